"""Runs functions with products on a GPU: `python -m tests.gpu.row_products values swiglu`.

It prints `right` at the end. `test_products.py` starts it in a process of its own with a time
limit, because a kernel whose barriers do not match hangs.
"""

import sys

import torch
from torch.utils import _pytree as pytree

from htile.testing import assert_close
from tests import products
from tests.products import BF16, F16, FUNCTIONS, arguments

SIZES = ((1, 512, 256), (17, 1000, 328), (64, 2048, 1024), (129, 1001, 512), (300, 776, 64),
         (1000, 256, 2048), (5, 264, 40), (2, 8, 8), (70, 16, 64), (700, 100, 72),
         (0, 64, 32), (9, 1, 64), (33, 72, 100))  # fmt: skip
SEVERAL = (1, 17, 64, 129)  # numbers of rows with which a row must have the same bits
LAUNCHES = 10000


def values(name: str) -> None:
    """A function at every size against float64, with operands of both dtypes."""
    f = named(name)
    for m, n, k in SIZES:
        for dtype in (BF16, F16):
            args = arguments(f, m, n, k, dtype, "cuda")
            assert_close(f, f(*args), *args)


def layouts(name: str) -> None:
    """Matrices and rows that lie otherwise in memory, with the bits of those that do not."""
    f = named(name)
    args = arguments(f, 40, 512, 256, device="cuda")
    expected = pytree.tree_leaves(f(*args))
    for change in (transposed, apart, misaligned, repeated):
        given = change(f, args)
        found = pytree.tree_leaves(f(*given))
        for a, b in zip(expected, found, strict=True):
            if change in (misaligned, repeated):  # cuBLAS multiplies, or there are other rows
                continue
            assert a.equal(b), (name, change.__name__)
        assert_close(f, f(*given), *given)
    lead = [v.unflatten(0, (5, 8)) if len(v) == 40 else v for v in args]
    for a, b in zip(expected, pytree.tree_leaves(f(*lead)), strict=True):
        assert a.equal(b.flatten(0, 1))


def transposed(f, args):
    """Matrices whose columns are contiguous, not their rows."""
    return [v.t().contiguous().t() if is_matrix(v) else v for v in args]


def apart(f, args):
    """Rows with NaN between them."""

    def spaced(v):
        if v.ndim < 2:
            return v
        wide = v.new_full((len(v), v.shape[1] + 16), torch.nan)
        wide[:, 8:-8] = v
        return wide[:, 8:-8]

    return [spaced(v) for v in args]


def misaligned(f, args):
    """Rows that begin at 2 bytes more than a multiple of 16."""
    return [torch.cat([v, v], 1)[:, 1 : v.shape[1] + 1] if v.ndim == 2 else v for v in args]


def repeated(f, args):
    """One row for all."""
    return [v[:1].expand_as(v) if v.ndim == 2 and len(v) == 40 else v for v in args]


def is_matrix(v):
    return v.ndim == 2 and len(v) != 40


def bits(name: str) -> None:
    """A row has the same bits in every number of rows, and in every place."""
    f = named(name)
    args = arguments(f, 4096, 1024, 512, device="cuda")
    whole = pytree.tree_leaves(f(*args))
    for m in SEVERAL:
        for at in (0, 777, 4096 - m):
            part = [v[at : at + m] if len(v) == 4096 else v for v in args]
            for a, b in zip(whole, pytree.tree_leaves(f(*part)), strict=True):
                assert a[at : at + m].equal(b), (name, m, at)


def gradients(name: str) -> None:
    """Gradients against autograd in float64, and the bits of results that are differentiated."""
    f = named(name)
    args = arguments(f, 60, 256, 128, device="cuda")
    ours = [v.clone().requires_grad_() if v.is_floating_point() else v for v in args]
    exact = [v.double().requires_grad_() if v.is_floating_point() else v for v in args]
    dims = tuple(0 if len(v) == 60 else None for v in args)
    results = pytree.tree_leaves(f(*ours))
    expected = pytree.tree_leaves(torch.vmap(f._fn, in_dims=dims)(*exact))
    sum(r.float().square().sum() for r in results).backward()
    sum(r.square().sum() for r in expected).backward()
    for a, b in zip(ours, exact, strict=True):
        if a.is_floating_point():
            assert (a.grad.double() - b.grad).norm() <= 0.02 * b.grad.norm() + 1e-3


def graphs(name: str) -> None:
    """A CUDA graph that is replayed with new data, and calls on two streams."""
    f = named(name)
    args = arguments(f, 100, 512, 256, device="cuda")
    f(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pytree.tree_leaves(f(*args))
    for seed in range(5):
        for v, new in zip(args, arguments(f, 100, 512, 256, device="cuda", seed=seed), strict=True):
            v.copy_(new)
        graph.replay()
        for a, b in zip(captured, pytree.tree_leaves(f(*args)), strict=True):
            assert a.equal(b)
    streams = [torch.cuda.Stream() for _ in range(2)]
    expected, found = pytree.tree_leaves(f(*args)), {}
    torch.cuda.synchronize()
    for k in range(LAUNCHES // 2):
        for stream in streams:
            with torch.cuda.stream(stream):
                found[stream] = pytree.tree_leaves(f(*args))
        if k % 100 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for results in found.values():
        assert all(a.equal(b) for a, b in zip(results, expected, strict=True))


def named(name: str):
    return next(f for f in FUNCTIONS if f._signature.name == name)


if __name__ == "__main__":
    torch.manual_seed(0)
    what, *names = sys.argv[1:]
    for each in names or [f._signature.name for f in FUNCTIONS]:
        if what == "gradients" and named(each) is products.mlp:
            continue  # its float64 form does not round
        globals()[what](each)
    print("right")
