"""The values of htile.compute.math on a GPU, compared with torch's in float64."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64

from htile.compute import math as m
from tests.primitives.elementwise import (
    COMPARISONS,
    FASTMATH,
    FUNCTIONS,
    NEAR,
    TINY,
    TORCH,
    B,
    F,
    build,
    float_pairs,
    int_pairs,
    on_vectors,
    result_dtype,
    same,
    ulps,
)

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

# name: (reference in float64, greatest error in ulp, greatest absolute error that is right anyway)
ACCURACY = {
    "sqrt": (torch.sqrt, 2, 0.0),
    "rsqrt": (torch.rsqrt, 3, 0.0),
    "exp": (torch.exp, 3, 0.0),
    "exp_bounded": (torch.exp, 200, 2.0**-126),
    "exp2": (torch.exp2, 3, 0.0),
    "expm1": (torch.expm1, 2, 0.0),
    "log": (torch.log, 2, 0.0),
    "log2": (torch.log2, 2, 0.0),
    "log10": (torch.log10, 2, 0.0),
    **{f"{name}_bounded": (getattr(torch, name), 2, 0.0) for name in ("log", "log2", "log10")},
    **{f"{name}_bounded": (getattr(torch, name), 3, 0.0) for name in ("sin", "cos")},
    "log1p": (torch.log1p, 2, 0.0),
    "log1p_bounded": (torch.log1p, 2, 0.0),
    "sin": (torch.sin, 3, 0.0),
    "cos": (torch.cos, 3, 0.0),
    "tanh": (torch.tanh, 3, 0.0),
    "erf": (torch.erf, 3, 0.0),
    "sigmoid": (torch.sigmoid, 4, 2.0**-125),
    "div": (torch.div, 0.501, 0.0),
    "div_shared": (torch.div, 0.501, 0.0),
    "div_bounded": (torch.div, 3, 2.0**-126),
    "div_near": (torch.div, 4, 0.0),
    # 2 ** -14 of the result, where it is normal
    **{f"{name}_near": (getattr(torch, name), 2**10, 2.0**-125) for name in NEAR if name != "gelu"},
    "gelu_near": (lambda x: x * torch.erfc(x * -math.sqrt(0.5)) / 2, 2**10, 2.0**-119),
    "pow": (torch.pow, 3, 0.0),
    "exp_quotient": (lambda x, total: x.exp() / total, 2**8, 2.0**-126),
}
# What is lost, absolutely, before the last rounding: a part of a quotient that may be subnormal.
LOST = {"div": 1.5 * 2.0**-149, "div_shared": 2.0**-150}
EXACT = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "bits": lambda x: x.view(torch.int32),
    "float_of": lambda x: x.view(torch.float32),
    "exponent": lambda x: torch.where(x.isfinite(), torch.frexp(x).exponent, 0),
    # torch's log2 on a GPU is a little less than 24 for 2 ** 24.
    "floor_log2": lambda x: x.cpu().double().log2().floor().float(),
    "ceil_log2": lambda x: x.cpu().double().log2().ceil().float(),
    "logical_not": torch.logical_not,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "invert": torch.bitwise_not,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    **{name: getattr(torch, name) for name in COMPARISONS},
}


def operands(name, dtype):
    """Flat CUDA tensors of a count that threads of 8 elements divide."""
    if dtype is Boolean:
        a, b = np.meshgrid([False, True], [False, True])
        a, b = np.tile(a.ravel(), 8), np.tile(b.ravel(), 8)
    elif dtype is Float32:
        a, b = float_pairs()
    else:
        a, b = int_pairs(np.int32 if dtype is Int32 else np.int64)
    if name == "exp_bounded":
        a = -np.abs(a)
    if name == "log1p_bounded":
        a = np.where(np.abs(a) <= 1, np.abs(a), np.float32(0.5))
    if name in ("sin_bounded", "cos_bounded"):
        a = np.where(np.abs(a) <= 1e5, a, np.float32(0.5))
    if name in ("log_bounded", "log2_bounded", "log10_bounded"):
        a = np.where(a >= TINY, a, np.float32(0.5))
    if name == "exp_quotient":
        a, b = -np.abs(a), np.clip(np.abs(b), np.float32(1), np.float32(2.0**30))
    if name == "div_bounded":
        b = np.where((np.abs(b) >= TINY) & (np.abs(b) <= 2.0**126), b, np.float32(3))
    if name in ("lshift", "rshift"):  # by every count, and some beyond
        b = np.where(np.arange(len(b)) % 8 == 0, b, np.arange(len(b), dtype=b.dtype) % 70 - 3)
        if dtype is Int64:  # of whose low halves alone another shift would be made
            b[::5] += 2**32
    if name in ("floordiv", "mod") and dtype is not Float32:
        b = np.where(b == 0, b.dtype.type(7), b)
    count = min(len(a) // 8 * 8, 8192)
    return [torch.from_numpy(np.ascontiguousarray(x[:count])).cuda() for x in (a, b)]


def launch(calls, tensors, dtypes, out_dtypes):
    """Run the calls over the tensors, 8 elements a thread; one output each.

    A launch has one block. It has up to 512 threads, so that a thread may have 128 registers.
    """
    outs = [torch.empty(len(tensors[0]), dtype=TORCH[d], device="cuda") for d in out_dtypes]
    kernel = build(calls, dtypes, out_dtypes, 8, None)
    for parts in zip(*(each.split(8 * 512) for each in (*tensors, *outs)), strict=True):
        kernel([*parts[: len(tensors)]], [*parts[len(tensors) :]], len(parts[0]) // 8)
    torch.cuda.synchronize()
    return outs


def elementwise(function):
    return lambda vectors, scalars: [function(*(v[i] for v in vectors)) for i in range(8)]


def check(name, got, tensors):
    """Compare one result with torch's."""
    if name not in ACCURACY:
        expected = EXACT[name](*tensors).cpu().numpy()
        bad = ~same(got, expected)
        if name in ("maximum", "minimum"):
            bad &= got != expected  # of 0.0 and -0.0 either
    else:
        reference, most, floor = ACCURACY[name]
        expected = reference(*(t.double() for t in tensors)).cpu().numpy()
        with np.errstate(all="ignore"):
            bad = (ulps(got, expected) > most) & ~(np.abs(got - expected) <= floor)
            unit = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
            bad &= ~(np.abs(got - expected) <= most * unit + LOST.get(name, 0.0))
    args = [t.cpu().numpy()[bad] for t in tensors]
    assert not bad.any(), (int(bad.sum()), list(zip(*args, got[bad], expected[bad]))[:10])  # noqa: B905


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize(
    "name, dtype", [(name, d) for name, (dtypes, _) in FUNCTIONS.items() for d in dtypes]
)
def test_values(name, dtype):
    function, arity = getattr(m, name), FUNCTIONS[name][1]
    tensors = operands(name, dtype)[:arity]
    calls = [on_vectors(function), elementwise(function)]
    expanded = [t.view(-1, 8)[:, :1].expand(-1, 8).reshape(-1) for t in tensors]
    inputs = [tensors, tensors]
    if arity == 2:
        calls += [lambda v, s: function(v[0], s[1]), lambda v, s: function(s[0], v[1])]
        inputs += [[tensors[0], expanded[1]], [expanded[0], tensors[1]]]
    outs = launch(calls, tensors, [dtype] * arity, [result_dtype(name, dtype)] * len(calls))
    outs = [o.cpu().numpy() for o in outs]
    assert same(outs[0], outs[1]).all(), "vectors and scalars differ"
    for got, values in zip(outs, inputs, strict=True):
        check(name, got, values)


@pytest.mark.gpu
@no_gpu
def test_values_of_division_by_a_mantissa_of_ones():
    """The one mantissa whose reciprocal a correction cannot round: rcp.approx has to."""
    generator = np.random.default_rng(2)
    a = np.concatenate(
        [np.arange(1, 2049), np.exp2(np.arange(-64, 64)), np.exp(generator.uniform(-40, 40, 6016))]
    )
    b = (
        (2 - 2.0**-23)
        * np.exp2(generator.integers(-20, 20, a.size))
        * generator.choice([-1, 1], a.size)
    )
    a, b = (torch.from_numpy(x.astype(np.float32)).cuda() for x in (a, b))
    calls = [on_vectors(m.div), elementwise(m.div)]
    for got in launch(calls, [a, b], F * 2, F * 2):
        assert torch.equal(got, (a.double() / b.double()).float())  # 53 bits: rounded rightly twice


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("exponent", [2, 3.0, 0.5, -0.5, -1.0, -2.0, 1.0, 0.0, 2.5])
def test_values_of_pow_by_a_constant(exponent):
    tensors = operands("pow", Float32)[:1]
    (got,) = launch([lambda v, s: m.pow(v[0], exponent)], tensors, F, F)
    got, expected = got.cpu().numpy(), torch.pow(tensors[0], exponent).cpu().numpy()
    assert (ulps(got, expected.astype(np.float64)) <= 10).all()


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("name", FASTMATH)
def test_values_of_fastmath(name):
    """Absolute errors near the origin only: what fastmath promises."""
    x = torch.linspace(0.01, 3, 4096, device="cuda")
    (got,) = launch([lambda v, s: getattr(m, name)(v[0], fastmath=True)], [x], F, F)
    expected = getattr(torch, name)(x.double())
    assert (got - expected).abs().max().item() < (2e-3 if name == "tanh" else 4e-6)


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("source", [Float32, Int32, Int64, Boolean])
def test_values_of_convert(source):
    (x,) = operands("convert", source)[:1]
    if source is Float32:  # beyond, torch's result is undefined
        x = torch.where(x.abs() < 2**30, x, torch.ones_like(x))
        x[:3] = torch.tensor([0.5, -0.0, -2.7])
    targets = [Float32, Int32, Int64, Boolean]
    calls = [(lambda v, s, t=t: m.convert(v[0], t)) for t in targets]
    for target, got in zip(targets, launch(calls, [x], [source], targets), strict=True):
        assert torch.equal(got, x.to(TORCH[target])), target
    if source is Float32:
        x = operands("convert", source)[0]
        (got,) = launch(calls[3:], [x], F, B)
        assert torch.equal(got, x.to(torch.bool))  # NaN is True


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("narrow", [BFloat16, Float16])
def test_values_of_round_to(narrow):
    (x,) = operands("round", Float32)[:1]
    dtype = torch.bfloat16 if narrow is BFloat16 else torch.float16
    calls = [lambda v, s: m.round_to(v[0], narrow), elementwise(lambda x: m.round_to(x, narrow))]
    for got in launch(calls, [x], F, F * 2):
        assert same(got.cpu().numpy(), x.to(dtype).float().cpu().numpy()).all()


@pytest.mark.gpu
@no_gpu
def test_values_of_where():
    a, b = operands("where", Float32)
    condition = a > 0.5
    calls = [
        lambda v, s: m.where(v[0], v[1], v[2]),
        lambda v, s: m.where(v[0], v[1], -math.inf),
        lambda v, s: m.where(v[0], 1.0, s[2]),
        lambda v, s: m.where(s[0], v[1], v[2]),
    ]
    first_condition, _, first = (
        t.view(-1, 8)[:, :1].expand(-1, 8).reshape(-1) for t in (condition, a, b)
    )
    expected = [
        torch.where(condition, a, b),
        torch.where(condition, a, -math.inf),
        torch.where(condition, 1.0, first),
        torch.where(first_condition, a, b),
    ]
    outs = launch(calls, [condition, a, b], [Boolean, Float32, Float32], F * 4)
    for got, value in zip(outs, expected, strict=True):
        assert same(got.cpu().numpy(), value.cpu().numpy()).all()
