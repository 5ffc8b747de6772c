"""The disk cache: each compiled kernel in a file, named by all that its code depends on.

A file is a zip archive (`kernel.py`, `.ptx`, `.cubin`, `.o`, `.so`, `.json`) whose comment is a
digest of its name and of its content. It appears whole or not at all, is checked whenever it is
read, and is replaced where it does not fit. Its time of modification is that of its last use.
The folder `tuned` in it holds the tuned plans that `tune/kept.py` writes.

HTILE_CACHE_DIR names the folder; empty, it turns the cache off. HTILE_CACHE_SIZE bounds its size.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import platform
import re
import time
import tokenize
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError
from .artifact import Artifact, as_compiled, variant
from .cubin import Resources
from .files import read_file, replace_file, without_waiting

logger = logging.getLogger("htile.cache")

FORMAT = 2
DEFAULT_SIZE = "512M"
TUNED = "tuned"  # the folder of tuned plans
LOCK = "lock"  # the one file that is never removed: a byte of it is locked for each kernel
LOCK_SECONDS = 300  # how long to wait for a lock; then a kernel is compiled twice, not never
LEFT_SECONDS = 600  # a file that is still being written after so long was left by a killed process

HTILE = Path(__file__).parents[1]
# The files that are compiled into a kernel beside its own text, and those that compile it.
PRIMITIVES = (
    "config.py", "dataflow.py", "matmul.py", "warp_matmul.py", "utils.py",
    "compute/*.py", "copy/*.py", "types/*.py",
)  # fmt: skip
COMPILER = ("build/compile.py", "build/artifact.py", "build/cubin.py")
# The variables of CuTe-DSL that change no code; any other one may.
HARMLESS = {
    f"CUTE_DSL_{name}"
    for name in ("ARCH", "DUMP_DIR", "KEEP", "LIBS", "LOG_LEVEL", "LOG_TO_CONSOLE", "LOG_TO_FILE")
}

_FIELDS = "function", "arch", "blocks", "level"  # of an Artifact, in kernel.json
# The fields of an Artifact that have files of their own in an archive.
_TEXTS = {"source": "kernel.py", "ptx": "kernel.ptx"}
_BYTES = {"cubin": "kernel.cubin", "object": "kernel.o", "library": "kernel.so"}
_DIGEST = 64  # characters of the comment of an archive
_KERNEL = re.compile(r"[0-9a-f]{64}\.zip")
_TUNED = re.compile(r"[0-9a-f]{64}\.json")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-f]+\.tmp")

_COUNTS: Counter[str] = Counter()  # what this process found ("hits") and compiled


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The disk cache, and what it did for this process.

    folder: where it is; None if it is turned off.
    entries: how many compiled kernels it holds.
    bytes, limit: the size of what it holds, and of what it may hold (0 if it is turned off).
    hits: how many kernels this process found there.
    compiled: how many kernels this process did not find there, and compiled.
    tuned: how many files of tuned plans it holds.
    """

    folder: Path | None
    entries: int
    bytes: int
    limit: int
    hits: int
    compiled: int
    tuned: int


class Entry(NamedTuple):
    """One file of the cache.

    used: when it was last used, in seconds since the epoch.
    function, arch: what it holds; None where it is torn or not HTile's.
    about: what the first lines of its source say: the length of its rows, and the dtypes.
    """

    path: Path
    bytes: int
    used: float
    function: str | None = None
    arch: str | None = None
    about: str = ""


def cache_folder(
    environ: Mapping[str, str] | None = None, system: str | None = None
) -> Path | None:
    """HTILE_CACHE_DIR, or else `htile` in the user's cache folder; None if the cache is off."""
    environ = os.environ if environ is None else environ
    system = platform.system() if system is None else system
    given = environ.get("HTILE_CACHE_DIR")
    if given == "":
        return None
    if given is not None:
        folder = Path(given)
    elif system == "Windows" and environ.get("LOCALAPPDATA"):
        folder = Path(environ["LOCALAPPDATA"], "htile", "cache")
    elif system == "Darwin":
        folder = Path("~/Library/Caches/htile")
    else:
        folder = Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "htile")
    try:
        return folder.expanduser().absolute()
    except RuntimeError:  # a user without a home
        return None


def cache_limit(environ: Mapping[str, str] | None = None) -> int:
    """HTILE_CACHE_SIZE in bytes. Raises ArgumentError where that is no size."""
    environ = os.environ if environ is None else environ
    text = environ.get("HTILE_CACHE_SIZE") or DEFAULT_SIZE
    size = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if size is None:
        raise ArgumentError(
            f"HTILE_CACHE_SIZE={text!r}: expected a number of bytes, such as 512M or 2G"
        )
    return int(size.group(1)) * 1024 ** " KMGT".index(size.group(2).upper() or " ")


def key_of(source: str, function: str, arch: str) -> str | None:
    """The 64 hexadecimal digits that name a kernel's file; None where CuTe-DSL is not installed.

    Comments, which hold the user's lines, do not count.
    """
    chosen = variant()
    installed = chosen and versions(chosen.name)
    if installed is None:
        return None
    parts = {
        "format": FORMAT,
        "code": _code(source),
        "function": function,
        "arch": arch,
        "machine": platform.machine(),
        "variant": chosen.name,
        "versions": installed,
        "htile": _own_text(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("CUTE_DSL_") and name not in HARMLESS
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _code(source: str) -> list[str]:
    """The tokens of a text without comments and empty lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t.string for t in tokens if t.type not in (tokenize.COMMENT, tokenize.NL)]


@functools.cache
def versions(variant: str) -> dict[str, str] | None:
    """The versions that a kernel depends on; None where CuTe-DSL is not installed."""
    from .. import __version__

    names = ("nvidia-cutlass-dsl", f"nvidia-cutlass-dsl-libs-{variant}", "apache-tvm-ffi")
    try:
        return {"htile": __version__, **{name: metadata.version(name) for name in names}}
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _own_text() -> str:
    """A digest of the primitives' text, and of the text that compiles kernels."""
    digest = hashlib.sha256()
    for pattern in (*PRIMITIVES, *COMPILER):
        for path in sorted(HTILE.glob(pattern)):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(HTILE).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def path_of(source: str, function: str, arch: str) -> Path | None:
    """The file that a kernel is kept in, whether it is there or not; None where none would be."""
    folder = cache_folder()
    key = None if folder is None else key_of(source, function, arch)
    return None if key is None else folder / f"{key}.zip"


def fetch(
    source: str, function: str, arch: str, compile: Callable[[str, str, str], Artifact]
) -> Artifact:
    """The kernel from its file, or else what `compile(source, function, arch)` returns.

    If many processes ask for a kernel at once, one compiles it and the others wait. A file that
    can not be read is replaced; a kernel that can not be kept costs a warning. Raises ArgumentError
    where a kernel is to be kept and HTILE_CACHE_SIZE is no size.
    """
    path = path_of(source, function, arch)
    if path is None:
        _COUNTS["compiled"] += 1
        return compile(source, function, arch)
    found = _read(path)
    if found is None:
        with _alone(path):
            found = _read(path)
            if found is None:
                limit = cache_limit()  # before a second of work
                artifact = compile(source, function, arch)
                _COUNTS["compiled"] += 1
                _write(path, artifact, limit)
                return artifact
    _COUNTS["hits"] += 1
    return replace(found, source=as_compiled(source, found.blocks, found.level))


def keep(source: str, artifact: Artifact) -> None:
    """Write the kernel that was built of this text, if the cache does not have it any more."""
    path = path_of(source, artifact.function, artifact.arch)
    if path is not None and not path.exists():
        _write(path, artifact, cache_limit())


def _read(path: Path) -> Artifact | None:
    """The kernel of this file, which is marked as used; None where no whole kernel is there."""
    try:
        artifact = _unpack(read_file(path), path.stem)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("%s can not be read: %s", path, error)
        return None
    if artifact is None:
        logger.info("%s is torn or no kernel of HTile: compiled again", path)
        return None
    with contextlib.suppress(OSError):  # not ours to mark
        os.utime(path)
    return artifact


def _write(path: Path, artifact: Artifact, limit: int) -> None:
    """Write the kernel's file; where that fails, warn.

    Then the files that were used least recently are removed until the rest is within the limit.
    """
    what = "compiled kernels", "every process compiles again"
    replace_file(path, _pack(artifact, path.stem), what)
    for left in _files(path.parent, _UNFINISHED):
        if time.time() - left.used > LEFT_SECONDS:
            _remove(left)
    kernels = _files(path.parent, _KERNEL)
    size = sum(entry.bytes for entry in kernels)
    for entry in kernels:
        if size > limit and _remove(entry):
            size -= entry.bytes


def _pack(artifact: Artifact, key: str) -> bytes:
    about = {field: getattr(artifact, field) for field in _FIELDS}
    about["resources"] = asdict(artifact.resources)
    files = {name: getattr(artifact, field) for field, name in (_TEXTS | _BYTES).items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("kernel.json", json.dumps(about, indent=1))
        for name, content in files.items():
            if content is not None:
                archive.writestr(name, content)
        archive.comment = b"0" * _DIGEST
    content = buffer.getvalue()[:-_DIGEST]
    return content + _digest(key, content)


def _unpack(data: bytes, key: str) -> Artifact | None:
    """The kernel in a file's content; None where `_pack` has not made that for the key."""
    if _digest(key, data[:-_DIGEST]) != data[-_DIGEST:]:
        return None
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    known = json.loads(files["kernel.json"])  # blocks and level are there from format 2 on
    about = {field: known[field] for field in _FIELDS if field in known}
    about["resources"] = Resources(**known["resources"])
    texts = {field: files[name].decode() for field, name in _TEXTS.items()}
    return Artifact(**about, **texts, **{field: files.get(name) for field, name in _BYTES.items()})


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).hexdigest().encode()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a kernel's file among processes, if files can be locked here.

    It is a record lock of one byte at a place made from the key: it ends with the process, however
    that ends, and forked children do not inherit it.
    """
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(path.parent / LOCK, "ab", opener=without_waiting))
            _wait(lock, int(path.stem[:15], 16))
        except OSError as error:
            logger.info("%s can not be locked: %s", path.parent, error)
        yield


def _wait(file: io.BufferedWriter, place: int) -> None:
    import fcntl  # not on Windows, where nothing is compiled

    end = time.monotonic() + LOCK_SECONDS
    while time.monotonic() <= end:
        with contextlib.suppress(BlockingIOError, PermissionError):  # another process has it
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        time.sleep(0.01)
    logger.warning("another process compiles this kernel for %d s", LOCK_SECONDS)


def _files(folder: Path | None, pattern: re.Pattern) -> list[Entry]:
    """The files of a pattern, the last used one at the end; those that vanish are left out."""
    found = []
    if folder is None:
        return found
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            if pattern.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):
                    stat = file.stat(follow_symlinks=False)
                    found.append(Entry(Path(file.path), stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda entry: entry.used)


def _remove(entry: Entry) -> bool:
    """Whether the file is gone."""
    try:
        entry.path.unlink(missing_ok=True)
    except OSError as error:
        logger.info("%s can not be removed: %s", entry.path, error)
        return False
    return True


def cache_info() -> CacheInfo:
    """Where compiled kernels are kept, how many and how large, and what this process took.

        info = htile.cache_info()
        print(f"{info.compiled} kernels compiled, {info.hits} found in {info.folder}")

    Raises ArgumentError where the cache is on and HTILE_CACHE_SIZE is no size.
    """
    folder = cache_folder()
    limit = 0 if folder is None else cache_limit()
    kernels, tuned = _files(folder, _KERNEL), _files(folder and folder / TUNED, _TUNED)
    size, counts = sum(file.bytes for file in kernels), (_COUNTS["hits"], _COUNTS["compiled"])
    return CacheInfo(folder, len(kernels), size, limit, *counts, len(tuned))


def entries() -> list[Entry]:
    """The kernels' files in the cache, the last used one at the end."""
    found = []
    for entry in _files(cache_folder(), _KERNEL):
        try:
            artifact = _unpack(read_file(entry.path), entry.path.stem)
        except OSError:
            if not os.path.lexists(entry.path):  # it has been removed meanwhile
                continue
            artifact = None
        if artifact is not None:
            about = (ast.get_docstring(ast.parse(artifact.source)) or "").partition(": ")[2]
            entry = entry._replace(function=artifact.function, arch=artifact.arch, about=about)
        found.append(entry)
    return found


def clear() -> int:
    """Remove all kernels, tuned plans and unfinished files; returns how many kernels there were.

    Running processes keep the kernels that they loaded. Raises OSError where a file can not be
    removed.
    """
    folder = cache_folder()
    if folder is None:
        return 0
    kernels = _files(folder, _KERNEL)
    tuned = _files(folder / TUNED, _TUNED) + _files(folder / TUNED, _UNFINISHED)
    for file in (*kernels, *_files(folder, _UNFINISHED), *tuned):
        file.path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        (folder / TUNED).rmdir()
    return len(kernels)
