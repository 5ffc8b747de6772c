"""Held rows that are computed a vector at a time: the same bits as with whole statements."""

import pytest
import torch

import htile
from htile.build.compile import build, load
from htile.frontend.graph import Role
from htile.lower import printed
from htile.testing import assert_close
from tests.lower.test_stretches import (
    BESIDE_STAGED,
    BF16,
    FUNCTIONS,
    LIGHT,
    STRETCHED,
    as_statements,
    beside_integers,
    beside_staged,
    held_plans,
    kernel,
    masked_twice,
    of_columns,
    relative_to_a_label,
)
from tests.training import assert_gradients

from .matrix import F32, job, seed, short

pytestmark = pytest.mark.gpu

ROWS = 67
LENGTHS = (1000, 4097, 11008, 50257)
VALUES = [(name, dtype) for dtype in (BF16, F32) for name in FUNCTIONS]
MIXED = (
    (masked_twice, (F32, F32, torch.bool), 3074),
    (beside_integers, (BF16, torch.int64, torch.bool), 3071),
    (beside_integers, (BF16, torch.int64, torch.bool), 3072),
    (of_columns, (BF16,), 5001),
)
SHAPES = {Role.ROW: (ROWS, "n"), Role.PER_ROW: (ROWS,), Role.COLUMN: ("n",)}


def texts(name, trains, n):
    """A plan's kernel in both forms."""
    found = kernel(*FUNCTIONS[name], n, trains=trains)
    return found, in_both(found, next(plan for plan in held_plans(found) if plan.stretches))


def in_both(found, plan):
    both = [printed(found.lowered.traced, each) for each in (plan, as_statements(plan))]
    return [(one.source, one.function, plan.target.arch.name) for one in both]


def case(name, n, dtype, device="meta"):
    function, rows, columns = FUNCTIONS[name]
    seed(name, n, dtype)
    args = [torch.randn(ROWS, n, device=device).to(dtype) for _ in range(rows)]
    args += [torch.randn(n, device=device).to(dtype) for _ in range(columns)]
    return htile.rowwise(function), args


def mixed(function, dtypes, n, device="meta"):
    """Rows of several dtypes."""
    seed(function.__name__, n)
    rows = [torch.randn(ROWS, n, device=device) * 3 for _ in dtypes]
    rows = [row > 0 if dtype is torch.bool else row.to(dtype)
            for row, dtype in zip(rows, dtypes, strict=True)]  # fmt: skip
    return htile.rowwise(function), rows


def labelled(n, device="meta"):
    seed("label", n)
    args = [torch.randn(ROWS, n, device=device).to(BF16) for _ in range(2)]
    return htile.rowwise(relative_to_a_label), [*args, torch.randint(n, (ROWS,), device=device)]


def jobs(arch):
    for n in LENGTHS:
        for name, trains in STRETCHED:
            for text in texts(name, trains, n)[1]:
                yield build, text
        for name, dtype in VALUES:
            f, args = case(name, n, dtype)
            yield job(f, args, arch)
        f, args = labelled(n)
        yield job(f, args, arch)
    for case_of in MIXED:
        f, args = mixed(*case_of)
        yield job(f, args, arch)
    for name in LIGHT:
        for n in BESIDE_STAGED:
            for text in in_both(*beside_staged(name, n)):
                yield build, text


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name, trains", STRETCHED)
def test_bits(name, trains, n, device):
    seed(name, trains, n)
    assert_same_bits(*texts(name, trains, n), n, device)


@pytest.mark.parametrize("n", BESIDE_STAGED)
@pytest.mark.parametrize("name", LIGHT)
def test_bits_beside_staged_columns(name, n, device):
    seed(name, n)
    found, plan = beside_staged(name, n)
    assert_same_bits(found, in_both(found, plan), n, device)


def assert_same_bits(found, both, n, device):
    """Of random rows, some of which are not finite."""
    given = []
    for i in found.graph.inputs:
        shape = [n if size == "n" else size for size in SHAPES[i.role]]
        values = torch.randn(shape, device=device)
        if i.role is Role.ROW:  # numbers that no arithmetic changes
            for row, special in enumerate((torch.inf, -torch.inf, torch.nan, 0.0)):
                values[row, row::97] = special
        given.append(values.to(i.dtype))
    results = []
    for text in both:
        outs = [
            torch.empty((ROWS, n) if o.is_row else (ROWS, *o.inner), dtype=o.dtype, device=device)
            for o in found.graph.outputs
        ]
        load(build(*text))(*given, *outs)
        results.append([o.view(torch.int16 if o.itemsize == 2 else torch.int32) for o in outs])
    for stretched, statements in zip(*results, strict=True):
        assert torch.equal(stretched, statements)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name, dtype", VALUES, ids=short)
def test_values_and_gradients(name, n, dtype, device):
    f, args = case(name, n, dtype, device)
    assert_close(f, f(*args), *args)
    assert_gradients(f, *args)


@pytest.mark.parametrize("n", LENGTHS)
def test_an_element_at_an_index(n, device):
    f, args = labelled(n, device)
    assert_close(f, f(*args), *args)


@pytest.mark.parametrize("function, dtypes, n", MIXED)
def test_rows_of_several_dtypes(function, dtypes, n, device):
    f, args = mixed(function, dtypes, n, device)
    assert_close(f, f(*args), *args)
