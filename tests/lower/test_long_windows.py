"""Windows of many neighbours in long rows, and their gradients: parts are chosen by the column."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
from htile.frontend.derive import derive
from htile.lower.passes.bundles import bundle_neighbours
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.space import place
from htile.lower.passes.ways import place_well
from tests.generated.movements import interpreted
from tests.gradients import called, check, cotangents
from tests.lower.cases import kernel_of
from tests.primitives.row_device import launch_pieces

M = 2
# Functions of x, and how long its rows are.
WINDOWS = {
    "maxima": (lambda x: F.max_pool1d(x[None], 9, 1, 4)[0], 131),
    "maxima of what is computed": (lambda x: torch.exp(x).unfold(-1, 9, 1).amax(-1), 131),
    "of even rows": (lambda x: F.max_pool1d(x[None], 12, 1)[0], 256),
    "means": (lambda x: F.avg_pool1d(x[None], 16, 1)[0], 211),
    "means of what is computed": (lambda x: F.pad(x * x, (8, 8)).unfold(-1, 17, 1).mean(-1), 130),
    "logarithms": (lambda x: F.pad(x, (5, 5)).unfold(-1, 11, 1).logsumexp(-1), 130),
    "deviations": (lambda x: x.unfold(-1, 10, 1).std(-1), 139),
    "beside the row": (lambda x: x - F.avg_pool1d(x[None], 11, 1, 5)[0], 201),
    "every second mean": (lambda x: F.avg_pool1d(x[None], 3, 2, 1)[0], 258),
    "every fourth mean": (lambda x: F.avg_pool1d(x[None], 9, 4)[0], 264),
    "every second maximum": (lambda x: F.max_pool1d(x[None], 3, 2, 1)[0], 202),
    "of neighbouring pairs": (lambda x: x.unfold(-1, 6, 2).logsumexp(-1), 202),
    "maxima of pairs": (lambda x: (y := x.view(-1, 2).amax(-1))[1:] * y[:-1], 258),
    "and their sum": (lambda x: (y := F.avg_pool1d(x[None], 9, 1)[0]) * y.sum(), 150),
    "their softmax": (lambda x: F.max_pool1d(x[None], 9, 1)[0].softmax(-1), 150),
    "their largest": (lambda x: (y := (x * x).unfold(-1, 9, 1).amax(-1)) / y.amax(), 150),
    "of a stack": (lambda x: F.max_pool1d(torch.stack((x, x * x)), 9, 1, 4).sum(0), 131),
}


def rows(n):
    return torch.randn(M, n, generator=torch.Generator().manual_seed(n))


def exactly(f, x):
    """x in float64, and what torch gives of its rows one by one."""
    x = x.double().requires_grad_()
    return x, torch.stack([f(row) for row in x])


def assert_placed(graph, call, more, exact):
    placed = bundle_neighbours(place_well(drop_slopes(graph)))
    with np.errstate(all="ignore"):
        (found,) = interpreted(placed, graph, call.values | more, call.lead)
    np.testing.assert_allclose(found, exact.detach().numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", WINDOWS)
def test_results_and_gradients(name):
    f, n = WINDOWS[name]
    call = check(htile.rowwise(f), rows(n), tolerance=1e-7)
    x, exact = exactly(f, rows(n))
    assert_placed(call.graph, call, {}, exact)
    given = {f"d_{name}": g for name, g in cotangents(call).items()}
    (slope,) = torch.autograd.grad(exact, x, given["d_out"])
    assert_placed(derive(call.graph, call.wrt, call.outputs), call, given, slope)


def in_memory(value):
    """The same in whole pieces of 16 bytes, as the memory of a GPU has them."""
    size = value.numel()
    memory = torch.zeros(-(-size // 4) * 4)
    memory[:size] = value.flatten()
    return memory[:size].view(value.shape)


RUN = "maxima of what is computed", "means", "every second mean", "every second maximum"


@pytest.mark.parametrize("name", [*RUN, "maxima of pairs"])
def test_kernels_give_the_gradients(name):
    """No thread reads beside the tensors, whatever parts of rows reach beyond their ends."""
    f, n = WINDOWS[name]
    x, exact = exactly(f, rows(n))
    g = torch.randn(exact.shape)
    (slope,) = torch.autograd.grad(exact, x, g.double())
    kernel = htile.rowwise(f).inspect(rows(n).requires_grad_(), arch="sm_90a").backward
    assert kernel.resources.stack == 0
    named = {"x": in_memory(rows(n)), "d_out": in_memory(g), "d_x": in_memory(torch.zeros(M, n))}
    named = {k: v for k, v in named.items() if k in kernel.graph.arguments or k == "d_x"}
    launch_pieces(kernel, named, M)
    torch.testing.assert_close(named["d_x"].double(), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "size", "step"), [
    (torch.float32, 3, 2), (torch.bfloat16, 3, 2), (torch.bfloat16, 7, 4),
])  # fmt: skip
@pytest.mark.parametrize("n", [404, 4096, 400000])
def test_bundles_beyond_the_ends_compile(n, dtype, size, step):
    """Of rows that registers hold and of those in loops; the bundles are those of the row."""
    x = torch.empty(M, n, dtype=dtype, device="meta", requires_grad=True)
    f = htile.rowwise(lambda x: F.max_pool1d(x[None], size, step, 1)[0])
    kernel = f.inspect(x, arch="sm_90a").backward
    assert kernel.resources.stack == 0
    views = [i.view for i in kernel.graph.inputs if i.name == "x"]
    assert {view.width for view in views} == {step}
    assert any(view.there(kernel.graph.n) for view in views)


def every_second(x):
    return F.max_pool1d(x[None], 3, 2, 1)[0]


def every_third(x):
    return F.max_pool1d(x[None], 4, 3, 1)[0]


def every_fourth(x):
    return F.max_pool1d(x[None], 5, 4, 1)[0]


def of_each_row(x: htile.Inner[2]):
    return F.max_pool1d(x, 9, 1, 4)


@pytest.mark.parametrize(("f", "shape"), [
    (every_second, (401,)), (every_third, (402,)), (every_fourth, (404,)), (of_each_row, (3, 131)),
])  # fmt: skip
def test_elements_apart_are_not_read_beyond_the_ends(f, shape):
    """Elements that are no bundles, and a stack: beyond the end of one row of it is the next one.
    """
    values = torch.randn(M, *shape, generator=torch.Generator().manual_seed(1))
    x, exact = exactly(f, values)
    g = torch.randn(exact.shape)
    (slope,) = torch.autograd.grad(exact, x, g.double())
    kernel = htile.rowwise(f).inspect(values.clone().requires_grad_(), arch="sm_90a").backward
    assert kernel.resources.stack == 0
    named = {"x": in_memory(values), "d_out": in_memory(g), "d_x": in_memory(values * 0)}
    launch_pieces(kernel, named, M)
    torch.testing.assert_close(named["d_x"].double(), slope, rtol=1e-5, atol=1e-5)


def test_large_windows_that_would_be_computed_many_times_are_refused():
    def f(x):
        return x.unfold(-1, 30, 1).logsumexp(-1)

    x = torch.ones(M, 1000, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"at most 1500: .* take smaller windows") as caught:
        htile.rowwise(f).inspect(x, arch="sm_90a").backward  # noqa: B018
    assert caught.value.loc.text == "return x.unfold(-1, 30, 1).logsumexp(-1)"
    assert kernel_of(f, torch.ones(M, 1000)).resources.stack == 0


def test_what_pieces_place_is_not_chosen():
    call = called(htile.rowwise(lambda x: x.unfold(-1, 8, 1).amax(-1)), rows(1000))
    assert str(place(call.graph)) == str(place_well(call.graph))
