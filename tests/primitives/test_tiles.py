"""Tiles in shared memory and in registers: their layouts, against what CuTe says of them."""

import itertools
import math

import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from htile.compute.gemm import tiled_mma
from htile.compute.operands import make_vector
from htile.copy.matrix import (
    GlobalToRegLoader,
    RegToGlobalStorer,
    RegToSharedStorer,
    SharedToRegLoader,
    check_alignment,
    line_copy,
)
from htile.types.global_tile import GlobalTile, TileIterator
from htile.types.register import AccumulatorMap, AccumulatorTile, WarpLayout
from htile.types.shared import SharedTile
from htile.utils import make_fake_tensor
from tests.primitives.device_code import ARCHS, compile_for
from tests.primitives.ptx_device import launch


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
    (BFloat16, (32, 128), "k", 128),
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
    assert [size_of(mode) for mode in shape] == [128, 64, 4]
    assert "S<3,4,3>" in pointer and alignment == 1024


def size_of(mode):
    """The product of the numbers of a mode, which may be nested."""
    return mode if isinstance(mode, int) else math.prod(map(size_of, mode))


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


# ---- which thread holds which sum ----------------------------------------------------------------

MAPS = [
    AccumulatorMap((64, 64), WarpLayout(2, 2)),
    AccumulatorMap((64, 96), WarpLayout(2, 2)),
    AccumulatorMap((128, 48), WarpLayout(4, 1)),
    AccumulatorMap((16, 128), WarpLayout(1, 4)),
    AccumulatorMap((64, 8), WarpLayout(4, 1), wgmma=True),
    AccumulatorMap((128, 24), WarpLayout(4, 1), wgmma=True),
    AccumulatorMap((256, 8), WarpLayout(8, 1), wgmma=True),
]


def mma_of(places):
    """The product of CuTe that a map belongs to."""
    if not places.wgmma:
        return tiled_mma(BFloat16, places.warps)
    groups, k = (places.warps.rows // 4, 1, 1), OperandMajorMode.K
    tile = 64, places.shape[1]
    return hopper_helpers.make_trivial_tiled_mma(BFloat16, BFloat16, k, k, Float32, groups, tile)


@pytest.mark.parametrize("places", MAPS, ids=str)
def test_accumulator_map(places):
    """Every register of every lane, against the partition of coordinates that CuTe makes."""

    def body():
        mma, found = mma_of(places), {}
        coords = cute.make_identity_tensor(places.shape)
        fragment = cute.make_rmem_tensor(mma.partition_shape_C(places.shape), Float32).layout
        for thread in range(places.warps.num_threads):
            part = mma.get_slice(thread).partition_C(coords)
            for i in range(cute.size(part)):
                found[thread, fragment(cute.make_identity_layout(fragment.shape)(i))] = part[i]
        return found

    found = traced(body)
    assert len(found) == math.prod(places.shape)
    for thread in range(places.warps.num_threads):
        for i in range(places.num_rows):
            for j in range(places.num_columns):
                place = places.row(thread, i), places.column(thread, j)
                assert found[thread, places.register(i, j)] == place
    assert len(set(found.values())) == len(found), "each sum is held once"


def test_the_operand_of_a_further_product_is_as_the_sums_lie():
    """Each element of the left operand is where `as_operand` finds it, in the same thread."""
    places = AccumulatorMap((64, 48), WarpLayout(2, 1))

    def body():
        mma, found = tiled_mma(BFloat16, places.warps), []
        acc = AccumulatorTile(mma, places)
        acc.fill(0)
        layout = acc.as_operand(BFloat16).layout
        coords = cute.make_identity_tensor(places.shape)
        wanted = cute.make_rmem_tensor(mma.partition_shape_A(places.shape), BFloat16)
        assert str(layout.shape) == str(wanted.shape)
        for thread in range(places.warps.num_threads):
            part = mma.get_slice(thread).partition_A(coords)
            found += [(thread, layout(part_coord), part[part_coord])
                      for part_coord in nested_coords(layout.shape)]  # fmt: skip
        return found

    held = {
        (thread, places.register(i, j)): (places.row(thread, i), places.column(thread, j))
        for thread in range(places.warps.num_threads)
        for i in range(places.num_rows)
        for j in range(places.num_columns)
    }
    found = traced(body)
    assert len(found) == len(held)
    assert all(held[thread, register] == place for thread, register, place in found)


def nested_coords(shape):
    """All coordinates of a nested shape."""
    if isinstance(shape, int):
        return range(shape)
    found = [()]
    for mode in shape:
        found = [(*before, each) for before in found for each in nested_coords(mode)]
    return found


@pytest.mark.parametrize("places", [p for p in MAPS if not p.wgmma], ids=str)
def test_rows_of_sums(places):
    """A kernel sets every sum to its row and its column, by the map, and they are stored there."""
    rows, columns = places.shape

    @cute.kernel
    def kernel(mO: cute.Tensor, mma: cute.TiledMma):
        thread, _, _ = cute.arch.thread_idx()
        acc = AccumulatorTile(mma, places)
        for i in range(places.num_rows):
            for j in range(0, places.num_columns, 2):
                numbers = [1000 * places.row(thread, i) + places.column(thread, j + c)
                           for c in range(2)]  # fmt: skip
                acc.store_row(i, make_vector(numbers, (2,), Int32).to(Float32), first=j)
            acc.store_row(i, acc.load_row(i) + 0.5)
        RegToGlobalStorer(mma, thread, True).store(acc, GlobalTile(mO, places.shape, (0, 0)))

    @cute.jit
    def host(mO: cute.Tensor, stream):
        block = [places.warps.num_threads, 1, 1]
        mma = tiled_mma(BFloat16, places.warps)
        kernel(mO, mma).launch(grid=[1, 1, 1], block=block, stream=stream)

    shape = cute.sym_int(), cute.sym_int()
    compiled = compile_for(host, make_fake_tensor(Float32, shape, 2), arch="sm_80")
    out = torch.full((rows - 3, columns - 2), torch.nan)  # the tile sticks out
    launch(compiled.__ptx__, (1, 1), [out])
    numbers = 1000 * torch.arange(rows - 3)[:, None] + torch.arange(columns - 2)
    assert out.equal(numbers + 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AccumulatorMap((64, 64), WarpLayout(8, 1)), "8x1 warps hold a multiple of 128x8"),
        (lambda: AccumulatorMap((64, 20), WarpLayout(1, 1)), "multiple of 16x8 sums, not 64x20"),
        (lambda: AccumulatorMap((64, 64), WarpLayout(2, 1), True), "2x1 warps are none"),
        (lambda: AccumulatorMap((64, 64), WarpLayout(4, 2), True), "4x2 warps are none"),
    ],
)
def test_maps_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- copy plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_bytes", [16, 4])
@pytest.mark.parametrize(("dtype", "shape", "major", "swizzle"), TILES)
def test_a_copy_deals_every_element_once(dtype, shape, major, swizzle, copy_bytes):
    """And the pieces of a line go to neighbouring threads."""
    tile, width = SharedTile(dtype, shape, major), copy_bytes * 8 // dtype.width

    def body():
        coords, found = cute.make_identity_tensor(shape), []
        for thread in range(32):
            part = line_copy(tile, 32, copy_bytes).get_slice(thread).partition_S(coords)
            found.append([part[i] for i in range(cute.size(part))])
        return found

    lines = shape[0] if major == "k" else shape[1]
    pieces = max(swizzle, 16) // copy_bytes
    if 32 % pieces or lines % (32 // pieces):
        message = f"32 threads, {pieces} on a line, do not copy {lines} lines evenly"
        with pytest.raises(ValueError, match=message):
            traced(body)
        return
    found = traced(body)
    assert sorted(itertools.chain(*found)) == [*itertools.product(*map(range, shape))]
    along = major == "k"
    first = [sorted(part[:width]) for part in found[:pieces]]
    line = [coord[along] for piece in first for coord in piece]
    assert line == list(range(pieces * width))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: tiled_mma(Float32, WarpLayout(1, 1)), "takes BFloat16 or Float16 operands here"),
        (lambda: GlobalToRegLoader(tiled_mma(BFloat16, WarpLayout(1, 1)), "c", 0, True),
         'operand must be "a" or "b", got \'c\''),
        (lambda: SharedToRegLoader(SharedTile(BFloat16, (16, 16)), None, None, "A", 0),
         'operand must be "a" or "b", got \'A\''),
        (lambda: RegToSharedStorer(SharedTile(BFloat16, (16, 16), "mn"), None, None, 0, True),
         'sums are stored to tiles with major "k", not \'mn\''),
    ],
)  # fmt: skip
def test_products_and_loaders_that_cannot_be(body, message):
    with pytest.raises(ValueError, match=message):
        traced(body)


def test_an_accumulator_spread_over_warps_is_no_operand():
    def body():
        places = AccumulatorMap((32, 32), WarpLayout(1, 2))
        return AccumulatorTile(tiled_mma(BFloat16, places.warps), places).as_operand(BFloat16)

    with pytest.raises(ValueError, match="all of them in one warp; 32 columns are in 2"):
        traced(body)


def test_alignment_that_is_not_enough():
    check_alignment("a", "k", 16)
    message = "b is copied in pieces of 16 bytes, but its rows start or end at multiples of 8 bytes"
    with pytest.raises(ValueError, match=message):
        check_alignment("b", "k", 8)
    with pytest.raises(ValueError, match="its columns start or end at multiples of 2 bytes"):
        check_alignment("b", "mn", 2)


def test_tiles_of_a_matrix():
    """An iterator counts the tiles that cover K, and a tile knows its place in the matrix."""

    def body():
        start = cute.make_rmem_tensor((1,), Float32).iterator
        tiles = TileIterator(cute.make_tensor(start, cute.make_layout((100, 40))), (64, 16), 1)
        tile = tiles[2]
        assert isinstance(tile, GlobalTile)
        return tiles.count, tile.matrix_shape, tile.coords[0, 0], tile.coords[63, 15]

    assert traced(body) == (3, (100, 40), (64, 32), (127, 47))
