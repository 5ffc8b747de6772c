"""Slopes of torch's functions at their edges: ties, zeros, infinities, NaN and masks.

Where a function has no derivative, torch takes one of several slopes; the same one is taken here.
Each case is compared in float64, with gradients of 1.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.derive import derive
from htile.frontend.ops import Op
from tests.gradients import autograd, called, check_second, cotangents, gradients

INF, NAN = math.inf, math.nan
EDGES = torch.tensor([[-95.0, -6.0, -3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 0.7, 1.0, 2.0, 3.0, 6.0,
                       20.0, 21.0, 95.0]])  # fmt: skip
FAR = torch.tensor([[-INF, INF]])
LEFT = torch.tensor([[1.0, -2.0, 0.0, 3.0, -1.0, 0.5, 0.0]])
RIGHT = torch.tensor([[1.0, 2.0, 0.0, -3.0, 0.0, 2.5, 2.0]])
TIES, ZEROS, EQUAL = torch.tensor([[1.0, 3, 3, 0, 0, 3]]), torch.zeros(1, 6), torch.ones(1, 6)


def compared(f, *args, tolerance=1e-6):
    """The names of the parameters whose gradient is not torch's."""
    call = called(htile.rowwise(f), *args)
    given = {name: torch.ones_like(g) for name, g in cotangents(call).items()}
    exact, found = autograd(call, given), gradients(call, given)
    differ = []
    for name in call.wrt:
        right = exact[name] if exact[name] is not None else torch.zeros_like(call.values[name])
        mine = found.get(name, torch.zeros_like(right))
        same = (mine - right).abs() <= tolerance * (1 + right.abs())
        same |= (mine == right) | (mine.isnan() & right.isnan())
        differ += [name] * (not same.all())
    return differ


# at their bounds and zeros, which float64 tells apart
ELEMENTWISE = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "hardshrink": F.hardshrink, "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink, "elu": F.elu, "selu": F.selu, "leaky_relu": F.leaky_relu,
    "softplus": F.softplus, "logsigmoid": F.logsigmoid, "mish": F.mish, "silu": F.silu,
    "gelu": F.gelu, "softsign": F.softsign, "abs": torch.abs, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "log1p": torch.log1p, "log": torch.log,
    "log2": torch.log2, "log10": torch.log10, "exp2": torch.exp2, "expm1": torch.expm1,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sinh": torch.sinh, "cosh": torch.cosh,
    "asinh": torch.asinh, "atan": torch.atan, "asin": torch.asin,
    "acos": torch.acos, "atanh": torch.atanh, "acosh": torch.acosh, "tan": torch.tan,
    "sinc": torch.sinc,
    "frac": torch.frac, "square": torch.square, "reciprocal": torch.reciprocal,
    "celu": lambda x: F.celu(x, 2.0), "softplus of 2": lambda x: F.softplus(x, 2.0, 10.0),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, 2.0), "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp_min": lambda x: x.clamp(min=0.0), "clamp_max": lambda x: x.clamp(max=2.0),
    "a power": lambda x: x.abs() ** 2.5, "a root": lambda x: x.abs() ** 0.5,
    "a cube": lambda x: x**3, "powers of 3": lambda x: torch.pow(3.0, x),
    "powers of 0": lambda x: torch.pow(0.0, x), "maximum": lambda x: torch.maximum(x, -x),
    "minimum": lambda x: torch.minimum(x, torch.zeros_like(x)),
    "remainder": lambda x: torch.remainder(x, 0.7), "nan_to_num": lambda x: x.nan_to_num(),
    "rounded": lambda x: x.round() + x.floor() * x,
    "logit": torch.logit, "logit of special": torch.special.logit,
    "logit, eps": lambda x: torch.logit(x, eps=0.3),
    "logit, eps of 0": lambda x: torch.logit(x, 0.0),
    "straight through": lambda x: (x.round() - x).detach() + x,
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    f = ELEMENTWISE[name]
    assert compared(lambda x: f(x), EDGES) == []


def test_an_eps_below_0_clamps_nothing():
    """torch's transforms have another slope there, so the tangents of it are not compared."""
    assert compared(lambda x: torch.logit(x, -1.0), EDGES) == []


UNBOUNDED = ("relu", "relu6", "hardtanh", "hardsigmoid", "hardswish", "clamp", "clamp_min",
             "clamp_max", "softplus", "logsigmoid", "elu", "leaky_relu", "tanh", "sigmoid", "abs",
             "softsign", "sqrt", "log", "maximum", "minimum", "threshold", "logit",
             "logit, eps")  # fmt: skip


@pytest.mark.parametrize("name", UNBOUNDED)
def test_of_infinities(name):
    f = ELEMENTWISE[name]
    assert compared(lambda x: f(x), FAR) == []


@pytest.mark.parametrize("name", ("relu", "relu6", "hardtanh", "clamp", "clamp_min", "maximum",
                                  "minimum", "abs", "softplus", "sqrt", "logit",
                                  "logit, eps"))  # fmt: skip
def test_of_nan(name):
    f = ELEMENTWISE[name]
    assert compared(lambda x: f(x), torch.tensor([[NAN, 1.0]])) == []


PAIRS = {
    "pow": lambda x, y: torch.pow(x, y), "div": lambda x, y: x / y,
    "remainder": lambda x, y: torch.remainder(x, y.abs() + 0.3),
    "fmod": lambda x, y: torch.fmod(x, y.abs() + 0.3),
    "atan2": lambda x, y: torch.atan2(x, y), "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y), "fmax": lambda x, y: torch.fmax(x, y),
    "fmin": lambda x, y: torch.fmin(x, y), "logaddexp": lambda x, y: torch.logaddexp(x, y),
    "logaddexp2": lambda x, y: torch.logaddexp2(x, y),
    "hypot": lambda x, y: torch.hypot(x, y), "copysign": lambda x, y: torch.copysign(x, y),
    "clamp": lambda x, y: x.clamp(y, y + 1), "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp by itself": lambda x, y: torch.lerp(x, y, x),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 0.5),
    "xlogy of zeros": lambda x, y: torch.xlogy(x, y),
    "xlog1py of zeros": lambda x, y: torch.special.xlog1py(x, y - 1),
    "xlog1py": lambda x, y: torch.special.xlog1py(x, y.abs()),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y), "l1": lambda x, y: F.l1_loss(x, y),
    "huber": lambda x, y: F.huber_loss(x, y), "mse": lambda x, y: F.mse_loss(x, y),
    "kl_div": lambda x, y: F.kl_div(x, y.abs() + 0.1),
    "cross entropy of logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "cosine": lambda x, y: F.cosine_similarity(x, y, dim=-1),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    assert compared(PAIRS[name], LEFT, RIGHT) == []


@pytest.mark.parametrize("name", ("hypot", "maximum", "minimum", "logaddexp", "atan2", "div"))
def test_pairs_with_nan(name):
    left, right = torch.tensor([[NAN, 1.0, NAN, 0.0]]), torch.tensor([[2.0, NAN, NAN, NAN]])
    assert compared(PAIRS[name], left, right) == []


NUMBERS = torch.tensor([-1.0, 0.0, 1.0, 2.0, INF, -INF, NAN])


def test_bounds_that_are_equal_or_crossed_or_nan():
    """All of x, min and max from these numbers: below bounds that are equal nothing has a slope."""

    def of_rows(x, low: htile.PerRow, high: htile.PerRow):
        return x.clip(low, high)

    x, low, high = torch.cartesian_prod(NUMBERS, NUMBERS, NUMBERS).T[:, None]
    assert compared(lambda x, low, high: torch.clamp(x, low, high), x, low, high) == []
    assert compared(of_rows, x.T.contiguous(), low[0], high[0]) == []


@pytest.mark.parametrize("number", NUMBERS.tolist())
def test_a_bound_that_is_a_number_beside_one_that_is_a_tensor(number):
    """torch takes two tensors or two numbers, so it is given a tensor of the number."""
    x, bound = torch.cartesian_prod(NUMBERS, NUMBERS).T[:, None]
    given = torch.full_like(x, number)
    for mine, right in (
        (lambda x, y: x.clamp(number, y), lambda x, y: x.clamp(given, y)),
        (lambda x, y: x.clamp(y, number), lambda x, y: x.clamp(y, given)),
    ):
        found = []
        for f in (htile.rowwise(mine), right):
            leaves = [each.clone().requires_grad_() for each in (x, bound)]
            found.append(torch.autograd.grad(f(*leaves).sum(), leaves))
        assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("name", ("huber", "smooth_l1"))
def test_losses_of_nan(name):
    left, right = torch.tensor([[NAN, 1.0, 3.0, 0.2]]), torch.zeros(1, 4)
    assert compared(PAIRS[name], left, right) == []


@pytest.mark.parametrize("f", [torch.remainder, torch.fmod], ids=lambda f: f.__name__)
def test_a_quotient_that_rounds_to_the_next_integer(f):
    """Of 1 and 0.1 in float32 the remainder is 0.0999..., and the quotient is rounded to 10."""
    t, p = torch.meshgrid(torch.arange(1.0, 999), torch.arange(1, 100) / 100, indexing="ij")
    p = p.clone().requires_grad_()
    rest = htile.rowwise(lambda t, p: f(t, p))(t, p)
    rest.sum().backward()
    quotient = ((t.double() - rest.double()) / p.double()).round()
    assert torch.equal(p.grad.double(), -quotient) and not torch.equal(quotient, t.div(p).trunc())


def test_remainders_by_zero_and_of_the_largest():
    left = torch.tensor([[3.0, 3.0, -3.0, 3e38, 0.0, 1e30, 5.0]])
    right = torch.tensor([[0.0, -0.0, 0.0, -2e38, 0.0, 3.0, INF]])
    mine, theirs = right.clone().requires_grad_(), right.clone().requires_grad_()
    htile.rowwise(lambda x, y: torch.remainder(x, y))(left, mine).sum().backward()
    torch.remainder(left, theirs).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("p", [-2.0, -1.0, -0.5, 0.3, 0.5, 0.9, 1.0, 1.5, 3.0])
def test_norms_of_zeros(p):
    assert compared(lambda x: x.norm(p), torch.tensor([[0.0, 1.0, 4.0, -2.0]])) == []


@pytest.mark.parametrize("p", [1, 2, 2.5, 3])
def test_norms_of_windows_of_zeros(p):
    x = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 5.0, 0.0]])
    assert compared(lambda x: F.lp_pool1d(x[None], p, 3)[0], x) == []


# Functions that are smooth where a part of them, such as |x|, is not, with arguments there
SMOOTH = {
    "cosh": lambda x: torch.cosh(x), "softplus": lambda x: F.softplus(x),
    "logsigmoid": lambda x: F.logsigmoid(x), "logaddexp": lambda x: torch.logaddexp(x, x * x),
    "logaddexp2": lambda x: torch.logaddexp2(x, 0 * x),
    "hypot": lambda x: torch.hypot(1 + x, 1 - x) + torch.hypot(x, x - 1),
    "huber": lambda x: F.huber_loss(x, 0.5 * x, delta=7.0),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, 0.5 * x, beta=7.0),
    "cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach() + 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_second_order_where_parts_have_corners(name):
    f = SMOOTH[name]
    check_second(htile.rowwise(lambda x: f(x)), torch.tensor([[-2.0, -0.5, 0.0, 0.0, 1.0, 3.0]]))


def test_second_order_of_products_with_zeros():
    zeros = torch.tensor([[2.0, 3.0, -1.0, 0.5], [2.0, 0.0, -1.0, 0.5], [0.0, 3.0, 0.0, 0.5],
                          [0.0, 0.0, 0.0, 2.0]])  # fmt: skip
    check_second(htile.rowwise(lambda x: x.prod()), zeros)
    check_second(htile.rowwise(lambda x: x.view(2, 2).prod(-1).sum() * x.prod()), zeros)


INFINITE = torch.tensor([[INF, 1.0, 2.0]])
NOTHING = torch.tensor([[-INF, -INF, -INF]])
MASKED = torch.tensor([[-INF, 1.0, 2.0]])
REDUCED = {
    "amax": (lambda x: x.amax(-1), TIES, EQUAL, INFINITE, NOTHING, torch.tensor([[NAN, 1.0]])),
    "amin": (lambda x: x.amin(-1), TIES, EQUAL, INFINITE, NOTHING),
    "max(dim)": (lambda x: x.max(-1).values, TIES, EQUAL, torch.tensor([[1.0, NAN, NAN]])),
    "min(dim)": (lambda x: x.min(-1, keepdim=True).values, TIES, EQUAL, LEFT),
    "max(dim) of groups": (lambda x: x.view(2, 3).max(0).values, TIES, EQUAL),
    "the norm": (lambda x: x.norm(), ZEROS, TIES, LEFT, INFINITE),
    "the vector norm": (lambda x: torch.linalg.vector_norm(x), ZEROS, TIES),
    "the norm of order 1": (lambda x: x.norm(p=1), ZEROS, TIES, LEFT),
    "the norm of order 3": (lambda x: x.norm(p=3), ZEROS, TIES, LEFT),
    "the largest magnitude": (lambda x: x.norm(p=INF), TIES, LEFT),
    "normalize": (lambda x: F.normalize(x, dim=-1), ZEROS, TIES),
    "std": (lambda x: x.std(), EQUAL, ZEROS, LEFT),
    "var": (lambda x: x.var(), EQUAL, LEFT),
    "prod": (lambda x: x.prod(), EQUAL, TIES, torch.tensor([[1.0, 0.0, 3.0]])),
    "nansum": (lambda x: x.nansum(), torch.tensor([[NAN, 1.0, 2.0]])),
    "nanmean": (lambda x: x.nanmean(), torch.tensor([[NAN, 1.0, 2.0]])),
    "softmax": (lambda x: torch.softmax(x, -1), MASKED, NOTHING, INFINITE, TIES),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), MASKED, NOTHING, INFINITE, TIES),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), MASKED, NOTHING, INFINITE, TIES),
    "cumsum": (lambda x: x.cumsum(-1), LEFT),
    "sort": (lambda x: x.sort().values, RIGHT[:, [0, 1, 3, 4, 5]]),
    "topk": (lambda x: x.topk(3).values, RIGHT[:, [0, 1, 3, 4, 5]]),
    "the least": (lambda x: x.topk(2, largest=False).values, RIGHT[:, [0, 1, 3, 4, 5]]),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCED)
def test_reductions(name):
    f, *values = REDUCED[name]
    assert [k for k, x in enumerate(values) if compared(f, x)] == []


ONLY = {  # ways to take the only element
    "v[0]": lambda v: v[0], "squeeze": lambda v: v.squeeze(0), "unbind": lambda v: v.unbind()[0],
    "amax": lambda v: v.amax(), "max(dim)": lambda v: v.max(-1).values,
    "amin of groups": lambda v: v.view(1, 1).amin(-1)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", ONLY)
@pytest.mark.parametrize("x", (NAN, INF, -0.0))
def test_the_only_element_has_all_of_the_gradient(name, x):
    """Of one element no comparison finds out which it is: that of a NaN fails."""
    take = ONLY[name]

    def f(x, s: htile.PerRow):
        return take(x[:1].exp() + s)

    call = called(htile.rowwise(f), torch.tensor([[x, 1.0]]), torch.tensor([0.7]))
    joint = derive(call.graph, ("s",), call.outputs)
    assert joint.outputs[0].id == len(call.graph)  # the gradient that is given, and nothing else
    given = {"out": torch.tensor([3.0], dtype=torch.float64)}
    assert gradients(call, given)["s"].item() == 3.0


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
def test_ignored_classes(reduction):
    """No gradient comes from a row that is ignored."""

    def f(x, y: htile.PerRow):
        return F.cross_entropy(x, y, reduction=reduction)

    y = torch.tensor([2, -100, 0])
    call = called(htile.rowwise(f), torch.randn(3, 5), y)
    given = {"out": torch.ones(3, dtype=torch.float64)}
    z = call.values["x"].clone().requires_grad_()
    F.cross_entropy(z, y, reduction="sum").backward()
    torch.testing.assert_close(gradients(call, given)["x"], z.grad)


def test_masks_are_applied_last():
    """What is not chosen has no part in a gradient, however steep it is there."""
    for f, x, right in (
        (lambda x: torch.where(x > 20, x, torch.log1p(torch.exp(x))), 1000.0, 1.0),
        (lambda x: torch.where(x > 0, x.log(), 0.0), 0.0, 0.0),  # where torch has NaN
        (lambda x: torch.where(x > 0, x.sqrt() * 3, x), 0.0, 1.0),
        (lambda x: torch.where(x > 0, torch.where(x < 1, 1 / x, x), x * 2), 0.0, 2.0),
        (lambda x: F.softplus(x), 95.0, 1.0),
    ):
        call = called(htile.rowwise(f), torch.tensor([[x, 0.5]]))
        given = {"out": torch.ones(1, 2, dtype=torch.float64)}
        assert gradients(call, given)["x"][0, 0].item() == right


def test_opposite_masks_are_one_selection():
    call = called(htile.rowwise(lambda x: F.leaky_relu(x)), EDGES)
    joint = derive(call.graph, ("x",), ("out",))
    behind = [node.op for node in joint.nodes[len(call.graph) :]]
    assert behind.count(Op.WHERE) == 1
