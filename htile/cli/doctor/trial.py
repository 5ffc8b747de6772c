"""A trial: compiles a small kernel, and runs it where there is a GPU, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from ...errors import HTileError
from .check import FAIL, OK, Check

TRIAL_SECONDS = 300  # after which a trial counts as hung


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of compiling a small kernel, and of running it if there is a GPU.

    arch: what it was compiled for.
    seconds, resources: how long that took, and what the kernel uses; None and empty if it failed.
    ran: whether it ran.
    wrong: how its result differs from torch's; empty where it does not.
    error: why the trial stopped; empty where it did not.
    """

    arch: str
    seconds: float | None = None
    resources: str = ""
    ran: bool = False
    wrong: str = ""
    error: str = ""


def try_kernel(arch: str, device: int | None) -> Trial:
    """Compile a kernel and run it on a GPU, or none, in a process of its own, which may crash."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from htile.cli.doctor.trial import _trial; _trial(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, arch, *([] if device is None else [f"cuda:{device}"])]
    environ = {k: v for k, v in os.environ.items() if k != "HTILE_DUMP"}
    environ["HTILE_CACHE_DIR"] = ""  # or the kernel might be found and not compiled
    try:
        run = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace",
            timeout=TRIAL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Trial(arch, error=f"it did not end within {TRIAL_SECONDS} seconds")
    said = {}
    for line in run.stdout.splitlines():
        if line.startswith(_MARK):
            said |= json.loads(line.removeprefix(_MARK))
    if run.returncode and not said.get("error"):
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        ended = f"signal {-run.returncode}: " if run.returncode < 0 else ""
        said["error"] = ended + last
    return Trial(arch, **said)


_MARK = "htile-trial "  # begins the other process's own lines, among those of its libraries


def _trial(arch: str, device: str | None = None) -> None:
    """What the other process does: after each step it prints a JSON object on a line."""
    import torch

    from ...run.rowwise import rowwise
    from ...testing import assert_close

    @rowwise
    def softmax(x):
        e = torch.exp(x - x.max())
        return e / e.sum()

    def say(**facts):
        print(f"{_MARK}{json.dumps(facts)}", flush=True)

    try:
        start = time.perf_counter()
        x = torch.empty(64, 1000, dtype=torch.bfloat16, device="meta")
        resources = str(softmax.inspect(x, arch=arch).resources)
        say(seconds=time.perf_counter() - start, resources=resources)
        if device is not None:
            x = torch.randn(64, 1000).bfloat16()
            y = softmax(x.to(device)).cpu()
            say(ran=True)
            try:
                assert_close(softmax, y, x)
            except AssertionError as error:
                say(wrong=str(error))
    except HTileError as error:
        say(error=str(error))


def check_compile(trial: Trial) -> Check:
    """Checks that the kernel was compiled."""
    name = f"compile for {trial.arch}"
    if trial.seconds is None:
        return Check(
            name, FAIL, trial.error or "the process ended early", "the checks above may say why; "
            "if all of them pass, please report this",
        )  # fmt: skip
    found = f"softmax in {trial.seconds:.1f} s, CuTe-DSL's import included; {trial.resources}"
    return Check(name, OK, found)


def check_run(trial: Trial, gpu: int) -> Check:
    """Checks that the kernel ran and computed what torch computes."""
    name = f"run on GPU {gpu}"
    if not trial.ran or trial.error:
        advice = "if the driver and the variant of CuTe-DSL pass above, please report this"
        return Check(name, FAIL, trial.error or "not tried", advice)
    if trial.wrong:
        return Check(name, FAIL, f"wrong: {trial.wrong}", "please report this")
    return Check(name, OK, "right: what torch computes in float64, rounded")
