"""Tensors that all rows share, htile.Shared, and rows of tables that an index chooses.

Results are held against the oracle, and against torch's own indexing of the whole batch where an
index beyond the end makes torch raise.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.lower import run_passes
from htile.lower.passes.space import place
from htile.testing import assert_close, oracle

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
NAN = math.nan
P, N, M = 11, 24, 9


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positions(*shape, most=P, dtype=I64, seed=1):
    """Integers from -most to most - 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most, shape, generator=generator).to(dtype)


def traced(f, *args):
    call = classify(f._signature, args)
    return trace(f._signature.fn, call.specs, call.n)


def check(f, *args):
    """The reference of the traced graph, and of the placed one, against the oracle."""
    assert_close(f, f(*args), *args)
    graph = traced(f, *args)
    named = dict(zip(f._signature.names, args, strict=True))
    lead = classify(f._signature, args).lead
    exact = torch.utils._pytree.tree_leaves(oracle(f, *args))
    found = torch.utils._pytree.tree_leaves(evaluate(graph, named, lead, torch.float64))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-12, atol=1e-12)
    assert place(run_passes(graph)) is not graph


# ---- what all rows share -------------------------------------------------------------------------


@htile.rowwise
def numbers(x, s: htile.Shared):
    return x * s[0] + s[1] - s[-1]


@htile.rowwise
def heads(x, w: htile.Shared):
    return (x.view(w.shape) * w).flatten(), w[1] * x[: w.shape[-1]]


@htile.rowwise
def both(x, w: htile.Shared):
    scale, shift = w.unbind()
    return x * scale + shift


@htile.rowwise
def matrix(x, w: htile.Shared):
    return (x.view(3, 8) * w.T[..., None].sum(0)).flatten(), w.amax(-1).sum() + x


@htile.rowwise
def vector(x, w: htile.Shared):
    return x * w[: x.shape[-1]] + w[x.shape[-1] :]


SHARED = {
    "three numbers": (numbers, (3,)),
    "weights of heads": (heads, (3, 8)),
    "two rows": (both, (2, N)),
    "a small matrix": (matrix, (3, 2)),
    "a vector of another length": (vector, (2 * N,)),
}


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_what_all_rows_share_is_there_as_a_whole(name, dtype):
    f, shape = SHARED[name]
    args = random(M, N).to(dtype), random(*shape, seed=1).to(dtype)
    assert all(spec.role is not Role.PER_ROW for spec in classify(f._signature, args).specs)
    check(f, *args)


@pytest.mark.parametrize("shape", ((), (1,), (1, 1)), ids=str)
def test_one_number_may_be_annotated_shared(shape):
    f = htile.rowwise(shared_number)
    check(f, random(M, N), random(1).reshape(shape))


def shared_number(x, s: htile.Shared):
    return x * s.reshape(())


def test_rows_do_not_take_their_length_from_what_is_shared():
    call = classify(numbers._signature, (random(M, N), random(99)))
    assert (call.n, call.lead) == (N, (M,))
    call = classify(both._signature, (random(2, N), random(2, N)))
    assert [spec.role for spec in call.specs] == [Role.ROW, Role.COLUMN] and call.lead == (2,)


# ---- rows of a table -----------------------------------------------------------------------------


@htile.rowwise
def plain(x, pos: htile.PerRow, table: htile.Shared):
    return x + table[pos]


@htile.rowwise
def computed(x, pos: htile.PerRow, table: htile.Shared):
    return x * table[(pos + 1) // 2], table[pos].sum(), table[-1 - pos % 3] - x


@htile.rowwise
def rotary(x, pos: htile.PerRow, table: htile.Shared):
    cos, sin = table[pos].chunk(2)
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


@htile.rowwise
def elements(x, pos: htile.PerRow, table: htile.Shared):
    row = table[pos]
    return row[3] * x, row[-1], table[pos, 2], table[pos, 4:8].sum(), row[None, ::2][0]


@htile.rowwise
def after_a_reduction(x, pos: htile.PerRow, table: htile.Shared):
    column = torch.arange(x.shape[-1])
    first = torch.where(x == x.amax(), column, x.shape[-1]).amin()
    return table[first % table.shape[0]] - table[pos]


@htile.rowwise
def reduced(x, pos: htile.PerRow, table: htile.Shared):
    y = x + table[pos]
    return torch.softmax(y, -1), y * torch.rsqrt((y * y).mean() + 1e-6)


@htile.rowwise
def of_functions(x, pos: htile.PerRow, table: htile.Shared):
    rows = table.index_select(0, torch.stack((pos, pos - 1)) % table.shape[0])
    return F.embedding(pos % table.shape[0], table) + x, rows[0] * rows[1]


FUNCTIONS = (plain, computed, rotary, elements, after_a_reduction, reduced, of_functions)


@pytest.mark.parametrize("pos", (I64, I32), ids=str)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_a_row_of_a_table(f, dtype, pos):
    if (f, pos) == (of_functions, I32):
        pos = I64  # torch's F.embedding under vmap has no remainder of int32
    check(f, random(M, N).to(dtype), positions(M, dtype=pos), random(P, N, seed=2).to(dtype))


@htile.rowwise
def weighted(ids: htile.Inner[1], share: htile.Inner[1], table: htile.Shared):
    return (share[:, None] * table[ids]).sum(0)


@htile.rowwise
def one_by_one(ids: htile.Inner[1], share: htile.Inner[1], table: htile.Shared):
    return sum(w * table[i] for w, i in zip(share.unbind(), ids.unbind(), strict=True))


@htile.rowwise
def several_of_parts(ids: htile.Inner[1], share: htile.Inner[1], table: htile.Shared):
    return table[ids, :8].flatten(), table[ids][:, -1] * share, table[ids[:, None]].sum((0, 1))


@pytest.mark.parametrize("k", (1, 2, 5))
@pytest.mark.parametrize("f", (weighted, one_by_one, several_of_parts),
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_several_rows_of_a_table(f, k):
    check(f, positions(M, k), random(M, k), random(P, N, seed=2))


@htile.rowwise
def of_three_axes(x, pos: htile.PerRow, table: htile.Shared):
    cos, sin = table[pos]
    return x * cos + sin


@htile.rowwise
def one_of_two_tables(x, pos: htile.PerRow, table: htile.Shared):
    cos, sin = table.unbind()
    return x * cos[pos] + sin[(pos - 1) // 2]


@htile.rowwise
def moved(x, pos: htile.PerRow, table: htile.Shared):
    flat = table.permute(1, 0, 2).flatten(1)
    return flat[pos].view(2, -1).sum(0) * x, table[1, 2:7][pos % 5] - x, table[:, ::3][0][pos % 3]


@htile.rowwise
def along_the_last(x, pos: htile.PerRow, table: htile.Shared):
    return table[0].T[pos % 4][: x.shape[-1]].sum() * x


@pytest.mark.parametrize(("f", "shape"), (
    (of_three_axes, (P, 2, N)), (one_of_two_tables, (2, P, N)), (moved, (2, P, N)),
    (along_the_last, (2, 40, N)),
), ids=lambda each: getattr(each, "_fn", each) and getattr(each, "__name__", None))  # fmt: skip
def test_tables_that_are_moved_first(f, shape):
    check(f, random(M, N), positions(M, most=min(P, shape[0 if f is of_three_axes else 1])),
          random(*shape, seed=2))  # fmt: skip


@htile.rowwise
def looked_up(pos: htile.PerRow, table: htile.Shared):
    return table[pos]


def test_rows_that_only_an_index_chooses():
    """Without any row argument: the leading shape is that of the values per row."""
    for lead in ((M,), (2, 3), ()):
        table, pos = random(P, N).to(BF16), positions(*lead)
        result = looked_up(pos, table)
        assert result.dtype is BF16 and torch.equal(result, table[pos])
    check(looked_up, positions(M), random(P, N))
    assert looked_up(positions(0), random(P, N)).shape == (0, N)


def test_a_batch_inside_vmap():
    x, pos, table = random(4, M, N), positions(4, M), random(P, N, seed=2)
    expected = plain(x, pos, table)
    assert torch.equal(torch.vmap(plain, in_dims=(0, 0, None))(x, pos, table), expected)
    with pytest.raises(UnsupportedError, match="which all rows of a call share"):
        torch.vmap(plain, in_dims=(None, None, 0))(x[0], pos[0], random(3, P, N))


def test_the_bits_of_a_row_do_not_depend_on_the_batch():
    x, pos, table = random(M, 1003), positions(M), random(P, 1003, seed=2)
    for whole, part in zip(reduced(x, pos, table), reduced(x[2:3], pos[2:3], table), strict=True):
        assert torch.equal(whole[2:3], part)


# ---- beyond the ends -----------------------------------------------------------------------------

FAR = (0, P - 1, P, P + 1, -1, -P, -P - 1, 10**9, 2**31, -(2**31) - 1, 2**40, -(2**63), 2**63 - 1)


@htile.rowwise
def found(pos: htile.PerRow, table: htile.Shared):
    row = table[pos]
    return row, row[1]


@pytest.mark.parametrize("dtype", (F32, BF16, I32, I64, BOOL, E4M3, E5M2, E8M0, torch.int8,
                                   torch.uint8),
                         ids=str)  # fmt: skip
def test_beyond_the_ends_is_nothing(dtype):
    table = (torch.arange(P * N).reshape(P, N) % 7 + 1).to(dtype)
    row, element = found(torch.tensor(FAR), table)
    assert row.dtype is dtype
    nothing = NAN if dtype.is_floating_point else 0.0
    for k, at in enumerate(FAR):
        is_there = -P <= at < P
        expected = table[at].double() if is_there else torch.full((N,), nothing).double()
        torch.testing.assert_close(row[k].double(), expected, equal_nan=True)
        torch.testing.assert_close(element[k].double(), expected[1], equal_nan=True)


def test_the_ends_are_those_of_what_is_indexed():
    f = htile.rowwise(part_of_a_table)
    result = f(torch.arange(-5, 5), random(P, N))
    assert result.isnan().all(-1).tolist() == [True, *[False] * 8, True]
    assert torch.equal(result[1:5], random(P, N)[2:6]) and torch.equal(result[5:9], result[1:5])


def part_of_a_table(pos: htile.PerRow, table: htile.Shared):
    return table[2:6][pos]


# ---- graphs --------------------------------------------------------------------------------------


def test_slices_of_a_row_are_pieces_of_the_table():
    graph = run_passes(traced(rotary, random(M, N), positions(M), random(P, N)))
    tables = [i for i in graph.inputs if i.role is Role.TABLE]
    assert [(i.view.start, i.view.steps, i.view.at) for i in tables] == [
        ((0, 0), (0, 1), (0, 1, P)),
        ((0, N // 2), (0, 1), (0, 1, P)),
    ]
    assert [node.op for node in graph].count(Op.LOOKUP) == 2
    assert not any(node.op in (Op.SLICE, Op.CAT) for node in graph)
    assert "table[0:11, 12:24] (table f32)" in str(graph)


def test_a_row_is_loaded_once():
    @htile.rowwise
    def f(ids: htile.Inner[1], table: htile.Shared):
        return table[ids[0]] * table[ids[0]] + table[ids[1]]

    graph = run_passes(traced(f, positions(M, 2), random(P, N)))
    assert [node.op for node in graph].count(Op.LOOKUP) == 2
    assert [i.role for i in graph.inputs].count(Role.TABLE) == 1


def test_the_kernel_is_the_same_for_tables_of_any_length():
    def source(length):
        return rotary.inspect(random(M, N), positions(M), random(length, N)).source

    assert source(5) == source(500) == source(1)


# ---- what is refused -----------------------------------------------------------------------------


def refused(kind, words, f, *args):
    with pytest.raises(kind) as raised:
        htile.rowwise(f)(*args)
    assert words in str(raised.value), raised.value
    return raised.value


def stack_index(x: htile.Inner[2], pos: htile.PerRow):
    return x[pos]


def table_of_results(x, pos: htile.PerRow, table: htile.Shared):
    return x + (table * 2)[pos]


def across(x, pos: htile.PerRow, table: htile.Shared):
    return x[: table.shape[-1] // 2] + table.view(-1, table.shape[-1] // 2)[pos]


def by_floats(x, table: htile.Shared):
    return table[x.sum()]


def by_a_mask(x, table: htile.Shared):
    return table[x > 0]


def by_a_row(x: htile.PerRow, ids: htile.Inner[1], table: htile.Shared):
    return table[ids].sum(0) + x


def two_at_once(ids: htile.Inner[1], table: htile.Shared):
    return table[ids, ids]


def of_a_number(x, table: htile.Shared):
    return x + table[100]


def test_refusals_name_the_line_and_the_remedy():
    x, pos, table = random(M, N), positions(M), random(P, N)
    error = refused(UnsupportedError, "annotated `x: htile.Shared`", stack_index,
                    random(M, 65, N), pos)  # fmt: skip
    assert error.loc.text == "return x[pos]"
    refused(UnsupportedError, "write table[pos] * 2 for", table_of_results, x, pos, table)
    error = refused(UnsupportedError, "lie across the rows of a table", across, x, pos, table)
    assert "table.view(-1" in error.loc.text
    refused(DtypeError, "an index is an integer", by_floats, x, table)
    refused(UnsupportedError, "no fixed length", by_a_mask, x, table)
    refused(UnsupportedError, "at most 64", by_a_row, x[:, 0], positions(M, 65), table)
    refused(UnsupportedError, "several indices at once", two_at_once, positions(M, 2), table)
    refused(ShapeError, "index 100 of an axis of 11", of_a_number, x, table)


def flat(x, pos: htile.PerRow, table: htile.Shared):
    return x + table.flatten(0, 1)[pos]


def flat_and_moved(x, pos: htile.PerRow, table: htile.Shared):
    return x + table.transpose(0, 1).flatten(0, 1)[pos]


@pytest.mark.parametrize("f, shape, view, remedy", (
    (flat, (P, 3, N), lambda t: t.flatten(0, 1), "pass table.flatten(0, 1) to the call for table, "
     "and index that, or look up a row first, and take parts of it"),
    (across, (P, 2 * N), lambda t: t.view(-1, N), f"pass table.view(-1, {N}) to the call for "
     "table, and index that, or look up a row first, and take parts of it"),
    (flat_and_moved, (P, 3, N), lambda t: t.transpose(0, 1).flatten(0, 1),
     "look up a row first, and take parts of it"),
))  # fmt: skip
def test_a_table_is_flattened_before_the_call(f, shape, view, remedy):
    x, pos, table = random(M, N), positions(M), random(*shape, seed=2)
    error = refused(UnsupportedError, "", f, x, pos, table)
    parts = math.prod(shape) // N
    told = f"an index of {parts} parts that lie across the rows of a table: {remedy}"
    assert error.message == told
    assert torch.equal(plain(x, pos, view(table)), x + view(table)[pos])


def test_a_table_without_the_annotation():
    def unannotated(x, pos: htile.PerRow, table):
        return x + table[pos]

    refused(ShapeError, "a table htile.Shared", unannotated,
            random(M, N), positions(M), random(P, N))  # fmt: skip


def test_shapes_of_what_is_shared():
    refused(ShapeError, "expected at most 3 dimensions", plain._fn,
            random(M, N), positions(M), random(1, 2, P, N))  # fmt: skip
    refused(ShapeError, "has no elements", plain._fn, random(M, N), positions(M), random(0, N))


def test_no_result_is_written_to_a_table():
    x, pos = random(P, N), positions(P)
    whole = random(2 * P, N)
    for out, table in ((x, x), (whole[:P], whole), (whole[P:], whole[: P + 1])):
        with pytest.raises(ArgumentError, match="out= shares memory with table"):
            plain(random(P, N), pos, table, out=out)
    with pytest.raises(ArgumentError, match="out= shares memory with table"):
        plain(x, pos, x, out=x)


def chosen_part(h: htile.Inner[2], i: htile.PerRow):
    return h[i]


def masked_part(h: htile.Inner[2], i: htile.PerRow):
    return torch.where(torch.arange(len(h))[:, None] == i, h, 0).sum(0)


def test_a_part_of_many_that_each_row_has_is_chosen_as_the_message_says():
    h, i = random(M, 66, 8), torch.arange(M) % 6
    says = re.escape("write torch.where(torch.arange(66)[:, None] == i, h, 0).sum(0) for h[i]")
    with pytest.raises(UnsupportedError, match=says):
        htile.rowwise(chosen_part)(h, i)
    assert torch.equal(htile.rowwise(masked_part)(h, i), h[torch.arange(M), i])


@pytest.mark.parametrize("dtype", [F32, BF16, I64, torch.int8, E4M3, BOOL])
@pytest.mark.parametrize("parts", [1, 2, 5, 64])
def test_a_part_of_a_few_that_each_row_has_is_chosen(parts, dtype):
    """Beyond the ends it is NaN, of integers 0 and of masks False; NaN elsewhere does not show."""
    h, i = (random(M, parts, 8) * 3).to(dtype), positions(M, most=parts)
    if dtype in (F32, BF16, E4M3):
        h.view(-1)[5] = NAN
    i[-1], i[-2] = parts, -parts - 1
    found, wide = htile.rowwise(chosen_part)(h, i), h.to(F32 if dtype is E4M3 else dtype)
    for m in range(M):
        beyond = torch.full((8,), NAN if dtype.is_floating_point else 0).to(dtype)
        wanted = wide[m, i[m]].to(dtype) if m < M - 2 else beyond
        torch.testing.assert_close(found[m].float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
    assert found.dtype is dtype


PARTS = {
    "of a constant": lambda x, i: x[:4] * torch.eye(4)[i % 4],
    "of a computed matrix": lambda x, i: (x[:12].view(4, 3).exp() + 1)[i % 4],
    "a part of it": lambda x, i: x.view(4, 6)[i % 4, 2:5],
    "of three axes": lambda x, i: x.view(2, 3, 4)[i % 2].sum(0),
    "several": lambda x, i: x.view(4, 6)[torch.stack((i % 4, (i + 1) % 4))].sum(0),
    "by index_select": lambda x, i: x.view(4, 6).index_select(0, (i % 4)[None])[0],
    "from the end": lambda x, i: x.view(4, 6)[-(i % 4) - 1],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_small_matrix_and_its_gradient(name):
    f = PARTS[name]
    x, i = random(M, N).requires_grad_(), positions(M, most=P) + P

    @htile.rowwise
    def chosen(x, i: htile.PerRow):
        return f(x, i)

    found, wanted = chosen(x, i), torch.stack([f(row, k) for row, k in zip(x, i, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    weights = random(*found.shape, seed=3)
    mine, theirs = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
