"""Which plans of a kernel are fast on this GPU: many of them in one run, beside the limit kernel.

`python -m benchmarks.plans softmax --cells 4096x32768 64x32768` shows what the table in
`htile/lower/choice/preference.py` is made from. Few rows are timed in a CUDA graph, many with a
cold L2.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import few_rows, limit, throughput
from benchmarks.cell import size
from benchmarks.check import Sample
from benchmarks.contenders import inputs
from benchmarks.kernels import DTYPES, KERNELS, Kernel
from htile.build.compile import build, build_all, load
from htile.lower import Lowered, enumerate_plans, printed
from htile.lower.plan import Plan
from htile.tune.search import candidates
from htile.tune.timing import interleave

FEW_ROWS = 1024  # from there on they fill the GPU


def of(kernel: Kernel, m: int, n: int, dtype: torch.dtype, most: int) -> list[Lowered]:
    """The default and the best by expected time, at most so many of different texts. No GPU."""
    found = kernel.function.inspect(*kernel.arguments(m, n, dtype, "meta"))
    plans = enumerate_plans(found.graph, found.plan.target)
    lower = functools.partial(printed, found.lowered.traced)
    return candidates(plans, found.plan, m, lower)[:most]


def label(plan: Plan) -> str:
    """A plan in a few words."""
    num, place = plan.numerics, plan.placement
    rows = plan.rows_per_block
    return (
        f"cluster {num.cluster_n}, {num.threads_per_row} threads of {plan.elements_per_thread}, "
        f"{num.form.value}{''.join(f', {name} at once' for name in num.joint)}, "
        f"{place.loader}, {place.columns} columns, "
        f"{rows} row{'s' if rows > 1 else ''} a CTA"
        f"{f', {place.shares} shares' if place.shares > 1 else ''}"
        f"{f', {plan.placement.abreast} at a time' if plan.placement.abreast > 1 else ''}"
    )


def launches(
    kernel: Kernel, lowered: list[Lowered], args: tuple
) -> list[Callable[[], object]]:
    """What launches each plan, in their order. Raises RuntimeError where one is wrong."""
    sample = Sample(kernel, args)
    given = inputs(kernel, lowered[0].graph, args)
    outs = [torch.empty_like(t, device=args[0].device) for t in kernel.results(args)]
    found = []
    for one in lowered:
        launch = load(build(*request(one)))
        found.append(functools.partial(launch, *given, *outs))
        found[-1]()
        sample.check(outs, kernel.tolerance)
    return found


def request(one: Lowered) -> tuple[str, str, str]:
    """What `build` compiles a plan from."""
    return one.source, one.function, one.plan.target.arch.name


def timed(lowered: list[Lowered], us: dict[int, float]) -> list[dict]:
    """The plans with their microseconds, by place in the list, as records keep them."""
    return [{"us": round(us[k], 3), **one.plan.properties()} for k, one in enumerate(lowered)]


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Time and show the fastest of each cell, the default marked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("kernel", choices=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--cells", nargs="+", type=size, metavar="MxN", default=[(4096, 32768)])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--most", type=int, default=40, help="plans of a cell that are tried")
    parser.add_argument("--best", type=int, default=9, help="plans of a cell that are shown")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    kernel, dtype = KERNELS[options.kernel], DTYPES[options.dtype]
    found = {(m, n): of(kernel, m, n, dtype, options.most) for m, n in options.cells}
    every = [one for lowered in found.values() for one in lowered]
    build_all(map(request, every))
    for (m, n), lowered in found.items():
        args = kernel.arguments(m, n, dtype, "cuda")
        labels = [label(one.plan) for one in lowered]
        contenders = dict(zip(labels, launches(kernel, lowered, args), strict=True))
        contenders["limit"] = limit.fastest(limit.candidates(kernel, args), interleave).call
        method = few_rows.METHOD if m < FEW_ROWS else throughput.METHOD
        times = method.at_once(contenders, options.rounds)
        times = {name: median(each) for name, each in times.items()}
        say(f"{kernel.name} {m}x{n} {options.dtype}, {len(lowered)} plans, µs")
        default = label(lowered[0].plan)
        fastest = sorted(times, key=times.get)
        shown = fastest[: options.best]
        for name in shown + [x for x in ("limit", default) if x not in shown]:
            ratio = times["limit"] / times[name]
            say(f"{times[name]:10.2f}  {ratio:.3f}  {name}{'  (default)' * (name == default)}")


if __name__ == "__main__":
    main()
