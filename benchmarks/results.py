"""Results on disk: JSON lines, one a cell, written as each is done, so that a run resumes.

A record: `suite`, `kernel`, `case`, `dtype`, `m`, `n`, `unit` of the times, `bytes` that move (or
null), `contenders`: a dict of name to {"times": [...], "error_of_bound": ...} or {"error": why}, of
htile also the `registers` and `stack` bytes of a thread, the `shared` bytes of a thread block and
its `occupancy`; `limit`: which limit kernel, `device`, `versions`, `date`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from htile.tune.statistics import Estimate, paired

PACKAGES = ("htile", "torch", "triton", "nvidia-cutlass-dsl", "quack-kernels", "liger-kernel")
IDENTITY = ("suite", "kernel", "case", "dtype", "m", "n")

Record = dict


@dataclass(frozen=True)
class Job:
    """What one cell, or the cells of one process, takes to measure.

    keys: of the records that `run` returns; it is given a function that shows what is under way.
    """

    title: str
    keys: tuple[tuple, ...]
    contenders: tuple[str, ...]
    run: Callable[[Callable[[str], None]], list[Record]]


def key(suite: str, kernel: str, dtype="", m=0, n=0, case="") -> tuple:
    """What a cell is found by, in the order of IDENTITY."""
    return suite, kernel, case, dtype, m, n


def record(key: tuple, contenders: dict, unit: str, **more) -> Record:
    """A record of this cell, with the machine, the versions and the date."""
    return {
        **dict(zip(IDENTITY, key, strict=True)),
        "unit": unit,
        "bytes": None,
        **more,
        "contenders": contenders,
        "device": device(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def device() -> str:
    """The GPU's name; without one, of what is compiled for."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def identity(record: Record) -> tuple:
    """A record's `key`."""
    return tuple(record[name] for name in IDENTITY)


def ratio(record: Record, name: str, to: str) -> Estimate | None:
    """How many times as fast as `to` a contender is, paired by round; None where one is missing."""
    times = [record["contenders"].get(n, {}).get("times") for n in (to, name)]
    if not all(times) or len(times[0]) != len(times[1]):
        return None
    return paired(*times)


def load(path: Path) -> list[Record]:
    """The records of a file, the last of each cell; none if there is no file.

    A line that is cut off, as by a run that was killed, is passed over.
    """
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[identity(entry), entry["device"]] = entry
    return list(found.values())


def append(path: Path, records: Iterable[Record]) -> None:
    """Add records to a file, which begins a new line where its last one is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if torn else "")
        for entry in records:
            file.write(json.dumps(entry) + "\n")


def is_done(job: Job, records: Iterable[Record]) -> bool:
    """Whether every cell of the job is there, with all the contenders, from this machine."""
    have = {identity(r): set(r["contenders"]) for r in records if r["device"] == device()}
    return all(set(job.contenders) <= have.get(k, set()) for k in job.keys)
