"""Convolutions along a row: `F.conv1d` with a kernel of a few numbers.

Each number of a kernel counts one part of the row, as in windows, and these are added up in turn.
"""

from __future__ import annotations

import torch

from ..errors import ShapeError, UnsupportedError
from .functions import implements
from .joins import stack
from .parts import part
from .promotion import floating
from .tensor import Tensor, fail
from .windows import one_number

MOST_FACTORS = 256  # numbers of a kernel: each is a product and a sum of every element


@implements("conv1d", method=False)
def conv1d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Sums of neighbours along the last axis, each times a number of a kernel.

    input: a row as one channel, x[None], or a few channels; weight: of shape (results, channels,
    size), such as w[None, None] of an htile.Shared; bias: one number for each result.
    """
    if isinstance(input, Tensor) and input.ndim == 3 and input._sizes[0] == 1:
        more = bias, stride, padding, dilation, groups
        return conv1d(input[0], weight, *more)[None]
    if not isinstance(input, Tensor) or input.ndim != 2:
        shape = tuple(input._sizes) if isinstance(input, Tensor) else ()
        fail(ShapeError, f"conv1d of a value of shape {shape}: torch takes channels before the "
             "elements, write F.conv1d(x[None], w[None, None])[0]")  # fmt: skip
    if not isinstance(weight, Tensor) or weight.ndim != 3:
        shape = tuple(weight._sizes) if isinstance(weight, Tensor) else ()
        fail(ShapeError, f"conv1d with a weight of shape {shape}: it has one of (results, "
             "channels, size), write w[None, None] for one kernel")  # fmt: skip
    x, weight = floating(input, "conv1d"), floating(weight, "conv1d")
    stride, dilation = one_number(stride, "conv1d"), one_number(dilation, "conv1d")
    groups = one_number(groups, "conv1d")
    results, of_each, size = weight._sizes
    channels = x._sizes[0]
    if min(stride, dilation, groups) < 1 or of_each * groups != channels or results % groups:
        fail(ShapeError, f"conv1d of {channels} channels with a weight of shape "
             f"{tuple(weight._sizes)}, stride={stride}, dilation={dilation}, groups={groups}: the "
             "weight has channels / groups channels, and results that groups divides")  # fmt: skip
    if weight._sizes.numel() > MOST_FACTORS:
        fail(UnsupportedError, f"conv1d with {weight._sizes.numel()} numbers in its kernels: at "
             f"most {MOST_FACTORS} are written out")  # fmt: skip
    x = _padded(x, padding, dilation * (size - 1), stride)
    count = (x._sizes[1] - dilation * (size - 1) - 1) // stride + 1
    if count < 1:
        fail(ShapeError, f"conv1d with a kernel that reaches over {dilation * (size - 1) + 1} "
             f"elements, of {x._sizes[1]}")  # fmt: skip
    if bias is not None and (not isinstance(bias, Tensor) or tuple(bias._sizes) != (results,)):
        fail(ShapeError, f"conv1d with a bias that is not of shape ({results},): it has one number "
             "for each result")  # fmt: skip
    parts = [[part(x[c], -1, k * dilation, count, stride) for k in range(size)]
             for c in range(channels)]  # fmt: skip
    found = []
    for result in range(results):
        first = result // (results // groups) * of_each
        terms = [parts[first + c][k] * weight[result, c, k]
                 for c in range(of_each) for k in range(size)]  # fmt: skip
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        found.append(total if bias is None else total + bias[result])
    return stack(found)


def _padded(x: Tensor, padding: object, reach: int, stride: int) -> Tensor:
    """Channels with zeros behind their ends."""
    if padding == "same" and stride != 1:
        fail(ShapeError, "conv1d(padding='same') with a stride: torch takes none there")
    if padding in ("same", "valid"):
        ends = (reach // 2, reach - reach // 2) if padding == "same" else (0, 0)
    else:
        ends = (one_number(padding, "conv1d"),) * 2
    if min(ends) < 0:
        fail(ShapeError, f"conv1d(padding={padding!r}): expected a number of zeros")
    return torch.nn.functional.pad(x, ends) if any(ends) else x
