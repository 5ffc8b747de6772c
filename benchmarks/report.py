"""Results as a table in the terminal and as a plot: shares of the limit over N.

    python -m benchmarks.report FILE... [--plot FILE]

Several files are read as one; of a cell that is in more than one, the last counts.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import NAMES, PARTS, WHAT
from benchmarks.general import summary
from benchmarks.results import Record, identity, load, ratio
from htile.tune.statistics import Estimate, estimate

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
MARKS = {name: mark for name, mark in zip(COLORS, "osDhP^*Xpx", strict=True)}
NO_PLOT = "no plot: nothing of suite throughput that has a limit"
KNEE = 0.9  # share of the limit below which the plot has a coarser scale
COARSE = 15.0  # times as many shares in a length of the axis as above it


def bandwidth(record: Record, name: str) -> Estimate | None:
    """GB/s of a contender, or None where it has no times."""
    times = record["contenders"].get(name, {}).get("times")
    return estimate(times).map(lambda us: record["bytes"] / us / 1e3) if times else None


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
        return f"{speed.median:.0f} ±{speed.half_width:.0f}"
    factor, _ = UNITS[record["unit"]]
    took = estimate(found["times"]).map(lambda t: t * factor)
    digits = 2 if took.median < 100 else 0
    return f"{took.median:.{digits}f} ±{took.half_width:.{digits}f}"


def allowed_text(record: Record) -> str:
    """What the table shows of the bound."""
    bound = allowed(record)
    return "" if bound is None else f"{bound.median:.2f} ±{bound.half_width:.2f}"


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


def shares(records: list[Record]) -> dict[str, list[tuple[int, Estimate]]]:
    """For each contender N and its share of the limit, by N, where both were measured."""
    found: dict[str, list[tuple[int, Estimate]]] = {}
    for name in ordered(records):
        if name not in ("limit", *PARTS):
            points = [(r["n"], share) for r in records if (share := ratio(r, name, "limit"))]
            if points:
                found[name] = sorted(points, key=lambda point: point[0])
    return found


def knee(panels: Iterable[dict[str, list[tuple[int, Estimate]]]]) -> float:
    """The share below which the plot's scale is coarser: KNEE, or less where htile's are lower.

    Most shares lie within some per cent of 1: one scale from 0 on would make one line of them.
    """
    ours = [share.median for drawn in panels for _, share in drawn.get("htile", [])]
    return max(0.05, min(KNEE, math.floor(20 * min(ours, default=1.0)) / 20))


def plot(records: list[Record], path: Path) -> bool:
    """Draw shares of the limit over N, a panel a kernel and dtype; False where there are none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    records = [r for r in records if r["suite"] == "throughput"]
    cells: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        cells.setdefault((r["kernel"], r["dtype"]), []).append(r)
    panels = {kind: drawn for kind, found in cells.items() if (drawn := shares(found))}
    if not panels:
        return False
    everything = [s for drawn in panels.values() for points in drawn.values() for _, s in points]
    low, top = knee(panels.values()), max(1.05, *(s.high + 0.01 for s in everything))
    has_coarse = min(s.low for s in everything) < low
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(4.2 * across, 2.6 * down + 0.9), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axis, (kind, drawn) in zip(axes.flat, panels.items(), strict=False):
        axis.axhline(1.0, color=COLORS["limit"], linewidth=1, linestyle="--")
        if has_coarse:
            axis.axhspan(0, low, color="0.93", zorder=0)
        for name, points in drawn.items():
            middle = [share.median for _, share in points]
            around = [
                [share.median - share.low for _, share in points],
                [share.high - share.median for _, share in points],
            ]
            axis.errorbar(
                [n for n, _ in points], middle, yerr=around, color=COLORS[name], label=name,
                marker=MARKS[name], markersize=3.5, linewidth=1.2, elinewidth=0.8,
                zorder=4 if name == "htile" else 3,
            )  # fmt: skip
        sizes = sorted({n for points in drawn.values() for n, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes[:: -(-len(sizes) // 8)])
        axis.xaxis.set_major_formatter(lambda n, _: size_text(int(n)))
        axis.minorticks_off()
        axis.set_title(" ".join(kind), fontsize="medium")
        axis.grid(alpha=0.3)
    axes[0, 0].set_yscale("function", functions=_scale(low))
    axes[0, 0].set_yticks(_ticks(low, top, has_coarse))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylim(0.0 if has_coarse else low, top)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supylabel("share of the limit, over N", fontsize="medium")
    marks = [
        Line2D([], [], color=COLORS[name], marker=MARKS[name], markersize=4, label=name)
        for name in ordered(records)
        if any(name in drawn for drawn in panels.values())
    ]
    marks.append(Line2D([], [], color=COLORS["limit"], linestyle="--", label="limit"))
    if has_coarse:
        marks.append(Patch(color="0.93", label=f"coarser scale below {low:g}"))
    figure.legend(handles=marks, loc="outside lower center", ncols=6, fontsize="small")
    devices = ", ".join(dict.fromkeys(r["device"] for r in records))
    figure.suptitle(
        f"{devices}: medians of paired ratios and their 95 % intervals, cold L2", fontsize="medium"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _scale(low: float) -> tuple[Callable, Callable]:
    """Functions from a share to its place on the axis, COARSE times as dense below `low`."""

    def place(share):
        return (share < low) * (share / COARSE) + (share >= low) * (low / COARSE + share - low)

    def share(place):
        bend = low / COARSE
        return (place < bend) * (place * COARSE) + (place >= bend) * (low + place - bend)

    return place, share


def _ticks(low: float, top: float, has_coarse: bool) -> list[float]:
    """Shares that the axis names: by 0.05, or 0.1 where it is long; two where it is coarse."""
    step = 0.05 if top - low < 0.5 else 0.1
    fine = [round(low + k * step, 2) for k in range(int((top - low) / step + 1e-6) + 1)]
    return [0.0, round(low / 2, 2), *fine] if has_coarse else fine


def size_text(n: int) -> str:
    """`512`, `8k`, `1M`: a row length, in units of 1024."""
    for unit, text in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{text}"
    return str(n)


def show(records: list[Record], console: Console, picture: Path | None = None) -> None:
    """Print the tables, and draw the plot where a path is given."""
    plain = [r for r in records if r["suite"] not in summary.SUITES]
    for table in (*tables(plain), *summary.tables(records)):
        console.print(table)
    if picture is not None:
        drawn = plot(records, picture)
        console.print(f"plot: {picture}" if drawn else NO_PLOT)


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
