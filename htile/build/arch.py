"""What an architecture offers a row kernel: shared memory, registers, clusters.

The figures are those of the CUDA C++ Programming Guide, section "Compute Capabilities".
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CompileError

MAX_REGISTERS = 255  # A thread has at most this many 32-bit registers.


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU architecture; `name` is the compiler's (`sm_90a`).

    shared_bytes: the shared memory that a thread block may use.
    max_cluster: the most thread blocks of a cluster.
    max_threads: the most threads of a thread block.
    loop_ctas: how many thread blocks of 512 threads loop over rows, for results over all of them.
        It is less than the multiprocessors of usual GPUs, so that others may work beside. Sums over
        rows depend on it, so it is the same for all GPUs of the architecture.
    registers: the 32-bit registers of a multiprocessor, all of which one thread block may use.
    dependent_launch: whether a kernel's thread blocks may start while the kernel before on the
        stream ends; they wait for its end before they touch memory (section "Programmatic
        Dependent Launch").
    has_wgmma: whether four warps multiply together (`wgmma`), and not only each by itself.
    has_float8: whether there are instructions that convert to and from float8_e4m3fn and e5m2.
    """

    name: str
    shared_bytes: int
    max_cluster: int
    max_threads: int = 1024
    loop_ctas: int = 120
    registers: int = 65536
    dependent_launch: bool = True
    has_float8: bool = True
    has_wgmma: bool = False

    def fitting(self, tiles: int) -> int:
        """Thread blocks of a multiprocessor, if each has so many bytes of tiles in shared memory.

        A block takes 1 KiB beside its own, and what it has beside its tiles is taken for 1 KiB too.
        """
        return (self.shared_bytes + 1024) // (tiles + 2048)


_A100, _CONSUMER, _HOPPER = 163 * 1024, 99 * 1024, 227 * 1024

ARCHS = {
    (8, 0): Arch("sm_80", _A100, 1, loop_ctas=96, dependent_launch=False, has_float8=False),
    (8, 6): Arch("sm_86", _CONSUMER, 1, loop_ctas=72, dependent_launch=False, has_float8=False),
    (8, 9): Arch("sm_89", _CONSUMER, 1, loop_ctas=112, dependent_launch=False),
    (9, 0): Arch("sm_90a", _HOPPER, 16, has_wgmma=True),
    (10, 0): Arch("sm_100a", _HOPPER, 16, loop_ctas=136),
    (10, 3): Arch("sm_103a", _HOPPER, 16, loop_ctas=136),
    (12, 0): Arch("sm_120a", _CONSUMER, 1, loop_ctas=152),
    (12, 1): Arch("sm_121a", _CONSUMER, 1, loop_ctas=40),
}

DEFAULT = ARCHS[9, 0]
_KNOWN = ", ".join(arch.name for arch in ARCHS.values())


def arch_of_capability(capability: tuple[int, int]) -> Arch:
    """The architecture of a device's compute capability. Raises CompileError if it is unknown."""
    if capability not in ARCHS:
        major, minor = capability
        raise CompileError(
            f"GPUs of compute capability {major}.{minor} are not supported; HTile knows {_KNOWN}"
        )
    return ARCHS[capability]


def arch_named(name: str) -> Arch:
    """The architecture of this name; `sm_90` means `sm_90a`. Raises CompileError for others."""
    for arch in ARCHS.values():
        if name in (arch.name, arch.name.removesuffix("a")):
            return arch
    raise CompileError(f"unknown architecture {name!r}; HTile knows {_KNOWN}")
