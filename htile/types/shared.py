"""Shared tiles: how a piece of a matrix lies in shared memory, in one or several stages."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Numeric
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from htile.utils import element_bits

# Bytes of a swizzled line, the widest first. A tile takes the widest one that divides its lines.
SWIZZLES = (128, 64, 32)
# Bytes that the start of a tile is aligned to. The swizzle is a function of the address, and its
# pattern of 128 bytes repeats after 8 lines.
ALIGNMENT = 1024
PIECE = 16  # bytes that ldmatrix, cp.async and wgmma move as one, and that a swizzle never splits

_KINDS = {
    ("k", 128): warpgroup.SmemLayoutAtomKind.K_SW128,
    ("k", 64): warpgroup.SmemLayoutAtomKind.K_SW64,
    ("k", 32): warpgroup.SmemLayoutAtomKind.K_SW32,
    ("k", 0): warpgroup.SmemLayoutAtomKind.K_INTER,
    ("mn", 128): warpgroup.SmemLayoutAtomKind.MN_SW128,
    ("mn", 64): warpgroup.SmemLayoutAtomKind.MN_SW64,
    ("mn", 32): warpgroup.SmemLayoutAtomKind.MN_SW32,
    ("mn", 0): warpgroup.SmemLayoutAtomKind.MN_INTER,
}


@dataclass(frozen=True)
class SharedTile:
    """A tile of (rows, K columns) in shared memory, in `stages` copies that are used in turn.

    Its bytes are swizzled, so that eight pieces of 16 bytes below each other lie in different
    banks. The order is that which wgmma, TMA and ldmatrix share, so one tile serves them all.
    Raises ValueError for a shape that does not consist of whole blocks of 8 lines by 16 bytes.

    shape: (rows, columns). The rows count along M or N of a product, the columns along K.
    major: which neighbours are contiguous: "k" for those of a row, "mn" for those of a column.
    """

    dtype: type[Numeric]
    shape: tuple[int, int]
    major: str = "k"
    stages: int = 1

    def __post_init__(self) -> None:
        if self.major not in ("k", "mn"):
            raise ValueError(f'major must be "k" or "mn", got {self.major!r}')
        if self.stages < 1:
            raise ValueError(f"a shared tile needs at least 1 stage, got {self.stages}")
        rows, columns = self.shape
        lines = rows if self.major == "k" else columns
        if min(self.shape) < 1 or lines % 8 or self.line_bytes % PIECE:
            raise ValueError(
                f"a shared tile has a multiple of 8 lines, each of a multiple of {PIECE} bytes; "
                f"{rows}x{columns} elements of {element_bits(self.dtype)} bits that are contiguous "
                f"along {self.major} are {lines} lines of {self.line_bytes} bytes"
            )

    @property
    def line_bytes(self) -> int:
        """Bytes of a line: of a row if K-major, of a column if MN-major."""
        return self.shape[self.major == "k"] * element_bits(self.dtype) // 8

    @property
    def swizzle_bytes(self) -> int:
        """Bytes of a line within which pieces are exchanged: 128, 64, 32, or 0 for none."""
        return next((size for size in SWIZZLES if self.line_bytes % size == 0), 0)

    @property
    def is_swizzled(self) -> bool:
        """Whether the pieces of a line change places. Lines of 16 bytes have only one each."""
        return self.swizzle_bytes > 0

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        rows, columns = self.shape
        return rows * columns * element_bits(self.dtype) // 8

    @property
    def nbytes(self) -> int:
        """Bytes of all stages."""
        return self.stage_bytes * self.stages

    @property
    def layout(self) -> cute.ComposedLayout:
        """The layout over (rows, columns, stages). It is made inside a @cute.jit function.

        Its parts count in different units: `outer` in elements, and the swizzle `inner` in bytes,
        because it belongs to a pointer.
        """
        return self._tiled((*self.shape, self.stages))

    @property
    def stage_layout(self) -> cute.ComposedLayout:
        """The layout of one stage, over (rows, columns)."""
        return self._tiled(self.shape)

    def _tiled(self, shape: tuple[int, ...]) -> cute.ComposedLayout:
        atom = warpgroup.make_smem_layout_atom(_KINDS[self.major, self.swizzle_bytes], self.dtype)
        order = (0, 1, 2) if self.major == "k" else (1, 0, 2)
        return cute.tile_to_shape(atom, shape, order=order[: len(shape)])

    def allocate(self, smem: SmemAllocator) -> cute.Tensor:
        """Allocate the tile. The result is a tensor (rows, columns, stages)."""
        return self.over(smem.allocate(self.nbytes, ALIGNMENT))

    def over(self, start: cute.Pointer) -> cute.Tensor:
        """The tile in shared memory that is there already, aligned to `ALIGNMENT` bytes.

        The swizzle belongs to the pointer of the tensor, and its layout is plain: this is the form
        that MMA descriptors, TMA and ldmatrix accept alike.
        """
        layout = self.layout
        pointer = cute.recast_ptr(start, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)
