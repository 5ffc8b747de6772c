"""`htile.sum_rows` and `htile.max_rows`: the trace, the reference, the oracle, and refusals."""

import pytest
import torch

import htile
from htile.errors import ArgumentError, DtypeError, TraceError, UnsupportedError
from htile.frontend.ops import Op
from htile.testing import assert_close, float32_errors, oracle

DRAWS = 5  # of data, over which torch's own error is the largest
LEADS = [(), (1,), (5,), (2, 3)]


@htile.rowwise
def statistics(x, w):
    y = torch.softmax(x * w, -1)
    return y, htile.sum_rows(y * x), htile.max_rows(y), htile.sum_rows(y.amax())


@htile.rowwise
def whole_numbers(x):
    return htile.sum_rows(x > 0), htile.sum_rows(x.argmax()), htile.max_rows(x.argmax())


@htile.rowwise
def summed(x):
    return htile.sum_rows(x)


@htile.rowwise
def parts(x):
    a, b = x.chunk(2, -1)
    return {"pair": htile.sum_rows(torch.stack((a, b))), "rest": (a - b, htile.sum_rows(a[0]))}


@pytest.mark.parametrize("lead", LEADS)
def test_values_are_those_of_the_oracle(lead):
    x, w = torch.randn(*lead, 24), torch.randn(24)
    results = statistics(x, w)
    assert [tuple(each.shape) for each in results] == [(*lead, 24), (24,), (24,), ()]
    assert all(each.dtype is torch.float32 for each in results)
    # torch's error of the one number that is the sum of all elements may be small by chance
    draws = [(torch.randn(*lead, 24), torch.randn(24)) for _ in range(DRAWS)]
    errors = [*map(max, *(float32_errors(statistics, *args) for args in draws))]
    assert_close(statistics, results, x, w, torch_errors=errors)


@pytest.mark.parametrize("lead", LEADS)
def test_integers_and_masks_are_added_in_int64(lead):
    x = torch.randn(*lead, 24)
    results = whole_numbers(x)
    assert all(each.dtype is torch.int64 for each in results)
    assert_close(whole_numbers, results, x)
    assert torch.equal(results[0], (x.reshape(-1, 24) > 0).sum(0))


def test_results_of_any_shape_and_structure():
    x = torch.randn(7, 24)
    found = parts(x)
    assert found["pair"].shape == (2, 12) and found["rest"][1].shape == ()
    assert_close(parts, found, x)


def test_the_graph_says_what_is_over_rows():
    x = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")
    kernel = statistics.inspect(x, x[0])
    over = [output.over for output in kernel.traced.outputs]
    assert over == [None, Op.SUM, Op.MAX, Op.SUM]
    assert "as f32 row, sum over all rows" in str(kernel.traced)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_float32_unless_the_result_says_another(dtype):
    @htile.rowwise
    def both(x):
        return htile.sum_rows(x), htile.sum_rows(x).to(x.dtype), htile.sum_rows(x.to(x.dtype))

    x = torch.randn(100, 8).to(dtype)
    results = both(x)
    assert [each.dtype for each in results] == [torch.float32, dtype, torch.float32]
    assert_close(both, results, x)
    assert [each.dtype for each in oracle(both, x)] == [torch.float64] * 3


def test_a_declared_dtype_rounds_the_sum_and_not_its_terms():
    @htile.rowwise
    def narrow(x):
        return htile.sum_rows(x).to(torch.bfloat16)

    x = torch.full((4096, 8), 1.0 + 2**-9)
    assert torch.equal(narrow(x), x.double().sum(0).bfloat16())
    assert_close(narrow, narrow(x), x)


def test_no_rows():
    x = torch.randn(0, 24)
    assert torch.equal(summed(x), torch.zeros(24))
    assert_close(summed, summed(x), x)
    with pytest.raises(ArgumentError, match="out2 is a maximum over all rows, and there are none"):
        statistics(x, torch.randn(24))


def test_a_maximum_of_no_rows_is_refused_with_gradients_too():
    """On a GPU it would be memory that nothing has written to."""
    scaled = htile.rowwise(lambda x, w: (x * w, htile.max_rows(x)))
    x, w = torch.randn(0, 8), torch.randn(8, requires_grad=True)
    with pytest.raises(ArgumentError, match="out1 is a maximum over all rows, and there are none"):
        scaled(x, w)
    with pytest.raises(ArgumentError, match="out1 is a maximum over all rows, and there are none"):
        torch.func.grad(lambda w: scaled(x, w)[0].sum())(w.detach())


def test_a_maximum_keeps_nan():
    x = torch.randn(4, 8)
    x[2, 3] = torch.nan

    @htile.rowwise
    def largest(x):
        return htile.max_rows(x)

    assert torch.equal(largest(x).isnan(), torch.arange(8) == 3)
    assert_close(largest, largest(x), x)


def test_a_maximum_has_no_gradient_yet():
    """A call is refused only where the maximum depends on what requires grad."""
    scaled = htile.rowwise(lambda x, w: (x * w, htile.max_rows(x.abs())))
    fixed = htile.rowwise(lambda x: (x * 2, htile.max_rows(x.detach().abs())))
    x, w = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    scaled(x, w)[0].sum().backward()
    torch.testing.assert_close(w.grad, x.sum(0))
    with pytest.raises(htile.GradientError, match=r"take it of v\.detach\(\)"):
        scaled(x.requires_grad_(), w)
    y, largest = fixed(x)
    assert y.requires_grad and not largest.requires_grad


def test_out():
    x, out = torch.randn(6, 8), torch.empty(8)
    assert summed(x, out=out) is out
    assert torch.equal(out, summed(x))
    with pytest.raises(htile.ShapeError, match=r"must have shape \(8,\), got \(6, 8\)"):
        summed(x, out=torch.empty(6, 8))
    with pytest.raises(ArgumentError, match="shares memory with x"):
        summed(x, out=x[0])


def test_outside_a_trace_it_is_the_sum_over_one_row():
    x = torch.randn(8)
    assert htile.sum_rows(x) is x and htile.max_rows(x) is x
    doubled = torch.vmap(lambda row: htile.sum_rows(2 * row))(torch.ones(3, 8))
    assert torch.equal(doubled, torch.full((3, 8), 2.0))


def test_a_function_that_is_called_by_another():
    @htile.rowwise
    def outer(x):
        return summed(x * 2), x

    x = torch.randn(5, 8)
    assert_close(outer, outer(x), x)


@pytest.mark.parametrize(
    "read",
    [
        lambda s, x: s + 1,
        lambda s, x: x * s,
        lambda s, x: s.exp(),
        lambda s, x: torch.where(x > 0, s, x),
        lambda s, x: torch.stack((s, x)),
        lambda s, x: s[0],
        lambda s, x: s.abs(),
        lambda s, x: s.sum(),
        lambda s, x: htile.sum_rows(s),
        lambda s, x: s.view(2, -1),
        lambda s, x: s.unsqueeze(0),
    ],
)
def test_it_can_only_be_returned(read):
    @htile.rowwise
    def reads(x):
        total = htile.sum_rows(x)
        return read(total, x)

    with pytest.raises(TraceError, match=r"the result of htile\.sum_rows .* can only be returned"):
        reads(torch.randn(4, 8))


def test_it_is_no_operand_of_an_assignment_operator():
    @htile.rowwise
    def changes(x):
        total = htile.max_rows(x)
        total += x
        return total

    with pytest.raises(TraceError, match=r"the result of htile\.max_rows") as found:
        changes(torch.randn(4, 8))
    assert found.value.loc.text == "total += x"


@pytest.mark.parametrize(
    ("function", "of"),
    [
        (lambda x: htile.max_rows(x > 0), "max_rows of bool: convert it, v.int"),
        (lambda x: htile.sum_rows(x.to(torch.int8)), "sum_rows of int8: convert it, v.int"),
        (lambda x: htile.sum_rows(x).to(torch.int32), "not as torch.int32"),
        (lambda x: htile.sum_rows(x > 0).to(torch.float32), "not as torch.float32"),
    ],
)
def test_dtypes_that_are_refused(function, of):
    @htile.rowwise
    def refused(x):
        return function(x)

    with pytest.raises(DtypeError, match=of):
        refused(torch.randn(4, 8))


def test_what_no_row_decides_is_refused():
    @htile.rowwise
    def shared(x, w):
        return x, htile.sum_rows(w)

    with pytest.raises(TraceError, match="does not depend on any row"):
        shared(torch.randn(4, 8), torch.randn(8))


def test_rows_of_any_length_are_refused():
    lazy = htile.rowwise(summed.__wrapped__, dynamic_n=True)
    with pytest.raises(UnsupportedError, match="dynamic_n=True") as found:
        lazy(torch.randn(4, 8))
    assert found.value.loc.text == "return htile.sum_rows(x)"


def test_a_batch_of_vmap_is_refused():
    x = torch.randn(2, 3, 8)
    with pytest.raises(UnsupportedError, match=r"which torch\.vmap would take together"):
        torch.vmap(summed)(x)
    with pytest.raises(UnsupportedError, match=r"which torch\.vmap would take together"):
        torch.vmap(torch.vmap(summed))(x[None])


def test_a_sum_over_rows_has_the_gradient_of_each_row():
    x = torch.randn(4, 8, requires_grad=True)
    g = torch.randn(8)
    assert torch.equal(torch.autograd.grad(summed(x), x, g)[0], g.expand(4, 8))
