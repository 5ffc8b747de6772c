"""Kernels of rows whose elements the indices of another row choose. Their PTX runs on numpy."""

import pytest
import torch

import htile
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from tests.lower.cases import BF16
from tests.primitives.ptx_device import launch

M = 5

FUNCTIONS = {
    "chosen": lambda x, ids: x[ids] * 2,
    "normalized": lambda x, ids: x[ids].softmax(-1),
    "of a normalized row": lambda x, ids: x.softmax(-1)[ids],
    "a mean": lambda x, ids: (x - x[ids]).abs().mean(),
    "turned": lambda x, ids: x.flip(-1) - x,
    "in groups": lambda x, ids: x[ids].view(-1, 8).amax(-1),
    "one of them": lambda x, ids: x[ids] + x.flip(-1)[0],
    "moved": lambda x, ids: x[ids].roll(3, -1),
    "at one place": lambda x, ids: x[torch.full((x.shape[-1],), 5)] * x + x[ids * 0 + 7],
    "an index that comes of a reduction": lambda x, ids: x[(ids + x.argmax()) % x.shape[-1]],
}


def run(f, *args, **plan):
    """What a kernel computes, and what torch evaluates of the same graph."""
    f = htile.rowwise(f).with_plan(**plan) if plan else htile.rowwise(f)
    kernel, right = f.inspect(*args, arch="sm_90a"), f(*args)
    out = torch.zeros_like(right)
    named = dict(zip(("x", "ids"), args, strict=True))
    given = [named[name] for name in kernel.graph.arguments]
    blocks = -(-args[0].shape[0] // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [*given, out], is_emitted=True)
    return out, right


def arguments(n, dtype=torch.float32, index=torch.int64):
    torch.manual_seed(n)
    return torch.randn(M, n).to(dtype), torch.randint(n, (M, n), dtype=index)


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
@pytest.mark.parametrize("n", (72, 200, 1000))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, n, dtype):
    x, ids = arguments(n, dtype)
    found, right = run(FUNCTIONS[name], x, ids)
    bound = 2e-6 if found.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)


@pytest.mark.parametrize("n", (65, 131, 1003))
def test_odd_lengths(n):
    x, ids = arguments(n, index=torch.int32)
    found, right = run(FUNCTIONS["chosen"], x, ids)
    assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", (torch.int64, torch.uint8, torch.int8, torch.bool), ids=str)
def test_dtypes(dtype):
    x, ids = arguments(200)
    found, right = run(lambda x, ids: x[ids], (x * 50).to(dtype), ids)
    assert torch.equal(found, right)


def test_indices_beyond_the_ends_read_nothing_outside():
    """The device of the test refuses what lies outside of the tensors."""
    x, ids = arguments(200)
    ids[:, ::3], ids[:, 1::3], ids[:, 2] = 2**40, -(2**63), 2**63 - 1
    found, right = run(lambda x, ids: x[ids], x, ids)
    assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0)) and right[0, :3].isnan().all()


def test_rows_that_are_apart():
    """Their distance in memory is another one than their length."""
    wide, ids = torch.randn(M, 300), arguments(200)[1]
    found, right = run(FUNCTIONS["chosen"], wide[:, :200], ids)
    assert torch.equal(found, right)


def test_a_loop_over_chunks():
    x, ids = arguments(16384)
    found, right = run(FUNCTIONS["normalized"], x, ids, form="loops", cluster_n=1)
    torch.testing.assert_close(found, right, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("n", (1000, 65536, 200003, 1000000))
@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "sm_100a"))
def test_it_compiles(n, arch):
    """The row is read at the indices, and nowhere else."""
    x, ids = torch.empty(4, n, dtype=BF16), torch.empty(4, n, dtype=torch.int64)
    kernel = htile.rowwise(FUNCTIONS["normalized"]).inspect(x, ids, arch=arch)
    roles = {i.name: i.role for i in kernel.graph.inputs}
    assert roles == {"x": Role.TAKEN, "ids": Role.ROW} and ".entry" in kernel.ptx
    assert kernel.plan.bytes_per_row() == (n * (2 + 8), n * 2)


def test_an_element_has_the_bits_of_its_row():
    """Among what is as large as each element of a computed row, that element is."""

    def counted(x, ids):
        p = x.softmax(-1)
        return (p[ids] == p).sum()

    x, _ = arguments(200)
    found, _ = run(counted, x, torch.arange(200).expand(M, 200).contiguous())
    assert torch.equal(found, torch.full((M,), 200))


def test_elements_of_a_product_of_matrices():
    """A row is gathered from in the kernel behind the product."""

    @htile.rowwise
    def f(x, weight: htile.Matrix, bias, ids):
        return torch.nn.functional.linear(x, weight) + bias[ids]

    x, w = torch.randn(4, 64).to(BF16), torch.randn(128, 64).to(BF16)
    bias, ids = torch.randn(4, 300), torch.randint(300, (4, 128))
    right = (x.double() @ w.double().T + bias.double().gather(-1, ids)).float()
    torch.testing.assert_close(f(x, w, bias, ids).float(), right, rtol=2**-7, atol=2**-7)
    kernel = f.inspect(x, w, bias, ids, arch="sm_90a")
    assert any(Op.GATHER in {node.op for node in each.graph} for each in kernel.kernels[1:])
