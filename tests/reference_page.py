"""docs/reference.md: everything that a row-wise function may use, read from the code's own tables.

    python -m tests.documents --write

The functions come from `htile.frontend.tensor.FUNCTIONS`, their results from traces of them, the
public API from its docstrings, the command line from its parser.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch

import htile
from htile import cli, errors, nn, testing
from htile.build.arch import ARCHS, DEFAULT
from htile.frontend import (  # noqa: F401 (they fill the tables)
    shapes,
    trace,
)
from htile.frontend.annotations import Inner, Matrix, PerRow, Scalar, Shared, Static
from htile.frontend.dtypes import STORAGE
from htile.frontend.factories import FACTORIES
from htile.frontend.graph import Builder, Role
from htile.frontend.ops import Value, Varies, compute_dtype, dtype_name
from htile.frontend.promotion import BYTES
from htile.frontend.tensor import FUNCTIONS, Tensor
from htile.run.kernel import Kernel
from htile.run.products.kernels import ProductKernels
from htile.tune.search import Tuned
from htile.tune.tiles import TunedProducts, TunedTile

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

HEAD = """\
# Reference

Everything that a row-wise function may use, and everything that `htile` offers. This page is made
from the code by `python -m tests.documents --write`, and a test holds that it is up to date. The
[guide](guide.md) explains how the parts go together, and [errors](errors.md) shows what mistakes
raise.
"""

FUNCTIONS_HEAD = """\
## Functions and methods

`x` is a tensor inside the function: a row of N elements, or one value of it. `F` is
`torch.nn.functional`. Where a function has several spellings, they mean the same. The columns at
the right say what dtype comes of a float, of an int64 and of a bool operand; a dash means that the
dtype is refused. Every floating value is computed in float32.

`dim` names an axis without the leading dimensions: a row has one, which is `-1` or `0`. `axis` and
`keepdims` are taken too.
`out=` is refused inside a function: assign the result.

`x += y`, functions and methods with a `_` behind (`x.mul_(y)`, `torch.relu_(x)`), `x.copy_`,
`x.fill_`, `x.zero_`, `torch.fill_`, `torch.zero_`, `inplace=True` and `x[:n] = y` change the tensor
`x` and every name of it, as in torch. They never write to the caller's memory. What was made from
`x` before and may share its memory in torch, such as `y = x[:n]`, raises an error where it is used
after that.
"""

# The modules of htile.frontend that fill the table, in the order of this page.
GROUPS = {
    "functions": "Arithmetic, comparisons and elementary functions",
    "bits": "Bits of integers and of masks",
    "composites": "Special functions and activations",
    "dropouts": "Dropouts that draw nothing",
    "special": "Error, gamma and Bessel functions",
    "fake_quantize": "Quantization that stays in floats",
    "reductions": "Reductions over the row",
    "scans": "Cumulative sums and products",
    "statistics": "Statistics, softmax, norms and losses",
    "channel_norms": "Norms over channels",
    "losses": "Losses of a class",
    "row_losses": "Losses of margins, distances and variances",
    "indices": "Elements at an index",
    "selected": "Elements that a mask chooses",
    "put": "Elements that are put at indices",
    "buckets": "Places in a sorted row, and elements of a few",
    "windows": "Windows of neighbours",
    "pools": "Pools and other lengths",
    "pairs": "Pairs of rows and of elements",
    "convolutions": "Convolutions along a row",
    "triangles": "Diagonals and triangles of small matrices",
    "ranks": "The largest and the smallest element",
    "order_statistics": "Sorted elements, and single ones by their rank",
    "products": "Products of rows and matrices",
    "tables": "Rows of a table",
    "shapes": "Dtypes, constants and shapes",
    "parts": "Parts of an axis",
    "joins": "What joins parts, and moves elements along an axis",
    "flips": "Axes in the opposite order",
}

OPERATORS = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "truediv": "a / b", "floordiv": "a // b",
    "mod": "a % b", "pow": "a ** b", "neg": "-a", "pos": "+a", "abs": "abs(a)", "eq": "a == b",
    "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b", "and": "a & b",
    "or": "a | b", "xor": "a ^ b", "invert": "~a", "round": "round(a)", "floor": "math.floor(a)",
    "ceil": "math.ceil(a)", "trunc": "math.trunc(a)", "iadd": "a += b", "isub": "a -= b",
    "imul": "a *= b", "itruediv": "a /= b", "ifloordiv": "a //= b", "imod": "a %= b",
    "ipow": "a **= b", "iand": "a &= b", "ior": "a |= b", "ixor": "a ^= b", "matmul": "a @ b",
    "lshift": "a << b", "rshift": "a >> b", "ilshift": "a <<= b", "irshift": "a >>= b",
}  # fmt: skip

# What is passed for a parameter of this name where functions are traced for their results.
SAMPLES = {
    "training": False,
    "fill_value": 1, "threshold": 0, "value": 1, "dim": -1, "min": 0, "exponent": 2, "chunks": 2,
    "split_size_or_sections": 4, "indices_or_sections": 2, "start": 0, "length": 4, "index": 0,
    "dim0": 0, "dim1": -1, "source": 0, "destination": -1, "shifts": 1,
    "num_classes": 8, "k": 2, "repeats": 2, "pad": (1, 1), "dims": -1,
}  # fmt: skip
# The arguments of functions of other shapes, of a row x and one index of it.
ARGUMENTS = {
    "scatter": lambda x, at: (x, -1, at, 1),
    "scatter_add": lambda x, at: (x, -1, at, x[:1]),
    "scatter_reduce": lambda x, at: (x, -1, at, x[:1], "amax"),
    "broadcast_tensors": lambda x, at: (x, x),
    "dropout1d": lambda x, at: (x[None], 0.0),
    "unfold": lambda x, at: (x, -1, 4, 4),
    "avg_pool1d": lambda x, at: (x[None], 4),
    "max_pool1d": lambda x, at: (x[None], 4),
    "lp_pool1d": lambda x, at: (x[None], 2, 4),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_max_pool1d"), lambda x, at: (x[None], 2)),
    "interpolate": lambda x, at: (x[None, None], 16),
    "cdist": lambda x, at: (x.view(2, 4), x.view(2, 4)),
    "pdist": lambda x, at: (x.view(2, 4),),
    "conv1d": lambda x, at: (x[None], x[None, None, :3]),
    "group_norm": lambda x, at: (x[None], 2),
    "instance_norm": lambda x, at: (x.view(1, 2, 4),),
    "batch_norm": lambda x, at: (x[None], x, x),
    "bmm": lambda x, at: (x.view(2, 2, 2), x.view(2, 2, 2)),
    "baddbmm": lambda x, at: (x.view(2, 2, 2),) * 3,
    "addmm": lambda x, at: (x[:4].view(2, 2),) * 3,
    "addmv": lambda x, at: (x[:2], x[:4].view(2, 2), x[:2]),
    **dict.fromkeys(("rot90", "fliplr"), lambda x, at: (x.view(2, 4),)),
    "matrix_norm": lambda x, at: (x.view(2, 4),),
    "matrix_power": lambda x, at: (x[:4].view(2, 2), 2),
    "tensordot": lambda x, at: (x, x, 1),
    "multi_dot": lambda x, at: ([x[:4].view(2, 2), x[:4].view(2, 2)],),
    **dict.fromkeys(("block_diag", "cartesian_prod"), lambda x, at: (x[:2], x)),
    "combinations": lambda x, at: (x[:4],),
    **dict.fromkeys(("cross", "linalg_cross"), lambda x, at: (x[:3], x[:3])),
    **dict.fromkeys(("tril", "triu", "diagonal", "trace"), lambda x, at: (x.view(2, 4),)),
    "fake_quantize_per_tensor_affine": lambda x, at: (x, 0.1, 0, -128, 127),
    "fake_quantize_per_channel_affine": lambda x, at: (x, x, x.int(), 0, -128, 127),
}
OF_ONE_TARGET = ("cosine_embedding_loss", "multi_margin_loss")  # an integer of the row
PLACES = {"index": (), "indices": (1,)}  # an index of each row, by its shape
AS_ASKED = (shapes.to,)  # whose result has the dtype that is written
MASKS = ("condition", "mask")
SHAPES = ("size", "sizes", "shape", "normalized_shape")
REFUSED = "–"
N = 8  # elements of a row in those traces


def page() -> str:
    """The text of docs/reference.md."""
    texts = [HEAD, _annotations(), _dtypes(), _operators(), _attributes(), FUNCTIONS_HEAD]
    texts += [_group(module, title) for module, title in GROUPS.items()]
    texts += [_factories()]
    texts += [_api(), _kernel(), _modules(), _testing(), _command_line()]
    return "\n".join(part.rstrip() + "\n" for part in texts if part)


# ---- what a function is given --------------------------------------------------------------------


def _annotations() -> str:
    lines = ["## Annotations of parameters", "", "| annotation | the argument |", "|---|---|"]
    for kind in (PerRow, Inner, Shared, Matrix, Scalar, Static):
        text = _summary(kind).removeprefix("Annotation: ")
        lines.append(f"| `htile.{kind.__name__}` | {text} |")
    lines += [
        "| `float` | A number given at run time: a Python float or int. A parameter whose default "
        "is a float is taken as annotated so. |",
        "",
        "They are found in unions, `Optional`, `Annotated` and annotations that are text. A "
        "parameter without one gets its role from what is passed: see the "
        "[guide](guide.md#what-each-argument-is). `self` and `cls` are static.",
    ]
    return "\n".join(lines)


def _dtypes() -> str:
    lines = ["## Dtypes", "", "| dtype | short name | computed in |", "|---|---|---|"]
    for dtype in sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str):
        try:
            computed = compute_dtype(dtype)
        except errors.DtypeError:
            continue
        of = "only converted" if dtype in STORAGE else f"`{dtype_name(computed)}`"
        of = "`i32`, of which 8 bits are kept" if dtype in BYTES else of
        lines.append(f"| `{dtype}` | `{dtype_name(dtype)}` | {of} |")
    return "\n".join([*lines, "", "Others raise `DtypeError`."])


# ---- what it may do ------------------------------------------------------------------------------


def _operators() -> str:
    own = {n.strip("_") for n, v in vars(Tensor).items() if n.startswith("__") and callable(v)}
    there = [text for name, text in OPERATORS.items() if name in own]
    return "## Operators\n\n" + ", ".join(f"`{text}`" for text in there) + "."


def _attributes() -> str:
    """What a tensor inside the function has that is not in the table."""
    lines = ["## Attributes of a tensor", "", "| | |", "|---|---|"]
    for name, value in sorted(vars(Tensor).items()):
        if isinstance(value, property) and not name.startswith("_"):
            lines.append(f"| `x.{name}` | {_summary(value)} |")
    size = vars(Tensor)["size"]
    lines.append(f"| `x.size{_signature(size, skip=1)}` | {_summary(size)} |")
    lines.append("| `x[...]`, `x[:]` | The row itself. |")
    lines.append("| `x[y]`, `x[3]` | The element at an index, an integer or one a row. A negative "
                 "one counts from the end. Beyond the end it is NaN, of integers 0, and of masks "
                 "False. |")  # fmt: skip
    lines.append("| `table[pos]`, `table[ids]` | The rows of a table, which is annotated "
                 "`htile.Shared`, at an integer of each row or at several. Ends are as above. |")
    lines.append("| `m[..., None]`, `m[..., 0]` | One value per row with an axis of size 1, and "
                 "without it. |")  # fmt: skip
    return "\n".join(lines)


def _spellings() -> dict[Callable, list[str]]:
    """How each function of the table is written: torch's names, F's, methods, torch.special's."""
    found: dict[Callable, set[str]] = {}
    for spelling, function in FUNCTIONS.values():
        found.setdefault(function, set()).add(spelling)
    for name, method in vars(Tensor).items():
        function = _behind(method)
        if function is not None and not name.startswith("_"):
            found.setdefault(function, set()).add(f"x.{name}")
    return {function: sorted(names, key=_rank) for function, names in found.items()}


def _rank(spelling: str) -> tuple[int, str]:
    prefixes = ("torch.special.", "torch.linalg.", "x.", "F.", "torch.")
    return -next(k for k, p in enumerate(prefixes) if spelling.startswith(p)), spelling


def _behind(method: object) -> Callable | None:
    """The function of the table that a method calls."""
    cells = getattr(method, "__closure__", None) or ()
    names = getattr(getattr(method, "__code__", None), "co_freevars", ())
    inside = {n: c.cell_contents for n, c in zip(names, cells, strict=True)}
    return inside.get("function") if callable(inside.get("function")) else None


def _group(module: str, title: str) -> str:
    """The functions that one module of the frontend enters."""
    rows = []
    for function, names in _spellings().items():
        if function.__module__ != f"htile.frontend.{module}":
            continue
        results = [*_results(function)]
        if set(results) == {REFUSED}:  # `x.double` is there for its message
            continue
        cells = [
            "<br>".join(f"`{name}`" for name in names),
            f"`{_arguments(function)}`",
            _summary(function).replace("|", "\\|"),
            *results,
        ]
        rows.append((names[0].rpartition(".")[2].lower(), f"| {' | '.join(cells)} |"))
    if not rows:
        return ""
    head = ["spelling", "arguments", "what it gives", "float", "int64", "bool"]
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(text for _, text in sorted(rows))])


def _factories() -> str:
    """What makes tensors of numbers alone."""
    names = ", ".join(f"`torch.{function.__name__}`" for function in FACTORIES)
    return f"### Tensors of numbers\n\n{names}: of any shape, in " + (
        "the dtype that torch gives them. `device` is `x.device`, or left out. "
        "`torch.arange(x.shape[-1])` is the number of each column. `x.new_zeros`, `x.new_ones`, "
        "`x.new_empty`, `x.new_full` and `x.new_tensor` have the dtype of x.\nOther "
        "functions make real tensors, with which nothing can be computed here: pass these as "
        "arguments."
    )


def _arguments(function: Callable) -> str:
    """The parameters; those of `var_mean` for its kin, which hand theirs on to it."""
    text = _signature(function)
    return _signature(FUNCTIONS[torch.var_mean][1]) if text == "(*args, **kwargs)" else text


def _results(function: Callable) -> Iterator[str]:
    """The dtypes that come of a float, an int64 and a bool operand: of rows, or else of values."""
    for dtype in (torch.float32, torch.int64, torch.bool):
        if function in AS_ASKED:
            yield "as asked"
            continue
        try:
            try:
                arguments, options = _sample(function, dtype, is_row=True)
                result = function(*arguments, **options)
            except errors.UnsupportedError:
                arguments, options = _sample(function, dtype, is_row=False)
                result = function(*arguments, **options)
        except errors.HTileError:
            yield REFUSED
            continue
        first = result[0] if isinstance(result, tuple) else result
        is_tensor = isinstance(first, torch.Tensor)
        yield dtype_name(compute_dtype(first.dtype)) if is_tensor else type(first).__name__


def _sample(function: Callable, dtype: torch.dtype, is_row: bool) -> tuple[list, dict]:
    """Arguments for a function: symbolic tensors where it needs nothing else."""
    builder = Builder("sample", N)

    takes = set(inspect.signature(function).parameters)
    is_of_matrices = bool({"mat2", "vec"} & takes) and function.__name__ not in ARGUMENTS

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        inner = (N, N) if is_of_matrices and name != "vec" else (N,) if is_row else ()
        value = Value(inner, Varies.ROW, dtype, spread=is_row)
        role = Role.ROW if is_row else Role.PER_ROW
        return Tensor(builder, builder.add_input(name, role, dtype, value))

    def place(inner: tuple[int, ...]) -> Tensor:
        """An index of a row."""
        value = Value(inner, Varies.ROW, torch.int64)
        return Tensor(builder, builder.add_input("y", Role.PER_ROW, torch.int64, value))

    if function.__name__ == "linear":
        value = Value((N, N), Varies.SHARED, torch.float32)
        weight = Tensor(builder, builder.add_input("W", Role.MATRIX, torch.bfloat16, value))
        value = Value((N,), Varies.ROW, torch.float32, spread=True)
        x = Tensor(builder, builder.add_input("x", Role.ROW, torch.bfloat16, value))
        return [x, weight], {}

    if function.__module__.endswith(".tables"):
        value = Value((N, N), Varies.SHARED, dtype, spread=True)
        table = Tensor(builder, builder.add_input("table", Role.COLUMN, dtype, value))
        is_select = function.__name__ == "index_select"
        return ([table, 0, place((1,))] if is_select else [place(()), table]), {}

    if function.__name__ in ARGUMENTS:
        return ARGUMENTS[function.__name__](tensor("x", dtype), place((1,))), {}

    arguments: list[object] = []
    is_loss = function.__module__.endswith(".losses") or function.__name__ in OF_ONE_TARGET
    places = {*PLACES, *(["target"] if is_loss else [])}
    options: dict[str, object] = {}
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_POSITIONAL and p.name == "args":
            arguments += [] if arguments else [tensor("x", dtype)]
        elif p.name in SHAPES and p.kind is p.POSITIONAL_OR_KEYWORD:
            options[p.name] = (N,) if is_row else (1,)
        elif p.name in SHAPES:
            arguments.append((N,) if is_row else (1,))
        elif p.name == "dims" and p.kind is p.VAR_POSITIONAL:
            arguments.append(-1)
        elif p.name == "repeats" and p.kind is p.VAR_POSITIONAL:
            arguments.append(2)
        elif p.name == "equation":
            arguments += ["i->i", tensor("x", dtype)]
        elif p.name == "tensors":
            arguments.append([tensor("x", dtype), tensor("y", dtype)])
        elif function.__name__ != "select" and p.name in places:
            options[p.name] = place(PLACES.get(p.name, ()))
        elif p.name in SAMPLES and (p.default in (p.empty, 1) or p.name in ("min", "num_classes")):
            options[p.name] = SAMPLES[p.name]
        elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            made = tensor(p.name, torch.bool if p.name in MASKS else dtype)
            if arguments:
                options[p.name] = made
            else:
                arguments.append(made)
    return arguments, options


# ---- the public API ------------------------------------------------------------------------------


def _api() -> str:
    function = htile.Rowwise
    parts = ["## The public API", ""]
    parts += _entry("htile.rowwise", htile.rowwise)
    for name in ("inspect", "compile", "tune", "with_plan"):
        parts += _entry(f"f.{name}", getattr(function, name), skip=1)
    over_rows, random = "sum_rows max_rows", "philox random_words uniform exponential dropout"
    for name in (*over_rows.split(), *random.split()):
        parts += _entry(f"htile.{name}", getattr(htile, name))
    parts += _entry("htile.cache_info", htile.cache_info)
    parts += _fields("htile.CacheInfo", htile.CacheInfo)
    parts += _fields("htile.Tuned", Tuned)
    parts += _fields("htile.TunedProducts", TunedProducts)
    parts += _fields("htile.TunedTile", TunedTile)
    parts += ["### Errors", "", "All are subclasses of `htile.HTileError`. Its `message` is the "
              "text, and its `loc` the line of yours, or None. [Errors](errors.md) shows each of "
              "them.", "", "| class | when |", "|---|---|"]  # fmt: skip
    for name in htile.__all__:
        kind = getattr(htile, name)
        if name.endswith("Error") and kind is not htile.HTileError:
            parts.append(f"| `htile.{name}` | {_summary(kind)} |")
    known = ", ".join(f"`{arch.name}`" for arch in ARCHS.values())
    parts += ["", "### Architectures", "", f"{known}. The default, where no GPU is asked, is "
              f"`{DEFAULT.name}`."]  # fmt: skip
    return "\n".join(parts)


def _kernel() -> str:
    """What `inspect` returns."""
    parts = ["### The kernel that `f.inspect` and `f.compile` return", "", _markdown(Kernel), "",
             "| | |", "|---|---|"]  # fmt: skip
    for name, value in vars(Kernel).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property) or not inspect.isfunction(value):
            parts.append(f"| `kernel.{name}` | {_summary(value)} |")
        else:
            parts.append(f"| `kernel.{name}{_signature(value, skip=1)}` | {_summary(value)} |")
    parts += ["", "### The kernels of a function with products", "", _markdown(ProductKernels), "",
              "| | |", "|---|---|"]  # fmt: skip
    for name, value in vars(ProductKernels).items():
        if isinstance(value, property):
            parts.append(f"| `kernels.{name}` | {_summary(value)} |")
        elif inspect.isfunction(value) and not name.startswith("_"):
            parts.append(f"| `kernels.{name}{_signature(value, skip=1)}` | {_summary(value)} |")
    return "\n".join(parts)


def _modules() -> str:
    parts = ["## Modules: `htile.nn`", "", _markdown(nn), ""]
    for name in sorted(nn.__all__, key=lambda name: (name == "fuse", name)):
        if name != "Report":
            parts += _entry(f"htile.nn.{name}", getattr(nn, name))
    return "\n".join(parts)


def _testing() -> str:
    parts = ["## Testing: `htile.testing`", "", _markdown(testing), ""]
    for name in ("assert_close", "oracle", "float32_errors"):
        parts += _entry(f"htile.testing.{name}", getattr(testing, name))
    return "\n".join(parts)


def _entry(title: str, function: Callable, skip: int = 0) -> list[str]:
    call = f"`{title}{_signature(function, skip)}`"
    return [f"### {title}", "", call, "", _markdown(function), ""]


def _fields(title: str, kind: type) -> list[str]:
    assert is_dataclass(kind)
    names = ", ".join(f"`{field.name}`" for field in fields(kind))
    return [f"### {title}", "", f"Fields: {names}.", "", _markdown(kind), ""]


def _signature(function: Callable, skip: int = 0) -> str:
    """The parameters without annotations, and without the first `skip`."""
    plain = [
        p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(plain[skip:]))


def _doc(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _summary(thing: object) -> str:
    """The first paragraph of a docstring as one line."""
    return _code(" ".join(_doc(thing).partition("\n\n")[0].split()))


def _markdown(thing: object) -> str:
    """A docstring as Markdown: its code in fences, what it says of each parameter as a list."""
    text = re.sub(r"(?m)^(\w+(?:, \w+)*): ", r"- `\1`: ", _doc(thing))
    text = re.sub(r"(?m)(?<=[^\n])\n(?=- `)", "\n", text)
    paragraphs = []
    for paragraph in text.split("\n\n"):
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            code = "\n".join(line[4:] for line in paragraph.splitlines())
            paragraphs.append(f"```py\n{code}\n```")
        else:
            paragraphs.append(_code(re.sub(r"(?m)^    (?=\S)", "  ", paragraph)))
    return "\n\n".join(paragraphs)


def _code(text: str) -> str:
    return text.replace("<", "&lt;") if "`" not in text else text


# ---- the command line ----------------------------------------------------------------------------


def _command_line() -> str:
    parts = ["## The command line: `python -m htile`", ""]
    for name in cli.COMMANDS:
        module = importlib.import_module(f"htile.cli.{name}")
        parser = argparse.ArgumentParser(add_help=False)
        module.add_arguments(parser)
        summary = f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}."
        parts += [f"### {name}", "", summary, "", "| option | |", "|---|---|"]
        for action in parser._actions:
            shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            if action.option_strings and action.nargs != 0:
                shown += f" {action.metavar or action.dest.upper()}"
            parts.append(f"| `{shown}` | {(action.help or '').replace('|', chr(92) + '|')} |")
        notes = (parser.epilog or "").strip()
        examples = "\n".join(f"{cli.PROGRAM} {line}" for line in module.EXAMPLES)
        if notes and notes != "None":
            parts += ["", "```text", notes.removesuffix("None").rstrip(), "```"]
        parts += ["", "Examples:", "", "```text", examples, "```", ""]
    parts.append(
        "Each command exits with 0, with 1 where something is wrong with a function or an "
        "installation, and with 2 where something is wrong with the command itself."
    )
    return "\n".join(parts)
