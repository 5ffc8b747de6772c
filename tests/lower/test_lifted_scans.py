"""Scans of which parts are read elsewhere: rolling sums, weights along a ray, advantages."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
from htile.frontend.derive import derive
from htile.frontend.ops import SCANS
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.space import place
from htile.lower.passes.ways import place_well
from tests.generated.movements import interpreted
from tests.gradients import called, check, cotangents
from tests.lower.cases import kernel_of

M = 3


def rolling(x):
    sums = x.cumsum(-1)
    return sums[16:] - sums[:-16]


def rolling_mean(x):
    sums = F.pad(x.cumsum(-1), (16, 0))
    return (sums[16:] - sums[:-16]) / 16


def rolling_sum_of_all(x):
    sums = x.cumsum(-1)
    return x - (sums[1:] - sums[:-1]).abs().sum()


def twice(x):
    sums = x.cumsum(-1)
    sums = (sums[5:] - sums[:-5]).cumsum(-1)
    return sums[2:] * sums[:-2]


def far_apart(x):
    return (x * x).cumsum(-1)[150:] * x[:107]


def from_the_end(x):
    sums = x.flip(-1).cumsum(-1).flip(-1)
    return F.pad(sums[3:] * x[3:] - sums[:-3], (1, 2)), sums.roll(1) + x


def products(x):
    behind = x.cumprod(-1)[:-1]
    return torch.cat((torch.ones(1), behind)) * x, behind * x[1:]


def logarithms(x):
    sums = x.logcumsumexp(-1)
    return sums[4:] - sums[:-4]


def logarithms_from_the_end(x):
    sums = x.flip(-1).logcumsumexp(-1).flip(-1)
    return F.pad(sums[:-3] * 2 - sums[3:], (2, 1))


def of_a_moved_row(x):
    return (x.roll(1) * x).cumsum(-1)


def weights_of_a_ray(density, length):
    share = 1 - torch.exp(-density * length)
    behind = torch.cat((torch.ones(1), torch.cumprod(1 - share, -1)[:-1]))
    return share * behind


def advantages(reward, value):
    weight = 0.95 ** torch.arange(reward.shape[-1]).to(reward.dtype)
    delta = reward + 0.99 * value[1:] - value[:-1]
    return (delta * weight).flip(-1).cumsum(-1).flip(-1) / weight


OF_ONE_ROW = (
    rolling, rolling_mean, rolling_sum_of_all, twice, far_apart, from_the_end, products, logarithms,
    logarithms_from_the_end, of_a_moved_row,
)  # fmt: skip


def rows(n, seed=0):
    return torch.rand(M, n, generator=torch.Generator().manual_seed(seed)) + 0.5


def arguments(f):
    if f is weights_of_a_ray:
        return rows(200) * 0.1, rows(200, 1) * 0.1
    return (rows(200), rows(201, 1)) if f is advantages else (rows(257),)


def assert_placed(graph, call, more, expected):
    """Assert that the placed graph gives these results in float64, and return it."""
    placed = place_well(drop_slopes(graph))
    with np.errstate(all="ignore"):
        found = interpreted(placed, graph, call.values | more, call.lead)
    for one, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, exact.detach().numpy(), rtol=1e-9, atol=1e-9)
    return placed


def in_torch(f, given):
    """What torch gives of each row in float64, without HTile."""
    each = [torch.utils._pytree.tree_leaves(f(*row)) for row in zip(*given, strict=True)]
    return [torch.stack(result) for result in zip(*each, strict=True)]


@pytest.mark.parametrize("f", [*OF_ONE_ROW, weights_of_a_ray, advantages])
def test_results(f):
    given = arguments(f)
    call = called(htile.rowwise(f), *given)
    placed = assert_placed(call.graph, call, {}, in_torch(f, [each.double() for each in given]))
    assert len(placed) < 60


@pytest.mark.parametrize("f", [*OF_ONE_ROW, weights_of_a_ray, advantages])
def test_gradients(f):
    given = arguments(f)
    rowwise = htile.rowwise(f)
    call = check(rowwise, *given, tolerance=1e-7)
    joint = derive(call.graph, call.wrt, call.outputs)
    more = {f"d_{name}": g for name, g in cotangents(call).items()}
    wide = [each.double().requires_grad_() for each in given]
    results = in_torch(f, wide)
    # The cotangents are in the order of the results, of which all have one here.
    exact = torch.autograd.grad(results, wide, [more[f"d_{name}"] for name in call.outputs])
    placed = assert_placed(joint, call, more, exact)
    assert len(placed) < 150
    kernel = rowwise.inspect(*[each.requires_grad_() for each in given], arch="sm_90a").backward
    assert kernel.resources.stack == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
def test_scans_of_integers_and_masks(dtype):
    """Their sums and extremes have neutral elements of their own."""

    def f(x):
        sums = x.cumsum(-1)
        largest, least = x.cummax(-1).values.int(), x.flip(-1).cummin(-1).values.flip(-1).int()
        return F.pad(sums[7:] - sums[:-7], (7, 0)), largest.roll(-5) * 2 + largest, least.roll(9)

    x = torch.randint(-9, 9, (M, 211), generator=torch.Generator().manual_seed(0)) % 7
    x = (x - 3).to(dtype)
    call = called(htile.rowwise(f), x)
    placed = place_well(drop_slopes(call.graph))
    with np.errstate(all="ignore"):
        found = interpreted(placed, call.graph, {"x": x}, call.lead)
    for one, exact in zip(found, in_torch(f, (x,)), strict=True):
        np.testing.assert_array_equal(one, exact.numpy())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("f", [rolling, from_the_end, logarithms, logarithms_from_the_end])
def test_infinities_stay_where_torch_has_them(f, value):
    x = rows(257)
    x[0, 0] = x[1, -1] = x[2, 100] = value
    call = called(htile.rowwise(f), x)
    placed = place_well(drop_slopes(call.graph))
    with np.errstate(all="ignore"):
        found = interpreted(placed, call.graph, {"x": x}, call.lead)
    for one, exact in zip(found, in_torch(f, (x.double(),)), strict=True):
        np.testing.assert_allclose(one, exact.numpy(), rtol=1e-9, atol=1e-9)


def rolling_energy(x):
    sums = x.cumsum(-1)
    return (sums[16:] - sums[:-16]).square().sum()


@pytest.mark.parametrize("n", [256, 1024])
@pytest.mark.parametrize("f", [rolling, rolling_energy])
def test_a_window_that_divides_the_row(f, n):
    """It could cut the row into pieces, of which each has a part of the scan: 64 of 1024."""
    call = called(htile.rowwise(f), rows(n))
    wide = rows(n).double().requires_grad_()
    (result,) = in_torch(f, (wide,))
    assert len(assert_placed(call.graph, call, {}, (result,))) < 40
    joint = derive(call.graph, call.wrt, call.outputs)
    more = {f"d_{name}": g for name, g in cotangents(call).items()}
    (exact,) = torch.autograd.grad(result, wide, more["d_out"])
    assert len(assert_placed(joint, call, more, (exact,))) < 60


def moved_sums(x):
    return F.pad(x.cumsum(-1)[:-1], (1, 0)) * x


def short_rolling_mean(x):
    sums = F.pad(x.cumsum(-1), (4, 0))
    return (sums[4:] - sums[:-4]) / 4


def behind_ones(x):
    return torch.cat((torch.ones(1), x)).cumprod(-1)[:-1] * x


def behind_a_padding(x):
    return F.pad(x, (3, 0), value=1.0).cumprod(-1)[2:-1] * x


def behind_a_number(x):
    return torch.cat((torch.zeros(1), x)).logcumsumexp(-1)[1:] * x


def behind_nothing(x):
    return torch.cat((torch.full((2,), -torch.inf), x)).logcumsumexp(-1)[2:] * x


def behind_its_first(x):
    return torch.cat((2 * x[:1], x)).logcumsumexp(-1)[1:] + x


BEHIND = (behind_ones, behind_a_padding, behind_a_number, behind_nothing, behind_its_first)


@pytest.mark.parametrize("n", [33, 64, 65, 66, 257])
@pytest.mark.parametrize("f", [moved_sums, short_rolling_mean, *BEHIND])
def test_few_pieces_at_any_length(f, n):
    """A row of 65 elements, of which 64 are a part, is not written out, and a scan that is joined
    to a start is a scan of the rest."""
    given = rows(n)
    call = check(htile.rowwise(f), given, tolerance=1e-7)
    (right,) = in_torch(f, [given.double()])
    assert len(assert_placed(call.graph, call, {}, [right])) < 70
    joint = derive(call.graph, call.wrt, call.outputs)
    more = {f"d_{name}": g for name, g in cotangents(call).items()}
    wide = given.double().requires_grad_()
    (exact,) = torch.autograd.grad(in_torch(f, [wide])[0], wide, more["d_out"])
    assert len(assert_placed(joint, call, more, (exact,))) < 110


def test_a_start_that_may_be_tiny_is_part_of_the_product():
    """The product of the rest alone would overflow."""
    f = htile.rowwise(lambda x: torch.cat((x[:1] * 1e-30, x)).cumprod(-1))
    x = torch.full((2, 5), 1e10)
    right = torch.cat((x[:, :1].double() * 1e-30, x.double()), -1).cumprod(-1)
    torch.testing.assert_close(f(x).double(), right, rtol=1e-5, atol=0)


@pytest.mark.parametrize("f", BEHIND)
def test_what_is_no_number_behind_a_start(f):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    x[0, 2], x[1, 0], x[2, 3], x[3, 6] = -torch.inf, torch.inf, torch.nan, 0
    (right,) = in_torch(f, [x.double()])
    torch.testing.assert_close(htile.rowwise(f)(x).double(), right, equal_nan=True)


def test_a_scan_is_lifted_only_where_nothing_else_places_it():
    """One that a few pieces have is one scan of each, as it was."""
    call = called(htile.rowwise(lambda x: x.cumsum(-1)[64:] * x[:64]), rows(128))
    pieces, placed = place(call.graph), place_well(call.graph)
    assert str(pieces) == str(placed)


@pytest.mark.parametrize("f", [rolling, from_the_end, logarithms])
@pytest.mark.parametrize("n", [131, 4096, 4099])
def test_kernels_compile(f, n):
    kernel = kernel_of(f, torch.ones(M, n))
    assert kernel.resources.stack == 0
    assert sum(node.op in SCANS for node in kernel.graph) <= 3


def test_a_scan_whose_largest_elements_are_looked_for_is_not_lifted():
    """The sums of a part are added in another order, and may be equal to no sum of the row."""

    def f(x):
        sums = x.cumsum(-1)
        return torch.where(sums[1:] == sums.amax(), x[1:], 0)

    with pytest.raises(UnsupportedError, match="pieces") as caught:
        kernel_of(f, torch.ones(M, 258))
    assert caught.value.loc.text == "sums = x.cumsum(-1)"


def test_one_of_every_few_elements_of_a_scan_is_refused():
    def f(x):
        return x.cumsum(-1)[::2] - x[1::2]

    with pytest.raises(UnsupportedError, match="one of every 2 elements of a cumsum") as caught:
        kernel_of(f, torch.ones(M, 258))
    assert caught.value.loc.text == "return x.cumsum(-1)[::2] - x[1::2]"
