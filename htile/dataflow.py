"""How a row moves: global memory to registers and back, through shared memory or directly.
`ElementwiseKernelContext` sets a kernel up; loaders and the storer are its verbs."""

import copy
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int8, Int32, const_expr
from cutlass.base_dsl.typing import as_numeric
from cutlass.memory import SmemAllocator

from htile.compute.gather import Gathered, Partial, SoftmaxPair, TwoLevelSum, WelfordTriple
from htile.compute.math import Product
from htile.compute.moments import reduce_moments
from htile.compute.reduce import (
    MAX,
    MIN,
    about_finite,
    identity,
    make_vector,
    online_softmax_reduce,
    row_reduce,
    softmax_pair_reduce,
)
from htile.copy.vector import predicate_k, vector_copy
from htile.utils import as_bytes, element_bits, expand


def convert(y, dtype):
    """A vector, scalar or Python number in `dtype`; to Boolean by comparison with zero.

    (`.to(Boolean)` of a float vector is miscompiled by CuTe-DSL 4.8.1: it is inverted.) What is
    stored goes through this and not `math.convert`, which makes vectors of scalars: a Boolean
    vector becomes 255.
    """
    if isinstance(y, bool | int | float):
        return dtype(y)
    if y.dtype is dtype:
        return y
    if dtype is Boolean:
        return y != y.dtype(0)
    return y.to(dtype)


class _Static:
    """An object that may be used inside dynamic `if` and `for`: nothing in it is carried.

    Its attributes are set before; setting one to a new value inside would be lost.
    """

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


class ElementwiseKernelContext(_Static):
    """What every row-wise kernel sets up first. Made and used inside one @cute.kernel."""

    def __init__(self, config):
        self.config = config

    def setup(self, mX, tiler_mn, tiled_copy, extra_smem_tensors=0, shared=True):
        """Indices, shared memory, partitions, predicates, fragment and cluster of row tensor mX.

        mX: (M, N), or ((...), N) as `as_rows` makes it of more leading dimensions.
        extra_smem_tensors: how many more tiles of mX's dtype in shared memory, or their dtypes.
        shared=False: no tile in shared memory, rows go straight to registers.
        """
        config = self.config
        self.shape, self.tiler_mn = (cute.size(mX, mode=[0]), mX.shape[1]), tiler_mn
        self.tidx, _, _ = cute.arch.thread_idx()
        self.bidx, _, _ = cute.arch.block_idx()
        self.cluster_y = cute.arch.block_idx()[1] if const_expr(config.ctas > 1) else 0
        # One row a CTA: the grid is exact, and no row is out of bounds.
        group = self.tidx // config.threads_per_row
        self.row = self.bidx * config.rows + group // config.abreast
        self.row_in_bounds = True if const_expr(config.rows == 1) else self.row < self.shape[0]
        self.beside = 0 if config.abreast == 1 else group % config.abreast
        self.rank = self.cluster_y * config.abreast + self.beside
        self.tile = self.rank  # which tile of columns

        smem = SmemAllocator()
        extra = extra_smem_tensors
        extra = (mX.element_type,) * extra if isinstance(extra, int) else tuple(extra)
        dtypes = (mX.element_type, *extra) if shared else extra
        tiles = [self._allocate_tile(smem, dtype) for dtype in dtypes]
        self.sX = tiles.pop(0) if shared else None
        self.extra_sX = tiles
        buffer, mbar_ptr = config.allocate_reduction_buffer_and_mbar(smem)
        self.reduction_buffer, self.mbar_ptr = buffer, mbar_ptr

        self.thr_copy = tiled_copy.get_slice(self.tidx)
        self.capacity = tiler_mn[1] * config.abreast * config.ctas
        self._take_columns()
        self.vec_size = cute.size(self.tXcX, mode=[0])
        self.num_chunks = cute.size(self.tXcX, mode=[2]) // config.turns
        self.tXgX = self.partition_dest(self.partition_global(mX))
        self.tXsX = self.partition_dest(self.sX) if shared else None
        self.tXrX = self.make_fragment(self.tXgX, mX.element_type)
        self._cluster_pending = config.has_mbars
        config.initialize_cluster(self.tidx, mbar_ptr)

    def _take_columns(self):
        """Coordinates and predicates of the columns of `tile`."""
        N = self.shape[1]
        coordinates = cute.make_identity_tensor((self.tiler_mn[0], self.capacity))
        tile = cute.local_tile(coordinates, self.tiler_mn, (0, self.tile))
        self.tXcX = self.partition_dest(tile)
        # A dynamic N is predicated always; a static one only if it does not fill the tiles.
        is_even_N = isinstance(N, int) and self.capacity == N
        self.tXpX = None if is_even_N else predicate_k(self.tXcX, N)
        self.vector_copy_fn = partial(vector_copy, pred=self.tXpX)
        self.tXpCopy = self._copy_predicate()

    def chunk(self, k, share=0):
        """This context with one vector a thread: of `num_chunks` the k-th, of one of its shares.

        k may be a run-time number.
        """
        part = copy.copy(self)
        part.tiler_mn = (self.tiler_mn[0], self.vec_size * self.config.threads_per_row)
        part.k, part.share = k, share
        part.tile = (self.rank * self.config.turns + share) * self.num_chunks + k
        part._take_columns()
        return part

    def _copy_predicate(self):
        """tXpX and row_in_bounds together, one Boolean a vector; None if always true.

        A predicate and no branch around the copies: each vector is then loaded, computed and
        stored on its own (float32 layernorm of N = 6144 on sm_90a: 134 registers, where it was
        255 and a stack frame).
        """
        if const_expr(self.row_in_bounds is True):
            return self.tXpX
        steps = cute.size(self.tXcX, mode=[2])
        if const_expr(self.tXpX is None):
            tXpCopy = cute.make_rmem_tensor(cute.make_layout(1), Boolean)
            tXpCopy[0] = self.row_in_bounds
            layout = cute.make_layout((1, 1, steps), stride=(0, 0, 0))
            return cute.make_tensor(tXpCopy.iterator, layout)
        tXpCopy = cute.make_rmem_tensor(self.tXpX.layout, Boolean)
        for k in range(steps):
            tXpCopy[0, 0, k] = self.tXpX[0, 0, k] & self.row_in_bounds
        return tXpCopy

    def _allocate_tile(self, smem, dtype) -> cute.Tensor:
        """A row-major tile of `dtype` in shared memory."""
        layout = cute.make_ordered_layout(self.tiler_mn, order=(1, 0))
        return smem.allocate_tensor(dtype, layout, byte_alignment=16)

    def cluster_wait(self):
        """Wait, once, until all CTAs of the cluster have initialised their mbarriers."""
        if self._cluster_pending:
            self._cluster_pending = False
            cute.arch.cluster_wait()

    # Partitions

    def partition_global(self, mT, tiler_mn=None) -> cute.Tensor:
        """The tile of this CTA in a row tensor (M, N), as this thread may use it: at its row.

        A thread has one row, so the tile's rows lie on each other at that row's address, which any
        nesting of leading dimensions has. 64-bit, for rows whose strides are.
        """
        tiler = self.tiler_mn if tiler_mn is None else tiler_mn
        start = mT.iterator + cute.crd2idx((self.row, 0), mT.layout)
        layout = cute.make_layout((tiler[0], mT.shape[1]), stride=(0, mT.stride[1]))
        return cute.local_tile(cute.make_tensor(start, layout), tiler, (0, self.tile))

    def partition_dest(self, gT) -> cute.Tensor:
        """This thread's part of a tile: ((vec_size, 1), 1, num_vectors)."""
        return self.thr_copy.partition_D(gT)

    def make_fragment(self, tXgT, dtype=None) -> cute.Tensor:
        """Registers for this thread's part. Name a `dtype` of Boolean: partitions forget it."""
        return cute.make_rmem_tensor(tXgT.shape, dtype or tXgT.element_type)

    def num_copy_elems(self, dtype) -> int:
        """Elements that one access of `dtype` moves under the alignment class."""
        bytes_per_copy = min(self.config.copy_bytes, 16)
        vec_size = cute.size(self.tXcX, mode=[0])
        return max(1, min(vec_size, 8 * bytes_per_copy // element_bits(dtype)))

    # The pipeline of one tensor, as a whole

    def load_to_smem_and_regs(self):
        """mX: global -> shared -> tXrX. Padded columns hold 0, as do rows out of bounds."""
        ElementwiseLoader(self).load_into(self.tXgX, self.tXsX, self.tXrX)

    def store_from_regs(self, tXrO, tXgO):
        """Registers -> global, under row and column predicates."""
        self.copy_row(tXrO, tXgO)

    def copy_row(self, src, dst, is_async=False):
        """Copy a partition of a row tensor where row and column are in bounds."""
        width = self.num_copy_elems(src.element_type)
        vector_copy(src, dst, pred=self.tXpCopy, is_async=is_async, num_copy_elems=width)

    def load_row(self, mX, into=None, padding=0) -> cute.Tensor:
        """Global -> registers, given or new; what `load_direct` does with a row tensor."""
        tXgX = self.partition_dest(self.partition_global(mX))
        tXrX = self.make_fragment(tXgX, mX.element_type) if into is None else into
        self.load_direct(tXgX, tXrX, padding)
        return tXrX

    def read_row(self, tile) -> cute.Tensor:
        """Shared -> registers, a chunk of a row that `ElementwiseLoader.keep` has brought."""
        k = self.share * self.num_chunks + self.k
        tXsX = self.partition_dest(cute.local_tile(tile, self.tiler_mn, (0, k)))
        tXrX = self.make_fragment(tXsX)
        cute.autovec_copy(as_bytes(tXsX), as_bytes(tXrX))
        return tXrX

    def load_direct(self, tXgX, tXrX, padding=0):
        """Global -> registers; what is out of bounds, row or column, becomes `padding`."""
        if const_expr(self.tXpX is not None or self.row_in_bounds is not True):
            tXrX.fill(tXrX.element_type(padding))
        self.copy_row(tXgX, tXrX)

    # Operands that are no rows

    def load_column(self, mW, into=None) -> cute.Tensor:
        """A vector (N,) that all rows share -> fragment of the row's map; padded columns hold 0."""
        tXgW = self.partition_dest(self.partition_global(expand(mW, 0, self.shape[0])))
        tXrW = self.make_fragment(tXgW, mW.element_type) if into is None else into
        if const_expr(self.tXpX is not None):
            tXrW.fill(tXrW.element_type(0))
        self.vector_copy_fn(tXgW, tXrW, num_copy_elems=self.num_copy_elems(mW.element_type))
        return tXrW

    def ahead(self, count, *tensors, backwards=False, padding=0):
        """`ChunksAhead` of tensors, rows (M, N) or vectors (N,); the first chunks' loads start."""
        return ChunksAhead(self, count, tensors, backwards, padding)

    @cute.jit
    def load_row_value(self, mT):
        """This row's element of a tensor (M,); 0 if the row is out of bounds."""
        value = mT.element_type(0)
        if self.row_in_bounds:
            value = convert(self._at_row(mT)[0], mT.element_type)
        return value

    @cute.jit
    def store_row_value(self, mT, value):
        """Write this row's element of a tensor (M,), by one thread of the row."""
        is_writer = self.tidx % self.config.threads_per_row == 0
        if const_expr(self.config.ctas > 1):
            is_writer = is_writer and self.cluster_y == 0
        if const_expr(self.config.abreast > 1):
            is_writer = is_writer and self.beside == 0
        if const_expr(self.row_in_bounds is not True):
            is_writer = is_writer and self.row_in_bounds
        if is_writer:
            element = self._at_row(mT)  # of Int8 where mT is Boolean: a view forgets it
            element[0] = convert(convert(value, mT.element_type), element.element_type)

    def _at_row(self, mT) -> cute.Tensor:
        """This row's element of a tensor (M,) or ((...),), as a tensor of one element."""
        offset = cute.crd2idx((self.row,), cute.make_layout((*mT.shape,), stride=(*mT.stride,)))
        return cute.make_tensor(mT.iterator + offset, cute.make_layout(1))

    # Vectors that the map gives

    @property
    def vector_shape(self):
        """Shape of every vector of a row: ((vec_size, 1), 1, num_vectors)."""
        return self.tXcX.shape

    @property
    def mask(self):
        """Boolean vector: is the element a column of the row? None if all always are."""
        if self.tXpX is None:
            return None
        vec_size = cute.size(self.tXcX, mode=[0])
        steps = cute.size(self.tXcX, mode=[2])
        bits = [self.tXpX[0, 0, k] for k in range(steps) for _ in range(vec_size)]
        return make_vector(bits, self.vector_shape, Boolean)

    @property
    def in_row(self):
        """Boolean: is this chunk's vector of this thread in the row? None if all always are."""
        return None if self.tXpX is None else self.tXpX[0, 0, 0]

    @property
    def chunks_in_row(self):
        """How many chunks of this share, from this one on, are in the row: the rest is padding."""
        if self.tXpX is None:
            return self.num_chunks
        behind = self.shape[1] - 1 - self.tXcX[0][1]  # columns of the row behind the first
        count = behind // (self.vec_size * self.config.threads_per_row) + 1
        return cutlass.max(cutlass.min(count, self.num_chunks), 0) * Int32(behind >= 0)

    @property
    def cols(self) -> cute.TensorSSA:
        """Int32 vector: the column of each element."""
        count = cute.size(self.tXcX)
        return make_vector([self.tXcX[i][1] for i in range(count)], self.vector_shape, Int32)

    def full(self, value, dtype=None) -> cute.TensorSSA:
        """A row-uniform scalar as a full vector."""
        dtype = as_numeric(value).dtype if dtype is None else dtype
        return cute.full(self.vector_shape, value, dtype)

    # Reductions

    def row_reduce(self, values, ops, slot=0, phase=0):
        """Reduce values over the row, one op each, with one barrier; padded lanes do not count.

        values: vectors, or row-uniform scalars that stand for N equal elements. Boolean vectors
        take MAX (any) and MIN (all). Uses slots [slot, slot + len) of the buffer; each slot once.
        """
        if not isinstance(values, tuple):
            return self.row_reduce((values,), (ops,), slot, phase)[0]
        operands = tuple(self._operand(v, op) for v, op in zip(values, ops, strict=True))
        results = self._exchange(operands, ops, slot, phase)
        return tuple(
            r != 0 if v.dtype is Boolean else r for v, r in zip(values, results, strict=True)
        )

    def online_softmax(self, x, slot=0, phase=0):
        """Row maximum m, sum of exp(x - m) and the vector exp(x - m), with one exchange.

        The buffer is of Int64. Padded lanes of the vector are 0.
        """
        x = self._operand(x, MAX)
        return online_softmax_reduce(x, **self._across_row(slot, 1, phase))

    def online_logsumexp(self, x, slot=0, phase=0):
        """Row maximum m and sum of exp(x - m), of exp(x) for an infinite m, with one exchange.

        The buffer is of Int64.
        """
        peak, total, _ = self.online_softmax(x, slot, phase)
        return peak, about_finite(peak, total)

    def reduce_partials(self, partials, slot=0, phase=0):
        """Reduce what `accumulate` gathered, one thing or a tuple of them, with one barrier."""
        if not isinstance(partials, tuple):
            return self.reduce_partials((partials,), slot, phase)[0]
        operands = tuple(tuple(part.vector for part in p.parts) for p in partials)
        results = self._exchange(operands, tuple(p.op for p in partials), slot, phase)
        return tuple(r != 0 if p.is_mask else r for p, r in zip(partials, results, strict=True))

    def reduce_pair(self, pair, slot=0, phase=0, finite=False):
        """Row maximum m and sum of exp(x - m) of a `SoftmaxPair`, with one exchange.

        finite: of exp(x) for an infinite m. The buffer is of Int64.
        """
        across = self._across_row(slot, 1, phase)
        peak, total = softmax_pair_reduce([part.of_thread for part in pair.parts], **across)
        return peak, about_finite(peak, total) if finite else total

    def reduce_triple(self, triple, slot=0, phase=0):
        """Row sum, and the row's `RowMoments`, of a `WelfordTriple`, with one exchange.

        `about(reference)` of the latter is the sum of (x - reference)**2. The buffer is of Int64;
        two slots.
        """
        across = self._across_row(slot, 2, phase)
        return reduce_moments([part.of_thread for part in triple.parts], **across)

    def partial(self, op, dtype=Float32):
        """The start of a reduction chunk by chunk: `op`'s identity, in values of `dtype`."""
        return self._in_shares(lambda share: Partial.start(op, dtype, self.vec_size))

    def two_level_sum(self):
        """The start of a sum of Float32 over many chunks."""
        return self._in_shares(lambda share: TwoLevelSum(self.vec_size))

    def softmax_pair(self):
        """The start of a maximum and of the sum of exponentials about it."""
        return self._in_shares(lambda share: SoftmaxPair(self.vec_size))

    def welford_triple(self, in_pairs=False):
        """The start of a sum and of the sum of squares about its mean; see `WelfordTriple`."""
        if in_pairs and (self.num_chunks % 2 or self.tXpX is not None):
            raise ValueError(f"pairs of {self.num_chunks} chunks of a row of {self.shape[1]}")
        return self._in_shares(lambda share: WelfordTriple(self.chunk(0, share), in_pairs))

    def _in_shares(self, start):
        """What is gathered for each share of this thread's."""
        return Gathered([start(share) for share in range(self.config.turns)])

    def accumulate(self, gathered, value, padded=False):
        """`gathered` and this chunk's values, element by element; padded lanes do not count.

        padded: they hold the identity of the reduction.
        """
        keeps = gathered.keeps_padding or padded
        value = self._vector(value, gathered.op) if keeps else self._operand(value, gathered.op)
        return gathered.take(self, value.reshape((self.vec_size,)))

    def _exchange(self, operands, ops, slot, phase):
        """Reduce vectors whose padded lanes hold the identity; the slots of the buffer in order.

        A tuple of vectors is one for each share.
        """
        return row_reduce(operands, ops, **self._across_row(slot, len(operands), phase))

    def _across_row(self, slot, count, phase):
        """What a reduction takes beside its operands, for `count` slots; the cluster is up then."""
        self.cluster_wait()
        return dict(
            threads_per_row=self.config.threads_per_row,
            reduction_buffer=self._slots(slot, count),
            mbar_ptr=None if self.mbar_ptr is None else self.mbar_ptr + slot,
            phase=phase,
            abreast=self.config.abreast,
        )

    def _operand(self, value, op):
        """What is reduced: a full vector whose padded lanes hold the identity of `op`."""
        value = self._vector(value, op)
        if self.tXpX is None:
            return value
        if isinstance(value, Product):  # a lane's identity stands for the rounded product
            value = value.rounded()
        return cute.where(self.mask, value, self.full(identity(op, value.dtype), value.dtype))

    def _vector(self, value, op):
        """A full vector of what `op` reduces, padded lanes as they are."""
        if isinstance(value, Product):
            return value.map(lambda factor: self._vector(factor, op))
        if not isinstance(value, cute.TensorSSA):
            value = self.full(value)
        if value.dtype is Boolean:
            if op not in (MAX, MIN):
                raise TypeError(f"a Boolean vector takes MAX (any) or MIN (all), not {op}")
            value = cute.where(value, self.full(1, Int32), self.full(0, Int32))
        elif value.dtype.is_float and value.dtype is not Float32:
            value = value.to(Float32)
        return value

    def _slots(self, slot, count):
        """Slots [slot, slot + count) of the reduction buffer."""
        buffer = self.reduction_buffer
        if buffer is None:
            return None
        if slot + count > self.config.stage:
            raise ValueError(f"slots {slot} to {slot + count - 1} of {self.config.stage}")
        layout = cute.make_layout((*buffer.shape[:2], count), stride=buffer.layout.stride)
        return cute.make_tensor(buffer[None, None, slot].iterator, layout)


class ChunksAhead(_Static):
    """The chunks of a thread's shares in order, with what they have of tensors in global memory.

    Each is loaded `count` chunks before it is used: no compiler moves a load above a store, or out
    of the branch that a predicate makes. backwards: from the last chunk of the last share on.
    padding: what rows hold behind their end.
    """

    def __init__(self, ctx: ElementwiseKernelContext, count, tensors, backwards, padding):
        self.ctx, self.tensors, self.backwards, self.padding = ctx, tensors, backwards, padding
        self.total = ctx.config.turns * ctx.num_chunks
        self.ring = [self._load(k) for k in range(min(count, self.total))]

    def _load(self, k, into=None) -> list:
        """The fragments of the k-th chunk of all, in registers of their own or in given ones."""
        chunk = self.ctx.chunk(self.total - 1 - k if self.backwards else k)
        into = [None] * len(self.tensors) if into is None else into
        return [
            chunk.load_row(mT, fragment, self.padding)
            if cute.rank(mT) > 1
            else chunk.load_column(mT, fragment)
            for mT, fragment in zip(self.tensors, into, strict=True)
        ]

    def take(self, first, count, share=0):
        """`count` chunks of a share from `first` on, each as (chunk, fragment of each tensor).

        first: a multiple of the chunks that are on their way. Where it is a run-time number, as
        many chunks must follow in the share.
        """
        ctx, behind = self.ctx, share * self.ctx.num_chunks
        for k in range(count):
            fragments = self.ring[(behind + k) % len(self.ring)]
            now = [cute.make_rmem_tensor_like(fragment) for fragment in fragments]
            for fragment, value in zip(now, fragments, strict=True):
                cute.autovec_copy(as_bytes(value), as_bytes(fragment))
            following = behind + first + k + len(self.ring)
            if not isinstance(following, int) or following < self.total:
                self._load(following, fragments)
            if self.backwards:
                chunk = ctx.chunk(ctx.num_chunks - 1 - first - k, ctx.config.turns - 1 - share)
            else:
                chunk = ctx.chunk(first + k, share)
            yield chunk, *now


class ElementwiseLoader(_Static):
    """Global -> shared (cp.async) -> registers, for any number of row tensors in flight."""

    def __init__(self, ctx: ElementwiseKernelContext):
        self.ctx = ctx
        self.free = [] if ctx.sX is None else [ctx.sX]
        self.free += ctx.extra_sX
        self.started = []  # (shared, register) partitions in flight
        self.finished = []

    def start(self, mX) -> cute.Tensor:
        """Issue the load of row tensor mX; the fragment is valid after `finish`."""
        ctx = self.ctx
        sX = self._take(mX)
        tXgX = ctx.partition_dest(ctx.partition_global(mX))
        tXrX = ctx.make_fragment(tXgX, mX.element_type)
        return self.start_into(tXgX, ctx.partition_dest(sX), tXrX)

    def keep(self, mX) -> cute.Tensor:
        """Issue the load of row tensor mX to stay in shared memory.

        For `ctx.chunk(k).read_row(tile)`, after `finish`.
        """
        ctx, sX = self.ctx, self._take(mX)
        tXgX = ctx.partition_dest(ctx.partition_global(mX))
        ctx.copy_row(tXgX, ctx.partition_dest(sX), is_async=True)
        return sX

    def _take(self, mX) -> cute.Tensor:
        """The next free tile."""
        if not self.free:
            raise ValueError("no tile in shared memory is left: raise extra_smem_tensors")
        sX = self.free.pop(0)
        if element_bits(sX.element_type) != element_bits(mX.element_type):
            raise TypeError(f"the tile is of {sX.element_type}, the tensor of {mX.element_type}")
        return sX

    def start_into(self, tXgX, tXsX, tXrX) -> cute.Tensor:
        """Issue the load of a partition through a given shared partition and fragment.

        cp.async moves no less than 4 bytes: narrower accesses go straight to the registers.
        """
        dtype = tXgX.element_type
        if self.ctx.num_copy_elems(dtype) * element_bits(dtype) < 32:
            self.ctx.load_direct(tXgX, tXrX)
        else:
            self.ctx.copy_row(tXgX, tXsX, is_async=True)
            self.started.append((tXsX, tXrX))
        return tXrX

    def finish(self):
        """Make every started fragment valid. Each thread reads only what it copied itself."""
        cute.arch.cp_async_commit_group()
        self.ctx.cluster_wait()
        cute.arch.cp_async_wait_group(0)
        self._read(self.started)
        self.finished, self.started = self.finished + self.started, []

    def reload(self):
        """Read every fragment again from shared memory, so that its registers are free between."""
        cute.arch.sync_warp()  # or, without a barrier since, the compiler keeps the first copy
        self._read(self.finished)

    def _read(self, parts):
        """Shared -> registers. No predicate: cp.async wrote zeros where it read nothing."""
        for tXsX, tXrX in parts:
            cute.autovec_copy(as_bytes(tXsX), as_bytes(tXrX))

    def load(self, mX) -> cute.Tensor:
        """start and finish at once."""
        tXrX = self.start(mX)
        self.finish()
        return tXrX

    def load_into(self, tXgX, tXsX, tXrX) -> cute.Tensor:
        """start_into and finish at once."""
        self.start_into(tXgX, tXsX, tXrX)
        self.finish()
        return tXrX


class GlobalToRegLoader(_Static):
    """Global -> registers, with the interface of ElementwiseLoader."""

    def __init__(self, ctx: ElementwiseKernelContext):
        self.ctx = ctx

    def start(self, mX) -> cute.Tensor:
        """Issue the load of row tensor mX into a fragment."""
        return self.ctx.load_row(mX)

    def finish(self):
        """Nothing is left to do but the cluster's start-up, which the loads have hidden."""
        self.ctx.cluster_wait()

    def load(self, mX) -> cute.Tensor:
        """start and finish at once."""
        tXrX = self.start(mX)
        self.finish()
        return tXrX


class ElementwiseStorer(_Static):
    """Registers -> global."""

    def __init__(self, ctx: ElementwiseKernelContext):
        self.ctx = ctx

    def store(self, mO, y):
        """Store a vector, or a scalar for the whole row, as mO's dtype into this row of mO."""
        ctx = self.ctx
        tXgO = ctx.partition_dest(ctx.partition_global(mO))
        is_mask = mO.element_type is Int8  # a Boolean tensor that went through a view
        y = convert(y, Boolean if is_mask else mO.element_type)
        y = y if isinstance(y, cute.TensorSSA) else ctx.full(y)
        if const_expr(y.dtype is Boolean):  # a true Boolean vector would be stored as 255
            y = cute.where(y, ctx.full(1, Int8), ctx.full(0, Int8))
        tXrO = ctx.make_fragment(tXgO, y.dtype)
        tXrO.store(y)
        ctx.copy_row(tXrO, tXgO)
