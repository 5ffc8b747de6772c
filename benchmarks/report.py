"""Results as a table in the terminal and as a plot: bandwidth over N against the limit.

    python -m benchmarks.report FILE... [--plot FILE]

Several files are read as one; of a cell that is in more than one, the last counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import NAMES, PARTS, WHAT
from benchmarks.results import Record, identity, load
from htile.tune.statistics import Estimate, estimate, paired

ALLOWED = 1.0  # µs of the host that a call may take beside its parts
UNITS = {"us": (1.0, "µs"), "s": (1e3, "ms")}  # a record's unit: factor and name of the table's
COLORS = {
    "htile": "tab:red",
    "bare": "tab:olive",
    "empty_like": "tab:cyan",
    "handwritten": "tab:pink",
    "quack": "tab:blue",
    "liger": "tab:green",
    "compile": "tab:orange",
    "autotune": "tab:brown",
    "eager": "tab:gray",
    "limit": "black",
}


def bandwidth(record: Record, name: str) -> Estimate | None:
    """GB/s of a contender, or None where it has no times."""
    times = record["contenders"].get(name, {}).get("times")
    return estimate(times).map(lambda us: record["bytes"] / us / 1e3) if times else None


def ratio(record: Record, name: str, to: str) -> Estimate | None:
    """How many times as fast as `to` a contender is, paired by round; None where one is missing."""
    times = [record["contenders"].get(n, {}).get("times") for n in (to, name)]
    if not all(times) or len(times[0]) != len(times[1]):
        return None
    return paired(*times)


def best_other(record: Record) -> str | None:
    """The fastest contender that is neither ours nor the limit."""
    medians = {
        name: estimate(found["times"]).median
        for name, found in record["contenders"].items()
        if found.get("times") and name not in ("htile", "handwritten", "limit", *PARTS)
    }
    return min(medians, key=medians.get) if medians else None


def allowed(record: Record) -> Estimate | None:
    """The bound on the host's time: compiled function, allocation and ALLOWED, paired by round."""
    parts = [record["contenders"].get(name, {}).get("times") for name in PARTS]
    if record["suite"] != "host" or not all(parts):
        return None
    return estimate([sum(times) + ALLOWED for times in zip(*parts, strict=True)])


def ordered(records: Iterable[Record]) -> list[str]:
    """The contenders of all records, as NAMES has them."""
    present = {name for record in records for name in record["contenders"]}
    return [name for name in NAMES if name in present]


def cell_text(record: Record, name: str) -> str:
    """What the table shows of a contender: median and half the interval, or what hindered it."""
    found = record["contenders"].get(name)
    if found is None:
        return ""
    if "error" in found:
        return hindrance(found["error"])
    if record["suite"] == "throughput":
        speed = bandwidth(record, name)
        return f"{speed.median:.0f} ±{speed.spread:.0f}"
    factor, _ = UNITS[record["unit"]]
    took = estimate(found["times"]).map(lambda t: t * factor)
    digits = 2 if took.median < 100 else 0
    return f"{took.median:.{digits}f} ±{took.spread:.{digits}f}"


def allowed_text(record: Record) -> str:
    """What the table shows of the bound."""
    bound = allowed(record)
    return "" if bound is None else f"{bound.median:.2f} ±{bound.spread:.2f}"


def hindrance(error: str) -> str:
    """A word for a reason; the table's footnotes have it whole."""
    for start in ("not installed", "wrong"):
        if error.startswith(start):
            return start
    return "no kernel" if "has no such kernel" in error else "failed"


def ratio_text(found: Estimate | None) -> str:
    """A ratio with its interval."""
    return "" if found is None else f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"


def tables(records: list[Record]) -> list[Table]:
    """One table a suite, its footnotes the reasons of what was not measured."""
    made = []
    for suite in dict.fromkeys(r["suite"] for r in records):
        rows = [r for r in records if r["suite"] == suite]
        names = ordered(rows)
        unit = "GB/s" if suite == "throughput" else UNITS[rows[0]["unit"]][1]
        devices = ", ".join(dict.fromkeys(r["device"] for r in rows))
        table = Table(title=f"{suite}: {unit}, median ± half the 95 % interval; {devices}")
        for column in ("kernel", "dtype", "cell"):
            table.add_column(column, no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        if suite == "host":
            table.add_column(f"{' + '.join(PARTS)} + {ALLOWED}", justify="right")
        table.add_column("htile / limit", overflow="fold")
        table.add_column("htile / best other", overflow="fold")
        for row in rows:
            cell = row["case"] or f"{row['m']}x{row['n']}"
            other = best_other(row)
            beside = ratio(row, "htile", other) if other else None
            table.add_row(
                row["kernel"],
                row["dtype"],
                cell,
                *(cell_text(row, name) for name in names),
                *([allowed_text(row)] if suite == "host" else []),
                ratio_text(ratio(row, "htile", "limit")),
                f"{ratio_text(beside)} {other}" if beside else "",
            )
        lines = [*notes(rows), *(f"{n}: {WHAT[n]}" for n in names)]
        table.caption = escape("\n".join(lines))
        table.caption_justify = "left"
        made.append(table)
    return made


def notes(records: list[Record]) -> list[str]:
    """Why contenders were not measured, once a reason, with the cells where there are few."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in records:
        for name, found in r["contenders"].items():
            if "error" in found:
                cell = f"{r['kernel']} {r['dtype']} {r['case'] or '{}x{}'.format(r['m'], r['n'])}"
                reasons.setdefault((name, found["error"]), []).append(cell)
    return [
        f"{name}: {error} ({', '.join(cells) if len(cells) < 4 else f'{len(cells)} cells'})"
        for (name, error), cells in reasons.items()
    ]


def plot(records: list[Record], path: Path) -> bool:
    """Draw bandwidth over N, a panel a kernel and dtype; False where no record has bandwidth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [r for r in records if r["suite"] == "throughput"]
    panels = list(dict.fromkeys((r["kernel"], r["dtype"]) for r in records))
    if not panels:
        return False
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.5 * across, 3.6 * down), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        rows = [r for r in records if (r["kernel"], r["dtype"]) == panel]
        for name in ordered(rows):
            points = sorted((r["n"], s) for r in rows if (s := bandwidth(r, name)) is not None)
            if not points:
                continue
            speeds = [s for _, s in points]
            around = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
            axis.errorbar(
                [n for n, _ in points],
                [s.median for s in speeds],
                yerr=around,
                label=name,
                color=COLORS[name],
                marker=".",
                linestyle="--" if name == "limit" else "-",
            )
        axis.set(title=" ".join(panel), xlabel="N", ylabel="GB/s", xscale="log")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"{', '.join(dict.fromkeys(r['device'] for r in records))}, cold L2, medians")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def show(records: list[Record], console: Console, picture: Path | None = None) -> None:
    """Print the tables, and draw the plot where a path is given."""
    for table in tables(records):
        console.print(table)
    if picture is not None:
        drawn = plot(records, picture)
        console.print(f"plot: {picture}" if drawn else "no plot: nothing of suite throughput")


def wide(console: Console) -> Console:
    """The console, or where its output is no terminal one that no table is folded for."""
    return console if console.is_terminal else Console(width=220)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw here (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    found = {}
    for file in options.files:
        found |= {(identity(r), r["device"]): r for r in load(file)}
    show(list(found.values()), wide(Console()), options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
