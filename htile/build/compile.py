"""Compiles emitted source with CuTe-DSL, ahead of time, and loads the result as a function.

No other module beside the primitives imports `cutlass`, and this one imports it inside functions
only: a kernel that the disk cache holds is loaded without it. Building and loading need no GPU.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..errors import CompileError
from . import artifact as loading
from . import cache
from .arch import arch_named
from .artifact import ENTRY, LEVEL, Artifact, as_compiled
from .cubin import Resources, read_resources
from .forks import hold_at_forks
from .recent import Recent

logger = logging.getLogger("htile.compile")

# `cute.compile` keeps its state in one object of the process and is not thread-safe. Forks wait for
# it: a child that begins while CuTe-DSL imports or compiles would wait for its locks for ever.
_LOCK = threading.RLock()
hold_at_forks(_LOCK)
# By (text, architecture). A kernel that was loaded stays: a CUDA graph that has captured it may
# launch it again, and nobody would know.
_ARTIFACTS: Recent[Artifact] = Recent(256)
_LOADED: dict[tuple[str, str], Callable[..., None]] = {}

# Machine -> the CPU and the features that host code is compiled for, which all such machines have.
# LLVM would take what the one at hand has (AVX-512), and the object would die on another.
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

    A process compiles it once, and of all processes that share a disk cache one does. Raises
    CompileError where CuTe-DSL is not installed or refuses the kernel.
    """
    with _LOCK:
        found = _ARTIFACTS.find((source, arch))
        if found is None:
            found = cache.fetch(source, function, arch, _build)
            _ARTIFACTS.keep((source, arch), found)
        return found


def build_ahead(source: str, function: str, arch: str) -> Artifact:
    """`build`, for other processes: the disk cache has it afterwards, whenever it was compiled."""
    with _LOCK:
        was_known = _ARTIFACTS.find((source, arch)) is not None
        artifact = build(source, function, arch)
        if was_known:  # else the cache has just been asked to keep it
            cache.keep(source, artifact)
        return artifact


def _build(source: str, function: str, arch: str) -> Artifact:
    """Compile a text, and where registers are spilled or few thread blocks fit, try other ways.

    Only a text that names a number of thread blocks has other ways. The one with the smallest stack
    is kept, and of several that spill nothing the one with the most thread blocks. A text may say
    what one thread block more is worth (`worth`).
    """
    cute = _import_cute()
    start = time.perf_counter()
    module = load_source(source)
    asked = module.get("blocks")
    counted_on = "RowLoop" in module  # there are groups of rows for so many thread blocks

    known: dict[tuple[int | None, int], Artifact] = {}

    def compiled(blocks: int | None, level: int = LEVEL) -> Artifact:
        if (blocks, level) not in known:
            if blocks is not None:
                module["blocks"] = blocks
            known[blocks, level] = _compile(cute, module, source, function, arch, level)
        return known[blocks, level]

    built = compiled(asked)
    for blocks, level in _other_ways(asked, built.resources, arch, counted_on):
        if not built.resources.stack:
            break
        other = compiled(blocks, level)
        built = min(built, other, key=lambda artifact: artifact.resources.stack)
    if asked and not built.blocks and not built.resources.stack:
        built = _with_most_blocks(compiled, built, _fitting(built.resources, arch), asked - 1)
    if worth := module.get("worth"):
        built = _with_one_more(compiled, built, arch, asked, worth)
    built = replace(built, seconds=time.perf_counter() - start)
    logger.info("compiled %s for %s in %.2f s", function, arch, built.seconds)
    return built


def _with_most_blocks(
    compiled: Callable[[int], Artifact], built: Artifact, fitting: int, spilling: int
) -> Artifact:
    """The kernel with the most thread blocks that spills nothing, found by halving.

    built: with as many thread blocks as the compiler liked, of which so many are `fitting`.
    spilling: a number of them with which registers were spilled.
    """
    while fitting + 1 < spilling:
        middle = (fitting + spilling) // 2
        other = compiled(middle)
        if other.resources.stack:
            spilling = middle
        else:
            built, fitting = other, middle
    return built


def _with_one_more(
    compiled: Callable[[int], Artifact],
    built: Artifact,
    arch: str,
    asked: int,
    worth: tuple[int, ...],
) -> Artifact:
    """The kernel with more thread blocks, as long as each one more is worth what it spills.

    worth: how many bytes of stack a second one may take, a third one, and so on. That counts only
        while fewer fit than are asked for; beyond that one more may spill nothing.
    """
    while (fit := _fitting(built.resources, arch)) <= len(worth):
        if arch_named(arch).fitting(built.resources.dynamic_shared) <= fit:
            break
        other = compiled(fit + 1)
        most = worth[fit - 1] if fit < asked else 0
        if other.resources.stack > most or _fitting(other.resources, arch) <= fit:
            break
        built = other
    return built


def _fitting(used: Resources, arch: str) -> int:
    """How many thread blocks a multiprocessor has registers for."""
    return arch_named(arch).registers // (used.registers * used.threads)


def _other_ways(
    blocks: int | None, used: Resources, arch: str, counted_on: bool
) -> list[tuple[int, int]]:
    """What to try after so many thread blocks: other numbers of them, each with a level of ptxas.

    With 0 the compiler decides, and it may spill a few registers to fit one block more. For 1 it
    may use all registers that there are. Level 2 spills where 3 does not, and the other way round.

    counted_on: whether a multiprocessor has to have so many. If it had fewer, the others would wait
        until these have ended, which takes longer than a few registers that are spilled.
    """
    if blocks is None:
        return []
    if counted_on:
        return [(blocks, 2)]
    fit = blocks or _fitting(used, arch)
    fewer = [fit - 1] if fit > 2 else []
    return [*((other, LEVEL) for other in (*fewer, 0, 1) if other != blocks), (blocks, 2)]


def _compile(
    cute, module: dict[str, object], source: str, function: str, arch: str, level: int = LEVEL
) -> Artifact:
    """Compile the text once, for the `blocks` that `module`, which is made of it, has now."""
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
        path = Path(folder, "kernel.o")
        compiled.export_to_c(str(path), function_name=ENTRY, export_only_tvm_ffi_symbols=True)
        object_ = path.read_bytes()
    dynamic = _dynamic_shared(str(compiled.ir_module))
    resources = read_resources(compiled.__cubin__, dynamic, f"{function}_kernel")
    blocks = module.get("blocks", 0)
    return Artifact(
        source=as_compiled(source, blocks, level),
        function=function,
        arch=arch,
        object=object_,
        library=loading.link(object_),
        ptx=compiled.__ptx__,
        cubin=compiled.__cubin__,
        resources=resources,
        blocks=blocks,
        level=level,
    )


def _options(cute, arch: str, folder: str, level: int) -> tuple:
    """The options of `cute.compile`.

    A product and a sum become an fma only where the text says so. A compiler would decide by what
    stands near, which is not the same in two plans of one row.
    """
    from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts

    dump = cute.KeepPTX, cute.KeepCUBIN, DumpDir(folder)
    exact = ExtraCompilerOpts("nvvm-options=-fma=0")  # .rn on every operation, which ptxas obeys
    return cute.EnableTVMFFI, cute.GPUArch(arch), *dump, exact, cute.PtxasOptions(f"-O{level}")


def _for_any_cpu(module) -> None:
    """Have LLVM compile the host functions of a module for every CPU of this machine's kind."""
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
    """`build` many (source, function, arch) in forked processes, and keep the results."""
    requests = list(dict.fromkeys(requests))
    with building(requests, workers) as built:
        return [built(request) for request in requests]


@contextmanager
def building(
    requests: Iterable[tuple[str, str, str]], workers: int | None = None
) -> Iterator[Callable[[tuple[str, str, str]], Artifact]]:
    """`build` many in forked processes side by side, the first ones first.

    It gives a function that waits for one of them and keeps it. What has not begun when the block
    is left is not built. There are no processes if every kernel was compiled before.
    """
    missing = [request for request in dict.fromkeys(requests) if not _was_built(*request)]
    if not missing:
        yield lambda request: build(*request)
        return
    _import_cute()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context)
    futures = {request: pool.submit(build, *request) for request in missing}

    def built(request: tuple[str, str, str]) -> Artifact:
        if request not in futures:
            return build(*request)
        artifact = futures[request].result()
        source, _, arch = request
        _ARTIFACTS.keep((source, arch), artifact)
        return artifact

    try:
        yield built
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _was_built(source: str, function: str, arch: str) -> bool:
    """Whether this process has the kernel, or the disk cache has a file of it."""
    if _ARTIFACTS.find((source, arch)) is not None:
        return True
    path = cache.path_of(source, function, arch)
    return path is not None and path.exists()


def load(artifact: Artifact) -> Callable[..., None]:
    """The host function, which launches on the current stream of the first tensor's device."""
    with _LOCK:
        key = artifact.source, artifact.arch
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
        path = Path(folder, "kernel.o")
        path.write_bytes(artifact.object)
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[ENTRY]


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
    """Bytes of dynamic shared memory of a launch, which the lowered host function has as text.

    Of two launches it is the first one, that of the kernel of the rows.
    """
    place = re.search(
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
        r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>",
        host_code,
    )
    assert place, "the host function launches no kernel"
    store = re.compile(rf"llvm\.store (%\w+), {re.escape(place[1])} : i64")
    stored = store.search(host_code, place.end())
    before = host_code[: place.start()]  # other functions behind it have the same names
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)", before))
    assert stored and stored[1] in constants, "shared memory is no constant"
    return int(constants[stored[1]])
