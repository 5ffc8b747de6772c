"""Derivatives as graphs: their values are torch's in float64, and their structure is the short one.

tests/gradients.py has the comparison. Edges of functions are in test_slopes.py.
"""

import importlib
import math
import zlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import htile
from examples.gallery import CASES
from examples.softmax import softmax
from htile.errors import GradientError
from htile.frontend.adjoints import DERIVE
from htile.frontend.derive import derive, differentiable
from htile.frontend.graph import Role
from htile.frontend.ops import COLLECTIVES, Op
from htile.frontend.reference import evaluate
from htile.frontend.slopes import Slope
from htile.lower.passes.simplify import run_passes
from htile.lower.patterns import ancestors
from tests.gradients import F64, called, check, check_second, cotangents, gradients
from tests.test_gallery import prepared

F32 = torch.float32
M, N = 5, 37
EXAMPLES = ("absnorm", "capped_softmax", "causal_softmax", "cross_entropy", "layernorm",
            "log_softmax", "norm_softmax", "rmsnorm", "softmax", "swiglu")  # fmt: skip


def rows(*lead, n=N, seed=0):
    return torch.randn(*lead, n, generator=torch.Generator().manual_seed(seed))


def joint_of(f, *args):
    call = called(htile.rowwise(f), *args)
    return derive(call.graph, call.wrt, call.outputs)


def stages(graph):
    """How many reductions follow each other, as a kernel has them."""
    found = []
    for node in run_passes(graph):
        before = max([found[i] for i in node.inputs], default=0)
        found.append(before + (node.op in COLLECTIVES))
    return max(found)


def derived(joint, graph):
    """The operations behind those of the graph itself."""
    return [node.op for node in joint.nodes[len(graph) :]]


# ---- values --------------------------------------------------------------------------------------


def test_every_operation_has_a_rule():
    assert set(DERIVE) == set(Op)


@pytest.mark.parametrize("n", (N, 1))
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, n):
    module = importlib.import_module(f"examples.{name}")
    torch.manual_seed(zlib.crc32(name.encode()))
    args = module.arguments(M, n, F32, "cpu")
    call = check(getattr(module, name), *args, tolerance=1e-7)
    assert call.outputs
    check_second(getattr(module, name), *args, tolerance=1e-6)


WITHOUT = {  # those without a derivative: what they say, and the parameters that have one
    "inverse_sample": ("inverse_sample has no derivative for weights and share", None),
    "microscaling": ("microscaling has no derivative for x", None),
    "speculative_sample": ("speculative_sample has no derivative for shares and", None),
}


@pytest.mark.parametrize(("name", "k"), CASES)
def test_gallery(name, k):
    f, _, args, variant = prepared(name, k, 0, F32)
    call = called(f, *args, **variant)
    if name not in WITHOUT or (name == "microscaling" and call.outputs):
        check(f, *args, tolerance=1e-7, **variant)
        return
    message, others = WITHOUT[name]
    if others:
        check(f, *args, tolerance=1e-7, wrt=others, **variant)
    with pytest.raises(GradientError, match=message):
        derive(call.graph, call.wrt, call.outputs or [out.name for out in call.graph.outputs])


TWICE = {
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x) + F.mish(x) + F.elu(x) + F.logsigmoid(x),
    "quotient": lambda x, y: x / (y * y + 1),
    "power": lambda x, y: (x * x + 0.5) ** y,
    "trigonometry": lambda x: torch.sin(x) * torch.cos(x) + torch.tanh(x) + torch.erf(x),
    "logarithms": lambda x: torch.log(x * x + 1) + torch.log2(x * x + 2) * torch.log1p(x.exp()),
    "powers of two": lambda x: torch.exp2(x) + torch.expm1(x) * torch.sqrt(x * x + 1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "entropy": lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(),
    "logsumexp": lambda x: torch.logsumexp(x, -1) ** 2,
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape, w[: x.shape[-1]], b),
    "rms_norm": lambda x, w: x * torch.rsqrt((x * x).mean() + 1e-6) * w,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "std": lambda x: x / x.std(),
    "norm of order 3": lambda x: x / x.norm(p=3),
    "prod": lambda x: (x * x + 0.5).prod(),
    "cumsum": lambda x: torch.exp(0.1 * x.cumsum(-1)),
    "parts": lambda x, y: torch.cat((x[:18] * y[18:36], (x[18:] * y[:19]).exp())),
    "every second": lambda x: (x[1::2] * x[:-1:2]).exp(),
    "ranks": lambda x: x.topk(3).values.exp() * x.sum(),
    "maximum": lambda x, y: torch.maximum(x * x, y * x) * x.amax(),
    "where": lambda x, y: torch.where(x > 0, x * y, x.exp() * y.sum()),
}


@pytest.mark.parametrize("name", TWICE)
def test_twice(name):
    f = htile.rowwise(TWICE[name])
    wide = [rows(M, seed=k) if p in "xy" else rows(seed=k)
            for k, p in enumerate(f._signature.names)]  # fmt: skip
    check(f, *wide)
    check_second(f, *wide)


SHAPES = {
    "groups": lambda x: torch.softmax(x.view(4, 6), -1).reshape(24),
    "the first axis": lambda x: torch.softmax(x.view(4, 6), 0),
    "a logsumexp of each group": lambda x: torch.logsumexp(x.view(4, 6), -1),
    "of all groups": lambda x: torch.logsumexp(x.view(4, 6), (0, 1)) * x,
    "deviations of groups": lambda x: F.layer_norm(x.view(4, 6), (6,)),
    "transposed": lambda x: x.view(4, 6).T.exp() * x.view(6, 4),
    "transposed maxima": lambda x: (x.view(4, 6) - x.view(4, 6).amax(-1)[:, None]).exp().T.sum(0),
    "expanded": lambda x: x.view(4, 1, 6).expand(4, 3, 6).exp().prod(1),
    "a matrix": lambda x, y: x.view(4, 6) @ y.view(6, 4),
    "outer": lambda x, y: (x[:, None] * y[None]).softmax(-1).sum(0),
    "stacked": lambda x, y: torch.stack((x * y, y.exp()), -1).flatten(),
    "a step of 3": lambda x: x[1::3].exp().sum() * x,
    "rolled": lambda x: x.roll(5) * x,
    "joined": lambda x, y: torch.cat((x, y.sum()[None], y))[3:40].exp(),
    "taken": lambda x, i: x[i].exp().sum() * x + x[i[0]],
    "classes": lambda x, i: F.cross_entropy(x, i[0], label_smoothing=0.1),
    "a class of a product": lambda x, i: (x.softmax(-1) * x.cumsum(-1))[i[1]],
    "columns": lambda x, w: (x.view(4, 6) * w[:6]).exp() + w.sum(),
    "per row": lambda x, t: torch.softmax(x / (t * t + 1), -1),
    "per row by itself": lambda x, t: (t.exp(), x * t),
    "a scalar": lambda x, s: torch.tanh(s * x) * s,
    "sums of rows": lambda x, y: (x * y).sum() / (x * x).sum().sqrt() / (y * y).sum().sqrt(),
    "scans of groups": lambda x: x.view(4, 6).cumsum(0) * x.view(4, 6).cumsum(1),
    "products of groups": lambda x: x.view(4, 6).prod(0) * x.view(4, 6).prod(1).sum(),
    "along another axis": lambda x: (e := (v := x[:16].view(4, 4)).sub(v.amax(-1)[:, None]).exp())
        / e.sum(-1)[None],
    "along the same axis": lambda x: (e := (v := x[:16].view(4, 4)).sub(v.amax(-1)[:, None]).exp())
        / e.sum(-1)[:, None],
    "one result twice": lambda x: (x.exp().sum(), *2 * (x.sin(),)),
    "detached": lambda x: x * x.detach() + (x.round() - x).detach() + x,
}


def _argument(name, k):
    drawn = rows(M, n=24, seed=k)
    return {
        "w": drawn[0], "t": drawn[:, :1], "s": drawn[0, 0],
        "i": torch.tensor([[3, 5], [0, 23], [7, 7], [1, 2], [22, 11]]),
    }.get(name, drawn)  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    f = htile.rowwise(SHAPES[name])
    args = [_argument(name, k) for k, name in enumerate(f._signature.names)]
    check(f, *args)
    check_second(f, *args)


def test_leading_dimensions():
    for lead in ((), (1,), (2, 3), (1, 2, 1)):
        check(htile.rowwise(lambda x, w: F.rms_norm(x, x.shape, w)), rows(*lead), rows(seed=1),
              tolerance=1e-6)  # torch's epsilon is that of the dtype  # fmt: skip


def test_no_rows():
    call = called(htile.rowwise(lambda x, w: x * w), torch.empty(0, N), rows())
    found = gradients(call, cotangents(call))
    assert found["x"].shape == (0, N) and torch.equal(found["w"], torch.zeros(N, dtype=F64))


def test_rows_of_any_length():
    """The mean divides by the length of the call, and so does its derivative."""
    f = htile.rowwise(lambda x, w: F.layer_norm(x, x.shape[-1:], w) + x.sum() + x.mean(),
                      dynamic_n=True)  # fmt: skip
    call = check(f, rows(M, n=48), rows(n=48))
    assert call.graph.multiple is not None and call.graph.n == 64


# ---- the graph -----------------------------------------------------------------------------------


def test_what_it_has():
    def f(x, w, t, s, k: float):
        return (x * w * s).bfloat16(), x.sum() * t + k

    args = rows(M).bfloat16(), rows(), rows(M, n=1), rows()[0], 2.0
    call = called(htile.rowwise(f), *args)
    assert call.outputs == ("out0", "out1")
    joint = derive(call.graph, ("s", "x", "w", "t", "k"), ("out0", "out1"))
    assert joint.nodes[: len(call.graph)] == call.graph.nodes
    added = joint.inputs[len(call.graph.inputs) :]
    assert [(i.name, i.role, i.dtype) for i in added] == [
        ("d_out0", Role.ROW, torch.bfloat16), ("d_out1", Role.PER_ROW, F32),
    ]  # fmt: skip
    assert [(o.name, o.dtype, o.inner, o.is_row, o.over) for o in joint.outputs] == [
        ("d_s", F32, (), False, Op.SUM), ("d_x", torch.bfloat16, (N,), True, None),
        ("d_w", F32, (N,), True, Op.SUM), ("d_t", F32, (1,), False, None),
    ]  # fmt: skip
    # of one cotangent only, which the other parameters have no part in
    joint = derive(call.graph, call.wrt, ("out1",))
    assert [o.name for o in joint.outputs] == ["d_x", "d_t"]
    assert [i.name for i in joint.inputs[len(call.graph.inputs) :]] == ["d_out1"]


def test_a_name_that_is_taken():
    call = called(htile.rowwise(lambda x, d_out: x * d_out), rows(M), rows(M))
    joint = derive(call.graph, call.wrt, call.outputs)
    assert [i.name for i in joint.inputs] == ["x", "d_out", "d_out_"]


def test_which_outputs_have_a_derivative():
    def f(x, w, i):
        return x.argmax(), x * 2, w.floor() + i, x.detach() * w, x.topk(2)

    call = called(htile.rowwise(f), rows(M), rows(), torch.ones(M, N, dtype=torch.int32))
    assert differentiable(call.graph, ("x",)) == ("out1", "out4")
    assert differentiable(call.graph, ("w",)) == ("out3",)
    assert differentiable(call.graph, ("i",)) == ()


def test_no_path():
    call = called(htile.rowwise(lambda x, w: x.floor() * w), rows(M), rows())
    joint = derive(call.graph, ("x", "w"), ("out",))
    assert [o.name for o in joint.outputs] == ["d_w"]
    for given in (("out",), ()):
        with pytest.raises(GradientError, match="of <lambda> has no derivative for x") as raised:
            derive(call.graph, ("x",), given)
        assert "x.floor() * w" in raised.value.loc.text


def _over_rows(graph, op=Op.SUM):
    """The graph, with its result reduced over all rows."""
    return replace(graph, outputs=tuple(replace(out, over=op) for out in graph.outputs))


@pytest.mark.parametrize("name", ("row", "number"))
def test_sums_over_rows(name):
    """Their gradient is the same for every row, and so may be what it gives: it keeps its bits."""

    def row(x, w, t):
        return x * 2 + w + t

    def number(x, w, t):
        return x.sum() + w.sum() * t[0]

    f = htile.rowwise(row if name == "row" else number)
    call = called(f, rows(M), rows(), rows(M, n=1))
    graph = _over_rows(call.graph)
    joint = derive(graph, call.wrt, ("out",))
    added = joint.inputs[len(graph.inputs)]
    assert added.role is (Role.COLUMN if name == "row" else Role.DEVICE_SCALAR)
    assert all(joint[o.id].value.varies.value == "row" for o in joint.outputs)
    call.values["x"][0, 0] = math.nan  # which the gradient of x does not depend on
    g = rows(seed=3).double() if name == "row" else torch.tensor(1.5, dtype=F64)
    found = call.evaluated(joint, {"d_out": g})
    x, w, t = (call.values[k].clone().requires_grad_() for k in "xwt")
    out = x * 2 + w + t if name == "row" else x.sum(-1) + w.sum() * t[:, 0]
    exact = torch.autograd.grad(out.sum(0), (x, w, t), g)
    for k, right in zip("xwt", exact, strict=True):
        torch.testing.assert_close(found[f"d_{k}"], right)


def test_a_maximum_over_rows_is_refused():
    call = called(htile.rowwise(lambda x: x * 2), rows(M))
    with pytest.raises(GradientError, match="out is a max over all rows") as raised:
        derive(_over_rows(call.graph, Op.MAX), ("x",), ("out",))
    assert raised.value.loc.short.startswith("test_derive.py:")


def test_gradients_in_8_bits_are_refused():
    x = rows(M).to(torch.float8_e4m3fn)
    graph = called(htile.rowwise(lambda x: x.float() * 2), x).graph
    told = "x is float8_e4m3fn, which no gradient is stored in"
    with pytest.raises(GradientError, match=told) as raised:
        derive(graph, ("x",), ("out",))
    assert "x.float() * 2" in raised.value.loc.text


# ---- what is short -------------------------------------------------------------------------------


def test_softmax_is_the_one_that_engineers_write():
    """y * (dy - sum(y * dy)): one reduction, and no ties of the maximum are counted."""
    for f in (softmax, htile.rowwise(lambda x: torch.softmax(x, -1))):
        graph = called(f, rows(M)).graph
        joint = derive(graph, ("x",), ("out",))
        assert derived(joint, graph) == [Op.INPUT, Op.MUL, Op.SUM, Op.SUB, Op.MUL]
        y, (out,) = graph.outputs[0].id, joint.outputs
        assert y in joint[out.id].inputs


MAXIMA = {
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i[0]),
    "z_loss": lambda x: torch.logsumexp(x, -1) ** 2 + torch.logsumexp(x, -1),
    "entropy": lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(),
    "groups": lambda x: torch.softmax(x.view(4, 6), -1).reshape(24),
    "temperature": lambda x, t: torch.softmax(x / (t * t + 1), -1),
    "masked": lambda x: torch.softmax(torch.where(x > 1.0, -math.inf, x), -1),
    "capped": lambda x: torch.softmax(30 * torch.tanh(x / 30), -1),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_no_ties_are_counted(name):
    f = htile.rowwise(MAXIMA[name])
    args = [_argument(name, k) for k, name in enumerate(f._signature.names)]
    check(f, *args)
    call = called(f, *args)
    joint = derive(call.graph, call.wrt, call.outputs)
    ops = [node.op for node in run_passes(joint)]
    assert Op.MAX in ops, "the maximum is subtracted"
    behind = derived(joint, call.graph)
    assert Op.EQ not in behind or name == "cross_entropy", "where elements are the maximum"


def test_ties_are_counted_where_they_matter():
    for name, matter in (("along another axis", True), ("along the same axis", False)):
        joint = joint_of(SHAPES[name], rows(M, n=24))
        assert (Op.EQ in [node.op for node in joint]) is matter
    joint = joint_of(lambda x: torch.exp(x - x.max()), rows(M))
    assert Op.EQ in [node.op for node in joint]
    joint = joint_of(lambda x: torch.exp(x - x.amax()) / (x.exp().sum() + 1), rows(M))
    assert Op.EQ in [node.op for node in joint]


def test_stages():
    """The sums of a norm's derivative begin together, and all sums begin with the function's."""

    def reductions(f, *args):
        graph = called(htile.rowwise(f), *args).graph
        joint = derive(graph, ("x",), ("out",))
        return derived(joint, graph).count(Op.SUM), stages(joint) - stages(graph)

    w, b = rows(seed=1), rows(seed=2)
    assert reductions(lambda x, w, b: F.layer_norm(x, x.shape, w, b), rows(M), w, b) == (2, 0)
    assert reductions(lambda x, w: F.rms_norm(x, x.shape, w), rows(M), w) == (1, 0)
    assert reductions(lambda x: torch.softmax(x, -1), rows(M)) == (1, 0)
    assert reductions(lambda x: torch.logsumexp(x, -1), rows(M)) == (0, 0)


def test_parts_are_joined():
    """The gradients of the parts of a row are put side by side, not added to zeros."""
    joint = joint_of(lambda x: F.silu(x[:18]) * x[18:], rows(M, n=36))
    cats = [node for node in joint if node.op is Op.CAT]
    assert len(cats) == 1 and joint.outputs[0].id == cats[0].id
    assert not any(joint[i].op is Op.CONST for i in cats[0].inputs)
    joint = joint_of(lambda x: x[0::2] * x[1::2].exp(), rows(M, n=36))
    assert sum(node.op is Op.CAT for node in joint) == 1
    joint = joint_of(lambda x: x[:12] * x[12:24] + x[24:], rows(M, n=36))
    (cat,) = (node for node in joint if node.op is Op.CAT)
    assert len(cat.inputs) == 3


def test_nothing_is_computed_twice():
    """Equal nodes of the function are one in its derivative."""
    joint = joint_of(lambda x: torch.sigmoid(x) * torch.sigmoid(x), rows(M))
    assert sum(node.op is Op.SIGMOID for node in joint) == 2, "as traced"
    live = ancestors(joint, joint.outputs)
    assert sum(joint[id].op is Op.SIGMOID for id in live) == 1


def test_kernels_have_no_slopes():
    """What only a derivative reads changes no kernel."""

    def f(x):
        return F.relu(x.detach()) + x.clamp(0.0, 1.0) + x.norm() + F.normalize(x, dim=-1)

    graph = called(htile.rowwise(f), rows(M)).graph
    assert any(node.op is Op.STOP for node in graph)
    assert any(isinstance(node.arg, Slope) for node in graph)
    placed = run_passes(graph)
    assert not any(node.op is Op.STOP or isinstance(node.arg, Slope) for node in placed)


PLACED = {
    "softmax": lambda x: torch.softmax(x, -1),
    "a norm with a column": lambda x, w: F.layer_norm(x, x.shape, w),
    "the weight of a class": lambda x, w, i: torch.logsumexp(x, -1) * w[i[0]],
    "cumsum": lambda x: x.cumsum(-1).exp(),
    "swiglu": lambda x: F.silu(x[:12]) * x[12:],
    "pairs": lambda x: x[0::2] * x[1::2].exp(),
    "groups": lambda x: x.view(4, 6).amax(-1).exp(),
    "groups of a norm": lambda x: F.layer_norm(x.view(4, 6), (6,)),
    "ranks": lambda x: x.topk(2).values.exp(),
    "a rank": lambda x: x.max(-1).values.exp(),
}
IN_PIECES = {"swiglu", "pairs", "groups", "groups of a norm", "ranks", "the weight of a class"}


@pytest.mark.parametrize("name", PLACED)
def test_kernels_can_be_made_of_it(name):
    f = htile.rowwise(PLACED[name])
    call = called(f, *(_argument(each, k) for k, each in enumerate(f._signature.names)))
    joint = derive(call.graph, call.wrt, call.outputs)
    placed = run_passes(joint)
    of = {(out.name, out.over) for out in joint.outputs}
    assert {(out.name, out.over) for out in placed.outputs} == of
    is_whole = all(each.view is None for each in (*placed.inputs, *placed.outputs))
    assert is_whole or name in IN_PIECES
    if is_whole:
        given = {f"d_{name}": g for name, g in cotangents(call).items()}
        found, right = (call.evaluated(graph, given) for graph in (placed, joint))
        for each in right:
            torch.testing.assert_close(found[each], right[each])


@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_can_be_made_of_examples(name):
    """Rows of one element, too, whose sum over the row is not that element of every thread."""
    module = importlib.import_module(f"examples.{name}")
    for n in (1, N):
        torch.manual_seed(1)
        call = called(getattr(module, name), *module.arguments(M, n, F32, "cpu"))
        joint = derive(call.graph, call.wrt, call.outputs)
        placed = run_passes(joint)
        given = {f"d_{name}": g for name, g in cotangents(call).items()}
        found, right = (call.evaluated(graph, given) for graph in (placed, joint))
        for each in right:
            torch.testing.assert_close(found[each], right[each], rtol=1e-6, atol=1e-6)


def test_cumsum_keeps_accuracy():
    """What is behind an element is as exact as it is small, however large the sum of the row is."""
    call = called(htile.rowwise(lambda x: x.cumsum(-1)), rows(64, n=4096))
    given = {"out": cotangents(call)["out"].abs() * torch.logspace(0, -20, 4096, dtype=F64)}
    given = {name: g.float() for name, g in given.items()}
    exact = given["out"].double().flip(-1).cumsum(-1).flip(-1)
    joint = derive(call.graph, call.wrt, call.outputs)
    assert derived(joint, call.graph) == [Op.INPUT, Op.SUM_FROM_END]
    tensors = {"x": call.values["x"].float(), "d_out": given["out"]}
    found = evaluate(joint, tensors, call.lead)["d_x"]
    assert ((found / exact - 1).abs() <= torch.finfo(F32).eps).all()
