"""Calls whose plans are timed: `Rowwise.tune`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..build.arch import Arch, arch_of_capability
from ..frontend.roles import classify
from ..lower import Lowered, printed
from ..tune import search
from .launch import Request, prepare, run
from .operands import device_of, refuse_transforms, wants_gradients
from .runner import Runner
from .training import passes_of

if TYPE_CHECKING:
    from .rowwise import Rowwise


def tuned(
    function: Rowwise, values: tuple, seconds: float, numerics: bool, progress: bool
) -> search.Tuned:
    """Time the plans of a call with these values, and keep the fastest; see `Rowwise.tune`."""
    name = function._signature.name
    call = classify(function._signature, values)
    refuse_transforms(function._signature, values)
    device = device_of(function._signature, values)
    rows = math.prod(call.lead)
    search.check(name, device, rows, seconds)
    request, _ = function._request(call, function._captures.fingerprint(), values)

    def tune(request: Request, wanted: Mapping) -> search.Tuned:
        return _tuned(request, wanted, device, seconds, numerics, progress)

    found = tune(request, function._wanted)
    if wants_gradients(values):
        found = replace(found, **_of_passes(function, request, device, tune))
    function._forget()
    return found


def _of_passes(
    function: Rowwise, request: Request, device: torch.device, tune: Callable
) -> dict[str, search.Tuned]:
    """What is found for the passes of a call, if it is differentiated."""
    passes, arch = passes_of(function, request), _arch(device)
    if passes is None:
        return {}

    def tuned_for(runner: Runner, values: tuple) -> search.Tuned:
        return runner.lowered(lambda r: tune(r, r.wanted), values, passes.lead, arch, device)[0]

    found, forward = {}, passes.derivative.forward
    if forward is not passes.derivative.of:
        found["forward"] = tuned_for(forward, passes.values)
    return found | {"backward": tuned_for(passes.backward.run, passes.given)}


def _arch(device: torch.device) -> Arch:
    return arch_of_capability(torch.cuda.get_device_capability(device))


def _tuned(
    request: Request, wanted: Mapping, device: torch.device, seconds: float, numerics: bool,
    progress: bool,
) -> search.Tuned:  # fmt: skip
    """What is found for the kernel of one request."""
    plans, copied = request.plans(_arch(device)), request.copied
    whole = tuple(v.contiguous() if n in copied else v for n, v in request.given.items())
    request = replace(request, values=whole)
    lower = functools.partial(printed, request.specialization.traced)

    def launcher(lowered: Lowered) -> Callable[[], object]:
        return functools.partial(run, prepare(request, device, lowered=lowered), whole)

    return search.tune(
        plans, wanted, device, request.rows, lower, launcher, seconds, numerics, progress
    )
