"""Random calls, right and wrong: each computes what torch computes, or raises an HTileError.

`calls(seed, count, device)` draws them; all that is drawn comes from one `random.Random`, so the
same seed gives the same calls on every device. Few functions and sizes, so that few kernels are
compiled: `kernels` gives them, from calls on the CPU, to be compiled ahead.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils import _pytree as pytree

import htile
from htile.build.arch import arch_named
from htile.errors import HTileError
from htile.testing import assert_close, float32_errors
from tests.request_of import request_of

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
N = 24
LEADS = ((5,), (2, 3), (5,), (1,), (0,), (2, 0))
SIZES = {"softmax": (N, 1, 17)}  # others: N


@htile.rowwise
def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


@htile.rowwise
def norm(x, weight, residual=None, eps: float = 1e-6):
    if residual is not None:
        x = x + residual
    y = x * torch.rsqrt((x * x).mean() + eps) * weight
    return y if residual is None else (y, x)


@htile.rowwise
def shifted(x, shift: htile.PerRow, scale: htile.Scalar = 2.0):
    y = x * scale + shift
    return {"y": y, "top": y.amax(-1, keepdim=True), "total": y.abs().sum()}


@htile.rowwise
def chosen(x, mode: htile.Static = "plain", *, gain: float = 1.5):
    return x.abs() * gain if mode == "abs" else x * gain


LAYOUTS = ("plain", "plain", "wide", "odd", "second", "turned", "crossed", "expanded")
FUNCTIONS = {f.__name__: f for f in (softmax, norm, shifted, chosen)}


class Subclass(torch.Tensor):
    """A subclass that no one supports."""


@dataclass
class Call:
    """One call; `note` says what was drawn."""

    function: htile.Rowwise
    args: list
    kwargs: dict
    note: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.function.__name__}: {', '.join(self.note)}"


def calls(seed: int, count: int, device: str = "cpu") -> Iterator[Call]:
    """Random calls; about a third of them right."""
    rng = random.Random(seed)
    for _ in range(count):
        yield _Draw(rng, device).call()


class _Draw:
    """One call being drawn."""

    def __init__(self, rng: random.Random, device: str):
        self.rng, self.device = rng, device
        self.lead = rng.choice(LEADS)
        self.name = rng.choice(("softmax", "norm", "norm", "shifted", "shifted", "chosen"))
        self.n = rng.choice((N, N, *SIZES.get(self.name, (N,))))
        # by rank, so that there are fewer kernels
        self.dtype = BF16 if self.name == "norm" and len(self.lead) == 2 else F32
        self.note = [f"N {self.n}", str(self.dtype), f"lead {self.lead}"]
        self.bases: list[torch.Tensor] = []
        self.mistakes = rng.choice((0, 0, 1, 1, 2))

    def call(self) -> Call:
        self.rows = [self.row()]
        given: dict[str, object] = {"x": self.rows[0]}
        if self.name == "norm":
            given["weight"] = self.tensor((self.n,), self.dtype)
            if self.rng.random() < 0.5:
                self.rows.append(self.row(broadcasts=True))
                given["residual"] = self.rows[1]
            if self.rng.random() < 0.3:
                given["eps"] = self.rng.choice((1e-5, 0.25, 1, 3))
        elif self.name == "shifted":
            given["shift"] = self.tensor(self.rng.choice((self.lead, self.lead[-1:])), F32)
            if self.rng.random() < 0.4:
                given["scale"] = self.rng.choice((0.5, 3, self.tensor((), F32)))
        elif self.name == "chosen":
            if self.rng.random() < 0.5:
                given["mode"] = self.rng.choice(("abs", "plain"))
            if self.rng.random() < 0.5:
                given["gain"] = self.rng.choice((0.5, -2, self.tensor((), F32)))
        given = {k: self.scalar_again(k, v) for k, v in given.items()}
        if self.rng.random() < 0.4:
            given["out"] = self.out()
        for _ in range(self.mistakes):
            self.mistake(given)
        args, kwargs = self.positions(given)
        return Call(FUNCTIONS[self.name], args, kwargs, self.note)

    # ---- tensors ---------------------------------------------------------------------------------

    def tensor(self, shape, dtype=F32, device=None) -> torch.Tensor:
        """Values that come from the drawn numbers alone."""
        made = torch.Generator().manual_seed(self.rng.randrange(2**31))
        values = torch.randn(shape, generator=made) * 3
        if dtype is torch.complex64:
            return values.to(dtype).to(device or self.device)
        values = values > 0 if dtype is torch.bool else values.to(dtype)
        return values.to(device or self.device)

    def row(self, broadcasts: bool = False, dtype=None) -> torch.Tensor:
        """A row argument in one of many layouts, its memory kept in `bases`."""
        kind = self.rng.choice(LAYOUTS)
        lead, dtype = self.lead, dtype or self.dtype
        if broadcasts and kind in ("odd", "wide"):  # fewer alignments
            kind = "plain"
        if broadcasts and self.rng.random() < 0.3:
            lead, kind = (1,) * len(lead), "plain"
            if self.rng.random() < 0.5 and len(self.lead) > 1:
                lead = (1,)
        self.note.append(f"{kind} row {lead}")
        wide = self.tensor((*lead, 2 * self.n + 8), dtype)
        self.bases.append(wide)
        if kind == "wide":
            return wide[..., : self.n]
        if kind == "odd":
            return wide[..., 1 : self.n + 1]
        if kind == "second":
            return wide[..., : 2 * self.n : 2]
        if kind == "turned":
            return self.tensor((self.n, *lead), dtype).movedim(0, -1)
        if kind == "crossed":
            return self.tensor((*lead[::-1], self.n), dtype).transpose(0, len(lead) - 1)
        if kind == "expanded":
            return self.tensor((1, *lead[1:], self.n), dtype).expand(*lead, self.n)
        plain = wide[..., : self.n].contiguous()
        self.bases[-1] = plain
        return plain

    def results(self) -> list[tuple[str | None, tuple, torch.dtype]]:
        """Key, shape and dtype of each result."""
        whole = (*self.lead, self.n)
        if self.name == "shifted":
            one = (*self.lead, 1)
            return [("y", whole, self.dtype), ("top", one, F32), ("total", self.lead, F32)]
        return [(None, whole, self.dtype)] * len(self.rows)

    def out(self):
        """An `out=` that fits, some of it in place."""
        outs = []
        for k, (_, shape, dtype) in enumerate(self.results()):
            same = self.rows[k] if k < len(self.rows) else None
            if same is not None and tuple(same.shape) == shape and self.rng.random() < 0.4:
                self.note.append("in place")
                outs.append(same)
            elif self.rng.random() < 0.3 and shape[-1:] == (self.n,):
                outs.append(self.tensor((*shape[:-1], self.n + 8), dtype)[..., : self.n])
            else:
                outs.append(self.tensor(shape, dtype))
        return self.structure(outs)

    def structure(self, outs: list):
        keys = [key for key, _, _ in self.results()]
        if keys[0] is not None:
            return dict(zip(keys, outs, strict=True))
        return outs[0] if len(outs) == 1 else tuple(outs)

    # ---- mistakes --------------------------------------------------------------------------------

    def scalar_again(self, name: str, value):
        """Some numbers become what is as good, or nearly."""
        if type(value) is float and self.rng.random() < 0.1:
            return self.tensor((1,) if name == "scale" else (), F32)
        return value

    def mistake(self, given: dict) -> None:
        """Change something; most changes are wrong, some are only odd."""
        kind = self.rng.choice(("value", "value", "tensor", "tensor", "out", "out", "arity"))
        if kind == "arity":
            change = self.rng.choice(("without", "unknown", "extra"))
            if change == "without" and given:
                given.pop(self.rng.choice(sorted(given)))
            elif change == "unknown":
                given["colour"] = 1.0
            else:
                given["*"] = self.odd_value()
        elif kind == "out":
            given["out"] = self.odd_out(given)
            change = "odd out"
        else:
            change = self.rng.choice([k for k in sorted(given) if k not in ("out", "*")] or ["x"])
            given[change] = self.odd_value() if kind == "value" else self.odd_tensor()
        self.note.append(f"{kind}: {change}")

    def odd_value(self):
        """What is no tensor."""
        number = self.rng.randrange(19)
        self.note.append(f"value {number}")
        return (
            None, 2.0, 3, True, "plain", 2**62, 1j, F32, float("nan"), [1.0, 2.0], {"a": 1},
            (1.0, 2.0), {1}, object(), np.ones((5, self.n), np.float32), np.float32(2.0), b"abs",
            softmax, np.float64(2.0),
        )[number]  # fmt: skip

    def odd_tensor(self) -> torch.Tensor:
        """A tensor of a wrong or odd shape, dtype, device, layout or class."""
        number = self.rng.randrange(21)
        self.note.append(f"tensor {number}")
        lead, n, x = self.lead, self.n, self.rows[0]
        dtypes = (torch.float64, torch.complex64, torch.int16, torch.bool, torch.float8_e4m3fn)
        makers = (
            lambda: self.tensor((*lead, n), self.rng.choice(dtypes)),
            lambda: self.tensor((*lead, n), self.rng.choice(dtypes)),
            lambda: self.tensor((*lead, n + 1), self.dtype),
            lambda: self.tensor((*lead[:-1], 7, n), self.dtype),
            lambda: self.tensor(lead),
            lambda: self.tensor((n,), self.dtype),
            # A weight of another length is wrong; of other functions it is a row, of one more N.
            lambda: self.tensor((n + 2 if self.name == "norm" else n,), self.dtype),
            lambda: self.tensor(()),
            lambda: self.tensor((1,)),
            lambda: self.tensor((*lead, 0)),
            lambda: self.tensor((4, n), self.dtype),
            lambda: self.tensor((*lead, n), device=self.elsewhere()),
            lambda: self.tensor((n,), device=self.elsewhere()),
            lambda: self.tensor((*lead, n), self.dtype).requires_grad_(),
            lambda: torch.nn.Parameter(self.tensor((*lead, n), self.dtype), requires_grad=False),
            lambda: self.tensor((*lead, n), self.dtype).as_subclass(Subclass),
            lambda: self.tensor((*lead, n), self.dtype).to_sparse(),
            lambda: torch._neg_view(self.tensor((*lead, n), self.dtype)),
            lambda: self.tensor((n + 32,), self.dtype).as_strided(
                (*(1 for _ in lead[1:]), 5, n), (*(8 for _ in lead), 1)
            ),
            lambda: x,
            lambda: self.tensor((*lead, 1), self.dtype).expand(*lead, n),
        )  # fmt: skip
        return makers[number]()

    def elsewhere(self) -> str:
        """Another device."""
        kinds = ("meta", "meta") if self.device == "cpu" else ("meta", "cpu")
        return self.rng.choice(kinds)

    def odd_out(self, given: dict):
        """An `out=` that is wrong in one way, or odd."""
        number = self.rng.randrange(16)
        self.note.append(f"out {number}")
        shapes = [(shape, dtype) for _, shape, dtype in self.results()]
        fresh = [self.tensor(shape, dtype) for shape, dtype in shapes]
        shape, dtype = shapes[0]
        first = (
            lambda: self.tensor((*shape[:-1], shape[-1] + 1), dtype),
            lambda: self.tensor(shape, torch.float64),
            lambda: self.tensor(shape, dtype, self.elsewhere()),
            lambda: self.tensor((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2],
            lambda: self.tensor((*shape[:-1], 1), dtype).expand(shape),
            lambda: self.tensor((1, *shape[1:]), dtype).expand(shape),
            lambda: self.tensor(shape, dtype).requires_grad_(),
            lambda: self.tensor(shape, dtype).as_subclass(Subclass),
            lambda: self.bases[0][..., 2 : 2 + self.n] if self.bases[0].shape[-1] > self.n
            else self.bases[0],
            lambda: self.bases[0][..., : self.n],
            lambda: next((t for t in given.values() if isinstance(t, torch.Tensor)), None),
            lambda: self.rng.choice((None, 1.0, "out", np.ones(shape, np.float32))),
        )
        if number < len(first):
            return self.structure([first[number](), *fresh[1:]])
        if number == 12:
            return [*fresh]
        if number == 13:
            return self.rng.choice(((), {}, 3, "out", (None,), object()))
        if number == 14 and len(fresh) > 1:
            return self.structure([fresh[0], *([fresh[0]] * (len(fresh) - 1))])
        return {"y": fresh[0]}

    def positions(self, given: dict) -> tuple[list, dict]:
        """Some of the arguments by position."""
        extra = [given.pop("*")] if "*" in given else []
        args = []
        for name in FUNCTIONS[self.name]._signature.names:
            if name not in given or name == "gain" or self.rng.random() < 0.3:
                break
            args.append(given.pop(name))
        return args + extra, given


# ---- what a call does ----------------------------------------------------------------------------


def check(call: Call) -> str:
    """Run a call; what came of it.

    "right", "shapes" (no values to compare), the class of its HTileError, "own" (an error of the
    function's own Python), or "number": a number has the methods of a tensor inside a row-wise
    function, and has none in the oracle.
    """
    out = call.kwargs.get("out")
    kept = pytree.tree_map(_snapshot, (call.args, call.kwargs))
    try:
        result = call.function(*call.args, **call.kwargs)
    except HTileError as error:
        assert len(str(error)) > 20, error
        _assert_helps(str(error))
        return type(error).__name__
    except (AttributeError, TypeError) as error:
        if not _is_own(error):
            raise
        return "own"
    args, kwargs = kept
    kwargs.pop("out", None)
    if out is not None:
        assert result is out
    if any(t.is_meta for t in pytree.tree_leaves(result)):
        return "shapes"
    try:
        errors = _errors(call.function, args, kwargs)
        assert_close(call.function, result, *args, torch_errors=errors, **kwargs)
    except AttributeError as error:
        if not _is_own(error):
            raise
        return "number"
    return "right"


def _errors(function, args, kwargs) -> list[float]:
    """torch's float32 errors for these arguments and a few that are near them: of the few rows of
    a call alone the largest error means nothing."""

    def near(value, factor):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value * factor if floating else value

    factors = [1 + k / 64 for k in range(8)]
    return list(map(max, *(
        float32_errors(function, *(near(a, f) for a in args),
                       **{name: near(a, f) for name, a in kwargs.items()})
        for f in factors
    )))  # fmt: skip


def _snapshot(value):
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return value.detach().clone() if plain else value


def _is_own(error: Exception) -> bool:
    """Whether the function's own Python raised: `x.mean()` where x is a number."""
    tb = error.__traceback__
    while tb.tb_next is not None:
        tb = tb.tb_next
    return tb.tb_frame.f_code in {f.__wrapped__.__code__ for f in FUNCTIONS.values()}


FOREIGN = ("cuda error", "cute.", "mlir", "tvm", "aten::", "pybind", "dlpack", "internal assert")


def _assert_helps(text: str) -> None:
    assert not any(word in text.lower() for word in FOREIGN), text


def run(seed: int, count: int, device: str = "cpu", every: int = 250) -> Counter:
    """Check `count` calls, and after each `every` one that must be right; what they did."""
    seen: Counter = Counter()
    for k, call in enumerate(calls(seed, count, device)):
        try:
            seen[check(call)] += 1
        except Exception as error:
            raise AssertionError(f"call {k} of seed {seed}: {call}\n{call.args}\n{call.kwargs}") \
                from error
        if k % every == every - 1:
            torch.manual_seed(k)
            x = torch.randn(5, N, device=device)
            assert_close(softmax, softmax(x), x)
    return seen


def kernels(seed: int, count: int, arch: str) -> dict[tuple[str, str], None]:
    """(source, host function) of what these calls, made on a GPU, compile."""
    found: dict[tuple[str, str], None] = {}
    target = arch_named(arch)
    for call in calls(seed, count):
        function = call.function
        kwargs = dict(call.kwargs)
        outs = tuple(pytree.tree_leaves(kwargs.pop("out", ())))
        try:
            outs = outs if all(isinstance(o, torch.Tensor) for o in outs) else ()
            request = request_of(function, call.args, outs, kwargs)
            if 0 in request.call.lead:
                continue
            lowered = request.lower(target)
        except (HTileError, AttributeError, TypeError):
            continue
        found[lowered.source, lowered.function] = None
    return found
