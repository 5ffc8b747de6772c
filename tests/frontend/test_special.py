"""The error function's complement, the gamma function and Bessel's functions, against float64.

Here errors are relative ones, in units in the last place of each element: those of rows are in
test_composites.py.
"""

from __future__ import annotations

import math

import pytest
import torch

import htile
from benchmarks import instructions
from htile.frontend.derive import derive
from htile.frontend.reference import evaluate
from htile.testing import ulp
from tests.gradients import called, check_tangents

INF, NAN = math.inf, math.nan
F32, F64 = torch.float32, torch.float64
SMALLEST = 2.0**-149
special = torch.special


def _ndtr(x):
    """torch's own is (1 + erf(x / 2 ** 0.5)) / 2, which is 0 from -8.3 down, in float64."""
    return 0.5 * torch.erfc(-x * math.sqrt(0.5)) if x.dtype is F64 else special.ndtr(x)


FUNCTIONS = {
    "erfc": torch.erfc, "erfcx": special.erfcx, "ndtr": _ndtr, "log_ndtr": special.log_ndtr,
    "erfinv": torch.erfinv, "ndtri": special.ndtri,
    "lgamma": torch.lgamma, "digamma": torch.digamma,
    "i0": torch.i0, "i0e": special.i0e, "i1": special.i1, "i1e": special.i1e,
}  # fmt: skip
WITHIN_1 = {"erfinv", "ndtri"}  # NaN beyond
BELOW_0 = {"lgamma", "digamma"}  # whose zeros there are differences of two terms


def kernel(name):
    function = special.ndtr if name == "ndtr" else FUNCTIONS[name]
    return htile.rowwise(lambda x: function(x))


def values(low, high, n=1 << 16):
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=F64)
    return (low + (high - low) * drawn).float()[None]


def sizes(*signs):
    """Numbers of every size."""
    powers = values(math.log(SMALLEST), math.log(3e38)).double().exp().float()
    return torch.cat([sign * powers for sign in signs], -1)


def ulps(result, exact):
    """The largest error in units of each element; what float32 does not hold is the same."""
    rounded = exact.to(result.dtype)
    is_special = ~rounded.isfinite()
    torch.testing.assert_close(
        result[is_special], rounded[is_special], rtol=0, atol=0, equal_nan=True
    )
    error = (result.double() - exact).abs() / ulp(exact.abs(), result.dtype)
    return error[~is_special].amax().item()


# the arguments, and the largest error in units in the last place
RANGES = {
    "erfc": [((-40, 0.5), 1.5), ((0, 9.2), 5), ((9.2, 10.1), 2)],
    "erfcx": [((-9.3, 0.5), 4.5), ((-30, 30), 4)],
    "ndtr": [((-0.5, 9), 1.5), ((-13.2, 0), 6), ((-14.3, -13), 2)],
    "log_ndtr": [((-60, 0), 4), ((0, 14.3), 6)],
    "erfinv": [((-1, 1), 3), ((-0.01, 0.01), 2.5), ((0.999, 1), 2.5)],
    "ndtri": [((0, 1), 3.5), ((0, 1e-6), 4), ((0.999, 1), 3), ((0.4999, 0.5001), 3)],
    "lgamma": [((0, 0.5), 2.5), ((0.5, 1.5), 5), ((1.5, 4), 4), ((4, 2000), 4)],
    "digamma": [((0, 0.5), 2.5), ((0.5, 4), 6), ((4, 2000), 2)],
    "i0": [((-92, 92), 6)],
    "i0e": [((-200, 200), 5)],
    "i1": [((-92, 92), 6)],
    "i1e": [((-200, 200), 5)],
}
CASES = [(name, x, most) for name, given in RANGES.items() for x, most in given]


@pytest.mark.parametrize(("name", "limits", "most"), CASES)
def test_relative_errors(name, limits, most):
    x = values(*limits)
    assert ulps(kernel(name)(x), FUNCTIONS[name](x.double())) <= most


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_size(name):
    x = sizes(1) if name in BELOW_0 else sizes(1, -1)
    assert ulps(kernel(name)(x), FUNCTIONS[name](x.double())) <= 6


def test_subnormal_tails():
    """Down to the last number that is not 0, half a unit beside it, and one more."""
    for name, x in (("erfc", values(9.19, 10.06)), ("ndtr", values(-14.3, -12.8))):
        result, exact = kernel(name)(x), FUNCTIONS[name](x.double())
        bound = 1.5 * SMALLEST + 5 * 2.0**-24 * exact
        assert ((result.double() - exact).abs() <= bound).all()
        small = exact < 2.0**-126
        assert small.any() and (result[exact > 0.75 * SMALLEST] > 0).all()


@pytest.mark.parametrize("name", sorted(BELOW_0))
def test_reflected(name):
    """The error is that of the terms that are added there."""
    for low, high in ((-1, 0), (-5, -1), (-50, -5), (-5000, -50)):
        x = values(low, high)
        result, exact = kernel(name)(x), FUNCTIONS[name](x.double())
        sine = (math.pi * (x.double() - x.double().round())).sin().abs()
        other = FUNCTIONS[name](-x.double()).abs()
        turned = math.pi / sine
        turned = (turned / x.double()).abs().log().abs() + 1 if name == "lgamma" else turned
        error, terms = (result.double() - exact).abs(), torch.maximum(other + turned, exact.abs())
        is_pole = x == x.round()
        assert torch.equal(result[is_pole], exact[is_pole].float()) or name == "digamma"
        assert (error <= 4 * 2.0**-24 * terms)[~is_pole].all()


EDGES = torch.tensor([[0.0, -0.0, INF, -INF, NAN, -1.0, -2.0, -101.0, -8388609.0, -3e38, 3e38,
                       1.0, 2.0, SMALLEST, -SMALLEST]])  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_edges(name):
    """Zeros with their signs, poles, infinities and NaN; near numbers are near enough."""
    result, exact = kernel(name)(EDGES), FUNCTIONS[name](EDGES.double()).float()
    torch.testing.assert_close(result, exact, rtol=1e-6, atol=SMALLEST, equal_nan=True)
    zero = (result == 0) & (exact == 0)
    assert torch.equal(result[zero].signbit(), exact[zero].signbit())


def test_exact_values():
    x = torch.tensor([[0.0, 1.0, 2.0]])
    for name, exact in (("erfc", 1.0), ("erfcx", 1.0), ("ndtr", 0.5), ("i0", 1.0), ("i0e", 1.0)):
        assert kernel(name)(x)[0, 0] == exact
    assert kernel("lgamma")(x)[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_16_bits(name, dtype):
    """Of every number of the dtype, rounded once. Of the poles below 0 the error is torch's."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)[None]
    x = x[:, x[0] > 0] if name in BELOW_0 else x
    result, exact = kernel(name)(x), FUNCTIONS[name](x.double())
    assert result.dtype is dtype and ulps(result, exact) <= 0.51


def test_integers_and_spellings():
    @htile.rowwise
    def f(i):
        return (
            torch.erfc(i), i.erfc(), special.erfc(i), torch.lgamma(i), i.lgamma(),
            special.gammaln(i), i.digamma(), special.digamma(i), special.psi(i), i.i0(),
            special.i0(i), special.ndtr(i), special.log_ndtr(i), special.erfcx(i),
            (i == 0).erfinv(), special.erfinv(i // 99), special.ndtri(i == 9),
        )  # fmt: skip

    i = torch.arange(1, 9)[None]
    for result, exact in zip(f(i), f._fn(i.double()), strict=True):
        assert result.dtype is F32
        torch.testing.assert_close(result, exact.float(), rtol=1e-6, atol=0)


def test_in_place():
    x = values(1.5, 3)

    @htile.rowwise
    def f(x):
        x = x.clone()
        x.lgamma_()
        x.erfc_()
        return x

    exact = torch.erfc(torch.lgamma(x.double()))
    torch.testing.assert_close(f(x), exact.float(), rtol=1e-6, atol=0)


# ---- derivatives ---------------------------------------------------------------------------------


def derivatives(name, x):
    """The first one and the second one, as kernels compute them: in float32."""
    call = called(kernel(name), x)
    first = derive(call.graph, ("x",), call.outputs)
    second = derive(first, ("x",), ("d_x",))
    ones = {i.name: torch.ones_like(x) for i in second.inputs if i.name != "x"}
    run = lambda graph: evaluate(graph, {"x": x, **ones}, call.lead, F32)["d_x"]  # noqa: E731
    return run(first), run(second)


def autograd(name, x):
    """Both by torch's autograd, in float64."""
    x = x.double().requires_grad_()
    (first,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.detach(), second


SMOOTH = {  # where float64 autograd is exact itself
    "erfinv": (-0.9999, 0.9999), "ndtri": (1e-6, 0.9999),
    "erfc": (-9, 9), "erfcx": (-9, 100), "ndtr": (-13, 13), "log_ndtr": (-20, 12),
    "lgamma": (0.001, 100), "digamma": (0.001, 100), "i0": (-80, 80), "i1": (-80, 80),
    "i0e": (-200, 200), "i1e": (-200, 200),
}  # fmt: skip
CROSSING = {"i0e", "i1e"}  # whose derivatives have zeros, of terms as large as the function


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives(name):
    """They have as many digits as the function."""
    low, high = SMOOTH[name]
    x = torch.cat([values(low, high, 4096), values(max(low, -1), 1, 4096)], -1)
    for found, exact in zip(derivatives(name, x), autograd(name, x), strict=True):
        scale = exact.abs()
        if name in CROSSING:
            scale = scale + FUNCTIONS[name](x.double()).abs()
        digits = (found.double() - exact).abs() / scale.clamp(min=2.0**-120)
        assert digits.amax() < (3e-6 if name in ("erfcx", *CROSSING) else 1e-6), name


@pytest.mark.parametrize("name", sorted(BELOW_0))
def test_derivatives_below_0(name):
    x = values(-20, 0, 4096)
    for found, exact in zip(derivatives(name, x), autograd(name, x), strict=True):
        turned = 1 / (x.double() - x.double().round()).abs()
        order = {"lgamma": 1, "digamma": 2}[name] + (exact is not None) - 1
        scale = exact.abs() + turned**order + 1
        assert ((found.double() - exact).abs() / scale).amax() < 3e-6


def test_derivatives_in_the_tails():
    """Neither NaN nor a difference of large terms, of which float64 autograd makes some."""
    far = torch.tensor([[1e4, 1e8, 1e18, 3e38, INF]])
    first, second = derivatives("erfcx", far)
    exact = -1 / math.sqrt(math.pi) / far.double() ** 2
    torch.testing.assert_close(first.double(), exact, rtol=1e-6, atol=SMALLEST)
    torch.testing.assert_close(second.double(), -2 * exact / far.double(), rtol=1e-5, atol=SMALLEST)
    assert [d.tolist() for d in derivatives("erfcx", -far)] == [[[-INF] * 5], [[INF] * 5]]
    for name in ("erfc", "ndtr"):
        for x in (far, -far):
            assert [d.abs().tolist() for d in derivatives(name, x)] == [[[0.0] * 5]] * 2
    assert [d.abs().tolist() for d in derivatives("log_ndtr", far)] == [[[0.0] * 5]] * 2
    first, second = derivatives("log_ndtr", -far)
    torch.testing.assert_close(first, far, rtol=3e-7, atol=0)
    torch.testing.assert_close(second, torch.full_like(far, -1), rtol=3e-7, atol=0)
    for name in ("i0", "i1"):
        for d in (*derivatives(name, far[:, :-1]), *derivatives(name, -far[:, :-1])):
            assert d.isinf().all()
    for name in ("i0e", "i1e"):
        assert not torch.cat([*derivatives(name, far), *derivatives(name, -far)]).isnan().any()
    first, second = derivatives("lgamma", far)
    torch.testing.assert_close(first, far.double().digamma().float(), rtol=3e-7, atol=0)
    torch.testing.assert_close(second, 1 / far, rtol=1e-4, atol=0)


def test_derivatives_at_the_ends():
    for name, x in (("erfinv", [[-1.0, 1.0]]), ("ndtri", [[0.0, 1.0]])):
        first, _ = derivatives(name, torch.tensor(x))
        assert first.tolist() == [[INF, INF]]


def test_they_are_inverses():
    x = values(-3, 3)
    f = htile.rowwise(lambda x: (torch.erf(x).erfinv(), special.ndtri(special.ndtr(x))))
    for found, slope in zip(f(x), (2 / math.sqrt(math.pi) * torch.exp(-x * x), torch.exp(-x * x / 2)
                                   / math.sqrt(2 * math.pi)), strict=True):  # fmt: skip
        assert ((found - x).abs() <= 2.0**-23 / slope + 1e-6 * x.abs()).all()


def test_autograd_runs_them_twice():
    """Through calls, as a user has it."""
    x = values(0.3, 3, 64).requires_grad_()
    f = htile.rowwise(lambda x: (torch.lgamma(x) * torch.erfc(x) + special.log_ndtr(-x)).sum())
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    y = x.detach().double().requires_grad_()
    exact = (torch.lgamma(y) * torch.erfc(y) + special.log_ndtr(-y)).sum()
    (first_exact,) = torch.autograd.grad(exact, y, create_graph=True)
    (second_exact,) = torch.autograd.grad(first_exact.square().sum(), y)
    torch.testing.assert_close(first, first_exact.float(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(second, second_exact.float(), rtol=2e-6, atol=2e-6)


def test_derivatives_of_nan():
    for name in FUNCTIONS:
        assert all(d.isnan().all() for d in derivatives(name, torch.tensor([[NAN]]))), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents(name):
    high = 0.9 if name in WITHIN_1 else 3
    check_tangents(kernel(name), values(0.2, high, 64), tolerance=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_slope_is_computed_forwards(name):
    """The derivative of a function is in its graph, and no kernel has it."""
    f = kernel(name)
    plan = f.inspect(torch.empty(4, 4096, device="meta")).plan
    traced = called(f, torch.ones(1, 4)).graph
    assert len(plan.graph) < len(traced)
    assert not [node for node in plan.graph if node.arg is True]


@pytest.mark.parametrize("dtype", (F32, torch.bfloat16))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_compile(name, dtype):
    """Those of both passes, without a stack."""
    x = torch.empty(4, 4096, dtype=dtype, device="meta")
    forward = kernel(name).inspect(x, arch="sm_90a")
    for compiled in (forward, forward.backward):
        assert compiled.resources.stack == 0 and compiled.resources.registers <= 128


# Instructions for an element. Of a softplus, which takes 18 itself, the logarithm is not reflected.
MOST_INSTRUCTIONS = {
    "erfc": 54, "ndtr": 56, "lgamma": 84, "digamma": 88, "lgamma(softplus)": 71
}  # fmt: skip


def test_instructions():
    pytest.importorskip("cutlass")
    found = instructions.table([*MOST_INSTRUCTIONS], torch.float32)
    assert all(found[name][0] <= most for name, most in MOST_INSTRUCTIONS.items()), found
