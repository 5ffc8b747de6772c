"""The disk cache: what names a kernel, what is believed, many processes, kills, full disks."""

import hashlib
import io
import json
import logging
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

import htile
from examples.softmax import softmax
from htile import cli
from htile.build import artifact as loading
from htile.build import cache, files
from htile.build import compile as compiler
from htile.build.artifact import Artifact, Variant, as_compiled
from htile.build.cubin import Resources
from htile.cli import cache as commands
from htile.errors import ArgumentError, CompileError

REPO = Path(__file__).parents[1]
SOURCE = """# made for softmax.py
def f(x):  # softmax.py:3
    return x * 2, "# no comment"
"""
USED = Resources(32, 0, 0, 1024, 128, 4096)


def made(source=SOURCE, function="f", arch="sm_90a", seed=0):
    """An artifact of made-up bytes, which do not compress."""
    noise = random.Random(seed).randbytes(20000)
    parts = b"o" + noise, b"s" + noise, "ptx", b"c" + noise
    return Artifact(source, function, arch, *parts, USED, seconds=1.0)


class Compiler:
    """A compiler that notes what it is asked for."""

    def __init__(self, seed=0):
        self.calls, self.seed = [], seed

    def __call__(self, source, function, arch):
        self.calls.append((source, function, arch))
        return made(source, function, arch, self.seed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's folder, which does not exist yet."""
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HTILE_CACHE_SIZE", raising=False)
    monkeypatch.setattr(cache, "_COUNTS", type(cache._COUNTS)())
    return tmp_path / "cache"


def fetch(compile, source=SOURCE):
    return cache.fetch(source, "f", "sm_90a", compile)


def kernels(folder):
    return sorted(path for path in folder.iterdir() if path.suffix == ".zip")


def python(code, *arguments, **variables):
    """What a process of its own prints."""
    environ = os.environ | {"PYTHONPATH": str(REPO)} | variables
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# ------------------------------------------------------------------------------------------- keys


def test_comments_and_empty_lines_name_no_other_kernel():
    moved = "\n" + SOURCE.replace("softmax.py:3", "softmax.py:40").replace("# made", "\n# Made")
    assert cache.key_of(moved, "f", "sm_90a") == cache.key_of(SOURCE, "f", "sm_90a")
    plain = "def f(x):\n    return x * 2, '# no comment'\n".replace("'", '"')
    assert cache.key_of(plain, "f", "sm_90a") == cache.key_of(SOURCE, "f", "sm_90a")


@pytest.mark.parametrize(
    "other",
    [
        (SOURCE.replace("x * 2", "x * 3"), "f", "sm_90a"),
        (SOURCE.replace("# no", "#  no"), "f", "sm_90a"),
        (SOURCE.replace("    return", "    pass\n    return"), "f", "sm_90a"),
        (SOURCE.replace("\n    return", " pass\nreturn"), "f", "sm_90a"),
        (SOURCE, "g", "sm_90a"),
        (SOURCE, "f", "sm_100a"),
    ],
)
def test_text_and_target_name_another_kernel(other):
    assert cache.key_of(*other) != cache.key_of(SOURCE, "f", "sm_90a")


def key_with(monkeypatch, target, name, value):
    """The key on a machine where `name` of `target` is `value`."""
    with monkeypatch.context() as patch:
        patch.setattr(target, name, value)
        cache.versions.cache_clear(), cache._own_text.cache_clear()
        key = cache.key_of(SOURCE, "f", "sm_90a")
    cache.versions.cache_clear(), cache._own_text.cache_clear()
    return key


def test_what_is_installed_names_another_kernel(monkeypatch):
    real, keys = metadata.version, [cache.key_of(SOURCE, "f", "sm_90a")]
    chosen = cache.variant()
    for package in ("nvidia-cutlass-dsl", f"nvidia-cutlass-dsl-libs-{chosen.name}",
                    "apache-tvm-ffi"):  # fmt: skip
        newer = lambda name, package=package: "99" if name == package else real(name)  # noqa: E731
        keys.append(key_with(monkeypatch, metadata, "version", newer))
    keys.append(key_with(monkeypatch, htile, "__version__", "99"))
    keys.append(key_with(monkeypatch, cache.platform, "machine", lambda: "riscv64"))
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    other = Variant("cu99", chosen.runtime)
    both = [key_with(monkeypatch, cache, "variant", lambda v=v: v) for v in (chosen, other)]
    assert len({*keys, *both}) == len(keys) + 2


def test_the_text_of_the_primitives_names_another_kernel(monkeypatch, tmp_path):
    """The text of each primitive counts, and of what compiles, and of nothing else."""
    tree = tmp_path / "htile"
    shutil.copytree(cache.HTILE, tree, ignore=shutil.ignore_patterns("__pycache__"))

    def key():
        return key_with(monkeypatch, cache, "HTILE", tree)

    known = {key()}
    assert known == {cache.key_of(SOURCE, "f", "sm_90a")}, "wherever it is installed"
    primitives = [path for pattern in cache.PRIMITIVES for path in tree.glob(pattern)]
    assert {"math.py", "reduce.py", "vector.py", "register.py"} < {p.name for p in primitives}
    kernels = [*(REPO / "tests" / "golden").glob("*.py"), *primitives]
    texts = "".join(path.read_text(encoding="utf-8") for path in kernels)
    imported = {name.partition(".")[0] for name in re.findall(r"^from htile\.(\S+)", texts, re.M)}
    known_parts = {re.split(r"[./]", pattern)[0] for pattern in cache.PRIMITIVES}
    assert {"config", "compute"} < imported <= known_parts, "all that a kernel imports"
    for path in (*primitives, tree / "build" / "compile.py"):
        path.write_text(path.read_text(encoding="utf-8") + "# \n", encoding="utf-8")
        assert key() not in known, path
        known.add(key())
    (tree / "cli" / "show.py").write_text("")
    assert key() in known


def test_options_in_the_environment_name_another_kernel(monkeypatch):
    key = cache.key_of(SOURCE, "f", "sm_90a")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/elsewhere")
    monkeypatch.setenv("HTILE_DUMP", "/elsewhere")
    assert cache.key_of(SOURCE, "f", "sm_90a") == key
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert cache.key_of(SOURCE, "f", "sm_90a") != key


def test_a_key_is_the_same_in_every_process():
    code = (
        "import sys\nfrom htile.build.cache import key_of\nprint(key_of(sys.argv[1], 'f', 'sm_80'))"
    )
    key = python(code, SOURCE, PYTHONHASHSEED="3").strip()
    assert key == cache.key_of(SOURCE, "f", "sm_80") and re.fullmatch("[0-9a-f]{64}", key)


def test_without_the_dsl_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setattr(cache, "variant", lambda: None)
    assert fetch(Compiler()).function == "f" and not folder.exists()


# ------------------------------------------------------------------------------------ in and out


def test_a_kernel_is_found_again_with_the_text_that_was_asked_for(folder):
    compile = Compiler()
    first = fetch(compile)
    moved = SOURCE.replace(":3", ":4")
    assert fetch(compile, moved) == replace(first, source=moved) and len(compile.calls) == 1
    (path,) = kernels(folder)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("kernel.py").decode() == SOURCE, "with its comments"
        assert archive.read("kernel.so") == first.library
    info = htile.cache_info()
    assert (info.folder, info.entries, info.hits, info.compiled) == (folder, 1, 1, 1)
    assert info.bytes == path.stat().st_size and info.limit == 512 * 2**20


def test_an_artifact_without_a_library_is_kept(folder):
    plain = replace(made(), library=None)
    fetch(lambda *request: plain)
    assert fetch(None) == plain


@pytest.mark.parametrize("empty", ["", None])
def test_turned_off(folder, monkeypatch, empty):
    if empty is None:  # a user without a home, which is the same
        monkeypatch.delenv("HTILE_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("HTILE_CACHE_DIR", empty)
    compile = Compiler()
    assert fetch(compile) == fetch(compile) and len(compile.calls) == 2
    info = htile.cache_info()
    assert (info.folder, info.entries, info.compiled) == (None, 0, 2) and not folder.exists()
    assert cache.entries() == [] and cache.clear() == 0


def test_what_is_torn_is_compiled_again_and_replaced(folder):
    """A torn file may have any length, and any byte of it may be changed."""
    fetch(Compiler())
    (path,) = kernels(folder)
    whole = path.read_bytes()
    places = {0, 1, 63, 64, 65, len(whole) - 1, *range(0, len(whole), len(whole) // 60)}
    for place in sorted(places):
        changed = bytes([whole[place] ^ 1])
        for torn in (whole[:place], whole[:place] + changed + whole[place + 1 :], whole[place:]):
            if torn == whole:
                continue
            path.write_bytes(torn)
            compile = Compiler()
            assert fetch(compile) == made() and compile.calls
            assert fetch(None) == made(), "it was replaced"


def foreign_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("kernel.json", "{}")


def another_kernel(path):
    """A whole entry lies under the name of another one."""
    cache.fetch(SOURCE, "f", "sm_80", Compiler(seed=9))
    os.replace(path.with_name(f"{cache.key_of(SOURCE, 'f', 'sm_80')}.zip"), path)


FOREIGN = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello " * 100),
    "the digest of nothing": lambda path: path.write_bytes(cache._digest("", b"")),
    "zip": foreign_zip,
    "another kernel": another_kernel,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
    "a pipe that nobody writes to": lambda path: os.mkfifo(path),
    "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_foreign_is_never_believed(folder, kind):
    folder.mkdir()
    path = cache.path_of(SOURCE, "f", "sm_90a")
    FOREIGN[kind](path)
    (entry,) = cache.entries()
    assert (entry.path, entry.function) == (path, None)
    compile = Compiler()
    assert fetch(compile) == made() and len(compile.calls) == 1
    assert fetch(None) == made() and not path.is_symlink()


def test_a_pipe_in_the_place_of_the_lock_holds_nobody_up(folder):
    folder.mkdir()
    os.mkfifo(folder / cache.LOCK)
    compile = Compiler()
    assert fetch(compile) == made() and fetch(None) == made() and len(compile.calls) == 1


def test_how_it_was_compiled_is_kept(folder):
    """It may be for other thread blocks than the text asks for, or at another level of ptxas."""
    asked = SOURCE + "blocks = 6  # of an SM, for which registers are spared\n"
    for blocks, level, line in (
        (6, 3, "blocks = 6  # of an SM, for which registers are spared"),
        (0, 3, "blocks = 0  # of an SM; 6 would spill registers"),
        (6, 2, "blocks = 6  # of an SM; ptxas -O2: -O3 would spill"),
    ):
        cache.clear()
        text = SOURCE + line + "\n"
        assert as_compiled(asked, blocks, level) == text
        first = replace(made(text), blocks=blocks, level=level)
        assert fetch(lambda *request, first=first: first, asked) is first
        moved = asked.replace(":3", ":4")
        again = fetch(None, moved)
        assert (again.blocks, again.level) == (blocks, level)
        assert again.source == text.replace(":3", ":4"), "with the caller's comments"
        assert (first.seconds, again.seconds) == (1.0, None), "compiled, and found"
        cache.clear()
        cache.keep(asked, first)
        assert fetch(None, asked) == first


def test_a_file_of_a_later_version_is_listed(folder):
    """It may say more of a kernel than this version knows."""
    fetch(Compiler())
    (entry,) = cache.entries()
    path = next(folder.glob("*.zip"))
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["kernel.json"] = json.dumps(json.loads(files["kernel.json"]) | {"newer": 1})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.comment = b"0" * cache._DIGEST
    content = buffer.getvalue()[: -cache._DIGEST]
    path.write_bytes(content + cache._digest(path.stem, content))
    (again,) = cache.entries()
    assert (again.function, again.arch) == (entry.function, entry.arch)


def test_files_of_the_format_before_are_listed(folder):
    fetch(Compiler())
    (path,) = kernels(folder)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(files["kernel.json"])
    del about["blocks"], about["level"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, json.dumps(about) if name == "kernel.json" else content)
        archive.comment = b"0" * 64
    content = path.read_bytes()[:-64]
    path.write_bytes(content + cache._digest(path.stem, content))
    (entry,) = cache.entries()
    assert (entry.function, entry.arch) == ("f", "sm_90a")


def test_a_folder_in_the_place_of_a_file_costs_the_cache_only(folder):
    cache.path_of(SOURCE, "f", "sm_90a").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="can not be kept"):
        assert fetch(Compiler()) == made()
    assert [entry.function for entry in cache.entries()] == [None]


# ------------------------------------------------------------------ folders that can not be written


def test_a_full_disk_costs_a_warning_and_leaves_nothing(folder):
    """The file system really refuses to write more than 1000 bytes."""
    compile, before = Compiler(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.warns(RuntimeWarning, match="File too large.*HTILE_CACHE_DIR"):
            assert fetch(compile) == made()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in folder.iterdir()] == [cache.LOCK]
    assert fetch(compile) == made() and len(compile.calls) == 2 and kernels(folder)


def test_a_read_only_folder_is_read(folder, monkeypatch):
    fetch(Compiler())

    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    def read_only(path, mode="r", **options):
        refuse() if set(mode) & set("wax") else None
        return open(path, mode, **options)

    monkeypatch.setattr(cache, "open", read_only, raising=False)
    monkeypatch.setattr(files, "open", read_only, raising=False)
    monkeypatch.setattr(cache.os, "utime", refuse)
    monkeypatch.setattr(cache.Path, "mkdir", refuse)
    assert fetch(None) == made()
    other = SOURCE.replace("2", "3")
    compile = Compiler()
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"Read-only file system.*compiles again"):
            assert fetch(compile, other).source == other
    assert len(compile.calls) == 2 and len(kernels(folder)) == 1


@pytest.mark.parametrize("place", ["file/below", "/proc/nothing/here"])
def test_a_folder_that_can_not_be_made(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / place))
    with pytest.warns(RuntimeWarning, match="can not be kept"):
        assert fetch(Compiler()) == made()
    assert htile.cache_info().entries == 0 and cache.entries() == []


def test_what_fails_to_compile_fails_and_is_not_kept(folder):
    def fails(*request):
        raise CompileError("no")

    for _ in range(2):
        with pytest.raises(CompileError, match="no"):
            fetch(fails)
    assert not kernels(folder) and fetch(Compiler()) == made()


# ------------------------------------------------------------------------------------------- size


def several(folder, count):
    """Make entries, each used a minute after the one before; returns their paths."""
    paths = []
    for k in range(count):
        source = SOURCE.replace("2", str(10 + k))
        fetch(Compiler(), source)
        paths.append(cache.path_of(source, "f", "sm_90a"))
        os.utime(paths[-1], (1e9 + 60 * k,) * 2)
    return paths


def test_what_was_used_least_recently_goes(folder, monkeypatch):
    paths = several(folder, 5)
    fetch(None, SOURCE.replace("2", "11"))  # is used now
    (folder / "notes.txt").write_text("of somebody else")
    size = paths[0].stat().st_size
    monkeypatch.setenv("HTILE_CACHE_SIZE", str(3 * size + size // 2))
    fetch(Compiler())
    kept = {paths[1], paths[4], cache.path_of(SOURCE, "f", "sm_90a")}
    assert set(kernels(folder)) == kept and (folder / "notes.txt").exists()
    assert htile.cache_info().bytes <= htile.cache_info().limit


def test_what_can_not_be_removed_keeps_nothing_else_from_it(folder, monkeypatch):
    paths = several(folder, 3)
    paths[0].unlink()
    paths[0].mkdir()
    os.utime(paths[0], (1e9, 1e9))
    monkeypatch.setenv("HTILE_CACHE_SIZE", str(paths[2].stat().st_size + 8192))
    fetch(Compiler())
    assert not paths[1].exists() and paths[0].exists()


def test_a_bound_of_nothing_keeps_nothing(folder, monkeypatch):
    monkeypatch.setenv("HTILE_CACHE_SIZE", "0")
    assert fetch(Compiler()) == made() and not kernels(folder)


def test_what_killed_processes_left_is_removed_in_time(folder):
    folder.mkdir()
    old, fresh = (folder / f"{digit * 64}.{digit * 16}.tmp" for digit in "ab")
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - cache.LEFT_SECONDS - 1,) * 2)
    fetch(Compiler())
    assert not old.exists() and fresh.exists(), "which somebody may be writing"
    assert cache.clear() == 1 and not fresh.exists()
    assert [path.name for path in folder.iterdir()] == [cache.LOCK]


@pytest.mark.parametrize(
    ("text", "size"),
    [("123", 123), ("2K", 2048), ("3 MiB", 3 << 20), ("1g", 2**30), ("1TB", 2**40), ("", 2**29)],
)
def test_sizes(text, size, monkeypatch):
    monkeypatch.setenv("HTILE_CACHE_SIZE", text)
    assert cache.cache_limit() == size


@pytest.mark.parametrize("text", ["much", "-1", "1.5G", "1X", "0x10"])
def test_what_is_no_size(text, folder, monkeypatch):
    fetch(Compiler())
    monkeypatch.setenv("HTILE_CACHE_SIZE", text)
    compile, other = Compiler(), SOURCE.replace("2", "3")
    for use in (lambda: fetch(compile, other), htile.cache_info):
        with pytest.raises(ArgumentError, match=r"HTILE_CACHE_SIZE=.*such as 512M"):
            use()
    assert not compile.calls, "it says so before a second of work"
    assert fetch(None) == made(), "what is there needs no size"
    monkeypatch.setenv("HTILE_CACHE_DIR", "")
    assert fetch(compile, other).source == other, "nor does a cache that is turned off"
    assert htile.cache_info().limit == 0


# ------------------------------------------------------------------------------- many processes


HOLD = """
import sys, time
from pathlib import Path
from htile.build.cache import _alone
with _alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(path):
    """A process that holds the lock of a kernel's file."""
    command = [sys.executable, "-c", HOLD, str(path)]
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_ends_with_its_process(folder):
    process = holder(cache.path_of(SOURCE, "f", "sm_90a"))
    compile, results = Compiler(), []
    thread = threading.Thread(target=lambda: results.append(fetch(compile)))
    thread.start()
    try:
        other = fetch(Compiler(), SOURCE.replace("2", "3"))
        assert other.function == "f", "another kernel waits for nobody"
        thread.join(0.3)
        assert thread.is_alive() and not compile.calls, "it waits"
    finally:
        process.kill()
        process.communicate()
    thread.join(30)
    assert results == [made()] and len(compile.calls) == 1


def test_a_slow_lock_is_waited_for_no_longer(folder, monkeypatch, caplog):
    """On a busy network folder each try takes its time."""
    import fcntl

    def slowly(*args):
        time.sleep(0.05)
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "lockf", slowly)
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.3)
    start = time.monotonic()
    assert fetch(Compiler()).function == "f"
    assert time.monotonic() - start < 2  # 30 tries would take 1.8 s and more
    assert "another process compiles this kernel" in caplog.text


def test_nobody_waits_forever(folder, monkeypatch, caplog):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    process = holder(cache.path_of(SOURCE, "f", "sm_90a"))
    try:
        assert fetch(Compiler()) == made()
    finally:
        process.kill()
        process.communicate()
    assert "another process compiles this kernel" in caplog.text


# Forked, so that torch is imported once; CuTe-DSL is not, since only those that compile import it.
TOGETHER = """
import json, os, sys, time
from pathlib import Path
import htile
from tests.lower.test_compile import request
from htile.build.compile import build, load
requests = [request(n=n) for n in (112, 176, 208)]
assert "cutlass" not in sys.modules
read, write = os.pipe()
start = time.monotonic() + 0.5
for _ in range(8):
    if os.fork() == 0:
        time.sleep(start - time.monotonic())
        for r in requests:
            assert callable(load(build(*r)))
        info = htile.cache_info()
        used = "cutlass" in sys.modules
        os.write(write, (json.dumps([info.compiled, info.hits, used]) + "\\n").encode())
        os._exit(0)
os.close(write)
sys.stdout.write(os.fdopen(read).read())
"""


def test_eight_processes_compile_each_kernel_once(folder):
    found = [json.loads(line) for line in python(TOGETHER).splitlines()]
    assert len(found) == 8 and all(compiled + hits == 3 for compiled, hits, _ in found)
    assert sum(compiled for compiled, _, _ in found) == 3
    assert all(used == (compiled > 0) for compiled, _, used in found), "CuTe-DSL is imported"
    assert len(kernels(folder)) == 3 and all(entry.function for entry in cache.entries())


# Forks, so that a try takes no second: torch and CuTe-DSL are imported once, and used in children
# only.
FORKS = """
import itertools, os, random, resource, shutil, signal, sys, time
from pathlib import Path
from htile.build import cache
{imports}
folder = Path(os.environ["HTILE_CACHE_DIR"])
outcomes = dict.fromkeys(("nothing", "unfinished", "entry"), 0)

def child(action):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            action()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def check():
    names = [p.suffix for p in folder.iterdir()] if folder.exists() else []
    outcomes["entry" if ".zip" in names else "unfinished" if ".tmp" in names else "nothing"] += 1
    assert all(entry.function == function for entry in cache.entries()), "no entry is torn"
    assert ended(child(use)) == 0, "the next run works"
    (entry,) = cache.entries()
    assert entry.function == function, "and what it leaves is whole"
    assert ended(child(found)) == 0
"""

# Each kill comes at a random moment of the time that a whole run takes. argv: how many tries.
KILLS = """
random.seed(5)
start = time.perf_counter()
assert [ended(pid) for pid in [child(use), child(use)]] == [0, 0]
whole = time.perf_counter() - start
for k in range(int(sys.argv[1])):
    shutil.rmtree(folder, ignore_errors=True)
    pids = [child(use) for _ in range(2)]
    time.sleep(random.uniform(0, whole))
    for pid in pids[: 1 + k % 2]:  # one, or both
        os.kill(pid, signal.SIGKILL)
    codes = [ended(pid) for pid in pids]
    assert set(codes) <= {0, -signal.SIGKILL}, codes
    if k % 2 == 0:
        assert codes[1] == 0, "the other one goes on"
    check()
print(*outcomes.values())
"""

# First, each kill comes just before another thing that the process asks of the system, as audit
# hooks are told: to open a file, to rename one, and so on. Then the kernel kills the process when a
# file has so many bytes. No moment depends on how fast the machine is.
MOMENTS = """
def killed_at(k):
    left = itertools.count(k, -1)

    def hook(event, arguments):
        if event.startswith(("open", "os.", "fcntl.")) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    use()

def killed_after(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    use()

cache.path_of("", "", "")  # children need not read anew what a process reads once
for k in itertools.count():
    shutil.rmtree(folder, ignore_errors=True)
    code = ended(child(lambda: killed_at(k)))
    if code == 0:
        break
    assert code == -signal.SIGKILL
    check()
(size,) = (entry.bytes for entry in cache.entries())
for part in (0, 1, size // 2, size - 1):
    shutil.rmtree(folder)
    assert ended(child(lambda: killed_after(part))) == -signal.SIGXFSZ
    assert part in [p.stat().st_size for p in folder.iterdir() if p.name != cache.LOCK]
    check()
print(*outcomes.values())
"""

FAKE = """
noise = random.Random(1).randbytes(1 << 17)
used = cache.Resources(1, 1, 1, 1, 1, 1)
function = "f"
def compile(*request):
    time.sleep(0.003)
    return cache.Artifact(*request, noise, noise, "ptx", noise, used)
def use():
    assert cache.fetch("x = 1", "f", "sm_90a", compile).object == noise
def found():
    assert cache.fetch("x = 1", "f", "sm_90a", None).object == noise
"""

REAL = """
import torch, tvm_ffi
from cutlass import cute
from htile.build import compile as compiler
from tests.lower.test_compile import request
request = request(n=144)
function = request[1]
def use():
    assert callable(compiler.load(compiler.build(*request)))
def found():
    compiler._build = None
    use()
"""


def after_kills(code, imports, *arguments):
    """How many kills left nothing, an unfinished file, and a kernel's whole file."""
    return [*map(int, python(FORKS.format(imports=imports) + code, *arguments).split())]


def test_killed_at_each_moment_of_the_cache(folder):
    """Before, in and after the write of a file, and between it and the file's name."""
    nothing, unfinished, entry = after_kills(MOMENTS, FAKE)
    assert nothing > 2 and unfinished > 4 and entry > 1


def test_killed_at_any_moment_of_the_cache(folder):
    assert sum(after_kills(KILLS, FAKE, "100")) == 100


def test_killed_at_any_moment_of_a_compile(folder):
    nothing, _, entry = after_kills(KILLS, REAL, "12")
    assert nothing and entry


def test_threads_compile_a_kernel_once(folder, monkeypatch):
    compile, results = Compiler(), []
    monkeypatch.setattr(compiler, "_build", compile)
    source = SOURCE.replace("2", "77")
    threads = [
        threading.Thread(target=lambda: results.append(compiler.build(source, "f", "sm_80")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(compile.calls) == 1


# ------------------------------------------------------------------------------ real kernels, warm


X = torch.empty(64, 328, dtype=torch.bfloat16, device="meta")

# Its argument is a folder for the bytecode, which an installed package has and a checkout may lack.
WARM = """
import sys, time
start = time.process_time()
import torch
of_torch = time.process_time() - start
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
start = time.process_time()
import htile
from examples.softmax import softmax
from htile.build.compile import load
x = torch.empty(64, 328, dtype=torch.bfloat16)
kernel = softmax.inspect(x)
function = load(kernel.artifact)
took = time.process_time() - start
try:
    function(x, x)
except ValueError as error:  # it is the kernel's own check of its arguments
    assert "softmax(mX: Tensor([n0, 328], bfloat16)" in str(error), error
    assert "expected device_type=cuda" in str(error), error
kernel.ptx, kernel.cubin, str(kernel.resources)
assert not [m for m in sys.modules if m.partition(".")[0] == "cutlass"]
maps = open("/proc/self/maps").read()
assert "_cutlass_ir" not in maps and "libcute_dsl_runtime" in maps
print(htile.cache_info().hits, htile.cache_info().compiled, took, of_torch)
"""


def test_a_warm_process_imports_no_cute_dsl(folder, tmp_path):
    """Its cost is in units of the CPU time of `import torch`, which a slow machine has too.

    Both times are the least of several processes, because whatever else the machine does makes
    each of them longer. They are times of the same processes, so that neither alone is of a moment
    when the machine was quick. The first process counts for neither: it writes the bytecode.
    """
    kernel = softmax.compile(X)
    assert isinstance(kernel, htile.run.kernel.Kernel) and kernel.arch == "sm_90a"
    assert cache.path_of(kernel.source, "softmax", "sm_90a").exists()
    took, of_torch = [], []
    for process in range(8):
        hits, compiled, *seconds = python(WARM, str(tmp_path / "bytecode")).split()
        assert (hits, compiled) == ("1", "0")
        if process > 0:
            took.append(float(seconds[0]))
            of_torch.append(float(seconds[1]))
    # It is 0.09 on a machine with two cores. The import of CuTe-DSL alone takes 0.3.
    assert min(took) < 0.12 * min(of_torch), "import htile and all of a first call but the launch"


def test_a_warm_process_says_the_same_of_a_kernel(folder):
    cold = softmax.compile(X)
    code = (
        "import json, sys, hashlib, torch\nfrom examples.softmax import softmax\n"
        "k = softmax.inspect(torch.empty(9, 328, dtype=torch.bfloat16, device='meta'))\n"
        "print(json.dumps([k.ptx, hashlib.sha256(k.cubin).hexdigest(), str(k.resources)]))\n"
        "assert 'cutlass' not in sys.modules"
    )
    expected = [cold.ptx, hashlib.sha256(cold.cubin).hexdigest(), str(cold.resources)]
    assert json.loads(python(code)) == expected


def test_compiling_ahead_knows_arguments_apart(folder):
    """The number of rows does not count; N, dtype, rank, architecture and alignment do."""
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    first = softmax.compile(X)
    for same in (torch.empty(1, 328, **meta), torch.empty(10**6, 328, **meta)):
        assert softmax.compile(same).source == first.source
    buffer = torch.empty(4, 336, dtype=torch.bfloat16)
    others = [
        softmax.compile(X, arch="sm_80"),
        softmax.compile(torch.empty(4, 5, 328, **meta)),
        softmax.compile(torch.empty(64, 327, **meta)),
        softmax.compile(torch.empty(64, 328, device="meta")),
        softmax.compile(buffer[:, 1:329]),
        softmax.compile(torch.empty_strided((64, 328), (330, 1), **meta)),
    ]
    texts = {(kernel.source, kernel.arch) for kernel in (first, *others)}
    assert len(texts) == 7
    assert len(kernels(folder)) == 7
    assert others[4].plan.placement.copy_bytes == 2 and first.plan.placement.copy_bytes == 16


def test_host_code_runs_on_every_cpu_of_its_kind():
    """LLVM would use what the machine at hand has, such as AVX-512, unless it is told not to."""
    artifact = softmax.inspect(X).artifact
    assert artifact.library is None or artifact.library[:4] == b"\x7fELF"
    if tool := shutil.which("objdump"):
        with loading.tempfile.TemporaryDirectory() as place:
            path = Path(place, "kernel.o")
            path.write_bytes(artifact.object)
            text = subprocess.run([tool, "-d", path], capture_output=True, text=True).stdout
        assert "__tvm_ffi_htile" in text and not re.search(r"%[yz]mm|\sv\w+ps\s", text)


def test_compiling_ahead_keeps_what_was_compiled_before(folder, tmp_path):
    softmax.compile(X)
    cache.clear()
    softmax.compile(X)
    assert len(kernels(folder)) == 1
    assert python(WARM, str(tmp_path / "bytecode")).startswith("1 0 ")


# ---------------------------------------------------------------------------------------- loading


@pytest.fixture
def no_linker(monkeypatch):
    monkeypatch.setattr(loading.shutil, "which", lambda name: None)


def test_without_a_linker_cute_dsl_loads_it_and_says_why(no_linker, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tvm_ffi_orcjit", None)
    built = replace(softmax.inspect(X).artifact, library=None)
    assert loading.link(built.object) is None
    with pytest.raises(loading.LoadError, match=r"no linker.*tvm-ffi-orcjit is not installed"):
        loading.load(built)
    with caplog.at_level(logging.WARNING):
        function = compiler._load(built)
    assert "importing CuTe-DSL to load softmax: no linker" in caplog.text
    x = torch.empty(2, 328, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(x, x)


def test_without_a_linker_orcjit_loads_it(no_linker, monkeypatch):
    """A module with its interface stands for apache-tvm-ffi-orcjit, which is not required."""
    seen = []

    class Session:
        def load_module(self, path):
            seen.append(Path(path).read_bytes())
            return {"htile": "function"}

    module = type(sys)("tvm_ffi_orcjit")
    module.default_session = Session
    monkeypatch.setitem(sys.modules, "tvm_ffi_orcjit", module)
    built = replace(softmax.inspect(X).artifact, library=None)
    assert loading.load(built) == "function" and seen == [built.object]


def test_what_can_not_be_mapped_is_loaded_otherwise(monkeypatch):
    """That happens in a temporary folder that nothing may be executed in."""
    monkeypatch.setitem(sys.modules, "tvm_ffi_orcjit", None)
    built = replace(softmax.inspect(X).artifact, library=b"no library")
    with pytest.raises(loading.LoadError, match="Failed to load"):
        loading.load(built)


def test_the_variant_is_the_newest_that_the_driver_supports(monkeypatch, tmp_path):
    for name in ("cu12", "cu13", "cu9", "cux"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / loading.RUNTIME).write_text("")
    spec = type(sys)("spec")
    spec.submodule_search_locations = [str(tmp_path)]

    def chosen(driver, package=spec):
        monkeypatch.setattr(loading, "_driver_major", lambda: driver)
        monkeypatch.setattr(loading.util, "find_spec", lambda name: package)
        return loading.variant.__wrapped__()

    assert chosen(None).name == chosen(13).name == chosen(14).name == "cu13"
    assert chosen(12) == Variant("cu12", tmp_path / "cu12" / "lib" / loading.RUNTIME)
    assert chosen(8) is None and chosen(None, None) is None
    other = tmp_path / loading.RUNTIME
    monkeypatch.setenv("CUTE_DSL_LIBS", os.pathsep.join(["/a/libother.so", str(other)]))
    assert chosen(12) == Variant("cu12", other)


def test_the_variant_is_the_one_that_cute_dsl_takes():
    code = (
        "import cutlass, sys\nfrom htile.build.artifact import variant\n"
        "from cutlass.base_dsl.version_info import CUDA_VERSION\n"
        "from cutlass.runtime import find_runtime_libraries\n"
        "assert variant().name == f'cu{CUDA_VERSION.major}', variant()\n"
        "assert str(variant().runtime) in find_runtime_libraries(), variant()"
    )
    python(code)


# ------------------------------------------------------------------------------- the command line


def main(capsys, *argv):
    code = cli.main(list(argv))
    return code, *capsys.readouterr()


ARCHS = ("sm_80", "sm_90a")


def test_what_the_list_says_of_each_kind_of_kernel(folder, capsys):
    where = "examples.gallery.linear_gelu:linear_gelu"
    ask = ["compile", where, "--args", "x=bf16[64,64] weight=bf16[64,64] bias=bf16[64]"]
    assert main(capsys, *ask)[0] == 0
    line = main(capsys, "cache")[1].splitlines()[1]
    assert re.split(r" {2,}", line)[:4] == ["linear_gelu", "N = 64", "1 product of bf16", "sm_90a"]
    every = "x bf16, weight bf16, eps f32 -> out0 bf16, out1 bf16"
    entry = cache.Entry(folder / "00", 1, 0.0, "f", "sm_90a", f"one row of N <= 8.\n\n{every}")
    assert commands._columns(entry)[:3] == ("f", "N <= 8", every)
    wide = commands._columns(entry._replace(about=f"one row of N = 8.\n\n{every}, {every}"))[2]
    assert len(wide) == commands.MOST_DTYPES and wide.endswith("…")


def test_a_cache_folder_that_is_a_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("HTILE_CACHE_DIR", str(place))
        code, out, err = main(capsys, "cache")
        assert (code, out) == (2, "") and f"{place} can not be read as a folder" in err
        assert "HTILE_CACHE_DIR" in err


def test_compile_asks_for_a_size_before_it_looks(folder, capsys, monkeypatch):
    ask = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,344]"]
    assert main(capsys, *ask)[0] == 0
    monkeypatch.setenv("HTILE_CACHE_SIZE", "foo")
    code, out, err = main(capsys, *ask)
    assert (code, out) == (1, "") and "HTILE_CACHE_SIZE='foo': expected a number" in err


def test_compile_lists_and_clear(folder, capsys):
    ask = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,344]"]
    more = ["--args", "x=bf16[64,360]", "--arch", "sm_80", "--arch", "sm_90a"]
    code, out, err = main(capsys, *ask, *more)
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[-1] == f"in {folder}" and len(kernels(folder)) == 4
    expected = [(n, arch) for n in (344, 360) for arch in ("sm_80", "sm_90a")]
    for (n, arch), line in zip(expected, lines[:-1], strict=True):
        assert re.fullmatch(rf"softmax, N = {n}, {arch}: compiled in \d+\.\d s", line)
    _, out, _ = main(capsys, *ask)
    assert out == f"softmax, N = 344, sm_90a: was there\nin {folder}\n"

    torn = kernels(folder)[0]
    torn.write_bytes(b"torn")
    code, out, err = main(capsys, "cache")
    title, *lines = out.splitlines()
    assert (code, err) == (0, "") and title.startswith(f"{folder}: 4 kernels, ")
    assert title.endswith(" of 512 MiB") and len(lines) == 4
    assert {line.split()[-1] for line in lines} == {path.name[:12] for path in kernels(folder)}
    assert lines[0].startswith("torn: compiled again when used")
    assert lines[0].endswith(torn.name[:12])
    assert sum(line.startswith("softmax  ") for line in lines) == 3
    known = [re.split(r" {2,}", line)[1:4] for line in lines[1:]]
    expected = [[f"N = {n}", "x bf16 -> out bf16", a] for n in (344, 360) for a in ARCHS]
    assert len(known) == 3 and all(each in expected for each in known)
    assert len({tuple(each) for each in known}) == 3, "no two lines look alike"

    code, out, err = main(capsys, "cache", "--clear")
    assert (code, out, err) == (0, f"removed 4 kernels from {folder}\n", "")
    assert not kernels(folder)
    _, out, _ = main(capsys, "cache")
    assert out == f"{folder}: 0 kernels, 0 B of 512 MiB\n"


def test_commands_without_a_cache(folder, capsys, monkeypatch):
    monkeypatch.setenv("HTILE_CACHE_DIR", "")
    ask = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,344]"]
    code, out, err = main(capsys, *ask)
    assert (code, out) == (2, "") and "turned off: set HTILE_CACHE_DIR" in err
    code, out, _ = main(capsys, "cache")
    assert code == 0 and out.startswith("the cache is turned off")


def test_compile_where_nothing_can_be_kept_fails(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "file" / "below"))
    ask = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,376]"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, out, err = main(capsys, *ask)
    assert (code, out) == (1, "") and "can not be kept in the disk cache" in err
    assert err.count("\n") == 1 and "HTILE_CACHE_DIR (empty: none)" in err, "it is said once"


def test_compile_where_kernels_do_not_fit_names_the_variable(capsys, folder, monkeypatch):
    """It fails too where its own later kernels drive out the earlier ones."""
    first = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,344]"]
    assert main(capsys, *first)[0] == 0
    size = sum(file.stat().st_size for file in kernels(folder))
    monkeypatch.setenv("HTILE_CACHE_SIZE", str(size * 3 // 2))
    several = *first, "--args", "x=bf16[64,376]", "--args", "x=bf16[64,408]"
    code, out, err = main(capsys, *several)
    assert code == 1 and out.count("sm_90a: ") == 3 and len(kernels(folder)) == 1
    assert err.count("\n") == 1 and "2 of 3 kernels had to leave" in err
    assert f"HTILE_CACHE_SIZE allows {size * 3 // 2}: set it to more" in err
    monkeypatch.setenv("HTILE_CACHE_SIZE", "1K")
    code, _, err = main(capsys, *first[:-1], "x=bf16[64,440]")
    assert code == 1 and "can not be kept in the disk cache: it does not fit" in err
    assert "HTILE_CACHE_SIZE allows 1024: set it to more, such as 512M" in err


def test_what_is_compiled_ahead_and_can_not_be_kept_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "file" / "below"))
    x = torch.empty(64, 392, device="meta")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        softmax.compile(x)
    assert ["can not be kept" in str(each.message) for each in told] == [True]
    with pytest.warns(RuntimeWarning, match="can not be kept"):
        softmax.compile(x)


def test_what_can_not_be_removed_is_said(folder, capsys, monkeypatch):
    fetch(Compiler())

    def refuse(path, missing_ok=False):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    code, _, err = main(capsys, "cache", "--clear")
    assert code == 2 and "Read-only file system" in err and str(folder) in err


def test_wrong_arguments_of_compile(folder, capsys):
    code, _, err = main(capsys, "compile", "examples.softmax:softmax")
    assert code == 2 and "softmax needs x" in err
    ask = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,344]", "--arch", "sm_1"]
    code, _, err = main(capsys, *ask)
    assert code == 1 and "unknown architecture 'sm_1'" in err
