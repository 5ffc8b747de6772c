"""Vectorised copies of row tiles.

The map says which thread holds which element. The vector size alone decides it. The width of the
copy instructions is chosen apart from it, up to 128 bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64, Numeric, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync

from htile.utils import as_bytes, element_bits

# Policies of the L2 cache, as PTX's createpolicy makes them: what is dropped before all else, and
# what is dropped in its turn.
EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000


@dataclass(frozen=True)
class VectorCopy:
    """The map of a tile: each thread holds `vec_size` neighbouring elements, again and again.

    The threads of a row lie beside each other, and the pattern repeats along the row.
    """

    dtype: type[Numeric]
    threads_per_row: int
    num_threads: int
    vec_size: int = 1
    is_async: bool = False

    @property
    def num_bits_per_copy(self) -> int:
        """The width of one copy of `dtype` under this map, at most 128 bits."""
        return min(128, self.vec_size * element_bits(self.dtype))

    def copy_atom(self) -> cute.CopyAtom:
        """The copy atom that moves `dtype` at this width."""
        dtype = Int8 if self.dtype is Boolean else self.dtype
        return copy_atom(dtype, self.num_bits_per_copy, self.is_async)

    def tiled_copy_2d(self) -> cute.TiledCopy:
        """The partitioner of tensors of any dtype.

        Its threads have the layout (num_threads // threads_per_row, threads_per_row). Its atom
        moves bytes, because a partition depends on element counts alone; `vector_copy` picks the
        atom that moves the data.
        """
        threads = (self.num_threads // self.threads_per_row, self.threads_per_row)
        return cute.make_tiled_copy_tv(
            copy_atom(Int8, 8 * self.vec_size, False),
            cute.make_ordered_layout(threads, order=(1, 0)),
            cute.make_layout((1, self.vec_size)),
        )


def copy_atom(
    dtype: type[Numeric],
    num_bits: int,
    is_async: bool = False,
    is_shared: bool = False,
    has_policy: bool = False,
) -> cute.CopyAtom:
    """A copy of `num_bits` at once.

    is_shared: whether other thread blocks copy the same. The L1 cache then keeps what cp.async
        copies. Else 16 bytes at a time pass it by, as what is copied once should.
    has_policy: of a load to registers, whether it says how long the L2 cache keeps it.

    Raises ValueError for an asynchronous copy (cp.async) of other widths than 4, 8 or 16 bytes.
    """
    if not is_async:
        op = cute.nvgpu.CopyG2ROp() if has_policy else cute.nvgpu.CopyUniversalOp()
        return cute.make_copy_atom(op, dtype, num_bits_per_copy=num_bits)
    if num_bits not in (32, 64, 128):
        raise ValueError(f"cp.async moves 32, 64 or 128 bits, not {num_bits}")
    mode = cute.nvgpu.LoadCacheMode.ALWAYS
    if num_bits == 128 and not is_shared:
        mode = cute.nvgpu.LoadCacheMode.GLOBAL
    return cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=mode), dtype, num_bits_per_copy=num_bits
    )


def inner_stride(tensor: cute.Tensor) -> int | Int32:
    """How far the elements of a vector are apart, in a partition ((V, 1), 1, K)."""
    stride = tensor.layout.stride[0]
    while isinstance(stride, tuple):
        stride = stride[0]
    return stride


def are_one(tensor: cute.Tensor) -> bool:
    """Whether a vector's elements are known to be one, in a partition ((V, 1), 1, K)."""
    stride = inner_stride(tensor)
    return cute.size(tensor, mode=[0]) > 1 and isinstance(stride, int) and stride == 0


def are_neighbours(tensor: cute.Tensor) -> bool:
    """Whether a vector's elements are known to be neighbours, in a partition ((V, 1), 1, K)."""
    stride = inner_stride(tensor)
    return isinstance(stride, int) and stride == 1


def has_neighbours(tensor: cute.Tensor) -> bool:
    """Whether the elements of a row are known to be neighbours, in a tensor (M, N) or (N,)."""
    stride = tensor.layout.stride[-1]
    return isinstance(stride, int) and stride == 1


def _split_vectors(tensor: cute.Tensor, num_elems: int) -> cute.Tensor:
    """View a partition ((V, 1), 1, K) as ((num_elems, 1), V // num_elems, K)."""
    vec_size, steps = cute.size(tensor, mode=[0]), cute.size(tensor, mode=[2])
    apart = inner_stride(tensor) if vec_size > 1 else 1
    layout = cute.make_layout(
        ((num_elems, 1), vec_size // num_elems, steps),
        stride=((apart, 0), num_elems * apart, tensor.layout.stride[2]),
    )
    return cute.make_tensor(tensor.iterator, layout)


def copy_firsts(src: cute.Tensor, dst: cute.Tensor, pred: cute.Tensor | None = None) -> None:
    """Copy the first element of each vector of a partition ((V, 1), 1, K).

    pred: as for `vector_copy`.
    """
    firsts = [
        cute.make_tensor(
            each.iterator,
            cute.make_layout(((1, 1), 1, cute.size(each, mode=[2])),
                             stride=((1, 0), 0, each.layout.stride[2])),
        )
        for each in (src, dst)
    ]  # fmt: skip
    vector_copy(*firsts, pred=pred, num_copy_elems=1)


def vector_copy(
    src: cute.Tensor,
    dst: cute.Tensor,
    *,
    pred: cute.Tensor | None = None,
    is_async: bool = False,
    is_shared: bool = False,
    policy: Int64 | None = None,
    num_copy_elems: int | None = None,
) -> None:
    """Copy a partition ((V, 1), 1, K), in pieces of `num_copy_elems` elements.

    pred: one Boolean for each vector, of shape (1, 1, K). Where it is false nothing is read or
        written, but an asynchronous copy writes zeros.
    is_async: by cp.async, from global to shared memory.
    is_shared: as for `copy_atom`.
    policy: how long the L2 cache keeps what is loaded to registers: EVICT_FIRST or EVICT_NORMAL.
    num_copy_elems: by default as many elements as 128 bits hold. Weaker alignments take fewer: then
        several instructions copy a vector under the same predicate.
    """
    src, dst = as_bytes(src), as_bytes(dst)
    width = src.element_type.width
    vec_size = cute.size(src, mode=[0])
    if const_expr(num_copy_elems is None):
        num_copy_elems = min(vec_size, 128 // width)
    bits = num_copy_elems * width
    atom = copy_atom(src.element_type, bits, is_async, is_shared, policy is not None)
    kept = {} if policy is None else {"cache_policy": policy}
    src, dst = _split_vectors(src, num_copy_elems), _split_vectors(dst, num_copy_elems)
    if const_expr(pred is None):
        cute.copy(atom, src, dst, **kept)
    else:
        shape = (1, vec_size // num_copy_elems, cute.size(src, mode=[2]))
        step = pred.layout.stride[2]
        mask = cute.make_tensor(pred.iterator, cute.make_layout(shape, stride=(0, 0, step)))
        cute.copy(atom, src, dst, pred=mask, **kept)


def copy_hidden(src: cute.Tensor, dst: cute.Tensor) -> None:
    """Copy a vector in registers. Of narrow elements a compiler does not know that they are equal.

    It would convert them once, and keep the wider numbers until they are read for the last time. A
    vector that is no whole number of 32-bit words is copied openly.
    """
    bits = element_bits(src.element_type)
    if bits > 16 or cute.size(src) * bits % 32:
        cute.autovec_copy(src, dst)
        return
    src, dst = cute.recast_tensor(src, Int32), cute.recast_tensor(dst, Int32)
    for i in range(cute.size(dst)):
        word, text = [src[i].ir_value()], "mov.b32 $0, $1;"
        dst[i] = Int32(
            llvm.inline_asm(Int32.mlir_type, word, text, "=r,r", has_side_effects=True)
        )


def predicate_k(tAcA: cute.Tensor, limit: int | Int32) -> cute.Tensor:
    """One Boolean for each vector of the partitioned coordinates: is its column below `limit`?

    tAcA: coordinates of shape ((V, R), M, K). The result has the shape (R, M, K). Its mode M has
        stride 0, because all rows of a thread share their columns.
    limit: the length of the row. The vector size divides it, so that no vector straddles the end.
    """
    shape = (cute.size(tAcA, mode=[0, 1]), cute.size(tAcA, mode=[1]), cute.size(tAcA, mode=[2]))
    layout = cute.make_layout(shape, stride=(shape[2], 0, 1))
    tApA = cute.make_rmem_tensor(layout, Boolean)
    for v in range(shape[0]):
        for k in range(shape[2]):
            tApA[v, 0, k] = cute.elem_less(tAcA[(0, v), 0, k][1], limit)
    return tApA


@cute.jit
def fill_oob(tXsX: cute.Tensor, tXpX: cute.Tensor, value):
    """Write `value` to the elements of the vectors whose predicate is false.

    tXsX: a partition of shape ((V, R), M, K). tXpX: its predicates, as `predicate_k` makes them.
    """
    tXrFill = cute.make_rmem_tensor_like(tXsX[(None, 0), None, 0])
    tXrFill.fill(value)
    for v in cutlass.range_constexpr(cute.size(tXpX, mode=[0])):
        for k in cutlass.range_constexpr(cute.size(tXpX, mode=[2])):
            if not tXpX[v, 0, k]:
                cute.autovec_copy(tXrFill, tXsX[(None, v), None, k])
