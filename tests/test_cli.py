"""`python -m htile`: the language of --args, finding functions, pages, errors and exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import htile
from examples.softmax import softmax
from htile import cli
from htile.build import compile as compile_step
from htile.cli.show import arguments, find
from htile.cli.terminal import UsageError, paint
from htile.cli.values import GRAMMAR, parse
from htile.errors import CompileError

REPO = Path(__file__).parents[1]
SOFTMAX = ["show", "examples.softmax:softmax", "--args", "x=bf16[64,512]"]


def python(*arguments, cwd=REPO):
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True
    )


def main(capsys, *argv):
    """The exit code, and what was written to stdout and stderr."""
    code = cli.main(list(argv))
    return code, *capsys.readouterr()


# ----------------------------------------------------------------------------- as a user runs it


def test_a_page_from_a_shell():
    run = python("-m", "htile", *SOFTMAX)
    assert run.returncode == 0 and not run.stderr, run.stderr
    titles = [text for text in run.stdout.splitlines() if text.startswith("==")]
    parts = ["graph", "plan", "source", "resources, sm_90a", "cost"]
    assert titles == [f"== {part} ==" for part in parts]
    assert "softmax.py:11" in run.stdout and "\x1b" not in run.stdout
    x = torch.empty(64, 512, dtype=torch.bfloat16, device="meta")
    assert run.stdout.rstrip() == str(softmax.inspect(x))


MODULE = """
import torch, htile
@htile.rowwise
def branches(x):
    if x.sum() > 0:
        return x
    return -x
def plain(x, eps=1e-6):
    return x + eps
"""


def test_an_error_from_a_shell_shows_the_line_and_no_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    run = python("-m", "htile", "show", "mine:branches", "--args", "x=f32[2,8]", cwd=tmp_path)
    assert run.returncode == 1 and not run.stdout
    assert run.stderr.startswith("TraceError: ") and "Traceback" not in run.stderr
    assert f"{tmp_path / 'mine.py'}:5: if x.sum() > 0:" in run.stderr


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "htile", *SOFTMAX, "--graph"]
    run = subprocess.run(command, cwd=REPO, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")


def test_importing_htile_brings_no_command_line(tmp_path):
    code = "import sys, torch; a = {*sys.modules}; from htile import *; print(*{*sys.modules} - a)"
    new = python("-c", code, cwd=tmp_path).stdout.split()
    assert "htile.run.rowwise" in new
    assert not {"argparse", "htile.cli", "htile.__main__"} & set(new)


def test_help_imports_no_torch(tmp_path):
    code = (
        "import sys, htile.cli\n"
        "try: htile.cli.main(sys.argv[1:])\n"
        "finally: print({'torch', 'htile.lower'} & {*sys.modules})"
    )
    for command in ([], *([name] for name in cli.COMMANDS)):
        assert python("-c", code, *command, "--help", cwd=tmp_path).stdout.endswith("\nset()\n")


def test_help_and_version(capsys):
    for argv in (["--help"], ["show", "--help"], ["doctor", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.count("examples:") == 3 and "python -m htile doctor --json" in out
    assert GRAMMAR in out and out.endswith(f"htile {htile.__version__}\n")


@pytest.mark.parametrize("argv", [[], ["shwo"], ["show"], ["show", "a:b", "--what"]])
def test_a_wrong_command_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2 and "usage: python -m htile" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- pages


def test_one_part_alone_has_no_heading(capsys):
    kernel = softmax.inspect(torch.empty(64, 512, dtype=torch.bfloat16, device="meta"))
    for part in ("graph", "plan", "source", "ptx", "resources"):
        code, out, err = main(capsys, *SOFTMAX, f"--{part}")
        assert (code, err) == (0, "") and out.rstrip() == str(getattr(kernel, part)).rstrip()


def test_several_parts_and_all(capsys):
    def titles(*options):
        _, out, _ = main(capsys, *SOFTMAX, *options)
        return [text.strip("= ") for text in out.splitlines() if text.startswith("== ")]

    assert titles("--plan", "--graph") == ["graph", "plan"]
    every = ["graph", "plan", "source", "ptx, sm_100a", "resources, sm_100a", "cost"]
    assert titles("--all", "--arch", "sm_100a") == every


def test_the_kernels_of_both_passes_are_compiled_ahead(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path))
    where = ["compile", "examples.rmsnorm:rmsnorm", "--args", "x=bf16[4,64] weight=f32[64]"]
    names = ["rmsnorm", "rmsnorm with a gradient", "rmsnorm_backward"]
    for how in (r"compiled in \d+\.\d s", "was there"):
        code, out, _ = main(capsys, *where, "--backward")
        *lines, folder = out.splitlines()
        assert code == 0 and folder == f"in {tmp_path}"
        for name, line in zip(names, lines, strict=True):
            assert re.fullmatch(f"{name}, N = 64, sm_90a: {how}", line), line


def test_the_kernels_of_products_are_compiled_ahead(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path))
    where = ["compile", "examples.gallery.linear_gelu:linear_gelu", "--args",
             "x=bf16[64,64] weight=bf16[64,64] bias=bf16[64]"]  # fmt: skip
    code, out, _ = main(capsys, *where)
    assert code == 0 and re.match(r"linear_gelu, N = 64, sm_90a: compiled in \d+\.\d s\n", out), out
    code, _, err = main(capsys, *where, "--backward")
    assert code == 1 and "at their first use" in err


def test_the_passes_of_training(capsys):
    where = ["show", "examples.rmsnorm:rmsnorm", "--args", "x=bf16[4,4096] weight=f32[4096]"]
    assert cli.main([*where, "--backward", "--graph", "--plan"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("== kept ==\nx         an argument in bf16, 8192 bytes a row\n")
    assert "rsqrt0    a result in f32, 4 bytes a row\n" in page
    assert "plan rmsnorm_backward, N = 4096" in page and "sum over all rows" in page
    assert cli.main([*where, "--joint", "--graph"]) == 0
    graph = capsys.readouterr().out
    for text in ("input eps", "input d_out", "return out =", "return d_x =", "return d_weight ="):
        assert text in graph
    with pytest.raises(SystemExit):
        cli.main([*where, "--joint", "--backward"])
    products = ["show", "examples.gallery.linear_gelu:linear_gelu", "--args",
                "x=bf16[64,64] weight=bf16[64,64] bias=bf16[64]"]  # fmt: skip
    for option in ("--backward", "--joint"):
        assert cli.main([*products, option]) == 1
        assert "at their first use" in capsys.readouterr().err


def test_save_writes_the_files_and_says_where(capsys, tmp_path):
    code, out, err = main(capsys, *SOFTMAX, "--save", str(tmp_path / "dump"))
    (folder,) = (tmp_path / "dump").iterdir()
    assert code == 0 and err == f"saved in {folder}\n"
    assert f"== source ==\n{folder / 'kernel.py'}\n" in out and "@cute.kernel" not in out
    assert (folder / "kernel.ptx").exists() and (folder / "kernel.cubin").exists()
    _, out, _ = main(capsys, *SOFTMAX, "--save", str(tmp_path / "dump"), "--source")
    assert out == (folder / "kernel.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--backward", "--joint"])
def test_the_passes_of_training_are_saved_and_drawn(capsys, tmp_path, option):
    where = ["show", "examples.rmsnorm:rmsnorm", "--args", "x=bf16[4,4096] weight=f32[4096]"]
    assert cli.main([*where, option, "--save", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("rmsnorm_backward-sm_90a-")
    for file in ("graph.svg", "plan.svg"):
        text = (folder / file).read_text(encoding="utf-8")
        assert "<svg" in text and "d_out" in text, file
    assert "d_weight" in (folder / "plan.txt").read_text(encoding="utf-8")
    assert str(folder) in capsys.readouterr().err


def test_save_where_nothing_can_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file"), "a\0b", "a" * 5000):
        code, _, err = main(capsys, *SOFTMAX, "--save", place)
        assert code == 2 and "--save" in err and "Traceback" not in err


def test_without_the_dsl_the_page_says_so(capsys, monkeypatch):
    def missing():
        raise CompileError("CuTe-DSL is not installed here")

    monkeypatch.setattr(compile_step, "_import_cute", missing)
    fresh = ["show", "examples.softmax:softmax", "--args", "x=bf16[64,777]"]
    code, out, _ = main(capsys, *fresh)
    assert code == 0 and "not compiled: CuTe-DSL is not installed here" in out
    assert out.index("== source ==") < out.index("== resources, ") < out.index("== cost ==")
    code, _, err = main(capsys, *fresh, "--ptx")
    assert code == 1 and err == "CompileError: CuTe-DSL is not installed here\n"


def test_an_unknown_architecture(capsys):
    for name in ("sm_75", "sm_90aaa", ""):
        code, _, err = main(capsys, *SOFTMAX, "--arch", name)
        assert code == 1 and f"unknown architecture {name!r}" in err


def test_colours_only_where_somebody_looks(monkeypatch, capsys):
    class Stream:
        def isatty(self):
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert paint("x", "red", Stream()) == "\x1b[31mx\x1b[0m"
    assert paint("x", "red", sys.stdout) == "x"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cli.main(["show", "examples.softmax:softmax", "--args", "x=f64[2,8]"])
    assert capsys.readouterr().err.startswith("\x1b[31mDtypeError: softmax: x: ")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as set_:
            set_.setenv(name, value)
            assert paint("x", "red", Stream()) == "x"


# ------------------------------------------------------------------------------ finding functions


def test_functions_by_module_by_path_and_alone(capsys, monkeypatch, tmp_path):
    for target in ("examples.softmax:softmax", f"{REPO / 'examples' / 'softmax.py'}:softmax"):
        assert find(target) is softmax
    monkeypatch.chdir(REPO)
    assert find("examples/softmax.py") is find("examples.softmax") is softmax


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with modules; what they put into `sys` is taken back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "shown_mine.py").write_text(MODULE)
    return tmp_path


def test_a_module_of_the_working_folder(here, capsys):
    code, out, _ = main(capsys, "show", "shown_mine:plain", "--args", "x=f32[2,8]", "--graph")
    assert code == 0 and "shown_mine.py:9" in out, "a plain function is decorated"
    assert isinstance(find("shown_mine.py:plain"), htile.Rowwise)
    assert find("shown_mine.py") is find("shown_mine:branches")


def test_a_file_beside_its_helper_and_one_in_a_package(here):
    folder = here / "scripts"
    folder.mkdir()
    (folder / "shown_helper.py").write_text("def double(x):\n    return x + x\n")
    (folder / "shown_user.py").write_text("from shown_helper import double\n")
    assert find("scripts/shown_user.py:double")._signature.name == "double"
    package = here / "shown_package" / "inner"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").write_text("")
    (package / "a.py").write_text("from .b import f\n")
    (package / "b.py").write_text("def f(x):\n    return x\n")
    assert find("shown_package/inner/a.py:f")._fn.__module__ == "shown_package.inner.b"


IN_CLASSES = """\
import htile
class Scaled:
    @htile.rowwise
    def forward(self, x, w):
        return x * w
    @staticmethod
    @htile.rowwise
    def double(x):
        return x * 2
def f(x, w):
    return Scaled().forward(x, w)
"""


def test_functions_in_classes(here):
    (here / "shown_classes.py").write_text(IN_CLASSES)
    assert find("shown_classes:Scaled.double")._signature.names == ("x",)
    with pytest.raises(UsageError, match=r"has no function 'Scaled.dubble'"):
        find("shown_classes:Scaled.dubble")
    with pytest.raises(UsageError) as caught:
        find("shown_classes:Scaled.forward")
    written = re.search(r"`(.*)`", str(caught.value))[1]
    assert written == "def f(x, w): return Scaled(...).forward(x, w)"
    x, w = torch.randn(2, 8), torch.randn(8)
    assert torch.equal(find("shown_classes:f")(x, w), x * w)  # as the message says


def test_a_file_with_the_name_of_another_module(here):
    (here / "json.py").write_text("def f(x):\n    return x\n")
    import json

    assert find("json.py:f")._fn.__module__ == "json_shown"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("no_such:f", "there is no module 'no_such', neither installed nor in "),
        ("examples.no_such:f", "there is no module 'examples.no_such'"),
        ("examples.softmax.deep:f", "there is no module 'examples.softmax.deep'"),
        ("examples/softmax:softmax", "'examples/softmax' is no module; write module:function"),
        ("", "'' is no module"),
        ("no_such.py:f", "there is no file no_such.py, seen from "),
        ("examples.softmax:sofmax", "has no function 'sofmax'; did you mean softmax?"),
        ("examples.softmax:zzz", "no function 'zzz'; row-wise functions there: softmax"),
        ("examples.softmax:torch", "examples.softmax:torch is a module, not a function"),
        ("examples.run", "which function of examples.run? Write examples.run:FUNCTION"),
        ("shown_needs:f", "shown_needs can not be imported: No module named 'absent_thing'"),
        ("shown_wrong:f", "shown_wrong can not be imported: invalid syntax"),
        ("shown_wrong.py:f", "shown_wrong.py can not be imported: invalid syntax"),
        ("a\0b.py:f", r"'a\x00b.py' is no path: embedded null"),
        ("a" * 5000 + ".py:f", "can not be imported: File name too long"),
        ("a" * 5000 + ":f", "can not be imported: File name too long"),
    ],
)
def test_a_function_that_is_not_there(here, capsys, target, says):
    (here / "shown_needs.py").write_text("import absent_thing\n")
    (here / "shown_wrong.py").write_text("x = = 1\n")
    code, out, err = main(capsys, "show", target)
    assert code == 2 and not out and err.startswith("htile show: ")
    assert says in err and "Traceback" not in err
    assert "shown_wrong" not in sys.modules
    if "syntax" in says:
        assert f"({here / 'shown_wrong.py'}:1)" in err


def test_a_module_that_raises_when_it_is_imported(here, capsys):
    (here / "shown_deep.py").write_text("def f():\n    return {}['absent']\n")
    (here / "shown_raises.py").write_text("import shown_deep\nshown_deep.f()\n")
    for target in ("shown_raises:f", "shown_raises.py:f"):
        code, out, err = main(capsys, "show", target)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert f"{target[:-2]} can not be imported: KeyError: 'absent' (" in err
        assert f"{here / 'shown_deep.py'}:2: return {{}}['absent'])" in err
        sys.modules.pop("shown_raises", None)
    (here / "shown_wrong_use.py").write_text("import htile\nf = htile.rowwise(3)\n")
    code, _, err = main(capsys, "show", "shown_wrong_use:f")
    assert code == 1 and err.startswith("ArgumentError: "), "HTile's own errors are told as such"


def test_a_file_in_a_folder_named_like_a_module(here, capsys):
    (here / "shown-folder").mkdir()
    (here / "plain_folder").mkdir()
    (here / "plain_folder" / "f.py").write_text("def f(x):\n    return x\n")
    assert find("plain_folder.f:f")._signature.name == "f"
    code, _, err = main(capsys, "show", "shown-folder.f:f")
    assert code == 2 and "'shown-folder.f' is no module" in err


# --------------------------------------------------------------------------------- its arguments


@pytest.mark.parametrize("command", ["show", "compile"])
def test_arguments_without_a_tensor(capsys, command):
    code, out, err = main(capsys, command, "examples.softmax:softmax", "--args", "x=1.0")
    assert (code, out) == (2, "") and "softmax: no argument is a tensor, got x=1.0" in err
    assert '--args "x=bf16[4096,8192]"' in err and GRAMMAR in err


def test_missing_and_unknown_arguments(capsys):
    code, _, err = main(capsys, "show", "examples.softmax:softmax")
    assert code == 2 and "softmax needs x; its parameters are (x). Say what they are" in err
    assert GRAMMAR in err
    code, _, err = main(capsys, "show", "examples.rmsnorm:rmsnorm", "--args", "wieght=f32[8]")
    assert code == 2 and "no parameter 'wieght'; its parameters are (x, weight, " in err
    assert "did you mean weight?" in err


def test_arguments_go_by_position_and_by_name():
    @htile.rowwise
    def f(a, /, b, c=3, *, arch=1.0, d=None):
        return a

    assert arguments(f, {"b": 2, "a": 1, "d": 5}) == ([1, 2, 3], {"arch": 1.0, "d": 5})

    @htile.rowwise
    def g(x, arch):
        return x * arch

    args, kwargs = arguments(g, parse("x=f32[2,8] arch=2.0"))
    assert g.inspect(*args, arch="sm_80", **kwargs).arch == "sm_80"


def test_defaults_suffice(here, capsys):
    (here / "shown_defaults.py").write_text(
        "import torch\ndef f(x=torch.empty(2, 8, device='meta'), eps=1.0):\n    return x + eps\n"
    )
    code, out, err = main(capsys, "show", "shown_defaults:f", "--graph")
    assert code == 0 and "graph f, one row of N = 8" in out, err


def test_examples_of_the_help_run(capsys, monkeypatch, tmp_path):
    import shlex

    monkeypatch.chdir(REPO)
    from htile.cli.show import EXAMPLES

    for text in EXAMPLES[:2]:
        code, out, err = main(capsys, *shlex.split(text))
        assert code == 0 and "== graph ==" in out, err


# ------------------------------------------------------------------------------- their language


def shape(text):
    """The dtype, sizes and strides of the tensor that `x=text` gives."""
    x = parse(f"x={text}")["x"]
    assert x.device.type == "meta"
    return x.dtype, tuple(x.shape), x.stride()


def test_tensors():
    assert shape("bf16[4096,8192]") == (torch.bfloat16, (4096, 8192), (8192, 1))
    assert shape("f32[]") == (torch.float32, (), ())
    assert shape("i64[ 3 , 0 ]") == (torch.int64, (3, 0), (1, 1))
    assert shape("f16[4,8:16,1]") == (torch.float16, (4, 8), (16, 1))
    assert shape("bool[4 : 0]") == (torch.bool, (4,), (0,))
    assert shape("i32[65536,65536]")[1] == (65536, 65536)
    for name in ("float32", "bfloat16", "torch.int32", "float8_e4m3fn", "float64"):
        assert shape(f"{name}[2]")[0] is getattr(torch, name.removeprefix("torch."))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("-2.5", -2.5), (".5", 0.5), ("1.", 1.0), ("+3", 3), ("-0", 0), ("7", 7),
        ("inf", float("inf")), ("True", True), ("False", False), ("None", None), ("'x'", "x"),
        ('"a b=c\'"', "a b=c'"), (r"'\''", "'"), ("''", ""), ("f16", torch.float16),
        ("torch.int64", torch.int64),
    ],
)  # fmt: skip
def test_python_values(text, value):
    found = parse(f"name={text}")["name"]
    assert found == value and type(found) is type(value)


def test_several_values():
    assert parse("") == parse("  ") == {}
    values = parse(" a = 1\n b=f32[2, 3]  c='x y' ")
    assert list(values) == ["a", "b", "c"] and values["b"].shape == (2, 3)
    assert parse("größe=1") == {"größe": 1}


@pytest.mark.parametrize(
    ("text", "says", "position"),
    [
        ("x=bf16[4096,8192", "expected a number, ',' or ']' at position 17, the text ends", 17),
        ("x=bf16[4,,8]", "expected a number at position 10, got ','", 10),
        ("x=bf16[4,]", "expected a number", 10),
        ("x=bf16[-4]", "expected a number at position 8, got '-4'", 8),
        ("x=bf16[8,10.5]", "expected a number at position 10, got '10.5'", 10),
        ("x=bf16[8,-1]", "expected a number at position 10, got '-1'", 10),
        ("x=bf16[" + "n" * 50 + "]", f"got '{'n' * 40}…'", 8),
        ("x=bf16[4 8]", "expected a number, ',' or ']'", 10),
        ("x=bf16[4a]", "expected a number", 8),
        ("x=bf16[N]", "expected a number", 8),
        ("x=bf16[4,8:8]", "2 sizes, but 1 strides", 11),
        ("x=bf16[4:1:2]", "expected a number, ',' or ']'", 11),
        ("x=bf17[4]", "'bf17' is no dtype (a string is written in quotes)", 3),
        ("x=exp[4]", "'exp' is no dtype", 3),
        ("mode=fast", "'fast' is no dtype", 6),
        ("x=[4]", "expected a value at position 3, got '['", 3),
        ("x=", "expected a value at position 3, the text ends", 3),
        ("x='open", "expected a value", 3),
        ("x=12ab", "expected a value", 3),
        (r"x='\x'", "this is no Python string", 3),
        ("x bf16[4]", "expected '=' after x at position 3, got 'bf16'", 3),
        ("=3", "expected the name of a parameter", 1),
        ("x=1,y=2", "expected a space before the next name at position 4, got ','", 4),
        ("x=f32[2]y=1", "expected a space", 9),
        ("x=1 x=2", "x is given twice", 5),
        (f"x=f32[{2**62},8]", "larger than any memory", 3),
        (f"x=f32[{10**30}]", "larger than any memory", 3),
        (f"x=f32[{2**40},{2**40}:0,0]", "larger than any memory", 3),
        (f"x=f32[{2**40},{2**40}:0,{2**30}]", "larger than any memory", 3),
        ("x=f32[2,8:9223372036854775807,1]", "larger than any memory", 3),
        ("k=" + "1" * 5000, "a number of 5000 digits; the limit is 1000", 3),
        ("k=-" + "1" * 5000, "a number of 5001 digits", 3),
        ("x=f32[2," + "1" * 5000 + "]", "a number of 5000 digits", 9),
        ("x=f32[2,8:" + "1" * 5000 + ",1]", "a number of 5000 digits", 11),
    ],
)  # fmt: skip
def test_what_can_not_be_read(text, says, position, capsys):
    with pytest.raises(UsageError) as caught:
        parse(text)
    first, shown, caret, *grammar = str(caught.value).split("\n")
    assert first.startswith("--args: ") and says in first and f"position {position}" in first
    assert shown == f"  {text}" and caret == " " * (position + 1) + "^"
    assert "\n".join(grammar) == GRAMMAR
    code, _, err = main(capsys, "show", "examples.softmax:softmax", "--args", text)
    assert code == 2 and err == f"htile show: {caught.value}\n"
