"""Every example on the GPU: against the oracle, and bit-equal in every batch and alignment."""

import pytest
import torch

from htile.testing import assert_close, float32_errors

from .matrix import (
    BATCHES,
    BF16,
    DTYPES,
    EXAMPLES,
    F16,
    F32,
    SIZES,
    assert_same_bits,
    job,
    rows_of,
    run,
    seed,
    shifted,
    short,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

BIT_DTYPES, BIT_ROWS, MOVED_ROWS = (BF16, F32), 5000, 64
BIT_SIZES = (127, 1000, 4096, 8191, 20001, 65536)
OFFSETS = (2, 4, 8, 16)  # bytes
IN_F16 = (3, 127, 4096, 16384)  # the lengths that float16 has too
CASES = [(n, dtype) for n in SIZES for dtype in DTYPES if dtype is not F16 or n in IN_F16]


def jobs(arch):
    """All sizes and dtypes; and those of bit-equality in every alignment."""
    for f, arguments in EXAMPLES.values():
        for n, dtype in CASES:
            for m in (7, max(BATCHES)):  # few rows and many
                yield job(f, arguments(m, n, dtype, "meta"), arch)
        for dtype in BIT_DTYPES:
            for n in BIT_SIZES:
                for m in (3, MOVED_ROWS, BIT_ROWS):
                    yield job(f, arguments(m, n, dtype, "meta"), arch)
                args = arguments(MOVED_ROWS, n, dtype, "meta")
                for moved in misaligned(args, dtype):
                    yield job(f, moved, arch)


def misaligned(args, dtype):
    """The arguments with all their rows moved, once for each offset."""
    for offset in OFFSETS:
        if elements := offset // dtype.itemsize:
            yield tuple(
                shifted(a, elements) if isinstance(a, torch.Tensor) and a.ndim == 2 else a
                for a in args
            )


@pytest.mark.parametrize(("n", "dtype"), CASES, ids=short)
@pytest.mark.parametrize("name", EXAMPLES)
def test_oracle(device, name, dtype, n):
    f, arguments = EXAMPLES[name]
    errors = None
    for m in sorted(BATCHES, reverse=True):
        seed(name, dtype, n, m)
        args = arguments(m, n, dtype, device)
        errors = float32_errors(f, *args) if errors is None else errors  # of the most rows
        assert_close(f, run(f, *args), *args, torch_errors=errors)


@pytest.mark.parametrize("n", BIT_SIZES)
@pytest.mark.parametrize("dtype", BIT_DTYPES, ids=short)
@pytest.mark.parametrize("name", EXAMPLES)
def test_bits_depend_on_the_row_alone(device, name, dtype, n):
    f, arguments = EXAMPLES[name]
    seed(name, dtype, n)
    args = arguments(BIT_ROWS, n, dtype, device)
    expected = run(f, *args)

    def some(rows):
        return [a[rows] if is_per_row(a) else a for a in args]

    def is_per_row(a):
        return isinstance(a, torch.Tensor) and len(a) == BIT_ROWS

    assert_close(f, rows_of(expected, slice(0, 64)), *some(slice(0, 64)))
    for first, count in ((0, 1), (2718, 1), (4999, 1), (0, 3), (4997, 3), (1234, 64), (4936, 64)):
        rows = slice(first, first + count)
        assert_same_bits(run(f, *some(rows)), rows_of(expected, rows), (first, count))
    reverse = torch.arange(BIT_ROWS - 1, -1, -1, device=device)
    assert_same_bits(run(f, *some(reverse)), rows_of(expected, reverse), "reversed")


@pytest.mark.parametrize("n", BIT_SIZES)
@pytest.mark.parametrize("dtype", BIT_DTYPES, ids=short)
@pytest.mark.parametrize("name", EXAMPLES)
def test_bits_do_not_depend_on_alignment(device, name, dtype, n):
    f, arguments = EXAMPLES[name]
    seed(name, dtype, n)
    args = arguments(MOVED_ROWS, n, dtype, device)
    expected = run(f, *args)
    assert_close(f, expected, *args)
    for moved in misaligned(args, dtype):
        offset = moved[0].data_ptr() - moved[0].untyped_storage().data_ptr()
        assert_same_bits(run(f, *moved), expected, f"{offset} bytes off")
