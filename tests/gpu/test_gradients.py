"""Gradients on a GPU: values, bits, strides, CUDA graphs, streams."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from examples.gallery import NAMES, load, variants
from htile.build.arch import arch_named
from htile.build.compile import build
from htile.testing import assert_close
from tests.frontend.test_dynamic import OF_FEW, few_numbers
from tests.lower import test_by_column, test_compile, test_ranked, test_scan_plans
from tests.test_gradients import (
    EXAMPLES,
    SHORT,
    TIED,
    layernorm,
    rmsnorm,
    softmax,
    without_default,
)
from tests.training import assert_gradients, cotangents_of, gradients, leaves_of

from .matrix import BF16, F32, assert_same_bits, seed

pytestmark = pytest.mark.gpu

SIZES = (64, 1003, 4096, 8192, 20000)
ROWS, FEW = 70, 9
PAIRS = [(name, n) for name in EXAMPLES for n in SIZES]
GPU_LENGTH = 256  # of rows of the gallery
BUSY = 1000  # products of another stream, of about 0.2 ms each
RANKED = {"topk_softmax"}  # equal elements, which it has, torch ranks in any order on a GPU
GALLERY = sorted({*NAMES} - TIED - RANKED)


def all_pairs(x):
    d = x[None, :] - x[:, None]
    return (F.softplus(4 * d) * (d > -0.2)).sum()


@htile.rowwise
def sparse(x, weight):
    """What trains a weight: the row where it is among the first elements, and scaled."""
    return torch.where(x >= x.topk(24).values[-1], x * weight, 0.0)


SCANS = {
    "sums": htile.rowwise(lambda x: x.cumsum(-1)),
    "products": htile.rowwise(lambda x: x.cumprod(-1)),
    "from the end": htile.rowwise(lambda x: x.flip(-1).cumsum(-1).flip(-1)),
    "logarithms": htile.rowwise(lambda x: x.logcumsumexp(-1)),
}
IN_TORCH = {
    "sums": lambda x: x.cumsum(-1), "products": lambda x: x.cumprod(-1),
    "from the end": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "logarithms": lambda x: x.logcumsumexp(-1),
}  # fmt: skip
# Functions of ranks, of all pairs of elements, and of one element after the other, with lengths.
RANKS = [(f, n) for f in test_ranked.FUNCTIONS for n in (32, 64, 256, 1000)
         if f is not test_ranked.ordered or n <= 64]  # fmt: skip
LOOPS = [(f, n) for f in (test_by_column.discounted, test_by_column.returns) for n in (40, 128)]
FUNCTIONS = [*RANKS, *LOOPS, *((all_pairs, n) for n in (16, 17, 33))]
SCANNED = [(name, n, dtype) for name in SCANS for n in (1, 7, 64, 1003, 4096, 20001, 65536)
           for dtype in (F32, BF16)]  # fmt: skip


def scanned(name, n, dtype, device):
    """Rows whose products neither overflow nor vanish; some have a zero, or two."""
    seed(name, n, dtype)
    x = torch.exp2(torch.randn(ROWS, n, device=device) * 0.05)
    x *= torch.where(torch.rand(ROWS, n, device=device) < 0.5, -1.0, 1.0)
    for row, zeros in enumerate(((0,), (n - 1,), (n // 2,), (n // 3, n // 2), (0, n - 1)), 3):
        x[row, list(zeros)] = 0.0
    return SCANS[name], (x.to(dtype),)


def function(f, n, device):
    """Random rows: hardly any elements are equal, whose ranks torch gives in any order."""
    seed(f.__name__, n)
    return htile.rowwise(f), (torch.randn(ROWS, n, device=device),)


def example(name, n, dtype, device):
    module = importlib.import_module(f"examples.{name}")
    seed(name, n)
    return getattr(module, name), module.arguments(ROWS, n, dtype, device)


def of_gallery(name, device):
    module = load(name)
    seed(name)
    size = getattr(module, "SMALL", (GPU_LENGTH,))[0]
    f, args = getattr(module, name), module.arguments(ROWS, size, BF16, device)
    return f, (*args, *without_default(f, args, variants(name)[0]))


def in_worker(make, key, arch):
    f, args = make(*key, "meta")
    kernel = f.inspect(*args, arch=arch)
    try:
        of_call = kernel.training
    except htile.GradientError:  # no result has a gradient
        return
    for each in (of_call.forward, of_call.backward):
        build(each.lowered.source, each.lowered.function, arch)


def jobs(arch):
    for name, n in PAIRS:
        yield in_worker, (example, (name, n, BF16), arch)
    for name in GALLERY:
        yield in_worker, (of_gallery, (name,), arch)
    for key in FUNCTIONS:
        yield in_worker, (function, key, arch)
    for key in SCANNED:
        if is_held(*key, arch):
            yield in_worker, (scanned, key, arch)


def is_held(name, n, dtype, arch):
    """Whether registers hold the rows of a gradient; long ones need clusters."""
    f, (x,) = scanned(name, n, dtype, "meta")
    try:
        f.inspect(x.requires_grad_(), arch=arch).backward.plan  # noqa: B018 (it may be refused)
    except htile.UnsupportedError:
        assert n > 8192 and arch_named(arch).max_cluster == 1
        return False
    return True


@pytest.mark.parametrize(("f", "n"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", v))
def test_functions(device, f, n):
    f, args = function(f, n, device)
    assert_gradients(f, *args)


@pytest.mark.parametrize("name, n", PAIRS)
def test_examples(device, name, n):
    f, args = example(name, n, BF16, device)
    assert_gradients(f, *args)


@pytest.mark.parametrize("name", GALLERY)
def test_gallery(device, name):
    f, args = of_gallery(name, device)
    assert_gradients(f, *args)


@pytest.mark.parametrize("name, n, dtype", SCANNED)
def test_scans(device, arch, name, n, dtype):
    """The bound is relative to the sum of the magnitudes of what is added up."""
    if not is_held(name, n, dtype, arch):
        return
    f, (x,) = scanned(name, n, dtype, device)
    g = torch.randn(ROWS, n, device=device).to(dtype)

    def gradient_of(f, x, g):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, g)[0].double()

    exact = gradient_of(IN_TORCH[name], x.double(), g.double())
    # A gradient of logarithms has the same factors of g, whatever the signs of g are.
    sized = x.double() if name == "logarithms" else x.double().abs()
    size = gradient_of(IN_TORCH[name], sized, g.double().abs())
    found = gradient_of(f, x, g)
    of_result = 0.0 if dtype is F32 else 2.0**-8
    bound = 2.0**-24 * (16 + 12 * n**0.5) * size + of_result * exact.abs()
    assert ((found - exact).abs() <= bound).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_have_the_bits_that_they_have_without_gradients(device, name):
    for n in (1003, 4096, 20000):
        f, args = example(name, n, BF16, device)
        with torch.no_grad():
            plain = f(*args)
        made, _ = leaves_of(args)
        trained = pytree.tree_map(torch.Tensor.detach, f(*made))
        assert_same_bits(trained, plain, (name, n))


@pytest.mark.parametrize("name", SHORT)
def test_results_of_short_functions_have_these_bits_too(device, name):
    f = htile.rowwise(SHORT[name])
    for n in (100, 4096, 20000):
        x = torch.randn(64, n, device=device).to(BF16)
        plain = f(x)
        assert_same_bits(f(x.requires_grad_()).detach(), plain, (name, n))
        assert_gradients(f, x[:3])


@pytest.mark.parametrize("name", OF_FEW)
def test_few_numbers_of_rows_of_any_length(device, name):
    f = few_numbers(name)
    for n in (3, 100, 1003, 20000):
        x, y = torch.randn(40, n, device=device), torch.arange(40, device=device) % n
        assert_close(f, f(x, y), x, y)
        assert_gradients(f, x.requires_grad_(), y)


@pytest.mark.parametrize("n", [9, 16, 40])
@pytest.mark.parametrize("name", ["ranked", "largest", "of products"])
def test_largest_elements_of_parts_of_scans(device, name, n):
    """The kernel finds them again, among elements of the same bits."""
    seed("parts of scans", n)
    x = torch.randn(500, n, device=device, requires_grad=True)
    assert_gradients(htile.rowwise(test_scan_plans.PARTS_OF_SCANS[name]), x)


def test_float32_and_many_rows(device):
    seed("many")
    for n in (128, 4096):
        x = torch.randn(3000, n, device=device)
        weight, bias = torch.rand(n, device=device), torch.randn(n, device=device)
        assert_gradients(layernorm, x, weight, bias)
        assert_gradients(rmsnorm, x.to(BF16), weight)


def test_cotangents_of_any_strides(device):
    x = torch.randn(64, 1024, device=device, dtype=BF16, requires_grad=True)
    w = torch.rand(1024, device=device, dtype=BF16, requires_grad=True)
    y = rmsnorm(x, w)
    g = torch.randn(1024, 64, device=device, dtype=BF16)
    ones = torch.ones((), device=device, dtype=BF16)
    for given in (g.t(), ones.expand(64, 1024), torch.randn_like(x)[:1].expand(64, 1024)):
        found = torch.autograd.grad(y, (x, w), given, retain_graph=True)
        right = torch.autograd.grad(y, (x, w), given.contiguous(), retain_graph=True)
        assert_same_bits(found, right)


def test_the_same_bits_in_every_run_and_stream(device):
    x = torch.randn(5000, 4096, device=device, dtype=BF16, requires_grad=True)
    w = torch.rand(4096, device=device, dtype=BF16, requires_grad=True)
    y = rmsnorm(x, w)
    g = torch.randn_like(y)
    first = torch.autograd.grad(y, (x, w), g, retain_graph=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for k in range(20):
        with torch.cuda.stream(side if k % 2 else torch.cuda.current_stream()):
            found = torch.autograd.grad(y, (x, w), g, retain_graph=True)
        torch.cuda.synchronize()
        assert_same_bits(found, first)


def cotangent_of(kind, y):
    g = torch.randn_like(y)
    if kind == "misaligned":
        return torch.empty(g.numel() + 1, device=g.device, dtype=g.dtype)[1:].view_as(g).copy_(g)
    if kind == "transposed":
        return g.t().contiguous().t()
    return {"expanded": g[:1].expand_as(g), "one": g[:1, :1].expand_as(g)}.get(kind, g)


def rows_from(first, args):
    """`FEW` rows of arguments of `ROWS` rows."""
    return [a[first : first + FEW].clone() if a.ndim > 1 or len(a) == ROWS else a for a in args]


@pytest.mark.parametrize("name", EXAMPLES)
def test_passes_that_come_again_have_the_bits_of_the_first(device, name):
    """They take shortcuts, on any stream; other cotangents and rows must not be taken for these."""
    f, args = example(name, 4096, BF16, device)
    made, leaves = leaves_of(args)
    side = torch.cuda.Stream()
    for kind in ("usual", "expanded", "one", "misaligned", "transposed", "usual"):
        first = None
        for stream in (torch.cuda.current_stream(), side, side):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs = [t for t in pytree.tree_leaves(f(*made)) if t.requires_grad]
                torch.manual_seed(0)
                given = [cotangent_of(kind, y) if y.ndim == 2 else torch.ones_like(y) for y in outs]
                found = torch.autograd.grad(outs, leaves, given, allow_unused=True)
                results = [*outs, *(g for g in found if g is not None)]
            torch.cuda.synchronize()
            first = results if first is None else first
            assert_same_bits(results, first)
    assert any(each.kind[0].__name__ == "RecordedWriter" for each in f._returning)
    assert_gradients(f, *args)
    f, args = example(name, 4096, BF16, device)
    some, *others = (rows_from(first, args) for first in range(0, ROWS - FEW + 1, FEW))
    assert_gradients(f, *some, others=others)


def test_a_step_is_captured_and_replayed(device):
    x = torch.randn(200, 1024, device=device, dtype=BF16, requires_grad=True)
    w = torch.rand(1024, device=device, dtype=BF16, requires_grad=True)
    g = torch.randn(200, 1024, device=device, dtype=BF16)

    def step():
        return torch.autograd.grad(rmsnorm(x, w), (x, w), g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for k in range(1000):
        torch.manual_seed(k)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            g.copy_(torch.randn_like(g))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(found, step())


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_busy_gpu_changes_no_bit(device, name):
    """Both passes, while products of another stream take the GPU's processors."""
    seed("busy", name)
    module = importlib.import_module(f"examples.{name}")
    f, args = getattr(module, name), module.arguments(3000, 4096, BF16, device)
    given, leaves = leaves_of(args)
    cotangents = cotangents_of(f(*given))

    def step():
        results = pytree.tree_leaves(f(*given))
        with_gradient = [each for each in results if each.requires_grad]
        gradients_of_all = torch.autograd.grad(with_gradient, leaves, cotangents)
        return [each.detach() for each in results], gradients_of_all

    first, side = step(), torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=device, dtype=BF16)
    out = a @ a  # what it takes is there before
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(BUSY):
            torch.mm(a, a, out=out)
        ended = side.record_event()
    found = [step() for _ in range(10)]
    torch.cuda.current_stream().synchronize()
    assert not ended.query(), "the GPU was idle"
    torch.cuda.synchronize()
    for each in found:
        assert_same_bits(each, first, name)


def test_a_first_backward_pass_in_a_capture_is_refused(device):
    f = htile.rowwise(lambda x: x.sin() * x)
    x = torch.randn(20, 64, device=device, requires_grad=True)
    side = torch.cuda.Stream()  # autograd runs a backward pass on the stream of its forward pass
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = f(x)
        g = torch.randn_like(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(htile.ArgumentError, match="CUDA graph"),
        torch.cuda.graph(graph, stream=side),
    ):
        torch.autograd.grad(y, x, g)
    torch.cuda.synchronize()
    right = x.detach().cos() * x.detach() + x.detach().sin()
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], right)


def test_memory_is_what_is_kept(device):
    """Beside its arguments and results a norm keeps 4 bytes a row, and softmax keeps nothing."""
    x = torch.randn(4096, 4096, device=device, dtype=BF16, requires_grad=True)
    w = torch.rand(4096, device=device, dtype=F32, requires_grad=True)
    for f, args, more in ((softmax, (x,), 0), (rmsnorm, (x, w), 4 * 4096)):
        y = f(*args)
        del y
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = f(*args)
        assert torch.cuda.memory_allocated() - before <= y.nbytes + more + 512
        del y


def test_second_order(device):
    x = torch.randn(50, 512, device=device, requires_grad=True)
    w = torch.rand(512, device=device, requires_grad=True)

    def penalty(f, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
        (gx,) = torch.autograd.grad(f(*leaves).pow(3).sum(), leaves[:1], create_graph=True)
        return torch.autograd.grad(gx.square().sum(), leaves)

    def plain(x, w):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    for got, right in zip(penalty(rmsnorm, F32), penalty(plain, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-3)


def test_gradients_agree_with_those_on_the_cpu(device):
    args = (torch.randn(33, 777), torch.rand(777), torch.randn(777))
    made, leaves = leaves_of(args)
    result = layernorm(*made)
    given = cotangents_of(result)
    right = gradients([result], leaves, given)
    on_gpu, on_gpu_leaves = leaves_of(tuple(a.to(device) for a in args))
    found = gradients([layernorm(*on_gpu)], on_gpu_leaves, [g.to(device) for g in given])
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got.cpu(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "n"), ((3, 8192), (700, 4096), (300, 40000)))
def test_ranks_that_warps_find_together(rows, n, device):
    seed("training", n)
    x = torch.randn(rows, n, device=device, requires_grad=True)
    weight = torch.randn(n, device=device, requires_grad=True)
    cotangent = torch.randn(rows, n, device=device)
    found = torch.autograd.grad(sparse(x, weight), (x, weight), cotangent)
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    kept = wide[0] >= wide[0].topk(24).values[:, -1:]
    exact = torch.where(kept, wide[0] * wide[1], 0.0)
    expected = torch.autograd.grad(exact, wide, cotangent.double())
    for each, known in zip(found, expected, strict=True):
        torch.testing.assert_close(each.double(), known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("f", (test_compile.of_a_vector, test_compile.of_a_repeated_vector))
@pytest.mark.parametrize("m", (1, 9, 5000))
def test_what_rows_have_beside_a_vector(m, f, device):
    seed("vector", m)
    w, p = torch.randn(40, device=device), torch.randn(m, device=device)
    assert_gradients(htile.rowwise(f), w, p)
