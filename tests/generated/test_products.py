"""Random functions with products, without a GPU: meaning, how they are cut, what they compile to.
"""

import pytest
from torch.utils import _pytree as pytree

from htile.lower.products.fused import WIDTHS
from htile.run.products.calls import ProductStep, steps_of
from htile.run.products.kernels import ProductKernel
from tests.request_of import request_of
from tests.test_matrices import run_steps

from .measure import check
from .products import program

SEEDS = range(300)
COMPILED = range(12)
ROWS = 5


def steps_for(seed):
    p = program(seed)
    return steps_of(request_of(p.function(), p.arguments(lead=(ROWS,))))


def is_fused(steps) -> bool:
    """Whether every level of products is one kernel, which a small row kernel may follow."""
    return all(step.kernel is not None for step in steps if isinstance(step, ProductStep))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reference_and_the_kernels_are_the_oracle(seed):
    """What a call gives, and what the kernels do that it is cut into, evaluated by torch."""
    p = program(seed)
    f, args = p.function(), p.arguments()
    try:
        check(p, f, f(*args), args, fair=True)
        args = p.arguments(lead=(ROWS,))
        structure = request_of(f, args).specialization.traced.structure
        check(p, f, pytree.tree_unflatten(run_steps(f, args), structure), args, fair=True)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None


@pytest.mark.parametrize("seed", COMPILED)
def test_kernels_compile_without_a_stack(seed):
    p = program(seed, "all")
    shown = p.function().inspect(*p.arguments(filled=False))
    assert shown.by_torch or any(isinstance(kernel, ProductKernel) for kernel in shown.kernels)
    for kernel in shown.kernels:
        assert kernel.resources.stack == 0, p


def test_most_are_multiplied_by_kernels():
    """Without those of which rows or matrices do not begin at multiples of 16 bytes."""
    shown = [program(s, "all").function().inspect(*program(s, "all").arguments(filled=False))
             for s in SEEDS[:40]]  # fmt: skip
    assert sum(not kernels.by_torch for kernels in shown) >= 15


def test_shares():
    """Of the programs, nine in ten are kernels that store no product."""
    every = [steps_for(seed) for seed in SEEDS]
    products = [[s for s in steps if isinstance(s, ProductStep)] for steps in every]
    assert sum(map(is_fused, every)) >= 0.9 * len(SEEDS)
    assert sum(len(steps) == 2 for steps in products) >= 0.2 * len(SEEDS)
    assert sum(any(s.then for s in steps) for steps in products) >= 0.3 * len(SEEDS)
    kernels = [s.kernel for steps in products for s in steps if s.kernel is not None]
    assert {len(kernel.operands) for kernel in kernels} == set(WIDTHS)
    assert {o.start > 0 for kernel in kernels for o in kernel.operands} == {False, True}
    texts = [program(seed).text for seed in SEEDS]
    for said in ("rsqrt((x * x)", "alpha * x", "left", "F.linear(", " @ ", "torch.matmul", "r0",
                 "b0", "logsumexp", ".chunk(2, -1)"):  # fmt: skip
        assert sum(said in text for text in texts) >= 10, said
