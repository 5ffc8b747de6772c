"""What came of the suites `general` and `regret`: one table of each, the halves apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from statistics import geometric_mean, median

from rich.table import Table

from benchmarks.results import Record, ratio

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


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them is not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def name(r: Record) -> str:
    """`softmax bf16 4096x32768`"""
    return f"{r['kernel']} {r['dtype']} {r['m']}x{r['n']}"


def tables(records: list[Record]) -> list[Table]:
    """The tables of these suites that there are records of."""
    of_suite = {suite: [r for r in records if r["suite"] == suite] for suite in SUITES}
    made = []
    if rows := of_suite["general"]:
        title = "general: the default plan's share of the limit"
        columns = ("mean", "5 %", "least", "torch.compile is faster in")
        made.append(_table(title, columns, rows, ("htile", "limit"), _shares))
    if rows := of_suite["regret"]:
        title = "regret: the default plan's time over that of the fastest plan"
        columns = ("mean", "95 %", "most", "plans a cell")
        made.append(_table(title, columns, rows, ("best", "default"), _regrets))
    return made


def _table(
    title: str, columns: tuple[str, ...], records: list[Record], pair: tuple[str, str],
    figures: Callable[[list[float], list[Record]], tuple],
) -> Table:  # fmt: skip
    """A table with a row for each half and group: the ratios of `pair`, and figures of them.

    Its caption names the worst cells.
    """
    table = Table(title=title)
    for column in ("half", "cells", "number", *columns):
        table.add_column(column, justify="left" if column in ("half", "cells") else "right")
    lines = []
    for part, (group, belongs) in product(HALVES, GROUPS.items()):
        found = {
            name(r): (value.median, r)
            for r in records
            if half(r["kernel"]) == part and belongs(r) and (value := ratio(r, *pair))
        }
        if not found:
            continue
        values = {key: value for key, (value, _) in found.items()}
        shown = figures(list(values.values()), [r for _, r in found.values()])
        table.add_row(part, group, str(len(values)), *shown)
        # A share of the limit is bad if it is small, and a regret if it is large.
        worst = sorted(values, key=values.get, reverse=figures is _regrets)[:WORST]
        lines.append(f"{part}, {group}: " + "; ".join(f"{key} {values[key]:.3f}" for key in worst))
    table.caption = "\n".join([*lines, *_failures(records)])
    table.caption_justify = "left"
    return table


def _shares(values: list[float], records: list[Record]) -> tuple[str, ...]:
    """The mean, the share that 95 of 100 reach, the least, and where torch.compile is faster."""
    beside = [found.median for r in records if (found := ratio(r, "compile", "htile"))]
    lost = [value for value in beside if value > 1]
    most = f", by up to {100 * (max(lost) - 1):.0f} %" if lost else ""
    return (
        f"{geometric_mean(values):.3f}", f"{quantile(values, 0.05):.3f}", f"{min(values):.3f}",
        f"{len(lost)} of {len(beside)}{most}",
    )  # fmt: skip


def _regrets(values: list[float], records: list[Record]) -> tuple[str, ...]:
    """The mean, what 95 of 100 do not exceed, the most, and how many plans were timed."""
    values = [max(value, 1.0) for value in values]  # a default that was timed again may win
    return (
        f"{geometric_mean(values):.3f}", f"{quantile(values, 0.95):.3f}", f"{max(values):.3f}",
        f"{median(len(r['plans']) for r in records):.0f}",
    )  # fmt: skip


def _failures(records: list[Record]) -> list[str]:
    """Why contenders were not measured, a line each."""
    return [
        f"{who} failed in {name(r)}: {found['error']}"
        for r in records
        for who, found in r["contenders"].items()
        if "error" in found
    ]
