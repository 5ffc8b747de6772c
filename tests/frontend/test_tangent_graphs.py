"""Tangents as graphs: their values are torch's in float64, and they have no more than they need.

tests/gradients.py has the comparison.
"""

import importlib
import zlib

import pytest
import torch
import torch.nn.functional as F

import htile
from examples.gallery import CASES
from htile.errors import GradientError
from htile.frontend.adjoints import DERIVE, REARRANGED, nothing
from htile.frontend.graph import Role
from htile.frontend.ops import COLLECTIVES, Op
from htile.frontend.tangents import PUSH, tangents
from htile.lower.passes.simplify import run_passes
from tests.frontend import test_derive as derivatives
from tests.frontend import test_slopes as slopes
from tests.gradients import called, check_tangents
from tests.test_gallery import prepared

F32 = torch.float32
M, N = 5, 37


def rows(*lead, n=N, seed=0):
    return torch.randn(*lead, n, generator=torch.Generator().manual_seed(seed))


def tangents_of(f, *args):
    call = called(htile.rowwise(f), *args)
    return tangents(call.graph, call.wrt).graph


# ---- values --------------------------------------------------------------------------------------


def test_what_moves_or_reduces_elements_has_a_rule_of_its_own():
    without = {op for op in REARRANGED if DERIVE[op] is nothing}
    assert set(PUSH) == (REARRANGED | {Op.EXPAND}) - without - {Op.CAT, Op.CUSTOM}


@pytest.mark.parametrize("name", derivatives.EXAMPLES)
def test_examples(name):
    module = importlib.import_module(f"examples.{name}")
    torch.manual_seed(zlib.crc32(name.encode()))
    args = module.arguments(M, N, F32, "cpu")
    check_tangents(getattr(module, name), *args, tolerance=1e-7)


OF_8_BITS_OR_INTEGERS = ("inverse_sample", "microscaling", "rmsnorm_fp4", "rmsnorm_static_fp8",
                         "rotary_fp8", "speculative_sample")  # fmt: skip
"""Those that give nothing else, in a variant at least."""


@pytest.mark.parametrize(("name", "k"), CASES)
def test_gallery(name, k):
    f, _, args, variant = prepared(name, k, 0, F32)
    graph = called(f, *args, **variant).graph
    dtypes = [out.dtype for out in graph.outputs]
    if any(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        check_tangents(f, *args, tolerance=1e-7, **variant)
    else:
        assert name in (*OF_8_BITS_OR_INTEGERS, "quantize_groups")


@pytest.mark.parametrize("name", derivatives.TWICE)
def test_functions(name):
    f = htile.rowwise(derivatives.TWICE[name])
    names = f._signature.names
    check_tangents(f, *(rows(*(M,) * (p in "xy"), seed=k) for k, p in enumerate(names)))


@pytest.mark.parametrize("name", derivatives.SHAPES)
def test_shapes(name):
    f = htile.rowwise(derivatives.SHAPES[name])
    check_tangents(f, *(derivatives._argument(p, k) for k, p in enumerate(f._signature.names)))


@pytest.mark.parametrize("name", slopes.ELEMENTWISE)
def test_edges(name):
    f = slopes.ELEMENTWISE[name]
    check_tangents(htile.rowwise(lambda x: f(x)), slopes.EDGES, tolerance=1e-6)


@pytest.mark.parametrize("name", slopes.PAIRS)
def test_pairs(name):
    """At equal operands torch's tangents of `fmax` and `atan2` are not those of its gradients."""
    places = [1, 3, 4, 5, 6] if name in ("fmax", "atan2") else [*range(7)]
    f = htile.rowwise(slopes.PAIRS[name])
    check_tangents(f, slopes.LEFT[:, places], slopes.RIGHT[:, places], tolerance=1e-6)


@pytest.mark.parametrize("name", slopes.REDUCED)
def test_reductions(name):
    f, *values = slopes.REDUCED[name]
    for x in values:
        check_tangents(htile.rowwise(f), x)


@pytest.mark.parametrize("wrt", [("x",), ("w",), ("t",), ("s",), ("w", "s"), ("t", "x")])
def test_some_parameters(wrt):
    f = htile.rowwise(lambda x, w, t, s: (torch.softmax(x * w, -1) * t + s, x.sum() + w * 2, x * s))
    check_tangents(f, rows(M), rows(), rows(M, n=1), rows()[0], wrt=wrt)


def test_tables_have_tangents():
    table, index = rows(7, seed=1), torch.tensor([[3], [0], [6], [3], [1]])

    def looked_up(x, table: htile.Shared, index):
        return x * table[index[0]].exp()

    check_tangents(htile.rowwise(looked_up), rows(M), table, index)


# ---- the graph -----------------------------------------------------------------------------------


def test_what_it_has():
    def f(x, w, t, s, t_w, k: float):
        return (x * w * s).bfloat16(), x.sum() * t + k, (t_w > x).int()

    args = rows(M).bfloat16(), rows(), rows(M, n=1), rows()[0], rows(), 2.0
    graph = tangents_of(f, *args)
    assert [(i.name, i.role, i.dtype) for i in graph.inputs] == [
        ("x", Role.ROW, torch.bfloat16), ("w", Role.COLUMN, F32), ("t", Role.PER_ROW, F32),
        ("s", Role.DEVICE_SCALAR, F32), ("t_x", Role.ROW, torch.bfloat16),
        ("t_w_", Role.COLUMN, F32), ("t_t", Role.PER_ROW, F32), ("t_s", Role.DEVICE_SCALAR, F32),
    ]  # fmt: skip
    assert [(o.name, o.dtype, o.inner, o.is_row) for o in graph.outputs] == [
        ("t_out0", torch.bfloat16, (N,), True), ("t_out1", F32, (1,), False)
    ]  # fmt: skip


def test_a_linear_function_needs_the_tangents_only():
    graph = tangents_of(lambda x, w: (x - 2 * w).cumsum(-1), rows(M), rows())
    assert [i.name for i in graph.inputs] == ["t_x", "t_w"]
    assert [node.op for node in graph if node.op in COLLECTIVES] == [Op.CUMSUM]


def test_no_tangents():
    call = called(htile.rowwise(lambda x, w: (x.detach() * w.floor(), x.argmax())), rows(M), rows())
    assert tangents(call.graph, ("x", "w")) is None


def test_ties_of_the_maximum_of_a_softmax_are_not_counted():
    graph = run_passes(tangents_of(lambda x: torch.softmax(x, -1), rows(M)))
    assert [node.op for node in graph if node.op in COLLECTIVES] == [Op.MAX, Op.SUM, Op.SUM]


def test_refused():
    call = called(htile.rowwise(lambda x: htile.max_rows(F.relu(x))), rows(M))
    with pytest.raises(GradientError, match="out is a max over all rows"):
        tangents(call.graph, ("x",))
