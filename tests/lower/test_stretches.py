"""Held rows whose elements are computed a vector at a time between exchanges."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.build.compile import build
from htile.frontend.ops import Op
from htile.lower import enumerate_plans, printed
from htile.lower.patterns import Function
from htile.lower.steps import Compute, Reduce, Store
from htile.lower.stretches import LEAST_INSTRUCTIONS
from tests.primitives.ptx_device import launch

BF16 = torch.bfloat16


def gelu_of_norm(x):
    return F.gelu(F.rms_norm(x, x.shape[-1:]))


def layer_norm_gelu(x, weight, bias):
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias))


def divergence(x, y):
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="none").sum(-1)


def gated_norm(x, z):
    return F.rms_norm(x * F.silu(z), x.shape[-1:])


def gated(x, z):
    return x * F.mish(z), F.softplus(x) * torch.tanh(z)


def masked(x):
    column = torch.arange(x.shape[-1], device=x.device)
    return torch.where(column % 3 == 0, F.gelu(x) * torch.sigmoid(x), torch.log1p(x.abs()))


def masked_twice(x, z, mask):
    y = torch.where(mask, F.gelu(x) * F.mish(z), torch.tanh(x) * torch.sigmoid(z))
    return torch.where(mask, x * F.softplus(z) - y.sum(-1, keepdim=True), z)


def beside_integers(x, count, mask):
    y = F.gelu(x) * torch.tanh(x) * torch.sigmoid(x + 1)
    z = F.mish(x) * torch.where(mask, count.float(), 1.0)
    total = (y * z).sum(-1, keepdim=True)
    return torch.where(mask, y - total, z * count.float() * total) * torch.sin(x * total)


def of_columns(x):
    column = torch.arange(x.shape[-1], device=x.device)
    y = torch.where(column % 3 == 0, F.gelu(x), x)
    return y.softmax(-1) * column + column.float() * torch.tanh(y)


def relative_to_a_label(x, z, label: htile.PerRow):
    return x * F.mish(z) - x[label]


def scaled_branch(x, weight):
    return x + weight * F.gelu(x)


def softmax(x):
    return x.softmax(-1)


def rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def residual_norm(x, z, weight):
    h = x + z
    return F.rms_norm(h, h.shape[-1:], weight), h


# Each function with how many rows and columns it takes.
FUNCTIONS = {
    f.__name__: (f, rows, columns)
    for f, rows, columns in (
        (gelu_of_norm, 1, 0), (layer_norm_gelu, 1, 2), (divergence, 2, 0), (gated_norm, 2, 0),
        (gated, 2, 0), (masked, 1, 0),
    )
}  # fmt: skip
FORWARD = ("layer_norm_gelu", "divergence", "gated", "masked")
# Those whose elements are light, and lengths at which staged columns are read by vectors.
LIGHT = {f.__name__: (f, rows, columns) for f, rows, columns in (
    (layer_norm, 1, 2), (residual_norm, 2, 1),
)}  # fmt: skip
BESIDE_STAGED = (6144, 12589, 50257)
STRETCHED = [(name, False) for name in FORWARD] + [(name, True) for name in FUNCTIONS]


def kernel(function, rows, columns, n, dtype=BF16, trains=False, m=4095):
    """The kernel of many rows, none of which are joined, or the one of their gradients."""
    xs = [torch.empty(m, n, device="meta", dtype=dtype) for _ in range(rows)]
    ws = [torch.empty(n, device="meta", dtype=dtype) for _ in range(columns)]
    found = htile.rowwise(function).inspect(*(x.requires_grad_(trains) for x in xs), *ws)
    return found.backward if trains else found


def held_plans(found):
    plans = enumerate_plans(found.graph, found.plan.target)
    return [plan for plan in plans if not plan.numerics.in_loops]


def as_statements(plan):
    """The same plan, of which each statement is about all elements of a thread."""
    plan = replace(plan)
    plan.__dict__["stretches"] = ()
    return plan


@pytest.mark.parametrize("n", (3072, 5001, 50257))
@pytest.mark.parametrize("name, trains", STRETCHED)
def test_every_step_is_there_and_finds_what_it_reads(name, n, trains):
    found = kernel(*FUNCTIONS[name], n, trains=trains)
    graph, seen = found.graph, 0

    def spread(ids):
        nodes = [graph[id] for id in ids]
        while any(node.op is Op.RESHAPE for node in nodes):
            nodes = [graph[n.inputs[0]] if n.op is Op.RESHAPE else n for n in nodes]
        return {node.id for node in nodes if node.value.spread and node.op is not Op.CONST}

    for plan in held_plans(found):
        kept, found_steps = set(), []
        steps = [s for s in plan.steps if isinstance(s, Compute | Reduce | Store)]
        reshaped = [s for s in steps if isinstance(s, Compute) and graph[s.id].op is Op.RESHAPE]
        wanted = [step for step in steps if step not in reshaped]
        inputs = {i.id for i in (*plan.work.rows, *plan.work.columns)}
        for stretch in plan.stretches:
            assert set(stretch.read) <= kept
            carried = spread(id for part in stretch.carried for id in part.operands(graph))
            known = {i.id for i in stretch.inputs} | set(stretch.read)
            for step in stretch.computes:
                assert step.function is not Function.FACTORS or step.id in carried
                assert spread(step.inputs) <= known
                known.add(step.id)
            assert spread(o.id for o in stretch.stores) <= known
            assert set(stretch.kept) <= known
            kept |= set(stretch.kept)
            assert set(stretch.whole) <= kept | inputs
            for step in stretch.factors:
                assert spread(step.inputs) <= set(stretch.whole)
            assert carried <= known
            if stretch.then:
                made = {step.id for step in stretch.factors}
                assert spread(stretch.then.operands(graph)) <= set(stretch.whole) | made | carried
            found_steps += [*stretch.once, *stretch.computes, *stretch.factors]
            found_steps += map(Store, (*stretch.stores, *stretch.values))
            found_steps += [stretch.then] if stretch.then else []
        if plan.stretches:
            seen += 1
            assert set(found_steps) == set(wanted)
    assert seen


@pytest.mark.parametrize(
    "name, trains",
    (("gelu_of_norm", True), ("layer_norm_gelu", True), ("gated", False), ("gated", True)),
)
def test_fewer_registers(name, trains):
    found = kernel(*FUNCTIONS[name], 5000, trains=trains)
    plan = next(plan for plan in held_plans(found) if plan.stretches and plan.chunks >= 3)
    used = []
    for each in (plan, as_statements(plan)):
        text = printed(found.lowered.traced, each)
        used.append(build(text.source, text.function, "sm_90a").resources)
    stretched, statements = used
    assert "range_constexpr" in printed(found.lowered.traced, plan).source
    assert stretched.stack == 0
    assert stretched.registers < statements.registers


def beside_staged(name, n):
    """A kernel, and a plan of it whose staged columns are read by vectors."""
    found = kernel(*LIGHT[name], n)
    plans = [plan for plan in held_plans(found) if plan.placement.columns == "staged"]
    plans = [plan for plan in plans if 3 <= plan.chunks <= 7]
    return found, next(plan for plan in plans if plan.stretches)


@pytest.mark.parametrize("n", BESIDE_STAGED)
@pytest.mark.parametrize("name", LIGHT)
def test_light_elements_beside_staged_columns(name, n):
    """Whole columns would be loaded from shared memory at once."""
    found, plan = beside_staged(name, n)
    assert plan.sweeps.costs[0] < LEAST_INSTRUCTIONS
    texts = [printed(found.lowered.traced, each) for each in (plan, as_statements(plan))]
    assert texts[0].source.count("chunk.read_row(s") == LIGHT[name][2]
    used = [build(text.source, text.function, "sm_90a").resources for text in texts]
    assert used[0].stack == 0 and used[0].registers < used[1].registers


def test_which_light_elements_stay_as_they_are():
    """Those of short shifted rows, of threads with few elements, and beside one column alone."""
    plans = held_plans(kernel(*LIGHT["layer_norm"], 7919))
    longer = held_plans(kernel(*LIGHT["layer_norm"], 12589))
    plans += [plan for plan in longer if plan.elements_per_thread < 40]
    for n in (6144, 12589):
        plans += held_plans(kernel(rms_norm, 1, 1, n))
    staged = [plan for plan in plans if plan.placement.columns == "staged"]
    assert len(staged) >= 8 and not any(plan.stretches for plan in staged)


def signed_log(x):
    return x.sign() * torch.log1p(x.abs())


def clamped_distance(x, y):
    return F.relu(x - y).clamp(max=3.0) * 2 + y


@pytest.mark.parametrize("f, rows, n", [(signed_log, 1, 20011), (clamped_distance, 2, 9001)])
def test_light_elements_without_columns(f, rows, n):
    """Shifted rows, and rows that are divided over a cluster, have no columns to wait for."""
    found = kernel(f, rows, 0, n)
    plans = [p for p in held_plans(found) if p.chunks >= 5 and p.elements_per_thread <= 56]
    plan = next(p for p in plans if p.stretches)
    assert plan.placement.shifted and plan.sweeps.costs[0] < LEAST_INSTRUCTIONS
    texts = [printed(found.lowered.traced, each) for each in (plan, as_statements(plan))]
    used = [build(text.source, text.function, "sm_90a").resources for text in texts]
    assert used[0].stack == 0 and used[0].registers <= used[1].registers
    aligned = held_plans(kernel(f, rows, 0, 8 * (n // 8)))
    divided = {p.numerics.cluster_n > 1 for p in aligned if p.stretches}
    assert divided == {True} and any(p.numerics.cluster_n == 1 and p.chunks > 2 for p in aligned)


def test_a_loop_over_rows_spills_nothing():
    """Gradients of weights, whose sums take registers for all elements too."""
    x = torch.empty(1335, 50257, device="meta", dtype=BF16, requires_grad=True)
    weight = torch.empty(50257, device="meta", dtype=BF16, requires_grad=True)
    found = htile.rowwise(scaled_branch).inspect(x, weight).backward
    assert found.plan.stretches and found.graph.over_rows
    assert "total0 = total0.take(chunk, " in found.source
    assert found.resources.stack == 0
    whole = printed(found.lowered.traced, as_statements(found.plan))
    assert build(whole.source, whole.function, "sm_90a").resources.stack > 0


def test_what_is_shorter_stays_as_it_is():
    for function, columns in ((softmax, 0), (rms_norm, 1)):
        for plan in held_plans(kernel(function, 1, columns, 6144)):
            assert plan.sweeps.costs[0] < LEAST_INSTRUCTIONS
            assert not plan.stretches


def test_no_instruction_is_lost_beside_narrow_vectors():
    """A vector of a mask beside integers of 64 bits is less than a register."""
    dtypes = BF16, torch.int64, torch.bool
    rows = [torch.empty(4096, 3071, device="meta", dtype=dtype) for dtype in dtypes]
    found = htile.rowwise(beside_integers).inspect(*rows)
    plan = next(plan for plan in held_plans(found) if plan.stretches)
    both = [printed(found.lowered.traced, each) for each in (plan, as_statements(plan))]
    assert "chunk.read_row(tXrMask)" in both[0].source
    stretched, whole = [len(build(one.source, one.function, "sm_90a").cubin) for one in both]
    assert stretched > whole / 2


def test_a_mask_of_narrow_vectors():
    """The kernel's PTX, which runs on numpy, beside the reference."""
    torch.manual_seed(0)
    x, z, drawn = (3 * torch.randn(3, 258) for _ in range(3))
    rows = x, z, drawn > 0
    f = htile.rowwise(masked_twice)
    found = f.inspect(*rows)
    plans = [p for p in held_plans(found) if p.stretches and p.numerics.vec_size == 2]
    plan = next(plan for plan in plans if plan.numerics.threads_per_row == 32)
    text = printed(found.lowered.traced, plan)
    assert "chunk.read_row(tXrMask)" in text.source
    out = torch.zeros(3, 258)
    blocks = -(-3 // plan.rows_per_block)
    launch(build(text.source, text.function, "sm_90a").ptx, (blocks, 1), [*rows, out],
           is_emitted=True)  # fmt: skip
    expected = masked_twice(*(t.double() if t.is_floating_point() else t for t in rows))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_numbers_of_columns_are_counted_again():
    found = kernel(of_columns, 1, 0, 5001)
    for plan in held_plans(found):
        for stretch in plan.stretches:
            assert not any(found.graph[id].op is Op.INDEX for id in stretch.kept)
    assert any(plan.stretches for plan in held_plans(found))


def test_the_plan_says_so():
    found = kernel(*FUNCTIONS["gated"], 6144)
    plan = next(plan for plan in held_plans(found) if plan.stretches)
    assert "computed a vector at a time" in str(plan)
    assert "computed a vector at a time" not in str(as_statements(plan))


def test_the_plan_says_what_crosses_an_exchange():
    plans = held_plans(kernel(*FUNCTIONS["divergence"], 5001, trains=True))
    plan = next(plan for plan in plans if plan.stretches)
    *_, across = str(plan).partition("across exchanges: ")
    told = ("x in registers, as in memory", "eq0 in registers", "sub0 computed again",
            "sum0 in registers", "sum1 in registers", "div0 in registers", "d_out in registers",
            "sub4 in registers")  # fmt: skip
    assert " ".join(across.split()) == ", ".join(told)


@pytest.mark.parametrize("arch", ("sm_80", "sm_100a", "sm_120a"))
@pytest.mark.parametrize("name", FORWARD)
def test_compiles_for_every_architecture(name, arch):
    function, rows, columns = FUNCTIONS[name]
    xs = [torch.empty(4095, 5001, device="meta", dtype=BF16) for _ in range(rows)]  # not joined
    ws = [torch.empty(5001, device="meta", dtype=BF16) for _ in range(columns)]
    found = htile.rowwise(function).inspect(*xs, *ws, arch=arch)
    plan = next(plan for plan in held_plans(found) if plan.stretches)
    text = printed(found.lowered.traced, plan)
    assert build(text.source, text.function, arch).resources.registers


def test_an_element_at_an_index_is_read_before_the_vectors():
    rows = [torch.empty(4096, 5001, device="meta", dtype=BF16) for _ in range(2)]
    label = torch.empty(4096, device="meta", dtype=torch.int64)
    found = htile.rowwise(relative_to_a_label).inspect(*rows, label)
    plan = next(plan for plan in held_plans(found) if plan.stretches)
    text = printed(found.lowered.traced, plan)
    assert text.source.index("ctx.load_element(") < text.source.index("range_constexpr")
    assert build(text.source, text.function, "sm_90a").resources.stack == 0


def several_sums(x, y):
    d = x - y
    size = torch.sqrt(1 + d * d) - 1
    share = torch.exp(-d * d)
    total, least = size.sum(), (share * size).amin()
    is_far, is_near = (d > 3.5).any(), (d < 9).all()
    growth = torch.where(d > 3, 1.25, 1.0).prod()
    sums = total, share.sum(), (d * size).sum(), d.mean(), growth, least, is_far, is_near
    return *sums, size / (1 + total)


def sums_of_one(x):
    return several_sums(x, 0.5)


@pytest.mark.parametrize(
    ("function", "rows", "dtype"), [(several_sums, 2, BF16), (sums_of_one, 1, torch.float32)]
)
@pytest.mark.parametrize("chunks", (3, 5, 6, 7, 8))
def test_reductions_that_take_one_vector_after_the_other(chunks, function, rows, dtype):
    """They have the bits of reductions of all elements at once, and those of float64 nearly."""
    torch.manual_seed(chunks)
    vec = 16 // dtype.itemsize
    n = 128 * vec * chunks - 3 * vec
    xs = [torch.randn(2, n).to(dtype) for _ in range(rows)]
    f = htile.rowwise(function).with_plan(
        form="held", cluster_n=1, threads_per_row=128, num_threads=128
    )
    found = f.inspect(*xs, arch="sm_90a")
    assert found.plan.chunks == chunks and any([each.carried for each in found.plan.stretches])
    traced = found.lowered.traced
    texts = [printed(traced, each) for each in (found.plan, as_statements(found.plan))]
    assert ["ctx.tree(" in each.source for each in texts] == [True, False]
    results = []
    for each in texts:
        outs = [torch.zeros_like(each) for each in f(*xs)]
        ptx = build(each.source, each.function, "sm_90a").ptx
        launch(ptx, (2, 1), [*xs, *outs], is_emitted=True)
        results.append(outs)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        exact = torch.vmap(function)(*(x.double() for x in xs))
    for one, right in zip(results[0], exact, strict=True):
        tolerance = 1e-5 if one.dtype is torch.float32 else 2.0**-7
        torch.testing.assert_close(one.double(), right.double(), rtol=tolerance, atol=1e-5)


def test_which_reductions_take_one_vector_after_the_other():
    """Several of one exchange do, if that saves registers and elements take enough instructions.

    The statements of a sine have branches, so vectors are not computed for that alone.
    """

    def carried(f, n=6664, rows=2):
        plan = kernel(f, rows, 0, n).plan
        return max([len(each.carried) for each in plan.stretches], default=0)

    assert carried(several_sums) == 7  # not the mean
    assert carried(lambda x, y: (torch.exp(x - y).sum(), x * y)) == 0  # one alone
    assert carried(lambda x, y: (x.sum(), (x * y).sum(), y.amax())) == 0  # few instructions
    assert carried(lambda x, y: (x.sin().sum(), (x * y.cos()).sum(), torch.exp(x).sum())) == 0

    def gaussians(x, y, count):
        return tuple([torch.exp(-k * (x - y).square()).sum() for k in range(1, count + 1)])

    assert carried(lambda x, y: gaussians(x, y, 8)) == 8
    assert carried(lambda x, y: gaussians(x, y, 9)) == 0  # too many
