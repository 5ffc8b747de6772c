"""htile.compute.math as it compiles: every mix of operands, and what PTX and machine code hold."""

import itertools
import math
import operator
import re

import pytest

pytest.importorskip("cutlass")

from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64

from htile.compute import math as m
from htile.compute.conversion import to_stored
from tests.primitives.device_code import machine_instructions
from tests.primitives.elementwise import (
    CONSTANT,
    FASTMATH,
    FUNCTIONS,
    F,
    build,
    instructions,
    mixes,
    on_vectors,
    ptx,
    result_dtype,
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mix_and_count_compiles(name):
    dtypes, arity = FUNCTIONS[name]
    function = getattr(m, name)
    for dtype, count in [(d, c) for d in dtypes for c in ((1, 3, 8) if d is dtypes[0] else (3,))]:
        calls = mixes(function, arity, CONSTANT[dtype])
        out_dtypes = [result_dtype(name, dtype)] * len(calls)
        text = build(calls, [dtype] * arity, out_dtypes, count).__ptx__
        assert (".local" in text) == (name in ("sin", "cos")), (dtype, count)


@pytest.mark.parametrize("dtype", [Float32, Int32, Int64, Boolean])
def test_plain_operators_take_every_mix(dtype):
    """What emitted code may print as an operator."""
    names = ["eq", "ne", "lt", "le", "gt", "ge"]
    names += ["add", "sub", "mul"] if dtype is not Boolean else []
    names += ["and_", "or_", "xor"] if dtype is not Float32 else []
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


def test_a_shift_of_64_bits_reads_all_of_its_count():
    """One that reads the low half alone would take 2 ** 32 + 1 for 1."""
    for function, limit in ((m.lshift, r"setp\.\w+\.u64"), (m.rshift, r"min\.u64")):
        text = ptx(on_vectors(function), [Int64] * 2, Int64, 2)
        assert len(re.findall(limit, text)) == 2 and text.count("ld.global.b64") >= 4


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


# name: (options, instruction, how often for 8 elements, instructions an element at most)
GOLDEN = {
    "maximum": ({}, "max.NaN.f32", 8, 1),
    "minimum": ({}, "min.NaN.f32", 8, 1),
    "exp_bounded": ({}, "ex2.approx.ftz.f32", 8, 2),
    "exp2": ({}, "ex2.approx.f32", 8, 1),
    "exp": ({}, "ex2.approx.ftz.f32", 8, 10),
    "sigmoid": ({}, "rcp.approx.ftz.f32", 8, 13),
    "rsqrt": ({}, "rsqrt.approx.f32", 8, 1),
    "sqrt": ({}, "sqrt.approx.ftz.f32", 8, 6),
    "log1p": ({}, "lg2.approx.ftz.f32", 8, 21),
    "expm1": ({}, "fma.rn.f32", 80, 20),
    "div": ({}, "rcp.approx.ftz.f32", 8, 15),
    "div_bounded": ({}, "rcp.approx.ftz.f32", 8, 2),
    "div_near": ({}, "rcp.approx.ftz.f32", 8, 10),
    "log1p_bounded": ({}, "fma.rn.f32", 64, 9),
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
    "div": (add_vector, lambda v, s: m.div(*v), 10),
    "div by a scalar": (add_scalar, lambda v, s: m.div(v[0], s[1]), 3),
    "div of a number": (add_number, lambda v, s: m.div(1.0, v[0]), 9),
    "div_number": (add_number, lambda v, s: m.div_number(v[0], 3.0), 2),
    "div_number below 1/2": (add_number, lambda v, s: m.div_number(v[0], 0.3), 2),
    "div_number, a power of two": (add_number, lambda v, s: m.div_number(v[0], 0.25), 1),
    "div_bounded": (add_vector, lambda v, s: m.div_bounded(*v), 2),
    "div_bounded by a scalar": (add_scalar, lambda v, s: m.div_bounded(v[0], s[1]), 1),
    "div_near": (add_vector, lambda v, s: m.div_near(*v), 7),
    "div_near by a scalar": (add_scalar, lambda v, s: m.div_near(v[0], s[1]), 2),
    "div_near by a number": (add_number, lambda v, s: m.div_near(v[0], 3.0), 1),
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
    [(2.0, "mul.f32"), (3, "mul.f32"), (0.5, "sqrt.app"), (-0.5, "rsqrt.app"), (-1.0, "rcp.app")],
)
def test_pow_of_a_constant(exponent, instruction):
    text = ptx(lambda v, s: m.pow(v[0], exponent), F, Float32)
    assert instruction in text and "bra" not in text and "lg2" not in text


@pytest.mark.parametrize("exponent", [None, 1.75, -3])
def test_a_power_has_no_branch(exponent):
    text = ptx(lambda v, s: m.pow(v[0], v[1] if exponent is None else exponent), F * 2, Float32)
    assert "bra" not in text and text.count("lg2.approx") == text.count("rcp.approx") == 8
