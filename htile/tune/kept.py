"""Tuned plans on disk: what `tune` found to be fastest, and the plan that calls take because of it.

Two files a tuning, in the folder `tuned` of the cache, each named by what it is for: one has the
numerics of a graph, written only where others than the default's were allowed; one has the whole
plan for one kind of call. So all calls of a function keep one numerics, whatever their batch and
alignment, and a row its bits. A file that is torn, foreign, or of a plan that is none any more
counts as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from ..build import cache, files
from ..build.artifact import variant
from ..frontend.graph import Graph
from ..lower.choice import choose
from ..lower.plan import Plan

logger = logging.getLogger("htile.tune")

FORMAT = 1

Wanted = Mapping[str, object]


def recall(plans: list[Plan], wanted: Wanted, device: torch.device) -> Plan:
    """The plan to run of all `plans` for a target with what is `wanted`: tuned, or the default.

    device: the GPU that it was to be tuned on; its name counts.
    """
    kept = in_force(plans, wanted, device)
    if len(kept) > 1 and _folder_there():
        found = _read(_about(kept[0], wanted, device))
        for plan in kept:
            if plan.properties() == found:
                return plan
    return choose(kept)


def in_force(plans: list[Plan], wanted: Wanted, device: torch.device) -> list[Plan]:
    """The plans that have the numerics of all calls: the default's, or those that were kept."""
    numerics = choose(plans).numerics
    if len(plans) > 1 and _folder_there():
        found = _read(_about_numerics(plans[0], wanted, device))
        numerics = next((p.numerics for p in plans if asdict(p.numerics) == found), numerics)
    return [plan for plan in plans if plan.numerics == numerics]


def keep(plan: Plan, wanted: Wanted, device: torch.device, numerics: bool) -> Path | None:
    """Have later calls run this plan, in all processes; with a warning None where that fails.

    numerics: whether its numerics are to be those of all calls, as they must be if they are others
        than the ones in force. Returns the file.
    """
    if numerics and _write(_about_numerics(plan, wanted, device), asdict(plan.numerics)) is None:
        return None
    return _write(_about(plan, wanted, device), plan.properties())


def _about(plan: Plan, wanted: Wanted, device: torch.device) -> dict[str, object]:
    """What a plan is tuned for: everything that plans are made from, and the GPU."""
    return _common(plan, wanted, device) | {"target": asdict(plan.target)}


def _about_numerics(plan: Plan, wanted: Wanted, device: torch.device) -> dict[str, object]:
    """What numerics are tuned for: nothing of the batch, its strides or its alignment."""
    target = plan.target
    return _common(plan, wanted, device) | {
        "numerics of": {"arch": target.arch.name, "fastmath": target.fastmath}
    }


def _common(plan: Plan, wanted: Wanted, device: torch.device) -> dict[str, object]:
    chosen = variant()
    return {
        "format": FORMAT,
        "graph": _graph(plan.graph),
        "wanted": dict(wanted),
        "gpu": torch.cuda.get_device_name(device),
        "versions": None if chosen is None else cache.versions(chosen.name),
    }


def _graph(graph: Graph) -> dict[str, object]:
    """What is computed, without the function's name and the user's lines."""
    return {
        "n": graph.n,
        "nodes": [[n.op.value, n.inputs, repr(n.arg), repr(n.value)] for n in graph],
        "inputs": list(map(repr, graph.inputs)),
        "outputs": list(map(repr, graph.outputs)),
    }


def _key(about: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _folder() -> Path | None:
    folder = cache.cache_folder()
    return None if folder is None else folder / cache.TUNED


def _folder_there() -> bool:
    """Whether anything was tuned: most calls ask no further."""
    folder = _folder()
    return folder is not None and folder.is_dir()


def _read(about: dict[str, object]) -> object:
    """What was kept for this; None where nothing was."""
    key = _key(about)
    path = _folder() / f"{key}.json"
    try:
        content = json.loads(files.read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.info("%s is no tuned plan: %s", path, error)
        return None
    if not isinstance(content, dict) or content.get("key") != key:
        logger.info("%s is no tuned plan of that key", path)
        return None
    return content.get("plan")


def _write(about: dict[str, object], plan: dict[str, object]) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    key = _key(about)
    content = json.dumps({"key": key, "plan": plan, "for": about}, indent=1) + "\n"
    path = folder / f"{key}.json"
    what = "tuned plans", "later calls run the default"
    return path if files.replace_file(path, content.encode(), what) else None
