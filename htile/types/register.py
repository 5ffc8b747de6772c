"""Register tiles: named views of the fragments that a thread holds, and who holds which element."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from htile.utils import WARP, Static


class RegTile(Static):
    """A register fragment of `shape` and `dtype`. Its elements are not initialised."""

    def __init__(self, shape: tuple, dtype: type[Numeric]):
        self.fragment = cute.make_rmem_tensor(shape, dtype)

    @property
    def shape(self) -> tuple:
        """The shape of the fragment."""
        return self.fragment.shape

    @property
    def dtype(self) -> type[Numeric]:
        """The element type of the fragment."""
        return self.fragment.element_type

    def load(self) -> cute.TensorSSA:
        """The values as one vector of the fragment's shape."""
        return self.fragment.load()

    def store(self, values: cute.TensorSSA) -> None:
        """Set the values from a vector of the same shape and dtype."""
        self.fragment.store(values)

    def fill(self, value: Numeric | float) -> None:
        """Set every element to `value`."""
        self.fragment.fill(value)

    def block(self, k: int) -> cute.Tensor:
        """The part of an operand of a product, (values, rows, K), that is block `k` along K."""
        return self.fragment[None, None, k]


class VectorRegTile(RegTile):
    """The fragment of one thread in a row tile, of shape ((vec_size, 1), 1, num_vectors)."""

    def __init__(self, vec_size: int, num_vectors: int, dtype: type[Numeric]):
        super().__init__(((vec_size, 1), 1, num_vectors), dtype)

    @property
    def vec_size(self) -> int:
        """How many neighbouring elements a vector has."""
        return self.shape[0][0]

    @property
    def num_vectors(self) -> int:
        """How many vectors the thread has along the row."""
        return self.shape[2]


@dataclass(frozen=True)
class WarpLayout:
    """How the warps that share a product are laid over it, the first ones below each other.

    rows, columns: how many warps there are along M and along N. All warps of a row read the same
        part of the left operand, and all warps of a column the same part of the right one.
    """

    rows: int
    columns: int

    @property
    def num_threads(self) -> int:
        """How many threads the warps have."""
        return WARP * self.rows * self.columns


@dataclass(frozen=True)
class AccumulatorMap:
    """Which elements of a tile (M, N) of sums a thread holds, and in which registers.

    A thread has `num_rows` rows of the tile and `num_columns` elements of each, in pairs of
    neighbours; the four lanes of a quad share a row. Warps take turns along M in blocks of 16 rows
    and along N in blocks of 8 columns.

    warps: where the warps are. The four of a warpgroup lie below each other.
    wgmma: whether the registers are in the order of m64nNk16, where the columns of a block of rows
        follow each other, or in that of m16n8k16, where the blocks do.
    """

    shape: tuple[int, int]
    warps: WarpLayout
    wgmma: bool = False

    def __post_init__(self) -> None:
        rows, columns = 16 * self.warps.rows, 8 * self.warps.columns
        if self.shape[0] % rows or self.shape[1] % columns:
            raise ValueError(
                f"{self.warps.rows}x{self.warps.columns} warps hold a multiple of {rows}x{columns} "
                f"sums, not {self.shape[0]}x{self.shape[1]}"
            )
        if self.wgmma and (self.warps.rows % 4 or self.warps.columns != 1):
            raise ValueError(
                f"a warpgroup is 4 warps below each other: {self.warps.rows}x{self.warps.columns} "
                "warps are none"
            )

    @property
    def num_blocks(self) -> int:
        """How many blocks of 16 rows a warp has."""
        return self.shape[0] // (16 * self.warps.rows)

    @property
    def num_rows(self) -> int:
        """How many rows of the tile a thread has a part of: two of each block."""
        return 2 * self.num_blocks

    @property
    def num_columns(self) -> int:
        """How many elements of each of its rows a thread has: two of every 8."""
        return self.shape[1] // (4 * self.warps.columns)

    @property
    def num_registers(self) -> int:
        """How many sums a thread holds."""
        return self.num_rows * self.num_columns

    def row(self, thread: int | Int32, i: int) -> int | Int32:
        """The row of the tile that a thread's row `i` is."""
        warp = thread // WARP % self.warps.rows
        block = i // 2 * self.warps.rows + warp
        return 16 * block + i % 2 * 8 + thread % WARP // 4

    def column(self, thread: int | Int32, j: int) -> int | Int32:
        """The column of the tile of a thread's element `j`, which is the same for all its rows."""
        warp = thread // WARP // self.warps.rows
        return 8 * (j // 2 * self.warps.columns + warp) + thread % 4 * 2 + j % 2

    def register(self, i: int, j: int) -> int:
        """The register with element `j` of row `i`."""
        block, pair = i // 2, j // 2
        if self.wgmma:
            unit = block * (self.num_columns // 2) + pair
        else:
            unit = pair * self.num_blocks + block
        return 4 * unit + i % 2 * 2 + j % 2


class AccumulatorTile(RegTile):
    """The float32 sums of a tile of a product, as one thread holds them."""

    def __init__(self, mma: cute.TiledMma, places: AccumulatorMap):
        """mma: a product of `htile.compute.gemm`. places: the map that belongs to it."""
        super().__init__(mma.partition_shape_C(places.shape), Float32)
        self.mma, self.places = mma, places

    def of_columns(self, first: int, count: int) -> cute.Tensor:
        """The sums of `count` columns of the tile, from column `first` on, for `gemm`.

        Both are multiples of the columns that the product takes at a time, which is mma.sync.
        """
        shape = self.mma.partition_shape_C((self.places.shape[0], count))
        start = self.places.register(0, first * self.places.num_columns // self.places.shape[1])
        return cute.make_tensor(self.fragment.iterator + start, cute.make_layout(shape))

    def load_row(self, i: int, first: int = 0, count: int | None = None) -> cute.TensorSSA:
        """`count` elements of the thread's row `i`, from its element `first` on, as a vector."""
        row = self._row(i, first, self.places.num_columns if count is None else count)
        return row.load().reshape((cute.size(row),))

    def store_row(self, i: int, values: cute.TensorSSA, first: int = 0) -> None:
        """Set elements of the thread's row `i`, from its element `first` on."""
        row = self._row(i, first, cute.size(values.shape))
        row.store(values.reshape(row.shape))

    def as_operand(self, dtype: type[Numeric]) -> cute.Tensor:
        """The sums, rounded to `dtype`, as the left operand of a further product over N.

        Two neighbouring blocks of 8 columns are the 16 columns that m16n8k16 takes at a time, and
        their registers are in its order: nothing moves between threads. A warp must have all
        columns of its rows.

        Raises ValueError where the columns are spread over several warps, or are no multiple of 16.
        """
        places = self.places
        if places.warps.columns != 1 or places.shape[1] % 16:
            raise ValueError(
                "a further product takes a multiple of 16 columns, all of them in one warp; "
                f"{places.shape[1]} columns are in {places.warps.columns}"
            )
        rounded = cute.make_rmem_tensor(self.fragment.layout, dtype)
        rounded.store(self.load().to(dtype))
        block, pair = places.register(2, 0), places.register(0, 2)
        shape = (2, 2, 2), places.num_blocks, places.shape[1] // 16
        layout = cute.make_layout(shape, stride=((1, 2, pair), block, 2 * pair))
        return cute.make_tensor(rounded.iterator, layout)

    def _row(self, i: int, first: int, count: int) -> cute.Tensor:
        """A view (2, pairs) of `count` elements of a row. Pairs are not divided."""
        layout = cute.make_layout((2, count // 2), stride=(1, self.places.register(0, 2)))
        return cute.make_tensor(self.fragment.iterator + self.places.register(i, first), layout)
