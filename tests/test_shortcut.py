"""Calls that come again, on a GPU that runs nothing: which are taken, which go the long way, and
how much Python a warm one is."""

import sys

import pytest
import torch

import htile
from htile import jit
from htile.errors import ArgumentError, GradientError

scale = 2.0


@htile.rowwise
def plain(x):
    return torch.softmax(x * scale, -1)


@htile.rowwise
def many(x, weight, residual=None, *, eps: float = 1e-6, flag=True, type="a"):
    y = x * weight + eps if flag else x
    if residual is not None:
        y = y + residual
    return {"y": y.half(), "top": y.amax(-1, keepdim=True), "sum": y.sum()}


@pytest.fixture
def gpu(monkeypatch):
    """`calls` gets what a kernel is called with, `long` what went the long way."""
    calls, long = [], []

    def load(source):
        known = []

        def kernel(*arguments):
            """Like the compiled one, it takes one dtype and number of dimensions of each."""
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
    monkeypatch.setattr(jit, "_device", lambda signature, values: torch.device("cuda", 0))
    monkeypatch.setattr(jit.Kernel, "artifact", property(lambda kernel: kernel.source))
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(jit, "_run", lambda launch, values, outs: "the long way")
    monkeypatch.setattr(jit.Rowwise, "_call", call)
    for f in (plain, many):
        monkeypatch.setattr(f, "_shortcuts", ())
        monkeypatch.setattr(f, "_launches", {})
    gpu.calls, gpu.long = calls, long
    return gpu


def test_a_call_that_comes_again_is_short(gpu):
    x = torch.randn(3, 64)
    assert plain(x) == "the long way"
    for other in (x, torch.randn(7, 64), torch.randn(1, 64), x[1:]):
        y = plain(other)
        assert y.shape == other.shape and y.dtype is other.dtype and y.is_contiguous()
        assert gpu.calls[-1][0] is other and gpu.calls[-1][1] is y
    assert len(gpu.long) == 1


def test_structures_keywords_and_defaults(gpu):
    x, w = torch.randn(2, 3, 64), torch.nn.Parameter(torch.rand(64), requires_grad=False)
    many(x, w)
    many(x, w, residual=x)
    assert len(gpu.long) == 2
    for kwargs in ({}, {"residual": x}, {"eps": 0.5}, {"flag": True, "type": "a"}):
        result = many(x, weight=w, **kwargs)
        assert len(gpu.long) == 2
        assert {k: (t.shape, t.dtype) for k, t in result.items()} == {
            "y": ((2, 3, 64), torch.float16),
            "top": ((2, 3, 1), torch.float32),
            "sum": ((2, 3), torch.float32),
        }
        assert kwargs.get("eps", 1e-6) in [a for a in gpu.calls[-1] if isinstance(a, float)]
        assert all(map(torch.Tensor.is_set_to, result.values(), gpu.calls[-1][-3:]))


X = torch.randn(4, 64)
OTHERS = {
    "dtype": lambda: plain(X.half()),
    "N": lambda: plain(torch.randn(4, 32)),
    "rows apart": lambda: plain(torch.randn(4, 128)[:, :64]),
    "not contiguous": lambda: plain(torch.randn(64, 4).t()),
    "no rows": lambda: plain(X[:0]),
    "many rows": lambda: plain(torch.randn(2048, 64)),
    "another static": lambda: many(X, X[0], flag=False),
    "a string": lambda: many(X, X[0], type="b"),
    "an integer where a float was": lambda: many(X, X[0], eps=1),
    "a tensor where a number was": lambda: many(X, X[0], eps=torch.tensor(1.0)),
    "a row where a column was": lambda: many(X, X),
    "a tensor that is not a row's": lambda: many(X, X[0], residual=X[:, :1]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_the_long_way(gpu, name):
    plain(X), plain(X), many(X, X[0]), many(X, X[0])
    before, calls = len(gpu.long), len(gpu.calls)
    OTHERS[name]()
    assert len(gpu.long) == before + 1 and len(gpu.calls) == calls


def test_a_kernel_of_narrow_accesses_is_not_tried_first(gpu):
    """It takes aligned tensors too: they would never get a kernel of their own."""
    moved = torch.randn(4 * 64 + 1)[1:].view(4, 64)
    assert moved.is_contiguous() and moved.data_ptr() % 16
    plain(moved), plain(moved)
    assert len(gpu.long) == 2 and not plain._shortcuts
    plain(X), plain(X)
    assert len(gpu.long) == 3 and len(plain._launches) == 2


def test_what_the_host_function_refuses_goes_the_long_way(gpu):
    many(X, X[0]), many(X, X[0])
    assert len(gpu.long) == 1
    with pytest.raises(htile.DtypeError, match="float64"):
        many(X, X[0].double())
    assert len(gpu.long) == 2


WRONG = {
    "gradient": (lambda: plain(X.clone().requires_grad_()), GradientError),
    "negated": (lambda: plain(torch._neg_view(X)), htile.UnsupportedError),
    "out= elsewhere": (lambda: plain(X, out=torch.empty_like(X)), ArgumentError),
    "no argument": (lambda: plain(), ArgumentError),
    "too many": (lambda: plain(X, X), ArgumentError),
    "another name": (lambda: plain(y=X), ArgumentError),
    "no tensor": (lambda: plain([1.0]), ArgumentError),
    "a scalar": (lambda: plain(torch.tensor(1.0)), ArgumentError),
    "inside grad": (lambda: torch.func.grad(lambda x: plain(x).sum())(X), htile.HTileError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_raise_as_the_first_would(gpu, name):
    call, kind = WRONG[name]
    plain(X)
    calls = len(gpu.calls)
    with pytest.raises(kind):
        call()
    assert len(gpu.calls) == calls


def test_gradients_count_only_where_they_are_recorded(gpu):
    plain(X)
    with torch.no_grad():
        plain(X.clone().requires_grad_())
    assert len(gpu.long) == 1 and len(gpu.calls) == 1


def test_a_captured_value_that_changes(gpu, monkeypatch):
    plain(X), plain(X)
    monkeypatch.setitem(globals(), "scale", 3.0)
    plain(X)
    assert len(gpu.long) == 2, "traced again"
    plain(X)
    monkeypatch.setitem(globals(), "scale", 2.0)
    plain(X)
    assert len(gpu.long) == 2, "both are known"


def test_only_so_many(gpu):
    for n in range(1, 12):
        plain(torch.randn(4, n))
    assert len(plain._shortcuts) == jit.MAX_SHORTCUTS
    before = len(gpu.long)
    plain(torch.randn(4, 11))
    assert len(gpu.long) == before + 1


def events_of(call) -> list[str]:
    """The calls of Python and of C functions that one call makes."""
    seen = []

    def note(frame, event, arg):
        if event in ("call", "c_call"):
            seen.append(frame.f_code.co_name if event == "call" else arg.__name__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name != "setprofile"]


def test_a_warm_call_is_little_python(gpu):
    plain(X), plain(X)
    events = events_of(lambda: plain(X))
    assert len(events[: events.index("kernel")]) <= 14, events
