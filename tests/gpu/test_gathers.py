"""Rows whose elements the indices of another row choose, on a GPU, against float64."""

import pytest
import torch

import htile
from htile.testing import assert_close

from .matrix import BF16, F16, F32, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

ROWS = 37
LENGTHS = (65, 1000, 8191, 65536, 200003)


@htile.rowwise
def chosen(x, ids):
    return x[ids] * 2


@htile.rowwise
def normalized(x, ids):
    return x[ids].softmax(-1), (x.sigmoid()[ids] - x).abs().mean()


@htile.rowwise
def turned(x, ids):
    return x.flip(-1) - x


@htile.rowwise
def decoded(x, ids, book: htile.Shared, scale: htile.PerRow):
    return book[ids % 300] * scale


FUNCTIONS = (chosen, normalized, turned, decoded)
CASES = [(f, n, F32) for f in FUNCTIONS for n in LENGTHS]
CASES += [(f, 1000, dtype) for f in FUNCTIONS for dtype in (BF16, F16)]


def arguments(f, n, dtype, device):
    seed(f.__name__, n, dtype)
    x, ids = torch.randn(ROWS, n).to(device, dtype), torch.randint(n, (ROWS, n)).to(device)
    more = (torch.randn(300).to(device), torch.rand(ROWS).to(device)) if f is decoded else ()
    return x, ids, *more


def jobs(arch):
    for f, n, dtype in CASES:
        yield job(f, arguments(f, n, dtype, "meta"), arch)


@pytest.mark.parametrize("f, n, dtype", CASES, ids=short)
def test_values(f, n, dtype, device):
    args = arguments(f, n, dtype, device)
    assert_close(f, run(f, *args), *args)


@pytest.mark.parametrize("n", (1000, 65536))
def test_indices_beyond_the_ends(n, device):
    """They give NaN, and nothing outside of the row is read."""
    x, ids = arguments(chosen, n, F32, device)
    ids[:, ::3], ids[:, 1::3] = 2**40, -(2**63)
    found = run(chosen, x, ids)
    right = x.gather(-1, ids.clamp(0, n - 1)) * 2
    right[:, ::3] = right[:, 1::3] = torch.nan
    assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))
