"""The benchmarks without a GPU: what is counted, checked, remembered, computed and shown."""

import argparse
import dataclasses
import functools
import gc
import io
import json
import multiprocessing
import re
import sys
import types
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from rich.console import Console

import htile
from benchmarks import __main__ as command
from benchmarks import (
    anchors,
    calls,
    compile_time,
    contenders,
    few_rows,
    fresh,
    host,
    idle,
    limit,
    plans,
    products,
    report,
    startup,
    throughput,
    timing,
    training,
    training_memory,
)
from benchmarks import gallery as gallery_benchmark
from benchmarks.cell import Method, compare, occupancy, size
from benchmarks.check import Sample
from benchmarks.contenders import NAMES, build
from benchmarks.kernels import DEFAULT, KERNELS, LENIENT, STRICT, Kernel
from benchmarks.results import Job, append, identity, is_done, key, load, record
from htile.build.cubin import Resources
from htile.tune.statistics import Estimate, estimate, paired
from htile.tune.timing import WARM_UP, interleave, turns

BF16, F32 = torch.bfloat16, torch.float32
M, N = 3, 10


# ---- what the emitted kernels use ----------------------------------------------------------------

H200 = types.SimpleNamespace(
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=228 * 1024,
    max_threads_per_multi_processor=2048,
)


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [
        (32, 33040, 512, 1.0),
        (40, 66080, 512, 0.75),  # by shared memory, and by registers
        (63, 64, 256, 0.5),
        (128, 64, 256, 0.25),
        (33, 64, 1024, 0.5),
        (20, 200 * 1024, 64, 1 / 32),
    ],
)
def test_occupancy(registers, shared, threads, expected):
    assert occupancy(Resources(registers, 0, 0, shared, threads, 0), H200) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_no_emitted_kernel_has_a_stack_frame(name, dtype):
    kernel = KERNELS[name]
    for n in (64, 1024, 6144, 8192, 16384, 65536, 262144, 1 << 22):
        args = kernel.arguments(max(64, (1 << 25) // n), n, dtype, "meta")
        used = kernel.function.inspect(*args, arch="sm_90a").resources
        assert used.stack == 0 and used.registers <= 168, (n, used)


# ---- kernels and their bytes ---------------------------------------------------------------------

# For 3 rows of 10 elements of 2 bytes: a row tensor is 60 bytes, a column 20, 3 values 6 or 12.
BYTES = {
    "softmax": 60 + 60,
    "log_softmax": 60 + 60 + 12,
    "rmsnorm": 60 + 20 + 60,
    "rmsnorm_residual": 60 + 20 + 60 + 120,
    "layernorm": 60 + 40 + 60,
    "layernorm_fp32_columns": 60 + 80 + 60,
    "cross_entropy": 60 + 6 + 24,
    "softmax_backward": 120 + 60,
    "swiglu": 120 + 60,
    "add_rmsnorm_max": 60 + 20 + 60 + 120 + 12,
    "norm_softmax": 60 + 60,
}


def test_bytes_are_those_of_arguments_and_results():
    assert {name: kernel.bytes(M, N, BF16) for name, kernel in KERNELS.items()} == BYTES


@pytest.mark.parametrize("name", KERNELS)
def test_roles_and_results_are_as_declared(name):
    kernel = KERNELS[name]
    args = kernel.arguments(M, N, F32, "cpu")
    shapes = {"row": (M, N), "column": (N,), "per-row": (M,)}
    assert [t.shape for t in args] == [shapes[role] for role in kernel.roles]
    results = kernel.function(*args)
    leaves = results if isinstance(results, tuple) else (results,)
    expected = [(t.shape, t.dtype) for t in kernel.results(args)]
    assert [(t.shape, t.dtype) for t in leaves] == expected


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("contender", "bound"), [("htile", STRICT), ("eager", LENIENT)])
def test_contenders_are_right(name, dtype, contender, bound):
    kernel = KERNELS[name]
    torch.manual_seed(1)
    args = kernel.arguments(40, 300, dtype, "cpu")
    assert 0 <= Sample(kernel, args).check(build(contender, kernel, args)(), bound) <= bound


@pytest.mark.parametrize("name", KERNELS)
def test_limit_kernels_move_what_the_kernel_moves(name):
    kernel = KERNELS[name]
    args = kernel.arguments(M, N, F32, "cpu")
    calls = []

    def measure(contenders, rounds):
        calls.append(set(contenders))
        return {name: [float(k)] * rounds for k, name in enumerate(contenders)}

    found = limit.candidates(kernel, args)
    assert limit.fastest(found, measure).name == found[0].name
    assert calls == ([{c.name for c in found}] if len(found) > 1 else [])


def test_a_limit_kernel_that_moves_nothing_is_refused():
    lazy = limit.Candidate("lazy", lambda: None, lambda: False)
    with pytest.raises(RuntimeError, match="lazy did not move"):
        limit.fastest([lazy], lambda contenders, rounds: {})


# ---- checks --------------------------------------------------------------------------------------


def softmax_that(eager):
    kernel = KERNELS["softmax"]
    return Kernel("softmax", kernel.function, kernel.arguments, eager, kernel.roles)


def constant(contenders, rounds):
    for call in contenders.values():
        call()
    return {name: [1.0] * rounds for name in contenders}


def test_every_sampled_row_counts():
    kernel = KERNELS["softmax"]
    args = kernel.arguments(1000, 50, F32, "cpu")
    sample = Sample(kernel, args)
    assert sample.index[0] == 0 and sample.index[-1] == 999 and len(sample.index) == 64
    result = kernel.function(*args)
    for row in (0, 999):
        wrong = result.clone()
        wrong[row, 7] += 1e-4
        assert sample.error(wrong) > 10 > 1 >= sample.error(result)
    assert sample.error(result.where(result > 1, torch.nan)) == float("inf")
    for other in ((result, result), result[:, 1:]):
        with pytest.raises(RuntimeError, match="wrong"):
            sample.error(other)


def test_a_contender_that_is_wrong_or_missing_is_named_and_not_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", None)
    kernel = softmax_that(lambda x: torch.softmax(x * 1.01, -1))
    args = kernel.arguments(20, 100, F32, "cpu")
    names = ("htile", "quack", "eager", "limit")
    results, chosen = compare(kernel, args, names, Method(constant), 4)
    assert results["htile"]["times"] == [1.0] * 4 and results["htile"]["error_of_bound"] <= 1
    assert results["limit"]["times"] == [1.0] * 4 and chosen == "copy_"
    assert results["quack"]["error"].startswith("not installed")
    assert results["eager"]["error"].startswith("wrong: error ")
    assert list(results) == list(names)


def test_a_contender_that_raises_is_named():
    def refuse(x):
        raise ValueError("no such shape\nsecond line")

    kernel = softmax_that(refuse)
    args = kernel.arguments(4, 10, F32, "cpu")
    results, _ = compare(kernel, args, ("eager", "htile"), Method(constant), 2)
    assert results["eager"] == {"error": "ValueError: no such shape"}
    assert results["htile"]["times"]


@pytest.mark.parametrize("package", ["quack", "liger"])
def test_peers_have_no_kernel_for_what_they_do_not_do(monkeypatch, package):
    """The table of a peer, its package replaced by one whose every name is there."""

    class Anything(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name):
            return Anything(name)

        def __call__(self, *args, **kwargs):
            return Anything("result")

    roots = {
        "quack": ("quack", "quack.softmax", "quack.rmsnorm", "quack.cross_entropy"),
        "liger": ("liger_kernel", *(f"liger_kernel.ops{s}" for s in ("", ".softmax", ".utils"))),
    }
    for name in roots[package]:
        monkeypatch.setitem(sys.modules, name, Anything(name))
    absent = set()
    for name in DEFAULT:
        kernel = KERNELS[name]
        args = kernel.arguments(4, 10, BF16, "cpu")
        results, _ = compare(kernel, args, (package,), Method(constant), 1)
        reason = results[package]["error"]
        if reason.startswith(f"{package} has no such kernel") or "no logsumexp" in reason:
            absent.add(name)
    both = {"log_softmax", "add_rmsnorm_max", "norm_softmax"}
    assert absent == both | ({"swiglu"} if package == "quack" else {"cross_entropy"})


def test_the_parts_of_a_call_are_timed_as_the_call_has_them(monkeypatch):
    """The compiled function gets what a call gives it, and a new tensor is made for each result."""
    launched = []
    monkeypatch.setattr(contenders, "load", lambda artifact: lambda *given: launched.append(given))
    kernel = KERNELS["rmsnorm_residual"]
    x, weight, residual = args = kernel.arguments(4, 16, BF16, "cpu")
    results, _ = compare(kernel, args, ("bare", "empty_like"), Method(constant), 2)
    assert results == {name: {"times": [1.0, 1.0]} for name in ("bare", "empty_like")}
    ((first, second, third, eps, *outs),) = launched
    assert first is x and second is weight and third is residual and eps == 1e-6
    assert [(out.shape, out.dtype) for out in outs] == [(x.shape, BF16)] * 2
    made = build("empty_like", kernel, args)()
    assert [(new.shape, new.dtype) for new in made] == [(x.shape, BF16)] * 2
    assert build("empty_like", KERNELS["softmax"], (x,))().shape == x.shape


# ---- statistics ----------------------------------------------------------------------------------


# Ranks of the 95 % interval of a median, from the tables of the sign test.
@pytest.mark.parametrize(
    ("count", "low", "high"), [(6, 1, 6), (10, 2, 9), (20, 6, 15), (50, 18, 33), (100, 40, 61)]
)
def test_the_interval_has_the_ranks_of_the_tables(count, low, high):
    numbers = [float(k) for k in range(1, count + 1)]
    found = estimate(numbers[::-1])
    assert found == Estimate((count + 1) / 2, low, high)
    assert found.half_width == (high - low) / 2


@pytest.mark.parametrize("count", range(1, 6))
def test_few_numbers_give_their_whole_range(count):
    assert estimate(range(count)) == Estimate((count - 1) / 2, 0, count - 1)


def test_the_interval_holds_the_median_as_often_as_it_says():
    torch.manual_seed(3)
    draws = torch.randn(2000, 31).exp().tolist()
    held = sum(e.low <= 1.0 <= e.high for e in map(estimate, draws))
    assert 0.94 < held / 2000 < 0.99


def test_ratios_are_paired_by_round():
    ours, theirs = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.5, 3.0, 6.0, 12.0, 24.0, 48.0]
    assert paired(theirs, ours) == Estimate(1.5, 1.5, 1.5)
    assert Estimate(4, 2, 8).map(lambda t: 8 / t) == Estimate(2, 1, 4)


def test_each_contender_is_first_as_often_as_any():
    names = ["a", "b", "c"]
    drawn = list(turns(names, 6))
    assert [counts for _, counts in drawn] == [False] * 3 * WARM_UP + [True] * 3 * 6
    for place in range(3):
        firsts = [name for name, _ in drawn[3 * WARM_UP + place :: 3]]
        assert [firsts.count(name) for name in names] == [2, 2, 2]


# ---- timing, with a clock of the test's own ------------------------------------------------------


class Clock:
    """A GPU whose launches take what they say, in microseconds, in the order they came in."""

    def __init__(self, monkeypatch):
        self.now, self.launched = 0.0, []
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def elapsed_time(self, stop):
                return (stop.at - self.at) / 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        flush = types.SimpleNamespace(zero_=self.launch("flush", 70.0))
        monkeypatch.setattr(torch, "empty", lambda *shape, **options: flush)

    def launch(self, name, took):
        def call():
            self.launched.append(name)
            self.now += took

        return call


def test_launches_are_interleaved_each_after_a_flush(monkeypatch):
    clock = Clock(monkeypatch)
    times = interleave({n: clock.launch(n, t) for n, t in (("a", 3.0), ("b", 5.0))}, 4)
    assert times == {"a": pytest.approx([3.0] * 4), "b": pytest.approx([5.0] * 4)}
    assert clock.launched[::2] == ["flush"] * 2 * (4 + WARM_UP)
    assert clock.launched[-7::2] == ["a", "b", "b", "a"], "rounds 2 and 3, the order rotated"


def test_replays_are_timed_by_call(monkeypatch):
    clock = Clock(monkeypatch)
    contenders = {n: clock.launch(n, t) for n, t in (("a", 30.0), ("b", 50.0))}
    times = timing.replays(contenders, 3, calls=10)
    assert times == {"a": pytest.approx([3.0] * 3), "b": pytest.approx([5.0] * 3)}


def test_the_host_is_timed_by_call_and_collects_no_garbage_meanwhile(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls, enabled = {"a": 0, "b": 0}, set()

    def count(name):
        calls[name] += 1
        enabled.add(gc.isenabled())

    contenders = {name: functools.partial(count, name) for name in calls}
    times = timing.host(contenders, 5, calls=10)
    assert calls == {"a": 10 * (5 + WARM_UP), "b": 10 * (5 + WARM_UP)}
    assert [len(t) for t in times.values()] == [5, 5] and min(map(min, times.values())) > 0
    assert enabled == {False} and gc.isenabled()


# ---- results and resuming ------------------------------------------------------------------------


def canned(kernel="softmax", n=4096, suite="throughput", case="", dtype="bf16", **contenders):
    m = 32768
    default = {
        "htile": {"times": [130.0, 131.0, 132.0], "error_of_bound": 0.4},
        "quack": {"times": [134.0, 135.0, 136.0], "error_of_bound": 0.5},
        "eager": {"error": "wrong: error 33 of the bound"},
        "liger": {"error": "not installed (No module named 'liger_kernel')"},
        "limit": {"times": [128.0, 129.0, 130.0]},
    }
    moved = KERNELS[kernel].bytes(m, n, BF16)
    unit = "s" if suite in ("startup", "compile_time") else "us"
    cell = key(suite, kernel, dtype, m, n, case)
    return record(cell, default | contenders, unit, bytes=moved, limit="copy_")


def test_results_are_found_again_and_torn_lines_passed_over(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    assert load(path) == []
    first, second = canned(), canned(n=1024)
    append(path, [first])
    with path.open("a") as file:
        file.write(json.dumps(second)[:50])
    append(path, [second])
    again = canned(htile={"times": [1.0]})
    append(path, [again])
    assert load(path) == [again, second]
    assert [identity(r)[-1] for r in load(path)] == [4096, 1024]


def test_a_cell_is_done_where_all_its_contenders_are_there():
    done = canned()
    cell = identity(done)

    def job(*names, keys=(cell,)):
        return Job("", keys, names, lambda say: [])

    assert is_done(job("htile", "quack"), [done])
    assert not is_done(job("htile", "compile"), [done])
    assert not is_done(job("htile"), [done | {"device": "another GPU"}])
    assert not is_done(job("htile", keys=(cell, key("host", "softmax"))), [done])


def options(tmp_path, *more):
    return command.parser().parse_args(["--json", str(tmp_path / "r.jsonl"), *more])


@pytest.fixture
def quiet():
    return Console(file=io.StringIO())


def test_a_run_is_resumed_where_it_stopped(tmp_path, quiet):
    ran = []

    def measure(n, say):
        if n == 3 and ran == [1, 2]:
            ran.append(0)
            raise RuntimeError("the machine was taken away")
        say("measuring")
        ran.append(n)
        return [canned(n=n)]

    jobs = [
        Job(str(n), (identity(canned(n=n)),), ("htile",), functools.partial(measure, n))
        for n in (1, 2, 3)
    ]
    with pytest.raises(RuntimeError, match="taken away"):
        command.run(jobs, options(tmp_path), quiet)
    found = command.run(jobs, options(tmp_path, "--resume"), quiet)
    assert ran == [1, 2, 0, 3] and [r["n"] for r in found] == [1, 2, 3]
    command.run(jobs, options(tmp_path), quiet)
    assert ran.count(1) == 2, "without --resume it begins anew"
    assert len(load(tmp_path / "r.jsonl.old")) == 3, "and keeps what was there"


def test_no_cell_is_begun_after_the_seconds(tmp_path, quiet):
    jobs = [Job("", (identity(canned()),), ("htile",), lambda say: [canned()])]
    assert command.run(jobs, options(tmp_path, "--seconds", "-1"), quiet) == []
    assert len(command.run(jobs, options(tmp_path, "--seconds", "60"), quiet)) == 1


# ---- what is shown -------------------------------------------------------------------------------


def shown(records, picture=None):
    console = Console(width=250, file=io.StringIO())
    report.show(records, console, picture)
    return console.file.getvalue()


def test_the_table_has_bandwidth_ratios_and_what_was_not_measured():
    text = shown([canned(), canned(kernel="rmsnorm", quack={"error": "quack has no such kernel"})])
    row = next(line for line in text.splitlines() if "32768x4096" in line)
    moved = 2 * 32768 * 4096 * 2
    assert f"{moved / 131 / 1e3:.0f} ±" in row and f"{moved / 129 / 1e3:.0f} ±" in row
    assert f"{129 / 131:.3f} [" in row and f"{135 / 131:.3f} [" in row and "quack" in row
    assert "not installed" in row and "wrong" in row
    assert "liger: not installed (No module named 'liger_kernel') (softmax bf16" in text
    assert "eager: wrong: error 33 of the bound" in text
    assert "no kernel" in text and "median ± half the 95 % interval" in text


def test_other_suites_show_times():
    text = shown(
        [
            canned(suite="few_rows", htile={"times": [1.5, 1.5, 1.5]}),
            canned(suite="startup", case="import, cold caches", htile={"times": [0.25, 0.25]}),
            canned(suite="host", quack={"error": "OSError: [/usr/lib] is no [bold] folder"}),
        ]
    )
    assert "1.50 ±0.00" in text and "few_rows: µs" in text
    assert "250 ±0" in text and "startup: ms" in text and "import, cold caches" in text
    assert "quack: OSError: [/usr/lib] is no [bold] folder (softmax" in text
    assert "bare + empty_like + 1.0" in text


def test_the_bound_on_the_host_is_of_the_same_run():
    parts = {"bare": {"times": [4.0, 6.0, 5.0]}, "empty_like": {"times": [2.0, 1.0, 1.5]}}
    entry = canned(suite="host", **parts)
    assert report.allowed(entry) == Estimate(7.5, 7.0, 8.0)
    assert "7.50 ±0.50" in shown([entry])
    assert command.summary([entry]).endswith("bare + empty_like + 1.0 7.50 ±0.50")
    assert report.best_other(entry) == "quack", "a part is nobody to be compared with"
    assert report.allowed(canned(**parts)) is None and report.allowed(canned(suite="host")) is None


def speeds(*shares, limit=100.0):
    """Contenders' times for these shares of the limit, with some noise."""
    noise = (0.999, 1.0, 1.001)
    found = {"limit": {"times": [limit * k for k in noise]}}
    for name, share in shares:
        found[name] = {"times": [limit / share * k for k in noise]}
    return found


def test_shares_of_the_limit_are_paired_and_by_size():
    records = [canned(n=n, **speeds(("htile", 0.98), ("quack", 0.5))) for n in (4096, 64)]
    records.append(canned(n=1024, limit={"error": "failed"}))
    found = report.shares(records)
    assert list(found) == ["htile", "quack"], "neither the limit itself nor who has no times"
    assert [n for n, _ in found["htile"]] == [64, 4096], "no cell without a limit"
    assert all(share.median == pytest.approx(0.98) for _, share in found["htile"])
    assert all(share.median == pytest.approx(0.5) for _, share in found["quack"])


@pytest.mark.parametrize(("ours", "wanted"), [(0.99, 0.9), (0.93, 0.9), (0.87, 0.85), (0.02, 0.05)])
def test_the_scale_is_fine_for_all_of_ours(ours, wanted):
    drawn = report.shares([canned(**speeds(("htile", ours), ("quack", 0.3)))])
    assert report.knee([drawn]) == pytest.approx(wanted)


def test_the_axis_goes_on_at_the_knee_and_back():
    place, share = report._scale(0.9)
    shares = np.array([0.0, 0.3, 0.9, 0.95, 1.0, 1.1])
    assert share(place(shares)) == pytest.approx(shares)
    gaps = np.diff(place(shares)) / np.diff(shares)
    assert gaps == pytest.approx([1 / report.COARSE] * 2 + [1.0] * 3)


def drawn_plot(records, path):
    """The texts of the plot as an SVG."""
    assert report.plot(records, path)
    root = ET.fromstring(path.read_text("utf-8"))
    comments = re.findall(r"<!-- (.*?) -->", path.read_text("utf-8"))
    return [*comments, *(e.text for e in root.iter() if e.text and e.text.strip())]


def test_the_plot_has_a_panel_a_kernel_a_line_at_one_and_a_legend(tmp_path):
    sizes = (1024, 4096, 16384)
    records = [canned(n=n, **speeds(("htile", 0.99), ("quack", 0.97))) for n in sizes]
    same = speeds(("htile", 1.01), ("quack", 0.99))
    records += [canned(kernel="rmsnorm", dtype="fp32", n=n, **same) for n in sizes]
    records += [canned(kernel="layernorm", limit={"error": "failed"})]
    texts = drawn_plot(records, tmp_path / "pictures" / "plot.svg")
    assert {"softmax bf16", "rmsnorm fp32", "share of the limit, over N"} <= set(texts)
    assert "layernorm bf16" not in texts, "nothing has a share of the limit there"
    assert {"htile", "quack", "limit", "1", "0.95", "1k", "4k", "16k"} <= set(texts)
    assert not [text for text in texts if "coarser" in text], "nothing is far below"
    assert any("paired ratios" in text and "95 %" in text for text in texts)


def test_what_is_far_below_has_a_scale_of_its_own_that_is_explained(tmp_path):
    far = canned(**speeds(("htile", 0.99), ("quack", 0.05)))
    texts = drawn_plot([far], tmp_path / "plot.svg")
    assert "coarser scale below 0.9" in texts and {"0", "0.45", "0.9"} <= set(texts)


def test_every_contender_has_a_colour_and_a_mark_of_its_own():
    assert set(report.COLORS) == set(report.MARKS) == set(NAMES)
    assert len({*report.COLORS.values()}) == len({*report.MARKS.values()}) == len(NAMES)


def test_there_is_no_plot_without_throughput_and_a_limit(tmp_path):
    path = tmp_path / "plot.png"
    assert not report.plot([canned(suite="host")], path)
    assert not report.plot([canned(limit={"error": "failed"})], path) and not path.exists()
    assert report.NO_PLOT in shown([canned(suite="host")], path)
    assert report.plot([canned()], path) and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("n", "text"), [(64, "64"), (1000, "1000"), (4096, "4k"), (6144, "6k"), (1 << 20, "1M")]
)
def test_row_lengths_are_written_short(n, text):
    assert report.size_text(n) == text


def test_a_report_joins_files(tmp_path, capsys):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append(first, [canned(), canned(n=1024)])
    append(second, [canned(htile={"times": [1.0, 1.0]})])
    assert report.main([str(first), str(second), "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("│ softmax")]
    assert len(rows) == 2 and "32768x1024" in rows[1] and "p.png" in out
    assert f"{2 * 32768 * 4096 * 2 / 1e3:.0f} ±0" in rows[0], "the last of a cell counts"


# ---- the command line ----------------------------------------------------------------------------


def test_the_help_names_every_suite_kernel_and_contender():
    text = command.parser().format_help()
    for name in ("pipeline", *command.SUITES, *KERNELS, *NAMES):
        assert name in text, name
    for option in ("suite", "kernels", "cells", "rounds", "dtype", "contenders", "json", "plot"):
        assert f"--{option}" in text
    assert "--seconds" in text and "--resume" in text


@pytest.mark.parametrize("text", ["4096", "x", "0x4", "4x-1", "axb", "1x2x3"])
def test_a_cell_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="32768x4096"):
        size(text)
    assert size("8x4096") == (8, 4096)


def test_every_suite_plans_its_jobs(tmp_path):
    every = options(tmp_path)
    planned = {name: make(every) for name, make in command.SUITES.items()}
    assert all(planned.values())
    keys = [k for jobs in planned.values() for job in jobs for k in job.keys]
    assert len(set(keys)) == len(keys)
    cells = throughput.CELLS
    assert len(planned["throughput"]) == len(DEFAULT) * 2 * len(cells)
    assert all(2 * m * n >= 64 << 20 for m, n in cells)
    assert len(planned["few_rows"]) == len(DEFAULT) * 2 * len(few_rows.CELLS)
    assert {startup.STARTS.keys() >= set(job.contenders) for job in planned["startup"]} == {True}


def test_torch_compile_takes_no_part_where_vmap_loops_over_rows():
    """`histc` has no batching rule. Once a row, 200 000 calls would be traced."""
    kernel = dataclasses.replace(KERNELS["softmax"], eager=torch.vmap(torch.histc))
    with pytest.raises(RuntimeError, match="vmap"):
        build("compile", kernel, (torch.rand(4, 8),))
    assert torch._C._functorch._is_vmap_fallback_enabled()


def test_torch_compile_takes_part_in_six_cells_a_kernel_and_three(tmp_path):
    jobs = throughput.jobs(options(tmp_path, "--kernels", "softmax", "--dtype", "bf16"))
    assert sum("compile" in job.contenders for job in jobs) == 6
    assert sum("autotune" in job.contenders for job in jobs) == 3
    asked = options(tmp_path, "--contenders", "compile", "limit", "--cells", "64x64")
    assert {job.contenders for job in throughput.jobs(asked)} == {("compile", "limit")}
    assert all(job.keys[0][-2:] == (64, 64) for job in host.jobs(asked))


def test_the_status_says_whether_ours_is_wrong():
    assert not command.wrong(canned())
    assert command.wrong(canned(htile={"error": "wrong: error 3 of the bound"}))


# ---- fresh processes -----------------------------------------------------------------------------


def test_a_fresh_process_has_its_own_caches(tmp_path):
    code = "import json, os; print('noise'); print(json.dumps([os.environ['TRITON_CACHE_DIR']]))"
    assert fresh.python(["-c", code], tmp_path) == [[str(tmp_path / "triton_cache_dir")]]


def test_what_a_fresh_process_dies_of_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"^ValueError: no kernel$"):
        fresh.python(["-c", "raise ValueError('no kernel')"], tmp_path)
    with pytest.raises(RuntimeError, match="more than 0 s"):
        fresh.python(["-c", "import time; time.sleep(60)"], tmp_path, timeout=0.2)


def test_a_contender_that_does_not_start_is_named(monkeypatch):
    def start(arguments, caches):
        if "quack" in arguments[1]:
            raise RuntimeError("ModuleNotFoundError: No module named 'quack'")
        return [[1.0, 2.0, 3.0, 4.0]]

    monkeypatch.setattr(fresh, "python", start)
    records = startup.measure(("htile", "quack"), 2, lambda text: None)
    (first,) = [r for r in records if r["case"] == "first call, warm caches"]
    assert first["contenders"]["htile"]["times"] == [3.0, 3.0]
    assert "No module" in first["contenders"]["quack"]["error"]
    assert {identity(r) for r in records} == set(startup.jobs(argparse.Namespace(
        contenders=None, rounds=None))[0].keys)  # fmt: skip


def test_compile_times_of_sizes_that_fail_are_named(monkeypatch):
    def start(arguments, caches):
        return [[1000, 9.0], [256, 0.5], [1024, "out of registers"]]

    monkeypatch.setattr(fresh, "python", start)
    small, large = compile_time.measure("softmax", (256, 1024), ("htile",), 3, lambda text: None)
    assert small["contenders"]["htile"] == {"times": [0.5]}
    assert large["contenders"]["htile"] == {"error": "out of registers"}


def test_the_chain_grows_and_means_the_same_by_row_and_at_once():
    few, many = compile_time.chain(10), compile_time.chain(50)
    args = torch.randn(6, 20), torch.randn(20)
    htile.testing.assert_close(many.function, many.eager(*args), *args)
    counts = [len(k.function.inspect(*args).graph) for k in (few, many)]
    assert counts[0] < 20 and 40 < counts[1] < 70


def test_a_compile_time_is_measured(tmp_path):
    rows = fresh.python(["-m", "benchmarks.compile_time", "htile", "chain", "10"], tmp_path)
    assert [size for size, _ in rows] == [compile_time.WARM_UP["chain"], 10]
    assert all(0.01 < took < 60 for _, took in rows)


@pytest.mark.parametrize("name", ["softmax", "layernorm"])
def test_plans_to_compare(name):
    """The default first, and each of a text and a name of its own."""
    kernel = KERNELS[name]
    found = plans.of(kernel, 4096, 32768, BF16, 30)
    default = kernel.function.inspect(*kernel.arguments(4096, 32768, BF16, "meta"))
    assert found[0].source == default.source and len(found) == 30
    assert len({one.source for one in found}) == len({plans.label(one.plan) for one in found}) == 30


def test_plans_are_shown_beside_the_default(monkeypatch):
    said = []
    names = [plans.label(one.plan) for one in plans.of(KERNELS["softmax"], 4096, 256, BF16, 5)]
    times = {name: [10.0 - k] for k, name in enumerate(names)} | {"limit": [4.5]}
    best = types.SimpleNamespace(call=0)
    monkeypatch.setattr(plans.limit, "fastest", lambda found, measure: best)
    monkeypatch.setattr(plans, "launches", lambda *arguments: dict.fromkeys(names))
    monkeypatch.setattr(plans, "build_all", lambda requests: None)
    monkeypatch.setattr(plans.throughput, "METHOD", Method(lambda contenders, rounds: times))
    monkeypatch.setattr(plans.limit, "candidates", lambda kernel, args: [])
    on_cpu = dataclasses.replace(
        KERNELS["softmax"],
        arguments=lambda m, n, dtype, device: (
            torch.empty(m, n, dtype=dtype, device="meta" if device == "meta" else "cpu"),
        ),
    )
    monkeypatch.setitem(KERNELS, "softmax", on_cpu)
    plans.main(["softmax", "--cells", "4096x256", "--most", "5", "--best", "2"], said.append)
    assert said == [
        "softmax 4096x256 bf16, 5 plans, µs",
        "      4.50  1.000  limit",
        f"      6.00  0.750  {names[4]}",
        f"     10.00  0.450  {names[0]}  (default)",
    ]


def _dies() -> None:
    raise SystemExit(3)


def test_the_gallery_ends_when_a_worker_dies():
    context = multiprocessing.get_context("spawn")
    said, barrier = context.Queue(), context.Barrier(2)
    processes = [context.Process(target=_dies), context.Process(target=barrier.wait)]
    for process in processes:
        process.start()
    said.put("a line")
    lines = gallery_benchmark.lines_of(said, processes, 2)
    assert next(lines) == "a line"
    with pytest.raises(SystemExit, match="a worker has died"):
        next(lines)
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode is not None for process in processes] == [True, True]


# ---- products ----------------------------------------------------------------------------------

OF_PRODUCTS = [c for make in (products.product, products.fused, products.vocabulary)
               for c in make(24, 64, 32)]  # fmt: skip


@pytest.mark.parametrize("cell", OF_PRODUCTS, ids=lambda cell: cell.title)
def test_contenders_of_products_are_right_or_left_out(cell, capsys):
    """On the CPU those of HTile, and what stands for cuBLAS; other libraries are not there."""
    calls = products.calls_of(cell, ["htile", "htile (K, N)", "pair", "quack", "liger", "cut"])
    assert set(calls) == {"htile", "htile (K, N)", "pair"} & set(cell.makers)
    absent = {"quack", "liger", "cut"} & set(cell.makers)
    said = capsys.readouterr().err
    assert all(f"{name}: ModuleNotFoundError" in said for name in absent)
    told = products.line(cell, "1.0", {"htile": 1.25}, ["htile", "cut"], ".3f")
    assert told.startswith(f"| {cell.title} | 24x64x32 | 1.0 | 1.250 |")
    assert ("–" in told) == ("cut" in cell.makers)
    cell.bare()


def test_a_wrong_product_is_not_timed(capsys):
    cell = OF_PRODUCTS[0]
    makers = {"htile": lambda *args: lambda: products.linear(*args) * 1.05}
    wrong = dataclasses.replace(cell, makers=makers)
    assert products.calls_of(wrong, ["htile"]) == {}
    assert "wrong: an error of" in capsys.readouterr().err


def test_all_contenders_of_products_have_a_cell():
    assert {name for cell in OF_PRODUCTS for name in cell.makers} == set(products.CONTENDERS)


def test_clock_and_power_are_medians_of_whole_lines():
    told = "1980, 512.40\n1965, 498.00\n[N/A], 3\n1950, 505.00\n19"
    assert anchors.readings(told) == (1965, 505)
    assert anchors.readings("") is None and anchors.readings("1980, 5") is None
    meter = anchors.Meter()
    times = {"cublas": [100.0, 102.0, 101.0], "htile": [50.5]}
    assert anchors.line((1000, 1000, 1000), "rests", times, meter) == (
        "| 1000x1000x1000 | rests | 101.0 | 20 | – | – | 2.000 | – | – |"
    )


def test_anchors_need_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        anchors.main([])
    assert "needs a GPU" in capsys.readouterr().err


# ---- the host's time of calls --------------------------------------------------------------------


def test_calls_on_a_gpu_that_runs_nothing(monkeypatch, capsys, tmp_path):
    """All are measured, by functions that take the way of a GPU; then the CPU is one again."""
    monkeypatch.setattr(calls, "CALLS", 2)
    monkeypatch.setattr(calls, "keep_memory", lambda: None)  # it would be kept for other tests
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    file = tmp_path / "calls.json"
    options = ["--idle", "--rounds", "2", "--json", str(file)]
    kernels = ["--kernels", "rmsnorm", "swiglu", "products"]
    monkeypatch.setattr(sys, "argv", ["calls", *options, *kernels])
    calls.main()
    figures = json.loads(file.read_text())
    passes = {"inference", "forward", "both"}
    assert {k: {c: {*v} for c, v in f.items()} for k, f in figures.items()} == {
        "rmsnorm": {"htile": passes, "torch": passes},
        "swiglu": {"htile": passes, "torch": passes},
        "products": {"htile": {*calls.PRODUCTS}, "torch": {"linear"}},
    }
    assert all(t > 0 for f in figures.values() for v in f.values() for t in v.values())
    assert capsys.readouterr().out.count("htile") == 3
    files = [path for path in (fresh.REPO / "htile" / "run").rglob("*.py")
             if "runs_kernels" in path.read_text(encoding="utf-8")]  # fmt: skip
    names = (path.relative_to(fresh.REPO).with_suffix("") for path in files)
    asking = {".".join(name.parts) for name in names}
    assert {module.__name__ for module in idle.ASKING} == asking
    x = torch.randn(2, 8)
    torch.testing.assert_close(htile.rowwise(calls.KERNELS["softmax"].function)(x), x.softmax(-1))
    for f in calls.PRODUCTS.values():
        f._forget()


# ---- the peak memory of both passes --------------------------------------------------------------


def test_the_peak_memory_of_training(monkeypatch, capsys, tmp_path):
    """Each contender runs both passes of each cell; one that is absent has a dash in the table."""
    steps = []

    def peak(step):
        found = step()
        steps.append([each.shape for each in found])
        return sum(each.nbytes for each in found)

    monkeypatch.setattr(training_memory, "peak", peak)
    monkeypatch.setattr(training_memory, "DEVICE", "cpu")
    file = tmp_path / "memory.json"
    options = ["--memory", "--shapes", "6x64", "--json", str(file)]
    who = ["--contenders", "htile", "torch", "quack"]
    monkeypatch.setattr(sys, "argv", ["training", *options, *who])
    training.main()
    found, moved = json.loads(file.read_text()), 6 * 64 * 2
    assert {*found} == {f"{name} 6x64" for name in (*training.KERNELS, training.LOSS)}
    for cell, of in found.items():
        kernel = training.KERNELS.get(cell.partition(" ")[0])
        rows, vectors = (1, 0) if kernel is None else (kernel.rows, kernel.vectors)
        assert of == dict.fromkeys(("htile", "torch"), rows * moved + vectors * 128)
    text = capsys.readouterr().out
    assert "| softmax 6x64 | 0.0 | 0.0 | – |" in text
    assert "quack takes no part in cross_entropy 6x64" in text
    monkeypatch.setattr(sys, "argv", ["training", "--kernels", training.LOSS])
    with pytest.raises(SystemExit):
        training.main()
    assert "only --memory" in capsys.readouterr().err


def test_a_peak_is_what_a_step_adds(monkeypatch):
    """Of what a warm step takes; what was there before does not count."""
    there, calls = types.SimpleNamespace(now=100, most=900), []

    def step():
        calls.append(None)
        there.most = max(there.most, there.now + 50)

    cuda = {
        "synchronize": lambda: None, "empty_cache": lambda: None,
        "memory_allocated": lambda: there.now,
        "reset_peak_memory_stats": lambda: setattr(there, "most", there.now),
        "max_memory_allocated": lambda: there.most,
    }  # fmt: skip
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert training_memory.peak(step) == 50 and len(calls) == 3
