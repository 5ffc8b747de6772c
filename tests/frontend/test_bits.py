"""The bits of integers: `& | ^ ~ << >>` of rows, of values per row and of numbers, as torch's."""

from __future__ import annotations

import itertools

import pytest
import torch

import htile
from htile.errors import DtypeError, UnsupportedError
from htile.frontend.ops import Op
from htile.lower.passes.narrow import _range
from tests.frontend.test_indices import exact, kernels_graph
from tests.lower.cases import kernel_of

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
N = 24
BINARY = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "left": lambda a, b: a << b, "right": lambda a, b: a >> b,
    "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor, "bitwise_left_shift": torch.bitwise_left_shift,
    "bitwise_right_shift": torch.bitwise_right_shift,
    "methods": lambda a, b: a.bitwise_and(b) | a.bitwise_left_shift(b).bitwise_xor(~b),
}  # fmt: skip


def integers(dtype, *shape, seed=0):
    """Of all magnitudes, both signs, with the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator)
    x = x >> torch.randint(0, info.bits, shape, dtype=dtype, generator=generator)
    ends = torch.tensor([info.max, info.min, 0, -1, 1], dtype=dtype)
    flat = x.view(-1)
    flat[: min(5, len(flat))] = ends[: len(flat)]
    return x


def counts(dtype, rows, n):
    """Of bits to shift by: all that there are, negative ones, and some beyond the width."""
    return (torch.arange(rows * n, dtype=dtype) % 72 - 3).view(rows, n)


@pytest.mark.parametrize("dtypes", [*itertools.product((I32, I64), repeat=2)], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_of_two_rows(name, dtypes):
    body = BINARY[name]
    f = htile.rowwise(lambda a, b: body(a, b))
    a = integers(dtypes[0], 6, N)
    for b in (integers(dtypes[1], 6, N, seed=1), counts(dtypes[1], 6, N)):
        exact(f(a, b), body(a, b))


@pytest.mark.parametrize("dtype", (I32, I64), ids=str)
@pytest.mark.parametrize("number", (0, 1, 31, 32, 63, 64, -1, 255, True))
@pytest.mark.parametrize("name", ("and", "or", "xor", "left", "right"))
def test_with_a_number_on_either_side(name, number, dtype):
    """In the kernel's graph too, where constants are folded."""
    body = BINARY[name]
    f = htile.rowwise(lambda a: (body(a, number), body(number, a)))
    a = integers(dtype, 3, N)
    expected = body(a, number), body(number, a)
    for found, right in zip(f(a), expected, strict=True):
        exact(found, right)
    for found, right in zip(kernels_graph(f, (a,), (3,)), expected, strict=True):
        exact(found, right)


def test_of_values_of_a_row_and_of_columns():
    @htile.rowwise
    def f(x, mask, k: htile.PerRow, s: htile.Scalar):
        return x & k, (x ^ mask) | s, ~k, k >> 3 << 3, x >> k, ~x, ~(x & 1 == 1)

    x, mask, k = integers(I64, 5, N), integers(I32, N), integers(I64, 5, seed=2)
    s = torch.tensor(5, dtype=I32)
    column = k[:, None]
    expected = (x & column, (x ^ mask) | s, ~k, k >> 3 << 3, x >> column, ~x, x & 1 == 0)
    for found, right in zip(f(x, mask, k, s), expected, strict=True):
        exact(found, right)


def test_masks_stay_logical():
    f = htile.rowwise(lambda a, b, i: (a & b, a | b, a ^ b, ~a, a & i, a ^ 1, i | True))
    a, b = integers(I32, 2, 4, N) > 0
    i = integers(I32, 4, N)
    for found, right in zip(f(a, b, i), (a & b, a | b, a ^ b, ~a, a & i, a ^ 1, i | True),
                            strict=True):  # fmt: skip
        exact(found, right)


def test_in_place():
    @htile.rowwise
    def f(x, y):
        x &= y
        x |= 8
        x ^= 3
        x <<= 2
        x >>= 1
        return x

    x, y = integers(I32, 3, N), integers(I32, 3, N, seed=1)
    exact(f(x.clone(), y), (((x & y) | 8) ^ 3) << 2 >> 1)


@pytest.mark.parametrize("dtype", (I32, I64, torch.uint8, torch.int8), ids=str)
@pytest.mark.parametrize("base", (2, 3, 4, 5, 10, 16, 1, 0, -1, -2, -3))
def test_a_number_to_the_power_of_integers(base, dtype):
    """Negative exponents, and those that leave nothing of the lower bits, are among them."""
    if dtype is torch.uint8 and base < 0:
        return
    e = torch.arange(-20, 108).to(dtype).repeat(2, 1)
    e[1, :4] = torch.tensor([100, 63, 31, 32]).to(dtype)
    f = lambda e: (base**e + 0 * e, torch.pow(base, e) | e)  # noqa: E731
    for found, of_kernel, expected in zip(
        htile.rowwise(f)(e), kernels_graph(htile.rowwise(f), (e,), (2,)), f(e), strict=True
    ):
        exact(found, expected)
        exact(of_kernel, expected)


def test_numbers_and_bits_of_signs():
    """The code of a row of signs, as quantizers without a table of codes have it."""

    def f(x):
        n = x.shape[-1]
        code = ((x > 0).long() * 2 ** torch.arange(n)).sum(-1, keepdim=True)
        return code, (code & torch.tensor(2) ** torch.arange(n - 1, -1, -1)) != 0

    x = torch.randn(4, 17)
    for found, expected in zip(htile.rowwise(f)(x), f(x), strict=True):
        exact(found, expected)
    with pytest.raises(UnsupportedError, match="write the base as a Python number"):
        htile.rowwise(lambda k: k**k)(torch.ones(2, 8, dtype=I64))


BYTES = (torch.uint8, torch.int8)
OF_BYTES = ("and", "or", "xor", "left", "right")


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", OF_BYTES)
def test_all_pairs_of_8_bits(name, dtype):
    body = BINARY[name]
    a = torch.arange(256).to(dtype)[:, None].expand(256, 256).contiguous()
    b = a.t().contiguous()
    exact(htile.rowwise(lambda a, b: body(a, b))(a, b), body(a, b))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", OF_BYTES)
def test_8_bits_with_numbers_masks_and_wide_integers(name, dtype):
    body = BINARY[name]
    a = torch.arange(256).to(dtype).view(2, 128)
    for number in (0, 1, 7, 8, 31, 127, True):
        for f in (lambda a: body(a, number), lambda a: body(number, a)):  # noqa: B023
            exact(htile.rowwise(f)(a), f(a))
            exact(kernels_graph(htile.rowwise(f), (a,), (2,)), f(a))
    f = lambda a, i, k: (body(a, i), body(i, a), body(a, k), body(k, a))  # noqa: E731
    given = a, a.int() // 9, a > 9
    for found, expected in zip(htile.rowwise(f)(*given), f(*given), strict=True):
        exact(found, expected)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("wide", (torch.int64, I32, *BYTES), ids=str)
@pytest.mark.parametrize("name", OF_BYTES)
def test_8_bits_with_a_number_of_the_row(name, wide, dtype):
    """torch cuts it to 8 bits first, whatever its dtype is."""
    body = BINARY[name]

    def f(a, k: htile.PerRow):
        return body(a, k), body(k, a)

    a, k = torch.arange(256).to(dtype).repeat(5, 1), torch.tensor([300, 258, -1, 3, 200]).to(wide)
    each = [f(*pair) for pair in zip(a, k, strict=True)]
    for found, expected in zip(htile.rowwise(f)(a, k), zip(*each, strict=True), strict=True):
        exact(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", ("and", "or", "xor"))
def test_8_bits_with_numbers_beyond_them(name, dtype):
    body, a = BINARY[name], torch.arange(256).to(dtype).view(2, 128)
    for number in (~3, -2, 0x1FF, 256, 300, -200):
        f = lambda a: body(a, number)  # noqa: B023, E731
        exact(htile.rowwise(f)(a), f(a))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_8_bits_inverted_and_in_place(dtype):
    def f(a, b):
        b = b.clone()
        b &= 60
        b <<= 2
        b |= a
        return ~a, b, (a >> 4).float()

    a = torch.arange(256).to(dtype).view(2, 128)
    for found, expected in zip(htile.rowwise(f)(a, a.flip(0)), f(a, a.flip(0)), strict=True):
        exact(found, expected)
    meta = a.to("meta")
    assert not htile.rowwise(f).inspect(meta, meta, arch="sm_90a").resources.stack


def test_8_bits_of_both_kinds_are_refused():
    """torch gives int16, which no kernel has."""
    a = torch.ones(2, N, dtype=torch.uint8)
    with pytest.raises(DtypeError, match=r"convert it first, x\.float\(\) or x\.int\(\)"):
        htile.rowwise(lambda a, b: a & b)(a, a.to(torch.int8))


REFUSED = {
    "& of a float": (lambda x, k: x & 1, "& of f32"),
    "a number & a float": (lambda x, k: 1 & x, "& of f32"),
    "| with a float number": (lambda x, k: k | 1.0, "| of a float"),
    "^ of a mask and a float": (lambda x, k: k ^ x, "^ of f32"),
    "~ of a float": (lambda x, k: ~x, "~ of f32"),
    "<< of a float": (lambda x, k: x << 1, "<< of f32"),
    ">> by a float": (lambda x, k: k.int() >> x, ">> of f32"),
    "<< of masks": (lambda x, k: k << k, "<< of bool"),
    ">> of masks": (lambda x, k: torch.bitwise_right_shift(k, True), ">> of bool"),
    "a number beyond int32": (lambda x, k: k.int() & 2**31, "does not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    body, message = REFUSED[name]
    f = htile.rowwise(lambda x, k: body(x, k))
    with pytest.raises(DtypeError) as raised:
        f(torch.ones(2, N), torch.ones(2, N, dtype=BOOL))
    assert message in raised.value.message and "test_bits.py" in str(raised.value)
    if "beyond" not in name:  # there torch drops the upper bits
        with pytest.raises((NotImplementedError, TypeError)):
            body(torch.ones(N), torch.ones(N, dtype=BOOL))


# ---- columns in int32 ---------------------------------------------------------------------------

OF_COLUMNS = {
    "a quarter": lambda c: c >> 2, "the lowest two": lambda c: c & 3,
    "without them": lambda c: c & ~3, "swapped": lambda c: c ^ 1, "set": lambda c: c | 64,
    "inverted": lambda c: ~c & 7, "signs": lambda c: (c - 9) >> 1,
    "negative": lambda c: (c - 9) ^ (c - 20),
    "times 8": lambda c: c << 3, "both": lambda c: (c - 5) & (3 - c),
    "or of negative ones": lambda c: (c - 5) | 2,
}  # fmt: skip
WIDE = {
    "by a row's count": lambda c, k: c << k, "beyond int32": lambda c, k: c << 40,
    "of a row": lambda c, k: (c ^ k) >> 1, "beyond the width": lambda c, k: (c - 9) >> 40,
    "of int64": lambda c, k: c & 2**40 - 1 | 2**40, "negative counts": lambda c, k: c << -1,
}  # fmt: skip


@pytest.mark.parametrize("n", (1, 7, 1003))
@pytest.mark.parametrize("name", [*OF_COLUMNS, *WIDE])
def test_columns(name, n):
    """The graph of the kernel, with columns in int32, against torch; narrow where it may be."""

    narrow = OF_COLUMNS.get(name)
    body = WIDE[name] if narrow is None else lambda c, k: narrow(c)
    f = htile.rowwise(lambda x, k: torch.where(x > 0, body(torch.arange(x.shape[-1]), k), k))
    x, k = torch.ones(4, n), integers(I64, 4, n)
    found = kernels_graph(f, (x, k), (4,))
    exact(found, body(torch.arange(n), k).expand(4, n).contiguous())


@pytest.mark.parametrize("name", OF_COLUMNS)
def test_bits_of_columns_are_computed_in_int32(name):
    body = OF_COLUMNS[name]

    def f(x):
        return x * body(torch.arange(x.shape[-1]))

    graph = kernel_of(f, torch.empty(8, 1000, device="meta")).graph
    assert not [node for node in graph if node.value.dtype is I64]


def test_ranges_hold_every_value():
    """Of all operations of bits, for all small ranges."""
    ends = [(lo, hi) for lo in range(-9, 10, 2) for hi in range(lo, 10, 3)]
    torchs = {Op.AND: torch.bitwise_and, Op.OR: torch.bitwise_or, Op.XOR: torch.bitwise_xor}
    for (a, b), (op, function) in itertools.product(
        itertools.product(ends, repeat=2), torchs.items()
    ):
        x, y = (torch.arange(lo, hi + 1) for lo, hi in (a, b))
        made = function(x[:, None], y)
        low, high = _range(op, [a, b])
        assert low <= made.min() and made.max() <= high, (op, a, b)
        assert max(-low, high) <= 16, "no more bits than the operands have"
    for (lo, hi), count in itertools.product(ends, range(4)):
        assert _range(Op.LSHIFT, [(lo, hi), (count, count)]) == (lo << count, hi << count)
        assert _range(Op.RSHIFT, [(lo, hi), (count, count)]) == (lo >> count, hi >> count)
        assert _range(Op.NOT, [(lo, hi)]) == (~hi, ~lo)
    for count in (-1, 32, 33, 64):
        assert _range(Op.LSHIFT, [(0, 1), (count, count)]) is None
        assert _range(Op.RSHIFT, [(-1, 1), (count, count)]) is None


@pytest.mark.parametrize("count", (0, 4, 31))
def test_a_product_is_shifted_by_a_constant(count):
    """The compiler crashed, so such a shift is a product."""

    @htile.rowwise
    def f(x):
        code = (x > 0.25).int() + 8 * (x < 0)
        return code << count, code.long() << torch.tensor(2 * count + 1), 3 * code << count

    x = torch.randn(3, 40)
    code = (x > 0.25).int() + 8 * (x < 0)
    expected = code << count, code.long() << 2 * count + 1, 3 * code << count
    for found, right in zip(f(x), expected, strict=True):
        assert torch.equal(found, right)
    assert not f.inspect(x.to("meta"), arch="sm_90a").resources.stack
