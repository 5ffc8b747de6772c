"""How a kernel runs: streams, graphs, shapes, strides, sizes, and what is refused."""

import math

import pytest
import torch

import htile
from htile.testing import assert_close

from .matrix import BF16, EXAMPLES, F16, F32, assert_same_bits, job, rows_of, run, seed

pytestmark = pytest.mark.gpu

softmax, softmax_arguments = EXAMPLES["softmax"]
rmsnorm, residual_arguments = EXAMPLES["rmsnorm_residual"]
N = 1000
LARGE = 175000, 12288  # more than 2 ** 31 elements


@htile.rowwise
def normalized(x, shift: htile.PerRow, weight=None):
    y = x - x.mean() + shift
    return (y if weight is None else y * weight), y.abs().max()


@htile.rowwise
def squared(x):
    return x * x, (x * x).sum()


def jobs(arch):
    """What most of the tests below run."""
    for dtype in (BF16, F32):
        yield job(softmax, softmax_arguments(7, N, dtype, "meta"), arch)
        yield job(rmsnorm, residual_arguments(7, N, dtype, "meta"), arch)
    yield job(softmax, (torch.empty(7, LARGE[1], dtype=F16, device="meta"),), arch)
    yield job(squared, (torch.empty(7, 1024, dtype=F16, device="meta"),), arch)


def test_current_stream_and_no_synchronization(device):
    """Work on a side stream: the input is written late, after the call has returned."""
    seed("stream")
    x, late = torch.zeros(64, N, device=device), torch.randn(64, N, device=device)
    run(softmax, x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
        x.copy_(late)
        y = softmax(x)
    assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert_close(softmax, y, late)


def test_captured_into_a_graph(device):
    seed("graph")
    args = residual_arguments(64, N, BF16, device)
    rmsnorm(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = rmsnorm(*args)
    for tensor in (args[0], args[2]):
        tensor.normal_()
    for out in result:
        out.fill_(math.nan)
    graph.replay()
    assert_close(rmsnorm, result, *args)


def test_allocates_its_outputs_only(device):
    x = torch.randn(1024, N, device=device)
    y = softmax(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.cuda.device(device):
        y = softmax(x)
    assert torch.cuda.max_memory_allocated() - before <= y.numel() * y.element_size() + 2**21


@pytest.mark.parametrize("lead", [(0,), (3, 0), (0, 5), (2, 0, 3)], ids=str)
def test_no_rows(device, lead):
    built = htile.cache_info().compiled
    x = torch.empty(*lead, N, device=device, dtype=BF16)
    y, largest = normalized(x, torch.empty(lead, device=device))
    assert y.shape == x.shape and y.dtype == BF16 and y.is_cuda
    assert largest.shape == lead and largest.dtype == F32
    assert htile.cache_info().compiled == built, "nothing is to be compiled for no rows"
    torch.cuda.synchronize()


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3), (N,), (1, 1)], ids=str)
def test_leading_dimensions(device, lead):
    seed(lead)
    x = torch.randn(*lead, N, device=device, dtype=F32).to(BF16)
    if not lead:  # the only tensor may be one row
        assert_close(softmax, run(softmax, x), x)
        return
    args = x, torch.randn(lead, device=device), torch.randn(N, device=device)
    assert_close(normalized, run(normalized, *args), *args)
    flat = x.view(-1, N), args[1].view(-1), args[2]
    y, largest = run(normalized, *args)
    assert_same_bits((y.view(-1, N), largest.view(-1)), run(normalized, *flat))


STRIDED = {
    "left part": lambda wide, n: wide[:, :n],
    "right part": lambda wide, n: wide[:, -n:],
    "odd offset": lambda wide, n: wide[:, 1 : n + 1],
    "every second row": lambda wide, n: wide[::2, :n],
    "one row, expanded": lambda wide, n: wide[3:4, :n].expand(8, n),
    "one row of odd offset, expanded": lambda wide, n: wide[3:4, 1 : n + 1].expand(8, n),
    "overlapping rows": lambda wide, n: wide.as_strided((6, n), (3, 1), 5),
}


@pytest.mark.parametrize("extra", [8, 13, 2])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("view", STRIDED)
def test_strides(device, view, dtype, extra):
    """Rows further apart than they are long, at every alignment, read in place."""
    seed(view, extra)
    wide = torch.randn(8, N + extra, device=device).to(dtype)
    x = STRIDED[view](wide, N)
    y = run(softmax, x)
    assert_close(softmax, y, x)
    assert_same_bits(y, run(softmax, x.contiguous()))


def test_rows_that_broadcast(device):
    seed("broadcast")
    x, weight, residual = residual_arguments(6, N, BF16, device)
    cases = (
        (x, weight, residual[:1]),
        (x[:1], weight, residual),
        (x.view(2, 3, N), weight, residual[:3]),
        (x.view(2, 3, N)[:, :1], weight, residual.view(2, 3, N)[:1]),
    )
    for args in cases:
        assert_close(rmsnorm, run(rmsnorm, *args), *args)


def test_more_than_2_to_the_31_elements(device):
    m, n = LARGE
    seed("large")
    x = torch.empty(m, n, dtype=F16, device=device).normal_()
    assert x.numel() > 2**31
    y = softmax(x)  # not poisoned: chosen rows are compared, and their neighbours differ
    border = 2**31 // n
    rows = torch.tensor([0, 1, border - 1, border, border + 1, border + 2, m - 1], device=device)
    assert_close(softmax, y[rows], x[rows])
    some = torch.randint(0, m, (512,), device=device)
    assert_close(softmax, y[some], x[some])
    del y
    # two rows, whose distance alone is more than 2 ** 31 elements
    far = x.view(-1).as_strided((2, 1024), (x.numel() - 1024, 1))
    assert far.stride(0) >= 2**31
    result = run(squared, far)
    assert_close(squared, result, far.contiguous())
    assert not result[0][0].equal(result[0][1])


def test_what_can_not_run_is_refused_by_name(device):
    with pytest.raises(htile.ArgumentError, match="one device"):
        rmsnorm(torch.randn(4, N, device=device), torch.ones(N))
    with pytest.raises(htile.DtypeError, match="float64"):
        softmax(torch.randn(4, N, device=device, dtype=torch.float64))


def test_cpu_runs_the_reference(device):
    """The same function on CPU and GPU: each right, and of the same shapes and dtypes."""
    for name, (f, arguments) in EXAMPLES.items():
        seed(name)
        args = arguments(5, 37, BF16, "cpu")
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
        on_cpu, on_gpu = f(*args), run(f, *moved)
        assert_close(f, on_cpu, *args)
        assert_close(f, on_gpu, *moved)
        for c, g in zip(_leaves(on_cpu), _leaves(on_gpu), strict=True):
            assert (c.shape, c.dtype, c.device.type) == (g.shape, g.dtype, "cpu") and g.is_cuda


def _leaves(structure):
    return torch.utils._pytree.tree_leaves(structure)


def test_one_kernel_for_every_batch(device):
    x = torch.randn(2048, N, device=device, dtype=F32)
    whole = softmax(x)
    built = htile.cache_info().compiled
    for m in range(1, 50):
        assert_same_bits(softmax(x[:m]), rows_of(whole, slice(0, m)))
    assert htile.cache_info().compiled == built


def test_dump(device, tmp_path, monkeypatch):
    monkeypatch.setenv("HTILE_DUMP", str(tmp_path))
    x = torch.randn(3, 48, device=device)
    assert_close(squared, run(squared, x), x)
    (folder,) = tmp_path.iterdir()
    files = {file.name for file in folder.iterdir() if file.stat().st_size}
    assert {"graph.txt", "plan.txt", "kernel.py", "kernel.ptx", "resources.json"} <= files
    assert "N = 48" in (folder / "plan.txt").read_text()
    assert ".entry" in (folder / "kernel.ptx").read_text()


def test_inspect_of_gpu_tensors_is_what_runs(device, arch):
    x = torch.randn(4, N, device=device, dtype=F32)
    kernel = softmax.inspect(x)
    assert kernel.arch == arch
    assert kernel.source == softmax.inspect(x.to("meta"), arch=arch).source
    assert kernel.resources.stack == 0
