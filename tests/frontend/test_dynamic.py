"""Functions of rows of any length: what the length is while tracing, and calls on the CPU."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import ShapeError, TraceError, UnsupportedError
from htile.frontend.dynamic import in_bucket, of_other_bucket
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.frontend.roles import Spec, classify
from htile.frontend.tensor import Length
from htile.frontend.trace import trace
from htile.testing import assert_close
from tests.request_of import request_of
from tests.training import assert_gradients

LENGTHS = (1, 2, 3, 8, 63, 64, 65, 100, 1003)


@htile.rowwise(dynamic_n=True)
def softmax(x):
    return torch.softmax(x, -1)


def arithmetic(x):
    n = x.shape[-1]
    m = n
    m += 1  # as of an int: n stays
    whole, rest = divmod(n, 3)
    return (
        x * n, x / n, n - x, x.sum() * (1 / n), x + n // 2 - m % 3, x * n**0.5, -n * x, x * m,
        x * whole - rest, x + divmod(1000, n)[1],
    )  # fmt: skip


def sizes(x):
    n, (k,) = x.size(-1), x.shape
    rows = torch.zeros(n), torch.ones(x.shape), torch.full((k,), 2.0), torch.ones_like(x)
    one = x.amax().expand(n) + x.sum(-1, keepdim=True).expand(*x.shape) + x.amin().expand_as(x)
    viewed = x.view(n).reshape(x.shape).view(-1).flatten() + sum(rows)
    return one, viewed, x.numel() * x, F.layer_norm(x, x.shape[-1:]), F.rms_norm(x, (n,))


def columns(x, y: htile.PerRow):
    n = x.shape[-1]
    even = torch.arange(n) % 2 == 0
    middle = torch.where(torch.arange(0, n, dtype=torch.int32) == n // 2, x, 0.0)
    back = (n - 1 - torch.arange(n)) * x
    return torch.where(even, x, 0.0), middle, back, F.one_hot(y, n), x[y], x[-1 - y], x[y] * n


def statistics(x):
    biased = x.var(correction=0), x.std(correction=0), torch.var_mean(x, correction=0)[0]
    return *biased, x.mean(), F.mse_loss(x, torch.zeros_like(x)), x.norm(), x.softmax(-1).sum()


def losses(x, y: htile.PerRow):
    return (F.cross_entropy(x, y), F.cross_entropy(x, y, label_smoothing=0.25),
            F.cross_entropy(x, x.softmax(-1), label_smoothing=0.5), F.nll_loss(x, y))  # fmt: skip


def integers(i):
    n = i.shape[-1]
    return i * n, i.sum() // n, i + n, torch.where(i > n, n, i), i.clamp(max=n), (i == n).sum()


FUNCTIONS = (arithmetic, sizes, columns, statistics, losses)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_length_is_that_of_the_call(f):
    """One trace a bucket, and each call has torch's numbers for its own N."""
    function = htile.rowwise(f, dynamic_n=True)
    for n in LENGTHS:
        torch.manual_seed(n)
        args = [torch.randn(5, n)]
        if "y" in function._signature.names:
            args.append(torch.arange(5) % n)
        assert_close(function, function(*args), *args)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_beside_integers_it_is_an_int(dtype):
    """So int32 stays int32, as beside a number of Python's."""
    function, plain = (htile.rowwise(integers, dynamic_n=d) for d in (True, False))
    for n in (2, 7, 64, 65):
        i = torch.arange(3 * n, dtype=dtype).view(3, n) - n
        found, expected = function(i), plain(i)
        assert [(a.dtype, a.shape) for a in found] == [(b.dtype, b.shape) for b in expected]
        assert all(map(torch.equal, found, expected))


def test_what_a_length_is_equal_to():
    @htile.rowwise(dynamic_n=True)
    def f(x, w):
        n = x.shape[-1]
        assert n == w.shape[-1] and x.shape == w.shape and (n != w.size(0)) is False
        assert isinstance(n, Length) and x.shape.numel() == n and x.ndim == 1
        assert x.sum().shape == () and x.sum(-1, keepdim=True).shape == (1,)
        assert x.topk(2).values.shape == (2,)
        return x * w

    assert torch.equal(f(torch.ones(2, 3), torch.ones(3)), torch.ones(2, 3))


NUMBERS = {
    "range": lambda x: sum(x * k for k in range(x.shape[-1])),
    "an index of a list": lambda x: x * [1, 2, 3][x.shape[-1]],
    "int": lambda x: x * int(x.shape[-1]),
    "float": lambda x: x * float(x.shape[-1]),
    "if": lambda x: x if x.shape[-1] else -x,
    "a comparison": lambda x: x if x.shape[-1] > 3 else -x,
    "min": lambda x: x * min(x.shape[-1], 5),
    "topk": lambda x: x.topk(x.shape[-1]).values,
    "a format": lambda x: x if f"{x.shape[-1]:d}" else -x,
    "len": lambda x: x * len(x),
    "linspace": lambda x: x * torch.linspace(0, 1, x.shape[-1]),
    "backwards": lambda x: x * torch.arange(x.shape[-1], 0, -1),
    "half": lambda x: x * torch.arange(x.shape[-1] // 2),
    "a constant": lambda x: x * torch.zeros(64),
    "a view of many": lambda x: x.view(64),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_it_is_no_number(what):
    f = htile.rowwise(NUMBERS[what], dynamic_n=True)
    for n in (64, 50):  # also where the number would be the capacity
        with pytest.raises((TraceError, UnsupportedError, ShapeError)) as raised:
            f(torch.ones(2, n))
        assert raised.value.loc is not None and raised.value.loc.file == __file__


CUT = {
    "a part": lambda x: x[2:],
    "a step": lambda x: x[::2],
    "halves": lambda x: x.chunk(2)[0],
    "unbind": lambda x: x.unbind()[0],
    "flip": lambda x: x[None].expand(2, x.shape[-1]).sum(0),
    "cat": lambda x: torch.cat((x, x)),
    "stack": lambda x: torch.stack((x, x)).sum(0),
    "groups": lambda x: x.unflatten(-1, (2, -1)).sum(-1),
    "a new axis": lambda x: x[None].sum(0),
    "sort": lambda x: x.sort().values,
    "a matrix": lambda x: (x[:, None] * x).sum(0),
}


@pytest.mark.parametrize("what", CUT)
def test_only_whole_rows(what):
    f = htile.rowwise(CUT[what], dynamic_n=True)
    with pytest.raises(UnsupportedError, match="dynamic_n=True") as raised:
        f(torch.ones(2, 64))
    assert raised.value.loc is not None and raised.value.loc.file == __file__


def test_one_trace_for_each_bucket(monkeypatch):
    from htile.run import specialize

    traces, trace = [], specialize.trace
    monkeypatch.setattr(
        specialize, "trace", lambda *args: traces.append(args[2:4]) or trace(*args)
    )
    f = htile.rowwise(lambda x: x * 2, dynamic_n=True)
    for n in (100, 65, 128, 72, 66, 129, 1, 2, 64, 100, 1):
        assert f(torch.ones(3, n)).shape == (3, n)
    assert traces == [
        (128, 4), (96, 1), (96, 4), (192, 1), (1, None), (64, 1), (64, 4),
    ]  # fmt: skip


def test_topk_of_as_many_as_there_are_has_no_number():
    f = htile.rowwise(lambda x: x.topk(x.shape[-1]).values, dynamic_n=True)
    with pytest.raises(TraceError, match="no Python number"):
        f(torch.randn(2, 100))


def test_rows_of_one_element_are_as_without_it():
    """There a part is as long as the row, and must not be taken for one."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    for f in (
        lambda x: torch.stack((x, 2 * x)).sum(0), lambda x: torch.stack((x, 2 * x)).argmax(0),
        lambda x: torch.cat((x, 2 * x)).sum(), lambda x: torch.cat((x, 2 * x)), lambda x: x[None],
        lambda x: torch.stack((x, 2 * x)).cumsum(0).sum(0), lambda x: x * x.shape[-1],
    ):  # fmt: skip
        expected = torch.stack([f(row) for row in x])
        for any_n in (False, True):
            found = htile.rowwise(f, dynamic_n=any_n)(x)
            assert found.shape == expected.shape and torch.equal(found, expected)


OF_FEW = {
    "an element": lambda x, y: x[y],
    "elements": lambda x, y: torch.stack((x[y], x[-1 - y])),
    "a sum": lambda x, y: x.sum(-1, keepdim=True),
    "statistics": lambda x, y: (x.mean(), torch.stack((x.sum(), x.amax()))),
    "the largest": lambda x, y: x.topk(1).values,
    "the first of the largest": lambda x, y: (x.topk(3).indices.amin(), x.topk(3).values),
}


def few_numbers(name):
    """A function of rows of any length, and of an index of each, of those above."""
    body = OF_FEW[name]

    @htile.rowwise(dynamic_n=True)
    def f(x, y: htile.PerRow):
        return body(x, y)

    return f


@pytest.mark.parametrize("name", OF_FEW)
def test_rows_of_which_a_few_numbers_come(name):
    """Their gradients are as long as the rows, and a kernel has the rows' length."""
    f = few_numbers(name)
    for n in (3, 100, 1003):
        x, y = torch.randn(5, n), torch.arange(5) % n
        assert_close(f, f(x, y), x, y)
        assert_gradients(f, x.requires_grad_(), y)
        kernel = f.inspect(x.to("meta"), y.to("meta"), arch="sm_90a")
        assert kernel.graph.n >= n and kernel.backward.graph.n >= n


def test_a_row_is_kept_for_its_length_only_if_no_other_is_read():
    x = torch.empty(5, 100, device="meta")
    for function, kept in ((lambda x: x * 2, []), (lambda x: x.sum() * 2, ["x"])):
        assert [*htile.rowwise(function, dynamic_n=True).inspect(x, arch="sm_90a").saved] == kept


def test_buckets_of_dtypes():
    """Whole vectors are those of the widest rows."""
    f = htile.rowwise(lambda x, y: x * y, dynamic_n=True)
    for x, y, n, multiple in (
        (torch.bfloat16, torch.bfloat16, 72, 8), (torch.bfloat16, torch.float32, 68, 4),
        (torch.bool, torch.bool, 80, 16), (torch.float32, torch.int64, 66, 2),
        (torch.bfloat16, torch.bfloat16, 68, 1),
    ):  # fmt: skip
        args = [torch.empty(2, n, dtype=dtype, device="meta") for dtype in (x, y)]
        call = request_of(f, args).call
        assert (call.n, call.multiple, call.length) == (96, multiple, n)
        assert f.inspect(*args).graph.multiple == multiple


def test_what_is_of_a_bucket():
    """The text that shortcuts have is true for exactly the other lengths."""
    signature = softmax._signature
    for n in (2, 64, 65, 68, 96, 100, 128, 4096):
        call = in_bucket(signature, classify(signature, (torch.empty(2, n, device="meta"),)))
        text = of_other_bucket("k", call, softmax.inspect(torch.empty(2, n)).traced)
        for k in range(1, 300):
            other = in_bucket(signature, classify(signature, (torch.empty(2, k, device="meta"),)))
            same = (other.n, other.multiple) == (call.n, call.multiple)
            assert bool(eval(text, {"k": k})) != same, (n, k, text)


def test_leading_dimensions_broadcasts_and_values_of_rows():
    @htile.rowwise(dynamic_n=True)
    def f(x, y, w, t, label: htile.PerRow, scale: float = 2.0, flag: bool = True):
        z = x * y + w * t * scale
        return (z if flag else x), z[label]

    for n in (1, 5, 64, 77):
        x, y, w = torch.randn(3, 1, 4, n), torch.randn(4, n), torch.randn(n)
        t, label = torch.randn(3, 2, 4, 1), torch.arange(24).view(3, 2, 4) % n
        for more in ((), (0.5,), (0.5, False)):
            args = (x, y, w, t, label, *more)
            assert_close(f, f(*args), *args)


def test_one_row_no_rows_and_no_elements():
    x = torch.randn(77)
    assert_close(softmax, softmax(x), x)
    assert softmax(torch.empty(0, 77)).shape == (0, 77)
    assert softmax(torch.empty(3, 0, 64)).shape == (3, 0, 64)
    with pytest.raises(ShapeError, match="no elements"):
        softmax(torch.empty(3, 0))


def test_out_vmap_and_calls_of_each_other():
    x = torch.randn(3, 4, 77)
    y = torch.empty_like(x)
    assert softmax(x, out=y) is y and torch.equal(y, softmax(x))
    assert softmax(y, out=y) is y and torch.equal(y, softmax(softmax(x)))
    assert torch.equal(torch.vmap(softmax)(x), softmax(x))

    @htile.rowwise(dynamic_n=True)
    def twice(x):
        return softmax(softmax(x)) * x.shape[-1]

    assert_close(twice, twice(x), x)
    with pytest.raises(ShapeError, match=r"must have shape \(3, 4, 77\)"):
        softmax(x, out=torch.empty(3, 4, 128))


def test_it_is_inspected_and_copied_as_others():
    x = torch.empty(4, 1000, dtype=torch.bfloat16, device="meta")
    kernel = softmax.inspect(x)
    assert kernel.graph.n == 1024 and kernel.plan.target.n == 1024
    assert "N <= 1024" in f"{kernel!r}{kernel.plan}{kernel.graph}{kernel.source}"
    assert kernel.cost(64).time > 0
    wide = softmax.with_plan(threads_per_row=128)
    assert wide.inspect(x).plan.numerics.threads_per_row == 128
    assert wide.inspect(x).graph.multiple == 8
    assert copy.deepcopy(softmax) is softmax and pickle.loads(pickle.dumps(softmax)) is softmax
    assert any(i.role is Role.ROW for i in kernel.graph.inputs)


def test_a_function_of_a_length_that_is_fixed_has_ints():
    seen = []

    def f(x):
        seen.extend([x.shape, x.size(0)])
        return x * x.shape[-1]

    graph = trace(f, [Spec("x", Role.ROW, torch.float32, (77,))], 77)
    assert seen == [torch.Size([77]), 77] and type(seen[0]) is torch.Size and type(seen[1]) is int
    assert graph.multiple is None and not any(node.op is Op.LENGTH for node in graph)


@pytest.mark.parametrize("n", [40, 62, 64, 70, 96, 1003])
def test_an_element_by_its_rank_counts_what_the_call_has(n):
    """The bucket of rows of 62 elements is of 64, the 40th of which is not the 25th from behind."""
    f = htile.rowwise(dynamic_n=True)(lambda x: (x.kthvalue(2).values, x.kthvalue(40).values))
    x = torch.randn(3, n)
    assert all(map(torch.equal, f(x), (x.kthvalue(2).values, x.kthvalue(40).values)))


@pytest.mark.parametrize("n", [2, 3, 20, 63, 64, 65, 100])
def test_ranks_in_rows_that_are_shorter_than_their_bucket(n):
    f = htile.rowwise(dynamic_n=True)(
        lambda x: (x.median(), x.nanmedian(), x.quantile(0.3), x.int().median())
    )
    x = torch.randn(3, n) * 9
    median = x.median(-1).values
    expected = median, median, x.double().quantile(0.3, -1), x.int().median(-1).values
    for found, wanted in zip(f(x), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-6, atol=1e-6)


def filled(x, k: htile.PerRow):
    return x.index_fill(-1, k[None], 1.0)


def test_an_index_from_the_end_is_filled_in_rows_of_any_length():
    f = htile.rowwise(dynamic_n=True)(filled)
    x, k = torch.zeros(2, 500), torch.tensor([-249, -1])
    assert f(x, k).nonzero().tolist() == [[0, 251], [1, 499]]


OF_THE_BUCKET = {  # numbers that mean all of the longest rows, and not all of the others
    "roll": lambda x: x.roll(64),
    "roll twice": lambda x: x.roll(-128),
    "narrow": lambda x: x.narrow(0, 0, 64) * 2,
    "pad": lambda x: F.pad(x, (0, -x.shape[-1] % 32)).sum(),
}


@pytest.mark.parametrize("n", [50, 64])
@pytest.mark.parametrize("name", OF_THE_BUCKET)
def test_a_number_is_not_taken_for_the_length_of_the_bucket(name, n):
    f = htile.rowwise(OF_THE_BUCKET[name], dynamic_n=True)
    with pytest.raises(UnsupportedError, match="dynamic_n=True") as raised:
        f(torch.randn(2, n))
    assert raised.value.loc is not None and raised.value.loc.file == __file__


def test_a_row_that_is_moved_by_nothing_is_whole():
    f, x = htile.rowwise(lambda x: x.roll(0, -1) + 1, dynamic_n=True), torch.randn(2, 50)
    assert torch.equal(f(x), x + 1)


AT = {
    "the last": lambda x: x - x[-1],
    "the first": lambda x: x * x[0],
    "of what is computed": lambda x: x * (x - x.mean())[..., -2],
    "as often as there are places": lambda x: x[[1, -1]],
    "of integers": lambda x: x.int()[2] + x.int(),
    "of a mask": lambda x: (x > 0)[-3],
}


@pytest.mark.parametrize("n", [3, 4, 63, 64, 65, 1003])
@pytest.mark.parametrize("name", AT)
def test_an_element_at_a_place_is_that_of_the_call(name, n):
    f = htile.rowwise(AT[name], dynamic_n=True)
    x = torch.randn(5, n) * 9
    expected = torch.stack([AT[name](row) for row in x])
    assert f(x).dtype is expected.dtype
    torch.testing.assert_close(f(x), expected)
    assert not f.inspect(x.to("meta"), arch="sm_90a").resources.stack
    if name in ("the last", "of what is computed"):
        assert_gradients(f, x.requires_grad_())


def changed_through_an_element(x):
    x[0].mul_(2)
    return x * 1


def changed_element(x):
    x = x.clone()
    y = x[-1]
    y += 1
    return x + y


def changed_row(x):
    x = x.clone()
    y = x[-1]
    x.mul_(3)
    return x + y


@pytest.mark.parametrize("f", [changed_through_an_element, changed_element, changed_row])
def test_an_element_at_a_place_shares_memory_with_its_row(f):
    """In torch the change of one is that of the other, so it is refused, and never lost."""
    with pytest.raises(TraceError, match="may share memory"):
        htile.rowwise(f, dynamic_n=True)(torch.ones(2, 6))


@pytest.mark.parametrize("body", [lambda x: x[3], lambda x: x[-4] * x])
def test_rows_without_an_element_at_a_place_are_refused(body):
    f = htile.rowwise(body, dynamic_n=True)
    f(torch.ones(2, 4))
    with pytest.raises(ShapeError, match="rows of 3 elements, of which the function takes 4"):
        f(torch.ones(2, 3))
    with pytest.raises(ShapeError):
        f(torch.ones(2, 1))


PLAIN = {
    "if": (lambda x: x if x.shape[-1] > 4 else -x, "the length of a row differs"),
    "if of a rest": (lambda x: x if x.shape[-1] % 2 == 0 else -x, "the length of a row differs"),
    "max": (lambda x: x * max(x.shape[-1], 4), "the length of a row differs"),
    "int of a half": (lambda x: x * int(x.shape[-1] / 2), "the length of a row differs"),
    "format": (lambda x: f"{x.shape[-1]:d}", "the length of a row differs"),
    "format of a half": (lambda x: f"{x.shape[-1] / 2:.1f}", "the length of a row differs"),
    "sizes": (lambda x: x.view(3, x.shape[-1]), "the sizes (3, n)"),
    "a number": (lambda x: x + torch.tensor([1.0, 2.0]), "shapes (2,) and (n,) do not"),
    "shares": (lambda x: F.cross_entropy(x, x[[0, 1]]), "of shape (n,) with shares of shape (2,)"),
    "topk": (lambda x: x.topk(200), "k is a number from 1 to the length of the row"),
    "repeats": (lambda x: x.repeat_interleave(x.shape[-1]), "by the length of a row"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_messages_have_no_words_of_the_trace(name):
    """Neither numbers of nodes, nor the class of a length, nor the capacity of a bucket."""
    body, words = PLAIN[name]
    with pytest.raises((TraceError, ShapeError, UnsupportedError)) as caught:
        htile.rowwise(body, dynamic_n=True)(torch.ones(2, 70))
    assert words in caught.value.message
    assert not any(word in caught.value.message for word in ("%", "Tensor(", "Length", "96"))


EQUAL = {  # numbers of the user's that are the capacity, beside rows of any length
    "one size": (lambda x: x.view(96), "the sizes (96,)"),
    "places": (lambda x: x[[0] * 96], "96 parts of one axis"),
    "sizes": (lambda x: x.view(x.shape[-1], 96), "the sizes (n, 96)"),
    "elements": (lambda x: x.topk(96), "topk of 96 elements"),
    "an axis": (lambda x: x.unflatten(-1, (96, 2)), "unflatten(-1, (96, 2)) of a value"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_number_that_equals_the_capacity_is_told_as_it_is(name):
    body, words = EQUAL[name]
    with pytest.raises((TraceError, ShapeError, UnsupportedError)) as caught:
        htile.rowwise(body, dynamic_n=True)(torch.ones(2, 70))
    assert words in caught.value.message


def test_a_graph_has_the_capacity_where_its_trace_shows_n():
    def f(x, w):
        return x * w + x[-1] + x.amax().expand(x.shape[-1]), x.sum(), x.view(-1).argmax()

    specs = [Spec("x", Role.ROW, torch.float32, (96,)), Spec("w", Role.COLUMN, torch.int32, (96,))]
    graph = trace(f, specs, 96, 1)
    told = repr([(node.arg, node.value.inner) for node in graph])
    told += repr([out.inner for out in graph.outputs]) + repr(graph.n)
    assert "96" in told and re.search(r"\bn\b", told) is None


def test_what_is_printed_while_tracing_has_no_capacity():
    seen = []

    def f(x):
        seen.extend((f"{x.shape}", f"{x.shape[-1]}", str(x.exp())))
        return x

    trace(f, [Spec("x", Role.ROW, torch.float32, (96,))], 96, 1)
    assert seen[:2] == ["(n,)", "n"] and "row f32[n]" in seen[2]


def test_a_branch_on_data_is_told_as_without_it():
    f = htile.rowwise(lambda x: x if x.sum() > x.shape[-1] else -x, dynamic_n=True)
    with pytest.raises(TraceError, match="the truth of a symbolic value"):
        f(torch.ones(2, 9))


PIECES = {
    "split": lambda x: x.split(10)[0] * 2,
    "chunk": lambda x: x.chunk(2)[0] * 2,
    "tensor_split": lambda x: x.tensor_split(2)[0] * 2,
    "unbind": lambda x: x.unbind()[0] * x,
    "unfold": lambda x: x.unfold(-1, 4, 1).sum(-1),
}


@pytest.mark.parametrize("name", PIECES)
def test_rows_of_any_length_are_not_cut_into_pieces(name):
    with pytest.raises(UnsupportedError, match="a part of a row of any length"):
        htile.rowwise(PIECES[name], dynamic_n=True)(torch.randn(2, 20))
