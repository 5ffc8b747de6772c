"""What is counted: masks that are summed, and the first of the largest elements of any length."""

import pytest
import torch

import htile

from .matrix import BF16, F32, job, run, seed

pytestmark = pytest.mark.gpu

ROWS = 67
SIZES = (8, 129, 1000, 4096, 8192, 50257, 131072)
SCANNED = (8, 1000, 4096, 32768)
ANY_LENGTHS = (5, 900, 4096, 10007)


@htile.rowwise
def counted(x, y: htile.PerRow):
    above, below = x > y, x < -y
    return above.sum(), (above | below).sum(), ((x == y).sum() + below.long().sum()) * 3


@htile.rowwise
def counted_so_far(x, y: htile.PerRow):
    above = x > y
    so_far = above.cumsum(-1)
    return so_far, (so_far - 1) * above, torch.where(so_far <= 3, x, 0.0)


@htile.rowwise
def counted_in_groups(x):
    return (x > 0).view(-1, 8).sum(-1), (x > 0).view(8, -1).sum(0), x.view(-1, 8).argmax(-1)


@htile.rowwise(dynamic_n=True)
def counted_of_any_length(x):
    return (x > 0).sum(), x.argmax(), x.argmin(), x.max(-1).indices


def arguments(n, dtype, device):
    x = torch.randint(-4, 5, (ROWS, n), device=device).to(dtype)
    return x, torch.randint(-4, 5, (ROWS,), device=device).to(dtype)


def jobs(arch):
    for n in SIZES:
        for dtype in (BF16, F32):
            yield job(counted, arguments(n, dtype, "meta"), arch)
    for n in SCANNED:
        yield job(counted_so_far, arguments(n, BF16, "meta"), arch)
        yield job(counted_in_groups, arguments(n, BF16, "meta")[:1], arch)
    for n in ANY_LENGTHS:
        yield job(counted_of_any_length, arguments(n, BF16, "meta")[:1], arch)


@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("n", SIZES)
def test_masks(n, dtype, device):
    seed("counts", n, dtype)
    x, y = arguments(n, dtype, device)
    above, outside, found = run(counted, x, y)
    y = y[:, None]
    assert torch.equal(above, (x > y).sum(-1))
    assert torch.equal(outside, ((x > y) | (x < -y)).sum(-1))
    assert torch.equal(found, ((x == y).sum(-1) + (x < -y).sum(-1)) * 3)


@pytest.mark.parametrize("n", SCANNED)
def test_running_counts(n, device):
    seed("running counts", n)
    x, y = arguments(n, BF16, device)
    so_far, places, chosen = run(counted_so_far, x, y)
    above = x > y[:, None]
    expected = above.cumsum(-1)
    assert torch.equal(so_far, expected) and torch.equal(places, (expected - 1) * above)
    assert torch.equal(chosen, torch.where(expected <= 3, x, 0.0))


@pytest.mark.parametrize("n", SCANNED)
def test_counts_of_groups(n, device):
    seed("counts of groups", n)
    (x, _) = arguments(n, BF16, device)
    near, far, first = run(counted_in_groups, x)
    assert torch.equal(near, (x > 0).view(ROWS, -1, 8).sum(-1))
    assert torch.equal(far, (x > 0).view(ROWS, 8, -1).sum(1))
    groups = x.view(ROWS, -1, 8)
    first_one = (groups == groups.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(first, first_one)


@pytest.mark.parametrize("n", ANY_LENGTHS)
def test_any_length(n, device):
    """Elements behind the end of a row are no candidates, whatever the row has."""
    seed("any length", n)
    (x, _) = arguments(n, BF16, device)
    x[0], x[1], x[2, -1] = -torch.inf, torch.nan, torch.nan
    count, high, low, index = counted_of_any_length(x)
    assert torch.equal(count, (x > 0).sum(-1)) and torch.equal(index, high)
    keys = x.double().nan_to_num(nan=1e300, posinf=1e200, neginf=-1e200)
    columns = torch.arange(n, device=device)
    for found, largest in ((high, keys.amax(-1)), (low, None)):
        if largest is None:
            keys = torch.where(x.isnan(), -1e300, keys)
            largest = keys.amin(-1)
        first = torch.where(keys == largest[:, None], columns, n).amin(-1)
        assert torch.equal(found, first)
