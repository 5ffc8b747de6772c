"""Fits the constants of the cost model to measured times of plans, and says how well it chooses.

    python -m benchmarks.general.fit

Without files it fits to `times-h200.jsonl.xz`. It has what these commands have written, and what an
earlier form of the second one has, which drew other lengths:

    python -m benchmarks --suite regret --half fitting --each 2 --most 60 --json times.jsonl
    python -m benchmarks.general.measure more.jsonl

Both files have times of `f67` from 2026-12-01, because `%` of floats takes another device function
since. They were measured with the plans of the older records.

The constants are not fitted to `times-h200-odd.jsonl.xz`, which `measure --odd` has written on
2026-11-25, without plans that a defect slowed down. With both files 892 cells have a regret of
1.046, and of 1.043 if the constants are fitted to both.

Only cells of the fitting half are fitted to. With `--judge` the choices of the cells that are left
are shown too: what the chosen plan takes, over what the fastest one takes.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import torch

from benchmarks.kernels import DTYPES, KERNELS
from benchmarks.results import Record, load
from htile.lower import enumerate_plans
from htile.lower.choice.cost import CONSTANTS, H200, Constants, Features, Rates, estimate, features
from htile.lower.plan import Plan

from .population import FITTING, FUNCTIONS, HALVES, JUDGING, half
from .summary import name, quantile

F64 = torch.float64
TIMES = Path(__file__).with_name("times-h200.jsonl.xz")
STEPS = 600
RATE = 0.02  # of a step, on the logarithm of each constant
# A plan is chosen with a probability that falls by a factor of e for each 1 / SHARPNESS that it is
# expected to take longer. What is minimized is the logarithm of the chosen plan's time.
SHARPNESS = 25.0
FASTER = 1.5  # how much more the error of a faster plan counts, as a power of its speed
ERRORS = 0.15  # how much errors of the expected times count, beside what is chosen
SHARED = 0.5  # of an error that all plans of a cell share, so much counts as none
PRIOR = 0.01  # how much the distance of the constants from where they start counts
# Where the fit starts: what data sheets and microbenchmarks of others say, and guesses.
START = Constants(
    launch=900.0, memory=700.0, cache=300.0, start=300.0, clustered=200.0, warp=60.0,
    block=150.0, cluster=900.0, iteration=20.0, latency=1.5, spacing=100.0,
    spacing_clustered=50.0, elements=1.0, code=0.02, moved=1.5, access=4.0, thread=60.0,
    exchange=40.0, spilled=2.0, lines_read=1.0, lines_written=1.0, lines_shared=1.0, columns=0.3,
    hits=0.5, single=60.0, together=0.7, overlap=0.8, tail=1.0, blend=4.0,
)  # fmt: skip
NAMES = Constants._fields


@dataclass(frozen=True)
class Cell:
    """The plans of one measured cell: their features, each a tensor, and their microseconds."""

    name: str
    features: Features
    us: torch.Tensor

    def expected(self, rates: Rates, constants: Constants) -> torch.Tensor:
        """The expected microseconds of every plan."""
        return estimated(self.features, rates, constants) / 1e3

    def regret(self, rates: Rates, constants: Constants) -> float:
        """The time of the plan that is expected to be the fastest, over that of the fastest one."""
        chosen = self.expected(rates, constants).argmin()
        return (self.us[chosen] / self.us.min()).item()


def estimated(found: Features, rates: Rates, constants: Constants) -> torch.Tensor:
    """The expected nanoseconds of plans whose features are tensors."""

    def larger(a, b):
        return (a + b + abs(a - b)) / 2

    def smaller(a, b):
        return (a + b - abs(a - b)) / 2

    return estimate(found, rates, constants, larger, smaller)[-1]


def cell_of(record: Record, rates: Rates) -> Cell | None:
    """The cell of a record of the suite regret; None where no plan of today was measured."""
    kernel = (KERNELS | FUNCTIONS)[record["kernel"]]
    args = kernel.arguments(record["m"], record["n"], DTYPES[record["dtype"]], "meta")
    found = kernel.function.inspect(*args)
    plans = enumerate_plans(found.graph, found.plan.target)
    today = {_key(plan.properties()): plan for plan in map(in_cluster, plans)}
    pairs: list[tuple[Plan, float]] = []
    for entry in record["plans"]:
        if plan := today.get(_key(properties_of(entry))):
            pairs.append((plan, entry["us"]))
    if not pairs:
        return None
    rows = [features(plan, record["m"], rates) for plan, _ in pairs]
    stacked = [torch.tensor(column, dtype=F64) for column in zip(*rows, strict=True)]
    us = torch.tensor([us for _, us in pairs], dtype=F64)
    return Cell(name(record), Features(*stacked), us)


def properties_of(entry: dict) -> dict:
    """The properties of a plan that was measured.

    Records do not say what no plan had at the time: shifted rows, groups, CTAs that start apart.
    """
    known = {"shifted": False, "groups": 0, "apart": False}
    return known | {k: v for k, v in entry.items() if k != "us"}


def in_cluster(plan: Plan) -> Plan:
    """The same plan as it was measured, where today its CTAs start apart."""
    return replace(plan, placement=replace(plan.placement, apart=False))


def half_of(record: Record) -> str:
    """The half of a record. The known kernels are in that of their length."""
    return half(record["n"] if record["kernel"] in KERNELS else record["kernel"])


def records_of(file: Path) -> list[Record]:
    """The records of a file, which xz may have compressed."""
    if file.suffix != ".xz":
        return load(file)
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _key(properties: dict) -> tuple:
    return tuple(sorted((key, str(value)) for key, value in properties.items()))


def fit(cells: Sequence[Cell], rates: Rates, start: Constants = START) -> Constants:
    """The constants with which the model chooses the fastest plans, and expects their times.

    Every cell counts the same. All constants are positive, so what is changed from step to step is
    their logarithm.
    """
    of_cell = torch.cat([torch.full((len(c.us),), k) for k, c in enumerate(cells)])
    every = Features(*map(torch.cat, zip(*(c.features for c in cells), strict=True)))
    us = torch.cat([c.us for c in cells]).log()
    behind = torch.cat([(c.us / c.us.min()).log() for c in cells])

    def sums(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(cells), dtype=F64).index_add(0, of_cell, values)

    weights = (-FASTER * behind).exp()
    weights = weights / sums(weights)[of_cell]
    first = torch.tensor([getattr(start, key) for key in NAMES], dtype=F64).log()
    logs = first.clone().requires_grad_()
    optimizer = torch.optim.Adam([logs], lr=RATE)
    for _ in range(STEPS):
        constants = Constants(**dict(zip(NAMES, logs.exp(), strict=True)))
        expected = (estimated(every, rates, constants) / 1e3).log()
        least = torch.stack([part.min() for part in expected.split([len(c.us) for c in cells])])
        chances = (-SHARPNESS * (expected - least[of_cell])).exp()
        chosen = sums(chances * behind) / sums(chances)
        error = expected - us
        error = error - SHARED * sums(weights * error)[of_cell]
        loss = (chosen + ERRORS * sums(weights * error.abs())).mean()
        loss = loss + PRIOR * (logs - first).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Constants(**dict(zip(NAMES, logs.detach().exp().tolist(), strict=True)))


def shown(title: str, cells: Sequence[Cell], rates: Rates, constants: Constants) -> str:
    """A line of how well these constants choose, and the worst cells."""
    regrets = {c.name: c.regret(rates, constants) for c in cells}
    worst = sorted(regrets, key=lambda key: -regrets[key])[:8]
    values = list(regrets.values())
    return (
        f"{title}: {len(cells)} cells, regret {geometric_mean(values):.3f} in the mean, "
        f"95 of 100 at most {quantile(values, 0.95):.3f}, most {max(values):.3f}\n  "
        + "\n  ".join(f"{regrets[key]:.3f} {key}" for key in worst)
    )


def main(arguments: list[str] | None = None) -> None:
    """Fit, and print the constants and how well they choose."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.general.fit", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", default=[TIMES])
    parser.add_argument("--judge", action="store_true", help="show the judging half too")
    options = parser.parse_args(arguments)
    records = [r for file in options.files for r in records_of(file) if r["suite"] == "regret"]
    of_half = {part: [] for part in HALVES}
    for record in records:
        if (part := half_of(record)) == FITTING or options.judge:
            if found := cell_of(record, H200):
                of_half[part].append(found)
    constants = fit(of_half[FITTING], H200)
    for key in NAMES:
        print(f"    {key}={getattr(constants, key):.3g},")
    print(shown("before", of_half[FITTING], H200, CONSTANTS))
    print(shown("fitted", of_half[FITTING], H200, constants))
    if of_half[JUDGING]:
        print(shown("judged", of_half[JUDGING], H200, constants))


if __name__ == "__main__":
    main()
