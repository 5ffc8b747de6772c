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
    Op.LENGTH, Op.TAKE, Op.GATHER, Op.LOOKUP, Op.BUNDLE, Op.UNBUNDLE, Op.KEY, Op.KEY_INDEX,
    Op.KEY_VALUE,
}) | SCANS | {Op.KTHVALUE}  # fmt: skip
IN_TILES = frozenset({Op.SUM, Op.MEAN, Op.MAX, Op.MIN, Op.PROD})  # what reduces rows of a tile
WIDEST = 256  # columns of a tile, at most
# Where tiles share rows and columns are read beside the products, a tile has no more than this.
# With more sums, a thread has no registers left for what is read.
WIDEST_READING = 128
# Elements of the left operand's rows, at most, where tiles share the rows of the product. Products
# of longer rows take so much of the time that little is saved (docs/traps.md).
SHARED_K = 256
# Bytes of all matrices that one thread block loads, of few rows, in about the time that the row
# kernel would take that it saves. Several thread blocks would load more of them in less time.
WHOLE_BYTES = 1 << 17
SHARES = (2, 4, 8)  # thread blocks of a cluster that may share the columns of a row
# Words that a mean exchanges: the sum, the largest and the smallest element. Where all are equal,
# the mean is exactly that.
WORDS_OF_MEAN = 3
WIDTHS = (1, 2, 4)  # numbers of products that a tile has side by side
ALIGNED = 8  # elements of 16 bits that rows have a multiple of if they are stored as whole tiles
LINE = 64  # columns of a line in shared memory of a matrix (K, N)
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
    is_whole: whether a row is reduced in the tile that has all its columns, or in those that do.
    shares: how many tiles have the columns of such a row. Several are the tiles of one cluster.
    """

    graph: Graph
    operands: tuple[Operand, ...]
    n: int
    is_whole: bool = False
    shares: int = 1

    @property
    def columns(self) -> int:
        """Columns of each product that a tile has of a whole row, or of one of several tiles.

        These depend on nothing else, because the order in which a row is reduced depends on them.
        Of several matrices (K, N) a tile has whole lines of each.
        """
        unit = CHUNK if self.shares == 1 or len(self.operands) == 1 else LINE
        return -(-self.n // (self.shares * unit)) * unit

    @property
    def exchanges(self) -> list[int]:
        """For each reduction of a row of several tiles, how many numbers these exchange."""
        if self.shares == 1:
            return []
        found = [node.op for node in self.graph if node.op in IN_TILES]
        return [WORDS_OF_MEAN if op is Op.MEAN else 1 for op in found]

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
        if self.graph.group_size is not None or self.n % ALIGNED:
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

    A row has one tile, or those of a cluster. None where the graph is not such a kernel, and where
    results are numbers: those come of groups of columns. Also None where a thread block would load
    much of the matrices, because few rows are then faster in more thread blocks.
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
    loaded = count * graph.n * product.k * product.dtype.itemsize
    whole = replace(kernel, is_whole=True)
    if count * whole.columns <= WIDEST and loaded <= WHOLE_BYTES:
        return whole
    return _shared(whole)


def _shared(kernel: Fused) -> Fused | None:
    """The kernel whose rows several tiles share, as few as can have them; None if there is none.

    Some rows take longer in tiles that share them than in two kernels, of which one stores the
    product. Other rows are read in each stage of reductions, a few elements at a time. Rows of a
    number of elements that is no multiple of 8 are never stored as whole tiles.
    """
    count, roles = len(kernel.operands), {i.role for i in kernel.others}
    if kernel.operands[0].product.k > SHARED_K or Role.ROW in roles or kernel.n % ALIGNED:
        return None
    widest = WIDEST_READING if Role.COLUMN in roles else WIDEST
    forms = (replace(kernel, shares=shares) for shares in SHARES)
    return next((form for form in forms if count * form.columns <= widest), None)
