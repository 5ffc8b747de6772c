"""A compiled kernel as a value, and how it becomes a function without `cutlass` and without a GPU.

The emitted host function calls two libraries: tvm-ffi's, and the runtime of CuTe-DSL.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import NamedTuple

from .cubin import Resources

ENTRY = "htile"  # the name of the host function in every object
RUNTIME = "libcute_dsl_runtime.so"
LEVEL = 3  # the optimization level of ptxas, unless another spills fewer registers


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel: its object, what it was made from, and what it uses.

    source: the text that was compiled, with `blocks` as below.
    function: the name of the host function in the source.
    object: the relocatable object.
    library: the same as a library for the dynamic linker; None where it was compiled without `ld`.
    blocks: how many thread blocks a multiprocessor has registers for. It is fewer than planned
        where too many registers would have been spilled, more where they suffice for more, and 0
        where the compiler decided.
    level: the optimization level of ptxas.
    seconds: how long this process compiled it; None where the disk cache had it.
    """

    source: str
    function: str
    arch: str
    object: bytes = field(repr=False)
    library: bytes | None = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    resources: Resources
    blocks: int = 0
    level: int = LEVEL
    seconds: float | None = field(default=None, compare=False)


def as_compiled(source: str, blocks: int, level: int) -> str:
    """The text `source` with the line of its thread blocks as the kernel was compiled."""

    def line(asked: re.Match) -> str:
        if 0 < int(asked[1]) < blocks:
            return f"blocks = {blocks}  # of an SM; registers suffice for more than {asked[1]}"
        if int(asked[1]) != blocks:
            other = asked[1] if int(asked[1]) else "the compiler's choice"
            return f"blocks = {blocks}  # of an SM; {other} would spill registers"
        if level != LEVEL:
            return f"blocks = {blocks}  # of an SM; ptxas -O{level}: -O{LEVEL} would spill"
        return asked[0]

    return re.sub(r"^blocks = (\d+)  #.*$", line, source, count=1, flags=re.MULTILINE)


class LoadError(Exception):
    """The kernel can not be loaded without `cutlass`; the message says why."""


class Variant(NamedTuple):
    """The build of CuTe-DSL for one CUDA version, such as `cu13`, and its runtime library."""

    name: str
    runtime: Path


@functools.cache
def variant() -> Variant | None:
    """The variant that `import cutlass` would take; None where there is none.

    That is the newest installed one that the driver supports, or without a driver the newest of
    all. CUTE_DSL_LIBS names other runtime libraries, as it does for CuTe-DSL.
    """
    package = util.find_spec("nvidia_cutlass_dsl")
    driver, usable = _driver_major(), {}
    for root in (package and package.submodule_search_locations) or ():
        for path in Path(root).glob(f"cu*/lib/{RUNTIME}"):
            major = path.parts[-3].removeprefix("cu")
            if major.isdecimal() and (driver is None or int(major) <= driver):
                usable.setdefault(int(major), path)
    if not usable:
        return None
    runtime = usable[max(usable)]
    for path in filter(None, os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)):
        if Path(path).name == RUNTIME:
            runtime = Path(path)
    return Variant(f"cu{max(usable)}", runtime)


def _driver_major() -> int | None:
    """The major CUDA version that the driver supports; None without one. CUDA stays unused."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else number.value // 1000


def find_linker() -> str | None:
    """The path of the system's linker, GNU's or LLVM's; None where there is none."""
    return shutil.which("ld") or shutil.which("ld.lld")


def link(object_: bytes) -> bytes | None:
    """The object as a library for the dynamic linker; None where no linker makes one of it."""
    if (linker := find_linker()) is None:
        return None
    with tempfile.TemporaryDirectory(prefix="htile-") as folder:
        source, target = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        source.write_bytes(object_)
        command = [linker, "-shared", "-o", str(target), str(source)]
        linked = subprocess.run(command, capture_output=True).returncode == 0
        return target.read_bytes() if linked else None


def load(artifact: Artifact) -> Callable[..., None]:
    """The host function, loaded by the dynamic linker, or else by apache-tvm-ffi-orcjit.

    Raises LoadError where neither can.
    """
    import tvm_ffi

    chosen = variant()
    if chosen is None:
        raise LoadError(f"no {RUNTIME} that the driver supports is installed")
    why = "no linker (ld) is here, nor was where it was compiled"
    try:
        ctypes.CDLL(str(chosen.runtime), mode=ctypes.RTLD_GLOBAL)
        with tempfile.TemporaryDirectory(prefix="htile-") as folder:
            path = Path(folder, "kernel.so")
            library = artifact.library or link(artifact.object)
            if library is not None:
                path.write_bytes(library)
                try:
                    return tvm_ffi.load_module(path)[ENTRY]
                except RuntimeError as error:  # such as a folder where nothing may be executed
                    why = str(error)
            import tvm_ffi_orcjit

            path = path.with_suffix(".o")
            path.write_bytes(artifact.object)
            return tvm_ffi_orcjit.default_session().load_module(str(path))[ENTRY]
    except ImportError as error:
        raise LoadError(f"{why}; and apache-tvm-ffi-orcjit is not installed") from error
    except RuntimeError as error:
        raise LoadError(f"{why}; {error}") from error
    except OSError as error:
        raise LoadError(str(error)) from error
