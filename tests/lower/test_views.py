"""Pieces of a tensor share the address of their row. The PTX runs on numpy."""

import re

import pytest
import torch

import htile
from tests.primitives.ptx_device import launch


@htile.rowwise
def turned(x, cos, sin):
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


@htile.rowwise
def quarters(x):
    a, b, c, d = x.chunk(4)
    return torch.cat((d - a, c * b, a + c, b))


@htile.rowwise
def first_half(x):
    return x.chunk(2)[0] * 3


@htile.rowwise
def gained(x, gain: htile.Inner[1], table: htile.Shared):
    low, high = table[gain[1].long()].chunk(2)
    return x * gain[0] + low, x - high


@htile.rowwise
def of_its_first(x):
    return x * x[0]


def parameters(kernel):
    """The tensors that the kernel, and not the host function, takes."""
    head = kernel.source.split("_kernel(")[1].split("):")[0]
    return re.findall(r"(\w+): cute\.Tensor", head)


def wide_products(kernel):
    """How many products of 64 bits a thread computes: those of rows and strides."""
    return sum(kernel.ptx.count(each) for each in ("mul.lo.s64", "mad.lo.s64"))


def test_a_kernel_of_two_pieces_takes_the_tensor_itself():
    x, angle = torch.empty(8, 128, device="meta"), torch.empty(8, 64, device="meta")
    kernel = turned.inspect(x, angle, angle, arch="sm_90a")
    assert parameters(kernel) == ["mX", "mCos", "mSin", "mOut"]
    assert wide_products(kernel) == 4, "one address of a row for each tensor"


def test_a_kernel_of_one_piece_takes_the_piece():
    kernel = first_half.inspect(torch.empty(8, 128, device="meta"), arch="sm_90a")
    kernel_text, host_text = kernel.source.split("@cute.jit")
    assert "= view_of(" in host_text and "= view_of(" not in kernel_text
    assert parameters(kernel) == ["mX0", "mOut"]


def test_more_pieces_cost_no_more_addresses():
    kernel = quarters.inspect(torch.empty(8, 128, device="meta"), arch="sm_90a")
    assert kernel.source.count("= view_of(") == 8
    assert wide_products(kernel) == 2


def test_a_row_and_one_of_its_elements_share_their_address():
    kernel = of_its_first.inspect(torch.empty(8, 128, device="meta"), arch="sm_90a")
    assert parameters(kernel) == ["mX", "mOut"]
    assert wide_products(kernel) == 2


def run(kernel, rows, tensors):
    grid = -(-rows // kernel.plan.rows_per_block), 1
    launch(kernel.ptx, grid, tensors, is_emitted=True, is_uncut=True)


def in_float64(x, cos, sin):
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize("n", [64, 66, 72, 130])
def test_pieces_are_those_of_their_rows(n):
    x, cos, sin, out = torch.randn(5, n), *torch.rand(2, 5, n // 2), torch.zeros(5, n)
    run(turned.inspect(x, cos, sin, arch="sm_90a"), 5, [x, cos, sin, out])
    expected = in_float64(x, cos, sin)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_four_pieces_are_those_of_their_rows():
    x, out = torch.randn(5, 96), torch.zeros(5, 96)
    run(quarters.inspect(x, arch="sm_90a"), 5, [x, out])
    a, b, c, d = x.double().chunk(4, -1)
    expected = torch.cat((d - a, c * b, a + c, b), -1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


def test_rows_that_lie_apart():
    """Each row is found by the stride of its own tensor, not by that of another."""
    wide = torch.randn(7, 300)
    x, cos, around = wide[:, :128], torch.randn(14, 64)[::2], torch.zeros(7, 160)
    out = around[:, :128]
    sin = torch.randn(1, 64).expand(7, 64)
    run(turned.inspect(x, cos, sin, arch="sm_90a"), 7, [x, cos, sin, out])
    expected = in_float64(x, cos, sin)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert not around[:, 128:].any()


@pytest.mark.parametrize("apart", [False, True], ids=["flat", "apart"])
def test_leading_dimensions_that_some_tensors_repeat(apart):
    """The kernel itself makes one mode of them, of tensors that have them all and of others."""
    x, out = torch.randn(3, 4, 64), torch.zeros(3, 4, 64)
    x = torch.randn(4, 3, 64).transpose(0, 1) if apart else x
    cos, sin = torch.randn(2, 4, 32)
    kernel = turned.inspect(x, cos, sin, arch="sm_90a")
    assert "lead = mOut.shape[:2]" in kernel.source.split("@cute.jit")[0]
    run(kernel, 12, [x, cos, sin, out])
    a, b = x.double().chunk(2, -1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_number_that_the_host_computes():
    @htile.rowwise
    def scaled(x, scale: float):
        a, b = x.chunk(2)
        return torch.cat((b / (1 - scale), a))

    kernel = scaled.inspect(torch.randn(5, 64), 3.0, arch="sm_90a")
    kernel_text, host_text = kernel.source.split("@cute.kernel")[1].split("@cute.jit")
    assert "Float64" not in kernel_text and "= Float32(" in host_text
    assert parameters(kernel) == ["mX", "mOut"] and kernel.ptx


def test_pieces_of_numbers_and_of_tables():
    x, gain = torch.randn(6, 64), torch.stack((torch.randn(6), torch.arange(6.0) % 3), -1)
    table, one, two = torch.randn(3, 128), torch.zeros(6, 64), torch.zeros(6, 64)
    kernel = gained.inspect(x, gain, table, arch="sm_90a")
    run(kernel, 6, [x, gain, table, one, two])
    low, high = table[gain[:, 1].long()].double().chunk(2, -1)
    expected = x.double() * gain[:, :1] + low, x.double() - high
    torch.testing.assert_close(one.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(two.double(), expected[1], rtol=1e-5, atol=1e-6)
