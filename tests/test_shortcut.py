"""Calls that come again, on a GPU that runs nothing.

Some are taken by a shortcut, and all others go the long way; a warm one is little Python.
"""

import contextlib
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import htile
from examples.rmsnorm import rmsnorm
from examples.softmax import softmax
from htile.errors import ArgumentError, GradientError
from htile.run import launch as launching
from htile.run import rowwise as jit
from htile.run import specialize
from htile.run.shortcuts import shortcut
from htile.run.shortcuts import text as short_text

empty_strided = torch._C._dynamo.guards._empty_strided_cpu
scale = 2.0
_offset = 1.0


@htile.rowwise
def plain(x):
    return torch.softmax(x * scale, -1)


@htile.rowwise
def many(x, weight, residual=None, *, eps: float = 1e-6, flag=True, type="a"):
    y = x * weight + eps if flag else x
    if residual is not None:
        y = y + residual
    return {"y": y.half(), "top": y.amax(-1, keepdim=True), "sum": y.sum()}


@htile.rowwise
def chosen(x, unread: htile.PerRow, ends: htile.Static = (1, 2.0), share: htile.Static = 0.5):
    """What is read of `ends` and `share` is in the kernel; a tensor is not read at all."""
    return x * share + ends[0] * ends[1]


@htile.rowwise
def paired(x, w):
    return x * torch.stack((w[1::2], w[0::2]), -1).flatten()


@htile.rowwise
def beside(x, t: htile.PerRow):
    return x * t


@htile.rowwise(dynamic_n=True)
def of_any(x, weight, labels: htile.PerRow):
    """Rows of any length."""
    y = torch.softmax(x * weight, -1)
    return y, (y - y.sum() / x.shape[-1]).amax(-1, keepdim=True), x[labels], x.topk(3).indices


@htile.rowwise
def over_rows(x, w):
    return x * w, htile.sum_rows(x * w), htile.max_rows(x.sum())


FUNCTIONS = plain, many, chosen, paired, beside, softmax, rmsnorm, of_any, over_rows


class Subclass(torch.Tensor):
    """A subclass that nobody supports."""


@pytest.fixture
def gpu(monkeypatch):
    """`calls` gets the arguments of each kernel, `long` those of calls that no shortcut took."""
    calls, long = [], []

    def load(source):
        known = []

        def kernel(*arguments):
            """It takes one dtype and number of dimensions of each argument, like a compiled one."""
            kinds = [(a.dtype, a.ndim) for a in arguments if isinstance(a, torch.Tensor)]
            known.append(kinds)
            if kinds != known[0]:
                raise ValueError("Mismatched Tensor")
            calls.append(arguments)

        return kernel

    whole = jit.Rowwise._call

    def call(self, args, kwargs):
        long.append((args, kwargs))
        return whole(self, args, kwargs)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(jit, "runs_kernels", lambda device: device.type != "meta")
    monkeypatch.setattr(launching.Kernel, "artifact", property(lambda kernel: kernel.source))
    monkeypatch.setattr(launching, "load", load)
    monkeypatch.setattr(short_text, "allocator", lambda device: empty_strided)
    monkeypatch.setattr(jit, "run", lambda launch, values, outs: "the long way")
    monkeypatch.setattr(jit.Rowwise, "_call", call)
    for f in FUNCTIONS:
        f._forget()
    gpu.calls, gpu.long = calls, long
    yield gpu
    for f in FUNCTIONS:  # they would launch nothing in the tests of other modules, too
        f._forget()


def test_a_call_that_comes_again_is_short(gpu):
    x = torch.randn(3, 64)
    assert plain(x) == "the long way"
    apart = torch.randn(4, 128)[:, :64]
    for other in (x, torch.randn(7, 64), torch.randn(1, 64), x[1:], apart, x[:1].expand(5, 64)):
        y = plain(other)
        assert y.shape == other.shape and y.dtype is other.dtype and y.is_contiguous()
        assert gpu.calls[-1][0] is other and gpu.calls[-1][1] is y
    assert len(gpu.long) == 1


def test_a_shortcut_of_fixed_sizes_goes_after_some_others(gpu):
    x = torch.randn(2, 3, 64)
    many(x, x[0, 0])
    first = many._returning[0]
    sizes = [(2, 3), (3, 2), (2, 3), (1, 6), (5, 5), (2, 3), (4, 1)]
    for k, lead in enumerate(sizes):
        other = torch.randn(*lead, 64)
        result = many(other, x[0, 0])
        assert result["y"].shape == other.shape and result["y"].is_contiguous()
        assert result["top"].shape == (*lead, 1) and result["sum"].shape == lead
        misses = sum(each != (2, 3) for each in sizes[: k + 1])
        assert (first in many._returning) == (misses < shortcut.MAX_MISSES)
    assert len(gpu.long) == 1 and len(many._returning) == 1


def test_rows_that_lie_otherwise_have_another_kernel(gpu):
    """A kernel for rows that are equally far apart must not be given others."""
    wide, crossed = torch.randn(2, 3, 128)[..., :64], torch.randn(3, 2, 64).transpose(0, 1)
    every_second = torch.randn(4, 3, 64)[::2]
    for first in (torch.randn(2, 3, 64), wide):
        plain._forget()
        gpu.long.clear()
        plain(first)
        equally = wide, torch.randn(5, 7, 256)[..., 64:128], torch.randn(1, 3, 64)
        for x in (first, *equally[: 3 * (first is wide)], torch.randn(7, 1, 64)):
            assert plain(x) is gpu.calls[-1][1] and gpu.calls[-1][0] is x and len(gpu.long) == 1
        for k, x in enumerate((crossed, every_second, torch.randn(1, 3, 64).expand(2, 3, 64))):
            assert plain(x) == "the long way" and len(gpu.long) == k + 2
            assert plain(x) is gpu.calls[-1][1] and len(gpu.long) == k + 2  # of just these sizes
        assert plain(first) is gpu.calls[-1][1] and len(gpu.long) == 4


def test_strides_of_leading_dimensions_of_size_1_count(gpu):
    """Torch calls such tensors contiguous. A flat kernel would step by the last of the strides."""
    x, t, crossed = torch.randn(2, 3, 64), torch.rand(2, 3), torch.randn(1, 2, 64).transpose(0, 1)
    one, short, values = torch.randn(2, 1, 64), torch.rand(2, 1), torch.rand(1, 2).t()
    assert crossed.is_contiguous() and crossed.stride() == (64, 128, 1)
    assert values.is_contiguous() and values.stride() == (1, 2)
    for f, first, fine, other in (
        (plain, (x,), (one,), (crossed,)),
        (chosen, (x, t), (one, short), (crossed, short)),  # which reads no t
        (beside, (x, t), (one, short), (one, values)),
    ):
        for written in (False, True):
            outs = [{"out": torch.empty_like(a[0])} if written else {} for a in (first, fine)]
            f._forget()
            gpu.long.clear()
            f(*first, **outs[0]), f(*first, **outs[0]), f(*fine, **outs[1])
            assert len(gpu.long) == 1
            f(*other, **outs[1])
            assert len(gpu.long) == 2
        f(*fine, out=torch.empty(1, 2, 64).transpose(0, 1))
        assert len(gpu.long) == 3


def test_a_tensor_that_is_not_read_may_lack_leading_dimensions(gpu):
    crossed = torch.arange(12).view(4, 3).t()
    chosen(torch.randn(2, 3, 4, 64), crossed)
    for lead in ((5, 3, 4), (2, 3, 4), (1, 3, 4)):
        y = chosen(torch.randn(*lead, 64), crossed)
        assert y is gpu.calls[-1][-1] and len(gpu.long) == 1


def test_structures_keywords_and_defaults(gpu):
    x, w = torch.randn(2, 3, 64), torch.nn.Parameter(torch.rand(64), requires_grad=False)
    many(x, w)
    many(x, w, residual=x.clone())
    assert len(gpu.long) == 2
    for kwargs in ({}, {"residual": x.clone()}, {"eps": 0.5}, {"flag": True, "type": "a"}):
        result = many(x, weight=w, **kwargs)
        assert len(gpu.long) == 2
        assert {k: (t.shape, t.dtype) for k, t in result.items()} == {
            "y": ((2, 3, 64), torch.float16),
            "top": ((2, 3, 1), torch.float32),
            "sum": ((2, 3), torch.float32),
        }
        assert kwargs.get("eps", 1e-6) in [a for a in gpu.calls[-1] if isinstance(a, float)]
        assert all(map(torch.Tensor.is_set_to, result.values(), gpu.calls[-1][-3:]))


def test_static_values_of_any_kind_and_tensors_that_are_not_read(gpu):
    for ends in ((1, 2.0), (1, 2), (True, 2.0), (0.0, 1), (-0.0, 1), ((1, 2.0)[0], 3)):
        chosen._forget()
        for share in (0.5, -0.0, 0.0):
            gpu.long.clear()
            for m in (4, 4, 5, 1):
                x, unread = torch.randn(m, 64), torch.randn(m)
                y = chosen(x, unread, ends, share=share)
                assert len(gpu.long) == 1 and (m == 4 or y is gpu.calls[-1][-1])
                assert all(t is not unread for call in gpu.calls for t in call)
    for ends, share in (((1, 2.0), 0.5), ([1, 2.0], 0.5), ((1.0, 2.0), 0.5), ((0.0, 1), 0.0)):
        gpu.long.clear()
        with contextlib.suppress(htile.HTileError):  # a list may not be static
            chosen(x, unread, ends, share)
        assert len(gpu.long) == 1
    gpu.long.clear()
    with pytest.raises(htile.ShapeError):
        chosen(torch.randn(4, 64), torch.randn(3), ((1, 2.0)[0], 3), 0.0)
    assert len(gpu.long) == 1


X = torch.randn(4, 64)
OTHERS = {
    "dtype": lambda: plain(X.half()),
    "N": lambda: plain(torch.randn(4, 32)),
    "another rank": lambda: plain(X[None]),
    "not contiguous": lambda: plain(torch.randn(64, 4).t()),
    "no rows": lambda: plain(X[:0]),
    "many rows": lambda: plain(torch.randn(2048, 64)),
    "another static": lambda: many(X, X[0], flag=False),
    "a string": lambda: many(X, X[0], type="b"),
    "an integer where a float was": lambda: many(X, X[0], eps=1),
    "a tensor where a number was": lambda: many(X, X[0], eps=torch.tensor(1.0)),
    "a row where a column was": lambda: many(X, X),
    "a tensor that is not a row's": lambda: many(X, X[0], residual=X[:, :1]),
    "a column of another dtype": lambda: many(X, X[0].half()),
    "a column that is a view of every second": lambda: many(X, torch.randn(128)[::2]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_the_long_way(gpu, name):
    plain(X), plain(X), many(X, X[0]), many(X, X[0])
    before, calls = len(gpu.long), len(gpu.calls)
    OTHERS[name]()
    assert len(gpu.long) == before + 1 and len(gpu.calls) == calls


def test_a_kernel_of_narrow_accesses_is_not_tried_first(gpu):
    """It takes aligned tensors too, which would then never get a kernel of their own."""
    moved = torch.randn(4 * 64 + 1)[1:].view(4, 64)
    assert moved.is_contiguous() and moved.data_ptr() % 16
    plain(moved), plain(moved)
    assert len(gpu.long) == 2 and not plain._returning
    plain(X), plain(X)
    assert len(gpu.long) == 3 and len(plain._launches) == 2


def test_pairs_that_begin_inside_a_pair_are_copied(gpu, monkeypatch):
    """A contiguous view of them is no copy: torch gives the view itself."""
    monkeypatch.setattr(jit, "run", launching.run)
    w = torch.randn(65, dtype=torch.bfloat16)[1:]
    assert w.is_contiguous() and w.data_ptr() % 4
    paired(torch.randn(3, 64, dtype=torch.bfloat16), w)
    (_, given, _) = gpu.calls[-1]
    assert torch.equal(given, w) and given.data_ptr() % 4 == 0


def test_what_the_host_function_refuses_goes_the_long_way(gpu):
    many(X, X[0]), many(X, X[0])
    assert len(gpu.long) == 1
    with pytest.raises(htile.DtypeError, match="float64"):
        many(X, X[0].double())
    assert len(gpu.long) == 2


REFUSED = (ValueError, TypeError, RuntimeError, NotImplementedError, BufferError)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_of_any_kind_goes_the_long_way_and_a_failing_launch_raises(
    gpu, monkeypatch, kind
):
    launched = []

    def kernel(*arguments):
        launched.append(arguments)
        if len(launched) > 1:
            raise kind("Cannot pack tensors on meta")

    monkeypatch.setattr(launching, "load", lambda source: kernel)
    monkeypatch.setattr(jit, "run", lambda launch, values, outs: launch.kernel(*values))
    plain(X)
    with pytest.raises(kind, match="Cannot pack"):
        plain(X)
    assert len(gpu.long) == 2 and len(launched) == 4  # of the shortcuts with sizes and without too


def test_one_tensor_as_two_arguments_goes_the_long_way(gpu):
    """`TensorGuards` tells it from two tensors, and it uses up no shortcut of later calls."""
    for m in range(1, 8):
        x = torch.randn(m, 64)
        many(x, x[0], x)
    assert len(gpu.long) == 7 and not many._returning
    many(X, X[0], X.clone())
    assert len(gpu.long) == 8
    many(X, X[0], X.clone())
    assert len(gpu.long) == 8
    many(X, X[0], X)
    assert len(gpu.long) == 9


WRONG = {
    "out= with a gradient": (
        lambda: plain(X.clone().requires_grad_(), out=torch.empty_like(X)), GradientError
    ),
    "sparse": (lambda: plain(X.to_sparse()), htile.HTileError),
    "a sparse column": (lambda: many(X, X[0].to_sparse()), htile.HTileError),
    "mkldnn": (lambda: plain(X.to_mkldnn()), htile.HTileError),
    "subclass": (lambda: plain(X.as_subclass(Subclass)), htile.HTileError),
    "a longer column": (lambda: many(X, torch.randn(65)), htile.ShapeError),
    "a list as a column": (lambda: many(X, [1.0]), htile.HTileError),
    "a negated column": (lambda: many(X, torch._neg_view(X[0])), htile.UnsupportedError),
    "negated": (lambda: plain(torch._neg_view(X)), htile.UnsupportedError),
    "a column elsewhere": (lambda: many(X, X[0].to("meta")), ArgumentError),
    "out= elsewhere": (lambda: plain(X, out=torch.empty_like(X, device="meta")), ArgumentError),
    "no argument": (lambda: plain(), ArgumentError),
    "too many": (lambda: plain(X, X), ArgumentError),
    "another name": (lambda: plain(y=X), ArgumentError),
    "no tensor": (lambda: plain([1.0]), ArgumentError),
    "a scalar": (lambda: plain(torch.tensor(1.0)), ArgumentError),
    "functionalized": (lambda: torch.func.functionalize(plain)(X), htile.UnsupportedError),
}


def test_a_fake_tensor_gives_fake_results(gpu):
    plain(X)
    calls = len(gpu.calls)
    found = plain(FakeTensorMode().from_tensor(X))
    assert type(found) is FakeTensor and found.shape == X.shape and len(gpu.calls) == calls


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_raise_as_the_first_would(gpu, name):
    call, kind = WRONG[name]
    plain(X), many(X, X[0])
    calls = len(gpu.calls)
    with pytest.raises(kind):
        call()
    assert len(gpu.calls) == calls


def test_gradients_count_only_where_they_are_recorded(gpu):
    plain(X)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        plain(X), plain(x), plain(x)
    assert len(gpu.long) == 2 and len(gpu.calls) == 2
    plain._differentiated = lambda values, outs: "differentiated"
    assert plain(x) == "differentiated"
    assert len(gpu.calls) == 2


def test_forward_mode_goes_the_long_way(gpu):
    plain(X)
    with forward_ad.dual_level():
        plain(X)
        plain._differentiated = lambda values, outs: "differentiated"
        assert plain(forward_ad.make_dual(X, X)) == "differentiated"
    assert len(gpu.long) == 3


def test_inference_has_shortcuts_of_its_own(gpu):
    """Its dispatch keys are others, so a first call may go the long way, but not the next one."""
    plain(X), plain(X)
    with torch.inference_mode():
        x = X.clone()
    for mode in (torch.inference_mode, contextlib.nullcontext):
        for given in (X, x):
            with mode():
                plain(given)
                before = len(gpu.long)
                result = plain(given)
                assert result.is_inference() == (mode is torch.inference_mode)
            assert len(gpu.long) == before


def test_memory_is_that_of_the_arguments_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    quick = torch._C._dynamo.guards._empty_strided_cuda
    allocate = short_text.allocator
    assert allocate(torch.device("cuda", 1)) is quick is not allocate(torch.device("cuda", 0))
    made = allocate(torch.device("meta"))((2, 3), (3, 1), torch.half)
    assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.half, "meta")


@pytest.mark.parametrize("count", [1, 2])
def test_outputs_on_another_gpu_are_no_outputs(monkeypatch, count):
    """The quick function makes them there once another GPU is the current one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    miss = short_text.MISS
    lines = short_text.is_elsewhere("_out0", torch.device("cuda", 1), miss)
    code = "\n".join(["def leaves(_out0):", *(f"    {line}" for line in lines), "    return 0"])
    scope = {}
    exec(code, scope)
    for index in range(count):
        made = SimpleNamespace(get_device=lambda index=index: index)
        missed = scope["leaves"](made) is None
        assert missed == (count > 1 and index != 1)
    assert short_text.is_elsewhere("_out0", torch.device("cpu"), miss) == []


def test_a_captured_value_that_changes(gpu, monkeypatch):
    plain(X), plain(X)
    monkeypatch.setitem(globals(), "scale", 3.0)
    plain(X)
    assert len(gpu.long) == 2, "traced again"
    plain(X)
    monkeypatch.setitem(globals(), "scale", 2.0)
    plain(X)
    assert len(gpu.long) == 2, "both are known"
    monkeypatch.setitem(globals(), "scale", float("2"))
    plain(X)
    assert len(gpu.long) == 2, "another object of the same value"
    monkeypatch.delitem(globals(), "scale")
    with pytest.raises(NameError, match="scale"):
        plain(X)


def helper(x, factor=1.0):
    return x * factor * scale + _offset


def test_every_kind_of_captured_value_is_looked_at(gpu, monkeypatch):
    """It is a global (one of them hidden by a parameter), a builtin, a default, or a cell."""
    monkeypatch.setattr(shortcut, "MAX_SHORTCUTS", 6)
    gain = 2.0

    def f(x, scale: float = 1.0):
        return helper(x) * gain * abs(x).max() * scale

    cell = f.__closure__[f.__code__.co_freevars.index("gain")]
    f = htile.rowwise(f)
    f(X), f(X)
    assert len(gpu.long) == 1
    changes = (
        lambda: monkeypatch.setitem(globals(), "_offset", 2.0),
        lambda: monkeypatch.setitem(globals(), "scale", 3.0),
        lambda: monkeypatch.setitem(globals(), "abs", torch.exp),
        lambda: monkeypatch.setattr(helper, "__defaults__", (3.0,)),
    )
    for known, change in enumerate(changes, 2):
        change()
        f(X), f(X)
        assert len(gpu.long) == known
    cell.cell_contents = 3.0
    f(X), f(X)
    assert len(gpu.long) == known + 1
    del cell.cell_contents
    with pytest.raises(NameError, match="gain"):
        f(X)


def test_only_so_many(gpu):
    for n in range(1, 12):
        plain(torch.randn(4, n))
    assert len(plain._returning) == shortcut.MAX_SHORTCUTS
    before = len(gpu.long)
    plain(torch.randn(4, 11))
    assert len(gpu.long) == before + 1


def traced(call) -> tuple[list[str], int]:
    """The functions of Python and C that a call calls up to the kernel, and the instructions of
    Python that it executes outside of it."""
    calls, instructions = [], 0

    def profile(frame, event, arg):
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name if event == "call" else arg.__name__)

    def trace(frame, event, arg):
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return trace if frame.f_code.co_name != "kernel" else None

    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    sys.settrace(trace)
    call()
    sys.settrace(None)
    return calls[1 : calls.index("kernel")], instructions


@pytest.mark.parametrize(
    ("function", "args", "outputs", "instructions"),
    [(softmax, (X,), 1, 104), (rmsnorm, (X, X[0], X.clone()), 2, 185)],
    ids=["softmax", "rmsnorm_residual"],
)
def test_a_warm_call_is_little_python(gpu, function, args, outputs, instructions):
    """It makes exactly these calls; other Pythons than 3.11 execute some more instructions."""
    function(*args), function(*args)
    calls, executed = traced(lambda: function(*args))
    allocations = ["_empty_strided_cpu"] * outputs
    assert calls == ["__call__", "is_dynamo_compiling", "_shortcut", "check", *allocations]
    assert executed <= instructions * 1.2
    assert len(gpu.long) == 1


# ---- rows of any length --------------------------------------------------------------------------


def any_length(m, n, dtype=torch.float32):
    labels = torch.arange(m) % n
    return torch.randn(m, n).to(dtype), torch.randn(n).to(dtype), labels


@pytest.fixture
def made(monkeypatch):
    """The names of the steps from a function to its kernel, as often as they were made."""
    found = []
    fresh = specialize.Specializations(of_any._fn, of_any._captures)
    monkeypatch.setattr(of_any, "_specializations", fresh)
    for module, name in ((specialize, "trace"), (launching, "plans_for"), (launching, "load")):
        whole = getattr(module, name)

        def counted(*args, _whole=whole, _name=name, **kwargs):
            found.append(_name)
            return _whole(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return found


@pytest.mark.parametrize("multiple", [1, 4], ids=["any", "whole vectors"])
def test_a_new_length_of_a_bucket_is_a_short_call(gpu, made, multiple):
    """Nothing is traced, planned or loaded, and no shortcut is added."""
    lengths = [n for n in range(97, 129) if (n % 4 == 0) == (multiple == 4)]
    of_any(*any_length(5, lengths[3]))
    steps = ["trace", "plans_for", "load"]
    assert made == steps and len(gpu.long) == 1
    for m, n in enumerate(lengths, 3):
        x, w, labels = any_length(m, n)
        y, top, taken, indices = of_any(x, w, labels)
        assert y.shape == (m, n) and y.is_contiguous() and top.shape == (m, 1)
        assert taken.shape == (m,) and indices.shape == (m, 3)
    assert made == steps and len(gpu.long) == 1 and len(of_any._returning) <= 2


def test_other_buckets_are_other_kernels(gpu, made):
    """Another capacity, and whole vectors beside others; in any order."""
    buckets = [(65, 95), (100, 128), (129, 191), (200, 256), (3, 63), (64, 4)]
    for n in (*itertools.chain(*zip(*buckets, strict=True)), 65, 64):
        of_any(*any_length(4, n))
    assert made.count("trace") == made.count("load") == len(buckets)


def test_the_long_way_of_a_known_bucket_plans_nothing(gpu, made):
    of_any(*any_length(5, 100))
    for n in range(100, 128, 4):
        of_any._returning = ()
        of_any(*any_length(5, n))
    assert made == ["trace", "plans_for", "load"] and len(gpu.long) == 8


def test_fewer_elements_than_topk_takes(gpu):
    of_any(*any_length(5, 3))
    with pytest.raises(htile.ShapeError, match="the function takes 3, by topk"):
        of_any(*any_length(5, 2))


def test_results_of_any_length_are_written(gpu, made):
    """`out=` of the right length, apart from the arguments or in place of one."""
    x, w, labels = any_length(5, 100)
    out = torch.empty(5, 100), torch.empty(5, 1), torch.empty(5), torch.empty(5, 3).long()
    of_any(x, w, labels, out=out)
    for n in (104, 112, 128):
        x, w, labels = any_length(5, n)
        into = (torch.empty(5, n), *out[1:])
        assert of_any(x, w, labels, out=into) is into
    assert made == ["trace", "plans_for", "load"] and len(gpu.long) == 1
    with pytest.raises(htile.ShapeError, match="must have shape"):
        of_any(x, w, labels, out=out)
    with pytest.raises(ArgumentError, match="shares memory"):
        of_any(x, w, labels, out=(torch.empty(5, 128), w[:5, None], *out[2:]))


# ---- results over all rows -----------------------------------------------------------------------


def test_results_over_all_rows_have_no_leading_dimensions(gpu):
    w = torch.randn(64)
    over_rows(torch.randn(2, 4, 64), w)
    assert len(gpu.long) == 1 and not gpu.calls
    for lead in ((2, 4), (3, 5), (7, 1)):
        x = torch.randn(*lead, 64)
        y, total, largest = over_rows(x, w)
        assert (y.shape, total.shape, largest.shape) == (x.shape, (64,), ())
        assert (y.dtype, total.dtype, largest.dtype) == (torch.float32,) * 3
        *arguments, parts = gpu.calls.pop()
        assert all(a is b for a, b in zip(arguments, (x, w, y, total, largest), strict=True))
        plan = over_rows.inspect(x, w, arch="sm_90a").plan
        assert (parts.dtype, parts.numel()) == (torch.int8, plan.parts * (64 + 1) * 4)
    assert len(gpu.long) == 1


def test_results_over_all_rows_of_out(gpu):
    w, x = torch.randn(64), torch.randn(5, 64)
    out = torch.empty(5, 64), torch.empty(64), torch.empty(())
    over_rows(x, w, out=out)
    assert len(gpu.long) == 1
    assert over_rows(x, w, out=out) is out
    assert len(gpu.long) == 1 and len(gpu.calls) == 1
    assert all(a is b for a, b in zip(gpu.calls[0][:-1], (x, w, *out), strict=True))
    with pytest.raises(htile.ShapeError, match=r"out1 must have shape \(64,\)"):
        over_rows(x, w, out=(out[0], torch.empty(5, 64), out[2]))
    with pytest.raises(ArgumentError, match="shares memory with w"):
        over_rows(x, w, out=(out[0], w, out[2]))
    assert len(gpu.calls) == 1  # neither was launched
