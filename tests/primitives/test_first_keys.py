"""The first keys of a row are right: the primitives' own code runs on numpy arrays of threads."""

import numpy as np
import pytest

from htile.compute import keys, ranks, reduce
from tests.primitives.numpy_device import Buffer, Device, Float32, Int32, Int64, Vector

LOWEST = {Int32: -(2**31), Int64: -(2**63)}


def keys_of(device, elements, n, values, smaller, dtype, lanes=32, packed_bits=0):
    """Each thread's keys as a context has them, and in float64 what they are keys of, by row.

    Columns are dealt to threads in vectors of two.
    """
    shares, warps, _ = device.threads
    rows, of_row = 32 // lanes, shares * warps * lanes
    rng = np.random.default_rng(n + elements)
    column = np.arange(elements * of_row).reshape(elements // 2, shares, warps, lanes, 2)
    column = np.moveaxis(column, 0, -2).reshape(shares, warps, lanes, elements)
    column = np.tile(column, (1, 1, rows, 1)).astype(np.int64)
    row = np.repeat(np.arange(rows), lanes)[None, None, :, None]
    x = rng.choice(values, (rows, elements * of_row)).astype(np.float32)
    x = x[row, column]
    bits = (x + np.float32(0)).view(np.int32)
    ordered = np.where(np.isnan(x), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF)).astype(np.int64)
    low = column if smaller else column ^ -1
    key = (ordered << 32) | (low & 0xFFFFFFFF)
    return key, column < n, row


VALUES = {
    "many": np.arange(-1000, 1000) / 2,
    "ties": [1.0, -1.0, 0.0, -0.0, 2.0],
    "one": [-np.inf],
    "special": [np.nan, np.inf, -np.inf, 1.0, -1.0, 0.0, -0.0],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("smaller", (False, True))
@pytest.mark.parametrize("bits", (0, 13))
@pytest.mark.parametrize(
    ("shares", "warps", "lanes", "elements", "n", "k"),
    [
        (1, 1, 32, 2, 64, 8), (1, 1, 32, 8, 256, 8), (1, 1, 32, 8, 200, 64), (1, 1, 32, 6, 9, 9),
        (1, 1, 32, 12, 384, 3), (1, 1, 8, 4, 32, 8), (1, 1, 8, 32, 256, 8), (1, 1, 1, 8, 8, 8),
        (1, 1, 2, 6, 11, 10), (1, 1, 16, 16, 250, 2), (1, 2, 32, 4, 256, 64),
        (1, 3, 32, 10, 900, 8),
        (1, 4, 32, 32, 4096, 8), (1, 4, 32, 8, 1000, 64), (1, 5, 32, 2, 311, 9),
        (1, 32, 32, 4, 4001, 8), (4, 3, 32, 4, 1500, 8), (8, 8, 32, 2, 4003, 10),
        (2, 20, 32, 4, 4096, 64),
    ],
)  # fmt: skip
def test_ranks(shares, warps, lanes, elements, n, k, bits, smaller, values, monkeypatch):
    device = Device(shares, warps)
    key, is_there, row = keys_of(device, elements, n, VALUES[values], smaller, Int64, lanes)
    device.install(monkeypatch)
    found = keys.in_order(Vector(key), smaller, bits)
    dtype = Int32 if bits else Int64
    assert found.dtype is dtype
    words = np.where(is_there, found.data, LOWEST[dtype])
    words = [dtype(words[..., i]) for i in range(elements)]
    several = shares * warps > 1
    buffer = Buffer(device.threads, k) if several else None
    found = ranks.first_of_row(words, k, warps * lanes, buffer, "mbar" if shares > 1 else None)
    found = [keys.as_key(each, smaller, bits) for each in found]
    found = np.stack([np.broadcast_to(each.data, device.threads) for each in found], -1)
    for r in range(32 // lanes):
        of_row = np.broadcast_to(row == r, key.shape)
        expected = np.sort(key[of_row & is_there])
        expected = expected[:k] if smaller else expected[::-1][:k]
        threads = np.broadcast_to((row == r)[..., 0], device.threads)
        every = found[threads]
        nan = (expected >> 32) == 2**31 - 1  # its bits may change
        assert (every == every[0]).all()
        assert np.array_equal(every[0][~nan], expected[~nan])
        assert np.array_equal(every[0] & 0xFFFFFFFF, expected & 0xFFFFFFFF)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("shares", "warps", "lanes", "elements", "n"),
    [
        (1, 1, 32, 2, 64), (1, 1, 32, 8, 200), (1, 1, 8, 32, 256), (1, 1, 1, 8, 8),
        (1, 4, 32, 32, 4096), (1, 5, 32, 2, 311), (4, 3, 32, 4, 1500), (8, 8, 32, 2, 4003),
    ],
)  # fmt: skip
def test_the_first_of_the_largest(shares, warps, lanes, elements, n, values, monkeypatch):
    """Of all its elements a thread makes one key, whose index is that of numpy's argmax."""
    device = Device(shares, warps)
    key, is_there, row = keys_of(device, elements, n, VALUES[values], False, Int64, lanes)
    device.install(monkeypatch)
    column = ((key & 0xFFFFFFFF) ^ 0xFFFFFFFF).astype(np.int32)
    x = np.asarray(keys.key_value(Vector(key), Float32).data, np.float32)
    padded = np.where(is_there, x, np.float32("-inf"))
    buffer = Buffer(device.threads, 1) if shares * warps > 1 else None
    if buffer is not None:
        buffer.element_type = Int64
    mbar = "mbar" if shares > 1 else None
    given = keys.Indexed(Vector(padded), Vector(column))
    found = reduce.row_reduce(given, reduce.MAX, warps * lanes, buffer, mbar)
    found = np.broadcast_to(keys.key_index(found).data, device.threads)
    for r in range(32 // lanes):
        of_row = np.broadcast_to(row == r, key.shape) & is_there
        expected = x[of_row][np.argsort(column[of_row])].argmax()
        assert (found[np.broadcast_to((row == r)[..., 0], device.threads)] == expected).all()


@pytest.mark.parametrize("values", VALUES)
def test_the_first_of_the_largest_chunk_by_chunk(values, monkeypatch):
    """A loop carries one key, and goes on with those of each chunk."""
    device = Device(1, 1)
    rng = np.random.default_rng(len(values))
    x = rng.choice(VALUES[values], (4, *device.threads, 8)).astype(np.float32)
    index = np.arange(x.size, dtype=np.int32).reshape(4, -1, 8).reshape(x.shape)
    device.install(monkeypatch)
    carried = Vector(np.full((*device.threads, 8), LOWEST[Int64], np.int64))
    for chunk in range(4):
        given = keys.Indexed(Vector(x[chunk]), Vector(index[chunk]))
        carried = reduce.combine(reduce.MAX, carried, given)
    found = reduce.row_reduce(carried, reduce.MAX, 32)
    assert (keys.key_index(found).data == x.reshape(-1).argmax()).all()


def test_the_last_float_below(monkeypatch):
    """Of a number and of its rank they are one, except below zero: there a rank has -0.0."""
    Device(1, 1).install(monkeypatch)
    least, most = np.float32(1e-45), np.finfo(np.float32).max
    x = [np.inf, most, 1.5, least, 0.0, -0.0, -least, -2.0, -most, -np.inf, np.nan]
    x = np.array(x, np.float32)
    below = np.where(np.isnan(x), np.float32("inf"), np.nextafter(x, np.float32("-inf")))
    below[x == -np.inf] = np.nan
    found = keys._next_below(Float32(x)).data
    np.testing.assert_array_equal(found, below)
    of_rank = keys.last_below(keys.ordered(Float32(x))).data
    np.testing.assert_array_equal(of_rank[x != 0], below[x != 0])
    assert (of_rank[x == 0] == 0).all() and (found[x == 0] == -least).all()


@pytest.mark.parametrize("lanes", (1, 4, 32))
@pytest.mark.parametrize("op", ("MAX", "MIN"))
@pytest.mark.parametrize("dtype", (Int32, Int64))
def test_the_extreme_integer_of_lanes(dtype, op, lanes, monkeypatch):
    """Numbers whose upper words are equal are told apart by their lower ones, without a sign."""
    device = Device(1, 1)
    rng = np.random.default_rng(lanes)
    info = np.iinfo(np.int32 if dtype is Int32 else np.int64)
    ends = [info.min, info.max, -1, 0, 1, 2**31 - 1, -(2**31)]
    x = rng.choice(np.array(ends, info.dtype), device.threads)
    device.install(monkeypatch)
    found = reduce.warp_reduce(dtype(x), getattr(reduce, op), lanes)
    groups = x.reshape(-1, lanes)
    expected = groups.max(-1) if op == "MAX" else groups.min(-1)
    assert np.array_equal(np.broadcast_to(found.data, x.shape).reshape(-1, lanes)[:, 0], expected)
