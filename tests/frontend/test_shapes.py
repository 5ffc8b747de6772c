"""Movements of values of every shape, held against torch, and their kernels lowered to text.

What they refuse is in tests/frontend/test_trace_errors.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

import htile
from htile.errors import DtypeError, ShapeError, TraceError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check

N = 8
MOVEMENTS = {
    "expand with a new axis": lambda x: x.expand(3, N),
    "expand with two new axes": lambda x: x.expand(2, 3, -1),
    "expand of an axis and a new one": lambda x: x[:, None].expand(2, -1, 3),
    "expand of a number": lambda x: x.sum().expand(3),
    "expand of a number to a matrix": lambda x: x.sum().expand(2, 3),
    "expand of a number to the row": lambda x: x.sum().expand(N),
    "sum of what was expanded": lambda x: x.expand(3, N).sum(0) + x.expand(3, N).amax(),
    "a constant that was expanded": lambda x: x + torch.arange(N).expand(2, N),
    "parts of what was expanded": lambda x: x.expand(4, N)[1:3, 2:],
    "tensor_split": lambda x: x.tensor_split(3),
    "tensor_split at places": lambda x: x.tensor_split((2, 5)),
    "tensor_split from the end": lambda x: x.tensor_split((-3,)),
    "tensor_split of a stack": lambda x: x.view(2, 4).tensor_split((1,), 1),
    "a number turned": lambda x: (x.sum().t(), x.sum().transpose(0, 0)),
    "a number moved": lambda x: (x.sum().movedim(0, -1), x.sum().permute(())),
    "a number in another shape": lambda x: (x.sum().flatten(), x.sum().view(1, 1)),
    "a number alone": lambda x: (x.sum()[...], x.sum()[None], x.sum().squeeze()),
    "flatten": lambda x: (x.view(2, 2, 2).flatten(1), x.view(2, 2, 2).flatten(0, 1)),
    "t": lambda x: (x.t() * 2, x.view(2, 4).t()),
    "view_as": lambda x: x.view_as(torch.zeros(2, 4)).sum(0),
    "glu": lambda x: torch.nn.functional.glu(x),
    "repeat": lambda x: (x.repeat(3), x.repeat(2, 1), x.view(2, 4).repeat(1, 2), x.repeat((1,))),
    "repeat of a number": lambda x: (x.sum().repeat(3), x.sum().repeat(2, 2)),
    "tile": lambda x: (x.tile(2), torch.tile(x.view(2, 4), (3, 1)), x.view(2, 4).tile(2)),
    "repeat_interleave": lambda x: (x.repeat_interleave(3), x.view(2, 4).repeat_interleave(2, 0),
                                    x.view(2, 4).repeat_interleave(2), x.sum().repeat_interleave(2),
                                    torch.repeat_interleave(x.view(-1, 2).sum(-1), 2) * x),
    "hstack": lambda x: (torch.hstack((x, x[:3])), torch.hstack((x.view(2, 4), x.view(4, 2).t())),
                         torch.hstack((x.sum(), x.amax()))),
    "vstack": lambda x: (torch.vstack((x, -x)), torch.vstack((x[:4], x.view(2, 4)))),
    "column_stack": lambda x: (torch.column_stack((x, -x)),
                               torch.column_stack((x[:2], x.view(2, 4)))),
    "pad": lambda x: (pad(x, (2, 2)), pad(x, (0, 8), value=-1.5), pad(x, (-2, 4)), pad(x, (0, 0)),
                      pad(x.view(2, 4), (1, 1, 0, 2)), pad(x.int(), (4, -4), value=3)),
    "all new": lambda x: x + pad(x[:0], (3, 5), value=2.5) - pad(x.view(2, 4), (-4, 4)).flatten(),
    "shifted": lambda x: x - pad(x, (1, 0))[:-1],
    "its elements": lambda x: [sum(x), *(v * v for v in x), *map(torch.exp, x[2:4])],
    "listed numbers": lambda x: (
        x.view(-1, 2) @ torch.tensor([[1.0, 2.0], [3.0, 4.0]]), x.view(2, 4) @ torch.eye(4, 3),
        x.view(2, 4) * torch.tensor([[1, 2, 3, 4], (5, 6, 7, 8)]), x[:4].view(2, 2) * torch.eye(2),
        x.view(2, 2, 2) * torch.tensor([[[True, False]] * 2] * 2),
    ),
    "diff": lambda x: (x.diff(), x.diff(n=3), torch.diff(x.view(2, 4), dim=0), x.diff(n=0),
                       torch.diff(x, prepend=x[:1], append=x[-2:]), (x > 0).diff(), x.int().diff()),
    "data": lambda x: x.data * 2,
    "broadcast": lambda x: (
        *torch.broadcast_tensors(x, x.sum(), x[:1] * 2), *torch.broadcast_tensors(x[None], x),
        *torch.broadcast_tensors(x.view(2, 4), x[:4], x.view(2, 4)[:, :1]),
    ),
    "parts without elements": lambda x: (
        torch.cat((x[:0], x[2:5], x[4:4], x[8:])), torch.cat((x[3:3], x)) * 2,
        torch.cat((*x.tensor_split((0, 3, 8)), x.narrow(0, 4, 0), x.split((8, 0))[1])),
        torch.cat((x.view(2, 4)[:, :0], x.view(2, 4), x.view(2, 4)[:, 4:]), -1),
        torch.cat((x.view(2, 4)[2:], x.view(2, 4))), torch.cat((x[:0], x.view(2, 4))),
        torch.hstack((x[:0], x)), x + x[5:2].numel() + len(x[:0]) + x[:0].shape[0],
        torch.cat(((x > 0)[:0], x > 1)), torch.cat((x.half()[:0], x.half())),
    ),
    "sums of no elements": lambda x: (
        x[0] + x[:0].exp().sum(), x[:0].prod() * x[1], x[2] - (x[:0] * x[3:3]).norm(),
        x[0] + x[:0] @ x[8:], x[:2] + x.view(4, 2)[:0].sum(0), x[:4] + x.view(4, 2)[:, :0].sum(-1),
        x.view(4, 2)[:, :0] @ x.view(4, 2)[4:, :] + x.view(4, 2), x[0] + (x[:0] > 0).sum(),
        torch.where((x[:0] > 0).any() | ~(x[4:4] > 0).all(), x, -x),
        [(x[k] - (x[:k] * x[:k]).sum()) / (k + 1) for k in range(3)],
    ),
    "axes that are there": lambda x: (
        torch.atleast_1d(x.sum()), torch.atleast_1d(x * 2), torch.atleast_2d(x.sum()),
        torch.atleast_2d(x * 2), torch.atleast_2d(x.view(2, 4) * 2),
    ),
    "several ellipses": lambda x: (
        x[..., ..., 0], x[..., ...] * 2, x.view(2, 4)[..., 1, ...], x.view(2, 4)[1, ..., ..., 2:],
        x.view(2, 4)[..., None, ...], x[..., 3, ...], x[..., ..., [4, 1]],
        x[..., ..., torch.tensor([2, 0])],
    ),
    "a part without elements that nothing reads": lambda x: (x[4:4], x.exp())[1],
}


@pytest.mark.parametrize("rows", [1, 2, 3, N])
@pytest.mark.parametrize("name", MOVEMENTS)
def test_movement(name, rows):
    """With as many rows as the new axis has elements they are told apart too."""
    plain = MOVEMENTS[name]
    f = htile.rowwise(plain)
    x = torch.randint(-8, 8, (rows, N), generator=torch.Generator().manual_seed(rows)).float()
    each = [pytree.tree_leaves(plain(row)) for row in x]
    found = pytree.tree_leaves(f(x))
    for result, *expected in zip(found, *each, strict=True):
        torch.testing.assert_close(result, torch.stack(expected), rtol=1e-6, atol=0)
    assert f.inspect(x).source.count("def ") > 1


@pytest.mark.parametrize("index", [(..., ..., 0), (0, ..., ..., None), (..., None, ..., 1)])
def test_several_ellipses_that_torch_refuses(index):
    """Each skips as many axes as are not named, so nothing can follow the second."""
    with pytest.raises(IndexError):
        torch.ones(2, 2, 2)[index]
    message = r"several `\.\.\.` in the index of a value of shape \(2, 2, 2\): the first stands"
    with pytest.raises(ShapeError, match=message) as caught:
        htile.rowwise(lambda x: x.view(2, 2, 2)[index])(torch.ones(3, N))
    assert caught.value.loc.file == __file__


@htile.rowwise
def weighted(x, w):
    return x * w.sum()


@htile.rowwise
def bounded(x, y):
    return x.clamp(y, None)


def test_a_vector_without_elements():
    with pytest.raises(ShapeError, match=r"w has no elements, got w \(0,\)"):
        weighted(torch.ones(3, N), torch.ones(0))


EMPTY = {
    "returned": (lambda x: x[:0], "a part without elements, of a value of shape (8,)"),
    "joined to nothing": (lambda x: torch.cat((x[:0], x[8:])), "a part without elements"),
    "the largest of none": (lambda x: x[:0].amax(), "a part without elements"),
    "the mean of none": (lambda x: x[:0].mean(), "a part without elements"),
    "beside a row": (lambda x: (x[:0] * x).sum(), "shapes (0,) and (8,) do not go together"),
    "added": (lambda x: x[3:3] + 1, "a part without elements"),
    "stacked": (lambda x: torch.stack((x[:0], x[:0])), "a part without elements"),
    "of another axis": (
        lambda x: torch.cat((x.view(4, 2)[:, :0], x.view(4, 2))), "shapes (4, 0), (4, 2) along 0"),
    "of another length": (
        lambda x: torch.cat((x.view(4, 2)[:0], x.view(2, 4))), "shapes (0, 2), (2, 4) along 0"),
    "of another dtype": (lambda x: torch.cat((x.int()[:0], x)), "in another dtype: leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_parts_without_elements(name):
    """Where they are no operands of torch.cat beside others, the line that made them is told."""
    body, message = EMPTY[name]
    with pytest.raises((ShapeError, DtypeError)) as caught:
        htile.rowwise(lambda x: body(x))(torch.ones(3, N))
    assert message in str(caught.value) and caught.value.loc.file == __file__


def test_parts_without_elements_have_gradients_of_the_rest():
    f = htile.rowwise(lambda x: torch.cat((x[:0], x[2:5].exp(), x[8:])))
    check(f, torch.randn(3, N))


def test_parts_without_elements_in_rows_of_any_length():
    f = htile.rowwise(lambda x: torch.cat((x[:0], x)) * 2, dynamic_n=True)
    for n in (5, N):
        assert torch.equal(f(torch.ones(3, n)), torch.full((3, n), 2.0))


def test_two_dtypes_of_8_bits():
    """torch has int16 for both, which HTile does not compute in."""
    x = torch.ones(3, N, dtype=torch.uint8)
    with pytest.raises(DtypeError, match="is stored and not computed in"):
        bounded(x, x.to(torch.int8))


def test_a_negated_view_is_refused_on_every_device():
    x = torch._neg_view(torch.ones(3, N))
    for call in (weighted, weighted.inspect):
        with pytest.raises(UnsupportedError, match="a negated view"):
            call(x, torch.ones(N))


@htile.rowwise
def rounded_at_random(x, seed: htile.PerRow):
    """Float32 numbers that are bfloat16, one of the two next to x."""
    noise = htile.random_words(torch.arange(x.shape[-1]), seed) & 0xFFFF
    bits = x.view(torch.int32) + noise.to(torch.int32)
    return (bits & -0x10000).view(torch.float32)


def test_bits_of_float32():
    x, seed = torch.randn(3, 1001), torch.arange(3)
    y = rounded_at_random(x, seed)
    assert_close(rounded_at_random, y, x, seed)
    assert torch.equal(y.bfloat16().float(), y) and not torch.equal(x.bfloat16().float(), y)
    assert ((y - x).abs() < x.abs() * 2**-7).all()
    kernel = rounded_at_random.inspect(x, seed, arch="sm_90a")
    assert "math.bits(x)" in kernel.source and kernel.resources.stack == 0


def test_bits_of_special_numbers_and_of_values_of_rows():
    special = torch.tensor([[0.0, -0.0, 1e-45, -3e-39, torch.inf, -torch.inf, torch.nan, 1.0]])
    f = htile.rowwise(lambda x: (x.view(torch.int32), x.abs().amax().view(torch.int32)))
    bits, of_row = f(special[:, [0, 1, 2, 3, 4, 5, 7]])
    assert torch.equal(bits, special[:, [0, 1, 2, 3, 4, 5, 7]].view(torch.int32))
    assert of_row.dtype is torch.int32 and of_row.item() == 0x7F800000
    twice = htile.rowwise(lambda x: x.view(x.dtype).view(dtype=torch.int32).view(torch.float32))
    again = twice(special)
    assert torch.equal(again.view(torch.int32), special.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_one_element_whose_neighbours_are_none(dtype):
    x = torch.randn(4, 1).to(dtype)
    for f in (
        lambda x: x * torch.cat((x.new_ones(1), x[:-1])), lambda x: x + pad(x[1:], (0, 1)),
        lambda x: x - pad(x, (-1, 1)), lambda x: torch.cat((x.to(dtype), x[:0])),
    ):  # fmt: skip
        result, exact = htile.rowwise(f)(x), torch.stack([f(row) for row in x])
        assert torch.equal(result, exact) and result.dtype == exact.dtype


def test_the_elements_of_a_long_row_are_not_visited():
    def f(x):
        total = 0.0
        for value in x:
            total = total + value
        return total

    with pytest.raises(TraceError, match="one by one") as caught:
        htile.rowwise(f)(torch.ones(3, 65))
    assert caught.value.loc.text == "for value in x:"
    with pytest.raises(TraceError, match=r"x.sum\(\)"):
        htile.rowwise(lambda x: sum(x))(torch.ones(3, 65))


def test_bits_have_no_gradient():
    """But a number beside them has."""
    x = torch.randn(2, 64, requires_grad=True)
    f = htile.rowwise(lambda x: x * (x.view(torch.int32) & -0x10000).view(torch.float32))
    f(x).sum().backward()
    assert torch.equal(x.grad, (x.detach().view(torch.int32) & -0x10000).view(torch.float32))


def test_bits_of_other_dtypes_are_refused():
    for f in (
        lambda x: x.bfloat16().view(torch.int32), lambda x: x.view(torch.int64),
        lambda x: x.long().view(torch.float32), lambda x: x.view(torch.int16),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="only the bits of float32"):
            htile.rowwise(f)(torch.ones(3, 64))
