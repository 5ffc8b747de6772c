"""Gathers the facts of this machine, and asks all checks about them in order."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import util
from types import ModuleType

from ...build.arch import DEFAULT
from ...build.artifact import find_linker
from .check import Check
from .machine import (
    Driver,
    check_cache,
    check_driver,
    check_dump,
    check_gpus,
    check_linker,
    known_arch,
    read_driver,
    read_gpus,
)
from .packages import (
    DSL,
    Wheels,
    check_cutlass_module,
    check_dsl,
    check_dsl_wheels,
    check_old_cutlass,
    check_package,
    check_python,
    check_system,
    check_torch,
    check_variant,
    import_torch,
    read_wheels,
)
from .trial import check_compile, check_run, try_kernel


def examine() -> Iterator[Check]:
    """All checks of this machine in order, each as soon as it is done."""
    system, environ = platform.system(), os.environ
    wheels, driver, torch = read_wheels(), read_driver(), import_torch()
    torch_cuda = torch.version.cuda if torch is not None else None
    cuda = _advised_cuda(torch_cuda, wheels, driver)
    has_dsl = wheels.version(DSL) is not None
    yield check_python(sys.version_info, sys.executable)
    yield check_system(system, platform.machine())
    yield check_torch(torch, driver)
    yield from (check_package(name, wheels) for name in ("networkx", "apache-tvm-ffi"))
    yield check_dsl(wheels, system, cuda)
    if has_dsl:
        yield check_dsl_wheels(wheels, cuda)
        yield check_cutlass_module(_folders_of_cutlass(), cuda)
        if old := check_old_cutlass(wheels):
            yield old
        if wheels.variants():
            yield check_variant(wheels.variants(), torch_cuda, driver)
    yield check_driver(driver)
    yield from check_gpus(torch, driver, environ)
    if dump := check_dump(environ):
        yield dump
    yield check_cache(environ, system)
    if has_dsl:
        yield check_linker(find_linker(), wheels.version("apache-tvm-ffi-orcjit"))
    if has_dsl and torch is not None:
        yield from _try_a_kernel(torch)


def _advised_cuda(torch_cuda: str | None, wheels: Wheels, driver: Driver | None) -> int:
    """The CUDA major that advice is for: torch's or CuTe-DSL's, as far as the driver goes."""
    majors = [int(torch_cuda.partition(".")[0])] if torch_cuda else wheels.variants()
    cuda = max(majors, default=12)
    known = driver is not None and driver.cuda is not None
    return min(cuda, driver.cuda[0]) if known else cuda


def _folders_of_cutlass() -> list[str] | None:
    """Where `import cutlass` would find its module; None where it finds none."""
    spec = util.find_spec("cutlass")
    return spec and list(spec.submodule_search_locations or [spec.origin])


def _try_a_kernel(torch: ModuleType) -> Iterator[Check]:
    """Compiles a kernel for the first GPU that HTile knows, and runs it there."""
    gpus = read_gpus(torch)
    archs = [] if isinstance(gpus, str) else [known_arch(capability) for _, capability in gpus]
    known = next((i for i, arch in enumerate(archs) if arch), None)
    trial = try_kernel(DEFAULT.name if known is None else archs[known], known)
    yield check_compile(trial)
    if known is not None and trial.seconds is not None:
        yield check_run(trial, known)
