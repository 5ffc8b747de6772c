"""The measure itself: the oracle against torch by hand, and errors that it must find."""

import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile import testing
from htile.testing import assert_close, oracle, ulp
from tests.lower.cases import BF16, EXAMPLES, F16, F32


@htile.rowwise
def scaled(x, w, t: htile.PerRow, s: float, mode: str = "mul"):
    assert x.ndim == 1 or isinstance(x, torch.Tensor)
    y = x * w * t * s
    return {"y": y if mode == "mul" else -y, "n": (y > 0).sum(), "top": y.amax(-1, keepdim=True)}


def arguments(*lead, n=9):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(*lead, n, generator=g)
    return x, torch.randn(n, generator=g), torch.rand(lead, generator=g), 1.5


@pytest.mark.parametrize("lead", [(4,), (2, 3), (1,), (0,), (0, 3)])
def test_the_oracle_is_the_function_of_each_row(lead):
    x, w, t, s = arguments(*lead)
    result = oracle(scaled, x, w, t, s, mode="neg")
    y = x.double() * w.double() * t.double()[..., None] * s
    assert list(result) == ["y", "n", "top"]
    assert (result["y"].dtype, result["n"].dtype) == (torch.float64, torch.int64)
    assert torch.equal(result["y"], -y)
    assert torch.equal(result["n"], (y > 0).sum(-1))
    top = y.amax(-1, keepdim=True)
    assert result["top"].shape == top.shape and torch.equal(result["top"], top)


def test_chunks_change_nothing(monkeypatch):
    args = arguments(11)
    whole = oracle(scaled, *args)
    monkeypatch.setattr(testing, "CHUNK", 9 * 3)
    parts = oracle(scaled, *args)
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_the_oracle_runs_in_the_dtype_that_is_asked_for():
    args = arguments(3)
    assert oracle(scaled, *args, dtype=F32)["y"].dtype is F32
    x = torch.full((1, 3), 1e30)
    square = htile.rowwise(lambda x: x * x)
    assert oracle(square, x).isfinite().all() and oracle(square, x, dtype=F32).isinf().all()


def test_broadcast_and_shared_operands():
    f = htile.rowwise(lambda x, y, w: x + y * w)
    x, y, w = torch.randn(2, 3, 5), torch.randn(3, 5), torch.randn(5)
    assert torch.equal(oracle(f, x, y, w), x.double() + y.double() * w.double())


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("value", [1.0, 1.5, 1.99, 2.0, 3e-3, 700.0])
def test_ulp_is_the_distance_to_the_neighbour(dtype, value):
    number = torch.tensor(value, dtype=dtype)
    neighbour = torch.nextafter(number.float(), torch.tensor(math.inf)) if dtype is F32 else None
    if neighbour is None:
        neighbour = (number.view(torch.int16) + 1).view(dtype).float()
    distance = neighbour.double() - number.double()
    assert ulp(number.double(), dtype).item() == distance.item()


def test_ulp_of_zero_is_that_of_the_smallest_normal():
    for dtype in (F16, BF16, F32):
        info = torch.finfo(dtype)
        assert ulp(torch.tensor(0.0), dtype).item() == info.eps * info.smallest_normal


# what is done to a right result, and whether it must be found
def change(at, how):
    def apply(out):
        out = out.clone()
        out[at] = how(out[at])
        return out

    return apply


EXP = htile.rowwise(lambda x: torch.exp(x - x.amax()))
TOP = 2.0**-23  # one ulp below 2 of float32
WRONG = {
    "three ulp": change((0, 0), lambda v: v + 3.0 * TOP),
    "a factor": lambda out: out * 1.001,
    "NaN": change((1, 2), lambda v: v * math.nan),
    "infinity": change((1, 2), lambda v: v * math.inf),
    "one row": change(1, lambda v: v.flip(0)),
    "shape": lambda out: out[:, :-1],
    "rank": lambda out: out[None],
    "two results": lambda out: (out, out),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_found(name):
    x = torch.linspace(-1, 0, 12).reshape(2, 6)
    right = EXP(x)
    assert assert_close(EXP, right, x) <= 1
    with pytest.raises(AssertionError):
        assert_close(EXP, WRONG[name](right), x)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rounding_twice_is_allowed_and_four_times_is_not(dtype):
    x = torch.rand(3, 40).add(1).to(dtype)
    f = htile.rowwise(lambda x: x * 1.0)
    step = torch.finfo(dtype).eps  # 1 ulp in [1, 2)
    assert assert_close(f, (x.double() + step).to(dtype), x) <= 1
    with pytest.raises(AssertionError, match=r"times the bound"):
        assert_close(f, (x.double() + 4 * step).to(dtype), x)


def test_integers_and_bools_must_be_equal():
    f = htile.rowwise(lambda x: (x > 0, (x > 0).sum()))
    x = torch.tensor([[1.0, -1.0, 2.0]])
    positive, count = f(x)
    assert assert_close(f, (positive, count), x) == 0
    with pytest.raises(AssertionError, match="result 0 of <lambda>: 3 of 3 elements differ"):
        assert_close(f, (~positive, count), x)
    with pytest.raises(AssertionError, match="result 1 of <lambda>: 1 of 1 elements differ"):
        assert_close(f, (positive, count + 1), x)


def test_specials_must_be_where_the_oracle_has_them():
    f = htile.rowwise(lambda x: torch.log(x))
    x = torch.tensor([[1.0, 0.0, -1.0, math.inf, math.nan]])
    right = f(x)
    assert right.isnan().tolist() == [[False, False, True, False, True]]
    assert_close(f, right, x)
    for index, value in ((1, math.inf), (2, 0.0), (3, 1e38), (0, math.nan), (4, math.inf)):
        wrong = right.clone()
        wrong[0, index] = value
        with pytest.raises(AssertionError):
            assert_close(f, wrong, x)


def test_what_overflows_the_result_is_infinite_there():
    f = htile.rowwise(lambda x: x * 4.0)
    x = torch.tensor([[30000.0, 1.0]], dtype=F16)
    assert f(x).isinf().tolist() == [[True, False]]
    assert_close(f, f(x), x)


def test_a_power_of_two_may_be_the_next_but_no_other():
    """float8_e8m0fnu has nothing between."""
    f = htile.rowwise(lambda x: x.to(torch.float8_e8m0fnu))
    x = torch.tensor([[1.0, 3.0, 1e-3, float("nan"), 1e30]])
    right = f(x)
    assert assert_close(f, right, x) == 0
    assert_close(f, (right.float() * 2).to(right.dtype), x)
    for wrong in (right.float() * 4, right.float() / 4, right.float().nan_to_num(nan=1.0)):
        with pytest.raises(AssertionError):
            assert_close(f, wrong.to(right.dtype), x)


def test_empty_results_are_right():
    function, make = EXAMPLES["capped_softmax"]
    args = make(0, 5, BF16, "cpu")
    assert assert_close(function, function(*args), *args) == 0.0


@pytest.mark.parametrize(
    "f",
    [
        lambda x: -(x.float().softmax(-1) * x.float().log_softmax(-1)).sum(),
        lambda x: -(x.softmax(-1, dtype=F32) * x.to(F32).log_softmax(-1)).sum(),
        lambda x: -torch.sum(x.softmax(-1) * x.type(F32).log_softmax(-1), -1, dtype=F32),
    ],
    ids=["float()", "to(float32)", "type(float32)"],
)
def test_the_oracle_stays_exact_where_a_function_asks_for_float32(f):
    x = torch.randn(5, 4097, generator=torch.Generator().manual_seed(3)) * 2
    p = x.double().softmax(-1)
    exact = -(p * p.log()).sum(-1)
    f = htile.rowwise(f)
    found = oracle(f, x)
    assert found.dtype is torch.float64 and (found - exact).abs().max() < 1e-12
    assert testing.float32_errors(f, x)[0] > 0
    assert_close(f, f(x), x)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_close(f, f(x) * (1 + 1e-5), x)


def test_bits_of_float32_stay_bits():
    x = torch.tensor([[1.0, -2.0, 0.1]])
    f = htile.rowwise(lambda x: (x.view(torch.int32) ^ 1).view(F32))
    assert torch.equal(oracle(f, x), (x.view(torch.int32) ^ 1).view(F32))


def test_functions_of_torch_that_look_at_their_arguments():
    args = [torch.rand(3, 8, generator=torch.Generator().manual_seed(k)) + 0.1 for k in range(3)]
    f = htile.rowwise(lambda mean, y, var: torch.nn.functional.gaussian_nll_loss(mean, y, var))
    exact = oracle(f, *args)
    mean, y, var = (each.double() for each in args)
    assert torch.allclose(exact, (((mean - y) ** 2 / var + var.log()) / 2).mean(-1), rtol=1e-12)
    assert_close(f, f(*args), *args)


OF_CONSTANTS = {
    "layer_norm": lambda x: F.layer_norm(x.float(), (16,), torch.ones(16), torch.zeros(16)),
    "dot": lambda x: torch.dot(x.float(), torch.ones(16)),
    "lerp": lambda x: torch.lerp(x.float(), torch.zeros(16), 0.3),
    "prelu": lambda x: F.prelu(x.float(), torch.tensor([0.25])),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.float().sigmoid(), torch.ones(16)),
    "type_as": lambda x: x.type_as(torch.zeros(1)).softmax(-1),
    "counts": lambda x: torch.zeros(4).scatter_add(0, (x > 0).long(), torch.ones(16)),
    "sums": lambda x: torch.zeros(4).scatter_add(0, (x > 0).long(), x),
    "index_add": lambda x: torch.zeros(4).index_add(0, (x > 0).long(), x),
    "bits": lambda x: (x.view(torch.int32) ^ 1).view(F32).softmax(-1),
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_constants_of_the_default_dtype_are_wide_too(name):
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(6))
    f = htile.rowwise(OF_CONSTANTS[name])
    assert oracle(f, x).dtype is torch.float64
    assert_close(f, f(x), x)


def test_a_second_attempt_begins_with_the_arguments_as_they_were():
    def of_mask(x):
        x.mul_(2)
        return x.masked_select(x > 0).sum()

    def checked_by_torch(x):
        x.mul_(2)
        return F.gaussian_nll_loss(x, x * 3, x.abs() + 1)

    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(7))
    twice = x.double() * 2
    assert torch.allclose(oracle(htile.rowwise(of_mask), x), twice.clamp(min=0).sum(-1))
    var = twice.abs() + 1
    right = (((twice * 2) ** 2 / var + var.log()) / 2).mean(-1)
    assert torch.allclose(oracle(htile.rowwise(checked_by_torch), x), right)


def test_sums_into_zeros_of_the_default_dtype():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    f = htile.rowwise(lambda x: torch.zeros(4).scatter_add(0, (x > 0).long(), x))
    exact = x.double()
    sums = torch.stack([exact.clamp(max=0).sum(-1), exact.clamp(min=0).sum(-1)], -1)
    assert torch.allclose(oracle(f, x)[:, :2], sums, rtol=1e-12)
    assert_close(f, f(x), x)
