"""`torch.vmap` of a row-wise function is a call with the batch as a leading dimension."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
from htile.run.vmap import bodies_as_written
from htile.testing import assert_close

BF16 = torch.bfloat16


@htile.rowwise
def norm(x, weight=None, shift: htile.PerRow = None, gain: htile.Scalar = 1.0):
    y = x * torch.rsqrt((x * x).mean() + 1e-6) * gain
    y = y if weight is None else y * weight
    return y if shift is None else y + shift, y.sum()


@htile.rowwise
def added(x, residual):
    return {"sum": x + residual}


X, W = torch.randn(3, 4, 64).to(BF16), torch.randn(64)
T = torch.randn(3, 4)

# name: (what vmap gives, what the call gives)
SAME = {
    "rows": (lambda: torch.vmap(norm)(X[0]), lambda: norm(X[0])),
    "batches": (lambda: torch.vmap(norm)(X), lambda: norm(X)),
    "a shared vector": (
        lambda: torch.vmap(norm, in_dims=(0, None))(X[0], W), lambda: norm(X[0], W)
    ),
    "nested": (lambda: torch.vmap(torch.vmap(lambda x: norm(x, W)))(X), lambda: norm(X, W)),
    "another dimension": (lambda: torch.vmap(norm, in_dims=1)(X.transpose(0, 1)), lambda: norm(X)),
    "the last dimension": (lambda: torch.vmap(norm, in_dims=-1)(X.movedim(0, -1)), lambda: norm(X)),
    "nested, other dimensions": (
        lambda: torch.vmap(torch.vmap(norm, in_dims=1), in_dims=2)(X.permute(2, 1, 0)),
        lambda: norm(X),
    ),
    "one value a row": (
        lambda: torch.vmap(lambda x, t: norm(x, W, t))(X, T), lambda: norm(X, W, T)
    ),
    "one value a call": (
        lambda: torch.vmap(lambda x, t: norm(x, W, t))(X, T[:, 0]),
        lambda: norm(X, W, T[:, :1]),
    ),
    "only values of rows": (
        lambda: torch.vmap(lambda t: norm(X[0], W, t))(T),
        lambda: norm(X[:1].expand(3, 4, 64), W, T),
    ),
    "only values of one row": (
        lambda: torch.vmap(lambda t: norm(X[0, 0], shift=t))(T[:, 0]),
        lambda: norm(X[0, :1].expand(3, 64), None, T[:, 0]),
    ),
    "an inner batch alone": (
        lambda: torch.vmap(lambda t: torch.vmap(lambda x: norm(x, W)[0].float())(X[0]) + t)(
            T[:, 0]
        ),
        lambda: norm(X[0], W)[0].float() + T[:, 0, None, None],
    ),
    "rows that repeat": (
        lambda: torch.vmap(added, in_dims=(0, None))(X, X[0]), lambda: added(X, X[0])
    ),
    "rows of fewer dimensions": (
        lambda: torch.vmap(lambda x, r: added(x[None], r))(X, X.float()),
        lambda: added(X[:, None], X[:, None].float()),
    ),
    "a row of one element": (
        lambda: torch.vmap(norm, in_dims=(0, None))(X[0, :, :1], W[:1]),
        lambda: norm(X[0, :, :1], W[:1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_what_vmap_gives_is_what_a_call_gives(name):
    """In values and dtypes: bfloat16 rows come back as bfloat16, computed in float32."""
    mapped, called = (torch.utils._pytree.tree_leaves(give()) for give in SAME[name])
    for a, b in zip(mapped, called, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a, b)


def test_it_is_right():
    y, total = torch.vmap(norm, in_dims=(0, None))(X[0], W)
    assert_close(norm, (y, total), X[0], W)


def refused(call):
    with pytest.raises(UnsupportedError, match=r"torch\.vmap"):
        call()


def test_what_the_batch_would_make_something_else_of_is_refused():
    square = torch.randn(4, 4, 4)
    refused(lambda: torch.vmap(norm)(square[0, 0]))
    refused(lambda: torch.vmap(lambda x: norm(x, out=x))(square))
    any_length = htile.rowwise(added._fn, dynamic_n=True)
    refused(lambda: torch.vmap(any_length)(square, square[0]))


@htile.rowwise
def layer(x, w, s: htile.Scalar = 1.0):
    return torch.softmax(x * w, -1) * s, (x * w).sum()


@htile.rowwise
def heads(x, w: htile.Shared):
    return (x.view(w.shape) * w).sum(0), x.sum() * w[1], htile.sum_rows(x)


@htile.rowwise
def product(x, W: htile.Matrix, bias):
    return torch.relu(F.linear(x, W) + bias)


def plain_layer(x, w, s=1.0):
    return torch.softmax(x * w, -1) * s, (x * w).sum(-1)


def plain_heads(x, w):
    y = x.unflatten(-1, w.shape) * w
    return y.sum(-2), x.sum(-1)[..., None] * w[1], x.sum(0)


def plain_product(x, W, bias):
    return torch.relu(F.linear(x, W) + bias)


V, SQUARE = torch.randn(3, 64), torch.randn(4, 4, 4)
ENSEMBLES = {  # of each element of a batch what all of its rows share
    "weights": (layer, plain_layer, lambda f: torch.vmap(f)(X, V)),
    "weights of the same rows": (layer, plain_layer, lambda f: torch.vmap(f, (None, 0))(X[0], V)),
    "weights of one row": (layer, plain_layer, lambda f: torch.vmap(f, (None, 0))(X[0, :1], V)),
    "sizes that agree by chance": (
        layer, plain_layer, lambda f: torch.vmap(f)(SQUARE, SQUARE[0]),
    ),
    "numbers": (layer, plain_layer, lambda f: torch.vmap(f, (0, None, 0))(X, V[0], V[:, 0])),
    "in other dimensions": (
        layer, plain_layer, lambda f: torch.vmap(f, (1, -1), 1)(X.transpose(0, 1), V.T),
    ),
    "a part at a time": (layer, plain_layer, lambda f: torch.vmap(f, chunk_size=2)(X, V)),
    "rows in weights": (
        layer, plain_layer, lambda f: torch.vmap(lambda w: torch.vmap(lambda x: f(x, w))(X))(V),
    ),
    "weights in rows": (
        layer, plain_layer, lambda f: torch.vmap(lambda x: torch.vmap(lambda w: f(x, w))(V))(X),
    ),
    "both nested": (
        layer, plain_layer,
        lambda f: torch.vmap(torch.vmap(f))(torch.stack((X, -X)), torch.stack((V, 2 * V))),
    ),
    "stacks and sums over rows": (
        heads, plain_heads, lambda f: torch.vmap(f)(X, V.view(3, 4, 16)),
    ),
    "a bias of a product": (
        product, plain_product,
        lambda f: torch.vmap(f, (0, None, 0))(X, torch.eye(64).to(X.dtype) * 2, V),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENSEMBLES)
def test_what_the_rows_of_each_element_share(name):
    f, plain, ensemble = ENSEMBLES[name]
    found = ensemble(f)
    exact = ensemble(lambda *args: plain(*(a.double() for a in args)))
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (found, exact)), strict=True):
        rounding = 1e-5 if one.dtype is torch.float32 else 1e-2
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=rounding)


def test_gradients_of_an_ensemble():
    """Of a batch of weights; what is computed is the same with gradients and without them."""
    x, w = X.float(), V.clone().requires_grad_()
    found = torch.vmap(layer)(x, w)
    for one, other in zip(found, torch.vmap(layer)(x, V), strict=True):
        assert torch.equal(one, other)
    weights = torch.randn(3, 4, 64)
    (g,) = torch.autograd.grad((found[0] * weights).sum(), w)
    v = V.double().requires_grad_()
    exact = torch.vmap(plain_layer)(x.double(), v)[0]
    torch.testing.assert_close(
        g.double(), torch.autograd.grad((exact * weights.double()).sum(), v)[0], rtol=1e-4,
        atol=1e-4,
    )  # fmt: skip


def test_the_body_itself_is_run_where_a_result_is_held_against_it():
    x = X[0].double()
    with bodies_as_written():
        y, _ = torch.vmap(norm)(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))
    with pytest.raises(htile.DtypeError):
        torch.vmap(norm)(x)


@pytest.mark.parametrize("s", [(1, 2), (3, (4, 5)), ()])
def test_static_tuples(s):
    @htile.rowwise
    def f(x, s: htile.Static = ()):
        return x * len(s) + sum(each for each in s if isinstance(each, int))

    x = torch.randn(2, 3, 4)
    assert torch.equal(torch.vmap(f, (0, None))(x, s), f(x, s))
    assert torch.equal(torch.vmap(lambda x: f(x, s))(x), f(x, s))


def test_values_per_row_that_make_rows_of_a_vector():
    @htile.rowwise
    def scaled(s: htile.PerRow, w):
        return (s * w).softmax(-1)

    s, w = torch.randn(3, 4), torch.randn(9)
    exact = (s.double()[..., None] * w.double()).softmax(-1)
    torch.testing.assert_close(torch.vmap(lambda s: scaled(s, w))(s).double(), exact)
    torch.testing.assert_close(torch.vmap(lambda s: scaled(s, w))(s[0]).double(), exact[0])
    w = torch.randn(2, 9)
    exact = (s[0].double()[:, None] * w.double()[:, None]).softmax(-1)
    found = torch.vmap(lambda w: scaled(s[0], w))(w)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
