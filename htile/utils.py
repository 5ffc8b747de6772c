"""Helpers of the primitives: views of tensors, fake tensors, words of bits, and remote stores.

Fake tensors stand for tensors when a kernel is compiled ahead of time. A remote store goes to the
shared memory of another CTA of the cluster.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64, Numeric, Uint32

WARP = 32  # lanes


class Static:
    """An object that the body of a dynamic `if` or `for` may use.

    CuTe-DSL carries the values of objects through such a body. Of this one it carries none, so its
    attributes are set outside: a new value set inside would be lost.
    """

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


def is_power_of_two(n: int) -> bool:
    """Whether a number above 0 is a power of two."""
    return n & (n - 1) == 0


# Views


def expand(tensor: cute.Tensor, dim: int, size: int | Int32) -> cute.Tensor:
    """Insert a mode of `size` elements and stride 0 before mode `dim`.

    With dim 0, a tensor (N,) becomes (size, N).
    """
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim:])
    stride = (*tensor.layout.stride[:dim], 0, *tensor.layout.stride[dim:])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def view_of(
    tensor: cute.Tensor,
    start: tuple,
    steps: tuple | None = None,
    size: int | None = None,
    dtype: type[Numeric] | None = None,
    divisibility: int = 1,
    groups: tuple | None = None,
) -> cute.Tensor:
    """A piece of a tensor (l0, ..., lk, *inner): (l0, ..., lk, size), or (l0, ..., lk).

    start: the first element of the piece, one number for each inner dimension.
    steps: how much further the next element lies in each inner dimension. The piece has `size` of
        them; without steps it has the one element.
    dtype: what the elements of the piece are, if each is a bundle of elements of the tensor. The
        outer strides are multiples of `divisibility` bundles.
    groups: (count, far), where the elements are groups of so many. `far` is how much further the
        next group lies in each inner dimension.
    """
    lead = len(tensor.shape) - len(start)
    shape, stride = tensor.shape[:lead], tensor.stride[:lead]
    if steps is not None:
        near = _distance(tensor.stride[lead:], steps)
        if groups is not None:
            count, far = groups
            size, near = (count, size // count), (near, _distance(tensor.stride[lead:], far))
        shape, stride = (*shape, size), (*stride, near)
    pointer = elem_pointer(tensor, (*(0,) * lead, *start))
    if dtype is not None:
        width = element_bits(dtype) // element_bits(tensor.element_type)
        last = steps[-1] // width  # elements of the last dimension are neighbours
        if groups is not None:
            last = last, _of_bundles(stride[-1][1], width, divisibility)
        stride = [_of_bundles(each, width, divisibility) for each in stride[:-1]] + [last]
        pointer = cute.recast_ptr(pointer, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout(tuple(shape), stride=tuple(stride)))


def _distance(strides: tuple, steps: tuple) -> int | Int32 | Int64:
    """How far so many steps in each dimension lead."""
    pairs = zip(steps, strides, strict=True)
    moves = [each if step == 1 else step * each for step, each in pairs if step]
    return sum(moves[1:], moves[0]) if moves else 0


def _of_bundles(
    stride: int | Int32 | Int64, width: int, divisibility: int
) -> int | Int32 | Int64:
    """A stride in bundles of `width` elements."""
    if isinstance(stride, int):
        return stride // width
    return cute.assume(stride // width, divby=divisibility)


def table_of(
    tensor: cute.Tensor,
    start: tuple,
    steps: tuple | None = None,
    size: int | None = None,
    axis: int = 0,
    step: int = 1,
    count: int | None = None,
    groups: tuple | None = None,
) -> cute.Tensor:
    """The rows of a table of which indices choose one: (count, size), or one element of each row.

    start, steps, size, groups: of a row, as for `view_of`; without steps, of an element of each.
    axis: which dimension counts the rows, in steps of `step`. count: by default all of it.
    """
    rows = tensor.shape[axis] if count is None else count
    stride = tensor.stride[axis]
    shape, strides = (rows,), (stride if step == 1 else step * stride,)
    pointer = elem_pointer(tensor, start)
    if steps is not None:
        row = view_of(tensor, start, steps, size, groups=groups)
        shape, strides = (*shape, *row.shape), (*strides, *row.stride)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))


def transposed(mT: cute.Tensor) -> cute.Tensor:
    """A matrix with its two modes exchanged; no element moves."""
    return cute.make_tensor(mT.iterator, cute.select(mT.layout, mode=[1, 0]))


def as_rows(
    tensor: cute.Tensor, lead: tuple | None = None, own: tuple | None = None, flat: bool = False
) -> cute.Tensor:
    """View (l0, ..., lk, N) as ((lk, ..., l0), N): one number counts the rows.

    lead: the leading shape that the rows of the call have; by default the tensor's own.
    own: for each dimension of `lead`, whether the tensor has it. True: it has the whole dimension.
        False: it has size 1 there, and the rows repeat it. None: it lacks the dimension, and the
        rows repeat it.
    flat: whether all rows are equally far apart. Then it is (lk * ... * l0, N), and no thread has
        to divide the number of its row.
    """
    shape, stride = _collapse(tensor.shape[:-1], tensor.stride[:-1], lead, own, flat)
    layout = cute.make_layout((shape, tensor.shape[-1]), stride=(stride, tensor.stride[-1]))
    return cute.make_tensor(tensor.iterator, layout)


def as_joined_rows(tensor: cute.Tensor, joined: int, vec: int) -> cute.Tensor:
    """View rows that follow each other in memory as rows that are `joined` times as long.

    vec: elements of a vector. The new rows are whole vectors.
    """
    n = tensor.shape[-1] * joined
    rows = math.prod(tensor.shape[:-1]) // joined
    # A static stride would be multiplied in 32 bits.
    layout = cute.make_layout((rows, n), stride=(cute.assume(Int64(n), divby=vec), 1))
    return cute.make_tensor(tensor.iterator, layout)


def as_row_values(
    tensor: cute.Tensor, inner: int = 0, lead: tuple | None = None, own: tuple | None = None,
    flat: bool = False,
) -> cute.Tensor:  # fmt: skip
    """View (l0, ..., lk) as ((lk, ..., l0),): one value for each row of `as_rows`.

    inner: how many dimensions of size 1 follow the leading ones.
    lead, own, flat: as for `as_rows`.
    """
    rank = len(tensor.shape) - inner
    shape, stride = _collapse(tensor.shape[:rank], tensor.stride[:rank], lead, own, flat)
    return cute.make_tensor(tensor.iterator, cute.make_layout((shape,), stride=(stride,)))


def _collapse(
    shape: tuple, stride: tuple, lead: tuple | None, own: tuple | None, flat: bool
) -> tuple:
    """The shape and the stride of the one mode that counts the rows."""
    if flat:
        return math.prod(shape), stride[-1]
    modes = list(zip(shape, stride, strict=True))
    if lead is not None:
        has = iter(modes)
        modes = []
        for size, owns in zip(lead, own, strict=True):
            mode = None if owns is None else next(has)
            modes.append(mode if owns else (size, 0))
    modes = modes[::-1] or [(1, 0)]
    if len(modes) == 1:
        return modes[0]
    return tuple(s for s, _ in modes), tuple(d for _, d in modes)


def place_of_row(row: Int32, leading: int | Int32 | tuple) -> Int32 | tuple[Int32, ...]:
    """The number of a row in one leading dimension, or its place in each of those of `as_rows`.

    The rows of all tensors have the same leading dimensions. Without this place, each tensor would
    divide the number of the row by sizes that the compiler takes for its own.
    """
    if not isinstance(leading, tuple):
        return row
    left, place = Uint32(row), []
    for size in leading[:-1]:
        more = left // Uint32(size)
        place.append(Int32(left - more * Uint32(size)))
        left = more
    return (*place, Int32(left))


def as_bytes(tensor: cute.Tensor) -> cute.Tensor:
    """View a Boolean tensor as the Int8 elements that hold it. Other tensors stay as they are."""
    if tensor.element_type is not Boolean:
        return tensor
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=Int8), tensor.layout)


def element_bits(dtype: type[Numeric]) -> int:
    """How many bits of memory an element takes. A Boolean, whose width is 1, takes 8."""
    return max(dtype.width, 8)


def elem_pointer(tensor: cute.Tensor, coord: tuple) -> cute.Pointer:
    """The pointer to the element of `tensor` at `coord`."""
    return tensor.iterator + cute.crd2idx(coord, tensor.layout)


# Fake tensors


def make_fake_tensor(
    dtype: type[Numeric],
    shape: tuple,
    divisibility: int = 1,
    *,
    align: int | None = None,
    stride: tuple | None = None,
    any_stride: bool = False,
) -> cute.Tensor:
    """What stands for a tensor of `shape` when a kernel is compiled.

    The inner stride is 1. Every outer stride is a 64-bit symbol, because CuTe-DSL computes offsets
    from static strides in 32 bits, where they wrap.

    divisibility: every outer stride is a multiple of so many elements.
    align: bytes that the data pointer is aligned to; by default those of `divisibility` elements.
    stride: the whole tuple of strides, in place of these.
    any_stride: every stride is a symbol, the inner one too.
    """
    if align is None:
        align = divisibility * element_bits(dtype) // 8
    if any_stride:
        stride = tuple(cute.sym_int64() for _ in shape)
    elif stride is None:
        stride = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, tuple(shape), tuple(stride), assumed_align=align)


# Words


def bits32(value: Numeric) -> Int32:
    """The 32 bits of a Float32, Int32 or Boolean."""
    if isinstance(value, Boolean):
        return value.to(Int32)
    return value if isinstance(value, Int32) else value.bitcast(Int32)


def pack64(low: Numeric, high: Numeric) -> Int64:
    """Two 32-bit values as one word of 64 bits."""
    word = cute.make_rmem_tensor((2,), Int32)
    word[0], word[1] = bits32(low), bits32(high)
    return cute.recast_tensor(word, Int64)[0]


def unpack64(word: Int64) -> tuple[Int32, Int32]:
    """The (low, high) halves of a word of 64 bits."""
    # CuTe-DSL 4.8.1 shows the low half twice where an Int64 fragment is recast to Int32.
    return word.to(Int32), (word >> 32).to(Int32)


def store_shared_remote(
    value: Numeric, smem_ptr: cute.Pointer, mbar_ptr: cute.Pointer, peer_cta_rank: int | Int32
) -> None:
    """Store 4 or 8 bytes into the shared memory of another CTA of the cluster.

    smem_ptr, mbar_ptr: pointers into this CTA's shared memory. The bytes go to the same place of
        the other CTA, and its mbarrier counts them.
    """
    if cutlass.const_expr(value.dtype.width == 64):
        cute.arch.store_async_dsmem(smem_ptr, unpack64(value), mbar_ptr, peer_cta_rank)
    else:
        cute.arch.store_async_dsmem(smem_ptr, bits32(value), mbar_ptr, peer_cta_rank)
