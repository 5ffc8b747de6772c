"""Rows of any length on a GPU: results, bits, and that nothing beside them is read or written."""

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.build.arch import arch_named
from htile.build.compile import build
from htile.errors import UnsupportedError
from htile.frontend.dynamic import capacity_of
from htile.testing import assert_close
from tests.generated.measure import check
from tests.generated.programs import program
from tests.lower.cases import ANY_LENGTH, any_length_arguments
from tests.request_of import request_of

from .matrix import BF16, F32, assert_same_bits, job, rows_of, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

# Whole vectors and others: the ends of buckets, odd numbers, and rows that are worked on in loops.
SIZES = (
    1, 2, 7, 63, 64, 65, 96, 120, 127, 1003, 1008, 2304, 3071, 4095, 4096, 5000, 50257, 131072,
)  # fmt: skip
IN_F32 = (1, 64, 65, 1003, 4096, 50257)  # the lengths that float32 has too
CASES = [(n, dtype) for n in SIZES for dtype in (BF16, F32) if dtype is BF16 or n in IN_F32]
ROWS, FEW = 40, 3
GUARD = 64  # elements before and behind a tensor
PROGRAMS = range(120)
SPECIAL = (float("nan"), float("inf"), -float("inf"))

FUNCTIONS = {f.__name__: htile.rowwise(f, dynamic_n=True) for f in ANY_LENGTH}
PLAIN = {function: f for f, function in zip(ANY_LENGTH, FUNCTIONS.values(), strict=True)}


def arguments(f, n, dtype, device, m=ROWS):
    return any_length_arguments(PLAIN[f], m, n, dtype, device)


def fits(f, n, arch):
    """Whether rows have enough elements for topk; and for a scan, whether a plan holds them."""
    if f is FUNCTIONS["any_ranks"]:
        return n > 1
    is_long = f is FUNCTIONS["any_scan"] and n > 16384
    return not is_long or arch_named(arch).max_cluster > 1


def every(arch):
    for f in FUNCTIONS.values():
        for n, dtype in CASES:
            if fits(f, n, arch):
                yield f, n, dtype


def apart(x, by):
    """Rows (M, N) whose distance is `by` elements more, as far as there are rows."""
    if x.ndim < 2:
        return x
    wide = x.new_empty(x.shape[0], x.shape[1] + by)
    wide.fill_(float("nan"))
    return wide[:, : x.shape[1]].copy_(x)


def in_place_job(f, x, args, arch):
    request = request_of(f, (x, *args), (x,))
    lowered = request.lower(arch_named(arch))
    return build, (lowered.source, lowered.function, arch)


@functools.cache
def programs():
    """The random programs that work on whole rows."""
    found = []
    for number in PROGRAMS:
        p = program(number)
        try:
            p.function(dynamic_n=True).inspect(*p.arguments(filled=False))
        except UnsupportedError:
            continue
        found.append(number)
    assert len(found) > len(PROGRAMS) / 2
    return tuple(found)


def jobs(arch):
    for f, n, dtype in every(arch):
        for m in (ROWS, FEW, 1):
            yield job(f, arguments(f, n, dtype, "meta", m), arch)
        for by in (1, 16):
            args = [apart(a, by) for a in arguments(f, n, dtype, "meta")]
            yield job(f, args, arch)
    norm = FUNCTIONS["any_layernorm"]
    for n, dtype in CASES:
        x, *more = arguments(norm, n, dtype, "cpu")
        yield in_place_job(norm, x, more, arch)
    for number in programs():
        p = program(number)
        yield job(p.function(dynamic_n=True), p.arguments(filled=False), arch)


def guarded(x):
    """A copy of a tensor between NaN (integers: their largest), and the memory of all that."""
    fill = float("nan")
    if not x.is_floating_point():
        fill = x.dtype is torch.bool or torch.iinfo(x.dtype).max
    memory = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
    return memory, memory[GUARD : GUARD + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize(("n", "dtype"), CASES, ids=short)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_between_guards(name, dtype, n, device, arch):
    """Twice: the second call is a shortcut's. NaN around the arguments does not show."""
    f = FUNCTIONS[name]
    if not fits(f, n, arch):
        assert name in ("any_ranks", "any_scan")
        with pytest.raises((UnsupportedError, htile.ShapeError)):
            f(*arguments(f, n, dtype, device))
        return
    seed(name, dtype, n)
    args = [guarded(a)[1] for a in arguments(f, n, dtype, device)]
    result = run(f, *args)
    assert_close(f, result, *args)
    leaves, structure = pytree.tree_flatten(result)
    for _ in range(2):
        memory, outs = zip(*(guarded(torch.empty_like(leaf)) for leaf in leaves), strict=True)
        before = [each.clone() for each in memory]
        f(*args, out=pytree.tree_unflatten(outs, structure))
        assert_same_bits(outs, leaves, "out=")
        for now, then in zip(memory, before, strict=True):
            assert_same_bits((now[:GUARD], now[-GUARD:]), (then[:GUARD], then[-GUARD:]), "guards")


@pytest.mark.parametrize(("n", "dtype"), CASES, ids=short)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_infinities_and_nan(name, dtype, n, device, arch):
    """In the first, the last and a middle column, each kind in a row of its own."""
    f = FUNCTIONS[name]
    if not fits(f, n, arch):
        return
    seed(name, dtype, n)
    x, *more = arguments(f, n, dtype, device)
    columns = (0, n - 1, n // 2)
    for k, column in enumerate(columns):
        for i, value in enumerate(SPECIAL):
            x[3 * k + i, column] = value
    x[9] = -float("inf")
    assert_close(f, run(f, x, *more), x, *more)


@pytest.mark.parametrize(("n", "dtype"), CASES, ids=short)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_depend_on_the_row_alone(name, dtype, n, device, arch):
    """Not on how many rows there are, on where they lie, nor on which length came first."""
    f = FUNCTIONS[name]
    if not fits(f, n, arch):
        return
    seed(name, dtype, n)
    args = arguments(f, n, dtype, device)
    expected = run(f, *args)
    for m in (1, FEW):
        some = [a[:m] if a.shape[0] == ROWS and (a.ndim > 1 or a.dtype is torch.int64) else a
                for a in args]  # fmt: skip
        assert_same_bits(run(f, *some), rows_of(expected, slice(0, m)), m)
    for by in (1, 16):
        assert_same_bits(run(f, *(apart(a, by) for a in args)), expected, f"{by} apart")
    again = htile.rowwise(PLAIN[f], dynamic_n=True)
    lengths = [other for other, of_other in CASES if of_other is dtype and fits(f, other, arch)]
    others = [other for other in lengths if capacity_of(other) == capacity_of(n)]
    for other in (*others[::-1], n):
        last = run(again, *(args if other == n else arguments(f, other, dtype, device)))
    assert_same_bits(last, expected, "after other lengths")


@pytest.mark.parametrize(("n", "dtype"), CASES, ids=short)
def test_in_place(dtype, n, device):
    f = FUNCTIONS["any_layernorm"]
    seed("in place", dtype, n)
    x, *more = arguments(f, n, dtype, device)
    expected = run(f, x, *more)
    for _ in range(2):
        memory, y = guarded(x)
        assert f(y, *more, out=y) is y
        assert_same_bits(y, expected)
        assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()


def test_a_captured_call_of_another_length(device):
    """The kernel of the bucket is there, so that a length which is new can be captured."""
    f = FUNCTIONS["any_layernorm"]
    f(*arguments(f, 4096, BF16, device))
    args = arguments(f, 3072 + 8, BF16, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = f(*args)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    assert_same_bits(captured, f(*args))
    assert_close(f, captured, *args)


@pytest.mark.parametrize("k", range(len(PROGRAMS)))
def test_random_programs(k, device):
    if k not in programs():  # a part of a row, say
        with pytest.raises(UnsupportedError, match="dynamic_n=True"):
            program(k).function(dynamic_n=True)(*program(k).arguments())
        return
    p = program(k)
    f, args = p.function(dynamic_n=True), p.arguments(device)
    check(p, f, run(f, *args), args, device, fair=True)
