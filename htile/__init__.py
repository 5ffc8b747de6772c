"""HTile: plain PyTorch math for one row, run on every row as one fused GPU kernel.

`import htile` needs no GPU and imports neither CUDA nor `cutlass`.
"""

from .errors import (
    ArgumentError,
    CompileError,
    DtypeError,
    GradientError,
    HTileError,
    LoweringError,
    ShapeError,
    TraceError,
    UnsupportedError,
)
from .frontend.roles import PerRow, Scalar, Static
from .jit import Rowwise, rowwise
from .lower.cache import CacheInfo, cache_info

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CacheInfo",
    "CompileError",
    "DtypeError",
    "GradientError",
    "HTileError",
    "LoweringError",
    "PerRow",
    "Rowwise",
    "Scalar",
    "ShapeError",
    "Static",
    "TraceError",
    "UnsupportedError",
    "cache_info",
    "rowwise",
]
