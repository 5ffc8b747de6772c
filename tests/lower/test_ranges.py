"""The ranges of values, and the short functions that they allow."""

import math

import pytest
import torch

import htile
from htile.frontend.ops import Op
from htile.lower.patterns import Function
from htile.lower.ranges import range_of

N = 64
BF16, HALF = torch.bfloat16, torch.float16


def traced(function, dtype=torch.float32):
    """The placed graph of a function of one row of so many elements."""
    x = torch.empty(4, N, dtype=dtype, device="meta")
    return htile.rowwise(function).inspect(x, arch="sm_90a").graph


def last(function, dtype=torch.float32):
    """The range of what a function returns."""
    graph = traced(function, dtype)
    return range_of(graph, graph[graph.outputs[0].id])


@pytest.mark.parametrize("function, expected", [
    (lambda x: x + torch.arange(N), (-math.inf, math.inf)),
    (lambda x: torch.where(x > 0, torch.arange(N) * 0.5, -1.0), (-1, 31.5)),
    (lambda x: torch.sigmoid(x) + 1e-8, (1e-8, 1 + 1e-8)),
    (lambda x: x * x + 1, (1, math.inf)),
    (lambda x: 3 - torch.tanh(x).abs() / 2, (2.5, 3)),
    (lambda x: -x.clamp(-2, 5), (-5, 2)),
    (lambda x: x.clamp(min=0.25), (0.25, math.inf)),
    (lambda x: torch.remainder(x, 3.0), (0, 3)),
    (lambda x: torch.maximum(torch.sin(x), torch.exp(x)), (-1, math.inf)),
    (lambda x: torch.where(x > 0, math.inf, x.cos()), (-math.inf, math.inf)),
])  # fmt: skip
def test_ranges(function, expected):
    assert last(function) == pytest.approx(expected, rel=1e-5, abs=1e-40)


@pytest.mark.parametrize("dtype, most", [
    (HALF, 65504.0), (torch.int8, 128), (torch.uint8, 255), (BF16, torch.finfo(BF16).max),
])  # fmt: skip
def test_a_dtype_has_a_range(dtype, most):
    low, high = last(lambda x: x.float(), dtype)
    assert max(-low, high) == pytest.approx(most)


def test_integers_wrap():
    """A product that leaves int64 may be any number of it."""
    graph = traced(lambda x: torch.where(x > 0, (torch.arange(N) * 2**60), 0))
    assert range_of(graph, graph[graph.outputs[0].id]) == (-(2**63), 2**63 - 1)


def test_infinity_may_become_a_number():
    """The smaller of infinity in float16 and of a number is the number, however large it is."""
    assert last(lambda x: x.float().clamp(max=1e6), HALF)[1] == 1e6
    # What is infinite saturates there.
    assert last(lambda x: torch.sigmoid(x).to(torch.float8_e4m3fn).float() * 2)[1] >= 2 * 448


def functions(function, dtype=torch.float32):
    """The device functions that a kernel computes sines, cosines and logarithms with."""
    x = torch.empty(4, N, dtype=dtype, device="meta")
    steps = htile.rowwise(function).inspect(x, arch="sm_90a").plan.steps
    graph = traced(function, dtype)
    ops = (Op.SIN, Op.COS, Op.LOG, Op.LOG2, Op.LOG10)
    return {s.function for s in steps if getattr(s, "function", None) and graph[s.id].op in ops}


@pytest.mark.parametrize("function, dtype", [
    (lambda x: x * torch.hann_window(N), torch.float32),
    (lambda x: x * torch.cos(2 * math.pi * torch.arange(N) / N), torch.float32),
    (lambda x: x.float().sin(), HALF),
    (lambda x: torch.log(x.clamp(min=1e-6)), torch.float32),
    (lambda x: torch.log2(torch.sigmoid(x) + 1e-8), torch.float32),
    (lambda x: torch.log10(x * x + 1e-10), torch.float32),
])  # fmt: skip
def test_short_functions(function, dtype):
    assert functions(function, dtype) == {Function.BOUNDED}


# Rounding takes the operands of these out of the range that the exact numbers have.
@pytest.mark.parametrize("function", [
    lambda x: torch.log((x.clamp(min=1.0).to(BF16).float() - 1.0) + 1e-40),
    lambda x: torch.sin((torch.sigmoid(x) + 2e10).to(BF16).float() - 2e10 * (1 + 2**-7)),
    lambda x: torch.log(x.clamp(min=1e-10).to(HALF).float() + 1e-40),
    lambda x: torch.sin((torch.sigmoid(x) * 4.2e-8).to(HALF).float() * 2.3e12),
    lambda x: x + torch.sin(torch.arange(61).to(torch.float8_e5m2).float()[:1] * 1666.0),
    lambda x: torch.sin(x.to(torch.int32).clamp(3, 3100).to(torch.float8_e8m0fnu).float() * 30.0),
    lambda x: torch.sin((((x.long() % 64) + (2**62 + 511)) - 2**62).float() * 1000.0),
    lambda x: torch.sin((((x.long() % 64) + (2**40 + 65000)).float() - 2.0**40) * 1.5),
    lambda x: torch.log((torch.sigmoid(x) + 3 + 2.0**30 - 2.0**30) + 1e-40),
    lambda x: torch.log(1 - torch.sigmoid(x) * 0.99999999 + 1e-40),
    lambda x: torch.sin((torch.sigmoid(x) + (2.0**30 + 65) - 2.0**30) * 1000.0),
])  # fmt: skip
def test_rounding_counts(function):
    assert Function.BOUNDED not in functions(function)


def test_a_deep_graph_has_ranges():
    def deep(x):
        for _ in range(400):
            x = x * x - 0.5
        return torch.sin(x)

    assert last(deep) == (-1, 1)


@pytest.mark.parametrize("function, dtype", [
    (lambda x: x.sin(), torch.float32),
    (lambda x: (x * 2).float().sin(), HALF),
    (lambda x: x * torch.cos(torch.arange(N) * 1e4), torch.float32),
    (lambda x: torch.log(x.clamp(min=1e-40)), torch.float32),
    (lambda x: torch.log(x.abs()), torch.float32),
])  # fmt: skip
def test_full_functions(function, dtype):
    assert functions(function, dtype) == {Function.EXACT}


def test_a_window_has_no_branch():
    kernel = htile.rowwise(lambda x: x * torch.hann_window(N)).inspect(
        torch.empty(4, N, device="meta"), arch="sm_90a")  # fmt: skip
    assert "cos_bounded(" in kernel.source and ".local" not in kernel.ptx
