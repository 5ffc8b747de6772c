"""Passes: what they merge, what they keep, and that they are done after one round."""

import math
import struct

import networkx as nx
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.graph import Builder, Role, verify
from htile.frontend.ops import Op, Value, Varies
from htile.frontend.reference import evaluate
from htile.lower.passes.rewrite import rewrite
from htile.lower.passes.simplify import PASSES, merge_common_subexpressions, run_passes
from tests.lower.cases import (
    BF16,
    COLUMN,
    EXAMPLES,
    F32,
    ROW,
    SCALAR,
    kernel_of,
    per_row_output,
    random_graph,
    row_output,
)
from tests.primitives.ptx_device import launch

SEEDS = range(30)


def builder():
    b = Builder("f", 64)
    return b, b.add_input("x", Role.ROW, BF16, ROW)


def ops(graph):
    return [node.op for node in graph]


def evaluated(graph, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (5, 64), "y": (5, 64), "w": (64,), "t": (5,)}
    tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    tensors |= {"y": tensors["y"].bfloat16(), "s": 0.7}
    names = {i.name for i in graph.inputs}
    return evaluate(graph, {k: v for k, v in tensors.items() if k in names}, lead=(5,))


def with_structure(graph):
    """The graph with a structure that `evaluate` can fill: a tuple of its outputs."""
    from dataclasses import replace

    from torch.utils import _pytree as pytree

    structure = pytree.tree_structure(tuple(range(len(graph.outputs))))
    return replace(graph, structure=structure)


def test_equal_expressions_become_one():
    b, x = builder()
    first, second = b.add(Op.EXP, (x,)), b.add(Op.EXP, (x,))
    out = b.add(Op.ADD, (first, second))
    merged = merge_common_subexpressions(b.finish([row_output(out)], None))
    assert ops(merged) == [Op.INPUT, Op.EXP, Op.ADD]
    assert merged[2].inputs == (1, 1)


def test_merging_follows_through_users():
    b, x = builder()
    sums = [b.add(Op.SUM, (b.add(Op.EXP, (x,)),)) for _ in range(2)]
    logs = [b.add(Op.LOG, (s,)) for s in sums]
    graph = b.finish([per_row_output(logs[0], "a"), per_row_output(logs[1], "b")], None)
    merged = merge_common_subexpressions(graph)
    assert ops(merged) == [Op.INPUT, Op.EXP, Op.SUM, Op.LOG]
    assert [out.id for out in merged.outputs] == [3, 3]


def test_operands_are_not_reordered():
    b, x = builder()
    y = b.add(Op.EXP, (x,))
    out = b.add(Op.MUL, (b.add(Op.SUB, (x, y)), b.add(Op.SUB, (y, x))))
    merged = merge_common_subexpressions(b.finish([row_output(out)], None))
    assert ops(merged).count(Op.SUB) == 2


def test_casts_to_different_dtypes_stay_apart():
    b, x = builder()
    casts = [b.add(Op.CAST, (x,), dtype) for dtype in (BF16, torch.float16, BF16)]
    total = b.add(Op.ADD, (b.add(Op.ADD, casts[:2]), casts[2]))
    merged = merge_common_subexpressions(b.finish([row_output(total)], None))
    assert [n.arg for n in merged if n.op is Op.CAST] == [BF16, torch.float16]


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [
        ((1.0, 1.0), 1),
        ((0.0, -0.0), 2),
        ((math.nan, math.nan), 1),
        ((math.inf, -math.inf), 2),
        ((0.1, 0.1 + 2**-60), 1),  # one number
        ((0.1, 0.1 + 2**-56), 2),
    ],
)
def test_constants_merge_by_bits(numbers, kept):
    b, x = builder()
    for number in numbers:
        x = b.add(Op.MUL, (x, b.add_const(number, SCALAR)))
    merged = merge_common_subexpressions(b.finish([row_output(x)], None))
    found = [n.arg for n in merged if n.op is Op.CONST]
    assert len(found) == kept
    assert {repr(number) for number in found} == {repr(number) for number in numbers}


@pytest.mark.parametrize(("op", "kept"), [(Op.MUL, 1), (Op.ADD, 1), (Op.SUB, 2), (Op.DIV, 2)])
def test_the_order_of_two_operands_counts_where_the_operation_says_so(op, kept):
    b, x = builder()
    y = b.add(Op.EXP, (x,))
    out = b.add(Op.POW, (b.add(op, (x, y)), b.add(op, (y, x))))
    merged = merge_common_subexpressions(b.finish([row_output(out)], None))
    assert sum(node.op is op for node in merged) == kept


def test_constants_of_different_types_stay_apart():
    b, x = builder()
    values = [
        b.add_const(1, Value((), Varies.SCALAR, torch.int32)),
        b.add_const(1, Value((), Varies.SCALAR, torch.int64)),
        b.add_const(1.0, SCALAR),
    ]
    true = b.add_const(True, Value((), Varies.SCALAR, torch.bool))
    wide = [b.add(Op.CONVERT, (i,), F32) for i in values[:2]] + [values[2]]
    for id in wide:
        x = b.add(Op.ADD, (x, id))
    out = b.add(Op.WHERE, (true, x, wide[0]))
    merged = merge_common_subexpressions(b.finish([row_output(out)], None))
    consts = [(type(n.arg), n.value.dtype) for n in merged if n.op is Op.CONST]
    assert len(consts) == len(set(consts)) == 4


def folded(op, *numbers, arg=None):
    """The constant that an operation on float constants becomes."""
    b, x = builder()
    id = b.add(op, [b.add_const(number, SCALAR) for number in numbers], arg)
    value = b[id].value
    graph = run_passes(b.finish([row_output(b.add(Op.MUL, (x, id)))], None))
    assert ops(graph) == [Op.INPUT, Op.CONST, Op.MUL]
    assert graph[1].value == value
    return graph[1].arg


@pytest.mark.parametrize(
    ("op", "numbers", "arg", "expected"),
    [
        (Op.ADD, (0.1, 0.2), None, struct.unpack("f", struct.pack("f", 0.1 + 0.2))[0]),
        (Op.DIV, (1.0, 4096.0), None, 2.0**-12),
        (Op.MUL, (-1.0, 0.0), None, -0.0),
        (Op.MUL, (3e38, 10.0), None, math.inf),
        (Op.CAST, (1.00390625,), BF16, 1.0),  # halfway: to even
        (Op.CAST, (1.01171875,), BF16, 1.015625),
        (Op.NEG, (math.inf,), None, -math.inf),
    ],
)
def test_numbers_are_folded_as_the_kernel_rounds(op, numbers, arg, expected):
    number = folded(op, *numbers, arg=arg)
    assert repr(number) == repr(expected)


def test_products_with_0_and_choices_of_one_number_are_folded():
    """Of integers. MLIR gives up on a kernel with a long chain of them."""

    def multiplied(x, y: htile.PerRow):
        found = torch.zeros_like(y)
        for k in range(16):
            found = torch.where(y == k, found * y, found)
        return found

    def of_floats(x, y: htile.PerRow):
        return torch.where(y == 1, y * 0.0, 0.0)

    x = torch.empty(4, 8, device="meta")
    kernel = kernel_of(multiplied, x, torch.empty(4, dtype=torch.int64, device="meta"))
    assert not [node for node in kernel.graph if node.op in (Op.MUL, Op.WHERE)]
    assert kernel.resources.stack == 0
    kept = kernel_of(of_floats, x, torch.empty(4, device="meta")).graph
    assert {Op.MUL, Op.WHERE} <= {node.op for node in kept}


def test_a_reduction_of_a_number_is_not_folded():
    """It hangs on N, and on how the row is padded."""
    b, x = builder()
    number = Value((64,), Varies.SCALAR, F32, None, True)
    total = b.add(Op.SUM, (b.add_const(1.0, number),))
    graph = run_passes(b.finish([row_output(b.add(Op.MUL, (x, total)))], None))
    assert Op.SUM in ops(graph)


def test_dead_nodes_go():
    b, x = builder()
    b.add(Op.SUM, (b.add(Op.EXP, (x,)),))
    b.add_const(3.0, SCALAR)
    out = b.add(Op.NEG, (x,))
    assert ops(rewrite(b.finish([row_output(out)], None))) == [Op.INPUT, Op.NEG]


def test_an_unused_argument_is_no_input():
    b, x = builder()
    b.add_input("w", Role.COLUMN, F32, COLUMN)
    y = b.add_input("y", Role.ROW, BF16, ROW)
    b.add_input("s", Role.SCALAR, F32, SCALAR)
    out = b.add(Op.ADD, (x, y))
    graph = rewrite(b.finish([row_output(out)], None))
    assert [(i.name, i.role, i.dtype) for i in graph.inputs] == [
        ("x", Role.ROW, BF16),
        ("y", Role.ROW, BF16),
    ]


@pytest.mark.parametrize("apply", [*PASSES, run_passes])
def test_outputs_keep_names_order_and_structure(apply):
    b, x = builder()
    e = b.add(Op.EXP, (x,))
    total = b.add(Op.SUM, (e,))
    outputs = [per_row_output(total, "b"), row_output(e, "a"), row_output(e, "c")]
    graph = apply(b.finish(outputs, "structure"))
    assert [(o.name, graph[o.id].op) for o in graph.outputs] == [
        ("b", Op.SUM),
        ("a", Op.EXP),
        ("c", Op.EXP),
    ]
    assert graph.structure == "structure"
    assert (graph.name, graph.n) == ("f", 64)


def test_locations_survive():
    from htile.errors import Location

    b, x = builder()
    here, there = Location("a.py", 3), Location("b.py", 4)
    out = b.add(Op.ADD, (b.add(Op.EXP, (x,), loc=here), b.add(Op.EXP, (x,), loc=there)), loc=there)
    graph = run_passes(b.finish([row_output(out)], None))
    assert [node.loc for node in graph] == [None, here, there]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs_keep_their_meaning(seed):
    graph = with_structure(random_graph(seed))
    passed = run_passes(graph)
    verify(passed)
    assert len(passed) < len(graph)
    for before, after in zip(evaluated(graph), evaluated(passed), strict=True):
        assert torch.equal(before.nan_to_num(1.25), after.nan_to_num(1.25))
        assert torch.equal(before.isnan(), after.isnan())


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_dead_or_double_is_left(seed):
    graph = run_passes(random_graph(seed))
    roots = [out.id for out in graph.outputs]
    live = set(roots).union(*(nx.ancestors(graph.dag, id) for id in roots))
    assert live == set(graph.dag)
    made = {i.id: i.formula for i in graph.inputs}  # of one float there may be several numbers
    seen = [(n.op, n.inputs, repr(n.arg), n.value, made.get(n.id)) for n in graph]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_round_changes_nothing(seed):
    once = run_passes(random_graph(seed))
    twice = run_passes(once)
    assert list(once) == list(twice)
    assert (once.inputs, once.outputs) == (twice.inputs, twice.outputs)


@pytest.mark.parametrize("apply", PASSES)
def test_the_argument_is_left_alone(apply):
    graph = random_graph(1)
    before = list(graph), set(graph.dag.edges)
    assert apply(graph) is not graph
    assert (list(graph), set(graph.dag.edges)) == before


def test_rewrite_verifies_what_a_rule_makes():
    b, x = builder()
    graph = b.finish([row_output(b.add(Op.NEG, (x,)))], None)

    def wrong(new, node, inputs):
        return new._add(Op.SUM, inputs, None, node.value, None) if node.op is Op.NEG else None

    with pytest.raises(AssertionError, match="value differs"):
        rewrite(graph, wrong)


def test_verify_names_what_is_wrong():
    b, x = builder()
    with pytest.raises(AssertionError, match="no outputs"):
        b.finish([], None)
    with pytest.raises(AssertionError, match="output out is no node"):
        b.finish([row_output(7)], None)
    b.inputs.clear()
    with pytest.raises(AssertionError, match="unnamed input"):
        b.finish([row_output(x)], None)


def test_log_softmax_and_logsumexp_share_their_exponentials():
    function, arguments = EXAMPLES["log_softmax"]
    graph = function.inspect(*arguments(2, 64, torch.bfloat16, "meta")).graph
    found = [node.op for node in graph]
    assert found.count(Op.EXP) == found.count(Op.SUM) == found.count(Op.LOG) == 1


@pytest.mark.parametrize("entropy", [False, True])
def test_the_logarithm_of_a_softmax_is_one_for_the_row(entropy):
    """It is as torch's in float64 has it: where the exponential is 0 there, and in rows of NaN."""

    def f(x):
        p = x.softmax(-1)
        return (p * p.log()).sum() if entropy else p.log()

    graph = kernel_of(f, torch.empty(9, 64, device="meta")).graph
    assert [node.value.spread for node in graph if node.op is Op.LOG] == [False]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    x[1, ::3], x[2, 5], x[3] = -math.inf, math.inf, -math.inf
    x[4, 7], x[5], x[6, 9], x[7, 2] = math.nan, 1.0, -1e4, -90.0
    x[8] *= 100
    (got,) = evaluate(with_structure(graph), {"x": x}, lead=(9,))
    expected = torch.stack([f(row) for row in x.double()])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("exponent", "short"), [(0.0, False), (1.0, True), (1.5, True), (65.0, False)]
)
def test_which_powers_are_short(exponent, short):
    """Anything to the power 0 is 1, which the short function would not give at 0."""
    x = torch.empty(9, 64, device="meta", dtype=torch.bfloat16)
    kernel = kernel_of(lambda x: x ** torch.full_like(x, exponent), x)
    assert ("pow_near" in kernel.source) == short


MEANS = {
    "of what else is read": (lambda x: x - x.mean(), [Op.INPUT, Op.MEAN, Op.SUB]),
    "of what is returned": (lambda x: (x, x.mean()), [Op.INPUT, Op.MEAN]),
    "with an axis": (lambda x: x - x.mean(-1, keepdim=True),
                     [Op.INPUT, Op.MEAN, Op.RESHAPE, Op.SUB]),
    "by hand": (lambda x: x - x.sum() / x.shape[-1], [Op.INPUT, Op.MEAN, Op.SUB]),
    "by hand with an axis": (lambda x: x - x.sum(-1, keepdim=True) / x.shape[-1],
                             [Op.INPUT, Op.MEAN, Op.RESHAPE, Op.SUB]),
    "once": (lambda x: (x - x.mean(), x.sum() / x.shape[-1]), [Op.INPUT, Op.MEAN, Op.SUB]),
    "of what nobody else reads": (lambda x: (x * x).mean(),
                                  [Op.INPUT, Op.MUL, Op.SUM, Op.CONST, Op.DIV]),
    "by another number": (lambda x: x - x.sum() / 3, [Op.INPUT, Op.SUM, Op.CONST, Op.DIV, Op.SUB]),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_which_means_are_exact_for_equal_elements(name):
    f, expected = MEANS[name]
    assert ops(kernel_of(f, torch.empty(4, 96, device="meta")).graph) == expected


def test_choices_by_a_sign_that_no_element_has_are_dropped():
    """Of a softplus, log(gamma(x)) is not reflected at 0; a NaN is neither less nor greater."""
    def kernel(f):
        return htile.rowwise(f).inspect(torch.empty(8, 256), arch="sm_90a")

    def choices(f):
        return sum(node.op is Op.WHERE for node in kernel(f).graph)

    assert choices(lambda x: torch.lgamma(F.softplus(x))) < choices(lambda x: torch.lgamma(x))
    assert choices(lambda x: torch.where(x.exp() < 0, 1.0, x)) == 0
    assert choices(lambda x: torch.where(-x.abs() > 0, 1.0, x)) == 0
    assert choices(lambda x: torch.where((x.abs() < -1) & (x > 3), 1.0, x)) == 0
    assert choices(lambda x: torch.where((x.abs() < 0) | (x > 3), 1.0, x)) == 1
    assert choices(lambda x: torch.where(x.exp() <= 0, 1.0, x)) == 1  # it may be 0
    assert choices(lambda x: torch.where(x.abs() < 1, 1.0, x)) == 1
    assert choices(lambda x: torch.where(x < 0, 1.0, x)) == 1
    # a root of -0.0 is -0.0, so that these are -inf there, and integers wrap
    assert choices(lambda x: torch.where(1 / x.sqrt() < 0, 1.0, x)) == 1
    assert choices(lambda x: torch.where(torch.rsqrt(x.exp() * x.sqrt()) < 0, 1.0, x)) == 1
    assert choices(lambda x: torch.where(x.sqrt() ** -3.0 < 0, 1.0, x)) == 1
    assert choices(lambda x: torch.where((x.int() * x.int()).float() < 0, 1.0, x)) == 1
    assert choices(lambda x: torch.where(x.exp() / 3 < 0, 1.0, x)) == 0


@pytest.mark.parametrize("name", ("lgamma", "digamma"))
def test_what_is_left_of_a_choice_by_sign_has_the_same_values(name):
    function = getattr(torch, name)
    f = htile.rowwise(lambda x: function(x.abs()))
    edges = torch.tensor([0.0, -0.0, math.inf, math.nan])
    x = torch.cat([torch.rand(100), torch.rand(156) * 50, edges])[None]
    kernel, out = f.inspect(x, arch="sm_90a"), torch.zeros_like(x)
    launch(kernel.ptx, (1, 1), [x, out], is_emitted=True)
    exact = function(x.double().abs()).float()
    torch.testing.assert_close(out, exact, rtol=3e-6, atol=1e-6, equal_nan=True)
