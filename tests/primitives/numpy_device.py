"""The threads of a row as numpy arrays: the primitives' own code runs on them, without a GPU.

A scalar of the device has one number for each thread, in an array of the shape (shares, warps,
lanes). A vector has one more axis, of its elements. `Device.install` puts them in place of CuTe-DSL
in the modules of `htile.compute`. Every operation rounds as the GPU's does. `rcp.approx` may be
off by an ulp, as its documentation allows: here it is in half of the cases, by up to an ulp.
"""

import math
import types

import cutlass.cute as cute
import numpy as np

from htile.compute import (
    accumulate,
    angles,
    bits,
    conversion,
    division,
    exchange,
    exponents,
    keys,
    log_add,
    logarithms,
    mean,
    moments,
    near,
    operands,
    powers,
    products,
    random,
    ranks,
    reduce,
    scan,
)
from htile.compute import math as functions
from htile.copy import layout

MODULES = (
    accumulate, angles, bits, conversion, division, exchange, exponents, functions, keys, log_add,
    logarithms, mean, moments, near, operands, powers, products, random, ranks, reduce, scan,
    layout,
)  # fmt: skip
TINY = np.float32(2.0**-126)


def fma(a, b, c):
    """a * b + c of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded there to odd, so that rounding it again, to
    float32, gives what a single rounding would.
    """
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = np.ascontiguousarray(total).view(np.int64) & 1 == 0
    inexact = np.isfinite(total) & (error != 0) & is_even.reshape(total.shape)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact, odd, total).astype(np.float32)


def rcp_approx(x):
    """1 / x to an ulp, without subnormal numbers: rcp.approx.ftz.

    Of the two numbers around 1 / x it gives the farther one in half of the cases, but the nearest
    for a mantissa of ones. There the GPU's own div.rn, which refines rcp.approx by the same steps
    as `htile.compute.division`, would be wrong otherwise. A test on the GPU shows that it is so.
    """
    x = np.asarray(x, np.float32)
    exact = np.float64(1) / np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)
    near = exact.astype(np.float32)
    far = np.nextafter(near, np.where(exact > near, np.inf, -np.inf).astype(np.float32))
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    ones = bits & np.uint32(0x7FFFFF) == 0x7FFFFF
    is_far = np.isfinite(far) & (near != exact) & (bits % np.uint32(1009) % np.uint32(2) == 1)
    is_far &= ~ones
    near = np.where(is_far, far, near)
    return np.where(np.abs(near) < TINY, np.copysign(np.float32(0), near), near)


def lg2_approx(x):
    """The logarithm to base 2, without subnormal numbers: lg2.approx.ftz.

    It is off by up to 2 ** -22 absolutely from 1/2 to 2, and relatively elsewhere.
    """
    flushed = np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)
    value = np.log2(flushed.astype(np.float64))
    size = np.maximum(np.abs(value), 1) * 2.0**-22
    return np.where(np.isfinite(value), value + _part(x) * size, value).astype(np.float32)


def sqrt_approx(x):
    """The square root, without subnormal numbers, to 2 ** -23 of it: sqrt.approx.ftz."""
    flushed = np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)
    return (np.sqrt(flushed.astype(np.float64)) * (1 + _part(x) * 0.75 * 2.0**-23)).astype("f")


def _part(x):
    """The share of its largest error that an approximation has: -1, 0 or 1, as the bits have it."""
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(np.shape(x))
    return (bits % np.uint32(1013) % np.uint32(3)).astype(np.float64) - 1


def exp(x):
    """What the device library's expf does, as its PTX reads; ex2.approx is taken as exact."""
    f = np.float32
    near = np.clip(fma(x, f(float.fromhex("0x1.77313ap-8")), f(0.5)), 0, 1)
    near = np.where(np.isnan(x), f(0), near).astype(f)
    shifted = np.floor(near.astype(np.float64) * 252 + 12582913).astype(f)
    n = shifted - f(12583039)
    high, low = f(float.fromhex("0x1.715476p+0")), f(float.fromhex("0x1.4ae0cp-26"))
    rest = fma(x, low, fma(x, high, -n))
    return (exact(np.exp2)(rest).astype(np.float64) * np.exp2(n.astype(np.float64))).astype(f)


def _unless_rare(is_rare, usual, each, *operands):
    """What `htile.compute.rare` does. It gives the bits of `usual` where no element is rare."""
    one, other = each(*operands), usual(*operands)
    found = apply(np.where, is_rare, one, other)
    for function in (lambda x: x, np.signbit):
        both = [np.broadcast_to(function(x.data), found.data.shape) for x in (found, one)]
        known = ~np.isnan(found.data)
        assert np.array_equal(both[0][known], both[1][known])
    return found


def exact(function):
    """A function of float64, rounded to float32."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


NAN = np.int32(0x7FFFFFFF).view(np.float32)  # which PTX makes of every NaN


class Value:
    """A scalar or a vector of the device."""

    def __init__(self, data):
        self.data = data

    def __neg__(self):
        return apply(np.negative, self)

    def __add__(self, other):
        return apply(np.add, self, other)

    def __radd__(self, other):
        return apply(np.add, other, self)

    def __sub__(self, other):
        return apply(np.subtract, self, other)

    def __rsub__(self, other):
        return apply(np.subtract, other, self)

    def __mul__(self, other):
        return apply(np.multiply, self, other)

    def __rmul__(self, other):
        return apply(np.multiply, other, self)

    def __truediv__(self, other):
        return apply(np.divide, self, other)

    def __floordiv__(self, other):
        return apply(np.floor_divide, self, other)

    def __mod__(self, other):
        return apply(np.mod, self, other)

    def __and__(self, other):
        return apply(np.bitwise_and, self, other)

    def __xor__(self, other):
        return apply(np.bitwise_xor, self, other)

    def __or__(self, other):
        return apply(np.bitwise_or, self, other)

    def __lshift__(self, other):
        return apply(np.left_shift, self, other)

    def __rlshift__(self, other):
        return apply(np.left_shift, other, self)

    def __rshift__(self, other):
        return apply(np.right_shift, self, other)

    def __eq__(self, other):
        return apply(np.equal, self, other)

    def __ne__(self, other):
        return apply(np.not_equal, self, other)

    def __lt__(self, other):
        return apply(np.less, self, other)

    def __le__(self, other):
        return apply(np.less_equal, self, other)

    def __gt__(self, other):
        return apply(np.greater, self, other)

    def __ge__(self, other):
        return apply(np.greater_equal, self, other)

    __hash__ = None


class Vector(Value):
    """A vector: the last axis of `data` has its elements, in CuTe's order of `shape`."""

    def __init__(self, data, shape=None, dtype=None):
        super().__init__(data)
        self.shape = shape or data.shape[-1:]

    @property
    def dtype(self):
        return SCALARS[self.data.dtype.type]

    def reshape(self, shape):
        return Vector(self.data, shape)

    def bitcast(self, dtype):
        return Vector(self.data.view(dtype.numpy))

    def __getitem__(self, where):
        if not isinstance(where, tuple):
            return self.dtype(self.data[..., where])
        _, column = where
        rows = self.shape[0]
        return Vector(self.data[..., rows * column : rows * (column + 1)])


    def to(self, dtype):
        """As C converts it: integers keep their lower bits."""
        return Vector(self.data.astype(dtype.numpy), self.shape)


class Scalar(Value):
    """A scalar. Its class is its dtype, as in CuTe-DSL."""

    numpy: type
    width, signed, is_float = 32, True, False

    def __init__(self, data):
        data = data.data if isinstance(data, Value) else data
        super().__init__(np.asarray(data).astype(self.numpy))

    @property
    def dtype(self):
        return type(self)

    def to(self, dtype):
        """As C converts it: integers keep their lower bits."""
        return dtype(self.data.astype(dtype.numpy))

    def bitcast(self, dtype):
        return dtype(np.ascontiguousarray(self.data).view(dtype.numpy).reshape(self.data.shape))


class Float32(Scalar):
    numpy, is_float, inf = np.float32, True, math.inf


class Int32(Scalar):
    numpy = np.int32


class Uint32(Scalar):
    numpy, signed = np.uint32, False


class Int64(Scalar):
    numpy, width = np.int64, 64


class Uint64(Scalar):
    numpy, width, signed = np.uint64, 64, False


class Boolean(Scalar):
    numpy, width = np.bool_, 1


SCALARS = {kind.numpy: kind for kind in (Float32, Int32, Uint32, Int64, Uint64, Boolean)}


def apply(function, *values):
    """`function` of the arrays of values. Numbers take the dtype of the others.

    A scalar counts for every element of a vector, and the result is a vector if an operand is.
    """
    vectors = [x for x in values if isinstance(x, Vector)]
    kinds = {x.data.dtype for x in values if isinstance(x, Value) and x.data.dtype != np.bool_}
    kind = kinds.pop() if len(kinds) == 1 else None

    def array(x):
        if not isinstance(x, Value):
            return np.asarray(x, kind)
        return x.data[..., None] if vectors and isinstance(x, Scalar) else x.data

    with np.errstate(all="ignore"):
        result = function(*map(array, values))
    return Vector(result, vectors[0].shape) if vectors else SCALARS[result.dtype.type](result)


def _shifted(x, count):
    """x >> count as if x were unsigned, as its own dtype."""
    kind = np.dtype(f"u{x.dtype.itemsize}")
    return (x.astype(kind) >> count.astype(kind)).astype(x.dtype)


def _applied(function):
    return lambda *values, **options: apply(function, *values)


class Slot:
    """A slot of the reduction buffer, with what every warp of a row has left in it."""

    def __init__(self, threads):
        shares, warps, _ = threads
        self.threads, self.shape = threads, (1, (warps, shares))

    def filled(self, value):
        """With a scalar that all lanes of a warp have."""
        every = np.broadcast_to(value.data, self.threads)
        assert np.array_equal(every, np.broadcast_to(every[..., :1], every.shape), equal_nan=True)
        self.words, self.kind = every[..., 0].ravel(), type(value)  # warps fastest, then shares
        return self

    def __getitem__(self, where):
        _, peer = where
        return self.kind(self.words[peer.data if isinstance(peer, Value) else peer])


class Buffer:
    """A reduction buffer of several slots."""

    def __init__(self, threads, count):
        self.slots = [Slot(threads) for _ in range(count)]

    def __getitem__(self, where):
        """The word of each lane: of its peer, in its slot."""
        row, peer, place = where
        every = [self.slots[k][row, peer] for k in range(len(self.slots))]
        place, *words = np.broadcast_arrays(place.data, *(word.data for word in every))
        words = np.stack(words)
        return type(every[0])(np.take_along_axis(words, place[None], 0)[0])


class Device:
    """As many warps of 32 lanes for each share of a row."""

    def __init__(self, shares=1, warps=1):
        self.threads = (shares, warps, 32)
        self.share = Int32(np.arange(shares).reshape(-1, 1, 1))
        self.warp = Int32(np.arange(warps).reshape(1, -1, 1))
        self.lane = Int32(np.arange(32).reshape(1, 1, -1))

    element_type = Float32  # of the reduction buffer, which the device itself stands for

    @property
    def shape(self):
        """That of the reduction buffer, without its slots."""
        shares, warps, _ = self.threads
        return 1, (warps, shares)

    def __getitem__(self, where):
        """A word of the reduction buffer, after an exchange."""
        _, (warp, share), slot = where
        found = np.stack([each.words.reshape(self.threads[:2]) for each in self.slots])
        places = (x.data if isinstance(x, Value) else x for x in (slot, share, warp))
        return self.slots[0].kind(found[tuple(places)])

    def install(self, patch):
        """Put this device in place of CuTe-DSL, by the MonkeyPatch `patch`."""
        names = dict(
            cute=self._cute(),
            cutlass=types.SimpleNamespace(
                select_=lambda condition, a, b: apply(np.where, condition, a, b).data,
                min=_applied(np.minimum),
                max=_applied(np.maximum),
            ),
            llvm=types.SimpleNamespace(
                intr_minnum=lambda a, b: apply(np.fmin, a, b).data,
                intr_maximum=lambda a, b: apply(np.maximum, a, b).data,
                intr_minimum=lambda a, b: apply(np.minimum, a, b).data,
            ),
            arith=types.SimpleNamespace(
                shli=lambda x, count: apply(np.left_shift, x, count).data,
                shrui=lambda x, count: apply(_shifted, x, count).data,
                shrsi=lambda x, count: apply(np.right_shift, x, count).data,
            ),
            as_numeric=lambda x: x if isinstance(x, Value) else Float32(x),
            const_expr=bool,
            exchange=self._exchange,
            slots_of=self._slots_of,
            exchange_pairs=self._exchange_pairs,
            to_word=lambda value, dtype: value,
            from_word=lambda word, dtype: word,
            make_vector=lambda values, shape, dtype: Vector(
                np.stack(np.broadcast_arrays(*(dtype(v).data for v in values)), -1), shape
            ),
            extreme=lambda x, of_two: x,
            unless_rare=_unless_rare,
            Vector=Vector,
            Numeric=Value,
            **{kind.__name__: kind for kind in SCALARS.values()},
        )
        for module in MODULES:
            for name, value in names.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        patch.setattr(keys, "_one_nan", lambda x: Float32(np.where(np.isnan(x.data), NAN, x.data)))

    def _slots_of(self, buffer, count):
        """The slots of the buffer, which keep what is left in them if the buffer has `slots`."""
        kept = getattr(buffer, "slots", None)
        self.slots = [Slot(self.threads) for _ in range(count)] if kept is None else kept[:count]
        return self.slots

    def _exchange(self, words, slots, mbar_ptr, phase, abreast):
        """What `htile.compute.exchange.exchange` does: the one word of each warp in each slot."""
        for slot, (word,) in zip(slots, words, strict=True):
            slot.filled(word)

    def _exchange_pairs(self, values, reduction_buffer, mbar_ptr, phase, abreast, identity):
        """What `exchange_pairs` of the same module does."""
        slots = [[Slot(self.threads).filled(n) for n in pair] for (pair,) in values]
        pairs = []
        for pair in slots:
            numbers = zip(pair, identity, strict=True)
            found = [exchange.peers(slot, Float32, abreast, none) for slot, none in numbers]
            pairs.append(list(zip(*found, strict=True)))
        return pairs, exchange.lanes_of_peers(slots[0][0])

    def _shuffle(self, value, lane, mask_and_clamp=31):
        every = np.broadcast_to(value.data, self.threads)
        source = np.broadcast_to(lane.data if isinstance(lane, Value) else lane, self.threads)
        segments = mask_and_clamp >> 8
        source = self.lane.data & segments | source & ~segments
        return type(value)(np.take_along_axis(every, source.astype(np.int64), -1))

    def _shuffle_up(self, value, count):
        return self._shuffle(value, np.where(self.lane.data < count, 0, -count) + self.lane.data)

    def _shuffle_down(self, value, count):
        lane = self.lane.data
        return self._shuffle(value, np.where(lane + count > 31, 0, count) + lane)

    def _butterfly(self, value, op, threads_in_group=32):
        offset = threads_in_group // 2
        while offset:
            value = op(value, self._shuffle(value, self.lane.data ^ offset))
            offset //= 2
        return value

    def _redux(self, value, kind):
        every = np.broadcast_to(value.data, self.threads)
        unsigned = {"umin": np.min, "umax": np.max}
        if kind in unsigned:
            every = np.ascontiguousarray(every).view(np.uint32)
        function = (unsigned | {"max": np.max, "min": np.min, "add": np.sum})[kind]
        found = function(every, -1, keepdims=True).astype(every.dtype)
        return type(value)(np.broadcast_to(found.view(value.data.dtype), self.threads))

    def _vote(self, condition):
        every = np.broadcast_to(condition.data, self.threads)
        return Boolean(np.broadcast_to(every.all(-1, keepdims=True), self.threads))

    def _ballot(self, condition):
        bits = np.broadcast_to(condition.data, self.threads) * (np.int64(1) << np.arange(32))
        words = bits.sum(-1, keepdims=True).astype(np.uint32).view(np.int32)
        return Int32(np.broadcast_to(words, self.threads))

    def _cute(self):
        def size(x):
            shape = x.shape if isinstance(x, Vector) else x
            return shape if isinstance(shape, int) else math.prod(map(size, shape))

        def full(shape, value, dtype):
            return Vector(np.repeat(dtype(value).data[..., None], size(shape), -1), shape)

        def full_like(x, value):
            return apply(lambda a, b: np.broadcast_to(np.asarray(b, a.dtype), a.shape), x, value)

        return types.SimpleNamespace(
            TensorSSA=Vector,
            ReductionOp=cute.ReductionOp,
            size=size,
            full=full,
            full_like=full_like,
            where=_applied(np.where),
            arch=types.SimpleNamespace(
                lane_idx=lambda: self.lane,
                warp_idx=lambda: self.warp,
                shuffle_sync=self._shuffle,
                shuffle_sync_up=self._shuffle_up,
                shuffle_sync_down=self._shuffle_down,
                warp_reduction=self._butterfly,
                warp_redux_sync=self._redux,
                vote_all_sync=self._vote,
                vote_ballot_sync=self._ballot,
                rcp_approx=_applied(rcp_approx),
                fmax=lambda a, b, nan=False: apply(np.maximum if nan else np.fmax, a, b),
                fmin=lambda a, b, nan=False: apply(np.minimum if nan else np.fmin, a, b),
            ),
            math=types.SimpleNamespace(
                absf=_applied(np.abs),
                absi=_applied(np.abs),
                ceil=_applied(np.ceil),
                copysign=_applied(np.copysign),
                cos=_applied(exact(np.cos)),
                exp=_applied(exp),
                exp2=_applied(exact(np.exp2)),
                floor=_applied(np.floor),
                fma=_applied(fma),
                log2=lambda x, fastmath=False: apply(lg2_approx if fastmath else exact(np.log2), x),
                rcp=_applied(rcp_approx),
                rem=_applied(np.fmod),
                roundeven=_applied(np.rint),
                sin=_applied(exact(np.sin)),
                sqrt=lambda x, fastmath=False: apply(sqrt_approx if fastmath else np.sqrt, x),
                trunc=_applied(np.trunc),
            ),
        )
