"""Functions of groups of neighbouring columns on the GPU, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.testing import assert_close, oracle
from tests.gpu.test_out import compile_in_place

from .matrix import BF16, F16, F32, assert_same_bits, job, rows_of, run, seed, shifted

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

# (rows, groups, elements of each): chunks that end in the row and after it, several rows a warp,
# one group, rows in several CTAs, in loops, and groups as long as a warp holds.
SIZES = (
    (5, 3, 2), (67, 8, 4), (33, 1, 16), (64, 5, 8), (300, 32, 128), (7, 300, 16), (3, 61, 64),
    (2, 1000, 128), (2, 4096, 32), (9, 64, 128),
)  # fmt: skip


@htile.rowwise
def normalized(x: htile.Inner[2], w):
    return F.rms_norm(x.float(), x.shape[-1:], eps=1e-6).to(x.dtype) * w


@htile.rowwise
def quantized(x: htile.Inner[2]):
    scale = x.float().abs().amax(-1) / 127
    return torch.round(x.float() / scale.clamp(min=1e-6)[:, None]).to(torch.int8), scale


@htile.rowwise
def scaled(q: htile.Inner[2], scale):
    return q.float() * scale[:, None]


@htile.rowwise
def of_the_row(x: htile.Inner[2]):
    groups = x.float()
    inside = groups.sum(-1)
    shares = torch.softmax(groups, -1)
    return shares, inside, inside.sum(), inside.mean(), inside.amax(), (inside > 0).any()


@htile.rowwise
def of_masks(x: htile.Inner[2], low: htile.PerRow):
    above = x > low
    largest = x.float().argmax(-1)
    return above.any(-1), above.all(-1), above.sum(-1), largest, (largest == 0).sum()


@htile.rowwise
def of_pairs(x: htile.Inner[2]):
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6)
    left, right = x.float()[:, 0::2] / scale, x.float()[:, 1::2] / scale
    return torch.stack([right, -left], -1).flatten(-2), left * right


@htile.rowwise
def of_halves(x: htile.Inner[2], angle: htile.Inner[2]):
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    left, right = normal.chunk(2, -1)
    cos, sin = torch.cos(angle.float()), torch.sin(angle.float())
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


@htile.rowwise
def numbered(x: htile.Inner[2]):
    place = torch.arange(x.shape[0] * x.shape[1]).view(x.shape)
    return torch.where(place % 3 == 0, x.float(), 0.0).sum(-1) + place.amax(-1)


@htile.rowwise
def turned(x: htile.Inner[2], pos: htile.PerRow, cos: htile.Shared, sin: htile.Shared):
    left, right = x.float().chunk(2, -1)
    c, s = cos[pos], sin[pos]
    return torch.cat((left * c - right * s, right * c + left * s), -1).to(x.dtype)


@htile.rowwise
def hidden(x: htile.Inner[2], length: htile.PerRow):
    """A group is of all its elements, also of those that are hidden in the result."""
    place = torch.arange(x.shape[0] * x.shape[1]).view(x.shape)
    largest = x.float().amax(-1, keepdim=True)
    filled = torch.full(x.shape, 2.0).sum(-1)
    return torch.where(place < length, x.float() - largest, 0.0), filled + largest[:, 0]


@htile.rowwise
def kept(x: htile.Inner[2]):
    """Results with an axis of one element at the end, whose strides are known at run time only."""
    largest = x.float().amax(-1, keepdim=True)
    return largest, (x - largest)[..., None]


@htile.rowwise
def whole(x: htile.Inner[2], s: htile.Inner[1]):
    """Reductions of all axes, and of one number a group that no group is reduced to."""
    shared = x.float() * s[:, None]
    above = s.abs()[:, None] > torch.arange(2)
    return shared / shared.abs().sum(), s * 2, s.amax(), above.all(-1)


FUNCTIONS = (
    normalized, quantized, scaled, of_the_row, of_masks, of_pairs, of_halves, numbered, turned,
    hidden, kept, whole,
)  # fmt: skip


def arguments(f, m, groups, size, dtype=BF16, device="meta"):
    def drawn(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)

    x = drawn(m, groups, size)
    return {
        normalized: (x, drawn(size)),
        scaled: (x.mul(20).to(torch.int8), drawn(m, groups, dtype=F32)),
        of_masks: (x, drawn(m, dtype=F32)),
        of_halves: (x, drawn(m, groups, size // 2)),
        hidden: (x, torch.arange(m, device=device) * 3),
        whole: (x, drawn(m, groups, dtype=F32)),
        turned: (x, torch.arange(m, device=device) % 10 - 2, *drawn(2, 8, size // 2).unbind()),
    }.get(f, (x,))


def of_one(args, place):
    """The arguments of one row alone; a vector that all rows share stays."""
    m = args[0].shape[0]

    def has_rows(a):
        return a.shape == (m,) or (a.shape[0] == m and a.ndim > 1)

    return [a[place : place + 1].clone() if has_rows(a) else a for a in args]


def cases():
    for f in FUNCTIONS:
        for m, groups, size in SIZES:
            for dtype in (BF16, F32) if groups < 1000 else (F16,):
                yield f, m, groups, size, dtype


def apart(x):
    """The same groups, with others between them."""
    wide = torch.cat((x, torch.full_like(x, 7)), -1)
    return wide[..., : x.shape[-1]]


def jobs(arch):
    for f, m, groups, size, dtype in cases():
        args = arguments(f, m, groups, size, dtype, "cpu")
        yield job(f, args, arch)
        yield job(f, of_one(args, 0), arch)
    for size in (16, 128):
        args = arguments(normalized, 40, 32, size, BF16, "cpu")
        yield job(normalized, (apart(args[0]), args[1]), arch)
        wide = shifted(args[0].flatten(1), 1).view(args[0].shape)
        yield job(normalized, (wide, args[1]), arch)
        yield compile_in_place(normalized, args, (0,), arch)


@pytest.mark.parametrize(("f", "m", "groups", "size", "dtype"), list(cases()))
def test_float64(f, m, groups, size, dtype, device):
    seed(m, groups, size)
    args = arguments(f, m, groups, size, dtype, device)
    result = run(f, *args)
    if f in (of_the_row, of_halves, whole):  # sums, which torch rounds otherwise
        exact = pytree.tree_leaves(oracle(f, *args))
        for found, right in zip(pytree.tree_leaves(result), exact, strict=True):
            close = dict(rtol=1e-5, atol=1e-5) if found.dtype is F32 else dict(rtol=8e-3, atol=1e-5)
            torch.testing.assert_close(found, right.to(found.dtype), **close)
    elif f is quantized:  # a number near the middle of two levels becomes either
        levels, scale = oracle(f, *args)
        assert (result[0].double() - levels.double()).abs().max() <= 1
        assert (result[0] != levels.to(torch.int8)).double().mean() < 1e-3
        torch.testing.assert_close(result[1], scale.to(F32), rtol=1e-6, atol=0)
    else:
        assert_close(f, result, *args)
    for place in (0, m - 1):
        alone = run(f, *of_one(args, place))
        assert_same_bits(alone, rows_of(result, slice(place, place + 1)), "a row alone")


@pytest.mark.parametrize("size", (16, 128))
def test_groups_that_lie_apart_or_anywhere(size, device):
    seed(size)
    x, w = arguments(normalized, 40, 32, size, BF16, device)
    expected = run(normalized, x, w)
    assert_same_bits(run(normalized, apart(x), w), expected, "apart")
    anywhere = shifted(x.flatten(1), 1).view(x.shape)
    assert_same_bits(run(normalized, anywhere, w), expected, "anywhere")
    run(normalized, x, w, out=x)
    assert_same_bits(x, expected, "in place")
