"""Row-wise kernels written with HTile, one a file. `python -m examples` shows them all.

Each module of `NAMES` has one decorated function with the module's name, a function
`arguments(m, n, dtype, device)` that makes arguments for it, and a `main()` that checks it.
`char_transformer` trains a whole model.
"""

from collections.abc import Callable
from importlib import import_module

import htile

NAMES = (
    "softmax",
    "log_softmax",
    "rmsnorm",
    "layernorm",
    "swiglu",
    "capped_softmax",
    "absnorm",
    "norm_softmax",
    "causal_softmax",
    "cross_entropy",
)


def load(name: str) -> tuple[htile.Rowwise, Callable[..., tuple]]:
    """The function of an example, and the one that makes arguments for it."""
    module = import_module(f"examples.{name}")
    return getattr(module, name), module.arguments
