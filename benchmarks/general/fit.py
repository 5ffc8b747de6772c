"""Fits the constants of the cost model to measured times of plans, and says how well it chooses.

    python -m benchmarks --suite regret --half fitting --json times.jsonl
    python -m benchmarks.general.fit times.jsonl

Only cells of the fitting half are fitted to. With `--judge` the choices of the cells that are left
are shown too: what the chosen plan takes, over what the fastest one takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean

import torch

from benchmarks.kernels import DTYPES
from benchmarks.results import Record, load
from htile.lower import enumerate_plans
from htile.lower.plan import Plan

from .cost import H200, Constants, Features, Rates, estimate, features
from .population import FITTING, FUNCTIONS, HALVES, JUDGING, half
from .summary import name, quantile

F64 = torch.float64
STEPS = 600
RATE = 0.02  # of a step, on the logarithm of each constant
SHARPNESS = 4.0  # how much more plans count that are nearly the fastest of their cell
NAMES = tuple(field.name for field in fields(Constants))


@dataclass(frozen=True)
class Cell:
    """The plans of one measured cell: their features, each a tensor, and their microseconds."""

    name: str
    features: Features
    us: torch.Tensor

    def expected(self, rates: Rates, constants: Constants) -> torch.Tensor:
        """The expected microseconds of every plan."""
        return estimate(self.features, rates, constants)[-1] / 1e3

    def regret(self, rates: Rates, constants: Constants) -> float:
        """The time of the plan that is expected to be the fastest, over that of the fastest one."""
        chosen = self.expected(rates, constants).argmin()
        return (self.us[chosen] / self.us.min()).item()


def cell_of(record: Record, rates: Rates) -> Cell | None:
    """The cell of a record of the suite regret; None where no plan of today was measured."""
    kernel = FUNCTIONS[record["kernel"]]
    args = kernel.arguments(record["m"], record["n"], DTYPES[record["dtype"]], "meta")
    found = kernel.function.inspect(*args)
    plans = enumerate_plans(found.graph, found.plan.target)
    today = {_key(plan.properties()): plan for plan in plans}
    pairs: list[tuple[Plan, float]] = []
    for entry in record["plans"]:
        properties = {key: value for key, value in entry.items() if key != "us"}
        if plan := today.get(_key(properties)):
            pairs.append((plan, entry["us"]))
    if not pairs:
        return None
    rows = [features(plan, record["m"], rates) for plan, _ in pairs]
    stacked = {
        field.name: torch.tensor([getattr(row, field.name) for row in rows], dtype=F64)
        for field in fields(Features)
    }
    us = torch.tensor([us for _, us in pairs], dtype=F64)
    return Cell(name(record), Features(**stacked), us)


def _key(properties: dict) -> tuple:
    return tuple(sorted((key, str(value)) for key, value in properties.items()))


def fit(cells: Sequence[Cell], rates: Rates, start: Constants = Constants()) -> Constants:  # noqa: B008
    """The constants whose expected times are closest to the measured ones.

    The error is that of the logarithm of a time. Plans that are nearly the fastest of their cell
    count more, and every cell counts the same. All constants are positive, so what is changed from
    step to step is their logarithm.
    """
    values = [getattr(start, key) for key in NAMES]
    logs = torch.tensor(values, dtype=F64).log().requires_grad_()
    optimizer = torch.optim.Adam([logs], lr=RATE)
    weights = [torch.softmax(-SHARPNESS * (c.us / c.us.min()).log(), 0) for c in cells]
    for _ in range(STEPS):
        constants = Constants(**dict(zip(NAMES, logs.exp(), strict=True)))
        errors = [
            (w * (c.expected(rates, constants) / c.us).log().abs()).sum()
            for c, w in zip(cells, weights, strict=True)
        ]
        loss = torch.stack(errors).mean()
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
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--judge", action="store_true", help="show the judging half too")
    options = parser.parse_args(arguments)
    records = [r for file in options.files for r in load(file) if r["suite"] == "regret"]
    of_half = {part: [] for part in HALVES}
    for record in records:
        if (part := half(record["kernel"])) == FITTING or options.judge:
            if found := cell_of(record, H200):
                of_half[part].append(found)
    constants = fit(of_half[FITTING], H200)
    for key in NAMES:
        print(f"    {key}: float = {getattr(constants, key):.4g}")
    print(shown("before", of_half[FITTING], H200, Constants()))
    print(shown("fitted", of_half[FITTING], H200, constants))
    if of_half[JUDGING]:
        print(shown("judged", of_half[JUDGING], H200, constants))


if __name__ == "__main__":
    main()
