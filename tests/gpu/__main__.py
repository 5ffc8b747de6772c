"""`python -m tests.gpu`: all tests that need a GPU, in processes side by side. `make gpu-test`.

One process would take half an hour. Each group below is a pytest of its own, on one of the GPUs in
turn. They share a folder of compiled kernels. What is timed, or needs all GPUs, runs at the end,
alone. Arguments go to every pytest. The exit code is 1 if any of them failed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU_CORES_A_GROUP = 2  # with fewer, groups wait for each other's compilations
MOST_OUTPUT = 20000  # characters that are shown of a group that failed, from its end

# The longest first. Files that no group names follow, each on its own.
GROUPS = (
    ("tests/gpu/test_clusters.py",),
    ("tests/gpu/test_products.py",),
    ("tests/gpu/test_gradients.py",),
    ("tests/gpu/test_layouts.py", "tests/gpu/test_examples.py"),
    ("tests/generated",),
    ("tests/gpu/test_edges.py", "tests/gpu/test_handwritten.py"),
    ("tests/gpu/test_plans.py", "tests/gpu/test_out.py", "tests/gpu/test_documents.py"),
    ("tests/gpu/test_gallery.py", "tests/gpu/test_groups.py"),
    ("tests/gpu/test_ranks.py", "tests/gpu/test_scans.py", "tests/gpu/test_language.py"),
    ("tests/gpu/test_row_sums.py",),
    ("tests/gpu/test_sanitizer.py", "tests/gpu/test_benchmarks.py"),
)
ALONE = ("tests/gpu/test_cache.py", "tests/gpu/test_devices.py", "tests/gpu/test_distributed.py")


@dataclass(frozen=True)
class Result:
    """What a pytest said."""

    name: str
    code: int
    seconds: float
    output: str

    @property
    def is_right(self) -> bool:
        """Whether no test failed; a group may hold none that the arguments select."""
        return self.code in (0, 5)

    @property
    def summary(self) -> str:
        """Its last line."""
        return (self.output.strip().splitlines() or ["no output"])[-1]


def rest() -> tuple[tuple[str, ...], ...]:
    """A group for each file with tests for a GPU that no group names."""
    named = {path for group in (*GROUPS, ALONE) for path in group}
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [f for f in files if "mark.gpu" in f.read_text(encoding="utf-8")]
    paths = [str(f.relative_to(ROOT)) for f in marked]
    return tuple((p,) for p in paths if not any(p.startswith(name) for name in named))


def run(files: tuple[str, ...], gpu: str | None, cache: str, arguments: list[str]) -> Result:
    """One pytest of these files, on one GPU, or on all for None."""
    name = ", ".join(Path(file).stem.removeprefix("test_") for file in files)
    environ = os.environ | {"HTILE_TESTS_CACHE": cache}
    if gpu is not None:
        environ["CUDA_VISIBLE_DEVICES"] = gpu
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *arguments, *files]
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    result = Result(name, done.returncode, time.monotonic() - start, done.stdout)
    mark = "passed" if result.is_right else "FAILED"
    print(f"{mark} in {result.seconds:4.0f} s  {name}: {result.summary}", flush=True)
    if not result.is_right:
        print(result.output[-MOST_OUTPUT:], flush=True)
    return result


def gpus() -> list[str]:
    """What names each GPU that may be used; asked without using CUDA."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(k) for k, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


def main(arguments: list[str]) -> int:
    """Run all groups; the exit code."""
    start = time.monotonic()
    names = itertools.cycle(gpus() or ["0"])
    groups = *GROUPS, *rest()
    workers = max(1, min(len(groups), (os.cpu_count() or 1) // CPU_CORES_A_GROUP))
    with tempfile.TemporaryDirectory(prefix="htile-tests-cache-") as cache:
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(run, files, next(names), cache, arguments) for files in groups]
            results = [future.result() for future in futures]
        results += [run((file,), None, cache, arguments) for file in ALONE]
    wrong = [result for result in results if not result.is_right]
    took = time.monotonic() - start
    print(f"{len(results) - len(wrong)} of {len(results)} groups passed in {took:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
