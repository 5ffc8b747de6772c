"""What `tune` times: whole kernels of rows, or calls with other tiles of their products."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..build.arch import arch_of_capability
from ..lower import Lowered, printed
from ..tune import search
from ..tune.search import Tuned
from ..tune.tiles import Asked, TunedProducts, TunedTile, tune_tile
from .launch import Request, prepare, run
from .product_kernels import ProductKernel, ProductKernels
from .products import ProductLaunch
from .tiles import choices, trying


def tune_rows(
    request: Request, device: torch.device, wanted: Mapping[str, object], seconds: float,
    numerics: bool, progress: bool,
) -> Tuned:  # fmt: skip
    """Search for the fastest plan of a row kernel, and keep it."""
    plans = request.plans(arch_of_capability(torch.cuda.get_device_capability(device)))
    copied = request.copied
    whole = tuple(v.contiguous() if n in copied else v for n, v in request.given.items())
    request = replace(request, values=whole)
    lower = functools.partial(printed, request.specialization.traced)

    def launcher(lowered: Lowered) -> Callable[[], object]:
        return functools.partial(run, prepare(request, device, lowered=lowered), whole)

    return search.tune(
        plans, wanted, device, request.rows, lower, launcher, seconds, numerics, progress
    )


def tune_products(
    request: Request, device: torch.device, seconds: float, progress: bool
) -> TunedProducts:
    """Search for the fastest tile of each kernel of products, and keep them.

    Whole calls are timed. The tiles that were found for one kernel are there for the next one.
    """
    arch = arch_of_capability(torch.cuda.get_device_capability(device))
    values, end = tuple(request.given.values()), time.monotonic() + seconds
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
