"""Indices in a row: torch's factories, masks of the column's number, and the element at an index.

Results are held against torch, row by row where an index beyond the end makes torch raise, and
against the oracle otherwise.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, ShapeError, UnsupportedError
from htile.frontend.ops import Op
from htile.testing import assert_close, oracle

INF, NAN = math.inf, math.nan
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
LENGTHS = (1, 2, 7, 64, 1003)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(result, expected):
    """Equal, of one dtype, with the same zeros."""
    assert result.dtype is expected.dtype and result.shape == expected.shape
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    if result.is_floating_point():
        zero = expected == 0
        assert torch.equal(result[zero].signbit(), expected[zero].signbit()), "the sign of a zero"


# ---- lists of places ----------------------------------------------------------------------------

LISTED = {
    "two": lambda x: x[[0, 2]], "back": lambda x: x[[-1, 3, 3]], "one": lambda x: x[[5]],
    "behind an ellipsis": lambda x: x[..., [1, 0]], "rows": lambda x: x.view(2, 4)[[1, 0, 1]],
    "a copy": lambda x: (x[[0, 1]].add_(1), x), "of a mask": lambda x: (x > 0)[[0, 2]],
    "columns": lambda x: x.view(2, 4).movedim(1, 0)[[1, 0]].movedim(0, 1),
    "of the last axis": lambda x: x.view(2, 4)[..., [0, 1]],
    "of the second axis": lambda x: x.view(2, 2, 2)[:, [1, -1, 0]],
    "of the first axis": lambda x: x.view(4, 2)[[0, 3], :],
    "beside a number": lambda x: (x.view(2, 2, 2)[1, [0, 1]], x.view(2, 2, 2)[:, [0, 1], 1]),
    "behind a number": lambda x: x.view(2, 2, 2)[-1, ..., [1, 0]],
    "beside a slice": lambda x: (x.view(2, 4)[[1, 1], 1:3], x.view(2, 4)[:1, [3, 0]]),
    "beside a new axis": lambda x: (x.view(2, 4)[None, [1]], x.view(2, 4)[[0, 1], None]),
    "of two axes": lambda x: x.view(2, 4)[[0, 1, 1], [2, 0, 3]],
    "of two axes, one place": lambda x: x.view(2, 4)[[1], [2, 0, 3]],
    "of two axes apart": lambda x: x.view(2, 2, 2)[[0, 1, 0], :, [1, 1, 0]],
    "of neighbours at the end": lambda x: x.view(2, 2, 2)[..., [0, 1], [1, 1]],
    "a new axis between": lambda x: x.view(2, 4)[[0, 1], None, [1, 1]],
    "of a triangle": lambda x: x[:4].view(2, 2)[tuple(torch.tril_indices(2, 2))],
    "of two tensors": lambda x: (lambda i, j: x.view(2, 4)[i, j])(*torch.triu_indices(2, 4)),
    "of a number": lambda x: (x[torch.tril_indices(3, 3)[0][2]], x[:4]),
    "of a diagonal": lambda x: x.view(2, 4)[torch.arange(2), torch.arange(2)],
    "of a tensor of numbers": lambda x: (x[torch.tensor([3, -1])], x[torch.tensor(2)]),
    "of rows": lambda x: x.view(4, 2)[torch.tensor([3, 1])],
    "of columns": lambda x: x.view(2, 4)[:, torch.tensor([2, 0, 2])],
    "of one tensor": lambda x: x[torch.tril_indices(3, 3)[1]],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", LISTED)
def test_a_list_of_places(name):
    x = random(3, 8)
    f = htile.rowwise(LISTED[name])
    found, expected = f(x), [LISTED[name](row.clone()) for row in x]
    if not isinstance(found, tuple):
        found, expected = (found,), [(each,) for each in expected]
    for mine, theirs in zip(found, zip(*expected, strict=True), strict=True):
        exact(mine, torch.stack(theirs))


def test_lists_of_places_compile():
    x = torch.empty(2, 64, device="meta")
    for f in (
        lambda x: x.view(4, 16)[:, [1, 0]] * x.sum(), lambda x: x.view(4, 16)[[0, 3], [5, 6]],
        lambda x: x.view(4, 16)[..., [2], :] * x.sum(),
    ):  # fmt: skip
        assert not htile.rowwise(f).inspect(x, arch="sm_90a").resources.stack


def test_a_list_of_rows_of_a_table():
    x, table = random(3, 8), random(4, 8, seed=1)

    def f(x, table: htile.Shared):
        return x + table[[0, 2]].sum(0)

    exact(htile.rowwise(f)(x, table), x + (table[0] + table[2]))


def test_take():
    """Of a matrix as one row, in the shape of the index."""
    x, y = random(3, 12), torch.tensor([[0, -1, 5], [-12, 11, 3], [7, 7, -7]])

    @htile.rowwise
    def f(x, y: htile.Inner[1]):
        return torch.take(x, y), x.view(3, 4).take(y), x.take(y[0]), (x > 0).take(y.view(3, 1))

    each = zip(*(f._fn(a, b) for a, b in zip(x, y, strict=True)), strict=True)
    for found, expected in zip(f(x, y), each, strict=True):
        exact(found, torch.stack(expected))
    with pytest.raises(DtypeError, match="take takes indices of int64"):
        htile.rowwise(lambda x: x.take(x.argmax().int()))(x)


# ---- windows and powers at equal distances ------------------------------------------------------

WINDOWS = {
    "hann": lambda n: torch.hann_window(n),
    "hann, symmetric": lambda n: torch.hann_window(n, False),
    "hamming": lambda n: torch.hamming_window(n, periodic=True),
    "hamming of own numbers": lambda n: torch.hamming_window(n, False, 0.6, beta=0.4),
    "blackman": lambda n: torch.blackman_window(n, periodic=False),
    "bartlett": lambda n: torch.bartlett_window(n),
    "logspace": lambda n: torch.logspace(-2, 3, n),
    "logspace of a base": lambda n: torch.logspace(start=0.5, end=-1, steps=n, base=2),
}


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1003])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_powers(name, n):
    make = WINDOWS[name]
    x, expected = torch.zeros(2, n), make(n)
    dtype = expected.dtype
    found = htile.rowwise(lambda x: make(x.shape[-1]) + (x * 0).to(dtype))(x)
    torch.testing.assert_close(found, expected.expand(2, n), rtol=1e-5, atol=1e-6)


def test_windows_in_16_bits_are_rounded_once():
    found = htile.rowwise(lambda x: torch.hann_window(64, dtype=F16) + x)(torch.zeros(2, 64).half())
    assert torch.equal(found[0], torch.hann_window(64).half())


@pytest.mark.parametrize("name", ["hann", "hamming", "blackman", "bartlett"])
def test_windows_that_torch_refuses(name):
    make = getattr(torch, f"{name}_window")
    of_integers, of_fewer = (lambda n: make(n, dtype=I32)), (lambda n: make(-n))
    for error, call in ((DtypeError, of_integers), (ShapeError, of_fewer)):
        with pytest.raises(RuntimeError):
            call(8)
        with pytest.raises(error, match=f"torch.{make.__name__}"):
            htile.rowwise(lambda x: x * call(8))(torch.ones(2, 8))  # noqa: B023


EMPTY = {
    "a window": lambda x: torch.cat((x, torch.hann_window(0))),
    "zeros": lambda x: torch.cat((torch.zeros(0), x, x[:0])),
    "numbers": lambda x: torch.cat((torch.arange(0), x.long())),
    "of axes": lambda x: torch.cat((x.view(2, 4), torch.ones(0, 4))),
}


@pytest.mark.parametrize("name", EMPTY)
def test_what_has_no_elements_is_left_out_of_a_join(name):
    x = random(2, 8)
    exact(htile.rowwise(EMPTY[name])(x), torch.stack([EMPTY[name](row) for row in x]))


@pytest.mark.parametrize("use", [
    lambda x: torch.ones(0), lambda x: x * torch.hann_window(0), lambda x: x + torch.arange(0),
    lambda x: (x, torch.zeros(2, 0)), lambda x: torch.cat((x.view(2, 4), torch.ones(0, 5))),
    lambda x: torch.cat((x, torch.arange(0))),
])  # fmt: skip
def test_what_has_no_elements_is_refused_elsewhere(use):
    with pytest.raises((ShapeError, DtypeError), match=r"without elements|cat of shapes"):
        htile.rowwise(use)(random(2, 8))


@pytest.mark.parametrize("make", [torch.hann_window, lambda n: torch.logspace(0, 1, n)])
def test_windows_beside_rows_of_any_length_are_refused(make):
    for n in (64, 3):
        with pytest.raises(UnsupportedError, match="dynamic_n=True"):
            htile.rowwise(lambda x: x * make(n), dynamic_n=True)(torch.ones(2, 64))  # noqa: B023


# ---- factories ----------------------------------------------------------------------------------

FACTORIES = {
    "arange": lambda x, n: torch.arange(n),
    "arange, end": lambda x, n: torch.arange(end=n),
    "arange from": lambda x, n: torch.arange(3, n + 3),
    "arange by": lambda x, n: torch.arange(0, 4 * n, 4),
    "arange back": lambda x, n: torch.arange(n, 0, -1),
    "arange, keywords": lambda x, n: torch.arange(start=-n, end=n, step=2),
    "arange, more than int32": lambda x, n: torch.arange(2**40, 2**40 + n),
    "arange of int32": lambda x, n: torch.arange(n, dtype=I32),
    "arange of int32, by": lambda x, n: torch.arange(1, 2 * n, 2, dtype=I32),
    "arange of float32": lambda x, n: torch.arange(n, dtype=F32),
    "arange of bfloat16": lambda x, n: torch.arange(n, dtype=BF16),
    "arange of floats": lambda x, n: torch.arange(0.0, 0.5 * n, 0.5),
    "arange to a float": lambda x, n: torch.arange(float(n)),
    "arange of truncated floats": lambda x, n: torch.arange(1.5, 1.5 + n, dtype=I64),
    "zeros": lambda x, n: torch.zeros(n),
    "zeros, tuple": lambda x, n: torch.zeros((n,)),
    "zeros, shape": lambda x, n: torch.zeros(x.shape, dtype=I32),
    "zeros, size": lambda x, n: torch.zeros(size=[n]),
    "ones": lambda x, n: torch.ones(n, dtype=F16),
    "ones, mask": lambda x, n: torch.ones(n, dtype=BOOL),
    "full": lambda x, n: torch.full((n,), -INF),
    "full of integers": lambda x, n: torch.full((n,), 7),
    "full of masks": lambda x, n: torch.full((n,), True),
    "full, rounded": lambda x, n: torch.full((n,), 0.1, dtype=BF16),
    "full, keywords": lambda x, n: torch.full(size=(n,), fill_value=-0.0),
    "tensor": lambda x, n: torch.tensor(2.5) + torch.zeros(n),
    "tensor of an integer": lambda x, n: torch.tensor(n) + torch.arange(n),
    "tensor, rounded": lambda x, n: torch.tensor(0.1, dtype=BF16) + torch.zeros(n),
    "tensor of a mask": lambda x, n: torch.tensor(True) & torch.ones(n, dtype=BOOL),
    "zeros of one": lambda x, n: torch.zeros(1) + torch.arange(n),
    "zeros of no dimension": lambda x, n: torch.zeros(()) + torch.arange(n),
    "arithmetic": lambda x, n: (torch.arange(n) * 3 + 1) // 2 % 5,
    "a mask": lambda x, n: torch.arange(n) % 2 == 0,
    "in place": lambda x, n: torch.zeros(n).add(1),
}


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_gives_what_torchs_does(name, n):
    """And in its dtype; the row only makes the result depend on one."""
    make = FACTORIES[name]
    f = htile.rowwise(lambda x: torch.where(x == x, make(x, x.shape[-1]), torch.zeros_like(
        make(x, x.shape[-1]))))  # fmt: skip
    x = torch.zeros(3, n, dtype=I32)
    exact(f(x), make(x[0], n).expand(3, n).contiguous())


PROMOTED = {
    "a row": lambda x, n: x * torch.ones(n),
    "a number": lambda x, n: x * torch.tensor(2.0),
    "integers": lambda x, n: x + torch.arange(n),
    "a declared row": lambda x, n: x.to(BF16) + torch.zeros(n, dtype=F16),
    "one value": lambda x, n: torch.where(x > 0, x, torch.full((), -1.0)),
}


@pytest.mark.parametrize("dtype", (BF16, F16, F32), ids=str)
@pytest.mark.parametrize("name", PROMOTED)
def test_promotion_is_torchs(name, dtype):
    body, x = PROMOTED[name], random(3, 8).to(dtype)
    f = htile.rowwise(lambda x: body(x, x.shape[-1]))
    expected = torch.stack([body(row, 8) for row in x])
    assert f(x).dtype is expected.dtype
    torch.testing.assert_close(f(x), expected, rtol=1e-2, atol=1e-2)


def test_other_lengths_and_shapes():
    @htile.rowwise
    def f(x):
        n = x.shape[-1]
        made = torch.arange(2 * n)[n:], torch.ones(2, n)[0], torch.full((n - 1,), 2.0).sum()
        table = torch.tensor([3, 1, 2])
        return x * sum(made) + torch.arange(n // 2).sum() - table[0] * table.sum(), x[:3] * table

    x = random(2, 6)
    scaled, tabled = f(x)
    exact(scaled, x * (torch.arange(6, 12) + 1 + 10) + 3 - 18)
    exact(tabled, x[:, :3] * torch.tensor([3, 1, 2]))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_constant_is_rounded_to_the_dtype_that_is_asked_for(dtype):
    """0.1 of 16 bits is another number than 0.1, and shows in float32."""

    @htile.rowwise
    def f(x):
        return x * torch.full_like(x, 0.1, dtype=dtype).float(), x * torch.full(
            x.shape, 0.1, dtype=dtype
        ).float()

    x = random(3, 5)
    expected = x * torch.tensor(0.1, dtype=dtype).float()
    assert not torch.equal(expected, x * 0.1)
    for found in f(x):
        exact(found, expected)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_changes_nothing(default):
    """A float that no dtype is given for is float32."""
    f = htile.rowwise(lambda x: x * torch.full((x.shape[-1],), 0.1) + torch.tensor(0.5))
    x, expected = random(2, 6), f(random(2, 6))
    torch.set_default_dtype(default)
    try:
        again = htile.rowwise(f._fn)(x)
    finally:
        torch.set_default_dtype(F32)
    exact(again, expected)


def test_the_default_device_changes_nothing():
    f = htile.rowwise(lambda x: x * torch.full((x.shape[-1],), 0.1) + torch.arange(x.shape[-1]))
    x = random(2, 6)
    with torch.device("meta"):
        again = htile.rowwise(f._fn)(x)
    exact(again, f(x))


def test_factories_of_another_function_are_left_alone():
    """While one is traced, and after it."""
    htile.rowwise(lambda x: x + torch.zeros(x.shape[-1]))(random(2, 6))
    assert type(torch.zeros(6)) is torch.Tensor and type(torch.arange(6)) is torch.Tensor


def test_a_function_inside_another_has_the_same_row():
    inner = htile.rowwise(lambda x, y: torch.where(torch.arange(x.shape[-1]) < 2, x, y))
    f = htile.rowwise(lambda x: inner(x, torch.zeros(x.shape[-1])))
    x = random(3, 5)
    exact(f(x), torch.where(torch.arange(5) < 2, x, 0.0))


# ---- masks of the column's number ---------------------------------------------------------------

POSITIONS = (0, 1, -1, -5, 3, 6, 7, 8, 10**9, -(10**9), 2**31 - 1, -(2**31))
BEYOND = (2**31, -(2**31) - 1, 2**40, -(2**40), 2**63 - 1, -(2**63))
COMPARED = {
    "eq": (torch.eq, lambda c, y: c == y), "ne": (torch.ne, lambda c, y: c != y),
    "lt": (torch.lt, lambda c, y: c < y), "le": (torch.le, lambda c, y: c <= y),
    "gt": (torch.gt, lambda c, y: c > y), "ge": (torch.ge, lambda c, y: c >= y),
}  # fmt: skip


def kernels_graph(f, args, lead):
    """What the graph of the kernel gives, which has int32 where the trace has int64."""
    from htile.frontend.reference import evaluate

    graph = f.inspect(*args, arch="sm_90a").graph
    return evaluate(graph, dict(zip(f._signature.names, args, strict=True)), lead)


@pytest.mark.parametrize("dtype", (I32, I64), ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_with_any_integer_of_a_row(name, dtype):
    torchs, own = COMPARED[name]
    y = torch.tensor([*POSITIONS, *(BEYOND if dtype is I64 else ())], dtype=dtype)
    x = torch.ones(len(y), 7, dtype=BOOL)

    @htile.rowwise
    def f(x, y: htile.PerRow):
        c = torch.arange(x.shape[-1])
        return x & own(c, y), x & own(y, c), x & own(c * 3 - 2, y)

    c, wide = torch.arange(7), y.long()[:, None]
    expected = torchs(c, wide), torchs(wide, c), torchs(c * 3 - 2, wide)
    for results in (f(x, y), kernels_graph(f, (x, y), (len(y),))):
        for got, want in zip(results, expected, strict=True):
            exact(got, want)


def test_bytes_are_masks_in_torch():
    """So they are no index, and the message says how to write either one."""
    x, byte = random(3, 8), torch.ones(3, 8, dtype=torch.uint8)

    @htile.rowwise
    def one(x, y: htile.PerRow):
        return x[y]

    told = "by uint8, which torch takes for a mask: write y.long"
    for f, y in ((one, byte[:, 0]), (htile.rowwise(lambda x, y: x[y]), byte)):
        with pytest.raises(DtypeError, match=told):
            f(x, y)
    with pytest.raises(DtypeError, match="gather by uint8: an index is an integer"):
        htile.rowwise(lambda x, y: x.gather(-1, y))(x, byte)


@pytest.mark.parametrize("n", LENGTHS)
def test_masks(n):
    q, length = torch.arange(9) * 5 % n, torch.tensor([0, 1, n, n + 1, -3, n // 2, 2, 3, 4])

    @htile.rowwise
    def f(x, q: htile.PerRow, length: htile.PerRow):
        c = torch.arange(x.shape[-1])
        causal, padded = c <= q, c < length
        return (
            torch.where(causal, x, -INF).softmax(-1), torch.where(padded, x, 0.0).sum(),
            x.masked_fill(c > q + 2, 0.0), (causal & padded).sum(), torch.where(c == q, 1, c),
            x * (c - q), (x * c).sum() / n, torch.where(c.float() < 0.5 * n, x, -x), c * x.int(),
        )  # fmt: skip

    x = random(9, n)
    assert_close(f, f(x, q, length), x, q, length)
    assert_close(f, kernels_graph(f, (x, q, length), (9,)), x, q, length)


# ---- the element at an index --------------------------------------------------------------------


def places(n):
    return sorted({0, n - 1, n // 2, -1, -n, min(3, n - 1)})


@pytest.mark.parametrize("index", (I32, I64), ids=str)
@pytest.mark.parametrize("dtype", (F32, BF16, F16, I32, I64, BOOL), ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_the_element_at_an_index(n, dtype, index):
    y = torch.tensor(places(n), dtype=index)
    x = random(len(y), n).mul(50)
    x = x > 0 if dtype is BOOL else x.to(dtype)

    @htile.rowwise
    def f(x, y: htile.PerRow):
        return x[y], x[..., y], x[y[..., None]], x[y, ...]

    wide = {BF16: F32, F16: F32}.get(dtype, dtype)  # a value a row of an argument is float32
    expected = torch.stack([row[k] for row, k in zip(x, y, strict=True)]).to(wide)
    for results in (f(x, y), kernels_graph(f, (x, y), y.shape)):
        for k, got in enumerate(results):
            exact(got, expected[:, None] if k == 2 else expected)


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN, 1e-45, -3.4e38])
@pytest.mark.parametrize("other", [0.0, -0.0, INF, -INF, NAN, 3.4e38])
def test_only_the_element_shows(value, other):
    for n in (5, 8):
        y = torch.arange(n)
        x = torch.full((n, n), other).fill_diagonal_(value)
        f = htile.rowwise(lambda x, y: (x[y[..., 0]], x.gather(-1, y)))
        single, kept = f(x, y[:, None])
        exact(single, torch.full((n,), value))
        exact(kept, torch.full((n, 1), value))


@pytest.mark.parametrize("extreme", [2**63 - 1, -(2**63), 2**53 + 1, 0])
def test_every_int64_is_kept(extreme):
    x = torch.full((3, 5), -1).index_fill(1, torch.tensor(2), extreme)
    f = htile.rowwise(lambda x: x[2])
    exact(f(x), torch.full((3,), extreme))


OUTSIDE = (5, 6, -6, -7, 10**9, 2**40, -(2**40), 2**63 - 1, -(2**63))


@pytest.mark.parametrize(("dtype", "nothing"), [(F32, NAN), (I32, 0), (I64, 0), (BOOL, False)])
def test_beyond_the_end(dtype, nothing):
    """torch raises there."""
    y, x = torch.tensor(OUTSIDE), torch.ones(len(OUTSIDE), 5).to(dtype)
    f = htile.rowwise(lambda x, y: (x[y[..., 0]], x.gather(-1, y), torch.take_along_dim(x, y, 0)))
    for results in (f(x, y[:, None]), kernels_graph(f, (x, y[:, None]), y.shape)):
        for got in results:
            exact(got.flatten(), torch.full((len(y),), nothing, dtype=dtype))


def test_gather_does_not_count_from_the_end_and_the_others_do():
    x, y = torch.arange(1.0, 6).expand(2, 5), torch.tensor([-1, -5])[:, None]
    f = htile.rowwise(lambda x, y: (x.gather(-1, y), torch.take_along_dim(x, y, -1), x[y]))
    gathered, taken, indexed = f(x, y)
    assert gathered.isnan().all()
    exact(taken, torch.tensor([[5.0], [1.0]]))
    exact(indexed, taken)


def test_a_few_indices():
    """By `gather`, `take_along_dim` and `x[y]`, of what is loaded and of what is computed."""

    @htile.rowwise
    def f(x, y: htile.Inner[1]):
        p = x.softmax(-1)
        return (
            x.gather(-1, y), p.gather(-1, y), x[y], torch.take_along_dim(p, y, -1),
            p.gather(-1, p.topk(3).indices), x[y].sum(),
        )  # fmt: skip

    x = random(5, 40)
    moved = torch.arange(5)[:, None] % 2 * torch.tensor([1, -1, 2])
    y = torch.tensor([[0, 39, 7]]) + moved
    p = x.softmax(-1)
    expected = x.gather(1, y), p.gather(1, y), x.gather(1, y), p.gather(1, y), p.topk(3).values
    found = f(x, y)
    for a, b in zip(found, expected, strict=False):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found[-1], x.gather(1, y).sum(1))
    beyond = f(x, torch.tensor([[-1, 40, -41]]).repeat(5, 1))
    assert beyond[0].isnan().all()
    assert torch.equal(beyond[2][:, 0], x[:, -1]) and beyond[2][:, 1:].isnan().all()


def test_one_of_a_few_computed_elements():
    """An index of each row chooses among elements by rank, parts that are summed, and numbers."""

    @htile.rowwise
    def f(x, k: htile.PerRow):
        top = x.topk(8)
        numbers = torch.stack((x.amax(), x.amin(), x.sum()))
        return (
            top.values[k - 1], top.indices[k - 1], numbers[k % 3], x.view(8, -1).sum(-1)[k - 1],
            top.values.gather(-1, (k - 1)[None]), x[:16].sort().values[k],
        )  # fmt: skip

    x, k = random(4, 64), torch.tensor([1, 8, 3, 2])
    place = (k - 1)[:, None]
    top, numbers = x.topk(8), torch.stack((x.amax(1), x.amin(1), x.sum(1)), 1)
    expected = (
        top.values.gather(1, place)[:, 0], top.indices.gather(1, place)[:, 0],
        numbers.gather(1, k[:, None] % 3)[:, 0], x.view(4, 8, -1).sum(-1).gather(1, place)[:, 0],
        top.values.gather(1, place), x[:, :16].sort().values.gather(1, k[:, None])[:, 0],
    )  # fmt: skip
    for found, right in zip(f(x, k), expected, strict=True):
        torch.testing.assert_close(found, right)


def scaled_and_sorted(x, b, k: htile.PerRow):
    return (x.sort().values * b)[k]


def first_ones(x, b, k: htile.PerRow):
    return torch.where(torch.arange(4) < k, x.topk(4).values, -torch.inf)[k - 1]


def of_groups(x, b, k: htile.PerRow):
    return (x.view(4, 10).softmax(-1).amax(-1) * torch.arange(1, 5))[k]


def shares(x, b, k: htile.PerRow):
    return (b * x.topk(40).values / x.sum())[k], (b + x)[k]


@pytest.mark.parametrize("f", (scaled_and_sorted, first_ones, of_groups, shares))
def test_an_element_of_a_few_values_of_the_row_and_others(f):
    """What is computed of a few values of a row is not computed again for one element."""
    x, b, k = random(3, 40), random(3, 40, seed=1), torch.tensor([1, 2, 3])
    found = htile.rowwise(f)(x, b, k)
    exact = torch.vmap(f)(x.double(), b.double(), k)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_an_index_without_its_annotation_is_refused():
    """As many labels as rows would be taken as indices that all rows share."""
    f = htile.rowwise(lambda x, label: torch.logsumexp(x, -1) - x[label])
    with pytest.raises(ShapeError, match=r"annotate label: htile\.PerRow"):
        f(random(3, 40), torch.tensor([0, 1, 2]))
    g = htile.rowwise(lambda x, label: F.cross_entropy(x, label))
    with pytest.raises(ShapeError, match=r"htile\.PerRow"):
        g(random(3, 40), torch.tensor([0, 1, 2]))


def test_gathered():
    x, y = random(4, 9), torch.tensor([0, 8, 3, 3])

    @htile.rowwise
    def f(x, y: htile.PerRow):
        return (x.gather(-1, y[..., None]), torch.gather(x, 0, y[..., None])[..., 0],
                x.gather(-1, y), torch.take_along_dim(x, y[..., None], dim=-1))  # fmt: skip

    picked = x[torch.arange(4), y]
    for got in f(x, y):
        exact(got.flatten(), picked)
    assert_close(f, f(x, y), x, y)


def test_of_a_column_and_by_a_number():
    x, w, y = random(4, 6), random(6, seed=1), torch.tensor([0, 5, -1, 2])

    @htile.rowwise
    def f(x, w, y: htile.PerRow, k: htile.Static):
        return x * w[y], w[0] * x, x[k], x[-1], w[k].exp() * x, x[torch.tensor(4)]

    for k in (0, 5, -6):
        assert_close(f, f(x, w, y, k), x, w, y, k)


def test_by_an_index_that_all_rows_share():
    x, i = random(4, 6), torch.tensor(4)
    f = htile.rowwise(lambda x, i: x[i])
    exact(f(x, i), x[:, 4])


def test_a_declared_dtype_is_kept():
    x, y = random(4, 6), torch.tensor([0, 5, -1, 2])
    f = htile.rowwise(lambda x, y: (x.to(BF16)[y[..., 0]], x.half().gather(-1, y.abs())))
    first, second = f(x, y[:, None])
    rows = torch.arange(4)
    exact(first, x.to(BF16)[rows, y])
    exact(second, x.half()[rows, y.abs()][:, None])


@pytest.mark.parametrize("n", LENGTHS)
def test_one_hot(n):
    y = torch.tensor(places(n)).remainder(n)

    @htile.rowwise
    def f(x, y: htile.PerRow):
        return F.one_hot(y, num_classes=x.shape[-1]) * x.int(), F.one_hot(y, x.shape[-1]) * x

    x = torch.ones(len(y), n)
    hot, floats = f(x, y)
    exact(hot, F.one_hot(y, n))
    exact(floats, F.one_hot(y, n).float())
    assert_close(f, f(x, y), x, y)


def test_one_hot_beyond_the_end_is_zero():
    f = htile.rowwise(lambda x, y: F.one_hot(y[..., 0], x.shape[-1]) * x)
    assert not f(torch.ones(3, 4, dtype=I64), torch.tensor([[4], [-1], [-100]])).any()


def test_the_oracle_makes_tensors_where_the_arguments_are():
    f = htile.rowwise(lambda x: torch.where(torch.arange(x.shape[-1]) < 2, x, torch.zeros(())))
    with torch.device("meta"):
        result = oracle(f, torch.ones(2, 4, device="cpu"))
    assert torch.equal(result, torch.tensor([[1.0, 1, 0, 0]] * 2, dtype=torch.float64).to("cpu"))


def test_under_vmap_and_without_rows():
    f = htile.rowwise(lambda x, y: x[y[..., 0]] + torch.arange(x.shape[-1]))
    x, y = random(2, 3, 5), torch.tensor([[[0], [1], [2]], [[3], [4], [-1]]])
    exact(torch.vmap(f)(x, y), f(x, y))
    assert f(x[:0], y[:0]).shape == (0, 3, 5)


@htile.rowwise
def hot_of_a_few(x, y: htile.Inner[1]):
    return F.one_hot(y, x.shape[-1]) * x


@pytest.mark.parametrize("n", [20, 64, 100])
def test_one_hot_of_a_few_indices_or_of_few_classes(n):
    x, y = torch.randn(3, n), torch.randint(0, n, (3, 5))
    assert torch.equal(hot_of_a_few(x, y), F.one_hot(y, n) * x[:, None])
    classes = htile.rowwise(lambda x: F.one_hot((x > 0).long(), 3).sum(0))
    assert torch.equal(classes(x), F.one_hot((x > 0).long(), 3).sum(1))
    with pytest.raises(UnsupportedError, match="by 100 indices of a row: more than 64"):
        htile.rowwise(lambda x: F.one_hot((x > 0).long(), 65).sum(0))(torch.randn(3, 100))


@pytest.mark.parametrize("f", [
    lambda x: x[torch.bucketize(x, torch.tensor([0.0, 1.0]))],
    lambda x: x.gather(-1, x.view(-1, 2).argmax(-1)),
])  # fmt: skip
def test_many_computed_indices(f):
    x = random(2, 200)
    exact(htile.rowwise(f)(x), torch.vmap(f)(x))


@htile.rowwise
def chosen_of_few(x, y, table: htile.Shared, own: htile.Inner[1]):
    groups = y.view(-1, 5)
    of_groups = (x.view(-1, 5) * own[groups]).sum(-1)
    return table[y] * x, own.gather(-1, y), table.take_along_dim(y, -1), of_groups


@pytest.mark.parametrize("size", [2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("dtype", [I32, I64], ids=str)
def test_each_element_chooses_of_a_short_row(size, dtype):
    x, y = torch.randn(4, 105), torch.randint(size, (4, 105)).to(dtype)
    table, own = torch.randn(size), torch.randn(4, size)
    if dtype is I32:  # which torch.gather does not take
        assert torch.equal(htile.rowwise(lambda y, t: t[y])(y, table), table[y.long()])
        return
    found = chosen_of_few(x, y, table, own)
    assert torch.equal(found[0], table[y] * x) and torch.equal(found[1], own.gather(-1, y))
    assert torch.equal(found[2], table[y])
    torch.testing.assert_close(found[3], (x * own.gather(-1, y)).view(4, -1, 5).sum(-1))


def test_indices_beyond_a_short_row():
    y = torch.tensor([[-1, -7, -8, 7, 1 << 40, 3] * 20])
    f = htile.rowwise(lambda y, t: (t[y], t.gather(-1, y)))
    t = torch.arange(7.0)
    for found, exact in zip(f(y, t), ([6, 0, NAN, NAN, NAN, 3], [NAN, NAN, NAN, NAN, NAN, 3]),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(found[0, :6], torch.tensor(exact).float(), equal_nan=True)
    for dtype, nothing in ((torch.bool, False), (torch.int8, 0), (torch.int64, 0)):
        found = f(y, t.to(dtype))[0]
        assert found.dtype is dtype and found[0, 2:5].eq(nothing).all()
        assert found[0, 0] == t.to(dtype)[6]


CHOSEN = {
    "x[y]": lambda y, t: t[y],
    "gather": lambda y, t: t.gather(-1, y),
    "take_along_dim": lambda y, t: t.take_along_dim(y, -1),
    "of what is computed": lambda y, t: (t * 2)[y],
    "of a part": lambda y, t: t[3:][y % 8],
    "its dtype": lambda y, t: t[y].to(t[y].dtype),
}


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen_of_few_has_the_dtype_of_the_table(name, dtype):
    y, t = torch.randint(16, (4, 105)), random(16).to(dtype)
    f = CHOSEN[name]
    for kind in (htile.rowwise(f), htile.rowwise(shared_table(f))):
        exact(kind(y, t), torch.stack([f(row, t) for row in y]))
    assert htile.rowwise(f).inspect(y, t, arch="sm_90a").source


def shared_table(f):
    def of_shared(y, t: htile.Shared):
        return f(y, t)

    return of_shared


def test_other_floats_than_the_table_decide_as_before():
    """A row of floats comes first, and a vector that no index chooses from decides nothing."""
    y, t, x = torch.randint(16, (4, 105)), random(16).to(BF16), random(4, 105)
    exact(htile.rowwise(lambda y, t, x: t[y] * x)(y, t, x), t[y] * x)
    exact(htile.rowwise(lambda y, w: w * y)(y, x[0].to(BF16)).double(), x[0].to(BF16).double() * y)
    assert htile.rowwise(lambda y, w: w * y)(y, x[0].to(BF16)).dtype is F32
    found = htile.rowwise(dequantized)(y, t, x[:, 0])
    assert found.dtype is BF16
    exact(found, (t[y].double() * x[:, :1].double()).to(F32).to(BF16))


def dequantized(y, t: htile.Shared, scale: htile.PerRow):
    return t[y] * scale


ONE = {  # of what has one element: an argument that all rows share, and values of each row
    "by each element": (lambda y, t: t[y], (1,)),
    "of each row": (lambda y, t: t[y], (4, 1)),
    "by a few": (lambda y, t: t[y[:3]], (1,)),
    "by one": (lambda y, t: t[y[0]], (1,)),
    "a maximum": (lambda y, t: t.float().amax(-1, keepdim=True).to(t.dtype)[y], (4, 1)),
}


@pytest.mark.parametrize("dtype", (F32, BF16, I64, BOOL), ids=str)
@pytest.mark.parametrize("name", ONE)
def test_a_table_of_one_element(name, dtype):
    f, shape = ONE[name]
    table = torch.arange(1, 1 + shape[0]).view(shape).to(dtype)
    y = torch.tensor([0, 1, -2, 0, -1, 1 << 40] * 20).repeat(4, 1)
    at = {"by a few": y[:, :3], "by one": y[:, 0]}.get(name, y)
    there = table.double() if shape == (4, 1) else table.double().expand(at.shape)
    nothing = NAN if dtype.is_floating_point else 0.0
    found = htile.rowwise(f)(y, table)
    expected = torch.where((at == 0) | (at == -1), there, nothing)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0, equal_nan=True)
    assert htile.rowwise(f).inspect(y, table, arch="sm_90a").source


def test_gradients_of_what_is_chosen_of_few():
    y, t, s = torch.randint(16, (5, 1003)), torch.randn(16), torch.rand(5, 1003)
    mine, theirs = (
        [each.to(dtype).requires_grad_() for each in (t, s)] for dtype in (F32, torch.float64)
    )
    g = torch.randn(5, 1003)
    found = torch.autograd.grad(htile.rowwise(lambda y, t, s: t[y] * s)(y, *mine), mine, g)
    exact = torch.autograd.grad(theirs[0][y] * theirs[1], theirs, g.double())
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [I32, I64], ids=str)
def test_a_choice_of_few_compiles(dtype):
    y = torch.empty(64, 4096, dtype=dtype, device="meta")
    f = htile.rowwise(lambda y, t: t[y])
    kernel = f.inspect(y, torch.empty(16, device="meta"), arch="sm_90a")
    assert kernel.resources.stack == 0 and kernel.graph.n == 4096


LEVELS = tuple(k * abs(k) / 64 for k in range(-8, 8))
OF_CODES = {  # functions of codes (n,) from 0 to 15 and a table of 16 numbers
    "a vector that all rows share": lambda y, t: t[y],
    "constants": lambda y, t: torch.tensor(LEVELS)[y],
    "what is computed": lambda y, t: (t[1:] + t[:-1])[y % 15],
    "from the end": lambda y, t: t[y - 16],
    "gather": lambda y, t: t.gather(-1, y),
    "two codes a byte": lambda y, t: t[torch.stack((y & 3, y >> 2), -1).flatten()],
    "places among boundaries": lambda y, t: t[torch.bucketize(y / y.sum(), torch.tensor([.1, .2]))],
    "of pairs": lambda y, t: t[y.view(-1, 2)].sum(-1),
}  # fmt: skip
IN_FLOAT32 = "constants", "places among boundaries", "of pairs"  # Float32 whatever the table is.


@pytest.mark.parametrize("name", OF_CODES)
def test_a_row_of_few_codes_is_looked_up_as_a_long_one_is(name):
    """The graph does not grow with the row, and the dtype does not differ with its length."""
    torch.manual_seed(3)
    function, lengths, dtypes = shared_table(OF_CODES[name]), [], []
    for n in (16, 64, 80):
        for dtype in (F32, BF16, I64):
            y, t = torch.randint(16, (4, n)), (torch.randn(16) * 3).to(dtype)
            found = htile.rowwise(function)(y, t)
            expected = torch.stack([OF_CODES[name](row, t.double()) for row in y])
            dtypes.append((dtype, found.dtype))
            torch.testing.assert_close(found.double(), expected.to(found.dtype).double())
        kernel = htile.rowwise(function).inspect(y, t.float(), arch="sm_90a")
        lengths.append((len(kernel.traced), len(kernel.graph)))
    assert kernel.resources.stack == 0
    assert len(set(dtypes)) == 3, "a dtype for each of the table's, whatever the length"
    assert ((BF16, F32) in dtypes) is (name in IN_FLOAT32)
    assert len({traced for traced, _ in lengths}) == 1
    assert max(placed for _, placed in lengths) < 150


def test_gradients_of_what_few_codes_choose():
    y, t, s = torch.randint(16, (5, 64)), torch.randn(16), torch.rand(5, 64)
    g = torch.randn(5, 64)
    mine = [each.clone().requires_grad_() for each in (t, s)]
    found = torch.autograd.grad(htile.rowwise(lambda y, t, s: t[y] * s)(y, *mine), mine, g)
    theirs = [each.double().requires_grad_() for each in (t, s)]
    exact = torch.autograd.grad(theirs[0][y] * theirs[1], theirs, g.double())
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_few_codes_beside_longer_rows_are_looked_up_one_by_one():
    """They are written out, so that each would choose among all numbers of the table."""

    def f(x, codes, table: htile.Shared):
        return x * table[codes].sum()

    given = torch.empty(64, 1000, device="meta"), torch.empty(64, 64, dtype=I64, device="meta")
    graph = htile.rowwise(f).inspect(*given, torch.empty(64, device="meta"), arch="sm_90a").graph
    assert len(graph) < 16 * 64, "nodes for each code"


def test_indices_that_are_numbers_of_a_row_are_looked_up_one_by_one():
    """Each is a number already: chosen for all together, each choice would be written out."""
    x, t = torch.randn(4, 32), torch.randn(8)
    f = htile.rowwise(lambda x, t: t[x.topk(8).indices % 8])
    exact(f(x, t), t[x.topk(8).indices % 8])
    assert Op.TAKE in {node.op for node in f.inspect(x, t, arch="sm_90a").graph}
