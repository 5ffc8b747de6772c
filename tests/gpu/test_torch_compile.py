"""torch.compile and torch.export on a GPU: the bits of eager calls, Inductor, CUDA graphs."""

import pytest
import torch
from torch.utils import _pytree as pytree

from htile.build.compile import build
from tests import products
from tests.test_gradients import residual_norm, rmsnorm, softmax

from .matrix import BF16, F32, assert_same_bits, seed

pytestmark = pytest.mark.gpu

ROWS = 70
SIZES = (1003, 4096)
BACKENDS = ("aot_eager", "inductor")


FUNCTIONS = {
    "softmax": (softmax, 1, False), "rmsnorm": (rmsnorm, 1, True),
    "residual_norm": (residual_norm, 2, True),
}  # fmt: skip


def arguments(name, n, dtype, device):
    _, count, has_weight = FUNCTIONS[name]
    seed(name, n)
    tensors = [torch.randn(ROWS, n, device=device, dtype=dtype) for _ in range(count)]
    return [*tensors, torch.rand(n, device=device, dtype=dtype)] if has_weight else tensors


def in_worker(name, n, dtype, arch):
    kernel = FUNCTIONS[name][0].inspect(*arguments(name, n, dtype, "meta"), arch=arch)
    for each in (kernel, kernel.training.forward, kernel.training.backward):
        build(each.lowered.source, each.lowered.function, arch)


def jobs(arch):
    for name in FUNCTIONS:
        for n in SIZES:
            for dtype in (BF16, F32):
                yield in_worker, (name, n, dtype, arch)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def passes(function, tensors, cotangents):
    """The results of a function, and the gradients of its arguments."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    results = pytree.tree_leaves(function(*leaves))
    found = torch.autograd.grad(results, leaves, cotangents[: len(results)])
    return [each.detach() for each in results], found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_have_the_bits_of_eager_calls(device, name, n, backend):
    function = FUNCTIONS[name][0]
    compiled = torch.compile(lambda *given: function(*given), fullgraph=True, backend=backend)
    for dtype in (BF16, F32):
        tensors = arguments(name, n, dtype, device)
        cotangents = [torch.randn(ROWS, n, device=device, dtype=dtype) for _ in range(2)]
        assert_same_bits(compiled(*tensors), function(*tensors), (name, n, dtype))
        found, right = (passes(f, tensors, cotangents) for f in (compiled, function))
        assert_same_bits(found, right, (name, n, dtype))


@pytest.mark.parametrize(("backend", "k"), [("aot_eager", 256), ("inductor", 256),
                                            ("aot_eager", 1024)])  # fmt: skip
def test_products_have_the_bits_of_eager_calls(device, backend, k):
    """The gradients are one operation with K = 256. With K = 1024 torch multiplies for them."""
    for function in (products.gelu, products.swiglu):
        compiled = torch.compile(lambda *given, f=function: f(*given), fullgraph=True,
                                 backend=backend)  # fmt: skip
        tensors = products.arguments(function, 256, 512, k, BF16, device)
        assert_same_bits(compiled(*tensors), function(*tensors), function)
        cotangents = [torch.randn(256, 512, device=device, dtype=BF16)]
        found, right = (passes(f, tensors, cotangents) for f in (compiled, function))
        assert_same_bits(found, right, function)


def test_a_product_in_cuda_graphs(device):
    x, weight, bias = products.arguments(products.gelu, 256, 512, 256, BF16, device)
    compiled = torch.compile(lambda x: products.gelu(x, weight, bias), fullgraph=True,
                             mode="reduce-overhead")  # fmt: skip
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        y = x + step
        assert_same_bits(compiled(y).clone(), products.gelu(y, weight, bias), step)


def test_what_inductor_compiles_around_a_call_does_not_change_it(device):
    """A call's operands are what Inductor's kernels write, with the strides that it chose."""

    def function(x, weight):
        return rmsnorm((x + 1).t().contiguous().t(), weight) * 2

    x, weight = arguments("rmsnorm", 4096, F32, device)
    compiled = torch.compile(function, fullgraph=True)
    assert_same_bits(compiled(x, weight), function(x, weight))
    cotangent = [torch.randn_like(x)]
    found, right = (passes(f, (x, weight), cotangent) for f in (compiled, function))
    assert_same_bits(found, right)


def test_one_graph_serves_any_number_of_rows(device):
    x, weight = arguments("rmsnorm", 4096, BF16, device)
    compiled = torch.compile(lambda x, w: rmsnorm(x, w), fullgraph=True, dynamic=True)
    for rows in (2, 3, 33, ROWS):
        assert_same_bits(compiled(x[:rows], weight), rmsnorm(x[:rows], weight), rows)


def test_a_training_step_in_cuda_graphs(device):
    """`mode="reduce-overhead"` warms up, captures, and then replays."""
    x, weight = arguments("rmsnorm", 4096, BF16, device)
    x, weight = x.requires_grad_(), torch.nn.Parameter(weight)
    compiled = torch.compile(
        lambda x: softmax(rmsnorm(x, weight)), fullgraph=True, mode="reduce-overhead"
    )
    cotangent = torch.randn_like(x)
    y = softmax(rmsnorm(x, weight))
    right = y.detach(), *torch.autograd.grad(y, (x, weight), cotangent)
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        found = y.detach().clone(), *torch.autograd.grad(y, (x, weight), cotangent)
        assert_same_bits(found, right, step)


def test_inference_in_cuda_graphs_reads_new_values(device):
    compiled = torch.compile(lambda x: softmax(x), fullgraph=True, mode="reduce-overhead")
    for step in range(5):
        x = torch.randn(ROWS, 4096, device=device, dtype=BF16)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(compiled(x).clone(), softmax(x), step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_written_in_place(device, backend):
    def function(x):
        softmax(x, out=x)
        return x + 1

    (x,) = arguments("softmax", 4096, F32, device)
    y = x.clone()
    found = torch.compile(function, fullgraph=True, backend=backend)(x)
    assert_same_bits(found, function(y))
    assert_same_bits(x, y)


def test_no_graph_breaks(device):
    x, weight = arguments("rmsnorm", 4096, BF16, device)
    explained = torch._dynamo.explain(lambda x: softmax(rmsnorm(x * 2, weight)) + 1)(x)
    assert explained.graph_break_count == 0 and explained.graph_count == 1


def test_an_exported_program_runs(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(4096, device=device))

        def forward(self, x):
            return rmsnorm(x, self.weight)

    model, x = Model(), torch.randn(ROWS, 4096, device=device)
    rows = torch.export.Dim("rows")
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}})
    assert_same_bits(program.module()(x[:7]).detach(), model(x[:7]).detach())
