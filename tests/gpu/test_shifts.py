"""Rows that are moved along themselves on the GPU: neighbours, rotations, differences."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.build.compile import build
from htile.testing import assert_close

from .matrix import BF16, F16, F32, assert_same_bits, job, rows_of, run, shifted, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]


@htile.rowwise
def rolled(x):
    return torch.roll(x, 1, -1), x.roll(-3, -1), x.roll(len(x) // 2 + 5, -1)


@htile.rowwise
def token_shift(x, mu):
    before = F.pad(x[:-1], (1, 0))
    return x + (before - x) * mu


@htile.rowwise
def smoothed(x):
    return F.pad(x[2:], (0, 2)) * 0.25 + F.pad(x[1:-1], (1, 1)) * 0.5 + x * 0.25


@htile.rowwise
def rolled_softmax(x, w):
    y = (x * w).softmax(-1)
    return y.roll(2, -1), (y * y.roll(-1, -1)).sum()


@htile.rowwise
def variation(x):
    return (x[1:] - x[:-1]).abs().sum() + x.amax(), x.argmax()


@htile.rowwise
def padded(g):
    """What the gradient of a difference is: its operand is shorter than the result."""
    return F.pad(g, (1, 0)) - F.pad(g, (0, 1))


@htile.rowwise
def joined(x, y):
    """A row longer than both of which it is joined."""
    z = torch.cat((x, y[: len(y) // 4 + 1]))
    return z * 2, z.sum(), z.amax()


@htile.rowwise
def integers(x):
    return x.roll(1, -1) * 3 - x, (x.roll(7, -1) > x).sum()


FLOATS = rolled, token_shift, smoothed, rolled_softmax, variation, padded, joined
LENGTHS = 70, 100, 131, 258, 1000, 1024, 4096, 4099, 40000, 65536, 100003
CASES = [
    *((f, n, BF16) for f in FLOATS for n in LENGTHS),
    *((f, n, F32) for f in FLOATS for n in (131, 1024, 4099, 65536)),
    *((f, n, F16) for f in FLOATS for n in (262144,)),
    *((integers, n, torch.int32) for n in (131, 1024, 40000)),
    *((integers, n, torch.int64) for n in (131, 1024)),
]
ROWS = 37


def arguments(f, n, dtype, device="meta", rows=ROWS):
    def drawn(*shape):
        if dtype.is_floating_point:
            return torch.randn(shape, device=device).to(dtype)
        return torch.randint(-99, 99, shape, device=device).to(dtype)

    if f is joined:
        return drawn(rows, n), drawn(rows, n)
    return (drawn(rows, n), drawn(n)) if f in (token_shift, rolled_softmax) else (drawn(rows, n),)


def apart(args):
    """The same rows, one element further in memory."""
    return [shifted(a, 1) if a.dim() > 1 else a for a in args]


def jobs(arch):
    for f, n, dtype in CASES:
        yield job(f, arguments(f, n, dtype), arch)
        yield job(f, arguments(f, n, dtype, rows=1), arch)
        if n in (1024, 4099):
            yield job(f, apart(arguments(f, n, dtype, "cpu", 3)), arch)
    for f, args in trained("cpu"):
        passes = f.inspect(*args, arch=arch).training
        for each in (passes.forward, passes.backward):
            yield build, (each.lowered.source, each.lowered.function, arch)


@pytest.mark.parametrize(
    ("f", "n", "dtype"), CASES, ids=lambda each: (getattr(each, "_signature", None) and
    each._signature.name) or short(each)
)  # fmt: skip
def test_shifts(f, n, dtype, device):
    torch.manual_seed(n)
    args = arguments(f, n, dtype, device)
    result = run(f, *args)
    assert_close(f, result, *args)
    for row in (0, ROWS - 1):
        alone = [a[row : row + 1].clone() if a.dim() > 1 else a for a in args]
        assert_same_bits(run(f, *alone), rows_of(result, slice(row, row + 1)), "a row alone")
    if n in (1024, 4099):
        some = apart([a[:3] if a.dim() > 1 else a for a in args])
        assert_same_bits(run(f, *some), rows_of(result, slice(3)), "rows that begin anywhere")


def trained(device):
    """Functions with arguments that need gradients, of rows and of what they share."""
    for f in (token_shift, smoothed, rolled_softmax, variation):
        for n in (1000, 4099):
            args = arguments(f, n, F32, device)
            yield f, [a.requires_grad_() for a in args]


@pytest.mark.parametrize("k", range(8))
def test_gradients_of_shifts(k, device):
    torch.manual_seed(k)
    f, args = list(trained(device))[k]
    fn = f._signature.fn

    def total(results):
        floats = [r for r in pytree.tree_leaves(results) if r.is_floating_point()]
        return sum([(r * torch.linspace(1, 2, r.shape[-1], device=r.device, dtype=r.dtype)).sum()
                    if r.dim() > 1 else r.sum() for r in floats])  # fmt: skip

    found = torch.autograd.grad(total(f(*args)), args)
    wide = [a.detach().double().cpu().requires_grad_() for a in args]
    rows = [fn(*[a[m] if a.dim() > 1 else a for a in wide]) for m in range(ROWS)]
    stacked = pytree.tree_map(lambda *each: torch.stack(each), *rows)
    expected = torch.autograd.grad(total(stacked), wide)
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double().cpu(), exact, rtol=1e-4, atol=1e-4)

