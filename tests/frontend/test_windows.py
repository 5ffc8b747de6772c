"""Windows of neighbours, places in sorted rows, and diagonals and triangles are those of torch."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import ShapeError, TraceError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check

M, N = 5, 24
NAN, INF = float("nan"), float("inf")
trapezoid = torch.trapezoid

WINDOWS = {
    "groups": lambda x: x.unfold(-1, 4, 4).amax(-1),
    "groups and a rest": lambda x: x.unfold(0, 5, 5).sum(-1),
    "groups of rows": lambda x: x.view(6, 4).unfold(0, 3, 3).sum(-1),
    "neighbours": lambda x: x.unfold(-1, 3, 1).std(-1),
    "neighbours in rows": lambda x: x.view(4, 6).unfold(1, 2, 1).prod(-1),
    "every second window": lambda x: x.unfold(-1, 4, 2)[:, 1],
    "means": lambda x: F.avg_pool1d(x[None], 4)[0],
    "moving means": lambda x: x - F.avg_pool1d(x[None], 5, stride=1, padding=2)[0],
    "means of what there is": lambda x: F.avg_pool1d(x[None], 5, 1, 2, count_include_pad=False)[0],
    "means of groups and ends": lambda x: F.avg_pool1d(
        x.view(2, 12), 4, padding=2, count_include_pad=False),
    "means of whole windows": lambda x: F.avg_pool1d(x[None], 3, count_include_pad=False)[0],
    "maxima": lambda x: F.max_pool1d(x[None], (3,), 1, 1)[0],
    "maxima of channels": lambda x: F.max_pool1d(x.view(2, 12), 2),
    "reflected": lambda x: F.pad(x[None], (2, 3), mode="reflect")[0],
    "repeated": lambda x: F.pad(x.view(2, 12), (1, 0), mode="replicate"),
    "around": lambda x: F.pad(x[None], (4, 1), mode="circular")[0],
    "means of what is repeated": lambda x: F.avg_pool1d(
        F.pad(x[None], (2, 2), mode="replicate"), 5, 1)[0],
    "means of norms": lambda x: F.lp_pool1d(x[None], 2, 4)[0],
    "norms of neighbours": lambda x: F.lp_pool1d(x.abs()[None], 3, 3, 1)[0],
    "sums of signs": lambda x: F.lp_pool1d(x[None], 1, 4)[0],
    "means of so many parts": lambda x: F.adaptive_avg_pool1d(x[None], 6)[0],
    "means of parts that overlap": lambda x: F.adaptive_avg_pool1d(x[None, None], 7)[0, 0],
    "the mean of all": lambda x: torch.adaptive_avg_pool1d(x.view(2, 12), 1),
    "maxima of so many parts": lambda x: F.adaptive_max_pool1d(x[None], 8)[0],
    "maxima of parts that overlap": lambda x: F.adaptive_max_pool1d(x[None], 5)[0],
    "twice as long": lambda x: F.interpolate(x[None, None], scale_factor=2)[0, 0],
    "half as long": lambda x: F.interpolate(x[None, None], scale_factor=0.5)[0, 0],
    "half of an odd length": lambda x: F.interpolate(x[None, None, :23], scale_factor=0.5)[0, 0],
    "half as long again": lambda x: F.interpolate(x[None, None], size=36)[0, 0],
    "the nearest": lambda x: F.interpolate(x.view(1, 2, 12), size=(9,), mode="nearest-exact"),
    "a line through both": lambda x: F.interpolate(
        x[None, None], scale_factor=2, mode="linear", align_corners=False)[0, 0],
    "a line of thirds": lambda x: F.interpolate(x.view(1, 2, 12), 16, mode="linear"),
    "a line to fewer": lambda x: F.interpolate(x[None, None], scale_factor=0.75, mode="linear"),
    "a line to half": lambda x: F.interpolate(x[None, None, 1:], scale_factor=0.5, mode="linear"),
    "areas to fewer": lambda x: F.interpolate(x[None, None], scale_factor=0.3, mode="area"),
    "area": lambda x: trapezoid(x, dx=0.5),
    "area at numbers": lambda x: trapezoid(x, torch.arange(24) * 0.5),
    "area at values": lambda x, y: torch.trapz(x, y),
    "areas of rows": lambda x: trapezoid(x.view(4, 6), torch.arange(4) * 2.0, dim=0),
    "area so far": lambda x: torch.cumulative_trapezoid(x),
    "slopes": lambda x: torch.gradient(x)[0],
    "slopes of parabolas": lambda x: torch.gradient(x, spacing=0.5, edge_order=2)[0],
    "slopes of two": lambda x: torch.gradient(x[:2], dim=-1)[0],
    "slopes along both axes": lambda x: torch.cat(torch.gradient(x.view(4, 6), spacing=(2, 0.1))),
    "slopes along one": lambda x: torch.gradient(x.view(4, 6), dim=0, edge_order=2)[0],
    "slopes in another order": lambda x: torch.stack(torch.gradient(x.view(4, 6), dim=[1, 0])),
}  # fmt: skip
MATRICES = {
    "lower": lambda x: x.view(4, 6).tril(),
    "below": lambda x: torch.tril(x.view(4, 6), -1),
    "upper": lambda x: x.view(6, 4).triu(1),
    "each": lambda x: x.view(2, 3, 4).triu().sum(0),
    "diagonal": lambda x: x.view(4, 6).diagonal(),
    "above": lambda x: x.view(4, 6).diagonal(3),
    "further above": lambda x: torch.diag(x.view(6, 4), 1),
    "diagonal below": lambda x: x.view(6, 4).diagonal(-4),
    "matrix": lambda x: torch.diag(x[:5]),
    "distances": lambda x, y: torch.cdist(x.view(6, 4), y[:12].view(3, 4)),
    "distances in turn": lambda x: torch.cdist(x.view(6, 4), x.view(6, 4), p=1.0),
    "distances of rows": lambda x, y: torch.cdist(x[None], y[None])[0, 0],
    "distances of batches": lambda x, y: torch.cdist(x.view(2, 3, 4), y.view(2, 3, 4), p=3),
    "distances of all pairs": lambda x: torch.pdist(x.view(6, 4)),
    "largest distances": lambda x: F.pdist(x.view(4, 6), torch.inf),
    "each times all": lambda x, y: torch.kron(x[:6].view(2, 3), y[:4].view(2, 2)),
    "each times a row": lambda x, y: torch.kron(x[:3], y),
    "each times a matrix": lambda x, y: x[:3].kron(y[:6].view(2, 3)),
    "tuples": lambda x, y: torch.cartesian_prod(x[:3], y[:2], x[4:6]),
    "tuples of one": lambda x: torch.cartesian_prod(x) * 2,
    "choices": lambda x: torch.combinations(x[:6]),
    "choices of three": lambda x: torch.combinations(x[:4], 3, with_replacement=True),
    "blocks": lambda x, y: torch.block_diag(x[:6].view(2, 3), y[:2], x[9], y[2:4].view(2, 1)),
    "turned": lambda x: [torch.rot90(x.view(4, 6), k) for k in range(-1, 4)],
    "turned in other axes": lambda x: x.view(2, 3, 4).rot90(1, (2, 0)),
    "upside down": lambda x: torch.flipud(x.view(4, 6)) + x.view(4, 6).fliplr() + x.flipud()[0],
    "matrix of a row": lambda x: torch.diag_embed(x[:5]) + x[:5].diag_embed(dim1=0, dim2=1),
    "norms of a matrix": lambda x: torch.stack(
        [torch.linalg.matrix_norm(x.view(4, 6), ord=o) for o in ("fro", 1, -1, torch.inf)]),
    "norms of matrices": lambda x: torch.linalg.matrix_norm(x.view(2, 3, 4), -torch.inf),
    "rolled twice": lambda x: x.view(4, 6).roll((1, -2), (0, 1)),
    "rolled along one": lambda x: torch.roll(x.view(4, 6), shifts=(1,), dims=(0,)),
    "rolled as one row": lambda x: torch.roll(x.view(4, 6), 3),
    "trace": lambda x: x[:16].view(4, 4).trace(),
    "perpendicular along the first": lambda x, y: torch.cross(x[:9].view(3, 3), y[:9].view(3, 3)),
    "perpendicular": lambda x, y: torch.cross(x[:3], y[:3], dim=-1),
    "perpendicular each": lambda x, y: torch.linalg.cross(x.view(8, 3), y.view(8, 3)),
}


@pytest.mark.parametrize("name", WINDOWS | MATRICES)
def test_values_and_gradients(name):
    f = htile.rowwise((WINDOWS | MATRICES)[name])
    torch.manual_seed(0)
    args = [torch.randn(M, N) for _ in f._signature.names]
    assert_close(f, f(*args), *args)
    check(f, *args, tolerance=1e-7)


@pytest.mark.parametrize("is_diagonal", [False, True])
def test_what_shares_memory_in_torch_is_not_used_after_a_change(is_diagonal):
    def f(x):
        m = x.clone().view(4, 6)
        (m.diagonal() if is_diagonal else m.unfold(0, 3, 1)).fill_(0.0)
        return m

    with pytest.raises(TraceError, match="share memory"):
        htile.rowwise(f)(torch.randn(2, 24))


def test_masks_have_diagonals():
    f = htile.rowwise(lambda x: ((x.view(4, 6) > 0).diagonal(1), (x.view(4, 6) > 0).tril()))
    x = torch.randn(M, N)
    mask = x.view(M, 4, 6) > 0
    expected = mask.diagonal(1, 1, 2), mask.tril()
    assert all(torch.equal(a, b) for a, b in zip(f(x), expected, strict=True))


BOUNDARIES = (-1.0, 0.0, 0.0, 0.5)


@pytest.mark.parametrize(("n", "count"), [(1000, 100), (333, 65)])
def test_many_boundaries_say_how_many_there_may_be(n, count):
    def places(x, edges):
        return torch.bucketize(x, edges)

    def in_two(x, edges):
        return torch.bucketize(x, edges[:64]) + torch.bucketize(x, edges[64:])

    x, edges = torch.randn(3, n), torch.linspace(-2, 2, count)
    told = f"each of {n} is compared with each of {count}; take 64 of these at a time"
    with pytest.raises(UnsupportedError, match=told):
        htile.rowwise(places).inspect(x, edges)
    htile.rowwise(in_two).inspect(x, edges)
    assert torch.equal(htile.rowwise(in_two)(x, edges), torch.bucketize(x, edges))


@pytest.mark.parametrize("right", [False, True])
def test_places_of_elements(right):
    f = htile.rowwise(lambda x: torch.bucketize(x, torch.tensor(BOUNDARIES), right=right))
    x = torch.tensor([[-2.0, -1, -0.5, 0, -0.0, 0.25], [0.5, 0.75, NAN, INF, -INF, 1e-45]])
    assert torch.equal(f(x), torch.bucketize(x, torch.tensor(BOUNDARIES), right=right))
    shared = htile.rowwise(
        lambda x, edges: torch.bucketize(x, edges, right=right, out_int32=True)
    )
    edges = torch.tensor(BOUNDARIES[:3])
    expected = torch.bucketize(x, edges, right=right, out_int32=True)
    found = shared.inspect(torch.empty(2, 6, device="meta"), edges.to("meta"), arch="sm_90a")
    assert found.graph.outputs[0].dtype is torch.int32
    assert torch.equal(shared(x, edges), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_places_of_numbers_in_rows(side):
    @htile.rowwise
    def f(x, u: htile.PerRow):
        total = x.abs().cumsum(-1)
        search = torch.searchsorted
        return search(total, u, side=side), search(total, torch.tensor([0.5, 2.0]), side=side)

    x, u = torch.randint(1, 4, (M, N)).float(), torch.randint(1, 30, (M,)).float()
    total = x.cumsum(-1)
    alone = torch.searchsorted(total, u[:, None], side=side)[:, 0]
    both = torch.searchsorted(total, torch.tensor([0.5, 2.0]).expand(M, 2).contiguous(), side=side)
    found = f(x, u)
    assert torch.equal(found[0], alone) and torch.equal(found[1], both)


REFUSED = {
    "large windows": (UnsupportedError, "at most 64 elements", lambda x: x.unfold(-1, 65, 1)),
    "much reflected": (UnsupportedError, "each from 0 to 2",
                       lambda x: F.pad(x[None, :3], (3, 0), mode="reflect")),
    "another way to pad": (UnsupportedError, "it is 'constant'",
                           lambda x: F.pad(x[None], (3, 0), mode="wrap")),
    "no window": (ShapeError, "no longer than the axis", lambda x: x.unfold(-1, 101, 1)),
    "a row as channels": (ShapeError, r"F.avg_pool1d\(x\[None\]", lambda x: F.avg_pool1d(x, 4)),
    "largest norms": (UnsupportedError, r"write F.max_pool1d\(x.abs",
                      lambda x: F.lp_pool1d(x[None], float("inf"), 4)),
    "other pools": (UnsupportedError, "leave them out",
                    lambda x: F.max_pool1d(x[None], 4, dilation=2)),
    "many parts": (UnsupportedError, "at most 64 are written out",
                   lambda x: F.adaptive_avg_pool1d(x[None], 70)),
    "a row of so many parts": (ShapeError, r"write F.adaptive_max_pool1d\(x\[None\]",
                               lambda x: F.adaptive_max_pool1d(x, 4)),
    "another length of a row": (ShapeError, r"write F.interpolate\(x\[None, None\]",
                                lambda x: F.interpolate(x, scale_factor=2)),
    "no whole number": (UnsupportedError, "write size=133",
                        lambda x: F.interpolate(x[None, None], scale_factor=1.333)),
    "lengths of no common divisor": (UnsupportedError, "99 come of 100",
                                     lambda x: F.interpolate(x[None, None], size=99)),
    "corners": (UnsupportedError, "leave it out", lambda x: F.interpolate(
        x[None, None], scale_factor=2, mode="linear", align_corners=True)),
    "a parabola": (UnsupportedError, "it is 'nearest'", lambda x: F.interpolate(
        x[None, None], scale_factor=2, mode="bicubic")),
    "the distance of a number": (TraceError, "it takes tensors", lambda x: torch.cdist(x[None], 3)),
    "a number times all": (TraceError, "it takes tensors", lambda x: x.kron(3)),
    "points without coordinates": (ShapeError, "it takes matrices", lambda x: torch.cdist(x, x)),
    "a shift for no axis": (ShapeError, "a shift for each axis", lambda x: x.roll((1, 2), 0)),
    "much padding": (ShapeError, "at most half", lambda x: F.max_pool1d(x[None], 3, 1, 2)),
    "an area of one": (ShapeError, "two or more", lambda x: trapezoid(x[:1])),
    "slopes of one": (ShapeError, "expected 2 or more", lambda x: torch.gradient(x[:1])[0]),
    "slopes of two by three": (ShapeError, "3 or more for edge_order=2",
                               lambda x: torch.gradient(x[:2], edge_order=2)[0]),
    "slopes at places": (UnsupportedError, r"write \(y\[2:\] - y\[:-2\]\)",
                         lambda x: torch.gradient(x, spacing=(x,))[0]),
    "slopes of an unknown order": (TraceError, "expected 1 or 2",
                                   lambda x: torch.gradient(x, edge_order=3)[0]),
    "places in a matrix": (UnsupportedError, "it takes one sorted row",
                           lambda x: torch.searchsorted(x.view(10, 10), x.view(10, 10))),
    "a row as a matrix": (ShapeError, "it takes a matrix", lambda x: x.tril()),
    "a diagonal that is none": (ShapeError, "there is none",
                                lambda x: x.view(10, 10).diagonal(10)),
    "four numbers": (ShapeError, "three elements", lambda x: torch.cross(x[:4], x[:4], dim=-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    kind, words, function = REFUSED[name]
    with pytest.raises(kind, match=words):
        htile.rowwise(function)(torch.randn(2, 100))


@pytest.mark.parametrize(("size", "step", "padding"), [(2, 1, 0), (3, 1, 1), (4, 4, 0), (5, 1, 2)])
def test_the_first_of_equal_elements_of_a_pool_has_the_slope(size, step, padding):
    x = torch.randint(-2, 3, (M, 40)).float().requires_grad_()
    y = x.detach().double().requires_grad_()
    found = htile.rowwise(lambda x: F.max_pool1d(x[None], size, step, padding)[0])(x)
    wanted = F.max_pool1d(y[:, None], size, step, padding)[:, 0]
    weights = torch.randn(wanted.shape)
    (slope,) = torch.autograd.grad((found * weights).sum(), x)
    (expected,) = torch.autograd.grad((wanted * weights).sum(), y)
    torch.testing.assert_close(slope.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_an_area_of_8_bits_is_added_up_in_more(dtype):
    """As torch does: only the sum of both ends has 8 bits."""
    y = torch.tensor([[0, 1, 100, 100], [100, 90, 80, 7], [127, 1, 1, 127]], dtype=dtype)

    @htile.rowwise
    def f(y):
        return trapezoid(y), trapezoid(y, dx=0.25), trapezoid(y.view(2, 2), dim=0)

    for found, exact in zip(f(y), zip(*(f._fn(row) for row in y), strict=True), strict=True):
        assert found.equal(torch.stack(exact))
