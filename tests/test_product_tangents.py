"""Forward mode of functions with matrix products, held against torch's own in float64."""

import pytest
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.utils._pytree import tree_leaves

from tests import products
from tests.products import arguments
from tests.test_product_gradients import K, M, N, dims_of
from tests.test_products_compiled import is_close, plain, total

OF_ONE = (0, None, None)
FORWARD = {
    "jvp": lambda f, x, W, b: jvp(f, (x, W, b), (x + 1, W.flip(0), b - 1)),
    "jvp of rows": lambda f, x, W, b: jvp(lambda x: f(x, W, b), (x,), (x + 1,)),
    "jvp of the matrix": lambda f, x, W, b: jvp(lambda W: f(x, W, b), (W,), (W.flip(0),)),
    "jvp of what no product takes": lambda f, x, W, b: jvp(lambda b: f(x, W, b), (b,), (b + 1,)),
    "jvp of grad": lambda f, x, W, b: jvp(
        grad(lambda W: total(f)(x, W, b)), (W,), (W.flip(0),)
    )[1],
    "grad of jvp": lambda f, x, W, b: grad(
        lambda x, W: jvp(lambda W: total(f)(x, W, b), (W,), (W,))[1], (0, 1)
    )(x, W),
    "jvp of jvp": lambda f, x, W, b: jvp(
        lambda W: jvp(lambda x: f(x, W, b), (x,), (x + 1,))[1], (W,), (W.flip(0),)
    ),
    "jvp of jvp, of both": lambda f, x, W, b: jvp(
        lambda x, W: jvp(lambda x, W: f(x, W, b), (x, W), (x.sin(), W))[1],
        (x, W), (x + 1, W.flip(0)),
    ),
    "jacfwd of jacfwd": lambda f, x, W, b: jacfwd(jacfwd(total(f)), 1)(x[:1], W[:16], b[:16]),
    "jvp of vmap": lambda f, x, W, b: jvp(lambda x: vmap(f, OF_ONE)(x, W, b), (x,), (x + 1,)),
    "vmap of jvp": lambda f, x, W, b: vmap(
        lambda x: jvp(lambda x, W: f(x, W, b), (x, W), (x + 1, W))[1]
    )(x),
    "jacfwd": lambda f, x, W, b: jacfwd(f, (0, 2))(x[:3], W, b),
    "jacfwd of the matrix": lambda f, x, W, b: jacfwd(total(f), 1)(x[:3], W[:16], b[:16]),
    "hessian": lambda f, x, W, b: hessian(lambda x: total(f)(x, W, b))(x[:2]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode(name):
    args = arguments(products.gelu, M, N, K)
    found = FORWARD[name](products.gelu, *args)
    right = FORWARD[name](plain(products.gelu), *(v.double() for v in args))
    assert is_close(found, right, 0.03)


@pytest.mark.parametrize("f", [products.norm_linear, products.swiglu, products.mlp,
                               products.project, products.softmax, products.nll],
                         ids=lambda f: f._signature.name)  # fmt: skip
@pytest.mark.parametrize("with_gradient", [False, True])
def test_dual_numbers_of_functions_of_several_kinds(f, with_gradient):
    args = arguments(f, M, N, K)
    is_floating = [v.is_floating_point() for v in args]
    given = [v.clone().requires_grad_(with_gradient) if own else v
             for v, own in zip(args, is_floating, strict=True)]  # fmt: skip

    def duals(values):
        return [make_dual(v, v.detach() + 1) if own else v
                for v, own in zip(values, is_floating, strict=True)]  # fmt: skip

    with dual_level():
        found = [unpack_dual(y) for y in tree_leaves(f(*duals(given)))]
        wide = [v.double() if own else v for v, own in zip(args, is_floating, strict=True)]
        right = [unpack_dual(y) for y in tree_leaves(vmap(f._fn, dims_of(f, args))(*duals(wide)))]
    for which in ("primal", "tangent"):
        each = [[getattr(y, which) for y in ys] for ys in (found, right)]
        assert all(a.requires_grad == with_gradient for a in each[0])
        assert is_close(*each, 0.03)
