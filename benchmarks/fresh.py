"""Runs Python in a fresh process, with caches of compiled kernels in a folder of the caller's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]
CACHES = (
    "HTILE_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
)


def python(arguments: list[str], caches: Path, timeout: float = 600) -> list:
    """The values that the process prints, one JSON a line, other lines left out.

    Raises RuntimeError with the last line of its stderr where it fails or takes too long.
    """
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    paths = filter(None, [str(REPO), os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=REPO, env=environment, timeout=timeout,
            capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took more than {timeout:.0f} s") from error
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]
