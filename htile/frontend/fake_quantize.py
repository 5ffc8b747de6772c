"""Quantization that stays in floats, as models are trained that will be quantized.

An element becomes the nearest of the numbers (q - zero_point) * scale, for integers q between two
bounds. Its slope is 1 where q lies between the bounds, and 0 beyond. Scales and zero points have no
gradient, as in torch.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError, DtypeError, ShapeError
from .functions import implements, where, with_slope_of
from .promotion import BOOL, FLOAT, convert, floating, into
from .shapes import axis_of, reshaped
from .tensor import Tensor, fail


@implements("fake_quantize_per_tensor_affine", method=False)
def fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max):
    """The nearest of (q - zero_point) * scale, for integers q from quant_min to quant_max.

    scale, zero_point: two numbers, or two tensors of one element each. The slope is 1, and 0 where
    q is beyond the bounds. NaN becomes the lowest number."""
    what = "fake_quantize_per_tensor_affine"
    _check_bounds(what, quant_min, quant_max)
    are_tensors = [isinstance(each, Tensor) for each in (scale, zero_point)]
    if any(are_tensors):
        if not all(are_tensors):
            fail(ArgumentError, f"{what} takes a scale and a zero point that are both numbers, or "
                 "both tensors")  # fmt: skip
        for each in (scale, zero_point):
            if each._sizes.numel() != 1:
                fail(ShapeError, f"{what} takes one scale and one zero point, got a tensor of "
                     f"shape {tuple(each._sizes)}")  # fmt: skip
        return _quantized(what, input, scale.reshape(()), zero_point.reshape(()),
                          quant_min, quant_max)  # fmt: skip
    if not quant_min <= zero_point <= quant_max:
        fail(ArgumentError, f"{what} takes a zero point between quant_min and quant_max, got "
             f"{zero_point}")  # fmt: skip
    return _quantized(what, input, scale, zero_point, quant_min, quant_max)


@implements("fake_quantize_per_channel_affine", method=False)
def fake_quantize_per_channel_affine(input, scale, zero_point, axis, quant_min, quant_max):
    """fake_quantize_per_tensor_affine with a scale and a zero point for each index of an axis."""
    what = "fake_quantize_per_channel_affine"
    _check_bounds(what, quant_min, quant_max)
    place = axis_of(input, axis)
    for name, each in (("scale", scale), ("zero_point", zero_point)):
        if not isinstance(each, Tensor) or tuple(each._sizes) != (input._sizes[place],):
            told = f"shape {tuple(each._sizes)}" if isinstance(each, Tensor) else repr(each)
            fail(ShapeError, f"{what} takes a {name} of shape ({input._sizes[place]},) for axis "
                 f"{axis} of a value of shape {tuple(input._sizes)}, got {told}")  # fmt: skip
    if place != -1:
        shape = (input._sizes[place], *(1,) * (-place - 1))
        scale, zero_point = reshaped(scale, shape), reshaped(zero_point, shape)
    return _quantized(what, input, scale, zero_point, quant_min, quant_max)


def _check_bounds(what: str, low: int, high: int) -> None:
    if not low <= high:
        fail(ArgumentError, f"{what} takes quant_min <= quant_max, got {low} and {high}")


def _quantized(what: str, x: Tensor, scale, zero_point, low: int, high: int) -> Tensor:
    x = floating(x, what)
    if isinstance(scale, Tensor):
        if scale._value.dtype is not FLOAT or zero_point._value.dtype in (FLOAT, BOOL):
            fail(DtypeError, f"{what} takes a scale of float32 and a zero point of int32, got "
                 f"{scale.dtype} and {zero_point.dtype}")  # fmt: skip
        scale, zero_point = scale.detach(), convert(zero_point, FLOAT)
        inverse = 1.0 / scale
    else:
        scale = torch.tensor(scale, dtype=torch.float32)
        scale, inverse = scale.item(), scale.reciprocal().item()
    q = torch.round(x * inverse) + zero_point
    held = where(q >= low, torch.clamp(q, max=high), float(low))
    result = into((held - zero_point) * scale, x._value)
    return with_slope_of(where((q >= low) & (q <= high), x, 0.0), result)
