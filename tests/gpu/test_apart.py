"""Rows that differ by some elements in one kernel, and parts of groups: forward and backward."""

import pytest
import torch

import htile
from htile.build.compile import build
from htile.testing import assert_close
from tests.frontend.test_group_gradients import PARTS, SHAPES
from tests.lower.test_apart import BACKWARD, FORWARD
from tests.training import assert_gradients

from .matrix import BF16, F32, job, seed, short

pytestmark = pytest.mark.gpu

ROWS = 67
DTYPES = (F32, BF16)
RANKED = "of a sort"  # equal elements, which bfloat16 has, torch ranks in any order on a GPU
TRAINED = {
    **BACKWARD,
    **{f"{name} of groups": (function, 512) for name, function in PARTS.items() if name != RANKED},
    **{name: (function, 64) for name, function in SHAPES.items()},
}


def case(name, dtype, device="meta"):
    function, n = (TRAINED | FORWARD)[name]
    seed(name, dtype)
    return htile.rowwise(function), torch.randn(ROWS, n, device=device).to(dtype)


def in_worker(name, dtype, arch):
    f, x = case(name, dtype)
    training = f.inspect(x.requires_grad_(), arch=arch).training
    for each in (training.forward, training.backward):
        build(each.lowered.source, each.lowered.function, arch)


def jobs(arch):
    for dtype in DTYPES:
        for name in FORWARD:
            f, x = case(name, dtype)
            yield job(f, (x,), arch)
        for name in TRAINED:
            yield in_worker, (name, dtype, arch)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", FORWARD)
def test_results(name, dtype, device):
    f, x = case(name, dtype, device)
    assert_close(f, f(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name, dtype, device):
    f, x = case(name, dtype, device)
    assert_gradients(f, x)
