"""Scans, such as cumulative sums: what they are of every dtype and axis, and what is refused."""

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import DtypeError, ShapeError, UnsupportedError
from htile.testing import assert_close

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOOL, I32, I64, U8 = torch.bool, torch.int32, torch.int64, torch.uint8


def rows(dtype, *shape):
    torch.manual_seed(len(shape))
    if dtype.is_floating_point:
        return (torch.rand(shape) * 2 - 0.75).to(dtype)
    return torch.randint(0, 2 if dtype is BOOL else 5, shape).to(dtype)


# (function, dtypes of the row)
FUNCTIONS = {
    "cumsum": (lambda x: x.cumsum(-1), (F32, BF16, F16, I32, BOOL, U8)),
    "torch.cumsum": (lambda x: torch.cumsum(x, 0), (F32, I32)),
    "a keyword": (lambda x: torch.cumsum(x, dim=-1), (F32,)),
    "axis": (lambda x: torch.cumsum(x, axis=-1), (F32,)),
    "cumprod": (lambda x: (x > 0).cumprod(-1) + x.cumprod(-1), (F32, BF16, I32)),
    "cumprod of masks": (lambda x: x.cumprod(-1), (BOOL,)),
    "in int32": (lambda x: x.cumsum(-1, dtype=torch.int32), (I32, BOOL)),
    "in float32": (lambda x: x.cumsum(-1, dtype=torch.float32), (BF16, I32, BOOL)),
    "in int64": (lambda x: x.cumprod(-1, dtype=torch.int64), (I32, BOOL)),
    "exclusive": (lambda x: x.cumsum(-1) - x, (F32, I32)),
    "of an expression": (lambda x: (x * 0.5).exp().cumsum(-1), (F32, BF16)),
    "of indices": (lambda x: x + torch.arange(x.shape[-1]).cumsum(-1), (I32,)),
    "of a constant": (lambda x: x + torch.ones_like(x).cumsum(-1), (F32, I32)),
    "of a number of the row": (lambda x: x.sum().expand(x.shape[-1]).cumsum(-1), (F32,)),
    "of a number": (lambda x: x + x.sum().cumsum(0), (F32, I32)),
    "twice": (lambda x: x.cumsum(-1).cumsum(-1), (F32, I32)),
    "of the normalized": (lambda x: x.float().softmax(-1).cumsum(-1).sum(), (F32, BF16)),
    "of groups": (lambda x: x.view(4, -1).cumsum(-1), (F32, I32)),
    "over groups": (lambda x: x.view(4, -1).cumsum(0).flatten(), (F32, I32)),
    "of sums of groups": (lambda x: x.view(4, -1).sum(-1).cumsum(-1), (F32, I32)),
    "in parts": (lambda x: torch.cat(x.cumsum(-1).chunk(2)[::-1], -1), (F32, I32)),
    "the last": (lambda x: x.cumsum(-1)[-1], (F32, I32)),
    "the third": (lambda x: x.cumsum(-1)[2], (F32, I32)),
    "cummax": (lambda x: x.cummax(-1).values, (F32, BF16, I32, I64)),
    "its indices": (lambda x: torch.cummax(x, dim=-1)[1], (F32, BF16, I32, I64)),
    "cummin": (lambda x: tuple(torch.cummin(x, 0)), (F32, F16, I32, BOOL)),
    "cummax of masks": (lambda x: tuple(x.cummax(-1)), (BOOL,)),
    "the last maximum": (lambda x: x.cummax(-1).values[-1] - x.cummin(-1).values[3], (F32, I32)),
    "maxima of groups": (lambda x: tuple(x.view(4, -1).cummax(-1)), (F32, I32)),
    "maxima over groups": (lambda x: tuple(x.view(4, -1).cummax(0)), (F32, I32)),
    "maxima of what was joined": (
        lambda x: torch.cat([x[8:], 2 * x[:8]]).cummax(-1).values.sum(), (F32, I32)
    ),
    "minima from the end": (lambda x: x.flip(-1).cummin(-1).values.flip(-1), (F32, I32)),
    "maxima from the end": (lambda x: x.flip(-1).cummax(-1).values.flip(-1) - x, (F32, I32)),
    "drawdown": (lambda x: (x.cummax(-1).values - x).amax(), (F32, I32)),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (F32, BF16, F16)),
    "its third": (lambda x: torch.logcumsumexp(x, dim=0)[2], (F32,)),
    "logarithms of groups": (lambda x: x.view(4, -1).logcumsumexp(-1), (F32,)),
    "logarithms over groups": (lambda x: x.view(4, -1).logcumsumexp(0), (F32, BF16)),
    "logarithms of what was joined": (
        lambda x: torch.cat([x[8:], 90 * x[:8]]).logcumsumexp(-1).sum(), (F32,)
    ),
    "logarithms from the end": (lambda x: x.flip(-1).logcumsumexp(-1).flip(-1), (F32, BF16)),
    "a mask of them": (lambda x: torch.where(x.cumsum(-1) < 3, x, 0), (I32,)),
}
CASES = [(name, dtype) for name, (_, dtypes) in FUNCTIONS.items() for dtype in dtypes]


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_what_they_are(name, dtype, n):
    f, x = htile.rowwise(FUNCTIONS[name][0]), rows(dtype, 3, n)
    results = f(x)
    assert_close(f, results, x)
    if not dtype.is_floating_point:
        expected = [pytree.tree_leaves(FUNCTIONS[name][0](each)) for each in x]
        for result, *of_rows in zip(pytree.tree_leaves(results), *expected, strict=True):
            assert result.dtype == of_rows[0].dtype and torch.equal(result, torch.stack(of_rows))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_rows_keep_their_dtype(dtype):
    x = rows(dtype, 2, 8)
    assert htile.rowwise(lambda x: x.cumsum(-1))(x).dtype is dtype
    assert htile.rowwise(lambda x: x.to(F16).cumprod(-1))(x).dtype is F16
    assert htile.rowwise(lambda x: x.cumsum(-1, dtype=BF16))(x).dtype is BF16


@pytest.mark.parametrize("dtype", [F32, I32, BOOL])
def test_a_row_of_one(dtype):
    f, x = htile.rowwise(lambda x: (x.cumsum(-1), x.cumprod(-1))), rows(dtype, 3, 1)
    for result in f(x):
        assert torch.equal(result, x.cumsum(-1)) and result.dtype == x.cumsum(-1).dtype


def test_nan_and_infinity():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1, inf, 2, -inf, 1], [nan, 1, 2, 3, 4], [1, 2, 3, 4, nan]])
    f = htile.rowwise(
        lambda x: (x.cumsum(-1), x.cumprod(-1), *x.cummax(-1), *x.cummin(-1), x.logcumsumexp(-1))
    )
    assert_close(f, f(x), x)


def test_running_maxima_of_equal_elements_nan_and_infinity():
    """The index is that of the last of equal elements, and of the last NaN, as torch has it."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [[2, 2, 1, 2, 3, 3.0], [-inf, -inf, 0, -0.0, inf, inf], [1, nan, 5, nan, inf, 0]]
    )
    f = htile.rowwise(lambda x: (*x.cummax(-1), *x.cummin(-1)))
    for result, right in zip(f(x), (*x.cummax(-1), *x.cummin(-1)), strict=True):
        assert torch.allclose(result, right, rtol=0, atol=0, equal_nan=True)


def test_logarithms_of_sums_of_elements_that_are_far_apart():
    """No exponential is 0 or infinite for the elements behind it, as with one maximum for all."""
    x = torch.tensor([[-1e4, 0, 5, 1e4, -1e4], [-float("inf"), -1e38, -1e38, 1e38, 1e38]])
    f = htile.rowwise(lambda x: x.logcumsumexp(-1))
    torch.testing.assert_close(f(x).double(), x.double().logcumsumexp(-1), rtol=2**-23, atol=0)


def test_a_scan_is_a_new_tensor():
    def f(x):
        y = x.cumsum(-1)
        y += 1
        return x, y

    x = rows(F32, 2, 8)
    same, changed = htile.rowwise(f)(x)
    assert torch.equal(same, x) and torch.allclose(changed, x.cumsum(-1) + 1)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: x.cumsum(1), ShapeError, "a row has one axis"),
        (lambda x: x.cumsum(), UnsupportedError, "x.cumsum does not take here"),
        (lambda x: x.cumsum(-1, dtype=torch.bool), DtypeError, "cumsum in torch.bool"),
        (lambda x: x.to(torch.float8_e4m3fn).cumsum(-1), DtypeError, "convert it first"),
        (lambda x: x.cumsum(-1)[::2], UnsupportedError, "one of every 2 elements of a cumsum"),
        (lambda x: x.cumprod(-1)[70], UnsupportedError, r"write x\[:71\].prod\(\)"),
        (lambda x: x.cummax(-1).values[70], UnsupportedError, r"write x\[:71\].amax\(\)"),
        (lambda x: x.logcumsumexp(-1)[70], UnsupportedError, r"write x\[:71\].logsumexp\(-1\)"),
        (lambda x: x.flip(-1).cummin(-1)[0].flip(-1)[::2], UnsupportedError, "cummin from the end"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_refusals(function, error, message):
    with pytest.raises(error, match=message) as caught:
        htile.rowwise(function)(rows(F32, 2, 4093))
    assert caught.value.loc is not None and "lambda" in caught.value.loc.text


def test_the_element_at_an_index():
    @htile.rowwise
    def f(x, y: htile.PerRow):
        return x.cumsum(-1)[y]

    x, y = rows(F32, 2, 16), torch.tensor([1, 15])
    assert_close(f, f(x, y), x, y)
