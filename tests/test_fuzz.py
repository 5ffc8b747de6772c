"""1500 random calls on the CPU: each right, or refused by an HTileError."""

import pytest

from tests import fuzz


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(seed):
    seen = fuzz.run(seed, 500)
    assert seen["right"] > 150 and seen["own"] + seen["number"] < 20
    for kind in ("Argument", "Shape", "Dtype", "Unsupported", "Trace", "Gradient"):
        assert seen[f"{kind}Error"], f"no {kind}Error was drawn"


def test_the_same_seed_gives_the_same_calls():
    first, again = ([str(call) for call in fuzz.calls(7, 50)] for _ in range(2))
    assert first == again != [str(call) for call in fuzz.calls(8, 50)]


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_result_is_found(monkeypatch):
    monkeypatch.setattr(fuzz, "FUNCTIONS", fuzz.FUNCTIONS | {"softmax": _Wrong(fuzz.softmax)})
    with pytest.raises(AssertionError, match=r"call .* of seed 0: softmax"):
        fuzz.run(0, 200)


class _Wrong:
    """A function that is off by a little."""

    def __init__(self, function):
        self.function = function

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args, out=None, **kwargs):
        return self.function(*args, **kwargs) * 1.01


@pytest.mark.filterwarnings("ignore")
def test_few_kernels():
    assert 50 < len(fuzz.kernels(0, 5000, "sm_90a")) < 200
