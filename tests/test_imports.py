"""Every import of the repository leads to something, those too that no test runs.

A module may move while a function that imports it is only called on a GPU. So each import statement
is read from the source, also inside functions and under TYPE_CHECKING, and resolved here.
"""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
FILES = sorted(
    path
    for part in ("htile", "examples", "benchmarks", "tests")
    for path in (REPO / part).rglob("*.py")
)

# Packages that are not installed everywhere, and why an import of them is not resolved then.
OPTIONAL = {
    "annotationlib": "is in Python from 3.14 on",
    "cuda": "comes with CuTe-DSL, which exists for Linux only",
    "cutlass": "CuTe-DSL exists for Linux only",
    "cut_cross_entropy": "a peer of the benchmarks, which needs a GPU",
    "liger_kernel": "a peer of the benchmarks, which needs a GPU",
    "nowhere": "does not exist: a test imports it where it must not be evaluated",
    "quack": "a peer of the benchmarks, which needs a GPU",
    "transformers": "whose models a benchmark trains, on a GPU",
    "triton": "comes with the CUDA build of torch",
    "tvm_ffi_orcjit": "loads kernels where no linker is, and is not needed elsewhere",
}


def imports(source: str, package: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name or None) of every import in a source; `package` is where it lies."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, module, alias.name) for alias in node.names)


def is_there(module: str) -> bool:
    """Whether there is a module of this name; its packages are imported, it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def is_optional(module: str | None) -> bool:
    return (module or "").partition(".")[0] in OPTIONAL


def has_name(module: str, name: str) -> bool:
    """Whether a module, which is there, has a name that can be imported from it."""
    try:
        if name == "*" or hasattr(importlib.import_module(module), name):
            return True
    except ModuleNotFoundError as error:
        if not is_optional(error.name):
            raise
        return is_there(f"{module}.{name}") or name in defined(module)
    return is_there(f"{module}.{name}")


def defined(module: str) -> set[str]:
    """The names at the top of a module's source, which cannot be imported here."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8"))
    names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    return names | {t.id for t in targets if isinstance(t, ast.Name)}


def unresolved(source: str, package: str) -> list[str]:
    """The imports of a source that lead nowhere, each with its line."""
    found = []
    for line, module, name in imports(source, package):
        if is_optional(module) and not is_there(module.partition(".")[0]):
            continue
        if not module:
            found.append(f"line {line}: the import goes above the repository")
        elif not is_there(module):
            found.append(f"line {line}: there is no module {module}")
        elif name is not None and not has_name(module, name):
            found.append(f"line {line}: {module} has no {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_import_resolves(path):
    package = ".".join(path.relative_to(REPO).parent.parts)
    assert unresolved(path.read_text(encoding="utf-8"), package) == []


def test_all_parts_of_the_repository_are_read():
    parts = {path.relative_to(REPO).parts[0] for path in FILES}
    assert parts == {"htile", "examples", "benchmarks", "tests"} and len(FILES) > 150


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (
            "def f():\n    from benchmarks.timing import interleave",
            "benchmarks.timing has no interleave",
        ),
        ("def f():\n    from htile.tune.timing import interleave", None),
        ("import htile.nothing", "there is no module htile.nothing"),
        ("import htile.nothing.more", "there is no module htile.nothing.more"),
        ("from no_such_package import x", "there is no module no_such_package"),
        (
            "if TYPE_CHECKING:\n    from htile.run.kernel import Colonel",
            "htile.run.kernel has no Colonel",
        ),
        ("from . import timing", None),
        ("from .timing import replays, nothing", "benchmarks.timing has no nothing"),
        ("from .. import htile", "the import goes above the repository"),
        ("from benchmarks.triton_limit import read, BLOCK", None),
        ("from benchmarks.triton_limit import nothing", "benchmarks.triton_limit has no nothing"),
        ("from quack.softmax import whatever", None),
        ("from torch import nn, where", None),
        ("from torch import no_such_name", "torch has no no_such_name"),
    ],
)
def test_what_does_not_resolve_is_named(source, wanted):
    found = unresolved(source, "benchmarks")
    assert (
        found == [] if wanted is None else [text.partition(": ")[2] for text in found] == [wanted]
    )
