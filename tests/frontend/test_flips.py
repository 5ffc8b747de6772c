"""Rows and axes in the opposite order: what waits to be turned, what is turned, and what cannot."""

import numpy as np
import pytest
import torch

import htile
from htile.errors import ShapeError, UnsupportedError
from htile.frontend.ops import Op
from htile.testing import assert_close


def changed(x):
    y = x.flip(-1)
    z = y.flip(-1)
    y += 1
    z *= 2
    return y.sum(), z


def changed_before(x):
    y = x.flip(0)
    x = x * 2
    x += 1
    return y.flip(0) - x


def without_gradient(x):
    with torch.no_grad():
        y = x.flip(-1)
    return y.cumsum(-1).flip(-1) * x


# What can be computed without turning a row, and so of any length.
WAITS = {
    "a sum from the end": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "of the function": lambda x: torch.flip(torch.cumsum(torch.flip(x, (-1,)), 0), [0]),
    "of several steps": lambda x: (x.flip(0) * 2).exp().clamp(max=3).cumsum(0).flip(0) - x,
    "discounted": lambda x: (x * 0.9 ** torch.arange(x.shape[-1])).flip(-1).cumsum(-1).flip(-1),
    "beside numbers": lambda x: (x.flip(-1) - x.mean()).cumsum(-1).flip(-1) / x.abs().amax(),
    "beside constants": lambda x: torch.where(x.flip(0) > 0, torch.ones_like(x), 0).flip(0) + x,
    "two rows": lambda x: torch.maximum(x.flip(0), (x + 1).flip(0)).flip(0),
    "minima from the end": lambda x: x.flip(-1).cummin(-1).values.flip(-1),
    "maxima from the end": lambda x: torch.cummax(x.detach().flip(0), 0)[0].flip(0) * x,
    "both ways": lambda x: x.flip(-1).cumsum(-1).flip(-1).cumsum(-1),
    "reductions": lambda x: (x.flip(-1).exp().sum(), x.flip(0).max(), (x.flip(0) > 0).any()),
    "a reduction of a sum": lambda x: x.flip(-1).cumsum(-1).amax(),
    "groups": lambda x: x.view(2, -1).flip((0, 1)).cumsum(-1).flip(-1).flip(0).flatten(),
    "sums beside": lambda x: x.view(2, -1).flip(-1).sum(0).flip(0),
    "groups, twice": lambda x: x.view(-1, 4).flip(0).sum(-1).flip(0),
    "other dtypes": lambda x: x.flip(-1).to(torch.bfloat16).float().cumsum(-1).flip(-1),
    "changed before": changed_before,
    "without a gradient": without_gradient,
    "no axis": lambda x: x.flip(()) + torch.flip(x.view(2, -1), dims=[]).flatten(),
    "a keyword": lambda x: x.flip(dims=(0,)).cumsum(-1).flip(dims=[-1]),
    "axes apart": lambda x: x.view(2, -1).flip(0, 1).cumsum(-1).flip(0, 1).flatten(),
    "copies": lambda x: x.flip(-1).clone().contiguous().view(-1).cumsum(-1)[...].flip(-1).clone(),
    "detached": lambda x: x.flip(-1).detach().float().cumsum(-1).to(x.dtype).flip(-1) * x,
    "one element": lambda x: x[:1].flip(0) + x,
}
# What is turned round in the kernel, an element at a time.
TURNED = {
    "a row": lambda x: x.flip(-1),
    "beside itself": lambda x: x + x.flip(-1),
    "from the front": lambda x: x.flip(-1).cumsum(-1),
    "products": lambda x: x.flip(-1).cumprod(-1).flip(-1),
    "of a sum": lambda x: x.cumsum(-1).flip(-1),
    "parts": lambda x: x.flip(-1)[2:5],
    "an index": lambda x: x.flip(0).argmax(),
    "columns": lambda x: x.flip(0) * torch.arange(x.shape[0]),
    "changed": changed,
}
OF_SCANS = ("from the front", "products", "of a sum")
PAIRS = {
    "pairs": lambda x: x.view(-1, 2).flip(-1).flatten(),
    "halves": lambda x: x.view(2, -1).flip(0).flatten(),
}


def rows(n):
    torch.manual_seed(n)
    return torch.rand(3, n) * 2 - 0.75


def check(f, x):
    torch.testing.assert_close(htile.rowwise(f)(x), torch.vmap(f)(x))
    assert_close(htile.rowwise(f), htile.rowwise(f)(x), x)


@pytest.mark.parametrize("n", [8, 100])
@pytest.mark.parametrize("name", WAITS | PAIRS)
def test_what_can_wait(name, n):
    check((WAITS | PAIRS)[name], rows(n))


@pytest.mark.parametrize("name", TURNED)
def test_what_is_turned(name):
    check(TURNED[name], rows(8))


@pytest.mark.parametrize("dtype", [
    torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool,
], ids=str)  # fmt: skip
def test_every_dtype_stays(dtype):
    x = (rows(8) * 9).to(dtype)
    for f in (lambda x: x.flip(-1), lambda x: x.flip(0).flip(0)):
        result, expected = htile.rowwise(f)(x), torch.vmap(f)(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("n", [65, 200])
@pytest.mark.parametrize("name", [name for name in TURNED if name not in OF_SCANS])
def test_long_rows_are_turned(name, n):
    """Each element is loaded from its place."""
    check(TURNED[name], rows(n))


@pytest.mark.parametrize("name", OF_SCANS)
def test_long_rows_that_are_scanned_are_not_turned(name):
    with pytest.raises(UnsupportedError, match=r"more than 64 .* or pass x\.flip") as caught:
        htile.rowwise(TURNED[name])(rows(65))
    assert "flip" in caught.value.loc.text


@pytest.mark.parametrize("n", [8, 100])
def test_a_sum_from_the_end_is_one_scan(n):
    graph = htile.rowwise(WAITS["a sum from the end"]).inspect(rows(n)).graph
    assert [node.op for node in graph] == [Op.INPUT, Op.SUM_FROM_END]


def test_any_length():
    f = htile.rowwise(dynamic_n=True)(WAITS["a sum from the end"])
    for n in (70, 101):
        expected = np.cumsum(rows(n).double().numpy()[:, ::-1], -1)[:, ::-1]
        np.testing.assert_allclose(f(rows(n)).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["discounted", "several", "pairs", "halves"])
def test_gradients(name):
    several = WAITS["of several steps"]
    f = {"several": several, "discounted": WAITS["discounted"], **PAIRS}[name]
    x, exact = rows(100).requires_grad_(), rows(100).double().requires_grad_()
    weights = torch.arange(300.0).view(3, 100).sin()
    (htile.rowwise(f)(x) * weights).sum().backward()
    (torch.vmap(f)(exact) * weights).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_wrong_axes():
    with pytest.raises(ShapeError, match="dim=1"):
        htile.rowwise(lambda x: x.flip(1))(rows(8))
    with pytest.raises(UnsupportedError, match=r"flip does not take here: .*\bdims\b"):
        htile.rowwise(lambda x: x.flip())(rows(8))
    with pytest.raises(ShapeError, match="twice"):
        htile.rowwise(lambda x: x.flip((0, -1)))(rows(8))


COUNTED = {
    "numbers": lambda x: x * torch.arange(x.shape[-1]).flip(0),
    "weights": lambda x: (x * 0.9 ** torch.arange(x.shape[-1]).flip(0)).sum(),
    "floats": lambda x: x * (torch.arange(x.shape[-1]).float() * 0.5 + 1).flip(-1) + x.mean(),
    "a mask": lambda x: torch.where(torch.arange(x.shape[-1]).flip(0) < 3, x, 0.0),
    "of a mask": lambda x: x * (torch.arange(x.shape[-1]) > 4).flip(0),
    "twice": lambda x: (torch.arange(x.shape[-1]).flip(0) * 2).flip(0) * x,
    "linspace": lambda x: x * torch.linspace(0, 1, x.shape[-1]).flip(0),
    "ones": lambda x: x + torch.ones(x.shape[-1]).flip(0),
}


@pytest.mark.parametrize("n", [1, 2, 7, 65, 1000])
@pytest.mark.parametrize("name", COUNTED)
def test_the_numbers_of_columns_are_counted_back(name, n):
    f, x = htile.rowwise(COUNTED[name]), torch.randn(3, n)
    assert_close(f, f(x), x)


def test_a_decay_of_an_argument_is_counted_back():
    f = htile.rowwise(lambda x, a: (x * a ** torch.arange(x.shape[-1]).flip(0)).sum())
    x = torch.randn(3, 100, requires_grad=True)
    assert_close(f, f(x, 0.9), x, 0.9)
    (found,) = torch.autograd.grad(f(x, 0.9).sum(), x)
    weights = 0.9 ** torch.arange(99, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(found.double(), weights.expand(3, 100), rtol=1e-6, atol=1e-7)
