"""Pools and resampling of a row whose windows follow from its length: `F.adaptive_avg_pool1d`.

A resampled row repeats every few elements: with g the greatest common divisor of both lengths, out
/ g elements come of n / g. Each of those is an element of every group, or a mean of two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, gcd, inf

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import implements
from .joins import cat, stack
from .ops import Op
from .parts import MOST_PARTS, part
from .promotion import floating, together
from .shapes import known_axis, reshaped
from .slopes import Slope
from .statistics import root
from .tensor import FUNCTIONS, Tensor, fail, node
from .windows import one_number, windows_of


def _pooled(x: Tensor, size: object, what: str, of: Callable[[Tensor], Tensor]) -> Tensor:
    """What `of` gives for each of so many parts of the last axis, which overlap or not."""
    count = one_number(size, what)
    n = _length(x, what)
    if count < 1:
        fail(ShapeError, f"{what} to {count} elements: expected one or more")
    if n % count == 0:
        return of(reshaped(x, (*x._sizes[:-1], count, n // count)))
    if count > MOST_PARTS:
        fail(UnsupportedError, f"{what} to {count} elements of {n}: where that does not divide the "
             f"row, at most {MOST_PARTS} are written out")  # fmt: skip
    ends = [(k * n // count, -(-(k + 1) * n // count)) for k in range(count)]
    return stack([of(part(x, -1, low, high - low)) for low, high in ends], -1)


def _length(x: Tensor, what: str) -> int:
    """How many elements the last axis has, behind an axis of channels."""
    if x.ndim < 2:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: torch takes channels "
             f"before the elements, write F.{what}(x[None], ...)[0]")  # fmt: skip
    return x._sizes[known_axis(x, -1, what)]


@implements("adaptive_avg_pool1d", method=False)
def adaptive_avg_pool1d(input, output_size):
    """The means of so many parts of the last axis, which together are all of it."""
    what = "adaptive_avg_pool1d"
    return _pooled(floating(input, what), output_size, what, lambda x: x.mean(-1))


def adaptive_max_pool1d(input, output_size, return_indices=False):
    """The largest elements of so many parts of the last axis, which together are all of it."""
    what = "adaptive_max_pool1d"
    if return_indices:
        fail(UnsupportedError, f"{what}(return_indices=True): write x.view(k, -1).max(-1)")
    return _pooled(floating(input, what), output_size, what, lambda x: x.max(-1).values)


FUNCTIONS[torch.nn.functional.adaptive_max_pool1d] = "F.adaptive_max_pool1d", adaptive_max_pool1d
FUNCTIONS[torch.adaptive_max_pool1d] = "torch.adaptive_max_pool1d", adaptive_max_pool1d


@implements("lp_pool1d")
def lp_pool1d(input, norm_type, kernel_size, stride=None, ceil_mode=False):
    """sum(x ** norm_type) ** (1 / norm_type) of windows of the last axis.

    For norm_type of 1 and more the slope of a window whose sum is 0 is 0, as torch has it.
    """
    if ceil_mode:
        fail(UnsupportedError, "lp_pool1d with ceil_mode: leave it out")
    p = float(norm_type)
    if abs(p) == inf:
        fail(UnsupportedError, f"lp_pool1d of norm_type {p}: write F.max_pool1d(x.abs()[None], k)")
    windows = windows_of(input, kernel_size, stride, 0, 0.0, "lp_pool1d")
    total = (windows**p).sum(-1)
    return root(total) if p == 2 else node(Op.POW, *together(total, 1 / p), arg=Slope.ZERO)


@implements("interpolate", "upsample")
def interpolate(
    input, size=None, scale_factor=None, mode="nearest", align_corners=None,
    recompute_scale_factor=None, antialias=False,
):  # fmt: skip
    """A row of another length, of an input of shape (1, channels, n).

    mode: nearest, nearest-exact, linear or area. The lengths have the ratio of small numbers.
    """
    if input.ndim != 3:
        fail(ShapeError, f"interpolate of a value of shape {tuple(input._sizes)}: of a row write "
             "F.interpolate(x[None, None], ...)[0, 0]")  # fmt: skip
    if mode not in ("nearest", "nearest-exact", "linear", "area") or antialias:
        fail(UnsupportedError, f"interpolate(mode={mode!r}, antialias={antialias}): of a row it is "
             "'nearest', 'nearest-exact', 'linear' or 'area', without antialias")  # fmt: skip
    if align_corners:
        fail(UnsupportedError, "interpolate with align_corners=True: leave it out")
    n = _length(input, "interpolate")
    count, n = _lengths(n, size, scale_factor, recompute_scale_factor, mode)
    if mode == "area":
        return adaptive_avg_pool1d(input, count)
    input = part(input, -1, 0, n)
    common = gcd(n, count)
    step, made = n // common, count // common
    if made > MOST_PARTS:
        fail(UnsupportedError, f"interpolate of {n} elements to {count}: {made} come of {step}, "
             f"again and again, and at most {MOST_PARTS} are written out")  # fmt: skip
    x = floating(input, "interpolate") if mode == "linear" else input
    if mode != "linear":
        ahead = 0.5 if mode == "nearest-exact" else 0.0
        places = [floor((k + ahead) * step / made) for k in range(made)]
        found = [part(x, -1, place, common, step) for place in places]
    else:
        x = cat([part(x, -1, 0, 1), x, part(x, -1, n - 1, 1)], -1)  # beyond its ends it is even
        found = [_between(x, (k + 0.5) * step / made + 0.5, common, step) for k in range(made)]
    return reshaped(stack(found, -1), (*input._sizes[:-1], count)) if made > 1 else found[0]


def _between(x: Tensor, place: float, count: int, step: int) -> Tensor:
    """The mean of the elements below and above a place, weighted, in each of the groups."""
    first = floor(place)
    share, below = place - first, part(x, -1, first, count, step)
    if share == 0:
        return below
    return below * (1 - share) + part(x, -1, first + 1, count, step) * share


def _lengths(
    n: int, size: object, scale_factor: object, recompute: object, mode: str
) -> tuple[int, int]:
    """How many elements are asked for, and how many of the n elements they come of."""
    if (size is None) == (scale_factor is None):
        fail(TraceError, "interpolate takes either size or scale_factor")
    used = n
    if size is not None:
        count = one_number(size, "interpolate")
    else:
        if isinstance(scale_factor, (tuple, list)) and len(scale_factor) == 1:
            (scale_factor,) = scale_factor
        if not isinstance(scale_factor, (int, float)):
            fail(TraceError, f"interpolate(scale_factor={scale_factor!r}): expected a number that "
                 "is known while tracing (htile.Static)")  # fmt: skip
        count = floor(n * scale_factor)
        if count and count != n * scale_factor and not recompute and mode != "area":
            used = int(count / scale_factor)  # torch goes on by 1 / scale_factor
            if used * scale_factor != count:
                fail(UnsupportedError, f"interpolate of {n} elements by {scale_factor}, which "
                     f"gives no whole number of them: write size={count}")  # fmt: skip
    if count < 1:
        fail(ShapeError, f"interpolate to {count} elements: expected one or more")
    return count, used
