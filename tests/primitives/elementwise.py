"""What the tests of `htile.compute.math` share: its functions, kernels, operands and errors."""

import itertools
import math
import re
import tempfile

import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Boolean, Float32, Int32, Int64

TORCH = {Float32: torch.float32, Int32: torch.int32, Int64: torch.int64, Boolean: torch.bool}
F, INTS, NUMBERS, B = (Float32,), (Int32, Int64), (Float32, Int32, Int64), (Boolean,)
CONSTANT = {Float32: 2.5, Int32: 3, Int64: 3, Boolean: True}

# The functions that have a form for results in 16 bits, `<name>_near`.
NEAR = ["exp", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "tanh", "gelu"]

# name: (the dtypes it takes, how many operands it has)
FUNCTIONS = {
    **dict.fromkeys(("neg", "abs", "sign"), (NUMBERS, 1)),
    **dict.fromkeys(("floor", "ceil", "trunc", "round", "sqrt", "rsqrt", "sigmoid"), (F, 1)),
    **dict.fromkeys(("exp", "exp_bounded", "exp2", "expm1", "erf", "tanh", "sin", "cos"), (F, 1)),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "log1p_bounded"), (F, 1)),
    **dict.fromkeys((f"{name}_bounded" for name in ("sin", "cos", "log", "log2", "log10")), (F, 1)),
    **dict.fromkeys((f"{name}_near" for name in NEAR), (F, 1)),
    **dict.fromkeys(("exponent", "floor_log2", "ceil_log2", "bits"), (F, 1)),
    "float_of": ((Int32,), 1),
    "logical_not": (B, 1),
    **dict.fromkeys(("div", "div_shared", "div_bounded", "div_near", "pow"), (F, 2)),
    "exp_quotient": (F, 2),
    **dict.fromkeys(("floordiv", "mod", "maximum", "minimum"), (NUMBERS, 2)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), ((*NUMBERS, Boolean), 2)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (B, 2)),
    "invert": (INTS, 1),
    **dict.fromkeys(("lshift", "rshift"), (INTS, 2)),
}
FASTMATH = ["exp2", "log", "log2", "log10", "sin", "cos", "tanh", "sigmoid"]
DUMP = tempfile.mkdtemp(prefix="htile-test-math-")  # --keep-ptx and --keep-cubin write there
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def result_dtype(name, dtype):
    if name in COMPARISONS:
        return Boolean
    return {"exponent": Int32, "bits": Int32, "float_of": Float32}.get(name, dtype)


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
