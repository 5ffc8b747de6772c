"""Random row functions with products of matrices, as Python source: `program(seed, sizes)`.

`Writer` of programs.py writes what is computed before and after the products. A *level* is one to
four products of one row and what follows them. A row of the first level that the program rounds may
be the left operand of a second one.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from .programs import (
    BF16,
    CASTS,
    F16,
    F32,
    F64,
    FLOATS,
    I32,
    I64,
    KEPT,
    LEADS,
    ONE,
    RANGES,
    ROW,
    STATEMENTS,
    Arg,
    Program,
    V,
    Writer,
    number,
)

# fmt: off
BODY = {  # statements of elements alone, and how often each kind is tried
    Writer.smooth: 9, Writer.exactly: 3, Writer.arithmetic: 12, Writer.division: 4,
    Writer.extreme: 3, Writer.comparison: 3, Writer.logical: 1, Writer.where: 4, Writer.several: 3,
    Writer.powers: 3, Writer.rounding: 1, Writer.predicate: 1, Writer.cast: 1, Writer.masked: 2,
}
REDUCTIONS = ("sum", "sum", "mean", "max", "min", "prod", "logsumexp", "logsumexp")
STYLES = {  # what follows the products of a program
    "elements": 9,  # elementwise statements
    "groups": 8,  # then reductions of rows to numbers
    "any": 3,  # all statements that row functions have
}
LEFTS = {  # a left operand that is no argument, and how much larger than x it may be
    "factor": (("x * {p}", 1.5), ("x * alpha", 2), ("alpha * x * {p}", 3),
               ("x * torch.rsqrt((x * x).mean() + 0.5)", 1.5),
               ("{p} * (x * torch.rsqrt((x * x).mean() + 0.5))", 2)),
    "rounded": (("F.relu(x)", 1), ("x.abs()", 1), ("x * 0.5", 0.5), ("F.silu(x)", 1),
                ("x * torch.rsqrt((x * x).mean() + 0.5)", 1.5)),
}
JOINED = {  # how several products become one row
    2: ("F.silu({0}) * {1}", "{0} * {1}", "{0} - {1}", "torch.maximum({0}, {1})"),
    4: ("({0} + {1}) * ({2} - {3})", "{0} * {1} + {2} * {3}"),
}
# fmt: on
DEVIATIONS = 4.0  # A product's bound; it is six times its standard deviation for x up to 2.
CHAINED = 0.25  # of the programs have a second level
SIZES = re.compile(r"\w+\.shape")  # no elements are read of such a value
ROUNDS = re.compile(r"silu\(x\)|rsqrt")  # what rounds otherwise in float32 than in float64


class ProductWriter(Writer):
    """Writes what belongs to products; `allowed` says what statements may be of."""

    def __init__(self, rng: random.Random, n: int):
        super().__init__(rng, n)
        self.allowed = lambda v: True

    def pick(self, wanted=lambda v: True) -> V | None:
        return super().pick(lambda v: self.allowed(v) and wanted(v))

    def many(self, kinds: dict, count: int) -> None:
        """As many statements of these kinds as can be made of what is allowed."""
        listed = [kind for kind, weight in kinds.items() for _ in range(weight)]
        wanted = len(self.lines) + count
        for _ in range(4 * count):
            if len(self.lines) < wanted:
                self.rng.choice(listed)(self)

    def multiply(self, left: str, count: int, gain: float, dtype, k: int) -> tuple[list[Arg], V]:
        """Products of a row of k elements; the matrices, and what is made of all products."""
        rng, matrices, products = self.rng, [], []
        is_packed = count == 2 and rng.random() < 0.3
        for _ in range(1 if is_packed else count):
            name, rows = f"W{len(self.lines)}", self.n * (1 + is_packed)
            text, is_transposed = self.one_of((
                (f"F.linear({left}, {name})", True), (f"{left} @ {name}.T", True),
                (f"{left} @ {name}", False), (f"torch.matmul({left}, {name})", False),
                (f"F.linear({left}, {name}.T)", False),
            ))  # fmt: skip
            sizes = (rows, k) if is_transposed else (k, rows)
            layout = ("transposed" if rng.random() < 0.3 else "plain",)
            scale = k**-0.5
            matrices.append(Arg(name, "matrix", dtype, "weight", layout, scale, sizes))
            if is_packed:
                self.lines.append((f"pair{name}", f"({text}).chunk(2, -1)"))
                products += [self.product(f"pair{name}[{half}]", gain) for half in (0, 1)]
            else:
                products.append(self.product(text, gain))
        if count == 1:
            return matrices, products[0]
        size = 2 * max(DEVIATIONS * gain, 1) * DEVIATIONS * gain
        size = size if count == 2 else 4 * size
        text = self.one_of(JOINED[count]).format(*(p.name for p in products))
        joined = self.put(text, products, F64, -size, size, err=8 * size, shape=ROW)
        return matrices, joined or products[0]

    def product(self, text: str, gain: float) -> V:
        size = DEVIATIONS * gain
        return self.put(text, [V("x", ROW, F64, -2, 2)], F64, -size, size, err=size)

    def reduced(self, of: set[str]) -> list[V]:
        """Numbers: reductions of rows that are made of products, and what is made of them."""
        before = len(self.pool)
        self.allowed = lambda v: v.shape == ROW and v.name in self.made_of(of)
        wanted = before + self.rng.choice((1, 1, 2, 3))
        for _ in range(8):
            if len(self.pool) >= wanted:
                break
            kind, keep = self.one_of(REDUCTIONS), self.rng.random() < 0.25
            getattr(self, f"_{kind}")("-1, keepdim=True" if keep else "", KEPT if keep else ONE)
        if self.rng.random() < 0.3:
            self.chosen()
        self.allowed = lambda v: v.shape != ROW
        self.many(BODY, self.rng.choice((0, 1, 3)))
        self.allowed = lambda v: True
        made = self.made_of(of)
        return [v for v in self.pool[before:] if v.shape != ROW and v.varies and v.name in made]

    def made_of(self, names: set[str]) -> set[str]:
        """These names, and those of all values that are made of them."""
        found = set(names)
        for name, text in self.lines:
            if found & set(re.findall(r"\w+", SIZES.sub("", text))):
                found.add(name)
        return found


def program(seed: int, sizes: str = "small") -> Program:
    """The program of a seed. sizes: `small`, or `all` with more rows and longer ones."""
    rng = random.Random(f"products {sizes} {seed}")
    n, k, more, lead = _draw_shape(rng, sizes)
    dtype = rng.choice((BF16, BF16, F16))
    args = [Arg("x", "row", dtype, rng.choice(("smooth", "grid")), _layout(rng), sizes=(k,))]
    writer = ProductWriter(rng, k)
    args += _draw_numbers(rng, writer)
    left, gain = _draw_left(rng, writer, args, dtype)
    rounds = ROUNDS.search(left) is not None and left.endswith(".to(D)")
    style = rng.choice([name for name, weight in STYLES.items() for _ in range(weight)])
    returned: list[V] = []
    levels = 2 if rng.random() < CHAINED else 1
    for level in range(levels):
        writer.n = (n, more)[level]
        if level:
            writer.pool = [v for v in writer.pool if v.shape != ROW or more == n]
        args += _draw_rows(rng, writer, level)
        count = rng.choice((1, 1, 1, 2, 2, 4)) if not level else rng.choice((1, 1, 2))
        matrices, joined = writer.multiply(left, count, gain, dtype, (k, n)[level])
        args += matrices
        rows = _draw_body(rng, writer, style, joined)
        found = writer.reduced({joined.name}) if style == "groups" else []
        returned += _some(rng, rows, found, needs_row=style == "elements")
        if level + 1 < levels:
            passed = rng.choice(rows)
            text = passed.name if passed.size <= 4 else f"{passed.name}.clamp(-4, 4)"
            left, gain, rounds = _rounded(writer, text), 1.0, True
    if rounds:  # An element that is rounded otherwise is an error that 16 bits hide.
        returned = [_cast(writer, v, dtype) for v in returned]
    return _program(seed, n, lead, args, writer, returned, dtype)


def _program(seed, n, lead, args, writer: Writer, returned: list[V], dtype) -> Program:
    """The statements that are needed, and the arguments that these read."""
    needed, kept = {v.name for v in returned}, []
    for name, text in reversed(writer.lines):
        if name in needed:
            text = re.sub(r"\bD\b", str(dtype), text)
            kept.append(f"{name} = {text}")
            needed |= set(re.findall(r"\w+", text))
    args = tuple(a for a in args if a.name in needed)
    returns = ", ".join(v.name for v in returned)
    errors = tuple(v.err for v in returned)
    return Program(seed, n, lead, args, tuple(reversed(kept)), returns, errors)


def _draw_shape(rng: random.Random, sizes: str) -> tuple[int, int, int, tuple[int, ...]]:
    """Columns of the first products, elements of x, columns of the second ones, and the lead."""
    if sizes == "small":
        n, more = (rng.choice((rng.randint(1, 40), 8 * rng.randint(1, 40))) for _ in range(2))
        k = rng.choice((8 * rng.randint(1, 16), rng.randint(2, 90)))
        lead = rng.choice(LEADS[rng.choice((0, 1, 3, 3, 3, 64))]) or (1,)
    else:
        n, more = (
            rng.choice((rng.randint(1, 1500), 8 * rng.randint(1, 200))) for _ in range(2)
        )  # fmt: skip
        k = rng.choice((8 * rng.randint(1, 64), 64 * rng.randint(1, 16), rng.randint(2, 300)))
        n = n if rng.random() < 0.7 else 8 * -(-n // 8)
        lead = (rng.choice((1, 3, 64, rng.randint(2, 300), rng.randint(100, 1000))),)
    return n, k, rng.choice((n, more)), lead


def _layout(rng: random.Random) -> tuple:
    """Rows that follow each other, or begin at multiples of 16 bytes or of 2."""
    return rng.choice((("plain",), ("plain",), ("plain",), ("strided", 8, 8), ("strided", 1, 1)))


def _draw_numbers(rng: random.Random, writer: Writer) -> list[Arg]:
    """What a row has beside x."""
    found = [Arg("p", "per_row", rng.choice((F32, F16)), "positive")]
    if rng.random() < 0.3:
        found.append(Arg("y", "per_row", I64, "integer"))
    for a in found:
        lo, hi, step = RANGES[a.kind]
        writer.pool.append(V(a.name, ONE, a.dtype if a.dtype is I64 else F64, lo, hi, step))
    alpha = Arg("alpha", "scalar", value=rng.choice((0.75, -1.5, 2.0)))
    writer.scalars.append(number(alpha.value, "alpha"))
    return [*found, alpha]


def _draw_left(rng: random.Random, writer: ProductWriter, args: list[Arg], dtype):
    """The text of the first left operand, and how much larger than x it is."""
    kind = rng.choice(("plain", "plain", "factor", "rounded"))
    x = args[0]
    lo, hi, step = RANGES[x.kind]
    numbers, row = list(writer.pool), V("x", ROW, F64, lo, hi, step)
    if rng.random() < 0.25:  # what is known of x before any product
        writer.pool = [row]
        writer.reduction()
        numbers += [v for v in writer.pool[1:] if v.shape != ROW]
    writer.pool = numbers
    if kind == "plain":
        return "x", 1.0
    text, gain = rng.choice(LEFTS[kind])
    text = text.format(p="p")
    return (f"({text})", gain) if kind == "factor" else (_rounded(writer, text), gain)


def _rounded(writer: Writer, text: str) -> str:
    """A left operand in 16 bits; D stands for their dtype."""
    name = f"left{len(writer.lines)}"
    writer.lines.append((name, f"({text}).to(D)"))
    return name


def _draw_rows(rng: random.Random, writer: Writer, level: int) -> list[Arg]:
    """Residual rows and columns beside the products of a level."""
    found, sizes = [], (writer.n,)
    for name, role, share in (("r", "row", 0.5), ("s", "row", 0.15), ("b", "column", 0.4)):
        if rng.random() < share:
            of = (*FLOATS, *FLOATS, I32) if role == "row" else FLOATS
            dtype = rng.choice(of)
            kind = "integer" if dtype is I32 else rng.choice(("smooth", "smooth", "grid"))
            layout = _layout(rng) if role == "row" else ("plain",)
            a = Arg(f"{name}{level}", role, dtype, kind, layout, sizes=sizes)
            lo, hi, step = RANGES[kind]
            of = F64 if dtype in FLOATS else dtype
            writer.pool.append(V(a.name, ROW, of, lo, hi, step, varies=role == "row"))
            found.append(a)
    return found


def _draw_body(rng: random.Random, writer: ProductWriter, style: str, joined: V) -> list[V]:
    """What is computed of the elements; the rows that are made of the products."""
    before = len(writer.pool)
    writer.many(STATEMENTS if style == "any" else BODY, rng.choice((0, 1, 2, 4, 8, 12)))
    made = writer.made_of({joined.name})
    return [joined] + [
        v for v in writer.pool[before:]
        if v.name in made and v.shape == ROW and v.varies and v.floating and (v.wide or v.final)
    ]  # fmt: skip


def _some(rng: random.Random, rows: list[V], numbers: list[V], needs_row: bool) -> list[V]:
    """What is returned of a level: its last values rather."""
    numbers = numbers[-rng.choice((1, 2, 3)):]
    if needs_row or not numbers or rng.random() < 0.4:
        several = rng.choice(rows) if rng.random() < 0.3 else rows[-1]
        return list(dict.fromkeys([rows[-1], several])) + numbers
    return numbers


def _cast(writer: Writer, v: V, dtype) -> V:
    if not v.floating:
        return v
    made = replace(v, name=f"v{len(writer.lines)}", dtype=dtype)
    writer.lines.append((made.name, CASTS[dtype][0].format(v.name)))
    return made
