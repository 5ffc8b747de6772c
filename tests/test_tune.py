"""The search for faster plans, with made-up times of a pretended GPU, and what is kept of it."""

import json
import os
import random
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import htile
from htile import cli, lower
from htile.build import cache
from htile.build.arch import arch_named
from htile.errors import ArgumentError, LoweringError
from htile.lower import choose, enumerate_plans, printed
from htile.lower.choice.cost import cost
from htile.lower.emission.emit import emit
from htile.run import ahead, rowwise
from htile.run import launch as launching
from htile.run import tuning as calls
from htile.tune import search as tuning
from htile.tune.statistics import Estimate
from tests.request_of import request_of

REPO = Path(__file__).parents[1]
CUDA = torch.device("cuda", 0)


@htile.rowwise
def softmax(x):
    return torch.softmax(x, -1)


@htile.rowwise
def norm(x, weight):
    return x * torch.rsqrt((x * x).mean() + 1e-6) * weight


def rows(m=2048, n=4096, dtype=torch.bfloat16):
    return torch.empty(m, n, dtype=dtype, device="meta")


class Machine:
    """A pretended GPU; `costs` has the microseconds of kernels by text, and others take 100."""

    def __init__(self, monkeypatch, name="GPU X"):
        self.costs, self.built, self.name, self.measured = {}, [], name, 0
        self.noise = random.Random(0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: self.name)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module in (ahead, calls, rowwise):
            monkeypatch.setattr(module, "device_of", lambda signature, values: CUDA)
        monkeypatch.setattr(launching.Kernel, "artifact", property(lambda kernel: kernel.source))
        monkeypatch.setattr(launching, "load", self.load)
        for module in (calls, rowwise):
            monkeypatch.setattr(module, "run", lambda launch, values, outs=(): launch.kernel())
        monkeypatch.setattr(tuning, "time_on", self.time)
        monkeypatch.setattr(tuning, "building", lambda requests: nullcontext(list))

    def load(self, source):
        self.built.append(source)
        return lambda: self.costs.get(source, 100.0)

    def time(self, device, contenders, rounds):
        assert device == CUDA
        self.measured += 1
        return {
            name: [call() * self.noise.gauss(1, 0.01) for _ in range(rounds)]
            for name, call in contenders.items()
        }


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "cache"))
    for f in (softmax, norm):
        f._forget()
    yield Machine(monkeypatch)
    for f in (softmax, norm):
        f._forget()


def candidates(found, current, m):
    """The plans that `tune` tries of these, in its order."""
    return [one.plan for one in tuning.candidates(found, current, m, partial(printed, None))]


def plans(f, *args):
    """The plans that calls may run, as `tune` tries them, and the numerics of the default."""
    plan = f.inspect(*args, arch="sm_80").plan  # no tuned one: another architecture's
    target = request_of(f, args).target(arch_named("sm_90a"))
    found = enumerate_plans(plan.graph, target)
    default = choose(found)
    return candidates(found, default, len(args[0])), default.numerics


def others(f, *args, numerics=False):
    """The plans that are not the default: those of its numerics, or those of others."""
    found, default = plans(f, *args)
    return [p for p in found[1:] if (p.numerics != default) == numerics]


# ------------------------------------------------------------------------------------ candidates


def test_candidates_begin_with_the_default_and_the_plan_in_use():
    found, _ = plans(norm, rows(), rows(1)[0])
    current = found[5]
    ordered = candidates(found[::-1], current, 2048)
    assert ordered == [found[0], current, *(p for p in found[1:] if p != current)]
    assert len({emit(plan) for plan in ordered}) == len(ordered)
    assert candidates(found + found, found[0], 2048) == found, "one of each text"
    times = [cost(plan, 2048).time for plan in found[1:]]
    assert times == sorted(times) and len(set(times)) > 10


@pytest.mark.parametrize("numerics", [False, True])
def test_other_numerics_are_tried_on_request_only(machine, numerics):
    args = rows(), rows(1)[0]
    found, default = plans(norm, *args)
    same = [p for p in found if p.numerics == default]
    assert 1 < len(same) < len(found)
    tuned = norm.tune(*args, numerics=numerics)
    tried = found if numerics else same
    assert machine.built == [emit(plan) for plan in candidates(tried, found[0], 2048)]
    assert tuned.tried == tuned.plans == len(tried)


def test_a_plan_is_printed_once(machine, monkeypatch):
    texts = []
    monkeypatch.setattr(lower, "emit", lambda plan: texts.append(emit(plan)) or texts[-1])
    tuned = softmax.tune(rows(), numerics=True)
    assert len(texts) == tuned.tried == len(machine.built)


# ----------------------------------------------------------------------------------------- winner


def canned(costs):
    """A measure by made-up costs: a number for each plan or a function of the rounds, else 100."""
    noise = random.Random(0)

    def measure(contenders, rounds):
        def cost(plan):
            found = next((c for p, c in costs if p is plan), 100.0)
            return found(rounds) if callable(found) else found

        return {
            name: [cost(plan) * noise.gauss(1, 0.01) for _ in range(rounds)]
            for name, plan in contenders.items()
        }

    return measure


def search(found, costs, seconds=60.0, **more):
    return tuning.search(found, lambda plan: plan, canned(costs), seconds, **more)


def test_the_fastest_wins_with_its_gain():
    found, _ = plans(softmax, rows())
    costs = [(found[2], 95.0), (found[7], 80.0), (found[9], 85.0), (found[1], 130.0)]
    result = search(found, costs)
    assert result.plan is found[7] and result.tried == len(found)
    assert result.ratio.low < 0.8 < result.ratio.high < 0.82
    assert result.us == pytest.approx(80, rel=0.01)
    assert result.default_us == pytest.approx(100, rel=0.01)


def test_what_is_faster_within_the_noise_does_not_win():
    found, _ = plans(softmax, rows())
    result = search(found, [(plan, 99.97) for plan in found[1:]])
    assert result.plan is found[0] and result.ratio == Estimate(1, 1, 1)
    assert result.us == result.default_us == pytest.approx(100, rel=0.01)


def test_what_was_faster_once_does_not_win():
    """The winner is timed again, for longer; if it was lucky, the next best one is."""
    found, _ = plans(softmax, rows())
    lucky = lambda rounds: 70.0 if rounds == tuning.ROUNDS else 101.0  # noqa: E731
    assert search(found, [(found[3], lucky)]).plan is found[0]
    result = search(found, [(found[3], lucky), (found[4], 90.0)])
    assert result.plan is found[4] and result.ratio.median == pytest.approx(0.9, abs=0.02)


def test_one_plan_alone_is_the_default():
    found, _ = plans(softmax, rows())
    result = search(found[:1], [])
    assert (result.plan, result.tried) == (found[0], 1)


def test_no_plan_is_begun_after_the_time_is_up():
    found, _ = plans(softmax, rows())
    now = iter(range(0, 1000, 10))  # each look at the clock is ten seconds later
    shown = []
    result = search(found, [(found[2], 50.0), (found[3], 40.0)], 25.0, clock=lambda: next(now),
                    show=lambda *what: shown.append(what))  # fmt: skip
    assert result.tried == 3 and result.plan is found[2], "found[3] was not tried"
    assert [done for done, _ in shown] == [0, 1, 2, 3] and shown[3][1].startswith("again")
    assert search(found, [(found[2], 50.0)], 1e-9).tried == 1


# ------------------------------------------------------------------------------- kept and used


def tune_to(machine, f, plan, *args, **more):
    machine.costs = {emit(plan): 80.0}
    tuned = f.tune(*args, **more)
    assert same(tuned.plan, plan)
    return tuned


def same(a, b):
    return a.properties() == b.properties()


def test_calls_of_the_kind_run_the_winner(machine):
    x = torch.ones(2048, 4096, dtype=torch.bfloat16)
    default = emit(plans(softmax, x)[0][0])
    best = others(softmax, x)[1]
    assert softmax(x) == 100.0 and machine.built == [default]
    tuned = tune_to(machine, softmax, best, x)
    assert tuned.file.parent == cache.cache_folder() / "tuned"
    machine.built.clear()
    assert softmax(x) == 80.0 and machine.built == [emit(best)], "what it remembered is forgotten"
    assert same(softmax.inspect(x).plan, best)
    assert same(softmax.inspect(x, arch="sm_90a").plan, best)
    assert same(softmax.inspect(torch.ones(4096, 4096, dtype=torch.bfloat16)).plan, best)


FRESH = """
import sys, torch
from htile.run import ahead
from tests.test_tune import softmax, rows
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.get_device_name = lambda device: sys.argv[1]
ahead.device_of = lambda signature, values: torch.device("cuda", 0)
print(softmax.inspect(rows()).plan.properties())
"""


def test_a_fresh_process_runs_the_winner(machine):
    found, _ = plans(softmax, rows())
    best = others(softmax, rows())[0]
    tune_to(machine, softmax, best, rows())

    def told(gpu):
        environ = os.environ | {"PYTHONPATH": str(REPO)}
        run = subprocess.run([sys.executable, "-c", FRESH, gpu], env=environ, text=True,
                             capture_output=True)  # fmt: skip
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert told("GPU X") == str(best.properties())
    assert told("GPU Y") == str(found[0].properties())


def test_other_kinds_of_calls_keep_the_default(machine, monkeypatch):
    found, _ = plans(softmax, rows())
    tune_to(machine, softmax, others(softmax, rows())[0], rows())
    fast = htile.rowwise(softmax._fn, fastmath=True)
    twice = htile.rowwise(lambda x: torch.softmax(2 * x, -1))
    cases = [
        (softmax, rows(1)), (softmax, rows(n=8192)), (softmax, rows(dtype=torch.float16)),
        (softmax, rows(n=4097)[:, :4096]), (softmax, rows()[None]), (fast, rows()), (twice, rows()),
        (softmax.with_plan(loader="direct"), rows()),
    ]  # fmt: skip
    for f, x in cases:
        wanted = [p for p in plans(f, x)[0] if f._wanted.items() <= p.properties().items()]
        assert same(f.inspect(x).plan, choose(wanted))
    machine.name = "GPU Y"
    assert same(softmax.inspect(rows()).plan, found[0])
    machine.name = "GPU X"
    assert not same(softmax.inspect(rows()).plan, found[0])
    versions = cache.versions
    monkeypatch.setattr(cache, "versions", lambda name: versions(name) | {"htile": "0.0.1"})
    assert same(softmax.inspect(rows()).plan, found[0])


def test_the_users_lines_and_name_do_not_count(machine):
    best = others(softmax, rows())[0]
    tune_to(machine, softmax, best, rows())

    @htile.rowwise
    def moved(x):
        return torch.softmax(x, -1)

    assert same(moved.inspect(rows()).plan, best)


def test_numerics_are_kept_for_every_batch_and_alignment(machine):
    """A row's bits depend on nothing but the row, even after tuning."""
    best = others(softmax, rows(), numerics=True)[3]
    tuned = tune_to(machine, softmax, best, rows(), numerics=True)
    assert "bits differ" in str(tuned)
    assert same(softmax.inspect(rows()).plan, best)
    for x in (rows(1), rows(n=4097)[:, :4096], rows()[None]):
        plan = softmax.inspect(x).plan
        assert plan.numerics == best.numerics
        like = [p for p in plans(softmax, x)[0] if p.numerics == best.numerics]
        assert same(plan, choose(like))
    # a later search without `numerics` changes no bit either, and finds that plan in use
    machine.built.clear()
    again = softmax.tune(rows())
    assert same(again.plan, best) and again.plan.numerics == again.default.numerics
    (few,) = {p.numerics for p in tuning.in_force(plans(softmax, rows())[0], {}, CUDA)}
    assert few == best.numerics
    # and one with it may go back
    machine.costs = {}
    back = softmax.tune(rows(), numerics=True)
    assert back.plan is back.default and same(softmax.inspect(rows(1)).plan,
                                              plans(softmax, rows(1))[0][0])  # fmt: skip


@htile.rowwise
def doubled(x):
    return x * 2.0


def training_rows(x, w):
    return x.requires_grad_(), w.requires_grad_()


def of_passes(f, *args):
    """The plans of both passes that calls run, which `inspect` shows of tensors on the GPU."""
    training = f.inspect(*args).training
    return training.forward.plan, training.backward.plan


@pytest.mark.parametrize("numerics", [False, True])
def test_the_passes_of_training_are_tuned(machine, numerics):
    args = training_rows(rows(), torch.empty(4096, device="meta", dtype=torch.bfloat16))
    before = of_passes(norm, *args)
    tried = {}
    for name, plan in zip(("forward", "backward"), before, strict=True):
        found = enumerate_plans(plan.graph, plan.target)
        like = found if numerics and name == "backward" else [
            p for p in found if p.numerics == plan.numerics
        ]  # fmt: skip
        tried[name] = next(p for p in like[::-1] if emit(p) != emit(plan))
        machine.costs[emit(tried[name])] = 70.0
    tuned = norm.tune(*args, numerics=numerics)
    assert same(tuned.forward.plan, tried["forward"])
    assert same(tuned.backward.plan, tried["backward"])
    assert all(map(same, of_passes(norm, *args), (tuned.forward.plan, tuned.backward.plan)))
    assert tuned.forward.plan.numerics == norm.inspect(*args).plan.numerics, "y keeps its bits"
    assert "the backward pass: tuned norm_backward" in str(tuned)
    if not numerics:
        assert tuned.backward.plan.numerics == before[1].numerics


def test_without_gradients_no_pass_is_tuned(machine):
    args = rows(), torch.empty(4096, device="meta", dtype=torch.bfloat16)
    tuned = norm.tune(*args)
    assert tuned.forward is tuned.backward is None
    with torch.no_grad():
        tuned = norm.tune(*training_rows(*args))
    assert tuned.forward is tuned.backward is None
    positive = htile.rowwise(lambda x: x > 0)
    assert positive.tune(rows().requires_grad_()).backward is None
    tuned = softmax.tune(rows().requires_grad_())
    assert tuned.forward is None and tuned.backward is not None, "its result is what is kept"


def test_all_plans_of_a_map_are_tried(machine):
    """Nothing is reduced, so no plan changes bits. Other numbers of rows keep their default."""
    x, many = rows(4), rows(4096)
    best = next(p for p in others(doubled, x, numerics=True) if p.numerics.cluster_n == 1)
    tuned = tune_to(machine, doubled, best, x)
    assert tuned.plan.numerics != tuned.default.numerics and "bits differ" not in str(tuned)
    assert same(doubled.inspect(x).plan, best)
    assert same(doubled.inspect(many).plan, plans(doubled, many)[0][0])


def test_a_placement_alone_brings_no_numerics(machine):
    """If the file of the numerics is gone, the file of the plan changes no bits."""
    best = others(softmax, rows(), numerics=True)[0]
    tuned = tune_to(machine, softmax, best, rows(), numerics=True)
    for path in tuned.file.parent.iterdir():
        if path != tuned.file:
            path.unlink()
    assert same(softmax.inspect(rows()).plan, plans(softmax, rows())[0][0])


def test_rows_that_are_copied_first_are_tuned_as_they_are_run(machine):
    x = torch.ones(4096, 2048, dtype=torch.bfloat16).t()
    best = others(softmax, rows())[0]
    tune_to(machine, softmax, best, x)
    assert same(softmax.inspect(x).plan, best) and same(softmax.inspect(rows()).plan, best)


def test_a_function_with_a_plan_is_tuned_within_it(machine):
    f = softmax.with_plan(threads_per_row=128)
    best = [p for p in others(softmax, rows(), numerics=True) if p.numerics.threads_per_row == 128]
    tune_to(machine, f, best[2], rows())
    assert same(f.inspect(rows()).plan, best[2])
    assert same(softmax.inspect(rows()).plan, plans(softmax, rows())[0][0])


@pytest.mark.parametrize("content", [
    "pipe",
    b"", b"{", b"\xff\xfe", b"null", b"[]", b"[" * 10000, b'{"key": 1}', b'{"plan": {}}', "half",
    "foreign", "gone", "list",
])  # fmt: skip
def test_what_is_torn_or_foreign_or_no_plan_any_more_is_ignored(machine, content):
    found, _ = plans(softmax, rows())
    tuned = tune_to(machine, softmax, others(softmax, rows())[0], rows())
    whole = tuned.file.read_bytes()
    said = json.loads(whole)
    if content == "half":
        content = whole[: len(whole) // 2]
    elif content == "foreign":
        content = json.dumps(said | {"key": "0" * 64}).encode()
    elif content == "gone":
        content = json.dumps(said | {"plan": said["plan"] | {"num_threads": 96}}).encode()
    elif content == "list":
        content = json.dumps(said | {"plan": [1]}).encode()
    if content == "pipe":  # that nobody writes to
        tuned.file.unlink()
        os.mkfifo(tuned.file)
    else:
        tuned.file.write_bytes(content)
    assert same(softmax.inspect(rows()).plan, found[0])
    tuned.file.unlink()
    tuned.file.write_bytes(whole)
    assert not same(softmax.inspect(rows()).plan, found[0])


def test_the_file_says_what_it_is_for(machine):
    tuned = tune_to(machine, softmax, others(softmax, rows())[0], rows())
    said = json.loads(tuned.file.read_text())
    assert said["plan"] == tuned.plan.properties()
    assert said["for"]["gpu"] == "GPU X" and said["for"]["target"]["arch"]["name"] == "sm_90a"
    assert [p.suffix for p in tuned.file.parent.iterdir()] == [".json"], "nothing unfinished"


def test_the_cache_knows_and_forgets(machine, capsys):
    tune_to(machine, softmax, others(softmax, rows())[0], rows())
    folder = cache.cache_folder()
    assert htile.cache_info().tuned == 1
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{folder}: 0 kernels, 0 B of 512 MiB, 1 tuned plan\n"
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"removed 0 kernels and 1 tuned plan from {folder}\n"
    assert htile.cache_info().tuned == 0 and not (folder / "tuned").exists()
    assert same(softmax.inspect(rows()).plan, plans(softmax, rows())[0][0])


def test_a_folder_that_can_not_be_written_costs_a_warning(machine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match=r"tuned plans can not be kept .* run the default"):
        tuned = softmax.tune(rows())
    assert tuned.file is None and str(tuned).endswith("not kept")


# -------------------------------------------------------------------------------- words, progress


def test_the_result_in_words(machine):
    best = others(softmax, rows())[0]
    tuned = tune_to(machine, softmax, best, rows())
    first, times, *layout, file = str(tuned).splitlines()
    count = len(others(softmax, rows())) + 1
    pattern = rf"tuned softmax, N = 4096, on GPU X: {count} of {count} plans tried in \d+\.\d s"
    assert re.fullmatch(pattern, first)
    pattern = (r"  (1\d\d|99)\.\d\d µs by default, now (79|8\d)\.\d\d µs: (19|20|21)\.\d % less "
               r"\(95 % interval [12]\d\.\d to 2\d\.\d\)")  # fmt: skip
    assert re.fullmatch(pattern, times)
    assert layout == [f"  {line}" for line in best.layout()] and file == f"  kept in {tuned.file}"
    assert tuned.gain.low < 20 < tuned.gain.high
    machine.costs = {}
    said = str(softmax.tune(rows())).splitlines()[1]
    pattern = r"  the default stays, (100|99)\.\d\d µs: none was faster beyond the noise"
    assert re.fullmatch(pattern, said)


class Terminal:
    """A terminal that keeps what is written to it."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("rich", [True, False])
def test_progress_is_shown_on_a_terminal_only(machine, monkeypatch, capsys, rich):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("TERM", "xterm")
    assert softmax.tune(rows()).file and capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    softmax.tune(rows(), progress=False)
    assert sys.stderr.text == ""
    softmax.tune(rows())
    assert "softmax" in sys.stderr.text
    count = len(others(softmax, rows())) + 1
    lines = sys.stderr.text.splitlines()
    assert rich or (lines[0] == f"softmax: 0 of {count}, the default" and len(lines) == count)


# ------------------------------------------------------------------------------------------ errors


def test_without_a_gpu():
    for x in (torch.ones(4, 64), torch.empty(4, 64, device="meta")):
        with pytest.raises(ArgumentError, match=rf"softmax.tune times plans.* {x.device}.*CUDA"):
            softmax.tune(x)


def test_wrong_use(machine, monkeypatch):
    with pytest.raises(ArgumentError, match="no rows"):
        softmax.tune(rows(0))
    for seconds in (0, -1.0, float("nan"), "10", True):
        with pytest.raises(ArgumentError, match="above 0"):
            softmax.tune(rows(), seconds=seconds)
    with pytest.raises(ArgumentError, match="no keyword argument 'out'"):
        softmax.tune(rows(), out=rows())
    with pytest.raises(LoweringError, match="no plan has"):
        softmax.with_plan(num_threads=7).tune(rows())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ArgumentError, match="captured"):
            softmax.tune(rows())
    monkeypatch.setenv("HTILE_CACHE_DIR", "")
    with pytest.raises(ArgumentError, match=r"turned off; set\s+HTILE_CACHE_DIR"):
        softmax.tune(rows())
    assert machine.measured == 0
