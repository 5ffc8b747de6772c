"""Calls to functions over the whole language, right and wrong, on the CPU.

    python -m tests.generated.wrong_calls 10000 [SEED]

Each call gives what torch computes, or raises an HTileError; anything else stops the run and is
printed. `calls(seed, count)` draws them, and `check` says what came of one. Some are lowered to
text as well, for tensors without memory: that refuses what the call refuses, in the same words.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from htile.build.arch import arch_named
from htile.errors import GradientError, HTileError
from htile.frontend.factories import Factories
from htile.frontend.graph import Role
from htile.frontend.roles import Spec, classify
from htile.testing import ulp
from tests.request_of import request_of

from .language import DIMS, FUNCTIONS, PHRASES, VALUES, Entry, Kind, Of, Takes, phrase

F32 = torch.float32
FLOATS = (F32, F32, torch.bfloat16, torch.float16)
STORED = (
    torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
INTEGERS = (torch.int32, torch.int64)
DTYPES = {
    Of.FLOATS: FLOATS, Of.INTEGERS: INTEGERS, Of.MASKS: (torch.bool,), Of.STORED: STORED,
    Of.ANY: (*FLOATS, *INTEGERS, torch.bool, *STORED),
}  # fmt: skip
ODD_DTYPES = (
    *FLOATS, *INTEGERS, *STORED, torch.bool, torch.float64, torch.int16, torch.uint16, torch.uint32,
    torch.uint64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip
SIZES = (1, 2, 3, 8, 8)
LEADS = ((3,), (3,), (2, 3), (), (1,), (0,), (2, 1, 2), (4, 0))
LAYOUTS = ("plain", "plain", "wide", "shifted", "apart", "turned", "expanded", "overlapping")
EVERY = 25  # calls of which one is lowered too
LONGEST = 20.0  # seconds that a call may take: more is a hang


class Subclass(torch.Tensor):
    """A subclass of Tensor, which HTile does not take."""


@dataclass
class Call:
    """One call; `note` says what was drawn, and `bases` has the memory behind its tensors."""

    entry: Entry
    given: dict[str, object]
    out: object = None
    note: list[str] = field(default_factory=list)
    bases: list[torch.Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.entry.function.__name__

    def run(self) -> object:
        out = {} if self.out is None else {"out": self.out}
        return self.entry.function(**self.given, **out)

    def __str__(self) -> str:
        shown = {k: _shown(v) for k, v in self.given.items()}
        out = pytree.tree_map(_shown, self.out)
        function = self.entry.function.__wrapped__
        text = "" if self.name in FUNCTIONS else f"\n{inspect.getsource(function)}"
        return f"{self.name}({shown}, out={out}): {', '.join(self.note)}{text}"


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    strides = value.stride() if value.layout is torch.strided else value.layout
    return f"<{value.dtype} {tuple(value.shape)} {strides} {value.device}>"


def calls(seed: int, count: int) -> Iterator[Call]:
    """Random calls; the same seed draws the same ones."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _Draw(rng).call()


# ---- drawing a call ------------------------------------------------------------------------------


class _Draw:
    """One call being drawn."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.n, self.lead = rng.choice(SIZES), rng.choice(LEADS)
        self.base = rng.choice(FLOATS)  # of most floating arguments
        if rng.randrange(3):
            entry = FUNCTIONS[rng.choice(list(FUNCTIONS))]
        else:
            drawn = [rng.choice(each) for each in (VALUES, PHRASES, DIMS, (1, 2, 3, 0, -1))]
            entry, self.base = phrase(*drawn), F32
        self.made = Call(entry, {})

    def call(self) -> Call:
        call, takes = self.made, self.made.entry.takes
        self._note(f"n {self.n}, lead {self.lead}")
        for name, each in takes.items():
            if not each.is_optional or self._one_in(2):
                call.given[name] = self._right(each)
        odd = (0, 0, 0, 1, 1, 2) if call.name in FUNCTIONS else (0, 0, 0, 0, 0, 1)
        for _ in range(self.rng.choice(odd)):
            self._mistake()
        if self._one_in(30):
            self._note("on meta")
            call.given = {k: _without_memory(v) for k, v in call.given.items()}
        if self._one_in(3):
            call.out = self._out()
        return call

    def _note(self, text: str) -> None:
        self.made.note.append(text)

    def _one_in(self, times: int) -> bool:
        return self.rng.randrange(times) == 0

    # ---- right arguments -------------------------------------------------------------------------

    def _right(self, takes: Takes) -> object:
        dtype = self.rng.choice(DTYPES[takes.of])
        if takes.of is Of.FLOATS and not self._one_in(5):
            dtype = self.base
        if takes.kind is Kind.STATIC:
            return self.rng.choice(takes.values[: self.rng.choice((2, 3, 100))])
        if takes.kind is Kind.NUMBER:
            number = self.rng.choice((0.5, 2, -1.25))
            return self._tensor(self.rng.choice(((), (1,))), F32) if self._one_in(4) else number
        if takes.kind is Kind.INDEX:
            return self._indices(self._lead(), self.rng.choice((torch.int64, *INTEGERS)))
        if takes.kind is Kind.PER_ROW:
            return self._tensor(self._lead(), dtype)
        inner = takes.inner(self.n)
        lead = self._lead() if takes.kind is Kind.ROW else ()
        return self._laid_out((*lead, *inner), dtype)

    def _lead(self) -> tuple[int, ...]:
        """The leading shape, or one that repeats to it."""
        if not self._one_in(6):
            return self.lead
        short = tuple(self.rng.choice((size, 1)) for size in self.lead)
        return short[self.rng.randrange(len(short) + 1) :] if short and self._one_in(2) else short

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Small numbers, now and then one of them NaN or infinite."""
        made = torch.Generator().manual_seed(self.rng.randrange(2**31))
        if dtype in (*INTEGERS, torch.int16, torch.uint8, torch.int8):
            return torch.randint(-100, 100, shape, generator=made).to(dtype)
        values = torch.randn(shape, generator=made) * 2
        if values.numel() and self._one_in(12) and dtype in FLOATS:
            values.view(-1)[0] = self.rng.choice((math.nan, math.inf, -math.inf))
        if dtype is torch.bool:
            return values > 0
        return values.abs().to(dtype) if dtype is torch.float8_e8m0fnu else values.to(dtype)

    def _indices(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.rng.randrange(2**31))
        low = self.rng.choice((0, 0, -self.n))
        return torch.randint(low, self.n, shape, generator=made).to(dtype)

    def _laid_out(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of one of many layouts, its memory kept in `bases`."""
        kind = self.rng.choice(LAYOUTS) if shape else "plain"
        self._note(kind)
        *lead, n = shape or (1,)
        if kind == "wide":
            base = self._tensor((*lead, n + 8), dtype)
            found = base[..., :n]
        elif kind == "shifted":
            base = self._tensor((*lead, n + 3), dtype)
            found = base[..., 1 : n + 1]
        elif kind == "apart":
            base = self._tensor((*lead, 2 * n), dtype)
            found = base[..., ::2]
        elif kind == "turned":
            base = self._tensor((n, *lead), dtype)
            found = base.movedim(0, -1)
        elif kind == "expanded":
            axis = self.rng.randrange(len(shape))
            base = self._tensor((*shape[:axis], 1, *shape[axis + 1 :]), dtype)
            found = base.expand(shape)
        elif kind == "overlapping":
            strides = [self.rng.randrange(4) for _ in shape]
            reach = sum(size * stride for size, stride in zip(shape, strides, strict=True))
            base = self._tensor((reach + 1,), dtype)
            found = base.as_strided(shape, strides)
        else:
            base = found = self._tensor(shape, dtype)
        self.made.bases.append(base)
        return found

    # ---- mistakes --------------------------------------------------------------------------------

    def _mistake(self) -> None:
        """Change an argument; most changes are wrong, some are only odd."""
        given = self.made.given
        kind = self.rng.choice(("value", "tensor", "tensor", "tensor", "index", "names"))
        if kind == "names":
            if given and self._one_in(2):
                given.pop(self.rng.choice(sorted(given)))
            else:
                given["colour"] = 1.0
            return
        of = self.made.entry.takes
        indices = [name for name in given if name in of and of[name].kind is Kind.INDEX]
        if kind == "index" and indices:
            given[indices[0]] = self._odd_index()
        elif given:
            name = self.rng.choice(sorted(given))
            given[name] = self._odd_value() if kind == "value" else self._odd_tensor()
            self._note(f"odd {name}")

    def _odd_value(self) -> object:
        return self.rng.choice((
            None, 2.0, 3, True, "same", 2**40, 2**70, 1j, math.nan, F32, [1.0, 2.0], (1, 2), {},
            {1}, b"x", object(), np.ones(self.n, np.float32), np.float32(2.0), torch.Size([2]),
            FUNCTIONS["softmax"].function,
        ))  # fmt: skip

    def _odd_index(self) -> torch.Tensor:
        kind = self.rng.choice(("beyond", "beyond", "huge", "dtype", "shape", "row"))
        self._note(f"index: {kind}")
        if kind == "beyond":
            return self._indices(self.lead, torch.int64) * 2 - self.rng.choice((0, self.n, 1))
        if kind == "huge":
            huge = self.rng.choice((2**31, 2**62, -(2**63), 2**32, -100))
            return torch.full(self.lead, huge)
        if kind == "dtype":
            return self._tensor(self.lead, self.rng.choice(ODD_DTYPES))
        if kind == "shape":
            return self._indices(self._odd_shape(self.lead), torch.int64)
        return self._indices((*self.lead, self.n), torch.int64)

    def _odd_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Another shape, of 0 to 4 dimensions."""
        sizes = list(shape)
        place = self.rng.randrange(len(sizes) + 1)
        kind = self.rng.choice(("more", "less", "one", "none", "longer", "several"))
        if kind == "several" or not sizes:
            return tuple(self.rng.choice((0, 1, 2, 3, 8)) for _ in range(self.rng.randrange(5)))
        if kind == "more" and len(sizes) < 4:
            sizes.insert(place, self.rng.choice((1, 2, self.n)))
        elif kind == "less":
            sizes.pop(place % len(sizes))
        else:
            size = {"one": 1, "none": 0}.get(kind, sizes[place % len(sizes)] + 1)
            sizes[place % len(sizes)] = size
        return tuple(sizes)

    def _odd_tensor(self) -> torch.Tensor:
        """A tensor of another shape, dtype, device, layout or class."""
        shape = (*self.lead, self.n)
        kind = self.rng.choice(("shape", "shape", "dtype", "dtype", "class", "memory"))
        if kind == "shape":
            return self._laid_out(self._odd_shape(shape), self.base)
        if kind == "dtype":
            dtype = self.rng.choice(ODD_DTYPES)
            return self._tensor(shape, dtype)
        plain = self._tensor(shape, self.base)
        if kind == "memory":
            return self.rng.choice((
                lambda: plain.to("meta"), plain.to_sparse, lambda: torch._neg_view(plain),
                lambda: self._tensor(shape, torch.complex64).real,
                lambda: self._tensor(shape, torch.complex64).conj(),
                lambda: next(iter(self.made.given.values())),
            ))()  # fmt: skip
        return self.rng.choice((
            lambda: torch.nn.Parameter(plain), lambda: torch.nn.Parameter(plain, False),
            plain.requires_grad_, lambda: plain.as_subclass(Subclass),
        ))()  # fmt: skip

    # ---- out= ------------------------------------------------------------------------------------

    def _out(self) -> object:
        """What the results are written to: right, in place, or wrong."""
        try:
            request = request_of(self.made.entry.function, (), (), dict(self.made.given))
        except Exception:  # `check` looks at what the call raises
            return torch.empty((*self.lead, self.n))
        graph = request.specialization.traced
        right = [self._written(*each) for each in request.specialization.shapes(request.call.lead)]
        if right and self._one_in(3):
            place = self.rng.randrange(len(right))
            right[place] = self._odd_result(right, place)
        out = pytree.tree_unflatten(right, graph.structure)
        if self._one_in(12):
            self._note("out= of another structure")
            more = (*right, right[0])
            out = self.rng.choice(((out,), [*right], (), {"y": right[0]}, more, 3, "y"))
        return out

    def _written(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        rows = [
            value for value in self.made.given.values() if isinstance(value, torch.Tensor)
            and tuple(value.shape) == shape and value.dtype is dtype
        ]  # fmt: skip
        if rows and self._one_in(2):
            self._note("in place")
            return self.rng.choice(rows)
        if shape and self._one_in(4):
            return self._tensor((*shape[:-1], shape[-1] + 8), dtype)[..., : shape[-1]]
        return self._tensor(shape, dtype)

    def _odd_result(self, right: list, place: int) -> object:
        old = right[place]
        shape, dtype = tuple(old.shape), old.dtype
        kind = self.rng.choice(("shape", "dtype", "layout", "layout", "shared", "other", "twice"))
        self._note(f"out= of another {kind}")
        if kind == "shape":
            return self._tensor(self._odd_shape(shape), dtype)
        if kind == "dtype":
            return self._tensor(shape, self.rng.choice(ODD_DTYPES))
        if kind == "layout":
            return self._laid_out(shape, dtype)
        if kind == "twice":
            return self.rng.choice(right)
        if kind == "shared" and self.made.bases:
            base = self.rng.choice(self.made.bases).flatten()
            elements = math.prod(shape)
            if base.dtype is dtype and base.numel() > elements:
                return base[self.rng.randrange(base.numel() - elements) :][:elements].view(shape)
        return self.rng.choice((
            None, 1.0, "y", old.to("meta"), old.clone().as_subclass(Subclass),
            torch.zeros(shape or 1).to_sparse(), np.ones(shape, np.float32),
        ))  # fmt: skip


def _without_memory(value: object) -> object:
    if not _is_plain(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


# ---- what a call does ----------------------------------------------------------------------------


def check(call: Call, is_lowered: bool = False) -> str:
    """Run a call; what came of it.

    "right", "shapes" (of tensors without memory), or the class of its HTileError. "own" is an error
    of the function's own Python that torch raises too. "number" is a number in place of a tensor,
    which has the methods of a tensor only while tracing, and "lenient" an argument of a kind that
    torch's function does not take, such as several axes for `x.prod`. "beyond" is an index beyond
    the row in a phrase, for which torch raises.
    """
    kept = {k: _snapshot(v) for k, v in call.given.items()}
    targets = [t for t in pytree.tree_leaves(call.out) if _is_plain(t)]
    before = [t.detach().clone() for t in targets]
    started = time.monotonic()
    refused, result = None, None
    try:
        result = call.run()
    except HTileError as error:
        refused = error
    except Exception as error:
        _assert_own(call, kept, error)
        return "own"
    assert time.monotonic() - started < LONGEST, "it hangs"
    if is_lowered:
        _assert_lowered_alike(call, refused)
    if refused is not None:
        _assert_helps(str(refused))
        for target, old in zip(targets, before, strict=True):
            _assert_same(target, old, "a call that was refused has written to out=")
        return type(refused).__name__
    if call.out is not None:
        assert result is call.out
    for name, value in call.given.items():
        if _is_plain(value) and not _shares(value, targets):
            _assert_same(value, kept[name], f"{name} was written to")
    if any(t.is_meta for t in pytree.tree_leaves(result)):
        return "shapes"
    return _compare(call, kept, result)


def _is_plain(value: object) -> bool:
    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_tensor and value.layout is torch.strided and not value.is_meta


def _snapshot(value: object) -> object:
    return value.detach().clone() if _is_plain(value) else value


def _assert_same(value: torch.Tensor, old: torch.Tensor, what: str) -> None:
    """Compared as bytes, for NaN equals itself there."""

    def content(t: torch.Tensor) -> list[int]:
        t = t.detach().resolve_neg().resolve_conj()
        return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()

    assert content(value) == content(old), what


def _shares(value: torch.Tensor, targets: list[torch.Tensor]) -> bool:
    """Whether the storage is one that results were written to."""
    own = value.untyped_storage().data_ptr()
    return any(t.untyped_storage().data_ptr() == own for t in targets)


# A view may copy here, a size be huge, and masks have a smallest one; and only in `plain` is one
# operand of a product float64 and another not.
LENIENT = "Use .reshape|Overflow when unpacking|clamp_cpu|to have (the )?same dtype"
BEYOND = "out of bounds|must be non-negative|out of range for|smaller than num_classes|index out of"
FOREIGN = ("cuda error", "cute.", "mlir", "tvm", "aten::", "pybind", "dlpack", "internal assert")


def _assert_helps(text: str) -> None:
    assert len(text) > 30, text
    assert not any(word in text.lower() for word in FOREIGN), text


def _assert_own(call: Call, kept: dict, error: Exception) -> None:
    """That the function's own Python raised, or a function of torch that it gave no row to.

    That is so where the innermost frame is the function's, or that of the mode which hears of such
    calls. torch then raises the same. All that other code of HTile raises is a defect.
    """
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    own = call.entry.function.__wrapped__.__code__, Factories.__torch_function__.__code__
    if last.tb_frame.f_code not in own:
        raise error
    with pytest.raises(type(error)):
        plain(call.entry, kept)


def _assert_lowered_alike(call: Call, refused: HTileError | None) -> None:
    """The kernel's text of the same call on tensors without memory: there is one, or the error.

    To get it nothing is computed, so no gradient is missed and no divisor found to be zero.
    """
    if isinstance(refused, GradientError):
        return
    if call.out is not None:
        if refused is None:  # `inspect` takes no out=; this is what a call on a GPU lowers
            outs = tuple(pytree.tree_leaves(call.out))
            request = request_of(call.entry.function, (), outs, call.given)
            assert request.lower(arch_named("sm_90a")).source
        return
    tensors = [t for t in call.given.values() if isinstance(t, torch.Tensor)]
    given = call.given
    if all(_is_plain(t) and not t.is_neg() for t in tensors):
        given = {k: _without_memory(v) for k, v in given.items()}
    try:
        text = call.entry.function.inspect(**given).source
    except HTileError as error:
        found = f"{type(error).__name__}: {error}"
        assert refused is not None, f"only the kernel is refused: {found}"
        assert found == f"{type(refused).__name__}: {refused}", f"{found} instead of {refused}"
        return
    is_alike = refused is None or "by zero" in str(refused)
    assert is_alike, f"only the call is refused: {refused}"
    assert "def " in text


def _compare(call: Call, kept: dict, result: object) -> str:
    """Compare with the plain function in float64."""
    entry, beyond = call.entry, None
    if entry.beyond is not None and isinstance(kept["y"], torch.Tensor):
        kept, beyond = _within(call, kept)
    try:
        exact = plain(entry, kept)
    except AttributeError:
        assert any(type(value) in (int, float) for value in kept.values())
        return "number"
    except TypeError:
        return "lenient"
    except (RuntimeError, IndexError, ValueError) as error:
        if re.search(LENIENT, str(error)):
            return "lenient"
        if call.name in FUNCTIONS or not re.search(BEYOND, str(error)):
            raise
        return "beyond"
    found, exact = pytree.tree_leaves(result), pytree.tree_leaves(exact)
    assert len(found) == len(exact)
    for each, expected in zip(found, exact, strict=True):
        assert each.shape == expected.shape, f"shape {each.shape}, not {expected.shape}"
        if beyond is not None:
            expected = _replaced(expected, beyond, entry.beyond)
        _assert_near(each, expected, entry)
    return "right"


def plain(entry: Entry, given: dict) -> object:
    """What the plain function gives, called for one row after the other, in float64.

    Of no rows it is called for one of ones, for the shapes.
    """
    signature = entry.function._signature
    values = signature.bind((), given)
    call = classify(signature, values)
    rows = math.prod(call.lead)

    def row(k: int, spec: Spec, value: object) -> object:
        takes = entry.takes.get(spec.name)
        if type(value) is int and takes is not None and takes.kind is Kind.NUMBER:
            return float(value)  # the annotation asks for a float
        if not isinstance(value, torch.Tensor):
            return value
        if spec.role in (Role.ROW, Role.PER_ROW):
            value = value.expand((*call.lead, *spec.inner)).reshape((rows, *spec.inner))
            value = value[k] if rows else value.new_full(spec.inner, call.n > 1)
        dtype = torch.float64 if value.is_floating_point() else value.dtype
        return value.detach().to(dtype, copy=True)

    specs = list(zip(call.specs, values, strict=True))
    each = [signature.invoke(tuple(row(k, *one) for one in specs)) for k in range(max(rows, 1))]
    leaves = zip(*(pytree.tree_leaves(one) for one in each), strict=True)
    stacked = [torch.stack(parts)[:rows] for parts in leaves]
    shaped = [t.reshape((*call.lead, *t.shape[1:])) for t in stacked]
    return pytree.tree_unflatten(shaped, pytree.tree_structure(each[0]))


def _within(call: Call, kept: dict) -> tuple[dict, torch.Tensor]:
    """The arguments with an index of 0 in place of those that torch refuses, and where they are."""
    y, n = kept["y"].long(), kept["x"].shape[-1]
    is_beyond = (y >= n) | (y < (-n if call.entry.wraps else 0))
    ignored = {"class_loss": -100, "class_score": kept.get("ignored", -100)}.get(call.name)
    if ignored is not None:
        is_beyond &= y != ignored
    signature = call.entry.function._signature
    lead = classify(signature, signature.bind((), kept)).lead
    y = torch.where(is_beyond, 0, kept["y"]).to(kept["y"].dtype)
    return kept | {"y": y}, is_beyond.broadcast_to(lead)


def _replaced(exact: torch.Tensor, is_beyond: torch.Tensor, value: float) -> torch.Tensor:
    """What a row with an index beyond it has: NaN, of integers 0, and of masks False."""
    while is_beyond.dim() < exact.dim():
        is_beyond = is_beyond[..., None]
    return torch.where(is_beyond, value if exact.is_floating_point() else 0, exact).to(exact.dtype)


def _assert_near(found: torch.Tensor, exact: torch.Tensor, entry: Entry) -> None:
    if not found.is_floating_point():
        assert found.dtype is exact.dtype, f"{found.dtype}, not {exact.dtype}"
        apart = (found.long() - exact.long()).abs()
        most = entry.steps if found.dtype is torch.int8 else 0
        assert not (apart > most).any(), f"{found}\n{exact}"
        return
    assert exact.is_floating_point(), f"{found.dtype}, not {exact.dtype}"
    rounded = exact.to(found.dtype).double()
    got, dtype = found.double(), found.dtype
    finite = rounded.isfinite() & got.isfinite()
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    if entry.near > 1e-3:  # what overflows in 16 bits does not in float32
        same |= rounded.isinf()
    assert (same | finite).all(), f"{found}\n{rounded}"
    if finite.any():
        most = rounded[finite].abs().max()
        bound = 2 * ulp(most, dtype) + entry.near * most.clamp(min=1.0)
        assert ((got - rounded).abs()[finite] <= bound).all(), f"{found}\n{rounded}"


# ---- many of them --------------------------------------------------------------------------------


def run(seed: int, count: int, show: Callable[[str], None] = lambda text: None) -> Counter:
    """Check so many calls; how often each thing came of one."""
    seen: Counter = Counter()
    for k, call in enumerate(calls(seed, count)):
        try:
            seen[check(call, is_lowered=k % EVERY == 0)] += 1
        except Exception as error:
            raise AssertionError(f"call {k} of seed {seed}: {call}\n{error}") from error
        if k % 1000 == 999:
            show(f"{k + 1} calls: {dict(seen.most_common())}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Wrong and right calls of random functions.")
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's, of what it takes unwillingly
    run(options.seed, options.count, print)


if __name__ == "__main__":
    main()
