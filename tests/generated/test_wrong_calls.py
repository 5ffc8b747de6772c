"""10000 calls, right and wrong: each gives what torch computes, or an HTileError."""

from dataclasses import replace

import pytest
import torch

import htile

from . import wrong_calls
from .language import DIMS, FUNCTIONS, PHRASES, VALUES, phrase
from .wrong_calls import ODD_DTYPES, calls, check, run

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = ("Argument", "Shape", "Dtype", "Unsupported", "Trace", "Gradient")


@pytest.mark.parametrize("seed", range(4))
def test_every_call_is_right_or_refused(seed):
    count = 2500
    seen = run(seed, count)
    refused = sum(seen[f"{kind}Error"] for kind in REFUSED)
    assert seen.total() == count
    assert seen["right"] > 0.3 * count, seen
    assert refused > 0.4 * count, seen
    assert all(seen[f"{kind}Error"] > 0.005 * count for kind in REFUSED), seen
    others = count - seen["right"] - refused - seen["shapes"]
    assert others < 0.02 * count, seen


def test_the_same_seed_gives_the_same_calls():
    first, again = ([str(call) for call in calls(7, 200)] for _ in range(2))
    assert len(first) == 200 and len(set(first)) > 150
    # an object has its address in its name
    assert [a for a in first if " at 0x" not in a] == [a for a in again if " at 0x" not in a]
    assert first != [str(call) for call in calls(8, 200)]


def test_everything_is_drawn():
    drawn = list(calls(0, 3000))
    tensors = [t for call in drawn for t in call.given.values() if isinstance(t, torch.Tensor)]
    assert {call.name for call in drawn} >= set(FUNCTIONS)
    assert {t.dtype for t in tensors} >= set(ODD_DTYPES)
    assert {t.dim() for t in tensors} >= {0, 1, 2, 3, 4}
    assert any(0 in t.shape for t in tensors) and any(t.is_meta for t in tensors)
    assert any(t.requires_grad for t in tensors)
    in_place = [call for call in drawn if any(call.out is t for t in call.given.values())]
    assert len(in_place) > 30
    names = {call.name for call in drawn} - set(FUNCTIONS)
    assert len(names) > 500, "most phrases differ"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_right_call(name):
    """So none of them is refused for what it is."""
    right = (call for call in calls(3, 6000) if call.name == name and call.out is None)
    assert any(check(call) == "right" for call in right)


def test_most_phrases_are_right_for_some_value():
    x = torch.arange(8.0).view(1, 8) - 3.5
    right = set()
    for text in PHRASES:
        for value in dict.fromkeys(VALUES):
            for dim in DIMS:
                try:
                    phrase(value, text, dim, 2).function(x)
                except htile.HTileError:
                    continue
                except (TypeError, ValueError, RuntimeError, AttributeError):
                    break  # the function's own Python: no value helps
                right.add(text)
                break
            if text in right:
                break
    assert len(right) > 0.7 * len(PHRASES), set(PHRASES) - right


# ---- what is wrong is found ----------------------------------------------------------------------


class _Faulty:
    """A function with a fault: what it does to the argument and to the result of the right one."""

    def __init__(self, function, fault):
        self.function, self.fault = function, fault
        self.__name__ = function.__name__

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, x):
        return self.fault(self.function(x), x)


def _off(result, x):
    return result * 1.01


def _written_to(result, x):
    x[0] = 0.0
    return result


def _of_another_shape(result, x):
    return result[None]


def _internal(result, x):
    return ()[0]


def _refused(result, x):
    raise htile.TraceError("the call is refused and its kernel is not")


FAULTS = {
    _off: r"tensor\(", _written_to: "x was written to", _of_another_shape: "shape torch.Size",
    _internal: "tuple index out of range", _refused: "only the call is refused",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault):
    entry = FUNCTIONS["softmax"]
    faulty = replace(entry, function=_Faulty(entry.function, fault))
    x = torch.randn(3, 8)
    assert check(wrong_calls.Call(entry, {"x": x}), is_lowered=True) == "right"
    with pytest.raises((AssertionError, IndexError), match=FAULTS[fault]):
        check(wrong_calls.Call(faulty, {"x": x}), is_lowered=True)
