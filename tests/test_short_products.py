"""Repeated calls of functions with matrix products, on a GPU that the CPU stands for."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import htile
from benchmarks.idle import idle_gpu
from htile.errors import LoweringError
from htile.run.rowwise import Rowwise
from htile.run.shortcuts import text as short_text
from htile.testing import assert_close
from tests import products
from tests.on_cpu import computing, multiplying
from tests.products import BF16, F16, FUNCTIONS, arguments

cap = 2.0


@htile.rowwise
def capped(x, W: htile.Matrix, t: htile.PerRow, low: float = 0.0):
    return (F.linear(x, W) * t).clamp(low, cap)


@htile.rowwise
def unread(x, W: htile.Matrix, t: htile.PerRow):
    """A value of each row that no kernel reads."""
    return F.linear(x, W)


LAUNCHED = []  # of all tests, because a function's row kernels outlive the test that made them


@pytest.fixture
def gpu(monkeypatch):
    """`launched` has each kernel's name and tensors, `long` is how many calls went the long way."""
    LAUNCHED.clear()
    found = SimpleNamespace(launched=LAUNCHED, long=0)
    whole = Rowwise._call

    def call(self, args, kwargs):
        found.long += 1
        return whole(self, args, kwargs)

    monkeypatch.setattr(Rowwise, "_call", call)
    functions = *FUNCTIONS, capped, unread
    for f in functions:
        f._forget()
    with idle_gpu(computing(found.launched), multiplying(found.launched, monkeypatch)):
        yield found
    for f in functions:
        f._forget()


def right(f, *args, **kwargs):
    """Call, and hold the results against float64."""
    assert_close(f, f(*args, **kwargs), *args, **kwargs)


def cut(args, m, of):
    """The first `m` rows of arguments with `of` rows."""
    return [a[:m].clone() if isinstance(a, torch.Tensor) and len(a) == of else a for a in args]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_repeated_calls(gpu, f):
    """Of each number of rows the first call goes the long way, and has a kernel of its own."""
    args = arguments(f, 40, 256, 64)
    for m in (5, 5, 33, 5, 33, 40, 1, 1):
        right(f, *cut(args, m, 40))
    stands = [each for each in f._returning if hasattr(each, "kernels")]
    by_torch = f.inspect(*args, arch="sm_90a").by_torch
    assert not by_torch and len(stands) == 1
    assert {*stands[0].kernels} == {1, 5, 33, 40} and gpu.long == 4


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
@pytest.mark.parametrize("lead", [(2, 3), (2, 1, 4)], ids=str)
def test_leading_dimensions(gpu, f, lead):
    def apart(lead, seed):
        m = torch.Size(lead).numel()
        args = arguments(f, m, 264, 64, seed=seed)
        rows = [isinstance(a, torch.Tensor) and len(a) == m for a in args]
        both = zip(args, rows, strict=True)
        return [a.unflatten(0, lead) if is_one else a for a, is_one in both]

    for seed, other in enumerate((lead, lead, lead[::-1], lead)):
        right(f, *apart(other, seed))
    assert gpu.long == 1, "as many rows have the same kernels"


@pytest.mark.parametrize("lead", [(6,), (2, 3)], ids=str)
def test_kernels_of_products_write_to_out(gpu, lead):
    """What they give is neither allocated nor copied. What a row kernel gives is copied."""
    f, (x, r, W) = products.project, arguments(products.project, 6, 256, 64)
    x, r = x.unflatten(0, lead), r.unflatten(0, lead)
    for _ in range(2):
        out = torch.zeros(*lead, 256, dtype=BF16), torch.zeros(lead)
        assert f(x, r, W, out=out) is out
        assert_close(f, out, x, r, W)
    written = {t.data_ptr() for _, tensors in gpu.launched for t in tensors
               if isinstance(t, torch.Tensor)}  # fmt: skip
    assert out[0].data_ptr() in written and out[1].data_ptr() not in written


def test_out_that_lies_otherwise_is_copied(gpu):
    """Elsewhere than at a multiple of 16 bytes, in longer rows, in place, and of no rows."""
    f, (x, r, W) = products.project, arguments(products.project, 6, 256, 64)
    number = torch.zeros(6)
    longer = torch.zeros(6 * 512 + 1, dtype=BF16)
    for out in (longer[1 : 6 * 256 + 1].view(6, 256), longer[1:].view(6, 512)[:, :256]):
        f(x, r, W, out=(out, number))
        assert_close(f, (out, number), x, r, W)
    square = arguments(products.linear, 64, 64, 64)
    expected, x = products.linear(*square), square[0].clone()
    assert products.linear(x, square[1], out=x).equal(expected)
    none = torch.zeros(0, 64, dtype=BF16)
    assert products.linear(square[0][:0], square[1], out=none) is none


def test_a_plan_of_rows_for_products_alone_is_refused(gpu):
    """By each call, whether its results are differentiated or not."""
    x, W, bias = arguments(products.gelu, 6, 256, 64)
    f = products.gelu.with_plan(threads_per_row=32)
    for _ in range(2):
        with pytest.raises(LoweringError, match="has no effect"):
            f(x, W, bias)
        with pytest.raises(LoweringError, match="has no effect"):
            f(x.clone().requires_grad_(), W, bias)
    products.softmax.with_plan(threads_per_row=64)(*arguments(products.softmax, 6, 512, 512))


def test_one_row_without_dimensions(gpu):
    x, W = arguments(products.gelu, 4, 256, 64)[:2]
    for k in range(3):
        right(products.linear, x[k], W)
    assert gpu.long == 1


def test_parts_of_matrices_and_of_rows(gpu):
    """Views are made again in each call, of the tensors of that call."""
    for seed in range(3):
        for f in (products.packed_swiglu, products.matmul, products.project, products.mlp):
            right(f, *arguments(f, 6, 264, 72, seed=seed))
    x, wide = torch.randn(6, 128).bfloat16()[:, :64], torch.randn(256, 192).bfloat16()[:, 64:128]
    for _ in range(3):
        right(products.linear, x, wide)
    assert gpu.long == 5


X, W = arguments(products.linear, 5, 256, 64)
T = torch.rand(5)


def moved(x):
    made = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return made.copy_(x)


def under(mode, call):
    with mode:
        return call()


def dual():
    with forward_ad.dual_level():
        return capped(forward_ad.make_dual(X, torch.ones_like(X)), W, T)


OTHERS = {
    "rows": lambda: capped(X[:4].clone(), W, T[:4].clone()),
    "dtype": lambda: capped(X.half(), W.half(), T),
    "dtype beside": lambda: capped(X, W, T.half()),
    "K": lambda: capped(X[:, :32].clone(), W[:, :32].clone(), T),
    "N": lambda: capped(X, W[:128], T),
    "strides of rows": lambda: capped(torch.cat((X, X), 1)[:, :64], W, T),
    "rows that repeat": lambda: capped(X[:1].expand(5, 64), W, T),
    "strides of a matrix": lambda: capped(X, torch.cat((W, W), 1)[:, :64], T),
    "strides of values": lambda: capped(X, W, torch.stack((T, T), 1)[:, 0]),
    "a turned matrix": lambda: capped(X, W.t().contiguous().t(), T),
    "misaligned rows": lambda: capped(moved(X), W, T),
    "a misaligned matrix": lambda: capped(X, moved(W), T),
    "requires_grad": lambda: capped(X, W.clone().requires_grad_(), T),
    "a Parameter": lambda: capped(X, torch.nn.Parameter(W, requires_grad=False), T),
    "inference_mode": lambda: under(torch.inference_mode(), lambda: capped(X, W, T)),
    "autocast": lambda: under(torch.autocast("cpu", BF16), lambda: capped(X, W, T)),
    "vmap": lambda: torch.vmap(capped, (0, None, 0))(X[None], W, T[None]),
    "tangents": dual,
    "a number of another type": lambda: capped(X, W, T, 1),
    "out": lambda: capped(X, W, T, out=torch.empty(5, 256, dtype=BF16)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_the_long_way(gpu, name):
    right(capped, X, W, T), right(capped, X, W, T)
    assert gpu.long == 1
    with contextlib.suppress(htile.HTileError):
        OTHERS[name]()
    assert gpu.long >= 2
    long = gpu.long
    right(capped, X, W, T)
    assert gpu.long == long, "the shortcut is there still"


def test_what_is_not_read_has_the_leading_shape_too(gpu):
    x = X[:4].unflatten(0, (2, 2))
    for _ in range(2):
        unread(x, W, torch.rand(2, 2))
    assert gpu.long == 1
    with pytest.raises(htile.ShapeError):
        unread(x, W, torch.rand(4, 1))
    with pytest.raises(htile.ShapeError):
        unread(X[:4], W, torch.rand(3))


def test_a_captured_value_that_changes(gpu, monkeypatch):
    right(capped, X, W, T), right(capped, X, W, T)
    monkeypatch.setitem(globals(), "cap", 0.5)
    right(capped, X, W, T)
    assert gpu.long == 2
    monkeypatch.setitem(globals(), "cap", 2.0)
    right(capped, X, W, T)
    assert gpu.long == 2


def test_numbers_are_those_of_the_call(gpu):
    for low in (0.0, -1.0, 0.5):
        right(capped, X, W, T, low)
    assert gpu.long == 1


def test_results_on_another_gpu_are_none(gpu, monkeypatch):
    monkeypatch.setattr(
        short_text, "is_elsewhere", lambda name, device, miss: [f"if {name}.get_device():", *miss]
    )  # the CPU is -1
    capped(X, W, T), capped(X, W, T)
    assert gpu.long == 2


def test_two_kinds_share_no_kernels(gpu):
    """Those of float16 and of bfloat16, and of two matrices, with numbers of rows in common."""
    for _ in range(2):
        for dtype in (BF16, F16):
            for n in (256, 512):
                right(products.linear, *arguments(products.linear, 5, n, 64, dtype))
    assert gpu.long == 4


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_nothing_keeps_tensors_alive(gpu, f):
    args = arguments(f, 5, 256, 64)
    for _ in range(3):
        results = f(*args)
    gpu.launched.clear()
    tensors = [*args, *torch.utils._pytree.tree_leaves(results)]
    alive = [weakref.ref(t) for t in tensors if isinstance(t, torch.Tensor)]
    del args, results, tensors
    gc.collect()  # of what refused a launch, a traceback may hold the arguments
    assert not any(each() is not None for each in alive)
