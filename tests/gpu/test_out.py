"""`out=` on the GPU: in place with every kind of plan, in odd memory, and what is refused."""

from collections import Counter, defaultdict

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.build.arch import arch_named
from htile.build.compile import build
from htile.lower import choose, enumerate_plans
from htile.lower.choice.bounds import MIN_CLUSTER_N
from htile.testing import assert_close
from tests.request_of import request_of

from .matrix import BF16, EXAMPLES, F32, assert_same_bits, run, seed, short

pytestmark = pytest.mark.gpu

softmax, _ = EXAMPLES["softmax"]
rmsnorm, residual_arguments = EXAMPLES["rmsnorm_residual"]
N = 1000


@htile.rowwise
def exchanged(x, y):
    """Each result may replace the argument that the other is made of."""
    s = (x * y).sum()
    return x - s, y - s


@htile.rowwise
def counted(x, t: htile.PerRow):
    """All threads of a row read a number that one of them overwrites, with no exchange before."""
    return x * t, t + 1


@htile.rowwise
def stepped(x, t: htile.PerRow):
    t = t + 0.1 * ((x * x).mean() - t)
    return x * torch.rsqrt(t), t


@htile.rowwise
def described(x):
    return {"y": x * 2, "top": x.amax(-1, keepdim=True), "positive": [(x > 0).sum(), x > 0]}


def pair(m, n, dtype, device):
    return torch.randn(m, n, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)


def rows(m, n, dtype, device):
    return (torch.randn(m, n, device=device).to(dtype),)


def rows_and_numbers(m, n, dtype, device):
    return torch.randn(m, n, device=device).to(dtype), torch.rand(m, device=device) + 1


# name: (function, arguments, which arguments the results replace, in order)
IN_PLACE = {
    "softmax": (softmax, rows, (0,)),
    "rmsnorm": (rmsnorm, residual_arguments, (0, 2)),
    "rmsnorm, crossed": (rmsnorm, residual_arguments, (2, 0)),
    "exchanged": (exchanged, pair, (1, 0)),
    "not exchanged": (exchanged, pair, (0, 1)),
    "a number of each row": (counted, rows_and_numbers, (0, 1)),
    "a number of each row, reduced": (stepped, rows_and_numbers, (0, 1)),
}
SIZES, ROWS = (1000, 4096, 32768), 133
DTYPES = (BF16, F32)


def kinds(function, args, arch):
    """One plan of each kind; a kind is (in a cluster, in loops, loader)."""
    kernel = function.inspect(*args, arch=arch)
    found = defaultdict(list)
    for plan in enumerate_plans(kernel.graph, kernel.plan.target):
        num, place = plan.numerics, plan.placement
        found[num.cluster_n > 1, num.in_loops, place.loader].append(plan)
    best = {kind: choose(plans) for kind, plans in found.items()}
    return {
        kind: function.with_plan(**plan.properties())
        for kind, plan in best.items()
    }


def compile_in_place(function, args, replaced, arch):
    """A job that compiles the kernel of a call whose results replace these CPU arguments."""
    outs = tuple(args[k] for k in replaced)
    lowered = request_of(function, args, outs).lower(arch_named(arch))
    return build, (lowered.source, lowered.function, arch)


def jobs(arch):
    """Jobs for each kind of plan, in place and not."""
    for function, arguments, replaced in IN_PLACE.values():
        for n in SIZES:
            for dtype in DTYPES:
                args = arguments(ROWS, n, dtype, "cpu")
                for forced in kinds(function, args, arch).values():
                    yield compile_in_place(forced, args, (), arch)
                    yield compile_in_place(forced, args, replaced, arch)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_bit_for_bit_what_it_is_elsewhere(compiles_nothing, arch, name, n, dtype):
    function, arguments, replaced = IN_PLACE[name]
    seed(name, n, dtype)
    args = arguments(ROWS, n, dtype, "cuda")
    reached = Counter()
    for kind, forced in kinds(function, args, arch).items():
        expected = run(forced, *args)
        assert_close(forced, expected, *args)
        mine = [a.clone() for a in args]
        outs = tuple(mine[k] for k in replaced)
        result = forced(*mine, out=outs if len(outs) > 1 else outs[0])
        assert all(a is b for a, b in zip(pytree.tree_leaves(result), outs, strict=True))
        assert_same_bits(result, expected, (name, kind))
        for k, (a, b) in enumerate(zip(mine, args, strict=True)):
            assert k in replaced or torch.equal(a, b)
        reached[kind] += 1
    print(dict(reached))
    assert len(reached) >= (4 if n >= MIN_CLUSTER_N else 2)


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("extra", [1, 6, 24])
def test_rows_in_a_wider_matrix_at_every_alignment(device, extra, offset):
    """The result is written where it was asked for, and nothing is written beside it."""
    seed(extra, offset)
    x = torch.randn(7, N, device=device).to(BF16)
    canvas = torch.full((7, N + extra + offset), -3.0, device=device, dtype=BF16)
    out = canvas[:, offset : offset + N]
    assert softmax(x, out=out) is out
    assert_same_bits(out.contiguous(), softmax(x))
    assert (canvas[:, :offset] == -3).all() and (canvas[:, offset + N :] == -3).all()


def test_structures(device):
    seed("structures")
    x = torch.randn(2, 3, N, device=device)
    out = pytree.tree_map(torch.empty_like, described(x))
    pointers = [t.data_ptr() for t in pytree.tree_leaves(out)]
    for turned in (out, dict(reversed(out.items()))):
        for leaf in pytree.tree_leaves(out):
            leaf.zero_()
        versions = [t._version for t in pytree.tree_leaves(out)]
        for _ in range(2):
            assert described(x, out=turned) is turned
        assert [t.data_ptr() for t in pytree.tree_leaves(out)] == pointers
        assert_close(described, out, x)
        assert all(t._version > v for t, v in zip(pytree.tree_leaves(out), versions, strict=True))
    crossed = pytree.tree_map(lambda t: torch.empty_like(t.transpose(0, 1)).transpose(0, 1), out)
    assert_close(described, described(x, out=crossed), x)


def test_slices_of_one_matrix(device):
    seed("slices")
    wide = torch.randn(64, 3 * N, device=device)
    before = wide.clone()
    softmax(wide[:, :N], out=wide[:, N : 2 * N])
    assert_same_bits(wide[:, N : 2 * N].contiguous(), softmax(before[:, :N]))
    assert torch.equal(wide[:, :N], before[:, :N])
    assert torch.equal(wide[:, 2 * N :], before[:, 2 * N :])
    exchanged(wide[:, :N], wide[:, 2 * N :], out=(wide[:, 2 * N :], wide[:, :N]))


def test_no_rows(device):
    x = torch.empty(0, N, device=device)
    out = torch.empty(0, N, device=device)
    assert softmax(x, out=out) is out and softmax(x, out=x) is x


M = 4
HAZARDS = {
    "structure": lambda x, w, h: dict(x=x, out=(x,)),
    "no tensor": lambda x, w, h: dict(x=x, out=3),
    "shape": lambda x, w, h: dict(x=x, out=h[:2]),
    "dtype": lambda x, w, h: dict(x=x, out=h.half()),
    "device": lambda x, w, h: dict(x=x, out=h.cpu()),
    "elements apart": lambda x, w, h: dict(x=x, out=w[:, ::2]),
    "expanded": lambda x, w, h: dict(x=x, out=h[:1].expand(M, N)),
    "rows that overlap": lambda x, w, h: dict(x=x, out=w.as_strided((M, N), (N - 1, 1))),
    "requires grad": lambda x, w, h: dict(x=x, out=h.clone().requires_grad_()),
    "shifted by one": lambda x, w, h: dict(x=w[:, :N], out=w[:, 1 : N + 1]),
    "shifted by a row": lambda x, w, h: dict(
        x=w.as_strided((M, N), (N, 1)), out=w.as_strided((M, N), (N, 1), N)
    ),
    "a repeated row": lambda x, w, h: dict(x=h[:1].expand(M, N), out=h),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards_are_refused_and_write_nothing(device, name):
    x, w, h = (torch.randn(M, n, device=device) for n in (N, 2 * N, N))
    softmax(x), softmax(x, out=torch.empty_like(x))  # calls of this kind are known
    before = [t.clone() for t in (x, w, h)]
    for _ in range(2):
        with pytest.raises(htile.HTileError, match="out="):
            softmax(**HAZARDS[name](x, w, h))
    torch.cuda.synchronize()
    assert all(map(torch.equal, (x, w, h), before))
    assert_close(softmax, softmax(x), x)


def test_operands_that_other_threads_read_are_refused(device):
    x, weight, h = residual_arguments(M, N, F32, device)
    x[0].copy_(weight)
    with pytest.raises(htile.ArgumentError, match="shares memory with weight"):
        rmsnorm(h, x[0], out=x)
    with pytest.raises(htile.ArgumentError, match="shares memory with residual"):
        rmsnorm(x, weight, h[:1], out=(torch.empty_like(x), h))
    with pytest.raises(htile.ArgumentError, match="two tensors of out= share memory"):
        rmsnorm(x, weight, h, out=(x, x))
