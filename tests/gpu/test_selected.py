"""The elements that a mask chooses, on a GPU: values and gradients are those of each row."""

import pytest
import torch

import htile
from htile.build.compile import build
from htile.testing import assert_close, in_bounds
from tests.frontend.test_selected import FUNCTIONS, by_row, leaves, rows

from .matrix import BF16, F32, job, run, short

pytestmark = pytest.mark.gpu

LENGTHS = (8, 100, 1000, 4097, 50257)
DIFFERENTIATED = (100, 4097, 8192)
# The product of a float32 and 10 is rounded, perhaps to an integer.
VALUES = [(name, dtype) for name in FUNCTIONS for dtype in (BF16, F32)
          if (name, dtype) != ("of_integers", F32)]  # fmt: skip
WITHOUT_GRADIENT = ("counts", "truths", "of_integers")


def given(name, n, dtype, device, trains=False):
    return [row.to(device, dtype).requires_grad_(trains) for row in rows(name, n)]


def jobs(arch):
    for name, dtype in VALUES:
        for n in LENGTHS:
            yield job(htile.rowwise(FUNCTIONS[name]), given(name, n, dtype, "meta"), arch)
    for name in FUNCTIONS:
        for n in DIFFERENTIATED if name not in WITHOUT_GRADIENT else ():
            args = given(name, n, F32, "meta", trains=True)
            kernel = htile.rowwise(FUNCTIONS[name]).inspect(*args, arch=arch).backward
            yield build, (kernel.source, kernel.lowered.function, kernel.arch)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name, dtype", VALUES, ids=short)
def test_values(name, dtype, n, device):
    f, args = htile.rowwise(FUNCTIONS[name]), given(name, n, dtype, device)
    assert_close(f, run(f, *args), *args)


def gradients(function, args):
    results = function(args)
    found = [each for each in results if each.requires_grad]
    total = sum(each.sin().sum() for each in found)
    return torch.autograd.grad(total, args, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("n", DIFFERENTIATED)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WITHOUT_GRADIENT])
def test_gradients(name, n, device):
    """Their errors are at most twice those of torch's float32, as those of values are."""
    f, args = htile.rowwise(FUNCTIONS[name]), given(name, n, F32, device, trains=True)
    exact = [row.detach().double().requires_grad_() for row in args]
    found = gradients(lambda rows: leaves(f(*rows)), args)
    expected = gradients(lambda rows: by_row(FUNCTIONS[name], rows), exact)
    theirs = gradients(lambda rows: by_row(FUNCTIONS[name], rows), args)
    for one, true, other in zip(found, expected, theirs, strict=True):
        error = (other.double() - true).abs().max().item()
        assert in_bounds(one, true, error).max() <= 1
