"""Windows of neighbours along an axis: `x.unfold(dim, size, step)`, pools, areas and slopes.

Windows that overlap are parts of the axis that begin one element after each other, put together.
"""

from __future__ import annotations

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .factories import index
from .functions import attach, clamp, implements, minimum
from .joins import cat, stack
from .parts import MOST_PARTS, part
from .promotion import BOOL, BYTES, floating, refuse
from .shapes import axis_of, known_axis, reshaped
from .tensor import FUNCTIONS, Tensor, alias, fail


def unfold(input, dimension, size, step):
    """Windows of neighbours along an axis, as one more axis of `size`, the last.

    size: at most 64, unless the windows lie one behind the other (step is size).
    """
    axis = known_axis(input, dimension, "unfold")
    n = input._sizes[axis]
    if size < 1 or step < 1 or size > n:
        fail(ShapeError, f"windows of {size} elements, {step} apart, of an axis of {n} elements: "
             "both are at least 1, and a window is no longer than the axis")  # fmt: skip
    count = (n - size) // step + 1
    if step == size:
        sizes = list(input._sizes)
        sizes[axis : axis + 1 or None] = count, size
        groups = reshaped(part(input, axis, 0, count * size), tuple(sizes))
        return groups.movedim(axis, -1)
    if size > MOST_PARTS:
        fail(UnsupportedError, f"unfold of windows of {size} elements that overlap: at most "
             f"{MOST_PARTS} elements are written out")  # fmt: skip
    windows = stack([part(input, axis, k, count, step) for k in range(size)], -1)
    return alias(input, windows)  # torch's share the memory of input


attach("unfold", unfold)  # F.unfold is of images


def windows_of(
    x: Tensor, size: object, stride: object, padding: object, beside: float, what: str
) -> Tensor:
    """The windows of a pool along the last axis, with one number behind its ends."""
    size, padding = one_number(size, what), one_number(padding, what)
    stride = one_number(size if stride is None or stride == () else stride, what)
    if x.ndim < 2:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: torch takes channels "
             f"before the elements, write F.{what}(x[None], ...)[0]")  # fmt: skip
    if not 0 <= padding * 2 <= size:
        fail(ShapeError, f"{what} with a padding of {padding}: at most half of the window is "
             "allowed")  # fmt: skip
    x = floating(x, what)
    if padding:
        x = torch.nn.functional.pad(x, (padding, padding), value=beside)
    return unfold(x, -1, size, stride)


def one_number(number: object, what: str) -> int:
    """A number that torch takes as a tuple of one, too."""
    if isinstance(number, (tuple, list)) and len(number) == 1:
        (number,) = number
    if not isinstance(number, int):
        fail(ShapeError, f"{what} with {number!r}: write a number")
    return number


@implements("avg_pool1d")
def avg_pool1d(
    input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True
):
    """The means of windows of the last axis; zeros behind the ends count if count_include_pad."""
    if ceil_mode:
        fail(UnsupportedError, "avg_pool1d with ceil_mode: leave it out, and write the mean of the "
             "elements that are left, x[k:].mean(), for the last window")  # fmt: skip
    windows = windows_of(input, kernel_size, stride, padding, 0.0, "avg_pool1d")
    size, padding = one_number(kernel_size, "avg_pool1d"), one_number(padding, "avg_pool1d")
    if count_include_pad or not padding:
        return windows.mean(-1)
    step = size if stride is None or stride == () else one_number(stride, "avg_pool1d")
    first = index(input._builder, windows._sizes[-2]) * step - padding
    count = minimum(first + size, input._sizes[-1]) - clamp(first, min=0)
    return windows.sum(-1) / count


def max_pool1d(
    input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
):
    """The largest elements of windows of the last axis; behind the ends nothing counts."""
    if one_number(dilation, "max_pool1d") != 1 or ceil_mode or return_indices:
        fail(UnsupportedError, "max_pool1d with dilation, ceil_mode or return_indices: leave them "
             "out")  # fmt: skip
    return windows_of(input, kernel_size, stride, padding, -torch.inf, "max_pool1d").max(-1).values


FUNCTIONS[torch.nn.functional.max_pool1d] = "F.max_pool1d", max_pool1d
FUNCTIONS[torch.max_pool1d] = "torch.max_pool1d", max_pool1d


def _areas(y: Tensor, x: object, dx: object, dim: int, what: str) -> Tensor:
    """The areas between neighbours under the line through them."""
    axis = axis_of(y, dim)
    n = y._sizes[axis] if y.ndim else 1
    if n < 2:
        fail(ShapeError, f"{what} of an axis of {n} elements: it takes two or more")
    if y._value.dtype is BOOL:
        refuse(what, y, "convert it first, y.float()")
    below, above = part(y, axis, 0, n - 1), part(y, axis, 1, n - 1)
    if x is None:
        return (below + above) * (0.5 * dx)
    if tuple(x._sizes) != tuple(y._sizes) and tuple(x._sizes) != (n,):
        fail(ShapeError, f"{what} of y of shape {tuple(y._sizes)} at x of shape {tuple(x._sizes)}")
    own = axis if x.ndim == y.ndim else -1
    widths = part(x, own, 1, n - 1) - part(x, own, 0, n - 1)
    if x.ndim < y.ndim:
        widths = reshaped(widths, (n - 1, *(1,) * (-1 - axis)))
    return (below + above) * widths * 0.5


@implements("trapezoid", "trapz")
def trapezoid(y, x=None, *, dx=1.0, dim=-1):
    """The area under the line through the elements of an axis, at x or dx apart."""
    areas = _areas(y, x, dx, dim, "trapezoid")
    if x is None and y._value.dtype in BYTES:  # torch adds these in more bits, but both ends in 8
        axis = axis_of(y, dim)
        ends = y.select(axis, 0) + y.select(axis, -1)
        return (y.sum(dim) - ends * 0.5) * dx
    return areas.sum(dim)


@implements("cumulative_trapezoid")
def cumulative_trapezoid(y, x=None, *, dx=1.0, dim=-1):
    """The areas under the line through the elements of an axis, from the first to each."""
    return _areas(y, x, dx, dim, "cumulative_trapezoid").cumsum(dim)


@implements("gradient")
def gradient(input, *, spacing=1, dim=None, edge_order=1):
    """(half the difference of both neighbours of each element) / spacing, for each axis of `dim`.

    spacing: a number, or one for each axis. At the ends of an axis it is the difference of the two
    elements there, or with edge_order=2 what is exact for parabolas.
    """
    x = floating(input, "gradient")
    dims = tuple(range(x.ndim)) if dim is None else dim
    dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    steps = spacing if isinstance(spacing, (tuple, list)) else (spacing,) * len(dims)
    if any(not isinstance(step, (int, float)) for step in steps) or len(steps) != len(dims):
        fail(UnsupportedError, "torch.gradient takes a number as spacing here, or one for each "
             "axis: of places write (y[2:] - y[:-2]) / (x[2:] - x[:-2])")  # fmt: skip
    if edge_order not in (1, 2):
        fail(TraceError, f"torch.gradient(edge_order={edge_order!r}): expected 1 or 2")
    return tuple(_slopes(x, axis, step, edge_order) for axis, step in zip(dims, steps, strict=True))


def _slopes(x: Tensor, dim: object, step: float, edge_order: int) -> Tensor:
    axis = known_axis(x, dim, "gradient")
    n = x._sizes[axis]
    if n <= edge_order:
        fail(ShapeError, f"torch.gradient of an axis of {n} elements: expected {edge_order + 1} "
             f"or more for edge_order={edge_order}")  # fmt: skip
    near = [part(x, axis, k, 1) for k in range(edge_order + 1)]
    far = [part(x, axis, n - 1 - k, 1) for k in range(edge_order + 1)]
    if edge_order == 1:
        first, last = near[1] - near[0], far[0] - far[1]
    else:
        first = 2 * near[1] - 1.5 * near[0] - 0.5 * near[2]
        last = 1.5 * far[0] - 2 * far[1] + 0.5 * far[2]
    between = [(part(x, axis, 2, n - 2) - part(x, axis, 0, n - 2)) * 0.5] if n > 2 else []
    return cat([first, *between, last], axis) / step
