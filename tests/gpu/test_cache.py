"""The disk cache on the GPU: what a fresh process computes, and how soon."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from htile.build import cache
from tests.processes import environment

from .matrix import BF16, EXAMPLES

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
N = 1816  # of no other test

# argv: which modules to import before the clock runs. Prints a JSON object.
FRESH = """
import importlib, json, sys, time
import torch
for name in sys.argv[1:]:
    importlib.import_module(name)
torch.manual_seed(11)
x = torch.randn(77, 1816, device="cuda", dtype=torch.bfloat16)
w = torch.randn(1816, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
import htile

@htile.rowwise
def norm(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean() + eps) * weight

y = norm(x, w)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
cutlass = sorted(m for m in sys.modules if m.partition(".")[0] == "cutlass")

from htile.testing import assert_close
assert_close(norm, y, x, w)  # against float64
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    replayed = norm(x, w)
replayed.zero_()
x.mul_(-3)
graph.replay()
assert_close(norm, replayed, x, w)
info = htile.cache_info()
print(json.dumps({"seconds": seconds, "cutlass": cutlass, "hits": info.hits,
                  "compiled": info.compiled, "entries": info.entries}))
"""


def start(folder, code, *arguments):
    """Start a process with that cache; its code is in a file, as a user's is.

    Python keeps the compiled modules beside the cache, as it does where a package is installed,
    even if this process's variables or the checkout's owner forbid it.
    """
    file = folder.parent / "fresh.py"
    file.write_text(code, encoding="utf-8")
    command = [sys.executable, str(file), *arguments]
    environ = environment(
        HTILE_CACHE_DIR=str(folder),
        PYTHONDONTWRITEBYTECODE="",
        PYTHONPYCACHEPREFIX=str(folder.parent / "bytecode"),
    )
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def said(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_a_fresh_process_with_a_warm_cache(device, tmp_path):
    folder = tmp_path / "cache"
    cold = said(start(folder, FRESH, "cutlass"))
    assert (cold["compiled"], cold["hits"], cold["entries"]) == (1, 0, 1)
    assert cold["seconds"] <= 1 + 0.3, "compiled and loaded, beyond the import of CuTe-DSL"
    warm = [said(start(folder, FRESH)) for _ in range(3)]
    for process in warm:
        assert process["cutlass"] == []
        assert (process["compiled"], process["hits"], process["entries"]) == (0, 1, 1)
    seconds = min(process["seconds"] for process in warm)
    assert seconds <= 0.30, "import htile and the first call, beyond torch and the CUDA context"


def test_eight_fresh_processes_compile_once(device, tmp_path):
    processes = [start(tmp_path / "cache", FRESH) for _ in range(8)]
    found = [said(process) for process in processes]
    assert sum(process["compiled"] for process in found) == 1
    assert all(process["compiled"] or not process["cutlass"] for process in found)


AHEAD = """
import json, sys, torch
from examples.rmsnorm import residual_arguments, rmsnorm
from examples.softmax import softmax
from htile.testing import assert_close
args = residual_arguments(7, 1816, torch.bfloat16, "cuda")
assert_close(rmsnorm, rmsnorm(*args), *args)
x = torch.randn(5, 1817, device="cuda", dtype=torch.bfloat16)[:, 1:]
assert_close(softmax, softmax(x), x)
import htile
info = htile.cache_info()
print(json.dumps([info.compiled, info.hits, "cutlass" in sys.modules]))
"""


def test_what_was_compiled_ahead_runs(device, arch, tmp_path, monkeypatch):
    """It is compiled from meta tensors, or from a CPU tensor for rows that begin at odd places."""
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "cache"))
    rmsnorm, arguments = EXAMPLES["rmsnorm_residual"]
    rmsnorm.compile(*arguments(1, N, BF16, "meta"), arch=arch)
    EXAMPLES["softmax"][0].compile(torch.empty(2, N + 1, dtype=BF16)[:, 1:], arch=arch)
    assert cache.cache_info().entries == 2
    assert said(start(tmp_path / "cache", AHEAD)) == [0, 2, False]
