"""All checks of this machine, in order.

Each check is a function of plain facts (versions, wheels, a driver, torch) that returns a `Check`.
`examine` gathers the facts of this machine. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import util

from ...build.arch import DEFAULT
from ...build.artifact import find_linker
from .check import Check
from .machine import (
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
    """All checks of this machine, in order, each as soon as it is done."""
    system, environ = platform.system(), os.environ
    wheels, driver, torch = read_wheels(), read_driver(), import_torch()
    torch_cuda = torch.version.cuda if torch is not None else None
    majors = [int(torch_cuda.partition(".")[0])] if torch_cuda else wheels.variants()
    cuda = max(majors, default=12)  # what advice is given for
    if driver is not None and driver.cuda is not None:
        cuda = min(cuda, driver.cuda[0])
    yield check_python(sys.version_info, sys.executable)
    yield check_system(system, platform.machine())
    yield check_torch(torch, driver)
    yield from (check_package(name, wheels) for name in ("networkx", "apache-tvm-ffi"))
    yield check_dsl(wheels, system, cuda)
    has_dsl = wheels.version(DSL) is not None
    if has_dsl:
        spec = util.find_spec("cutlass")
        folders = spec and list(spec.submodule_search_locations or [spec.origin])
        yield check_dsl_wheels(wheels, cuda)
        yield check_cutlass_module(folders, cuda)
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
        gpus = read_gpus(torch)
        archs = [] if isinstance(gpus, str) else [known_arch(capability) for _, capability in gpus]
        known = next((i for i, arch in enumerate(archs) if arch), None)
        trial = try_kernel(DEFAULT.name if known is None else archs[known], known)
        yield check_compile(trial)
        if known is not None and trial.seconds is not None:
            yield check_run(trial, known)
