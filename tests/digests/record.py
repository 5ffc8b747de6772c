"""The record of what is emitted for every cell, and what its kernels use."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from htile.build.compile import build

from .cells import Cell, digest, text_digest

RECORD = Path(__file__).parent / "record.json"


def groups(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each group, by its name."""
    found = defaultdict(list)
    for cell in cells:
        found[cell.group].append(cell)
    return dict(found)


def emitted(cell: Cell) -> tuple[str, str, str]:
    """(source, name of the host function, architecture): what `build` takes."""
    kernel = cell.kernel()
    return kernel.source, kernel.lowered.function, cell.arch


def texts(cells: Iterable[Cell]) -> dict[str, object]:
    """The part of a group's record that needs no compiler."""
    found = [(cell.n, cell.rows, text_digest(emitted(cell)[0])) for cell in cells]
    return {"kernels": len({text for *_, text in found}), "texts": digest(*found)}


def used(cells: Iterable[Cell]) -> dict[str, object]:
    """The part of a group's record that compiles kernels."""
    jobs = (emitted(cell) for cell in cells if cell.is_compiled)
    artifacts = {text_digest(job[0]): build(*job) for job in jobs}
    found = {text: artifact.resources for text, artifact in sorted(artifacts.items())}
    return {
        "registers": max(r.registers for r in found.values()),
        "stack": max(r.stack for r in found.values()),
        "resources": digest(found),
    }


def both(cells: list[Cell]) -> dict[str, object]:
    """The whole record of a group."""
    return texts(cells) | used(cells)


def take(cells: Iterable[Cell], workers: int | None = None) -> dict[str, dict[str, object]]:
    """The record of all groups, made by processes side by side."""
    found = groups(cells)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context) as pool:
        return dict(zip(found, pool.map(both, found.values()), strict=True))


def recorded() -> dict[str, dict[str, object]]:
    """What was recorded last."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write(record: dict[str, dict[str, object]]) -> None:
    """Replace the record: a line a group."""
    lines = [f" {json.dumps(name)}: {json.dumps(about)}" for name, about in record.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
