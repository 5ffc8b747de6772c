"""A few numbers of a row beside the whole of it, such as its largest elements, in gradients.

Where the row is a multiple of as many elements, it could be cut into pieces of them. They are
numbers instead, and the row stays whole.
"""

import numpy as np
import pytest
import torch

import htile
from htile.frontend.derive import derive
from htile.lower.passes import ways
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.space import TooLong, place
from tests.generated.movements import interpreted
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


def test_a_way_that_gets_long_is_given_up():
    """The gradient of a table that every element chooses from was traced in 5 s, and is in 0.8."""
    def biased(x, place: htile.PerRow, table: htile.Shared):
        distance = (torch.arange(x.shape[-1]) - place).abs().clamp(max=31)
        return (x + table[distance]).softmax(-1)

    args = rows(192), torch.tensor([0, 100, 191]), torch.linspace(-1, 1, 32)
    call = check(htile.rowwise(biased), *args, tolerance=1e-7)
    joint = derive(call.graph, call.wrt, call.outputs)
    given = {f"d_{name}": g for name, g in cotangents(call).items()}
    wide = [args[0].double().requires_grad_(), args[1], args[2].double().requires_grad_()]
    results = torch.stack([biased(x, at, wide[2]) for x, at in zip(*wide[:2], strict=True)])
    exact = torch.autograd.grad(results, (wide[0], wide[2]), given["d_out"])
    given_up = []

    def watched(*arguments, nodes=None, **options):
        try:
            return place(*arguments, nodes=nodes, **options)
        except TooLong:
            given_up.append(nodes)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "place", watched)
        placed = ways.place_well(drop_slopes(joint))
    assert given_up == [ways.LONGER * len(placed), len(placed) // ways.LONGER]
    x, table = interpreted(placed, joint, call.values | given, call.lead)[-2:]
    np.testing.assert_allclose(x, exact[0], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(table.sum(0), exact[1], rtol=1e-7, atol=1e-9)
