"""Which calls of a row-wise function go another way, by the types of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from ..frontend.roles import PLAIN
from .operands import is_distributed, is_inside_transform, is_recorded

if TYPE_CHECKING:
    from .rowwise import Rowwise


def detour_of(values: tuple) -> Callable[..., object] | None:
    """What takes a call with these values, as (function, args, kwargs); None for a usual call.

    It is imported here, because few processes need it.
    """
    if not torch._C._len_torch_dispatch_stack() and not any(
        isinstance(value, torch.Tensor) and type(value) not in PLAIN for value in values
    ):
        return None
    if is_distributed(values):
        from .distributed import call_on_local_rows

        return call_on_local_rows
    if is_recorded(values) and not is_linearized(values):
        from .operations.compiled import call_recorded

        return call_recorded
    return None


def as_in_a_process(function: Rowwise, values: tuple) -> tuple:
    """The values that the kernel of a call gets: of DTensors what this process has of them."""
    if not is_distributed(values):
        return values
    from .distributed import local_values

    return local_values(function, values)


def is_linearized(values: tuple) -> bool:
    """Whether `torch.func.linearize` records the call.

    It computes with numbers, and keeps the graph of the tangents for this process, so the call
    need not be an operation that others find again.
    """
    if forward_ad._current_level < 0 or not is_inside_transform(values):
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
