"""Rows in several leading dimensions that are not equally far apart. The PTX runs on numpy."""

import torch

import htile
from htile.lower.choice.cost import features
from tests.primitives.ptx_device import launch


@htile.rowwise
def turned(x, y):
    a, b = x.chunk(2)
    return torch.cat((a * y[:32] - b, b + a)), (x * y).sum()


def apart(*lead, n=64):
    """Rows of three leading dimensions, two of which lie in memory in the other order."""
    a, b, c = lead
    return torch.randn(a, c, b, n).transpose(1, 2), torch.randn(b, a, c, n).transpose(0, 1)


def test_the_number_of_a_row_is_divided_once_for_all_tensors():
    """Seven tensors, each of two pieces or of one number a row, in three leading dimensions."""
    x, y = apart(3, 4, 5)
    kernel = turned.inspect(x, y, arch="sm_90a")
    assert kernel.source.count("as_rows(") + kernel.source.count("as_row_values(") == 7
    assert "flat=True" not in kernel.source
    assert kernel.ptx.count("div.") == 2 and "rem." not in kernel.ptx


def test_every_row_is_that_of_its_place():
    x, y = apart(3, 4, 5)
    kernel = turned.inspect(x, y, arch="sm_90a")
    out, total = torch.zeros(3, 4, 5, 64), torch.zeros(3, 4, 5)
    blocks = -(-60 // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [x, y, out, total], is_emitted=True, is_uncut=True)
    expected, of_rows = turned(x, y)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, of_rows, rtol=1e-5, atol=1e-5)


def test_the_divisions_count():
    x, y = apart(3, 4, 5)
    found = turned.inspect(x, y, arch="sm_90a").plan
    flat = turned.inspect(x.contiguous(), y.contiguous(), arch="sm_90a").plan
    assert found.numerics == flat.numerics, "numerics hang on no strides"
    more = features(found, 60).computed - features(flat, 60).computed
    # Two leading dimensions beside the first: a division each, and a step of each of three tensors.
    assert more == 2 * (25 + 3 * 6) * features(flat, 60).threads


def test_a_column_beside_them_has_no_leading_dimensions():
    @htile.rowwise
    def scaled(x, y, w):
        return x * w + y

    x, y = apart(3, 4, 5)
    w, out = torch.randn(64), torch.zeros(3, 4, 5, 64)
    kernel = scaled.inspect(x, y, w, arch="sm_90a")
    launch(kernel.ptx, (-(-60 // kernel.plan.rows_per_block), 1), [x, y, w, out], is_emitted=True)
    torch.testing.assert_close(out, scaled(x, y, w), rtol=1e-6, atol=1e-6)


def test_a_number_summed_over_them():
    """The gradient of a scalar: each CTA has a part of it, and CTAs have one dimension."""

    @htile.rowwise
    def times(x, y, scale: htile.Scalar):
        return x * y * scale

    x, y = (t.to("meta").requires_grad_() for t in apart(3, 4, 5))
    scale = torch.empty((), device="meta", requires_grad=True)
    training = times.inspect(x, y, scale, arch="sm_90a").training
    assert "Parts(" in training.backward.source
    assert training.backward.ptx
