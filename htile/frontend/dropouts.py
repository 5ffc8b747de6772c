"""Dropouts and other functions of torch that draw numbers, where they are told to draw none.

With `training=False` they are the identity or an activation. What draws is `htile.dropout`.
"""

from __future__ import annotations

import torch

from ..errors import ShapeError
from .composites import where
from .functions import implements
from .promotion import floating
from .tensor import FUNCTIONS, SAME, fail, unsupported


@implements("dropout", "dropout2d", "dropout3d", check=floating)
def dropout(input, p=0.5, training=True):
    """x, where training is False or p is 0; what draws is htile.dropout."""
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
    """x, where training is False or p is 0; the other case is not there."""
    return _undrawn("F.alpha_dropout", input, p, training)


@implements("rrelu", check=floating)
def rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False):
    """x from 0 on, and below it x times the middle of lower and upper, where training is False."""
    if training:
        unsupported("F.rrelu")
    return where(input > 0, input, input * ((lower + upper) / 2))


def _undrawn(spelling, input, p, training):
    if training and p != 0:
        unsupported(spelling)
    return input


for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
    SAME.add(FUNCTIONS[getattr(torch.nn.functional, _name)][1])
