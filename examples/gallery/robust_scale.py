"""Each row about its median, in units of its median absolute deviation, which outliers do not move.

The factor 1.4826 makes that deviation the standard deviation of normal numbers.
"""

import torch

import htile

SIZE = 16384, 4096
SMALL = 300, 65


@htile.rowwise
def robust_scale(x):
    centred = x - x.median()
    return centred / (1.4826 * centred.abs().median() + 1e-6)


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).to(dtype),)


def reference(x):
    def middle(y):
        return y.sort(-1).values[..., (y.shape[-1] - 1) // 2, None]

    centred = x.double() - middle(x.double())
    return centred / (1.4826 * middle(centred.abs()) + 1e-6)
