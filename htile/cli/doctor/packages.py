"""Checks of the packages: Python, torch, CuTe-DSL and its wheels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .check import FAIL, OK, WARN, Check, dotted
from .machine import Driver

PYTHON = (3, 10)
MINIMUM = {"torch": "2.7", "networkx": "3", "apache-tvm-ffi": "0.1.11"}
DSL_FROM, DSL_BELOW = "4.8", "4.9"

DSL = "nvidia-cutlass-dsl"
LIBS = f"{DSL}-libs-"


def check_python(version: tuple[int, ...], executable: str) -> Check:
    """Checks that the interpreter is new enough."""
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < PYTHON:
        needed = ".".join(map(str, PYTHON))
        return Check("Python", FAIL, f"{text} ({executable})", f"use Python {needed} or newer")
    return Check("Python", OK, f"{text} ({executable})")


def check_system(system: str, machine: str) -> Check:
    """Checks that CuTe-DSL has wheels for the system: Linux on x86-64 or Arm."""
    found = f"{system} {machine}"
    if system != "Linux":
        return Check(
            "system", WARN, found,
            "CPU tensors run the reference here; kernels need Linux (on Windows: WSL 2)",
        )  # fmt: skip
    if machine not in ("x86_64", "aarch64"):
        return Check(
            "system", WARN, found, "CuTe-DSL has wheels for x86_64 and aarch64 only: no kernels"
        )
    return Check("system", OK, found)


def import_torch():
    """The module, or None where it can not be imported."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library that it needs is not there
        return None
    return torch


def check_torch(torch, driver: Driver | None) -> Check:
    """Checks that torch (the module, or None) is new enough and a build for what is here."""
    needed = f"pip install -U 'torch>={MINIMUM['torch']}'"
    if torch is None:
        return Check("torch", FAIL, "can not be imported", needed)
    version = str(torch.__version__)
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"CUDA {cuda} build" if cuda else "ROCm build" if hip else "CPU build"
    found = f"{version}, {build}"
    if _number(version) < _number(MINIMUM["torch"]):
        return Check("torch", FAIL, found, needed)
    if cuda is None and driver is not None:
        return Check(
            "torch", WARN, found,
            "there is an NVIDIA driver here, which this build does not use: install a CUDA build "
            "(https://pytorch.org/get-started) to run kernels",
        )  # fmt: skip
    if cuda is None and hip:
        return Check("torch", WARN, found, "kernels need an NVIDIA GPU and a CUDA build of torch")
    return Check("torch", OK, found)


def check_package(name: str, wheels: Wheels) -> Check:
    """Checks that a package which HTile imports is there and new enough."""
    needed = f"pip install -U '{name}>={MINIMUM[name]}'"
    version = wheels.version(name)
    if version is None:
        return Check(name, FAIL, "not installed", needed)
    if _number(version) < _number(MINIMUM[name]):
        return Check(name, FAIL, version, needed)
    return Check(name, OK, version)


def _number(version: str) -> tuple[int, ...]:
    """The release of a version as numbers that can be compared: `2.13.0+cpu` -> (2, 13)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release.group().split(".")] if release else [0]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@dataclass(frozen=True)
class Wheels:
    """The installed distributions by normalized name, each name's in the order of `sys.path`."""

    found: Mapping[str, tuple[metadata.Distribution, ...]]

    def version(self, name: str) -> str | None:
        """The version that an import would take; None where the package is not installed."""
        return self.found[name][0].version if name in self.found else None

    def libs(self) -> dict[str, str]:
        """The version of each installed part of CuTe-DSL: `libs-base`, `libs-cu12` and so on."""
        return {n: self.version(n) for n in sorted(self.found) if n.startswith(LIBS)}

    def variants(self) -> list[int]:
        """The CUDA majors that CuTe-DSL is installed for."""
        found = (re.fullmatch(rf"{LIBS}cu(\d+)", name) for name in self.libs())
        return sorted(int(match.group(1)) for match in found if match)


def read_wheels() -> Wheels:
    """The distributions that importlib.metadata finds on `sys.path`."""
    found = defaultdict(list)
    for distribution in metadata.distributions():
        try:
            name, _ = distribution.metadata["Name"], distribution.version
        except (KeyError, TypeError, FileNotFoundError):  # a leftover folder with no METADATA
            continue
        if name:
            found[re.sub(r"[-_.]+", "-", name).lower()].append(distribution)
    return Wheels({name: tuple(all_) for name, all_ in found.items()})


def check_dsl(wheels: Wheels, system: str, cuda: int) -> Check:
    """Checks that CuTe-DSL is there, in a version that HTile knows."""
    version = wheels.version(DSL)
    if version is None:
        linux = system == "Linux"
        advice = _install(cuda) if linux else "nothing: it exists for Linux only"
        return Check("CuTe-DSL", FAIL if linux else WARN, "not installed: no kernels", advice)
    if not _number(DSL_FROM) <= _number(version) < _number(DSL_BELOW):
        return Check("CuTe-DSL", FAIL, version, _install(cuda))
    if re.search(r"[a-z]", version.partition("+")[0].replace("post", "")):
        return Check("CuTe-DSL", WARN, version, f"HTile is tested on releases: {_install(cuda)}")
    return Check("CuTe-DSL", OK, version)


def check_dsl_wheels(wheels: Wheels, cuda: int) -> Check:
    """Checks that the wheels of CuTe-DSL are complete, of one version, and installed once each."""
    name = "CuTe-DSL wheels"
    version, libs = wheels.version(DSL), wheels.libs()
    found = ", ".join(f"{n.removeprefix(DSL + '-')} {v}" for n, v in libs.items()) or "none"
    again = _reinstall(wheels, cuda)
    others = [n for n, v in libs.items() if v != version]
    if others:
        return Check(name, FAIL, f"not all of {version}: {found}", again)
    twice = [n for n in (DSL, *libs) if _twice_in_a_folder(wheels.found[n])]
    if twice:
        return Check(name, FAIL, f"installed twice in one folder: {', '.join(twice)}", again)
    if f"{LIBS}base" not in libs or not wheels.variants():
        return Check(name, FAIL, f"incomplete: {found}", again)
    torn = contested(wheels)
    if torn:
        return Check(
            name, FAIL,
            f"{len(torn)} files that two wheels hold with different content, such as {torn[0]}",
            again,
        )  # fmt: skip
    return Check(name, OK, found)


def contested(wheels: Wheels) -> list[str]:
    """The files that two wheels of CuTe-DSL have with different content, so one is overwritten."""
    claims = defaultdict(set)
    for name in wheels.libs():
        for file in wheels.found[name][0].files or ():
            if file.hash is not None:
                claims[str(file)].add(file.hash.value)
    return sorted(path for path, hashes in claims.items() if len(hashes) > 1)


def check_old_cutlass(wheels: Wheels) -> Check | None:
    """Warns of the package `nvidia-cutlass`, CUTLASS' old Python interface, beside CuTe-DSL."""
    version = wheels.version("nvidia-cutlass")
    if version is None:
        return None
    return Check(
        "nvidia-cutlass", WARN, f"{version}, another package than {DSL}; some versions of it also "
        "hold a module `cutlass`", "pip uninstall nvidia-cutlass, unless something needs it",
    )  # fmt: skip


def check_cutlass_module(folders: list[str] | None, cuda: int) -> Check:
    """Checks that `import cutlass` finds CuTe-DSL; `folders` is where it finds that module."""
    name = "module cutlass"
    if not folders:
        return Check(
            name, FAIL, "not found, though CuTe-DSL is installed",
            "its wheel puts it on the path with a .pth file, which Python reads in site-packages "
            f"only: install it there ({_install(cuda)})",
        )  # fmt: skip
    if not any(Path(folder, "base_dsl").is_dir() for folder in folders):
        return Check(
            name, FAIL, f"{folders[0]} is not CuTe-DSL and hides it",
            "rename that folder, take it off PYTHONPATH, or uninstall the package that brought it",
        )  # fmt: skip
    return Check(name, OK, folders[0])


def check_variant(variants: list[int], torch_cuda: str | None, driver: Driver | None) -> Check:
    """Checks that the CUDA variant which CuTe-DSL will load suits the driver and torch.

    CuTe-DSL takes the newest one that the driver supports, or without a driver the newest of all.
    """
    name = "CuTe-DSL variant"
    major = driver.cuda[0] if driver is not None and driver.cuda else None
    usable = [v for v in variants if major is None or v <= major]
    found = " and ".join(f"cu{v}" for v in variants)
    if not usable:
        advice = "update the NVIDIA driver"
        if major >= 12:
            advice += f", or {_install(major)}"
        found += f", but the driver supports CUDA {dotted(driver.cuda)}"
        return Check(name, FAIL, found, advice)
    chosen = usable[-1]
    if len(variants) > 1:
        found += f", of which cu{chosen} is loaded"
    built_for = int(torch_cuda.partition(".")[0]) if torch_cuda else None
    if built_for is not None and built_for != chosen:
        found += f", while torch is built for CUDA {torch_cuda}"
        if chosen < built_for:
            advice = _install(built_for)
        else:
            advice = f"if kernels fail to load, install a torch for CUDA {chosen}"
        return Check(name, WARN, found, advice)
    return Check(name, OK, found)


def _twice_in_a_folder(distributions: tuple[metadata.Distribution, ...]) -> bool:
    """Whether one folder has two versions of a package; `sys.path` may list a folder twice."""
    places = defaultdict(set)
    for distribution in distributions:
        places[str(distribution.locate_file(""))].add(distribution.version)
    return any(len(versions) > 1 for versions in places.values())


def _install(cuda: int) -> str:
    extra = "[cu13]" if cuda >= 13 else ""
    return f"pip install '{DSL}{extra}>={DSL_FROM},<{DSL_BELOW}'"


def _reinstall(wheels: Wheels, cuda: int) -> str:
    return f"pip uninstall -y {' '.join((DSL, *wheels.libs()))} && {_install(cuda)}"
