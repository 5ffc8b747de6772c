"""Cuts a function with matrix products into kernels, each of which is a graph of its own.

What comes before a product, what follows it up to the next one, and so on, are *levels*. Level 0 is
computed without products. Each later level reads products of rows that are arguments or results of
the level before, and a product is just a row that is read. What a level passes on is small where it
can be: what was reduced to a number of the row, and rows that the user rounded to 16 bits. All that
is elementwise is computed again where it is read.

Reductions over the columns of a product do not fit one kernel, because a thread block has some
columns only. So they are cut once more (`in_groups`): the kernel of the product reduces groups of
columns, and a row kernel combines what it gives.

A level is one kernel for rows of each length. Where several of these need the same product, it is
asked for how they get it (`Sharing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
from torch.utils import _pytree as pytree

from ...frontend.dtypes import compute_dtype
from ...frontend.graph import Builder, Graph, Node, Output, Role
from ...frontend.ops import COLLECTIVES, Op, Value
from ..passes.parts_of_joins import READS, keys_apart, parts_apart


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


class Sharing(Enum):
    """How kernels of one level get products that several of them need.

    APART: each multiplies. TOGETHER: they are one kernel. STORED: a kernel before them stores the
    products, which they read.
    """

    APART = "apart"
    TOGETHER = "together"
    STORED = "stored"


Choice = Callable[[list[Level], Level], Sharing]  # of kernels apart, and the same as one
Goals = tuple[list[Output], list[int]]  # what a kernel computes: results, and values for others


def levels(traced: Graph, sharing: Choice) -> list[Level]:
    """The kernels of a function with products, in the order in which they run.

    sharing: says how kernels that need the same products get them.
    """
    return _Cut(traced, sharing).levels


class _Cut:
    def __init__(self, traced: Graph, sharing: Choice):
        traced = parts_apart(keys_apart(traced))
        self.traced, self._sharing = traced, sharing
        self.level, self.of_rows = _level_of(traced), _of_rows(traced)
        self.arguments = {i.id: i for i in traced.inputs}
        taken = {i.name for i in traced.inputs} | {o.name for o in traced.outputs}
        self._taken = taken
        self.passed: dict[int, str] = {}  # the values that one level passes on, by node
        self._stored: set[int] = set()  # the products that a kernel of their level stores
        found = [level for k in range(max(self.level), -1, -1) for level in self._at(k)[::-1]]
        self.levels = found[::-1]

    def _at(self, level: int) -> list[Level]:
        """The kernels of a level, one for rows of each length; later ones have said what they read.
        """
        kernels: dict[frozenset[int], Goals] = {}
        for output in self.traced.outputs:
            if self.level[output.id] == level:
                kernels.setdefault(self._lengths(level, output.id), ([], []))[0].append(output)
        for id in self.passed:
            if self.level[id] == level:
                kernels.setdefault(self._lengths(level, id), ([], []))[1].append(id)
        return [made for goals in self._joined(level, [*kernels.values()])
                for made in self._shared(level, goals)]  # fmt: skip

    def _joined(self, level: int, kernels: list[Goals]) -> list[list[Goals]]:
        """The kernels in groups, which have no product in common."""
        groups: list[tuple[set[int], list[Goals]]] = []
        for goals in kernels:
            products, joined = {*self._products(level, goals)}, [goals]
            for group in [group for group in groups if group[0] & products]:
                groups.remove(group)
                products, joined = products | group[0], group[1] + joined
            groups.append((products, joined))
        return [joined for _, joined in groups]

    def _products(self, level: int, goals: Goals) -> list[int]:
        """The products that a kernel with these goals multiplies."""
        nodes = self._collect(level, [*(o.id for o in goals[0]), *goals[1]])
        return [id for id in nodes if self._is_product(self.traced[id], level)]

    def _shared(self, level: int, kernels: list[Goals]) -> list[Level]:
        """The kernels of one group, of which each product is multiplied by one as a rule."""
        if len(kernels) == 1:
            return [self._built(level, *kernels[0])]
        whole = [each for goals in kernels for each in goals[0]], [
            id for goals in kernels for id in goals[1]
        ]
        before = self.passed.copy(), self._taken.copy()
        apart = [self._built(level, *goals) for goals in kernels]
        after = self.passed, self._taken
        self.passed, self._taken = before
        together = self._built(level, *whole)
        found = self._sharing(apart, together)
        if found is Sharing.TOGETHER:
            return [together]
        if found is Sharing.APART:
            self.passed, self._taken = after
            return apart
        return self._stored_first(level, kernels)

    def _stored_first(self, level: int, kernels: list[Goals]) -> list[Level]:
        """A kernel for each product that several kernels need, and these behind them."""
        readers = Counter(id for goals in kernels for id in self._products(level, goals))
        made, shared = [], [id for id in sorted(readers) if readers[id] > 1]
        for id in shared:
            if id not in self.passed:
                self.passed[id] = self._name(Op.MATMUL.value)
            made.append(self._built(level, [], [id]))
        self._stored.update(shared)
        rest = [(results, [id for id in wanted if id not in self._stored])
                for results, wanted in kernels]  # fmt: skip
        return made + [self._built(level, *goals) for goals in rest if any(goals)]

    def _is_product(self, node: Node, level: int) -> bool:
        """Whether a kernel of the level multiplies to have this value."""
        is_own = node.op is Op.MATMUL and self.level[node.id] == level
        return is_own and node.id not in self._stored

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
            if not self._is_product(node, level) and not self._is_passed(node, level):
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
        the row that was reduced. Of a key that was found its element is passed on.
        """
        if node.id in self._stored:
            return True
        if self.level[node.id] == level or node.op in (Op.INPUT, Op.CONST, Op.INDEX):
            return False
        of_row = node.op in COLLECTIVES or (node.op is Op.TAKE and self.level[node.id] > 0)
        of_row = of_row or (node.op in READS and self.traced[node.inputs[0]].op in COLLECTIVES)
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
            if self._is_product(node, level):
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
            if self._is_product(node, level):
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
