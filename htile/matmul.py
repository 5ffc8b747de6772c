"""Kernels in which rows are products: the tile, the context, and a thread's rows of a tile.

A thread block loads tiles of both operands through shared memory, and its warpgroups multiply them
on the tensor cores (wgmma). One warp loads, and one or two warpgroups of 128 threads multiply. A
block is persistent: it goes from tile to tile, and loads the next one while the last one is worked
on and stored. What follows a product is written for a thread's rows of the tile (`TileRows`), a
chunk of columns at a time (`TileChunk`), as row kernels are.

Products are summed over K in order, and no sum is split. So the bits of a row depend on that row
and the matrix alone: not on the tile, the cluster, the number of rows or the place in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.memory import SmemAllocator

from htile.compute.conversion import convert
from htile.compute.reduce import make_vector, thread_reduce, warp_reduce
from htile.copy.tma import GlobalToSharedLoader, SharedToGlobalStorer
from htile.types.register import AccumulatorMap, AccumulatorTile, WarpLayout
from htile.types.shared import SharedTile
from htile.utils import Static

WARPGROUP = 128  # threads
BLOCK = 64  # rows that one instruction of a warpgroup multiplies
K_CHUNK = 64  # elements of K that are loaded as one stage
QUAD = 4  # lanes that have the columns of one row of a tile


@dataclass(frozen=True)
class MatmulTileConfig:
    """The tile of a kernel with products.

    dtype: of both operands.
    tile: rows and columns of a thread block's tile. Several products share the columns.
    cluster: thread blocks along rows and columns that share what they load.
    stages: how many chunks of K are on their way or being multiplied.
    products: how many matrices the rows are multiplied by.
    majors: for each of them which neighbours are contiguous: "k" for (N, K), "mn" for (K, N).
    chunk: columns that a thread works on at a time, together with the three others of its quad.
    stored: the dtype of the result that is stored as whole tiles through shared memory; None if
        there is none. It has 16 bits.
    a_rows: how many rows of the left operand are loaded; fewer than those of the tile if there are
        no more. The others are not stored.
    warp_groups: how many warpgroups multiply, each of them `tile[0] / warp_groups` rows.
    """

    dtype: type = BFloat16
    tile: tuple[int, int] = (128, 256)
    cluster: tuple[int, int] = (2, 1)
    stages: int = 4
    products: int = 1
    majors: tuple[str, ...] = ("k",)
    chunk: int = 32
    stored: type | None = BFloat16
    a_rows: int = 0
    warp_groups: int = 2

    STORE_STAGES = 2  # tiles of a warpgroup that are being stored, or are filled meanwhile
    LOADER_REGISTERS, MATH_REGISTERS = 40, 232  # of a thread that loads, and one that multiplies

    @property
    def columns(self) -> int:
        """Columns of a product in a tile."""
        return self.tile[1] // self.products

    @property
    def blocks(self) -> int:
        """How many times 64 rows a warpgroup has."""
        return self.tile[0] // BLOCK // self.warp_groups

    @property
    def places(self) -> AccumulatorMap:
        """Which sums of the tile a thread has."""
        return AccumulatorMap(self.tile, WarpLayout(4 * self.warp_groups, 1), wgmma=True)

    @property
    def loaded_rows(self) -> int:
        """Rows of the left operand that are loaded for a tile."""
        return self.a_rows or self.tile[0]

    @property
    def left_tile(self) -> SharedTile:
        """Where the left operand is staged."""
        return SharedTile(self.dtype, (self.tile[0], K_CHUNK), "k", self.stages)

    @property
    def right_tile(self) -> SharedTile:
        """Where the matrices are staged, side by side."""
        return SharedTile(self.dtype, (self.tile[1], K_CHUNK), self.majors[0], self.stages)

    @property
    def part_tile(self) -> SharedTile:
        """The part of one matrix in `right_tile`."""
        return SharedTile(self.dtype, (self.columns, K_CHUNK), self.majors[0], self.stages)

    @property
    def store_tile(self) -> SharedTile:
        """Where a result is staged, for all warpgroups."""
        stages = self.STORE_STAGES * self.warp_groups
        return SharedTile(self.stored, (BLOCK, self.chunk), "k", stages)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are loaded for a chunk of K."""
        return (self.loaded_rows + self.tile[1]) * K_CHUNK * self.dtype.width // 8

    @property
    def block(self) -> list[int]:
        """The launch block: the warpgroup that loads, and those that multiply."""
        return [WARPGROUP * (1 + self.warp_groups), 1, 1]

    def tiles(self, m, n) -> tuple:
        """How many clusters of tiles M rows and N columns have, along rows and columns."""
        rows, columns = self.tile[0] * self.cluster[0], self.columns * self.cluster[1]
        return cute.ceil_div(m, rows), cute.ceil_div(n, columns)

    def tiled_mma(self, groups: int | None = None) -> cute.TiledMma:
        """The instruction of `groups` warpgroups, or of all of them."""
        modes = {"k": cute.nvgpu.OperandMajorMode.K, "mn": cute.nvgpu.OperandMajorMode.MN}
        atoms = (self.warp_groups if groups is None else groups, 1, 1)
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, modes["k"], modes[self.majors[0]], Float32, atoms,
            (BLOCK, self.tile[1]),
        )  # fmt: skip

    def left_atom(self, mA: cute.Tensor):
        """(atom, coordinates) that load the left operand (M, K)."""
        box = self.loaded_rows, K_CHUNK
        staged = SharedTile(self.dtype, box, "k", self.stages).layout
        return GlobalToSharedLoader.atom_of(mA, staged, box, self.cluster[1])

    def right_atom(self, mB: cute.Tensor):
        """(atom, coordinates) that load a matrix (N, K)."""
        box = self.columns, K_CHUNK
        return GlobalToSharedLoader.atom_of(mB, self.part_tile.layout, box, self.cluster[0])

    def store_atom(self, mO: cute.Tensor):
        """(atom, coordinates) that store a result (M, N)."""
        return SharedToGlobalStorer.atom_of(mO, self.store_tile.layout, (BLOCK, self.chunk))


class MatmulKernelContext(Static):
    """What a kernel with products sets up first. It is made and used inside one @cute.kernel."""

    GROUP = 8  # clusters along the rows that follow each other, so that L2 has what they share

    def __init__(self, config: MatmulTileConfig):
        self.config = config

    def setup(
        self, left: tuple, rights: tuple, stored: tuple | None, tiled_mma: cute.TiledMma,
        tiles: tuple, shape: tuple,
    ) -> None:  # fmt: skip
        """Allocate shared memory and start the pipeline.

        left, rights, stored: (atom, coordinates) of the operands and the result, from the config.
        tiles: how many clusters of tiles there are, along rows and columns.
        shape: (M, N) of the product.
        """
        c, self.tiled_mma, self.shape = self.config, tiled_mma, shape
        self.tiles_m, self.tiles_n = tiles
        self.tidx, _, _ = cute.arch.thread_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.group = self.warp // 4 - 1  # the warpgroup; -1 for the one that loads
        smem, sizes = SmemAllocator(), c.cluster
        layout = cute.make_layout((*sizes, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.coord = coord = layout.get_flat_coord(rank)
        masks = [cute.make_layout_image_mask(layout, coord, mode=mode) for mode in (1, 0)]
        sA, sB = c.left_tile.allocate(smem), c.right_tile.allocate(smem)
        self.storer = None
        if c.stored is not None:
            box = (BLOCK, c.chunk)
            self.storer = SharedToGlobalStorer(*stored, c.store_tile.allocate(smem), box)
        # Each warp of every thread block that reads a stage tells those that fill it.
        readers = (sizes[0] + sizes[1] - 1) * 4 * c.warp_groups
        self.pipeline = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(Int64, 2 * c.stages),
            num_stages=c.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
            tx_count=c.chunk_bytes,
            cta_layout_vmnk=cute.make_layout((1, *sizes, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=sizes, is_relaxed=True)

        box = c.loaded_rows, K_CHUNK
        gA = cute.local_tile(left[1], box, (None, None))
        sA_box = cute.local_tile(sA, (*box, c.stages), (0, 0, 0)) if c.a_rows else sA
        self.loads = [GlobalToSharedLoader(left[0], gA, sA_box, coord[1], sizes[1], masks[0])]
        part = c.columns, K_CHUNK
        for p, (atom, mB) in enumerate(rights):
            gB = cute.local_tile(mB, part, (None, None))
            sP = cute.local_tile(sB, (*part, c.stages), (p, 0, 0))
            loader = GlobalToSharedLoader(atom, gB, sP, coord[0], sizes[0], masks[1])
            self.loads.append(loader)
        self.chunks = cute.size(gA, mode=[3])
        thread = tiled_mma.get_slice(self.group * WARPGROUP)
        self.tCrA = tiled_mma.make_fragment_A(thread.partition_A(sA))
        self.tCrB = tiled_mma.make_fragment_B(thread.partition_B(sB))
        self.acc = AccumulatorTile(tiled_mma, c.places)
        _, _, self.first = cute.arch.block_idx()  # a cluster's tiles: first, first + stride...
        _, _, self.stride = cute.arch.grid_dim()
        self.total = self.tiles_m * self.tiles_n
        pipeline.pipeline_init_wait(cluster_shape_mn=sizes)

    @property
    def is_loader(self):
        """Whether the thread is in the warpgroup that loads."""
        return self.group < 0

    def tile_at(self, index) -> tuple:
        """(row, column) of this thread block's tile: groups of clusters along the rows."""
        c = self.config
        band = index // (self.GROUP * self.tiles_n)
        inside = index - band * (self.GROUP * self.tiles_n)
        height = cutlass.min(self.tiles_m - band * self.GROUP, self.GROUP)
        n = inside // height
        m = band * self.GROUP + inside - n * height
        return m * c.cluster[0] + self.coord[0], n * c.cluster[1] + self.coord[1]

    @cute.jit
    def load_tiles(self):
        """Load all tiles of the thread block, as one warp."""
        cute.arch.setmaxregister_decrease(self.config.LOADER_REGISTERS)
        if self.warp == 0:
            index = self.first + 0
            state = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Producer, self.config.stages
            )
            while index < self.total:
                m, n = self.tile_at(index)
                for k in cutlass.range(self.chunks, unroll=1):
                    self.pipeline.producer_acquire(state)
                    barrier = self.pipeline.producer_get_barrier(state)
                    self.loads[0].load(m, k, state.index, barrier)
                    for right in self.loads[1:]:
                        right.load(n, k, state.index, barrier)
                    self.pipeline.producer_commit(state)
                    state.advance()
                index += self.stride
            self.pipeline.producer_tail(state)

    def begin(self) -> None:
        """Take the registers of a thread that multiplies."""
        cute.arch.setmaxregister_increase(self.config.MATH_REGISTERS)

    def end(self) -> None:
        """Wait for the last stores."""
        if const_expr(self.storer is not None):
            SharedToGlobalStorer.wait(0)

    def _state_after(self, chunks):
        """The pipeline's state after so many chunks of this thread block."""
        stages = self.config.stages
        return pipeline.PipelineState(stages, chunks, chunks % stages, chunks // stages % 2)

    def _multiply_chunk(self, stage, is_first: bool = False) -> None:
        for block in range(cute.size(self.tCrA, mode=[2])):
            if is_first and block < 2:  # the first product overwrites the accumulators
                self.tiled_mma.set(warpgroup.Field.ACCUMULATE, block > 0)
            at = (None, None, block, stage)
            sums = self.acc.fragment
            cute.gemm(self.tiled_mma, sums, self.tCrA[at], self.tCrB[at], sums)
        warpgroup.commit_group()

    @cute.jit
    def multiply(self, chunks):
        """The products of one tile, `chunks` after the first of this thread block.

        The products of one chunk are in flight while the next one is waited for.
        """
        read, release = self._state_after(chunks), self._state_after(chunks)
        warpgroup.fence()
        self.pipeline.consumer_wait(read)
        self._multiply_chunk(read.index, True)
        read.advance()
        for _ in cutlass.range(1, self.chunks, unroll=1):
            self.pipeline.consumer_wait(read)
            self._multiply_chunk(read.index)
            warpgroup.wait_group(1)
            self.pipeline.consumer_release(release)
            read.advance()
            release.advance()
        warpgroup.wait_group(0)
        self.pipeline.consumer_release(release)


class TileRows(Static):
    """The rows of one tile as a thread has them: two of each 64, and of these a quarter."""

    def __init__(self, ctx: MatmulKernelContext, index):
        self.ctx, self.config = ctx, ctx.config
        c, self.tile = ctx.config, ctx.tile_at(index)
        self.thread = ctx.tidx - WARPGROUP  # of those that multiply
        self.places, self.vec_size = c.places, c.chunk // QUAD
        self.m, self.n = self.tile[0] * c.tile[0], self.tile[1] * c.columns
        if const_expr(c.stored is not None):
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), c.stored)
            mma = c.tiled_mma(1)
            self.copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, mma))
            self.tRsO = self.copy.get_slice(ctx.tidx % WARPGROUP).partition_D(ctx.storer.sT)
            self.rO = cute.make_rmem_tensor(self.tRsO.shape[:3], c.stored)

    def row(self, r: int):
        """The row of the whole product that is the thread's r-th."""
        return self.m + self.places.row(self.thread, r)

    def load_row_value(self, mT: cute.Tensor) -> cute.TensorSSA:
        """An element of a tensor (M,) for each row. Behind the last row it is the last one's."""
        last = self.ctx.shape[0] - 1
        count = self.places.num_rows
        values = [mT[cutlass.min(self.row(r), last)] for r in range(count)]
        return make_vector(values, (count,), mT.element_type)

    def chunks(self):
        """The chunks of all rows, which are to be worked on one after the other."""
        c = self.config
        count = c.columns // c.chunk
        for block in range(c.blocks):
            for k in range(count):
                self.has_stored = False
                for half in range(2):
                    yield TileChunk(self, k, 2 * block + half)
                if self.has_stored:
                    self._flush(k, block, block * count + k)

    @cute.jit
    def _flush(self, k: cutlass.Constexpr, block: cutlass.Constexpr, count: cutlass.Constexpr):
        """Store the chunk that all rows of a block have by now."""
        ctx, c = self.ctx, self.config
        stage = ctx.group * c.STORE_STAGES + count % c.STORE_STAGES
        if ctx.warp % 4 == 0:
            SharedToGlobalStorer.wait(c.STORE_STAGES - 1)
        cute.arch.barrier(barrier_id=1 + ctx.group, number_of_threads=WARPGROUP)
        cute.copy(self.copy, self.rO, self.tRsO[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1 + ctx.group, number_of_threads=WARPGROUP)
        if ctx.warp % 4 == 0:
            row = self.tile[0] * (c.tile[0] // BLOCK) + ctx.group + c.warp_groups * block
            ctx.storer.store(stage, (row, self.tile[1] * (c.columns // c.chunk) + k))


class TileChunk(Static):
    """Some columns of one of a thread's rows.

    A thread has 2 of each 8 columns. Its elements are a vector, in the order of the columns.
    """

    def __init__(self, rows: TileRows, k: int, r: int):
        self.rows, self.k, self.r = rows, k, r
        self.vec_size = rows.vec_size
        self.layout = cute.make_layout((2, self.vec_size // 2), stride=(1, 4))
        self.n = rows.n + k * rows.config.chunk + rows.places.column(rows.thread, 0)

    def read(self, product: int = 0) -> cute.TensorSSA:
        """The elements of a product, in float32."""
        c = self.rows.config
        first = (product * c.columns + self.k * c.chunk) // QUAD
        return self.rows.ctx.acc.load_row(self.r, first, self.vec_size)

    def of(self, values):
        """What this row has of values that a thread has one a row of."""
        return values[self.r] if isinstance(values, cute.TensorSSA) else values

    @property
    def columns(self) -> list:
        """The numbers of the columns."""
        return [self.n + 8 * (i // 2) + i % 2 for i in range(self.vec_size)]

    @property
    def cols(self) -> cute.TensorSSA:
        """The numbers of the columns, as a vector."""
        return make_vector(self.columns, (self.vec_size,), Int32)

    @property
    def offsets(self) -> cute.TensorSSA:
        """How far behind the first column of the thread each of its columns is."""
        return make_vector([Int32(8 * (i // 2) + i % 2) for i in range(self.vec_size)],
                           (self.vec_size,), Int32)  # fmt: skip

    def offset_of(self, column):
        """How far behind the first column of the thread this one is."""
        return column - self.n

    def load_column(self, mW: cute.Tensor, in_pairs: bool = True) -> cute.TensorSSA:
        """The elements of a vector (N,). Behind its end they are other elements of it.

        in_pairs: whether two neighbours may be loaded at a time: N is even, and so is the address.
        """
        return self._load(mW, mW.shape[0], in_pairs)

    def load_row(self, mX: cute.Tensor, in_pairs: bool = True) -> cute.TensorSSA:
        """The elements of a tensor (M, N). Out of its bounds they are other elements of it."""
        m = cutlass.min(self.rows.row(self.r), self.rows.ctx.shape[0] - 1)
        return self._load(mX[m, None], mX.shape[1], in_pairs)

    def _load(self, row: cute.Tensor, n, in_pairs: bool) -> cute.TensorSSA:
        dtype, values = row.element_type, []
        if not in_pairs:
            for column in self.columns:
                values.append(row[cutlass.min(column, n - 1)])
            return make_vector(values, (self.vec_size,), dtype)
        found = cute.make_rmem_tensor((2, self.vec_size // 2), dtype)
        for j in range(self.vec_size // 2):
            at = row.iterator + cutlass.min(self.n + 8 * j, n - 2)
            pair = cute.make_tensor(at.align(2 * dtype.width // 8), cute.make_layout(2))
            cute.autovec_copy(pair, found[None, j])
        return found.load().reshape((self.vec_size,))

    def group_reduce(self, value: cute.TensorSSA, op, size: int) -> cute.TensorSSA:
        """The reduction of the chunk, which is a group of columns, in all its elements."""
        assert size == self.rows.config.chunk, "a group is a chunk"
        return warp_reduce(thread_reduce(value, op), op, QUAD)

    def store(self, value) -> None:
        """Store the elements of the result that is stored as whole tiles."""
        rows = self.rows
        rows.has_stored = True
        view = cute.make_tensor(rows.rO.iterator + 2 * (self.r % 2), self.layout)
        value = cute.full((self.vec_size,), value) if isinstance(value, cutlass.Numeric) else value
        view.store(convert(value, rows.config.stored).reshape(view.shape))

    @cute.jit
    def store_direct(self, mO, value, in_pairs: cutlass.Constexpr = True):
        """Store the elements of a result (M, N) without staging."""
        m = self.rows.row(self.r)
        stored = convert(value, mO.element_type)
        elements = cute.make_rmem_tensor((2, self.vec_size // 2), mO.element_type)
        elements.store(stored.reshape(elements.shape))
        for j in cutlass.range_constexpr(self.vec_size // 2):
            n = self.n + 8 * j
            if const_expr(in_pairs):
                at = mO[m, None].iterator + n
                pair = cute.make_tensor(
                    at.align(2 * mO.element_type.width // 8), cute.make_layout(2)
                )
                if m < mO.shape[0] and n < mO.shape[1]:
                    cute.autovec_copy(elements[None, j], pair)
            else:
                for i in cutlass.range_constexpr(2):
                    if m < mO.shape[0] and n + i < mO.shape[1]:
                        mO[m, n + i] = elements[i, j]

    @cute.jit
    def store_group(self, mP, value):
        """Store the chunk's element of a result (M, groups)."""
        m, chunks = self.rows.row(self.r), self.rows.config.columns // self.rows.config.chunk
        group = self.rows.tile[1] * chunks + self.k
        if self.rows.thread % QUAD == 0 and m < mP.shape[0] and group < mP.shape[1]:
            mP[m, group] = value
