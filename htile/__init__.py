"""HTile: plain PyTorch math for one row, run on every row as one fused GPU kernel.

`import htile` needs no GPU and imports neither CUDA nor `cutlass`. Each of the names below is
imported when it is first used, and so are `htile.nn` and `htile.testing`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import nn as nn
    from . import testing as testing
    from .build.cache import CacheInfo, cache_info
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
    from .frontend.annotations import Inner, Matrix, PerRow, Scalar, Shared, Static
    from .frontend.over_rows import max_rows, sum_rows
    from .frontend.random import dropout, exponential, philox, random_words, uniform
    from .run.rowwise import Rowwise, rowwise
    from .tune.search import Tuned
    from .tune.tiles import TunedProducts, TunedTile

__version__ = "0.2.0"

__all__ = [
    "ArgumentError",
    "CacheInfo",
    "CompileError",
    "DtypeError",
    "GradientError",
    "HTileError",
    "Inner",
    "LoweringError",
    "Matrix",
    "PerRow",
    "Rowwise",
    "Scalar",
    "ShapeError",
    "Shared",
    "Static",
    "TraceError",
    "Tuned",
    "TunedProducts",
    "TunedTile",
    "UnsupportedError",
    "cache_info",
    "dropout",
    "exponential",
    "max_rows",
    "philox",
    "random_words",
    "rowwise",
    "sum_rows",
    "uniform",
]

_MODULES = ("nn", "testing")
_ROLES = dict.fromkeys(
    ("Inner", "Matrix", "PerRow", "Scalar", "Shared", "Static"), "frontend.annotations"
)
_RANDOM = dict.fromkeys(
    ("dropout", "exponential", "philox", "random_words", "uniform"), "frontend.random"
)
_OVER_ROWS = dict.fromkeys(("max_rows", "sum_rows"), "frontend.over_rows")
_CACHE = dict.fromkeys(("CacheInfo", "cache_info"), "build.cache")
_RUN = {"Rowwise": "run.rowwise", "Tuned": "tune.search", "TunedProducts": "tune.tiles",
        "TunedTile": "tune.tiles", "rowwise": "run.rowwise"}
# The module of each name; it is `errors` for all others.
_HOMES = {**_RUN, **_ROLES, **_RANDOM, **_OVER_ROWS, **_CACHE}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f".{name}", __name__)  # whose import gives it its name here
    if name not in __all__:
        told = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(told, name=name, obj=sys.modules[__name__])
    value = getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
