"""Emitted source: golden text, the same in every process, lint-clean, as short as by hand."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import htile
from htile.build.compile import build
from tests import products
from tests.lower.backward import backward_kernel
from tests.lower.cases import (
    ARCH,
    BF16,
    EXAMPLES,
    F32,
    any_length_kernel,
    example_kernel,
    kernel_of,
    rows,
    scan_backward,
    scan_kernel,
    table_kernel,
)

REPO = Path(__file__).parents[2]
SIZES = [4096, 1003]  # a row that fills its tile, and one that not even vectors divide
LONG = [("layernorm", 32768), ("softmax", 1 << 22), ("layernorm", (1 << 22) + 1)]  # in chunks
GOLDEN = [(name, n) for name in EXAMPLES for n in SIZES] + LONG


OF_TABLES = [("table_rotary", 128), ("table_norm", 65536), ("table_alone", 1003)]
OF_ANY_LENGTH = [("any_rmsnorm", 4000), ("any_layernorm", 30001)]  # buckets of 4096 and 32768
OVER_ROWS = [("rmsnorm_backward", 4096), ("layernorm_backward", 1003)]
OF_PRODUCTS = [("product_swiglu", 4096), ("product_nll", 1003), ("product_project", 512)]
OF_PRODUCTS += [("warp_product_swiglu", 4096), ("warp_product_project", 512)]  # without wgmma
OF_PRODUCTS += [("product_softmax", 104)]  # whose rows are reduced in the tile
OF_SCANS = [
    ("scan_products", 1003), ("scan_extremes", 1003), ("scan_inverse", 32768), ("scan_groups", 4096)
]  # fmt: skip
OF_SCANS_BACK = [("sums", 4096), ("products", 1003)]


@pytest.mark.parametrize(("name", "n"), GOLDEN)
def test_golden_source(golden, name, n):
    golden(f"{name}_{n}.py", example_kernel(name, n).source)


@pytest.mark.parametrize(("name", "n"), OF_TABLES)
def test_golden_source_of_what_looks_rows_up(golden, name, n):
    golden(f"{name}_{n}.py", table_kernel(name, n).source)


@pytest.mark.parametrize(("name", "n"), OF_SCANS)
def test_golden_source_of_scans(golden, name, n):
    golden(f"{name}_{n}.py", scan_kernel(name, n).source)


@pytest.mark.parametrize(("name", "n"), OF_SCANS_BACK)
def test_golden_source_of_gradients_of_scans(golden, name, n):
    golden(f"{name}_backward_{n}.py", scan_backward(name, n).source)


@pytest.mark.parametrize(("name", "n"), OVER_ROWS)
def test_golden_source_of_sums_over_rows(golden, name, n):
    golden(f"{name}_{n}.py", backward_kernel(name, n).source)


@pytest.mark.parametrize(("name", "n"), OF_ANY_LENGTH)
def test_golden_source_of_rows_of_any_length(golden, name, n):
    golden(f"{name}_{n}.py", any_length_kernel(name, n).source)


@pytest.mark.parametrize(("name", "n"), OF_PRODUCTS)
def test_golden_source_of_products(golden, name, n):
    golden(f"{name}_{n}.py", product_source(name, n))


def product_source(name, n):
    f = getattr(products, name.rpartition("_")[2])
    arch = "sm_80" if name.startswith("warp") else "sm_90a"
    first, *_ = f.inspect(*products.arguments(f, 4096, n, 64), arch=arch).kernels
    return first.source


def test_no_golden_file_is_left_over():
    files = {path.name for path in (REPO / "tests" / "golden").glob("*.py")}
    every = GOLDEN + OF_TABLES + OF_SCANS + OF_ANY_LENGTH + OVER_ROWS + OF_PRODUCTS
    of_gradients = {f"{name}_backward_{n}.py" for name, n in OF_SCANS_BACK}
    assert files == {f"{name}_{n}.py" for name, n in every} | of_gradients


# ---- the same text in every process --------------------------------------------------------------

PRINT_ALL = """
import sys
from tests.lower.cases import example_kernel
from tests.lower.test_emit import GOLDEN
texts = [example_kernel(name, n).source for name, n in GOLDEN]
sys.stdout.write("\\f".join(texts))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_text_hangs_on_neither_hash_seed_nor_folder(tmp_path, seed):
    """The examples are run from a copy in another folder, with its own working directory."""
    for part in ("examples", "tests/lower"):
        shutil.copytree(REPO / part, tmp_path / part)
    env = os.environ | {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)]),
    }
    run = subprocess.run(
        [sys.executable, "-c", PRINT_ALL], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    texts = run.stdout.split("\f")
    assert texts == [example_kernel(name, n).source for name, n in GOLDEN]
    for folder in (tmp_path, REPO):
        assert str(folder) not in run.stdout
    assert "# softmax.py:" in texts[0]


# ---- lint ----------------------------------------------------------------------------------------


def test_golden_text_is_lint_clean(tmp_path):
    for name, n in GOLDEN:
        (tmp_path / f"{name}_{n}.py").write_text(example_kernel(name, n).source)
    for name, n in OF_TABLES:
        (tmp_path / f"{name}_{n}.py").write_text(table_kernel(name, n).source)
    for name, n in OF_SCANS:
        (tmp_path / f"{name}_{n}.py").write_text(scan_kernel(name, n).source)
    for name, n in OF_PRODUCTS:
        (tmp_path / f"{name}_{n}.py").write_text(product_source(name, n))
    check_lint(tmp_path)


def check_lint(folder):
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config"]
    run = subprocess.run(
        [*command, str(REPO / "pyproject.toml"), str(folder)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def unused_names(source):
    """Names that a function of `source` takes or assigns and never reads."""
    unused = []
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
            made = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            made |= {a.arg for a in function.args.args}
            read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
            unused += sorted(made - read)
    return unused


def check_text(source):
    """What holds for every emitted module."""
    assert unused_names(source) == []
    assert max(map(len, source.splitlines())) <= 100, "too long a line"
    assert source.endswith(")\n") and "\t" not in source
    assert all(line == line.rstrip() for line in source.splitlines())


@pytest.mark.parametrize(("name", "n"), GOLDEN)
def test_no_value_is_unused_and_lines_are_short(name, n):
    check_text(example_kernel(name, n).source)


@pytest.mark.parametrize(("name", "n"), OF_TABLES)
def test_nothing_of_what_looks_rows_up_is_unused(name, n):
    check_text(table_kernel(name, n).source)


def test_the_check_for_unused_values_finds_one():
    source = "def f(x, y):\n    a = x\n    b = a\n    return a\n"
    assert unused_names(source) == ["b", "y"]


# ---- what a line says ----------------------------------------------------------------------------


def test_stages_are_named_and_lines_point_home():
    source = example_kernel("norm_softmax", 4096).source
    comments = [line.strip() for line in source.splitlines() if line.strip().startswith("#")]
    assert comments == [
        "# stage 1: mean",
        "# stage 2: sum",
        "# stage 3: max",
        "# stage 4: sum",
        "# output",
    ]
    text = Path(sys.modules[EXAMPLES["norm_softmax"][1].__module__].__file__).read_text()
    lines = text.splitlines()
    (max0,) = (line for line in source.splitlines() if line.lstrip().startswith("max0"))
    place, number = max0.split("# ")[1].split(":")
    assert place == "norm_softmax.py" and "softmax" in lines[int(number) - 1]


def test_the_loader_and_the_config_are_those_of_the_plan():
    shared = example_kernel("rmsnorm_residual", 4096, loader="shared").source
    assert "ElementwiseLoader(ctx)" in shared and "GlobalToRegLoader" not in shared
    assert "extra_smem_tensors=(BFloat16,)" in shared
    direct = example_kernel("rmsnorm_residual", 4096, loader="direct").source
    assert "GlobalToRegLoader(ctx)" in direct and "ElementwiseLoader" not in direct
    assert "shared=False" in direct
    forced = example_kernel("softmax", 4096, threads_per_row=64, num_threads=128).source
    assert "num_threads=128, threads_per_row=64" in forced


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.5, "x * 0.5"),
        (-0.5, "x * (-0.5)"),
        (-0.0, "x * math.negative_zero()"),
        (1e-30, "x * 1e-30"),
        (float("inf"), "x * Float32.inf"),
        (float("-inf"), "x * -Float32.inf"),
        (0.1, "x * 0.1"),
    ],
)
def test_literals(number, text):
    kernel = kernel_of(lambda x: x * number, *rows((4, 512)))
    assert f" = {text}" in kernel.source
    check_text(kernel.source)


# ---- awkward names -------------------------------------------------------------------------------


def dict_of_inputs(x, out0):
    return {"x": x + out0, "out": x}


def out(out):
    return out * 2


def ctx(ctx, pred: float, config: float):
    return ctx * pred + config


def max0(x, max0: float, sub0: float, exp0: float):
    return torch.exp(x - x.max()) * max0 + sub0 + exp0


def cutlass(x, cute: float, m: float, lambda_: float):
    return torch.exp(x) * cute + m + lambda_


def math(math, loader: float, stream: float, tiled_copy: float):
    return torch.exp(math) * loader + stream + tiled_copy


def htile_(x, mX: float, tXrX: float, htile__kernel: float):
    return x * mX + tXrX + htile__kernel


def builtin_names(x, float: float, int: float, range: float):
    return torch.where(x > 0, x * float, torch.full_like(x, torch.nan)) * int + range


def emitted_imports(
    x, ElementwiseTileConfig: float, ElementwiseKernelContext: float, ElementwiseStorer: float,
    GlobalToRegLoader: float, ElementwiseLoader: float,
):  # fmt: skip
    x = x * ElementwiseTileConfig + ElementwiseKernelContext
    return x * ElementwiseStorer + GlobalToRegLoader * ElementwiseLoader


def Float32(x, Float32: float, BFloat16: float):
    return x * Float32 + BFloat16


def größe(ряд, α: float):
    return ряд * α


def fake_arguments(a_b, aB, AB):
    return a_b + aB + AB


def _(_, __: float):
    return _ * __


def a_function_whose_name_is_as_long_as_names_get(
    a_parameter_with_a_long_name, another_parameter_with_a_long_name
):
    return a_parameter_with_a_long_name + another_parameter_with_a_long_name


FLOAT_ANNOTATED = [
    dict_of_inputs, out, ctx, max0, cutlass, math, htile_, builtin_names, emitted_imports, Float32,
    größe, fake_arguments, _, a_function_whose_name_is_as_long_as_names_get,
]  # fmt: skip


def arguments_for(fn):
    floats = [name for name, kind in fn.__annotations__.items() if kind is float]
    count = fn.__code__.co_argcount
    return [*rows(*[(4, 512)] * (count - len(floats))), *[1.5] * len(floats)]


@pytest.mark.parametrize("fn", FLOAT_ANNOTATED, ids=lambda fn: fn.__name__)
def test_awkward_names_compile(fn, tmp_path):
    kernel = kernel_of(fn, *arguments_for(fn))
    check_text(kernel.source)
    (tmp_path / "kernel.py").write_text(kernel.source, encoding="utf-8")
    check_lint(tmp_path)
    assert kernel.resources.stack == 0


def test_a_lambda_is_a_kernel_too():
    kernel = kernel_of(lambda x: x * 2, *rows((4, 512)))
    check_text(kernel.source)
    assert kernel.resources.threads == kernel.plan.placement.num_threads


# ---- as short as by hand -------------------------------------------------------------------------
#
# Code lines (no blank lines, comments or docstrings) of the same four parts on both sides:
# configuration, kernel, host function, and the fake tensors that it is compiled with. Imports, the
# call of cute.compile and the launch from torch are left out on both sides: the emitted module
# leaves the last two to HTile. The twins serve many variants and are counted as if written for one:
# of `if const_expr(...)` the arm that is taken, without the `if`; no line that makes an absent
# operand None; no helper for fake tensors that may be absent.


def code_lines(source, keep):
    """The numbers of the code lines of the nodes of a module that `keep(node)` picks."""
    tree, lines = ast.parse(source), source.splitlines()
    kept, docstrings = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings |= span(first)
        if keep(node):
            kept |= span(node)
    return {k for k in kept if lines[k - 1].split("#")[0].strip()} - docstrings


def span(node):
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return set(range(first, node.end_lineno + 1))


def specialized(source, lines, names):
    """`lines` without what is not there when the names in `const_expr(...)` have these values."""
    text, tree = source.splitlines(), ast.parse(source)
    names = {**names, "const_expr": bool, "cutlass": SimpleNamespace(const_expr=bool)}
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) not in lines:
            continue
        if isinstance(node, ast.If) and "const_expr" in ast.unparse(node.test):
            dropped = node.orelse if eval(ast.unparse(node.test), names) else node.body
            lines = lines.difference(*map(span, dropped), span(node.test))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            taken = node.value.body if eval(ast.unparse(node.value.test), names) else None
            if isinstance(taken, ast.Constant) and taken.value is None:
                lines = lines - span(node)
    return {k for k in lines if text[k - 1].strip() != "else:"}


def emitted_lines(name):
    return code_lines(
        example_kernel(name, 4096).source,
        lambda n: isinstance(n, ast.FunctionDef | ast.Assign) and not n.col_offset,
    )


def twin(name, cls, values, fakes):
    """Code lines of one variant of a hand-written kernel; `fakes(node)` picks its arguments."""
    module = importlib.import_module(f"examples.handwritten_{name}")
    source = Path(module.__file__).read_text()
    lines = code_lines(source, lambda n: getattr(n, "name", None) in (cls, "load_optional"))
    lines = specialized(source, lines, {**vars(module), **values})

    def symbol(node):
        return isinstance(node, ast.Assign) and "cute.sym_int()" in ast.unparse(node)

    return lines | code_lines(source, symbol) | code_lines(source, fakes)


def test_softmax_is_as_short_as_by_hand():
    def fakes(node):
        return isinstance(node, ast.Assign) and "make_fake_tensor" in ast.unparse(node)

    values = {"self": SimpleNamespace(online_softmax=False, dependent=True)}
    lines = twin("softmax", "Softmax", values, fakes)
    emitted = emitted_lines("softmax")
    assert 30 < len(lines) < 50
    assert len(emitted) <= 1.3 * len(lines)


@pytest.mark.parametrize("name", ["rmsnorm", "rmsnorm_residual"])
def test_rmsnorm_is_as_short_as_by_hand(name):
    absent = {"b", "rstd", "mean"} | (set() if "residual" in name else {"res", "res_out"})
    operands = {"mX": "x", "mW": "w", "mB": "b", "mRes": "res", "mResO": "res_out", "mO": "out"}
    operands |= {"mRstd": "rstd", "mMean": "mean"}
    values = {m: None if short in absent else short for m, short in operands.items()}
    values |= {"self": SimpleNamespace(is_layernorm=False, dependent=True), "values": 16}

    def fakes(node):
        called = isinstance(node, ast.Call) and ast.unparse(node.func) == "fake"
        return called and node.args[0].id not in absent

    lines = twin("rmsnorm", "RMSNorm", values, fakes)
    emitted = emitted_lines(name)
    assert 30 < len(lines) < 60
    assert len(emitted) <= 1.3 * len(lines)


# ---- the text stands alone -----------------------------------------------------------------------

RUN_FILE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
import cutlass.cute as cute, cutlass.cute.runtime
stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
options = "--enable-tvm-ffi --gpu-arch sm_90a"
cute.compile(
    kernel.softmax, *kernel.fake_arguments(), stream, options=options, no_jit_engine=True
)
print("compiled")
"""


def test_the_text_is_a_module_that_one_can_take_away(tmp_path):
    path = tmp_path / "taken.py"
    path.write_text(example_kernel("softmax", 4096).source)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    run = subprocess.run(
        [sys.executable, "-c", RUN_FILE, str(path)],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.endswith("compiled\n"), run.stderr


def test_text_without_comments_compiles_to_the_same_code():
    source = example_kernel("softmax", 4096).source
    bare = ast.unparse(ast.parse(source)) + "\n"
    assert "#" not in bare
    built, again = (build(text, "softmax", "sm_90a") for text in (source, bare))
    assert built.ptx == again.ptx


@pytest.mark.parametrize("arch", ARCH)
def test_text_does_not_name_the_architecture(arch):
    """Only dependent launch is there or is not."""
    text = example_kernel("layernorm", 1000, F32).source.splitlines()
    if arch.startswith("sm_8"):
        text = [line for line in text if not re.search("griddepcontrol|use_pdl", line)]
    assert "\n".join(code_of(text)) == (
        "\n".join(code_of(example_kernel("layernorm", 1000, F32, arch).source.splitlines()))
    )


def code_of(lines):
    """The code, without comments, of text in lines that may be wrapped in other places."""
    return ast.unparse(ast.parse("\n".join(lines))).splitlines()


def test_dtypes_are_those_of_the_arguments():
    function, arguments = EXAMPLES["softmax"]
    for dtype, name in ((BF16, "BFloat16"), (torch.float16, "Float16"), (F32, "Float32")):
        text = function.inspect(*arguments(4, 4096, dtype, "meta")).source
        assert text.count(f"make_fake_tensor({name}, (m, 4096)") == 2
    assert isinstance(function, htile.Rowwise)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x, w: x * w + 2.0, "add0 = math.fma(x, w, 2.0)"),
        (lambda x, w: 2.0 + x * w, "add0 = math.fma(x, w, 2.0)"),
        (lambda x, w: x * w - 2.0, "sub0 = math.fms(x, w, 2.0)"),
        (lambda x, w: 2.0 - x * w, "sub0 = math.fnma(x, w, 2.0)"),
        (lambda x, w: w - x * w, "sub0 = math.fnma(x, w, w)"),
        (lambda x, w: x - x.sum() * x, "sub0 = math.fnma(sum0, x, x)"),
        (lambda x, w: (x * w).sum(), "mul0 = math.product(x, w)"),
    ],
)
def test_what_is_added_to_a_product(function, text):
    assert f"    {text}  #" in kernel_of(function, *rows((4, 512), (512,))).source


def test_many_reductions_of_one_exchange_are_written_in_lines_that_fit():
    """Five of them, whose names of reductions alone are longer than a line."""

    def f(x):
        return x.sum(), x.mean() - x, (x > 0).any(), (x < 1).all(), (x > 2).any(), (x < 3).all()

    source = kernel_of(f, torch.empty(8, 64, device="meta")).source
    assert max(map(len, source.splitlines())) <= 100
    assert "        (\n            cute.ReductionOp." in source
