"""`@rowwise` on tensors without a GPU: results, structures, retraces, errors, and dispatch."""

import inspect
import threading
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import htile
from htile.errors import ArgumentError, CompileError
from htile.frontend.graph import Role
from htile.run import launch as launching
from htile.run import rowwise as running
from htile.run import specialize
from htile.testing import assert_close, oracle
from tests.lower.cases import BF16, EXAMPLES, F16, F32

ROWS, SIZES = (0, 1, 7), (1, 3, 17, 64, 127, 1000)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_against_float64(name, dtype):
    function, arguments = EXAMPLES[name]
    torch.manual_seed(0)
    for m in ROWS:
        for n in SIZES:
            args = arguments(m, n, dtype, "cpu")
            assert_close(function, function(*args), *args)


TORCH = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: (torch.log_softmax(x, -1), torch.logsumexp(x, -1)),
    "rmsnorm": lambda x, w: torch.rms_norm(x, x.shape[-1:], w, 1e-6),
    "layernorm": lambda x, w, b: torch.layer_norm(x, x.shape[-1:], w, b, 1e-5),
    "swiglu": lambda x, y: torch.nn.functional.silu(x) * y,
}


@pytest.mark.parametrize("name", TORCH)
def test_examples_are_what_torch_calls_by_that_name(name):
    function, arguments = EXAMPLES[name]
    args = arguments(7, 130, F32, "cpu")
    expected = TORCH[name](*(a.double() for a in args))
    torch.testing.assert_close(function(*args), expected, check_dtype=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3), (0, 4)])
def test_leading_dimensions(lead):
    x = torch.randn(*lead, 33)
    result, lse = EXAMPLES["log_softmax"][0](x)
    assert result.shape == x.shape and lse.shape == lead
    torch.testing.assert_close(result, torch.log_softmax(x, -1))


@pytest.mark.parametrize("n", [1, 5])
def test_one_value_a_row_has_an_element_at_every_n(n):
    """At N = 1 an argument of shape (M, 1) counts as a row."""

    @htile.rowwise
    def f(x, t):
        top = x.amax(-1, keepdim=True)
        return x * t[..., 0], x - t.squeeze(-1), x + t[0], x + t.squeeze() * t[-1], x / top[..., 0]

    for dtype in (F32, BF16):
        x, t = torch.randn(2, 3, n).to(dtype), torch.randn(2, 3, 1).to(dtype)
        assert_close(f, f(x, t), x, t)


ONLY = {
    F32: [-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 1e-45],
    BF16: [-0.0, 3.0, float("nan")],
    torch.int32: [-(2**31), 2**31 - 1],
    torch.int64: [-(2**63), 2**63 - 1, 0],
    torch.bool: [True, False],
}


@pytest.mark.parametrize("dtype", ONLY, ids=str)
def test_the_element_of_a_row_of_one(dtype):
    x = torch.tensor(ONLY[dtype], dtype=dtype)[:, None]
    wide = F32 if dtype.is_floating_point else dtype
    for f in (lambda x: x[..., 0], lambda x: x[-1], lambda x: x.squeeze(), lambda x: x.squeeze(0)):
        result, expected = htile.rowwise(f)(x), x[:, 0].to(wide)
        assert result.dtype is wide and torch.equal(result.isnan(), expected.isnan())
        result, expected = result.nan_to_num(7), expected.nan_to_num(7)
        assert torch.equal(result, expected) and torch.equal(result.signbit(), expected.signbit())
    assert htile.rowwise(lambda x: (x[0], x)).inspect(x).resources.stack == 0, "it compiles"


def test_the_element_of_a_row_of_one_keeps_its_dtype():
    x, w = torch.randn(4, 1), torch.randn(1)
    f = htile.rowwise(lambda x, w: (x.to(BF16)[0], x * w[0], x.half()[..., 0] + 1))
    results = f(x, w)
    assert [r.dtype for r in results] == [BF16, F32, F16]
    assert torch.equal(results[0], x[:, 0].to(BF16)) and torch.equal(results[1], x * w)
    assert_close(f, results, x, w)


class Moments(NamedTuple):
    mean: torch.Tensor
    rows: dict


def nested(x):
    return Moments(x.mean(), {"a": [x + 1, x > 0], "b": (x.amax(-1, keepdim=True),)})


def test_the_users_structure_comes_back():
    x = torch.randn(2, 5, 8)
    result = htile.rowwise(nested)(x)
    assert type(result) is Moments and list(result.rows) == ["a", "b"]
    (plus, positive), (top,) = result.rows["a"], result.rows["b"]
    assert type(result.rows["a"]) is list and type(result.rows["b"]) is tuple
    assert (result.mean.shape, plus.shape, top.shape) == ((2, 5), (2, 5, 8), (2, 5, 1))
    assert torch.equal(plus, x + 1) and torch.equal(positive, x > 0)
    torch.testing.assert_close(result.mean, x.mean(-1))
    assert torch.equal(top, x.amax(-1, keepdim=True))


@htile.rowwise
def affine(x, scale: float = 2.0, *, shift: float = 0.5, negate: bool = False):
    y = x * scale + shift
    return -y if negate else y


@pytest.mark.parametrize(
    ("args", "kwargs", "scale", "shift"),
    [
        ((), {}, 2.0, 0.5),
        ((3.0,), {}, 3.0, 0.5),
        ((3,), {}, 3.0, 0.5),
        ((), {"scale": 4.0, "shift": 1.0}, 4.0, 1.0),
        ((), {"shift": torch.tensor(1.5)}, 2.0, 1.5),
        ((), {"negate": True}, -2.0, -0.5),
    ],
)
def test_keywords_and_defaults(args, kwargs, scale, shift):
    x = torch.randn(3, 16)
    torch.testing.assert_close(affine(x, *args, **kwargs), x * scale + shift)
    named = dict(zip(("x", "scale"), (x, *args), strict=False)) | kwargs
    torch.testing.assert_close(affine(**named), x * scale + shift)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "affine needs 'x'"),
        ((1, 2, 3), {}, "takes 2 positional arguments, got 3"),
        ((torch.ones(2, 4),), {"colour": 1}, "no keyword argument 'colour'"),
        ((torch.ones(2, 4),), {"x": 1}, "got parameter 'x' twice"),
        ((3.0,), {}, "expected a row argument"),
        (([1.0, 2.0],), {}, "expected a tensor, float, .* got list"),
        ((torch.ones(2, 4),), {"shift": [1]}, "got list"),
        ((torch.ones(2, 4), "a"), {}, "scale is annotated float: expected a number, got str 'a'"),
    ],
)
def test_arguments_that_do_not_fit(args, kwargs, message):
    with pytest.raises(ArgumentError, match=message):
        affine(*args, **kwargs)


# ---- retraces ------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch):
    """A list that gets the static values of each trace that is made."""
    statics = []

    def trace(fn, specs, n, *rest):
        statics.append(tuple(s.value for s in specs if s.role is Role.STATIC))
        return original(fn, specs, n, *rest)

    original = specialize.trace
    monkeypatch.setattr(specialize, "trace", trace)
    return statics


def test_a_float_does_not_retrace_and_a_static_does(traced):
    @htile.rowwise
    def f(x, a: float, power: int, mode: str):
        return (x * a) ** power if mode == "power" else x * a

    x = torch.rand(2, 8) + 0.5
    for a, power, mode in ((2.0, 2, "power"), (3.0, 2, "power"), (3, 3, "power"), (2.0, 2, "no")):
        expected = (x * a) ** power if mode == "power" else x * a
        torch.testing.assert_close(f(x, a, power, mode), expected)
    assert traced == [(2, "power"), (3, "power"), (2, "no")]


def test_shapes_and_dtypes_retrace_and_batches_do_not(traced):
    f = htile.rowwise(lambda x: x * 2)
    for m in (1, 2, 7, 0):
        f(torch.ones(m, 8))
    f(torch.ones(3, 2, 8))
    assert len(traced) == 1
    f(torch.ones(1, 9))
    f(torch.ones(1, 8, dtype=BF16))
    assert len(traced) == 3


@pytest.mark.parametrize(
    "values", [(1, True, 1.0), (0.0, -0.0), (None, 0, False), (torch.float32, torch.float64)]
)
def test_statics_differ_by_type_and_bits(traced, values):
    @htile.rowwise
    def f(x, s: htile.Static):
        return x + 1

    for value in values * 2:
        f(torch.ones(2, 4), value)
    assert [repr(s) for (s,) in traced] == list(map(repr, values))


def test_a_captured_scalar_that_changes_retraces():
    cap = 2.0

    def f(x):
        return x.clamp(max=cap)

    g, x = htile.rowwise(f), torch.tensor([[1.0, 5.0]])
    assert g(x).tolist() == [[1.0, 2.0]]
    cap = 3.0
    assert g(x).tolist() == [[1.0, 3.0]]
    cap = 2.0
    assert g(x).tolist() == [[1.0, 2.0]]


@dataclass(frozen=True)
class Options:
    scale: float = 2.0


OPTIONS = Options()


def test_a_captured_global_that_changes_retraces(monkeypatch):
    g, x = htile.rowwise(lambda x: x * OPTIONS.scale), torch.ones(1, 2)
    assert g(x).tolist() == [[2.0, 2.0]]
    monkeypatch.setitem(globals(), "OPTIONS", Options(5.0))
    assert g(x).tolist() == [[5.0, 5.0]]


def test_eight_values_of_a_static_warn_once_with_the_remedy():
    @htile.rowwise
    def f(x, power: int):
        return x + power

    x = torch.ones(1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for power in range(7):
            f(x, power)
            f(x, power)
    with pytest.warns(UserWarning, match="8 values of 'power'.*annotate it `power: float`") as seen:
        f(x, 7)
    assert seen[0].filename == __file__, "it points at the call"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for power in range(12):
            f(x, power)


def test_the_warning_of_inspect_points_at_the_call():
    @htile.rowwise
    def f(x, power: int):
        return x + power

    with pytest.warns(UserWarning, match="8 values of 'power'") as seen:
        for power in range(8):
            f.inspect(torch.ones(1, 4), power)
    assert seen[0].filename == __file__


# ---- what is refused -----------------------------------------------------------------------------


def test_tensors_of_two_devices_are_refused():
    message = r"expected all tensors on one device, got x on cpu, weight on meta.*\.to\(device\)"
    for use in (EXAMPLES["rmsnorm"][0], EXAMPLES["rmsnorm"][0].inspect):
        with pytest.raises(ArgumentError, match=message):
            use(torch.ones(2, 8), torch.ones(8, device="meta"))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(8, 4).t(),
        torch.randn(4, 6, 8).transpose(0, 1)[:, :2],
        torch.randn(4, 8)[:, ::2],
        torch.randn(2, 3, 4, 8)[:, ::2],
        torch.randn(8),
    ],
)
def test_every_layout_has_a_kernel(x):
    softmax, _ = EXAMPLES["softmax"]
    assert softmax.inspect(x).plan.target.lead == x.ndim - 1
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(4, 16)[:, :8],
        torch.ones(4, 16)[::2],
        torch.ones(8)[None].expand(4, 8),
        torch.ones(4, 8)[:, :1],
        torch.ones(2, 3, 8),
        torch.ones(6, 2, 8)[:, 0],
    ],
)
def test_layouts_that_a_kernel_takes(x):
    softmax, _ = EXAMPLES["softmax"]
    assert softmax.inspect(x).graph.n == x.shape[-1]


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_takes_meta_tensors_and_an_architecture():
    x = torch.empty(2, 3, 4096, device="meta", dtype=BF16)
    softmax, _ = EXAMPLES["softmax"]
    assert softmax.inspect(x).arch == "sm_90a"
    kernel = softmax.inspect(x, arch="sm_80")
    assert kernel.arch == "sm_80" and ".target sm_80" in kernel.ptx
    assert kernel.plan.target.arch.name == "sm_80"
    with pytest.raises(CompileError, match="sm_42"):
        softmax.inspect(x, arch="sm_42")


def test_an_architecture_that_is_no_text_is_unknown():
    with pytest.raises(CompileError, match="unknown architecture 90"):
        EXAMPLES["softmax"][0].inspect(torch.empty(2, 8, device="meta"), arch=90)


def test_inspect_takes_no_fake_tensors():
    """The advice for other subclasses, `as_subclass`, would be wrong for them."""
    softmax, _ = EXAMPLES["softmax"]
    mode, x = FakeTensorMode(), torch.randn(4, 8)
    fake = mode.from_tensor(x)
    for use in (softmax.inspect, softmax.compile):
        with pytest.raises(htile.UnsupportedError, match=r"pass meta tensors to softmax\.inspect"):
            use(fake)
        with mode, pytest.raises(htile.UnsupportedError, match="torch traces here"):
            use(x)
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))


def test_meta_tensors_and_real_ones_give_one_kernel():
    for name, (function, arguments) in EXAMPLES.items():
        meta, real = (
            function.inspect(*arguments(7, 1000, BF16, device)) for device in ("meta", "cpu")
        )
        assert meta.source == real.source, name


def test_calls_with_meta_tensors_give_shapes():
    function, arguments = EXAMPLES["capped_softmax"]
    result = function(*arguments(7, 33, BF16, "meta"))
    assert {k: (v.shape, v.dtype, v.device.type) for k, v in result.items()} == {
        "probabilities": ((7, 33), BF16, "meta"),
        "entropy": ((7,), F32, "meta"),
    }


# ---- the object ----------------------------------------------------------------------------------


def test_it_is_the_function_that_it_wraps():
    def softplus(x, beta: float = 1.0):
        """One line."""
        return torch.log1p(torch.exp(beta * x)) / beta

    f = htile.rowwise(softplus)
    assert (f.__name__, f.__doc__, f.__module__) == ("softplus", "One line.", __name__)
    assert f.__qualname__ == softplus.__qualname__ and f.__wrapped__ is softplus
    assert inspect.signature(f) == inspect.signature(softplus)
    assert repr(f) == "<htile.rowwise softplus>"
    assert isinstance(f, htile.Rowwise)


def test_decorating_with_and_without_arguments():
    x = torch.randn(2, 8)
    plain, called = htile.rowwise(lambda x: torch.tanh(x)), htile.rowwise()(lambda x: torch.tanh(x))
    fast = htile.rowwise(fastmath=True)(lambda x: torch.tanh(x))
    assert torch.equal(plain(x), called(x)) and torch.equal(plain(x), fast(x))
    assert plain.inspect(x).source == called.inspect(x).source != fast.inspect(x).source
    assert "fastmath=True" in fast.inspect(x).source


@pytest.mark.parametrize("given", [{"dyn": True}, {"fast_math": True, "dynamic_n": True}])
def test_options_that_there_are_not(given):
    unknown = next(iter(given))
    for call in (lambda: htile.rowwise(**given), lambda: htile.rowwise(lambda x: x, **given)):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert f"htile.rowwise({unknown}=)" in caught.value.message
        assert "fastmath=True and dynamic_n=True" in caught.value.message


def test_with_plan_leaves_the_function_alone():
    softmax, _ = EXAMPLES["softmax"]
    x = torch.empty(4, 4096, device="meta", dtype=BF16)
    forced = softmax.with_plan(threads_per_row=64).with_plan(num_threads=128)
    plan = forced.inspect(x).plan
    assert (plan.numerics.threads_per_row, plan.placement.num_threads) == (64, 128)
    assert softmax.inspect(x).plan.numerics.threads_per_row == 256


def test_first_calls_of_two_threads():
    def f(x):
        return torch.softmax(x, -1)

    g, x = htile.rowwise(f), torch.randn(4, 65)
    barrier, results = threading.Barrier(4), []

    def call():
        barrier.wait()
        results.append((g(x), g.inspect(x).resources))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len({resources for _, resources in results}) == 1
    for result, _ in results:
        torch.testing.assert_close(result, torch.softmax(x, -1))


def test_inputs_are_left_alone_and_outputs_are_new():
    x = torch.randn(3, 8)
    before = x.clone()
    result = htile.rowwise(lambda x: x)(x)
    assert torch.equal(x, before) and torch.equal(result, x)
    assert result.data_ptr() != x.data_ptr()


def test_oracle_and_reference_share_no_code():
    """A wrong reference is found out, because the oracle runs the user's own function."""
    f = htile.rowwise(lambda x: torch.exp(x))
    x = torch.randn(2, 8)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_close(f, f(x) * 1.001, x)
    assert oracle(f, x).dtype == torch.float64


# ---- dispatch, as it goes on a GPU ---------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch):
    """Calls go the way of CUDA tensors up to the launch; the list gets what is prepared."""
    calls = []

    def prepare(request, device, known):
        calls.append(request.values)
        return "launch"

    monkeypatch.setattr(running, "device_of", lambda signature, values: torch.device("cuda"))
    monkeypatch.setattr(running, "prepare", prepare)
    monkeypatch.setattr(running, "run", lambda launch, values, outs: launch)
    monkeypatch.setattr(running.Rowwise, "_add_shortcuts", lambda *arguments: None)
    return calls


def test_calls_of_one_kind_are_prepared_once(prepared):
    f = htile.rowwise(lambda x: x * 2)
    x = torch.zeros(4, 64)
    for _ in range(3):
        assert f(x) == "launch"
    assert len(prepared) == 1


ALIGNED = torch.zeros(4, 4 * 65)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(5, 64),
        torch.zeros(4, 65),
        torch.zeros(2, 2, 64),
        torch.zeros(4, 64, dtype=BF16),
        torch.zeros(4, 128)[:, :64],
        ALIGNED[:, 1:65],
        torch.zeros(64, 4).t(),
        torch.nn.Parameter(torch.zeros(4, 64), requires_grad=False),
    ],
)
def test_calls_of_another_kind_are_prepared_anew(prepared, x):
    f = htile.rowwise(lambda x: x * 2)
    f(torch.zeros(4, 64))
    f(x)
    assert len(prepared) == 2


def test_numbers_of_run_time_are_no_kind_of_their_own(prepared):
    @htile.rowwise
    def f(x, a: float):
        return x * a

    for a in (1.0, 2.5, -0.0):
        f(torch.zeros(4, 64), a)
    assert len(prepared) == 1


@pytest.mark.parametrize("values", [(0.5, 0.25), (1, 1.0), (0.0, -0.0), ("a", "b"), (True, 1)])
def test_statics_are_kinds_of_their_own(prepared, values):
    @htile.rowwise
    def f(x, s: htile.Static):
        return x + 1

    for value in values * 2:
        f(torch.zeros(4, 64), value)
    assert [v[1] for v in prepared] == list(values)


def test_grad_mode_is_a_kind_of_its_own(prepared, monkeypatch):
    f = htile.rowwise(lambda x: x * 2)
    x = torch.zeros(4, 64, requires_grad=True)
    with torch.no_grad():
        assert f(x) == "launch"
    monkeypatch.setattr(f, "_differentiated", lambda values, outs: "differentiated")
    assert f(x) == "differentiated"
    with torch.no_grad():
        assert f(x) == "launch"


def test_captured_values_are_a_kind_of_their_own(prepared):
    scale = 1.0
    f = htile.rowwise(lambda x: x * scale)
    x = torch.zeros(4, 64)
    f(x)
    scale = 2.0
    f(x)
    f(x)
    assert len(prepared) == 2


def test_launches_that_are_remembered_are_bounded(prepared, monkeypatch):
    monkeypatch.setattr(running, "MAX_LAUNCHES", 10)
    f = htile.rowwise(lambda x: x * 2)
    for m in range(1, 26):
        f(torch.zeros(m, 4))
    assert len(prepared) == 25 and len(f._launches) <= 10


# ---- captures into a CUDA graph, as far as they can be seen without a GPU ------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU that runs nothing and notes what is loaded and launched."""
    pretended = SimpleNamespace(
        loaded=[], launches=[], device=torch.device("cuda", 0), capturing=False
    )

    def load(source):
        pretended.loaded.append(source)
        return lambda *arguments: None

    def run(launch, values, outs):
        pretended.launches.append(launch)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pretended.capturing)
    monkeypatch.setattr(running, "device_of", lambda signature, values: pretended.device)
    monkeypatch.setattr(launching.Kernel, "artifact", property(lambda kernel: kernel.source))
    monkeypatch.setattr(launching, "load", load)
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(running, "add", lambda *arguments: None)
    return pretended


def inside_grad(call):
    torch.func.grad(lambda t: call() or t.sum())(torch.ones(3))


def inside_fake(call):
    with FakeTensorMode():
        call()


@pytest.mark.parametrize("inside", [inside_grad, inside_fake])
def test_outputs_without_memory_are_no_outputs(inside):
    """Where torch makes wrapped or fake tensors, a kernel must not be given them."""
    launched = []
    structure = torch.utils._pytree.tree_structure(0)
    outputs = (((4, 64), torch.float32),)
    cpu = torch.device("cpu")
    launch = launching.Launch(lambda *given: launched.append(given), "", ((0, False),), outputs,
                        structure, cpu, True)  # fmt: skip
    x = torch.zeros(4, 64)
    assert type(launching.run(launch, (x,))) is torch.Tensor and len(launched) == 1
    with pytest.raises(htile.UnsupportedError, match="call a rowwise function outside"):
        inside(lambda: launching.run(launch, (x,)))
    assert len(launched) == 1


def test_a_capture_takes_new_shapes_of_a_kernel_that_ran(gpu):
    f = htile.rowwise(lambda x: torch.softmax(x, -1))
    f(torch.empty(3, 64))
    gpu.capturing = True
    for x in (torch.empty(5, 64), torch.empty(7, 100)[:, :64], torch.empty(64, 9).t()):
        f(x)
        assert gpu.launches[-1].kernel is gpu.launches[0].kernel
    f(torch.empty(0, 32))
    assert gpu.launches[-1].kernel is None, "nothing is launched for no rows"
    assert len(gpu.loaded) == 1


def test_a_capture_compiles_and_loads_nothing(gpu):
    f = htile.rowwise(lambda x: torch.softmax(x, -1))
    known, narrow = torch.empty(3, 64), torch.empty(3, 65)[:, 1:]
    f(known)
    gpu.capturing = True
    for x in (torch.empty(3, 32), known.bfloat16(), narrow, torch.empty(2, 3, 64)):
        with pytest.raises(ArgumentError, match="compiles or loads a kernel"):
            f(x)
    gpu.device = torch.device("cuda", 1)
    with pytest.raises(ArgumentError, match="call it once before the capture"):
        f(torch.empty(4, 64))
    assert len(gpu.launches) == len(gpu.loaded) == 1
    gpu.capturing = False
    f(narrow)
    gpu.capturing = True
    f(narrow[:2])
    assert len(gpu.loaded) == 2


# ---- names ---------------------------------------------------------------------------------------


def test_names_of_a_hundred_characters(tmp_path):
    """Long names make long lines in the kernel, and break nothing."""
    name = "n" * 99
    code = f"""
def {name}0({name}1, {name}2: float, {name}3: htile.PerRow):
    {name}4 = torch.exp({name}1 - {name}1.max()) * {name}2
    return {{"{name}5": {name}4 + {name}3, "{name}6": {name}4.sum()}}
"""
    names = {"torch": torch, "htile": htile}
    exec(code, names)
    f = htile.rowwise(names[f"{name}0"])
    args = torch.randn(3, 40), 0.5, torch.randn(3)
    assert_close(f, f(*args), *args)
    kernel = f.inspect(*args)
    assert kernel.resources.stack == 0
    assert {path.name for path in kernel.save(tmp_path).iterdir()} >= {"kernel.py", "plan.svg"}
