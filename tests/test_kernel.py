"""What `inspect` returns: a page to read, and files."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import htile
from htile import cli
from htile.build import cubin as cubin_module
from htile.errors import ArgumentError, CompileError, UnsupportedError
from htile.frontend.ops import Op
from tests.lower.cases import BF16, EXAMPLES, example_kernel


def test_the_page_has_every_part_in_order():
    kernel = example_kernel("capped_softmax", 1000)
    page = str(kernel)
    parts = ["== graph ==", "== plan ==", "== source ==", "== resources, sm_90a ==", "== cost =="]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    for part in (kernel.graph, kernel.plan, kernel.source.rstrip(), kernel.resources):
        assert str(part) in page


def test_the_graph_reads_like_the_function():
    lines = str(example_kernel("softmax", 4096).graph).splitlines()
    assert lines[0] == "graph softmax, one row of N = 4096"
    assert lines[1].split() == ["%0", "=", "input", "x", "(row", "bf16)", ":", "row", "f32[4096]"]
    assert [line.split()[2] for line in lines[1:-1]] == ["input", "max", "sub", "exp", "sum", "div"]
    assert all("# softmax.py:" in line for line in lines[2:-1])
    assert lines[-1].strip() == "return out = %5 as bf16 row"


def test_the_plan_reads_like_a_kernel():
    text = str(example_kernel("softmax", 4096).plan)
    assert text.startswith("plan softmax, N = 4096, sm_90a\n")
    order = ["numerics", "placement", "8192 bytes read and 8192 written a row", "load      row x",
             "reduce    stage 1: max0 = max of x, slot 0", "compute   exp0 = exp_bounded(sub0)",
             "reduce    stage 2: sum0 = sum of exp0, slot 1", "store     out (bf16) = div0",
             "across exchanges: x in registers, exp0 in registers"]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_the_graph_before_the_passes_is_kept():
    kernel = example_kernel("layernorm", 64)
    means = [sum(node.op is Op.MEAN for node in graph) for graph in (kernel.traced, kernel.graph)]
    assert means == [2, 1], "a pass makes a sum of the mean of squares"
    assert kernel.traced.name == kernel.graph.name == kernel.name == "layernorm"


def test_resources_say_what_a_block_uses():
    kernel = example_kernel("softmax", 4096)
    used = kernel.resources
    assert str(used).startswith(f"{used.registers} registers and 0 bytes of stack a thread, ")
    assert f"{used.threads} threads, {used.dynamic_shared} bytes of shared memory" in str(used)
    assert kernel.resources is used, "compiled once"


def test_rows_that_are_copied_first_are_named(tmp_path):
    """The page and the files name them, and say nothing where nothing is copied."""
    norm, _ = EXAMPLES["rmsnorm_residual"]
    x, w = torch.empty(64, 8).t(), torch.empty(128)[::2]
    kernel = norm.inspect(x, w, torch.empty(8, 64))
    assert kernel.copied == {"x", "weight"}
    said = [line for line in str(kernel).splitlines() if line.startswith("  copied ")]
    assert [line.split()[1] for line in said] == ["weight", "x"]
    assert all(line.endswith("the elements of its rows are apart in memory") for line in said)
    assert "\n".join(said) in (kernel.save(tmp_path) / "plan.txt").read_text()
    assert "  copied " not in str(norm.inspect(torch.empty(8, 64), w[:64].clone(), x.contiguous()))


def test_repr_is_one_line():
    assert repr(example_kernel("softmax", 64)) == "<htile kernel softmax, N = 64, sm_90a>"


FILES = {
    "graph-traced.txt", "graph.txt", "plan.txt", "kernel.py", "kernel.ptx", "kernel.cubin",
    "resources.json", "graph.dot", "graph.json", "graph.svg", "plan.svg",
}  # fmt: skip


def test_save_writes_all_of_it(tmp_path):
    kernel = example_kernel("softmax", 4096)
    folder = kernel.save(tmp_path / "new" / "dump")
    assert folder.parent == tmp_path / "new" / "dump"
    assert folder.name.startswith("softmax-sm_90a-")
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / "kernel.py").read_text() == kernel.source
    assert (folder / "graph.txt").read_text() == f"{kernel.graph}\n"
    assert (folder / "plan.txt").read_text() == f"{kernel.plan}\n"
    assert ".target sm_90a" in (folder / "kernel.ptx").read_text()
    assert json.loads((folder / "resources.json").read_text()) == asdict(kernel.resources)
    cubin = (folder / "kernel.cubin").read_bytes()
    again = cubin_module.read_resources(cubin, kernel.resources.dynamic_shared)
    assert again == kernel.resources
    threads = bytes([4, cubin_module._REQUIRED_THREADS, 12, 0])  # the head of that attribute
    assert cubin.count(threads) == 1
    with pytest.raises(CompileError, match="does not name its registers and threads"):
        cubin_module.read_resources(cubin.replace(threads, bytes([4, 0xFF, 12, 0])), 0)


def test_kernels_are_saved_side_by_side_and_again_in_place(tmp_path):
    kernels = [
        example_kernel("softmax", 64),
        example_kernel("softmax", 64, arch="sm_80"),
        example_kernel("softmax", 128),
        example_kernel("softmax", 64),
    ]
    folders = [kernel.save(tmp_path) for kernel in kernels]
    assert len(set(folders)) == 3 and folders[0] == folders[3]


SAVE = """
import sys, torch, htile
def größe(x, α: float):
    return x * α
path = htile.rowwise(größe).inspect(torch.empty(2, 64, device="meta"), 1.0).save(sys.argv[1])
assert "α" in (path / "kernel.py").read_text(encoding="utf-8")
"""


def test_saved_text_is_utf8_whatever_the_machine_speaks(tmp_path):
    (tmp_path / "script.py").write_text(SAVE, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "script.py", "dump"],
        cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    warned = [line for line in run.stderr.splitlines() if "EncodingWarning" in line]
    assert not [line for line in warned if "/htile/" in line]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_has_a_page(name):
    function, arguments = EXAMPLES[name]
    page = str(function.inspect(*arguments(4, 1000, BF16, "meta")))
    assert f"graph {function.__name__}, one row of N = 1000" in page
    assert "0 bytes of stack" in page and max(map(len, page.splitlines())) < 130


def test_pages_are_the_same_each_time():
    x = torch.empty(4, 64, device="meta")
    softmax = EXAMPLES["softmax"][0]
    assert str(softmax.inspect(x)) == str(softmax.inspect(x))


def test_the_cost_says_what_bounds_a_kernel():
    """A copy of many rows is bound by memory, and one row by what cannot overlap."""
    kernel = htile.rowwise(lambda x: x * 2.0).inspect(torch.empty(4096, 8192, device="meta"))
    many, one = kernel.cost(1 << 20), kernel.cost(1)
    assert next(iter(many.bounds)) == "memory" and next(iter(one.bounds)) != "memory"
    assert many.time > 100 * one.time
    assert str(many).startswith(f"{many.time / 1e3:.1f} µs, bound by memory ")
    assert str(kernel).endswith(f"== cost ==\n{kernel.cost()}, for 65536 rows on an H200")
    other = htile.rowwise(lambda x: x * 2.0).inspect(torch.empty(8, 64), arch="sm_80")
    assert other.cost_text == "not known for sm_80"
    with pytest.raises(UnsupportedError, match="for sm_80 is not known"):
        other.cost()
    with pytest.raises(ArgumentError, match="above 0"):
        kernel.cost(0)


# ---- HTILE_DUMP ----------------------------------------------------------------------------------


def test_a_dump_that_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "dump")
    monkeypatch.setenv("HTILE_DUMP", place)
    kernel = example_kernel("softmax", 712)
    for _ in range(2):  # it is no kernel that was saved
        with pytest.raises(ArgumentError) as caught:
            _ = kernel.artifact
        told = caught.value.message
        assert f"HTILE_DUMP={place!r}: " in told and "Not a directory" in told
        assert "softmax can not be saved there; name a folder" in told
    monkeypatch.delenv("HTILE_DUMP")
    assert kernel.artifact.function == "softmax"


def test_kernels_that_are_compiled_ahead_are_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HTILE_DUMP", str(tmp_path))
    ask = ["compile", "examples.softmax:softmax", "--args", "x=bf16[64,712]", "--arch", "sm_80"]
    assert cli.main(ask) == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("softmax-sm_80-") and (folder / "kernel.ptx").exists()
