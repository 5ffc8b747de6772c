"""Calls that are timed with other plans, or with other tiles of their products: `Rowwise.tune`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..build.arch import Arch, arch_of_capability
from ..frontend.roles import classify
from ..lower import Lowered, printed
from ..tune import search
from ..tune.tiles import Asked, TunedProducts, TunedTile, tune_tile
from .differentiation.training import passes_of
from .launch import Request, prepare, run
from .operands import device_of, refuse_transforms, wants_gradients
from .products.calls import ProductLaunch
from .products.kernels import ProductKernel, ProductKernels
from .products.tiles import choices, trying
from .runner import Runner

if TYPE_CHECKING:
    from .rowwise import Rowwise


def tuned(
    function: Rowwise, values: tuple, seconds: float, numerics: bool, progress: bool
) -> search.Tuned | TunedProducts:
    """Time the plans of a call with these values, and keep the fastest; see `Rowwise.tune`."""
    name = function._signature.name
    call = classify(function._signature, values)
    refuse_transforms(function._signature, values)
    device = device_of(function._signature, values)
    rows = math.prod(call.lead)
    search.check(name, device, rows, seconds)
    request, _ = function._request(call, function._captures.fingerprint(), values)

    def tune(request: Request, wanted: Mapping) -> search.Tuned:
        return _of_rows(request, wanted, device, seconds, numerics, progress)

    if request.specialization.has_products:
        found = _of_products(request, device, seconds, progress)
    else:
        found = tune(request, function._wanted)
    if wants_gradients(values) and not request.specialization.has_products:
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


def _of_rows(
    request: Request, wanted: Mapping, device: torch.device, seconds: float, numerics: bool,
    progress: bool,
) -> search.Tuned:  # fmt: skip
    """What is found for the kernel of one request, which has no products."""
    plans, copied = request.plans(_arch(device)), request.copied
    rows = request.rows // plans[0].target.joined
    whole = tuple(v.contiguous() if n in copied else v for n, v in request.given.items())
    request = replace(request, values=whole)
    lower = functools.partial(printed, request.specialization.traced)

    def launcher(lowered: Lowered) -> Callable[[], object]:
        return functools.partial(run, prepare(request, device, lowered=lowered), whole)

    return search.tune(
        plans, wanted, device, rows, lower, launcher, seconds, numerics, progress
    )


def _of_products(
    request: Request, device: torch.device, seconds: float, progress: bool
) -> TunedProducts:
    """Search for the fastest tile of each kernel of products, and keep them.

    Whole calls are timed. The tiles that were found for one kernel are there for the next one.
    """
    arch, given = _arch(device), request.given.values()
    values = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in given)
    end = time.monotonic() + seconds
    with torch.cuda.device(device), choices() as chosen:
        ProductLaunch(request, device)(values)
    found: list[TunedTile] = []
    for k, (asked, default) in enumerate(chosen):
        asked = Asked(*asked)
        left = max(end - time.monotonic(), 0.0) / (len(chosen) - k)

        def requests(tile, kernel=asked.kernel) -> list[tuple[str, str, str]]:
            with trying(kernel, tile):
                kernels = ProductKernels(request, arch).kernels
            texts = [each.text for each in kernels if isinstance(each, ProductKernel)]
            return [(text.source, text.function, arch.name) for text in texts]

        def called(tile, kernel=asked.kernel) -> Callable[[], object]:
            with torch.cuda.device(device), trying(kernel, tile):
                launch = ProductLaunch(request, device)
                launch(values)
            return functools.partial(launch, values)

        found.append(
            tune_tile(asked, default, device, requests, called, left, request.fastmath, progress)
        )
    return TunedProducts(tuple(found))
