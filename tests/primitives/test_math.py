"""htile.compute.math: every function compiles in every mix of operands; what the PTX must and must
not hold; the algorithms on numpy, without a GPU; and, on a GPU, the values against torch."""

import itertools
import math
import operator
import re
import tempfile

import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64  # noqa: E402

from htile.compute import math as m  # noqa: E402
from htile.compute.conversion import to_stored  # noqa: E402
from tests.primitives.device_code import machine_instructions  # noqa: E402
from tests.primitives.numpy_device import Device, Vector  # noqa: E402

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
TORCH = {Float32: torch.float32, Int32: torch.int32, Int64: torch.int64, Boolean: torch.bool}
F, INTS, NUMBERS, B = (Float32,), (Int32, Int64), (Float32, Int32, Int64), (Boolean,)
CONSTANT = {Float32: 2.5, Int32: 3, Int64: 3, Boolean: True}

# name: (dtypes, count of operands)
FUNCTIONS = {
    **dict.fromkeys(("neg", "abs", "sign"), (NUMBERS, 1)),
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "sqrt", "rsqrt", "sigmoid"), (F, 1)),
    **dict.fromkeys(("exp", "exp_bounded", "exp2", "expm1", "erf", "tanh", "sin", "cos"), (F, 1)),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), (F, 1)),
    "logical_not": (B, 1),
    **dict.fromkeys(("div", "div_bounded", "pow", "exp_share"), (F, 2)),
    **dict.fromkeys(("floordiv", "mod", "maximum", "minimum"), (NUMBERS, 2)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), ((*NUMBERS, Boolean), 2)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (B, 2)),
}
FASTMATH = ["exp2", "log", "log2", "log10", "sin", "cos", "tanh", "sigmoid"]
DUMP = tempfile.mkdtemp(prefix="htile-test-math-")  # else --keep-ptx writes into the current folder
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def result_dtype(name, dtype):
    return Boolean if name in COMPARISONS else dtype


# ---- a kernel around a function ------------------------------------------------------------------


def run_calls(calls, count, tensors, outs):
    """The body of the kernel: store each call's result into its own output."""
    tid, _, _ = cute.arch.thread_idx()
    tiles = [cute.local_tile(t, (count,), (tid,)) for t in tensors]
    vectors = [tile.load() for tile in tiles]
    scalars = [tile[0] for tile in tiles]
    for call, out in zip(calls, outs, strict=True):
        result = call(vectors, scalars)
        tile = cute.local_tile(out, (count,), (tid,))
        if isinstance(result, cute.TensorSSA):
            tile.store(result)
        elif isinstance(result, list):
            for i, x in enumerate(result):
                tile[i] = x
        else:
            tile[0] = result


def build(calls, dtypes, out_dtypes, count=8, arch="sm_90a"):
    """Compile a kernel of one block. A call takes the operands as vectors and as scalars.

    arch None: for the device of this machine, so that the result can be called.
    """

    @cute.kernel
    def kernel(tensors: list, outs: list):
        run_calls(calls, count, tensors, outs)

    @cute.jit
    def host(tensors: list, outs: list, threads: Int32):
        kernel(tensors, outs).launch(grid=[1, 1, 1], block=[threads, 1, 1])

    def fake(dtype):
        return cute.runtime.make_fake_tensor(dtype, (cute.sym_int(),), (1,), assumed_align=8)

    options = "--enable-tvm-ffi"
    if arch:
        options += f" --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {DUMP}"
    args = ([fake(d) for d in dtypes], [fake(d) for d in out_dtypes], Int32(1))
    return cute.compile(host, *args, options=options, no_jit_engine=arch is not None)


def ptx(call, dtypes, out_dtype, count=8, arch="sm_90a"):
    return build([call], dtypes, [out_dtype], count, arch).__ptx__


def on_vectors(function, **options):
    return lambda vectors, scalars: function(*vectors, **options)


def instructions(text):
    """The instructions of a PTX text without moves, memory and addresses."""
    skip = ("mov", "ld.", "st.", "cvta", "ret", "mad.lo", "mul.wide", "shl.b32 \t%r2", "add.s64")
    lines = [x.strip() for x in text.splitlines() if re.match(r"\s+(@%p|[a-z])", x)]
    return [x for x in lines if not x.startswith(skip)]


def mixes(function, arity, constant):
    """Calls of every mix of vector, scalar and constant, but constants alone."""

    def call(kinds):
        def run(vectors, scalars):
            pick = {"v": vectors, "s": scalars, "c": [constant] * arity}
            return function(*(pick[k][i] for i, k in enumerate(kinds)))

        return run

    kinds = [k for k in itertools.product("vsc", repeat=arity) if set(k) != {"c"}]
    return [call(k) for k in kinds]


# ---- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mix_and_count_compiles(name):
    dtypes, arity = FUNCTIONS[name]
    function = getattr(m, name)
    for dtype, count in [(d, c) for d in dtypes for c in ((1, 3, 8) if d is dtypes[0] else (3,))]:
        calls = mixes(function, arity, CONSTANT[dtype])
        if name == "pow" and count == 8:
            calls = calls[:2]
        out_dtypes = [result_dtype(name, dtype)] * len(calls)
        text = build(calls, [dtype] * arity, out_dtypes, count).__ptx__
        assert (".local" in text) == (name in ("sin", "cos")), (dtype, count)


@pytest.mark.parametrize("dtype", [Float32, Int32, Int64, Boolean])
def test_plain_operators_take_every_mix(dtype):
    """What emitted code may print as an operator."""
    names = ["eq", "ne", "lt", "le", "gt", "ge"]
    names += ["and_", "or_", "xor"] if dtype is Boolean else ["add", "sub", "mul"]
    for name in [*names, "truediv"] if dtype is Float32 else names:
        calls = mixes(getattr(operator, name), 2, CONSTANT[dtype])
        build(calls, [dtype] * 2, [result_dtype(name, dtype)] * len(calls), 3)
    if dtype is not Boolean:
        build(mixes(operator.neg, 1, 0), [dtype], [dtype] * 2, 3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dtype", [Float32, Int32, Int64, Boolean])
def test_other_architectures(arch, dtype):
    names = [n for n, (dtypes, _) in FUNCTIONS.items() if dtype in dtypes]
    calls = [(lambda v, s, n=n: getattr(m, n)(*v[: FUNCTIONS[n][1]])) for n in names]
    if dtype is Float32:
        names += FASTMATH
        calls += [(lambda v, s, n=n: getattr(m, n)(v[0], fastmath=True)) for n in FASTMATH]
    build(calls, [dtype] * 2, [result_dtype(n, dtype) for n in names], 2, arch)


@pytest.mark.parametrize("dtype", [Float32, Int32, Int64, Boolean])
def test_where_in_every_mix(dtype):
    constant = CONSTANT[dtype]

    def call(kinds):
        def run(vectors, scalars):
            pick = {"v": vectors, "s": scalars, "c": [True, constant, constant]}
            return m.where(*(pick[k][i] for i, k in enumerate(kinds)))

        return run

    calls = [call(k) for k in itertools.product("vsc", repeat=3)]
    text = build(calls, [Boolean, dtype, dtype], [dtype] * len(calls), 3).__ptx__
    assert "bra" not in text


@pytest.mark.parametrize("source", [Float32, Int32, Int64, Boolean])
@pytest.mark.parametrize("target", [Float32, Int32, Int64, Boolean])
def test_convert_every_pair(source, target):
    calls = mixes(lambda x: m.convert(x, target), 1, CONSTANT[source])
    for count in (1, 3):
        build(calls, [source], [target] * len(calls), count)


def test_constants_alone():
    calls = [
        lambda v, s: m.div(1.0, 0.0),  # the DSL's own operator raises ZeroDivisionError
        lambda v, s: m.maximum(1.0, 2),
        lambda v, s: m.pow(2.0, 0.5),
        lambda v, s: m.where(True, 1.0, math.inf),
        lambda v, s: m.convert(m.lt(1.0, 2.0), Float32),
        lambda v, s: m.floordiv(m.convert(7, Float32), 2.0),
    ]
    text = build(calls, [Float32], [Float32] * len(calls)).__ptx__
    for value in ("0f3F800000", "0f40000000"):  # 1.0 and 2.0 are folded
        assert value.lower() in text.lower() or str(int(value[2:], 16)) in text, value


# ---- what the PTX holds --------------------------------------------------------------------------

# name: (options, instruction, how often for 8 elements, instructions an element at most)
GOLDEN = {
    "maximum": ({}, "max.NaN.f32", 8, 1),
    "minimum": ({}, "min.NaN.f32", 8, 1),
    "exp_bounded": ({}, "ex2.approx.ftz.f32", 8, 2),
    "exp2": ({}, "ex2.approx.f32", 8, 1),
    "exp": ({}, "ex2.approx.ftz.f32", 8, 10),
    "sigmoid": ({}, "rcp.approx.ftz.f32", 8, 13),
    "rsqrt": ({}, "rsqrt.approx.f32", 8, 1),
    "sqrt": ({}, "sqrt.rn.f32", 8, 1),
    "div": ({}, "rcp.approx.ftz.f32", 8, 19),
    "div_bounded": ({}, "rcp.approx.ftz.f32", 8, 2),
    "floor": ({}, "cvt.rmi.f32.f32", 8, 1),
    "ceil": ({}, "cvt.rpi.f32.f32", 8, 1),
    "trunc": ({}, "cvt.rzi.f32.f32", 8, 1),
    "round": ({}, "cvt.rni.f32.f32", 8, 1),
    "abs": ({}, "abs.f32", 8, 1),
    "neg": ({}, "neg.f32", 8, 1),
    "tanh": ({"fastmath": True}, "tanh.approx.f32", 8, 1),
    "log": ({"fastmath": True}, "lg2.approx.ftz.f32", 8, 2),
    "log10": ({"fastmath": True}, "lg2.approx.ftz.f32", 8, 2),
    "sin": ({"fastmath": True}, "sin.approx", 8, 2),
    "cos": ({"fastmath": True}, "cos.approx", 8, 2),
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_golden_instructions(name, arch):
    options, instruction, times, most = GOLDEN[name]
    arity = FUNCTIONS[name][1]
    text = ptx(on_vectors(getattr(m, name), **options), F * arity, Float32, arch=arch)
    assert text.count(instruction) == times
    assert ".local" not in text and "bra" not in text
    assert len(instructions(text)) <= 8 * most + 4


def add_number(v, s):
    return v[0] + 1.0


def add_vector(v, s):
    return v[0] + v[1]


def add_scalar(v, s):
    return v[0] + s[1]


# name: (what takes one instruction with the same operands, function, instructions an element)
DIVISIONS = {
    "div": (add_vector, lambda v, s: m.div(*v), 16),
    "div by a scalar": (add_scalar, lambda v, s: m.div(v[0], s[1]), 6),
    "div of a number": (add_number, lambda v, s: m.div(1.0, v[0]), 15),
    "div_number": (add_number, lambda v, s: m.div_number(v[0], 3.0), 5),
    "div_number below 1/2": (add_number, lambda v, s: m.div_number(v[0], 0.3), 6),
    "div_number, a power of two": (add_number, lambda v, s: m.div_number(v[0], 0.25), 1),
    "div_bounded": (add_vector, lambda v, s: m.div_bounded(*v), 2),
    "div_bounded by a scalar": (add_scalar, lambda v, s: m.div_bounded(v[0], s[1]), 1),
}


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_machine_instructions_of_divisions(name, arch):
    add, function, expected = DIVISIONS[name]

    def of_32_elements(call):
        few, many = (
            machine_instructions(build([call], F * 2, F, count, arch).__cubin__)
            for count in (16, 48)
        )
        return many - few

    found = of_32_elements(function) - of_32_elements(add) + 32
    assert abs(found - 32 * expected) <= 4  # constants and addresses of the whole kernel


def test_one_reciprocal_for_a_scalar_divisor():
    text = ptx(lambda v, s: m.div_bounded(v[0], s[1]), F * 2, Float32)
    assert text.count("rcp.approx.ftz.f32") == 1


@pytest.mark.parametrize("narrow", [BFloat16, Float16])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_rounding_survives(narrow, count):
    kind = "bf16" if narrow is BFloat16 else "f16"
    for call, times in (
        (lambda v, s: m.round_to(v[0], narrow), count),
        (lambda v, s: m.round_to(s[0], narrow), 1),
    ):
        text = ptx(call, F, Float32, count)
        down = re.findall(rf"cvt\.rn\.{kind}(x2)?\.f32", text)
        assert sum(2 if x else 1 for x in down) >= times
        assert text.count(f"cvt.f32.{kind}") >= times or narrow is BFloat16  # or a shift


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("source", [Int32, Int64])
def test_integers_become_bfloat16_by_way_of_float32(source, arch):
    """As in torch. From sm_90 on there is an instruction that would round once."""
    to_float32 = f"cvt.rn.f32.s{source.width}"
    for call, out_dtype, count in (
        (lambda v, s: m.round_to(v[0], BFloat16), Float32, 3),
        (lambda v, s: m.convert(v[0], BFloat16), BFloat16, 3),
        (lambda v, s: m.convert(m.convert(v[0], Float32), BFloat16), BFloat16, 3),
        (lambda v, s: to_stored(v[0], BFloat16), BFloat16, 3),
        (lambda v, s: to_stored(s[0], BFloat16), BFloat16, 1),
    ):
        text = ptx(call, (source,), out_dtype, 3, arch)
        assert text.count(to_float32) == count and "bf16.s" not in text


def test_float_to_boolean_compares():
    """`.to(Boolean)` tests the inverse."""
    text = ptx(lambda v, s: m.convert(v[0], Boolean), F, Boolean)
    assert text.count("setp.neu.f32") == 8


def test_no_division_by_a_tested_divisor():
    """A user's `where(b == 0, 0, a // b)` keeps its test."""

    def call(v, s):
        return m.where(m.eq(v[1], 0), 0, m.floordiv(v[0], v[1]))

    text = ptx(call, (Int32, Int32), Int32, 1)
    divisor = re.search(r"div\.s32\s+%r\d+, %r\d+, (%r\d+);", text)[1]
    assert re.search(rf"selp\.b32\s+{divisor}, 1, ", text)


@pytest.mark.parametrize(
    "exponent, instruction",
    [(2.0, "mul.f32"), (3, "mul.f32"), (0.5, "sqrt.rn"), (-0.5, "rsqrt.app"), (-1.0, "rcp.app")],
)
def test_pow_of_a_constant(exponent, instruction):
    text = ptx(lambda v, s: m.pow(v[0], exponent), F, Float32)
    assert instruction in text and "bra" not in text and "ex2" not in text


# ---- the algorithms, on numpy --------------------------------------------------------------------


@pytest.fixture
def on_numpy(monkeypatch):
    """A function that runs one of `htile.compute.math` on numpy arrays."""
    Device().install(monkeypatch)

    def run(name, *arrays, **options):
        with np.errstate(all="ignore"):
            return getattr(m, name)(*map(Vector, arrays), **options).data

    return run


TINY = float(np.finfo(np.float32).tiny)
# fmt: off
FLOATS = [0.0, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.3, 10.0, 88.0, 88.72, 88.8, 103.9,
          104.1, 1e3, 8388607.5, 16777216.0, 1e10, 3e38, math.inf, TINY, TINY / 4, 1e-45, 1e-4]
# fmt: on
FLOATS = np.array([*FLOATS, *(-x for x in FLOATS), math.nan], np.float32)


def float_pairs():
    """Every pair of the edge values, then random ones of many magnitudes."""
    generator = np.random.default_rng(0)
    scale = np.exp2(generator.uniform(-20, 20, 4000))
    random = (generator.standard_normal((2, 4000)) * scale).astype(np.float32)
    grid = [g.ravel() for g in np.meshgrid(FLOATS, FLOATS)]
    return [np.concatenate([g, r]) for g, r in zip(grid, random, strict=True)]


def int_pairs(dtype):
    info = np.iinfo(dtype)
    edge = [0, 1, 2, 3, 7, 1000, info.max, info.max - 1]
    edge = np.array([*edge, *(-x for x in edge), info.min], dtype)
    generator = np.random.default_rng(1)
    random = generator.integers(-1000, 1000, (2, 2000)).astype(dtype)
    a, b = (np.concatenate([g.ravel(), r]) for g, r in
            zip(np.meshgrid(edge, edge), random, strict=True))  # fmt: skip
    return a, np.where((b == 0) | ((b == -1) & (a == info.min)), dtype(5), b)


def same(got, expected):
    """Equal bit for bit, NaN being NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    equal = got == expected
    if got.dtype.kind == "f":
        equal &= np.signbit(got) == np.signbit(expected)
        equal |= np.isnan(got) & np.isnan(expected)
    return equal


def ulps(got, expected64):
    """The error in units of the last place of the float32 nearest to the expected value."""
    with np.errstate(all="ignore"):
        rounded = expected64.astype(np.float32)
        unit = np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, 1))).astype(np.float64)
        error = np.abs(got.astype(np.float64) - expected64) / unit
        # beyond the largest float32 the expected value is inf; just below it inf is 1 ulp away
        at_top = np.isinf(got) & (np.abs(expected64) > 3.4028e38) & (got * expected64 > 0)
    exact = same(got, rounded) | at_top
    return np.where(exact, 0, np.where(np.isnan(error), np.inf, error))


def test_numpy_exp(on_numpy):
    x = np.concatenate([FLOATS, np.linspace(-105, 89, 200001, dtype=np.float32)])
    with np.errstate(over="ignore"):
        expected = np.exp(x.astype(np.float64))
    assert ulps(on_numpy("exp", x), expected).max() < 1.5


def test_numpy_exp_bounded(on_numpy):
    x = np.concatenate([[-0.0, -math.inf, math.nan], np.linspace(-87, 0, 100001)]).astype("f")
    got, expected = on_numpy("exp_bounded", x), np.exp(x.astype(np.float64))
    assert got[0] == 1 and got[1] == 0 and np.isnan(got[2])
    assert (np.abs(got - expected)[3:] <= 2**-23 * expected[3:] * (1 + np.abs(x[3:]))).all()
    assert np.abs(got - expected)[3:].max() < 2**-23


@pytest.mark.parametrize("total", [1.0, 1.5, 1000.0, 2.0**30])
def test_numpy_exp_share(on_numpy, total):
    x = np.concatenate([[-math.inf, math.nan], np.linspace(-60, 0, 100001)]).astype("f")
    got = on_numpy("exp_share", x, np.full_like(x, total))
    expected = np.exp(x.astype(np.float64)) / total
    assert got[0] == 0 and np.isnan(got[1])
    assert (np.abs(got[2:] / expected[2:] - 1) < 2**-16).all()
    assert np.isnan(on_numpy("exp_share", x, np.full_like(x, math.nan))).all()


@pytest.mark.parametrize("fastmath", [False, True])
def test_numpy_sigmoid(on_numpy, fastmath):
    x = np.concatenate([FLOATS, np.linspace(-87, 87, 100001)]).astype("f")
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    got = on_numpy("sigmoid", x, fastmath=fastmath)
    normal = ~(expected < 4e-38)  # e ** -x overflows below: 0
    assert ulps(got, expected)[normal].max() < (150 if fastmath else 3)
    assert np.abs(got - expected)[~normal].max() < 4e-38
    ends = np.float32([np.inf, -np.inf, np.nan])
    assert same(on_numpy("sigmoid", ends, fastmath=fastmath), np.float32([1, 0, np.nan])).all()


@pytest.mark.parametrize(
    "name, reference",
    [("floordiv", torch.floor_divide), ("mod", torch.remainder)],
)
def test_numpy_division(on_numpy, name, reference):
    a, b = float_pairs()
    got = on_numpy(name, a, b)
    expected = reference(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    with np.errstate(all="ignore"):  # torch's fmod on vectors overflows beyond, on the CPU only
        known = ~(np.isfinite(a) & (np.abs(a.astype(np.float64) / b) > 2**24))
    bad = known & ~same(got, expected)
    assert not bad.any(), list(zip(a[bad], b[bad], got[bad], expected[bad], strict=True))[:10]
    for dtype in (np.int32, np.int64):
        a, b = int_pairs(dtype)
        expected = reference(torch.from_numpy(a), torch.from_numpy(b)).numpy()
        assert same(on_numpy(name, a, b), expected).all()
    assert on_numpy("floordiv", np.float32([1.0]), np.float32([0.1]))[0] == 9


def test_numpy_sign_and_round(on_numpy):
    for name, reference in (("sign", torch.sign), ("round", torch.round)):
        assert same(on_numpy(name, FLOATS), reference(torch.from_numpy(FLOATS)).numpy()).all()
    integers = np.int32([0, 5, -5, 2**31 - 1, -(2**31)])
    assert (on_numpy("sign", integers) == np.sign(integers)).all()


# ---- values, on a GPU ----------------------------------------------------------------------------

# name: (reference in float64, greatest error in ulp, greatest absolute error that is right anyway)
ACCURACY = {
    "sqrt": (torch.sqrt, 0.51, 0.0),
    "rsqrt": (torch.rsqrt, 3, 0.0),
    "exp": (torch.exp, 3, 0.0),
    "exp_bounded": (torch.exp, 200, 2.0**-126),
    "exp2": (torch.exp2, 3, 0.0),
    "expm1": (torch.expm1, 3, 0.0),
    "log": (torch.log, 3, 0.0),
    "log2": (torch.log2, 3, 0.0),
    "log10": (torch.log10, 3, 0.0),
    "log1p": (torch.log1p, 3, 0.0),
    "sin": (torch.sin, 3, 0.0),
    "cos": (torch.cos, 3, 0.0),
    "tanh": (torch.tanh, 3, 0.0),
    "erf": (torch.erf, 3, 0.0),
    "sigmoid": (torch.sigmoid, 4, 2.0**-125),
    "div": (torch.div, 0.51, 0.0),
    "div_bounded": (torch.div, 3, 2.0**-126),
    "pow": (torch.pow, 10, 2.0**-126),
    "exp_share": (lambda x, total: x.exp() / total, 2**8, 2.0**-126),
}
EXACT = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "logical_not": torch.logical_not,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
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
    if name == "exp_share":
        a, b = -np.abs(a), np.clip(np.abs(b), np.float32(1), np.float32(2.0**30))
    if name == "div_bounded":
        b = np.where((np.abs(b) >= TINY) & (np.abs(b) <= 2.0**126), b, np.float32(3))
    if name in ("floordiv", "mod") and dtype is not Float32:
        b = np.where(b == 0, b.dtype.type(7), b)
    count = min(len(a) // 8 * 8, 8192)
    return [torch.from_numpy(np.ascontiguousarray(x[:count])).cuda() for x in (a, b)]


def launch(calls, tensors, dtypes, out_dtypes):
    """Run the calls over the tensors, 8 elements a thread; one output each."""
    outs = [torch.empty(len(tensors[0]), dtype=TORCH[d], device="cuda") for d in out_dtypes]
    build(calls, dtypes, out_dtypes, 8, None)(tensors, outs, len(tensors[0]) // 8)
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
