"""What each argument of a call is to the row: its role, from rank and annotation, never from size.

`Signature` is read once from a decorated function and binds calls to one value a parameter;
`classify` gives every value a `Spec`, and the call its N and its leading shape.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
import typing
from dataclasses import dataclass, field

import torch

from ..errors import ArgumentError, DtypeError, Location, ShapeError, UnsupportedError
from .captures import ATOMS, freeze
from .graph import Role
from .ops import broadcast_shapes, compute_dtype


class PerRow:
    """Annotation: a tensor of the leading shape, one value per row (`labels: htile.PerRow`)."""


class Scalar:
    """Annotation: one number for the whole call: a float, or a tensor of shape () or (1,)."""


class Static:
    """Annotation: a hashable Python value that is fixed in the kernel; each value compiles anew."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One parameter of one specialization.

    dtype: the dtype in memory; float32 for a Python float; None for STATIC.
    inner: ROW, COLUMN: `(N,)`; PER_ROW, SCALAR, DEVICE_SCALAR: `()` or `(1,)`.
    value: STATIC only. Compared by type and bits (1, True and 1.0 differ), through `guard`.
    """

    name: str
    role: Role
    dtype: torch.dtype | None = None
    inner: tuple[int, ...] = ()
    value: object = field(default=None, compare=False)
    guard: object = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "guard", freeze(self.value))


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call: a `Spec` a parameter, N, and the leading shape of the rows."""

    specs: tuple[Spec, ...]
    n: int
    lead: tuple[int, ...]


MARKERS = {PerRow: PerRow, Scalar: Scalar, Static: Static, float: float}
_MARKER_NAMES = {kind.__name__: kind for kind in MARKERS}
_MISSING = inspect.Parameter.empty
_UNRESOLVED = (NameError, AttributeError, TypeError, ValueError, SyntaxError, LookupError)


class Signature:
    """The parameters of a decorated function; analysed once, annotations at first use."""

    def __init__(self, fn):
        if not isinstance(fn, types.FunctionType):
            raise ArgumentError(
                f"expected a plain Python function, got {type(fn).__name__} {fn!r}; "
                "write `def f(x): ...` and decorate that"
            )
        self.fn = fn
        self.name = fn.__name__
        parameters = _parameters(fn)
        for p in parameters:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                stars = "*" if p.kind is p.VAR_POSITIONAL else "**"
                raise UnsupportedError(
                    f"{self.name}: parameter {stars}{p.name} is not supported; "
                    "give every argument a parameter of its own",
                    Location(fn.__code__.co_filename, fn.__code__.co_firstlineno),
                )
        self.names = tuple(p.name for p in parameters)
        self.defaults = tuple(p.default for p in parameters)
        self.parameters = parameters
        self._kinds = None
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self._positional = len(positional)
        self._by_keyword = {
            p.name: i for i, p in enumerate(parameters) if p.kind is not p.POSITIONAL_ONLY
        }
        # for k positional arguments, the defaults that follow; None where one has no default
        tails = [self.defaults[k:] for k in range(self._positional + 1)]
        self._tails = [None if any(d is _MISSING for d in t) else t for t in tails]

    @property
    def kinds(self) -> tuple[type | None, ...]:
        """For each parameter PerRow, Scalar, Static, float, or None."""
        if self._kinds is None:
            scope = _Scope(inspect.unwrap(self.fn))
            self._kinds = tuple(_kind(p, scope) for p in self.parameters)
        return self._kinds

    def bind(self, args: tuple, kwargs: dict) -> tuple[object, ...]:
        """One value a parameter, in order, defaults filled in. Raises ArgumentError."""
        if not kwargs and len(args) <= self._positional:
            tail = self._tails[len(args)]
            if tail is not None:
                return args + tail
        if len(args) > self._positional:
            raise ArgumentError(
                f"{self.name} takes {self._positional} positional arguments, got {len(args)}; "
                f"its parameters are {self._text()}"
            )
        values = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            i = self._by_keyword.get(name)
            if i is None:
                raise ArgumentError(
                    f"{self.name} takes no keyword argument {name!r}; "
                    f"its parameters are {self._text()}"
                )
            if i < len(args):
                raise ArgumentError(
                    f"{self.name} got parameter {name!r} twice: by position and by name"
                )
            values[i] = value
        missing = [n for n, v in zip(self.names, values, strict=True) if v is _MISSING]
        if missing:
            raise ArgumentError(
                f"{self.name} needs {', '.join(map(repr, missing))}; "
                f"its parameters are {self._text()}"
            )
        return tuple(values)

    def invoke(self, values: tuple) -> object:
        """Call the function with one value a parameter, as `bind` gives them."""
        k = self._positional
        return self.fn(*values[:k], **dict(zip(self.names[k:], values[k:], strict=True)))

    def _text(self) -> str:
        return f"({', '.join(self.names)})"


def _parameters(fn) -> tuple[inspect.Parameter, ...]:
    if sys.version_info >= (3, 14):  # annotations may name what does not exist yet
        import annotationlib

        signature = inspect.signature(fn, annotation_format=annotationlib.Format.FORWARDREF)
    else:
        signature = inspect.signature(fn)
    return tuple(signature.parameters.values())


class _Scope(dict):
    """The names that an annotation in text can see: the function's closure, then its globals."""

    def __init__(self, fn):
        self.globals = fn.__globals__
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue


def _kind(p: inspect.Parameter, scope: _Scope) -> type | None:
    if p.annotation is not _MISSING:
        return _marker(p.annotation, scope)
    if p.name in ("self", "cls"):  # of a method
        return Static
    return float if type(p.default) is float else None


def _marker(annotation, scope: _Scope) -> type | None:
    """The marker inside an annotation: through text, Optional, unions and Annotated."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        try:
            return _marker(eval(annotation, scope.globals, scope), scope)
        except _UNRESOLVED:  # a name for type checkers only, or local to an enclosing function
            found = [_MARKER_NAMES.get(word) for word in re.findall(r"\w+", annotation)]
            return _strongest(found)
    if isinstance(annotation, type):
        return MARKERS.get(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        described = (MARKERS.get(a) for a in arguments[1:] if isinstance(a, type))
        return _strongest([_marker(arguments[0], scope), *described])
    if origin in (typing.Union, types.UnionType):
        return _strongest([_marker(a, scope) for a in arguments])
    return None


def _strongest(kinds: list[type | None]) -> type | None:
    return next((kind for kind in MARKERS if kind in kinds), None)


# ---------------------------------------------------------------------------------------- roles


def classify(signature: Signature, values: tuple[object, ...]) -> Call:
    """The role of each value, N and the leading shape. Raises the error that names the argument."""
    name = signature.name
    arguments = tuple(zip(signature.names, signature.kinds, values, strict=True))
    tensors = {}  # those whose role depends on the rows: by parameter, without annotation
    per_row = {}  # annotated PerRow
    specs: dict[str, Spec] = {}
    for parameter, kind, value in arguments:
        if kind is Static or not isinstance(value, torch.Tensor):
            specs[parameter] = _value_spec(name, parameter, kind, value)
            continue
        _check_tensor(name, parameter, value)
        shape = tuple(value.shape)
        if kind is Scalar and shape not in ((), (1,)):
            raise ShapeError(
                f"{name}: {parameter} is annotated htile.Scalar: expected shape () or (1,), "
                f"got {shape}; pass one number, or drop the annotation"
            )
        if kind is PerRow:
            per_row[parameter] = value
        elif kind is Scalar or not shape:
            specs[parameter] = Spec(parameter, Role.DEVICE_SCALAR, value.dtype, shape)
        else:
            tensors[parameter] = value

    shapes = {p: tuple(t.shape) for p, t in tensors.items()}
    n, lead = _rows(name, shapes, per_row)
    for parameter, tensor in tensors.items():
        role, inner = _tensor_role(name, parameter, shapes, n, lead)
        specs[parameter] = Spec(parameter, role, tensor.dtype, inner)
    for parameter, tensor in per_row.items():
        _check_per_row(name, parameter, tuple(tensor.shape), lead)
        specs[parameter] = Spec(parameter, Role.PER_ROW, tensor.dtype)
    return Call(tuple(specs[p] for p in signature.names), n, lead)


def _rows(name: str, shapes: dict[str, tuple], per_row: dict) -> tuple[int, tuple[int, ...]]:
    """N and the leading shape, from the tensors of two or more dimensions, or from the only one."""
    rows = {p: s for p, s in shapes.items() if len(s) > 1}
    if not rows:
        if len(shapes) != 1:
            got = (
                f"{_listed(shapes)} have one dimension each; give the row a leading one, x[None]"
                if shapes
                else "no tensor was passed that has a row; pass a tensor of shape (*lead, N)"
            )
            raise ArgumentError(
                f"{name}: expected a row argument: a tensor of two or more dimensions, or a single "
                f"tensor of one; {got}"
            )
        rows = shapes
    lasts = {s[-1] for s in rows.values()} - {1}
    if len(lasts) > 1:
        raise ShapeError(
            f"{name}: row arguments must agree in the last dimension N (or have 1 there, one value "
            f"per row), got {_listed(rows)}"
        )
    n = lasts.pop() if lasts else 1
    if n == 0:
        raise ShapeError(
            f"{name}: a row has no elements (N = 0), got {_listed(rows)}; "
            "pass rows of at least one element"
        )
    lead = broadcast_shapes(*(s[:-1] for s in rows.values()))
    if lead is None:
        raise ShapeError(
            f"{name}: leading dimensions of the row arguments do not broadcast, got "
            f"{_listed(rows)}; all dimensions but the last must agree or be 1"
        )
    return n, lead


def _tensor_role(
    name: str, parameter: str, shapes: dict[str, tuple], n: int, lead: tuple[int, ...]
) -> tuple[Role, tuple[int, ...]]:
    """The role of a tensor of one or more dimensions that has no annotation."""
    shape = shapes[parameter]
    if len(shape) > 1 or len(shapes) == 1:
        return (Role.ROW, (n,)) if shape[-1] == n else (Role.PER_ROW, (1,))
    (size,) = shape
    if size == n:
        return Role.COLUMN, (n,)
    if size == 1:
        return Role.DEVICE_SCALAR, (1,)
    message = (
        f"{name}: {parameter} has one dimension, so it is shared by all rows: expected N values, "
        f"shape ({n},), got {shape}"
    )
    if size == math.prod(lead) or size in lead:
        message += (
            f"; if it holds one value for each row of {lead}, annotate it "
            f"`{parameter}: htile.PerRow`" + (f" and pass shape {lead}" * (shape != lead))
        )
    else:
        message += "; pass N values, or (1,) for one value that all share"
    raise ShapeError(message)


def _check_per_row(name: str, parameter: str, shape: tuple, lead: tuple[int, ...]) -> None:
    trailing = lead[len(lead) - len(shape) :]
    if len(shape) <= len(lead) and all(a in (1, b) for a, b in zip(shape, trailing, strict=True)):
        return
    hint = "pass one value for each row"
    if len(shape) == len(lead) + 1 and shape[-1] == 1:
        hint = f"drop the last dimension, {parameter}.squeeze(-1)"
    raise ShapeError(
        f"{name}: {parameter} is annotated htile.PerRow: expected the leading shape {lead} of the "
        f"rows, or one that broadcasts to it, got {shape}; {hint}"
    )


def _check_tensor(name: str, parameter: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(
            f"{name}: {parameter} is a {type(tensor).__name__}; HTile takes torch.Tensor and "
            "torch.nn.Parameter only, no other tensor subclass yet; pass a plain tensor, for "
            f"instance {parameter}.as_subclass(torch.Tensor)"
        )
    if tensor.is_nested:
        raise UnsupportedError(
            f"{name}: {parameter} is a nested tensor; pass a dense one, for instance "
            f"{parameter}.to_padded_tensor(0.0)"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{name}: {parameter} has layout {tensor.layout}; pass a dense tensor, for instance "
            f"{parameter}.to_dense()"
        )
    try:
        compute_dtype(tensor.dtype)
    except DtypeError as error:
        cast = ".float()" if tensor.dtype.is_floating_point else ".to() one of these"
        raise DtypeError(f"{name}: {parameter}: {error.message}; convert it with {cast}") from None


def _value_spec(name: str, parameter: str, kind: type | None, value: object) -> Spec:
    """The spec of what is no tensor, or is annotated Static."""
    cls = type(value)
    if kind is Static:
        if isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{name}: {parameter} is annotated htile.Static but got a tensor; a static value "
                "is fixed in the kernel: drop the annotation, or pass a Python value"
            )
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"{name}: {parameter} is annotated htile.Static: expected a hashable value, got "
                f"{cls.__name__}; {_FROZEN.get(cls, 'pass a tuple or a frozen dataclass')}"
            ) from None
        try:
            freeze(value)
        except TypeError as error:
            message = f"{name}: {parameter} is static, fixed in the kernel, but {error}"
            raise ArgumentError(message + _OF_METHODS * (parameter == "self")) from None
        return Spec(parameter, Role.STATIC, value=value)
    if cls is float or (cls is int and kind in (float, Scalar)):
        if cls is int and abs(value) >= 2**63:
            raise ArgumentError(f"{name}: {parameter} is an int of more than 64 bits; pass a float")
        return Spec(parameter, Role.SCALAR, torch.float32)
    numpy = cls.__module__.partition(".")[0] == "numpy"
    if not numpy and (value is None or cls in ATOMS):
        return Spec(parameter, Role.STATIC, value=value)
    if numpy:
        remedy = (
            f"pass torch.from_numpy({parameter})"
            if cls.__name__ == "ndarray"
            else f"pass the Python number, {parameter}.item()"
        )
    else:
        remedy = _REMEDY.get(
            cls,
            f"if it is hashable and fixed in the kernel, annotate it `{parameter}: htile.Static`",
        )
    raise ArgumentError(
        f"{name}: {parameter}: expected a tensor, float, int, bool, str, None or dtype, got "
        f"{cls.__name__}; {remedy}"
    )


_OF_METHODS = (
    "; pass a frozen dataclass as self, or write a function outside the class that takes what the "
    "method uses: "
    "`@htile.rowwise def norm(x, eps: float): ...`, called as `norm(x, self.eps)`"
)
_FROZEN = {
    list: "pass a tuple",
    dict: "pass a tuple of pairs or a frozen dataclass",
    set: "pass a frozenset",
}
_REMEDY = {
    list: "pass torch.tensor(...), or a tuple that is annotated htile.Static",
    dict: "pass each entry as an argument of its own",
    set: "pass each entry as an argument of its own",
    complex: "pass the real and imaginary parts as two floats",
}


def _listed(shapes: dict[str, tuple]) -> str:
    return ", ".join(f"{p} {s}" for p, s in shapes.items())
