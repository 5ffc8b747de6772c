"""Which tensors a kernel may take in place of torch's own functions, without anybody noticing."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

PLAIN = (torch.Tensor, torch.nn.Parameter)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(*tensors: torch.Tensor | None) -> bool:
    """Whether a row-wise function may be called with these tensors here; None counts as absent.

    It may not where torch would do something else than compute: while it compiles or exports, in
    torch.func and forward mode, in modes that watch operations, and for subclasses of tensors. It
    may not either for float64, which kernels do not compute, for rows without elements, and under
    autocast in 16 bits, which chooses the dtypes of results.
    """
    if is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN or tensor.dtype not in DTYPES or tensor.is_neg():
            return False
        if tensor.ndim and tensor.shape[-1] == 0:
            return False
        if device is None:
            device = tensor.device
            is_cast = torch.is_autocast_enabled(device.type)
        if tensor.device != device or (is_cast and tensor.dtype is not torch.float32):
            return False
        if tensor.layout is not torch.strided:
            return False
    return True
