"""The demo: whole, without a GPU; what it shows on one, with made-up measurements."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks.kernels import LENIENT
from examples import NAMES, load
from examples import __main__ as demo
from examples.run import TORCH
from htile.testing import float32_errors, oracle, ulp
from tests.lower.cases import example_kernel

REPO = Path(__file__).parents[1]
COPY, OURS, EAGER = 100.0, 125.0, 300.0  # microseconds


def run_demo(cache, columns="80"):
    environ = os.environ | {
        "HTILE_CACHE_DIR": str(cache), "COLUMNS": columns, "CUDA_VISIBLE_DEVICES": "",
        "PYTHONIOENCODING": "utf-8",
    }  # fmt: skip
    run = subprocess.run([sys.executable, "-m", "examples"], cwd=REPO, env=environ,
                         capture_output=True, text=True, timeout=600)  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the demo prints with an empty cache, and then with a full one."""
    cache = tmp_path_factory.mktemp("demo")
    return run_demo(cache), run_demo(cache, "120")


def test_one_example_is_shown_from_its_lines_to_its_registers(shown):
    text = shown[0]
    parts = [
        "There is no GPU here",
        "1. What you write: examples/softmax.py",
        "@htile.rowwise\ndef softmax(x):\n    e = torch.exp(x - x.max())",
        "2. The graph, stage by stage",
        "stage 1    max behind one barrier",
        "max0 = max(x)",
        "3. The plan",
        "plan softmax, N = 4096, sm_90a",
        "4. The kernel that is emitted, all of it",
        "5. What it compiles to, for sm_90a",
        "registers and 0 bytes of stack a thread",
        "Every example",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_all_of_the_emitted_kernel_is_shown(shown):
    """Line breaks apart, which depend on the terminal, and comments of lines that are too long."""
    function, arguments = load("softmax")
    kernel = function.inspect(*arguments(*demo.CHECKED, torch.bfloat16, "meta"))
    for text in shown:
        start = text.index("4. The kernel that is emitted, all of it")
        printed = text[start : text.index("5. What it compiles to")]
        for line in kernel.source.splitlines():
            code = line.partition("  # ")[0]
            assert re.sub(r"\s", "", code) in re.sub(r"\s", "", printed), line


def test_every_example_is_checked_and_compiled(shown):
    for text in shown:
        table = text[text.index("Every example") :]
        for name in NAMES:
            (line,) = re.findall(rf"^{name} +error.*$", table, re.M)
            error, stages, registers = re.search(
                r"error (\d\.\d\d) +stages (\d) +registers +(\d+)", line
            ).groups()
            assert 0 < float(error) <= 1 and int(registers) > 8
            assert int(stages) == example_kernel(name, 4096).plan.stages


def test_it_says_what_was_compiled_and_what_came_from_the_cache(shown):
    cold, warm = shown
    assert f"Kernels compiled: {len(NAMES)}; taken from the cache: 0." in " ".join(cold.split())
    assert f"Kernels compiled: 0; taken from the cache: {len(NAMES)}." in " ".join(warm.split())
    assert len(re.findall(r"compiled in \d+\.\d\d s", cold)) == len(NAMES)
    assert "from the cache:" in warm and "compiled in" not in warm
    assert len(re.findall(r"registers +\d+   from the cache$", warm, re.M)) == len(NAMES) - 1
    assert "already compiled" in cold and "already compiled" in warm, "softmax, shown before"


@pytest.mark.parametrize(("which", "width"), [(0, 80), (1, 120)])
def test_it_fits_a_terminal(shown, which, width):
    assert max(map(len, shown[which].splitlines())) <= width
    assert "\x1b" not in shown[which], "no colours where nobody looks"


def measured(name="softmax", ours=OURS):
    times = {"htile": [ours] * 3, "torch": [EAGER] * 3, "copy": [COPY - 1, COPY, COPY + 9]}
    return demo.Measured(name, 0.31, 10**9, times)


def test_a_line_has_error_time_bandwidth_share_and_how_much_faster():
    line = demo.table_line(measured(), demo.Page(100, False))
    assert line.split()[:6] == ["softmax", "0.31", "125.0", "us", "8000", "80%"]
    assert line.split()[-4:] == ["300.0", "us", "2.4", "x"]
    assert "█" * 24 in line and "█" * 25 not in line, "80 % of 30"


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("ours", [20.0, 125.0, 20000.0])
def test_lines_stand_below_their_headings(width, ours):
    page = demo.Page(width, False)
    heading, line = demo.heading(page), demo.table_line(measured("capped_softmax", ours), page)
    assert len(heading) == len(line) <= width
    for column, text in (("error", "0.31"), ("of a copy", "%"), ("torch", "us"), ("faster", "x")):
        end = heading.index(column) + len(column)
        assert line[:end].endswith(text), column


def test_colours_change_no_text():
    plain = demo.table_line(measured(), demo.Page(80, False))
    painted = demo.table_line(measured(), demo.Page(80, True))
    assert "\x1b[" in painted and re.sub(r"\x1b\[\d+m", "", painted) == plain


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "    "), (0.5, "██  "), (0.53125, "██▏ "), (1.0, "████"), (1.4, "████")],
)
def test_a_bar_ends_at_the_share(share, text):
    assert demo.Page(80, False).bar(share, 4) == text


def test_the_summary_has_geometric_means():
    text = demo.summary([measured(ours=50.0), measured(ours=200.0)])
    assert "100% of the speed of a copy" in text and "3.0 times as fast as torch" in text


def test_an_example_is_measured_beside_torch_and_a_copy():
    """All that the demo does on a GPU but the timing, on the CPU."""
    asked = []

    def timer(contenders, rounds):
        asked.append((list(contenders), rounds))
        for call in contenders.values():
            call()
        return {name: [5.0] for name in contenders}

    for name in NAMES:
        found = demo.measure(name, "cpu", (3, 64), timer)
        assert found.name == name and 0 < found.error <= 1
        function, arguments = load(name)
        args = arguments(3, 64, torch.bfloat16, "cpu")
        result = function(*args)
        leaves = pytree.tree_leaves(result)
        rows = [t for t in (*args, *leaves) if t.shape[0] == 3]
        assert found.bytes == sum(t.nbytes for t in rows)
        assert found.share == found.speedup == 1.0
    assert asked == [(["htile", "torch", "copy"], demo.ROUNDS)] * len(NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_timed_beside_an_example_is_the_same_in_torch(name, dtype):
    """By the bound of HTile's own results, widened as for the benchmarks' other contenders."""
    torch.manual_seed(0)
    function, arguments = load(name)
    args = arguments(40, 300, dtype, "cpu")
    ours, theirs = function(*args), TORCH[name](*args)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    leaves = map(pytree.tree_leaves, (ours, theirs, oracle(function, *args)))
    errors = float32_errors(function, *args)
    for mine, other, exact, error in zip(*leaves, errors, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        bound = 2 * error + 2 * ulp(exact.abs().amax(-1, keepdim=True), other.dtype)
        assert ((other.double() - exact).abs() <= LENIENT * bound).all()


def test_on_a_gpu_every_example_is_in_the_table_and_one_is_shown(monkeypatch, capsys):
    """All of `main` there, with made-up measurements and arguments on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(demo, "measure", measured)
    monkeypatch.setenv("COLUMNS", "100")

    def on_cpu(name):
        function, arguments = load(name)
        return function, lambda m, n, dtype, device: arguments(m, n, dtype, "cpu")

    monkeypatch.setattr(demo, "load", on_cpu)
    demo.main()
    text = capsys.readouterr().out
    assert "Every example on Some GPU" in text and "32768 rows of 4096 elements" in text
    for name in NAMES:
        assert len(re.findall(rf"^{name} +0\.31 +125\.0 us +8000 +80%.* 2\.4 x$", text, re.M)) == 1
    assert "80% of the speed of a copy, and 2.4 times as fast as torch" in " ".join(text.split())
    assert text.index("Every example on") < text.index("1. What you write") < text.index("5. What")
    assert max(map(len, text.splitlines())) <= 100


def test_every_example_has_the_same_in_torch():
    assert set(TORCH) == set(NAMES)


RIGHT = r"right; largest error \d\.\d\d of the bound"


@pytest.mark.parametrize("name", NAMES)
def test_each_example_has_a_main_that_checks_it(name, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    import_module(f"examples.{name}").main()
    found = re.findall(rf"^{name} \d+x\d+ \w+ on cpu +{RIGHT}$", capsys.readouterr().out, re.M)
    assert len(found) >= 6


def test_an_example_runs_alone():
    run = subprocess.run(
        [sys.executable, "-m", "examples.softmax"], cwd=REPO, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert len(re.findall(RIGHT, run.stdout)) == 6
