"""What came of the suites `general` and `regret`: one table of each, the halves apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from rich.table import Table

from benchmarks.results import Record
from htile.tune.statistics import paired

from .population import FEW_ROWS, HALVES, LEAST_BYTES, half

SUITES = ("general", "regret")
WORST = 10  # cells that are named
GROUPS: dict[str, Callable[[Record], bool]] = {
    "bf16, multiples of 8, many rows": lambda r: r["dtype"] == "bf16" and is_large(r) and even(r),
    "fp16, multiples of 8, many rows": lambda r: r["dtype"] == "fp16" and is_large(r) and even(r),
    "fp32, multiples of 8, many rows": lambda r: r["dtype"] == "fp32" and is_large(r) and even(r),
    "odd lengths, many rows": lambda r: is_large(r) and not even(r),
    "few rows": lambda r: not is_large(r),
}


def is_large(r: Record) -> bool:
    """Whether a record's rows are many and its tensors do not fit the L2."""
    return r["m"] not in FEW_ROWS and r["bytes"] >= LEAST_BYTES


def even(r: Record) -> bool:
    """Whether the rows of a record are whole 16-byte pieces, of any dtype."""
    return r["n"] % 8 == 0


def ratio(r: Record, of: str, to: str) -> float | None:
    """The median of `of`'s times over `to`'s, paired by round; None where one is missing."""
    times = [r["contenders"].get(name, {}).get("times") for name in (of, to)]
    return paired(*times).median if all(times) else None


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them is not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def name(r: Record) -> str:
    """`softmax bf16 4096x32768`"""
    return f"{r['kernel']} {r['dtype']} {r['m']}x{r['n']}"


def tables(records: list[Record]) -> list[Table]:
    """The tables of these suites that there are records of."""
    found = []
    for suite, make in (("general", _general), ("regret", _regret)):
        if rows := [r for r in records if r["suite"] == suite]:
            found.append(make(rows))
    return found


def _general(records: list[Record]) -> Table:
    table = Table(title="general: the default plan's share of the limit")
    for column in ("half", "cells", "number", "mean", "5 %", "least", "torch.compile is faster in"):
        table.add_column(column, justify="right" if column not in ("half", "cells") else "left")
    lines = []
    for part in HALVES:
        ours = [r for r in records if half(r["kernel"]) == part]
        for group, belongs in GROUPS.items():
            shares = {}
            beside = []
            for r in filter(belongs, ours):
                if (share := ratio(r, "limit", "htile")) is not None:
                    shares[name(r)] = share
                if (other := ratio(r, "htile", "compile")) is not None:
                    beside.append(other)
            if not shares:
                continue
            values = list(shares.values())
            table.add_row(
                part, group, str(len(values)), f"{mean(values):.3f}",
                f"{quantile(values, 0.05):.3f}", f"{min(values):.3f}", _losses(beside),
            )  # fmt: skip
            worst = sorted(shares, key=shares.get)[:WORST]
            lines.append(f"{part}, {group}: " + "; ".join(f"{n} {shares[n]:.3f}" for n in worst))
    table.caption = "\n".join([*lines, *_failures(records)])
    table.caption_justify = "left"
    return table


def _losses(beside: list[float]) -> str:
    """In how many cells torch.compile is faster, and by how much at most."""
    lost = [r for r in beside if r > 1]
    most = f", by up to {100 * (max(lost) - 1):.0f} %" if lost else ""
    return f"{len(lost)} of {len(beside)}{most}"


def _regret(records: list[Record]) -> Table:
    table = Table(title="regret: the default plan's time over that of the fastest plan")
    for column in ("half", "cells", "number", "mean", "95 %", "most", "plans a cell"):
        table.add_column(column, justify="right" if column not in ("half", "cells") else "left")
    lines = []
    for part in HALVES:
        ours = [r for r in records if half(r["kernel"]) == part]
        for group, belongs in GROUPS.items():
            found = {name(r): (ratio(r, "default", "best"), r) for r in filter(belongs, ours)}
            found = {n: pair for n, pair in found.items() if pair[0] is not None}
            if not found:
                continue
            values = [max(value, 1.0) for value, _ in found.values()]
            plans = [len(r["plans"]) for _, r in found.values()]
            table.add_row(
                part, group, str(len(values)), f"{mean(values):.3f}",
                f"{quantile(values, 0.95):.3f}", f"{max(values):.3f}", f"{median(plans):.0f}",
            )  # fmt: skip
            worst = sorted(found, key=lambda n: -found[n][0])[:WORST]
            lines.append(f"{part}, {group}: " + "; ".join(f"{n} {found[n][0]:.3f}" for n in worst))
    table.caption = "\n".join([*lines, *_failures(records)])
    table.caption_justify = "left"
    return table


def _failures(records: list[Record]) -> list[str]:
    """Why contenders were not measured, a line each."""
    return [
        f"{who} failed in {name(r)}: {found['error']}"
        for r in records
        for who, found in r["contenders"].items()
        if "error" in found
    ]
