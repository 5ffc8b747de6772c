"""`python -m tests.gpu`: all tests that need a GPU, in processes side by side. `make gpu-test`.

One process would take an hour, most of it to compile kernels. So one pool of workers compiles what
each group of files lists in `jobs`, and the group's pytest starts as soon as its kernels are there,
on one of the GPUs in turn. What is timed, or needs all GPUs, runs at the end, alone. With
`--only edges clusters` those files alone are run. Other arguments go to every pytest. The exit code
is 1 if any of them failed. Stopped early, it says how far each came.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from .matrix import arch_of_the_gpu, jobs_of

ROOT = Path(__file__).parents[2]
CPU_CORES_A_GROUP = 2
MOST_OUTPUT = 20000  # characters that are shown of a group that failed, from its end
SECONDS_TO_STOP = 10  # for a pytest to say what failed, when all are stopped

# Those that take longest once their kernels are there come first. A number after the path is how
# many processes share the file. Files that are not named here follow, each on its own.
GROUPS = (
    ("tests/gpu/test_products.py", 6),
    ("tests/gpu/test_sanitizer.py", 3),
    ("tests/gpu/test_nn.py", 2),
    ("tests/gpu/test_torch_compile.py", 1),
    ("tests/gpu/test_gradients.py", 2),
    ("tests/gpu/test_handwritten_matmul.py", 1),
    ("tests/generated", 1),
    ("tests/gpu/test_clusters.py", 1),
    ("tests/gpu/test_examples.py", 1),
    ("tests/gpu/test_layouts.py", 1),
)
ALONE = ("tests/gpu/test_cache.py", "tests/gpu/test_devices.py", "tests/gpu/test_distributed.py",
         "tests/gpu/test_benchmarks.py")  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The tests of a file or a folder, or every `of`-th of them."""

    path: str
    part: int = 0
    of: int = 1

    @property
    def name(self) -> str:
        """How it is called in what is printed."""
        name = Path(self.path).stem.removeprefix("test_")
        return name if self.of == 1 else f"{name} {self.part + 1}/{self.of}"

    @property
    def modules(self) -> list[str]:
        """Its modules' names."""
        path = ROOT / self.path
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        return [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files if needs_gpu(f)]


@dataclass(frozen=True)
class Result:
    """What a pytest said."""

    group: Group
    code: int
    seconds: float
    output: str

    @property
    def is_right(self) -> bool:
        """Whether no test failed; a group may hold none that the arguments select."""
        return self.code in (0, 5)


def needs_gpu(file: Path) -> bool:
    """Whether a file holds tests for a GPU."""
    return "mark.gpu" in file.read_text(encoding="utf-8")


def last_line(text: str) -> str:
    """The last line that says something."""
    return (text.strip().splitlines() or ["no output"])[-1]


def groups() -> list[Group]:
    """All groups but those that run alone, the longest first."""
    named = [path for path, _ in GROUPS] + list(ALONE)
    files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if needs_gpu(f)]
    paths = [str(f.relative_to(ROOT)) for f in files]
    rest = [(p, 1) for p in paths if not any(p.startswith(name) for name in named)]
    return [Group(path, k, of) for path, of in (*GROUPS, *rest) for k in range(of)]


def gpus() -> list[str]:
    """What names each GPU that may be used; asked without using CUDA."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(k) for k, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


class Kernels:
    """What the groups need compiled, each kernel once, by a pool of workers."""

    def __init__(self, pool: ProcessPoolExecutor, arch: str) -> None:
        self.pool, self.arch, self.lock = pool, arch, threading.Lock()
        self.futures: dict[tuple, Future] = {}

    def compile(self, group: Group) -> None:
        """Compile what a group needs. A worker lists it, because that takes a part of a minute.

        What fails in a compilation fails in its test.
        """
        jobs = self.pool.submit(_jobs, group.modules, self.arch).result()
        with self.lock:
            for job in jobs:
                if job not in self.futures:
                    self.futures[job] = self.pool.submit(job[0], *job[1])
        wait([self.futures[job] for job in jobs])


def _jobs(modules: list[str], arch: str) -> list[tuple]:
    return jobs_of([importlib.import_module(name) for name in modules], arch)


class Run:
    """The groups' processes: which have ended and which have not."""

    def __init__(self, folder: str, arguments: list[str]) -> None:
        self.folder, self.arguments = Path(folder), arguments
        self.start = time.monotonic()
        self.under_way: dict[Group, tuple[subprocess.Popen, Path]] = {}

    def __call__(self, group: Group, gpu: str | None, kernels: Kernels | None = None) -> Result:
        """One pytest on one GPU, or on all for None, once its kernels are compiled."""
        if kernels is not None:
            kernels.compile(group)
        output = self.folder / f"{group.name.replace('/', ' of ')}.log"
        environ = {"OMP_NUM_THREADS": str(CPU_CORES_A_GROUP), **os.environ}
        if gpu is not None:
            environ["CUDA_VISIBLE_DEVICES"] = gpu
        part = [] if group.of == 1 else [f"--part={group.part}/{group.of}"]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *part]
        start = time.monotonic()
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, *self.arguments, group.path],
                cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,  # only `stop` interrupts it
            )  # fmt: skip
            self.under_way[group] = process, output
            process.wait()
        del self.under_way[group]
        text = output.read_text(errors="replace")
        result = Result(group, process.returncode, time.monotonic() - start, text)
        mark = "passed" if result.is_right else "FAILED"
        print(f"{mark} in {result.seconds:4.0f} s  {group.name}: {last_line(text)}", flush=True)
        if not result.is_right:
            print(text[-MOST_OUTPUT:], flush=True)
        return result

    def stop(self, *_) -> NoReturn:
        """End every pytest, which says what failed until then, and this process."""
        print(f"stopped after {time.monotonic() - self.start:.0f} s", flush=True)
        left = dict(self.under_way)
        for process, _output in left.values():
            process.send_signal(signal.SIGINT)
        for group, (process, output) in left.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_STOP)
            process.kill()
            text = output.read_text(errors="replace")
            print(f"not ended: {group.name}: {last_line(text)}", flush=True)
            if " failed" in last_line(text):
                print(text[-MOST_OUTPUT:], flush=True)
        for worker in multiprocessing.active_children():
            worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Run all groups, or those that are asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", add_help=False)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    options, arguments = parser.parse_known_args(arguments)

    def asked_for(found: list[Group]) -> list[Group]:
        return [g for g in found if options.only is None or Group(g.path).name in options.only]

    together, alone = groups(), [Group(path) for path in ALONE]
    known = sorted({Group(group.path).name for group in (*together, *alone)})
    if wrong := set(options.only or ()) - set(known):
        names = ", ".join(known)
        parser.error(f"no tests are called {', '.join(sorted(wrong))}; --only takes {names}")
    together, alone = asked_for(together), asked_for(alone)
    cores = os.cpu_count() or 1
    names = itertools.cycle(gpus() or ["0"])
    context = multiprocessing.get_context("fork")  # this process never uses CUDA
    with tempfile.TemporaryDirectory(prefix="htile-tests-") as folder:
        for variable in ("HTILE_TESTS_CACHE", "HTILE_CACHE_DIR"):
            os.environ[variable] = str(Path(folder, "cache"))
        os.environ["CUTE_DSL_DUMP_DIR"] = folder  # CuTe-DSL would write into the working folder
        run = Run(folder, arguments)
        # One torch thread a worker: torch's own threads do not survive a fork.
        with (
            ProcessPoolExecutor(cores, context, torch.set_num_threads, (1,)) as pool,
            ThreadPoolExecutor(max(1, cores // CPU_CORES_A_GROUP)) as threads,
        ):
            wait([pool.submit(time.sleep, 0.1) for _ in range(cores)])  # workers before threads
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, run.stop)
            kernels = Kernels(pool, arch_of_the_gpu())
            futures = [threads.submit(run, group, next(names), kernels) for group in together]
            results = [future.result() for future in futures]
        results += [run(group, None) for group in alone]
    wrong = [result for result in results if not result.is_right]
    took = time.monotonic() - run.start
    print(f"{len(results) - len(wrong)} of {len(results)} groups passed in {took:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
