"""The last element of a scan, where it is taken alone: of all kinds of scans, it is a reduction."""

import numpy as np
import pytest
import torch

import htile
from htile.frontend.derive import derive
from htile.frontend.ops import REDUCTIONS, SCANS
from htile.lower.passes.collectives import MOST_PIECES
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.space import place
from htile.lower.passes.ways import place_well
from tests.generated.movements import interpreted
from tests.gradients import called, check, cotangents

INF = float("inf")


def sorted_row(x):
    return x.sort().values.logcumsumexp(-1)


def list_mle(x):
    """Of an order, the log likelihood: each element is the first of those from it on."""
    x = x.sort(descending=True).values
    return x - x.flip(-1).logcumsumexp(-1).flip(-1)


def half_beside_all(x):
    return x.chunk(2)[0].logcumsumexp(-1) + 1, x * 2


def half_from_the_end_beside_all(x):
    return x.chunk(2)[1].flip(-1).logcumsumexp(-1).flip(-1) + 1, x * 2


def last(x):
    return x.logcumsumexp(-1)[-1] * x


def last_from_the_end(x):
    return x.flip(-1).logcumsumexp(-1).flip(-1)[0] + x


def last_of_what_is_joined(x):
    return torch.cat([x[3:], x[:3] * 2]).logcumsumexp(-1)[-1] - x


def last_of_equal_elements(x):
    return x[:1].expand(x.shape[-1]).logcumsumexp(-1)[-1] + x


SHORT = sorted_row, list_mle, half_beside_all, half_from_the_end_beside_all
LONG = last, last_from_the_end, last_of_what_is_joined, last_of_equal_elements
CASES = [(f, n) for f in SHORT for n in (2, 3, 7, 8, 10, 16)] + [
    (f, n) for f in LONG for n in (4, 7, 64, 101, 1000)
]


def rows(n):
    return 3 * torch.randn(4, n, generator=torch.Generator().manual_seed(n))


def assert_placed(graph, call, more, expected):
    """Assert that the placed graphs give these results in float64."""
    graph = drop_slopes(graph)
    for way in (place, place_well) if graph.n <= MOST_PIECES else (place_well,):
        placed = way(graph)
        with np.errstate(all="ignore"):
            found = interpreted(placed, graph, call.values | more, call.lead)
        for one, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, exact.detach().numpy(), rtol=1e-9, atol=1e-9)


def in_torch(f, x):
    """What torch gives of each row, without HTile."""
    each = [torch.utils._pytree.tree_leaves(f(row)) for row in x]
    return [torch.stack(result) for result in zip(*each, strict=True)]


@pytest.mark.parametrize(("f", "n"), CASES)
def test_values_and_gradients(f, n):
    x = rows(n)
    call = check(htile.rowwise(f), x)
    wide = x.double().requires_grad_()
    results = in_torch(f, wide)
    assert_placed(call.graph, call, {}, results)
    joint = derive(call.graph, call.wrt, call.outputs)
    more = {f"d_{name}": g for name, g in cotangents(call).items()}
    given = [more[f"d_{name}"] for name in call.outputs]
    assert_placed(joint, call, more, torch.autograd.grad(results, wide, given))


@pytest.mark.parametrize("n", [7, 101])
def test_infinities_and_nan(n):
    x = rows(n).repeat(2, 1)
    x[0, 1:] = x[1, :-1] = x[2] = -INF
    x[3, 2] = INF
    x[4, 2], x[4, 4] = INF, -INF
    x[5, 5] = float("nan")
    x[6] += 800
    x[7] -= 800
    functions = (last, last_from_the_end, *([half_beside_all] if n == 7 else []))
    for f in functions:
        call = called(htile.rowwise(f), x)
        assert_placed(call.graph, call, {}, in_torch(f, x.double()))


def test_a_gradient_beside_elements_of_minus_infinity():
    x = torch.tensor([[0, -INF, 1, 2, -INF, 800, 3], [5, -INF, 4, -INF, -800, 2, 1]])

    def f(x):
        return x.logcumsumexp(-1)[-1]

    call = called(htile.rowwise(f), x)
    joint, given = derive(call.graph, call.wrt, call.outputs), cotangents(call)
    wide = x.double().requires_grad_()
    exact = torch.autograd.grad(in_torch(f, wide), wide, list(given.values()))
    assert exact[0].isfinite().all()
    assert_placed(joint, call, {f"d_{name}": g for name, g in given.items()}, exact)


@pytest.mark.parametrize("n", [7, 1000, 4097, 50257])
def test_the_last_element_takes_no_scan(n):
    """So it is had of rows that no scan is had of, as the last of a cumulative sum is."""
    f = htile.rowwise(lambda x: x.logcumsumexp(-1)[-1])
    kernel = f.inspect(torch.empty(2, n), arch="sm_90a")
    ops = {node.op for node in kernel.graph}
    assert kernel.resources.stack == 0 and not ops & SCANS and (n == 7 or ops & REDUCTIONS)


@pytest.mark.parametrize(("f", "n"), [(sorted_row, 7), (list_mle, 16), (half_beside_all, 8)])
def test_kernels_compile(f, n):
    kernel = htile.rowwise(f).inspect(torch.empty(2, n, requires_grad=True), arch="sm_90a")
    assert kernel.resources.stack == kernel.backward.resources.stack == 0
