"""Which tensors a kernel may take in place of torch's own functions, without anybody noticing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad
from torch.compiler import (
    assume_constant_result,
    is_compiling,
    is_dynamo_compiling,
    is_exporting,
)

from ..frontend.roles import PLAIN
from ..run.operands import is_distributed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(*tensors: torch.Tensor | None, inner: int = 1) -> bool:
    """Whether a row-wise function may be called with these tensors here; None counts as absent.

    inner: how many of the last dimensions of the first one are a row.

    It may not where torch would do something else than compute: while it exports, in torch.func and
    forward mode, in modes that watch operations, and for subclasses of tensors other than DTensors
    of whole rows. It may not either for float64, which kernels do not compute, for rows without
    elements, on the meta device, of which torch knows no autocast, and under autocast in 16 bits,
    which chooses the dtypes of results.

    Dynamo follows it, so in torch.compile the answer belongs to the kind of call that is compiled.
    """
    if _is_transformed_or_exported():
        return False
    is_read = is_dynamo_compiling()
    if not is_read and (is_compiling() or torch._C._len_torch_dispatch_stack() > 0):
        return False
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN and not is_split_in_rows(tensors, inner):
            return False
        if tensor.dtype not in DTYPES or (not is_read and tensor.is_neg()):
            return False
        if tensor.is_meta or (tensor.ndim and tensor.shape[-1] == 0):
            return False
        if device is None:
            device = tensor.device
            is_cast = torch.is_autocast_enabled(device.type)
        if tensor.device != device or (is_cast and tensor.dtype is not torch.float32):
            return False
        if tensor.layout is not torch.strided:
            return False
    return True


@assume_constant_result
def _is_transformed_or_exported() -> bool:
    """Whether torch.func, forward mode or torch.export work here.

    Where Dynamo asks it is a constant. Dynamo of torch 2.11 itself takes `is_exporting()` for True.
    """
    is_any = torch._C._functorch.peek_interpreter_stack() is not None
    return is_any or forward_ad._current_level >= 0 or is_exporting()


def is_split_in_rows(tensors: Iterable[torch.Tensor | None], inner: int = 1) -> bool:
    """Whether all tensors are DTensors, and processes have whole rows of them.

    The first tensor is one of rows, and so are all others of its rank; the rest is what rows share.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not is_distributed(given):
        return False
    from ..run.distributed import have_whole_rows  # which few processes need

    return have_whole_rows(given, inner)


def lie_alike(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether each process has of a tensor what belongs to its part of these rows, which fit."""
    if type(tensor) in PLAIN or type(rows) in PLAIN:
        return type(tensor) in PLAIN and type(rows) in PLAIN
    is_on_mesh = is_distributed((tensor,)) and tensor.device_mesh == rows.device_mesh
    return is_on_mesh and tensor.placements == rows.placements
