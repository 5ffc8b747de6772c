"""Modules of torch whose forward is one kernel, and `fuse`, which finds them in a whole model.

    norm = htile.nn.RMSNorm(4096)             # where torch.nn.RMSNorm(4096) would stand
    report = htile.nn.fuse(model)             # modules of any library, as they are

docs/training.md has more of both.
"""

from .fusion import Report, fuse
from .modules import (
    GEGLU,
    AddRMSNorm,
    CrossEntropyLoss,
    DyT,
    GroupNorm,
    LayerNorm,
    LogSoftmax,
    RMSNorm,
    Softmax,
    SwiGLU,
)

__all__ = [
    "GEGLU",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "DyT",
    "GroupNorm",
    "LayerNorm",
    "LogSoftmax",
    "RMSNorm",
    "Report",
    "Softmax",
    "SwiGLU",
    "fuse",
]
