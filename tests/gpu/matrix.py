"""What the GPU tests have in common: the examples, their sizes, and how a test runs one."""

import contextlib
import subprocess
import sys
import zlib
from collections.abc import Iterable
from types import ModuleType

import torch
from torch.utils import _pytree as pytree

import examples
from examples.rmsnorm import residual_arguments, rmsnorm
from htile.build.arch import arch_of_capability
from htile.build.compile import build
from htile.run.shortcuts import text as short_text

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
SIZES = (1, 3, 17, 64, 127, 128, 1000, 1024, 3584, 4096, 5120, 8191, 16384)
BATCHES = (0, 1, 7, 4096)

EXAMPLES = {name: examples.load(name) for name in examples.NAMES}
EXAMPLES["rmsnorm_residual"] = rmsnorm, residual_arguments


def short(value) -> str | None:
    """The name of a dtype, for the names of tests."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def seed(*what) -> None:
    """Seed torch with something that is the same in every process."""
    torch.manual_seed(zlib.crc32(repr(what).encode()))


def arch_of_the_gpu() -> str:
    """The GPU's architecture, asked in another process, because this one may not use CUDA yet."""
    code = "import torch; print(*torch.cuda.get_device_capability())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    return arch_of_capability(tuple(map(int, asked.stdout.split()))).name


def jobs_of(modules: Iterable[ModuleType], arch: str) -> list[tuple]:
    """What these test modules need compiled: each a function and its arguments, for a worker."""
    return [job for m in modules for job in getattr(m, "jobs", lambda arch: ())(arch)]


def job(f, args, arch: str, **kwargs) -> tuple:
    """How to compile what `f(*args)` needs: a function and its arguments, for a worker."""
    kernel = f.inspect(*args, arch=arch, **kwargs)
    return build, (kernel.source, kernel.lowered.function, kernel.arch)


@contextlib.contextmanager
def poisoned_memory():
    """Every `torch.empty` in here is filled with NaN (integers with their largest value)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def poison_shortcuts() -> None:
    """From here on, what a repeated call allocates is filled in there too.

    It does not go through torch's dispatcher, which does so for `torch.empty`.
    """
    allocator = short_text.allocator

    def poisoning(device):
        allocate = allocator(device)

        def empty(sizes, strides, dtype):
            made = allocate(sizes, strides, dtype)
            if torch.are_deterministic_algorithms_enabled():
                poison = torch.nan
                if not dtype.is_floating_point:
                    poison = dtype is torch.bool or torch.iinfo(dtype).max
                made.fill_(poison)
            return made

        return empty

    short_text.allocator = poisoning


def run(f, *args, **kwargs):
    """`f(*args)`, with outputs in which an element that is not written shows."""
    with poisoned_memory():
        return f(*args, **kwargs)


def assert_same_bits(actual, expected, what: object = "") -> None:
    """Structures of tensors are equal bit for bit, NaN included."""
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    for k, (a, b) in enumerate(pairs):
        assert a.shape == b.shape and a.dtype == b.dtype, (what, k)
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        differ = (a.view(kind) != b.view(kind)).sum().item() if a.numel() else 0
        assert not differ, f"{what}: result {k}: {differ} of {a.numel()} elements differ"


def rows_of(structure, rows):
    """The same structure of some of the rows."""
    return pytree.tree_map(lambda t: t[rows], structure)


def shifted(tensor, elements: int):
    """A copy of rows (M, N), contiguous, at a pointer that is off by so many elements.

    On `meta`, where no pointer is, rows whose distance has that alignment.
    """
    m, n = tensor.shape
    if tensor.device.type == "meta":
        return tensor.new_empty(m, n + elements)[:, :n]
    buffer = tensor.new_empty(m * n + elements)
    return buffer[elements:].view(m, n).copy_(tensor)
