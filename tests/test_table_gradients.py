"""Gradients of tables whose rows an index chooses, beside torch's in float64, on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import GradientError, UnsupportedError
from tests.test_gradients import row
from tests.training import assert_gradients, largest_of

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
M, N, P = 40, 24, 7


def places(*shape, seed=3, dtype=torch.int64):
    """Indices of which some count from the end, and most are there several times."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-P, P, shape, generator=made).to(dtype)


@htile.rowwise
def scaled(x, pos: htile.PerRow, table: htile.Shared):
    return x * table[pos]


@htile.rowwise
def several(x, ids: htile.Inner[1], share: htile.Inner[1], table: htile.Shared):
    return x + (share[:, None] * table[ids].exp()).sum(0)


@htile.rowwise
def used_twice(x, pos: htile.PerRow, other: htile.PerRow, table: htile.Shared):
    """By two indices, by a number, and as a whole."""
    return table[pos] * table[other] + table[2] * x + table.sum()


@htile.rowwise
def moved(x, pos: htile.PerRow, table: htile.Shared):
    """Parts of the table, turned and of another shape."""
    turned = table[1:, ::2].t().reshape(3, -1, P - 1)
    halves = table.view(P, 2, -1)[pos]
    return x * table[:, : x.shape[-1]][pos] + turned[pos % 3].sum() * halves[1, 0]


@htile.rowwise
def normalized(x, pos: htile.PerRow, table: htile.Shared):
    y = table[pos] + x
    return y * torch.rsqrt((y * y).mean() + 1e-6), y


@htile.rowwise
def chosen_by_the_row(x, table: htile.Shared):
    """The index is computed, and has no gradient."""
    return x.exp() * table[x.argmax() % 7]


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_tables(dtype):
    x, table = row(M, N, dtype=dtype), row(P, N, dtype=dtype, seed=1)
    pos, other = places(M), places(M, seed=4)
    assert_gradients(scaled, x, pos, table)
    assert_gradients(scaled, x, pos.int(), table)
    assert_gradients(scaled, x[None], pos[None], table)
    assert_gradients(several, x, places(M, 3), row(M, 3, seed=2), table)
    assert_gradients(used_twice, x, pos, other, table)
    assert_gradients(normalized, x, pos, table)
    assert_gradients(chosen_by_the_row, x, table)


def test_movements_of_tables():
    assert_gradients(moved, row(M, N), places(M), row(P, 2 * N, seed=1))


def test_tables_of_several_axes_and_of_numbers():
    @htile.rowwise
    def heads(x, pos: htile.PerRow, table: htile.Shared):
        return (x.view(3, -1) * table[pos]).flatten(), table[:, 0, 0].exp().sum() * x

    assert_gradients(heads, row(M, N), places(M), row(P, 3, N // 3, seed=1))

    @htile.rowwise
    def column(x, pos: htile.PerRow, table: htile.Shared):
        return x * table[pos].exp()

    assert_gradients(column, row(M, N), places(M), row(P, 1, seed=1))


def test_second_order():
    args = row(M, N), row(P, N, seed=1)
    pos, (g, more) = places(M), torch.randn(2, M, N)

    def second(f, dtype):
        leaves = [a.detach().to(dtype).requires_grad_() for a in args]
        results = f(leaves[0], pos, leaves[1])
        given = [g.to(dtype).requires_grad_(), more.to(dtype)]
        first = torch.autograd.grad(results, leaves, given, create_graph=True)
        total = sum(each.sin().sum() for each in first)
        return [*first, *torch.autograd.grad(total, [*leaves, given[0]])]

    def plain(x, pos, table):
        y = table[pos] + x
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6), y

    for got, exact in zip(second(normalized, F32), second(plain, F64), strict=True):
        assert largest_of(got.double() - exact) <= 1e-5 * largest_of(exact)


def test_the_gradient_is_that_of_torchs_embedding():
    """In the table's dtype, rounded once, and without what padding has."""

    @htile.rowwise
    def embedded(x, pos: htile.PerRow, table: htile.Shared):
        return x + F.embedding(pos, table, padding_idx=2) * 3

    @htile.rowwise
    def embedded_from_the_end(x, pos: htile.PerRow, table: htile.Shared):
        return x + F.embedding(pos, table, padding_idx=2 - P) * 3

    pos, g = places(M) % P, torch.randn(M, N)
    for dtype in (F32, BF16):
        x, table = row(M, N, dtype=dtype).detach(), row(P, N, dtype=dtype, seed=1)
        wide = table.detach().double().requires_grad_()
        right = F.embedding(pos, wide, padding_idx=2) * 3
        (exact,) = torch.autograd.grad(right, wide, g.to(dtype).double())
        assert not exact[2].any() and (pos == 2).any()
        for f in (embedded, embedded_from_the_end):
            (found,) = torch.autograd.grad(f(x, pos, table), table, g.to(dtype))
            assert found.dtype is dtype and found.shape == table.shape
            error = 2 * torch.finfo(F32).eps * largest_of(exact)  # of the sums, before rounding
            rtol = torch.finfo(dtype).eps / 2
            torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=error)
            assert not found[2].any()
    plain = htile.rowwise(lambda x, pos, table: x + table[pos] * 3)
    plain._signature.kinds = (None, htile.PerRow, htile.Shared)
    meta = [t.to("meta") for t in (x, pos, table.detach())]
    kernel, with_padding = plain.inspect(*meta).source, embedded.inspect(*meta).source
    assert with_padding.count("[") == kernel.count("["), "padding matters to the gradient only"


def test_indices_beyond_the_ends_add_nothing():
    pos = torch.tensor([0, P, -P - 1, -1, 2**40])
    x, table = row(5, N), row(P, N, seed=1)
    y = scaled(x, pos, table)
    (found,) = torch.autograd.grad(y, table, torch.ones(5, N))
    right = torch.zeros(P, N)
    right[0], right[-1] = x[0].detach(), x[3].detach()
    assert torch.equal(found, right)
    given = torch.full((5, N), math.nan)
    given[0] = 1
    (found,) = torch.autograd.grad(scaled(x, pos, table), table, given)
    assert torch.equal(found[:-1], right[:-1]) and found[-1].isnan().all()


def test_no_rows_and_frozen_tables():
    table = row(P, N)
    scaled(torch.zeros(0, N), places(0), table).sum().backward()
    assert torch.equal(table.grad, torch.zeros(P, N))
    x = row(M, N)
    scaled(x, places(M), table.detach()).sum().backward()
    torch.testing.assert_close(x.grad, table.detach()[places(M)])
    kernel = scaled.inspect(torch.empty(4, 64, device="meta", requires_grad=True),
                            torch.empty(4, device="meta", dtype=torch.int64),
                            torch.empty(9, 64, device="meta"))  # fmt: skip
    assert [o.name for o in kernel.backward.graph.outputs] == ["d_x"]


def test_a_model_learns():
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(P, N))
    pos, weight = torch.arange(200) % P, torch.randn(P, N)
    optimizer, losses = torch.optim.SGD([table], lr=0.5), []
    x = torch.ones(200, N)
    for _ in range(100):
        loss = (scaled(x, pos, table) - weight[pos]).square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_torch_compile(backend):
    torch.compiler.reset()
    step = lambda *args: several(*args).square().sum()  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for m in (9, 13):
        args = row(m, N), places(m, 3), row(m, 3, seed=2), row(P, N, seed=1)
        wrt = args[0], *args[2:]
        found = [torch.autograd.grad(f(*args), wrt) for f in (compiled, step)]
        assert all(map(torch.equal, *found))


def test_in_a_compiled_graph_the_addition_is_one_operation():
    """Inductor would make additions of it that take place in any order."""
    graphs = []
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def keep(graph, example):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    args = row(M, N), places(M), row(P, N, seed=1)
    compiled = torch.compile(scaled, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    compiled(*args).sum().backward()
    assert graphs[-1].count("htile.add_rows") == 1 and "embedding" not in graphs[-1]


def test_torch_func():
    x, table = row(3, M, N).detach(), row(P, N, seed=1).detach()
    pos = places(3, M)

    def loss(f):
        return lambda table, x, pos: f(x, pos, table).sin().sum()

    def plain(x, pos, table):
        return x * table[pos]

    for make in (
        lambda f: torch.vmap(torch.func.grad(loss(f)), (None, 0, 0)),
        lambda f: torch.func.grad(loss(f)),
        lambda f: torch.func.grad(lambda *args: torch.func.grad(loss(f))(*args).square().sum()),
        lambda f: lambda *args: torch.func.jvp(
            lambda table: torch.func.grad(loss(f))(table, *args[1:]), args[:1], args[:1]
        ),
    ):
        found, right = make(scaled)(table, x, pos), make(plain)(table.double(), x.double(), pos)
        for got, exact in zip(*map(torch.utils._pytree.tree_leaves, (found, right)), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


def test_a_function_with_products():
    @htile.rowwise
    def logits(x, W: htile.Matrix, pos: htile.PerRow, bias: htile.Shared):
        return torch.tanh(F.linear(x, W)) + bias[pos]

    args = row(M, 64, dtype=BF16), row(32, 64, dtype=BF16, seed=1), row(P, 32, seed=2)
    pos = places(M)
    found = torch.autograd.grad(logits(args[0], args[1], pos, args[2]).float().sin().sum(), args)
    wide = [a.detach().double().requires_grad_() for a in args]
    right = (torch.tanh(F.linear(*wide[:2])) + wide[2][pos]).sin().sum()
    for got, exact in zip(found, torch.autograd.grad(right, wide), strict=True):
        assert largest_of(got.double() - exact) <= 0.02 * largest_of(exact)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ("sparse", "scale_grad_by_freq"))
def test_other_gradients_of_torchs_embedding_are_refused(option):
    f = htile.rowwise(lambda x, pos, table: x + F.embedding(pos, table, **{option: True}))
    f._signature.kinds = (None, htile.PerRow, htile.Shared)
    with pytest.raises(UnsupportedError, match=f"{option}=True"):
        f(row(M, N).detach(), places(M), row(P, N).detach())


def test_a_table_of_8_bits_has_no_gradient():
    f = htile.rowwise(lambda x, pos, table: x * table[pos].float())
    f._signature.kinds = (None, htile.PerRow, htile.Shared)
    table = torch.randn(P, N).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(GradientError, match="table is float8_e4m3fn") as raised:
        f(torch.randn(M, N), places(M), table)
    assert "x * table[pos].float()" in raised.value.loc.text
