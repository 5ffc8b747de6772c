"""Plans of elements by rank: rows are held, each bit has a place of the exchange buffer, and real
compiles without a GPU."""

import pytest
import torch

import htile
from htile.lower import choose, enumerate_plans
from htile.lower.plan import ROWS, Form, Target
from tests.lower.cases import ARCH, BF16, F32
from tests.lower.test_compile import COMPILED, check

F16, I32 = torch.float16, torch.int32
LENGTHS = (101, 333, 1003, 4096, 8192, 32768, 50257)


def scaled(x):
    middle = x.median()
    return (x - middle) / (x - middle).abs().median()


def masked(x):
    return torch.where(x >= x.topk(100).values[-1], x, 0)


def chosen(x, place: htile.PerRow):
    return x.sort().values[place]


def quartiles(x):
    n = x.shape[-1]
    return x.kthvalue(n // 3).values, x.kthvalue(n // 2).values


FUNCTIONS = {each.__name__: htile.rowwise(each) for each in (scaled, masked, chosen, quartiles)}


def kernel_of(name, n, dtype=F32, arch="sm_90a", m=64):
    args = [torch.empty(m, n, dtype=dtype)]
    if name == "chosen":
        args.append(torch.empty(m, dtype=torch.int64))
    return FUNCTIONS[name].inspect(*args, arch=arch)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_held(name, n):
    graph = kernel_of(name, n).graph
    plans = enumerate_plans(graph, Target(graph.n, ARCH["sm_90a"]))
    assert plans and {plan.numerics.form for plan in plans} == {Form.HELD}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", LENGTHS)
def test_numerics_are_those_of_every_batch(name, n):
    graph = kernel_of(name, n).graph
    found = set()
    for rows in ROWS:
        target = Target(n, ARCH["sm_90a"], rows=rows)
        found |= {plan.numerics for plan in [choose(enumerate_plans(graph, target))]}
    assert len(found) == 1


@pytest.mark.parametrize(("dtype", "bits"), [(F32, 32), (BF16, 16), (F16, 19), (I32, 32)])
def test_each_bit_that_is_looked_for_has_a_place(dtype, bits):
    kernel = kernel_of("quartiles", 4096, dtype)
    assert kernel.plan.slots == 2 * bits
    (reduce,) = kernel.plan.sweeps.reduces
    assert reduce.waits == bits and kernel.plan.sweeps.exchanges == bits
    said = f"zero_bits={32 - bits}"
    assert (said in kernel.source) == (bits < 32)


def test_a_row_that_is_computed_has_32_bits():
    kernel = FUNCTIONS["scaled"].inspect(torch.empty(64, 4096, dtype=BF16), arch="sm_90a")
    assert [reduce.waits for reduce in kernel.plan.sweeps.reduces if reduce.is_by_rank] == [16, 32]


def test_a_row_is_described_with_its_ranks():
    kernel = kernel_of("quartiles", 4096)
    assert "kthvalue1 = the element of x that 2047 come before, 32 exchanges" in kernel.plan_text
    assert "32 barriers" in kernel.plan_svg() and "barrier for each bit" in kernel.graph_svg()


@pytest.mark.parametrize("arch", COMPILED)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("n", "dtype"), [(333, F32), (4096, BF16), (8192, F32)])
def test_compiles_without_a_stack(name, n, dtype, arch):
    check(kernel_of(name, n, dtype, arch))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows_in_clusters_compile_without_a_stack(arch):
    kernel = kernel_of("scaled", 65536, BF16, arch)
    assert kernel.plan.ctas > 1
    check(kernel)
