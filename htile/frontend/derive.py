"""The derivative of a graph, as a graph: reverse mode, node by node from the results back.

`DERIVE` of htile.frontend.adjoints says what each operation contributes to the gradients of its
operands. Here contributions meet: those of elements to a value that they share are summed, masks
are applied, and what is the same for all rows is left to a sum over rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from ..errors import GradientError
from .adjoints import DERIVE, FLOAT, REARRANGED, Masked, Step, reached
from .algebra import Algebra
from .custom import firsts, gradients, key_of
from .dtypes import FLOAT8, STORAGE
from .graph import Builder, Graph, Input, Node, Output, Role
from .ops import Op, Value, Varies, compute_dtype
from .peaks import independent_peaks
from .scattered import Chosen
from .totals import total

BOOL = torch.bool
Masks = tuple[tuple[int, bool], ...]
TENSORS = (Role.ROW, Role.COLUMN, Role.PER_ROW, Role.DEVICE_SCALAR)


@dataclass(frozen=True, slots=True)
class Part:
    """One contribution to the gradient of a value.

    value: it may lack axes that it is the same along.
    masks: (mask, holds): it is 0 where a mask is not as it is said to be.
    inner, spread: the shape of the elements that contribute, which the value stands for.
    """

    value: int
    masks: Masks
    inner: tuple[int, ...]
    spread: bool


def differentiable(graph: Graph, wrt: Collection[str]) -> tuple[str, ...]:
    """The names of the outputs that have a derivative with respect to one of these parameters."""
    needed = depending(graph, wrt, frozenset())
    return tuple(out.name for out in graph.outputs if out.id in needed and _is_float(graph[out.id]))


def derive(graph: Graph, wrt: Collection[str], cotangents: Collection[str]) -> Graph:
    """The joint graph: what `graph` computes, and the gradients with respect to its parameters.

    graph: as traced, with values of any inner shape; or a joint graph itself.
    wrt: names of parameters. Floating tensors have gradients; others are passed over.
    cotangents: names of those outputs whose gradients are given.

    Its first nodes are those of `graph`, with their ids. They are followed by an input
    `d_<output>` for each of the cotangents, in the order of the outputs and in their dtypes: a row
    or one value per row as the output is, and a column or device scalar, the same for every row,
    for an output that is a sum over rows. A name that is taken gets `_` behind it. Its outputs are
    `d_<parameter>`, in the order of `wrt`, of the parameter's shape and dtype. That of a parameter
    that all rows share is a sum over all rows (`Output.over`). A parameter that no output of a
    cotangent depends on has none. One that is found to be 0 everywhere, as of `x - x`, is that,
    unless a backward pass of the user's own says that there is none. Those of tables whose rows an
    index chooses, and of rows whose elements the indices of another row choose, follow
    (`Graph.scattered`).

    Raises GradientError where no parameter has a gradient, where an operation on the way has no
    derivative, and for a parameter of 8 bits or an output that is a maximum over rows.
    """
    given = [out for out in graph.outputs if out.name in cotangents and _is_float(graph[out.id])]
    needed = depending(graph, wrt, independent_peaks(graph, [out.id for out in given]))
    builder = Builder.after(graph, f"{graph.name}_backward")
    walk = _Walk(graph, builder, needed)
    for out in given:
        walk.give(out)
    gradients = walk.gradients()
    inputs, ends = {i.name: i for i in graph.inputs if i.id in needed}, [out.id for out in given]
    outputs, own = [], frozenset(node.id for node in graph if node.op is Op.CUSTOM)
    for i in [inputs[name] for name in dict.fromkeys(wrt) if name in inputs]:
        if i.id in gradients:
            outputs.append(walk.output(i, gradients[i.id]))
        elif i.id in walk.chosen.tables:
            refuse_8_bits(graph, i)
        elif not depending(graph, (i.name,), own).isdisjoint(ends):
            outputs.append(walk.output(i, walk.algebra.number(0.0)))
    scattered = walk.chosen.outputs({out.name for out in outputs})
    outputs += [out for _, *both in scattered for out in map(walk.of_rows, both)]
    if not outputs:
        of = " and ".join(cotangents) or "nothing"
        told = f"{of} of {graph.name} has no derivative for {' and '.join(wrt)}"
        raise GradientError(told, graph[given[-1].id].loc if given else graph.last_line)
    joint = _pruned(builder, outputs, len(graph) + len(given))
    return replace(joint, scattered=tuple(of for of, *_ in scattered))


def _is_float(node: Node) -> bool:
    return node.value.dtype.is_floating_point


def depending(graph: Graph, wrt: Collection[str], peaks: frozenset[int]) -> set[int]:
    """The nodes that have a derivative with respect to a parameter; keys have one, too."""
    found = {i.id for i in graph.inputs if i.name in wrt and i.role in TENSORS}
    return reached(graph, {id for id in found if _is_float(graph[id])}, peaks)


def refuse_extreme(graph: Graph, out: Output) -> None:
    """Raise GradientError for an output that is a maximum over rows."""
    if out.over not in (None, Op.SUM):
        raise GradientError(
            f"{out.name} is a {out.over.value} over all rows, which has no derivative yet: "
            "return what it is taken of, and reduce it outside, or take it of v.detach()",
            graph[out.id].loc,
        )


def refuse_8_bits(graph: Graph, i: Input) -> None:
    """Raise GradientError for a parameter of 8 bits, with the first line that reads it."""
    if i.dtype in FLOAT8:
        name = str(i.dtype).removeprefix("torch.")
        first = next((node.loc for node in graph if i.id in node.inputs), None)
        raise GradientError(
            f"{i.name} is {name}, which no gradient is stored in: convert it before the call, "
            "x.float()",
            first,
        )


def free_name(builder: Builder, name: str) -> str:
    """The name of a new input: this one, with `_` behind it where it is taken."""
    while any(i.name == name for i in builder.inputs):
        name += "_"
    return name


class _Walk:
    """From the results back to the parameters.

    needed: the nodes whose gradients are wanted.
    """

    def __init__(self, graph: Graph, builder: Builder, needed: set[int]):
        self.graph, self.builder, self.needed = graph, builder, needed
        self.algebra = Algebra(builder, graph)
        self.parts: dict[int, list[Part]] = {}
        self.chosen = Chosen(graph, self.algebra)
        self.firsts = firsts(graph)
        self.given: dict[object, dict[int, int]] = {key: {} for key in self.firsts}

    def give(self, out: Output) -> None:
        """Add the input that is the gradient of an output."""
        inner, is_row = out.inner, out.is_row
        refuse_extreme(self.graph, out)
        role = Role.ROW if is_row else Role.PER_ROW
        varies = Varies.ROW
        if out.over is not None:
            role = Role.COLUMN if is_row else Role.DEVICE_SCALAR
            varies = Varies.SHARED if is_row else Varies.SCALAR
        name = free_name(self.builder, f"d_{out.name}")
        value = Value(inner, varies, compute_dtype(out.dtype), spread=is_row)
        id = self.algebra.input(name, role, out.dtype, value)
        if out.id in self.needed:
            self.parts.setdefault(out.id, []).append(Part(id, (), inner, is_row))

    def _in_float32(self, part: Part) -> Part:
        """A gradient that is given; that of an output of 8 bits has so many, too."""
        if self.builder[part.value].value.dtype is FLOAT:
            return part
        return replace(part, value=self.algebra.node(Op.CAST, part.value, arg=FLOAT))

    def gradients(self) -> dict[int, int]:
        """The gradient of each parameter, by the ids of their inputs."""
        algebra, found = self.algebra, {}
        for parts in self.parts.values():
            parts[:] = map(self._in_float32, parts)
        for node in reversed(self.graph.nodes):
            if node.op is Op.CUSTOM:
                self._custom(node)
                continue
            parts = self.parts.pop(node.id, None)
            if parts is None:
                continue
            algebra.loc = node.loc
            g, masks = self._joined(parts, node.value)
            if node.op is Op.INPUT or node.op in REARRANGED:
                g, masks = algebra.select(g, masks), ()
            if algebra.constant(g) == 0:
                continue
            if node.op is Op.INPUT:
                found[node.id] = g
                continue
            if node.op in (Op.GATHER, Op.LOOKUP):
                self.chosen.add(node, g)
                continue
            operands = tuple([algebra.same[i] for i in node.inputs])
            step = Step(node, operands, algebra.same[node.id])
            contributions = DERIVE[node.op](algebra, step, g)
            for i, contribution in zip(node.inputs, contributions, strict=True):
                if contribution is not None and i in self.needed:
                    self._contribute(node, i, contribution, masks)
        return found

    def _custom(self, node: Node) -> None:
        """Of a result of a call whose backward pass the user has written.

        That is asked when the gradients of all results are known.
        """
        algebra, parts, key = self.algebra, self.parts.pop(node.id, None), key_of(node)
        given, k = self.given[key], node.arg.result
        if parts is not None:
            algebra.loc = node.loc
            g = algebra.select(*self._joined(parts, node.value))
            if algebra.constant(g) != 0:
                g = algebra.widened(g, node.value.inner, node.value.spread)
                given[k] = algebra.add(given[k], g) if k in given else g
        if given and self.firsts[key] == node.id:
            for i, g in gradients(algebra, node, given):
                if i in self.needed:
                    self._contribute(node, i, g, ())

    def _contribute(self, node: Node, i: int, value: int | Masked, masks: tuple) -> None:
        if isinstance(value, Masked):
            value, masks = value.value, (*masks, (value.mask, value.holds))
        if self.algebra.constant(value) == 0:
            return
        of = self.graph[i] if node.op in REARRANGED else node
        part = Part(value, masks, of.value.inner, of.value.spread)
        self.parts.setdefault(i, []).append(part)

    def _joined(self, parts: list[Part], value: Value) -> tuple[int, tuple]:
        """The sum of contributions to a value, and the masks that all of it is under.

        Those of elements that share the value are added, and then summed over their axes.
        """
        algebra, groups = self.algebra, {}
        for part in parts:
            key = _shared_axes(part, value), part.inner, part.spread
            groups.setdefault(key, []).append((part.value, part.masks))
        found = []
        for (axes, inner, spread), group in groups.items():
            g, masks = added(algebra, group)
            if axes or (len(inner) > len(value.inner) and masks):
                g, masks = algebra.select(g, masks), ()
            if axes:
                g = total(algebra, g, inner, spread, axes)
            found.append((algebra.without_leading_ones(g, len(value.inner)), masks))
        return added(algebra, found)

    def of_rows(self, out: Output) -> Output:
        """An output that belongs to each row, also if it is the same for all."""
        is_row = self.builder[out.id].value.varies is Varies.ROW
        return out if is_row else replace(out, id=of_row(self.algebra, out.id))

    def output(self, i: Input, g: int) -> Output:
        """The gradient of a parameter as an output."""
        refuse_8_bits(self.graph, i)
        self.algebra.loc = None
        value, is_row = self.graph[i.id].value, i.role in (Role.ROW, Role.COLUMN)
        g = self.algebra.widened(g, value.inner, is_row)
        if self.builder[g].value.varies is not Varies.ROW:
            g = of_row(self.algebra, g, i.id)
        over = Op.SUM if i.role in (Role.COLUMN, Role.DEVICE_SCALAR) else None
        return Output(f"d_{i.name}", g, i.dtype, value.inner, is_row, over=over)


def added(algebra: Algebra, parts: list[tuple[int, Masks]]) -> tuple[int, Masks]:
    """The sum of values under masks. What is under a mask, or where it does not hold, is one.

    Masks that all of them are under are left, and the others applied.
    """
    under: dict[Masks, int] = {}
    todo = [*reversed(parts)]
    while todo:
        value, masks = todo.pop()
        if masks in under:
            todo.append((algebra.add(under.pop(masks), value), masks))
            continue
        if masks:
            *rest, (mask, holds) = masks
            opposite = (*rest, (mask, not holds))
            if opposite in under:
                both = (value, under.pop(opposite)) if holds else (under.pop(opposite), value)
                chosen = both[0]
                if both[0] != both[1]:
                    chosen = algebra.node(Op.WHERE, mask, *both)
                todo.append((chosen, tuple(rest)))
                continue
        under[masks] = value
    if len(under) == 1:
        ((masks, value),) = under.items()
        return value, masks
    total = None
    for masks, value in under.items():
        value = algebra.select(value, masks)
        total = value if total is None else algebra.add(total, value)
    return total, ()


def of_row(algebra: Algebra, g: int, like: int | None = None) -> int:
    """A value that is the same for all rows, as one of each row: kernels give no other.

    It is chosen, whatever an element of the row is, and so it keeps its bits.

    like: the input whose element that is, if it is one of rows.
    """
    node, inner, builder = algebra.node, algebra.inner, algebra.builder
    rows = [each.id for each in builder.inputs if each.role in (Role.ROW, Role.PER_ROW)]
    x = like if like in rows else rows[0]
    if builder[x].value.dtype in STORAGE | {BOOL}:
        x = node(Op.CAST, x, arg=FLOAT)
    mask = node(Op.EQ, x, x)
    while inner(mask) not in ((), inner(g)):
        mask = node(Op.ANY, mask, arg=-1 if len(inner(mask)) > 1 else None)
    return node(Op.WHERE, mask, g, g)


def _shared_axes(part: Part, value: Value) -> tuple[int, ...]:
    """The axes along which elements share a value."""
    inner, target = part.inner, value.inner
    found = []
    for axis in range(-len(inner), 0):
        is_missing = len(target) < -axis or target[axis] == 1
        is_spread = axis == -1 and part.spread and not value.spread
        if is_missing and (inner[axis] > 1 or is_spread):
            found.append(axis)
    return tuple(found)


def _pruned(builder: Builder, outputs: list[Output], kept: int) -> Graph:
    """The graph, without the nodes behind the first `kept` that no output needs."""
    live = {out.id for out in outputs}
    for id in range(len(builder) - 1, kept - 1, -1):
        if id in live:
            live.update(builder[id].inputs)
    ids, nodes = [*range(kept)], [builder[id] for id in range(kept)]
    for id in range(kept, len(builder)):
        ids.append(len(nodes))
        if id in live:
            node = builder[id]
            inputs = tuple([ids[i] for i in node.inputs])
            nodes.append(replace(node, id=len(nodes), inputs=inputs))
    structure = pytree.tree_structure({out.name: 0 for out in outputs})
    return builder.finish([replace(out, id=ids[out.id]) for out in outputs], structure, nodes)
