"""Kernels in which rows are products: the tile and the context.

A thread block loads tiles of both operands through shared memory, and its warpgroups multiply them
on the tensor cores (wgmma). One warp loads, and one or two warpgroups of 128 threads multiply. A
block is persistent: it goes from tile to tile, and loads the next one while the last one is worked
on and stored. Tiles that are left when no more of them keep all thread blocks busy may be cut into
narrower ones. What follows a product is written for a thread's rows of the tile
(`htile/compute/tile_rows.py`), a chunk of columns at a time, as row kernels are.

Two warpgroups work together on one tile, or in turns: each has tiles of its own, and one multiplies
while the other computes what follows its products. `MatmulKernelContext.multiply` says why neither
waits for the other for ever.

Products are summed over K in order, and no sum is split. So the bits of a row depend on that row
and the matrix alone: not on the tile, the cluster, the number of rows or the place in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from htile.compute.exchange import begin_barriers
from htile.compute.tile_reduce import RowExchange
from htile.compute.tile_rows import BLOCK, WARPGROUP, place_in_band
from htile.copy.tma import GlobalToSharedLoader, SharedToGlobalStorer
from htile.types.register import AccumulatorMap, AccumulatorTile, WarpLayout
from htile.types.shared import SharedTile
from htile.utils import Static

K_CHUNK = 64  # elements of K that are loaded as one stage


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
    warp_groups: how many warpgroups multiply: each of them `tile[0] / warp_groups` rows of a tile,
        or, in turns, the whole of every second tile.
    in_turns: whether the two warpgroups have tiles of their own.
    parts: how many narrower tiles each tile is cut into that is left for the last wave; 1 for none.
    exchanges: how many reductions of each row the thread blocks along its columns exchange.
    words: how many numbers of a row an exchange has at most.
    buffers: how many places in shared memory exchanges take in turns.
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
    in_turns: bool = False
    parts: int = 1
    exchanges: int = 0
    words: int = 1
    buffers: int = 2

    STORE_STAGES = 2  # tiles of a warpgroup that are being stored, or are filled meanwhile
    LOADER_REGISTERS, MATH_REGISTERS = 24, 240  # of a thread that loads, and one that multiplies

    @property
    def narrow(self) -> MatmulTileConfig:
        """The same kernel's narrower tile for what is left."""
        return replace(self, tile=(self.tile[0], self.tile[1] // self.parts), parts=1)

    @property
    def columns(self) -> int:
        """Columns of a product in a tile."""
        return self.tile[1] // self.products

    @property
    def sharers(self) -> int:
        """How many warpgroups share a tile."""
        return 1 if self.in_turns else self.warp_groups

    @property
    def blocks(self) -> int:
        """How many times 64 rows a warpgroup has."""
        return self.tile[0] // BLOCK // self.sharers

    @property
    def places(self) -> AccumulatorMap:
        """Which sums of the tile a thread has."""
        return AccumulatorMap(self.tile, WarpLayout(4 * self.sharers, 1), wgmma=True)

    @property
    def free_registers(self) -> int:
        """Registers that a thread has beside its sums."""
        return self.MATH_REGISTERS - self.places.num_registers

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
        """The instruction of `groups` warpgroups, or of all that share a tile."""
        modes = {"k": cute.nvgpu.OperandMajorMode.K, "mn": cute.nvgpu.OperandMajorMode.MN}
        atoms = (self.sharers if groups is None else groups, 1, 1)
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, modes["k"], modes[self.majors[0]], Float32, atoms,
            (BLOCK, self.tile[1]),
        )  # fmt: skip

    def left_atom(self, mA: cute.Tensor):
        """(atom, coordinates) that load the left operand (M, K)."""
        box = self.loaded_rows, K_CHUNK
        staged = SharedTile(self.dtype, box, "k").stage_layout
        return GlobalToSharedLoader.atom_of(mA, staged, box, self.cluster[1])

    def right_atom(self, mB: cute.Tensor):
        """(atom, coordinates) that load a matrix (N, K)."""
        box = self.columns, K_CHUNK
        return GlobalToSharedLoader.atom_of(mB, self.part_tile.stage_layout, box, self.cluster[0])

    def store_atom(self, mO: cute.Tensor):
        """(atom, coordinates) that store a result (M, N)."""
        return SharedToGlobalStorer.atom_of(mO, self.store_tile.stage_layout, (BLOCK, self.chunk))


class MatmulKernelContext(Static):
    """What a kernel with products sets up first. It is made and used inside one @cute.kernel."""

    def __init__(self, config: MatmulTileConfig):
        self.config = config

    def setup(
        self, left: tuple, rights: tuple, stored: tuple | None, tiled_mma: cute.TiledMma,
        tiles: tuple, shape: tuple, narrow_atoms: tuple = (),
    ) -> None:  # fmt: skip
        """Allocate shared memory and start the pipeline.

        left, rights, stored: (atom, coordinates) of the operands and the result, from the config.
        tiles: how many clusters of tiles there are, along rows and columns.
        shape: (M, N) of the product.
        narrow_atoms: those of the matrices from `config.narrow`, if there are narrower tiles.
        """
        c, self.shape = self.config, shape
        assert c.stages > 1, "one stage is loaded while another one is multiplied"
        self.tiles_m, self.tiles_n = tiles
        self.tidx, _, _ = cute.arch.thread_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.group = self.warp // 4 - 1  # the warpgroup; -1 for the one that loads
        self.place = 0 if c.in_turns else self.group  # among the warpgroups of a tile
        self.thread = self.tidx % WARPGROUP + self.place * WARPGROUP  # of those of a tile
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
        readers = (sizes[0] + sizes[1] - 1) * 4 * c.sharers
        self.pipeline = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(Int64, 2 * c.stages),
            num_stages=c.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
            tx_count=c.chunk_bytes,
            cta_layout_vmnk=cute.make_layout((1, *sizes, 1)),
            defer_sync=True,
        )
        self.turns = self.exchange = None
        if c.in_turns:  # At the barrier of a warpgroup the other one says that its turn has come.
            self.turns = smem.allocate_array(Int64, 2)
            begin_barriers(self.turns, 2, WARPGROUP)
        if c.exchanges:
            self.exchange = RowExchange(c, smem, self.tidx, self.place, coord[1])
        pipeline.pipeline_init_arrive(cluster_shape_mn=sizes, is_relaxed=True)

        box = c.loaded_rows, K_CHUNK
        gA = cute.local_tile(left[1], box, (None, None))
        sA_box = cute.local_tile(sA, (*box, c.stages), (0, 0, 0)) if c.a_rows else sA
        self.left = GlobalToSharedLoader(left[0], gA, sA_box, coord[1], sizes[1], masks[0])
        self.chunks = cute.size(gA, mode=[3])
        _, _, self.first = cute.arch.block_idx()  # a cluster's tiles: first, first + stride...
        _, _, self.stride = cute.arch.grid_dim()
        self.total, self.before = self.tiles_m * self.tiles_n, 0
        self._begin_products(tiled_mma, sA, sB, rights, masks[1])
        self.narrow = None
        if c.parts > 1:
            rest = self.total % self.stride
            self.total -= rest
            both = zip(narrow_atoms, rights, strict=True)
            self.narrow = NarrowTiles(
                self, rest, sA, sB, [(atom, mB) for atom, (_, mB) in both], masks[1]
            )
        pipeline.pipeline_init_wait(cluster_shape_mn=sizes)

    def _begin_products(self, tiled_mma, sA, sB, rights, mask) -> None:
        """Set up what depends on the width of a tile: loads of the matrices, and accumulators."""
        c, self.tiled_mma = self.config, tiled_mma
        self.rights, part = [], (c.columns, K_CHUNK)
        for p, (atom, mB) in enumerate(rights):
            gB = cute.local_tile(mB, part, (None, None))
            sP = cute.local_tile(sB, (*part, c.stages), (p, 0, 0))
            loader = GlobalToSharedLoader(atom, gB, sP, self.coord[0], c.cluster[0], mask)
            self.rights.append(loader)
        thread = tiled_mma.get_slice(self.place * WARPGROUP)
        self.tCrA = tiled_mma.make_fragment_A(thread.partition_A(sA))
        self.tCrB = tiled_mma.make_fragment_B(thread.partition_B(sB))
        self.acc = AccumulatorTile(tiled_mma, c.places)

    @property
    def is_loader(self):
        """Whether the thread is in the warpgroup that loads."""
        return self.group < 0

    @property
    def step(self) -> int:
        """How many of the thread block's tiles a warpgroup goes on by."""
        return self.config.warp_groups // self.config.sharers

    def index_of(self, tile):
        """The number among all tiles of this width of the thread block's tile number `tile`."""
        return self.first + (tile - self.before) * self.stride

    def tile_at(self, index) -> tuple:
        """(row, column) of this thread block's tile: bands of clusters along the rows."""
        c = self.config
        m, n = place_in_band(index, (self.tiles_m, self.tiles_n))
        return m * c.cluster[0] + self.coord[0], n * c.cluster[1] + self.coord[1]

    @cute.jit
    def load_tiles(self):
        """Load all tiles of the thread block, as one warp."""
        cute.arch.setmaxregister_decrease(self.config.LOADER_REGISTERS)
        if self.warp == 0:
            state = pipeline.make_pipeline_state(
                pipeline.PipelineUserType.Producer, self.config.stages
            )
            state = self._load_all(state)
            if const_expr(self.narrow is not None):
                state = self.narrow._load_all(state)
            self.pipeline.producer_tail(state)

    @cute.jit
    def _load_all(self, state: pipeline.PipelineState):
        """Load this thread block's tiles of one width; gives the pipeline's state after them."""
        index = self.first + 0
        while index < self.total:
            m, n = self.tile_at(index)
            for k in cutlass.range(self.chunks, unroll=1):
                self.pipeline.producer_acquire(state)
                barrier = self.pipeline.producer_get_barrier(state)
                self.left.load(m, k, state.index, barrier)
                for right in self.rights:
                    right.load(n, k, state.index, barrier)
                self.pipeline.producer_commit(state)
                state.advance()
            index += self.stride
        return state

    def begin(self):
        """Take the registers of a thread that multiplies; the number of its first tile."""
        cute.arch.setmaxregister_increase(self.config.MATH_REGISTERS)
        return self.group + 0 if self.config.in_turns else Int32(0)

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
    def multiply(self, tile):
        """The products of the thread block's tile number `tile`.

        The products of one chunk are in flight while the next one is waited for. In turns, a
        warpgroup begins when the other one has issued all products of the tile before.

        No wait lasts for ever. Let the chunks of all tiles of a thread block have numbers in the
        order of the tiles. The thread blocks of a cluster have the same ones, because each of
        their tiles has all chunks of K.

        - Chunk c is loaded once all of the cluster have given back chunk c - stages.
        - It is issued once it is loaded and chunk c - 1 is issued. The first one of a tile waits,
          too, for what follows the products of the warpgroup's own tile before. That waits for
          nothing here: its stores and barriers are the warpgroup's, and so are loads of other rows.
        - It is given back once it is computed and, if its tile goes on, chunk c + 1 is issued.

        What follows the products of a tile may exchange parts of rows in the cluster. Then it waits
        for the other thread blocks' products of the same tile. All chunks of that tile are given
        back before, so these products wait for nothing that comes later. Kernels that exchange do
        not work in turns.

        There are two stages or more. So each of these waits for what is earlier in the order
        "load c, issue c, give back c - 1" only, and the earliest that has not happened can happen.
        A turn is not missed, either: a warpgroup's next one is announced by threads that wait for
        all of its threads to have announced the other's.
        """
        chunks = tile * self.chunks
        read, release = self._state_after(chunks), self._state_after(chunks)
        if const_expr(self.config.in_turns):
            # The first turn is there from the start: of its barrier no phase need be over.
            cute.arch.mbarrier_wait(self.turns + self.group, (tile // 2 + 1 - self.group) % 2)
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
        if const_expr(self.config.in_turns):
            cute.arch.mbarrier_arrive(self.turns + (1 - self.group))
        warpgroup.wait_group(0)
        self.pipeline.consumer_release(release)


class NarrowTiles(MatmulKernelContext):
    """The tiles that are left, cut into narrower ones, as a context of the same kernel.

    It shares all but the width with the kernel's `wide` context, the stages of shared memory and
    the pipeline included, and comes after it.
    """

    def __init__(self, wide: MatmulKernelContext, rest, sA, sB, rights: list, mask):
        super().__init__(wide.config.narrow)
        c, self.wide = self.config, wide
        self.shape, self.tidx, self.thread = wide.shape, wide.tidx, wide.thread
        self.warp, self.group, self.place = wide.warp, wide.group, wide.place
        self.turns, self.exchange = wide.turns, None
        self.coord, self.storer, self.left = wide.coord, wide.storer, wide.left
        self.first, self.stride, self.chunks = wide.first, wide.stride, wide.chunks
        self.total, self.before = rest * wide.config.parts, wide.total // wide.stride
        full = wide.pipeline.sync_object_full
        full = full.recast_to_new_op_type(full.op_type)  # a copy, with the same barriers
        full.tx_count = c.chunk_bytes
        self.pipeline = replace(wide.pipeline, sync_object_full=full)
        # A stage begins where the wide one does, so that none is written while it is still read.
        sB = cute.local_tile(sB, (c.tile[1], K_CHUNK, c.stages), (0, 0, 0))
        self._begin_products(c.tiled_mma(), sA, sB, rights, mask)

    def tile_at(self, index) -> tuple:
        """(row, column) of this thread block's narrow tile."""
        parts = self.wide.config.parts
        wide = index // parts
        m, n = self.wide.tile_at(self.wide.total + wide)
        return m, n * parts + index - wide * parts
