"""Measure HTile beside quack, Liger, torch.compile, torch and a kernel that only moves the bytes.

All contenders of a cell run in one process, interleaved launch by launch, each checked first. The
figures go to a file of JSON lines as they come, to a table and to a plot.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import compile_time, few_rows, host, pipeline, report, startup, throughput
from benchmarks.cell import size
from benchmarks.contenders import NAMES, PARTS
from benchmarks.general import regret, suite
from benchmarks.general import summary as general
from benchmarks.general.population import FUNCTIONS, HALVES
from benchmarks.kernels import DTYPES, KERNELS
from benchmarks.results import Job, append, is_done, load, ratio

SUITES = {
    "throughput": throughput.jobs,
    "few_rows": few_rows.jobs,
    "host": host.jobs,
    "startup": startup.jobs,
    "compile_time": compile_time.jobs,
    "general": suite.jobs,
    "regret": regret.jobs,
}
NEEDS_GPU = ("throughput", "few_rows", "host", "startup", "general", "regret")
PREPARE = {"general": suite.prepare, "regret": regret.prepare}  # in parallel, before the jobs
ASKED_FOR = general.SUITES  # They run only where they are named, because they take long.
EPILOG = """\
suites:
  pipeline      trace, plan, emit and compile times of HTile alone, with their bounds; no GPU
  throughput    GB/s of large tensors, cold L2
  few_rows      1 to 256 rows: the GPU's time of a call in a CUDA graph
  host          the host's time of a call, and of its parts
  startup       import and first call in fresh processes, cold and warm caches
  compile_time  the first call over N, and over the number of operations
  general       row functions and lengths that nothing was fitted to, and as many that were
  regret        the default plan of those beside the fastest of all plans

torch.compile (contenders compile, autotune) takes seconds a cell: without --contenders it is in six
and three cells a kernel of throughput, and in host, startup and compile_time. handwritten and
layernorm_fp32_columns take part where they are named. So do the suites general and regret, which
choose cells by --half, --each and --functions instead of --kernels, --cells and --dtype.

  python -m benchmarks --suite throughput --kernels softmax --seconds 120 --plot softmax.png
  python -m benchmarks --suite general --half judging --each 2
  python -m benchmarks --resume            go on where the last run stopped
  python -m benchmarks.report FILE...      tables and plot of files that are there
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    suites = ("pipeline", *SUITES)
    usual = [name for name in suites if name not in ASKED_FOR]
    add("--suite", nargs="+", choices=suites, default=usual, metavar="SUITE",
        help=f"which of those below (all but {' and '.join(ASKED_FOR)})")  # fmt: skip
    add("--kernels", nargs="+", choices=tuple(KERNELS), metavar="KERNEL",
        help=f"of {', '.join(KERNELS)} (each suite's own)")  # fmt: skip
    add("--cells", nargs="+", type=size, metavar="MxN", help="sizes (each suite's own)")
    add("--dtype", nargs="+", choices=tuple(DTYPES), default=["bf16", "fp32"], metavar="DTYPE",
        help=f"of {', '.join(DTYPES)} (bf16 fp32)")  # fmt: skip
    add("--contenders", nargs="+", choices=NAMES, metavar="NAME",
        help=f"of {', '.join(NAMES)}, in every cell (each suite's own)")  # fmt: skip
    add("--half", nargs="+", choices=HALVES, default=list(HALVES), metavar="HALF",
        help=f"of functions and lengths, there: {', '.join(HALVES)} (both)")  # fmt: skip
    add("--each", type=positive, default=1, metavar="K", help="cells of each function there (1)")
    add("--functions", nargs="+", choices=tuple(FUNCTIONS), metavar="NAME",
        help="only cells of these functions there (all)")  # fmt: skip
    add("--most", type=positive, default=40, metavar="P", help="plans of a cell in regret (40)")
    add("--workers", type=positive, default=os.cpu_count(), metavar="W",
        help="processes that compile for general and regret (as many as cores)")  # fmt: skip
    add("--rounds", type=positive, metavar="R", help="launches, or processes, of each contender")
    add("--seconds", type=float, metavar="S", help="begin no cell after so many seconds")
    add("--json", type=Path, default=Path("bench-out/results.jsonl"), metavar="FILE",
        help="results, one cell a line (%(default)s); what it had moves to FILE.old")  # fmt: skip
    add("--resume", action="store_true", help="keep what the file has and skip those cells")
    add("--plot", type=Path, metavar="FILE", help="draw GB/s over N here (.png, .svg, .pdf)")
    return made


def positive(text: str) -> int:
    """A number of rounds."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds")
    return int(text)


def run(jobs: list[Job], options, console: Console) -> list[dict]:
    """Measure the jobs and write each one's records as it is done; returns all that the file has.

    Stops beginning jobs once the seconds are over.
    """
    if options.json.exists() and not options.resume:
        options.json.replace(f"{options.json}.old")
    records = load(options.json)
    left = [job for job in jobs if not is_done(job, records)]
    if len(left) < len(jobs):
        console.print(f"{options.json} has {len(jobs) - len(left)} of {len(jobs)} already")
    begun = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(left))
        for count, job in enumerate(left):
            if options.seconds is not None and time.monotonic() - begun > options.seconds:
                rest = len(left) - count
                console.print(f"{options.seconds:.0f} s are over: {rest} left for --resume")
                break
            say = lambda text, title=job.title: progress.update(  # noqa: E731
                task, description=f"{title}: {text}"
            )
            start = time.monotonic()
            found = job.run(say)
            append(options.json, found)
            took = time.monotonic() - start
            console.print(f"{job.title}: {summary(found)} ({took:.1f} s)", highlight=False)
            progress.advance(task)
    return load(options.json)


def summary(records: list[dict]) -> str:
    """A line for a job that is done."""
    shown = []
    for record in records:
        if record["suite"] == "regret" and (found := ratio(record, "best", "default")):
            return f"{found.median:.3f} times that of the fastest of {len(record['plans'])} plans"
        texts = [f"{n} {report.cell_text(record, n)}" for n in report.ordered([record])]
        if bound := report.allowed_text(record):
            texts.append(f"{' + '.join(PARTS)} + {report.ALLOWED} {bound}")
        label = f"{record['case'] or record['n']}: " if len(records) > 1 else ""
        shown.append(label + ", ".join(texts))
    return "; ".join(shown)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 where htile is wrong or the pipeline over a bound."""
    options = parser().parse_args(arguments)
    console = report.wide(Console())
    status = 0
    if "pipeline" in options.suite:
        status = pipeline.main()
    on_gpu = torch.cuda.is_available()
    suites = [s for s in SUITES if s in options.suite and (on_gpu or s not in NEEDS_GPU)]
    skipped = [s for s in SUITES if s in options.suite and s not in suites]
    if skipped:
        print(f"No GPU: {', '.join(skipped)} not measured", file=sys.stderr)
    jobs = [job for name in suites for job in SUITES[name](options)]
    if not jobs:
        return status
    for name in suites:
        if name in PREPARE:
            console.print(f"{name}: compiling")
            PREPARE[name](options)
    records = run(jobs, options, console)
    report.show(records, console, options.plot)
    console.print(f"results: {options.json}")
    return int(status or any(wrong(record) for record in records))


def wrong(record: dict) -> bool:
    """Whether htile's result was not what it must be."""
    return record["contenders"].get("htile", {}).get("error", "").startswith("wrong")


if __name__ == "__main__":
    sys.exit(main())
