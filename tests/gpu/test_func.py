"""torch.func of row-wise functions on a GPU, beside float64 on the same GPU."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.test_func import check, plain_rmsnorm, plain_softmax, rmsnorm, softmax, total

from .matrix import seed

pytestmark = pytest.mark.gpu

MAKE = {
    "grad": (lambda f: grad(total(f), (0, 1)), (70, 1000)),
    "one for each sample": (lambda f: vmap(grad(total(f), (0, 1)), (0, None)), (3, 70, 1000)),
    "samples of one row": (lambda f: vmap(grad(total(f), (0, 1)), (0, None)), (70, 1003)),
    "of a batch": (lambda f: grad(total(vmap(f, (0, None))), (0, 1)), (3, 70, 1000)),
    "jacrev": (lambda f: jacrev(f, (0, 1)), (5, 64)),
    "second order": (lambda f: grad(total(grad(total(f))), (0, 1)), (70, 1000)),
    "a weight of each sample": (
        lambda f: lambda x, w: vmap(grad(total(f), (0, 1)))(x, torch.stack((w, w.sin(), w + 1))),
        (3, 70, 1000),
    ),
    "jvp": (lambda f: lambda x, w: jvp(f, (x, w), (x.sin(), w.cos())), (70, 1000)),
    "jacfwd": (lambda f: jacfwd(f, (0, 1)), (5, 64)),
    "hessian": (lambda f: hessian(total(f), (0, 1)), (2, 24)),
}


@pytest.mark.parametrize("name", MAKE)
def test_gradients_of_rows_and_of_what_they_share(device, name):
    make, shape = MAKE[name]
    seed(name)
    x, weight = torch.randn(shape, device=device), torch.rand(shape[-1], device=device)
    check(make, rmsnorm, plain_rmsnorm, x, weight)


def test_dual_numbers(device):
    seed("dual")
    x, weight = torch.randn(70, 1003, device=device), torch.rand(1003, device=device)

    def make(f):
        def run(x, weight):
            with forward_ad.dual_level():
                given = forward_ad.make_dual(x, x.sin()), forward_ad.make_dual(weight, weight.cos())
                return [*forward_ad.unpack_dual(f(*given))]

        return run

    check(make, rmsnorm, plain_rmsnorm, x, weight)


def test_gradients_of_rows(device):
    seed("rows")
    for make in (lambda f: grad(total(f)), lambda f: vmap(jacrev(f)), lambda f: jacfwd(f)):
        check(make, softmax, plain_softmax, torch.randn(7, 64, device=device))
