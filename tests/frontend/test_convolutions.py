"""F.conv1d with a few numbers, and torch.isin of a few elements."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import ShapeError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check
from tests.lower.cases import kernel_of

M = 3


def smoothed(x, w: htile.Shared):
    return F.conv1d(x[None], w[None, None], padding=1)[0]


def by_numbers(x):
    w = torch.tensor([[[0.25, 0.5, 0.25]]]).to(x.dtype)
    return x - F.conv1d(x[None], w, padding="same")[0]


def by_own_numbers(x, w: htile.Inner[1]):
    return F.conv1d(x[None, None], w.view(1, 1, -1), dilation=3)[0, 0]


def of_channels(x, w: htile.Shared):
    return F.conv1d(x.view(2, -1), w, padding="same")


def in_groups(x, w: htile.Shared, b: htile.Shared):
    return F.conv1d(x.view(4, -1), w, b, stride=(2,), padding=2, dilation=2, groups=2)


def causal(x, w: htile.Shared):
    return F.silu(F.conv1d(F.pad(x, (3, 0))[None], w[None, None])[0])


CONVOLUTIONS = [  # a function, and the shapes of its arguments
    (smoothed, (100,), (3,)), (smoothed, (7,), (3,)), (by_numbers, (100,)),
    (by_own_numbers, (100,), (M, 5)), (of_channels, (48,), (3, 2, 4)),
    (in_groups, (64,), (6, 2, 3), (6,)), (causal, (1001,), (4,)),
]  # fmt: skip


def arguments(row, *others):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g) for shape in ((M, *row), *others)]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: f"{case[0].__name__}-{case[1][0]}")
def test_convolutions(case):
    f, *shapes = case
    given = arguments(*shapes)
    rowwise = htile.rowwise(f)
    assert_close(rowwise, rowwise(*given), *given)
    check(rowwise, *given, tolerance=1e-7)


@pytest.mark.parametrize("n", [1000, 1001, 4096])
def test_kernels_of_long_rows_compile(n):
    """A part of the row for each number, and one sum."""
    kernel = kernel_of(causal, torch.ones(M, n), torch.ones(4))
    assert kernel.resources.stack == 0 and kernel.graph.n == n
    mine = torch.ones(M, n, requires_grad=True), torch.ones(4, requires_grad=True)
    assert kernel_of(causal, *mine).backward.resources.stack == 0


def test_a_kernel_of_numbers_is_in_one_dtype_in_the_reference():
    f = htile.rowwise(lambda x: F.conv1d(x[None], torch.tensor([[[0.5, 0.5]]]))[0])
    (x,) = arguments((100,))
    assert_close(f, f(x), x)


WRONG = {
    "a row": (ShapeError, r"F.conv1d\(x\[None\]", lambda x: F.conv1d(x, x[None, None, :3])),
    "a kernel of one axis": (ShapeError, r"write w\[None, None\]",
                             lambda x: F.conv1d(x[None], x[:3])),
    "other channels": (ShapeError, "channels / groups",
                       lambda x: F.conv1d(x[None], x[:6].view(1, 2, 3))),
    "a long kernel": (UnsupportedError, "at most 256",
                      lambda x: F.conv1d(x[None], x[None, None])),
    "too short": (ShapeError, "reaches over",
                  lambda x: F.conv1d(x[None, :4], x[None, None, :5])),
    "same with a stride": (ShapeError, "padding='same'",
                           lambda x: F.conv1d(x[None], x[None, None, :3], None, 2, "same")),
    "a bias of another size": (ShapeError, "a bias",
                               lambda x: F.conv1d(x[None], x[None, None, :3], x[:2])),
    "many elements": (UnsupportedError, "at most 64 are compared", lambda x: torch.isin(x, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes(name):
    error, words, f = WRONG[name]
    with pytest.raises(error, match=words) as caught:
        htile.rowwise(f)(torch.ones(M, 300))
    assert "lambda" in caught.value.loc.text


def in_a_few(x, few: htile.Shared):
    number = x.sum() % 9
    return (
        torch.isin(x, few), torch.isin(x, few, invert=True), torch.isin(x, 3), torch.isin(3, x),
        torch.isin(number, x), torch.isin(x, torch.tensor([2, 3])).sum(), torch.isin(x, x[:2]),
        torch.isin(x.view(4, -1), few.view(1, -1)).any(-1),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_elements_of_a_few(dtype):
    x = torch.randint(9, (M, 100), generator=torch.Generator().manual_seed(0)).to(dtype)
    few = torch.tensor([1, 4, 7]).to(dtype)
    found = htile.rowwise(in_a_few)(x, few)
    expected = zip(*(in_a_few(row, few) for row in x), strict=True)
    for one, rows in zip(found, expected, strict=True):
        assert torch.equal(one, torch.stack(rows))
    assert kernel_of(in_a_few, x, few).resources.stack == 0


def test_nan_is_in_no_few():
    x = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    few = torch.tensor([1.0, torch.nan, torch.inf])
    found = htile.rowwise(in_a_few)(x.repeat(1, 4), few)[0]
    assert found[:, :2].tolist() == [[True, False], [True, False]]
