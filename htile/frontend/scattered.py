"""Gradients of what indices choose from: rows of a table, or elements of a row.

No kernel adds to a place that an index chooses, in an order that is always the same. So the joint
graph gives, of each row, what is added and the indices, and torch adds it up
(htile.run.differentiation.tables).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from .algebra import Algebra
from .graph import Graph, Node, Output, Role
from .ops import Op

INT64 = torch.int64


@dataclass(frozen=True)
class Padding:
    """The static part of a lookup with an index that has no gradient."""

    index: int


class Scattered(NamedTuple):
    """Two outputs of a joint graph that are the gradient of a table together, or a part of it.

    table: the parameter. rows, at: the names of the outputs: what is added, (*lead, K, *inner) in
        float32, and the indices in the first axis, (*lead, K). Without K where that is 1.
    shape: that of the value which is chosen from: the table, or a movement of it, or a row.
    moves: those movements, from the value back to the table, each with the shape of its operand.
    dtype: the table's.
    of_each_row: whether the parameter has rows of its own, to which the indices of theirs add.
    """

    table: str
    rows: str
    at: str
    shape: tuple[int, ...]
    moves: tuple[tuple[Op, object, tuple[int, ...]], ...]
    dtype: torch.dtype
    of_each_row: bool


class Chosen:
    """The lookups and gathers of a graph, whose gradients are found one after the other.

    parts: for each value that is chosen from the index and the gradient of each of them.
    """

    def __init__(self, graph: Graph, algebra: Algebra):
        self.graph, self.algebra = graph, algebra
        self.parts: dict[int, list[tuple[int, int]]] = {}

    def add(self, node: Node, g: int) -> None:
        """Add what a lookup or a gather contributes to what it chooses from.

        Nothing is added for an index of a lookup beyond the ends, nor for the one that padding has.

        g: the gradient of its result.
        """
        a, (table, index) = self.algebra, node.inputs
        count, index = a.inner(table)[0], a.same[index]
        if a[index].value.dtype is not INT64:
            index = a.node(Op.CONVERT, index, arg=INT64)
        zero, size = a.integer(0), a.integer(count)
        if node.op is Op.GATHER:
            index = a.node(Op.MINIMUM, a.node(Op.MAXIMUM, index, zero), a.integer(count - 1))
            g = a.widened(g, node.value.inner, node.value.spread)
            self.parts.setdefault(table, []).append((index, g))
            return
        at = a.node(Op.WHERE, a.node(Op.LT, index, zero), a.node(Op.ADD, index, size), index)
        is_there = a.node(Op.AND, a.node(Op.GE, at, zero), a.node(Op.LT, at, size))
        if node.arg is not None:
            padding = a.integer(node.arg.index % count)
            is_there = a.node(Op.AND, is_there, a.node(Op.NE, at, padding))
        g = a.select(a.widened(g, node.value.inner, node.value.spread), ((is_there, True),))
        at = a.node(Op.WHERE, is_there, at, zero)
        self.parts.setdefault(table, []).append((at, g))

    @property
    def tables(self) -> set[int]:
        """The arguments that are chosen from."""
        return {self._moves(table)[1].id for table in self.parts}

    def _moves(self, table: int) -> tuple[list[tuple[Op, object, tuple[int, ...]]], Node]:
        """The movements from a value back to the argument, and that."""
        moves, node = [], self.graph[table]
        while node.op is not Op.INPUT:
            (operand,) = self.graph.operands(node)
            moves.append((node.op, node.arg, operand.value.inner))
            node = operand
        return moves, node

    def outputs(self, names: set[str]) -> list[tuple[Scattered, Output, Output]]:
        """The outputs for all that is chosen from, with names that are none of these."""
        return [self._of(table, parts, names) for table, parts in self.parts.items()]

    def _of(
        self, table: int, parts: list[tuple[int, int]], names: set[str]
    ) -> tuple[Scattered, Output, Output]:
        a, graph, (moves, node) = self.algebra, self.graph, self._moves(table)
        a.loc = None
        of = next(i for i in graph.inputs if i.id == node.id)
        at, rows = ([part[k] for part in parts] for k in (0, 1))
        if len(parts) > 1:
            inner = a.inner(rows[0])
            if not a.inner(at[0]):  # of lookups
                at = [a.reshape(i, (1,)) for i in at]
                rows = [a.reshape(g, (1, *inner)) for g in rows]
                inner = (1, *inner)
            at, rows = [a.node(Op.CAT, *at, arg=-1)], [a.node(Op.CAT, *rows, arg=-len(inner))]
        made = []
        for name, (id,), dtype in (("rows", rows, torch.float32), ("at", at, INT64)):
            name = f"d_{of.name}_{name}"
            while name in names:
                name += "_"
            names.add(name)
            value = a[id].value
            is_row = value.spread or prod(value.inner) > 1
            made.append(Output(name, id, dtype, value.inner, is_row))
        shape = graph[table].value.inner
        names = made[0].name, made[1].name
        is_row = of.role is Role.ROW
        return Scattered(of.name, *names, shape, tuple(moves), of.dtype, is_row), *made
