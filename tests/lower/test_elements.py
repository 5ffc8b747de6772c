"""An element of a computed row that a kernel computes beside the row has the row's bits."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.ops import Op
from htile.lower.patterns import Function
from htile.lower.steps import Compute
from tests.lower.cases import BF16
from tests.primitives.ptx_device import launch

M, N = 40, 192


def softmax(x, w, b):
    return x.softmax(-1)


def affine(x, w, b):
    return x * w + b


def shares(x, w, b):
    return x / x.abs().sum()


def standard(x, w, b):
    return (x - x.mean()) * torch.rsqrt(x.var(correction=0) + 1e-5) * w + b


def scaled_less(x, w, b):
    return b - 2.0 * w * x


ROWS = (softmax, affine, shares, standard, scaled_less)


def ranked(row):
    """Of an element at an index, and of the first one: how many are larger, and as large."""

    @htile.rowwise
    def ranks(x, w, b, label: htile.PerRow):
        p = row(x, w, b)
        own, first = p[label], p[0]
        counts = (p > own).sum(), (p == own).sum(), (p > first).sum(), (p == first).sum()
        return *counts, p.to(torch.float32)

    return ranks


@pytest.mark.parametrize("row", ROWS)
def test_its_bits(row):
    """The PTX runs on numpy."""
    torch.manual_seed(0)
    x, w, b, label = torch.randn(M, N), torch.randn(N), torch.randn(N), torch.randint(N, (M,))
    kernel = ranked(row).inspect(x, w, b, label, arch="sm_90a")
    counts, p = [torch.zeros(M, dtype=torch.int64) for _ in range(4)], torch.zeros(M, N)
    named = {"x": x, "w": w, "b": b, "label": label}
    given = [named[name] for name in kernel.graph.arguments]
    blocks = -(-M // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [*given, *counts, p], is_emitted=True)
    for own, found in ((p.gather(-1, label[:, None]), counts[:2]), (p[:, :1], counts[2:])):
        assert torch.equal(found[0], (p > own).sum(-1))
        assert torch.equal(found[1], (p == own).sum(-1))


@pytest.mark.parametrize("row", ROWS)
def test_bits_of_neighbours(row):
    """Where elements repeat, a neighbour is as large."""

    @htile.rowwise
    def repeated(x, w, b):
        p = row(x, w, b)
        return (p[1:] == p[:-1]).sum(), (p > p.roll(2, 0)).sum(), p.to(torch.float32)

    torch.manual_seed(0)
    x, w, b = torch.randn(M, N // 4).repeat_interleave(4, -1), torch.ones(N), torch.zeros(N)
    kernel = repeated.inspect(x, w, b, arch="sm_90a")
    counts, p = [torch.zeros(M, dtype=torch.int64) for _ in range(2)], torch.zeros(M, N)
    named = {"x": x, "w": w, "b": b}
    given = [named[name] for name in kernel.graph.arguments]
    blocks = -(-M // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [*given, *counts, p], is_emitted=True)
    assert torch.equal(counts[0], (p[:, 1:] == p[:, :-1]).sum(-1))
    assert torch.equal(counts[1], (p > p.roll(2, 1)).sum(-1))


@pytest.mark.parametrize("n", (96, 1003, 16384, 100003))
@pytest.mark.parametrize("row", ROWS)
def test_its_device_functions(row, n):
    args = torch.empty(4, n, dtype=BF16), torch.empty(n), torch.empty(n)
    kernel = ranked(row).inspect(*args, torch.empty(4, dtype=torch.int64), arch="sm_90a")
    graph, work = kernel.graph, kernel.plan.work
    assert work.elements
    steps = [step for sweep in kernel.plan.sweeps.all for step in (*sweep.computes, *sweep.then)]
    steps = [step for step in steps if isinstance(step, Compute)]
    chosen = {step.id: step.function for step in (*work.before, *steps)}
    compared = 0
    for id, node in work.elements.items():
        if id in chosen and node.id in chosen and graph[id].op is not Op.TAKE:
            own, of_row = chosen[id], chosen[node.id]
            is_division = of_row is Function.EXACT and graph[id].op is Op.DIV
            is_value = not graph[id].value.spread
            assert own is (Function.SHARED if is_division and is_value else of_row)
            compared += 1
    assert compared


def values(f, **named):
    """What a kernel computes; its PTX runs on numpy."""
    kernel = f.inspect(*named.values(), arch="sm_90a")
    shapes = [(M, N) if output.is_row else (M,) for output in kernel.graph.outputs]
    dtypes = [output.dtype for output in kernel.graph.outputs]
    out = [torch.zeros(shape, dtype=d) for shape, d in zip(shapes, dtypes, strict=True)]
    given = [named[name] for name in kernel.graph.arguments]
    launch(kernel.ptx, (-(-M // kernel.plan.rows_per_block), 1), [*given, *out], is_emitted=True)
    return out


def test_an_element_that_an_index_is_computed_of():
    """It is computed before the row is."""

    @htile.rowwise
    def f(x, w, b, y, label: htile.PerRow):
        t = x * w + b
        own = t[label]
        return (t == own).sum(), y[own.abs().long()], t

    torch.manual_seed(0)
    x, y, w, b = torch.randn(M, N), torch.randn(M, N), torch.randn(N), torch.randn(N)
    label = torch.randint(N, (M,))
    equal, _, t = values(f, x=x, w=w, b=b, y=y, label=label)
    assert torch.equal(equal, (t == t.gather(-1, label[:, None])).sum(-1))


OTHERS = {  # what is no element of the row, though it is computed of elements as the row is
    "two places": (lambda x, y: x + y, lambda x, y: x[0] + y[1]),
    "all columns": (lambda x, y: x - torch.arange(N) * 1.0,
                    lambda x, y: x[60] - torch.arange(N) * 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_element_may_lie_above_the_maximum(name):
    """The short exponential, which is for numbers up to 0, is off by more than 20 ulp there."""
    row, other = OTHERS[name]

    @htile.rowwise
    def f(x, y):
        z = row(x, y)
        return (z - z.amax()).exp(), (other(x, y) - z.amax()).exp()

    torch.manual_seed(0)
    x, y = torch.randn(M, N), torch.randn(M, N)
    x[:, 0], y[:, 1], x[:, 60] = 60.0, 60.3, 80.0
    _, found = values(f, x=x, y=y)
    exponents = [other(a, b) - row(a, b).amax() for a, b in zip(x, y, strict=True)]  # in float32
    expected = torch.stack(exponents).double().exp()
    is_above = expected >= 1
    assert is_above.any()
    torch.testing.assert_close(found.double()[is_above], expected[is_above], rtol=5e-7, atol=0)


@pytest.mark.parametrize("n", (65, 192))
@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("f", (
    lambda x: (F.gelu(x), F.gelu(x).roll(1, 0)),
    lambda x: (x.argmax(), x[3:].argmax()),
    lambda x: (*x.max(-1), *x[1:].max(-1)),
))  # fmt: skip
def test_functions_that_follow_from_who_reads_the_row(f, dtype, n):
    x = torch.empty(4, n, dtype=dtype)
    assert ".entry" in htile.rowwise(f).inspect(x, arch="sm_90a").ptx


def test_parts_of_rows_have_none():
    """They may be no elements of what the row is reduced over."""

    @htile.rowwise
    def parts(x):
        peak = x[1:].max()
        return (x[1:] - peak).exp().sum(), (x[0] - peak).exp()

    assert not parts.inspect(torch.empty(4, 65, dtype=BF16), arch="sm_90a").plan.work.elements


PARTS = {  # computed of parts of an argument, or of a row and one of its elements
    "the end": lambda x: x[1:].softmax(-1),
    "the start": lambda x: x[:48].softmax(-1),
    "every second": lambda x: x[::2].softmax(-1),
    "a product and a sum": lambda x: x[1:] * 0.7 + 0.1,
    "beside one element": lambda x: x * 0.3 + x[0],
    "neighbours": lambda x: (x[1:] - x[:-1]) * 0.3 + x[1:],
    "divided": lambda x: x[1:] / 3 + x[1:].abs(),
    "moved": lambda x: x.roll(1, -1).softmax(-1),
    "joined": lambda x: torch.cat((x[1:], x[:1])).softmax(-1),
    "padded": lambda x: F.pad(x, (0, 3)).softmax(-1),
    "halves": lambda x: x[:48].exp() / x[48:].exp().sum(),
    "shares": lambda x: x[2:].sigmoid() / x[2:].sigmoid().sum(),
    "turned": lambda x: x.flip(-1).softmax(-1),
    "by a row": lambda x: (x[1:] - x.max()).exp() / (x[:-1].square() + 1),
    "a joined product": lambda x: torch.cat((x[1:] * 0.3, x[:1] * 0.3)) + x,
}


@pytest.mark.parametrize("name", PARTS)
def test_bits_of_elements_of_parts(name):
    """No element is lost or found twice among those that are as large as it."""
    row = PARTS[name]

    @htile.rowwise
    def ranks(x, label: htile.PerRow):
        p = row(x)
        found = p[0], p[-1], p[label], p.max()
        counts = [count for each in found for count in ((p == each).sum(), (p > each).sum())]
        return *counts, (p[1:] == p[:-1]).sum(), p.to(torch.float32)

    torch.manual_seed(0)
    x, label = torch.randn(17, 96).repeat_interleave(2, -1)[:, :96], torch.randint(40, (17,))
    kernel, right = ranks.inspect(x, label, arch="sm_90a"), ranks(x, label)
    out = [torch.zeros_like(each) for each in right]
    given = [{"x": x, "label": label}[each] for each in kernel.graph.arguments]
    blocks = -(-17 // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [*given, *out], is_emitted=True)
    *counts, beside, p = out
    found = p[:, :1], p[:, -1:], p.gather(-1, label[:, None]), p.amax(-1, keepdim=True)
    for k, each in enumerate(found):
        assert torch.equal(counts[2 * k], (p == each).sum(-1)), name
        assert torch.equal(counts[2 * k + 1], (p > each).sum(-1)), name
    assert torch.equal(beside, (p[:, 1:] == p[:, :-1]).sum(-1))


def test_bits_of_elements_of_groups():
    def first_of_each(x):
        p = x.view(-1, 16).softmax(-1)
        return (p == p[:, 1:2]).sum(-1)

    x = torch.randn(4, 96)
    kernel = htile.rowwise(first_of_each).inspect(x, arch="sm_90a")
    out = torch.zeros(4, 6, dtype=torch.int64)
    launch(kernel.ptx, (-(-4 // kernel.plan.rows_per_block), 1), [x, out], is_emitted=True)
    assert torch.equal(out, torch.ones_like(out))


def test_what_is_computed_alike_keeps_quick_functions():
    """Halves and parts that each take the same function keep it."""

    @htile.rowwise
    def gated(x):
        a, b = x.chunk(2)
        return F.silu(a) * F.silu(b), (a * 2 + 1).exp() / (b * 2 + 1).exp().sum()

    work = gated.inspect(torch.empty(4, 192, dtype=BF16), arch="sm_90a").plan.work
    assert not work._settled
