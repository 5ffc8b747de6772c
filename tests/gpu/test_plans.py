"""Every plan, forced one by one: right, and bit-equal where only the placement differs."""


import pytest
import torch

from htile.lower import enumerate_plans
from htile.testing import assert_close

from .matrix import BF16, EXAMPLES, F32, assert_same_bits, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

NAMES = ("softmax", "rmsnorm_residual", "capped_softmax")
SIZES, DTYPES = (1000, 4096, 8191), (BF16, F32)
CASES = [(name, n, dtype) for name in NAMES for n in SIZES for dtype in DTYPES]
CASES += [("softmax", 9003, BF16)]  # loops over rows that begin anywhere


def plans(name, n, dtype, arch):
    """(the function with that plan forced, the plan) for each plan there is."""
    f, arguments = EXAMPLES[name]
    kernel = f.inspect(*arguments(7, n, dtype, "meta"), arch=arch)
    for plan in enumerate_plans(kernel.graph, kernel.plan.target):
        wanted = plan.properties()
        yield f.with_plan(**wanted), plan


def jobs(arch):
    """Every plan."""
    for name, n, dtype in CASES:
        for forced, _ in plans(name, n, dtype, arch):
            yield job(forced, EXAMPLES[name][1](7, n, dtype, "meta"), arch)


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
