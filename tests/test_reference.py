"""The reference is torch: every operation, its rounding points, its shapes and its structures."""

from __future__ import annotations

import math
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.frontend import reference
from htile.frontend.graph import Builder, Output, Role
from htile.frontend.ops import (
    COMPARISONS,
    MOVEMENTS,
    REDUCTIONS,
    SCANS,
    Op,
    Value,
    Varies,
    compute_dtype,
)
from htile.frontend.reference import EVALUATE

N = 6
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
ROW, SHARED, SCALAR = Varies.ROW, Varies.SHARED, Varies.SCALAR
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan)


class Maker(Builder):
    """Builds small graphs: inputs by role, and outputs whose shape is that of the node."""

    def __init__(self, n=N):
        super().__init__("f", n)

    def input(self, name, role=Role.ROW, dtype=F32, inner=None):
        varies = {Role.ROW: ROW, Role.PER_ROW: ROW, Role.COLUMN: SHARED}.get(role, SCALAR)
        spread = role in (Role.ROW, Role.COLUMN)
        inner = ((self.n,) if spread else ()) if inner is None else inner
        value = Value(inner, varies, compute_dtype(dtype), None, spread)
        return self.add_input(name, role, dtype, value)

    def const(self, number, dtype=F32, inner=()):
        return self.add_const(number, Value(inner, SCALAR, dtype, None, inner == (self.n,)))

    def graph(self, result, dtype=None):
        """The graph that returns `result`, a structure of ids."""
        ids, structure = pytree.tree_flatten(result)
        values = [self[i].value for i in ids]
        outputs = [
            Output(f"out{k}", i, dtype or v.dtype, v.inner, v.spread)
            for k, (i, v) in enumerate(zip(ids, values, strict=True))
        ]
        return self.finish(outputs, structure)


def equal(a, b):
    assert a.dtype is b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    assert a.is_contiguous()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def floats(*shape, seed=0):
    x = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[: min(len(EDGES), x.numel())] = torch.tensor(EDGES)[: x.numel()]
    return x


def sample(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype is BOOL:
        return torch.rand(*shape, generator=generator) > 0.5
    if dtype in (I32, I64):
        numbers = torch.randint(1, 9, shape, generator=generator, dtype=dtype)
        return numbers * (1 - 2 * (torch.arange(shape[-1]) % 2)).to(dtype)
    return floats(*shape, seed=seed)


def test_total():
    assert set(EVALUATE) == set(Op) - {Op.INPUT, Op.CONST, Op.INDEX, Op.LENGTH}


# -------------------------------------------------------------------------------- operations

FLOATING = (
    *(Op.SQRT, Op.RSQRT, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P, Op.SIN),
    *(Op.COS, Op.TANH, Op.SIGMOID, Op.ERF, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC),
)


def one_by_one(function):
    """torch computes elements that are neighbours with other bits; these have none."""

    def apply(*values):
        values = torch.broadcast_tensors(*values)
        elements = zip(*(v.flatten() for v in values), strict=True)
        results = [function(*each) for each in elements]
        return torch.stack(results).reshape(values[0].shape) if results else values[0]

    return apply


UNARY = {
    **{op: (getattr(torch, op.value), (F32,)) for op in FLOATING},
    Op.EXP2: (one_by_one(torch.exp2), (F32,)),
    Op.NEG: (torch.neg, (F32, I32, I64)),
    Op.ABS: (torch.abs, (F32, I32, I64)),
    Op.SIGN: (torch.sign, (F32, I32, I64)),
    Op.FLOOR_LOG2: (lambda x: x.double().log2().floor().float(), (F32,)),
    Op.CEIL_LOG2: (lambda x: x.double().log2().ceil().float(), (F32,)),
    Op.EXPONENT: (lambda x: torch.where(x.isfinite(), torch.frexp(x).exponent, 0), (F32,)),
    Op.NOT: (torch.bitwise_not, (BOOL, I32, I64)),
    Op.BITS: (lambda x: x.view(torch.int32), (F32,)),
    Op.FLOAT_OF: (lambda x: x.view(torch.float32), (I32,)),
}
NUMBERS = (F32, I32, I64)
BINARY = {
    Op.ADD: (torch.add, NUMBERS),
    Op.SUB: (torch.sub, NUMBERS),
    Op.MUL: (torch.mul, NUMBERS),
    Op.DIV: (torch.div, (F32,)),
    Op.FLOORDIV: (torch.floor_divide, NUMBERS),
    Op.MOD: (one_by_one(torch.remainder), NUMBERS),
    Op.POW: (one_by_one(torch.pow), (F32,)),
    Op.MAXIMUM: (torch.maximum, NUMBERS),
    Op.MINIMUM: (torch.minimum, NUMBERS),
    **{op: (getattr(torch, op.value), (*NUMBERS, BOOL)) for op in Op if op in COMPARISONS},
    Op.AND: (torch.bitwise_and, (BOOL, I32, I64)),
    Op.OR: (torch.bitwise_or, (BOOL, I32, I64)),
    Op.XOR: (torch.bitwise_xor, (BOOL, I32, I64)),
    Op.LSHIFT: (torch.bitwise_left_shift, (I32, I64)),
    Op.RSHIFT: (torch.bitwise_right_shift, (I32, I64)),
}


def total(x):
    """The sum of each row, rounded once."""
    return x.sum(-1, dtype=F64 if x.is_floating_point() else x.dtype).to(x.dtype)


def product(x):
    return x.prod(-1, dtype=F64 if x.is_floating_point() else x.dtype).to(x.dtype)


REDUCE = {
    Op.SUM: (total, NUMBERS),
    Op.MEAN: (lambda x: x.double().mean(-1).to(F32), (F32,)),
    Op.PROD: (product, NUMBERS),
    Op.MAX: (lambda x: x.amax(-1), NUMBERS),
    Op.MIN: (lambda x: x.amin(-1), NUMBERS),
    Op.ANY: (lambda x: x.any(-1), (BOOL,)),
    Op.ALL: (lambda x: x.all(-1), (BOOL,)),
}
SCANNED = {
    Op.CUMSUM: (lambda x: x.cumsum(-1, dtype=wide(x)).to(x.dtype), NUMBERS),
    Op.CUMPROD: (lambda x: x.cumprod(-1, dtype=wide(x)).to(x.dtype), NUMBERS),
    Op.SUM_FROM_END: (
        lambda x: x.flip(-1).cumsum(-1, dtype=wide(x)).flip(-1).to(x.dtype), NUMBERS
    ),
    Op.CUMMAX: (lambda x: x.cummax(-1).values, NUMBERS),
    Op.CUMMIN: (lambda x: x.cummin(-1).values, NUMBERS),
    Op.MAX_FROM_END: (lambda x: x.flip(-1).cummax(-1).values.flip(-1), NUMBERS),
    Op.MIN_FROM_END: (lambda x: x.flip(-1).cummin(-1).values.flip(-1), NUMBERS),
    Op.LOGCUMSUMEXP: (lambda x: x.double().logcumsumexp(-1).to(F32), (F32,)),
    Op.LOGSUMEXP_FROM_END: (
        lambda x: x.double().flip(-1).logcumsumexp(-1).flip(-1).to(F32), (F32,)
    ),
}


def wide(x):
    return F64 if x.is_floating_point() else x.dtype


# These have tests of their own.
OTHER = {
    Op.CAST, Op.CONVERT, Op.WHERE, Op.TAKE, Op.GATHER, Op.LOOKUP, Op.UNBUNDLE, Op.BUNDLE, Op.PHILOX,
    Op.WORD, Op.UNIFORM, Op.EXPONENTIAL, Op.KEY, Op.KEY_INDEX, Op.KEY_VALUE, Op.LDEXP, Op.GROUPED,
    Op.STOP, Op.CUSTOM, Op.MATMUL, Op.KTHVALUE, *MOVEMENTS,
}  # fmt: skip


def cases(table):
    return [(op, f, dtype) for op, (f, dtypes) in table.items() for dtype in dtypes]


def test_every_operation_has_a_test():
    assert {*UNARY, *BINARY, *REDUCE, *SCANNED, *OTHER} == set(EVALUATE)
    assert set(REDUCE) == REDUCTIONS and set(SCANNED) == SCANS


def evaluate(graph, tensors, dtype=F32):
    """The graph's results for the rows of `x`."""
    shapes = [t.shape[:-1] for name, t in tensors.items() if name in ("x", "y")]
    return reference.evaluate(graph, tensors, torch.broadcast_shapes(*shapes), dtype)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,), (1,)])
@pytest.mark.parametrize(("op", "f", "dtype"), cases(UNARY))
def test_unary(op, f, dtype, lead):
    b = Maker()
    graph = b.graph(b.add(op, [b.input("x", dtype=dtype)]))
    x = sample(dtype, *lead, N)
    equal(evaluate(graph, {"x": x}), f(x))


@pytest.mark.parametrize("shapes", [((5, N), (5, N)), ((2, 3, N), (3, N)), ((2, 1, N), (3, N))])
@pytest.mark.parametrize(("op", "f", "dtype"), cases(BINARY))
def test_binary(op, f, dtype, shapes):
    b = Maker()
    graph = b.graph(b.add(op, [b.input("x", dtype=dtype), b.input("y", dtype=dtype)]))
    x, y = (sample(dtype, *s, seed=i) for i, s in enumerate(shapes))
    equal(evaluate(graph, {"x": x, "y": y}), f(x, y))


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("lead", [(9,), (2, 3), (), (0,), (1,)])
@pytest.mark.parametrize(("op", "f", "dtype"), cases(REDUCE))
def test_reductions(op, f, dtype, lead, n):
    b = Maker(n)
    result = b.add(op, [b.input("x", dtype=dtype)])
    graph = b.graph((result, b.add(Op.RESHAPE, [result], (1,))))
    x = sample(dtype, *lead, n)
    plain, kept = evaluate(graph, {"x": x})
    equal(plain, f(x))
    equal(kept, f(x).unsqueeze(-1))


@pytest.mark.parametrize("axis", [None, -2, -1])
@pytest.mark.parametrize("lead", [(9,), (2, 3), (), (0,)])
@pytest.mark.parametrize(("op", "f", "dtype"), cases(SCANNED))
def test_scans(op, f, dtype, lead, axis):
    b = Maker()
    x = b.input("x", dtype=dtype)
    cut = b.add(Op.RESHAPE, [x], (1, N)) if axis else x
    if axis == -2:
        cut = b.add(Op.PERMUTE, [cut], (-1, -2))
    result = b.add(op, [cut], axis)
    graph = b.graph(b.add(Op.RESHAPE, [result], (N,)) if axis else result)
    x = sample(dtype, *lead, N)
    equal(evaluate(graph, {"x": x}), f(x))


def test_where():
    b = Maker()
    c, x = b.input("c", dtype=BOOL), b.input("x")
    graph = b.graph(b.add(Op.WHERE, [c, x, b.const(2.5)]))
    x, c = floats(5, N), sample(BOOL, 5, N)
    equal(evaluate(graph, {"x": x, "c": c}), torch.where(c, x, 2.5))


@pytest.mark.parametrize("op", [Op.CAST, Op.CONVERT])
@pytest.mark.parametrize(
    ("source", "to"), [(I64, F32), (I32, F32), (BOOL, I64), (BOOL, F32), (F32, I32), (I32, I64)]
)
def test_conversions(op, source, to):
    b = Maker()
    graph = b.graph(b.add(op, [b.input("x", dtype=source)], to))
    x = sample(source, 5, N).nan_to_num(0, 0, 0)
    equal(evaluate(graph, {"x": x}), x.to(to))


# --------------------------------------------------------------------------- rounding points


@pytest.mark.parametrize("narrow", [BF16, torch.float16])
def test_cast_rounds_in_mid_expression(narrow):
    b = Maker()
    x = b.input("x")
    graph = b.graph(b.add(Op.ADD, [b.add(Op.CAST, [x], narrow), x]))
    x = floats(5, N)
    equal(evaluate(graph, {"x": x}), x.to(narrow).float() + x)
    wide = evaluate(graph, {"x": x.double()}, torch.float64)
    equal(wide, x.to(narrow).double() + x.double())


def test_inputs_are_widened_and_outputs_rounded_once():
    b = Maker()
    x = b.input("x", dtype=BF16)
    graph = b.graph(b.add(Op.EXP, [b.add(Op.MUL, [x, x])]), dtype=BF16)
    x = torch.randn(5, N).to(BF16)
    equal(evaluate(graph, {"x": x}), (x.float() * x.float()).exp().to(BF16))
    equal(evaluate(graph, {"x": x}, torch.float64), (x.double() * x.double()).exp())


def test_cast_to_float32_does_not_round_in_float64():
    b = Maker()
    graph = b.graph(b.add(Op.CAST, [b.input("x")], F32))
    x = torch.randn(5, N, dtype=torch.float64)
    equal(evaluate(graph, {"x": x}, torch.float64), x)


def test_numbers_are_rounded_to_what_they_are_computed_in():
    b = Maker()
    x = b.add(Op.MUL, [b.input("x"), b.const(0.1)])
    graph = b.graph(b.add(Op.ADD, [x, b.input("eps", Role.SCALAR)]))
    x = torch.randn(5, N)
    equal(evaluate(graph, {"x": x, "eps": 0.3}), x * torch.tensor(0.1) + torch.tensor(0.3))
    wide = evaluate(graph, {"x": x, "eps": 0.3}, torch.float64)
    equal(wide, x.double() * 0.1 + 0.3)
    assert evaluate(graph, {"x": x, "eps": 1e300}).isinf().all()


# ------------------------------------------------------------------------- roles and shapes


@pytest.mark.parametrize("lead", [(5,), (N,), (1,), (0,), (2, 3), (N, N), ()])
@pytest.mark.parametrize("n", [N, 1])
def test_roles(lead, n):
    b = Maker(n)
    total = b.input("x")
    for name, role, inner in (
        ("column", Role.COLUMN, None),
        ("kept", Role.PER_ROW, (1,)),
        ("bare", Role.PER_ROW, ()),
        ("number", Role.SCALAR, ()),
        ("zero_d", Role.DEVICE_SCALAR, ()),
        ("one", Role.DEVICE_SCALAR, (1,)),
    ):
        total = b.add(Op.ADD, [total, b.input(name, role, inner=inner)])
    graph = b.graph(total)
    tensors = {
        "x": torch.randn(*lead, n),
        "column": torch.randn(n),
        "kept": torch.randn(*lead, 1),
        "bare": torch.randn(lead),
        "number": 0.5,
        "zero_d": torch.randn(()),
        "one": torch.randn(1),
    }
    x, column, kept, bare, number, zero_d, one = tensors.values()
    expected = x + column + kept + bare.unsqueeze(-1) + number + zero_d + one
    equal(evaluate(graph, tensors), expected)


def test_per_row_broadcasts_to_the_leading_shape():
    b = Maker()
    graph = b.graph(b.add(Op.ADD, [b.input("x"), b.input("p", Role.PER_ROW)]))
    x, p = torch.randn(2, 3, N), torch.randn(3)
    equal(evaluate(graph, {"x": x, "p": p}), x + p[:, None])


def test_outputs_are_expanded_to_the_leading_shape():
    b = Maker()
    b.input("x")
    w = b.input("w", Role.COLUMN)
    graph = b.graph([w, b.add(Op.SUM, [w]), b.const(2, I64)])
    w = torch.randn(N)
    row, summed, two = evaluate(graph, {"x": torch.randn(2, 3, N), "w": w})
    equal(row, w.expand(2, 3, N).contiguous())
    equal(summed, total(w).expand(2, 3).contiguous())
    equal(two, torch.full((2, 3), 2))


def test_lead_of_an_argument_that_is_not_used():
    b = Maker()
    graph = b.graph(b.add(Op.NEG, [b.input("x")]))
    x = torch.randn(1, N)
    equal(evaluate(graph, {"x": x, "y": torch.randn(5, N)}), -x.repeat(5, 1))


def test_a_constant_row_has_n_elements():
    b = Maker()
    b.input("x")
    graph = b.graph(b.add(Op.SUM, [b.const(2.0, inner=(N,))]))
    equal(evaluate(graph, {"x": torch.randn(5, N)}), torch.full((5,), 2.0 * N))


def test_outputs_are_new_tensors():
    b = Maker()
    x = b.input("x")
    x_in = torch.randn(5, N)
    one, two = evaluate(b.graph([x, x]), {"x": x_in})
    assert len({x_in.data_ptr(), one.data_ptr(), two.data_ptr()}) == 3


def test_strided_and_meta_inputs():
    b = Maker()
    x = b.input("x")
    graph = b.graph([b.add(Op.NEG, [x]), b.add(Op.MAX, [x])])
    x = torch.randn(N, 5).t()
    equal(evaluate(graph, {"x": x})[0], -x.contiguous())
    row, largest = evaluate(graph, {"x": torch.empty(5, N, device="meta")})
    assert row.shape == (5, N) and largest.shape == (5,) and row.device.type == "meta"


Pair = namedtuple("Pair", "y total")


def test_structures():
    for make in (
        lambda y, s: y,
        lambda y, s: (y, s),
        lambda y, s: [y, s],
        lambda y, s: {"y": y, "s": s},
        lambda y, s: Pair(y, s),
        lambda y, s: (y, {"s": [s, y]}),
    ):
        b = Maker()
        x = b.input("x")
        graph = b.graph(make(b.add(Op.NEG, [x]), b.add(Op.SUM, [x])))
        x = torch.randn(5, N)
        got, expected = evaluate(graph, {"x": x}), make(-x, total(x))
        assert type(got) is type(expected)
        assert pytree.tree_structure(got) == pytree.tree_structure(expected)
        for a, e in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
            equal(a, e)


def test_softmax_of_a_normalized_row():
    b = Maker()
    x = b.input("x")
    norm = b.add(Op.SQRT, [b.add(Op.SUM, [b.add(Op.MUL, [x, x])])])
    y = b.add(Op.DIV, [x, norm])
    e = b.add(Op.EXP, [b.add(Op.SUB, [y, b.add(Op.MAX, [y])])])
    graph = b.graph(b.add(Op.DIV, [e, b.add(Op.SUM, [e])]))
    x = torch.randn(7, N, dtype=torch.float64)
    expected = torch.softmax(x / x.norm(dim=-1, keepdim=True), -1)
    torch.testing.assert_close(evaluate(graph, {"x": x}, torch.float64), expected)


# ----------------------------------------------------------------- a row's bits, constant rows


def same_bits(a, b):
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


ROWS = {
    **{op.value: getattr(torch, op.value) for op in FLOATING},
    "power": lambda x: (x.abs() ** 1.7, x ** x.abs().max(), 1.3**x, 2**x),
    "modulo": lambda x: (x % 0.7, x // 0.3, 5.0 % x, x % x.max()),
    "larger": lambda x: (x.clamp(-1, 1), x.clamp(min=0.0), x.clamp(max=-0.0), x.max(), x.min()),
    "sums": lambda x: (x.sum(), x.mean(), x.prod(), (x * x).sum(), x.var()),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)),
    "norms": lambda x: (F.layer_norm(x, x.shape), F.rms_norm(x, x.shape), F.normalize(x, dim=-1)),
    "activations": lambda x: (F.silu(x), F.gelu(x), F.mish(x), F.elu(x), F.softplus(x)),
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(19, 1003), (3, 40000)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_bits_depend_on_the_row_alone(name, shape, threads):
    """Neither on the layout, nor on the other rows, nor on the number of threads."""
    body = ROWS[name]
    f = htile.rowwise(lambda x: body(x))
    m, n = shape
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-40, 88.0, -104.0, 127.5])
    x[:, ::7] = special[torch.randint(len(special), x[:, ::7].shape)]
    x[1], x[2, ::2], x[2, 1::2] = x[1].clamp(max=-0.0), 0.0, -0.0
    threads(1)
    expected = pytree.tree_leaves(f(x))
    wide = torch.empty(m, 2 * n)
    wide[:, ::2] = x
    for k in (1, 2, 5):
        threads(k)
        for given, rows in (
            (x, slice(None)),
            (x.t().contiguous().t(), slice(None)),
            (wide[:, ::2], slice(None)),
            (x.repeat(9, 1), slice(-m, None)),
            (x.flip(0), range(m - 1, -1, -1)),
            (torch.cat([torch.ones(3), x.flatten()])[3:].view(m, n), slice(None)),
        ):
            for result, want in zip(pytree.tree_leaves(f(given)), expected, strict=True):
                assert same_bits(result[rows], want)
        for row in range(m):
            for result, want in zip(pytree.tree_leaves(f(x[row])), expected, strict=True):
                assert same_bits(result, want[row])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 100, 1000, 12289, 70001])
@pytest.mark.parametrize("value", [1e6, 123.456, 0.1, -3.3e-20, 1e36, 16777215.0])
def test_a_constant_row_has_its_mean_and_no_variance(n, value):
    f = htile.rowwise(lambda x: (x.mean(), x.mean(-1, keepdim=True), x.var(unbiased=False),
                                 F.layer_norm(x, x.shape)))  # fmt: skip
    x = torch.full((2, n), value)
    mean, kept, variance, normed = f(x)
    assert torch.equal(mean, x[:, 0]) and torch.equal(kept[:, 0], mean)
    assert not variance.any() and not normed.any()


def test_only_three_additions_of_a_sum_round_in_float32():
    x = torch.randn(4, 100001, generator=torch.Generator().manual_seed(0)) * 1e3
    got, exact = htile.rowwise(lambda x: x.sum())(x).double(), x.double().sum(-1)
    bound = 3 * 2.0**-24 * x.double().abs().sum(-1) + 2.0**-24 * exact.abs()
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,), (1,)])
@pytest.mark.parametrize(("op", "f", "dtype"), cases(REDUCE))
def test_groups(op, f, dtype, lead):
    """Each column has what its group of four has."""
    b = Maker(8)
    graph = b.graph(b.add(Op.GROUPED, [b.input("x", dtype=dtype)], (op, 4)))
    x = sample(dtype, *lead, 8)
    groups = x.unflatten(-1, (2, 4))
    equal(evaluate(graph, {"x": x}), f(groups)[..., None].expand(groups.shape).flatten(-2))
