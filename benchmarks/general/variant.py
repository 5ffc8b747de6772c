"""What a row function needs to be measured: its arguments, and the same in batches for torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

import htile
from benchmarks.kernels import STRICT, Kernel

# How a floating argument's values are drawn: normally, from 0.5 to 1.5, or from -2 to 2.
NORMAL, POSITIVE, BOUNDED = "normal", "positive", "bounded"


@dataclass(frozen=True)
class Parameter:
    """One tensor that a function takes.

    role: "row" (M, N), "column" (N,) or "per-row" (M,).
    dtype: its own dtype, or None for that of the cell.
    values: NORMAL, POSITIVE or BOUNDED, of floating dtypes. Masks are true in two of three
        places, and integers are from -16 to 16.
    """

    role: str
    dtype: torch.dtype | None = None
    values: str = NORMAL

    def make(self, m: int, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A tensor for `m` rows of `n` elements."""
        shape = {"row": (m, n), "column": (n,), "per-row": (m,)}[self.role]
        own = self.dtype or dtype
        if device == "meta":
            return torch.empty(shape, dtype=own, device=device)
        if own is torch.bool:
            return torch.rand(shape, device=device) < 2 / 3
        if not own.is_floating_point:
            return torch.randint(-16, 17, shape, device=device, dtype=own)
        if self.values == POSITIVE:
            return torch.rand(shape, device=device).add_(0.5).to(own)
        if self.values == BOUNDED:
            return torch.rand(shape, device=device).sub_(0.5).mul_(4).to(own)
        return torch.randn(shape, device=device).to(own)


ROW, COLUMN = Parameter("row"), Parameter("column", values=POSITIVE)
PER_ROW = Parameter("per-row", torch.float32, POSITIVE)
MASK = Parameter("row", torch.bool)
UNIFORM = Parameter("row", values=POSITIVE)  # a row of values from 0.5 to 1.5
WIDE = Parameter("row", torch.float32)  # a row of float32, whatever the cell's dtype is

VARIANTS: dict[str, Kernel] = {}  # by name, in the order of the modules


def variant(*parameters: Parameter, jumps: bool = False) -> Callable[[Callable], Callable]:
    """Enter a function of one row, which takes these tensors, among VARIANTS.

    Parameters of it that are not listed have defaults, which are used. `jumps` is as in `Kernel`.
    """

    def enter(fn: Callable) -> Callable:
        VARIANTS[fn.__name__] = kernel_of(htile.rowwise(fn), parameters, jumps=jumps)
        return fn

    return enter


def kernel_of(
    function: htile.Rowwise,
    parameters: tuple[Parameter, ...],
    tolerance: float = STRICT,
    jumps: bool = False,
) -> Kernel:
    """The kernel of a row-wise function; `tolerance` and `jumps` are as in `Kernel`."""

    def arguments(m, n, dtype, device):
        return tuple(p.make(m, n, dtype, device) for p in parameters)

    roles = tuple(p.role for p in parameters)
    eager = batched(function.__wrapped__, roles)
    return Kernel(function.__name__, function, arguments, eager, roles, tolerance, jumps)


def batched(fn: Callable, roles: tuple[str, ...]) -> Callable:
    """`fn` over all rows by `torch.vmap`: in float32, its rows returned in the first row's dtype.

    It is what a user of torch.compile writes who wants what HTile computes.
    """
    dims = tuple(None if role == "column" else 0 for role in roles)

    def over_rows(*args):
        dtype = args[0].dtype if args[0].is_floating_point() else torch.float32
        wide = [a.float() if a.is_floating_point() else a for a in args]
        results = torch.vmap(fn, dims)(*wide)
        return pytree.tree_map(
            lambda t: t.to(dtype) if t.ndim == 2 and t.dtype is torch.float32 else t, results
        )

    return over_rows
