"""Which plans of a kernel are fast on this GPU: many of them in one run, beside the limit kernel.

`python -m benchmarks.plans softmax --cells 4096x32768 64x32768` shows what the table of defaults in
`htile/lower/choice.py` is made from. Few rows are timed in a CUDA graph, many with a cold L2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import limit
from benchmarks.__main__ import cell
from benchmarks.contenders import Absent
from benchmarks.kernels import DTYPES, KERNELS, Kernel
from benchmarks.timing import captured, replays
from htile.lower import Lowered, enumerate_plans, printed
from htile.lower.compile import build, build_all, load
from htile.lower.plan import Plan
from htile.timing import Contenders, Times, interleave
from htile.tune import candidates

FEW_ROWS, CALLS = 1024, 20
SAME = 0.02  # of the largest magnitude, that results of two plans may differ by


def of(kernel: Kernel, m: int, n: int, dtype: torch.dtype, most: int) -> list[Lowered]:
    """The default plan and those closest to it, of different texts, at most so many. No GPU."""
    found = kernel.function.inspect(*kernel.arguments(m, n, dtype, "meta"))
    plans = enumerate_plans(found.graph, found.plan.target)
    traced = found.lowered.traced
    return [printed(traced, plan) for plan in candidates(plans, found.plan)[:most]]


def label(plan: Plan) -> str:
    """A plan in a few words."""
    num, place = plan.numerics, plan.placement
    kind = "streamed" if num.streamed else "in chunks" if num.reload else "in registers"
    rows = plan.rows_per_block
    return (
        f"cluster {num.cluster_n}, {num.threads_per_row} threads of {plan.elements_per_thread}, "
        f"{kind}{', pairs' if num.paired else ''}, {place.loader}, {place.columns} columns, "
        f"{rows} row{'s' if rows > 1 else ''} a CTA"
        f"{f', {place.rows_per_thread} a thread' if place.rows_per_thread > 1 else ''}"
    )


def launches(kernel: Kernel, lowered: list[Lowered], args: tuple) -> Contenders:
    """What launches each plan, by its label. Raises RuntimeError where two plans differ."""
    signature = kernel.function._signature
    values = dict(zip(signature.names, signature.bind(args, {}), strict=True))
    found: Contenders = {}
    expected = None
    for one in lowered:
        launch = load(build(one.source, one.function, one.plan.target.arch.name))
        given = [values[i.name] for i in one.graph.inputs]
        outs = [torch.empty((len(args[0]), *o.inner), dtype=o.dtype, device=args[0].device)
                for o in one.graph.outputs]  # fmt: skip
        launch(*given, *outs)
        expected = outs if expected is None else expected
        if not all(map(_agree, outs, expected)):
            raise RuntimeError(f"wrong: {label(one.plan)} is not what the default gives")
        found[label(one.plan)] = lambda call=launch, a=(*given, *expected): call(*a)
    return found


def _agree(out: torch.Tensor, expected: torch.Tensor) -> bool:
    scale = expected.float().abs().max()
    return bool((out.float() - expected.float()).abs().max() <= SAME * scale)


def timed(contenders: Contenders, rows: int, rounds: int) -> Times:
    """Microseconds of each: of few rows in a CUDA graph, of many with a cold L2."""
    if rows >= FEW_ROWS:
        return interleave(contenders, rounds)
    return replays({k: captured(call, CALLS) for k, call in contenders.items()}, rounds, CALLS)


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Time and show the fastest of each cell, the default marked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("kernel", choices=KERNELS, metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--cells", nargs="+", type=cell, metavar="MxN", default=[(4096, 32768)])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--most", type=int, default=40, help="plans of a cell that are tried")
    parser.add_argument("--best", type=int, default=9, help="plans of a cell that are shown")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    kernel, dtype = KERNELS[options.kernel], DTYPES[options.dtype]
    found = {(m, n): of(kernel, m, n, dtype, options.most) for m, n in options.cells}
    every = [one for lowered in found.values() for one in lowered]
    build_all([(one.source, one.function, one.plan.target.arch.name) for one in every])
    for (m, n), lowered in found.items():
        args = kernel.arguments(m, n, dtype, "cuda")
        contenders = launches(kernel, lowered, args)
        try:
            contenders["limit"] = limit.fastest(limit.candidates(kernel, args), interleave).call
        except Absent as reason:
            say(f"no limit: {reason}")
        times = {name: median(t) for name, t in timed(contenders, m, options.rounds).items()}
        say(f"{kernel.name} {m}x{n} {options.dtype}, {len(lowered)} plans, µs")
        default = label(lowered[0].plan)
        fastest = sorted(times, key=times.get)
        shown = fastest[: options.best]
        for name in shown + [x for x in ("limit", default) if x in times and x not in shown]:
            ratio = f"  {times['limit'] / times[name]:.3f}" if "limit" in times else ""
            say(f"{times[name]:10.2f}{ratio}  {name}{'  (default)' if name == default else ''}")


if __name__ == "__main__":
    main()
