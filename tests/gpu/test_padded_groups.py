"""Groups of rows that end inside of the last group on the GPU, against float64."""

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.testing import assert_close
from tests.lower import test_padded_groups as padded

from .matrix import BF16, F32, assert_same_bits, job, rows_of, run, seed
from .test_out import compile_in_place

pytestmark = pytest.mark.gpu


def as_bytes(x):
    """Bytes that no rounding changes."""
    groups = padded.padded(x, 128)
    scale = groups.abs().amax(-1, keepdim=True)
    return (groups > scale / 2).flatten()[: x.shape[-1]].to(torch.int8), scale.flatten()


def of_pairs(x):
    """Bytes and masks whose vectors are shorter than a word, so that they are stored one by one."""
    pairs = padded.padded(x, 2)
    is_largest = pairs == pairs.amax(-1, keepdim=True)
    return is_largest.flatten()[: x.shape[-1]].to(torch.int8), (pairs > 0).flatten()[: x.shape[-1]]


# Rows that end at a vector and inside of one: short ones, several rows a CTA, loops and clusters.
LENGTHS = 100, 136, 1000, 1001, 5000, 20007, 100104


@htile.rowwise
def deviation(x):
    rest = x - x.mean()
    return rest, padded.padded(rest, 128).amax(-1)


SUMS = htile.rowwise(padded.sums)
PLANS = (20007, {"form": "loops"}), (20007, {"form": "held"}), (100104, {"form": "loops"})
FUNCTIONS = [htile.rowwise(f) for f in (as_bytes, of_pairs, *padded.FUNCTIONS)]


def arguments(f, n, dtype, device, rows=5):
    """Rows in turn: as they are allocated, apart in memory, and from an odd address on."""
    more = {padded.normalized_before: (n,), padded.dequantized: (rows, -(-n // 32)),
            padded.of_two: (rows, n)}.get(f.__wrapped__)  # fmt: skip
    others = [] if more is None else [torch.randn(more, dtype=dtype, device=device)]
    wide = torch.randn(rows, n + 24, dtype=dtype, device=device)
    for x in (wide[:, :n].contiguous(), wide[:, 8 : n + 8], wide[:, 1 : n + 1]):
        yield [x, *others]


def of_sums(device, n):
    return [torch.randn(640, n, dtype=BF16, device=device) for _ in range(2)]


def jobs(arch):
    for n in LENGTHS:
        yield job(SUMS, of_sums("cpu", n), arch)
        yield job(deviation, [torch.empty(2048, n)], arch)
    for n in (1000, 1001):
        x = torch.empty(3000, n)
        yield job(htile.rowwise(padded.softmax_of_groups), [x], arch)
        yield compile_in_place(htile.rowwise(padded.softmax_of_groups), [x], (0,), arch)
    for f in FUNCTIONS:
        for n in LENGTHS:
            for dtype in (BF16, F32):
                for args in arguments(f, n, dtype, "cpu"):
                    yield job(f, args, arch)
        for n, plan in PLANS:
            for args in arguments(f, n, BF16, "cpu"):
                yield job(f.with_plan(**plan), args, arch)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_at_every_length(f, n, dtype, device):
    seed(f.__name__, n)
    found = []
    for args in arguments(f, n, dtype, device):
        result = run(f, *args)
        assert_close(f, result, *args)
        alone = run(f, *[a[3:4] if a.dim() == 2 else a for a in args])
        assert_same_bits(alone, rows_of(result, slice(3, 4)), "a row alone")
        found.append(result)
    assert len(pytree.tree_leaves(found)) >= 3


@pytest.mark.parametrize(("n", "plan"), PLANS, ids=str)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_form(f, n, plan, device):
    seed(f.__name__, n)
    for args in arguments(f, n, BF16, device):
        assert_close(f, run(f.with_plan(**plan), *args), *args)


def test_a_result_takes_the_place_of_its_argument(device):
    seed("in place")
    f = htile.rowwise(padded.softmax_of_groups)
    for n in (1000, 1001):
        x = torch.randn(3000, n, device=device)
        expected = f(x)
        f(x, out=x)
        assert_same_bits(x, expected)


@pytest.mark.parametrize("n", LENGTHS)
def test_sums_over_rows(n, device):
    seed("sums", n)
    args = of_sums(device, n)
    assert_close(SUMS, run(SUMS, *args), *args)


@pytest.mark.parametrize("n", (1000, 1001))
def test_gradients(n, device):
    """Those of a row and of a weight, beside torch's in float64."""
    seed("gradients", n)
    f = htile.rowwise(padded.normalized_before)
    x, w = torch.randn(50, n, device=device), torch.rand(n, device=device)
    args = [each.requires_grad_() for each in (x, w)]
    exact = [each.detach().double().requires_grad_() for each in args]
    factor = torch.randn(50, n, device=device)
    found = torch.autograd.grad((f(*args)[0] * factor).sum(), args)
    rows = [padded.normalized_before(row, exact[1])[0] for row in exact[0]]
    expected = torch.autograd.grad((torch.stack(rows) * factor).sum(), exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", LENGTHS)
def test_the_mean_of_equal_elements_is_that_element(n, device):
    seed("equal", n)
    scales = 10.0 ** torch.randint(-6, 6, (2048, 1), device=device)
    x = (torch.randn(2048, 1, device=device) * scales).expand(2048, n).contiguous()
    assert not deviation(x)[0].any()
