"""Calls whose plans are timed: `Rowwise.tune`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..build.arch import arch_of_capability
from ..frontend.roles import classify
from ..lower import Lowered, printed
from ..tune import search
from .launch import prepare, run
from .operands import device_of, refuse_transforms

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
    plans = request.plans(arch_of_capability(torch.cuda.get_device_capability(device)))
    copied = request.copied
    whole = tuple(v.contiguous() if n in copied else v for n, v in request.given.items())
    request = replace(request, values=whole)
    lower = functools.partial(printed, request.specialization.traced)

    def launcher(lowered: Lowered) -> Callable[[], object]:
        return functools.partial(run, prepare(request, device, lowered=lowered), whole)

    found = search.tune(
        plans, function._wanted, device, rows, lower, launcher, seconds, numerics, progress
    )
    function._forget()
    return found
