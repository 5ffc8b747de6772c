"""Random row functions over the whole language, as Python source: `program(seed, sizes)`.

A program is data: arguments, lines of source, what is returned. The tracer, the oracle and the
kernel all run the function that its text defines. `Writer` knows bounds, exactness and an error
bound of every value, so that programs are well-conditioned by construction; its docstring says how.
"""

from __future__ import annotations

import functools
import linecache
import math
import random
import re
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

import htile

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
E4M3, E5M2, I8, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
FLOATS = (BF16, F16, F32)
BITS = {F64: 24, F32: 24, F16: 11, BF16: 8}  # of a significand; of F64 those that float32 keeps
ONE, KEPT, ROW = 0, 1, 2  # shapes inside a row: (), (1,), (N,)

# ---- what a program is --------------------------------------------------------------------------

LONG = (32768, 65537, 131072, 262144)
ELEMENTS = {"small": 1 << 13, "all": 1 << 22}  # of one argument, at most
LEADS = {
    0: ((0,), (2, 0), (0, 3)),
    1: ((), (1,), (1, 1)),
    3: ((3,), (1, 3), (3, 1, 1)),
    64: ((64,), (4, 16), (2, 4, 8), (2, 2, 4, 4)),
    5000: ((5000,), (50, 100), (5, 10, 100)),
}


@dataclass(frozen=True)
class Arg:
    """One parameter. kind: how its values are drawn; layout: how they lie in memory.

    sizes: those of a matrix, and of a row or column that has not N elements.
    """

    name: str
    role: str  # row, column, kept, per_row, scalar, device, static, matrix
    dtype: torch.dtype | None = None
    kind: str = ""
    layout: tuple = ("plain",)
    value: object = None
    sizes: tuple[int, ...] = ()

    @property
    def annotation(self) -> str:
        marker = {"per_row": "htile.PerRow", "scalar": "float", "static": "htile.Static",
                  "matrix": "htile.Matrix"}  # fmt: skip
        return f": {marker[self.role]}" if self.role in marker else ""


@dataclass(frozen=True)
class Program:
    """A function of one row, with the shape that it is called with."""

    seed: int
    n: int
    lead: tuple[int, ...]
    args: tuple[Arg, ...]
    lines: tuple[str, ...]
    returns: str
    errors: tuple[float, ...]  # of each result, what its functions may err by, in units of 2^-24
    variant: float | None = None  # which of its plans: a share of their list; None: the default

    @property
    def text(self) -> str:
        params = ", ".join(a.name + a.annotation for a in self.args)
        body = "".join(f"    {line}\n" for line in (*self.lines, f"return {self.returns}"))
        return f"def f{self.seed}({params}):\n{body}"

    def function(self, dynamic_n: bool = False) -> htile.Rowwise:
        """A new decorated function of this text."""
        file = f"program_{self.seed}.py"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(True), file)
        # Without a __name__, torch.compile does not look for a module that is not there.
        names = {"torch": torch, "F": F, "htile": htile, "SCALE": SCALE}
        exec(compile(self.text, file, "exec", dont_inherit=True), names)
        return htile.rowwise(names[f"f{self.seed}"], dynamic_n=dynamic_n)

    def arguments(self, device="cpu", lead=None, filled: bool = True, draw: int = 0) -> list:
        """One value a parameter; of another leading shape (then contiguous) if one is given."""
        torch.manual_seed(1000 * self.seed + draw)
        plain = lead is not None
        lead = self.lead if lead is None else lead
        return [_argument(a, lead, self.n, device, plain, filled) for a in self.args]

    def many(self, device="cpu", draw: int = 1, elements: int = 1 << 13) -> list:
        """Arguments of the same kind with rows enough for a largest error to mean something."""
        rows = max(8, elements // self.n)
        return self.arguments(device, lead=(rows,), draw=1 + draw)

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{a.name}={a.role} {a.dtype or a.value} {a.layout}{a.sizes or ''}" for a in self.args
        )
        plan = f"\n# variant {self.variant}" if self.variant is not None else ""
        return f"# seed {self.seed}: N = {self.n}, lead {self.lead}\n# {shapes}{plan}\n{self.text}"


def _argument(a: Arg, lead: tuple, n: int, device, plain: bool, filled: bool):
    if a.role in ("scalar", "static"):
        return a.value
    sizes = a.sizes or (n,)
    shape = {
        "row": (*lead, *sizes), "column": sizes, "kept": (*lead, 1), "per_row": lead, "device": (),
        "matrix": sizes,
    }[a.role]  # fmt: skip
    if plain and a.role == "column":  # as rows, so that there are as many of them
        shape = (*lead, *sizes)
    layout, *numbers = ("plain",) if plain else a.layout
    if a.role == "matrix":
        is_turned = layout == "transposed"
        drawn = _drawn(a, shape[::-1] if is_turned else shape, device, filled)
        return drawn.t() if is_turned else drawn
    if layout == "expanded":  # stride 0 over all rows
        one = (1,) * len(lead) + shape[len(lead) :]
        return _drawn(a, one, device, filled).expand(shape)
    if layout == "broadcast":  # the leading dimensions are 1
        return _drawn(a, (1,) * len(lead) + shape[len(lead) :], device, filled)
    if layout == "partial":  # broadcast over the first dimension only
        return _drawn(a, (1, *shape[1:]), device, filled)
    if layout == "transposed":  # the first leading dimension is the fastest of them
        back = (*lead[::-1], *shape[len(lead) :])
        order = (*reversed(range(len(lead))), *range(len(lead), len(shape)))
        return _drawn(a, back, device, filled).permute(order)
    drawn = _drawn(a, shape, device, filled)
    if layout == "plain":
        return drawn
    gap, offset = numbers  # elements between rows, and before the first
    last = shape[-1] if a.role in ("row", "column") else 1
    rows = drawn.numel() // last if last else 0
    buffer = torch.empty(rows * (last + gap) + offset, dtype=a.dtype, device=device)
    strides = [last + gap] * len(lead)
    for k in reversed(range(len(lead) - 1)):
        strides[k] = strides[k + 1] * lead[k + 1]
    inner = {"row": [1], "column": [1], "kept": [1], "per_row": []}[a.role]
    strides = strides if a.role != "column" else []
    view = buffer.as_strided(shape, [*strides, *inner], offset)
    return view.copy_(drawn) if filled else view


def _drawn(a: Arg, shape: tuple, device, filled: bool) -> torch.Tensor:
    """Values of a kind: `RANGES` has their bounds."""
    if not filled:
        return torch.empty(shape, dtype=a.dtype, device=device)
    if a.kind == "mask":
        return torch.rand(shape, device=device) > 0.4
    if a.kind in ("grid", "integer"):
        whole = torch.randint(-16, 17, shape, device=device)
        return (whole / 8).to(a.dtype) if a.kind == "grid" else whole.to(a.dtype)
    low, high, _ = RANGES[a.kind]
    drawn = torch.rand(shape, device=device) * (high - low) + low
    return (drawn * a.value if a.kind == "weight" else drawn).to(a.dtype)


RANGES = {  # kind: lowest, highest, and what all values are multiples of (0: of nothing)
    "mask": (0, 1, 1),
    "integer": (-16, 16, 1),
    "count": (0, 16, 1),
    "grid": (-2, 2, 1 / 8),
    "smooth": (-2, 2, 0),
    "positive": (0.5, 1.5, 0),
    "weight": (-1, 1, 0),  # times the value of the argument
}
SCALE = 0.75  # captured by some programs
_WORD = re.compile(r"\w+")

# ---- how it is written --------------------------------------------------------------------------


@dataclass(frozen=True)
class V:
    """A value and what is known of it.

    dtype: what it is in the oracle, where floating arguments are float64.
    step: it is a multiple of this power of two; 0 if of none.
    err: a bound of a kernel's error, in units of 2^-24. 0: the same in float32 and in float64.
    final: not to be computed with, see `Writer.put`.
    """

    name: str
    shape: int
    dtype: torch.dtype
    lo: float
    hi: float
    step: float = 0.0
    err: float = 0.0
    varies: bool = True
    final: bool = field(default=False)

    @property
    def size(self) -> float:
        return max(abs(self.lo), abs(self.hi))

    @property
    def floating(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def wide(self) -> bool:
        return self.dtype is F64

    @property
    def sample(self):
        """Something that torch promotes as it does this value."""
        if self.dtype is None:
            return self.lo
        return torch.empty((1,) * (self.shape > ONE), dtype=self.dtype, device="meta")


def number(c: float, name: str | None = None) -> V:
    """A Python number as an operand."""
    step = next((2.0**-k for k in range(12) if float(c * 2**k).is_integer()), 0.0)
    kind = None  # the dtype of a number is decided by what it meets
    return V(name or repr(c), ONE, kind, c, c, step, 0.0 if step else 2.0**-2, False)


NUMBERS = (0.5, 2.0, -1.5, 0.25, 3.0, 1.0, 2, 3, -1, 0.1, 0.7)
COMPARED = (0.0, 0.5, -0.25, 1, 0, 1.5)

# name: spellings, where it may be evaluated, whether torch takes integers
# fmt: off
SMOOTH = {
    "exp": (("torch.exp({})", "{}.exp()"), (-16, 2.5), True),
    "exp2": (("torch.exp2({})", "2.0 ** {}"), (-16, 3.5), True),
    "expm1": (("torch.expm1({})",), (-16, 2.5), True),
    "log": (("torch.log({})", "{}.log()"), (0.2, 1e4), True),
    "log2": (("torch.log2({})",), (0.2, 1e4), True),
    "log10": (("torch.log10({})",), (0.2, 1e4), True),
    "log1p": (("torch.log1p({})",), (-0.75, 1e4), True),
    "sin": (("torch.sin({})", "{}.sin()"), (-8, 8), True),
    "cos": (("torch.cos({})",), (-8, 8), True),
    "tanh": (("torch.tanh({})", "{}.tanh()", "F.tanh({})"), (-64, 64), True),
    "sigmoid": (("torch.sigmoid({})", "{}.sigmoid()", "torch.special.expit({})"), (-30, 30), True),
    "erf": (("torch.erf({})",), (-64, 64), True),
    "sqrt": (("torch.sqrt({})", "{} ** 0.5"), (0.25, 1e4), True),
    "rsqrt": (("torch.rsqrt({})", "{} ** -0.5"), (0.25, 1e4), True),
    "reciprocal": (("torch.reciprocal({})", "{} ** -1", "1.0 / {}"), (0.25, 1e4), True),
    "power": (("{} ** -2", "{}.pow(1.75)", "{} ** 2.5"), (0.5, 4), False),
    "silu": (("F.silu({})", "{} * torch.sigmoid({})"), (-16, 16), False),
    "gelu": (("F.gelu({})", "F.gelu({}, approximate='tanh')"), (-16, 16), False),
    "softplus": (("F.softplus({})", "F.softplus({}, 2.0, 8.0)"), (-16, 3.5), False),
    "logsigmoid": (("F.logsigmoid({})",), (-16, 16), False),
    "elu": (("F.elu({})", "F.elu({}, 0.5)"), (-16, 16), False),
    "leaky": (("F.leaky_relu({}, 0.25)",), (-64, 64), False),
    "mish": (("F.mish({})",), (-16, 16), False),
    "softsign": (("F.softsign({})",), (-64, 64), False),
    "hard": (("F.hardsigmoid({})", "F.hardswish({})"), (-64, 64), False),
}
# Exact: nothing is rounded, so also of integers and of what is to be compared later.
EXACT = {
    "neg": ("-{}", "torch.neg({})"),
    "abs": ("abs({})", "{}.abs()"),
    "relu": ("F.relu({})", "torch.relu({})"),
    "clamp": ("{}.clamp(-1.5, 1.0)", "torch.clamp({}, min=-0.5)", "{}.clamp(max=1)"),
    "hardtanh": ("F.hardtanh({})", "F.relu6({})"),
    "same": ("+{}", "{}.clone()", "{}.detach()"),
}
ROUNDINGS = {
    "floor": ("torch.floor({})", "{}.floor()"), "ceil": ("torch.ceil({})",),
    "round": ("torch.round({})", "{}.round()"), "trunc": ("torch.trunc({})",),
    "sign": ("torch.sign({})", "{}.sign()"),
}
COMPARISONS = {
    "eq": ("{} == {}", "torch.eq({}, {})"), "ne": ("{} != {}", "{}.ne({})"),
    "lt": ("{} < {}", "torch.lt({}, {})"), "le": ("{} <= {}", "{}.le({})"),
    "gt": ("{} > {}", "torch.gt({}, {})"), "ge": ("{} >= {}", "{}.ge({})"),
}
LOGICAL = ("{} & {}", "{} | {}", "{} ^ {}", "torch.logical_and({}, {})",
           "torch.logical_or({}, {})", "torch.logical_xor({}, {})")
# fmt: on
CASTS = {
    BF16: ("{}.to(torch.bfloat16)", "{}.bfloat16()"),
    F16: ("{}.to(torch.float16)", "{}.half()"),
    F32: ("{}.float()", "{}.to(torch.float32)"),
    I32: ("{}.int()", "{}.to(torch.int32)"),
    I64: ("{}.long()", "{}.to(torch.int64)"),
    BOOL: ("{}.bool()", "{}.to(torch.bool)"),
}
DIMS = ("", "-1", "dim=-1", "dim=0")


class Writer:
    """Adds one statement after another; each knows bounds, exactness and error of its result.

    Fair to a kernel, because
    - a function is applied only inside a domain where it amplifies errors little (`fit` clamps,
      squashes or shifts what is outside); a divisor is at least 0.25;
    - what jumps (comparisons, floor, sign, to int, to bool, // and %) is applied only to exact
      values: inputs, and what arithmetic on multiples of a power of two keeps in 24 bits;
    - `.to(bfloat16)` in mid-expression rounds exact values only, since an error of one unit
      before it is one of 2^16 units after it; other values are rounded just to be returned;
    - what the oracle itself computes in less than float64 (after `.float()`, of two integers, after
      `.to(bfloat16)`) goes on only as long as it is exact there, else it is just returned;
    - the error bound of every value, to first order, stays below `WORST` times its size.
    """

    WORST = 64

    def __init__(self, rng: random.Random, n: int):
        self.rng, self.n = rng, n
        self.lines: list[tuple[str, str]] = []
        self.pool: list[V] = []
        self.used: set[str] = set()
        self.scalars: list[V] = []  # Python numbers given at run time
        self.way: tuple[str, int] | None = None  # how `moved` moves, and the size of groups

    # -- values

    def put(self, text: str, operands: list[V], dtype, lo, hi, step=0.0, err=0.0, shape=None):
        """Add `name = text`, or None if its errors would be too large. A Python number: dtype None.

        Exact results are given as err = 0 with a step, or with step 0 where nothing is rounded.
        """
        operands = [v for v in operands if v.dtype is not None]
        size = max(abs(lo), abs(hi))
        if dtype.is_floating_point:
            lost = any(v.floating and BITS[v.dtype] > BITS[dtype] for v in operands)
            wide_integer = any(not v.floating and v.size > 2 ** BITS[dtype] for v in operands)
            if err == 0 and (size > step * 2 ** BITS[dtype] if step else lost or wide_integer):
                step, err = 0.0, size
            if err > self.WORST * max(size, 0.25) or size > 2**20:
                return None
            if err and lost and len(operands) > 1:  # the oracle rounds an operand, then computes
                return None
        elif size > (2**30 if dtype is I32 else 2**40):
            return None
        shape = max((v.shape for v in operands), default=ONE) if shape is None else shape
        v = V(
            f"v{len(self.lines)}", shape, dtype, lo, hi, 0.0 if err else step, err,
            any(v.varies for v in operands), final=bool(err) and dtype is not F64,
        )  # fmt: skip
        self.lines.append((v.name, text))
        self.used.update(o.name for o in operands)
        self.pool.append(v)
        return v

    def pick(self, wanted=lambda v: True) -> V | None:
        """A value to compute with, more often one of the last that nothing uses yet."""
        found = [v for v in self.pool if not v.final and wanted(v)]
        if not found:
            return None
        unused = [v for v in found if v.name not in self.used]
        if unused and self.rng.random() < 0.6:
            found = unused
        return self.rng.choice(found[-3:] if self.rng.random() < 0.65 else found)

    def one_of(self, spellings) -> str:
        return self.rng.choice(spellings)

    def promoted(self, a: V, b: V) -> torch.dtype:
        """What the oracle computes two operands in."""
        if a.dtype is b.dtype is None:
            return F32
        return torch.result_type(a.sample, b.sample)

    def evaluated(self, text: str, a: V) -> tuple[float, float, float]:
        """Lowest and highest value and steepest slope of `text` of `x` between a's bounds."""
        lo, hi = (a.lo, a.hi) if a.hi > a.lo else (a.lo - 0.01, a.lo + 0.01)
        x = torch.linspace(lo, hi, 257, dtype=F64)
        y = eval(text.replace("{}", "x"), {"torch": torch, "F": F, "x": x})
        slope = (y.diff() / x.diff()).abs().max().item()
        slack = 0.02 * (y.max() - y.min()).item()
        return y.min().item() - slack, y.max().item() + slack, slope

    def fit(self, a: V | None, lo: float, hi: float) -> V | None:
        """`a`, or something made of it that lies between lo and hi."""
        if a is None or (a.lo >= lo and a.hi <= hi):
            return a
        if a.dtype is BOOL:
            return None
        guards = [f"{{}}.clamp({_inside(lo, 1)}, {_inside(hi, -1)})"]
        if lo > 0:
            guards += ["({}.abs() + 0.5)", "({} * {} + 0.5)"]
        elif a.wide:
            guards += ["torch.tanh({})", "{} * 0.125"]
        guard = self.one_of(guards)
        low, high, slope = self.evaluated(guard, a)
        fits = low >= lo and high <= hi
        if not fits:
            guard = guards[0]
        if guard == guards[0]:
            low, high = (min(max(v, _inside(lo, 1)), _inside(hi, -1)) for v in (a.lo, a.hi))
            dtype = a.dtype if a.floating else torch.result_type(a.sample, _inside(lo, 1))
            step = min(a.step, 1 / 8) if a.step else 0.0
            return self.put(guard.replace("{}", a.name), [a], dtype, low, high, step, a.err)
        if not a.wide:
            return None
        err = slope * a.err + max(abs(low), abs(high))
        return self.put(guard.replace("{}", a.name), [a], F64, low, high, err=err)

    # -- elementwise

    def smooth(self):
        spellings, (lo, hi), integers = SMOOTH[self.one_of(list(SMOOTH))]
        a = self.pick(lambda v: v.wide or (integers and self.rng.random() < 0.2))
        a = self.fit(a, lo, hi)
        if a is None or not (a.floating or integers):
            return None
        text = self.one_of(spellings)
        low, high, slope = self.evaluated(text, a)
        err = slope * a.err + 2 * max(abs(low), abs(high), 0 if integers else a.size)
        dtype = a.dtype if a.floating else F32
        return self.put(text.replace("{}", a.name), [a], dtype, low, high, err=err)

    def exactly(self):
        name = self.one_of(list(EXACT))
        a = self.pick(lambda v: v.dtype is not BOOL)
        text = self.one_of(EXACT[name])
        if a is None or (name == "hardtanh" and not a.floating and text.startswith("F.hardtanh")):
            return None
        low, high, _ = self.evaluated(text, replace(a, lo=a.lo - 1, hi=a.hi + 1))
        dtype = a.dtype
        if not a.floating and "." in text.partition("clamp(")[2]:
            dtype = F32  # a bound with a fraction
        text, step = text.replace("{}", a.name), min(a.step, 1 / 2)
        return self.put(text, [a], dtype, low, high, step, a.err)

    def rounding(self):
        name = self.one_of(list(ROUNDINGS))
        a = self.pick(lambda v: not v.err and v.dtype is not BOOL)
        if a is None:
            return None
        lo, hi = (-1, 1) if name == "sign" else (math.floor(a.lo), math.ceil(a.hi))
        return self.put(self.one_of(ROUNDINGS[name]).format(a.name), [a], a.dtype, lo, hi, 1.0)

    def operands(self, wanted=lambda v: True, numbers=NUMBERS, share=0.25) -> tuple | None:
        """Two operands, one of which may be a number."""
        a, b = self.pick(wanted), self.pick(wanted)
        if a is None:
            return None
        if self.rng.random() < share:
            b = number(self.one_of(numbers))
            if numbers is NUMBERS and self.rng.random() < (0.5 if self.scalars else 0.05):
                b = self.one_of(self.scalars or [number(SCALE, "SCALE")])
            if self.rng.random() < 0.3:
                a, b = b, a
        return a, b

    def arithmetic(self):
        symbol = self.one_of("+-*")
        pair = self.operands(lambda v: v.dtype is not BOOL or symbol != "-")
        if pair is None:
            return None
        a, b = pair
        dtype = self.promoted(a, b)
        exact = a.step and b.step and not (a.err or b.err)
        if symbol == "*":
            corners = [x * y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
            step, err = a.step * b.step, a.size * b.err + b.size * a.err
        else:
            low, high = (b.lo, b.hi) if symbol == "+" else (-b.hi, -b.lo)
            corners = [a.lo + low, a.hi + high]
            step, err = min(a.step, b.step), a.err + b.err
        lo, hi = min(corners), max(corners)
        if dtype is BOOL:  # + and * of masks are | and &
            lo, hi = 0, 1
        names = {"+": "add", "-": "sub", "*": "mul"}
        spellings = [f"{a.name} {symbol} {b.name}"] * 3
        if a.dtype is not None:
            spellings.append(f"torch.{names[symbol]}({a.name}, {b.name})")
            spellings.append(f"{a.name}.{names[symbol]}({b.name})")
        err = 0.0 if exact or not dtype.is_floating_point else err + max(abs(lo), abs(hi))
        return self.put(self.one_of(spellings), [a, b], dtype, lo, hi, step if exact else 0.0, err)

    def division(self):
        a = self.pick()
        b = number(self.one_of(NUMBERS))
        if self.rng.random() < 0.6:
            b = self.fit(self.pick(), 0.25, 64)
        if a is None or b is None:
            return None
        dtype = self.promoted(a, b)
        dtype = dtype if dtype.is_floating_point else F32
        least = min(abs(b.lo), abs(b.hi))
        size = a.size / least
        lo = 0.0 if a.lo >= 0 and b.lo > 0 else -size
        text = self.one_of((f"{a.name} / {b.name}", f"torch.div({a.name}, {b.name})"))
        err = a.err / least + a.size * b.err / least**2 + size
        return self.put(text, [a, b], dtype, lo, size, err=err)

    def whole_division(self):
        """// and %, of values on a coarse grid, so that no quotient is near an integer but one."""

        def coarse(v):
            return v.step and not v.err and v.size <= 2**10 * v.step and v.dtype is not BOOL

        a = self.pick(coarse)
        b = number(self.one_of((3.0, -1.5, 2, -3, 0.75, 5)))
        if self.rng.random() < 0.4:
            b = self.fit(self.pick(coarse), 1, 64)
        if a is None or b is None or not b.step or b.err:
            return None
        dtype = self.promoted(a, b)
        quotient = math.ceil(a.size / min(abs(b.lo), abs(b.hi))) + 1
        if self.rng.random() < 0.5:
            text = self.one_of(("{} // {}", "torch.floor_divide({}, {})"))
            return self.put(text.format(a.name, b.name), [a, b], dtype, -quotient, quotient, 1.0)
        text = self.one_of(("{} % {}", "torch.remainder({}, {})"))
        step = min(a.step, b.step)
        return self.put(text.format(a.name, b.name), [a, b], dtype, -b.size, b.size, step)

    def extreme(self):
        pair = self.operands(share=0.0)
        if pair is None:
            return None
        a, b = pair
        name = self.one_of(("maximum", "minimum"))
        choose = max if name == "maximum" else min
        return self.put(
            f"torch.{name}({a.name}, {b.name})", [a, b], self.promoted(a, b),
            choose(a.lo, b.lo), choose(a.hi, b.hi), min(a.step, b.step), max(a.err, b.err),
        )  # fmt: skip

    def comparison(self):
        pair = self.operands(lambda v: not v.err, COMPARED, 0.5)
        if pair is None or pair[0].dtype is None:
            return None
        text = self.one_of(COMPARISONS[self.one_of(list(COMPARISONS))])
        if self.rounds_an_operand(*pair):
            return None
        return self.put(text.format(pair[0].name, pair[1].name), [*pair], BOOL, 0, 1, 1.0)

    def rounds_an_operand(self, *operands: V) -> bool:
        """Whether promotion brings an operand to a dtype that may not hold it exactly."""
        dtype = functools.reduce(
            lambda x, y: torch.result_type(_sample(x), _sample(y)), [v.sample for v in operands]
        )
        if not dtype.is_floating_point:
            return False
        for v in operands:
            bits = BITS.get(v.dtype, 24)
            fits = v.step and v.size <= v.step * 2 ** BITS[dtype]
            if not fits and (bits > BITS[dtype] or not v.floating):
                return True
        return False

    def logical(self):
        if self.rng.random() < 0.25:
            a = self.pick(lambda v: v.dtype is BOOL)
            text = self.one_of(("~{}", "torch.logical_not({})"))
            return a and self.put(text.format(a.name), [a], BOOL, 0, 1, 1.0)
        text = self.one_of(LOGICAL)
        pair = self.operands(
            lambda v: not v.err and (v.dtype is BOOL or text.startswith("torch")), share=0.0
        )
        if pair is None:
            return None
        return self.put(text.format(pair[0].name, pair[1].name), [*pair], BOOL, 0, 1, 1.0)

    def where(self):
        mask = self.pick(lambda v: v.dtype is BOOL)
        pair = self.operands(share=0.3)
        if mask is None or pair is None:
            return None
        a, b = pair
        text = f"torch.where({mask.name}, {a.name}, {b.name})"
        if b.dtype is None and a.shape >= mask.shape and self.rng.random() < 0.5:
            if not (a.floating or isinstance(b.lo, int)) or a.dtype is BOOL:
                return None  # the value does not fit
            text = f"{a.name}.masked_fill({mask.name}, {b.name})"
            dtype = a.dtype
        else:
            dtype = self.promoted(a, b)
        return self.put(
            text, [mask, a, b], dtype, min(a.lo, b.lo), max(a.hi, b.hi),
            min(a.step, b.step), max(a.err, b.err),
        )  # fmt: skip

    def cast(self):
        dtype = self.one_of(list(CASTS))
        a = self.pick(lambda v: not v.err or (dtype in FLOATS and v.wide))
        if a is None or (dtype in (BF16, F16) and a.err and self.rng.random() < 0.6):
            return None
        text = self.one_of(CASTS[dtype]).format(a.name)
        if dtype is BOOL:
            return self.put(text, [a], BOOL, 0, 1, 1.0)
        if not dtype.is_floating_point:
            return self.put(text, [a], dtype, math.floor(a.lo), math.ceil(a.hi), 1.0)
        fits = a.step and a.size <= a.step * 2 ** BITS[dtype]
        if fits or a.err:
            return self.put(text, [a], dtype, a.lo, a.hi, a.step, a.err)
        like = replace(a, dtype=dtype)  # a rounding of what is exact is exact
        slack = a.size * 2**-8
        return self.put(
            text, [replace(like, lo=0, hi=0)], dtype, a.lo - slack, a.hi + slack, shape=a.shape
        )

    def several(self):
        a, b, c = (self.pick(lambda v: v.wide) for _ in range(3))
        if a is None:
            return None
        kind = self.one_of(("addcmul", "addcdiv", "lerp", "lerp", "clamp"))
        if kind == "addcmul":
            size = a.size + b.size * c.size / 2
            err = a.err + (b.err * c.size + c.err * b.size) / 2 + 2 * size
            text = f"torch.addcmul({a.name}, {b.name}, {c.name}, value=0.5)"
        elif kind == "addcdiv":
            c = self.fit(c, 0.25, 64)
            if c is None:
                return None
            size = a.size + b.size / c.lo
            err = a.err + b.err / c.lo + b.size * c.err / c.lo**2 + 2 * size
            text = f"torch.addcdiv({a.name}, {b.name}, {c.name})"
        elif kind == "lerp":
            size = 2 * (a.size + b.size)
            err = 2 * (a.err + b.err) + size
            text = f"torch.lerp({a.name}, {b.name}, {self.one_of((0.25, 0.7))})"
            c = a
        else:
            size, err = max(a.size, b.size, c.size), max(a.err, b.err, c.err)
            text = f"torch.clamp({a.name}, {b.name}, {c.name})"
            return self.put(text, [a, b, c], F64, -size, size, min(a.step, b.step, c.step), err)
        return self.put(text, [a, b, c], F64, -size, size, err=err)

    def powers(self):
        a = self.pick(lambda v: v.dtype is not BOOL and v.size <= 2**6)
        if a is None:
            return None
        if self.rng.random() < 0.3:
            a, b = self.fit(self.pick(lambda v: v.wide), 0.5, 3), self.pick(lambda v: v.wide)
            b = self.fit(b, -1.5, 1.5)
            if a is None or b is None:
                return None
            size = 3 * max(a.hi, 1 / a.lo) ** 0.5
            return self.put(
                f"torch.pow({a.name}, {b.name})", [a, b], F64, 0.0, 2 * size,
                err=2 * size * (1.5 * a.err / a.lo + b.err * 1.2 + 2),
            )  # fmt: skip
        k = self.one_of((2, 3))
        text = self.one_of((f"{a.name} ** {k}", f"{a.name}.pow({k})"))
        if k == 2 and self.rng.random() < 0.3:
            text = f"torch.square({a.name})"
        size, exact = a.size**k, a.step and not a.err
        err = 0.0 if exact or not a.floating else k * a.size ** (k - 1) * a.err + k * size
        return self.put(
            text, [a], a.dtype, 0 if k == 2 else -size, size, a.step**k if exact else 0.0, err
        )

    def predicate(self):
        a = self.pick()
        name = self.one_of(("isnan", "isinf", "isfinite"))
        return a and self.put(f"torch.{name}({a.name})", [a], BOOL, 0, 1, 1.0)

    def filled(self):
        a = self.pick(lambda v: v.dtype is not BOOL)
        name, value = self.one_of((("zeros_like", 0), ("ones_like", 1), ("full_like", 2)))
        if a is None:
            return None
        text = f"torch.{name}({a.name}{', 2' if value == 2 else ''})"
        v = self.put(text, [a], a.dtype, value, value, 1.0)
        if v is not None:  # torch's does not depend on the row
            self.pool[-1] = replace(v, varies=False)
        return v

    def reshaped(self):
        a = self.pick(lambda v: v.shape != ROW)
        if a is None:
            return None
        row = self.pick(lambda v: v.shape == ROW)
        if row is not None and self.rng.random() < 0.4:
            text, shape = f"{a.name}.expand({row.name}.shape)", ROW
        elif a.shape == ONE:
            text, shape = self.one_of((f"{a.name}[..., None]", f"{a.name}.unsqueeze(-1)")), KEPT
        else:
            text, shape = self.one_of((f"{a.name}.squeeze(-1)", f"{a.name}[..., 0]")), ONE
        if row is not None and shape == ROW and not a.varies:
            return None
        return self.put(text, [a], a.dtype, a.lo, a.hi, a.step, a.err, shape)

    # -- reductions

    def reduction(self):
        kind = self.one_of(
            ("sum", "sum", "mean", "mean", "max", "min", "any", "all", "count", "prod", "spread",
             "norm", "logsumexp")
        )  # fmt: skip
        dim = self.one_of(DIMS)
        keep = self.rng.random() < 0.25 and dim != ""
        arguments = ", ".join(filter(None, (dim, "keepdim=True" if keep else "")))
        shape = KEPT if keep else ONE
        return getattr(self, f"_{kind}")(arguments, shape)

    def _row(self, wanted=lambda v: True) -> V | None:
        return self.pick(lambda v: v.shape == ROW and wanted(v))

    def _sum(self, arguments, shape):
        a = self._row(lambda v: v.wide or not v.err)
        if a is None:
            return None
        lo, hi = a.lo * self.n, a.hi * self.n
        return self._added(f"{a.name}.sum({arguments})", a, lo, hi, shape)

    def _added(self, text, a, lo, hi, shape):
        """What adds up to all elements of a row `a`, and is from lo to hi."""
        if not a.floating:
            return self.put(text, [a], I64, lo, hi, 1.0, shape=shape)
        size = max(abs(lo), abs(hi))
        exact = a.step and not a.err and size <= a.step * 2 ** BITS[a.dtype]
        if not exact and not a.wide:
            return None
        if not exact and size > 64:  # to be of a size with other values
            text, k = f"{text} * {2.0 ** -math.ceil(math.log2(self.n))!r}", self.n
            lo, hi, size = lo / k, hi / k, size / k
            return self.put(text, [a], a.dtype, lo, hi, err=a.err + 2 * size, shape=shape)
        err = 0.0 if exact else a.err * self.n + size
        return self.put(text, [a], a.dtype, lo, hi, a.step, err, shape)

    def cumulative(self):
        """A sum or product of each element and all before it."""
        dim, kind = self.one_of(DIMS[1:]), self.rng.random()
        if kind < 0.25:
            a = self._row(lambda v: v.dtype is BOOL)
            return a and self.put(f"{a.name}.cumprod({dim})", [a], I64, 0, 1, 1.0, shape=ROW)
        if kind < 0.4:
            return self._multiplied(f"cumprod({dim})", ROW)
        a = self._row(lambda v: v.wide or not v.err)
        if a is None:
            return None
        lo, hi = min(a.lo, a.lo * self.n), max(a.hi, a.hi * self.n)
        text = self.one_of((f"{a.name}.cumsum({dim})", f"torch.cumsum({a.name}, {dim})"))
        return self._added(text, a, lo, hi, ROW)

    def ranked(self):
        """An element by its rank; of equal ones any may be it."""
        a = self._row(lambda v: v.dtype not in (BOOL, I64))
        if a is None:
            return None
        k, end = self.rng.randint(1, min(self.n, 8)), self.one_of(("max", "min"))
        j, largest = self.rng.randrange(k), ", largest=False" if end == "min" else ""
        text, shape = self.one_of((
            (f"{a.name}[{a.name}.arg{end}()]", ONE),
            (f"{a.name}.gather(-1, {a.name}.{end}(-1, keepdim=True).indices)", KEPT),
            (f"{a.name}.topk({k}{largest}).values[{j}]", ONE),
            (f"torch.topk({a.name}, {k}{largest})[0][{j}:{j + 1}]", KEPT),
        ))  # fmt: skip
        return self.put(text, [a], a.dtype, a.lo, a.hi, a.step, a.err, shape)

    def moved(self):
        """Elements in another order, or what groups of them have in common; of one way a program.
        """
        if self.way is None:
            sizes = [2**k for k in range(1, 7) if self.n % 2**k == 0 and self.n > 2**k]
            ways = ["halves", "pairs", *(2 * ["groups"] if sizes else [])] if sizes else [""]
            self.way = self.one_of(ways), self.one_of(sizes or [1])
        a, (way, size) = self._row(), self.way
        if a is None or not way:
            return None
        text, lo, hi, step, err = "torch.cat({0}.chunk(2)[::-1])", a.lo, a.hi, a.step, a.err
        if way == "pairs":
            text = "torch.stack(({0}[1::2], {0}[0::2]), -1).flatten()"
        elif way == "groups":
            name = self.one_of(("any", "all") if a.dtype is BOOL else ("amax", "amin"))
            if name in ("any", "all") and err:
                return None
            groups = f"{{0}}.view(-1, {size})"
            text = f"{groups}.{name}(-1, keepdim=True).expand(-1, {size}).flatten()"
        return self.put(text.format(a.name), [a], a.dtype, lo, hi, step, err, ROW)

    def _mean(self, arguments, shape):
        a = self._row(lambda v: v.wide)
        return a and self.put(
            f"{a.name}.mean({arguments})", [a], F64, a.lo, a.hi, err=a.err + a.size, shape=shape
        )

    def _max(self, arguments, shape, name="max"):
        a = self._row()
        if a is None:
            return None
        spellings = [f"{a.name}.a{name}({arguments or '-1'})"]
        if not arguments:
            spellings.append(f"{a.name}.{name}()")
        elif shape == ONE:
            spellings.append(f"{a.name}.{name}({arguments}).values")
        text = self.one_of(spellings)
        return self.put(text, [a], a.dtype, a.lo, a.hi, a.step, a.err, shape)

    def _min(self, arguments, shape):
        return self._max(arguments, shape, "min")

    def _any(self, arguments, shape, name="any"):
        a = self._row(lambda v: not v.err)
        return a and self.put(f"{a.name}.{name}({arguments})", [a], BOOL, 0, 1, 1.0, shape=shape)

    def _all(self, arguments, shape):
        return self._any(arguments, shape, "all")

    def _count(self, arguments, shape):
        a = self._row(lambda v: not v.err)
        text = self.one_of(("torch.count_nonzero({})", "{}.count_nonzero(-1)"))
        return a and self.put(text.format(a.name), [a], I64, 0, self.n, 1.0, shape=ONE)

    def _prod(self, arguments, shape):
        mask = self._row(lambda v: v.dtype is BOOL)
        if mask is not None and self.rng.random() < 0.6:
            text = f"torch.where({mask.name}, -1, 1).prod({arguments})"
            return self.put(text, [mask], I64, -1, 1, 1.0, shape=shape)
        return self._multiplied(f"prod({arguments})", shape)

    def _multiplied(self, method, shape):
        """Products of elements that are so near 1 that none is large."""
        a = self._row(lambda v: v.wide and v.size <= 4)
        if a is None:
            return None
        small = 2.0 ** -math.ceil(math.log2(2 * self.n))
        text = f"(1.0 + {a.name} * {small!r}).{method}"
        size = math.exp(a.size / 2)
        # each factor is rounded, in torch as in a kernel: what differs is the order of the product
        return self.put(text, [a], F64, 1 / size, size, err=size * (a.err + 8), shape=shape)

    def _spread(self, arguments, shape):
        a = self._row(lambda v: v.wide)
        if a is None or self.n == 1:
            return None
        name = self.one_of(("var", "std"))
        text = self.one_of(
            (f"{a.name}.{name}({arguments})", f"torch.{name}_mean({a.name}, correction=0)[0]")
        )
        if name == "std" and (a.err or a.name not in ("x", "y") or self.n < 33):
            # the root of nearly 0: of equal values torch's variance is 0, a sum's not quite
            text, shape = f"({a.name}.var() + 0.25).sqrt()", ONE
        shape = ONE if text.startswith("torch") else shape
        size = a.hi - a.lo
        err = 4 * (a.err + a.size)
        if name == "var":
            size, err = size**2, 2 * size * err
        return self.put(text, [a], F64, 0.0, size, err=err + 2 * size, shape=shape)

    def _norm(self, arguments, shape):
        a = self._row(lambda v: v.wide and v.size <= 16)
        if a is None:
            return None
        p = self.one_of(("2", "1", "math.inf", "3"))
        size = a.size * self.n ** {"1": 1, "2": 0.5, "3": 1 / 3}.get(p, 0)
        if size > 2**10:
            return None
        if p == "3":
            a = self.fit(a, 0.25, 16)
            if a is None:
                return None
        err = (a.err + 2 * a.size) * size / a.size if a.size else 1.0
        p = p.replace("math.inf", "float('inf')")
        text = self.one_of((f"{a.name}.norm(p={p})", f"torch.linalg.vector_norm({a.name}, {p})"))
        return self.put(text, [a], F64, 0.0, size, err=2 * err, shape=ONE)

    def _logsumexp(self, arguments, shape):
        a = self.fit(self._row(lambda v: v.wide), -16, 16)
        if a is None or a.shape != ROW:
            return None
        keep = ", keepdim=True" if shape == KEPT else ""
        return self.put(
            f"torch.logsumexp({a.name}, -1{keep})", [a], F64, a.lo, a.hi + math.log(self.n),
            err=a.err + 2 * a.size + 4, shape=shape,
        )  # fmt: skip

    # -- whole rows

    def composite(self):
        kind = self.one_of(("softmax", "log_softmax", "layer_norm", "rms_norm", "normalize"))
        a = self._row(lambda v: v.wide)
        if a is None:
            return None
        if "softmax" in kind:
            a = self.fit(a, -16, 16)
            if a is None or a.shape != ROW:
                return None
            text = self.one_of((f"F.{kind}({a.name}, dim=-1)", f"torch.{kind}({a.name}, -1)"))
            if kind == "softmax":
                return self.put(text, [a], F64, 0.0, 1.0, err=2 * a.err + 4)
            low = a.lo - a.hi - math.log(self.n)
            return self.put(text, [a], F64, low, 0.0, err=2 * a.err - 2 * low)
        if kind == "normalize":
            p = self.one_of(("", ", p=1"))
            err = 4 * a.err + 4
            return self.put(f"F.normalize({a.name}, dim=-1, eps=0.5{p})", [a], F64, -1, 1, err=err)
        eps = self.one_of((0.25, 0.5, 1.0))
        if a.err == 0 and a.name == "x" and self.n > 32:
            eps = 1e-5
        size = min(2 * a.size / eps**0.5, self.n**0.5)
        gain = 2 / max(eps, 0.25) ** 0.5
        weights = [v.name for v in self.pool if v.wide and not v.varies and v.shape == ROW]
        if weights and self.rng.random() < 0.6:
            weight, bias = self.rng.choice(weights), self.rng.choice(weights)
            affine = f"{weight}, {bias}, " if kind == "layer_norm" else f"{weight}, "
            size = 2 * size + 2
        else:
            affine = ""
        operands = [a, *(v for v in self.pool if v.name in affine.split(", "))]
        if any(v.size > 2 or v.err for v in operands[1:]):
            return None
        text = f"F.{kind}({a.name}, {a.name}.shape, {affine}eps={eps})"
        return self.put(text, operands, F64, -size, size, err=4 * gain * (a.err + a.size) + size)

    def chained(self):
        """What makes stages depend on each other: a row by one of its own reductions."""
        a = self._row(lambda v: v.wide and v.size <= 16)
        if a is None:
            return None
        size, err = a.size, a.err
        text, size, err = self.one_of((
            ("{} - {}.mean()", 2 * size, 2 * err + 3 * size),
            ("{} - {}.amax(-1)", 2 * size, 2 * err + 2 * size),
            ("{} / ({}.abs().max() + 0.5)", 1, 4 * err + 2),
            ("{} * torch.rsqrt(({} * {}).mean() + 0.5)", 2 * size, 3 * (err + size) * (1 + size)),
            ("torch.exp({} - {}.max())", 1, 2 * err + 4 * size),
            ("{} / ({} * {}).sum().clamp(min=1.0)", size, 2 * err + 4 * size),
        ))  # fmt: skip
        return self.put(text.replace("{}", a.name), [a], F64, -size, size, err=err)

    # -- indices

    def columns(self):
        """The numbers of the columns, and what arithmetic makes of them."""
        row = self.pick(lambda v: v.shape == ROW)
        if row is None:
            return None
        n = f"{row.name}.shape[-1]"
        text, dtype, lo, hi = self.one_of((
            (f"torch.arange({n})", I64, 0, self.n - 1),
            (f"torch.arange(1, {n} + 1)", I64, 1, self.n),
            (f"torch.arange(0, 3 * {n}, 3) // 2", I64, 0, 2 * self.n),
            (f"torch.arange({n}, dtype=torch.int32)", I32, 0, self.n - 1),
            (f"torch.arange({n}, dtype=torch.float32)", F32, 0, self.n - 1),
            (f"torch.arange({n}) % 4", I64, 0, 3),
        ))  # fmt: skip
        return self.put(text, [], dtype, lo, hi, 1.0, shape=ROW)

    def place(self):
        """An integer of each row, or of all; it may lie beyond the row's ends."""
        found = [v for v in self.pool if v.shape != ROW and v.dtype in (I32, I64) and not v.err]
        if found and self.rng.random() < 0.7:
            return self.rng.choice(found)
        if self.rng.random() < 0.5 and (v := self._count("", ONE)):
            return v
        k = self.rng.randrange(self.n)
        return self.put(f"torch.tensor({k})", [], I64, k, k, 1.0, shape=ONE)

    def masked(self):
        """A choice by the column."""
        columns, y, pair = self.columns(), self.place(), self.operands(share=0.3)
        if None in (columns, y, pair) or pair[0].dtype is None:
            return None
        mask = self.one_of(COMPARISONS[self.one_of(list(COMPARISONS))])
        mask, (a, b) = mask.format(columns.name, y.name), pair
        return self.put(
            f"torch.where({mask}, {a.name}, {b.name})", [columns, y, a, b], self.promoted(a, b),
            min(a.lo, b.lo), max(a.hi, b.hi), min(a.step, b.step), max(a.err, b.err),
        )  # fmt: skip

    def chosen(self):
        """The element at an index, which is brought into the row."""
        a, y = self._row(), self.place()
        if a is None or y is None:
            return None
        n, k = f"{a.name}.shape[-1]", self.rng.randrange(-self.n, self.n)
        texts = [f"{a.name}[{y.name} % {n}]", f"{a.name}[{y.name} % {n} - {n}]", f"{a.name}[{k}]"]
        if y.shape == ONE and y.dtype is I64:
            texts.append(f"{a.name}.gather(-1, ({y.name} % {n})[..., None])[..., 0]")
            texts.append(f"torch.take_along_dim({a.name}, ({y.name} % {n})[..., None], -1)[..., 0]")
        text = self.one_of(texts)
        if self.n == 1 and text == texts[2]:
            return None  # the element of a row of one is its squeeze
        shape, read = y.shape if text in texts[:2] else ONE, [a] if text == texts[2] else [a, y]
        return self.put(text, read, a.dtype, a.lo, a.hi, a.step, a.err, shape)

    def one_hot(self):
        row, y = self._row(), self.place()
        if row is None or y is None or y.shape != ONE:
            return None
        n = f"{row.name}.shape[-1]"
        return self.put(f"F.one_hot({y.name}.long() % {n}, {n})", [y], I64, 0, 1, 1.0, shape=ROW)

    # -- bits and random numbers

    def _integer(self) -> V | None:
        found = self.pick(lambda v: v.dtype in (I32, I64) and not v.err)
        made = self.columns() if found is None else found
        return made if made is not None and made.dtype in (I32, I64) else None

    def bits(self):
        """An operation on the bits of integers."""
        a, b = self._integer(), self._integer()
        if a is None or b is None:
            return None
        if self.rng.random() < 0.6:
            count = self.rng.randrange(4)
            if count == 3 and self.rng.random() < 0.5:  # by a count that varies, up to 3
                low, high = min(a.lo, 8 * a.lo), max(a.hi, 8 * a.hi)
                text = f"{a.name} << ({b.name} & 3)"
                return self.put(text, [a, b], self.promoted(a, b), low, high, 1.0)
            text, low, high = self.one_of((
                (f"{a.name} << {count}", a.lo * 2**count, a.hi * 2**count),
                (f"{a.name} >> {count}", a.lo // 2**count, a.hi // 2**count),
                (f"~{a.name}", -1 - a.hi, -1 - a.lo),
                (f"torch.bitwise_right_shift({a.name}, 70)", -1, 0),
            ))  # fmt: skip
            return self.put(text, [a], a.dtype, low, high, 1.0)
        if self.rng.random() < 0.4:
            b = number(self.one_of((1, 3, 7, 12, -2)))
        text = self.one_of(("{} & {}", "{} | {}", "{} ^ {}", "torch.bitwise_xor({}, {})"))
        size = 2 ** max(int(v.size).bit_length() for v in (a, b))
        low = 0 if a.lo >= 0 and b.lo >= 0 else -size
        text = text.format(a.name, b.name)
        return self.put(text, [a, b], self.promoted(a, b), low, size - 1, 1.0)

    def exponents(self):
        """What the bits of an exact number say, or a power of two times a number."""
        if self.rng.random() < 0.4:
            a, b = self.pick(lambda v: v.wide), self._integer()
            if a is None or b is None or b.shape > a.shape or b.varies > a.varies:
                return None  # torch warns where it makes the result larger than its first operand
            text = self.one_of(("torch.ldexp({}, {} % 5 - 2)", "{}.ldexp({} % 5 - 2)"))
            text, more = text.format(a.name, b.name), 4 * a.size
            return self.put(text, [a, b], F64, -more, more, a.step / 4, 4 * a.err)
        a = self.pick(lambda v: v.wide and not v.err)
        if a is None:
            return None
        high = math.frexp(max(a.size, 1))[1]
        text, dtype, low, high, step = self.one_of((
            ("torch.frexp({}).exponent", I32, -200, high, 1.0),
            ("{}.frexp().mantissa", F64, -1, 1, 0.0),
            ("torch.floor(torch.log2({}.abs().clamp(min=0.125)))", F64, -3, high, 1.0),
            ("abs({}).clamp(min=0.125).log2().ceil()", F64, -3, high, 1.0),
            ("{}.to(torch.float8_e8m0fnu).float()", F32, 0, 2 * a.size + 1, 0.0),
        ))  # fmt: skip
        if dtype is I32 and self.rng.random() < 0.7:
            text = "({}.float().abs().view(torch.int32) & -65536).view(torch.float32)"
            dtype, low, high, step = F32, 0, a.size, 0.0
        return self.put(text.format(a.name), [a], dtype, low, high, step)

    def word(self) -> tuple[str, list[V]]:
        """The text of a word of each column, and the values in it."""
        key, rest = self._integer(), self._integer()
        row = self._row()
        if row is None:
            return "", []
        key = number(self.rng.randrange(-(2**63), 2**63)) if key is None else key
        rest = number(self.rng.randrange(9)) if rest is None or self.rng.random() < 0.6 else rest
        columns, k = f"torch.arange({row.name}.shape[-1])", self.rng.randrange(5)
        columns += self.one_of(("", " // 4", " >> 1"))
        named = [v for v in (key, rest) if v.dtype is not None]
        if k == 4:
            return f"htile.random_words({columns}, {key.name}, {rest.name})", named
        return f"htile.philox({columns}, {key.name}, {rest.name})[{k}]", named

    def drawn(self):
        """A random word, or a number made of one. The words are the same in torch and in a kernel.
        """
        word, named = self.word()
        if not word:
            return None
        text, dtype, high, step, err = self.one_of((
            (f"{word} >> 28", I64, 15, 1.0, 0.0), (f"{word} & 255", I64, 255, 1.0, 0.0),
            (f"{word} % 7", I64, 6, 1.0, 0.0), (f"htile.uniform({word})", F32, 1.0, 0.0, 0.0),
            (f"(htile.uniform({word}) > 0.3)", BOOL, 1, 1.0, 0.0),
            *[(f"htile.exponential({word})", F32, 23.0, 0.0, 92.0)] * 3,
        ))  # fmt: skip
        return self.put(text, named, dtype, 0, high, step, err, shape=ROW)

    def dropped(self):
        a, seed = self._row(lambda v: v.wide), self._integer()
        if a is None or seed is None:
            return None
        p, exact = self.one_of(((0.5, True), (0.1, False), (0.25, False), (0.0, True)))
        size = a.size / (1 - p)
        err = a.err / (1 - p) + (0.0 if exact else size)
        text = f"htile.dropout({a.name}, {p}, {seed.name})"
        return self.put(text, [a, seed], a.dtype, -size, size, a.step if exact else 0.0, err)

    def static(self, arg: Arg):
        """A use of a static argument."""
        a = self.pick(lambda v: v.wide)
        if a is None:
            return None
        if isinstance(arg.value, bool):
            text = f"({a.name} + 1.0 if {arg.name} else {a.name} - 1.0)"
            err = a.err + a.size + 1
            return self.put(text, [a], F64, a.lo - 1, a.hi + 1, err=err)
        if isinstance(arg.value, torch.dtype):
            text = f"{a.name}.to({arg.name})"
            return self.put(text, [a], arg.value, a.lo, a.hi, err=max(a.err, a.size))
        if isinstance(arg.value, int):
            a = self._row(lambda v: v.wide)
            text = f"{a.name}.amax(dim={arg.name})" if a else ""
            return a and self.put(text, [a], F64, a.lo, a.hi, a.step, a.err, ONE)
        a = self.fit(a, -16, 16)
        if a is None:
            return None
        low, high, slope = self.evaluated("F.gelu({})", a)
        text = f"F.gelu({a.name}, approximate={arg.name})"
        return self.put(text, [a], F64, low, high, err=slope * a.err + 2 * a.size)


def _inside(bound: float, sign: int) -> float:
    """A bound that is exact in every dtype, at or inside the given one."""
    scaled = bound * 8
    return (math.ceil(scaled) if sign > 0 else math.floor(scaled)) / 8 if abs(bound) < 64 else bound


def _sample(x):
    return torch.empty((), dtype=x, device="meta") if isinstance(x, torch.dtype) else x


# fmt: off
STATEMENTS = {  # how often each kind is tried
    Writer.smooth: 9, Writer.exactly: 3, Writer.rounding: 4, Writer.arithmetic: 10,
    Writer.division: 4, Writer.whole_division: 4, Writer.extreme: 3, Writer.comparison: 5,
    Writer.logical: 4, Writer.where: 5, Writer.cast: 5, Writer.several: 3, Writer.powers: 3,
    Writer.predicate: 1, Writer.filled: 1, Writer.reshaped: 3, Writer.reduction: 11,
    Writer.composite: 4, Writer.chained: 6,
}
INDICES = (Writer.masked, Writer.masked, Writer.chosen, Writer.chosen, Writer.one_hot)
BITS_AND_NOISE = (Writer.bits, Writer.bits, Writer.bits, Writer.drawn, Writer.drawn, Writer.dropped)
# fmt: on
SCANNED_N = 2048  # Programs of at most so many elements have scans: their rows are held.
SCANNING = 0.4  # of these programs
MOVING = 0.9  # of the other programs
MOVES = Writer.ranked, Writer.moved, Writer.moved


def program(seed: int, sizes: str = "small", is_first: bool = False) -> Program:
    """The program of a seed. sizes: `small`, or `all` with rows of every length and many rows.

    is_first: of the language as it first was, without indices and numbers of 8 bits. The benchmarks
        take such programs, because measured times belong to them.
    """
    return draw_program(random.Random(f"{sizes} {seed}"), seed, sizes, is_first)


def draw_program(
    rng: random.Random, seed: int = 0, sizes: str = "small", is_first: bool = False
) -> Program:
    """A program from a source of randomness; hypothesis has one whose choices it can shrink."""
    n, lead = _draw_shape(rng, sizes)
    # Numbers of 8 bits are drawn apart, so that the other draws do not depend on them.
    bytes_rng, has_float8 = random.Random(f"bytes {sizes} {seed}"), seed % 4 > 0  # 0: for sm_80
    args = _draw_arguments(rng, n, lead)
    args = args if is_first else _in_bytes(bytes_rng, args, has_float8)
    writer = Writer(rng, n)
    statics = []
    for a in args:
        if a.role == "static":
            statics.append(a)
        elif a.role == "scalar":
            writer.scalars.append(number(a.value, a.name))
        else:
            writer.pool.append(_argument_value(a, n))
    kinds = [kind for kind, weight in STATEMENTS.items() for _ in range(weight)]
    wanted = rng.choice((4, 8, 12, 16, 20, 26))
    for _ in range(4 * wanted):
        if len(writer.lines) >= wanted:
            break
        rng.choice(kinds)(writer)
    for a in statics:
        writer.static(a)
    returned = _draw_returned(rng, writer)
    if not is_first:
        returned += _draw_more(random.Random(f"indices {sizes} {seed}"), writer, INDICES, kinds)
        returned = _to_bytes(bytes_rng, returned, writer, has_float8)
        noise_rng = random.Random(f"noise {sizes} {seed}")
        returned += _draw_more(noise_rng, writer, BITS_AND_NOISE, kinds)
        exponents_rng = random.Random(f"exponents {sizes} {seed}")
        returned += _draw_more(exponents_rng, writer, (Writer.exponents,), kinds)
        scans_rng = random.Random(f"scans {sizes} {seed}")
        if n <= SCANNED_N and scans_rng.random() < SCANNING:
            returned += _draw_more(scans_rng, writer, (Writer.cumulative,), kinds)
        elif (moves_rng := random.Random(f"moves {sizes} {seed}")).random() < MOVING:
            returned += _draw_more(moves_rng, writer, MOVES, kinds)
    lines = [f"{a.name} = {a.name}{WIDENED[a.dtype]}" for a in args if a.dtype in WIDENED]
    lines = (*lines, *_live(writer.lines, returned))
    returns = _draw_structure(rng, returned)
    variant = rng.random() if sizes == "all" and rng.random() < 0.25 else None
    errors = tuple(v.err for v in returned)
    return Program(seed, n, lead, tuple(args), lines, returns, errors, variant)


def _draw_shape(rng: random.Random, sizes: str) -> tuple[int, tuple[int, ...]]:
    """N and the leading shape."""
    if sizes == "small":
        n = rng.choice((rng.randint(1, 40), rng.choice((64, 96, 128, 256, 1000, 1024)),
                        rng.randint(41, 700), 8 * rng.randint(1, 128)))  # fmt: skip
    else:
        n = rng.choice((
            rng.randint(1, 64), rng.randint(65, 1024), rng.randint(1025, 16384),
            rng.randint(1025, 16384), 8 * rng.randint(1, 2048), 256 * rng.randint(1, 64),
        ))  # fmt: skip
        if rng.random() < 0.06:
            n = rng.choice(LONG)
    counts = [m for m in (0, 1, 1, 3, 3, 3, 64, 64, 64, 5000, 5000) if m * n <= ELEMENTS[sizes]]
    return n, rng.choice(LEADS[rng.choice(counts)])


def _draw_arguments(rng: random.Random, n: int, lead: tuple) -> list[Arg]:
    def tensor(name, role, dtype, kinds=("smooth", "smooth", "grid")):
        kind = rng.choice(kinds)
        kind = {BOOL: "mask", I32: "integer", I64: "integer"}.get(dtype, kind)
        return Arg(name, role, dtype, kind, _draw_layout(rng, role, n, lead))

    one_dimension = lead == ()
    first = rng.choice((BF16, BF16, F16, F32, F32, I32, BOOL))
    args = [tensor("x", "row", first)]
    if args[0].layout[0] in ("broadcast", "partial"):  # one argument has the whole shape
        args = [replace(args[0], layout=("plain",))]
    if not one_dimension:
        if rng.random() < 0.6:
            args.append(tensor("y", "row", rng.choice((BF16, F16, F32, I32, I64, BOOL))))
        if rng.random() < 0.2:
            args.append(tensor("z", "row", rng.choice((BF16, F16, F32, I32, I64, BOOL))))
        if rng.random() < 0.4:
            args.append(tensor("w", "column", rng.choice((BF16, F16, F32, F32, I32, I64, BOOL))))
        if rng.random() < 0.15:
            args.append(tensor("b", "column", rng.choice(FLOATS)))
        if rng.random() < 0.2:
            args.append(tensor("k", "kept", rng.choice((BF16, F32, I64, BOOL))))
    if rng.random() < 0.3:
        args.append(tensor("p", "per_row", rng.choice((F16, F32, I32, I64, BOOL)), ("positive",)))
    if rng.random() < 0.2:
        value = rng.choice((0.75, -1.5, 2.0, 0.3))
        args.append(Arg("alpha", "scalar", value=value))
    if rng.random() < 0.2:
        args.append(tensor("d", "device", rng.choice((BF16, F32, I32, I64)), ("positive",)))
    if rng.random() < 0.25:
        value = rng.choice((True, False, BF16, F16, -1, 0, "tanh", "none"))
        args.append(Arg("static", "static", value=value))
    return args


# How a program computes with numbers of 8 bits, and what they are computed in.
WIDENED = {E4M3: ".float()", E5M2: ".to(torch.float32)", I8: ".int()", U8: ".to(torch.int32)"}
COMPUTED = {E4M3: F32, E5M2: F32, I8: I32, U8: I32}
OF_BYTES = {"grid": (E4M3,), "integer": (I8,)}  # by kind; e5m2 has too few bits for a grid


def _in_bytes(rng: random.Random, args: list[Arg], has_float8: bool) -> list[Arg]:
    """The arguments with some of them stored in 8 bits."""
    found = []
    for a in args:
        dtypes = OF_BYTES.get(a.kind, ()) if a.role in ("row", "column", "per_row") else ()
        dtypes = [dtype for dtype in dtypes if has_float8 or dtype is I8]
        if dtypes and rng.random() < 0.3:
            a = replace(a, dtype=rng.choice(dtypes))
            if a.dtype is I8 and rng.random() < 0.5:
                a = replace(a, dtype=U8, kind="count")
        found.append(a)
    return found


def _to_bytes(
    rng: random.Random, returned: list[V], writer: Writer, has_float8: bool
) -> list[V]:
    """What is returned, some of it in 8 bits: integers that they hold, and any float."""
    found = []
    for v in returned:
        is_float = v.floating and v.dtype is not BF16 and has_float8
        # What is beyond e4m3 saturates; the oracle follows torch, whose versions differ there.
        dtypes = [E4M3] * (is_float and v.size <= 448) + [E5M2] * is_float
        if not v.err and v.step >= 1 and v.dtype is not BOOL:
            dtypes += [I8] * (v.size <= 127) + [U8] * (v.lo >= 0 and v.hi <= 255)
        if dtypes and rng.random() < 0.2:
            dtype = rng.choice(dtypes)
            v = replace(v, name=f"v{len(writer.lines)}", dtype=dtype)
            writer.lines.append((v.name, f"{returned[len(found)].name}.to({dtype})"))
        found.append(v)
    return found


def _draw_layout(rng: random.Random, role: str, n: int, lead: tuple) -> tuple:
    """The name of a layout; of `strided` also the elements between rows and before the first."""
    if role == "device" or rng.random() < 0.5 or (role == "per_row" and not lead):
        return ("plain",)
    if role == "column" or not lead:
        return ("strided", 0, rng.choice((1, 2, 4, 8)))
    kind = rng.random()
    if kind < 0.15:
        return ("expanded",)
    if kind < 0.25:
        return ("broadcast",)
    if kind < 0.45 and len(lead) > 1:
        return (rng.choice(("partial", "transposed")),)
    return ("strided", rng.choice((0, 1, 2, 4, 8, 24)), rng.choice((0, 0, 1, 2, 4, 8)))


def _argument_value(a: Arg, n: int) -> V:
    shape = {"row": ROW, "column": ROW, "kept": KEPT, "per_row": ONE, "device": ONE}[a.role]
    if a.role == "kept" and n == 1:  # (*lead, 1) is a row then
        shape = ROW
    dtype = F64 if a.dtype in FLOATS else COMPUTED.get(a.dtype, a.dtype)
    lo, hi, step = RANGES[a.kind]
    return V(a.name, shape, dtype, lo, hi, step, varies=a.role not in ("column", "device"))


def _draw_returned(rng: random.Random, writer: Writer) -> list[V]:
    """One to five values, the last ones rather."""
    found = [v for v in writer.pool if v.varies]
    made = [v for v in found if v.name not in writer.used and v.name.startswith("v")] or found
    chosen = [made[-1]]
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        chosen.append(rng.choice(made if rng.random() < 0.7 else found))
    return list(dict.fromkeys(chosen)) if rng.random() < 0.9 else chosen


def _draw_more(rng: random.Random, writer: Writer, wanted: tuple, kinds: list) -> list[V]:
    """For some programs one value more, made of indices, bits, exponents or scans; what else is
    drawn does not depend on it.
    """
    if rng.random() > 0.4:
        return []
    writer.rng, before = rng, len(writer.pool)
    for _ in range(rng.choice((1, 2, 3))):
        rng.choice(wanted)(writer)
    for _ in range(rng.choice((0, 2, 4))):
        rng.choice(kinds)(writer)
    made = [v for v in writer.pool[before:] if v.varies and v.name not in writer.used]
    return made[-1:]


def _draw_structure(rng: random.Random, returned: list[V]) -> str:
    names = [v.name for v in returned]
    kind = rng.random()
    if len(names) == 1:
        return names[0] if kind < 0.8 else f"({names[0]},)"
    if kind < 0.7:
        return ", ".join(names)
    if kind < 0.8:
        return f"[{', '.join(names)}]"
    if kind < 0.9:
        return "{" + ", ".join(f"'r{k}': {name}" for k, name in enumerate(names)) + "}"
    return f"{names[0]}, ({', '.join(names[1:])},)"


def _live(lines: list[tuple[str, str]], returned: list[V]) -> tuple[str, ...]:
    """The statements that what is returned needs."""
    needed = {v.name for v in returned}
    kept = []
    for name, text in reversed(lines):
        if name in needed:
            kept.append(f"{name} = {text}")
            needed |= set(_WORD.findall(text))
    return tuple(reversed(kept))


def reduced(p: Program, fails) -> Program:
    """The smallest program found that still fails: fewer results, and values for what made them."""

    def returning(names: list[str], errors: tuple) -> Program:
        pairs = [tuple(line.split(" = ", 1)) for line in p.lines]
        lines = _live(pairs, [V(name, ROW, F64, 0, 0) for name in names])
        return replace(p, lines=lines, returns=", ".join(names), errors=errors)

    returned = [w for w in _WORD.findall(p.returns) if re.fullmatch(r"[a-z]|v\d+", w)]
    made = [line.split(" = ", 1)[0] for line in p.lines]
    candidates = [returning([name], (64.0,)) for name in dict.fromkeys([*made, *returned])]
    candidates += [returning(returned, p.errors)]
    return next((q for q in candidates if fails(q)), p)
