"""Every plan, forced one by one: right, and bit-equal where only the placement differs."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from benchmarks.check import Sample
from benchmarks.general.population import FUNCTIONS
from htile.lower import enumerate_plans
from htile.testing import assert_close

from .matrix import BF16, EXAMPLES, F32, assert_same_bits, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

NAMES = ("softmax", "rmsnorm_residual", "capped_softmax")
SIZES, DTYPES = (1000, 4096, 8191), (BF16, F32)
CASES = [(name, n, dtype) for name in NAMES for n in SIZES for dtype in DTYPES]
CASES += [("softmax", 9003, BF16)]  # loops over rows that begin anywhere
APART = (8200, 12288, 20001)  # lengths of maps whose thread blocks start in no cluster
EVERY = 9  # of whose plans one of so many is tried
DRAWN = 4  # plans of each function of the suite general


@htile.rowwise
def computing(x, scale: htile.PerRow, weight):
    return torch.tanh(x * scale) * torch.log1p(torch.exp(-x * weight)) + F.gelu(x), x * weight


def of_computing(m, n, device):
    """Two leading dimensions, of which the first is 2."""
    x = torch.randn(2, m // 2, n, device=device).to(BF16)
    return x, torch.rand(2, m // 2, device=device), torch.rand(n, device=device)


def plans_apart(n, arch):
    """(the function with that plan forced, the plan) for some plans of a map."""
    kernel = computing.inspect(*of_computing(600, n, "meta"), arch=arch)
    for plan in enumerate_plans(kernel.graph, kernel.plan.target)[::EVERY]:
        yield computing.with_plan(**plan.properties()), plan


def plans(name, n, dtype, arch):
    """(the function with that plan forced, the plan) for each plan there is."""
    f, arguments = EXAMPLES[name]
    kernel = f.inspect(*arguments(7, n, dtype, "meta"), arch=arch)
    for plan in enumerate_plans(kernel.graph, kernel.plan.target):
        wanted = plan.properties()
        yield f.with_plan(**wanted), plan


def drawn(name, device):
    """A function of the suite general, and arguments of a length and a dtype drawn by its name.

    The rows are so many that thread blocks of several rows meet each other.
    """
    rng = random.Random(name)
    short, long = rng.randrange(64, 4000), rng.randrange(4000, 20000)
    n = rng.choice((short | 1, 8 * (short // 8), long))
    seed("drawn", name)
    m = 2500 if n < 4000 else 600
    return FUNCTIONS[name], FUNCTIONS[name].arguments(m, n, rng.choice((BF16, BF16, F32)), device)


def drawn_plans(name, arch):
    """(the function with that plan forced, the plan) for some of its plans."""
    found, args = drawn(name, "meta")
    kernel = found.function.inspect(*args, arch=arch)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    for plan in random.Random(name).sample(plans, min(DRAWN, len(plans))):
        yield found.function.with_plan(**plan.properties()), plan


def jobs(arch):
    """Every plan."""
    for name in FUNCTIONS:
        for forced, _ in drawn_plans(name, arch):
            yield job(forced, drawn(name, "meta")[1], arch)
    for name, n, dtype in CASES:
        for forced, _ in plans(name, n, dtype, arch):
            yield job(forced, EXAMPLES[name][1](7, n, dtype, "meta"), arch)
    for n in APART:
        for forced, _ in plans_apart(n, arch):
            yield job(forced, of_computing(600, n, "meta"), arch)


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    CASES,
    ids=lambda each: short(each) if isinstance(each, torch.dtype) else str(each),
)
def test_every_plan(device, arch, name, n, dtype):
    seed(name, n, dtype)
    args = EXAMPLES[name][1](133, n, dtype, device)  # 133 is no multiple of any rows a block
    results = {}
    for forced, plan in plans(name, n, dtype, arch):
        kernel = forced.inspect(*args)
        assert (kernel.plan.numerics, kernel.plan.placement) == (plan.numerics, plan.placement)
        result = run(forced, *args)
        if plan.numerics not in results:
            results[plan.numerics] = result
            try:
                assert_close(forced, result, *args)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{plan}") from None
        assert_same_bits(result, results[plan.numerics], plan.placement)
    placements = [plan.placement for _, plan in plans(name, n, dtype, arch)]
    # Rows of an odd number of 16-bit elements begin anywhere.
    is_shifted = n % 2 == 1 and dtype is BF16
    assert {place.shifted for place in placements} == {is_shifted}
    loaders = {"direct"} if is_shifted else {"direct", "shared"}
    loaders |= {"shared", "packed"} if is_shifted and n > 8192 else set()
    assert len(results) > 1 and {place.loader for place in placements} == loaders


@pytest.mark.parametrize("name", FUNCTIONS)
def test_drawn_plans(device, arch, name):
    """Some plans of functions and lengths that are in no other test, for many rows."""
    kernel, args = drawn(name, device)
    sample, results = Sample(kernel, args), {}
    for forced, plan in drawn_plans(name, arch):
        result = run(forced, *args)
        sample.check(pytree.tree_leaves(result), kernel.tolerance)
        assert_same_bits(result, results.setdefault(plan.numerics, result), plan.placement)


@pytest.mark.parametrize("n", APART)
def test_thread_blocks_that_start_apart(device, arch, n):
    seed("apart", n)
    args = of_computing(600, n, device)
    results, apart = [], []
    for forced, plan in plans_apart(n, arch):
        results.append(run(forced, *args))
        apart.append(plan.placement.apart)
        for found, first in zip(results[-1], results[0], strict=True):
            assert_same_bits(found, first, plan.placement)
    assert_close(computing, results[0], *args)
    assert sum(apart) > 2
