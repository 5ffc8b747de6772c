"""The benchmarks measure: each suite that times a GPU, on a few cells, in a process of its own."""

import math
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from benchmarks.results import load

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def run(path, *options):
    command = [sys.executable, "-m", "benchmarks", "--json", str(path), "--dtype", "bf16", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return load(path)


def test_the_suites_time_every_contender_that_is_there(tmp_path):
    records = run(
        tmp_path / "r.jsonl", "--suite", "throughput", "few_rows", "host", "--kernels", "softmax",
        "cross_entropy", "rmsnorm_residual", "softmax_backward", "--cells", "64x4096", "--rounds",
        "6", "--contenders", "htile", "eager", "limit", "--plot", str(tmp_path / "plot.png"),
    )  # fmt: skip
    assert len(records) == 3 * 4
    for record in records:
        for name, found in record["contenders"].items():
            assert len(found["times"]) == 6, (record["suite"], name, found)
            assert all(0.1 < t < 1e4 and math.isfinite(t) for t in found["times"]), found
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_starting_up_and_compiling_are_timed(tmp_path):
    records = run(
        tmp_path / "r.jsonl", "--suite", "startup", "compile_time", "--kernels", "softmax",
        "--cells", "64x512", "--rounds", "1", "--contenders", "htile",
    )  # fmt: skip
    seconds = {
        (r["suite"], r["case"], r["n"]): t
        for r in records
        for t in r["contenders"]["htile"]["times"]
    }
    assert all(0 < t < 120 for t in seconds.values())
    first, second = (
        seconds["startup", f"{case} call, cold caches", 4096] for case in ("first", "second")
    )
    assert first > second
    assert ("compile_time", "", 512) in seconds


def test_known_kernels_run_at_the_speed_of_memory(tmp_path):
    """They have 0.95 or more of the limit on an H200 (docs/performance.md).

    Thread blocks have eight rows of half a warp each, two rows of two warps each, or one row.
    """
    records = run(
        tmp_path / "r.jsonl", "--suite", "throughput", "--kernels", "softmax", "rmsnorm",
        "layernorm", "--cells", "262144x256", "32768x1024", "65536x1000", "16384x8192",
        "--rounds", "9", "--contenders", "htile", "limit",
    )  # fmt: skip
    shares = {}
    for record in records:
        us = {name: median(found["times"]) for name, found in record["contenders"].items()}
        shares[record["kernel"], record["n"]] = us["limit"] / us["htile"]
    assert len(shares) == 12 and min(shares.values()) >= 0.85, shares
