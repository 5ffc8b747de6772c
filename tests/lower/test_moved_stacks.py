"""Stacks that are moved along a long axis, and parts of one that a gradient is added to.

A curve is such a stack: many points of two or three numbers each. Its points are the columns, and
what is wanted of it reaches beyond its ends, where the column's number chooses something else.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.errors import UnsupportedError
from htile.frontend.derive import derive
from htile.frontend.graph import View
from htile.lower.passes.bundles import bundle_neighbours
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.ways import place_well
from tests.generated.movements import interpreted
from tests.gradients import called, cotangents
from tests.lower.test_compile import check
from tests.primitives.row_device import launch_pieces

M = 2
BF16, F32 = torch.bfloat16, torch.float32


def blur(x: htile.Inner[2]):
    return (x.roll(1, 0) + 2 * x + x.roll(-1, 0)) / 4


def blur_along(x: htile.Inner[2]):
    return (x.roll(1, 1) + 2 * x + x.roll(-1, 1)) / 4


def roughness(x: htile.Inner[2]):
    return (x - x.roll(1, 0)).abs().sum()


def far(x: htile.Inner[2]):
    return x.roll(31, 0) * x


def differences(x: htile.Inner[2]):
    return torch.diff(x, dim=0) * 2


def padded(x: htile.Inner[2]):
    return F.pad(x, (0, 0, 2, 1)).exp()


def length(x: htile.Inner[2]):
    return (x[1:] - x[:-1]).square().sum(-1).sqrt().sum()


def closed_length(x: htile.Inner[2]):
    y = torch.cat((x, x[:1]))
    return (y[1:] - y[:-1]).square().sum(-1).sqrt().sum()


def area(x: htile.Inner[2]):
    y = x.roll(-1, 0)
    return (x[:, 0] * y[:, 1] - x[:, 1] * y[:, 0]).sum() / 2


def variation(x: htile.Inner[2]):
    return (x[1:] - x[:-1]).abs().sum() + (x - 1).square().mean()


def of_two_lengths(x: htile.Inner[2]):
    return (x[1:] - x[:-1]).exp(), x.exp(), x[3:].amax(0).exp()


def slopes(x: htile.Inner[2]):
    return torch.gradient(x, dim=0)[0] * x


def inner_points(x: htile.Inner[2]):
    y = x * 3
    y[1:-1] = (x[2:] * x[:-2]) / 2
    return y


def means_of_moved(x: htile.Inner[2]):
    y = x.roll(2, 0)
    return (y - y.mean(0)) * x.softmax(0)


def largest_near(x: htile.Inner[2]):
    return F.max_pool1d(x.T, 3, 1, 1) - x.T


def from_first(x):
    points = x.view(-1, 3)
    return ((points - points[0]) ** 2).sum(-1)


def from_last(x):
    points = x.view(-1, 3)
    return (points - points[-1]).norm(dim=-1)


def from_some(x):
    points = x.view(-1, 3)
    return points * points[2:5].mean(0)


def angles(x):
    points = x.view(-1, 3)
    steps = points[1:] - points[:-1]
    return (steps[1:] * steps[:-1]).sum(-1)


def some(x):
    return x.view(-1, 3)[2:7].square()


def pairs(x):
    points = x.view(-1, 2)
    return points.roll(1, 0) * points.roll(-3, 0)


STACKS = (blur, roughness, far, differences, padded, length, closed_length, area, variation,
          of_two_lengths, slopes, inner_points, means_of_moved, largest_near)  # fmt: skip
ROWS = {from_first: 3, from_last: 3, from_some: 3, angles: 3, some: 3, pairs: 2}
FUNCTIONS = (*STACKS, blur_along, *ROWS)


def arguments(f, n, dtype=F32):
    """Rows of n points."""
    shape = (n * ROWS[f],) if f in ROWS else (2, n) if f is blur_along else (n, 2)
    return torch.randn(M, *shape, generator=torch.Generator().manual_seed(n)).to(dtype)


def exactly(f, x):
    """x in float64, and what torch gives of its rows one by one."""
    wide = x.detach().double().requires_grad_()
    each = [pytree.tree_leaves(f(row.clone())) for row in wide]
    results = [torch.stack(rows) for rows in zip(*each, strict=True)]
    return wide, results


def assert_placed(graph, call, more, exact) -> int:
    """Assert that a placed graph means these results; how many nodes it has."""
    placed = bundle_neighbours(place_well(drop_slopes(graph)))
    with np.errstate(all="ignore"):
        found = interpreted(placed, graph, call.values | more, call.lead)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-9, atol=1e-9)
    return len(placed)


@pytest.mark.parametrize("n", [5, 40, 65, 100, 129, 1000])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_results_and_gradients(f, n):
    n = max(n, 32) if f is far else max(n, 8) if f is some else n
    x = arguments(f, n)
    call = called(htile.rowwise(f), x)
    wide, results = exactly(f, x)
    count = assert_placed(call.graph, call, {}, results)
    given = cotangents(call)
    slopes = torch.autograd.grad(results, wide, [given[o.name] for o in call.graph.outputs])
    joint = derive(call.graph, call.wrt, call.outputs)
    more = assert_placed(joint, call, {f"d_{name}": g for name, g in given.items()}, slopes)
    if n > 16:
        assert count < 80 and more < 160, "no point is written out"


@pytest.mark.parametrize("n", [4, 16, 24, 48, 64, 65, 100])
def test_states_of_any_number_of_channels(n):
    """As in a state space model. 16 states are written out, of 16 channels or more."""

    def step(h: htile.Inner[2], x, dt, a: htile.Shared, b: htile.Inner[1], c: htile.Inner[1]):
        delta = torch.exp(dt)
        h = torch.exp(delta[:, None] * a) * h + (delta * x)[:, None] * b
        return h, (h * c).sum(-1)

    made = torch.Generator().manual_seed(n)
    shapes = (M, n, 16), (M, n), (M, n), (n, 16), (M, 16), (M, 16)
    args = [torch.randn(shape, generator=made) for shape in shapes]
    call = called(htile.rowwise(step), *args)
    wide = [each.double().requires_grad_() for each in args]
    results = torch.vmap(step, in_dims=(0, 0, 0, None, 0, 0))(*wide)
    assert assert_placed(call.graph, call, {}, results) < 200
    given = cotangents(call)
    of_rows = [name for name in call.wrt if name != "a"]
    named = dict(zip(("h", "x", "dt", "a", "b", "c"), wide, strict=True))
    slopes = torch.autograd.grad(
        results, [named[name] for name in of_rows], [given[o.name] for o in call.graph.outputs]
    )
    joint = derive(call.graph, tuple(of_rows), call.outputs)
    nodes = assert_placed(joint, call, {f"d_{name}": g for name, g in given.items()}, slopes)
    assert nodes < 700


def in_memory(value):
    """The same in whole pieces of 16 bytes, as the memory of a GPU has them."""
    each = 16 // value.element_size()
    memory = torch.zeros(-(-value.numel() // each) * each, dtype=value.dtype)
    memory[: value.numel()] = value.flatten()
    return memory[: value.numel()].view(value.shape)


def close(dtype):
    size = 1e-5 if dtype is F32 else 2e-2
    return {"rtol": size, "atol": size}


SIMULATED = [
    (blur, F32), (blur, BF16), (blur_along, F32), (blur_along, BF16), (far, F32), (area, BF16),
    (differences, BF16), (closed_length, F32), (variation, F32), (variation, BF16),
    (largest_near, F32), (from_first, F32), (from_first, BF16), (pairs, F32), (angles, F32),
]  # fmt: skip


@pytest.mark.parametrize("n", [100, 129])
@pytest.mark.parametrize(("f", "dtype"), SIMULATED)
def test_kernels_read_nothing_beside_a_stack(f, dtype, n):
    """On the simulator, which raises where a kernel reads beside the memory of an argument."""
    x = arguments(f, n, dtype)
    wide, (exact,) = exactly(f, x)
    kernel = htile.rowwise(f).inspect(x.requires_grad_(), arch="sm_90a")
    result = torch.full(exact.shape, 77, dtype=htile.rowwise(f)(x.detach()).dtype)
    result = in_memory(result)
    launch_pieces(kernel, {"x": in_memory(x.detach()), "out": result}, M)
    torch.testing.assert_close(result.double(), exact.detach(), **close(dtype))
    g = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    (slope,) = torch.autograd.grad(exact, wide, g.double())
    kernel = kernel.backward
    assert kernel.resources.stack == 0
    named = {"x": in_memory(x.detach()), "d_out": in_memory(g), "d_x": in_memory(x.detach() * 0)}
    named = {k: v for k, v in named.items() if k in kernel.graph.arguments or k == "d_x"}
    launch_pieces(kernel, named, M)
    torch.testing.assert_close(named["d_x"].double(), slope, **close(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n", [100, 129])
def test_results_of_two_lengths_are_stored_up_to_their_ends(n, dtype):
    x = arguments(of_two_lengths, n, dtype)
    _, exact = exactly(of_two_lengths, x)
    kernel = htile.rowwise(of_two_lengths).inspect(x, arch="sm_90a")
    assert kernel.graph.n == n
    results = {f"out{k}": in_memory(torch.full(e.shape, 77, dtype=dtype))
               for k, e in enumerate(exact)}  # fmt: skip
    launch_pieces(kernel, {"x": in_memory(x)} | results, M)
    for found, right in zip(results.values(), exact, strict=True):
        torch.testing.assert_close(found.double(), right.detach(), **close(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_loops_read_and_store_nothing_beside_a_stack(dtype):
    """The largest is of one number less than the sum, so the first loop ends before the columns."""

    def f(x: htile.Inner[2]):
        return (x.roll(1, 0) - x[1:].amax()).exp().sum(), (x[1:] - x[:-1]).exp()

    x = torch.randn(M, 12001, 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    _, exact = exactly(f, x)
    kernel = htile.rowwise(f).with_plan(form="loops").inspect(x, arch="sm_90a")
    given = htile.rowwise(f)(x)
    results = {f"out{k}": in_memory(torch.full_like(each, 77)) for k, each in enumerate(given)}
    launch_pieces(kernel, {"x": in_memory(x)} | results, M)
    for found, right in zip(results.values(), exact, strict=True):
        torch.testing.assert_close(found.double(), right.detach(), **close(dtype))


def test_the_numbers_of_a_point_may_lie_in_longer_rows():
    """Points of two numbers of which memory has three."""
    memory = torch.randn(M, 100, 3)
    x = memory[..., :2]
    _, (exact,) = exactly(blur, x)
    kernel = htile.rowwise(blur).inspect(x, arch="sm_90a")
    result = in_memory(torch.zeros(exact.shape))
    launch_pieces(kernel, {"x": x, "out": result}, M)
    torch.testing.assert_close(result.double(), exact.detach(), **close(F32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("n", [1001, 40000])
@pytest.mark.parametrize("f", [blur, blur_along, variation])
def test_long_ones_compile_without_a_stack(f, n, arch):
    x = torch.empty_like(arguments(f, n, BF16), device="meta").requires_grad_()
    kernel = htile.rowwise(f).inspect(x, arch=arch)
    check(kernel)
    check(kernel.backward)


def test_masks_are_moved():
    def moved(x: htile.Inner[2]):
        return x.roll(1, 0)

    x = torch.rand(M, 100, 2) > 0.5
    result = in_memory(torch.zeros_like(x))
    launch_pieces(htile.rowwise(moved).inspect(x, arch="sm_90a"), {"x": x, "out": result}, M)
    assert torch.equal(result, x.roll(1, 1))


def test_the_other_end_is_one_load():
    """One point that all columns but one have elsewhere is no row."""
    kernel = htile.rowwise(blur).inspect(torch.empty(M, 100, 2), arch="sm_90a")
    assert len([i for i in kernel.graph.inputs if i.view.steps is None]) == 4
    assert len(kernel.graph.inputs) == 10


def scaled_beside(x, p: htile.PerRow):
    return x * 2, p.exp()


def of_a_vector(x: htile.Shared, p: htile.PerRow):
    return p * x[0]


def test_kernels_that_read_values_of_rows_alone():
    """They take their shape from a value, which is a row without axes."""
    x, p = torch.empty(8, 5), torch.empty(8, requires_grad=True)
    assert htile.rowwise(scaled_beside).inspect(x, p, arch="sm_90a").backward.resources.stack == 0
    kernel = htile.rowwise(of_a_vector).inspect(x[0], p.detach(), arch="sm_90a")
    assert kernel.resources.stack == 0


@pytest.mark.parametrize("points", [16, 64])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_points_in_another_order_are_loaded_once(width, points):
    def backwards(x):
        return x.view(-1, width).flip(0)

    x = torch.empty(8, width * points, requires_grad=True)
    kernel = htile.rowwise(backwards).inspect(x, arch="sm_90a")
    for each in (kernel, kernel.backward):
        assert sum(i.view.count(each.graph.n) for i in each.graph.inputs) <= width * points


def below_zero_moved(x: htile.Inner[2]):
    y = x.roll(-31, 0)
    return torch.where(y > 0, y, y.roll(1, 0) * 2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_numbers_below_zero_are_compared_as_they_are(dtype):
    """The simulator compares 16-bit floats as numbers."""
    x = in_memory(torch.randn(M, 100, 2).to(dtype))
    result = in_memory(torch.zeros_like(x))
    kernel = htile.rowwise(below_zero_moved).inspect(x, arch="sm_90a")
    launch_pieces(kernel, {"x": x, "out": result}, M)
    assert torch.equal(result, torch.stack([below_zero_moved(row) for row in x]))


@pytest.mark.parametrize(("view", "n", "there"), [
    (View((100, 2), (-1, 1), (1, 0)), 100, (1, 100)),
    (View((100, 2), (3, 0), (1, 0)), 100, (0, 97)),
    (View((100, 2), (0, 1), (1, 0)), 100, None),
    (View((300,), (-3,), (3,)), 100, (1, 100)),
    (View((300,), (-4,), (3,)), 100, (2, 100)),
    (View((300,), (5,), (3,)), 100, (0, 99)),
    (View((303,), (5,), (3,)), 100, None),
    (View((200,), (-2,), (2,), 2), 100, (1, 100)),
    (View((200,), (-8,), (4,), 2), 60, (2, 52)),
    (View((9, 7), (-2, 3), (1, 1)), 9, (2, 4)),
    (View((100,), (5,), None), 100, None),
    (View((), (), ()), 1, None),
])  # fmt: skip
def test_which_columns_are_there(view, n, there):
    assert view.there(n) == there


def cumulative(x: htile.Inner[2]):
    return torch.roll(x.cumsum(0), 1, 0)


def of_bytes(x: htile.Inner[2]):
    return torch.roll(x, 1, 0)


@pytest.mark.parametrize(("f", "dtype"), [(cumulative, F32), (of_bytes, torch.uint8)])
def test_what_is_not_moved_is_refused(f, dtype):
    told = r"an axis of 100 elements.* would be cut into 100 pieces of 1 element"
    with pytest.raises(UnsupportedError, match=told):
        htile.rowwise(f).inspect(torch.ones(M, 100, 2, dtype=dtype), arch="sm_90a")
