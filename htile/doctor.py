"""What is installed, whether it fits together, and what to do where it does not.

Each check is a function of plain facts (versions, wheels, a driver, torch) that returns a `Check`;
`examine` gathers the facts of this machine and yields the checks in order. Nothing is changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from .errors import CompileError, HTileError
from .lower.arch import DEFAULT, arch_of_capability
from .lower.artifact import find_linker
from .lower.cache import cache_folder

OK, WARN, FAIL = "ok", "warn", "fail"

PYTHON = (3, 10)
MINIMUM = {"torch": "2.6", "networkx": "3", "apache-tvm-ffi": "0.1.11"}
DSL_FROM, DSL_BELOW = "4.8", "4.9"

DSL = "nvidia-cutlass-dsl"
LIBS = f"{DSL}-libs-"
TRIAL_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis.

    status: OK; WARN, something is missing or odd, but HTile works; FAIL, it does not.
    advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: str
    found: str
    advice: str = ""


# ------------------------------------------------------------------------------ Python and torch


def check_python(version: tuple[int, ...], executable: str) -> Check:
    """The interpreter is new enough."""
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < PYTHON:
        needed = ".".join(map(str, PYTHON))
        return Check("Python", FAIL, f"{text} ({executable})", f"use Python {needed} or newer")
    return Check("Python", OK, f"{text} ({executable})")


def check_system(system: str, machine: str) -> Check:
    """CuTe-DSL's wheels are for Linux on x86-64 and Arm."""
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


def check_torch(torch, driver: Driver | None) -> Check:
    """torch is new enough, and a build for what is here. torch: the module, or None."""
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
    """A package that HTile imports is there and new enough."""
    needed = f"pip install -U '{name}>={MINIMUM[name]}'"
    version = wheels.version(name)
    if version is None:
        return Check(name, FAIL, "not installed", needed)
    if _number(version) < _number(MINIMUM[name]):
        return Check(name, FAIL, version, needed)
    return Check(name, OK, version)


def _number(version: str) -> tuple[int, ...]:
    """The release of a version, to compare: `2.13.0+cpu` -> (2, 13)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in release.group().split(".")] if release else [0]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


# ------------------------------------------------------------------------------------ the wheels


@dataclass(frozen=True)
class Wheels:
    """The installed distributions: by normalized name, in the order in which they are found."""

    found: Mapping[str, tuple[metadata.Distribution, ...]]

    def version(self, name: str) -> str | None:
        """The version that an import takes, or None."""
        return self.found[name][0].version if name in self.found else None

    def libs(self) -> dict[str, str]:
        """The version of each part of CuTe-DSL: `libs-base`, `libs-cu12` and so on."""
        return {n: self.version(n) for n in sorted(self.found) if n.startswith(LIBS)}

    def variants(self) -> list[int]:
        """The CUDA majors that CuTe-DSL is installed for."""
        found = (re.fullmatch(rf"{LIBS}cu(\d+)", name) for name in self.libs())
        return sorted(int(match.group(1)) for match in found if match)


def read_wheels() -> Wheels:
    """What importlib.metadata finds on sys.path."""
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
    """CuTe-DSL is there, in a version that HTile knows."""
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
    """The wheels that make up CuTe-DSL are of one version, once each, and all there."""
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
    """The files that two wheels of CuTe-DSL claim with different content: the last one won."""
    claims = defaultdict(set)
    for name in wheels.libs():
        for file in wheels.found[name][0].files or ():
            if file.hash is not None:
                claims[str(file)].add(file.hash.value)
    return sorted(path for path, hashes in claims.items() if len(hashes) > 1)


def check_old_cutlass(wheels: Wheels) -> Check | None:
    """The package `nvidia-cutlass` (CUTLASS' old Python interface) beside CuTe-DSL."""
    version = wheels.version("nvidia-cutlass")
    if version is None:
        return None
    return Check(
        "nvidia-cutlass", WARN, f"{version}, another package than {DSL}; some versions of it also "
        "hold a module `cutlass`", "pip uninstall nvidia-cutlass, unless something needs it",
    )  # fmt: skip


def check_cutlass_module(folders: list[str] | None, cuda: int) -> Check:
    """`import cutlass` finds CuTe-DSL. folders: where that module is, None if nowhere."""
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
    """The CUDA variant that CuTe-DSL will load goes with the driver and with torch.

    CuTe-DSL takes the newest one that the driver supports; the newest of all without a driver.
    """
    name = "CuTe-DSL variant"
    major = driver.cuda[0] if driver is not None and driver.cuda else None
    usable = [v for v in variants if major is None or v <= major]
    found = " and ".join(f"cu{v}" for v in variants)
    if not usable:
        advice = "update the NVIDIA driver"
        if major >= 12:
            advice += f", or {_install(major)}"
        found += f", but the driver supports CUDA {_dotted(driver.cuda)}"
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
    """Whether a folder holds two versions of one package (a path may be listed twice)."""
    places = defaultdict(set)
    for distribution in distributions:
        places[str(distribution.locate_file(""))].add(distribution.version)
    return any(len(versions) > 1 for versions in places.values())


def _install(cuda: int) -> str:
    extra = "[cu13]" if cuda >= 13 else ""
    return f"pip install '{DSL}{extra}>={DSL_FROM},<{DSL_BELOW}'"


def _reinstall(wheels: Wheels, cuda: int) -> str:
    return f"pip uninstall -y {' '.join((DSL, *wheels.libs()))} && {_install(cuda)}"


# ---------------------------------------------------------------------------- the driver and GPUs


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its version, the CUDA version it supports (None: unknown), its GPUs."""

    version: str
    cuda: tuple[int, int] | None
    gpus: int


def read_driver() -> Driver | None:
    """Asks the driver's own libraries, which initializes no CUDA; None where none answers."""
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
    """The driver supports CUDA 12 or newer; having none is no mistake."""
    if driver is None:
        return Check("NVIDIA driver", WARN, "none: kernels can be compiled, not run")
    cuda = f"CUDA {_dotted(driver.cuda)}" if driver.cuda else "CUDA version unknown"
    found = f"{driver.version}, {cuda}"
    if driver.cuda is not None and driver.cuda < (12, 0):
        return Check("NVIDIA driver", FAIL, found, "update the driver to 525 or newer (CUDA 12)")
    return Check("NVIDIA driver", OK, found)


def check_gpus(torch, driver: Driver | None, environ: Mapping[str, str]) -> list[Check]:
    """Each GPU that torch sees, and whether HTile knows it; or why it sees none."""
    gpus = read_gpus(torch)
    if isinstance(gpus, str):
        return [Check("GPU", FAIL, f"torch can not use it: {gpus}", "see what nvidia-smi says")]
    if not gpus:
        return [_no_gpu(torch, driver, environ)]
    unknown = WARN if any(_arch(capability) for _, capability in gpus) else FAIL
    checks = []
    for index, (model, capability) in enumerate(gpus):
        name = f"GPU {index}"
        found = f"{model}, compute capability {_dotted(capability)}"
        if arch := _arch(capability):
            checks.append(Check(name, OK, f"{found} ({arch})"))
        elif capability < (8, 0):
            checks.append(Check(name, unknown, found, "kernels need a GPU of 8.0 or newer"))
        else:
            advice = "HTile does not know this architecture yet: please report it"
            checks.append(Check(name, unknown, found, advice))
    return checks


def read_gpus(torch) -> list[tuple[str, tuple[int, int]]] | str:
    """(name, compute capability) of the GPUs that torch sees, or what it says instead."""
    if torch is None or torch.version.cuda is None:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old driver: the checks say it
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
            f"{_dotted(driver.cuda)}: update the driver, or install a torch for CUDA "
            f"{driver.cuda[0]}"
        )
        return Check("GPU", FAIL, found, advice)
    return Check("GPU", FAIL, found, 'see what python -c "import torch; torch.cuda.init()" says')


def _arch(capability: tuple[int, int]) -> str | None:
    try:
        return arch_of_capability(capability).name
    except CompileError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# -------------------------------------------------------------------------------------- folders


def check_dump(environ: Mapping[str, str]) -> Check | None:
    """HTILE_DUMP, if it is set, can be written: a launch writes there."""
    folder = environ.get("HTILE_DUMP")
    if not folder:
        return None
    if writable(Path(folder)):
        return Check("HTILE_DUMP", OK, folder)
    found = f"{folder} can not be written, so no kernel runs"
    return Check("HTILE_DUMP", FAIL, found, "unset it, or name another folder")


def check_cache(environ: Mapping[str, str], system: str) -> Check:
    """The folder for compiled kernels can be written."""
    folder = cache_folder(environ, system)
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
    """A compiled kernel can be loaded without CuTe-DSL. orcjit: the version of that package."""
    if linker is not None:
        return Check("linker", OK, linker)
    if orcjit is not None:
        return Check("linker", OK, f"none, but apache-tvm-ffi-orcjit {orcjit}")
    return Check(
        "linker", WARN, "none: loading a compiled kernel imports CuTe-DSL, which takes longer",
        "install binutils (ld), or pip install apache-tvm-ffi-orcjit",
    )  # fmt: skip


def writable(folder: Path) -> bool:
    """Whether files can be made in `folder`, or it itself where it does not exist yet: tries it."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError:
        return False
    return True


# --------------------------------------------------------------------------------------- a trial


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of compiling a small kernel, and of running it if there is a GPU.

    error: why it stopped; wrong: how the result differs from torch's. Empty where all is well.
    """

    arch: str
    seconds: float | None = None
    resources: str = ""
    ran: bool = False
    wrong: str = ""
    error: str = ""


def try_kernel(arch: str, device: int | None) -> Trial:
    """Compile a kernel, and run it on that device, in a process of its own that may crash."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from htile.doctor import _trial; _trial(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, arch, *([] if device is None else [f"cuda:{device}"])]
    environ = {k: v for k, v in os.environ.items() if k != "HTILE_DUMP"}
    environ["HTILE_CACHE_DIR"] = ""  # that it compiles
    try:
        run = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace",
            timeout=TRIAL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Trial(arch, error=f"it did not end within {TRIAL_SECONDS} seconds")
    said = {}
    for line in run.stdout.splitlines():
        if line.startswith(_MARK):
            said |= json.loads(line.removeprefix(_MARK))
    if run.returncode and not said.get("error"):
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        ended = f"signal {-run.returncode}: " if run.returncode < 0 else ""
        said["error"] = ended + last
    return Trial(arch, **said)


_MARK = "htile-trial "  # before what the other process says, among what its libraries print


def _trial(arch: str, device: str | None = None) -> None:
    """The other process: says a JSON object a line, one for each step that it comes through."""
    import torch

    from .jit import rowwise
    from .testing import assert_close

    @rowwise
    def softmax(x):
        e = torch.exp(x - x.max())
        return e / e.sum()

    def say(**facts):
        print(f"{_MARK}{json.dumps(facts)}", flush=True)

    try:
        start = time.perf_counter()
        x = torch.empty(64, 1000, dtype=torch.bfloat16, device="meta")
        resources = str(softmax.inspect(x, arch=arch).resources)
        say(seconds=time.perf_counter() - start, resources=resources)
        if device is not None:
            x = torch.randn(64, 1000).bfloat16()
            y = softmax(x.to(device)).cpu()
            say(ran=True)
            try:
                assert_close(softmax, y, x)
            except AssertionError as error:
                say(wrong=str(error))
    except HTileError as error:
        say(error=str(error))


def check_compile(trial: Trial) -> Check:
    """A small kernel compiles."""
    name = f"compile for {trial.arch}"
    if trial.seconds is None:
        return Check(
            name, FAIL, trial.error or "the process ended early", "the checks above may say why; "
            "if all of them pass, please report this",
        )  # fmt: skip
    found = f"softmax in {trial.seconds:.1f} s, CuTe-DSL's import included; {trial.resources}"
    return Check(name, OK, found)


def check_run(trial: Trial, gpu: int) -> Check:
    """It runs, and computes what torch computes."""
    name = f"run on GPU {gpu}"
    if not trial.ran or trial.error:
        advice = "if the driver and the variant of CuTe-DSL pass above, please report this"
        return Check(name, FAIL, trial.error or "not tried", advice)
    if trial.wrong:
        return Check(name, FAIL, f"wrong: {trial.wrong}", "please report this")
    return Check(name, OK, "right: what torch computes in float64, rounded")


# ----------------------------------------------------------------------------------- this machine


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
        archs = [] if isinstance(gpus, str) else [_arch(capability) for _, capability in gpus]
        known = next((i for i, arch in enumerate(archs) if arch), None)
        trial = try_kernel(DEFAULT.name if known is None else archs[known], known)
        yield check_compile(trial)
        if known is not None and trial.seconds is not None:
            yield check_run(trial, known)


def import_torch():
    """The module, or None where it can not be imported."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library that it needs is not there
        return None
    return torch
