"""Row-wise kernels written with HTile, one a file. `python -m examples` runs them all.

Each module of `NAMES` has one decorated function of the module's name, and `arguments(m, n,
dtype, device)`, which makes arguments for it.
"""

from importlib import import_module

NAMES = (
    "softmax",
    "log_softmax",
    "rmsnorm",
    "layernorm",
    "swiglu",
    "capped_softmax",
    "absnorm",
    "norm_softmax",
)


def load(name: str):
    """(function, arguments) of an example."""
    module = import_module(f"examples.{name}")
    return getattr(module, name), module.arguments
