"""Starting up: softmax in fresh processes, with empty caches on disk, then with full ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import fresh
from benchmarks.results import Job, key, record

ROUNDS = 3
CASES = ("torch and context", "import", "first call", "second call")

# The statements after which `f` is the softmax.
STARTS = {
    "htile": "from examples.softmax import softmax as f",
    "quack": "from quack.softmax import softmax_fwd as f",
    "liger": "from liger_kernel.ops import LigerSoftmaxFunction; f = LigerSoftmaxFunction.apply",
    "compile": "f = torch.compile(lambda x: torch.softmax(x, -1), dynamic=False)",
    "eager": "f = lambda x: torch.softmax(x, -1)",
}

PROGRAM = """
import json
from time import perf_counter as clock
def done():
    torch.cuda.synchronize()
    return clock()
a = clock()
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
b = done()
{start}
c = done()
f(x)
d = done()
f(x)
e = done()
print(json.dumps([b - a, c - b, d - c, e - d]))
"""


def measure(names: tuple[str, ...], rounds: int, say) -> list[dict]:
    """A record for each case and state of the caches, in seconds."""
    found = {(case, state): {} for state in ("cold", "warm") for case in CASES}
    for name in names:
        times = {place: [] for place in found}
        try:
            for k in range(rounds):
                with tempfile.TemporaryDirectory(prefix="htile-bench-") as folder:
                    for state in ("cold", "warm"):
                        say(f"{name}, {state} caches, {k + 1} of {rounds}")
                        code = PROGRAM.format(start=STARTS[name])
                        (row,) = fresh.python(["-c", code], Path(folder))
                        for case, took in zip(CASES, row, strict=True):
                            times[case, state].append(took)
        except RuntimeError as error:
            for place in found:
                found[place][name] = {"error": str(error)}
            continue
        for place in found:
            found[place][name] = {"times": times[place]}
    return [record(_key(*place), results, "s") for place, results in found.items()]


def _key(case: str, state: str) -> tuple:
    return key("startup", "softmax", "bf16", 4096, 4096, f"{case}, {state} caches")


def jobs(options) -> list[Job]:
    """One job: every contender in its processes."""
    asked = options.contenders or tuple(STARTS)
    names = tuple(name for name in asked if name in STARTS)
    keys = tuple(_key(case, state) for state in ("cold", "warm") for case in CASES)
    rounds = options.rounds or ROUNDS
    return [Job("startup softmax", keys, names, lambda say: measure(names, rounds, say))]
