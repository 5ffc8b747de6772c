"""The project as a whole: what an import brings, which way imports point, what README promises."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import htile

REPO = Path(__file__).parents[1]
FILES = sorted((REPO / "htile").rglob("*.py"))
PRIMITIVES = {"config.py", "dataflow.py", "matmul.py", "utils.py", "warp_matmul.py"}


def python(code, cwd):
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


IMPORT = """
import sys, torch
def refuse(*args):
    raise AssertionError("CUDA is initialised")
torch.cuda.init = torch.cuda._lazy_init = refuse
before = set(sys.modules)  # torch brings cuda.bindings where they are installed
import htile
@htile.rowwise
def f(x):
    return torch.softmax(x, -1)
f(torch.randn(2, 5))
f.inspect(torch.empty(2, 4096, device="meta")).source
new = set(sys.modules) - before
print(sorted(m for m in new if m.partition(".")[0] in ("cutlass", "cuda", "tvm_ffi", "sympy")))
print(torch.cuda.is_initialized())
"""


def test_import_brings_neither_cute_dsl_nor_cuda(tmp_path):
    """Nor does tracing, the reference, or emission; sympy alone takes half a second to import."""
    assert python(IMPORT, tmp_path) == "[]\nFalse\n"


def test_every_public_name_is_there():
    assert sorted(htile.__all__) == list(htile.__all__)
    for name in htile.__all__:
        assert getattr(htile, name).__module__.startswith("htile.")
    errors = [n for n in htile.__all__ if n.endswith("Error")]
    assert all(issubclass(getattr(htile, n), htile.HTileError) for n in errors)


LAZY = """
import sys
import torch
before = set(sys.modules)
import htile
assert set(htile.__all__) <= set(dir(htile)) and htile.__version__
assert not hasattr(htile, "colwise")
print(sorted(m for m in set(sys.modules) - before if not m.startswith("_")))
from htile import *
print(sorted(m for m in set(sys.modules) - before if m in ("htile.run.rowwise", "networkx")))
assert rowwise is htile.rowwise is htile.run.rowwise.rowwise and "rowwise" in vars(htile)
assert htile.testing.assert_close and htile.nn.fuse and {"nn", "testing"} <= set(dir(htile))
"""


def test_public_names_are_imported_at_their_first_use(tmp_path):
    assert python(LAZY, tmp_path) == "['htile']\n['htile.run.rowwise']\n"


def imports(path):
    """(module, imported inside a function) for every import that a file runs, absolute."""
    package = path.relative_to(REPO).parent.parts
    found = []

    def visit(node, inside):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            found.append((module, inside))
            found.extend((f"{module}.{alias.name}", inside) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def test_the_walk_sees_relative_imports():
    found = dict(imports(REPO / "htile" / "build" / "compile.py"))
    assert found["htile.errors"] is False and found["cutlass.cute"] is True
    assert dict(imports(REPO / "htile" / "run" / "launch.py"))["htile.lower.plan"] is False


# From the ground up. A module imports from its own part and from those on lower floors.
FLOORS = (
    ("errors.py", "__init__.py"),  # which imports the public names when they are first used
    (*PRIMITIVES, "copy", "compute", "types"),
    ("frontend", "build"),
    ("lower",),
    ("pictures", "tune"),
    ("run",),
    ("testing.py", "nn"),
    ("cli",),
    ("__main__.py",),
)
FLOOR_OF = {part: k for k, floor in enumerate(FLOORS) for part in floor}
HTILE = REPO / "htile"


def part_of(module):
    """The folder or file of `htile` that a module such as htile.lower.plan belongs to."""
    name = module.split(".")[1] if "." in module else "__init__"
    return name if (HTILE / name).is_dir() else f"{name}.py"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(HTILE)))
def test_imports_point_one_way(path):
    """Those inside functions too. Primitives are one floor: the next test orders them."""
    own = path.relative_to(HTILE).parts[0]
    for module, _ in imports(path):
        if module.partition(".")[0] == "htile" and (part := part_of(module)) != own:
            primitives = FLOOR_OF[own] == FLOOR_OF.get(part) == 1
            assert primitives or FLOOR_OF.get(part, 0) < FLOOR_OF[own], f"{path}: {module}"


def test_no_modules_import_each_other_in_a_circle():
    names = {".".join(f.relative_to(REPO).with_suffix("").parts): f for f in FILES}
    names = {n.removesuffix(".__init__"): f for n, f in names.items()}
    graph = nx.DiGraph()
    for name, path in names.items():
        graph.add_edges_from((name, m) for m, _ in imports(path) if m in names and m != name)
    assert list(nx.simple_cycles(graph)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPO / "htile")))
def test_only_primitives_and_the_compile_step_import_cute_dsl(path):
    inner = path.relative_to(REPO / "htile")
    primitive = inner.name in PRIMITIVES or inner.parts[0] in ("compute", "copy", "types")
    for module, inside in imports(path):
        if module.partition(".")[0] in ("cutlass", "cuda"):
            assert primitive or (str(inner) == "build/compile.py" and inside), module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPO / "htile")))
def test_no_exception_is_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in ("everything", "Exception", "BaseException"), node.lineno


def test_versions_agree():
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.M)
    assert htile.__version__ == version


def test_every_example_has_a_main_and_runs_itself():
    for path in (REPO / "examples").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        if path.stem not in ("__init__", "__main__", "run"):
            assert "main" in names, path
            assert ast.unparse(tree.body[-1]).endswith("main()"), path
