"""A repeated call as a function of its own: a few checks, the results, the launch.

`shortcut` writes it for one launch, in Python, with the user's parameters. One call of torch's own
`TensorGuards` compares all tensors and the modes of torch with those of the first call: types,
dtypes, devices, N, `requires_grad`, dispatch keys (negation, transforms, inference). The compiled
host function itself checks whatever else tells launches apart: sizes of rows, strides, alignment.
It does not compare the strides of leading dimensions, which a kernel for rows that are equally far
apart takes for granted; so the shortcut does.

A shortcut is for the sizes of the first call, or for any number of rows. One that writes to `out=`
also checks that the results are laid out as they were, and that each lies apart from the other
tensors, or exactly over one of them, as it did. That takes a few comparisons of addresses.
"""

from __future__ import annotations

import builtins
import inspect
import math
from collections.abc import Callable, Iterator

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..frontend.annotations import Static
from ..frontend.captures import Captures, freeze
from ..frontend.dynamic import of_other_bucket
from ..frontend.graph import Output, Role
from ..frontend.roles import Spec
from ..lower.plan import rows_like
from .launch import Request
from .memory import are_disjoint, layout
from .operands import has_one_twice

# The exceptions by which the host function and the conversion of a tensor refuse. A launch that
# fails counts as refused too: the long way launches again, and raises.
REFUSED = (TypeError, ValueError, RuntimeError, BufferError)
ONE = pytree.tree_structure(0)  # the structure of a single tensor
MISS = ["    return None"]  # the line for a call that the shortcut does not take


def shortcut(
    first: Request,
    kernel: Callable,
    captures: Captures,
    watched: tuple[tuple, tuple],
    missed: Callable[[], None] | None = None,
) -> Callable | None:
    """The function for calls like `first`; None where cheap checks do not tell them from others.

    It takes what the user's function takes, and returns None for a call that is not like the first.
    It raises TypeError for arguments that the user's function would not take, and NameError or
    ValueError where a captured name or cell is gone.

    watched: where the captured values of the call were read, and their fingerprint.
    missed: if given, the function is for the sizes of this call, and calls `missed` for others.
    """
    if any(name.startswith("_") for name in first.given) or has_one_twice(first.values):
        return None  # such a name may be one of the scope; `TensorGuards` takes no tensor twice
    try:
        function = _Writer(first, kernel, captures, watched, missed).function()
    except _NotTold:
        return None
    function.in_place = first.in_place
    return function


def allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """The quickest function from sizes, strides and dtype to a tensor of this device.

    On the current GPU that is what Inductor calls, without torch's dispatcher. Where another GPU is
    the current one later, it makes tensors there: see `is_elsewhere`.
    """
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return torch._C._dynamo.guards._empty_strided_cuda

    def empty(sizes, strides, dtype):
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


def is_elsewhere(name: str, device: torch.device, miss: list[str]) -> list[str]:
    """Lines that leave if a result was made on another GPU; none where there is only one GPU."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return []
    return [f"if {name}.get_device() != {device.index}:", *miss]


class _NotTold(Exception):
    """Cheap checks do not tell calls like the first one from others."""


class _Writer:
    """Writes one shortcut.

    scope: the values of the names in the text that begin with `_`.
    like: the name of an argument whose shape is that of the rows.
    sizes: the leading sizes of the rows as text: numbers, or names where they may change.
    length: likewise how many elements a row has, if each call may have rows of another length.
    results: the names of the results in the text.
    written: for each tensor of `out=` its result's name, or that of the argument that it is.
    guarded: the arguments and the tensors of `out=` by their names.
    shapes: for each of these the sizes that it must have, and None for sizes that may change.
    changing: for each of these the names of the sizes that may change.
    """

    def __init__(
        self, first: Request, kernel: Callable, captures: Captures, watched: tuple,
        missed: Callable[[], None] | None,
    ):  # fmt: skip
        self.first, self.captures, self.watched = first, captures, watched
        self.graph, self.is_fixed = first.specialization.graph, missed is not None
        self.outputs = first.specialization.traced.outputs
        self.tensors = {n: v for n, v in first.given.items() if isinstance(v, torch.Tensor)}
        lead, length = first.call.lead, first.call.length
        self.length = str(length) if self.is_fixed else "_n"
        rows = {s.name: s.inner if length is None else (length,)
                for s in first.call.specs if s.role is Role.ROW}  # fmt: skip
        whole = (name for name in rows if self.tensors[name].shape == (*lead, *rows[name]))
        self.like = next(whole, None)
        if self.like is None:
            raise _NotTold
        self.sizes = [str(n) if self.is_fixed else f"_m{k}" for k, n in enumerate(lead)]
        self.miss = ["    _missed()", *MISS] if self.is_fixed else MISS
        self.scope = {"_kernel": kernel, "_refused": REFUSED, "_missed": missed,
                      "_type": type, "_len": len, "_float": float}  # fmt: skip
        outputs, is_one = self.outputs, first.outs and self.graph.structure == ONE
        self.results = ["out"] if is_one else [f"_out{k}" for k in range(len(outputs))]
        named = zip(first.in_place, self.results, strict=False)
        self.written = [name or result for name, result in named]
        self.guarded = self.tensors | dict(zip(self.written, first.outs, strict=True))
        like = first.specs | dict(zip(self.written, outputs, strict=False))
        self.shapes, self.changing = {}, {}
        for name, tensor in self.guarded.items():
            own, shape = tensor.ndim - len(like[name].inner), tensor.shape
            sizes = {k: self.sizes[k - own] for k in range(own) if shape[k] == lead[k - own]}
            if self._has_length(like[name]):
                sizes[own] = self.length
            free = {} if self.is_fixed else sizes
            self.shapes[name] = [None if k in free else size for k, size in enumerate(shape)]
            self.changing[name] = [*free.values()]

    def _has_length(self, each: Spec | Output) -> bool:
        """Whether a tensor has rows, or what they share, of any length."""
        if self.graph.multiple is None:
            return False
        if isinstance(each, Spec):
            return each.role in (Role.ROW, Role.COLUMN)
        return self.first.specialization.traced[each.id].value.spread

    def _lead(self, output: Output) -> list[str]:
        """The leading shape of a result, as text."""
        return self.sizes if output.over is None else []

    def _inner(self, output: Output) -> list[str]:
        """The shape of a result behind the leading dimensions, as text."""
        inner = self.first.specialization.inner(output, self.length)
        return [*map(str, inner)]

    def function(self) -> Callable:
        """Write the text, and return the function that it defines."""
        guards = [*self._same_values(), *self._same_tensors(), *self._same_captures()]
        called = [*self.graph.arguments, *self.results]
        return self._defined([
            *(self._opened() if self.written else []),
            f"if not ({' and '.join(guards)}):",
            *self.miss,
            *(self._rows_read() if not self.is_fixed and self._any_changes else []),
            *(self._apart() if self.written else self._allocated()),
            "try:",
            f"    _kernel({', '.join(called)})",
            "except _refused:",
            *self.miss,
            *self._returned(),
        ])  # fmt: skip

    @property
    def _any_changes(self) -> bool:
        """Whether rows may be of another number, or of another length."""
        return bool(self.sizes) or self.graph.multiple is not None

    def _same_values(self) -> Iterator[str]:
        """What must hold of arguments that are no tensors."""
        kinds = zip(self.first.signature.kinds, self.first.given.items(), strict=True)
        for k, (kind, (name, value)) in enumerate(kinds):
            if isinstance(value, torch.Tensor):
                continue
            if type(value) is float and kind is not Static:
                yield f"_type({name}) is _float"
            elif value is not None and kind not in (None, Static):  # an integer for a float
                raise _NotTold
            elif value is None or isinstance(value, bool):
                yield f"{name} is {value}"
            elif isinstance(value, int | str | torch.dtype):
                self.scope |= {f"_static{k}": value, f"_type{k}": type(value)}
                yield f"_type({name}) is _type{k} and {name} == _static{k}"
            elif _never_changes(value):
                self.scope |= {"_freeze": freeze, f"_static{k}": freeze(value)}
                yield f"_freeze({name}) == _static{k}"
            else:
                raise _NotTold

    def _same_tensors(self) -> Iterator[str]:
        """What must hold of the tensors, of gradients and of transforms."""
        self.scope["_same"] = torch._C._dynamo.guards.TensorGuards(
            *self.guarded.values(),
            dynamic_dims_sizes=[*self.shapes.values()],
            dynamic_dims_strides=[self._strides(name) for name in self.guarded],
        ).check
        self.scope |= {"_ad": forward_ad, "_grad": torch.is_grad_enabled}
        yield f"_same({', '.join(self.guarded)})"
        yield "_ad._current_level < 0"
        if any(tensor.requires_grad for tensor in self.guarded.values()):
            yield "not _grad()"
        for name, sizes in self.changing.items():
            if len(sizes) < 2:
                continue
            if self.written or self.guarded[name].is_contiguous():
                yield f"{name}.is_contiguous()"
            if self.first.is_flat and (name in self.written or self._is_read(name)):
                yield self._flat(name)

    def _is_read(self, name: str) -> bool:
        """Whether the kernel takes an argument, so that the host function compares its sizes."""
        return name in self.graph.arguments

    def _flat(self, name: str) -> str:
        """The test that a tensor's rows are equally far apart, as text; see `operands.is_flat`.

        Of a contiguous tensor it is enough that the last leading dimension says how far: it may
        have size 1, and then any stride.
        """
        tensor, last = self.guarded[name], len(self.sizes) - 1
        step = f"{name}.stride({last})"
        if tensor.is_contiguous():
            sizes = [f"{name}.shape[{k}]" for k in range(last + 1, tensor.ndim)]
            return f"{step} == {' * '.join(sizes) or '1'}"
        tests, apart = [], f"{step} * {name}.shape[{last}]"
        for k in range(last - 1, -1, -1):
            tests.append(f"({name}.shape[{k}] == 1 or {name}.stride({k}) == {apart})")
            apart += f" * {name}.shape[{k}]"
        return " and ".join(tests)

    def _strides(self, name: str) -> list[int | None]:
        """The strides that a tensor must have; None where any will do.

        Where results are written, sizes and strides must tell which bytes a tensor spans. So all
        strides count, or a tensor of several sizes that may change must be contiguous. With other
        numbers of rows, a result must not overlap itself, either.
        """
        tensor, shape = self.guarded[name], self.shapes[name]
        if self.is_fixed and len(self.sizes) > 1:  # they tell which rows are equally far apart
            return [*tensor.stride()]
        if not self.written or len(self.changing[name]) > 1:
            if self.written and not tensor.is_contiguous():
                raise _NotTold
            return [*[None] * (tensor.ndim - 1), *tensor.stride()[-1:]]
        if name in self.written and self.changing[name]:
            if tensor.stride(shape.index(None)) < self._span(name):
                raise _NotTold
        return [None if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True)]

    def _same_captures(self) -> Iterator[str]:
        """What must hold of captured values. The shortcut sees the same globals as the function."""
        watched, captured = self.watched
        self.scope |= {"_captured": captured, "_captures": self.captures.fingerprint}
        globals_, hidden = self.captures.fn.__globals__, {*self.first.given, "out"}
        reads = []
        for k, (read, where, seen) in enumerate(watched):
            own = getattr(read, "__self__", None) is globals_
            if own and where not in hidden and not where.startswith("_"):
                if where not in globals_:  # a builtin, until a global hides it
                    seen = getattr(builtins, where, seen)
                self.scope[f"_seen_{where}"] = seen
                reads.append(f"{where} is _seen_{where}")
            else:
                self.scope |= {f"_read{k}": read, f"_where{k}": where, f"_seen{k}": seen}
                reads.append(f"_read{k}(_where{k}) is _seen{k}")
        if reads:
            yield f"({' and '.join(dict.fromkeys(reads))} or _captures() is _captured)"

    def _rows_read(self) -> list[str]:
        """Lines that read how many rows there are, and leave if kernel or results have others."""
        fewest, beyond = rows_like(self.first.rows)
        lines = [f"_shape = {self.like}.shape"]
        lines += [f"{size} = _shape[{k}]" for k, size in enumerate(self.sizes)]
        wrong = [f"not {fewest} <= {' * '.join(self.sizes)} < {beyond}"] if self.sizes else []
        if self.graph.multiple is not None:
            lines.append("_n = _shape[-1]")
            wrong.append(of_other_bucket("_n", self.first.call, self.first.specialization.traced))
        like = [self.length] if self.graph.multiple is not None else [
            *map(str, self.first.specs[self.like].inner)]  # fmt: skip
        for name, output in zip(self.written, self.outputs, strict=False):
            inner = self._inner(output)
            whole = inner == like and output.over is None
            shape = "_shape" if whole else _tuple([*self._lead(output), *inner])
            wrong += [f"{name}.shape != {shape}"] if name != self.like else []
        for name in self.tensors:
            if self._is_read(name):
                continue
            free = (k for k, size in enumerate(self.shapes[name]) if size is None)
            pairs = zip(free, self.changing[name], strict=True)
            wrong += [f"{name}.shape[{k}] != {size}" for k, size in pairs]
        return [*lines, f"if {' or '.join(wrong)}:", *self.miss]

    def _allocated(self) -> list[str]:
        """Lines that make the results."""
        device = self.tensors[self.like].device
        self.scope["_empty"] = allocator(device)
        lines = []
        for k, (name, output) in enumerate(zip(self.results, self.outputs, strict=True)):
            self.scope[f"_dtype{k}"] = output.dtype
            sizes = [*self._lead(output), *self._inner(output)]
            strides = [" * ".join(sizes[k + 1 :]) or "1" for k in range(len(sizes))]
            lines.append(f"{name} = _empty({_tuple(sizes)}, {_tuple(strides)}, _dtype{k})")
        return lines + is_elsewhere(self.results[0], device, self.miss)

    def _returned(self) -> list[str]:
        """Lines that return `out`, or the results in the user's structure."""
        structure = self.graph.structure
        if self.written:  # so that autograd sees that saved tensors were written to
            self.scope["_written"] = torch._C._increment_version
            return [f"_written({_tuple(self.written)})", "return out"]
        if structure == ONE:
            return [f"return {self.results[0]}"]
        if structure == pytree.tree_structure((0,) * len(self.results)):
            return [f"return {_tuple(self.results)}"]
        self.scope |= {"_structure": structure, "_unflatten": pytree.tree_unflatten}
        return [f"return _unflatten([{', '.join(self.results)}], _structure)"]

    def _opened(self) -> list[str]:
        """Lines that take `out` apart, and leave if its structure is another one.

        They also leave if a result is not the argument that it was, or if the first one, which was
        none, is a row now: where calls of both kinds take turns, the wrong shortcut ends early.
        """
        model = pytree.tree_unflatten(range(len(self.results)), self.graph.structure)
        pairs = zip(self.results, self.written, strict=True)
        wrong = [f"{result} is not {name}" for result, name in pairs if result != name]
        if self.written[0] == self.results[0]:
            kind = self.first.outs[0].shape, self.first.outs[0].dtype
            rows = [name for name, t in self.tensors.items() if (t.shape, t.dtype) == kind]
            wrong += [f"{self.results[0]} is {row}" for row in rows]
        leave = [f"if {' or '.join(wrong)}:", *MISS] if wrong else []
        return [*self._taken_apart(model, "out"), *leave]

    def _taken_apart(self, model: object, name: str) -> list[str]:
        """Lines that take `name` apart; `model` is its structure over the indices of results."""
        kind = type(model)
        if kind is int:
            return []
        if kind not in (tuple, list, dict) and not hasattr(kind, "_fields"):
            raise _NotTold
        self.scope[f"_kind_{name}"] = kind
        is_counted = kind is dict or not model  # others are unpacked
        size = f" or _len({name}) != {len(model)}" if is_counted else ""
        lines = [f"if _type({name}) is not _kind_{name}{size}:", *MISS]
        parts = [*(model.values() if kind is dict else model)]
        names = [self.results[part] if type(part) is int else f"_{name}_{k}"
                 for k, part in enumerate(parts)]  # fmt: skip
        if kind is dict:
            self.scope |= {f"_key_{name}_{k}": key for k, key in enumerate(model)}
            lines += [f"{part} = {name}.get(_key_{name}_{k})" for k, part in enumerate(names)]
        elif parts:
            lines.append(f"{', '.join(names)}, = {name}")
        for part, inside in zip(names, parts, strict=True):
            lines += self._taken_apart(inside, part)
        return lines

    def _apart(self) -> list[str]:
        """Lines that leave if a result lies otherwise beside another tensor than it did.

        Tensors that lay apart may lie anywhere apart. Tensors whose elements interleave, or that
        are the same memory, must have the distance at which that was checked.
        """
        pointers = {name: f"_p{k}" for k, name in enumerate(self.guarded)}
        wrong = []
        for k, a in enumerate(self.written):
            for b in (name for name in self.guarded if name not in self.written[: k + 1]):
                one, other, p, q = self.guarded[a], self.guarded[b], pointers[a], pointers[b]
                if are_disjoint(one, other):
                    tests = [f"{q} < {p} + {self._extent(a)}", f"{p} < {q} + {self._extent(b)}"]
                    if one.data_ptr() > other.data_ptr():  # first the test that failed before
                        tests.reverse()
                    wrong.append(" and ".join(tests))
                elif self.is_fixed or layout(one) == layout(other):
                    wrong.append(f"{p} - {q} != {one.data_ptr() - other.data_ptr()}")
                else:
                    raise _NotTold
        read = [f"{p} = {name}.data_ptr()" for name, p in pointers.items()]
        return [*read, f"if {' or '.join(wrong)}:", *MISS] if wrong else []

    def _span(self, name: str) -> int:
        """How many elements a tensor spans with the sizes that do not change."""
        steps = zip(self.shapes[name], self.guarded[name].stride(), strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps if size is not None)

    def _extent(self, name: str) -> str:
        """The bytes that a tensor spans, as text."""
        tensor, shape, changing = self.guarded[name], self.shapes[name], self.changing[name]
        size, fixed = tensor.element_size(), self._span(name) * tensor.element_size()
        if not changing:
            return str(fixed)
        if len(changing) > 1:  # it is contiguous
            return " * ".join([*changing, str(math.prod(n for n in shape if n is not None) * size)])
        step = tensor.stride(shape.index(None)) * size
        return f"{changing[0]} * {step}" + f" + {fixed - step}" * (fixed != step)

    def _defined(self, lines: list[str]) -> Callable:
        """The function of these lines, with the names of `scope` beside the user's globals."""
        signature, made = self.first.signature, {}
        parameters = []
        for k, parameter in enumerate(signature.parameters):
            if parameter.default is not inspect.Parameter.empty:
                self.scope[f"_default{k}"] = parameter.default
                parameter = parameter.replace(default=_Name(f"_default{k}"))
            parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
        if self.written:
            parameters.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY))
        text = [
            f"def _make({', '.join(self.scope)}):",
            f"    def _shortcut{inspect.Signature(parameters)}:",
            *(f"        {line}" for line in lines),
            "    return _shortcut",
        ]
        name = f"<htile shortcut of {signature.name}>"
        exec(compile("\n".join(text), name, "exec"), self.captures.fn.__globals__, made)
        return made["_make"](**self.scope)


def _never_changes(value: object) -> bool:
    """Whether a static value is the one that was traced, whatever has run since."""
    if type(value) is tuple:
        return all(map(_never_changes, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def _tuple(texts: list[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"


class _Name(str):
    """Text that is its own `repr`."""

    __repr__ = str.__str__
