"""Random row functions of parts: slices, reshapes, joins and reductions over any axis.

`program(seed)` gives a function as Python text, and how it is called. Every statement is tried with
torch on tensors without memory, which give the shapes. `interpreted` evaluates a placed graph with
numpy, element by element of each view, and shares nothing with kernels or with the reference.
"""

from __future__ import annotations

import linecache
import math
import random
import re
from dataclasses import dataclass, replace

import numpy as np
import torch

import htile
from htile.frontend.graph import Graph, Role, View
from htile.frontend.ops import REDUCTIONS, SCANS, Op

ELEMENTS = {"small": 256, "all": 20000, "long": 1 << 18}  # of one value, at most


@dataclass(frozen=True)
class Program:
    """A function of rows x and y and a vector w, which all rows share, of these inner shapes.

    t: the shape of a table of which `i`, two integers of each row, choose rows; () for none.
    """

    seed: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    w: tuple[int, ...]
    lines: tuple[str, ...]
    returns: str
    dtype: torch.dtype
    t: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        kinds = [f": htile.Inner[{len(shape)}]" * (len(shape) > 1) for shape in (self.x, self.y)]
        body = "".join(f"    {line}\n" for line in (*self.lines, f"return {self.returns}"))
        more = ", t: htile.Shared, i: htile.Inner[1]" if self.t else ""
        return f"def parts{self.seed}(x{kinds[0]}, y{kinds[1]}, w{more}):\n{body}"

    def function(self) -> htile.Rowwise:
        file = f"parts_{self.seed}.py"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(True), file)
        names = {"torch": torch, "htile": htile}
        exec(compile(self.text, file, "exec", dont_inherit=True), names)
        return htile.rowwise(names[f"parts{self.seed}"])

    def arguments(self, device="cpu", lead=(3,), filled: bool = True) -> list[torch.Tensor]:
        """Values whose sums are exact in float32, in every order: multiples of 1/8 up to 2."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(*lead, *self.x), (*lead, *self.y), self.w, *([self.t] if self.t else [])]
        if not filled:
            made = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]
            return made + ([torch.empty((*lead, 2), device=device).long()] if self.t else [])
        drawn = [torch.randint(-16, 17, shape, generator=generator) for shape in shapes]
        made = [(each / 8).to(self.dtype).to(device) for each in drawn]
        if self.t:
            most = self.t[0] - 1
            made.append(torch.randint(-most, most, (*lead, 2), generator=generator).to(device))
        return made

    def __str__(self) -> str:
        return f"# x {self.x}, y {self.y}, w {self.w}, t {self.t}, {self.dtype}\n{self.text}"


def program(
    seed: int, sizes: str = "small", tables: bool = False, scans: bool = False
) -> Program:
    """The program of a seed.

    sizes: `small`, `all` with rows up to thousands of elements, or `long`, which loops work on.

    tables: whether it looks rows of a table up. scans: whether it has cumulative sums.
    """
    rng = random.Random(f"{'tables' if tables else 'scans' if scans else 'parts'} {sizes} {seed}")
    n = rng.choice((8, 12, 16, 24, 40, 48, 64))
    if sizes == "all":
        n = rng.choice((16, 48, 128, 192, 256, 768, 1000, 1024, 2048, 4096, 5120))
    if sizes == "long":
        n = rng.choice((16384, 20480, 40000))
    shapes = [(n,), (2 * n,), (n // 2,), (2, n), (3, n), (4, n // 4)]
    x, y = rng.choice(shapes[:2]), rng.choice(shapes)
    w = rng.choice([(n,), (n,), (n // 2,), (2 * n,)])
    t = rng.choice([(5, n), (5, n), (5, n // 2), (5, 2, n // 2), (4, 3, n)]) if tables else ()
    writer = _Writer(rng, {"x": x, "y": y, "w": w}, ELEMENTS[sizes], t, scans)
    wanted = rng.randint(4, 12)
    for _ in range(6 * wanted):
        if len(writer.lines) == wanted:
            break
        writer.statement()
    varying = [name for name in writer.shapes if name not in writer.shared]
    returned = [varying[-1], *rng.sample(varying, rng.randint(0, min(2, len(varying))))]
    returned = [f"{name} * 0.5" for name in dict.fromkeys(returned)]
    dtype = rng.choice((torch.float32, torch.bfloat16))
    return Program(seed, x, y, w, tuple(writer.lines), ", ".join(returned), dtype, t)


class _Writer:
    """Adds statements whose operands and results have the shapes that torch gives them."""

    def __init__(
        self,
        rng: random.Random,
        shapes: dict[str, tuple[int, ...]],
        most: int,
        t: tuple[int, ...],
        scans: bool,
    ):
        self.rng, self.most, self.t, self.scans = rng, most, t, scans
        self.shapes = dict(shapes)
        self.sizes = dict.fromkeys(shapes, 2.0)  # the largest magnitude of each value
        self.shared = {"w"}
        self.lines: list[str] = []

    def statement(self) -> None:
        names = list(self.shapes)
        a = self.rng.choice(names[-3:] + names)
        kinds = (
            self._slice, self._reshape, self._join, self._reduce, self._rank, self._arithmetic,
            self._move,
        )  # fmt: skip
        if self.t and self.rng.random() < 0.4:
            made = self._look_up()
        elif self.scans and self.rng.random() < 0.3:
            made = self._scan(a, self.shapes[a])
        else:
            made = self.rng.choices(kinds, (6, 6, 6, 6, 1, 10, 2))[0](a, self.shapes[a])
        if made is None:
            return
        text, size = made[0], made[2]
        operands = [b for b in made[1] if re.search(rf"\b{b}\b", text)]
        values = {n: torch.empty(self.shapes[n], device="meta") for n in operands}
        if self.t:
            values |= {"t": torch.empty(self.t), "i": torch.zeros(2, dtype=torch.int64)}
        try:
            shape = tuple(eval(text, {"torch": torch}, values).shape)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return
        if not 0 < math.prod(shape) <= self.most or size > 2**11 or len(shape) > 3:
            return
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.shapes[name], self.sizes[name] = shape, size
        if set(operands) <= self.shared and not re.search(r"\bi\b", text):
            self.shared.add(name)

    def _look_up(self):
        """Rows of the table, or of what a movement makes of it; and a row at a known number."""
        n, index = self.t[-1], self.rng.choice(("i[0]", "i[1]", "i[-1] // 2", "i"))
        last = "t.transpose(0, -1)[..., :2]" if len(self.t) == 2 else "t.transpose(0, 1)"
        text = self.rng.choice((
            f"t[{index}]", f"t[{index}]", f"t[{index}][..., {n // 2}:]", "t[i[0]][..., 0::2]",
            f"t[:, ..., {n // 4}:][i[0]]", f"t[1:][{index}]", "t[::2][i[1] % 2]",
            f"t[i[0], ..., :{n // 2}]", f"t.reshape({self.t[0]}, -1)[{index}]",
            f"{last}[i[0] % 2]", "t[i[0], ..., -1]", "t.unflatten(-1, (2, -1))[i[1]]", "t[1]",
            f"t[:3, ..., :{n // 2}].sum(0)",
        ))  # fmt: skip
        return text, (), 2.0 * self.t[0]

    def _slice(self, a, shape):
        if not shape:
            return None
        n = shape[-1]
        text = self.rng.choice((
            f"{a}[..., :{n // 2}]", f"{a}[..., {n // 2}:]", f"{a}[..., 0::2]", f"{a}[..., 1::2]",
            f"{a}[..., {n // 4}:{3 * n // 4}]", f"{a}[0]", f"{a}[..., -1]", f"{a}.chunk(2, -1)[1]",
            f"{a}.split({max(n // 4, 1)}, -1)[-1]", f"{a}[..., 1:]", f"{a}.select(0, 0)",
            f"{a}.narrow(-1, {n // 2}, {n - n // 2})",
            f"{a}.unbind(0)[-1]" if shape[0] <= 64 else f"{a}[:2]",
        ))  # fmt: skip
        return text, (a,), self.sizes[a]

    def _reshape(self, a, shape):
        size = math.prod(shape)
        parts = [k for k in (2, 3, 4, 8) if size % k == 0]
        if not parts:
            return f"{a}[..., None]", (a,), self.sizes[a]
        k = self.rng.choice(parts)
        text = self.rng.choice((
            f"{a}.reshape({k}, -1)", f"{a}.reshape(-1, {k})", f"{a}.flatten()", f"{a}[..., None]",
            f"{a}.unflatten(-1, (-1, 2))", f"{a}.reshape(2, -1, 2)", f"{a}.unsqueeze(0)",
            f"{a}.squeeze()",
        ))  # fmt: skip
        return text, (a,), self.sizes[a]

    def _join(self, a, shape):
        alike = [b for b, other in self.shapes.items() if len(other) == len(shape)]
        b = self.rng.choice(alike)
        axis = self.rng.choice((0, -1))
        text = self.rng.choice((
            f"torch.cat([{a}, {b}], {axis})", f"torch.cat([{a}, {b}, {a}], {axis})",
            f"torch.stack([{a}, {b}], {axis})", f"torch.stack(({a}, -{a}), -1).flatten(-2)",
            f"{a}.roll({self.rng.choice((1, 2, 4, 8))}, {axis})",
        ))  # fmt: skip
        return text, (a, b), max(self.sizes[a], self.sizes[b])

    def _reduce(self, a, shape):
        if not shape:
            return None
        axis = self.rng.randrange(-len(shape), len(shape))
        keep = self.rng.choice(("", ", keepdim=True"))
        over = self.rng.choice((str(axis), "-1", "0"))
        if self.rng.random() < 0.4:
            return f"{a}.{self.rng.choice(('amax', 'amin'))}({over}{keep})", (a,), self.sizes[a]
        if self.rng.random() < 0.2 and not keep:
            over = ""
        return f"{a}.sum({over}{keep})", (a,), self.sizes[a] * math.prod(shape)

    def _scan(self, a, shape):
        """Along any axis, also of what has no such axis yet; and an element or a part of it."""
        if not shape:
            return None
        axis = self.rng.randrange(-len(shape), len(shape))
        text = self.rng.choice((f"{a}.cumsum({axis})",) * 4 + (
            f"{a}.cumsum(-1)[..., -1]", f"{a}.cumsum(-1)[..., {shape[-1] // 2}:]",
            f"{a}.cumsum({axis})[0]", f"{a}[..., None].expand(*{a}.shape, 2).cumsum({axis})",
            f"{a}.sum({axis}, keepdim=True).expand({a}.shape).cumsum(-1)",
        ))  # fmt: skip
        size = self.sizes[a] * math.prod(shape) * 2
        return text, (a,), size

    def _rank(self, a, shape):
        if not shape:
            return None
        axis = self.rng.randrange(-len(shape), len(shape))
        k, largest = self.rng.randint(1, min(3, shape[axis])), self.rng.random() < 0.6
        text, size = self.rng.choice((
            (f"{a}.topk({k}, {axis}, {largest}).values", self.sizes[a]),
            (f"{a}.argmax({axis}).float()", shape[axis]),
            (f"{a}.argmin({axis}, keepdim=True).float()", shape[axis]),
            (f"{a}.max({axis}).indices.float()", shape[axis]),
        ))  # fmt: skip
        return text, (a,), size

    def _arithmetic(self, a, shape):
        b = self.rng.choice(list(self.shapes))
        sign = self.rng.choice("+-*")
        sizes = self.sizes[a], self.sizes[b]
        size = math.prod(sizes) if sign == "*" else sum(sizes)
        if sign == "*" and size > 64:
            return None
        return f"{a} {sign} {b}", (a, b), size

    def _move(self, a, shape):
        if len(shape) < 2:
            return None
        text = self.rng.choice((f"{a}.transpose(0, 1)", f"{a}.mT", f"{a}.movedim(0, -1)"))
        return text, (a,), self.sizes[a]


# What a placed graph means


def interpreted(placed: Graph, traced: Graph, named: dict, lead: tuple[int, ...]) -> list:
    """The results of a placed graph, as arrays of float64 in the order of the traced outputs."""
    rows, n = math.prod(lead), placed.n
    arrays = {}
    for name, value in named.items():
        array = (value if value.is_complex() else value.double()).numpy()  # keys are complex
        inner = next((i.view.shape for i in placed.inputs if i.name == name and i.view), None)
        if inner is None:
            inner = next(traced[i.id].value.inner for i in traced.inputs if i.name == name)
        shared = array.ndim == len(inner)
        whole = np.broadcast_to(array, (*lead, *inner)) if shared else array
        arrays[name] = whole.reshape((rows, *inner))
    values: dict[int, np.ndarray] = {}
    leaves = {i.id: i for i in placed.inputs}
    for node in placed:
        operands = [values[i] for i in node.inputs]
        if node.op is Op.INPUT:
            leaf = leaves[node.id]
            if leaf.role is Role.TABLE:
                found = _rows_of(leaf.view, arrays[leaf.name], n)
            elif leaf.view is None:
                found = arrays[leaf.name].reshape((rows, -1))
            else:  # a bundle has a third axis
                width = leaf.view.width
                each = [_elements(leaf.view, arrays[leaf.name], n, k) for k in range(width)]
                found = each[0].reshape((rows, -1)) if width == 1 else np.stack(each, -1)
        elif node.op is Op.INDEX:
            found = np.broadcast_to(np.arange(n), (rows, n))
        elif node.op is Op.KEY:  # numpy compares complex numbers by their real parts first
            element, index = operands
            found = element + (1j if node.arg else -1j) * index
        elif node.op is Op.KEY_INDEX:
            found = operands[0].imag * (1 if node.arg else -1)
        elif node.op is Op.CONST:
            found = np.full((rows, n if node.value.spread else 1), float(node.arg))
        elif node.op in REDUCTIONS:
            assert operands[0].shape[1] == n, "only rows are reduced"
            found = MEANT[node.op](operands[0], axis=1, keepdims=True)
        elif node.op is Op.GROUPED:
            (op, size), (operand,) = node.arg, operands
            found = MEANT[op](operand.reshape((rows, -1, size)), axis=2).repeat(size, 1)
        elif node.op in SCANS:
            assert operands[0].shape[1] == n or n == 1, "only rows are scanned"
            found = MEANT[node.op](np.broadcast_to(operands[0], (rows, n)), axis=1)
        elif node.op is Op.UNBUNDLE:
            found = operands[0][..., node.arg[0]]
        elif node.op is Op.BUNDLE:
            found = np.stack(np.broadcast_arrays(*operands), -1)
        elif node.op is Op.LOOKUP:
            table, index = operands[0], operands[1][:, 0].astype(int)
            place = np.where(index < 0, index + table.shape[1], index)
            found = table[np.arange(rows), place].reshape((rows, -1))
        elif node.op is Op.GATHER:
            row, index = operands
            place = np.clip(index, 0, row.shape[1] - 1).astype(int)
            found = np.take_along_axis(np.broadcast_to(row, (rows, row.shape[1])), place, 1)
        else:
            found = MEANT[node.op](*operands)
        is_table = node.op is Op.INPUT and leaves[node.id].role is Role.TABLE
        assert is_table or found.shape[1] == (n if node.value.spread else 1), node
        values[node.id] = found
    results = {out.name: np.full((rows, *out.inner), np.nan) for out in traced.outputs}
    for out in placed.outputs:
        target, value = results[out.name], values[out.id]
        if out.view is None:
            target[...] = value if out.is_row else value.reshape((rows, *out.inner))
        else:
            there = slice(*(out.view.there(n) or (0, n)))  # the columns that are stored
            for k in range(out.view.width):
                places = _places(out.view, n, k, there)
                assert np.isnan(target[places]).all(), "an element is written twice"
                each = value[..., k] if out.view.width > 1 else value
                if out.view.is_of_groups:
                    size = out.view.groups[0]
                    shape = rows, n // size, size
                    of_groups = np.broadcast_to(each, (rows, n)).reshape(shape)
                    first = np.broadcast_to(of_groups[..., :1], shape)
                    is_one = np.array_equal(of_groups, first, equal_nan=True)
                    assert is_one, "a group has several values"
                target[places] = each[:, 0] if out.view.steps is None else _part_of(each, there)
    return [each.reshape((*lead, *each.shape[1:])) for each in results.values()]


def _rows_of(view: View, array: np.ndarray, n: int) -> np.ndarray:
    """All rows of a table that an index may choose: (rows of the call, rows of the table, n)."""
    axis, step, count = view.at
    starts = [list(view.start) for _ in range(count)]
    for k, start in enumerate(starts):
        start[axis] += k * step
    return np.stack([array[_places(replace(view, start=tuple(s)), n)] for s in starts], 1)


def _elements(view: View, array: np.ndarray, n: int, k: int) -> np.ndarray:
    """The k-th element of each bundle of a piece; beside a row some number that shows if used."""
    if view.steps is None or view.groups is not None:
        return array[_places(view, n, k)]
    _, *places = _places(view, n, k)
    pairs = zip(places, view.shape, strict=True)
    is_there = np.all([(place >= 0) & (place < size) for place, size in pairs], 0)
    assert is_there.any(), "some column is one of the row"
    first, end = view.there(n) or (0, n)
    assert np.array_equal(np.flatnonzero(is_there), np.arange(first, end))
    found = np.full((len(array), n), 12345.0)
    found[:, is_there] = array[(slice(None), *(place[is_there] for place in places))]
    return found


def _part_of(row: np.ndarray, columns: slice) -> np.ndarray:
    """Some columns of what is one number for all of them, or one for each."""
    return row if row.shape[1] == 1 else row[:, columns]


def _places(view: View, n: int, k: int = 0, which: slice = slice(None)) -> tuple:
    """The k-th element of each bundle, of some of n columns."""
    if view.steps is None:
        return (slice(None), *view.start)
    starts, columns = (*view.start[:-1], view.start[-1] + k), np.arange(n)[which]
    size, far = view.groups or (n, (0,) * len(starts))
    return (slice(None), *(
        first + step * (columns % size) + jump * (columns // size)
        for first, step, jump in zip(starts, view.steps, far, strict=True)
    ))  # fmt: skip


def _mean(x: np.ndarray, **along) -> np.ndarray:
    """The mean, as exact as HTile's, and infinite where an element is."""
    first, rough = x[:, :1], np.mean(x, **along)
    return np.where(np.isfinite(rough), first + np.mean(x - first, **along), rough)


MEANT = {
    Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.NEG: np.negative,
    Op.FLOORDIV: np.floor_divide, Op.MOD: np.mod,
    Op.MAXIMUM: np.maximum, Op.MINIMUM: np.minimum, Op.SUM: np.sum, Op.CUMSUM: np.cumsum,
    Op.PROD: np.prod, Op.CUMPROD: np.cumprod,
    Op.SUM_FROM_END: lambda x, axis: np.flip(np.cumsum(np.flip(x, axis), axis), axis),
    Op.CUMMAX: np.maximum.accumulate, Op.CUMMIN: np.minimum.accumulate,
    Op.MAX_FROM_END: lambda x, axis: np.flip(np.maximum.accumulate(np.flip(x, axis), axis), axis),
    Op.MIN_FROM_END: lambda x, axis: np.flip(np.minimum.accumulate(np.flip(x, axis), axis), axis),
    Op.MAX: np.max, Op.MIN: np.min, Op.ANY: np.any, Op.ALL: np.all, Op.DIV: np.divide,
    Op.MEAN: _mean,
    Op.OR: np.logical_or, Op.EXP: np.exp, Op.LOG: np.log, Op.ABS: np.abs, Op.SQRT: np.sqrt,
    Op.LOG1P: np.log1p, Op.RSQRT: lambda x: 1 / np.sqrt(x), Op.LE: np.less_equal,
    Op.NE: np.not_equal, Op.KEY_VALUE: np.real, Op.LT: np.less, Op.GT: np.greater,
    Op.GE: np.greater_equal, Op.WHERE: np.where, Op.NOT: np.logical_not,
    Op.EQ: np.equal, Op.AND: lambda x, y: (x.astype(int) & y.astype(int)),
    Op.RSHIFT: lambda x, y: x.astype(int) >> y.astype(int),
    Op.CONVERT: lambda x: x.astype(float) if x.dtype == bool else x,
    Op.CAST: lambda x: x, Op.RESHAPE: lambda x: x, Op.POW: np.power, Op.SIGN: np.sign,
    Op.LOGCUMSUMEXP: np.logaddexp.accumulate,
    Op.LOGSUMEXP_FROM_END: lambda x, axis: (
        np.flip(np.logaddexp.accumulate(np.flip(x, axis), axis), axis)),
}  # fmt: skip
