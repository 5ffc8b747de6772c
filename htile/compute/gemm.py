"""Products of tiles on tensor cores: which instruction, over which warps, and the verb `gemm`."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Numeric
from cutlass.cute.nvgpu import warp

from htile.types.register import AccumulatorTile, RegTile, WarpLayout

# M, N and K of mma.sync, the instruction of one warp: the base tile of TileFusion (docs/tiles.md).
WARP_MMA = (16, 8, 16)


def tiled_mma(dtype: type[Numeric], warps: WarpLayout) -> cute.TiledMma:
    """The product of 16-bit operands with float32 sums by mma.sync, on sm_80 and newer.

    Each warp takes two neighbouring base tiles along N at a time, because ldmatrix reads the right
    operand of two at once. Warps of a row take turns of 8 columns all the same.
    """
    if dtype not in (BFloat16, Float16):
        raise ValueError(f"mma.sync takes BFloat16 or Float16 operands here, not {dtype}")
    m, n, k = WARP_MMA
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, WARP_MMA),
        (warps.rows, warps.columns, 1),
        permutation_mnk=(m * warps.rows, 2 * n * warps.columns, k),
    )


def gemm(
    mma: cute.TiledMma, a: RegTile | cute.Tensor, b: RegTile | cute.Tensor,
    acc: AccumulatorTile | cute.Tensor,
) -> None:  # fmt: skip
    """acc += a b^T over the whole K of two operands in registers, base tile by base tile."""
    a, b, acc = (each.fragment if isinstance(each, RegTile) else each for each in (a, b, acc))
    cute.gemm(mma, acc, a, b, acc)
