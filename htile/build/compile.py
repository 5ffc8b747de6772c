"""Compiles emitted source with CuTe-DSL, ahead of time, and loads the result as a function.

The only module beside the primitives that imports `cutlass`, and only inside its functions: a
kernel that the disk cache holds is loaded without it. No GPU is needed to build; loading needs none
either, calling does.
"""

from __future__ import annotations

import hashlib
import linecache
import logging
import multiprocessing
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

from ..errors import CompileError
from . import artifact as loading
from . import cache
from .artifact import ENTRY, Artifact
from .cubin import read_resources

logger = logging.getLogger("htile.compile")

# `cute.compile` keeps its state in one object of the process and is not thread-safe.
_LOCK = threading.RLock()
_ARTIFACTS: dict[tuple[str, str], Artifact] = {}
_LOADED: dict[tuple[str, str], Callable[..., None]] = {}


# Machine -> the CPU and features that host code is compiled for: what all of them have. LLVM would
# take what the one at hand has (AVX-512), and the object would die on another.
_ANY_CPU = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}


def load_source(source: str) -> dict[str, object]:
    """Run emitted text as a module and return its names.

    The text is registered with `linecache` under a name made from its content: CuTe-DSL reads a
    function's source through it, and a traceback shows it.
    """
    name = f"<htile-{hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, object] = {"__name__": "htile_generated"}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace


def build(source: str, function: str, arch: str) -> Artifact:
    """The host function `function` of `source`, compiled for `arch` (`sm_90a`).

    Compiled once: in a process, and in all that share a disk cache. Raises CompileError where
    CuTe-DSL is not installed or refuses the kernel.
    """
    with _LOCK:
        key = (source, arch)
        if key not in _ARTIFACTS:
            _ARTIFACTS[key] = cache.fetch(source, function, arch, _build)
        return _ARTIFACTS[key]


def build_ahead(source: str, function: str, arch: str) -> Artifact:
    """`build`, for other processes: the disk cache has it afterwards, whenever it was compiled."""
    artifact = build(source, function, arch)
    cache.keep(artifact)
    return artifact


def _build(source: str, function: str, arch: str) -> Artifact:
    """Compile; a text for some thread blocks an SM again in other ways where registers are
    spilled."""
    cute = _import_cute()
    start = time.perf_counter()
    module = load_source(source)
    built = _compile(cute, module, source, function, arch)
    for blocks, level in _other_ways(module["blocks"]) if "blocks" in module else ():
        if not built.resources.stack:
            break
        module["blocks"] = blocks
        other = _compile(cute, module, source, function, arch, level)
        built = min(built, other, key=lambda artifact: artifact.resources.stack)
    logger.info("compiled %s for %s in %.2f s", function, arch, time.perf_counter() - start)
    return built


def _other_ways(blocks: int) -> list[tuple[int, int]]:
    """Thread blocks an SM, and the level of ptxas, to try after so many: 0 blocks are as the
    compiler likes, of 1 it takes all registers that there are. Level 2 spills where 3 does not, and
    the other way round."""
    fewer = [blocks - 1] if blocks > 2 else []
    return [*((other, 3) for other in (*fewer, 0, 1) if other != blocks), (blocks, 2)]


def _compile(
    cute, module: dict[str, object], source: str, function: str, arch: str, level: int = 3
) -> Artifact:
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    from cutlass.base_dsl.common import DSLBaseError

    with tempfile.TemporaryDirectory(prefix="htile-") as folder:
        try:
            compiled = cute.compile[_options(cute, arch, folder, level)](
                module[function], *module["fake_arguments"](), stream, no_jit_engine=True
            )
        except DSLBaseError as error:
            raise CompileError(
                f"CuTe-DSL refuses the kernel of {function} for {arch}, which is a defect of "
                "HTile: please report it with the source that .inspect(...).source gives"
            ) from error
        _for_any_cpu(compiled.ir_module)
        path = os.path.join(folder, "kernel.o")
        compiled.export_to_c(path, function_name=ENTRY, export_only_tvm_ffi_symbols=True)
        with open(path, "rb") as file:
            object_ = file.read()
    resources = read_resources(compiled.__cubin__, _dynamic_shared(str(compiled.ir_module)))
    return Artifact(
        source=source,
        function=function,
        arch=arch,
        object=object_,
        shared=loading.link(object_),
        ptx=compiled.__ptx__,
        cubin=compiled.__cubin__,
        resources=resources,
    )


def _options(cute, arch: str, folder: str, level: int) -> tuple:
    """What the kernel is compiled with. No product and sum become an fma but where the text says
    so: compilers decide by what is near, which is not the same in two plans of one row."""
    from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts

    dump = cute.KeepPTX, cute.KeepCUBIN, DumpDir(folder)
    exact = ExtraCompilerOpts("nvvm-options=-fma=0")  # .rn on every operation, which ptxas obeys
    return cute.EnableTVMFFI, cute.GPUArch(arch), *dump, exact, cute.PtxasOptions(f"-O{level}")


def _for_any_cpu(module) -> None:
    """Have LLVM compile the host functions of an MLIR module for any CPU of this machine's kind."""
    from cutlass._mlir import ir

    cpu, features = _ANY_CPU[platform.machine()]
    with module.context:
        for op in module.body.operations:
            if op.operation.name == "llvm.func" and op.regions[0].blocks:
                op.attributes["target_cpu"] = ir.StringAttr.get(cpu)
                op.attributes["target_features"] = ir.Attribute.parse(
                    f'#llvm.target_features<["{features}"]>'
                )


def build_all(
    requests: Iterable[tuple[str, str, str]], workers: int | None = None
) -> list[Artifact]:
    """`build` many (source, function, arch) in processes side by side, and keep the results.

    For tests and deployments. The workers are forked before CUDA is used in them: they compile
    only.
    """
    requests = list(dict.fromkeys(requests))
    _import_cute()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context) as pool:
        artifacts = list(pool.map(build, *zip(*requests, strict=True))) if requests else []
    with _LOCK:
        for artifact in artifacts:
            _ARTIFACTS.setdefault((artifact.source, artifact.arch), artifact)
    return artifacts


def load(artifact: Artifact) -> Callable[..., None]:
    """The artifact's host function: takes the tensors and scalars in the order of the source.

    It launches on the current stream of the first tensor's device. Loaded once a process.
    """
    with _LOCK:
        key = (artifact.source, artifact.arch)
        if key not in _LOADED:
            _LOADED[key] = _load(artifact)
        return _LOADED[key]


def _load(artifact: Artifact) -> Callable[..., None]:
    try:
        return loading.load(artifact)
    except loading.LoadError as error:
        logger.warning("importing CuTe-DSL to load %s: %s", artifact.function, error)
    cute = _import_cute()
    with tempfile.TemporaryDirectory(prefix="htile-") as folder:
        path = os.path.join(folder, "kernel.o")
        with open(path, "wb") as file:
            file.write(artifact.object)
        return cute.runtime.load_module(path, enable_tvm_ffi=True)[ENTRY]


def _import_cute():
    try:
        from cutlass import cute
        from cutlass.cute import runtime  # noqa: F401 (an attribute of cute once imported)
    except ImportError as error:
        raise CompileError(
            "compiling a kernel needs CuTe-DSL, which is not installed here "
            f"({error}): pip install 'nvidia-cutlass-dsl>=4.8,<4.9' (Linux only; with a CUDA 13 "
            "driver, htile[cu13]). CPU tensors run the reference without it"
        ) from error
    return cute


def _dynamic_shared(host_code: str) -> int:
    """Bytes of dynamic shared memory of the launch, a constant of the lowered host function."""
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", host_code))
    launch_config = re.search(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>",
        host_code,
    )
    assert launch_config, "the host function launches no kernel"
    stored = re.search(rf"llvm\.store (%\w+), {re.escape(launch_config.group(1))} : i64", host_code)
    assert stored and stored.group(1) in constants, "shared memory is no constant"
    return int(constants[stored.group(1)])
