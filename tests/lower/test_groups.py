"""Functions whose columns are groups: which of them are, and what their kernels need."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import UnsupportedError
from htile.frontend.ops import Op
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.ways import place_well
from htile.testing import oracle
from tests.generated.movements import interpreted
from tests.gradients import called
from tests.lower.placing import assert_placed_right


@htile.rowwise
def one_hot(x: htile.Inner[2], s: htile.Inner[1]):
    """Nothing is loaded but one element a group."""
    return (s[:, None] == torch.arange(16)).any(-1)


@htile.rowwise
def shares(x: htile.Inner[2], s: htile.Inner[1]):
    return x / x.sum(-1, keepdim=True), x.sum(), x.mean((0, 1)), x.argmax(-1)


@htile.rowwise
def scaled(x: htile.Inner[2], s: htile.Inner[1]):
    return x * s[:, None], s * 2, s.sum(), s.prod(), s.amax()


@htile.rowwise
def cumulative(x: htile.Inner[2], s: htile.Inner[1]):
    """A scan in groups writes them out."""
    return x.cumsum(-1), x.amax(-1)


@htile.rowwise
def masked(x: htile.Inner[2], s: htile.Inner[1]):
    """A group needs all its elements, whatever hides the result."""
    places = torch.arange(x.shape[0] * x.shape[1]).view(x.shape)
    return torch.where(places < s[0].long(), x - x.amax(-1, keepdim=True), 0.0)


def arguments(groups, size):
    torch.manual_seed(groups)
    return torch.rand(3, groups, size) + 0.1, torch.randint(1, 3, (3, groups)) / 2


@pytest.mark.parametrize("size", (16, 32))
@pytest.mark.parametrize("groups", (3, 256))
@pytest.mark.parametrize("f", (one_hot, shares, scaled, masked), ids=lambda f: f._signature.name)
def test_any_number_of_groups(f, groups, size):
    args = arguments(groups, size)
    for found, exact in zip(
        pytree.tree_leaves(f(*args)), pytree.tree_leaves(oracle(f, *args)), strict=True
    ):
        torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-6)
    kernel = f.inspect(*args, arch="sm_90a")
    assert kernel.graph.group_size == (16 if f is one_hot else size)
    assert kernel.graph.n == kernel.graph.group_size * groups
    assert all(i.end is None for i in kernel.graph.inputs)
    assert kernel.resources.stack == 0


def test_scans_in_groups_write_them_out():
    kernel = cumulative.inspect(*arguments(4, 32), arch="sm_90a")
    assert kernel.graph.group_size is None and kernel.graph.n == 32
    assert [node.op for node in kernel.graph].count(Op.CUMSUM) == 4


@pytest.mark.parametrize(("dtype", "most"), ((torch.float32, 128), (torch.bfloat16, 256)), ids=str)
def test_a_group_is_no_longer_than_what_a_warp_holds(dtype, most):
    @htile.rowwise
    def largest(x):
        return x.view(8, -1).amax(-1).to(dtype), x

    for size in (most, 2 * most):
        graph = largest.inspect(torch.empty(2, 8 * size, dtype=dtype, device="meta")).graph
        assert graph.group_size == (most if size == most else None)


@pytest.mark.parametrize(("step", "dtype", "widths"), [
    (8, torch.bfloat16, {4}), (8, torch.float32, {2}), (8, torch.int8, {8}),
    (12, torch.float16, {4}), (6, torch.bfloat16, {2}), (16, torch.int8, {8}),
    (5, torch.bfloat16, {1}),
])  # fmt: skip
def test_pieces_of_many_parts_are_bundles(step, dtype, widths):
    @htile.rowwise
    def turned(x):
        return torch.stack(x.view(-1, step).unbind(-1)[::-1], -1).flatten()

    kernel = turned.inspect(torch.empty(64, 100 * step, dtype=dtype, device="meta"), arch="sm_90a")
    pieces = *kernel.graph.inputs, *kernel.graph.outputs
    assert {each.view.width for each in pieces} == widths and kernel.graph.n == 100
    assert len(pieces) == 2 * step // min(widths) and kernel.resources.stack == 0


def test_many_pieces_are_few_bundles():
    @htile.rowwise
    def reversed_products(x, y):
        p, q = x.view(-1, 64).unbind(-1), y.view(-1, 64).unbind(-1)
        return torch.stack([p[k] * q[63 - k] for k in range(64)], -1).flatten()

    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    kernel = reversed_products.inspect(x, x, arch="sm_90a")
    assert len(kernel.graph.inputs) + len(kernel.graph.outputs) == 48


def test_too_many_pieces_are_refused():
    @htile.rowwise
    def state(x, decay: htile.Shared, b: htile.Inner[1], h: htile.Inner[2]):
        return torch.exp(x[:, None] * decay) * h + x[:, None] * b

    shapes = (2, 64), (64, 64), (2, 64), (2, 64, 64)
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    kernel = state.inspect(*args, arch="sm_90a")
    with pytest.raises(UnsupportedError, match=r"at most 400; pass rows that are padded") as caught:
        kernel.backward  # noqa: B018
    assert caught.value.loc.text.startswith("return torch.exp(")


def test_rows_of_two_lengths_are_not_cut():
    """These were cut into pieces of 32 elements, of which there were too many."""

    def scaled(x, y):
        return x * y.sum()

    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 2048, generator=g), torch.randn(2, 2080, generator=g)
    assert len(assert_placed_right(scaled, (x, y), place_well, 1e-9)) == 4


def places(x, edges: htile.Shared):
    groups = x.view(-1, 64)
    scale = groups.abs().amax(-1, keepdim=True)
    return torch.bucketize(groups / scale, edges), scale


def counted(x, edges: htile.Shared):
    groups = x.view(-1, 64)
    scale = groups.abs().amax(-1, keepdim=True)
    return ((groups / scale)[..., None] > edges).sum(-1), scale


@pytest.mark.parametrize("count", [7, 15, 16, 64])
@pytest.mark.parametrize("fn", [places, counted])
def test_what_all_rows_share_is_written_out_beside_groups(fn, count):
    """Boundaries are compared one by one, and no element is: the graph is as long for any row."""
    torch.manual_seed(count)
    edges = torch.linspace(-1, 1, count)
    lengths = []
    for n in (256, 4096):
        x = torch.randn(3, n)
        call = called(htile.rowwise(fn), x, edges)
        placed = place_well(drop_slopes(call.graph))
        found, scale = interpreted(placed, call.graph, call.values, call.lead)
        groups = x.double().view(3, -1, 64)
        exact = groups.abs().amax(-1, keepdim=True)
        expected = ((groups / exact)[..., None] > edges.double()).sum(-1)
        np.testing.assert_array_equal(found, expected.numpy())
        np.testing.assert_array_equal(scale, exact.numpy())
        lengths.append(len(placed))
    assert lengths[0] == lengths[1] < 6 * count + 10
    kernel = htile.rowwise(fn).inspect(x, edges, arch="sm_90a")
    assert kernel.graph.group_size == 64 and kernel.resources.stack == 0
