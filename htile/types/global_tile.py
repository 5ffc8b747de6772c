"""Tiles of a matrix in global memory, which know where the matrix ends, and their iterator."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from htile.utils import Static


class GlobalTile(Static):
    """The tile of `shape` at block `at` of a matrix (rows, columns), which it may stick out of.

    tensor: the elements of the tile. What is beyond the matrix may not be touched.
    coords: the row and the column in the matrix of each of them. Partitions of both by the same
        map belong together, so every loader and storer can ask `contains`.
    """

    def __init__(
        self, matrix: cute.Tensor, shape: tuple[int, int], at: tuple[int | Int32, int | Int32]
    ):
        self.matrix_shape = matrix.shape
        self.tensor = cute.local_tile(matrix, shape, at)
        self.coords = cute.local_tile(cute.make_identity_tensor(matrix.shape), shape, at)

    def contains(self, coord: tuple) -> Boolean:
        """Whether an element with this coordinate is in the matrix."""
        return cute.elem_less(coord, self.matrix_shape)


class TileIterator(Static):
    """The tiles along K of one block of rows of a matrix (rows, K), by index.

    An index beyond the last tile is allowed: its tile has no element in the matrix.
    """

    def __init__(self, matrix: cute.Tensor, shape: tuple[int, int], block: int | Int32):
        self.matrix, self.shape, self.block = matrix, shape, block

    @property
    def count(self) -> int | Int32:
        """How many tiles cover K."""
        return cute.ceil_div(self.matrix.shape[1], self.shape[1])

    def __getitem__(self, k: int | Int32) -> GlobalTile:
        return GlobalTile(self.matrix, self.shape, (self.block, k))
