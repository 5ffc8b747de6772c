"""The derivative of cumulative products, above all where elements are 0, against torch's.

torch's own derivative of second order of `cumprod` has a formula of its own for zeros. Here it is
also compared with that of a chain of products, in which every slope is one of a product of two.
"""

import math

import numpy as np
import pytest
import torch

import htile
from htile.frontend.derive import derive
from htile.frontend.ops import COLLECTIVES
from htile.frontend.reference import evaluate
from htile.frontend.tangents import tangents
from htile.lower.passes.simplify import drop_slopes, run_passes
from htile.lower.passes.space import place
from tests.generated.movements import interpreted
from tests.gradients import F64, called, check, check_second, check_tangents, cotangents
from tests.training import assert_gradients

BF16, F32 = torch.bfloat16, torch.float32
M, N = 5, 11
LAST = N - 1
PLACES = [
    (), (0,), (1,), (5,), (LAST,), (0, 1), (0, 5), (5, 6), (5, LAST), (0, LAST), (0, 5, LAST),
    (3, 4, 5, 6), tuple(range(N)),
]  # fmt: skip
products = htile.rowwise(lambda x: x.cumprod(-1))


def rows(places=(), n=N, m=M, seed=0, size=1.0):
    """Rows of both signs, of about one size, that are 0 at these places; the first has no zero."""
    made = torch.Generator().manual_seed(seed)
    x = torch.exp2(torch.randn(m, n, generator=made) * size)
    x *= torch.where(torch.rand(m, n, generator=made) < 0.5, -1.0, 1.0)
    x[1:, list(places)] = 0.0
    return x


def chained(x):
    """The same products, one after the other."""
    found = [x[0]]
    for element in x[1:]:
        found.append(found[-1] * element)
    return torch.stack(found)


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_derivatives_are_torchs(places):
    for compared in (check, check_second, check_tangents):
        compared(products, rows(places))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_rows(n):
    for zero in range(n):
        for compared in (check, check_second, check_tangents):
            compared(products, rows((zero,), n))


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_second_order_is_that_of_a_chain_of_products(places):
    """Both modes over both modes."""
    call = called(products, rows(places))
    x, g, t, u = (call.values["x"], *(torch.randn(M, N, dtype=F64) for _ in range(3)))

    def gradient(x, g):
        return torch.func.vjp(torch.vmap(chained), x)[1](g)[0]

    def tangent(x, t):
        return torch.func.jvp(torch.vmap(chained), (x,), (t,))[1]

    joint = derive(call.graph, ("x",), ("out",))
    pushed = tangents(call.graph, ("x",)).graph
    compared = [
        (derive(joint, ("x", "d_out"), ("d_x",)), {"d_out": g, "d_d_x": u},
         torch.func.vjp(gradient, x, g)[1](u)),
        (tangents(joint, ("x", "d_out")).graph, {"d_out": g, "t_x": t, "t_d_out": u},
         (torch.func.jvp(gradient, (x, g), (t, u))[1],)),
        (derive(pushed, ("x", "t_x"), ("t_out",)), {"t_x": t, "d_t_out": u},
         torch.func.vjp(tangent, x, t)[1](u)),
        (tangents(pushed, ("x", "t_x")).graph, {"t_x": t, "t_x_": g, "t_t_x": u},
         (torch.func.jvp(tangent, (x, t), (g, u))[1],)),
    ]  # fmt: skip
    for graph, given, exact in compared:
        found = call.evaluated(graph, given)
        for one, right in zip(found.values(), exact, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-9, atol=1e-10 * right.abs().max())


SHAPES = {
    "the first axis": lambda x: x.view(4, 6).cumprod(0),
    "groups": lambda x: (y := x.view(4, 6).cumprod(1)) * y,
    "three axes": lambda x: x.view(2, 3, 4).cumprod(-2) * x.view(2, 3, 4).cumprod(0),
    "parts": lambda x: (x[:12] * x[12:]).cumprod(-1)[3:7],
    "of what is computed": lambda x: torch.where(x > 0, x, 0.5 * x).cumprod(-1) * x,
    "twice": lambda x: (x * x.cumprod(-1)).cumprod(-1),
    "of a number": lambda x: x.sum().expand(24).cumprod(-1),
    "both": lambda x: x.cumprod(-1).cumsum(-1) * x.cumsum(-1),
    "the last": lambda x: x.cumprod(-1)[-1] + x.cumprod(-1)[5],
    "of a mask": lambda x: (x > 0).cumprod(-1) * x,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    x = rows((3, 9, 15, 20), 24, size=0.2)
    f = htile.rowwise(SHAPES[name])
    check(f, x)
    check_tangents(f, x)
    check_second(f, x)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_can_be_made_of_it(name):
    """What is placed of a gradient gives the same."""
    call = called(htile.rowwise(SHAPES[name]), rows((3, 9, 15, 20), 24, size=0.2))
    joint = derive(call.graph, call.wrt, call.outputs)
    given = {f"d_{name}": g for name, g in cotangents(call).items()}
    right = call.evaluated(joint, given)
    with np.errstate(all="ignore"):
        found = interpreted(place(drop_slopes(joint)), joint, call.values | given, call.lead)
    for one, exact in zip(found, right.values(), strict=True):
        np.testing.assert_allclose(one, exact.numpy(), rtol=1e-9, atol=1e-9)


def test_rows_of_any_length():
    for n in (48, 50):
        check(htile.rowwise(lambda x: x.cumprod(-1), dynamic_n=True), rows((7, 40), n, size=0.2))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n", [1, 2, 7, 64, 1003, 4096])
def test_gradients_of_calls(n, dtype):
    """As exact as torch's own in float32, where products stay near 1 and where they vanish."""
    for size in (0.05, 0.5):
        for places in ((), (0,), (n // 2,), (n - 1,), (n // 3, n // 2), (0, n - 1)):
            assert_gradients(products, rows(places, n, size=size).to(dtype))
            assert_gradients(products, (rows(places, n, size=size) * 0.5).to(dtype))


def test_small_sums_keep_their_digits():
    """Behind products that vanish a slope is as exact as before them, relative to its own size."""
    x = torch.full((1, 60), 0.5) + torch.rand(1, 60) * 0.1
    x[0, 40] = 1e-3
    call = called(products, x)
    exact = call.evaluated(derive(call.graph, ("x",), ("out",)), {"d_out": torch.ones(1, 60)})
    x.requires_grad_()
    (found,) = torch.autograd.grad(products(x).sum(), x)
    torch.testing.assert_close(found.double(), exact["d_x"], rtol=1e-6, atol=0.0)


EDGES = {
    "they overflow": (1e30, 1e30, -1e30, 2.0),
    "behind a zero they overflow": (2.0, 0.0, 1e30, 1e30, 1e30),
    "they vanish": (1e-30, 1e-30, -1e-30, 2.0, 0.0, 1e-30),
    "infinity": (2.0, math.inf, 3.0, 2.0),
    "infinity behind zeros": (2.0, 0.0, 3.0, 0.0, math.inf, 2.0),
    "NaN": (2.0, math.nan, 3.0, 0.0, 2.0),
    "NaN behind a zero": (2.0, 0.0, math.nan, 0.0, 2.0),
    "NaN behind zeros": (2.0, 0.0, 3.0, 0.0, math.nan, 2.0),
    "negative zeros": (2.0, -0.0, 3.0, -0.0, 2.0),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    """What is infinite or no number is so in torch's float32, too."""
    x = torch.tensor([EDGES[name]])
    for seed in range(3):
        g = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        leaf, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        (found,) = torch.autograd.grad(products(leaf), leaf, g)
        (right,) = torch.autograd.grad(plain.cumprod(-1), plain, g)
        torch.testing.assert_close(found, right, rtol=1e-6, atol=0.0, equal_nan=True)


def test_what_it_has():
    """One product more, and one sum from the end. Nothing of second order is left in a kernel."""
    graph = called(products, rows()).graph
    placed = run_passes(derive(graph, ("x",), ("out",)))
    assert sorted(node.op.value for node in placed if node.op in COLLECTIVES) == [
        "cumprod", "min", "min", "sum", "sum_from_end"
    ]  # fmt: skip
    pushed = run_passes(tangents(graph, ("x",)).graph)
    assert sorted(node.op.value for node in pushed if node.op in COLLECTIVES) == [
        "cumprod", "cumsum", "min", "min", "sum"
    ]  # fmt: skip


def test_values_of_the_reference_and_of_what_is_placed():
    """In float32, as kernels compute it."""
    call = called(products, rows((4,), 37))
    joint = derive(call.graph, ("x",), ("out",))
    given = {"x": call.values["x"].float(), "d_out": cotangents(call)["out"].float()}
    found, right = (evaluate(g, given, call.lead)["d_x"] for g in (run_passes(joint), joint))
    assert torch.equal(found, right)
