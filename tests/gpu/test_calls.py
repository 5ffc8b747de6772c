"""Calls on the GPU: scalars, graphs, streams, threads, and what is compiled for them."""

import threading
import warnings
from dataclasses import dataclass

import pytest
import torch

import htile
from htile.testing import assert_close

from .matrix import BF16, EXAMPLES, assert_same_bits, run, seed

pytestmark = pytest.mark.gpu

rmsnorm, residual_arguments = EXAMPLES["rmsnorm_residual"]
N = 1000


@htile.rowwise
def scaled(x, a: float = 2.0, b: htile.Scalar = 0.5, *, mode: str = "plain"):
    y = x * a + b
    return y.abs() if mode == "abs" else y


@htile.rowwise
def outer(x, a: float = 3.0):
    return scaled(x, a) - scaled(x).max()


@dataclass(frozen=True)
class Norm:
    eps: float

    @htile.rowwise
    def plain(self, x, weight=None):
        y = x * torch.rsqrt((x * x).mean() + self.eps)
        return y if weight is None else y * weight


@pytest.fixture
def compiled(device):
    """A function that tells how many kernels were compiled since."""
    before = htile.cache_info().compiled
    return lambda: htile.cache_info().compiled - before


def test_runtime_scalars_compile_once(compiled, device):
    seed("scalars")
    x = torch.randn(7, 72, device=device)
    for a in (2.0, 0.1, -1e30, 3, -7, 0.0, 2**40, float("inf")):
        assert_close(scaled, run(scaled, x, a), x, float(a))
    with pytest.raises(htile.ArgumentError, match="more than 64 bits"):
        scaled(x, 10**400)
    assert compiled() == 1
    for a in (0.1, -3.0):
        on_device = torch.tensor(a, device=device), torch.tensor([a], device=device)
        assert_close(scaled, run(scaled, x, *on_device), x, *on_device)
    assert compiled() == 2
    for a in (3, -4):
        on_device = torch.tensor(a, device=device)
        assert_close(scaled, run(scaled, x, on_device), x, on_device)
    assert compiled() == 3, "an int64 of the device is another kernel"


def test_a_number_and_its_tensor_give_the_same_bits(device):
    x = torch.randn(5, 88, device=device)
    for a in (0.1, 1 / 3, 1e-20):
        expected = scaled(x, a, a)
        assert_same_bits(scaled(x, torch.tensor(a, device=device), a), expected)
        assert_same_bits(scaled(x, a, torch.tensor([a], device=device)), expected)


def test_statics_and_none_are_kernels_of_their_own(compiled, device):
    x, w = torch.randn(7, 80, device=device), torch.randn(80, device=device)
    for _ in range(2):
        for mode in ("plain", "abs"):
            assert_close(scaled, run(scaled, x, mode=mode), x, mode=mode)
    assert compiled() == 2
    for eps in (1e-6, 0.5, 1e-6):
        norm = Norm(eps)
        for weight in (None, w):
            expected = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
            expected = expected if weight is None else expected * weight
            torch.testing.assert_close(norm.plain(x, weight), expected, rtol=1e-5, atol=1e-5)
    assert compiled() == 2 + 4


def test_captured_numbers_are_looked_at_again(compiled, device):
    gain = 2.0

    def f(x):
        return x * gain

    f, x = htile.rowwise(f), torch.randn(7, 96, device=device)
    for gain, kernels in ((2.0, 1), (3.0, 2), (2.0, 2), (-0.0, 3), (0.0, 4)):
        assert_same_bits(f(x), x * gain)
        assert compiled() == kernels


def test_functions_of_functions_are_one_kernel(compiled, device):
    x = torch.randn(7, 104, device=device)
    for a in (3.0, 5.0):
        assert_close(outer, run(outer, x, a), x, a)
    assert compiled() == 1


@htile.rowwise
def grown(x):
    return x + 1


@htile.rowwise
def summed(x, weight, count: htile.PerRow):
    return x + weight, count + x.max()


@pytest.mark.parametrize("m", [3, 3000])
@pytest.mark.parametrize("n", [64, 4096, 40000])
def test_launches_wait_for_each_other(device, n, m):
    """Each reads what the one before has just written: rows, shared vectors, values of rows."""
    x, weight = torch.zeros(m, n, device=device), torch.ones(1, n, device=device)
    count, next_count = torch.zeros(2, m, device=device)

    def step():
        grown(weight, out=weight)
        summed(x, weight[0], count, out=(x, next_count))
        count.copy_(next_count)

    def check(steps):
        column = 1.0 + steps
        assert (weight == column).all(), "all of it is exact"
        assert (x == column * (column + 1) / 2 - 1).all()
        assert (count == steps * (steps + 1) * (steps + 2) / 6 - steps).all()

    for _ in range(200):
        step()
    check(200)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step()
    for _ in range(10):
        graph.replay()
    check(400)


# ---- repeated calls ------------------------------------------------------------------------------


@htile.rowwise
def repeated(x, weight):
    y = x * weight
    return y, y.amax(-1, keepdim=True), y.sum()


@pytest.fixture
def long(monkeypatch):
    """A list that gets the arguments of each call that no shortcut took."""
    seen, whole = [], htile.Rowwise._call

    def call(self, args, kwargs):
        seen.append(args)
        return whole(self, args, kwargs)

    monkeypatch.setattr(htile.Rowwise, "_call", call)
    return seen


MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_calls_of_any_mode_are_short_the_second_time(device, long, mode):
    seed("modes")
    repeated(torch.randn(7, 128, device=device), torch.randn(128, device=device))
    with mode():
        x, weight = torch.randn(5, 128, device=device), torch.randn(128, device=device)
        repeated(x, weight)
        before = len(long)
        apart = torch.randn(4, 160, device=device)[:, 32:]
        for rows in (x, x[:1], apart, torch.randn(9, 128, device=device)):
            y, top, total = run(repeated, rows, weight)
            torch.testing.assert_close(y, rows * weight)
            torch.testing.assert_close(top, y.amax(-1, keepdim=True))
            torch.testing.assert_close(total, y.sum(-1))
            assert y.is_contiguous() and y.device == rows.device
        assert len(long) == before


def test_calls_with_out_and_in_place_are_short_the_second_time(device, long):
    """They may come in turn and be of other sizes; each result is right."""
    seed("out")

    def calls(m):
        x, weight = torch.randn(m, 128, device=device), torch.randn(128, device=device)
        expected = repeated(x, weight)
        outs = tuple(torch.full_like(t, torch.nan) for t in expected)
        assert repeated(x, weight, out=outs) is outs
        assert_same_bits(outs, expected)
        others = tuple(torch.full_like(t, torch.nan) for t in expected[1:])
        assert repeated(x, weight, out=(x, *others))[0] is x
        assert_same_bits((x, *others), expected)

    calls(5)
    before = len(long)
    for m in (5, 5, 7, 33, 1, 5):
        calls(m)
    assert len(long) == before


def test_a_hazard_after_a_shortcut_is_refused(device, long):
    wide = torch.randn(5, 256, device=device)
    x, out = wide[:, :128], torch.empty(5, 128, device=device)
    for _ in range(3):
        scaled(x, out=out), scaled(out, out=out)
    before = wide.clone()
    for hazard in (wide[:, 1:129], wide[:, 127:255], wide.as_strided((5, 128), (127, 1))):
        with pytest.raises(htile.ArgumentError, match="out="):
            scaled(x, out=hazard)
    torch.cuda.synchronize()
    assert torch.equal(wide, before)


def test_what_the_compiled_function_refuses_goes_the_long_way(device, long):
    seed("refused")
    x, weight = torch.randn(5, 128, device=device), torch.randn(128, device=device)
    repeated(x, weight), repeated(x, weight)
    shifted = torch.randn(4 * 128 + 1, device=device)[1:].view(4, 128)  # off by 4 bytes
    before = len(long)
    torch.testing.assert_close(repeated(shifted, weight)[0], shifted * weight)
    torch.testing.assert_close(repeated(x[None], weight)[0], x[None] * weight)
    torch.testing.assert_close(repeated(x.t().contiguous().t(), weight)[0], x * weight)
    assert len(long) == before + 3
    for elsewhere in ("meta", "cpu"):
        with pytest.raises(htile.ArgumentError, match="expected all tensors on one device"):
            repeated(x, weight.to(elsewhere))


# ---- CUDA graphs ---------------------------------------------------------------------------------


def test_replay_with_new_data_and_new_scalars(device):
    seed("replay")
    x, out = torch.randn(33, N, device=device), torch.empty(33, N, device=device)
    a, b = torch.tensor(2.0, device=device), torch.tensor([0.5], device=device)
    scaled(x, a, b), scaled(x, a, b, out=out), scaled(out, a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = scaled(x, a, b)
        scaled(result, a, b, out=out)
        scaled(x, a, b, out=x)
    for value in (3.0, -0.25):
        x.normal_()
        a.fill_(value), b.fill_(value / 2)
        before = x.clone()
        result.zero_(), out.zero_()
        graph.replay()
        assert_close(scaled, result, before, a, b)
        assert_close(scaled, out, result, a, b)
        assert_same_bits(x, result)


def test_numbers_are_fixed_in_a_graph(device):
    x = torch.randn(9, N, device=device)
    scaled(x, 2.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = scaled(x, 3.0)  # another number, the same kernel
    result.zero_()
    graph.replay()
    assert_same_bits(result, scaled(x, 3.0))


def test_the_first_call_inside_a_capture_raises_and_breaks_nothing(device):
    x = torch.randn(9, 112, device=device)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        with (
            pytest.raises(htile.ArgumentError, match="call it once before the capture"),
            torch.cuda.graph(graph),
        ):
            scaled(x)
    torch.cuda.synchronize()
    assert_close(scaled, scaled(x), x)
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        result = scaled(x)
    result.zero_()
    again.replay()
    assert_close(scaled, result, x)


def test_new_shapes_of_a_kernel_that_ran_can_be_captured(compiled, device):
    scaled(torch.randn(9, 120, device=device))
    x, turned = torch.randn(33, 120, device=device), torch.randn(120, 5, device=device).t()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = scaled(x), scaled(turned)
    assert compiled() == 1
    for value, result in zip((x, turned), results, strict=True):
        value.normal_(), result.zero_()
    graph.replay()
    for value, result in zip((x, turned), results, strict=True):
        assert_close(scaled, result, value)


# ---- streams, threads, synchronization -----------------------------------------------------------


def test_nothing_synchronizes(device):
    seed("sync")
    args = residual_arguments(64, N, BF16, device)
    outs = torch.empty_like(args[0]), torch.empty_like(args[0])
    a = torch.tensor(0.5, device=device)
    x = torch.randn(8, N, device=device)

    def calls():
        rmsnorm(*args)
        rmsnorm(*args, out=outs)
        rmsnorm(args[0].t().contiguous().t(), *args[1:])
        scaled(x, a), scaled(x, 2), scaled(x, out=x)

    calls()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
        rmsnorm(*(t[:32] if t.ndim > 1 else t for t in args))  # a new kind of call
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_two_streams(device):
    """Each call runs on the stream that is current where it is made."""
    seed("streams")
    xs = [torch.zeros(64, N, device=device) for _ in range(2)]
    late = [torch.randn(64, N, device=device) for _ in range(2)]
    scaled(xs[0])
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for stream, x, values in zip(streams, xs, late, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            x.copy_(values)
            results.append(scaled(x))
    assert not streams[1].query(), "the call waited for the GPU"
    for stream, result, values in zip(streams, results, late, strict=True):
        stream.synchronize()
        assert_close(scaled, result, values)


def test_first_calls_of_many_threads(device):
    seed("threads")

    @htile.rowwise
    def f(x, a: float):
        return torch.softmax(x, -1) * a

    xs = [torch.randn(5, n, device=device) for n in (40, 48, 40, 56)]
    barrier, results, failures = threading.Barrier(8), {}, []

    def call(k):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                results[k] = f(xs[k % 4], float(k))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=call, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for k, result in results.items():
        assert_close(f, result, xs[k % 4], float(k))
    assert len(results) == 8
