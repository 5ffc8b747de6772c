"""`show`: what a row-wise function becomes for arguments of given dtypes and shapes."""

from __future__ import annotations

import difflib
import sys
import traceback
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module, util
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CompileError, HTileError, an
from .terminal import UsageError, paint
from .values import GRAMMAR, parse

if TYPE_CHECKING:
    from ..run.kernel import Kernel
    from ..run.rowwise import Rowwise

SUMMARY = "show the graph, plan, kernel and resources of a row-wise function; no GPU needed"
EXAMPLES = (
    'show examples.softmax:softmax --args "x=bf16[4096,8192]"',
    'show examples/rmsnorm.py:rmsnorm --args "x=bf16[64,4096] weight=f32[4096] eps=1e-5" --all',
    'show examples.softmax:softmax --args "x=bf16[4096,8192]" --backward',
    "show mymodule:f --args \"x=f16[8,512:1024,1] mode='fast'\" --arch sm_100a --save dump",
)
SECTIONS = {
    "graph": "the dataflow, each line with the line of yours that it comes from",
    "plan": "the stages, which thread holds what, the bytes that move",
    "source": "the CuTe-DSL kernel",
    "ptx": "the compiled kernel's PTX",
    "resources": "its registers, stack, threads and shared memory",
    "cost": "its expected time, and what bounds it",
}
PAGE = ("graph", "plan", "source", "resources", "cost")
TEXTS = {"plan": "plan_text", "cost": "cost_text"}  # what has a text of its own


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="the function, decorated with @htile.rowwise or plain; a path such as "
        "examples/softmax.py:softmax will do. Without :FUNCTION, the module's only one",
    )
    parser.add_argument(
        "--args", default="", metavar="TEXT", help="its arguments, written as below"
    )
    parser.add_argument(
        "--arch", metavar="NAME", help="the architecture, such as sm_100a (default: sm_90a)"
    )
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument(
        "--backward", action="store_true",
        help="the kernel of the backward pass, and what the forward pass keeps for it",
    )  # fmt: skip
    passes.add_argument(
        "--joint", action="store_true",
        help="one kernel of both passes, which no call runs: what the derivative is made of",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FOLDER", help="write all of it to files in this folder")
    parts = parser.add_argument_group(
        "what to print (one alone: without a heading; default: all but the PTX)"
    )
    for name, text in SECTIONS.items():
        parts.add_argument(f"--{name}", action="store_true", help=text)
    parts.add_argument("--all", action="store_true", help="all of these")
    parser.epilog = f"{GRAMMAR}\n\n{parser.epilog}"


def run(options: Namespace) -> int:
    kernel = inspected(find(options.function), options.args, options.arch)
    kept = {}
    if options.backward:
        kept, kernel = {"kept": str(kernel.training.saved)}, kernel.training.backward
    elif options.joint:
        kernel = kernel.training.joint
    saved = None
    if options.save is not None:
        try:
            saved = kernel.save(options.save)
        except (OSError, ValueError) as error:  # ValueError: no path has a zero byte
            raise UsageError(f"--save {options.save!r}: {_reason(error)}") from None
    asked = [name for name in SECTIONS if options.all or getattr(options, name)]
    if len(asked) == 1:
        print(_section(kernel, asked[0]).rstrip())
    elif asked:
        _print_page(kept | _sections(kernel, asked), kernel.arch)
    else:
        _print_page(kept | _default_page(kernel, saved), kernel.arch)
    if saved is not None:
        print(f"saved in {saved}", file=sys.stderr)
    return 0


def _section(kernel: Kernel, name: str) -> str:
    return str(getattr(kernel, TEXTS.get(name, name)))


def _sections(kernel: Kernel, names: Sequence[str]) -> dict[str, str]:
    """The text of each section. What is compiled is compiled first: then the others show it too."""
    if {"ptx", "resources"} & set(names):
        _ = kernel.artifact
    return {name: _section(kernel, name) for name in names}


def _default_page(kernel: Kernel, saved: Path | None) -> dict[str, str]:
    try:
        _ = kernel.artifact  # first, because the other sections then show what is compiled
        known = {}
    except CompileError as error:
        known = {"resources": f"not compiled: {error.message}"}
    if saved is not None:
        known["source"] = str(saved / "kernel.py")
    return {name: known.get(name) or _section(kernel, name) for name in PAGE}


def _print_page(page: dict[str, str], arch: str) -> None:
    parts = []
    for name, text in page.items():
        title = f"== {name}, {arch} ==" if name in ("ptx", "resources") else f"== {name} =="
        parts.append(f"{paint(title, 'bold', sys.stdout)}\n{text.rstrip()}")
    print("\n\n".join(parts))


def find(target: str) -> Rowwise:
    """The function that `module:function`, `path.py:function` or `module:Class.function` names."""
    from ..run.rowwise import Rowwise, rowwise

    place, colon, name = target.rpartition(":")
    if not colon or "/" in name or "\\" in name:  # no function; the colon may be a drive's
        place, name = target, ""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _Importing(place):
            module = _load_path(place) if place.endswith(".py") else _load_name(place)
    except (ImportError, SyntaxError, OSError) as error:
        where = f" ({error.filename}:{error.lineno})" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{place} can not be imported: {_reason(error)}{where}") from error
    rows = [key for key, value in vars(module).items() if isinstance(value, Rowwise)]
    there = f"; row-wise functions there: {', '.join(rows)}" if rows else ""
    if not name:
        if len(rows) != 1:
            raise UsageError(f"which function of {place}? Write {place}:FUNCTION{there}")
        (name,) = rows
    value: object = module
    for part in name.split("."):
        if not hasattr(value, part):
            likely = difflib.get_close_matches(part, vars(value) if value is module else (), n=1)
            guess = f"; did you mean {likely[0]}?" if likely else there
            raise UsageError(f"{place} has no function {name!r}{guess}")
        value = getattr(value, part)
    if isinstance(value, types.FunctionType):
        return rowwise(value)
    if not isinstance(value, Rowwise):
        raise UsageError(f"{place}:{name} is {an(type(value).__name__)}, not a function{there}")
    owner, _, last = name.rpartition(".")
    if owner and value._signature.names[:1] == ("self",):
        rest = ", ".join(value._signature.names[1:])
        raise UsageError(
            f"{place}:{name} is a method, whose object --args cannot give: write a function beside "
            f"the class, `def f({rest}): return {owner}(...).{last}({rest})`, and show that"
        )
    return value


class _Importing:
    """While a user's module is imported, tells in one line of an exception that it does not catch.

    It may be any exception. Those that `find` tells of, and HTile's own, are left as they are.
    """

    def __init__(self, place: str):
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error, trace) -> None:
        if kind is None or not issubclass(kind, Exception):
            return
        if issubclass(kind, (ImportError, SyntaxError, OSError, HTileError, UsageError)):
            return
        from ..frontend.libraries import library

        users = [f for f in traceback.extract_tb(trace) if not library(f.filename)]
        where = f" ({users[-1].filename}:{users[-1].lineno}: {users[-1].line})" if users else ""
        text = f"{kind.__name__}: {error}".removesuffix(": ")
        raise UsageError(f"{self.place} can not be imported: {text}{where}") from error


def _reason(error: Exception) -> str:
    """The message of an error without what the reader knows already."""
    return getattr(error, "msg", None) or getattr(error, "strerror", None) or str(error)


def _load_name(name: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{name!r} is no module; write module:function, such as examples.softmax:softmax, or "
            "path.py:function"
        )
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # found, but it needs something that is not there
        file = Path(*name.split(".")).with_suffix(".py")
        hint = f"; there is a file {file}: write {file}:FUNCTION" if file.exists() else ""
        raise UsageError(
            f"there is no module {error.name!r}, neither installed nor in {Path.cwd()}{hint}"
        ) from None


def _load_path(text: str) -> types.ModuleType:
    """The module in a file. In a package it is loaded as a part of that, else as a script is."""
    try:
        path = Path(text).resolve()
        is_there = path.is_file()
    except ValueError as error:  # no path has a zero byte
        raise UsageError(f"{text!r} is no path: {error}") from None
    if not is_there:
        raise UsageError(f"there is no file {text}, seen from {Path.cwd()}")
    name, root = path.stem, path.parent
    while (root / "__init__.py").exists():
        name, root = f"{root.name}.{name}", root.parent
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None):
        if Path(known.__file__).resolve() == path:
            return known
    if known is not None:  # another module has the name
        name = f"{name}_shown"
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    spec = util.spec_from_file_location(name, path)
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    complete = False
    try:
        spec.loader.exec_module(module)
        complete = True
    finally:
        if not complete:
            del sys.modules[name]
    return module


def inspected(function: Rowwise, text: str, arch: str | None) -> Kernel:
    """The kernel for arguments that are written as text. Raises UsageError where none is a row."""
    import torch

    args, kwargs = arguments(function, parse(text))
    values = dict(zip(function._signature.names, (*args, *kwargs.values()), strict=True))
    if not any(isinstance(value, torch.Tensor) for value in values.values()):
        given = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise UsageError(
            f"{function._signature.name}: no argument is a tensor, got {given}; a kernel is for "
            f'rows, so write one as a dtype and its sizes, such as --args "{next(iter(values))}='
            f'bf16[4096,8192]"\n{GRAMMAR}'
        )
    return function.inspect(*args, arch=arch, **kwargs)


def arguments(function: Rowwise, values: dict[str, object]) -> tuple[list, dict[str, object]]:
    """A call's positional and keyword arguments: `values`, and the defaults of the rest."""
    signature = function._signature
    listed = f"its parameters are ({', '.join(signature.names)})"
    for name in values:
        if name not in signature.names:
            likely = difflib.get_close_matches(name, signature.names, n=1)
            guess = f"; did you mean {likely[0]}?" if likely else ""
            raise UsageError(f"{signature.name} has no parameter {name!r}; {listed}{guess}")
    given = dict(zip(signature.names, signature.defaults, strict=True)) | values
    missing = [name for name, value in given.items() if value is Parameter.empty]
    if missing:
        raise UsageError(
            f"{signature.name} needs {', '.join(missing)}; {listed}. Say what they are, such as "
            f'--args "{missing[0]}=bf16[4096,8192]"\n{GRAMMAR}'
        )
    by_position = list(given.values())[: signature._positional]
    by_name = dict(list(given.items())[signature._positional :])
    return by_position, by_name
