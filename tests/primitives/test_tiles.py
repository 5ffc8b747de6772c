"""Tiles in shared memory and in registers: their layouts, against what CuTe says of them."""

import cutlass.cute as cute
import pytest
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from htile.types.shared import SharedTile
from htile.utils import make_fake_tensor
from tests.primitives.device_code import ARCHS, compile_for


def traced(body, arch="sm_90a"):
    """What `body` returns when it is called inside a kernel."""
    found = []

    @cute.kernel
    def kernel(mO: cute.Tensor):
        found.append(body())

    @cute.jit
    def host(mO: cute.Tensor, stream):
        kernel(mO).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    compile_for(host, make_fake_tensor(Float32, (1,)), arch=arch)
    return found[0]


def place(tile, layout, coord):
    """The byte at which an element lies.

    The plain layout counts elements, and the swizzle works on bytes. That of 2**b pieces adds,
    without carry, b bits of the number of the 128 bytes to the number of the piece of 16 bytes.
    """
    byte = layout.outer(coord) * tile.dtype.width // 8
    mask = max(tile.swizzle_bytes // 16, 1) - 1
    assert str(layout.inner) == f"S<{mask.bit_length()},4,3>"
    return byte ^ (byte >> 3 & mask << 4)


# dtype, shape, major, bytes of a swizzled line
TILES = [
    (BFloat16, (128, 64), "k", 128),
    (BFloat16, (64, 256), "k", 128),
    (Float16, (16, 32), "k", 64),
    (BFloat16, (8, 48), "k", 32),
    (BFloat16, (64, 8), "k", 0),
    (BFloat16, (16, 24), "k", 0),
    (Float32, (64, 32), "k", 128),
    (Float8E4M3FN, (128, 64), "k", 64),
    (BFloat16, (128, 64), "mn", 128),
    (Float16, (96, 64), "mn", 64),
    (BFloat16, (16, 8), "mn", 32),
    (BFloat16, (8, 16), "mn", 0),
]


@pytest.mark.parametrize(("dtype", "shape", "major", "swizzle"), TILES)
def test_swizzle(dtype, shape, major, swizzle):
    """It is what CuTe's own choice for wgmma is, and the tile covers its bytes without a gap."""
    tile = SharedTile(dtype, shape, major, stages=3)
    assert tile.swizzle_bytes == swizzle
    assert tile.is_swizzled == (swizzle > 0)
    assert tile.nbytes == 3 * shape[0] * shape[1] * dtype.width // 8 == 3 * tile.stage_bytes
    order = LayoutEnum.ROW_MAJOR if major == "k" else LayoutEnum.COL_MAJOR

    def body():
        layout = tile.layout
        line = shape[1] if major == "k" else shape[0]
        kind = hopper_helpers.get_smem_layout_atom(order, dtype, line)
        theirs = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind, dtype),
            (*shape, 3),
            order=(0, 1, 2) if major == "k" else (1, 0, 2),
        )
        places = {place(tile, layout, (r, c, 2)) for r in range(shape[0]) for c in range(shape[1])}
        return str(layout), str(theirs), places

    mine, theirs, places = traced(body)
    assert mine == theirs
    assert places == set(range(2 * tile.stage_bytes, tile.nbytes, dtype.width // 8))


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("line", [16, 32, 64])
def test_eight_pieces_that_ldmatrix_reads_are_in_all_banks(line, major):
    """8 pieces of 16 bytes, one in each of 8 lines, are in the 8 places of 128 bytes."""
    shape = (64, line) if major == "k" else (line, 64)
    tile = SharedTile(BFloat16, shape, major)

    def body():
        layout = tile.layout
        found = []
        for first in range(0, 64, 8):
            for piece in range(0, line, 8):
                at = [(first + i, piece) for i in range(8)]
                at = at if major == "k" else [(c, r) for r, c in at]
                found.append(sorted(place(tile, layout, (*each, 0)) // 16 % 8 for each in at))
        return found

    assert all(found == list(range(8)) for found in traced(body))


@pytest.mark.parametrize("arch", ARCHS)
def test_allocated(arch):
    def body():
        smem = SmemAllocator()
        smem.allocate_array(Float32, 3)
        tensor = SharedTile(BFloat16, (128, 64), "k", 4).allocate(smem)
        return tensor.shape, str(tensor.iterator.type), tensor.iterator.alignment

    shape, pointer, alignment = traced(body, arch)
    assert [cute_size(s) for s in shape] == [128, 64, 4]
    assert "S<3,4,3>" in pointer and alignment == 1024


def cute_size(shape):
    """The product of a nested tuple of numbers."""
    if isinstance(shape, int):
        return shape
    size = 1
    for part in shape:
        size *= cute_size(part)
    return size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BFloat16, (128, 64), "m"), 'major must be "k" or "mn", got \'m\''),
        ((BFloat16, (128, 64), "k", 0), "at least 1 stage, got 0"),
        ((BFloat16, (12, 64)), "12x64 elements of 16 bits .* are 12 lines of 128 bytes"),
        ((BFloat16, (16, 12)), "16x12 elements of 16 bits .* along k are 16 lines of 24 bytes"),
        ((BFloat16, (12, 64), "mn"), "along mn are 64 lines of 24 bytes"),
        ((BFloat16, (0, 64)), "0x64 elements"),
    ],
)
def test_shared_tiles_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        SharedTile(*arguments)
