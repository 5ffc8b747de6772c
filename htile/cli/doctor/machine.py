"""Checks of the machine: the NVIDIA driver, the GPUs, and the folders that HTile writes to."""

from __future__ import annotations

import ctypes
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...build.arch import arch_of_capability
from ...build.cache import cache_folder, cache_limit
from ...errors import ArgumentError, CompileError
from .check import FAIL, OK, WARN, Check, dotted


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver.

    cuda: the CUDA version that it supports; None if that is unknown.
    gpus: how many GPUs it sees.
    """

    version: str
    cuda: tuple[int, int] | None
    gpus: int


def read_driver() -> Driver | None:
    """What the driver's own libraries say; None where none answers. CUDA is not initialized."""
    version, gpus, cuda = None, 0, None
    nvml = _library("libnvidia-ml.so.1", "nvml.dll")
    if nvml is not None and nvml.nvmlInit_v2() == 0:
        text, count = ctypes.create_string_buffer(96), ctypes.c_uint(0)
        if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            version = text.value.decode()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            gpus = count.value
        nvml.nvmlShutdown()
    libcuda = _library("libcuda.so.1", "nvcuda.dll")
    number = ctypes.c_int(0)
    if libcuda is not None and libcuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        if number.value:
            cuda = number.value // 1000, number.value % 1000 // 10
    if version is None and cuda is None:
        return None
    return Driver(version or "of unknown version", cuda, gpus)


def _library(linux: str, windows: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(windows if sys.platform == "win32" else linux)
    except OSError:
        return None


def check_driver(driver: Driver | None) -> Check:
    """Checks that the driver supports CUDA 12 or newer; to have none is no mistake."""
    if driver is None:
        return Check("NVIDIA driver", WARN, "none: kernels can be compiled, not run")
    cuda = f"CUDA {dotted(driver.cuda)}" if driver.cuda else "CUDA version unknown"
    found = f"{driver.version}, {cuda}"
    if driver.cuda is not None and driver.cuda < (12, 0):
        return Check("NVIDIA driver", FAIL, found, "update the driver to 525 or newer (CUDA 12)")
    return Check("NVIDIA driver", OK, found)


def check_gpus(torch, driver: Driver | None, environ: Mapping[str, str]) -> list[Check]:
    """Checks whether HTile knows each GPU that torch sees, or finds out why torch sees none."""
    gpus = read_gpus(torch)
    if isinstance(gpus, str):
        return [Check("GPU", FAIL, f"torch can not use it: {gpus}", "see what nvidia-smi says")]
    if not gpus:
        return [_no_gpu(torch, driver, environ)]
    unknown = WARN if any(known_arch(capability) for _, capability in gpus) else FAIL
    checks = []
    for index, (model, capability) in enumerate(gpus):
        name = f"GPU {index}"
        found = f"{model}, compute capability {dotted(capability)}"
        if arch := known_arch(capability):
            checks.append(Check(name, OK, f"{found} ({arch})"))
        elif capability < (8, 0):
            checks.append(Check(name, unknown, found, "kernels need a GPU of 8.0 or newer"))
        else:
            advice = "HTile does not know this architecture yet: please report it"
            checks.append(Check(name, unknown, found, advice))
    return checks


def read_gpus(torch) -> list[tuple[str, tuple[int, int]]] | str:
    """The (name, compute capability) of the GPUs that torch sees, or torch's error message."""
    if torch is None or torch.version.cuda is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver, which a check tells of
        if not torch.cuda.is_available():
            return []
        try:
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return [(p.name, (p.major, p.minor)) for p in found]


def _no_gpu(torch, driver: Driver | None, environ: Mapping[str, str]) -> Check:
    if driver is None or not driver.gpus:
        return Check("GPU", WARN, "none: CPU tensors run the reference")
    found = f"{driver.gpus} in this machine, but torch sees none"
    if torch is None or torch.version.cuda is None:
        return Check("GPU", WARN, found, "install a CUDA build of torch to run kernels")
    if "CUDA_VISIBLE_DEVICES" in environ:
        value = environ["CUDA_VISIBLE_DEVICES"]
        return Check("GPU", WARN, found, f"CUDA_VISIBLE_DEVICES={value!r} hides them: unset it")
    if driver.cuda is not None and driver.cuda[0] < int(torch.version.cuda.partition(".")[0]):
        advice = (
            f"torch is built for CUDA {torch.version.cuda}, the driver supports "
            f"{dotted(driver.cuda)}: update the driver, or install a torch for CUDA "
            f"{driver.cuda[0]}"
        )
        return Check("GPU", FAIL, found, advice)
    return Check("GPU", FAIL, found, 'see what python -c "import torch; torch.cuda.init()" says')


def known_arch(capability: tuple[int, int]) -> str | None:
    """The name of a capability's architecture; None where HTile does not know it."""
    try:
        return arch_of_capability(capability).name
    except CompileError:
        return None


def check_dump(environ: Mapping[str, str]) -> Check | None:
    """Checks that the folder HTILE_DUMP can be written to; None where it names none."""
    folder = environ.get("HTILE_DUMP")
    if not folder:
        return None
    if writable(Path(folder)):
        return Check("HTILE_DUMP", OK, folder)
    found = f"{folder} can not be written, so no kernel runs"
    return Check("HTILE_DUMP", FAIL, found, "unset it, or name another folder")


def check_cache(environ: Mapping[str, str], system: str) -> Check:
    """Checks that the folder for compiled kernels can be written, and that its bound is a size."""
    folder = cache_folder(environ, system)
    try:
        cache_limit(environ)
    except ArgumentError as error:
        if folder is not None:
            advice = "unset it, or write a size: without one nothing is compiled"
            return Check("cache folder", FAIL, error.message, advice)
    if folder is None:
        return Check(
            "cache folder", WARN, "none: every process compiles again",
            "unset HTILE_CACHE_DIR, or set it to a folder that can be written",
        )  # fmt: skip
    if writable(folder):
        return Check("cache folder", OK, str(folder))
    return Check(
        "cache folder", WARN, f"{folder} can not be written: every process compiles again",
        "set HTILE_CACHE_DIR to a folder that can",
    )  # fmt: skip


def check_linker(linker: str | None, orcjit: str | None) -> Check:
    """Checks that a compiled kernel can be loaded without CuTe-DSL.

    linker: the path of the system's linker, if there is one.
    orcjit: the version of apache-tvm-ffi-orcjit, if it is installed.
    """
    if linker is not None:
        return Check("linker", OK, linker)
    if orcjit is not None:
        return Check("linker", OK, f"none, but apache-tvm-ffi-orcjit {orcjit}")
    return Check(
        "linker", WARN, "none: loading a compiled kernel imports CuTe-DSL, which takes longer",
        "install binutils (ld), or pip install apache-tvm-ffi-orcjit",
    )  # fmt: skip


def writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or in the first folder above it that exists."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError:
        return False
    return True
