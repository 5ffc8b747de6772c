"""The kernels written by hand over the primitives, against explicit formulas in float64."""

import functools
import os
import tempfile

import pytest
import torch

from examples import handwritten_rmsnorm, handwritten_softmax
from htile.testing import _compare, _largest

from .matrix import BF16, DTYPES, F16, F32, SIZES, run, seed, short

pytestmark = pytest.mark.gpu

LONG = (32768, 65536, 131072, 262144)
COMPILERS = {"compile_softmax": handwritten_softmax, "compile_rmsnorm": handwritten_rmsnorm}


def softmax(device, m, n, dtype, *, online):
    """(results of the kernel, the formula) for seeded inputs."""
    x = torch.randn(m, n, device=device).mul(3).to(dtype)

    def formula(to):
        return (torch.softmax(x.to(to), dim=-1),)

    return lambda: (handwritten_softmax.softmax_fwd(x, online),), formula


def norm(device, m, n, dtype, *, layer, with_=(), returns=(), residual_dtype=None, wide=False):
    """(results of the kernel, the formula) for RMSNorm, or LayerNorm where `layer`."""
    column = F32 if wide else dtype
    x = torch.randn(m, n, device=device).add(1).to(dtype)
    given = {
        "weight": torch.rand(n, device=device).to(column),
        "bias": torch.randn(n, device=device).to(column),
        "residual": torch.randn(m, n, device=device).to(residual_dtype or dtype),
    }
    given = {name: given[name] for name in with_}
    eps = 1e-5 if layer else 1e-6

    def formula(to):
        operands = {name: tensor.to(to) for name, tensor in given.items()}
        h = x.to(to) + operands.get("residual", 0)
        mean = h.mean(-1, keepdim=True) if layer else torch.zeros_like(h[:, :1])
        rstd = ((h - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        y = (h - mean) * rstd * operands.get("weight", 1) + operands.get("bias", 0)
        extra = {"residual": h, "rstd": rstd[:, 0], "mean": mean[:, 0]}
        return (y, *(extra[name] for name in extra if name in returns))

    def kernel():
        forward = handwritten_rmsnorm.layernorm_fwd if layer else handwritten_rmsnorm.rmsnorm_fwd
        options = {f"return_{name}": True for name in returns}
        result = forward(x, **given, eps=eps, **options)
        return result if isinstance(result, tuple) else (result,)

    return kernel, formula


ALL_OF_LAYER = {"returns": ("residual", "rstd", "mean"), "with_": ("weight", "bias", "residual")}
ALL_OF_RMS = {"returns": ("residual", "rstd"), "with_": ("weight", "bias", "residual")}
KERNELS = {
    "softmax": functools.partial(softmax, online=False),
    "online softmax": functools.partial(softmax, online=True),
    "rmsnorm": functools.partial(norm, layer=False, with_=("weight",)),
    "rmsnorm, all": functools.partial(norm, layer=False, **ALL_OF_RMS),
    "layernorm": functools.partial(norm, layer=True, with_=("weight", "bias"), wide=True),
    "layernorm, all": functools.partial(norm, layer=True, **ALL_OF_LAYER),
}
OPTIONS = {  # each optional tensor alone, and mixed dtypes
    **{f"rmsnorm {w}": {"layer": False, "with_": (w,)} for w in ALL_OF_RMS["with_"]},
    **{f"layernorm {w}": {"layer": True, "with_": (w,)} for w in ALL_OF_LAYER["with_"]},
    **{f"rmsnorm -> {r}": {"layer": False, "returns": (r,)} for r in ALL_OF_RMS["returns"]},
    **{f"layernorm -> {r}": {"layer": True, "returns": (r,)} for r in ALL_OF_LAYER["returns"]},
    "rmsnorm bare": {"layer": False},
    "layernorm bare": {"layer": True},
    "rmsnorm, float32 residual": {"layer": False, **ALL_OF_RMS, "residual_dtype": F32},
    "layernorm, float16 residual": {"layer": True, **ALL_OF_LAYER, "residual_dtype": F16},
}
OPTION_SIZES = (17, 1000, 4096)


# ---- compiled ahead -----------------------------------------------------------------------------


def compiled_object(compiler: str, args: tuple, options: tuple) -> bytes:
    """What a kernel's compile function makes, as an object file. Runs in a worker."""
    compiled = getattr(COMPILERS[compiler], compiler)(*args, **dict(options))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.o")
        compiled.export_to_c(path, function_name="htile", export_only_tvm_ffi_symbols=True)
        with open(path, "rb") as file:
            return file.read()


def loaded(object_: bytes):
    """The function of an object file."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.o")
        with open(path, "wb") as file:
            file.write(object_)
        return cute.runtime.load_module(path, enable_tvm_ffi=True)["htile"]


def request_of(compiler: str, args: tuple, options: dict) -> tuple:
    return compiled_object, (compiler, args, tuple(sorted(options.items())))


def jobs(arch):
    """What the tests below compile: their own calls on `meta`, with the compilers listening."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for compiler, module in COMPILERS.items():
            listen = functools.partial(_listen, asked, compiler)
            patch.setattr(module, compiler, listen)
            patch.setattr(module, "device_arch", lambda device: arch)
        for make in KERNELS.values():
            for n in SIZES + LONG:
                for dtype in DTYPES:
                    make("meta", 3, n, dtype)[0]()
        for options in OPTIONS.values():
            for n in OPTION_SIZES:
                norm("meta", 3, n, BF16, **options)[0]()
    return asked


def _listen(asked: list, compiler: str, *args, **options):
    asked.append(request_of(compiler, args, options))
    return lambda *tensors: None


@pytest.fixture(autouse=True)
def ahead(device, built, monkeypatch):
    """The kernels take what the workers compiled, and nothing else."""

    def take(compiler, *args, **options):
        key = request_of(compiler, args, options)
        assert key in built, f"not compiled ahead, or its compilation failed: {key}"
        return loaded(built[key])

    for compiler, module in COMPILERS.items():
        monkeypatch.setattr(module, compiler, functools.cache(functools.partial(take, compiler)))


# ---- tests --------------------------------------------------------------------------------------


def check(kernel, formula):
    """`_compare` is the measure of DESIGN section 6: twice torch's error in float32, and 2 ulp."""
    results, exact, torch32 = run(kernel), formula(torch.float64), formula(F32)
    assert len(results) == len(exact)
    for k, (result, e, t) in enumerate(zip(results, exact, torch32, strict=True)):
        assert result.shape == e.shape
        if result.numel():
            _compare(f"result {k}", result, e, _largest((t.double() - e).abs()))


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", KERNELS)
def test_formula(device, name, dtype, n):
    for m in (0, 1, 7, 4096 if n <= 16384 else 133):
        seed(name, dtype, n, m)
        check(*KERNELS[name](device, m, n, dtype))


@pytest.mark.parametrize("n", OPTION_SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device, name, n):
    seed(name, n)
    check(*norm(device, 65, n, BF16, **OPTIONS[name]))


@pytest.mark.parametrize("n", (1000, 32768))
@pytest.mark.parametrize("name", ("softmax", "online softmax"))
def test_infinite_and_nan(device, name, n):
    """`-inf` in all columns but one, everywhere, and beside NaN; NaN and +inf in any place."""
    columns = range(0, n, 61)
    inf, nan = float("inf"), float("nan")
    x = torch.full((5 * len(columns), n), -inf, device=device)
    for k, column in enumerate(columns):
        x[5 * k, column] = 3.0
        x[5 * k + 2, column] = nan
        x[5 * k + 3 : 5 * k + 5] = 1.0
        x[5 * k + 3, column] = nan
        x[5 * k + 4, column] = inf
    y = handwritten_softmax.softmax_fwd(x, name != "softmax")
    expected = torch.softmax(x.double(), dim=-1)
    one_column = torch.zeros_like(expected).scatter(
        1, torch.tensor(list(columns), device=device).repeat_interleave(5)[:, None], 1.0
    )
    assert expected[::5].equal(one_column[::5]) and expected[1::5].isnan().all()
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
