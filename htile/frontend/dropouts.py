"""Dropouts and other functions of torch that draw numbers, where they are told to draw none.

With `training=False` they are the identity or an activation, and with p = 1 zeros. What draws is
`htile.dropout`.
"""

from __future__ import annotations

import math

import torch

from ..errors import ShapeError, TraceError
from .composites import where
from .functions import implements
from .promotion import floating
from .tensor import FUNCTIONS, SAME, Tensor, fail, unsupported


@implements("dropout", "dropout2d", "dropout3d", "feature_dropout", check=floating)
def dropout(input, p=0.5, training=True):
    """x, where training is False or p is 0, and x * 0 where p is 1; what draws is htile.dropout."""
    return _undrawn("F.dropout", input, p, training)


@implements("dropout1d", check=floating)
def dropout1d(input, p=0.5, training=True):
    """`dropout` of channels, which come before the elements."""
    if input.ndim < 2:
        fail(ShapeError, f"dropout1d of a value of shape {tuple(input._sizes)}: torch takes "
             "channels before the elements, write F.dropout(x, training=False)")  # fmt: skip
    return _undrawn("F.dropout1d", input, p, training)


@implements("alpha_dropout", "feature_alpha_dropout", check=floating)
def alpha_dropout(input, p=0.5, training=False):
    """x, where training is False or p is 0, and x * 0 where p is 1; no other case is there."""
    return _undrawn("F.alpha_dropout", input, p, training)


@implements("rrelu", check=floating)
def rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False):
    """x from 0 on, and below it x times the middle of lower and upper. No other slope is drawn."""
    are_known = not isinstance(lower, Tensor) and not isinstance(upper, Tensor)
    if are_known and not (-math.inf < lower <= upper < math.inf):
        fail(TraceError, f"F.rrelu with lower={lower} and upper={upper}: they are finite, and "
             "lower is not the greater one")  # fmt: skip
    if training and not (are_known and lower == upper):
        unsupported("F.rrelu")
    slope = lower if are_known and lower == upper else (lower + upper) / 2
    return where(input > 0, input, input * slope)


def _undrawn(spelling, input, p, training):
    is_known = not isinstance(p, Tensor)
    if is_known and not 0 <= p <= 1:
        fail(TraceError, f"{spelling} with p={p}: a probability is from 0 to 1")
    if not training or (is_known and p == 0):
        return input
    if is_known and p == 1:
        return input * 0.0  # NaN of what is infinite, as in torch
    unsupported(spelling)


for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
    SAME.add(FUNCTIONS[getattr(torch.nn.functional, _name)][1])
