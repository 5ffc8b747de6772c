"""Where rows may end: what a kernel does not load must not show in any result."""

from __future__ import annotations

import linecache
import random
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.frontend.graph import Output, Role
from htile.frontend.reference import evaluate
from htile.lower.passes.rewrite import rewrite
from tests.lower.cases import ARCH

I32, NAN = torch.int32, float("nan")
N, M = 40, 50


@htile.rowwise
def masked_softmax(x, n: htile.PerRow):
    return torch.where(torch.arange(x.shape[-1]) < n, x, -torch.inf).softmax(-1)


@htile.rowwise
def masked_norm(x, w, n: htile.PerRow):
    inside = torch.arange(x.shape[-1]) < n
    mean = torch.where(inside, x, 0).sum() / n
    d = torch.where(inside, x - mean, 0)
    return torch.where(inside, d * torch.rsqrt((d * d).sum() / n + 1e-5) * w, 0)


@htile.rowwise
def of_some_rows(x, y, valid: htile.PerRow):
    return torch.where(valid, x * y, 0)


@htile.rowwise
def window(x, first: htile.PerRow, last: htile.PerRow):
    column = torch.arange(x.shape[-1])
    return torch.where((column >= first) & ~(column > last), x, 0).sum()


@htile.rowwise
def exchanged_halves(x, n: htile.PerRow):
    a, b = x.chunk(2)
    return torch.where(torch.arange(x.shape[-1]) < n, torch.cat((b, a)), 0)


@htile.rowwise
def also_read_whole(x, n: htile.PerRow):
    return torch.where(torch.arange(x.shape[-1]) < n, x, 0).sum() / x.sum()


@htile.rowwise
def times_a_mask(x, n: htile.PerRow):
    return x * (torch.arange(x.shape[-1]) < n)


@htile.rowwise
def of_a_reduction(x, n: htile.PerRow):
    return torch.where(torch.arange(x.shape[-1]) < x.sum().int(), x, n)


@htile.rowwise
def or_else(x, n: htile.PerRow):
    return torch.where((torch.arange(x.shape[-1]) < n) | (x > 0), 1.0, x)


def arguments(f, n=N, m=M):
    torch.manual_seed(0)
    made = {"x": torch.randn(m, n), "y": torch.randn(m, n), "w": torch.randn(n)}
    made |= {name: torch.randint(-3, n + 4, (m,)) for name in ("n", "first", "last")}
    return [(made | {"valid": made["n"] > 3})[name] for name in f._signature.names]


def ends_of(graph, named):
    """For each input its name, view, and the column of each row where it ends, as evaluated."""
    for i in graph.inputs:
        if i.end is not None:
            only = Output("end", i.end, I32, (), False)
            structure = pytree.tree_structure(0)
            asked = replace(graph, outputs=(only,), structure=structure)
            yield i, evaluate(rewrite(asked), named, (M,))


def assert_nothing_shows(f, args):
    """NaN in what is not loaded leaves every result as it is; returns how many elements that is."""
    graph = f.inspect(*args).graph
    named = dict(zip(f._signature.names, args, strict=True))
    expected, hidden = f(*args), 0
    wholes = {name: value.clone() for name, value in named.items()}
    seen = {name: torch.zeros_like(named[name], dtype=torch.bool) for name in wholes}
    for i in graph.inputs:
        if i.role is Role.ROW:
            ends = dict((j.id, end) for j, end in ends_of(graph, named))
            end = ends.get(i.id, torch.full((M,), graph.n))
            start = i.view.start[-1] if i.view else 0
            step = i.view.steps[-1] if i.view else 1
            columns = torch.arange(graph.n)
            inside = columns < end.long()[:, None]
            seen[i.name][:, start + step * columns] |= inside
    for name, value in wholes.items():
        if value.is_floating_point() and value.shape == (M, args[0].shape[-1]):
            hidden += (~seen[name]).sum().item()
            value[~seen[name]] = NAN
    found = f(*(wholes[name] for name in f._signature.names))
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return hidden


LIMITED = (masked_softmax, masked_norm, of_some_rows, window, exchanged_halves)


@pytest.mark.parametrize("f", LIMITED, ids=lambda f: f._signature.name)
def test_rows_end(f):
    assert assert_nothing_shows(f, arguments(f)) > M * N / 20


@pytest.mark.parametrize("f", (also_read_whole, times_a_mask, of_a_reduction, or_else),
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_rows_that_do_not_end(f):
    """NaN times 0 is NaN, and lengths have to be known before the row is loaded."""
    assert all(i.end is None for i in f.inspect(*arguments(f)).graph.inputs)


def test_random_conditions():
    """Of masks and lengths in any combination."""
    rng, limited = random.Random(5), 0
    for k in range(150):
        lines = ["c = torch.arange(x.shape[-1])"]
        masks = ["c < n", "c <= n", "n > c", "c >= first", "c > last", "c == first", "c != n",
                 "n > 5", "x > 0", "c < 7", "c < n + first", "(c + 3) < last"]  # fmt: skip
        for j in range(rng.randint(1, 5)):
            a, b = rng.choices(masks, k=2)
            forms = "{a}", "({a}) & ({b})", "({a}) | ({b})", "~({a})", "~(({a}) & ({b}))"
            form = rng.choice(forms)
            lines.append(f"m{j} = {form.format(a=a, b=b)}")
            masks.append(f"m{j}")
        values = ["x", "y"]
        for j in range(rng.randint(1, 5)):
            a, b = rng.choices(values, k=2)
            m = rng.choice(masks)
            forms = ("{a} + {b}", "torch.where({m}, {a}, {b})", "torch.where({m}, {a}, 0)",
                     "torch.where({m}, 1.0, {a})", "{a} - {a}.sum()")  # fmt: skip
            text = rng.choice(forms)
            lines.append(f"v{j} = {text.format(a=a, b=b, m=m)}")
            values.append(f"v{j}")
        lines.append(f"return torch.where({m}, {values[-1]}, 0) + 0 * n")
        body = "".join(f"    {line}\n" for line in lines)
        text = f"def f{k}(x, y, n: htile.PerRow, first: htile.PerRow, last: htile.PerRow):\n{body}"
        file = f"limits_{k}.py"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        names = {"torch": torch, "htile": htile}
        exec(compile(text, file, "exec", dont_inherit=True), names)
        f = htile.rowwise(names[f"f{k}"])
        try:
            limited += assert_nothing_shows(f, arguments(f)) > 0
        except AssertionError as error:
            raise AssertionError(f"{error}\n{text}") from None
    assert limited > 30


@pytest.mark.parametrize("name", ("sm_80", "sm_90a"))
@pytest.mark.parametrize("n", (1000, 4096, 20000, 400000))
def test_every_form_compiles(n, name):
    """Held rows and loops, also where every element of the tile is in the row."""
    for f in (masked_softmax, masked_norm):
        args = [a.to("meta") for a in arguments(f, n, 64)]
        kernel = f.inspect(*args, arch=ARCH[name].name)
        assert any(i.end is not None for i in kernel.graph.inputs)
        assert "end" in kernel.source or "until" in kernel.source
        assert not kernel.resources.stack
