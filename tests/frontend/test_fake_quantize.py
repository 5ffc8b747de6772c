"""Quantization that stays in floats is torch's, its gradients too."""

from __future__ import annotations

import pytest
import torch

import htile
from htile import ArgumentError, DtypeError, HTileError, ShapeError
from htile.testing import assert_close
from tests.lower.cases import F32, kernel_of

per_tensor = torch.fake_quantize_per_tensor_affine
per_channel = torch.fake_quantize_per_channel_affine


def fixed(x):
    return per_tensor(x, 0.037, 3, -128, 127)


def of_four_bits(x):
    return per_tensor(x * 3, 0.1, -1, -8, 7)


def by_the_largest_element(x):
    zero = torch.zeros((), dtype=torch.int32)
    return per_tensor(x, x.detach().abs().amax() / 127, zero, -128, 127)


def asymmetric(x):
    low, high = x.amin().detach().clamp(max=0), x.amax().detach().clamp(min=0)
    scale = (high - low) / 255
    zero = torch.round(-low / scale).int()
    return per_tensor(x, scale, zero, 0, 255)


def by_tensors_of_one_element(x):
    return per_tensor(x, torch.full((1,), 0.1), torch.full((1,), 3, dtype=torch.int32), -8, 7)


def of_groups(x):
    groups = x.view(-1, 4)
    scale = groups.detach().abs().amax(-1).float() / 7  # torch takes no other dtype
    zero = torch.zeros(scale.shape[0], dtype=torch.int32)
    return per_channel(groups, scale, zero, 0, -8, 7).reshape(-1)


def of_columns(x, scale, zero):
    return per_channel(x, scale, zero, 0, -8, 7)


ONE_ROW = {f.__name__: f for f in (fixed, of_four_bits, by_the_largest_element, asymmetric,
                                   by_tensors_of_one_element, of_groups)}  # fmt: skip
LENGTHS = (8, 100, 1000)


def rows(n, m=5):
    g = torch.Generator().manual_seed(n)
    return torch.randn(m, n, generator=g)


def by_row(function, x, *others):
    return torch.stack([function(row, *others) for row in x])


def compared(function, x, *others):
    """Values and gradients are those that torch has for each row in float64."""
    x, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    weights = rows(x.shape[-1], x.shape[0])
    found, expected = htile.rowwise(function)(x, *others), by_row(function, exact, *others)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    (one,) = torch.autograd.grad((found * weights).sum(), x)
    (other,) = torch.autograd.grad((expected * weights).sum(), exact)
    torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
    assert 0 < (other == 0).sum() < other.numel() or function is not of_four_bits


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", ONE_ROW)
def test_values_and_gradients_are_torchs(name, n):
    f, x = htile.rowwise(ONE_ROW[name]), rows(n)
    assert_close(f, f(x), x)
    compared(ONE_ROW[name], x)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_scale_for_each_column(n):
    g = torch.Generator().manual_seed(n)
    scale, zero = torch.rand(n, generator=g) * 0.2 + 0.05, torch.arange(n, dtype=torch.int32) % 5
    compared(of_columns, rows(n), scale, zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_elements(dtype):
    x = rows(64).to(dtype)
    found = htile.rowwise(fixed)(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, by_row(fixed, x), rtol=0, atol=0)


def test_halves_go_to_the_even_number():
    """Products with the inverse of this scale are exact, so that halves are halves."""
    x = torch.arange(-40, 40)[None] / 8
    f = htile.rowwise(lambda x: per_tensor(x, 0.25, 0, -8, 7))
    torch.testing.assert_close(f(x), by_row(lambda x: per_tensor(x, 0.25, 0, -8, 7), x),
                               rtol=0, atol=0)  # fmt: skip


def test_edges():
    """NaN is the lowest number as in torch. Infinities are the ends, which torch says on a GPU."""
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e30, -1e30, -0.0, 0.0, 1e-30]])
    x.requires_grad_()
    found = htile.rowwise(lambda x: per_tensor(x, 0.5, 1, -8, 7))(x)
    assert found.tolist() == [[-4.5, 3.0, -4.5, 3.0, -4.5, 0.0, 0.0, 0.0]]
    found.sum().backward()
    assert x.grad.tolist() == [[0.0] * 5 + [1.0] * 3]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_and_divides_nothing_by_a_number(arch):
    kernel = kernel_of(fixed, torch.empty(64, 4096, dtype=F32, device="meta"), arch=arch)
    assert "div" not in {node.op.value for node in kernel.graph}


REFUSED = {
    "bounds": (lambda x: per_tensor(x, 0.1, 0, 7, -8), ArgumentError, "quant_min <= quant_max"),
    "a zero point beyond": (
        lambda x: per_tensor(x, 0.1, 9, -8, 7), ArgumentError, "a zero point between"),
    "one number": (
        lambda x: per_tensor(x, x.amax(), 0, -8, 7), ArgumentError, "both numbers, or both"),
    "many scales": (
        lambda x: per_tensor(x, x, torch.zeros_like(x), -8, 7), ShapeError, "one scale"),
    "integers": (lambda x: per_tensor(x.int(), 0.1, 0, -8, 7), DtypeError, "x.float()"),
    "an integer scale": (
        lambda x: per_tensor(x, x.int().amax(), x.int().amin(), -8, 7), DtypeError, "of float32"),
    "a zero point of integers in floats": (
        lambda x: per_channel(x, x, x * 0.5, 0, -8, 7), DtypeError, "of int32"),
    "a scale for all": (
        lambda x: per_channel(x, x.amax(), x.amin(), 0, -8, 7), ShapeError, "a scale of shape"),
    "an axis that is not there": (
        lambda x: per_channel(x, x, x, 1, -8, 7), ShapeError, "dim=1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_raise(name):
    function, error, message = REFUSED[name]
    with pytest.raises(HTileError) as caught:
        htile.rowwise(function)(torch.ones(2, 8))
    assert type(caught.value) is error and message in caught.value.message
    assert caught.value.loc is not None
