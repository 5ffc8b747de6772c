"""Repeated calls with `out=` and in place, on a GPU that runs nothing.

Each hazard is refused after a shortcut exists as before, and calls of several kinds in turn all
have shortcuts.
"""

import random
import re
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from examples.rmsnorm import rmsnorm
from examples.softmax import softmax
from htile.errors import ArgumentError, HTileError
from tests import test_out
from tests.gpu import test_out as gpu_test_out
from tests.test_out import HAZARDS, exchanged, named, nested, pair, scaled, single, two
from tests.test_shortcut import gpu as gpu
from tests.test_shortcut import traced

F32, BF16 = torch.float32, torch.bfloat16
M, N = 4, 64
FUNCTIONS = (softmax, rmsnorm, single, two, pair, named, nested, exchanged, scaled)


@pytest.fixture(autouse=True)
def fresh(gpu):
    for f in FUNCTIONS:
        f._forget()
    yield
    for f in FUNCTIONS:
        f._forget()


def rows(*lead, n=N, dtype=F32):
    return torch.randn(*lead, n).to(dtype)


def leaves(out):
    return pytree.tree_leaves(out)


def is_short(gpu, function, *args, out):
    """Whether a shortcut takes the call, and does what it should."""
    before, calls = len(gpu.long), len(gpu.calls)
    versions = [leaf._version for leaf in leaves(out)]
    assert function(*args, out=out) is out
    assert all(leaf._version > v for leaf, v in zip(leaves(out), versions, strict=True))
    if len(gpu.long) > before:
        return False
    assert len(gpu.calls) == calls + 1
    given = [t for t in gpu.calls[-1] if isinstance(t, torch.Tensor)]
    mine = function.inspect(*args).graph.structure.flatten_up_to(out)
    assert all(a is b for a, b in zip(given[-len(mine) :], mine, strict=True)), "in their order"
    return True


# ---- calls that are taken ------------------------------------------------------------------------


def test_a_call_that_comes_again_is_short(gpu):
    x, y = rows(M), rows(M)
    assert not is_short(gpu, softmax, x, out=y)
    for m in (M, M, 7, 1, 30, M):
        x, y = rows(m), rows(m)
        assert is_short(gpu, softmax, x, out=y)
        assert is_short(gpu, softmax, x.clone(), out=torch.nn.Parameter(y).detach())
    assert not is_short(gpu, softmax, x, out=x), "another kernel"
    for m in (M, 7, 1, M):
        x = rows(m)
        assert is_short(gpu, softmax, x, out=x)


def test_the_same_memory_through_another_object(gpu):
    x = rows(M)
    assert not is_short(gpu, softmax, x, out=x.view_as(x))
    for m in (M, 9, M):
        x = rows(m)
        assert is_short(gpu, softmax, x, out=x.view_as(x))
        before = len(gpu.long)
        softmax(x, out=rows(m))
        softmax(x, out=x)
    assert len(gpu.long) == before, "each kind has its own"


def test_programs_of_three_kinds_in_turn(gpu):
    x, y = rows(M), rows(M)
    calls = (lambda: softmax(x), lambda: softmax(x, out=y), lambda: softmax(x, out=x))
    for call in calls:
        call()
    assert len(gpu.long) == 3
    for _ in range(20):
        for call in calls:
            call()
    assert len(gpu.long) == 3
    counts = [traced(call)[0].count("check") for call in calls]
    assert counts == [1, 1, 1], "what is another kind leaves before the tensors are compared"
    writing = softmax._writing
    for m in (7, 9, 7, 9, 11):  # now of other sizes: those of fixed sizes go
        x, y = rows(m), rows(m)
        for call in calls:
            call()
    assert len(gpu.long) == 3 and set(softmax._writing) < set(writing)
    assert len(softmax._writing) == 2 and len(softmax._returning) == 1


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(gpu, lead):
    """There may be any number; their sizes may change where the tensors are contiguous."""
    for kind in (lambda x: rows(*x.shape[:-1]), lambda x: x):
        x = rows(*lead)
        assert not is_short(gpu, single, x, out=kind(x))
        assert is_short(gpu, single, x, out=kind(x))
        x = rows(*(size + 2 for size in lead))
        assert is_short(gpu, single, x, out=kind(x))


def test_rows_apart_and_side_by_side(gpu):
    """Sizes may change where no element of one tensor lies between those of the other."""
    x, out = rows(M, n=2 * N)[:, :N], rows(M, n=3 * N)[:, :N]
    assert not is_short(gpu, single, x, out=out)
    assert is_short(gpu, single, x, out=out)
    assert is_short(gpu, single, rows(9, n=2 * N)[:, N:], out=rows(9, n=3 * N)[:, N : 2 * N])
    wide = rows(M, n=2 * N)
    assert not is_short(gpu, single, wide[:, :N], out=wide[:, N:])
    assert is_short(gpu, single, wide[:, :N], out=wide[:, N:])
    other = rows(M, n=2 * N)
    assert is_short(gpu, single, other[:, :N], out=other[:, N:])
    assert not is_short(gpu, single, other[:, N:], out=other[:, :N]), "another distance"
    longer = rows(M + 1, n=2 * N)
    assert not is_short(gpu, single, longer[:, :N], out=longer[:, N:]), "of these sizes only"


class Nested(NamedTuple):
    first: torch.Tensor
    more: dict


@htile.rowwise
def deep(x):
    return Nested(x * 2, {"a": [x.sum(), (x > 0).any()], 3: (x.amax(-1, keepdim=True),)})


def test_structures(gpu):
    cases = [
        (two, lambda: (rows(M), torch.zeros(M))),
        (pair, lambda: test_out.Pair(rows(M), torch.zeros(M))),
        (named, lambda: {"tops": [rows(M, n=1), torch.zeros(M) > 0], "y": rows(M)}),
        (named, lambda: {"y": rows(M), "tops": [rows(M, n=1), torch.zeros(M) > 0]}),
        (deep, lambda: Nested(
            rows(M), {3: (rows(M, n=1),), "a": [torch.zeros(M), torch.zeros(M) > 0]}
        )),
    ]  # fmt: skip
    for function, make in cases:
        function._forget()
        x = rows(M)
        is_short(gpu, function, x, out=make())
        assert is_short(gpu, function, x, out=make())
    for function, make in cases[2:4]:  # the keys of a dict in any order, one shortcut for both
        assert is_short(gpu, function, x, out=make())


def test_results_that_are_arguments_crossed_and_not(gpu):
    for _ in range(2):
        x, y, out = rows(M), rows(M), rows(M)
        kinds = ((x, y), (y, x), (out, y), (x, out), (out, rows(M)))
        short = [is_short(gpu, exchanged, x, y, out=kind) for kind in kinds]
    assert short[:2] == [True, True] and len(exchanged._writing) <= 6
    for kind, was in zip(kinds, short, strict=True):
        assert is_short(gpu, exchanged, x, y, out=kind) == was


def test_a_parameter_of_that_name(gpu):
    @htile.rowwise
    def f(x, out):
        return x + out

    x, y = rows(M), rows(M)
    f(x, out=y)
    before = len(gpu.long)
    for call in (lambda: f(x, out=y), lambda: f(x, y), lambda: f(out=y, x=x)):
        result = call()
        assert result.shape == x.shape and result is not y
        assert gpu.calls[-1][0] is x and gpu.calls[-1][1] is y and gpu.calls[-1][2] is result
    assert len(gpu.long) == before


out = 2.0


@htile.rowwise
def captures_out(x):
    return x * out


def test_a_captured_value_of_that_name(gpu, monkeypatch):
    x, y = rows(M), rows(M)
    captures_out(x, out=y)
    assert is_short(gpu, captures_out, x, out=y)
    monkeypatch.setitem(globals(), "out", 3.0)
    assert not is_short(gpu, captures_out, x, out=y)
    assert is_short(gpu, captures_out, x, out=y)


def test_none_is_no_out(gpu):
    x = rows(M)
    single(x), single(x)
    before = len(gpu.long)
    y = single(x, out=None)
    assert y.shape == x.shape and len(gpu.long) == before + 1, "by a shortcut of calls without out="
    assert gpu.calls[-1][1] is y


# ---- hazards -------------------------------------------------------------------------------------


def good_calls(function, args, specialized):
    """Calls of many kinds with arguments like these, so that there are shortcuts for them all."""
    clones = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    like = [torch.empty(shape, dtype=dtype) for shape, dtype in specialized]
    structure = function.inspect(*args).graph.structure

    def out_of(tensors):
        return pytree.tree_unflatten(list(tensors), structure)

    for given in (args, clones):
        function(*given, out=out_of(map(torch.empty_like, like)))
        wide = [torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype) for t in like]
        narrow = [w[..., : t.shape[-1]] for w, t in zip(wide, like, strict=True)]
        function(*given, out=out_of(narrow))
    rows_ = [a for a in clones if isinstance(a, torch.Tensor) and a.shape == like[0].shape]
    if rows_ and rows_[0].dtype == like[0].dtype:
        for first in (rows_[0], rows_[0].view_as(rows_[0])):
            function(*clones, out=out_of([first, *like[1:]]))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", HAZARDS)
def test_hazard(gpu, name, after):
    """The messages of tests/test_out.py, before and after good calls of the same kind."""
    function, args, given, kind, message = HAZARDS[name]
    function._forget()
    if after:
        values = function._signature.bind(args, {})
        call = htile.run.rowwise.classify(function._signature, values)
        captured = function._captures.fingerprint()
        specialization = function._request(call, captured, values)[0].specialization
        good_calls(function, args, specialization.shapes(call.lead))
        assert function._writing
    dense = [t for t in leaves(given) if type(t) is torch.Tensor and not (t.is_sparse or t.is_meta)]
    calls, before = len(gpu.calls), [t.clone() for t in dense]
    for _ in range(2):
        with pytest.raises(kind, match=re.escape(message) + "$"):
            function(*args, out=given)
    assert len(gpu.calls) == calls
    assert all(map(torch.equal, before, dense)), "nothing was written"


@pytest.mark.parametrize("name", gpu_test_out.HAZARDS)
def test_hazard_of_the_gpu(gpu, name):
    m, n = gpu_test_out.M, gpu_test_out.N
    x, w, h = (torch.randn(m, k) for k in (n, 2 * n, n))
    hazard = gpu_test_out.HAZARDS[name](x, w, h)
    if name == "device":
        hazard["out"] = h.to("meta")
    for _ in range(2):
        with pytest.raises(HTileError, match="out="):
            softmax(**hazard)
        for y in (x, w[:, :n], h, w.as_strided((m, n), (n, 1))):
            softmax(y), softmax(y, out=torch.empty(m, n)), softmax(y, out=y)
        calls = len(gpu.calls)
        with pytest.raises(HTileError, match="out="):
            softmax(**hazard)
        assert len(gpu.calls) == calls


def test_operands_that_other_threads_read(gpu):
    x, h, weight = rows(M), rows(M), rows()
    for _ in range(3):
        for given in ((rows(M), rows(M)), (x, h), (h, x)):
            rmsnorm(x, weight, h, out=given)
    calls, out = len(gpu.calls), rows(M)
    for args, given, says in (
        ((h, x[0], rows(M)), (x, rows(M)), "shares memory with weight"),
        ((x, weight, h[:1]), (out, h), "shares memory with residual"),
        ((x, weight, h), (x, x), "two tensors of out= share memory"),
        ((x, weight, h), (out, out), "two tensors of out= share memory"),
        ((x, weight, h), (out, out.view_as(out)), "two tensors of out= share memory"),
    ):
        with pytest.raises(ArgumentError, match=says):
            rmsnorm(*args, out=given)
    assert len(gpu.calls) == calls


def test_a_row_alone_does_not_make_rows_that_overlap_right(gpu):
    """The stride of one row alone says nothing; of more rows it would."""
    buffer, x = torch.zeros(200), rows(1)
    for _ in range(2):
        single(x, out=buffer.as_strided((1, N), (1, 1)))
    with pytest.raises(ArgumentError, match="more than one element at the same address"):
        single(rows(3), out=buffer.as_strided((3, N), (1, 1)))


def test_grad_mode_counts(gpu):
    x, y = rows(M), rows(M).requires_grad_()
    with torch.no_grad():
        single(x, out=y)
        assert is_short(gpu, single, x, out=y)
    with pytest.raises(ArgumentError, match="requires grad"):
        single(x, out=y)
    single(x, out=rows(M))
    with pytest.raises(ArgumentError, match="requires grad"):
        single(x, out=y)


def outcome(function, x, out):
    try:
        function(x, out=out)
    except HTileError as error:
        return type(error), str(error)
    return "launched"


@pytest.mark.parametrize("seed", range(4))
def test_any_two_views_of_one_memory(gpu, seed):
    """With shortcuts for many kinds of calls, a call does what it does without any."""
    rng, memory = random.Random(seed), torch.zeros(4096)
    warm, cold = htile.rowwise(single._fn), htile.rowwise(single._fn)

    def view():
        lead = rng.choice([(1,), (3,), (5,), (2, 3), (3, 2)])
        step = rng.choice([N, N, N, 2 * N, 3 * N, N // 2, 0, 1])
        strides = (step * lead[-1], step)[-len(lead) :]
        offset = rng.choice([0, 0, N, 2 * N, 3 * N, 6 * N, 1, 20 * N])
        return memory.as_strided((*lead, N), (*strides, 1), offset)

    seen, taken = set(), 0
    for _ in range(1500):
        x, y = view(), view()
        if rng.random() < 0.3:
            y = x if rng.random() < 0.5 else x.view_as(x)
        before = len(gpu.long)
        given = outcome(warm, x, y)
        taken += len(gpu.long) == before
        cold._forget()
        assert given == outcome(cold, x, y), (x.shape, x.stride(), y.stride(), y.storage_offset())
        seen.add(given if given == "launched" else given[0])
    assert len(seen) >= 3 and taken > 20


# ---- how much Python it is -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "in_place", "instructions", "pointers"),
    [
        (softmax, (rows(M),), False, 129, 2),
        (softmax, (rows(M),), True, 109, 0),
        (rmsnorm, (rows(M), rows(), rows(M)), False, 269, 5),
        (rmsnorm, (rows(M), rows(), rows(M)), True, 222, 3),
    ],
    ids=["softmax", "softmax in place", "rmsnorm_residual", "rmsnorm_residual in place"],
)
def test_a_warm_call_is_little_python(gpu, function, args, in_place, instructions, pointers):
    """It makes exactly these calls; other Pythons than 3.11 execute some more instructions."""
    outs = (args[0], args[-1]) if in_place else (rows(M), rows(M))
    given = outs[0] if function is softmax else outs
    function(*args, out=given), function(*args, out=given)
    calls, executed = traced(lambda: function(*args, out=given))
    short = ["__call__", "is_dynamo_compiling", "_shortcut", "check"]
    assert calls == [*short, *["data_ptr"] * pointers]
    assert executed <= instructions * 1.2
    assert len(gpu.long) == 1
