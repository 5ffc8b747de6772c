"""Builds the placed graph of what `space.py` has found to be wanted."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from ...errors import Location, UnsupportedError
from ...frontend.graph import Builder, Graph, Node, Output, Role, View
from ...frontend.ops import SCANS, Op, Value, Varies
from ..vectors import is_vector
from .axes import Axis, Groups, Index, Ungrouped, Wanted, axes_of, row_chosen, starts_of

# Reductions in which equal elements count, and what leaves their result as it is.
ONCE = {Op.SUM: 0, Op.PROD: 1}


class Placed(NamedTuple):
    """A node of the placed graph, before the columns are known.

    axes: those that it varies over. view: of a leaf, what is wanted of its tensor.
    inside: of a reduction, the axes that it is over.
    """

    op: Op
    inputs: tuple[int, ...]
    arg: object
    axes: tuple[Axis, ...]
    of: Node
    view: Wanted = ()
    inside: tuple[Axis, ...] = ()


def built(
    graph: Graph,
    nodes: list[Placed],
    pieces: list[list[tuple[int, Wanted]]],
    n: int,
    groups: Groups | None,
) -> Graph:
    """The placed graph of a traced one.

    nodes: its nodes. pieces: for each output the places of its pieces in `nodes`, and where in the
        output they lie. n: how many columns there are. groups: what they are, if they are groups.

    Raises Ungrouped where they cannot be.
    """
    return _Building(graph, nodes, n, groups).result(pieces)


class _Building:
    def __init__(self, graph: Graph, nodes: list[Placed], n: int, groups: Groups | None):
        self.graph, self.nodes, self.n, self.groups = graph, nodes, n, groups
        self.leaves: dict[object, int] = {}

    def result(self, pieces: list[list[tuple[int, Wanted]]]) -> Graph:
        graph, n, new = self.graph, self.n, Builder(self.graph.name, self.n, self.graph.multiple)
        ids: dict[int, int] = {}
        leaves = [k for k, each in enumerate(self.nodes) if each.op is Op.INPUT]
        order = {i.id: place for place, i in enumerate(graph.inputs)}
        leaves.sort(key=lambda k: (order[self.nodes[k].of.id], starts_of(self.nodes[k].view)))
        for k in leaves:
            ids[k] = self._leaf(new, self.nodes[k])
        both = zip(graph.outputs, pieces, strict=True)
        has_row = any(axes_of(each) for o, found in both if o.over is None for _, each in found)
        self._give_shape(new, has_row)
        for k, each in enumerate(self.nodes):
            if each.op is Op.CONST:
                ids[k] = new.add_const(each.arg, self._constant(each), each.of.loc)
            elif each.op is Op.INDEX:
                ids[k] = self._index(new, each)
            elif each.inside:
                ids[k] = self._reduction(new, each, [ids[i] for i in each.inputs])
            elif each.op is not Op.INPUT:
                ids[k] = new.add(each.op, [ids[i] for i in each.inputs], each.arg, each.of.loc)
        outputs = []
        for output, found in zip(graph.outputs, pieces, strict=True):
            for k, wanted in found:
                is_row = bool(axes_of(wanted))
                view = self._view(output.inner, wanted, is_row)
                self._refuse_beyond_result(output, k, wanted, view)
                inner = output.inner if view is None else (n,) if is_row else ()
                kinds = output.dtype, inner, is_row, view, output.over, output.groups
                outputs.append(Output(output.name, ids[k], *kinds))
        return new.finish(outputs, graph.structure)

    def _reduction(self, new: Builder, each: Placed, operands: list[int]) -> int:
        """A reduction or scan of the row, or a reduction of each group, or of what each has."""
        groups, op, loc = self.groups, each.op, each.of.loc
        inside = frozenset(each.inside)
        if groups is None or not inside & (groups.outer | groups.inner):
            return new.add(op, operands, None, loc)
        if op in SCANS or op is Op.KTHVALUE:
            raise Ungrouped
        (operand,) = operands
        of_groups, of_elements = bool(inside & groups.outer), bool(inside & groups.inner)
        if each.axes:  # of each group
            if of_groups or not of_elements or not new[operand].value.spread:
                raise Ungrouped
            if op is not Op.MEAN:
                return new.add(Op.GROUPED, (operand,), (op, groups.size), loc)
            total = new.add(Op.GROUPED, (operand,), (Op.SUM, groups.size), loc)
            part = new.add_const(1 / groups.size, Value((), Varies.SCALAR, torch.float32))
            return new.add(Op.MUL, (total, part), loc=loc)
        if not of_groups or not new[operand].value.spread:
            raise Ungrouped
        if not of_elements and op in ONCE:  # each group counts once
            place = self._column(new, Op.AND, groups.size - 1, loc)
            first = new.add(Op.EQ, (place, self._number(new, 0, loc)), loc=loc)
            dtype = new[operand].value.dtype
            nothing = float(ONCE[op]) if dtype.is_floating_point else ONCE[op]
            other = new.add_const(nothing, Value((), Varies.SCALAR, dtype), loc)
            operand = new.add(Op.WHERE, (first, operand, other), loc=loc)
        return new.add(op, (operand,), None, loc)

    def _leaf(self, new: Builder, leaf: Placed) -> int:
        source = next(i for i in self.graph.inputs if i.id == leaf.of.id)
        value, role = leaf.of.value, source.role
        if role not in (Role.ROW, Role.COLUMN):
            return new.add_input(source.name, role, source.dtype, value)
        if not leaf.view:  # only elements at indices are read
            return new.add_input(source.name, Role.TAKEN, source.dtype, value)
        is_row = bool(leaf.axes)
        if (chosen := row_chosen(leaf.view)) is not None:
            place, axis, step = chosen
            steps, groups = self._steps(leaf.view) if is_row else (None, None)
            at = place, step, axis.size
            view = View(value.inner, starts_of(leaf.view), steps, at=at, groups=groups)
            inner = (axis.size, self.n) if is_row else (axis.size,)
            role, value = Role.TABLE, Value(inner, value.varies, value.dtype, None, is_row)
        elif not is_row:
            # An element beside the row is any number, so that one of the row will do.
            pairs = zip(starts_of(leaf.view), value.inner, strict=True)
            starts = tuple(min(max(start, 0), size - 1) for start, size in pairs)
            view = View(value.inner, starts, None)
            role = Role.PER_ROW if role is Role.ROW else Role.DEVICE_SCALAR
            varies = Varies.ROW if role is Role.PER_ROW else Varies.SCALAR
            value = Value((), varies, value.dtype)
        else:
            view = self._view(value.inner, self._touching(leaf), is_row)
            value = Value((self.n,), value.varies, value.dtype, None, True)
        key = source.name, role, view
        if key not in self.leaves:
            self.leaves[key] = new.add_input(source.name, role, source.dtype, value, view)
        return self.leaves[key]

    def _refuse_beyond_result(
        self, output: Output, k: int, wanted: Wanted, view: View | None
    ) -> None:
        """Raise an error where a piece of a result would be stored behind the end of the result.

        One that is all of it is stored up to its end (`View.there`).
        """
        pairs = zip(wanted, output.inner, strict=True)
        if all([index.last < size for index, size in pairs]):
            return
        there = view and view.there(self.n)
        if there and there[0] == 0 < there[1]:  # some of it is stored
            return
        raise Ungrouped if self.groups else UnsupportedError(
            f"{output.name} ends before the columns do, and would be cut into pieces",
            self.nodes[k].of.loc,
        )

    def _touching(self, leaf: Placed) -> Wanted:
        """What is wanted of a row, moved to its start where no element of the row is wanted.

        Then any number will do, and those are read that are there (`View.there`). Raises Ungrouped
        where groups reach beyond an end.
        """
        pairs = [*zip(leaf.view, leaf.of.value.inner, strict=True)]
        if all([index.start >= 0 and index.last < size for index, size in pairs]):
            return leaf.view
        _, groups = self._steps(leaf.view)
        if groups is not None:
            raise Ungrouped
        touching = tuple(
            Index(0, index.steps) if index.last < 0 or index.start >= size else index
            for index, size in pairs
        )
        view = self._view(leaf.of.value.inner, touching, True)
        first, end = (view and view.there(self.n)) or (0, self.n)
        if first < end:
            return touching
        return tuple(Index(0, index.steps) for index in touching)  # no column is in all axes

    def _index(self, new: Builder, each: Placed) -> int:
        """start + step * the number of the column, or of the group and of the column in it."""
        (index,), loc = each.view, each.of.loc
        if not index.steps:
            return self._number(new, index.start, loc)
        if self.groups is None:
            near, far, size = sum([step for _, step in index.steps]), 0, self.n
        else:
            (near, far), size = self.groups.steps(index), self.groups.size
        if self.groups is None or far == near * size:  # groups follow each other
            parts = [(new.add_index(self.n), near)]
        else:
            shift = size.bit_length() - 1
            of_group = [(self._column(new, Op.RSHIFT, shift, loc), far)] if far else []
            in_group = [(self._column(new, Op.AND, size - 1, loc), near)] if near else []
            parts = of_group + in_group
        found = None
        for part, step in parts:
            if step > 1:
                part = new.add(Op.MUL, (part, self._number(new, step, loc)), loc=loc)
            found = part if found is None else new.add(Op.ADD, (found, part), loc=loc)
        if index.start:
            found = new.add(Op.ADD, (found, self._number(new, index.start, loc)), loc=loc)
        return found

    def _column(self, new: Builder, op: Op, number: int, loc: Location | None) -> int:
        """The number of the column, with `op` and a number."""
        return new.add(op, (new.add_index(self.n), self._number(new, number, loc)), loc=loc)

    def _number(self, new: Builder, value: int, loc: Location | None) -> int:
        return new.add_const(value, Value((), Varies.SCALAR, torch.int64), loc)

    def _constant(self, each: Placed) -> Value:
        v, is_row = each.of.value, bool(each.axes)
        if each.of.op is not Op.CONST:  # it counts the parts of a mean, or is the 1 of `_spread`
            return Value((self.n,) if is_row else (), Varies.SCALAR, v.dtype, None, is_row)
        return Value((self.n,) if is_row else (), v.varies, v.dtype, v.stored, is_row)

    def _view(self, shape: tuple[int, ...], wanted: Wanted, is_row: bool) -> View | None:
        """Where the elements lie in a tensor of this shape; None for all of it."""
        starts = starts_of(wanted)
        if not is_row:
            return View(shape, starts, None) if prod(shape) > 1 else None
        steps, groups = self._steps(wanted)
        whole = shape == (self.n,) and starts == (0,) and steps == (1,) and groups is None
        return None if whole else View(shape, starts, steps, groups=groups)

    def _steps(self, wanted: Wanted) -> tuple[tuple[int, ...], tuple[int, tuple[int, ...]] | None]:
        """`View.steps` and `View.groups` of what is wanted."""
        own = [index.without_rows for index in wanted]
        if self.groups is None:
            return tuple(sum([step for _, step in index.steps]) for index in own), None
        size, both = self.groups.size, [self.groups.steps(index) for index in own]
        steps, far = (tuple(each) for each in zip(*both, strict=True))
        follows = far == tuple(step * size for step in steps)
        return steps, None if follows else (size, far)

    def _give_shape(self, new: Builder, has_row: bool) -> None:
        """Add a row that is not read, if none is: the kernel takes its shape from one.

        Where no row argument is so long, it takes its shape from a result, which may be a number of
        each row where tables or columns are read. Or else it takes it from an argument whose first
        element stands for all: a row, or a value of each row.

        has_row: whether a result, or a piece of one, is a row.
        """
        if any(i.role is Role.ROW for i in new.inputs):
            return
        sources = {i: self.graph[i.id].value.inner for i in self.graph.inputs
                   if i.role in (Role.ROW, Role.PER_ROW)}  # fmt: skip
        rows = [i for i in sources if i.role is Role.ROW]
        source = next((i for i in rows if sources[i][-1] >= self.n), None)
        has_number = any(not o.is_row and o.over is None for o in self.graph.outputs)
        has_vector = any(is_vector(new, i) for i in new.inputs)  # of which there are columns
        if source is None and (has_row or (has_number and has_vector)):
            return
        step = int(source is not None)
        source = source or next(iter([*rows, *sources]))
        inner = sources[source]
        value = Value((self.n,), Varies.ROW, self.graph[source.id].value.dtype, None, True)
        starts, steps = (0,) * len(inner), (*(0,) * (len(inner) - 1), step)[: len(inner)]
        view = None if inner == (self.n,) and step else View(inner, starts, steps)
        new.add_input(source.name, Role.ROW, source.dtype, value, view)
