"""What each argument of a call is to the row: its role, from rank and annotation, never from size.

`Signature` is read once from a decorated function and binds calls to one value a parameter.
`classify` gives every value a `Spec`, and the call its N and its leading shape.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from .annotations import INNER, MOST_AXES, Inner, Matrix, PerRow, Scalar, Shared, Static
from .captures import closure, freeze, line_of
from .dtypes import HALVES
from .graph import Role
from .hints import nearest
from .leading import not_broadcast
from .libraries import library_of
from .ops import broadcast_shapes, compute_dtype


@dataclass(frozen=True, slots=True)
class Spec:
    """One parameter of one specialization.

    dtype: the dtype in memory; float32 for a Python float; None for STATIC.
    inner: the shape behind the leading dimensions: `(N,)` for ROW and COLUMN, any shape for those
        annotated htile.Inner or htile.Shared; `()` or `(1,)` for PER_ROW, SCALAR, DEVICE_SCALAR.
    value: of STATIC only. It is compared by type and bits (1, True and 1.0 differ), by `guard`.
    """

    name: str
    role: Role
    dtype: torch.dtype | None = None
    inner: tuple[int, ...] = ()
    value: object = field(default=None, compare=False)
    guard: object = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "guard", freeze(self.value))


class Call(NamedTuple):
    """The arguments of one call: a `Spec` for each parameter, N, and the rows' leading shape.

    n: the largest last dimension of the rows; without rows, of what they share.
    multiple, length: of rows of any length (htile.frontend.dynamic), of which n is the capacity:
        `Graph.multiple`, and how many elements they have in this call.
    """

    specs: tuple[Spec, ...]
    n: int
    lead: tuple[int, ...]
    multiple: int | None = None
    length: int | None = None


PLAIN = (torch.Tensor, torch.nn.Parameter)  # the types of tensors that a call takes
_KINDS = (PerRow, Shared, Matrix, Scalar, Static, float, *INNER.values())
_OF_HTILE = (PerRow, Shared, Matrix, Scalar, Static, Inner)  # an instance means what the class does
MARKERS = {kind.__name__: kind for kind in _KINDS}
# Modules of torch whose decorators enter a context, compile, or transform a function. A trace goes
# through what others wrap.
_WRAPPERS = "_contextlib.py", "autocast_mode.py", "eval_frame.py", "_functorch"
_PACKAGE = __package__.split(".")[0]
_MISSING = inspect.Parameter.empty
_UNRESOLVED = (NameError, AttributeError, TypeError, ValueError, SyntaxError, LookupError)
_INSTEAD = (
    (torch.nn.Module, "its forward as a function of a row that takes its parameters: "
                      "`def f(x, weight): ...`"),
    (functools.partial, "`def f(x): return part(x)`, where `part` is this partial, and decorate "
                        "that"),
    (object, "`def f(x): ...` and decorate that"),
)  # fmt: skip


class Signature:
    """The parameters of a decorated function. Annotations are read when they are first used."""

    def __init__(self, fn):
        if not isinstance(fn, types.FunctionType):
            instead = next(text for kind, text in _INSTEAD if isinstance(fn, kind))
            raise ArgumentError(
                f"expected a plain Python function, got {type(fn).__name__} {fn!r}; write {instead}"
            )
        users = written(fn)
        by = fn.__code__.co_filename
        if library_of(fn) == "torch" and any(module in by for module in _WRAPPERS):
            raise ArgumentError(
                f"{users.__name__} is wrapped by torch, as by @torch.no_grad() or @torch.compile: "
                "decorate the plain function; write `with torch.no_grad():` inside it, and "
                "torch.compile or torch.vmap around what calls it",
                line_of(users),
            )
        self.fn = fn
        self.name = fn.__name__
        parameters = _parameters(fn)
        for p in parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise UnsupportedError(
                    f"{self.name}: parameter {p.replace(annotation=_MISSING)} is not supported; "
                    "give every argument a parameter of its own",
                    line_of(fn),
                )
        self.names = tuple(p.name for p in parameters)
        self.defaults = tuple(p.default for p in parameters)
        self.parameters = parameters
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._positional = len(positional)
        named = enumerate(parameters)
        self._by_keyword = {p.name: i for i, p in named if p.kind is not p.POSITIONAL_ONLY}

    @functools.cached_property
    def kinds(self) -> tuple[type | None, ...]:
        """For each parameter PerRow, Inner[k], Shared, Scalar, Static, float, or None."""
        return tuple(_kind(p, written(self.fn)) for p in self.parameters)

    @property
    def shared(self) -> frozenset[str]:
        """The names of the parameters that are annotated htile.Shared."""
        both = zip(self.names, self.kinds, strict=True)
        return frozenset(name for name, kind in both if kind is Shared)

    def bind(self, args: tuple, kwargs: dict) -> tuple[object, ...]:
        """One value a parameter, in order, defaults filled in. Raises ArgumentError."""
        if len(args) == self._positional == len(self.names) and not kwargs:
            return args
        if len(args) > self._positional:
            most = self._positional
            self._refuse(f"takes {most} positional argument{'s' * (most != 1)}, got {len(args)}")
        values = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            i = self._by_keyword.get(name)
            if i is None:
                self._refuse(f"takes no keyword argument {name!r}")
            if i < len(args):
                twice = f"{self.name} got parameter {name!r} twice: by position and by name"
                raise ArgumentError(twice)
            values[i] = value
        missing = [repr(n) for n, v in zip(self.names, values, strict=True) if v is _MISSING]
        if missing:
            self._refuse(f"needs {', '.join(missing)}")
        return tuple(values)

    def invoke(self, values: tuple) -> object:
        """Call the function with one value a parameter, as `bind` gives them."""
        k = self._positional
        return self.fn(*values[:k], **dict(zip(self.names[k:], values[k:], strict=True)))

    def _refuse(self, what: str) -> typing.NoReturn:
        plain = [p.replace(annotation=_MISSING, default=_MISSING) for p in self.parameters]
        told = f"{self.name} {what}; its parameters are {inspect.Signature(plain)}"
        if self.names[:1] in (("self",), ("cls",)):
            told += f". inspect, compile, tune and with_plan of a method take {self.names[0]} first"
        raise ArgumentError(told)


def written(fn: types.FunctionType) -> types.FunctionType:
    """The last plain Python function that `functools.wraps` leads to from this one."""
    last = fn
    while (fn := getattr(fn, "__wrapped__", None)) is not None:
        last = fn if isinstance(fn, types.FunctionType) else last
    return last


def _parameters(fn: types.FunctionType) -> tuple[inspect.Parameter, ...]:
    follow = isinstance(inspect.unwrap(fn), types.FunctionType)
    options = {"follow_wrapped": follow}  # a builtin or a partial behind `fn` is not asked
    if sys.version_info >= (3, 14):  # annotations may name what does not exist yet
        import annotationlib

        options["annotation_format"] = annotationlib.Format.FORWARDREF
    signature = inspect.signature(fn if follow else written(fn), **options)
    return tuple(signature.parameters.values())


def _kind(p: inspect.Parameter, fn: types.FunctionType) -> type | None:
    if p.annotation is not _MISSING:
        kind = _marker(p.annotation, fn)
        if kind is Inner:
            raise ArgumentError(
                f"{fn.__name__}: {p.name} is annotated htile.Inner, which says nothing of how many "
                "of the tensor's last dimensions belong to a row: write htile.Inner[2] for two",
                line_of(fn),
            )
        return kind
    if p.name in ("self", "cls"):  # of a method
        return Static
    return float if type(p.default) is float else None


def _marker(annotation: object, fn: types.FunctionType) -> type | None:
    """The marker inside an annotation of `fn`: through text, Optional, unions and Annotated."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    parts = typing.get_args(annotation)
    if isinstance(annotation, str):
        try:
            return _marker(eval(annotation, fn.__globals__, closure(fn)), fn)
        except _UNRESOLVED as error:  # a name for type checkers, or local to an enclosing function
            if getattr(error, "obj", None) is sys.modules[_PACKAGE]:
                _refuse_misspelt(annotation, error, fn)
            found = [MARKERS.get(word) for word in re.findall(r"Inner\[\d\]|\w+", annotation)]
    elif typing.get_origin(annotation) is typing.Annotated:
        found = [_marker(parts[0], fn), *map(_class, parts[1:])]
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [_marker(a, fn) for a in parts]
    else:
        found = [_class(annotation)]
    return next((kind for kind in (*MARKERS.values(), Inner) if kind in found), None)


def _class(annotation: object) -> type:
    """The class that an annotation is, or is an instance of, such as `htile.PerRow()`."""
    if isinstance(annotation, type):
        return annotation
    return type(annotation) if isinstance(annotation, _OF_HTILE) else object


def _refuse_misspelt(
    annotation: str, error: AttributeError, fn: types.FunctionType
) -> typing.NoReturn:
    """Refuse text that names what htile itself does not have."""
    known = [name.partition("[")[0] for name, kind in MARKERS.items() if kind is not float]
    near = nearest(error.name, known)
    likely = f": write {_PACKAGE}.{near[0]}" if near else ""
    told = f"{fn.__name__}: {_PACKAGE} has no {error.name}, which an annotation names"
    raise ArgumentError(f"{told} ({annotation!r}){likely}", line_of(fn)) from error


# roles


def classify(signature: Signature, values: tuple[object, ...]) -> Call:
    """The role of each value, N and the leading shape. Raises the error that names the argument."""
    name = signature.name
    tensors = {}  # those whose role depends on the rows: by parameter, without annotation
    per_row = {}  # annotated PerRow
    shared = {}  # annotated Shared
    inners = {}  # how many dimensions of a tensor belong to the row, where an annotation says so
    specs: dict[str, Spec] = {}
    for parameter, kind, value in zip(signature.names, signature.kinds, values, strict=True):
        if kind is Static or not isinstance(value, torch.Tensor):
            specs[parameter] = _value_spec(name, parameter, kind, value)
            continue
        _check_tensor(name, parameter, value)
        shape = tuple(value.shape)
        if kind is Scalar and shape not in ((), (1,)):
            told = f"{name}: {parameter} is annotated htile.Scalar: expected shape () or (1,), got "
            raise ShapeError(f"{told}{shape}; pass one number, or drop the annotation")
        if kind is Shared:
            _check_shared(name, parameter, shape)
        if kind is Matrix:
            specs[parameter] = _matrix_spec(name, parameter, value)
            continue
        if kind in INNER.values():
            _check_inner(name, parameter, shape, kind.rank)
            inners[parameter] = kind.rank
        if kind is not PerRow and (kind is Scalar or not shape):
            specs[parameter] = Spec(parameter, Role.DEVICE_SCALAR, value.dtype, shape)
        else:
            where = {PerRow: per_row, Shared: shared}.get(kind, tensors)
            where[parameter] = value

    for parameter, tensor in shared.items():
        specs[parameter] = Spec(parameter, Role.COLUMN, tensor.dtype, tuple(tensor.shape))
    if _are_of_values(tensors, per_row, shared, inners):
        n, lead, is_one_row = _of_per_row(name, per_row, shared | tensors)
    else:
        n, lead, is_one_row = _rows(name, tensors, inners)
    for parameter, tensor in tensors.items():
        shape = tuple(tensor.shape)
        role, inner = Role.ROW, shape[-inners.get(parameter, 1) :]
        if inner == (1,) and n > 1 and parameter not in inners:
            role = Role.PER_ROW
        if len(shape) == 1 and not is_one_row and parameter not in inners:
            role, inner = (Role.DEVICE_SCALAR if shape == (1,) and n > 1 else Role.COLUMN), shape
        specs[parameter] = Spec(parameter, role, tensor.dtype, inner)
    for parameter, tensor in per_row.items():
        _check_per_row(name, parameter, tuple(tensor.shape), lead)
        specs[parameter] = Spec(parameter, Role.PER_ROW, tensor.dtype)
    return Call(tuple(specs[p] for p in signature.names), n, lead)


def _are_of_values(
    tensors: dict[str, torch.Tensor], per_row: dict[str, torch.Tensor],
    shared: dict[str, torch.Tensor], inners: dict[str, int],
) -> bool:  # fmt: skip
    """Whether each value per row makes a row, of what all rows share."""
    if any(tensor.ndim > 1 or p in inners for p, tensor in tensors.items()):
        return False
    if tensors:  # without dimensions, a value belongs to one row alone
        return any(tensor.ndim for tensor in per_row.values())
    return bool(per_row and shared)


def _rows(
    name: str, tensors: dict[str, torch.Tensor], inners: dict[str, int]
) -> tuple[int, tuple[int, ...], bool]:
    """N, the leading shape of the rows, and whether the call is for one row alone.

    Rows are the tensors of more dimensions than their rows have axes. Where there are none, all
    tensors are one row: a vector that all rows share is then the same as a part of that row.
    """
    shapes = {p: tuple(t.shape) for p, t in tensors.items()}
    rows = {p: s for p, s in shapes.items() if len(s) > inners.get(p, 1)} or shapes
    listed = ", ".join(f"{p} {s}" for p, s in rows.items())
    is_one_row = all(len(s) == inners.get(p, 1) for p, s in rows.items())
    dtypes = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if not rows or (is_one_row and len(dtypes) > 1):
        raise ArgumentError(
            f"{name}: expected a row argument, a tensor of two or more dimensions, "
            + (f"or tensors of one dimension and one floating dtype, got {listed} of different "
               "ones; give the row a leading dimension, x[None]"
               if rows else "or of one for a single row; no tensor was passed that has one. "
               "Numbers of rows go with a vector that all share, or are rows of one element, "
               "t[:, None]")
        )  # fmt: skip
    n = max(s[-1] for s in rows.values())
    empty = [p for p, s in shapes.items() if 0 in s[len(s) - inners.get(p, 1) :]]
    if empty:
        what = "a row has no elements (N = 0)"
        if empty[0] not in rows:
            what, listed = f"{empty[0]} has no elements", f"{empty[0]} {shapes[empty[0]]}"
        raise ShapeError(f"{name}: {what}, got {listed}; pass rows of at least one element")
    lead = broadcast_shapes(*(s[: len(s) - inners.get(p, 1)] for p, s in rows.items()))
    if lead is None:
        raise ShapeError(f"{name}: {not_broadcast(rows, n)}")
    return n, lead, is_one_row


def _of_per_row(
    name: str, per_row: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]
) -> tuple[int, tuple[int, ...], bool]:
    """What `_rows` gives, of a call whose only rows are values per row.

    shared: the tables and vectors that all rows share.
    """
    empty = {p: tuple(t.shape) for p, t in shared.items() if 0 in t.shape}
    if empty:
        listed = ", ".join(f"{p} {shape}" for p, shape in empty.items())
        raise ShapeError(f"{name}: a row has no elements (N = 0), got {listed}; pass rows of at "
                         "least one element")  # fmt: skip
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in per_row.items()}
    lead = broadcast_shapes(*shapes.values())
    if lead is None:
        listed = ", ".join(f"{parameter} {shape}" for parameter, shape in shapes.items())
        raise ShapeError(f"{name}: values per row do not broadcast, got {listed}")
    return max(tensor.shape[-1] for tensor in shared.values()), lead, False


def _check_shared(name: str, parameter: str, shape: tuple) -> None:
    if len(shape) > MOST_AXES:
        raise ShapeError(
            f"{name}: {parameter} is annotated htile.Shared: expected at most {MOST_AXES} "
            f"dimensions, got {shape}; pass a view of fewer, {parameter}.flatten(0, 1)"
        )
    if 0 in shape:
        raise ShapeError(
            f"{name}: {parameter} is annotated htile.Shared and has no elements, got {shape}; "
            "pass one of at least one element"
        )


def _matrix_spec(name: str, parameter: str, tensor: torch.Tensor) -> Spec:
    what, shape = f"{name}: {parameter} is annotated htile.Matrix", tuple(tensor.shape)
    if len(shape) != 2 or 0 in shape:
        raise ShapeError(f"{what}: expected two dimensions of at least one element, got {shape}")
    if tensor.dtype not in HALVES:
        raise DtypeError(
            f"{what}: expected bfloat16 or float16, as tensor cores multiply them with float32 "
            f"sums, got {tensor.dtype}; convert it with .to(torch.bfloat16)"
        )
    return Spec(parameter, Role.MATRIX, tensor.dtype, shape)


def _check_inner(name: str, parameter: str, shape: tuple, rank: int) -> None:
    if len(shape) < rank:
        raise ShapeError(
            f"{name}: {parameter} is annotated htile.Inner[{rank}]: expected {rank} dimensions or "
            f"more, got {shape}"
        )


def _check_per_row(name: str, parameter: str, shape: tuple, lead: tuple[int, ...]) -> None:
    if broadcast_shapes(shape, lead) == lead:
        return
    hint = "pass one value for each row"
    if broadcast_shapes(shape, lead) is not None:
        hint = "it adds no rows: expand the rows, so that there is one for each value"
    if len(shape) == len(lead) + 1 and shape[-1] == 1:
        hint = f"drop the last dimension, {parameter}.squeeze(-1)"
    raise ShapeError(
        f"{name}: {parameter} is annotated htile.PerRow: expected the leading shape {lead} of the "
        f"rows, or one that broadcasts to it, got {shape}; {hint}"
    )


def stands_in(kind: type) -> bool:
    """Whether torch traces with tensors of this type in the place of plain ones."""
    if kind in PLAIN:
        return False
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    return (fake is not None and issubclass(kind, fake.FakeTensor)) or (
        functional is not None and issubclass(kind, functional.FunctionalTensor)
    )


def refuse_subclass(name: str, parameter: str, kind: type) -> None:
    """Raise UnsupportedError for tensors of other types than torch's own."""
    if kind not in PLAIN:
        plain = "to_local()" if hasattr(kind, "to_local") else "as_subclass(torch.Tensor)"
        nested = sys.modules.get("torch.nested._internal.nested_tensor")
        if nested is not None and issubclass(kind, nested.NestedTensor):
            plain = "to_padded_tensor(0.0)"
        raise UnsupportedError(
            f"{name}: {parameter} is a {kind.__name__}; HTile takes torch.Tensor and "
            "torch.nn.Parameter only, no other tensor subclass yet; pass a plain tensor, for "
            f"instance {parameter}.{plain}"
        )


def _check_tensor(name: str, parameter: str, tensor: torch.Tensor) -> None:
    what = f"{name}: {parameter}"
    if not stands_in(type(tensor)):
        refuse_subclass(name, parameter, type(tensor))
    if tensor.is_nested:
        dense = f"{parameter}.to_padded_tensor(0.0)"
        raise UnsupportedError(f"{what} is a nested tensor; pass a dense one, for instance {dense}")
    if tensor.layout is not torch.strided:
        remedy = f"pass a dense tensor, for instance {parameter}.to_dense()"
        raise UnsupportedError(f"{what} has layout {tensor.layout}; {remedy}")
    if tensor.is_neg():
        raise UnsupportedError(
            f"{what} is a negated view, whose memory holds the other sign; pass "
            f"{parameter}.resolve_neg()"
        )
    try:
        compute_dtype(tensor.dtype)
    except DtypeError as error:
        cast = ".float()" if tensor.dtype.is_floating_point else ".to() one of these"
        raise DtypeError(f"{what}: {error.message}; convert it with {cast}") from None


def _value_spec(name: str, parameter: str, kind: type | None, value: object) -> Spec:
    """The spec of what is no tensor, or is annotated Static."""
    cls, what = type(value), f"{name}: {parameter}"
    if kind is Static:
        if isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{what} is annotated htile.Static but got a tensor; a static value "
                "is fixed in the kernel: drop the annotation, or pass a Python value"
            )
        try:
            freeze(value)
        except TypeError as error:
            message = f"{what} is static, fixed in the kernel, but {error}"
            if parameter == "self":
                message = message.partition("; expected")[0] + _OF_METHODS
            raise ArgumentError(message) from None
        return Spec(parameter, Role.STATIC, value=value)
    if cls is float or (cls is int and kind in (float, Scalar)):
        if cls is int and abs(value) >= 2**63:
            raise ArgumentError(f"{what} is an int of more than 64 bits; pass a float")
        return Spec(parameter, Role.SCALAR, torch.float32)
    if kind in (float, Scalar) and cls in (str, torch.dtype):
        wanted = "float" if kind is float else "htile.Scalar"
        raise ArgumentError(
            f"{what} is annotated {wanted}: expected a number, got {cls.__name__} {value!r}"
        )
    if value is None or cls in (bool, int, str, torch.dtype):
        return Spec(parameter, Role.STATIC, value=value)
    if cls.__module__.partition(".")[0] == "numpy":
        remedy = f"pass the Python number, {parameter}.item()"
        if cls.__name__ == "ndarray":
            remedy = f"pass torch.from_numpy({parameter})"
    else:
        fixed = f"if it is fixed in the kernel, annotate it `{parameter}: htile.Static`"
        remedy = _REMEDY.get(cls, fixed)
    expected = "expected a tensor, float, int, bool, str, None or dtype"
    if cls in (list, tuple) and any(isinstance(each, torch.Tensor) for each in value):
        remedy = "pass each tensor as an argument of its own, or torch.stack of them"
    raise ArgumentError(f"{what}: {expected}, got {cls.__name__}; {remedy}")


_OF_METHODS = (
    "; pass a frozen dataclass as self, or write a function outside the class that takes what the "
    "method uses: `@htile.rowwise def norm(x, eps: float): ...`, called as `norm(x, self.eps)`"
)
_REMEDY = {
    list: "pass torch.tensor(...), or a tuple that is annotated htile.Static",
    dict: "pass each entry as an argument of its own",
    set: "pass each entry as an argument of its own",
    complex: "pass the real and imaginary parts as two floats",
}
