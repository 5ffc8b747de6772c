"""The tangents of a graph, as a graph: forward mode, node by node from the parameters on.

An operation of elements needs no rule of its own: what an operand adds to the tangent of the result
is what `DERIVE` of htile.frontend.adjoints contributes to that operand, with the operand's tangent
in place of the gradient. `PUSH` has the rules of the operations that are not of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from torch.utils import _pytree as pytree

from ..errors import GradientError
from .adjoints import DERIVE, FLOAT, Masked, Step
from .algebra import Algebra
from .cumulative_logarithms import CumulativeLogarithm
from .cumulative_products import CumulativeProduct
from .custom import named_operands, spliced
from .definitions import defined_at
from .derive import (
    Masks,
    added,
    depending,
    derive,
    differentiable,
    free_name,
    of_row,
    refuse_extreme,
)
from .dtypes import FLOAT8
from .graph import Builder, Graph, Output
from .ops import RUNNING, Op, Varies
from .peaks import independent_peaks

Rule = Callable[[Algebra, Step, int], int]
"""The tangent of a result, of that of the first operand, which has all of the operand's axes."""


class Pushed(NamedTuple):
    """The graph of the tangents of another graph's results.

    parameters: for each input that is a tangent, by its name, the name of the parameter.
    """

    graph: Graph
    parameters: dict[str, str]


def tangents(graph: Graph, wrt: Collection[str]) -> Pushed | None:
    """The graph of the tangents of the results of `graph`; None where all of them are 0.

    graph: as traced, with values of any inner shape; or a graph that was derived.
    wrt: the names of the parameters that have tangents. Integers are passed over.

    Its inputs are the parameters that it needs, in their order, and an input `t_<parameter>` for
    each tangent that it needs, of the parameter's role, dtype and shape. A name that is taken gets
    `_` behind it. Its outputs are `t_<output>`, each like the output. A result whose tangent is 0
    has none.

    Raises GradientError where an operation on the way has no derivative, and for an output that is
    a maximum over rows.
    """
    outputs = [out for out in graph.outputs if graph[out.id].value.dtype.is_floating_point]
    needed = depending(graph, wrt, independent_peaks(graph, [out.id for out in outputs]))
    outputs = [out for out in outputs if out.id in needed]
    if not outputs:
        return None
    builder = Builder.after(graph, f"{graph.name}_tangents")
    push = _Push(graph, builder)
    push.parameters(needed)
    push.results(needed)
    found = [push.output(out) for out in outputs if out.id in push.found]
    return Pushed(_alone(builder, found), push.given) if found else None


class _Push:
    """From the parameters to the results.

    found: the tangent of each node that has one. It may lack axes that it is the same along.
    given: the parameter of each input that is a tangent, by their names.
    """

    def __init__(self, graph: Graph, builder: Builder):
        self.graph, self.builder = graph, builder
        self.algebra = Algebra(builder, graph)
        self.found: dict[int, int] = {}
        self.given: dict[str, str] = {}

    def parameters(self, needed: Collection[int]) -> None:
        """Add an input for the tangent of each parameter."""
        for i in self.graph.inputs:
            if i.id in needed:
                name = free_name(self.builder, f"t_{i.name}")
                value = self.graph[i.id].value
                self.found[i.id] = self.algebra.input(name, i.role, i.dtype, value)
                self.given[name] = i.name

    def results(self, needed: Collection[int]) -> None:
        """Find the tangents of these nodes."""
        algebra = self.algebra
        for node in self.graph:
            if node.op is Op.INPUT or node.id not in needed:
                continue
            algebra.loc = node.loc
            given = [self.found.get(i) for i in node.inputs]
            operands = tuple([algebra.same[i] for i in node.inputs])
            step = Step(node, operands, algebra.same[node.id])
            if all(t is None for t in given):
                continue
            if node.op is Op.CUSTOM:
                t = self._custom(step)
            elif node.op is Op.DIV:
                t = _quotient(algebra, step, given)
            elif node.op in PUSH:
                t = PUSH[node.op](algebra, step, self._whole(node.inputs[0]))
            elif node.op is Op.CAT:
                t = algebra.node(Op.CAT, *map(self._whole, node.inputs), arg=node.arg)
            else:
                t = _of_elements(algebra, step, given)
            if algebra.constant(t) != 0:
                self.found[node.id] = t

    def _custom(self, step: Step) -> int:
        """Of a result whose backward pass the user has written.

        That is linear in the gradient of the result, so its own derivative with respect to it
        has the tangents of the arguments in the place of gradients.
        """
        algebra, link = self.algebra, step.node.arg
        call, name = link.call, link.call.results[link.result].gradient
        arguments = dict(zip(call.tensors, step.node.inputs[1 + len(call.read) :], strict=True))
        values = [algebra[i].value for i in step.operands[1:]]
        graph = call.graph(values, (link.result,), algebra.builder)
        asked = [] if graph is None else [
            out.name for out in graph.outputs if arguments[out.name] in self.found
        ]  # fmt: skip
        asked = asked and [n for n in differentiable(graph, (name,)) if n in asked]
        if not asked:
            return algebra.number(0.0)
        back = derive(graph, (name,), asked)
        if next(i.id for i in back.inputs if i.name == name) in _live(back, back.outputs):
            raise GradientError(
                f"{call.backward.signature.name} is not linear in {name}, so it has no tangents",
                defined_at(call.backward.fn),
            )
        result = step.node.value
        given = {name: algebra.filled(0.0, result.inner, result.spread)}
        for i, argument in zip(back.inputs[len(graph.inputs) :], asked, strict=True):
            given[i.name] = self._whole(arguments[argument])
        ids = spliced(algebra, back, named_operands(algebra, step.node) | given)
        return ids[back.outputs[0].id]

    def _whole(self, id: int) -> int:

        """The tangent of a node with all axes of the node."""
        value, t = self.graph[id].value, self.found.get(id)
        if t is None:
            return self.algebra.filled(0.0, value.inner, value.spread)
        return self.algebra.widened(t, value.inner, value.spread)

    def output(self, out: Output) -> Output:
        """The tangent of an output, as an output."""
        refuse_extreme(self.graph, out)
        algebra = self.algebra
        algebra.loc = None
        t = algebra.widened(_in_float32(algebra, self.found[out.id]), out.inner, out.is_row)
        if self.builder[t].value.varies is not Varies.ROW:
            t = of_row(algebra, t)
        if out.dtype in FLOAT8:
            t = algebra.node(Op.CAST, t, arg=out.dtype)
        return Output(f"t_{out.name}", t, out.dtype, out.inner, out.is_row, over=out.over)


def _of_elements(a: Algebra, step: Step, given: list[int | None]) -> int:
    """The tangent of an operation's result, of those of its operands."""
    parts: list[tuple[int, Masks]] = []
    for k, t in enumerate(given):
        if t is None:
            continue
        part = DERIVE[step.node.op](a, step, _in_float32(a, t))[k]
        if isinstance(part, Masked):
            parts.append((part.value, ((part.mask, part.holds),)))
        elif part is not None:
            parts.append((part, ()))
    return a.select(*added(a, parts)) if parts else a.number(0.0)


def _quotient(a: Algebra, step: Step, given: list[int | None]) -> int:
    """Of x / y: one division, where the slopes of x and y would take two."""
    of_x, of_y = (None if t is None else _in_float32(a, t) for t in given)
    if of_y is not None:
        more = a.mul(of_y, step.result)
        of_x = a.neg(more) if of_x is None else a.sub(of_x, more)
    return a.div(of_x, step.operands[1])


def _in_float32(a: Algebra, t: int) -> int:
    """A tangent to compute with; that of a parameter of 8 bits has so many, too."""
    return t if a[t].value.dtype is FLOAT else a.node(Op.CAST, t, arg=FLOAT)


def _as_it_is(a: Algebra, step: Step, t: int) -> int:
    """Of what moves or adds elements: the tangents are moved and added alike."""
    return a.node(step.node.op, t, *step.operands[1:], arg=step.node.arg)


def _of_weights(a: Algebra, step: Step, t: int) -> int:
    """Of MAX, MIN, PROD and KTHVALUE: the sum of tangents, each by its element's slope."""
    (slope, *_), axis = DERIVE[step.node.op](a, step, a.number(1.0)), step.node.arg
    if isinstance(slope, Masked):
        t = a.select(a.mul(t, slope.value), ((slope.mask, slope.holds),))
    else:
        t = a.mul(t, slope)
    return a.node(Op.SUM, t, arg=axis if axis is None else int(axis))


def _of_products(a: Algebra, step: Step, t: int) -> int:
    return CumulativeProduct(a, step.operands[0], step.result, step.node.arg).tangent(t)


def _of_logarithms(a: Algebra, step: Step, t: int) -> int:
    return CumulativeLogarithm(a, step.node, step.operands[0], step.result).tangent(t)


MOVED = (Op.RESHAPE, Op.SLICE, Op.SHIFT, Op.PERMUTE, Op.EXPAND, Op.TAKE, Op.GATHER,
         Op.LOOKUP)
PUSH: dict[Op, Rule] = {
    **dict.fromkeys((*MOVED, Op.SUM, Op.MEAN, Op.CUMSUM, Op.SUM_FROM_END), _as_it_is),
    **dict.fromkeys((Op.MAX, Op.MIN, Op.PROD, Op.KTHVALUE), _of_weights), Op.CUMPROD: _of_products,
    **dict.fromkeys((Op.LOGCUMSUMEXP, Op.LOGSUMEXP_FROM_END), _of_logarithms),
    **dict.fromkeys(RUNNING, DERIVE[Op.CUMMAX]),  # which refuses them
}


def _live(graph: Graph | Builder, outputs: Iterable[Output]) -> set[int]:
    """The nodes that these outputs are computed of."""
    live = {out.id for out in outputs}
    for id in range(len(graph) - 1, -1, -1):
        if id in live:
            live.update(graph[id].inputs)
    return live


def _alone(builder: Builder, outputs: list[Output]) -> Graph:
    """A graph of what these outputs need, and of nothing else."""
    live = _live(builder, outputs)
    new, ids = Builder(builder.name, builder.n), {}
    inputs = {i.id: i for i in builder.inputs}
    for id in sorted(live):
        node = builder[id]
        if node.op is Op.INPUT:
            of = inputs[id]
            ids[id] = new.add_input(of.name, of.role, of.dtype, node.value)
        else:
            ids[id] = new.copied(node, [ids[i] for i in node.inputs])
    outputs = [replace(out, id=ids[out.id]) for out in outputs]
    return new.finish(outputs, pytree.tree_structure({out.name: 0 for out in outputs}))
