"""The language on the GPU: every operation, every kind of argument, every structure of results."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.frontend.ops import MOVEMENTS, SCANS, Op
from htile.testing import assert_close, oracle, ulp

from .matrix import BF16, F16, F32, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
SIZES, ROWS = (37, 1024), 9
INF, NAN = math.inf, math.nan


# ---- inputs -------------------------------------------------------------------------------------

# fmt: off
VALUES = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.49, 0.99999994, 1.0000001, 1e-3, -1e-3,
    1e-7, 1e-20, -1e-20, 1e-40, 3.1415927, 1.5707964, 20.0, -20.0, 80.0, -80.0, 88.0, -88.0, 100.0,
    -100.0, 1e4, 1e5, -1e5, 8388609.0, -8388607.5, 1e10, 1e30, -1e30, 3e38, INF, -INF, NAN,
)
OPERANDS = (
    0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 0.3, 2.5, 3.0, -3.0, 7.0, -7.0, 1e-6, 1e30, -1e30, INF, -INF,
    NAN,
)
# fmt: on


def special(n, dtype, device):
    """Rows with every one of VALUES, the rest random of many magnitudes."""
    x = torch.randn(ROWS * n) * torch.exp(2 * torch.randn(ROWS * n))
    x[torch.randperm(ROWS * n)[: len(VALUES)]] = torch.tensor(VALUES)
    return (x.view(ROWS, n).to(dtype).to(device),)


def special_pairs(n, dtype, device):
    """Two arguments with every pair of OPERANDS, the rest random."""
    pairs = torch.cartesian_prod(torch.tensor(OPERANDS), torch.tensor(OPERANDS))
    both = torch.randn(2, ROWS * n) * 3
    both[:, torch.randperm(ROWS * n)[: len(pairs)]] = pairs.T
    return tuple(x.view(ROWS, n).to(dtype).to(device) for x in both)


def normal(n, dtype, device, count=1):
    return tuple((torch.randn(ROWS, n) * 3).to(dtype).to(device) for _ in range(count))


def normal_pair(n, dtype, device):
    return normal(n, dtype, device, 2)


def normal_triple(n, dtype, device):
    return normal(n, dtype, device, 3)


def near_one(n, dtype, device):
    return ((torch.randn(ROWS, n) / 32).exp().to(dtype).to(device),)


def masks(n, dtype, device):
    """Random masks, with rows of nothing and of everything."""
    a, b = torch.rand(ROWS, n) > 0.5, torch.rand(ROWS, n) > 0.2
    a[0], a[1], b[2], b[3] = False, True, False, True
    a[4], a[5] = False, True
    a[4, -1], a[5, 0] = True, False
    return a.to(device), b.to(device)


def integers(n, dtype, device):
    """Two arguments; the second one has no 0, which torch does not define a division by."""
    a, b = torch.randint(-50, 51, (ROWS, n)), torch.randint(1, 8, (ROWS, n))
    b = torch.where(torch.rand(ROWS, n) > 0.5, b, -b)
    a[0, 0], a[1, -1], b[0, 0], b[1, -1] = 2**31 - 1, 1 - 2**31, -1, 1
    return a.to(dtype).to(device), b.to(dtype).to(device)


def ones_and_twos(n, dtype, device):
    x = torch.where(torch.rand(ROWS, n) < 8 / n, 2, 1)
    return ((x * torch.where(torch.rand(ROWS, n) > 0.5, 1, -1)).to(dtype).to(device),)


# ---- elementwise: measured element by element ---------------------------------------------------


def unary(function):
    @htile.rowwise
    def f(x):
        return function(x)

    return f


def binary(function):
    @htile.rowwise
    def f(x, y):
        return function(x, y)

    return f


# fmt: off
UNARY = (
    torch.neg, torch.abs, torch.sign, torch.sqrt, torch.rsqrt, torch.exp, torch.exp2, torch.expm1,
    torch.log, torch.log2, torch.log10, torch.log1p, torch.sin, torch.cos, torch.tanh,
    torch.sigmoid, torch.erf, torch.floor, torch.ceil, torch.round, torch.trunc, torch.reciprocal,
    torch.square, torch.relu, torch.isnan, torch.isinf, torch.isfinite,
)
BINARY = (
    torch.add, torch.sub, torch.mul, torch.div, torch.floor_divide, torch.remainder, torch.pow,
    torch.maximum, torch.minimum,
)
# fmt: on


@htile.rowwise
def comparisons(x, y):
    return x == y, x != y, x < y, x <= y, x > y, x >= y


@htile.rowwise
def reflected(x):
    return 2.0 - x, 3.0 / x, 2.0 // x, 5.0 % x.clamp(min=0.125), 2.0**x


@htile.rowwise
def powers(x):
    return x**2, x**3, x**0.5, x**-0.5, x**-1, x**-2, x**0 + x, x**1.75


@htile.rowwise
def by_numbers(x):
    return x // 0.375, x % 3.0, x // -3.0, x % -3.0, x.clamp(-1.5, 2.0), x.clamp(min=0.25)


@htile.rowwise
def choices(x, y):
    return torch.where(x > y, x, y), torch.where(x.isnan(), 0.0, x), x.masked_fill(y < 0, -INF)


@htile.rowwise
def roundings(x):
    low, half = x.to(torch.bfloat16), x.half()
    return low, half, x - low.float(), x - half.float(), low * 3.0, low.bool()


@htile.rowwise
def whole_numbers(x):
    return x.int(), x.long(), x.int().float(), x.long() // 3, (x.int() % 4).bool()


@htile.rowwise
def filled(x):
    return torch.full_like(x, 2.5) + x, torch.zeros_like(x) - x, torch.ones_like(x) * x, +x


ELEMENTWISE = {  # name: (function, inputs)
    **{f.__name__: (unary(f), special) for f in UNARY},
    **{f.__name__: (binary(f), special_pairs) for f in BINARY},
    "comparisons": (comparisons, special_pairs),
    "reflected": (reflected, special),
    "powers": (powers, special),
    "by numbers": (by_numbers, special),
    "choices": (choices, special_pairs),
    "roundings": (roundings, special),
    "whole numbers": (whole_numbers, normal),
    "filled": (filled, special),
}
# Below this the reciprocal of a sum beyond 2 ** 126 is taken as 0.
SMALLEST = {"sigmoid": 1e-37}


def assert_elementwise(name, f, result, *args):
    """Each element within twice the units that torch's float32 errs by at worst, and 2 more.

    Constants in these functions are exact in float32, which the oracle does not round them to.
    """
    exact, torch32 = oracle(f, *args), oracle(f, *args, dtype=F32)
    leaves = (pytree.tree_leaves(t) for t in (result, exact, torch32))
    for k, (out, e, t) in enumerate(zip(*leaves, strict=True)):
        assert out.shape == e.shape, (name, k)
        if not out.is_floating_point():
            assert torch.equal(out, e), (name, k, args[0][out != e], out[out != e])
            continue
        rounded = e.to(out.dtype)
        finite = rounded.isfinite()
        same = (out == rounded) | (out.isnan() & rounded.isnan())
        wrong = ~finite & ~same
        assert not wrong.any(), (name, k, [a[wrong] for a in args], out[wrong], rounded[wrong])
        unit = ulp(e.double().abs(), out.dtype)
        units = ((t.double() - e).abs() / unit)[finite]
        bound = (2 * units[units.isfinite()].max().clamp(max=8) + 2) * unit
        bound = bound.clamp(min=SMALLEST.get(name, torch.finfo(F32).smallest_normal))
        wrong = finite & ~((out.double() - e).abs() <= bound)
        assert not wrong.any(), (name, k, [a[wrong] for a in args], out[wrong], e[wrong])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=short)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(device, name, dtype, n):
    seed(name, n)
    f, inputs = ELEMENTWISE[name]
    args = inputs(n, dtype, device)
    assert_elementwise(name, f, run(f, *args), *args)


# ---- reductions, composites: measured by the row ------------------------------------------------


@htile.rowwise
def reductions(x):
    return x.sum(), x.mean(), x.max(), x.min(), x.amax(-1), x.amin(dim=-1), torch.logsumexp(x, -1)


@htile.rowwise
def kept(x):
    s, m = x.sum(-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    return s, m, x.mean(-1, keepdim=True) + m, x - m


@htile.rowwise
def statistics(x):
    return x.var(), x.std(), x.var(correction=0), x.std(unbiased=False), torch.var_mean(x)


@htile.rowwise
def norms(x):
    return x.norm(), x.norm(p=1), x.norm(p=INF), x.norm(p=3), torch.linalg.vector_norm(x, 2)


@htile.rowwise
def counts(x):
    return (x > 0).sum(), (x > 100).any(), (x < 100).all(), x.count_nonzero(), (x > 2).any()


@htile.rowwise
def row_product(x):
    return x.prod()


@htile.rowwise
def fused(x, y, z):
    """Products that one addition or sum takes, of rows, of values per row and of numbers."""
    peak = x.amax()
    added = x * y + z, z - x * x, x * z - y, x * 2.5 - z, z * z + peak, 1.0 - peak * x
    summed = (y * z).sum(), (y * y).sum(), (y * peak).sum(), (y * 0.1).sum()
    filled = peak.expand(x.shape)
    return *added, *summed, filled.sum(), (filled * 3.0).sum()


@htile.rowwise
def four_stages(x):
    a = x / x.abs().max()
    b = a - a.mean()
    c = b / (b * b).sum()
    return c * (c > c.min()).sum(), c.max()


@htile.rowwise
def softmaxes(x):
    return F.softmax(x, dim=-1), F.log_softmax(x, dim=-1), x.softmax(-1)


@htile.rowwise
def norm_layers(x):
    return F.layer_norm(x, x.shape), F.rms_norm(x, x.shape, eps=1e-6), F.normalize(x, dim=-1)


@htile.rowwise
def activations(x):
    return (
        F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.softplus(x), F.softplus(x, 2.0, 4.0),
        F.hardtanh(x), F.relu6(x), F.elu(x), F.leaky_relu(x, 0.2), F.mish(x), F.softsign(x),
    )  # fmt: skip


@htile.rowwise
def gates(x):
    return F.hardsigmoid(x), F.hardswish(x), F.logsigmoid(x), F.sigmoid(x), F.tanh(x), F.relu(x)


@htile.rowwise
def several(x, y, z):
    return torch.addcmul(x, y, z, value=0.5), torch.lerp(x, y, 0.3), torch.clamp(x, y, z)


@htile.rowwise
def logical(a, b):
    return a & b, a | b, a ^ b, ~a, torch.logical_and(a, b), a.any(), a.all(), b.sum()


@htile.rowwise
def masks_as_numbers(a, b):
    return a.float() + b.int(), torch.where(a, 1, 0), (a == b).sum(), a.long().max(), a != b, a < b


@htile.rowwise
def integer_arithmetic(a, b):
    return a + b, a - b, a * b, a // b, a % b, -a, abs(b), a.sign(), torch.maximum(a, b), a.clamp(0)


@htile.rowwise
def integer_reductions(a, b):
    return a.sum(), b.max(), b.min(), a.amax(), a.amin(), (a > b).any(), a.float().mean(), (a // b)


@htile.rowwise
def integer_comparisons(a, b):
    return a == b, a < b, a >= b, a != 7, torch.where(a > b, a, b), a / b, a * 0.5, a + True


@htile.rowwise
def integer_product(a):
    return a.prod()


BY_ROW = {  # name: (function, inputs, dtypes)
    "reductions": (reductions, normal, (F32, BF16)),
    "kept": (kept, normal, (F32, BF16)),
    "statistics": (statistics, normal, (F32, BF16)),
    "norms": (norms, normal, (F32, BF16)),
    "counts": (counts, normal, (F32, BF16)),
    "product": (row_product, near_one, (F32, BF16)),
    "fused": (fused, normal_triple, (F32, BF16)),
    "four stages": (four_stages, normal, (F32, BF16)),
    "softmaxes": (softmaxes, normal, (F32, BF16)),
    "norm layers": (norm_layers, normal, (F32, BF16)),
    "activations": (activations, normal, (F32, BF16)),
    "gates": (gates, normal, (F32, BF16)),
    "several": (several, normal_triple, (F32, BF16)),
    "logical": (logical, masks, (BOOL,)),
    "masks as numbers": (masks_as_numbers, masks, (BOOL,)),
    "integer arithmetic": (integer_arithmetic, integers, (I32, I64)),
    "integer reductions": (integer_reductions, integers, (I32, I64)),
    "integer comparisons": (integer_comparisons, integers, (I32, I64)),
    "integer product": (integer_product, ones_and_twos, (I32, I64)),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, d) for name in BY_ROW for d in BY_ROW[name][2]], ids=str
)
def test_by_row(device, name, dtype, n):
    seed(name, n)
    f, inputs, _ = BY_ROW[name]
    args = inputs(n, dtype, device)
    assert_close(f, run(f, *args), *args)


# ---- arguments and results ----------------------------------------------------------------------


class Pair(NamedTuple):
    y: torch.Tensor
    total: torch.Tensor


@htile.rowwise
def labelled(x, label: htile.PerRow, temperature: htile.PerRow):
    z = x / temperature
    return torch.where(label == 3, z.sum(), z.max()), label * 2, z * (label > 3), label.float() + 1


@htile.rowwise
def per_row_column(x, scale):
    return x * scale, scale + 1


@htile.rowwise
def columns(x, weight, bias, mask, ids):
    y = torch.where(mask, x * weight + bias, 0.0)
    return y, (y * ids).sum(), weight.sum() + x.max()


@htile.rowwise
def numbers(x, alpha: float, beta=0.5, *, gamma: float = 2.0, twice: bool = False):
    y = alpha * x + beta - gamma
    return y * 2 if twice else y


@htile.rowwise
def averages(x, mean, beta: float, rate: float = 1e-3):
    """Differences between floats and numbers, which the host function computes in float64."""
    new = beta * mean + (1 - beta) * x
    return new, new * rate / (1 - (2 * beta - 1) / beta), (x * (1 - beta)).sum()


@htile.rowwise
def device_numbers(x, scale, shift: htile.Scalar, count):
    return x * scale + shift, x.sum() * count


@htile.rowwise
def mixed(x, y, z):
    return x + y * z, (x + y).to(torch.float16), (y * z).to(torch.float32), y * z


@htile.rowwise
def structured(x):
    return {"pair": Pair(x + 1, x.sum()), "list": [x * 2, (x.max(),)], "row": x - 1}


@htile.rowwise
def listed(x):
    return [x.sum(), x + 1]


@htile.rowwise
def single(x):
    return (x.sum(),)


def of_labels(n, device):
    x = torch.randn(ROWS, n).to(BF16)
    return x.to(device), torch.arange(ROWS).to(device), (torch.rand(ROWS) + 0.5).to(device)


def of_per_row(n, device):
    return torch.randn(ROWS, n).to(BF16).to(device), torch.randn(ROWS, 1).to(device)


def of_columns(n, device):
    made = torch.rand(n).to(F16), torch.randn(n), torch.rand(n) > 0.3, torch.randint(-4, 5, (n,))
    return tuple(t.to(device) for t in (torch.randn(ROWS, n).to(BF16), *made))


def of_numbers(n, device):
    return torch.randn(ROWS, n).to(device), 1.5


def of_averages(n, device):
    return torch.randn(ROWS, n).to(device), torch.zeros(ROWS, n).to(device), 0.99999


def of_device_numbers(n, device):
    made = torch.randn(ROWS, n), torch.tensor(0.7), torch.tensor([0.3], dtype=BF16), torch.tensor(3)
    return tuple(t.to(device) for t in made)


def of_mixed(n, device):
    return tuple(torch.randn(ROWS, n).to(d).to(device) for d in (BF16, F32, F16))


def of_one(n, device):
    return (torch.randn(ROWS, n).to(F16).to(device),)


ARGUMENTS = {
    "labels": (labelled, of_labels),
    "(M, 1)": (per_row_column, of_per_row),
    "columns": (columns, of_columns),
    "numbers": (numbers, of_numbers),
    "numbers near one": (averages, of_averages),
    "numbers of the device": (device_numbers, of_device_numbers),
    "mixed dtypes": (mixed, of_mixed),
    "structure": (structured, of_one),
    "list": (listed, of_one),
    "tuple of one": (single, of_one),
}


@pytest.mark.parametrize("n", (1, *SIZES))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(device, name, n):
    seed(name, n)
    f, inputs = ARGUMENTS[name]
    args = inputs(n, device)
    result = run(f, *args)
    assert_close(f, result, *args)
    expected = oracle(f, *args)
    assert type(result) is type(expected)
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)


def test_numbers_are_arguments_of_one_kernel(device):
    x, _ = of_numbers(37, device)
    run(numbers, x, 1.5)
    before = htile.cache_info().compiled
    for alpha in (1.5, -2.0, 0.0, INF, 1e-40, 3):
        assert_close(numbers, run(numbers, x, alpha), x, alpha)
    for options in ({"beta": 3.0}, {"gamma": -1.0}, {"beta": 0.0, "gamma": 0.0}):
        assert_close(numbers, run(numbers, x, alpha=1.0, **options), x, 1.0, **options)
    assert htile.cache_info().compiled == before
    twice = run(numbers, x, 1.5, twice=True)
    assert torch.equal(twice, 2 * run(numbers, x, 1.5))


def test_numbers_of_the_device_are_read_by_the_kernel(device):
    x, scale, shift, count = of_device_numbers(37, device)
    run(device_numbers, x, scale, shift, count)
    scale.fill_(-3.0)
    count.fill_(5)
    result = run(device_numbers, x, scale, shift, count)
    assert_close(device_numbers, result, x, scale, shift, count)


@htile.rowwise(fastmath=True)
def fast(x):
    return torch.tanh(x), torch.log(x), torch.log2(x), torch.log10(x), torch.sin(x), torch.cos(x)


def test_fastmath(device):
    x = torch.rand(ROWS, 1024, device=device) * 3 + 0.05
    result, exact = run(fast, x), oracle(fast, x)
    for out, e in zip(result, exact, strict=True):
        assert (out - e).abs().max() < 2**-10
    assert fast.inspect(x).source.count("fastmath=True") == len(result)


def cases(device):
    """(function, arguments) of every table here."""
    for n in SIZES:
        for f, inputs in ELEMENTWISE.values():
            for dtype in (F32, BF16):
                yield f, inputs(n, dtype, device)
        for f, inputs, dtypes in BY_ROW.values():
            for dtype in dtypes:
                yield f, inputs(n, dtype, device)
    for f, inputs in ARGUMENTS.values():
        for n in (1, *SIZES):
            yield f, inputs(n, device)
    yield fast, (torch.empty(ROWS, 1024, device=device),)


def jobs(arch):
    """Everything; and the one variant by a static argument."""
    for f, args in cases("meta"):
        yield job(f, args, arch)
    yield job(numbers, of_numbers(37, "meta"), arch, twice=True)


def test_every_operation_runs():
    seen = {node.op for f, args in cases("meta") for node in f.inspect(*args).graph}
    elsewhere = MOVEMENTS - {Op.RESHAPE} | {Op.UNBUNDLE, Op.BUNDLE}  # test_parts.py
    elsewhere |= {Op.INDEX, Op.TAKE, Op.LOOKUP}  # test_indices.py, test_tables.py
    elsewhere |= {Op.GATHER}  # test_gathers.py
    elsewhere |= {Op.LENGTH}  # test_dynamic.py
    elsewhere |= {Op.MATMUL}  # test_products.py
    elsewhere |= {Op.STOP, Op.CUSTOM}  # which no kernel has
    elsewhere |= {Op.KEY, Op.KEY_INDEX, Op.KEY_VALUE}  # test_ranks.py
    elsewhere |= {Op.KTHVALUE}  # test_order_statistics.py
    elsewhere |= SCANS  # test_scans.py
    elsewhere |= {Op.GROUPED}  # test_groups.py
    elsewhere |= {Op.LSHIFT, Op.RSHIFT, Op.PHILOX, Op.WORD}  # test_random.py
    elsewhere |= {Op.UNIFORM, Op.EXPONENTIAL}  # test_random.py
    elsewhere |= {Op.EXPONENT, Op.LDEXP, Op.FLOOR_LOG2, Op.CEIL_LOG2}  # test_conversions.py
    elsewhere |= {Op.BITS, Op.FLOAT_OF}  # test_conversions.py
    assert seen == set(Op) - elsewhere
