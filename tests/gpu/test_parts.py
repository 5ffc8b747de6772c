"""Functions of slices, stacks, pairs and joins on the GPU: random ones, and those people write."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.errors import ArgumentError, UnsupportedError
from htile.testing import assert_close, oracle
from tests.generated.movements import program

from .matrix import BF16, F16, F32, assert_same_bits, job, rows_of, run, shifted, short
from .test_out import compile_in_place

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

SEEDS = range(200)
LEADS = ((5,), (2, 3), (67,), (), (1,), (3, 1, 7))


@htile.rowwise
def swiglu(x):
    gate, up = x.chunk(2)
    return F.silu(gate) * up


@htile.rowwise
def swiglu_backward(x, dy):
    gate, up = x.chunk(2)
    share = torch.sigmoid(gate)
    silu = gate * share
    return torch.cat((dy * up * (share + silu * (1 - share)), dy * silu))


@htile.rowwise
def interleaved(x, limit: float = 7.0):
    gate, up = x[0::2].clamp(max=limit), x[1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@htile.rowwise
def rotated(x, cos, sin):
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


@htile.rowwise
def rotated_pairs(x, cos, sin):
    a, b = x[0::2], x[1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten()


@htile.rowwise
def attended(v: htile.Inner[2], w):
    keys = F.rms_norm(v, v.shape[-1:], eps=1e-6) * w
    share = torch.softmax((keys * 0.1).sum(-1), 0)
    return (share[:, None] * v).sum(0), share


@htile.rowwise
def mixed(matrix: htile.Inner[2], x: htile.Inner[2]):
    return (matrix[:, :, None] * x[None]).sum(1)


@htile.rowwise
def grouped(x, w):
    groups = x.view(4, -1)
    return (F.rms_norm(groups, groups.shape[-1:], eps=1e-6) * w).flatten()


@htile.rowwise
def softmax_with_sink(x, sink: htile.Inner[1]):
    joined = torch.cat((x, sink))
    return joined.softmax(-1)[:-1], joined.mean(), joined.argmax()


@htile.rowwise
def turned_pairs(x, y):
    a, b = x[0::2], x[1::2]
    return torch.stack((a - b * y, a), -1).flatten(), (a * b).sum()


@htile.rowwise
def turned_fours(x, y):
    a, b, c, d = x.view(-1, 4).unbind(-1)
    return torch.stack((d, c - y * a, b, a), -1).flatten(), torch.maximum(b, c).amax()


@htile.rowwise
def reversed_fours(x):
    a, b, c, d = x.view(-1, 4).unbind(-1)
    return torch.stack((d, c, b, a), -1).flatten(), a.float() * 2 - d.float()


@htile.rowwise
def narrowed_fours(x):
    a, b, c, d = (part.float() for part in x.view(-1, 4).unbind(-1))
    mixed = torch.stack((d, a + b, c * 0.5, a), -1).flatten()
    return mixed.to(torch.int8), mixed.to(torch.float8_e4m3fn), (a * d).sum()


@htile.rowwise
def mixed_eights(x, y):
    parts = x.view(-1, 8).unbind(-1)
    ends = [a + b * y for a, b in zip(parts, parts[::-1], strict=True)]
    return torch.stack(ends, -1).flatten(), (parts[1] * parts[6]).sum()


@htile.rowwise
def reversed_twelves(x):
    parts = x.view(-1, 12)
    return torch.stack(parts.unbind(-1)[::-1], -1).flatten(), parts.float().amax(0)


I32, I8, E4M3 = torch.int32, torch.int8, torch.float8_e4m3fn
OF_DTYPES = (
    (turned_pairs, 2, F16), (turned_pairs, 2, I32), (turned_fours, 4, F16), (turned_fours, 4, I32),
    (reversed_fours, 4, I8), (reversed_fours, 4, E4M3), (reversed_fours, 4, F16),
    (narrowed_fours, 4, I8), (narrowed_fours, 4, E4M3), (narrowed_fours, 4, F16),
    (mixed_eights, 8, F16), (mixed_eights, 8, F32), (mixed_eights, 8, I32),
    (reversed_twelves, 12, I8), (reversed_twelves, 12, F16), (reversed_twelves, 12, F32),
)  # fmt: skip
OF_DTYPES_SIZES = ((64, 1024), (3, 1003), (7, 16), (2, 16384))


def of_dtype(f, parts, dtype, m, n, device="meta"):
    """Rows of so many parts of N elements. The elements are small, so that every sum is exact."""
    drawn = torch.randint(-8, 9, (m, parts * n), device=device).to(dtype)
    with_row = turned_pairs, turned_fours, mixed_eights
    return (drawn, drawn.new_full((n,), 2)) if f in with_row else (drawn,)


def cases(device="meta"):
    """Each function with arguments, even and odd."""

    def rows(*shape, dtype=BF16):
        return torch.randn(shape, device=device).to(dtype)

    for m, n in ((64, 4096), (3, 1003), (7, 64), (2, 65536)):
        yield swiglu, (rows(m, 2 * n),)
        yield swiglu_backward, (rows(m, 2 * n), rows(m, n))
        yield interleaved, (rows(m, 2 * n),)
        yield rotated, (rows(m, 2 * n), rows(n), rows(n))
        yield rotated_pairs, (rows(m, 2 * n), rows(n), rows(n))
        yield rotated_pairs, (rows(m, 2 * n, dtype=F32), rows(n), rows(n))
        yield grouped, (rows(m, 4 * n), rows(n))
        yield softmax_with_sink, (rows(m, n), rows(m, 1, dtype=F32))
        if n < 10000:
            yield attended, (rows(m, 3, n), rows(n))
            yield mixed, (rows(m, 4, 4, dtype=F32), rows(m, 4, n))


def prepared(seed, device="meta", filled=False):
    p = program(seed, "all")
    return p, p.function(), p.arguments(device, LEADS[seed % len(LEADS)], filled)


def jobs(arch):
    for seed in SEEDS:
        try:
            _, f, args = prepared(seed)
            yield job(f, args, arch)
        except UnsupportedError:
            continue  # the test says so
    for f, parts, dtype in OF_DTYPES:
        for m, n in OF_DTYPES_SIZES:
            yield job(f, of_dtype(f, parts, dtype, m, n), arch)
    yield compile_in_place(swapped, (torch.empty(64, 1024),), (0,), arch)
    for f, args in cases("cpu"):
        yield job(f, args, arch)
        one = [a[:1] if a.dim() > 1 else a for a in args]
        yield job(f, one, arch)
        if f in (swiglu, swiglu_backward):
            yield job(f, [shifted(a, 1) for a in args], arch)
        if f in (rotated, rotated_pairs):
            yield compile_in_place(f, args, (0,), arch)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_functions(seed, device):
    try:
        p, f, args = prepared(seed, device, filled=True)
        result = run(f, *args)
    except UnsupportedError as error:
        assert "pieces" in error.message
        return
    try:
        assert_close(f, result, *args)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None


@pytest.mark.parametrize("k", range(len(list(cases()))))
def test_functions_that_people_write(k, device):
    torch.manual_seed(k)
    f, args = list(cases(device))[k]
    result = run(f, *args)
    assert_close(f, result, *args)
    alone = [a[1:2] if a.dim() > 1 else a for a in args]
    assert_same_bits(run(f, *[a.clone() for a in alone]), rows_of(result, slice(1, 2)), f)
    if f in (swiglu, swiglu_backward):
        apart = [shifted(a, 1) for a in args]
        assert_same_bits(run(f, *apart), result, "rows that begin anywhere")


@pytest.mark.parametrize(("m", "n"), OF_DTYPES_SIZES)
@pytest.mark.parametrize(
    ("f", "parts", "dtype"), OF_DTYPES, ids=lambda each: getattr(each, "__name__", short(each))
)
def test_pairs_and_fours_of_every_width(f, parts, dtype, m, n, device):
    """Against the function in float64 on the CPU: the elements are exact, so all must be equal."""
    torch.manual_seed(n)
    args = of_dtype(f, parts, dtype, m, n, device)
    on_cpu = [arg.cpu() for arg in args]
    expected = pytree.tree_leaves(oracle(f, *on_cpu))
    for found, exact in zip(run(f, *args), expected, strict=True):
        assert_same_bits(found.cpu(), exact.to(found.dtype), dtype)


@pytest.mark.parametrize("f", (rotated, rotated_pairs), ids=lambda f: f._signature.name)
def test_in_place(f, device):
    for each, args in cases(device):
        if each is f:
            expected = pytree.tree_leaves(oracle(f, *args))
            run(f, *args, out=args[0])
            for found, exact in zip((args[0],), expected, strict=True):
                torch.testing.assert_close(found, exact.to(found.dtype), rtol=2e-2, atol=2e-2)


@htile.rowwise
def swapped(x):
    first, second = x.chunk(2)
    return torch.cat((second, first))


@htile.rowwise
def moved(x):
    return torch.cat((x[1:513], x[512:]))


def test_halves_that_are_swapped_in_place(device):
    x = torch.randn(64, 1024, device=device)
    expected = torch.cat((x[:, 512:], x[:, :512]), 1)
    swapped(x, out=x)
    assert_same_bits(x, expected)


def test_elements_that_move_to_other_columns_in_place(device):
    x = torch.randn(4, 1024, device=device)
    with pytest.raises(ArgumentError, match="overwritten before they are read"):
        moved(x, out=x)
