"""Cuts a function with matrix products into kernels, each of which is a graph of its own.

What comes before a product, what follows it up to the next one, and so on, are *levels*. Level 0 is
computed without products. Each later level reads products of rows that are arguments or results of
the level before, and a product is just a row that is read. What a level passes on is small where it
can be: what was reduced to a number of the row, and rows that the user rounded to 16 bits. All that
is elementwise is computed again where it is read.

Reductions over the columns of a product do not fit one kernel, because a thread block has some
columns only. So they are cut once more (`in_groups`): the kernel of the product reduces groups of
columns, and a row kernel combines what it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.utils import _pytree as pytree

from ...frontend.dtypes import compute_dtype
from ...frontend.graph import Builder, Graph, Node, Output, Role
from ...frontend.ops import COLLECTIVES, Op, Value


@dataclass(frozen=True, slots=True)
class Product:
    """A row of a kernel's graph that is the product of a row and a matrix.

    name: of the input. left: the row, which is an argument or a value of an earlier kernel.
    matrix: the argument. is_transposed: whether it is (N, K). k: the length of the left row.
    dtype: of both.
    """

    name: str
    left: str
    matrix: str
    is_transposed: bool
    k: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Level:
    """One kernel: its graph, and the products among its inputs.

    The graph is a traced one. Its inputs are products, arguments, and values of earlier levels. Its
    outputs are results of the whole function, and values for later levels.
    """

    graph: Graph
    products: tuple[Product, ...]


def levels(traced: Graph) -> list[Level]:
    """The kernels of a function with products, in the order in which they run."""
    return _Cut(traced).levels


class _Cut:
    def __init__(self, traced: Graph):
        self.traced = traced
        self.level, self.of_rows = _level_of(traced), _of_rows(traced)
        self.arguments = {i.id: i for i in traced.inputs}
        taken = {i.name for i in traced.inputs} | {o.name for o in traced.outputs}
        self._taken = taken
        self.passed: dict[int, str] = {}  # the values that one level passes on, by node
        found = [level for k in range(max(self.level), -1, -1) for level in self._at(k)[::-1]]
        self.levels = found[::-1]

    def _at(self, level: int) -> list[Level]:
        """The kernels of a level, one for rows of each length; later ones have said what they read.
        """
        kernels: dict[frozenset[int], tuple[list[Output], list[int]]] = {}
        for output in self.traced.outputs:
            if self.level[output.id] == level:
                kernels.setdefault(self._lengths(level, output.id), ([], []))[0].append(output)
        for id in self.passed:
            if self.level[id] == level:
                kernels.setdefault(self._lengths(level, id), ([], []))[1].append(id)
        return [self._built(level, *goals) for goals in kernels.values()]

    def _lengths(self, level: int, goal: int) -> frozenset[int]:
        """How many elements the rows have that a goal is computed of."""
        values = [self.traced[id].value for id in self._collect(level, [goal])]
        return frozenset(v.inner[-1] for v in values if v.spread and v.inner)

    def _collect(self, level: int, goals: list[int]) -> list[int]:
        """The nodes that are computed for the goals, and the values that these read."""
        todo, seen = list(goals), {}
        while todo:
            id = todo.pop()
            if id in seen:
                continue
            seen[id] = node = self.traced[id]
            is_product = node.op is Op.MATMUL and self.level[id] == level
            if not is_product and not self._is_passed(node, level):
                todo += node.inputs
        return list(seen)

    def _product(self, node: Node) -> Product:
        left, matrix = node.inputs
        if left not in self.arguments and left not in self.passed:
            self.passed[left] = self._name("left")
        name = self.passed.get(left) or self.arguments[left].name
        (k,), given = self.traced[left].value.inner, self.arguments[matrix]
        return Product(self._name("product"), name, given.name, bool(node.arg), k, given.dtype)

    def _is_passed(self, node: Node, level: int) -> bool:
        """Whether an earlier level computes a value that this one reads.

        It does if it has it anyhow, as a left operand, or if the value is a product, or a number of
        the row that was reduced.
        """
        if self.level[node.id] == level or node.op in (Op.INPUT, Op.CONST, Op.INDEX):
            return False
        of_row = node.op in COLLECTIVES or (node.op is Op.TAKE and self.level[node.id] > 0)
        of_row = of_row and self.of_rows[node.id]  # A kernel has a row among its inputs.
        return node.op is Op.MATMUL or node.id in self.passed or of_row

    def _name(self, what: str) -> str:
        count = 0
        while (name := f"{what}{count}") in self._taken:
            count += 1
        self._taken.add(name)
        return name

    def _built(self, level: int, results: list[Output], wanted: list[int]) -> Level:
        traced, found = self.traced, {}
        nodes = self._collect(level, [*(o.id for o in results), *wanted])
        for node in map(traced.__getitem__, nodes):
            if node.op is Op.MATMUL and self.level[node.id] == level:
                found[node.id] = self._product(node)
            elif node.id not in self.passed and self._is_passed(node, level):
                self.passed[node.id] = self._name(node.op.value)
        nodes, products = sorted(nodes), [found[id] for id in sorted(found)]
        spread = [traced[id].value for id in nodes if traced[id].value.spread]
        builder = Builder(traced.name, max((v.inner[-1] for v in spread if v.inner), default=1))
        ids: dict[int, int] = {}
        left = iter(products)
        for id in nodes:
            node = traced[id]
            if node.op is Op.MATMUL and self.level[id] == level:
                name = next(left).name
                ids[id] = builder.add_input(name, Role.ROW, torch.float32, node.value)
            elif self._is_passed(node, level):
                ids[id] = self._read(builder, node)
            elif node.op is Op.INPUT:
                given = self.arguments[id]
                ids[id] = builder.add_input(given.name, given.role, given.dtype, node.value)
            else:
                ids[id] = builder.copied(node, [ids[i] for i in node.inputs])
        outputs = [Output(o.name, ids[o.id], o.dtype, o.inner, o.is_row, over=o.over)
                   for o in results]  # fmt: skip
        outputs += [self._passed_on(id, ids[id]) for id in wanted]
        structure = pytree.tree_structure((0,) * len(outputs))
        return Level(builder.finish(outputs, structure), tuple(products))

    def _read(self, builder: Builder, node: Node) -> int:
        """The input that is a value of an earlier level."""
        value, dtype = node.value, stored_dtype(node.value)
        role = Role.ROW if _is_row(value) else Role.PER_ROW
        value = Value(value.inner, value.varies, compute_dtype(dtype), spread=value.spread)
        read = builder.add_input(self.passed[node.id], role, dtype, value)
        return read if node.value.stored is None else builder.add(Op.CAST, (read,), dtype)

    def _passed_on(self, node: int, id: int) -> Output:
        value = self.traced[node].value
        row = _is_row(value)
        return Output(self.passed[node], id, stored_dtype(value), value.inner, row)


def stored_dtype(value: Value) -> torch.dtype:
    """The dtype that a value keeps all its bits in: the one that `.to` declared, or its own."""
    return value.stored or value.dtype


def _is_row(value: Value) -> bool:
    return value.spread or prod(value.inner) > 1


def _level_of(traced: Graph) -> list[int]:
    """For each node how many products are on the longest path to it."""
    found: list[int] = []
    for node in traced:
        before = max((found[i] for i in node.inputs), default=0)
        found.append(before + (node.op is Op.MATMUL))
    return found


def _of_rows(traced: Graph) -> list[bool]:
    """For each node whether it is computed of a row's elements: of an argument, or a product."""
    rows = {i.id for i in traced.inputs if i.role is Role.ROW}
    found: list[bool] = []
    for node in traced:
        is_row = node.id in rows or node.op is Op.MATMUL
        found.append(is_row or any(found[i] for i in node.inputs))
    return found
