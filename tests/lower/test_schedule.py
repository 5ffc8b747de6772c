"""The steps: stages, device functions, shared exchanges, and that each step finds its operands."""

import math

import networkx as nx
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.graph import Role
from htile.frontend.ops import REDUCTIONS, Op
from htile.lower.passes.simplify import run_passes
from htile.lower.patterns import Function
from htile.lower.reductions import FOLLOWING, MAX, MIN, MOMENTS, OF_OP, PEAK, SOFTMAX, SUM, Reduce
from htile.lower.schedule import list_steps
from htile.lower.steps import ChunkLoop, Compute, Home, Load, OwnMaxima, Reload, Store
from htile.lower.work import Work
from tests.lower.cases import BF16, EXAMPLES, F32, example_kernel, kernel_of, random_graph, rows

# reductions of each stage
STAGES = {
    "softmax": [["max"], ["sum"]],
    "log_softmax": [["max"], ["sum"]],  # of one exponential, for logsumexp too
    "rmsnorm": [["sum"]],
    "rmsnorm_residual": [["sum"]],
    "layernorm": [["mean"], ["sum"]],
    "swiglu": [],
    "absnorm": [["sum"]],
    "capped_softmax": [["max"], ["sum", "sum"]],
    "norm_softmax": [["mean"], ["sum"], ["max"], ["sum"]],
    "causal_softmax": [["max"], ["sum"]],
    "cross_entropy": [["max", "sum"], ["sum"]],
}

GRAPHS = {
    **{f"random{seed}": lambda seed=seed: run_passes(random_graph(seed)) for seed in range(60)},
    **{f"big{seed}": lambda seed=seed: run_passes(random_graph(seed, 300)) for seed in range(5)},
    **{name: lambda name=name: example_kernel(name, 512).graph for name in EXAMPLES},
}


def held(graph, late=False, joint=False):
    """The steps of a row that is held in registers."""
    work = Work(graph)
    sweeps = work.held_joint if joint else work.held
    return list_steps(work, sweeps, Home.REGISTERS, late_columns=work.columns if late else ())


def check_steps(graph, steps, slots):
    """Walk the steps: each operand is there when it is read, each node and output made once."""
    there = {n.id for n in graph if n.op is Op.CONST}
    there |= {i.id for i in graph.inputs if i.role in (Role.SCALAR, Role.TAKEN, Role.TABLE)}
    made, stored, slot, stage = [], [], 0, 0
    for step in steps:
        match step:
            case Load(input, home):
                assert input in graph.inputs and home is Home.REGISTERS
                made.append(input.id)
            case Compute(id, _, inputs):
                assert set(inputs) <= there, f"%{id} reads what is not there"
                assert graph[id].op not in REDUCTIONS
                made.append(id)
            case Reduce(k, results, parts, first):
                assert set(step.operands(graph)) <= there
                assert [part.results for part in parts] == [(r,) for r in results]
                assert [part.kind for part in parts] == [OF_OP[graph[r].op] for r in results]
                stage += 1
                assert (k, first) == (stage, slot), "stages and slots follow each other"
                slot += len(results)
                made += results
            case Store(output):
                assert output.id in there
                stored.append(output)
        there.update(made)
    assert len(made) == len(set(made)), "made twice"
    assert stored == list(graph.outputs)
    assert slot == slots
    leaves = {n.id for n in graph if n.op is Op.CONST}
    leaves |= {i.id for i in graph.inputs if i.role in (Role.SCALAR, Role.TAKEN, Role.TABLE)}
    sums = [s for s in steps if isinstance(s, Compute) and s.function in (FMA, FMS, FNMA, COLUMNS)]
    fused = set().union(*(set(graph[s.id].inputs) - set(s.inputs) for s in sums))
    assert {graph[id].op for id in fused} <= {Op.MUL, Op.INDEX} and not fused & set(made)
    assert set(made) == set(graph.dag) - leaves - fused, "a live node is made"


LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@LATE
@pytest.mark.parametrize("name", GRAPHS)
def test_every_operand_is_made_before_it_is_read(name, late):
    graph = GRAPHS[name]()
    check_steps(graph, held(graph, late), Work(graph).held.slots)


@pytest.mark.parametrize("name", GRAPHS)
def test_late_columns_are_loaded_just_before_the_goal_that_reads_them(name):
    graph = GRAPHS[name]()
    steps, early = held(graph, late=True), held(graph)
    goals = [at for at, step in enumerate(steps) if isinstance(step, Reduce | Store)]
    for at, step in enumerate(steps):
        if isinstance(step, Load) and step.input.role is Role.COLUMN:
            goal = next(g for g in goals if g > at)
            reads = set()
            for other in steps[at:goal]:
                reads.update(other.inputs if isinstance(other, Compute) else ())
            last = steps[goal]
            reads.update(last.operands(graph) if isinstance(last, Reduce) else (last.output.id,))
            assert step.input.id in reads
    key = repr
    assert sorted(steps, key=key) == sorted(early, key=key), "the same steps in another order"
    ends = Work(graph).ends  # which come before the rows that they are of
    loads = [isinstance(step, Load) for step in early if step not in ends]
    assert loads == sorted(loads, reverse=True), "early: every load comes first"


@pytest.mark.parametrize("name", GRAPHS)
def test_a_stage_is_the_longest_path_of_reductions(name):
    graph = GRAPHS[name]()
    weighted = nx.DiGraph(graph.dag.edges)
    weighted.add_nodes_from(graph.dag)
    for u, v in weighted.edges:
        weighted.edges[u, v]["weight"] = int(graph[v].op in REDUCTIONS)
    reduces = [s for s in held(graph) if isinstance(s, Reduce)]
    assert len(reduces) == nx.dag_longest_path_length(weighted)
    for step in reduces:
        for result in step.results:
            before = weighted.subgraph(nx.ancestors(weighted, result) | {result})
            assert nx.dag_longest_path_length(before) == step.stage


@LATE
@pytest.mark.parametrize("name", GRAPHS)
def test_values_are_computed_in_the_first_stage_that_needs_them(name, late):
    graph = GRAPHS[name]()
    waiting, early = set(), {step.id for step in Work(graph).before}
    for step in held(graph, late):
        if isinstance(step, Compute):
            waiting |= {step.id} - early
        elif isinstance(step, Reduce | Store):
            goals = step.operands(graph) if isinstance(step, Reduce) else (step.output.id,)
            needed = set(goals).union(*(nx.ancestors(graph.dag, id) for id in goals))
            assert waiting <= needed, f"{waiting - needed} could wait"
            waiting.clear()
    assert not waiting


@LATE
@pytest.mark.parametrize("name", GRAPHS)
def test_homes_are_what_crosses_a_barrier(name, late):
    graph = GRAPHS[name]()
    steps = held(graph, late)
    born, read = {}, {}
    for at, step in enumerate(steps):
        match step:
            case Load(input):
                born[input.id] = at
            case Compute(id, _, inputs):
                born[id] = at
                read |= dict.fromkeys(inputs, at)
            case Reduce(_, results):
                read |= dict.fromkeys(step.operands(graph), at)
                born |= dict.fromkeys(results, at)
            case Store(output):
                read[output.id] = at
    barriers = [at for at, step in enumerate(steps) if isinstance(step, Reduce)]
    crossing = {
        id for id in born if any(born[id] < barrier < read.get(id, -1) for barrier in barriers)
    }
    work = Work(graph)
    assert set().union(*work.crossing(work.held, late)) == crossing


@pytest.mark.parametrize("n", [1, 4096])
@pytest.mark.parametrize("name", EXAMPLES)
def test_stages_of_the_examples(name, n):
    plan = example_kernel(name, n).plan
    reduces = [step for step in plan.steps if isinstance(step, Reduce)]
    ops = [[plan.graph[id].op.value for id in step.results] for step in reduces]
    expected = [[*stage] for stage in STAGES[name]]
    if name == "cross_entropy" and n == 1:
        # The only element is found by a maximum, and the sum of all is taken below that.
        expected = [["max", "max"], ["sum", "sum"]]
    assert ops == expected
    assert plan.stages == len(expected)
    assert plan.sweeps.slots == sum(map(len, expected))


def moments(x):
    return x.sum(), x.amax(), x.amin(), (x * x).sum()


def test_independent_reductions_share_one_barrier():
    plan = kernel_of(moments, *rows((4, 512))).plan
    (reduce,) = (step for step in plan.steps if isinstance(step, Reduce))
    assert [part.kind for part in reduce.parts] == [SUM, MAX, MIN, SUM]
    assert (plan.sweeps.slots, reduce.slot) == (4, 0)


def test_a_reduction_of_a_later_stage_waits_for_its_own_kind_only():
    """An independent sum goes behind the first barrier, not the second."""

    def f(x):
        return torch.exp(x - x.max()).sum(), x.sum()

    plan = kernel_of(f, *rows((4, 512))).plan
    reduces = [step for step in plan.steps if isinstance(step, Reduce)]
    assert [[p.kind for p in r.parts] for r in reduces] == [[MAX, SUM], [SUM]]


def test_rows_are_in_flight_before_the_rest_is_loaded():
    def f(weight, scale: htile.PerRow, x, gain, y):
        return x * weight * scale * gain + y

    weight, x, y = rows((512,), (4, 512), (4, 512))
    (scale,), gain = rows((4,), dtype=F32), torch.empty((), device="meta")
    graph = kernel_of(f, weight, scale, x, gain, y).graph

    def loads(late):
        return [step.input.name for step in held(graph, late) if isinstance(step, Load)]

    assert loads(late=False) == ["x", "y", "weight", "scale", "gain"]
    assert loads(late=True) == ["x", "y", "scale", "gain", "weight"]


def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


def keepdim_softmax(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def guarded(x, t: htile.PerRow):
    return torch.exp(x - torch.where(t > 0, torch.zeros_like(t), x.max()))


E_, B, F_, NUMBER = Function.EXACT, Function.BOUNDED, Function.FAST, Function.NUMBER
FMA, FMS, FNMA, FACTORS = Function.FMA, Function.FMS, Function.FNMA, Function.FACTORS
COLUMNS = Function.COLUMNS
QUOTIENT = Function.QUOTIENT
FORMS = {
    "softmax": (softmax, {"exp": [B], "div": [B]}),
    "keepdim softmax": (keepdim_softmax, {"exp": [B], "div": [B]}),
    "torch.softmax": (lambda x: torch.softmax(x, -1), {"exp": [B], "div": [B]}),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), {"exp": [B]}),
    "exp": (lambda x: torch.exp(x), {"exp": [E_]}),
    "exp of log_softmax": (lambda x: torch.log_softmax(x, -1).exp(), {"exp": [B, B]}),
    "another's logsumexp": (
        lambda x: torch.exp(x * 2 - torch.logsumexp(x, -1)), {"exp": [B, E_]}
    ),
    "exp of a difference": (lambda x: torch.exp(x - 1.0), {"exp": [E_]}),
    "x - min": (lambda x: torch.exp(x - x.min()), {"exp": [E_]}),
    "max - x": (lambda x: torch.exp(x.max() - x), {"exp": [E_]}),
    "another's max": (lambda x: torch.exp(x - (x * x).max()), {"exp": [E_]}),
    "scaled after": (lambda x: torch.exp(4.0 * (x - x.max())), {"exp": [E_]}),
    "share of x": (lambda x: x / x.sum(), {"div": [E_]}),
    "share of exp": (
        lambda x: torch.exp(x) / torch.exp(x).sum(),
        {"exp": [E_], "div": [E_]},
    ),
    "another's share": (
        lambda x: x / torch.exp(x - x.max()).sum(),
        {"exp": [B], "div": [E_]},
    ),
    "quotient": (lambda x: x / x.abs().amax(), {"div": [E_]}),
    "by a number": (lambda x: x / 3.0, {"div": [NUMBER]}),
    "by a power of two": (lambda x: x.mean(), {"div": [NUMBER]}),
    "by zero": (lambda x: x / 0.0, {"div": [E_]}),
    "by infinity": (lambda x: x / math.inf, {"div": [E_]}),
    "by a tiny number": (lambda x: x / 1e-40, {"div": [E_]}),
    "number by x": (lambda x: 3.0 / x, {"div": [E_]}),
    "norm": (lambda x: x * torch.rsqrt((x * x).sum()), {"rsqrt": [E_]}),
}


def forms(plan):
    found = {}
    for step in plan.steps:
        if isinstance(step, Compute):
            found.setdefault(plan.graph[step.id].op.value, []).append(step.function)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_a_short_form_only_where_its_operand_is_bounded(name):
    fn, expected = FORMS[name]
    found = forms(kernel_of(fn, *rows((4, 512), dtype=F32)).plan)
    assert {op: found[op] for op in expected} == expected


NEAR = Function.NEAR
# What is only seen in 16 bits, through steps that keep a relative error small.
IN_16_BITS = {
    "returned": (lambda x, y: x / y, [NEAR]),
    "by a value of the row": (lambda x, y: x / x.abs().amax(), [NEAR]),
    "by a number": (lambda x, y: x / 3.0, [NEAR]),
    "by zero": (lambda x, y: x / 0.0, [NEAR]),
    "through products": (lambda x, y: -(x / y) * y * 2.0, [NEAR]),
    "chosen": (lambda x, y: torch.where(x > 0, x / y, 0.0), [NEAR]),
    "twice": (lambda x, y: (x / y, (x / y) * y), [NEAR]),
    "in float32": (lambda x, y: (x / y).to(torch.float32), [E_]),
    "in float32 too": (lambda x, y: (x / y, ((x / y) * y).to(torch.float32)), [E_]),
    "one value a row": (lambda x, y: 1.0 / x.sum(), [E_]),
    "choosing": (lambda x, y: torch.where(x / y > 1, x, y), [E_]),
    "rounded": (lambda x, y: torch.round(x / y), [E_]),
    "in a sum": (lambda x, y: x * (x / y).sum(), [E_]),
    "in a sum of one sign": (lambda x, y: x * (x / y).abs().sum(), [NEAR]),
    "in a norm": (lambda x, y: x * torch.rsqrt((x / y).square().mean() + 1e-6), [NEAR, NUMBER]),
    "in a difference of one sign": (
        lambda x, y: torch.where(x > 0, -(x / y).abs(), 0.0) - y.abs(), [NEAR]
    ),
    "in a difference of both signs": (lambda x, y: x * ((x / y).abs() - y.abs()), [E_]),
    "cast": (lambda x, y: (x / y).to(BF16), [NEAR]),
    "cast, and read again": (lambda x, y: (x / y).to(BF16) * 2, [E_]),
    "in an addition": (lambda x, y: x / y + x, [E_]),
    "an exponent": (lambda x, y: torch.exp(x / y), [E_]),
    "by a number, rounded": (lambda x, y: torch.floor(x / 3.0), [NUMBER]),
}


@pytest.mark.parametrize("name", IN_16_BITS)
def test_a_division_is_near_where_only_16_bits_of_it_are_seen(name):
    fn, expected = IN_16_BITS[name]
    found = forms(kernel_of(fn, *rows((4, 512), (4, 512), dtype=BF16)).plan)
    assert found["div"] == expected


GELUS = {
    "torch's": (lambda x: F.gelu(x), [Function.GELU]),
    "written out": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), [Function.GELU]),
    "in another order": (lambda x: x * ((torch.erf(x * 0.5**0.5) + 1.0) * 0.5), [Function.GELU]),
    "times another row": (lambda x: F.gelu(x) * x, [Function.GELU]),
    "of another scale": (lambda x: 0.5 * x * (1 + torch.erf(x)), None),
    "of another operand": (lambda x: 0.5 * x * (1 + torch.erf(-x / math.sqrt(2))), None),
    "of another number": (lambda x: x * (1 + torch.erf(x / math.sqrt(2))), None),
    "in float32": (lambda x: F.gelu(x).to(torch.float32), None),
    "in a sum of both signs": (lambda x: F.gelu(x) + x, None),
}


@pytest.mark.parametrize("name", GELUS)
def test_gelu_is_one_function_where_only_16_bits_of_it_are_seen(name):
    fn, expected = GELUS[name]
    found = forms(kernel_of(fn, *rows((4, 512), dtype=BF16)).plan)
    assert ("erf" in found) == (expected is None)
    if expected:
        assert found["mul"][0] is Function.GELU


def test_a_logarithm_of_at_most_two_is_short():
    def found(fn):
        return forms(kernel_of(fn, *rows((4, 512), dtype=F32)).plan)["log1p"]

    assert found(lambda x: torch.log1p(torch.exp(-x.abs()))) == [B]
    assert found(lambda x: F.softplus(x) + F.logsigmoid(x)) == [B]  # they share it
    assert found(lambda x: torch.logaddexp2(x, x * 2)) == [B]
    assert found(lambda x: torch.log1p(torch.exp(x))) == [E_]
    assert found(lambda x: torch.log1p(x.abs())) == [E_]
    assert found(lambda x: torch.log1p(torch.exp(-x))) == [E_]


# What is rounded once, by fma: a product of elements that one addition, or sum, alone reads.
PRODUCTS = {
    "x * w + b": (lambda x, w: x * w + 2.0, {"mul": [], "add": [FMA]}),
    "b + x * w": (lambda x, w: 2.0 + x * w, {"mul": [], "add": [FMA]}),
    "x * w - b": (lambda x, w: x * w - 2.0, {"mul": [], "sub": [FMS]}),
    "b - x * w": (lambda x, w: 2.0 - x * w, {"mul": [], "sub": [FNMA]}),
    "two products": (lambda x, w: x * w + x * x, {"mul": [E_] * 2, "add": [E_]}),
    "squares": (lambda x, w: x * x - w * w, {"mul": [E_] * 2, "sub": [E_]}),
    "in another order": (lambda x, w: x * w - w * x, {"mul": [E_], "sub": [E_]}),
    "about its maximum's": (lambda x, w: x * 0.3 - x.amax() * 0.3, {"mul": [E_] * 2, "sub": [E_]}),
    "about its mean's": (lambda x, w: x * w - x.mean() * w, {"mul": [E_] * 2, "sub": [E_]}),
    "about another's": (lambda x, w: -(x * x).amin() - x * w, {"mul": [E_] * 2, "sub": [E_]}),
    "twice the same": (lambda x, w: x * w + x * w, {"mul": [E_], "add": [E_]}),
    "of products": (lambda x, w: x * w * x + 2.0, {"mul": [E_], "add": [FMA]}),
    "of sums": (lambda x, w: (x * w + w) * x + 2.0, {"mul": [], "add": [FMA] * 2}),
    "in a sum": (lambda x, w: (x * w).sum(), {"mul": [FACTORS]}),
    "in a maximum": (lambda x, w: (x * w).amax(), {"mul": [E_]}),
    "in two sums": (lambda x, w: ((x * w).sum(), x * w + 1.0), {"mul": [E_], "add": [E_]}),
    "returned": (lambda x, w: (x * w, x * w + 1.0), {"mul": [E_], "add": [E_]}),
    "of a sum": (lambda x, w: x * w - x.sum(), {"mul": [], "sub": [FMS]}),
    "returned alone": (lambda x, w: x * w, {"mul": [E_]}),
    "about its maximum": (lambda x, w: x * w - (x * w).amax(), {"mul": [E_], "sub": [E_]}),
    "of a row's values": (lambda x, w: x + x.sum() * x.amax(), {"mul": [E_], "add": [E_]}),
    "rounded": (lambda x, w: (x * w).to(BF16) + 1.0, {"mul": [E_], "add": [E_]}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_fused_where_nobody_else_reads_it(name):
    fn, expected = PRODUCTS[name]
    found = forms(kernel_of(fn, *rows((4, 512), (512,))).plan)
    assert {op: found.get(op, []) for op in expected} == expected


INDEXED = Function.INDEXED
# A thread makes one key of all its elements where maxima of the row alone read their keys.
KEYS = {
    "argmax": (lambda x: x.argmax(), [INDEXED]),
    "argmin": (lambda x: x.argmin(), [INDEXED]),
    "with the maximum": (lambda x: x.max(-1), [INDEXED]),
    "of integers": (lambda x: x.int().argmax(), [INDEXED]),
    "the smallest integer": (lambda x: x.int().argmin(), [E_]),  # a minimum reads it
    "two ranks": (lambda x: x.topk(2).indices, [E_]),
    "beside two ranks": (lambda x: (x.argmax(), x.topk(2).indices), [E_]),
    "of groups": (lambda x: x.view(-1, 8).argmax(-1), [E_]),
    "of two parts": (lambda x: torch.cat((x, x * 2)).argmax(), [E_] * 2),  # a choice reads them
}


@pytest.mark.parametrize("name", KEYS)
def test_a_thread_makes_one_key_for_maxima_of_the_row(name):
    fn, expected = KEYS[name]
    assert forms(kernel_of(fn, *rows((4, 512))).plan)["key"] == expected


@pytest.mark.parametrize(
    ("returns", "dtype", "n", "expected"),
    [
        (lambda p, e: p, BF16, 131072, QUOTIENT),
        (lambda p, e: p, torch.float16, 1 << 20, QUOTIENT),
        (lambda p, e: p, BF16, 4096, B),  # its exponentials are in registers
        (lambda p, e: p, F32, 1 << 20, B),
        (lambda p, e: (p, p.to(F32)), BF16, 1 << 20, B),
        (lambda p, e: (p, p + 1.0), BF16, 131072, B),
        (lambda p, e: p * 2.0, BF16, 131072, B),
        (lambda p, e: (p, e), BF16, 131072, QUOTIENT),
    ],
)
def test_a_quotient_of_exponentials_is_one_where_16_bits_are_returned(
    returns, dtype, n, expected
):
    def function(x):
        e = torch.exp(x - x.amax())
        return returns(e / e.sum(), e)

    plan = kernel_of(function, *rows((4, n), dtype=dtype)).plan
    assert plan.numerics.in_loops == (n > 4096)
    loops = [step for step in plan.steps if isinstance(step, ChunkLoop)]
    last = loops[-1].steps if loops else plan.steps
    found = {plan.graph[s.id].op.value: s.function for s in last if isinstance(s, Compute)}
    assert found["div"] is expected
    is_returned = len(plan.graph.outputs) > 1 and plan.graph[plan.graph.outputs[1].id].op is Op.EXP
    assert ("exp" in found) == (expected is not QUOTIENT or is_returned)


def test_integers_are_not_fused():
    x = torch.empty(4, 512, dtype=torch.int32, device="meta")
    found = forms(kernel_of(lambda x: (x * x + 1, (x * x * x).sum()), x).plan)
    assert {*found["mul"], *found["add"]} == {E_}


def test_a_maximum_that_is_not_always_subtracted_bounds_nothing():
    x, t = *rows((4, 512), dtype=F32), torch.empty(4, device="meta")
    assert forms(kernel_of(guarded, x, t).plan)["exp"] == [E_]


@pytest.mark.parametrize("fastmath", [False, True])
def test_fast_forms_only_when_asked_for(fastmath):
    def f(x):
        return torch.tanh(x) + torch.log(x) + torch.sin(x) + torch.sqrt(x) + torch.exp(x) / x

    found = forms(kernel_of(f, *rows((4, 512), dtype=BF16), fastmath=fastmath).plan)
    fast = F_ if fastmath else E_
    assert [found[op] for op in ("tanh", "log", "sin")] == [[fast]] * 3
    assert [found[op] for op in ("sqrt", "exp", "div")] == [[E_]] * 3


@htile.rowwise
def shares(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


@htile.rowwise
def of_another(x, y):
    e = torch.exp(x - y.max())
    return e / e.sum()


@htile.rowwise
def of_two(x):
    e = torch.exp(x - x.max())
    return e / e.sum(), x - x.min()


@htile.rowwise
def logsumexp_and_exponentials(x):
    peak = x.max()
    peak = torch.where(peak.abs() == float("inf"), 0.0, peak)
    e = torch.exp(x - peak)
    return torch.log(e.sum()) + peak, e


@htile.rowwise
def above(x):
    return torch.exp(x.max() - x).sum()


@htile.rowwise
def sum_and_maximum(x):
    mean = x.mean()
    return ((x - mean) ** 2).sum() * x.max()


@pytest.mark.parametrize(
    ("function", "n", "exchanges"),
    [
        (EXAMPLES["layernorm"][0], 32768, 1),
        (EXAMPLES["layernorm"][0], 131072, 2),  # a lane would combine what four warps send
        (EXAMPLES["layernorm"][0], 1 << 20, 1),  # one exchange of a row so long is little
        (sum_and_maximum, 32768, 2),  # of which only the sum has squares about it
    ],
)
def test_a_mean_and_the_squares_about_it_in_one_exchange(function, n, exchanges):
    x, column = torch.empty(3, n, device="meta"), torch.empty(n, device="meta")
    tensors = (x,) if function is sum_and_maximum else (x, column, column)
    loops = Work(function.inspect(*tensors).graph).loops
    assert loops.exchanges == exchanges and ("moments" in loops.joint) == (exchanges == 1)
    first, second = loops.reduces
    (part,) = second.parts
    assert part in first.parts and part.kind is MOMENTS and part.results[1:] == second.results
    assert second.exchanges == (exchanges == 2)
    assert loops.slots == len({*first.results, *second.results})


@pytest.mark.parametrize(
    ("function", "count", "stages"),
    [
        (shares, 1, [["max", "sum"]]),
        (of_another, 2, [["max"], ["sum"]]),
        (of_two, 1, [["max", "min"], ["sum"]]),
        (above, 1, [["max"], ["sum"]]),
        (EXAMPLES["norm_softmax"][0], 1, [["mean"], ["sum"], ["max", "sum"]]),
        (EXAMPLES["log_softmax"][0], 1, [["max", "sum"]]),  # 0 stands for an infinite maximum
        (logsumexp_and_exponentials, 1, [["max"], ["sum"]]),  # of which another use is made
        (EXAMPLES["rmsnorm"][0], 2, [["sum"]]),
    ],
)
def test_a_maximum_and_a_sum_in_one_exchange(function, count, stages):
    """Only the sum of exp(x - max(x)), where both are alone in their stages."""
    tensors = [torch.empty(3, 512, device="meta") for _ in range(count)]
    graph = function.inspect(*tensors).graph
    work, steps = Work(graph), held(graph, joint=True)
    reduces = [s for s in steps if isinstance(s, Reduce)]
    assert [[graph[id].op.value for id in r.results] for r in reduces] == stages
    pairs = [r for r in reduces if r.is_pair]
    assert len(pairs) == sum(ops == ["max", "sum"] for ops in stages)
    assert work.has_pair == bool(pairs)
    assert work.held_joint.slots == sum(1 if r.is_pair else len(r.results) for r in reduces)
    there = {n.id for n in graph if n.op is Op.CONST}
    there |= {i.id for i in graph.inputs if i.role in (Role.SCALAR, Role.TAKEN, Role.TABLE)}
    for step in steps:
        match step:
            case Load(input):
                there.add(input.id)
            case Compute(id, _, inputs):
                assert id not in there and set(inputs) <= there
                there.add(id)
            case Reduce():
                operands = step.operands(graph)
                assert set(operands[:1] if step.is_pair else operands) <= there
                there.update(step.made(graph))
            case Store(output):
                assert output.id in there


# ---- loops over chunks, and what they carry ------------------------------------------------------


def check_loops(graph, listed):
    """Walk the steps: what a loop makes is gone after it, what is done once a row stays."""
    there = {n.id for n in graph if n.op is Op.CONST}
    there |= {i.id for i in graph.inputs if i.role in (Role.SCALAR, Role.TAKEN, Role.TABLE)}
    carried, stored, stages = {}, [], []

    def run(steps, there):
        for step in steps:
            match step:
                case Reload(inputs, _):
                    there.update(i.id for i in inputs)
                case Load(input, Home.REGISTERS):
                    there.add(input.id)
                case Compute(id, _, inputs):
                    assert set(inputs) <= there, f"%{id} reads what is not there"
                    assert id not in there and graph[id].op not in REDUCTIONS
                    there.add(id)
                case OwnMaxima(part):
                    assert all(carried[id].kind is PEAK for id in part.maxima)
                    there.update(part.maxima)
                case Store(output):
                    assert output.id in there
                    stored.append(output)

    for step in listed:
        match step:
            case ChunkLoop(steps, parts):
                inside = set(there)
                run(steps, inside)
                assert not (step.backwards and parts), "the order of a sum hangs on where rows are"
                for part in parts:
                    assert inside.issuperset(part.operands(graph))
                    assert len(part.references) == len(part.maxima or part.results[1:])
                    carried |= dict.fromkeys(part.results, part)
            case Reduce(stage, results, parts):
                assert [carried[r] for r in results] == list(parts)
                for r, part in zip(results, parts, strict=True):
                    if part.maxima:
                        assert {*part.maxima, *part.references} <= there
                    elif r != part.results[0] and not step.is_pair:
                        reference = part.references[part.results.index(r) - 1]
                        assert {part.results[0], reference} <= there
                stages.append(stage)
                there.update(results)
            case _:
                run([step], there)
    assert stages == list(range(1, len(stages) + 1))
    assert sorted(stored, key=repr) == sorted(graph.outputs, key=repr)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_loop_makes_what_it_reads(name):
    graph = GRAPHS[name]()
    work = Work(graph)
    steps = list_steps(work, work.loops, Home.REREAD)
    check_loops(graph, steps)
    loops = [step for step in steps if isinstance(step, ChunkLoop)]
    reduces = [step for step in steps if isinstance(step, Reduce)]
    later = [r for r in reduces if not r.is_pair and r.results[0] != r.parts[0].results[0]]
    assert len(loops) == len(reduces) - len(later) + (not loops[-1].parts)
    assert not any(isinstance(step, Store) for loop in loops[:-1] for step in loop.steps)
    if loops[-1].parts:  # what is stored is stored by a loop that carries reductions
        last = {id for part in loops[-1].parts for id in part.results}
        assert not last & ancestors(graph, [o.id for o in graph.outputs if o.is_row])
    made = [{s.id for s in loop.steps if isinstance(s, Compute)} for loop in loops]
    for id, home in work.homes_in_loops(Home.REREAD).items():
        if home is Home.RECOMPUTE:
            assert sum(id in steps for steps in made) > 1


def ancestors(graph, ids):
    """The nodes that these are computed of, themselves included."""
    found = set(ids)
    for node in reversed(list(graph)):
        if node.id in found:
            found.update(node.inputs)
    return found


def logsumexp_and_mean_of(x, y):
    return torch.logsumexp(x + y, -1)


def moments_and_softmax(x, y):
    """Two pairs and a triple, behind the same two barriers."""
    a, b = torch.exp(x - x.max()), torch.exp(y - y.max())
    return a / a.sum(), b.sum(), (x * y).var()


def cross_entropy(x, t: htile.PerRow):
    lse = torch.logsumexp(x, -1)
    return lse - t, lse


def by_hand(x):
    d = x - x.sum() / x.shape[-1]
    return d * torch.rsqrt((d**2).mean() + 1e-5)


def covariance(x, y):
    return ((x - x.mean()) * (y - y.mean())).sum()


def entropy(x):
    shifted = x - x.max()
    e = torch.exp(shifted)
    return e / e.sum(), (e * shifted).sum()


S, W = SOFTMAX, MOMENTS
# function -> (how often it reads a streamed row, which sums are carried with what they need)
READS = {
    "softmax": (softmax, 2, [S]),
    "keepdim": (keepdim_softmax, 2, [S]),
    "torch.softmax": (lambda x: torch.softmax(x, -1), 2, [S]),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), 2, [S]),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), 1, [S]),
    "softmax and logsumexp": (lambda x: (softmax(x), torch.logsumexp(x, -1)), 2, [S]),
    "of a sum": (logsumexp_and_mean_of, 1, [S]),
    "cross entropy": (cross_entropy, 1, [S]),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape), 2, [W]),
    "of x + y": (lambda x, y: torch.nn.functional.layer_norm(x + y, x.shape), 2, [W]),
    "square": (lambda x: (x - x.mean()).square().sum(), 1, [W]),
    "by hand": (by_hand, 2, [W]),
    "var": (lambda x: x.var(), 1, [W]),
    "std, keepdim": (lambda x: x / x.std(-1, keepdim=True), 2, [W]),
    "norm, then softmax": (lambda x: softmax(by_hand(x)), 3, [W, S]),
    "two pairs and a triple": (moments_and_softmax, 2, [S, S, W]),
    "one stage": (lambda x: x / x.sum(), 2, []),
    "min": (lambda x: torch.exp(x - x.min()).sum(), 2, []),
    "scaled": (lambda x: torch.exp(4.0 * (x - x.max())).sum(), 2, []),
    "another's max": (lambda x: torch.exp(x - (x * x).max()).sum(), 2, []),
    "max of exp": (lambda x: torch.exp(x - x.max()).amax(), 2, []),
    "rounded": (lambda x: torch.exp(x - x.max()).to(torch.bfloat16).sum(), 2, []),
    "weighted": (lambda x, y: (torch.exp(x - x.max()) * y).sum(), 2, []),
    "base 2": (lambda x: torch.exp2(x - x.max()).sum(), 2, []),
    "entropy, of which the second loop has both sums": (entropy, 3, [FOLLOWING]),
    "about the maximum": (lambda x: (x - x.max()).square().sum(), 2, []),
    "cubes": (lambda x: ((x - x.mean()) ** 3).sum(), 2, []),
    "covariance": (covariance, 2, []),
    "about another's mean": (lambda x, y: (x - y.mean()).square().sum(), 2, []),
    "about half the mean": (lambda x: (x - 0.5 * x.mean()).square().sum(), 2, []),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_loop_carries_along(name):
    fn, reads, kinds = READS[name]
    (t,) = rows((4,), dtype=F32)
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    args = [t if n == "t" else x for n, x in zip(names, rows(*[(4, 512)] * 3), strict=False)]
    graph = kernel_of(fn, *args).graph
    loops = Work(graph).loops.loops
    assert len(loops) == reads
    further = [part.kind for loop in loops for part in loop.parts for _ in part.results[1:]]
    assert further == kinds
