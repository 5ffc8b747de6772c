"""Captured and static values that change while a call is under way: one fingerprint a call.

Whatever the call itself reads, no later call may be given a graph or a kernel of other values.
"""

import threading
from types import SimpleNamespace

import pytest
import torch

import htile
from htile.run import launch as launching
from htile.run import rowwise as jit
from htile.run import specialize

gain = 2.0


def scaled(x):
    return x * gain


def by_act(x, act: htile.Static):
    return act(x)


def scaled_by_gain(x):
    return x * gain


def changes_after(x):
    global gain
    y = x * gain
    gain = 3.0
    return y


def changes_before(x):
    global gain
    gain = 3.0
    return x * gain


X = torch.ones(2, 64)


@pytest.fixture(autouse=True)
def reset():
    change(2.0)
    yield
    change(2.0)


def change(value):
    globals()["gain"] = value


def change_in_another_thread(value):
    thread = threading.Thread(target=change, args=(value,))
    thread.start()
    thread.join()


def around(monkeypatch, module, name, action, before):
    """Have `action` happen once, before or after the next call of a function of HTile's."""
    original, left = getattr(module, name), [action]

    def wrapped(*args, **kwargs):
        if before and left:
            left.pop()()
        result = original(*args, **kwargs)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(module, name, wrapped)


POINTS = {
    "before the key": (jit, "call_key", True),
    "after the key": (jit, "call_key", False),
    "before the roles": (jit, "classify", True),
    "after the roles": (jit, "classify", False),
    "before the trace": (specialize, "trace", True),
    "after the trace": (specialize, "trace", False),
    "after the passes": (specialize, "run_passes", False),
    "before the plan": (launching, "plans_for", True),
    "before the compilation": (launching, "load", True),
    "after the compilation": (launching, "load", False),
    "before the shortcuts": (jit, "add", True),
    "after the shortcuts": (jit, "add", False),
}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that runs nothing; `texts` gets the source of each kernel that is launched."""
    texts = []

    def load(source):
        return lambda *arguments: texts.append(source)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(jit, "runs_kernels", lambda device: True)
    monkeypatch.setattr(launching.Kernel, "artifact", property(lambda kernel: kernel.source))
    monkeypatch.setattr(launching, "load", load)
    return SimpleNamespace(texts=texts)


def factor(texts, call):
    """The number that the kernel which `call` launches multiplies with."""
    before = len(texts)
    call()
    assert len(texts) == before + 1
    (line,) = (line for line in texts[-1].splitlines() if " * " in line and " = x" in line)
    return float(line.split(" * ")[1].split()[0])


def calls(f):
    """Ways to call it."""
    args = (X, scaled_by_gain) if f._fn is by_act else (X,)
    out = torch.empty_like(X)
    return lambda: f(*args), lambda: f(*args, out=out)


CHANGES = {"here": change, "in another thread": change_in_another_thread}


@pytest.mark.parametrize("by", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("fn", [scaled, by_act])
@pytest.mark.parametrize("point", POINTS)
def test_no_kernel_of_other_values_is_ever_launched(gpu, monkeypatch, point, fn, by):
    module, name, before = POINTS[point]
    for k in range(2):
        f = htile.rowwise(fn)
        call = calls(f)[k]
        with monkeypatch.context() as patch:
            change(2.0)
            around(patch, module, name, lambda: by(3.0), before)
            call()  # while it is under way the value becomes 3
            assert gain == 3.0 or (fn is by_act and name == "shortcut"), "it makes none"
        for value in (3.0, 3.0, 2.0, 2.0, 3.0, 5.0, 2.0):
            change(value)
            assert factor(gpu.texts, call) == value


@pytest.mark.parametrize("fn", [changes_after, changes_before])
def test_a_function_that_changes_what_it_captures_while_it_is_traced(gpu, fn):
    """A value that it has set is gone once the graph is remembered, but what it read is right."""
    for call in calls(htile.rowwise(fn)):
        for value in (2.0, 3.0, 3.0, 2.0, 2.0, 3.0):
            change(value)
            assert factor(gpu.texts, call) == (value if fn is changes_after else 3.0)
            assert gain == 3.0


REFERENCE = [point for point, (_, name, _) in POINTS.items()
             if name in ("call_key", "classify", "trace", "run_passes")]  # fmt: skip


@pytest.mark.parametrize("point", REFERENCE)
def test_the_same_of_the_reference_and_of_inspect(monkeypatch, point):
    module, name, before = POINTS[point]
    f = htile.rowwise(scaled)
    with monkeypatch.context() as patch:
        around(patch, module, name, lambda: change(3.0), before)
        f(X)
    for value in (3.0, 2.0, 5.0):
        change(value)
        assert torch.equal(f(X), X * value)
        assert f" * {value}" in f.inspect(X).source
