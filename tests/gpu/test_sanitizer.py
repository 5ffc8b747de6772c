"""compute-sanitizer over every example at three sizes, over rows in chunks, and over products."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.processes import REPO, environment

from .sanitize import PRODUCTS, cases

pytestmark = pytest.mark.gpu

CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "ERROR SUMMARY: 0 errors",
}


@pytest.mark.parametrize("tool", CLEAN)
def test_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    assert os.path.exists(sanitizer), "compute-sanitizer of the CUDA toolkit is not installed"
    options = ["--no-clusters"] if tool == "racecheck" else []
    # With an allocation for each tensor, the ends of tensors are seen.
    environ = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "1", "--target-processes", "all",
         "--report-api-errors", "no",  # CuTe-DSL asks the driver for functions that it may lack
         sys.executable, str(REPO / "tests/gpu/sanitize.py"), *options],
        cwd=REPO, env=environ, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    assert CLEAN[tool] in output, output[-8000:]
    count = sum(len(case.dtypes) for case in cases(clusters=not options))
    assert f"{count} kernels right" in output, output[-8000:]
    assert f"{len(PRODUCTS)} functions with products right" in output, output[-8000:]
