"""Rows that end on a GPU: NaN behind the end does not show, in held rows and in loops."""

import pytest
import torch

from tests.lower.test_limits import masked_norm, masked_softmax, of_some_rows, window

from .matrix import BF16, F32, assert_same_bits, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

FUNCTIONS = (masked_norm, masked_softmax, of_some_rows, window)
SIZES = (7, 1000, 4096, 5001, 16384, 40000, 300000)
DTYPES = (BF16, F32)
ROWS = 70


def arguments(f, n, dtype, device):
    last = torch.arange(ROWS, device=device) * 977 % (n + 1)
    made = {"n": last, "first": last // 2, "last": last - 1, "valid": last % 3 > 0}
    made["w"] = torch.rand(n, device=device).add(0.5).to(dtype)
    names = f._signature.names
    x, y = torch.randn(2, ROWS, n, device=device).to(dtype)
    return [(made | {"x": x, "y": y})[name] for name in names]


def jobs(arch):
    for n in SIZES:
        for dtype in DTYPES:
            for f in FUNCTIONS:
                args = arguments(f, n, dtype, "cpu")
                yield job(f, [a.to("meta") for a in args], arch)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_what_is_hidden_does_not_show(f, dtype, n, device):
    seed(f._signature.name, dtype, n)
    args = arguments(f, n, dtype, device)
    expected = f(*(a.cpu() for a in args))
    found = run(f, *args)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if dtype is BF16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **tolerance)
    column = torch.arange(n, device=device)
    named = dict(zip(f._signature.names, args, strict=True))
    if f is of_some_rows:
        seen = named["valid"][:, None].expand(ROWS, n)
    elif f is window:
        seen = (column >= named["first"][:, None]) & (column <= named["last"][:, None])
    else:
        seen = column < named["n"][:, None]
    for name in ("x", "y"):
        if name in named:
            named[name] = torch.where(seen, named[name], float("nan"))
    assert_same_bits(run(f, *named.values()), found)
