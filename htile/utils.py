"""Small helpers shared by the primitives: views, fake tensors for ahead-of-time compilation,
and the store into the shared memory of a peer CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64


def expand(tensor: cute.Tensor, dim: int, size) -> cute.Tensor:
    """Insert a mode of `size` with stride 0 before mode `dim`: (N,) -> (size, N) for dim 0."""
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim:])
    stride = (*tensor.layout.stride[:dim], 0, *tensor.layout.stride[dim:])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def make_fake_tensor(dtype, shape, divisibility=1, *, align=None, stride=None, any_stride=False):
    """A tensor of `shape` for cute.compile: inner stride 1, outer strides 64-bit symbols.

    Every outer stride is a multiple of `divisibility` elements and the data pointer is aligned
    to `align` bytes (default: `divisibility` elements). Static outer strides are never made,
    because offsets from them are 32-bit and wrap. `stride` replaces the whole tuple; with
    `any_stride` every one is a symbol, the last too.
    """
    size_bytes = max(dtype.width, 8) // 8
    if align is None:
        align = divisibility * size_bytes
    if any_stride:
        stride = tuple(cute.sym_int64() for _ in shape)
    elif stride is None:
        stride = (*(cute.sym_int64(divisibility=divisibility) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, tuple(shape), tuple(stride), assumed_align=align)


def as_rows(tensor: cute.Tensor, lead=None, own=None) -> cute.Tensor:
    """(l0, ..., lk, N) -> ((lk, ..., l0), N): rows that one number counts, the last fastest.

    lead, own: the rows' leading shape, and for each of its dimensions whether the tensor has it:
        True, False (of size 1, the rows repeat it) or None (missing, the same).
    """
    shape, stride = _collapse(tensor.shape[:-1], tensor.stride[:-1], lead, own)
    layout = cute.make_layout((shape, tensor.shape[-1]), stride=(stride, tensor.stride[-1]))
    return cute.make_tensor(tensor.iterator, layout)


def as_row_values(tensor: cute.Tensor, inner: int = 0, lead=None, own=None) -> cute.Tensor:
    """(l0, ..., lk) -> ((lk, ..., l0),): one value for each row of `as_rows`.

    inner: how many dimensions of size 1 follow the leading ones.
    """
    rank = len(tensor.shape) - inner
    shape, stride = _collapse(tensor.shape[:rank], tensor.stride[:rank], lead, own)
    return cute.make_tensor(tensor.iterator, cute.make_layout((shape,), stride=(stride,)))


def _collapse(shape, stride, lead, own):
    """Shape and stride of the one mode that counts the rows."""
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


def as_bytes(tensor: cute.Tensor) -> cute.Tensor:
    """View a Boolean tensor as the Int8 elements it is stored in; other tensors are unchanged."""
    if tensor.element_type is not Boolean:
        return tensor
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=Int8), tensor.layout)


def element_bits(dtype) -> int:
    """Bits that one element takes in memory (a Boolean, of width 1, takes 8)."""
    return max(dtype.width, 8)


def elem_pointer(tensor: cute.Tensor, coord) -> cute.Pointer:
    """Pointer to the element of `tensor` at `coord`."""
    return tensor.iterator + cute.crd2idx(coord, tensor.layout)


def bits32(value):
    """The 32 bits of a Float32, Int32 or Boolean as an Int32."""
    if isinstance(value, Boolean):
        return value.to(Int32)
    return value if isinstance(value, Int32) else value.bitcast(Int32)


def pack64(low, high) -> Int64:
    """Two 32-bit values as one Int64."""
    word = cute.make_rmem_tensor((2,), Int32)
    word[0], word[1] = bits32(low), bits32(high)
    return cute.recast_tensor(word, Int64)[0]


def unpack64(word: Int64):
    """The (low, high) Int32 halves of an Int64."""
    # not by recast_tensor: of an Int64 fragment it shows the low half twice (CuTe-DSL 4.8.1)
    return word.to(Int32), (word >> 32).to(Int32)


def store_shared_remote(value, smem_ptr: cute.Pointer, mbar_ptr: cute.Pointer, peer_cta_rank):
    """Store 4 or 8 bytes to `smem_ptr` of a peer CTA and count them on its `mbar_ptr`."""
    if cutlass.const_expr(value.dtype.width == 64):
        cute.arch.store_async_dsmem(smem_ptr, unpack64(value), mbar_ptr, peer_cta_rank)
    else:
        cute.arch.store_async_dsmem(smem_ptr, bits32(value), mbar_ptr, peer_cta_rank)
