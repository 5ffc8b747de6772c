"""Bits of integers and random numbers on a GPU: the same as torch's on the CPU, bit for bit."""

import pytest
import torch

import htile
from htile.testing import assert_close
from tests.frontend.test_random import KNOWN, int64, seeds

from .matrix import BF16, F32, assert_same_bits, job, rows_of, run, seed, shifted, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

I32, I64 = torch.int32, torch.int64
SIZES = (1, 7, 128, 1003, 4096, 100001)  # held and looped rows, even and odd
ROWS = 20
P = 0.3


@htile.rowwise
def bits(i, j, k: htile.PerRow):
    c = torch.arange(i.shape[-1])
    return (
        i & j, i | 3, 5 ^ i, ~i, i << k, i >> k, j << 3, j >> 2, (c >> 2) + j, (c & 3 ^ 1) + i,
        j << k, j >> k, i << (i & 63), j >> (j & 127), j << (j ^ c), (i & 1 == 1) ^ (j < 0),
        (i & 7).sum(), k & 15,
    )  # fmt: skip


@htile.rowwise
def draws(x, key: htile.PerRow, step: htile.PerRow):
    c = torch.arange(x.shape[-1])
    a, b, d, e = htile.philox(c, key, step)
    return (
        a, b ^ d, e & 255, htile.philox(c // 4, key)[2], htile.philox(key, c, 7)[0],
        htile.philox(step, key)[3], htile.uniform(a), htile.uniform(b) > P, htile.uniform(e).amax(),
        htile.random_words(c, key), htile.random_words(c + 8, key, step) ^ 5,
        htile.random_words(c + 3, 5, step), htile.random_words(c * 3 - 7, key),
        htile.random_words(step, key), htile.random_words(key, c),
        htile.random_words(c, c * 7 + key), htile.random_words(c, key, c // 3),
    )  # fmt: skip


@htile.rowwise
def noise(x, key: htile.PerRow):
    w = htile.random_words(torch.arange(x.shape[-1]), key)
    e, other = htile.exponential(w), htile.philox(torch.arange(x.shape[-1]), key, 1)[1]
    return e, -torch.log(htile.exponential(other)), torch.softmax(x - torch.log(e), -1)


@htile.rowwise
def dropped(x, key: htile.PerRow):
    return htile.dropout(x, P, key), torch.softmax(htile.dropout(x, 0.5, key), -1)


@htile.rowwise
def dropped_at(x, p: htile.PerRow, key: htile.PerRow):
    return htile.dropout(x, p, key)


@htile.rowwise
def words(counter, key, subsequence):
    return htile.philox(counter, key, subsequence)


@htile.rowwise
def uniform(w):
    return htile.uniform(w)


def integers(dtype, n, device):
    """Of all magnitudes and both signs."""
    if device == "meta":
        return torch.empty(ROWS, n, dtype=dtype, device=device)
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, (ROWS, n), dtype=dtype)
    return (x >> torch.randint(0, info.bits, (ROWS, n), dtype=dtype)).to(device)


def per_row(device, dtype=I64):
    """Seeds, or counts of bits: some negative, some beyond the width."""
    if device == "meta":
        return torch.empty(ROWS, dtype=dtype, device=device)
    return seeds(ROWS).to(device) if dtype is I64 else torch.arange(ROWS, device=device) * 4 - 6


def of_bits(n, device):
    counts = torch.empty(ROWS, dtype=I64, device=device)
    counts = counts if device == "meta" else per_row(device, I32)
    return integers(I32, n, device), integers(I64, n, device), counts


def of_row(f, n, dtype, device):
    x = torch.randn(ROWS, n, device=device).to(dtype)
    step = torch.arange(ROWS, device=device) - 3
    return (x, per_row(device), step) if f is draws else (x, per_row(device))


PROBABILITIES = (0.0, 2.0**-32, 0.1, 0.3, 0.5, 0.75, 1 - 2.0**-24, 1.0)


def of_probabilities(dtype, device):
    x = torch.ones(len(PROBABILITIES), 4096, dtype=dtype, device=device)
    p = torch.tensor(PROBABILITIES, device=device)
    key = torch.empty(len(PROBABILITIES), dtype=I64, device=device)
    return x, p, key if device == "meta" else seeds(len(PROBABILITIES)).to(device)


def jobs(arch):
    """Every function of every size and dtype."""
    for n in SIZES:
        yield job(bits, of_bits(n, "meta"), arch)
        for dtype in (BF16, F32):
            for f in (draws, noise, dropped):
                yield job(f, of_row(f, n, dtype, "meta"), arch)
    for dtype in (BF16, F32):
        yield job(dropped_at, of_probabilities(dtype, "meta"), arch)
        for offset in (2, 4, 8):
            if off := offset // dtype.itemsize:
                x, *rest = of_row(dropped, 1003, dtype, "meta")
                yield job(dropped, (shifted(x, off), *rest), arch)
    yield job(words, [torch.empty(2, 3, dtype=I64, device="meta")] * 3, arch)
    yield job(uniform, (torch.empty(1, 1 << 16, dtype=I64, device="meta"),), arch)
    for f in (draws, noise, dropped):
        args = of_row(f, 4096, F32, "meta")
        yield job(f, tuple(x[:3] for x in args), arch)


def on_cpu(f, args):
    """What the function gives on the CPU, by torch's own arithmetic."""
    return f(*(x.cpu() for x in args))


@pytest.mark.parametrize("n", SIZES)
def test_bits(n, device):
    seed("bits", n)
    args = of_bits(n, device)
    found = [x.cpu() for x in run(bits, *args)]
    assert_same_bits(found, list(on_cpu(bits, args)), n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", (BF16, F32), ids=short)
def test_words_and_uniform_numbers(dtype, n, device):
    """Bit for bit; the masks too."""
    args = of_row(draws, n, dtype, device)
    found = [x.cpu() for x in run(draws, *args)]
    assert_same_bits(found, list(on_cpu(draws, args)), n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", (BF16, F32), ids=short)
@pytest.mark.parametrize("f", (noise, dropped), ids=lambda f: f._signature.name)
def test_oracle(f, dtype, n, device):
    seed(f._signature.name, dtype, n)
    args = of_row(f, n, dtype, device)
    assert_close(f, run(f, *args), *args)


@pytest.mark.parametrize("n", SIZES)
def test_noise_is_finite_and_exact_near_one(n, device):
    x, key = of_row(noise, n, F32, device)
    e, gumbel, p = run(noise, x, key)
    w = htile.random_words(torch.arange(n), key.cpu()[:, None])
    right = -torch.log1p(-((0xFFFFFFFF - w).double() + 0.5) * 2.0**-32)
    assert ((e.cpu().double() - right).abs() <= 6 * 2.0**-24 * right).all()
    assert gumbel.isfinite().all() and p.isfinite().all()


@pytest.mark.parametrize("dtype", (BF16, F32), ids=short)
def test_the_mask_of_a_seed(dtype, device):
    """Of the kernel, of torch's tensors on the GPU, and on the CPU."""
    x, key = of_row(dropped, 4096, dtype, device)
    x = torch.ones_like(x)
    found, _ = run(dropped, x, key)
    assert_same_bits(found, htile.dropout(x, P, key))
    assert_same_bits(found.cpu(), htile.dropout(x.cpu(), P, key.cpu()))
    share = (found != 0).double().mean().item()
    assert abs(share - (1 - P)) < 5 * (P * (1 - P) / found.numel()) ** 0.5


@pytest.mark.parametrize("dtype", (BF16, F32), ids=short)
def test_probabilities_of_rows(dtype, device):
    x, p, key = of_probabilities(dtype, device)
    found = run(dropped_at, x, p, key)
    expected = htile.dropout(x.cpu(), p.cpu(), key.cpu())
    assert torch.equal(found.cpu() != 0, expected != 0)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-2 if dtype is BF16 else 3e-7, atol=0)


def test_known_answers(device):
    """The published ones."""
    for counter, key, expected in KNOWN:
        given = int64(*counter[:2]), int64(*key), int64(*counter[2:])
        found = run(words, *(torch.full((2, 3), x, device=device) for x in given))
        assert tuple(x[1, 2].item() for x in found) == expected


def test_every_uniform_number_of_some_words(device):
    """Those at both ends, and a few from everywhere: as on the CPU, and inside (0, 1)."""
    near = torch.arange(1 << 14)
    w = torch.cat([near, 0xFFFFFFFF - near, near * 262147, (1 << 31) - (1 << 13) + near])[None]
    found = run(uniform, w.to(device))
    assert_same_bits(found.cpu(), htile.uniform(w))
    assert found.min() == 2.0**-33 and found.max() == 1 - 2.0**-24


@pytest.mark.parametrize("dtype", (BF16, F32), ids=short)
def test_masks_do_not_depend_on_alignment(dtype, device):
    seed("alignment", dtype)
    x, key = of_row(dropped, 1003, dtype, device)
    expected = run(dropped, x, key)
    for offset in (2, 4, 8):
        if off := offset // dtype.itemsize:
            assert_same_bits(run(dropped, shifted(x, off), key), expected, offset)


@pytest.mark.parametrize("f", (draws, noise, dropped), ids=lambda f: f._signature.name)
def test_bits_depend_on_the_row_alone(f, device):
    seed(f._signature.name)
    args = of_row(f, 4096, F32, device)
    expected = run(f, *args)
    assert_same_bits(run(f, *(x[:3] for x in args)), rows_of(expected, slice(0, 3)))
