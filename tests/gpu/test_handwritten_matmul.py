"""The products written by hand over tiles, on a GPU, in processes with a time limit."""

import subprocess
import sys

import pytest

from tests.processes import REPO, environment

from . import products

pytestmark = pytest.mark.gpu

SECONDS = 480  # for a process: some compile a dozen kernels, beside others that do the same
EXAMPLES = ("handwritten_matmul_registers", "handwritten_matmul", "handwritten_fused_matmul")
ONE, TWO = ("k", "mn"), ("k,k", "mn,mn", "k,mn")
CASES = [(name, dtype, major)
         for name, majors in (("registers", ONE), ("shared", ONE), ("fused", TWO))
         for dtype in ("bfloat16", "float16") for major in majors]  # fmt: skip


def run(*module_and_arguments: str) -> str:
    """What a module prints that runs in a process with a time limit."""
    done = subprocess.run(
        [sys.executable, "-m", *module_and_arguments], cwd=REPO, text=True, timeout=SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize(("name", "dtype", "majors"), CASES)
def test_products(name, dtype, majors):
    """Every size against float64, with NaN beside the operands, and the bits of a row alone."""
    sizes = len(products.FUSED) if name == "fused" else len(products.ALIGNED)
    if name != "fused" and majors == "k":
        sizes += len(products.ODD_COLUMNS)
    if name == "fused" and majors.endswith("k"):
        sizes += len(products.FUSED_ODD)
    if name == "registers":
        sizes += len(products.UNALIGNED)
    assert f"{sizes} sizes right" in run("tests.gpu.products", name, dtype, majors)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_checks_itself(example):
    assert "max |error|" in run(f"examples.{example}")
