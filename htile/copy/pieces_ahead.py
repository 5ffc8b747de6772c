"""A shifted row on its way through shared memory: its pieces come ahead, vectors are read later."""

from __future__ import annotations

import cutlass.cute as cute

from htile.copy.shifted import Pieces, batches, one_vector, shift_out
from htile.copy.tile import RowTile
from htile.copy.vector import vector_copy
from htile.utils import WARP, Static, as_bytes

TO_VECTORS = 5  # So many vectors of a thread are shifted out of their pieces at a time.


class PiecesAhead(Static):
    """This thread's pieces of a row in shared memory. `copy` brings them, and `vectors` reads them.

    Each thread copies the first piece of each of its vectors. The second piece of a vector is what
    the next thread copies. The last thread of a share has no next one, so it copies one piece more.
    All threads of the share have to wait for each other between `copy` and `vectors`.

    ctx: the context of the row. mX: rows (M, N).
    tile: (rows, elements) of shared memory. A row has a piece more than its threads have vectors.
    """

    def __init__(self, ctx: RowTile, mX: cute.Tensor, tile: cute.Tensor):
        self.ctx, self.pieces, self.dtype = ctx, Pieces(ctx, mX), mX.element_type
        self.count = cute.size(ctx.tXcX, mode=[2])
        each, vec_size, tile = ctx.config.threads_per_row, ctx.vec_size, as_bytes(tile)
        self.is_last = ctx.tidx % each == each - 1
        row, column = ctx.tidx // each, ctx.tidx % each * vec_size
        layout = cute.make_layout((vec_size, self.count, 2), stride=(1, each * vec_size, vec_size))
        place = cute.assume(cute.crd2idx((row, column), tile.layout), divby=vec_size)
        self.places = cute.make_tensor(tile.iterator + place, layout)

    def copy(self) -> None:
        """Issue the copies (cp.async) of the row, if there is such a row."""
        if self.ctx.row_in_bounds is True:
            self._copy()
        else:
            self._copy_if_there()

    @cute.jit
    def _copy_if_there(self):
        if self.ctx.row_in_bounds:
            self._copy()

    def _copy(self) -> None:
        for k in range(self.count):
            self._copy_piece(k, 0)
        self._copy_one_more()

    @cute.jit
    def _copy_one_more(self):
        if self.is_last:
            self._copy_piece(self.count - 1, 1)

    def _copy_piece(self, k: int, beyond: int) -> None:
        """Issue the copy of the first piece of a vector, or of its second one."""
        vec_size = self.ctx.vec_size
        source = self.pieces.of_vector(self.ctx, k, beyond)
        target = cute.make_tensor(self.places[None, k, beyond].iterator, one_vector(vec_size))
        vector_copy(source, target, is_async=True, num_copy_elems=vec_size)

    def vectors(self) -> cute.Tensor:
        """A fragment of the row, shifted out of the pieces. What is not in it is any number."""
        ctx, start = self.ctx, self.pieces.start
        fragment = cute.make_rmem_tensor(ctx.vector_shape, self.dtype)
        target = as_bytes(fragment)
        is_warp = ctx.config.threads_per_row >= WARP
        for first, size in batches(self.count, TO_VECTORS):
            low, high, vectors = (start.fragment(size) for _ in range(3))
            for k in range(size):
                for beyond, part in enumerate((low, high)):
                    place = self.places[None, first + k, beyond]
                    cute.autovec_copy(place, part[(None, 0), 0, k])
            shift_out(low, high, self.pieces.shift, vectors, is_warp)
            for k in range(size):
                cute.autovec_copy(vectors[(None, 0), 0, k], target[(None, 0), 0, first + k])
        return fragment
