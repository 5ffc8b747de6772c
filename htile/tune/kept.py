"""Tuned plans on disk: what `tune` found to be fastest, and the plan that calls take because of it.

A tuning writes up to two files in the folder `tuned` of the cache, each named by what it is for.
One has the whole plan for one kind of call. The other has the numerics of a graph that reduces; it
is written only where other numerics than the default's were allowed. So all calls of such a
function have the same numerics, whatever their batch and alignment, and a row keeps its bits. A
file that is torn or foreign, or whose plan does not exist any more, is ignored.
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
from ..lower.choice.default import choose
from ..lower.plan import Plan

logger = logging.getLogger("htile.tune")

FORMAT = 1

Wanted = Mapping[str, object]


def recall(plans: list[Plan], wanted: Wanted, device: torch.device) -> Plan:
    """The plan to run: the tuned one, or else the default.

    plans: all plans for a target that have what is `wanted`.
    device: the GPU; only a plan that was tuned on one of its name counts.
    """
    kept = in_force(plans, wanted, device)
    if len(kept) > 1 and folder_there():
        found = read(_about(kept[0], wanted, device))
        for plan in kept:
            if plan.properties() == found:
                return plan
    return choose(kept)


def in_force(plans: list[Plan], wanted: Wanted, device: torch.device) -> list[Plan]:
    """The plans with the numerics that all calls have: the default's, or those that were kept.

    These are all plans where nothing is reduced, because bits do not depend on numerics then.
    """
    if plans[0].work.is_map:
        return plans
    numerics = choose(plans).numerics
    if len(plans) > 1 and folder_there():
        found = read(_about_numerics(plans[0], wanted, device))
        numerics = next((p.numerics for p in plans if p.numerics.properties() == found), numerics)
    return [plan for plan in plans if plan.numerics == numerics]


def keep(plan: Plan, wanted: Wanted, device: torch.device, numerics: bool) -> Path | None:
    """Have later calls run this plan, in all processes; returns the file that says so.

    If it can not be written, there is a warning, and None is returned.

    numerics: whether its numerics become those of all calls. They must if they are not the ones in
        force.
    """
    if numerics and not plan.work.is_map:
        of_numerics = _about_numerics(plan, wanted, device)
        if write(of_numerics, plan.numerics.properties()) is None:
            return None
    return write(_about(plan, wanted, device), plan.properties())


def _about(plan: Plan, wanted: Wanted, device: torch.device) -> dict[str, object]:
    """What a plan is tuned for: everything that plans are made from, and the GPU."""
    return _common(plan, wanted, device) | {"target": asdict(plan.target)}


def _about_numerics(plan: Plan, wanted: Wanted, device: torch.device) -> dict[str, object]:
    """What numerics are tuned for; the batch, its strides and its alignment do not count."""
    target = plan.target
    return _common(plan, wanted, device) | {
        "numerics of": {"arch": target.arch.name, "fastmath": target.fastmath}
    }


def _common(plan: Plan, wanted: Wanted, device: torch.device) -> dict[str, object]:
    return {**of_machine(device), "graph": of_graph(plan.graph), "wanted": dict(wanted)}


def of_machine(device: torch.device | int) -> dict[str, object]:
    """The GPU, and what kernels are made with."""
    chosen = variant()
    return {
        "format": FORMAT,
        "gpu": torch.cuda.get_device_name(device),
        "versions": None if chosen is None else cache.versions(chosen.name),
    }


def of_graph(graph: Graph) -> dict[str, object]:
    """What is computed; the function's name and the user's lines do not count."""
    return {
        "n": graph.n,
        **({} if graph.multiple is None else {"multiple": graph.multiple}),
        "nodes": [[n.op.value, n.inputs, repr(n.arg), repr(n.value)] for n in graph],
        "inputs": list(map(repr, graph.inputs)),
        "outputs": list(map(repr, graph.outputs)),
    }


def _key(about: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _folder() -> Path | None:
    folder = cache.cache_folder()
    return None if folder is None else folder / cache.TUNED


def folder_there() -> bool:
    """Whether anything was ever tuned; if not, as is usual, no file is looked for."""
    folder = _folder()
    return folder is not None and folder.is_dir()


def read(about: dict[str, object]) -> object:
    """What was kept for this; None where nothing was, or nothing that can be read."""
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


def write(about: dict[str, object], plan: dict[str, object]) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    key = _key(about)
    content = json.dumps({"key": key, "plan": plan, "for": about}, indent=1) + "\n"
    path = folder / f"{key}.json"
    what = "tuned plans", "later calls run the default"
    return path if files.replace_file(path, content.encode(), what) else None
