"""Movements of values of every shape, held against torch, and their kernels lowered to text.

What they refuse is in tests/frontend/test_trace_errors.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import DtypeError, ShapeError, UnsupportedError

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


@htile.rowwise
def weighted(x, w):
    return x * w.sum()


@htile.rowwise
def bounded(x, y):
    return x.clamp(y, None)


def test_a_vector_without_elements():
    with pytest.raises(ShapeError, match=r"w has no elements, got w \(0,\)"):
        weighted(torch.ones(3, N), torch.ones(0))


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
