"""The elements that a mask chooses, on a GPU: values and gradients are those of each row."""

import pytest

import htile
from htile.build.compile import build
from htile.testing import assert_close, in_bounds
from tests.frontend.test_selected import DIFFERENTIABLE, FUNCTIONS, by_row, gradients, leaves, rows

from .matrix import BF16, F32, job, run, short

pytestmark = pytest.mark.gpu

LENGTHS = (8, 100, 1000, 4097, 50257)
DIFFERENTIATED = (100, 4097, 8192)
# The product of a float32 and 10 is rounded, perhaps to an integer.
VALUES = [(name, dtype) for name in FUNCTIONS for dtype in (BF16, F32)
          if (name, dtype) != ("of_integers", F32)]  # fmt: skip
DRAWS = 4  # of weights


def given(name, n, dtype, device, trains=False):
    return [row.to(device, dtype).requires_grad_(trains) for row in rows(name, n)]


def jobs(arch):
    for name, dtype in VALUES:
        for n in LENGTHS:
            yield job(htile.rowwise(FUNCTIONS[name]), given(name, n, dtype, "meta"), arch)
    for name in DIFFERENTIABLE:
        for n in DIFFERENTIATED:
            args = given(name, n, F32, "meta", trains=True)
            kernel = htile.rowwise(FUNCTIONS[name]).inspect(*args, arch=arch).backward
            yield build, (kernel.source, kernel.lowered.function, kernel.arch)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name, dtype", VALUES, ids=short)
def test_values(name, dtype, n, device):
    f, args = htile.rowwise(FUNCTIONS[name]), given(name, n, dtype, device)
    assert_close(f, run(f, *args), *args)


@pytest.mark.parametrize("n", DIFFERENTIATED)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name, n, device):
    """Errors are at most twice those of torch in float32, which several draws of weights tell."""
    f, args = htile.rowwise(FUNCTIONS[name]), given(name, n, F32, device, trains=True)
    exact = [row.detach().double().requires_grad_() for row in args]
    errors = [0.0] * len(args)
    for draw in range(DRAWS):
        expected = gradients(by_row(FUNCTIONS[name], exact), exact, draw)
        theirs = gradients(by_row(FUNCTIONS[name], args), args, draw)
        pairs = zip(errors, theirs, expected, strict=True)
        errors = [max(e, (t.double() - x).abs().max().item()) for e, t, x in pairs]
    found = gradients(leaves(f(*args)), args, DRAWS - 1)
    for one, true, error in zip(found, expected, errors, strict=True):
        assert in_bounds(one, true, error).max() <= 1
