"""Which kernel of a level multiplies, and how kernels of a level share a product that all need.

A product is multiplied once in a forward pass. Where one kernel over tiles gives all that is
computed of it, that is the kernel. Where none does, a kernel stores the product in float32, and row
kernels go on from there: one of them where it has everything, or several that read what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...build.arch import ARCHS
from ...errors import HTileError
from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Graph
from ...frontend.ops import REDUCTIONS
from .. import plans_for, run_passes
from ..passes.by_column import FEW_PIECES
from ..plan import Target
from .column_groups import cut_reductions
from .fused import Fused, fused, whole_rows
from .levels import Level, Sharing

# The architecture whose thread blocks have the least shared memory, for which there is a kernel if
# there is one for any.
LEAST = min(ARCHS.values(), key=lambda arch: (arch.shared_bytes, not arch.has_float8))
STORED_BYTES = 8  # that a product in float32 moves for an element: it is written, and read
# Operations of tensor cores in the time of a byte of memory, where storing is not clearly slower.
# They are half of those that both take as long for: 790 T / 4 T.
FLOPS_PER_BYTE = 100


@dataclass(frozen=True)
class TileKernel:
    """A kernel that goes on with products in registers.

    rest: the traced graph of the row kernel that combines groups of columns; None without one.
    """

    kernel: Fused
    rest: Graph | None


def tile_kernel(level: Level) -> TileKernel | None:
    """The kernel that computes a level without storing its products; None if there is none."""
    placed = run_passes(level.graph)
    kernel, graph, rest = whole_rows(placed, level.products), placed, None
    if kernel is None and any(node.op in REDUCTIONS for node in placed):
        cut = cut_reductions(placed)
        graph = None if cut is None else cut.of_groups
        rest = None if cut is None else cut.of_row
    if kernel is None and graph is not None:
        kernel = fused(graph, level.products, placed.n)
    return None if kernel is None else TileKernel(kernel, rest)


def sharing(apart: list[Level], together: Level) -> Sharing:
    """How kernels of one level, which read some of the same products, are to get these.

    apart: the kernels, each with products of its own. together: all as one kernel.
    """
    try:
        if tile_kernel(together) is not None:
            return Sharing.TOGETHER
        is_one = _is_good_as_one(together)
    except HTileError:  # Rows of several lengths may not fit one kernel.
        is_one = False
    kernels = [tile_kernel(level) for level in apart]
    # Where there is no wgmma, tiles share no rows: then each kernel would store the product.
    is_known = all(each is not None and each.kernel.shares == 1 for each in kernels)
    if is_known and _is_multiplied_fast([each.kernel for each in kernels]):
        return Sharing.APART
    return Sharing.TOGETHER if is_one else Sharing.STORED


def _is_good_as_one(level: Level) -> bool:
    """Whether one row kernel reads each product in few pieces, as which it is as fast as whole.

    Raises HTileErrors where there is no such kernel.
    """
    placed = run_passes(level.graph)
    plans_for(placed, Target(placed.n, LEAST))
    names = [i.name for i in placed.inputs]
    return all(names.count(product.name) <= FEW_PIECES for product in level.products)


def _is_multiplied_fast(kernels: list[Fused]) -> bool:
    """Whether what several kernels multiply again takes clearly less time than to store it.

    Nothing is multiplied again where each has other columns. Rows and columns that may begin
    elsewhere than at a multiple of 16 bytes are no operands: then each would store the product.
    """
    columns: dict[tuple, set[int]] = {}
    again = 0
    for operand, n in ((operand, kernel.n) for kernel in kernels for operand in kernel.operands):
        product, own = operand.product, range(operand.start, operand.start + n)
        if any(at * product.dtype.itemsize % ACCESS_BYTES for at in (operand.start, product.k)):
            return False
        known = columns.setdefault((product.left, product.matrix, product.is_transposed), set())
        again += 2 * product.k * len(known.intersection(own))
        known.update(own)
    stored = STORED_BYTES * sum(map(len, columns.values()))
    return again <= stored * FLOPS_PER_BYTE
