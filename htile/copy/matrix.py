"""How tiles of a matrix move between all three memories, on sm_80 and newer.

Each loader and each storer infers its copy plan, which says what each thread copies, from the tiles
and from the product whose operand or sums they are. Between global and shared memory, neighbouring
threads copy neighbouring pieces of a line. Registers are filled as the tensor cores want them.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Numeric, const_expr
from cutlass.cute.nvgpu import warp

from htile.copy.vector import copy_atom
from htile.types.global_tile import GlobalTile
from htile.types.register import AccumulatorTile, RegTile
from htile.types.shared import PIECE, SharedTile
from htile.utils import Static, element_bits

# Matrices of 8x8 that one ldmatrix or stmatrix moves: 16 rows of 16 columns.
MATRICES = 4


def piece_elements(dtype: type[Numeric], copy_bytes: int = PIECE) -> int:
    """How many elements a copy of so many bytes has."""
    return copy_bytes * 8 // element_bits(dtype)


def check_alignment(name: str, major: str, align: int) -> None:
    """Raise ValueError unless cp.async or TMA can copy a matrix in pieces of 16 bytes.

    align: bytes that the start, the length and the distance of its lines are multiples of.
    """
    if align % PIECE:
        line = "rows" if major == "k" else "columns"
        raise ValueError(
            f"{name} is copied in pieces of {PIECE} bytes, but its {line} start or end at "
            f"multiples of {align} bytes only: pad them, or copy it to aligned memory"
        )


def line_copy(
    tile: SharedTile, num_threads: int, copy_bytes: int = PIECE, is_async: bool = False
) -> cute.TiledCopy:
    """The plan of a copy between global memory and a shared tile.

    Neighbouring threads take the pieces of a swizzled line, so that a warp touches whole lines.

    Raises ValueError where the lines of the tile cannot be dealt to the threads evenly.
    """
    elements = piece_elements(tile.dtype, copy_bytes)
    pieces = max(tile.swizzle_bytes, PIECE) // copy_bytes
    lines = tile.shape[0] if tile.major == "k" else tile.shape[1]
    if num_threads % pieces or lines % (num_threads // pieces):
        raise ValueError(
            f"{num_threads} threads, {pieces} on a line, do not copy {lines} lines evenly: "
            f"they copy {num_threads // pieces} at a time"
        )
    threads, values = (num_threads // pieces, pieces), (1, elements)
    order = (1, 0)
    if tile.major == "mn":
        threads, values, order = threads[::-1], values[::-1], (0, 1)
    return cute.make_tiled_copy_tv(
        copy_atom(tile.dtype, 8 * copy_bytes, is_async),
        cute.make_ordered_layout(threads, order=order),
        cute.make_ordered_layout(values, order=order),
    )


def _inside(tile: GlobalTile, coords: cute.Tensor) -> cute.Tensor:
    """One Boolean for each piece of a partition of coordinates ((V, R), M, K): (R, M, K).

    A piece is in the matrix where its first element is, because pieces do not straddle its end.
    """
    shape = tuple(cute.size(coords, mode=mode) for mode in ([0, 1], [1], [2]))
    inside = cute.make_rmem_tensor(shape, Boolean)
    for r in range(shape[0]):
        for m in range(shape[1]):
            for k in range(shape[2]):
                inside[r, m, k] = tile.contains(coords[(0, r), m, k])
    return inside


class GlobalToSharedLoader(Static):
    """Copies tiles of a matrix to the stages of a shared tile by cp.async, and zeros beyond it.

    K is a multiple of 16 bytes if the operand is K-major, and so are the rows if it is MN-major;
    `check_alignment` says so to the caller of a kernel.
    """

    def __init__(self, tile: SharedTile, sX: cute.Tensor, num_threads: int, thread: Int32):
        """tile, sX: the shared tile and its tensor (rows, columns, stages)."""
        self.copy = line_copy(tile, num_threads, is_async=True).get_slice(thread)
        self.atom = copy_atom(tile.dtype, 8 * PIECE, is_async=True)
        self.tXsX = self.copy.partition_D(sX)

    def load(self, tile: GlobalTile, stage: int | Int32) -> None:
        """Issue the copies of a tile to a stage. A commit and a wait must follow."""
        inside = _inside(tile, self.copy.partition_S(tile.coords))
        source = self.copy.partition_S(tile.tensor)
        cute.copy(self.atom, source, self.tXsX[None, None, None, stage], pred=inside)


class SharedToRegLoader(Static):
    """Reads the operand of a product from a shared tile by ldmatrix, transposed if MN-major."""

    def __init__(
        self, tile: SharedTile, sX: cute.Tensor, mma: cute.TiledMma, operand: str, thread: Int32
    ):
        """operand: "a" for the left operand of the product, or "b" for the right one."""
        is_left = _is_left(operand)
        op = warp.LdMatrix8x8x16bOp(tile.major == "mn", MATRICES)
        self.atom = cute.make_copy_atom(op, tile.dtype)
        make = cute.make_tiled_copy_A if const_expr(is_left) else cute.make_tiled_copy_B
        self.copy = make(self.atom, mma).get_slice(thread)
        self.tXsX = self.copy.partition_S(sX)
        shape = mma.partition_shape_A if const_expr(is_left) else mma.partition_shape_B
        self.shape, self.dtype = shape(tile.shape), tile.dtype

    @property
    def blocks(self) -> int:
        """How many blocks of 16 columns along K the tile has."""
        return self.shape[2]

    def make_tile(self) -> RegTile:
        """Registers for the operand's whole K of a stage."""
        return RegTile(self.shape, self.dtype)

    def load(self, stage: int | Int32, block: int, tile: RegTile) -> None:
        """Read one block of 16 columns along K of a stage into its place in the register tile."""
        source = self.tXsX[None, None, block, stage]
        cute.copy(self.atom, source, self.copy.retile(tile.fragment)[None, None, block])


class GlobalToRegLoader(Static):
    """Reads the operand of a product from global memory to registers, with zeros beyond its end.

    Each thread reads what the tensor core wants of it: pairs along K, which are one access if they
    are neighbours and aligned.
    """

    def __init__(self, mma: cute.TiledMma, operand: str, thread: Int32, is_paired: bool):
        """is_paired: whether all pairs along K, which then is even, are aligned neighbours."""
        self.mma, self.is_left, self.is_paired = mma, _is_left(operand), is_paired
        self.slice = mma.get_slice(thread)

    def make_tile(self, dtype: type[Numeric], shape: tuple[int, int]) -> RegTile:
        """Registers for an operand's tile (rows, K)."""
        of = self.mma.partition_shape_A if self.is_left else self.mma.partition_shape_B
        return RegTile(of(shape), dtype)

    def load(self, source: GlobalTile, tile: RegTile) -> None:
        """Read a tile. The zeros beyond its end add nothing to a product."""
        partition = self.slice.partition_A if self.is_left else self.slice.partition_B
        tile.fill(0)
        size = 2 if self.is_paired else 1
        coords = partition(source.coords)
        _copy_elements(source, coords, partition(source.tensor), tile.fragment, size)


class RegToGlobalStorer(Static):
    """Writes the sums of a product from registers to global memory, those within the matrix.

    Each thread writes what it holds: pairs along N, which are one access if they are aligned.
    """

    def __init__(self, mma: cute.TiledMma, thread: Int32, is_paired: bool):
        """is_paired: whether all pairs along N, which then is even, are aligned neighbours."""
        self.slice, self.is_paired = mma.get_slice(thread), is_paired

    def store(self, acc: AccumulatorTile, out: GlobalTile) -> None:
        """Round the sums to the dtype of the matrix, and write them."""
        dtype = out.tensor.element_type
        rounded = cute.make_rmem_tensor(acc.fragment.layout, dtype)
        rounded.store(acc.load().to(dtype))
        size = 2 if self.is_paired else 1
        coords = self.slice.partition_C(out.coords)
        _copy_elements(out, coords, rounded, self.slice.partition_C(out.tensor), size)


class RegToSharedStorer(Static):
    """Writes the sums of a product from registers to a shared tile, rounded to its dtype.

    That is stmatrix where the architecture has it (sm_90 and newer), or else pairs of elements.

    Raises ValueError for a tile that is not K-major: the sums of a row are neighbours.
    """

    def __init__(
        self, tile: SharedTile, sX: cute.Tensor, mma: cute.TiledMma, thread: Int32,
        has_stmatrix: bool,
    ):  # fmt: skip
        if tile.major != "k":
            raise ValueError(f'sums are stored to tiles with major "k", not {tile.major!r}')
        self.dtype = tile.dtype
        if const_expr(has_stmatrix and tile.dtype.width == 16):
            op = warp.StMatrix8x8x16bOp(False, MATRICES)
            self.atom = cute.make_copy_atom(op, tile.dtype)
        else:
            self.atom = copy_atom(tile.dtype, 2 * tile.dtype.width)
        self.copy = cute.make_tiled_copy_C(self.atom, mma).get_slice(thread)
        self.tXsX = self.copy.partition_D(sX)

    def store(self, acc: AccumulatorTile, stage: int | Int32 = 0) -> None:
        """Round the sums, and write them to a stage. A barrier must follow."""
        rounded = cute.make_rmem_tensor(acc.fragment.layout, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        target = self.tXsX[None, None, None, stage]
        cute.copy(self.atom, self.copy.retile(rounded), target)


class SharedToGlobalStorer(Static):
    """Writes the stages of a shared tile to global memory, as far as they are within the matrix."""

    def __init__(
        self, tile: SharedTile, sX: cute.Tensor, num_threads: int, thread: Int32,
        copy_bytes: int = PIECE,
    ):  # fmt: skip
        """copy_bytes: what all lines of the matrix start and end at multiples of, at most 16."""
        self.copy = line_copy(tile, num_threads, copy_bytes).get_slice(thread)
        self.atom = copy_atom(tile.dtype, 8 * copy_bytes)
        self.tXsX = self.copy.partition_S(sX)

    def store(self, out: GlobalTile, stage: int | Int32 = 0) -> None:
        """Write one stage. A barrier must have made it visible to all threads."""
        source = self.tXsX[None, None, None, stage]
        inside = _inside(out, self.copy.partition_D(out.coords))
        pieces = cute.make_rmem_tensor_like(source)
        cute.autovec_copy(source, pieces)
        cute.copy(self.atom, pieces, self.copy.partition_D(out.tensor), pred=inside)


def _is_left(operand: str) -> bool:
    """Whether an operand is the left one. Raises ValueError where it is neither."""
    if operand not in ("a", "b"):
        raise ValueError(f'operand must be "a" or "b", got {operand!r}')
    return operand == "a"


def _copy_elements(
    tile: GlobalTile, coords: cute.Tensor, source: cute.Tensor, target: cute.Tensor, size: int
) -> None:
    """Copy a partition, `size` neighbours at once, where its coordinates are in the matrix."""
    source, target, coords = (_in_groups(each, size) for each in (source, target, coords))
    count = cute.size(coords, mode=[1])
    inside = cute.make_rmem_tensor((1, count), Boolean)
    for i in range(count):
        inside[0, i] = tile.contains(coords[(0, 0), i])
    atom = copy_atom(source.element_type, size * source.element_type.width)
    cute.copy(atom, source, target, pred=inside)


def _in_groups(tensor: cute.Tensor, size: int) -> cute.Tensor:
    """View a partition, whose first mode is of 2 elements, as ((size, 1), the number of groups)."""
    flat = cute.flatten(tensor)
    if size == 1:
        flat = cute.make_tensor(flat.iterator, cute.prepend(flat.layout, cute.make_layout(1)))
    flat = cute.group_modes(flat, 1, cute.rank(flat))
    layout = cute.make_layout(
        ((size, 1), flat.shape[1]), stride=((flat.stride[0], 0), flat.stride[1])
    )
    return cute.make_tensor(flat.iterator, layout)
