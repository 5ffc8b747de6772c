"""What one kernel computes of the products of a row, whether one can, and the tile that it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...frontend.dtypes import HALVES
from ...frontend.graph import Graph, Input, Output, Role
from ...frontend.ops import COLLECTIVES, SCANS, Op
from ..work import Work
from .column_groups import GROUP
from .levels import Product

ROLES = (Role.ROW, Role.COLUMN, Role.PER_ROW, Role.SCALAR, Role.DEVICE_SCALAR)
LOADED = (*HALVES, torch.float32, torch.int32, torch.int64)  # dtypes of what bodies read
UNFUSED = frozenset({
    Op.LENGTH, Op.TAKE, Op.LOOKUP, Op.BUNDLE, Op.UNBUNDLE, Op.KEY, Op.KEY_INDEX, Op.KEY_VALUE,
}) | SCANS | {Op.KTHVALUE}  # fmt: skip
IN_TILES = frozenset({Op.SUM, Op.MEAN, Op.MAX, Op.MIN, Op.PROD})  # what reduces rows of a tile
WIDEST = 256  # columns of a tile, at most
# Bytes of all matrices that one thread block loads, of few rows, in about the time that the row
# kernel would take that it saves. Several thread blocks would load more of them in less time.
WHOLE_BYTES = 1 << 17
WIDTHS = (1, 2, 4)  # numbers of products that a tile has side by side
CHUNK = 32  # columns that a thread works on at a time where there are no groups


@dataclass(frozen=True)
class Operand:
    """One product of a kernel: the columns from `start` on of a product of the function."""

    input: Input
    product: Product
    start: int


@dataclass(frozen=True)
class Tile:
    """The tile of a kernel; `MatmulTileConfig` and `WarpMatmulConfig` say what the numbers are.

    warps: how many multiply, each by itself (mma.sync); 0 where warpgroups do (wgmma).
    is_dependent: whether the kernel may start while the one before ends.
    """

    columns: int
    rows: int = 128
    cluster: int = 1
    stages: int = 4
    a_rows: int = 0
    warp_groups: int = 2
    in_turns: bool = False
    parts: int = 1
    warps: int = 0
    is_dependent: bool = True


@dataclass(frozen=True)
class Fused:
    """What one kernel computes of the products of one row.

    graph: a placed graph. operands: its inputs that are products. n: their columns, of which the
        graph may have more, for whole groups.
    is_whole: whether a tile has all columns of a row, which may be reduced there.
    """

    graph: Graph
    operands: tuple[Operand, ...]
    n: int
    is_whole: bool = False

    @property
    def chunk(self) -> int:
        """Columns of a chunk: those of a group, if there are groups."""
        return GROUP if self.graph.group_size is not None else CHUNK

    @cached_property
    def instructions(self) -> tuple[int, int]:
        """How many an element takes, and how many of these are for the special function units."""
        return Work(self.graph, in_tiles=True).held.costs

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of an element of all other rows that are read."""
        return sum(i.dtype.itemsize for i in self.others if i.role is Role.ROW)

    @property
    def others(self) -> list[Input]:
        """The inputs that are no products, in the order in which the host function takes them."""
        return [i for i in self.graph.inputs if i.id not in {o.input.id for o in self.operands}]

    @property
    def staged(self) -> Output | None:
        """The result that is stored as whole tiles: the first of 16 bits whose rows are aligned."""
        if self.graph.group_size is not None or self.n % 8:
            return None
        return next((o for o in self.graph.outputs if o.dtype in HALVES), None)


def fused(graph: Graph, products: tuple[Product, ...], n: int) -> Fused | None:
    """What a placed graph is as one kernel; None where one kernel does not compute it.

    Its products must have one left operand, and its results must be rows, or one number for each
    group. A thread works on one group at a time, so all groups have `GROUP` columns.
    """
    # A chunk reads all its columns, also those that a mask of the row leaves out.
    graph = replace(graph, inputs=tuple(replace(i, end=None) for i in graph.inputs))
    named = {product.name: product for product in products}
    operands = []
    for i in graph.inputs:
        view = i.view
        if view is not None and (len(view.shape) > 1 or not view.is_contiguous or view.groups):
            return None
        if view is not None and (view.width > 1 or view.at is not None or view.there(graph.n)):
            return None
        if i.name in named:
            if not graph[i.id].value.spread:  # one element of a product
                return None
            start = 0 if view is None else view.start[0]
            operands.append(Operand(i, named[i.name], start))
        elif i.role not in ROLES or i.dtype not in LOADED:
            return None
    lefts = {o.product.left for o in operands}
    is_whole = all(o.is_row and o.view is None and o.over is None for o in graph.outputs)
    is_body = not any(
        node.op in UNFUSED or (node.op is Op.GROUPED and node.arg[1] != GROUP) for node in graph
    )
    if len(lefts) != 1 or not is_whole or not is_body:
        return None
    if len(operands) not in WIDTHS or any(o.dtype not in LOADED for o in graph.outputs):
        return None
    if any(i.view is not None for i in graph.inputs if i.role not in (Role.ROW, Role.COLUMN)):
        return None
    return Fused(graph, tuple(operands), n)


def whole_rows(graph: Graph, products: tuple[Product, ...]) -> Fused | None:
    """What a placed graph with reductions is as one kernel whose tiles have whole rows.

    None where it is not one, and where results are numbers: those come of groups of columns. Also
    None where the matrices are large, because few rows are then faster in several thread blocks.
    """
    reductions = [node for node in graph if node.op in COLLECTIVES]
    is_known = all(
        node.op in IN_TILES and node.value.dtype is torch.float32
        and graph[node.inputs[0]].value.spread for node in reductions
    )  # fmt: skip
    if not reductions or not is_known or graph.group_size is not None:
        return None
    if not all(output.is_row for output in graph.outputs):
        return None
    kernel = fused(graph, products, graph.n)
    if kernel is None:
        return None
    count, product = len(kernel.operands), kernel.operands[0].product
    if -(-graph.n // CHUNK) * CHUNK * count > WIDEST:
        return None
    if count * graph.n * product.k * product.dtype.itemsize > WHOLE_BYTES:
        return None
    return replace(kernel, is_whole=True)
