"""Tracing: numbers against torch itself over `torch.vmap` in float64, graphs as text, dtypes."""

from __future__ import annotations

import inspect
import itertools
import math
import textwrap
import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.errors import HTileError
from htile.frontend import ops as ops_
from htile.frontend.functions import FUNCTIONS
from htile.frontend.graph import Role
from htile.frontend.ops import INFER, Op, Value, Varies
from htile.frontend.reference import evaluate
from htile.frontend.roles import Spec
from htile.frontend.tensor import Tensor
from htile.frontend.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

M, N = 5, 7


def make_arguments(n: int = N) -> dict[str, tuple[Role, object]]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=g)

    special = normal(M, n)
    for row, number in enumerate((math.inf, -math.inf, math.nan, 0.0)):
        special[row, 0] = number
    special[4] = -math.inf
    return {
        "x": (Role.ROW, normal(M, n) * 2),
        "y": (Role.ROW, normal(M, n)),
        "p": (Role.ROW, normal(M, n).abs() + 0.1),
        "z": (Role.ROW, special),
        "w": (Role.COLUMN, normal(n)),
        "b": (Role.COLUMN, normal(n)),
        "k": (Role.ROW, normal(M, n) > 0),
        "h": (Role.ROW, normal(M, n) > 0.5),
        "i": (Role.ROW, integers(-4, 5, M, n)),
        "q": (Role.ROW, integers(1, 5, M, n)),
        "j": (Role.ROW, integers(-4, 5, M, n).int()),
        "label": (Role.PER_ROW, integers(0, n, M)),
        "t": (Role.PER_ROW, normal(M, 1).abs() + 0.1),
        "s": (Role.SCALAR, 0.7),
    }


def spec(name: str, role: Role, value: object) -> Spec:
    if role in (Role.SCALAR, Role.STATIC):
        dtype = torch.float32 if role is Role.SCALAR else None
        return Spec(name, role, dtype, (), value if role is Role.STATIC else None)
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    lead = 0 if role is Role.COLUMN else 1
    return Spec(name, role, dtype, tuple(value.shape[lead:]))


def traced(fn, n: int = N, **changed):
    arguments = make_arguments(n) | changed
    parameters = inspect.signature(fn).parameters
    used = {name: arguments[name] for name in parameters if name in arguments}
    graph = trace(fn, [spec(name, *a) for name, a in used.items()], n)
    return graph, used


def check(fn, n: int = N, **changed) -> None:
    """The graph evaluated in float64 is what `torch.vmap` of the function gives."""
    graph, used = traced(fn, n, **changed)
    got = evaluate(graph, {name: a for name, (_, a) in used.items()}, (M,), torch.float64)
    dims = tuple(0 if role in (Role.ROW, Role.PER_ROW) else None for role, _ in used.values())
    want = torch.vmap(fn, dims)(*(a for _, a in used.values()))
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if w.is_floating_point():  # an oracle that started from integers is of float32
            error = 1e-9 if w.dtype is torch.float64 else 2e-5
            torch.testing.assert_close(g, w.double(), equal_nan=True, rtol=error, atol=error)
        else:
            torch.testing.assert_close(g, w)


UNARY = (
    "neg abs absolute negative sign sgn reciprocal square sqrt rsqrt exp exp2 expm1 log log2 log10 "
    "log1p sin cos tanh sigmoid erf relu floor ceil round trunc fix isnan isinf isfinite "
    "logical_not clone detach positive"
)
UNARY_F = (
    "relu silu gelu softplus hardtanh relu6 elu leaky_relu hardswish hardsigmoid mish logsigmoid "
    "softsign sigmoid tanh"
)
COMPARE = "eq ne lt le gt ge not_equal less less_equal greater greater_equal"
REDUCE = "sum mean prod amax amin logsumexp var std any all norm"

CASES = {
    **{f"torch.{n}": lambda p, n=n: getattr(torch, n)(p) for n in UNARY.split()},
    **{f"method.{n}": lambda p, n=n: getattr(p, n)() for n in UNARY.split()},
    **{f"special.{n}": lambda z, n=n: getattr(torch, n)(z) for n in UNARY.split()},
    **{f"F.{n}": lambda x, n=n: getattr(F, n)(x) for n in UNARY_F.split()},
    **{f"F.{n}.z": lambda z, n=n: getattr(F, n)(z) for n in ("relu", "hardtanh", "relu6")},
    **{f"torch.{n}": lambda i, j, n=n: getattr(torch, n)(i, j) for n in COMPARE.split()},
    **{f"method.{n}": lambda z, n=n: getattr(z, n)(0.5) for n in COMPARE.split()},
    **{f"masks.{n}": lambda k, h, n=n: getattr(k, n)(h) for n in COMPARE.split()},
    **{f"masks.number.{n}": lambda k, n=n: getattr(k, n)(1) for n in COMPARE.split()},
    **{f"torch.{n}.all": lambda x, n=n: x - getattr(torch, n)(x, dim=-1) for n in REDUCE.split()
       if n not in ("any", "all")},
    **{f"torch.{n}": lambda x, n=n: getattr(torch, n)(x, dim=-1) for n in REDUCE.split()},
    **{f"torch.{n}.keepdim": lambda x, n=n: getattr(torch, n)(x, dim=-1, keepdim=True)
       for n in REDUCE.split()},
    **{f"method.{n}.z": lambda z, n=n: getattr(z, n)(dim=-1) for n in REDUCE.split()},
    **{f"{n}.per_row": lambda t, n=n: getattr(t, n)(dim=-1) for n in REDUCE.split()},
    **{f"{n}.per_row.keepdim": lambda t, n=n: getattr(t, n)(dim=-1, keepdim=True)
       for n in REDUCE.split()},
    **{f"{n}.axis": lambda x, n=n: getattr(torch, n)(x, axis=-1, keepdims=True)
       for n in ("sum", "mean", "amax", "prod")},
    "operators": lambda x, y: ((x + y) * (x - y) / (y * y + 1), x // y, x % y, abs(x), -x, +x),
    "reflected": lambda x, p: (1 + x, 1 - x, 2 * x, 1 / p, 2 // p, 2.5 % p, 2**x, 3.0**x, 0.5**x),
    "pow": lambda p: [p * p**e for e in (0, 1, 2, 3, 4, 2.5, 0.5, -0.5, -1, -2, -3, 0.0, True)],
    "pow.tensors": lambda p, x: (p**x, torch.pow(p, x), torch.pow(2, x), p.pow(2.5)),
    "pow.int": lambda i, j: (i**2, j**3, j**7, i**1, i**True, torch.square(j)),
    "pow.zero": lambda i, z: (i * i**0, z + z**0),
    "pow.int.float": lambda q: (q**0.5, q**-1.0, 2.0**q),
    "ints": lambda i, j, q: (i + j, i * 2, j - 3, i // q, i % q, -j, i.abs(), i.sign(), i / q),
    "ints.floats": lambda i, x, s: (i + x, i * 0.5, i + s, x * i, i / 2, i // 2.0, i % 2.5, 2 // x),
    "ints.unary": lambda q: (q.exp(), q.sqrt(), q.log(), q.floor(), q.round(), q.relu(), +q),
    "ints.isnan": lambda i: (i.isnan(), i.isinf(), i.isfinite()),
    "masks": lambda k, h: (k + h, k * h, k & h, k | h, k ^ h, ~k, k == h, k != h, k < h, k / 2),
    "masks.numbers": lambda k, x: (k + 1, k * 2.0, k * x, x + k, k & True, True ^ k, k**2, k * 3),
    "masks.extremes": lambda k, h: (torch.maximum(k, h), torch.minimum(k, h), k.sign(), k.exp()),
    "masks.isnan": lambda k: (k.isnan(), k.isinf(), k.isfinite()),
    "logical": lambda x, k, i: (torch.logical_and(x, k), torch.logical_or(i, k), k.logical_xor(i)),
    "bitwise": lambda k, h: (torch.bitwise_and(k, h), k.bitwise_or(h), torch.bitwise_not(k)),
    "minimum": lambda z, y: (torch.minimum(z, y), torch.maximum(y, z), torch.max(z, y), y.min(z)),
    "where": lambda k, x, y: (torch.where(k, x, y), torch.where(k, x, 0.0), x.where(k, y)),
    "where.numbers": lambda k, i: (torch.where(k, 1, 0), k.where(k, False),
                                    torch.where(k, i, 0), torch.where(k, 0, i)),
    "where.promotes": lambda k, i, j, x: (torch.where(k, i, x), torch.where(k, i, j)),
    "where.per_row": lambda x, t: torch.where(t > 0.7, x, t),
    "masked_fill": lambda x, k, i: (x.masked_fill(k, -math.inf), i.masked_fill(k, 0)),
    "clamp": lambda z: (z.clamp(min=0.0), z.clamp(-1, 1), z.clip(max=0.5), torch.clamp(z, 0.0)),
    "clamp.tensors": lambda x, y, t: (x.clamp(y, t), torch.clamp(x, max=t), x.clamp_min(0.0)),
    "clamp.ints": lambda i, j: (i.clamp(0, 2), i.clamp(min=0.5), j.clamp(max=i), j.clamp_max(1)),
    "hardtanh": lambda x: (F.hardtanh(x, -0.5, 2.0), F.relu6(x * 4)),
    "gelu": lambda x: (F.gelu(x, approximate="tanh"), F.gelu(x, approximate="none")),
    "softplus": lambda x: (F.softplus(x, 2.0, 1.0), F.softplus(x * 20), F.softplus(x, beta=0.5)),
    "elu": lambda x: (F.elu(x, 0.5), F.leaky_relu(x, 0.2)),
    "div.modes": lambda x, y: (torch.div(x, y, rounding_mode="floor"), torch.true_divide(x, y),
                               torch.div(x, y, rounding_mode="trunc"), torch.floor_divide(x, y)),
    "div.integers": lambda i, q: tuple(torch.div(a, b, rounding_mode="trunc")
                                       for a, b in ((i, q), (i, -q), (i, 3), (5, q))),
    "alpha": lambda x, y: (torch.add(x, y, alpha=2), torch.sub(x, 3, alpha=0.5), x.add(y)),
    "rsub": lambda x, y: (torch.rsub(x, y), torch.rsub(x, 1.0), torch.subtract(x, y)),
    "addcmul": lambda x, y, p: (torch.addcmul(x, y, p, value=0.5), x.addcdiv(y, p),
                                torch.lerp(x, y, 0.25), torch.lerp(x, y, 0.75), x.lerp(y, p)),
    "casts": lambda x, i: (x.int(), x.long(), i.float() * 0.5, x.bool(), i.bool(),
                           x.to(torch.int32),
                           i.int(), i.to(dtype=torch.bool)),
    "type_as": lambda x, i: (x.type_as(i), x.to(i.dtype)),
    "like": lambda x, i: (x + torch.zeros_like(x), i + torch.ones_like(i),
                          torch.maximum(x, torch.full_like(x, 0.5)),
                          i * torch.ones_like(x, dtype=torch.int32)),
    "like.sum": lambda x: x * torch.ones_like(x).sum(),
    "sums": lambda i, j, k: (i.sum(), j.sum(), k.sum(), j.prod(), k.prod(), k.sum(-1, True)),
    "sums.dtype": lambda i: (i.sum(dtype=torch.int32), i.prod(-1, dtype=torch.int64)),
    "extremes": lambda i, k, x: (i.amax(), k.max(), k.min(), k.amax(-1), x.max(), x.min(), i.min()),
    "max.values": lambda x, i: (x.max(dim=-1).values, i.min(dim=-1, keepdim=True).values,
                                torch.max(x, -1)[0], torch.min(x, dim=0, keepdim=True).values),
    "any": lambda x, k: (k.any(), k.all(), x.any(), torch.all(x > -9), k.any(-1, True)),
    "var": lambda x: (x.var(unbiased=False), torch.var(x, -1, False), x.std(-1, True, True),
                      torch.var(x, correction=2), torch.var(x, False), x.std(correction=0)),
    "var.nan": lambda x: (x.var(correction=N), x.var(correction=N + 2)),
    "var_mean": lambda x: (torch.var_mean(x), torch.var_mean(x, -1, keepdim=True),
                           torch.std_mean(x, dim=-1, correction=0)),
    "norm": lambda x: [x.norm(p) for p in (1, 2, math.inf, -math.inf, 0, 3)],
    "norm.functions": lambda x: (torch.linalg.matrix_norm(x[None]), torch.norm(x),
                                 x.norm(dim=-1, keepdim=True), torch.linalg.norm(x),
                                 torch.norm(x, p=1, dim=-1), torch.linalg.vector_norm(x, 3),
                                 torch.linalg.norm(x, math.inf), x.norm(p=2, dim=0),
                                 torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "logsumexp": lambda z, i: (z.logsumexp(-1), torch.logsumexp(i, dim=-1, keepdim=True)),
    "softmax": lambda x: (F.softmax(x, dim=-1), x.softmax(-1), torch.softmax(x, 0),
                          torch.special.softmax(x, -1)),
    "softmax.z": lambda z: (F.softmax(z, dim=-1), z.log_softmax(-1)),
    "log_softmax": lambda x: (F.log_softmax(x, dim=-1), torch.log_softmax(x, -1)),
    "layer_norm": lambda x, w, b: (F.layer_norm(x, (N,)), F.layer_norm(x, x.shape, w, b, 1e-3),
                                   torch.layer_norm(x, [N], weight=w),
                                   F.layer_norm(x, x.shape[-1:], bias=b)),
    "rms_norm": lambda x, w: (F.rms_norm(x, (N,), w, 1e-5), torch.rms_norm(x, (N,), eps=0.1)),
    "normalize": lambda x: (F.normalize(x, dim=-1), F.normalize(x, p=1, dim=0),
                            F.normalize(x * 0, dim=-1, eps=1e-6)),
    "count_nonzero": lambda i: torch.count_nonzero(i),
    "per_row": lambda x, t, label: (x / t, x + label, t + label, label * 2, t * label),
    "per_row.shapes": lambda x, t: (x.sum().unsqueeze(-1), x.sum()[..., None], t.squeeze(-1), t[0],
                                    x.sum(-1, keepdim=True)[..., 0], t.squeeze(), t[...], x[:]),
    "per_row.rows": lambda x, t: (t.expand_as(x), x.max().expand(N), t.expand(x.shape),
                                  torch.broadcast_to(x.sum(), (N,)), (t > 0.5).expand_as(x)),
    "per_row.moments": lambda t, x: (t.var(unbiased=False), x.sum().softmax(-1), t.softmax(-1)),
    "columns": lambda x, w, b: (x * w.softmax(-1), x + (w * b).sum()),
    "scalars": lambda x, s, i: (x * s, s - x, i + s, x**s, s**x, (s + x.sum()) * x),
    "numbers": lambda x: (x + math.inf, x * math.nan, x * x.shape[-1], x / x.numel(), x - x.size(0),
                          ),
    "shape": lambda x: x * x.ndim + x.dim() + x.size()[0] + torch.numel(x),
    "Tensor.exp": lambda x, y: (torch.Tensor.exp(x), torch.Tensor.add(x, y), torch.Tensor.sum(x)),
    "views": lambda x, t: (x.view(-1), x.reshape(x.shape), x.flatten(), x.ravel(), x.view_as(x),
                           torch.reshape(x, (-1,)), x.detach(), t.view(1), t.reshape(()),
                           x.sum().view(-1), torch.flatten(x), x.reshape(-1).contiguous()),
    "devices": lambda x, y: (x.to(x.device), x.to(y.device, x.dtype), x.to(y),
                             x * (x.device == y.device)),
    "devices of factories": lambda x, i: (
        i * torch.arange(x.shape[-1], device=x.device), i + torch.ones(len(x), device=i.device),
        x * torch.tensor(2.0, device=x.device), x + torch.zeros_like(x, device=x.device),
        x + torch.full((), 0.5, device=x.device)),
    "new": lambda x, i: (x + x.new_zeros(x.shape), x * x.new_ones(x.shape[-1]), x + x.new_ones(()),
                         i * i.new_full((x.shape[-1],), 3), x * x.new_tensor(2), i.new_ones(1) * i),
    "full_like of a number": lambda x, i, s: (x * torch.full_like(x, s), i + torch.full_like(i, s)),
    "aminmax": lambda x, i: (*torch.aminmax(x), *x.aminmax(dim=-1, keepdim=True), i.aminmax().max),
    "decimals": lambda x: (x.round(decimals=2), torch.round(x * 1000, decimals=-2)),
    "distances": lambda x, y: (torch.dist(x, y), torch.dist(x, y, 1), F.pairwise_distance(x, y),
                               F.pairwise_distance(x, y, 3, 1e-3, True)),
    "margins": lambda x, y: (F.soft_margin_loss(x, y.sign()),
                             F.soft_margin_loss(x, y.sign(), reduction="none")),
    "poisson": lambda x, p: (F.poisson_nll_loss(x, p), F.poisson_nll_loss(x, p * 3, full=True),
                             F.poisson_nll_loss(p, p, log_input=False, reduction="sum")),
    "len": lambda x: (x / len(x), x * len(x[None])),
    "sticky": lambda z: (z - z.max()).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    check(CASES[name])


ONE = [n for n in CASES if n not in ("var.nan", "per_row.rows", "layer_norm", "rms_norm")]


@pytest.mark.parametrize("name", ONE)
def test_numbers_of_one_column(name):
    check(CASES[name], n=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_constant_like_a_row_is_not_rounded(dtype):
    """Whether its number is written in the function or is an argument."""
    x = torch.ones(2, 8, dtype=dtype)
    for f in (lambda x, a: (x * torch.full_like(x, 0.9)).sum() + 0 * a,
              lambda x, a: (x * torch.full_like(x, a)).sum(),
              lambda x, a: (x * torch.full_like(x * 1.0, a)).sum()):  # fmt: skip
        f = htile.rowwise(f)
        assert f(x, 0.9).tolist() == pytest.approx([7.2] * 2)
    rounded = htile.rowwise(lambda x, a: (x * torch.full_like(x, a, dtype=torch.bfloat16)).sum())
    assert rounded(x, 0.9).tolist() == [7.1875] * 2


@pytest.mark.parametrize("ends", [(-1, 3), (0.5, -2.5), (7, 7)])
@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_linspace(n, ends):
    f = htile.rowwise(lambda x: x + torch.linspace(*ends, n, device=x.device))
    error = (f(torch.zeros(2, n)) - torch.linspace(*ends, n, dtype=torch.float64)).abs().max()
    assert error <= 4e-7
    halves = htile.rowwise(lambda x: x + torch.linspace(*ends, steps=n, dtype=torch.float16))
    assert halves(torch.zeros(2, n)).dtype is torch.float16


def test_tensors_of_a_number_that_is_given_at_run_time():
    def f(x, s: float):
        t = torch.tensor([s, 2.0, 1 - s])
        return (
            torch.full(x.shape, s) * x, x * x.new_full((1,), s), x * torch.tensor(s), t.sum() * x,
            torch.scalar_tensor(s) - x, x * torch.as_tensor(s), x.new_tensor(s) + x,
            x * torch.sqrt(torch.tensor(s)),
        )  # fmt: skip

    x = torch.randn(3, N)
    for got, want in zip(htile.rowwise(f)(x, 0.7), f(x, 0.7), strict=True):
        torch.testing.assert_close(got, want)


def test_a_number_that_torch_makes_of_a_tensor_has_no_gradient():
    f = htile.rowwise(lambda x, s: x * torch.full_like(x, s) * torch.tensor(s) * torch.tensor([s]))
    x, s = torch.ones(2, N, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    assert torch.autograd.grad(f(x, s).sum(), s, allow_unused=True) == (None,)
    assert torch.equal(torch.autograd.grad(f(x, s).sum(), x)[0], torch.full((2, N), 8.0))


def test_keepdim_is_not_a_row_at_one_column():
    graph, _ = traced(lambda x: (x, x.sum(-1, keepdim=True), x.mean()), n=1)
    assert [(o.inner, o.is_row) for o in graph.outputs] == [
        ((1,), True),
        ((1,), False),
        ((), False),
    ]


# every pair of dtypes, every operator: torch's dtype, or both refuse

BINARY = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": lambda a, b: a / b, "//": lambda a, b: a // b, "%": lambda a, b: a % b,
    "==": lambda a, b: a == b, "<": lambda a, b: a < b, "max": torch.maximum,
    "where": lambda a, b: torch.where(a == a, a, b), "clamp": lambda a, b: torch.clamp(a, min=b),
}  # fmt: skip
ROWS = {d: torch.ones(2, N).to(d) for d in (torch.float32, torch.int32, torch.int64, torch.bool)}
PARTNERS = [
    *((Role.ROW, t) for t in ROWS.values()),
    *((Role.PER_ROW, t[:, 0]) for t in ROWS.values()),
    *((Role.PER_ROW, t[:, :1]) for t in ROWS.values()),
    *((Role.STATIC, number) for number in (2, 2.5, True)),
]


@pytest.mark.parametrize("name", BINARY)
def test_promotion_is_torchs(name):
    def reflected(a, b, function=BINARY[name]):
        return function(b, a)

    for (dtype, row), (role, other), function in itertools.product(
        ROWS.items(), PARTNERS, (BINARY[name], reflected)
    ):
        if role is Role.STATIC and name == "max":
            continue
        try:
            partner = other if role is Role.STATIC else other[0]
            want = function(row[0], partner).dtype
        except (RuntimeError, TypeError):
            want = None
        try:
            specs = [Spec("a", Role.ROW, dtype, (N,)), spec("b", role, other)]
            got = trace(lambda a, b, f=function: f(a, b), specs, N).outputs[0].dtype
        except HTileError as error:
            assert want is None, f"{name} {dtype} {role} {other}: {error}"
            continue
        assert got == want, f"{name} of {dtype} and {role} {other}: {got}, torch {want}"


# graphs as text


def text(fn, **changed) -> str:
    return str(traced(fn, **changed)[0])


def ops(fn, **changed) -> list[str]:
    return [n.op.value for n in traced(fn, **changed)[0] if n.op not in (Op.INPUT, Op.CONST)]


def test_softmax_as_text():
    def softmax(x):
        e = torch.exp(x - x.max())
        return e / e.sum()

    line = softmax.__code__.co_firstlineno
    assert text(softmax) == textwrap.dedent(f"""\
        graph softmax, one row of N = 7
          %0   = input x (row f32)                : row f32[7]
          %1   = max %0                           : row f32[]                 # test_trace.py:{line + 1}
          %2   = sub %0, %1                       : row f32[7]                # test_trace.py:{line + 1}
          %3   = exp %2                           : row f32[7]                # test_trace.py:{line + 1}
          %4   = sum %3                           : row f32[]                 # test_trace.py:{line + 2}
          %5   = div %3, %4                       : row f32[7]                # test_trace.py:{line + 2}
          return out = %5 as f32 row""")  # noqa: E501


DECOMPOSED = {
    "square": (lambda x: x.square(), "mul"),
    "mean": (lambda x: x.mean(), "mean"),
    "var": (lambda x: x.var(), "mean sub mul sum div"),
    "softmax": (lambda x: x.softmax(-1), "max sub exp sum div"),
    "log_softmax": (
        lambda x: x.log_softmax(-1), "max abs eq where sub exp sum log abs eq where sub"
    ),
    "log_softmax and logsumexp": (
        lambda x: (x.log_softmax(-1), x.logsumexp(-1)),
        "max abs eq where sub exp sum log abs eq where sub"
        " max abs eq where sub exp sum log add",
    ),
    "layer_norm": (lambda x: F.layer_norm(x, (N,)), "mean sub mul mean add rsqrt mul"),
    "clamp": (lambda x: x.clamp(0, 1), "maximum minimum"),
    "silu": (lambda x: F.silu(x), "sigmoid mul"),
    "isnan": (lambda x: x.isnan(), "ne"),
    "power": (lambda x: 2**x, "exp2"),
    "promotion": (lambda x, i: x + i, "convert add"),
    "no promotion of numbers": (lambda x: x + 1, "add"),
    "sum of masks": (lambda k: k.sum(), "convert sum"),
    "per-row maximum": (lambda t: t.max(), "reshape"),
    "identity": (lambda x: x.contiguous().clone(), ""),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposition(name):
    fn, expected = DECOMPOSED[name]
    assert ops(fn) == expected.split()


def test_reductions_count_columns_only():
    graph, _ = traced(lambda t, x: (x + t.sum() + t.mean(), t.prod(-1)))
    assert not {n.op for n in graph} & {Op.SUM, Op.PROD}


# roles, outputs, structures


def test_values_of_the_roles():
    def f(x, w, label, t, s, d, flag):
        assert flag is True
        return x * w + label + t + s + d

    specs = [
        Spec("x", Role.ROW, torch.bfloat16, (N,)),
        Spec("w", Role.COLUMN, torch.float32, (N,)),
        Spec("label", Role.PER_ROW, torch.int64, ()),
        Spec("t", Role.PER_ROW, torch.float16, (1,)),
        Spec("s", Role.SCALAR, torch.float32),
        Spec("d", Role.DEVICE_SCALAR, torch.float16, (1,)),
        Spec("flag", Role.STATIC, value=True),
    ]
    f.__name__ = "named"
    graph = trace(f, specs, N)
    assert graph.name == "named"
    assert [i.name for i in graph.inputs] == ["x", "w", "label", "t", "s", "d"]
    values = [graph[i.id].value for i in graph.inputs]
    assert [v.inner for v in values] == [(N,), (N,), (), (1,), (), (1,)]
    assert [v.spread for v in values] == [True, True, False, False, False, False]
    row, shared, scalar = Varies.ROW, Varies.SHARED, Varies.SCALAR
    assert [v.varies for v in values] == [row, shared, row, row, scalar, scalar]
    assert graph.outputs[0].dtype is torch.bfloat16


def test_dtypes_of_outputs():
    def f(x, y, i):
        return {
            "row": x * y,
            "per_row": x.sum(),
            "declared": x.to(torch.float16) * 2,
            "declared_per_row": x.sum().to(torch.bfloat16),
            "wider": (x.half() + x.bfloat16()),
            "not_after_a_reduction": x.half().sum(),
            "mask": x > 0,
            "count": (x > 0).sum(),
            "integers": i * 2,
            "divided": i / 2,
        }

    specs = [
        Spec("i", Role.ROW, torch.int32, (N,)),
        Spec("x", Role.ROW, torch.bfloat16, (N,)),
        Spec("y", Role.ROW, torch.float32, (N,)),
    ]
    outputs = {o.name: o.dtype for o in trace(f, specs, N).outputs}
    assert outputs == {
        "row": torch.bfloat16, "per_row": torch.float32, "declared": torch.float16,
        "declared_per_row": torch.bfloat16, "wider": torch.float32,
        "not_after_a_reduction": torch.float32, "mask": torch.bool, "count": torch.int64,
        "integers": torch.int32, "divided": torch.bfloat16,
    }  # fmt: skip


def test_dtype_seen_inside():
    def f(x, i, k):
        assert (x.dtype, i.dtype, k.dtype) == (torch.float32, torch.int64, torch.bool)
        assert (x.half() + 1).dtype is torch.float16
        assert x.is_floating_point() and torch.is_floating_point(x)
        return x

    traced(f)


class Pair(NamedTuple):
    left: object
    right: object


STRUCTURES = {
    "single": (lambda x: x, ["out"]),
    "tuple": (lambda x: (x, x.sum()), ["out0", "out1"]),
    "list": (lambda x: [x], ["out0"]),
    "dict": (lambda x: {"y": x, "total": x.sum()}, ["y", "total"]),
    "named tuple": (lambda x: Pair(x, x.sum()), ["left", "right"]),
    "nested": (lambda x: (x, {"a": Pair(x + 1, x), "c": [x]}), ["out0", "out1", "out2", "out3"]),
    "nested names": (lambda x: {"a": Pair(x + 1, x)}, ["a_left", "a_right"]),
    "strange keys": (lambda x: {1: x, "two words": x + 1}, ["out0", "out1"]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    fn, names = STRUCTURES[name]
    assert [o.name for o in traced(fn)[0].outputs] == names
    check(fn)


def test_only_shapes_that_differ_are_broadcast(monkeypatch):
    def refuse(*shapes):
        raise AssertionError(f"broadcasts {shapes}")

    row = Value((N,), Varies.ROW, torch.float32, None, True)
    column = replace(row, varies=Varies.SHARED)
    number, one = (Value(inner, Varies.SCALAR, torch.float32) for inner in ((), (1,)))
    assert INFER[Op.ADD]((one, row), None) == row
    monkeypatch.setattr(ops_, "broadcast_shapes", refuse)
    assert INFER[Op.ADD]((column, row), None) == row
    assert INFER[Op.MUL]((number, column), None) == column
    assert INFER[Op.EXP]((number,), None) == number


def test_kinds_of_parameters():
    def f(x, /, y, *, w, eps=1e-3):
        return x + y * w + eps

    graph, _ = traced(f, eps=(Role.STATIC, 0.5))
    assert 0.5 in [n.arg for n in graph if n.op is Op.CONST]
    specs = [Spec(n, Role.ROW, torch.float32, (N,)) for n in "xyw"]
    assert 1e-3 in [n.arg for n in trace(f, specs, N) if n.op is Op.CONST]


def test_every_entry_arrives_and_has_a_method():
    methods = {n for n in vars(Tensor) if not n.startswith("_")}
    issue = (
        "neg abs sign reciprocal square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos "
        "tanh sigmoid erf relu clamp minimum maximum where floor ceil round trunc isnan isinf "
        "isfinite to type_as sum mean prod amax max amin min var std norm logsumexp any all "
        "softmax log_softmax float half bfloat16 int long bool double"
    )
    assert not set(issue.split()) - methods
    functions = {spelling.rsplit(".", 1)[-1] for spelling, _ in FUNCTIONS.values()}
    functional = "silu gelu softplus hardtanh layer_norm rms_norm normalize zeros_like ones_like"
    assert not set(functional.split()) - functions


def test_every_entry_says_in_its_first_line_what_it_does():
    for spelling, function in FUNCTIONS.values():
        doc = function.__doc__
        assert doc and doc.partition("\n")[0].endswith("."), spelling
        assert inspect.signature(function).parameters
    for name, method in vars(Tensor).items():
        if not name.startswith("_") and name != "requires_grad":
            assert (method.fget if isinstance(method, property) else method).__doc__, name


def test_speed():
    def chain(x):
        for _ in range(250):
            x = torch.exp(x - 1.0)
        return x

    best = min(_seconds(chain) for _ in range(3))
    assert best < 0.15, f"{best * 1e3:.0f} ms for 750 nodes"


def _seconds(fn) -> float:
    """The CPU time of this process, which others on the machine do not lengthen."""
    start = time.process_time()
    traced(fn)
    return time.process_time() - start
