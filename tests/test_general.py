"""The benchmark of the general case: its functions, its halves, and what it says of them."""

import itertools
import math
from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch
from rich.console import Console
from torch.utils import _pytree as pytree

import htile
from benchmarks import accuracy, instructions, limit, plans
from benchmarks.check import Sample
from benchmarks.general import fit, measure, regret, suite
from benchmarks.general.population import (
    FITTING,
    FUNCTIONS,
    HALVES,
    JUDGING,
    LENGTHS,
    REAL,
    Cell,
    cells,
    half,
)  # fmt: skip
from benchmarks.kernels import DTYPES, KERNELS, LENIENT, STRICT
from benchmarks.report import show
from benchmarks.results import append, key, record
from htile.build import cache
from htile.lower import enumerate_plans
from htile.lower.choice import cost

BF16 = torch.bfloat16


def test_there_are_as_many_functions_as_are_asked_for():
    assert len(FUNCTIONS) >= 80 and not set(FUNCTIONS) & set(KERNELS)
    for part in HALVES:
        assert sum(half(name) == part for name in FUNCTIONS) >= 40
        assert sum(half(n) == part for n in LENGTHS) >= 40


def test_the_halves_never_change():
    """Moving a function or a length to the other half would let it be fitted and judged."""
    names = ("gemma_norm", "kl_of_logits", "mish_alone", 50257, 151936, 7168)
    assert [half(name) for name in names] == [FITTING, JUDGING, FITTING, JUDGING, FITTING, JUDGING]


def test_lengths_are_spread_and_of_all_kinds():
    drawn = [n for n in LENGTHS if n not in REAL]
    assert min(drawn) < 100 and max(drawn) > 200000
    for low in (64, 512, 4096, 32768):
        assert sum(low <= n < 8 * low for n in drawn) >= 10
    assert 20 <= sum(n % 2 for n in drawn) < len(drawn) * 0.6
    assert not [n for n in drawn if n % 8 == 0 and n & (n - 1) == 0]


def test_a_cell_is_of_one_half_and_drawn_again_the_same():
    found = cells(HALVES, 3)
    assert found == cells(HALVES, 3)
    assert all(half(c.function) == half(c.n) == c.half for c in found)
    assert set(cells((JUDGING,), 1)) <= {c for c in found if c.half == JUDGING}
    assert {c.function for c in cells(HALVES, 1)} == set(FUNCTIONS)
    few = sum(c.m < 512 and c.m * c.n < 1 << 26 for c in found)
    assert 0.15 < few / len(found) < 0.35


@pytest.mark.parametrize("n", [257, 1000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_batches_are_right(name, n):
    kernel = FUNCTIONS[name]
    torch.manual_seed(1)
    args = kernel.arguments(16, n, BF16, "cpu")
    sample = Sample(kernel, args)
    sample.check(kernel.function(*args), kernel.tolerance)
    sample.check(kernel.eager(*args), LENIENT)
    leaves = pytree.tree_leaves(kernel.function(*args))
    expected = [(t.shape, t.dtype) for t in kernel.results(args)]
    assert [(t.shape, t.dtype) for t in leaves] == expected


def test_only_generated_programs_may_err_more():
    strict = [name for name, kernel in FUNCTIONS.items() if kernel.tolerance == STRICT]
    assert len(strict) >= 80
    assert all(name.startswith("f") and name[1:].isdigit() for name in set(FUNCTIONS) - {*strict})


def test_a_limit_of_other_mixes_moves_as_many_bytes():
    for name in ("adam_step", "rotated", "four_statistics", "kl_of_logits", "masked_layernorm"):
        kernel = FUNCTIONS[name]
        args = kernel.arguments(8, 64, BF16, "cpu")
        for candidate in limit.candidates(kernel, args):
            candidate.call()
            assert candidate.right()


# ---- what is said of the results -----------------------------------------------------------------


def judged(count):
    """Names of functions of the judging half."""
    return list(itertools.islice((f for f in FUNCTIONS if half(f) == JUDGING), count))


def canned(suite_name, function, contenders, m=65536, n=2048, **more):
    times = {name: {"times": [t] * 7} for name, t in contenders.items()}
    return record(key(suite_name, function, "bf16", m, n), times, "us", bytes=m * n * 4, **more)


def text(records, tmp_path):
    console = Console(width=250, file=(tmp_path / "out").open("w"))
    show(records, console)
    console.file.close()
    return (tmp_path / "out").read_text()


def test_shares_of_the_limit_by_half(tmp_path):
    first, second = judged(2)
    records = [
        canned("general", first, {"htile": 100.0, "compile": 90.0, "limit": 81.0}),
        canned("general", second, {"htile": 100.0, "compile": 120.0, "limit": 100.0}),
        canned("general", second, {"htile": 5.0, "limit": 4.0}, m=4),
    ]
    shown = text(records, tmp_path)
    (line,) = [x for x in shown.splitlines() if "judging │ bf16" in x]
    for figure in (f"{math.sqrt(0.81):.3f}", "0.810", "1 of 2, by up to 11 %"):
        assert figure in line
    assert f"{first} bf16 65536x2048 0.810" in shown
    assert "few rows" in shown and "fitting" not in shown


def test_regret_by_half(tmp_path):
    first, second = judged(2)
    records = [
        canned("regret", first, {"default": 121.0, "best": 100.0}, plans=[{"us": 1.0}] * 30),
        canned("regret", second, {"default": 99.0, "best": 100.0}, plans=[{"us": 1.0}] * 10),
    ]
    (line,) = [x for x in text(records, tmp_path).splitlines() if "judging │ bf16" in x]
    for figure in ("1.100", "1.210", " 20 "):
        assert figure in line


def test_what_failed_is_named(tmp_path):
    (first,) = judged(1)
    failed = canned("general", first, {"limit": 4.0})
    failed["contenders"]["htile"] = {"error": "wrong: error 3 of the bound"}
    assert f"htile failed in {first} bf16 65536x2048: wrong: error 3" in text([failed], tmp_path)


class Options:
    half, each, functions, contenders, rounds, most = HALVES, 1, None, None, None, 40


def test_jobs_are_of_the_cells_that_are_asked_for():
    options = Options()
    options.half, options.functions = (FITTING,), None
    jobs = suite.jobs(options)
    assert len(jobs) == sum(half(name) == FITTING for name in FUNCTIONS)
    options.functions = [jobs[0].keys[0][1]]
    assert [job.keys for job in suite.jobs(options)] == [jobs[0].keys]
    assert regret.jobs(options)[0].contenders == ("default", "best")


def test_plans_are_compiled_ahead(monkeypatch, tmp_path):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path))
    options = Options()
    options.functions, options.most, options.workers = ["gemma_norm"], 3, 2
    regret.prepare(options)
    under_way = {**regret._UNDER_WAY}
    regret._UNDER_WAY.clear()
    assert len(under_way) == 3
    for (source, function, arch), future in under_way.items():
        artifact = future.result()
        assert (artifact.function, artifact.arch) == (function, arch)
        assert cache.path_of(source, function, arch).exists()


def test_regret_times_the_fastest_plans_again(monkeypatch):
    """Without a GPU: every plan's launch computes by the reference and has a time of its own."""
    kernel, cell = FUNCTIONS["gemma_norm"], Cell("gemma_norm", "bf16", 64, 2048)
    order = [one.source for one in regret._plans(cell, 6)]
    calls = []

    def arguments(m, n, dtype, device):
        return kernel.arguments(m, n, dtype, "cpu" if device == "cuda" else device)

    def build(source, function, arch):
        def launch(x, weight, eps, out):
            out.copy_(kernel.function(x, weight, eps))

        launch.rank = order.index(source)
        return launch

    class Method:
        def at_once(self, launches, rounds):
            calls.append(sorted(launches))
            return {k: [10.0 - call.func.rank] * rounds for k, call in launches.items()}

    monkeypatch.setitem(FUNCTIONS, "gemma_norm", replace(kernel, arguments=arguments))
    monkeypatch.setattr(plans, "build", build)
    monkeypatch.setattr(plans, "load", lambda launch: launch)
    monkeypatch.setattr(regret, "method", lambda cell: Method())
    options = Options()
    options.most = 6
    found, kept = regret._measure(cell, options, lambda text: None)
    assert calls == [[0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5]]
    assert found["best"]["plan"] == 5 and found["default"]["times"][0] == 10.0
    assert [entry["us"] for entry in kept] == [10.0, 9.0, 8.0, 7.0, 6.0, 5.0]
    assert kept[0]["cluster_n"] and kept[0]["loader"]


# ---- the cost model and its fit ------------------------------------------------------------------


def measured(functions, constants):
    """Records of the suite regret as if these constants were true of a GPU."""
    found = []
    for function in functions:
        c = next(c for c in cells((half(function),), 1) if c.function == function)
        kernel = FUNCTIONS[function]
        inspected = kernel.function.inspect(*kernel.arguments(c.m, c.n, DTYPES[c.dtype], "meta"))
        every = enumerate_plans(inspected.graph, inspected.plan.target)
        times = [cost.cost(plan, c.m, constants=constants).time / 1e3 for plan in every]
        entries = [
            {"us": us, **plan.properties()} for us, plan in zip(times, every, strict=True)
        ]
        contenders = {"default": times[0], "best": min(times)}
        found.append(canned("regret", function, contenders, c.m, c.n, plans=entries))
        found[-1]["dtype"] = c.dtype
    return found


FITTED = ("rmsnorm_backward", "l2_backward", "over_range", "collision_threshold")
TRUE = cost.CONSTANTS._replace(memory=1500.0, block=300.0, cluster=2500.0, moved=1.7)


def test_the_fit_finds_the_constants_that_times_were_made_with(monkeypatch):
    monkeypatch.setattr(fit, "STEPS", 150)
    monkeypatch.setattr(fit, "PRIOR", 0.002)  # so few cells would hold little against it
    found = [fit.cell_of(r, cost.H200) for r in measured(FITTED, TRUE)]
    fitted = fit.fit(found, cost.H200)

    def error(constants):
        off = [(c.expected(cost.H200, constants) / c.us).log() for c in found]
        return torch.cat([each - each.median() for each in off]).abs().mean().item()

    def regret_of(constants):
        return max(c.regret(cost.H200, constants) for c in found)

    assert error(TRUE) < 1e-9 and error(fitted) < 0.7 * error(fit.START)
    assert regret_of(fit.START) > 1.02 > regret_of(fitted)


def test_the_constants_choose_well_among_the_plans_that_they_were_fitted_to():
    """The file of times is readable, and the best of eight plans by cost is nearly the fastest."""
    records = fit.records_of(fit.TIMES)
    assert {fit.half_of(r) for r in records} == {FITTING}
    cells = [fit.cell_of(r, cost.H200) for r in records[::9]]
    found = [c for c in cells if c is not None]  # plans of odd lengths have changed since
    one = [c.regret(cost.H200, cost.CONSTANTS) for c in found]
    eight = [(c.us[c.expected(cost.H200, cost.CONSTANTS).argsort()[:8]].min() / c.us.min()).item()
             for c in found]  # fmt: skip
    assert len(found) > 30 and geometric_mean(one) < 1.1 and geometric_mean(eight) < 1.02


def test_what_is_measured_for_the_fit_is_of_the_fitting_half():
    """Known kernels and functions, at lengths of that half; functions at powers of two as well."""
    found = measure.cells()
    assert found == measure.cells() and len(found) > 400
    assert {c.function for c in found} == {*KERNELS, *(f for f in FUNCTIONS if half(f) == FITTING)}
    for c in found:
        power = c.function not in KERNELS and c.n & (c.n - 1) == 0
        assert power or half(c.n) == FITTING
    odd = measure.odd_cells()
    assert odd == measure.odd_cells() and {c.function for c in odd} == {c.function for c in found}
    assert all(c.n % 2 and half(c.n) == FITTING for c in odd)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_plans_that_are_measured_have_different_texts(first):
    c = measure.cells()[first]
    found = measure.plans(c)
    assert len({one.source for one in found}) == len(found) <= 19
    kernel = measure.EVERY[c.function]
    args = kernel.arguments(c.m, c.n, DTYPES[c.dtype], "meta")
    assert found[0].source == kernel.function.inspect(*args).source


def test_the_fit_never_sees_the_judging_half(monkeypatch, tmp_path, capsys):
    names = [FITTED[0], judged(1)[0]]
    append(tmp_path / "times.jsonl", measured(names, TRUE))
    seen = []
    monkeypatch.setattr(fit, "fit", lambda found, rates: seen.extend(found) or cost.CONSTANTS)
    fit.main([str(tmp_path / "times.jsonl"), "--judge"])
    assert [c.name.split()[0] for c in seen] == [FITTED[0]]
    out = capsys.readouterr().out
    assert "judged: 1 cells" in out and "fitted: 1 cells" in out
    for field in ("launch", "memory", "cluster"):
        assert f"    {field}=" in out


def test_what_bounds_a_plan():
    """A copy of large rows is bound by memory, logit by instructions, one row by waiting."""
    kernel = FUNCTIONS["logit"]
    plan = kernel.function.inspect(*kernel.arguments(4096, 8192, BF16, "meta")).plan
    plain = htile.rowwise(lambda x: x * 2.0)
    copy = plain.inspect(torch.empty(4096, 8192, dtype=BF16, device="meta")).plan
    assert next(iter(cost.cost(copy, 65536).bounds)) == "memory"
    assert next(iter(cost.cost(plan, 65536).bounds)) == "issue"
    assert next(iter(cost.cost(copy, 1).bounds)) in ("waits", "around")
    bytes_ = 65536 * 8192 * 4
    assert 1 <= cost.cost(copy, 65536).time / (bytes_ / cost.H200.memory) < 1.2


def test_instructions_are_counted_for_an_element():
    """One more addition is one more; exp has one for the special function units."""
    one, two = (instructions.of_element(f, 1) for f in (lambda x: x + 1, lambda x: abs(x + 1) + 2))
    assert two[0] - one[0] == 1 and one[1] == two[1] == 0
    count, special = instructions.of_element(lambda x: torch.exp(x), 1)
    assert special == 1 and 6 <= count - one[0] <= 9
    long, _ = instructions.of_element(lambda x: torch.log(x), 1)  # the default plan is in loops
    assert 15 <= long - one[0] <= 30
    assert {*instructions.ONE} & {*instructions.TWO} == set()


def test_accuracy_counts_in_units_of_the_last_place():
    numbers = [1.0, 1 + 2.0**-24, 3.0, math.inf, math.nan, 2.0**130, 1.0, 2.0**-150]
    expected = torch.tensor(numbers, dtype=torch.float64)
    got = torch.tensor([1.0, 1.0, 3 + 2.0**-22, math.inf, math.nan, math.inf, math.nan, 0.0])
    found = accuracy.errors(got, expected).tolist()
    assert found == [0, 0.5, 1, 0, 0, 0, math.inf, 0.5]
    assert accuracy.errors(torch.tensor([1 + 2.0**-7]).bfloat16(), torch.ones(1).double()) == 1
    assert accuracy.errors(torch.tensor([65504.0]).half(), torch.tensor([1e9]).double()) == 1
    assert {*accuracy.SHORTER} <= {*instructions.ONE, *instructions.TWO}
    assert {*accuracy.STABLE} <= {*instructions.ONE}


@pytest.mark.parametrize("name", accuracy.STABLE)
def test_the_references_of_accuracy_are_the_functions(name):
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64)
    torch.testing.assert_close(accuracy.STABLE[name](x), instructions.ONE[name](x))
