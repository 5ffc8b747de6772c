"""`out=`: results are written where the caller wants them, in place too, or it is refused."""

import re
from typing import NamedTuple

import pytest
import torch

import htile
from htile.errors import ArgumentError, DtypeError, ShapeError, TraceError
from htile.lower.steps import ChunkLoop, Load, Reload, Store
from htile.run.launch import Launch
from htile.run.memory import are_disjoint, overlaps_itself, share_memory
from htile.run.operands import call_key
from htile.run.out import find_aliases
from htile.testing import assert_close
from tests.lower.cases import ARCH, BF16, EXAMPLES, F32
from tests.request_of import request_of

M, N = 4, 8
softmax, _ = EXAMPLES["softmax"]
rmsnorm, _ = EXAMPLES["rmsnorm"]


class Pair(NamedTuple):
    y: torch.Tensor
    total: torch.Tensor


@htile.rowwise
def single(x):
    return x * 2 + 1


@htile.rowwise
def two(x):
    return x * 2, x.sum()


@htile.rowwise
def pair(x):
    return Pair(x * 2, x.sum())


@htile.rowwise
def named(x):
    return {"y": x * 2, "tops": [x.amax(-1, keepdim=True), (x > 0).any()]}


@htile.rowwise
def exchanged(x, y):
    s = (x * y).sum()
    return x - s, y - s


@htile.rowwise
def scaled(x, t: htile.PerRow, s: htile.Scalar = 1.0):
    return x * t * s, x.max()


def rows(*lead, n=N, dtype=F32):
    return torch.randn(*lead, n).to(dtype)


# ---- results arrive ------------------------------------------------------------------------------

STRUCTURES = {
    "one tensor": (single, lambda: rows(M)),
    "tuple": (two, lambda: (rows(M), torch.zeros(M))),
    "named tuple": (pair, lambda: Pair(rows(M), torch.zeros(M))),
    "dict": (named, lambda: {"y": rows(M), "tops": [rows(M, n=1), torch.zeros(M) > 0]}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_users_structure_is_written_and_returned(name):
    function, make = STRUCTURES[name]
    x, out = rows(M), make()
    before = [t.data_ptr() for t in torch.utils._pytree.tree_leaves(out)]
    assert function(x, out=out) is out
    assert [t.data_ptr() for t in torch.utils._pytree.tree_leaves(out)] == before
    assert_close(function, out, x)
    expected = torch.utils._pytree.tree_leaves(function(x))
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(out), expected))


@htile.rowwise
def nested(x):
    return {"y": x * 2, "more": {"z": x * 3, "top": x.max()}}


def test_dicts_are_matched_by_key():
    """That holds for results of one shape and dtype too, which only the key tells apart."""
    x = rows(M)
    for keys in (("y", "z", "top"), ("z", "top", "y"), ("top", "z", "y")):
        made = {"y": rows(M), "z": rows(M), "top": torch.zeros(M)}
        more = {key: made[key] for key in keys if key != "y"}
        for out in ({"y": made["y"], "more": more}, {"more": more, "y": made["y"]}):
            before = list(out), list(more)
            assert nested(x, out=out) is out and (list(out), list(more)) == before
            assert torch.equal(made["y"], x * 2) and torch.equal(made["z"], x * 3)
            assert torch.equal(made["top"], x.amax(-1))
            assert out["y"] is made["y"] and out["more"]["z"] is made["z"]
    x = rows(M)
    expected = x * 3
    nested(x, out={"more": {"top": torch.zeros(M), "z": x}, "y": rows(M)})
    assert torch.equal(x, expected), "in place"


def launched_as(function, args, out, kernel):
    """Have the call go to `kernel` as if that had been launched before."""
    leaves, structure = torch.utils._pytree.tree_flatten(out)
    signature, outs = function._signature, tuple(leaves)
    captured = function._captures.fingerprint()
    key = call_key(captured, signature, args, outs, find_aliases(signature, args, outs))
    inputs = tuple((k, False) for k in range(len(args)))
    results = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    function._launches[key] = Launch(kernel, "", inputs, results, structure, args[0].device, True)


@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_autograd_sees_that_a_result_was_overwritten(path):
    function = htile.rowwise(two._fn)
    x, out = rows(M), (rows(M), torch.zeros(M))
    if path == "kernel":
        launched_as(function, (x,), out, lambda *arguments: None)  # nor does torch see a kernel
    weight = rows(M).requires_grad_()
    loss = (weight * out[0]).sum()
    before = [t._version for t in (x, *out)]
    assert function(x, out=out) is out
    after = [t._version for t in (x, *out)]
    assert after[0] == before[0] and after[1] > before[1] and after[2] > before[2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LAYOUTS = {
    "wider rows": lambda: rows(M, n=N + 5)[:, :N],
    "odd offset": lambda: rows(M, n=N + 5)[:, 3 : N + 3],
    "every second row": lambda: rows(2 * M)[::2],
    "parameter": lambda: torch.nn.Parameter(rows(M), requires_grad=False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_can_be_written(name):
    x, out = rows(M), LAYOUTS[name]()
    around = out.detach().as_strided((out.untyped_storage().nbytes() // 4,), (1,), 0)
    mine = torch.zeros_like(around, dtype=torch.bool)
    mine.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
    before = around.clone()
    assert single(x, out=out) is out
    assert torch.equal(out, x * 2 + 1)
    assert torch.equal(around[~mine], before[~mine]), "nothing else is written"


def test_leading_dimensions_that_cross():
    x, out = rows(2, 3), rows(3, 2).transpose(0, 1)
    assert torch.equal(single(x, out=out), x * 2 + 1)
    total = torch.zeros(3, 2).t()
    y, t = two(x, out=(out, total))
    assert torch.equal(y, x * 2) and t is total
    torch.testing.assert_close(total, x.sum(-1))


def test_no_rows_one_column_one_dimension():
    for x in (rows(0), rows(3, n=1), torch.randn(N), rows(2, 0, 3)):
        out = torch.full_like(x, 7.0)
        assert single(x, out=out) is out and torch.equal(out, x * 2 + 1)


# ---- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_in_place_is_bit_for_bit_what_it_is_elsewhere(dtype):
    x, h, w = rows(M, dtype=dtype), rows(M, dtype=dtype), rows(dtype=dtype)
    expected = softmax(x)
    assert softmax(x, out=x) is x and torch.equal(x, expected)
    x = rows(M, dtype=dtype)
    y, added = rmsnorm(x, w, residual=h)
    result = rmsnorm(x, w, residual=h, out=(x, h))
    assert result[0] is x and result[1] is h
    assert torch.equal(x, y) and torch.equal(h, added)


def test_strides_of_dimensions_of_size_1_do_not_count_in_place():
    x = torch.randn(2, 3, 8)[:1]
    out, right = x.as_strided((1, 3, 8), (7, 8, 1)), softmax(x)
    assert softmax(x, out=out) is out and torch.equal(x, right)


def test_two_rows_that_change_places():
    x, y = rows(M), rows(M)
    expected = exchanged(x, y)
    exchanged(x, y, out=(y, x))
    assert torch.equal(y, expected[0]) and torch.equal(x, expected[1])


def test_one_tensor_given_twice():
    x = rows(M)
    expected = exchanged(x, x)
    out = torch.empty_like(x)
    exchanged(x, x, out=(x, out))
    assert torch.equal(x, expected[0]) and torch.equal(out, expected[1])


@htile.rowwise
def six(a, b, c, d, e, f):
    s = (a * b * c * d * e * f).sum()
    return a - s, b - s, c - s, d - s, e - s, f - s


@pytest.mark.parametrize("n", [4096, 32768, 131072])
@pytest.mark.parametrize("function", [softmax, exchanged, six], ids=lambda f: f.__name__)
def test_in_place_has_the_same_numerics(function, n):
    """Which thread has which element must not depend on where the results go."""
    args = tuple(torch.empty(1, n, dtype=BF16) for _ in function._signature.names)
    def plan(outs):
        request = request_of(function, args, outs)
        assert len(request.aliases) == len(outs)
        return request.lower(ARCH["sm_90a"]).plan

    here, elsewhere = plan((*args[1:], args[0])), plan(())
    assert here.numerics == elsewhere.numerics
    if here.numerics.in_loops:  # a thread writes a chunk after it has read all of it for good
        loops = [step for step in here.steps if isinstance(step, ChunkLoop)]
        assert not any(isinstance(s, Store) for loop in loops[:-1] for s in loop.steps)
        steps = loops[-1].steps
        assert {i for s in steps if isinstance(s, Reload) for i in s.inputs} == set(
            loops[-1].steps[0].inputs
        )
    else:
        steps = here.steps
    stored = [k for k, step in enumerate(steps) if isinstance(step, Store)]
    read = [k for k, step in enumerate(steps) if isinstance(step, (Load, Reload))]
    assert max(read) < min(stored), "all is read before anything is written"


def test_column_slices_of_one_matrix():
    wide = rows(M, n=3 * N)
    x, out = wide[:, :N], wide[:, 2 * N :]
    before = wide.clone()
    single(x, out=out)
    assert torch.equal(out, before[:, :N] * 2 + 1)
    assert torch.equal(wide[:, : 2 * N], before[:, : 2 * N])
    wide = rows(2, 3, n=2 * N + 1)
    y, z = exchanged(wide[..., :N], wide[..., N : 2 * N], out=(wide[..., N : 2 * N], rows(2, 3)))
    assert y.data_ptr() == wide[..., N:].data_ptr() and z.shape == (2, 3, N)


def test_an_argument_that_the_function_does_not_read_may_be_overwritten_in_place_only():
    @htile.rowwise
    def first(x, y):
        return x + 1

    x, y = rows(M), rows(M)
    assert torch.equal(first(x, y, out=y), x + 1)


# ---- hazards -------------------------------------------------------------------------------------

WIDE = torch.randn(M, 2 * N)
FLAT = torch.randn(M * N + M)
X = WIDE[:, :N]
EXPANDED = torch.randn(1, N).expand(M, N)
ONE = "must have the structure that the function returns (1 results: out), got "
TWO = "must have the structure that the function returns (2 results: out0, out1), got "
SHARES = (
    "out= shares memory with {}, but is not exactly an argument that differs from row to row (the "
    "same address, shape and strides); pass a tensor of its own"
)


def sparse(*shape):
    return torch.zeros(*shape).to_sparse()


# name: (function, arguments, out, class, the message from "out=" on)
HAZARDS = {
    "a tuple for one": (single, (X,), (rows(M),), ArgumentError, f"out= {ONE}a tuple of 1"),
    "one for a tuple": (two, (X,), rows(M), ArgumentError, f"out= {TWO}a Tensor"),
    "a list for a tuple": (
        two, (X,), [rows(M), torch.zeros(M)], ArgumentError, f"out= {TWO}a list of 2"
    ),
    "too few": (two, (X,), (rows(M),), ArgumentError, f"out= {TWO}a tuple of 1"),
    "nothing": (single, (X,), (), ArgumentError, f"out= {ONE}a tuple of 0"),
    "other names": (
        named, (X,), {"z": rows(M), "tops": [rows(M, n=1), torch.zeros(M)]}, ArgumentError,
        "out= must have the structure that the function returns (3 results: y, out1, out2), "
        "got a dict of 'z', 'tops'",
    ),
    "a number": (single, (X,), 3, ArgumentError, "out= for out must be a tensor, got int"),
    "a string": (single, (X,), "y", ArgumentError, "out= for out must be a tensor, got str"),
    "None inside": (
        two, (X,), (rows(M), None), ArgumentError, "out= for out1 must be a tensor, got NoneType"
    ),
    "an array": (
        single, (X,), X.numpy(), ArgumentError, "out= for out must be a tensor, got ndarray"
    ),
    "a sparse tensor": (
        single, (X,), sparse(M, N), ArgumentError,
        "out= for out must be a dense tensor, got layout torch.sparse_coo",
    ),
    "shape": (
        single, (X,), rows(M, n=N + 1), ShapeError,
        "out= for out must have shape (4, 8), got (4, 9)",
    ),
    "rank": (
        single, (X,), rows(1, M), ShapeError, "out= for out must have shape (4, 8), got (1, 4, 8)"
    ),
    "shape of one value a row": (
        two, (X,), (rows(M), rows(M, n=1)), ShapeError,
        "out= for out1 must have shape (4,), got (4, 1)",
    ),
    "dtype": (
        single, (X,), rows(M, dtype=BF16), DtypeError,
        "out= for out must be torch.float32, got torch.bfloat16",
    ),
    "device": (
        single, (X,), rows(M).to("meta"), ArgumentError, "out= for out must be on cpu, got meta"
    ),
    "requires grad": (
        single, (X,), rows(M).requires_grad_(), ArgumentError,
        "out= for out requires grad, and writing to it would not be recorded; pass a tensor that "
        "does not, or call under torch.no_grad()",
    ),
    "a negated view": (
        single, (X,), torch._neg_view(rows(M)), ArgumentError,
        "out= for out is a negated view; pass out.resolve_neg()",
    ),
    "strided rows": (
        single, (X,), rows(M, n=2 * N)[:, ::2], ArgumentError,
        "out= for out: the elements of a row must be neighbours in memory, got a last stride of 2",
    ),
    "turned": (
        single, (X,), rows(N, n=M).t(), ArgumentError,
        "out= for out: the elements of a row must be neighbours in memory, got a last stride of 4",
    ),
    "expanded": (
        single, (X,), rows(1).expand(M, N), ArgumentError,
        "out= for out has more than one element at the same address (strides (0, 1)), as an "
        "expanded tensor has; pass a tensor of its own memory",
    ),
    "expanded, in place": (
        single, (EXPANDED,), EXPANDED, ArgumentError,
        "out= for out has more than one element at the same address (strides (0, 1)), as an "
        "expanded tensor has; pass a tensor of its own memory",
    ),
    "rows that overlap": (
        single, (X,), FLAT.as_strided((M, N), (3, 1)), ArgumentError,
        "out= for out has more than one element at the same address (strides (3, 1)), as an "
        "expanded tensor has; pass a tensor of its own memory",
    ),
    "one value a row, expanded": (
        two, (X,), (rows(M), torch.zeros(1).expand(M)), ArgumentError,
        "out= for out1 has more than one element at the same address (strides (0,)), as an "
        "expanded tensor has; pass a tensor of its own memory",
    ),
    "the same twice": (
        exchanged, (rows(M), rows(M)), (WIDE[:, N:], WIDE[:, N:]), ArgumentError,
        "two tensors of out= share memory",
    ),
    "two that overlap": (
        exchanged, (rows(M), rows(M)), (WIDE[:, 1 : N + 1], X), ArgumentError,
        "two tensors of out= share memory",
    ),
    "a row and one value a row of one memory": (
        two, (rows(M),), (X, X[:, 0]), ArgumentError, "two tensors of out= share memory"
    ),
    "a shifted row": (single, (X,), WIDE[:, 1 : N + 1], ArgumentError, SHARES.format("x")),
    "a shifted batch": (
        single, (FLAT[: M * N].view(M, N),), FLAT[M:].view(M, N), ArgumentError, SHARES.format("x")
    ),
    "the rows in another order": (
        single, (FLAT[:64].view(2, 2, 16)[..., :N] if len(FLAT) >= 64 else X.view(2, 2, N),),
        X.view(2, 2, N).transpose(0, 1), ArgumentError, SHARES.format("x"),
    ),
    "a row of another dtype": (
        htile.rowwise(lambda x: (x > 0) & (x < 1)), (X,),
        WIDE.view(torch.bool)[:, :N], ArgumentError, SHARES.format("x"),
    ),
    "a row that is repeated": (
        exchanged, (rows(M), WIDE[:1, :N]), (X, rows(M)), ArgumentError, SHARES.format("y")
    ),
    "an expanded row": (
        single, (WIDE[:1, :N].expand(M, N),), X, ArgumentError, SHARES.format("x")
    ),
    "a column": (
        rmsnorm, (rows(M), WIDE[0, :N]), X, ArgumentError, SHARES.format("weight")
    ),
    "one value a row": (
        scaled, (rows(M), FLAT[:M]), (rows(M), FLAT[1 : M + 1]), ArgumentError, SHARES.format("t")
    ),
    "a number of the device": (
        scaled, (rows(M), torch.ones(M), FLAT[2]), (rows(M), FLAT[:M]), ArgumentError,
        SHARES.format("s"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HAZARDS)
def test_hazard(name):
    function, args, out, kind, message = HAZARDS[name]
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    dense = [t for t in leaves if t.layout is torch.strided and t.device.type == "cpu"]
    before = [t.detach().clone() for t in dense]
    with pytest.raises(kind, match=re.escape(message) + "$") as caught:
        function(*args, out=out)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{function.__name__}: out= ") or "two tensors" in message
    assert all(map(torch.equal, dense, before)), "nothing was written"


def test_grad_mode_off_allows_what_requires_grad():
    x, out = rows(M), rows(M).requires_grad_()
    with torch.no_grad():
        single(x, out=out)
    assert torch.equal(out, x * 2 + 1) and out.requires_grad and out.is_leaf


def test_a_traced_function_calls_no_other_with_out():
    @htile.rowwise
    def outer(x):
        return single(x, out=x)

    with pytest.raises(TraceError, match=r"single\(out=...\) inside a traced") as caught:
        outer(rows(M))
    assert caught.value.loc.text == "return single(x, out=x)"


def test_a_parameter_of_that_name_is_an_argument():
    @htile.rowwise
    def f(x, out):
        return x + out

    x, out = rows(M), rows(M)
    before = out.clone()
    assert torch.equal(f(x, out=out), x + out) and torch.equal(out, before)


def test_every_call_is_checked_not_only_the_first_of_its_kind():
    wide = rows(M, n=2 * N + 1)
    for _ in range(2):
        single(wide[:, :N], out=wide[:, N + 1 :])
        with pytest.raises(ArgumentError, match="shares memory with x"):
            single(wide[:, :N], out=wide[:, N - 1 : 2 * N - 1])


# ---- the two questions, against all addresses ----------------------------------------------------


def addresses(t):
    index = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    return set(index.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def test_shared_memory_is_never_missed():
    generator = torch.Generator().manual_seed(0)

    def pick(*choices):
        return choices[torch.randint(len(choices), (), generator=generator)]

    storage, apart = torch.zeros(400), 0
    for _ in range(4000):
        views = []
        for _ in range(2):
            shape = pick((3, 8), (2, 8), (2, 3, 8), (8,), (3, 1), (0, 8), (3, 4))
            lead = pick((8,), (16,), (32,), (0,), (20,), (1,))
            strides = (pick(32, 48, 64), *lead, pick(1, 1, 1, 2))[-len(shape) :]
            views.append(storage.as_strided(shape, strides, pick(0, 4, 8, 12, 16, 31)))
        a, b = views
        truth = bool(addresses(a) & addresses(b))
        assert share_memory(a, b) == share_memory(b, a) == truth, (a.stride(), b.stride())
        apart += not truth
        doubled = len(addresses(a)) < a.numel()
        assert overlaps_itself(a) >= doubled, (a.shape, a.stride())
    assert apart > 500


def test_columns_of_one_tensor_are_no_shared_memory():
    """Their ranges interleave, and no element is one of both."""
    x, o = rows(M), torch.zeros(M, 2)
    top, total = htile.rowwise(lambda x: (x.max(), x.sum()))(x, out=(o[:, 0], o[:, 1]))
    assert torch.equal(top, x.amax(-1)) and torch.equal(o[:, 0], top) and o[:, 1].equal(total)
    with pytest.raises(ArgumentError, match="two tensors of out= share memory"):
        htile.rowwise(lambda x: (x.max(), x.sum()))(x, out=(o[:, 0], o[:, 0]))


def test_shared_bytes_of_elements_of_other_sizes():
    """The tensors begin at any byte, and no stride need be a multiple of another."""
    generator = torch.Generator().manual_seed(1)

    def bytes_of(t):
        first = torch.arange(800) * t.element_size()
        starts = first.as_strided(t.shape, t.stride()).flatten() + t.data_ptr()
        return {start + k for start in starts.tolist() for k in range(t.element_size())}

    def pick(*choices):
        return choices[torch.randint(len(choices), (), generator=generator)]

    storage, apart, missed = torch.zeros(3000, dtype=torch.int8), 0, 0
    for _ in range(3000):
        views = []
        for _ in range(2):
            dtype = pick(torch.bool, BF16, F32, torch.int64)
            size = dtype.itemsize
            start = size * int(torch.randint(64 // size, (), generator=generator))
            shape = pick((7,), (3, 5), (4, 1), (2, 3, 4), ())
            strides = [int(torch.randint(1, 24, (), generator=generator)) for _ in shape]
            views.append(storage[start:][:2400].view(dtype).as_strided(shape, strides))
        a, b = views
        truth = bool(bytes_of(a) & bytes_of(b))
        assert share_memory(a, b) == share_memory(b, a) == truth, (a.stride(), b.stride())
        apart += not truth
        missed += not truth and not are_disjoint(a, b)
    assert apart > 500 and missed > 200, "many whose ranges cross and whose elements do not"


# ---- parts and elements in place ----------------------------------------------------------------


@htile.rowwise
def swapped(x):
    first, second = x.chunk(2)
    return torch.cat((second, first))


@htile.rowwise
def moved(x):
    return torch.cat((x[2:6], x[4:]))


@htile.rowwise
def less_an_element(x, y: htile.PerRow):
    return x - x[y]


@htile.rowwise
def less_the_counted(x):
    return x - x[(x > 0).sum() % x.shape[-1]]


@htile.rowwise
def less_the_first(x):
    return x - x[0]


def test_parts_that_change_places_in_place():
    x = torch.arange(16.0).view(2, 8)
    expected = torch.cat((x[:, 4:], x[:, :4]), 1)
    assert torch.equal(swapped(x, out=x), expected)


def test_an_element_at_an_index_is_read_before_its_row_is_overwritten():
    x, y = torch.arange(16.0).view(2, 8), torch.tensor([7, 0])
    expected = x - x.gather(1, y[:, None])
    assert torch.equal(less_an_element(x, y, out=x), expected)
    meta = torch.empty(2, 8, device="meta")
    lowered = request_of(less_an_element, (x, y), (x,)).lower(ARCH["sm_90a"])
    text = lowered.source
    assert text.index("load_element") < text.index("wait_for_row") < text.index(".store(")
    assert "wait_for_row" not in less_an_element.inspect(meta, y.to("meta")).source


@htile.rowwise
def counted(x, t: htile.PerRow):
    return x * t, t + 1


@htile.rowwise
def counted_inside(x, t: htile.Inner[1]):
    return x * t.sum(), t + 1


@htile.rowwise
def stepped(x, t: htile.PerRow):
    t = t + 0.1 * ((x * x).mean() - t)
    return x * torch.rsqrt(t), t


@pytest.mark.parametrize("n", [8, 4096, 60000, 300000])
@pytest.mark.parametrize("f", [counted, counted_inside, stepped], ids=lambda f: f.__name__)
def test_a_number_of_each_row_is_read_by_all_threads_before_one_overwrites_it(f, n):
    x, t = rows(M, n=n), torch.rand(M) + 1
    t = t if f is not counted_inside else t[:, None]
    expected, outs = f(x, t), (x, t)
    lowered = request_of(f, (x, t), outs).lower(ARCH["sm_90a"])
    text = lowered.source
    loads, waits = text.index("load_row_value"), text.index("wait_for_row")
    assert loads < waits < min(text.index(".store("), text.index("store_row_value"))
    assert text.count("wait_for_row") == 1 and text.rindex("load_row_value") < waits
    alone = request_of(f, (x, t), (x, torch.empty_like(t))).lower(ARCH["sm_90a"])
    assert "wait_for_row" not in alone.source, "nothing else waits"
    f(x, t, out=outs)
    assert torch.equal(x, expected[0]) and torch.equal(t, expected[1])


def test_the_first_element_of_a_row_in_place():
    x = torch.arange(16.0).view(2, 8)
    assert torch.equal(less_the_first(x, out=x), torch.arange(8.0).expand(2, 8))
    text = request_of(less_the_first, (x,), (x,)).lower(ARCH["sm_90a"]).source
    assert text.index("load_row_value") < text.index("wait_for_row") < text.index(".store(")


@pytest.mark.parametrize("f", [moved, less_the_counted], ids=lambda f: f.__name__)
def test_elements_that_others_would_read_too_late(f):
    """Other threads read the element after a reduction, or hold it in another column."""
    x = torch.randn(2, 8)
    with pytest.raises(ArgumentError, match="overwritten before they are read"):
        f(x, out=x)
    assert f(x).shape == x.shape


def test_a_row_that_is_moved_along_itself_is_not_replaced():
    rolled, x = htile.rowwise(lambda x: x.roll(1, -1) * 2), torch.randn(2, 1000)
    with pytest.raises(ArgumentError, match="overwritten before they are read"):
        rolled(x, out=x)
    assert torch.equal(rolled(x), x.roll(1, -1) * 2)


def test_a_conversion_inside_that_decides_the_dtype_is_named():
    @htile.rowwise
    def gradient(x):
        mask = x > 0
        return torch.softmax(x, -1) - mask.float()

    @htile.rowwise
    def chosen(x):
        p = torch.softmax(x, -1)
        return torch.where(x > 0, p - 1, p)

    x = rows(M, dtype=BF16)
    with pytest.raises(DtypeError, match=r"must be torch.float32, got torch.bfloat16: a conv") as e:
        gradient(x, out=x)
    assert e.value.loc.text == "return torch.softmax(x, -1) - mask.float()"
    expected = gradient(x).to(BF16)
    torch.testing.assert_close(chosen(x, out=x), expected)
