"""Columns are numbered in int32 in kernels, and a comparison with a position is one instruction."""

from __future__ import annotations

import operator
import struct

import pytest
import torch

import htile
from benchmarks.instructions import of_element
from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from htile.lower.passes.narrow import ranges
from htile.lower.passes.rewrite import rewrite
from htile.lower.passes.simplify import narrow_indices
from htile.lower.patterns import Function
from tests.lower.cases import BF16, F32, kernel_of
from tests.primitives.device_code import ARCHS, sections

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
N = 4096
LOAD, STORE = 0x181, 0x186  # from and to global memory: the low 9 bits of an instruction


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def of(fn, n=N, dtype=F32, position=I64, **more):
    """The kernel of a function of a row and of a position in it."""
    return kernel_of(placed(fn), meta(64, n, dtype=dtype), meta(64, dtype=position), **more)


def placed(body):
    """As a function whose second argument is a position, one for each row."""

    def f(x, y: htile.PerRow):
        return body(x, y)

    return f


def dtypes(graph, op):
    return [node.value.dtype for node in graph if node.op is op]


def spread_int64(graph):
    """What is computed in int64 for each element."""
    return [n for n in graph if n.value.spread and n.value.dtype is I64 and n.op is not Op.INPUT]


def columns(x):
    return torch.arange(x.shape[-1])


NARROW = {
    "a position": lambda x, y: torch.where(columns(x) <= y, x, 0.0),
    "a position before": lambda x, y: torch.where(y < columns(x), x, 0.0),
    "an offset": lambda x, y: torch.where(columns(x) + 5 > y + 3, x, 0.0),
    "a number": lambda x, y: torch.where(columns(x) < 100, x, 0.0),
    "a number beyond int32": lambda x, y: torch.where(columns(x) < 2**40, x, 0.0),
    "two columns": lambda x, y: torch.where(columns(x) % 2 == columns(x) // 7, x, 0.0),
    "blocks": lambda x, y: torch.where(columns(x) // 128 == y // 128, x, 0.0),
    "backwards": lambda x, y: torch.where(torch.arange(x.shape[-1], 0, -1) == y, x, 0.0),
    "the nearer end": lambda x, y: torch.where(
        torch.minimum(columns(x), x.shape[-1] - 1 - columns(x)) <= y, x, 0.0),
    "the farther end": lambda x, y: torch.where(
        torch.maximum(columns(x), x.shape[-1] - 1 - columns(x)) <= y, x, 0.0),
    "never the other": lambda x, y: torch.where(
        torch.maximum(columns(x) + x.shape[-1], columns(x)) - x.shape[-1] <= y, x, 0.0),
    "always a number": lambda x, y: torch.where(
        x.argmax().clamp(min=x.shape[-1]) > y, x, columns(x).clamp(max=-1)),
    "clamped": lambda x, y: torch.where(columns(x).clamp(3, 9) != y, x, 0.0),
    "a float": lambda x, y: x * columns(x),
    "a float64 position": lambda x, y: x * (columns(x) * 2 + 1).float(),
    "16 bits": lambda x, y: x * columns(x).to(BF16).float(),
    "int32": lambda x, y: x * columns(x).int(),
    "a position in int32": lambda x, y: torch.where(columns(x).int() * 2 >= y.int(), x, 0.0),
    "arange of int32": lambda x, y: torch.where(
        torch.arange(x.shape[-1], dtype=I32) == y.clamp(-9, 999).int(), x, 0.0),
    "there and back": lambda x, y: torch.where(columns(x).int().long() < y, x, 0.0),
    "one hot": lambda x, y: x * torch.nn.functional.one_hot(y, x.shape[-1]).float(),
}
# Masks as int64, which are added up, and columns that are.
COUNTS = {
    "a count": lambda x, y: x * (x > y).sum(),
    "a returned count": lambda x, y: (x > y).sum(),
    "a sum of columns": lambda x, y: x * columns(x).sum(),
    "a running count": lambda x, y: torch.where((x > 0).cumsum(-1) <= y, x, 0.0),
    "a returned running count": lambda x, y: (x > y).cumsum(-1),
    "a running count from the end": lambda x, y: x * (x > 0).flip(-1).cumsum(-1).flip(-1),
    "of two masks": lambda x, y: x * ((x > y).long() + (x < 0).long()).sum(),
    "a share": lambda x, y: (x > y).sum() / x.shape[-1],
}
WIDE = {
    "a distance": lambda x, y: x * (columns(x) - y),
    "a sum beyond int32": lambda x, y: x * (columns(x) * 2**20).sum(),
    "a running sum beyond int32": lambda x, y: x * (columns(x) * 2**20).cumsum(-1),
    "a product beyond int32": lambda x, y: torch.where(columns(x) * 2**30 > y, x, 0.0),
    "beside a row of int64": lambda x, y: x + (columns(x) == x.long()),
    "a choice": lambda x, y: x * torch.where(x > 0, columns(x), y),
}


@pytest.mark.parametrize("name", NARROW)
def test_no_element_is_computed_in_int64(name):
    graph = of(NARROW[name]).graph
    left = [n for n in spread_int64(graph) if name != "one hot" or n.op is not Op.CONVERT]
    assert not left and dtypes(graph, Op.INDEX) == [I32]


@pytest.mark.parametrize("name", WIDE)
def test_what_may_not_fit_stays_in_int64(name):
    assert spread_int64(of(WIDE[name]).graph)


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_counted_is_added_up_in_int32(name):
    graph = of(COUNTS[name]).graph
    assert not [n for n in spread_int64(graph) if n.op is not Op.CONVERT]
    sums = [node for node in graph if node.op in (Op.SUM, Op.CUMSUM, Op.SUM_FROM_END)]
    assert any(node.value.dtype is I32 for node in sums)
    assert not any(node.value.dtype is I64 for node in sums)


@pytest.mark.parametrize("n", [1, 7, 128])
@pytest.mark.parametrize("name", [*NARROW, *COUNTS, *WIDE])
def test_a_narrow_graph_computes_what_torch_does(name, n):
    """Of positions in the row, at its ends and far beyond."""
    body = (NARROW | COUNTS | WIDE)[name]
    inside = name in ("an element", "one hot")
    y = torch.tensor([0, n - 1, n // 2] + [n, -1, 10**12, -(10**12), 64, 2**31, 3] * (not inside))
    x = torch.arange(len(y) * n).view(-1, n) % 19 - 9.0
    graph = kernel_of(placed(body), x, y).graph
    expected = torch.stack([body(row, k) for row, k in zip(x, y, strict=True)])
    assert torch.equal(evaluate(graph, {"x": x, "y": y}, (len(y),)), expected)


def test_the_limits_of_int32():
    """A range that ends where int32 does is left in int64, since one number more must fit."""
    for shift, fits in ((2**31 - 2 - 9, True), (2**31 - 1 - 9, False), (-(2**31) + 1, True),
                        (-(2**31), False)):  # fmt: skip

        def f(x, y: htile.PerRow, shift: htile.Static):
            return torch.where(columns(x) + shift > y, x, 0.0)

        graph = kernel_of(f, meta(64, 10), meta(64, dtype=I64), shift).graph
        assert (not spread_int64(graph)) == fits, shift


def test_ranges_are_those_of_the_values():
    """Every value of each range's node lies in it, and its ends occur where nothing divides."""

    @htile.rowwise
    def f(x):
        c = columns(x)
        made = c * -3 + 2, 7 - c, -c, c // 3, c % 5, c.clamp(2, 6), (c - 4) // 3 * 2, (c - 4) % 3
        return tuple(x + k for k in made)

    x = torch.zeros(1, 10, dtype=I64)
    graph = f.inspect(x, arch="sm_90a").lowered.traced
    found = ranges(graph)
    results = dict(zip((o.id for o in graph.outputs), f(x), strict=True))
    for id, result in results.items():
        (made,) = (i for i in graph[id].inputs if i in found)
        low, high = found[made]
        assert low <= result.min() and result.max() <= high
        assert (low, high) == (result.min(), result.max()) or high - low <= 10


def test_a_graph_without_an_index_stays_as_it_is():
    graph = of(lambda x, y: torch.where(x > y, x, (x.long() + y).float())).graph
    assert list(narrow_indices(graph)) == list(graph)


def test_a_second_round_changes_nothing():
    for body in (*NARROW.values(), *WIDE.values()):
        graph = of(body).graph
        assert list(narrow_indices(graph)) == list(rewrite(graph))


# ---- the text and the machine code --------------------------------------------------------------

COMPARISONS = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_column_comes_first(name):
    compare = COMPARISONS[name]
    mirrored = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(name, name)
    for body, expected in (
        (lambda x, y: torch.where(compare(columns(x), y), x, 0.0), name),
        (lambda x, y: torch.where(compare(y, columns(x)), x, 0.0), mirrored),
    ):
        kernel = of(body)
        assert f"math.{expected}(ctx.offsets, ctx.offset_of(" in kernel.source
        assert "ctx.cols" not in kernel.source and "math.convert(ctx" not in kernel.source
        assert Function.COLUMNS in {getattr(s, "function", None) for s in kernel.plan.steps}


def test_a_loop_asks_its_chunk():
    source = of(lambda x, y: torch.where(columns(x) <= y, x, 0.0).softmax(-1), n=1 << 20).source
    assert source.count("math.le(chunk.offsets, chunk.offset_of(") >= 2
    assert "ctx.offsets" not in source and "ctx.cols" not in source
    wide = of(lambda x, y: (x * columns(x)).softmax(-1), n=1 << 20).source
    assert "chunk.cols" in wide and "ctx.cols" not in wide


@pytest.mark.parametrize(
    ("name", "arch"), [("eq", "sm_80"), ("eq", "sm_90a"), ("le", "sm_90a"), ("lt", "sm_100a")]
)
def test_a_comparison_is_one_instruction_for_an_element(name, arch):
    """Beside the select: as many as a comparison of the element itself with a float takes."""
    compare = COMPARISONS[name]

    def of_the_column(x, w):
        y = (w.max() * 7).long()  # one for the whole row, whatever it is
        return torch.where(compare(columns(x), y), x, 1.0)

    def of_the_element(x, w):
        y = (w.max() * 7).long().float()
        return torch.where(compare(x, y), x, 1.0)

    counts = [of_element(f, 2, arch)[0] for f in (of_the_column, of_the_element)]
    assert counts[0] <= counts[1] + 0.3, counts


def test_ptx_has_one_comparison_for_an_element():
    """And no 64-bit one, nor an addition for the column."""
    kernel = of(lambda x, y: torch.where(columns(x) == y, x, 0.0))
    share = kernel.plan.elements_per_thread
    compared = [line.split()[0] for line in kernel.ptx.splitlines() if "setp.eq" in line]
    assert compared == ["setp.eq.b32"] * share or compared == ["setp.eq.s32"] * share, compared


def test_what_lies_beyond_a_number_is_not_even_loaded():
    plan = {"threads_per_row": 256, "num_threads": 256, "loader": "direct"}
    loads = []
    for body in (
        lambda x, y: torch.where(columns(x) < 100, x, 0.0),
        lambda x, y: torch.where(x < 100, x, 0.0),
    ):
        f = htile.rowwise(placed(body)).with_plan(**plan)
        kernel = f.inspect(meta(64, N), meta(64, dtype=I64), arch="sm_90a")
        code = b"".join(c for name, c in sections(kernel.cubin) if name.startswith(b".text"))
        operations = [word & 0x1FF for word in struct.unpack(f"<{len(code) // 8}Q", code)[::2]]
        loads.append(operations.count(LOAD))
        assert operations.count(STORE) == 4
    assert loads == [1, 4]


def causal(x, y, w):
    z = torch.where(columns(x) <= y, x, -torch.inf)
    return z.softmax(-1) * w, x[y], w[y] * x


def losses(x, y, w):
    label = y.long()
    loss = torch.nn.functional.cross_entropy(x, label, w, label_smoothing=0.1, reduction="sum")
    return loss, torch.nn.functional.one_hot(label, x.shape[-1]) * x


def arithmetic(x, y, w):
    c = columns(x)
    return x * (c - y), torch.where(c % 3 == 1, x, w), (c * x).sum(), (c <= y) & (x > 0)


SHAPES = {"held": 4096, "held, odd": 1003, "one": 1, "looped": 1 << 20, "looped, odd": 300001}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("body", [causal, losses, arithmetic])
def test_it_compiles_without_a_stack(body, n, arch):
    dtype, position = ((BF16, I64), (F32, I32))[ARCHS.index(arch) % 2]

    def f(x, y: htile.PerRow, w):
        return body(x, y, w)

    arguments = meta(64, n, dtype=dtype), meta(64, dtype=position), meta(n, dtype=dtype)
    kernel = kernel_of(f, *arguments, arch=arch)
    assert kernel.plan.numerics.in_loops == (n > 100000)
    assert kernel.resources.stack == 0


@pytest.mark.parametrize("dtype", [I32, I64, BOOL], ids=str)
def test_elements_of_integers_compile(dtype):
    for n in (1003, 1 << 20):
        assert of(lambda x, y: x[y], n, dtype).resources.stack == 0


def chosen(x, k):
    """The elements of another row at the places of the k largest, which are in the row."""
    return torch.exp(x).gather(-1, x.topk(k).indices)


KNOWN = {
    "gather": lambda x: chosen(x, 3),
    "an index": lambda x: (x * 2)[x.argmax()],
    "an index that counts back": lambda x: (x * 2)[x.argmin() - N],
    "of a part": lambda x: (x * 2)[x[:2048].argmax() + 7],
    "a comparison": lambda x: torch.where(x.argmax() < N, x.sum(), 0.0),
}


@pytest.mark.parametrize("f", KNOWN.values(), ids=KNOWN)
def test_what_a_rank_has_for_an_index_is_in_the_row(f):
    """So nothing checks it, and nothing is put in the place of what would be beyond the row."""
    kernel = kernel_of(f, meta(64, N))
    ops = {node.op for node in kernel.graph if not node.value.spread}
    assert not {Op.GE, Op.LT, Op.AND, Op.WHERE, Op.MAXIMUM, Op.MINIMUM} & ops
    assert I64 not in dtypes(kernel.graph, Op.CONVERT)


def test_an_index_that_may_be_beyond_the_row_is_checked():
    for f in (lambda x: x[x.argmax() + 1], lambda x, y: x[torch.maximum(x.argmax(), y)]):
        kernel = kernel_of(f, meta(64, N)) if f.__code__.co_argcount == 1 else of(f)
        assert {Op.LT, Op.WHERE} <= {node.op for node in kernel.graph if not node.value.spread}


def test_masks_that_are_added_are_counted_in_32_bits():
    def f(x, y):
        masks = torch.stack([x > k for k in range(5)])
        return x * masks.sum(0), y * (masks.sum(0) // 2)

    kernel = kernel_of(f, meta(64, N), meta(64, N))
    assert I64 not in dtypes(kernel.graph, Op.CONVERT) and I64 not in dtypes(kernel.graph, Op.ADD)
    x, y = torch.randn(2, 3, 50)
    count = sum((x > k).double() for k in range(5))
    found = htile.rowwise(f)(x, y)
    torch.testing.assert_close(found[0].double(), x.double() * count)
    torch.testing.assert_close(found[1].double(), y.double() * (count // 2))
