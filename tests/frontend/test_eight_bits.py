"""Arithmetic on integers of 8 bits wraps as torch's does, of all operands that there are."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import DtypeError
from tests.frontend.test_indices import exact, kernels_graph

BYTES = (torch.uint8, torch.int8)


def not_zero(b):
    return torch.where(b == 0, 1, b)


def rows_of_all(dtype):
    return torch.stack([torch.arange(256), torch.arange(256).flip(0) * 3]).to(dtype)


def each_row(f, *args):
    """What torch itself gives for each row."""
    found = [pytree.tree_leaves(f(*row)) for row in zip(*args, strict=True)]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def check(f, *args):
    expected = each_row(f, *args)
    found = pytree.tree_leaves(htile.rowwise(f)(*args))
    assert len(found) == len(expected)
    for of_call, right in zip(found, expected, strict=True):
        exact(of_call, right)
    return expected


PAIRS = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "floor": lambda a, b: a // not_zero(b),
    "remainder": lambda a, b: a % not_zero(b),
    "fmod": lambda a, b: torch.fmod(a, not_zero(b)),
    "trunc": lambda a, b: torch.div(a, not_zero(b), rounding_mode="trunc"),
    "maximum": lambda a, b: torch.maximum(a, b),
    "min": lambda a, b: torch.min(a, b),
    "clamp": lambda a, b: a.clamp(min=b),
    "where": lambda a, b: torch.where(a > b, a, b),
    "alpha": lambda a, b: torch.add(a, b, alpha=3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
}


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_all_pairs(name, dtype):
    a = torch.arange(256).to(dtype)[:, None].expand(256, 256).contiguous()
    b = a.t().contiguous()
    (expected,) = check(PAIRS[name], a, b)
    exact(kernels_graph(htile.rowwise(PAIRS[name]), (a, b), (256,)), expected)


SINGLE = {
    "numbers": lambda a: (a + 8, a - 1, 255 - a, a * 300, a + True, 3 * a),
    "signs": lambda a: (-a, a.abs(), a.sign(), abs(a)),
    "powers": lambda a: (a**2, a**3, torch.square(a)),
    "bounds": lambda a: (a.clamp(3, 100), torch.clamp(a, max=7), a.clip(min=5)),
    "parts of numbers": lambda a: (a // 16, a % 16, torch.div(a, 3, rounding_mode="trunc")),
    "choice": lambda a: (torch.where(a > 5, a, 7), torch.where(a > 5, a, 0.5)),
    "extremes": lambda a: (a.amax(), a.max(), a.min(-1).values, a.max(-1).indices, a.aminmax()),
    "ranks": lambda a: (a.argmax(), a.topk(3), a.median(), a.kthvalue(9).values),
    "running": lambda a: (a.cummax(-1).values, a.cumsum(-1), a.prod()),
    "neighbours": lambda a: (a.diff(), a[1:] - a[:-1]),
    "pairs": lambda a: a[::2] + a[1::2],
    "masks": lambda a: (a + (a > 3), a * (a > 3)),
    "wider numbers": lambda a: (a + torch.tensor(1000), a // torch.tensor(259)),
    "constants": lambda a: (torch.zeros_like(a) + a, a.new_full((256,), 7) - a,
                            torch.ones(256, dtype=a.dtype) + a, torch.zeros(256, dtype=a.dtype) | a,
                            a.clone().fill_(3) * a),
}  # fmt: skip


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", SINGLE)
def test_of_one_operand(name, dtype):
    check(SINGLE[name], rows_of_all(dtype))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_in_place(dtype):
    def f(a):
        b = a.clone()
        b += 3
        b *= 5
        b -= a
        b.add_(7)
        b.clamp_(2, 90)
        b[2:9] += 1
        b //= 3
        b[b > 20] = 1
        return b

    check(f, rows_of_all(dtype))


def test_codes_of_4_bits():
    """As people write them: two codes a byte, and eight a word whose parts are int8."""

    def packed(x, scale: float = 0.25):
        q = torch.clamp(torch.round(x / scale), -8, 7).to(torch.int8)
        q = (q + 8).to(torch.uint8)
        return q[::2] | (q[1::2] << 4)

    def restored(words):
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        w = torch.bitwise_right_shift(words[:, None].expand(-1, 8), shifts).to(torch.int8)
        return ((torch.bitwise_and(w, 15) - 8) * 0.5).flatten()

    x = torch.randn(4, 96)
    for found, right in zip(htile.rowwise(packed)(x), map(packed, x), strict=True):
        exact(found, right)
    words = torch.randint(-(2**31), 2**31 - 1, (4, 12), dtype=torch.int32)
    check(restored, words)


def test_a_kernel_wraps_too():
    """The kernel computes in int32 and stores bytes, of which the compiler is given all pairs."""
    kernel = htile.rowwise(lambda a, b: a * b + 1).inspect(
        *torch.empty(2, 4, 256, dtype=torch.uint8, device="meta"), arch="sm_90a"
    )
    assert "Uint8" in kernel.source and not kernel.resources.stack


REFUSED = {
    "a bound beyond 8 bits": lambda a: a.clamp(max=300),
    "a divisor beyond 8 bits": lambda a: a // 300,
    "a choice beyond 8 bits": lambda a: torch.where(a > 3, a, 300),
    "a comparison beyond 8 bits": lambda a: a == -1,
    "both kinds": lambda a: a + a.to(torch.int8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_torch_cuts_or_refuses(name):
    with pytest.raises(DtypeError, match=r"convert (it|the tensor) first, x\."):
        htile.rowwise(REFUSED[name])(rows_of_all(torch.uint8))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_elements_of_rows_of_any_length(dtype, n):
    rows = torch.tensor([200, 7, 0, 255]).to(dtype)[:, None].repeat(1, n)
    check(lambda x: x[0] + x[-1], rows)
    check(lambda x: x[-1:].squeeze(-1), rows)


def test_the_element_of_a_row_of_one_float8():
    rows = torch.tensor([1.5, -448.0, math.nan])[:, None].to(torch.float8_e4m3fn)
    found = htile.rowwise(lambda x: x[0])(rows)
    assert found.dtype is torch.float8_e4m3fn
    assert torch.equal(found.view(torch.uint8), rows[:, 0].view(torch.uint8))
