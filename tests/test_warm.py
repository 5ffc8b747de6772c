"""A first call whose kernel is on disk: what a fresh process imports and compiles for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

# What a call on a GPU does up to the launch. argv: "compile", or nothing. Prints a JSON object.
CALL = """
import json, sys
import torch
x, w = torch.empty(77, 1816, dtype=torch.bfloat16), torch.empty(1816, dtype=torch.bfloat16)
before = set(sys.modules)
import htile

@htile.rowwise
def norm(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean() + eps) * weight

if sys.argv[1:]:
    norm.compile(x, w, arch="sm_90a")
else:
    from htile.build.compile import load
    assert callable(load(norm.inspect(x, w, arch="sm_90a").artifact))
modules = sorted(set(sys.modules) - before)
info = htile.cache_info()
print(json.dumps({"modules": modules, "compiled": info.compiled, "hits": info.hits}))
"""

ABSENT = {
    "cuda", "cutlass", "matplotlib", "networkx", "rich", "sympy",
    *(f"htile.{name}" for name in (
        "cli", "config", "dataflow", "pictures.dot", "pictures.node_link", "testing",
        "tune.search", "tune.statistics", "tune.timing",
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What a process that compiles the kernel says, and what the next one does."""
    folder = tmp_path_factory.mktemp("warm")
    file = folder / "call.py"
    file.write_text(CALL, encoding="utf-8")
    environ = os.environ | {"HTILE_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(REPO)}

    def said(*arguments):
        command = [sys.executable, str(file), *arguments]
        run = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    return said("compile"), said()


def test_a_warm_process_loads_what_a_cold_one_compiled(processes):
    cold, warm = processes
    assert (cold["compiled"], cold["hits"]) == (1, 0)
    assert (warm["compiled"], warm["hits"]) == (0, 1)


def test_a_warm_process_imports_little(processes):
    cold, warm = (set(process["modules"]) for process in processes)
    assert "cutlass" in cold and "tvm_ffi" in warm
    assert not ABSENT & warm
    packages = {name.partition(".")[0] for name in warm} - sys.stdlib_module_names
    public = {name for name in packages if not name.startswith("_")}
    assert public <= {"htile", "torch", "torch_c_dlpack_ext", "tvm_ffi"}
