"""A GPU that runs nothing, so that the host's time of calls is measured on any machine.

Inside `idle_gpu` tensors on the CPU go the way of tensors on a GPU: calls are traced, planned and
printed, take their shortcuts and allocate their results. In place of a compiled kernel there is a
function that does nothing, and so nothing is computed, compiled or launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from htile.run import ahead, launch, operands, rowwise, runner
from htile.run.launch import Kernel
from htile.run.products import calls as products
from htile.run.products import gradients as product_gradients
from htile.run.products import operations as product_operations
from htile.run.shortcuts import text as short_text

CAPABILITY = (9, 0)  # of an H200
PROCESSORS = 132
# The modules that ask which devices have kernels.
ASKING = ahead, operands, product_gradients, product_operations, rowwise, runner
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # what mallopt sets


Load = Callable[[object], Callable[..., None]]


def nothing(kernel: object) -> Callable[..., None]:
    """What is called in place of the compiled host function of a kernel."""
    return lambda *arguments: None


@contextmanager
def idle_gpu(load: Load = nothing, load_products: Load = nothing) -> Iterator[None]:
    """Have the CPU stand for a GPU that runs nothing.

    load: makes of a `Kernel` what is called in place of its compiled host function.
    load_products: makes it of the text of a kernel of products.
    """
    empty = torch._C._dynamo.guards._empty_strided_cpu
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    given = [
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (Kernel, "artifact", property(lambda kernel: kernel)),
        (launch, "load", load),
        (products, "load", load_products),
        (products, "build", lambda source, function, arch: source),
        (short_text, "allocator", lambda device: empty),
    ]
    for module in ASKING:
        given.append((module, "runs_kernels", lambda device: device.type != "meta"))
    with ExitStack() as stack:
        for owner, name, value in given:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def keep_memory() -> None:
    """Have freed memory stay with the process, as torch's allocator keeps that of a GPU.

    Without this each large tensor would be mapped anew, which takes the kernel of Linux longer than
    torch takes for memory of a GPU.
    """
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 1 << 30)
