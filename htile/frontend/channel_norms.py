"""Norms over channels: `F.group_norm`, `F.instance_norm`, and `F.batch_norm` with given statistics.

Torch has them of (batch, channels, ...). A row has no batch, so a function writes x[None] for it.
Each norm is that of rows of a view, and each weight has one number for each channel.
"""

from __future__ import annotations

from math import prod

import torch
from torch import rsqrt

from ..errors import ShapeError, UnsupportedError
from .dynamic import ONLY_WHOLE
from .promotion import floating
from .shapes import has_any_length, reshaped
from .statistics import layer_norm
from .tensor import FUNCTIONS, Tensor, fail

OF_A_BATCH = (
    "write (x - running_mean) * torch.rsqrt(running_var + eps) * weight + bias with statistics "
    "that are given; those of a batch are sums over rows, htile.sum_rows"
)


def _channels(input: object, what: str, remedy: str) -> Tensor:
    """The floating input, which has axes of a batch and of channels."""
    if not isinstance(input, Tensor) or input.ndim < 2:
        shape = tuple(input._sizes) if isinstance(input, Tensor) else input
        fail(ShapeError, f"{what} of {shape}: torch takes (batch, channels, ...), and a row "
             f"has neither: {remedy}")  # fmt: skip
    return floating(input, what)


def _of_channels(x: Tensor, given: object, what: str, name: str) -> object:
    """A number for each channel, with an axis of 1 for each axis behind the channels."""
    if given is None:
        return None
    count, shape = x._sizes[1], tuple(given._sizes) if isinstance(given, Tensor) else given
    if shape != (count,):
        fail(ShapeError, f"{what} with a {name} of shape {shape}: expected {(count,)}, one number "
             "for each channel")  # fmt: skip
    return reshaped(given, (count, *(1 for _ in x._sizes[2:])))


def _affine(y: Tensor, weight: object, bias: object, what: str) -> Tensor:
    weight, bias = _of_channels(y, weight, what, "weight"), _of_channels(y, bias, what, "bias")
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """The layer norm of each group of channels; input is (batch, channels, ...), as x[None] is."""
    what = f"group_norm(num_groups={num_groups!r})"
    x = _channels(input, what, "of a row of channels write F.group_norm(x[None], groups)[0]")
    batch, channels = x._sizes[:2]
    if type(num_groups) is not int or num_groups < 1 or channels % num_groups:
        fail(ShapeError, f"{what} of {channels} channels: expected a divisor of {channels}")
    if any(has_any_length(x, axis) for axis in range(-x.ndim, 0)):
        fail(UnsupportedError, ONLY_WHOLE.format("groups"))
    size = prod(x._sizes[2:]) * channels // num_groups
    if batch * size == 1:
        fail(ShapeError, f"{what} of {channels} channels of one number each: it is its own mean")
    groups = layer_norm(reshaped(x, (batch * num_groups, size)), (size,), eps=eps)
    return _affine(reshaped(groups, tuple(x._sizes)), weight, bias, what)


def instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True,
    momentum=0.1, eps=1e-5,
):  # fmt: skip
    """The layer norm of each channel; input is (batch, channels, ...), as x[None] is."""
    what = "instance_norm"
    x = _channels(input, what, "of a row of one channel write F.layer_norm(x, x.shape[-1:])")
    if running_mean is not None or running_var is not None:
        if use_input_stats:
            fail(UnsupportedError, f"{what} that changes running statistics: a kernel changes no "
                 "argument; leave running_mean and running_var out")  # fmt: skip
        return batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    if prod(x._sizes[2:]) == 1:
        fail(ShapeError, f"{what} of channels of one number each, which is its own mean")
    return group_norm(x, x._sizes[1], weight, bias, eps)


def batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1,
    eps=1e-5,
):  # fmt: skip
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias; one number for each channel."""
    what = "batch_norm"
    if training or running_mean is None or running_var is None:
        fail(UnsupportedError, f"{what} with the statistics of a batch, which no row knows: "
             f"{OF_A_BATCH}")  # fmt: skip
    x = _channels(input, what, "of a row of channels write F.batch_norm(x[None], mean, var)[0]")
    average = _of_channels(x, running_mean, what, "running_mean")
    variance = _of_channels(x, running_var, what, "running_var")
    return _affine((x - average) * rsqrt(variance + eps), weight, bias, what)


for _function in (group_norm, instance_norm, batch_norm):
    _name = _function.__name__
    FUNCTIONS[getattr(torch.nn.functional, _name)] = f"F.{_name}", _function
FUNCTIONS[torch.group_norm] = "torch.group_norm", group_norm
