"""Powers whose exponent a call gives. Their PTX runs on numpy, one kernel for all exponents."""

import math

import pytest
import torch

import htile
from htile.lower.patterns import Function
from tests.lower.cases import BF16
from tests.primitives.ptx_device import launch

INF, NAN = math.inf, math.nan
WHOLE = (1.0, 2.0, 3.0, 4.0)
EXPONENTS = (
    *WHOLE, 0.0, 5.0, -1.0, -2.0, 7.0, 64.0, 0.5, 2.5, -0.3, 63.7, 65.0, 1e4, INF, -INF, NAN
)  # fmt: skip
EDGES = (0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 2.0, -2.0, 0.5, -3.0, 1e-30, -1e20, 3e38, 1e-40)
N = 104


@htile.rowwise
def power(x, p: float):
    return x**p


@htile.rowwise
def norm(x, p: float):
    return (x.abs() ** p).mean() ** (1 / p)


def function_of(kernel):
    (function,) = {step.function for sweep in kernel.plan.sweeps.all for step in sweep.computes
                   if kernel.graph[step.id].op.value == "pow"}  # fmt: skip
    return function


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_values(dtype):
    """Zeros, infinities, NaN and negative numbers too; the sign of a result as well."""
    torch.manual_seed(3)
    x = torch.cat([torch.tensor(EDGES), torch.rand(40) * 3, -torch.rand(N - 55) * 3])
    x = x.to(dtype)[None].repeat(2, 1)
    kernel = power.inspect(x, 2.0, arch="sm_90a")
    is_near = dtype is BF16
    assert function_of(kernel) is (Function.NEAR if is_near else Function.SCALAR)
    for exponent in EXPONENTS:
        out = torch.zeros_like(x)
        launch(kernel.ptx, (2, 1), [x, exponent, out], is_emitted=True)
        # With a tensor as exponent, torch takes no square root for 0.5, as it does for a number.
        exact = x.double().pow(torch.tensor(exponent).double()).to(dtype)
        error = (out.double() - exact.double()).abs() / exact.double().abs()
        right = (out == exact) | (out.isnan() & exact.isnan())
        right |= error <= (2.0**-8 if is_near else 4 * 2.0**-24)
        right |= (exact.abs() < 2.0**-120) & (out.abs() < 2.0**-119)
        right &= exact.isnan() | (out.signbit() == exact.signbit())
        assert right.all(), (exponent, x[~right], out[~right], exact[~right])


def test_whole_exponents_are_products():
    """The bits are those of the products, as with torch's own 2 and 3."""
    x = torch.randn(2, N)
    kernel = power.inspect(x, 2.0, arch="sm_90a")
    products = {1.0: x, 2.0: x * x, 3.0: x * x * x, 4.0: (x * x) * (x * x)}
    for exponent, product in products.items():
        out = torch.zeros_like(x)
        launch(kernel.ptx, (2, 1), [x, exponent, out], is_emitted=True)
        assert torch.equal(out, product)


@pytest.mark.parametrize("p", (1.0, 2.0, 3.0, 2.5))
def test_exponents_that_are_computed_of_the_call(p):
    x = torch.randn(2, N)
    kernel, out = norm.inspect(x, 2.0, arch="sm_90a"), torch.zeros(2)
    launch(kernel.ptx, (2, 1), [x, p, out], is_emitted=True)
    exact = (x.double().abs() ** p).mean(-1) ** (1 / p)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=0)


@htile.rowwise
def of_rows(x, p: htile.PerRow):
    return x**p


def test_an_exponent_of_each_row_takes_one_function_for_all():
    """Rows beside each other would have a vector of exponents, and bits do not depend on that."""
    kernel = of_rows.inspect(torch.rand(3, N), torch.rand(3), arch="sm_90a")
    assert function_of(kernel) is Function.EXACT
