"""A backward pass that the user has written: `@f.backward`.

A function that has one returns `Op.CUSTOM` nodes. Each is its first operand, and refers to all that
the backward pass may read: some of the results, and the function's arguments. Where the graph is
differentiated, the user's backward pass is traced as a graph of its own, and its nodes are copied.
So it is planned, printed and differentiated again as any other part of a derivative. In forward
mode it is transposed (htile.frontend.tangents).
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import NamedTuple, NoReturn

import torch
from torch.utils import _pytree as pytree

from ..errors import DtypeError, HTileError, Location, ShapeError, TraceError, UnsupportedError
from .adjoints import reached
from .algebra import Algebra
from .captures import check_static, line_of
from .definitions import defined_at, returned_at
from .dtypes import FLOAT8, STORAGE
from .factories import Factories
from .graph import Builder, Graph, Node, Output, Role
from .ops import Op, Value, Varies, broadcast_shapes
from .over_rows import OverRows
from .results import names_of
from .retold import RETOLD, retell
from .roles import Signature
from .tensor import Tensor, is_real

FLOAT = torch.float32
_MISSING = inspect.Parameter.empty
_NUMBERS = itertools.count()


class CustomBackward:
    """The backward pass of one function.

    of: the function's parameters. fn: the user's backward pass. Its parameters are some of those of
    the function, of its results, and of their gradients, `d_<result>`. A name that is a parameter
    of the function means that one; a result or gradient of this name has `_` behind it.

    Raises ArgumentError for what is no plain Python function, and TraceError for one that takes no
    gradient. What the results are named is not known before the function is traced.
    """

    def __init__(self, of: Signature, fn: types.FunctionType):
        self.of, self.fn = of, fn
        self.signature = Signature(fn)
        if not any(name.startswith("d_") for name in {*self.signature.names} - {*of.names}):
            gradient = _free("d_out", of.names)
            self.fail(f"{self.signature.name} takes no gradient of a result of {of.name}: give it "
                      f"the parameter {gradient}, or that of another result")  # fmt: skip

    def __call__(self, values: tuple) -> object:
        """What the function returns for these values of its parameters, some of them symbolic.

        Raises TraceError and UnsupportedError, with the line of the backward pass, where that does
        not fit the function.
        """
        tensors = [value for value in values if isinstance(value, Tensor)]
        before = [tensor._id for tensor in tensors]
        result = self.of.invoke(values)
        if [tensor._id for tensor in tensors] != before:
            self.fail(f"{self.of.name} changes an argument in place, which its backward pass may "
                      "read: write x = x + 1 for x += 1")  # fmt: skip
        builder = tensors[0]._builder
        if builder.records and not torch.is_grad_enabled():
            return result  # it has no gradient
        return CustomCall.of(self, values, result).linked(result, before)

    def fail(self, message: str, kind: type[HTileError] = TraceError) -> NoReturn:
        """Raise an error with the line where the backward pass is defined."""
        raise kind(message, defined_at(self.fn)) from None

    def refuse(self, message: str, kind: type[HTileError] = TraceError) -> NoReturn:
        """Raise an error of what the backward pass returns, with the line that returns it."""
        raise kind(message, returned_at(self.fn)) from None


class Result(NamedTuple):
    """A result of a function, and what the backward pass takes of it.

    name: that of the result there. gradient: that of its gradient; None if it is not taken.
    is_read: whether the result itself is. dtype: in memory. value: what it is to one row.
    """

    name: str
    gradient: str | None
    is_read: bool
    dtype: torch.dtype
    value: Value


@dataclass(frozen=True, eq=False)
class CustomCall:
    """A call of a function with a backward pass of its own, in a trace.

    results: of the function, in order.
    tensors: the parameters whose arguments are tensors, and the dtypes of these in memory.
    statics: the other arguments, by parameter.
    wrt: the parameters that the backward pass gives gradients of.
    number: another one for each call.
    """

    backward: CustomBackward
    results: tuple[Result, ...]
    tensors: Mapping[str, torch.dtype]
    statics: Mapping[str, object]
    wrt: tuple[str, ...]
    number: int

    @classmethod
    def of(cls, backward: CustomBackward, values: tuple, result: object) -> CustomCall:
        """A call with these values of the parameters that gave this result."""
        given = dict(zip(backward.of.names, values, strict=True))
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        statics = {name: value for name, value in given.items() if name not in tensors}
        if any(isinstance(each, Tensor) for each in pytree.tree_leaves(statics)):
            backward.fail(f"an argument of {backward.of.name} holds several tensors, and it has a "
                          "backward pass of its own: give each tensor a parameter")  # fmt: skip
        roles = {i.id: i.role for i in next(iter(tensors.values()))._builder.inputs}
        for name, value in tensors.items():
            if roles.get(value._id) is Role.MATRIX:
                backward.fail(
                    f"the gradient of {name}, a matrix that rows are multiplied by, is no row: "
                    f"leave the backward pass of {backward.of.name} to HTile, or write a "
                    "torch.autograd.Function", UnsupportedError,
                )  # fmt: skip
        wrt = tuple(
            name for name, value in tensors.items()
            if value._value.dtype is FLOAT and roles.get(value._id) is not Role.SCALAR
        )  # fmt: skip
        dtypes = {name: value.dtype for name, value in tensors.items()}
        results = _results(backward, result, {tensors[name]._id for name in wrt})
        return cls(backward, results, dtypes, statics, wrt, next(_NUMBERS))

    @property
    def read(self) -> tuple[int, ...]:
        """The indices of the results that the backward pass reads."""
        return tuple(k for k, result in enumerate(self.results) if result.is_read)

    def linked(self, result: object, arguments: list[int]) -> object:
        """The result of the call, with the gradients that the backward pass gives.

        arguments: the nodes of the tensors.
        """
        loc, (leaves, structure) = line_of(self.backward.fn), pytree.tree_flatten(result)
        for k, (of, leaf) in enumerate(zip(self.results, leaves, strict=True)):
            if of.gradient is None and of.value.dtype is FLOAT:
                leaves[k] = _with_node(leaf, Op.STOP, (leaf._node,), None, loc)
        others = [leaves[k]._node for k in self.read] + arguments
        for k, (of, leaf) in enumerate(zip(self.results, leaves, strict=True)):
            if of.gradient is not None:
                inputs = leaf._node, *others
                leaves[k] = _with_node(leaf, Op.CUSTOM, inputs, Link(self, k), loc)
        return pytree.tree_unflatten(leaves, structure)

    def graph(
        self, values: Sequence[Value], given: Collection[int], like: Graph | Builder
    ) -> Graph | None:
        """The backward pass as a graph, for gradients of the results `given`; others are 0.

        values: those of a node's operands behind the first one. like: the graph with that node.

        The inputs have the names of the parameters of the backward pass. The outputs have those of
        `wrt`, and belong to each row. A gradient that is None or 0 has none; without any there is
        no graph. Raises an HTileError with the user's line.
        """
        backward = self.backward
        builder = Builder(f"{backward.of.name}_backward", like.n, like.multiple)
        builder.records = True
        builder.declared = backward.of.shared
        operands = dict(zip(self.operands, values, strict=True))
        gradients = {of.gradient: of for of in self.results}
        there = [self.results[k] for k in given]
        own, found = backward.signature, []
        for name, default in zip(own.names, own.defaults, strict=True):
            if name in operands:
                found.append(_argument(builder, name, self.operands[name], operands[name]))
            elif of := gradients.get(name):
                found.append(_gradient(builder, of, of in there))
            else:
                found.append(self.statics.get(name, default))
        check_static(backward.fn, self.statics)
        try:
            with Factories(builder), torch.enable_grad():
                result = own.invoke(tuple(found))
        except RETOLD as error:
            retell(error)
            raise
        outputs = self._outputs(builder, result, operands)
        structure = pytree.tree_structure((0,) * len(outputs))
        return builder.finish(outputs, structure) if outputs else None

    @cached_property
    def operands(self) -> dict[str, torch.dtype]:
        """The names of a node's operands behind the first one, and their dtypes in memory."""
        return {self.results[k].name: self.results[k].dtype for k in self.read} | {**self.tensors}

    def _outputs(
        self, builder: Builder, result: object, values: Mapping[str, Value]
    ) -> list[Output]:
        backward, wrt = self.backward, self.wrt
        gradients = result if isinstance(result, (tuple, list)) else (result,)
        if len(gradients) != len(wrt):
            backward.refuse(
                f"{backward.signature.name} returns {_counted(len(gradients))}, and "
                f"{backward.of.name} has {_counted(len(wrt))} here: of {', '.join(wrt)}, in this "
                "order, None where there is none"
            )
        outputs = []
        for name, g in zip(wrt, gradients, strict=True):
            id = self._node(builder, name, g, values[name])
            if id is not None:
                value = builder[id].value
                is_row = value.spread or prod(value.inner) > 1
                outputs.append(Output(name, id, FLOAT, value.inner, is_row))
        return outputs

    def _node(self, builder: Builder, name: str, g: object, of: Value) -> int | None:
        """The node of a gradient that was returned for an argument; None for 0."""
        refuse = self.backward.refuse
        told = f"{self.backward.signature.name} returns {{}} as the gradient of {name}"
        if g is None or (type(g) in (int, float) and g == 0):
            return None
        if type(g) in (int, float):
            return builder.add_const(float(g), Value((), Varies.SCALAR, FLOAT))
        if not isinstance(g, Tensor) or g._builder is not builder:
            what = "a real tensor" if is_real(g) else f"a {type(g).__name__}"
            refuse(f"{told.format(what)}: return a value of the row, a number or None")
        if isinstance(g, OverRows):
            refuse(f"{told.format('a result over all rows')}: return what one row adds to it, and "
                   "HTile sums that over the rows")  # fmt: skip
        id, value = g._id, g._value
        if value.dtype is not FLOAT:
            dtype = str(value.dtype).removeprefix("torch.")
            refuse(f"{told.format(dtype)}: return floating values", DtypeError)
        if prod(value.inner) == 1 and value.inner:
            id, value = builder.add(Op.RESHAPE, (id,), ()), replace(value, inner=())
        fits = broadcast_shapes(value.inner, of.inner) == of.inner
        # A value of each row that is repeated would be added to several elements of what all rows
        # share, which is seldom the gradient of these.
        is_of_row = value.varies is Varies.ROW and of.varies is not Varies.ROW
        is_one = not value.inner and value.varies is Varies.ROW  # a sum, where elements are asked
        if not fits or ((is_of_row or is_one) and prod(value.inner) != prod(of.inner)):
            refuse(
                f"{told.format(f'a value of shape {value.inner}')}, which has the shape {of.inner} "
                "for one row: return a value of this shape; HTile sums it over the rows",
                ShapeError,
            )
        if value.inner == of.inner:
            return id
        ones = builder.add_const(1.0, Value(of.inner, Varies.SCALAR, FLOAT, spread=of.spread))
        return builder.add(Op.MUL, (id, ones))


@dataclass(frozen=True)
class Link:
    """The static part of an `Op.CUSTOM`: of which call it is the result, and which one."""

    call: CustomCall
    result: int

    def __repr__(self) -> str:
        """It tells calls apart."""
        return f"{self}, call {self.call.number}"

    def __str__(self) -> str:
        name = self.call.backward.signature.name
        return f"{name} of {self.call.results[self.result].name}"


def _results(
    backward: CustomBackward, result: object, arguments: set[int]
) -> tuple[Result, ...]:
    """What the backward pass takes of each result.

    arguments: the nodes of those that have gradients.

    Raises TraceError for a name that is none, and where a gradient would be dropped.
    """
    paths, _ = pytree.tree_flatten_with_path(result)
    names, taken, found = names_of([path for path, _ in paths]), {*backward.of.names}, []
    asked = {*backward.signature.names} - taken
    for name, (_, leaf) in zip(names, paths, strict=True):
        own, gradient = _free(name, taken), _free(f"d_{name}", taken)
        if not isinstance(leaf, Tensor):
            backward.fail(f"{backward.of.name} returns a {type(leaf).__name__} as {name}, and has "
                          "a backward pass of its own: return tensors only")  # fmt: skip
        is_over = isinstance(leaf, OverRows)  # its node is what one row adds
        value = leaf._builder[leaf._node if is_over else leaf._id].value
        if own in asked and is_over:
            backward.fail(f"{own} is a result over all rows, which the backward pass of one row "
                          f"does not know: {_take_out(own)}", UnsupportedError)  # fmt: skip
        if gradient in asked and value.dtype is not FLOAT:
            dtype = str(leaf.dtype).removeprefix("torch.")
            backward.fail(f"{name} is {dtype}, which has no gradient: {_take_out(gradient)}")
        is_taken = gradient if gradient in asked else None
        found.append(Result(own, is_taken, own in asked, leaf.dtype, value))
        asked -= {own, gradient}
    defaults = dict(zip(backward.signature.names, backward.signature.defaults, strict=True))
    unknown = [n for n in backward.signature.names if n in asked and defaults[n] is _MISSING]
    if unknown:
        known = ", ".join([*backward.of.names, *(r.name for r in found)])
        argument = unknown[0].removeprefix("d_")
        returned = f"; it returns the gradient of {argument}" if argument in taken else ""
        backward.fail(
            f"{backward.signature.name} has the parameter {unknown[0]}, which is not known: it may "
            f"have {known} and the gradients {', '.join(f'd_{name}' for name in names)}{returned}"
        )
    builder = paths[0][1]._builder
    known = reached([builder[k] for k in range(len(builder))], set(arguments))
    for name, (_, leaf), of in zip(names, paths, found, strict=True):
        if of.gradient is None and leaf._node in known:
            backward.fail(
                f"{name} has a gradient, which {backward.signature.name} does not take: give it "
                f"the parameter {_free(f'd_{name}', taken)}, or return {name}.detach(), which is a "
                "constant in gradients of second order"
            )
    return tuple(found)


def _free(name: str, taken: Collection[str]) -> str:
    return name if name not in taken else _free(f"{name}_", taken)


def _take_out(name: str) -> str:
    return f"take {name} out of its parameters"


def _counted(count: int) -> str:
    return f"{count} gradient{'s' * (count != 1)}"


def _with_node(
    leaf: Tensor, op: Op, inputs: tuple[int, ...], arg: object, loc: Location
) -> Tensor:
    """A result, with another node in place of its own."""
    tensor = Tensor(leaf._builder, leaf._builder.add(op, inputs, arg, loc))
    return OverRows(tensor, leaf._over, leaf._stored) if isinstance(leaf, OverRows) else tensor


def _argument(builder: Builder, name: str, dtype: torch.dtype, value: Value) -> Tensor:
    """An input of a backward pass, which is what it is to the function."""
    is_row = value.spread or prod(value.inner) > 1
    role = Role.COLUMN if is_row else Role.DEVICE_SCALAR
    if value.varies is Varies.ROW:
        role = Role.ROW if is_row else Role.PER_ROW
    return Tensor(builder, builder.add_input(name, role, dtype, value))


def _gradient(builder: Builder, of: Result, is_given: bool) -> Tensor:
    """The gradient of a result: an input, or 0."""
    inner, spread = of.value.inner, of.value.spread
    if not is_given:
        zero = Value(inner, Varies.SCALAR, FLOAT, spread=spread)
        return Tensor(builder, builder.add_const(0.0, zero))
    dtype = of.dtype if of.dtype.itemsize > 1 else FLOAT
    return _argument(builder, of.gradient, dtype, Value(inner, Varies.ROW, FLOAT, spread=spread))


# In a derivative


def firsts(graph: Graph) -> dict[object, int]:
    """For each call that is in a graph the first of its nodes, behind which all gradients are."""
    found: dict[object, int] = {}
    for node in graph:
        if node.op is Op.CUSTOM:
            found.setdefault(key_of(node), node.id)
    return found


def key_of(node: Node) -> object:
    """Equal for the nodes of one call with the same operands."""
    return node.arg.call, node.inputs[1:]


def gradients(algebra: Algebra, node: Node, given: Mapping[int, int]) -> list[tuple[int, int]]:
    """(argument, gradient) for each argument of a call that has one, of those of its results.

    node: any of the call's nodes. given: by the index of a result its gradient.
    """
    call, operands = node.arg.call, [algebra.same[i] for i in node.inputs[1:]]
    graph = call.graph([algebra[i].value for i in operands], given, algebra.builder)
    if graph is None:
        return []
    names = {call.results[k].gradient: g for k, g in given.items()}
    ids = spliced(algebra, graph, names | named_operands(algebra, node))
    arguments = dict(zip(call.tensors, node.inputs[1 + len(call.read) :], strict=True))
    return [(arguments[out.name], ids[out.id]) for out in graph.outputs]


def named_operands(algebra: Algebra, node: Node) -> dict[str, int]:
    """The nodes that the inputs of a call's backward pass stand for, but for gradients.

    A result is the node that has its gradient. Where the graph lacks it, it is added.
    """
    call, operands = node.arg.call, tuple([algebra.same[i] for i in node.inputs[1:]])
    named = dict(zip(call.operands, operands, strict=True))
    for k in call.read:
        of = call.results[k]
        if of.gradient is not None:
            link = Link(call, k)
            named[of.name] = algebra.node(Op.CUSTOM, named[of.name], *operands, arg=link)
    return named


def spliced(algebra: Algebra, graph: Graph, inputs: Mapping[str, int]) -> list[int]:
    """Copy the nodes of a graph; for each of them the copy. inputs: the nodes of its inputs."""
    ids: list[int] = []
    for node in graph:
        algebra.loc = node.loc
        operands = tuple([ids[i] for i in node.inputs])
        if node.op is Op.INPUT:
            ids.append(inputs[node.arg])
        elif node.op is Op.TAKE and algebra[operands[0]].op is not Op.INPUT:
            ids.append(_element(algebra, *operands))
        elif node.op is Op.GATHER and algebra[operands[0]].op is not Op.INPUT:
            raise UnsupportedError(
                "a backward pass that gathers elements of a row that is computed: gather in the "
                "function that gets the row as an argument, or outside",
                node.loc,
            )
        else:
            ids.append(algebra.copied(node, operands))
    return ids


def _element(algebra: Algebra, row: int, place: int) -> int:
    """The element of a computed row at an index, which is in the row. Only of arguments is it
    loaded alone (`Op.TAKE`)."""
    dtype = algebra[row].value.dtype
    if dtype in STORAGE:  # of 8 bits, which no kernel computes with
        op, computed = (Op.CAST, FLOAT) if dtype in FLOAT8 else (Op.CONVERT, torch.int32)
        wide = algebra.node(op, row, arg=computed)
        return algebra.node(Op.CAST, _element(algebra, wide, place), arg=dtype)
    if algebra[place].value.dtype is not torch.int64:
        place = algebra.node(Op.CONVERT, place, arg=torch.int64)
    here = algebra.node(Op.EQ, algebra.index(algebra.inner(row)[-1]), place)
    if dtype is torch.bool:
        return algebra.node(Op.ANY, algebra.node(Op.AND, here, row))
    if dtype is FLOAT:
        return algebra.node(Op.MAX, algebra.node(Op.WHERE, here, row, algebra.number(-inf)))
    nothing = algebra.node(Op.CONVERT, algebra.integer(0), arg=dtype)
    return algebra.node(Op.SUM, algebra.node(Op.WHERE, here, row, nothing))


def kept_by(graph: Graph) -> frozenset[int] | None:
    """The nodes that the user's backward pass keeps: the arguments and results that it reads.

    None where the graph is not that of one call whose operands are arguments and results: there
    the user does not say what is kept.
    """
    nodes = [graph[out.id] for out in graph.outputs]
    results = {node.arg.result: node for node in nodes if node.op is Op.CUSTOM}
    others = [node for node in nodes if node.op not in (Op.CUSTOM, Op.STOP)]
    if not results or any(node.value.dtype is FLOAT for node in others):
        return None
    if len({key_of(node) for node in nodes if node.op is Op.CUSTOM}) > 1:
        return None
    node = next(iter(results.values()))
    call, kept = node.arg.call, []
    named = dict(zip(call.operands, node.inputs[1:], strict=True))
    for k in call.read:
        of = call.results[k]
        if of.gradient is None and named[of.name] not in [each.id for each in nodes]:
            return None
        if of.gradient is not None and k not in results:
            return None
        kept.append(named[of.name] if of.gradient is None else results[k].id)
    if any(graph[named[name]].op is not Op.INPUT for name in call.tensors):
        return None
    kept += [named[name] for name in call.tensors if name in call.backward.signature.names]
    return frozenset(kept)
