"""A few numbers of a row beside the whole of it, such as its largest elements, in gradients.

Where the row is a multiple of as many elements, it could be cut into pieces of them. They are
numbers instead, and the row stays whole.
"""

import pytest
import torch

import htile
from htile.frontend.derive import derive
from tests.gradients import check, cotangents
from tests.lower.test_apart import assert_placed

M = 3


def softmax_of_the_largest(k):
    return lambda x: x.topk(k).values.softmax(-1)


def router(k):
    def f(x):
        found = x.softmax(-1).topk(k)
        return found.values / found.values.sum()

    return f


def drawn(k):
    def f(x):
        p = x.topk(k).values.softmax(-1)
        return p[(p.cumsum(-1) < 0.5).sum()].log()

    return f


FUNCTIONS = {each.__name__: each for each in (softmax_of_the_largest, router, drawn)}
SIZES = (64, 8), (128, 16), (1000, 20), (1024, 32)


def rows(n):
    """Rows without equal elements, whose order torch leaves open."""
    generator = torch.Generator().manual_seed(n)
    return torch.stack([torch.randperm(n, generator=generator) for _ in range(M)]) * (8.0 / n)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name, n, k):
    f = htile.rowwise(FUNCTIONS[name](k))
    call = check(f, rows(n), tolerance=1e-7)
    joint = derive(call.graph, call.wrt, call.outputs)
    given = {f"d_{name}": g for name, g in cotangents(call).items()}
    placed = assert_placed(joint, call.values | given, call.lead, rtol=1e-7)
    assert placed.n == n and len(placed) < 5 * len(joint)


def test_a_kernel():
    """It had 2800 lines, and spilled registers."""
    x = torch.empty(4, 1024, device="meta", requires_grad=True)
    kernel = htile.rowwise(softmax_of_the_largest(32)).inspect(x, arch="sm_90a").backward
    assert kernel.graph.n == 1024 and len(kernel.source.splitlines()) < 700
    assert kernel.resources.stack == 0
