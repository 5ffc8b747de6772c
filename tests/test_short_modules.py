"""Modules whose calls come again, on a GPU that the CPU stands for.

A shortcut takes such a call before the module looks at it. What a module leaves to torch, it leaves
to torch then too.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import htile
from benchmarks.idle import idle_gpu
from htile.nn import modules
from htile.run.rowwise import Rowwise
from tests.on_cpu import computing
from tests.test_short_gradients import Watching

BF16 = torch.bfloat16
N = 64
FUNCTIONS = [f for f in vars(modules).values() if isinstance(f, Rowwise)]


@pytest.fixture
def gpu(monkeypatch):
    """`launched` has each kernel's name and tensors, `long` the names of functions called."""
    found, whole = SimpleNamespace(launched=[], long=[]), Rowwise.__call__

    def call(self, *args, **kwargs):
        found.long.append(self.__name__)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Rowwise, "__call__", call)
    for f in FUNCTIONS:
        f._forget()
    with idle_gpu(computing(found.launched)):
        yield found
    for f in FUNCTIONS:
        f._forget()


X, T = torch.randn(5, N), torch.arange(5)
MADE = {
    "RMSNorm": (lambda: htile.nn.RMSNorm(N), lambda m, x: F.rms_norm(x, (N,), m.weight)),
    "LayerNorm": (
        lambda: htile.nn.LayerNorm(N), lambda m, x: F.layer_norm(x, (N,), m.weight, m.bias)
    ),
    "Softmax": (lambda: htile.nn.Softmax(-1), lambda m, x: torch.softmax(x, -1)),
    "LogSoftmax": (lambda: htile.nn.LogSoftmax(-1), lambda m, x: torch.log_softmax(x, -1)),
    "CrossEntropyLoss": (
        htile.nn.CrossEntropyLoss, lambda m, x: F.cross_entropy(x, T[: len(x)])
    ),
    "SwiGLU": (htile.nn.SwiGLU, lambda m, x: F.silu(x) * x.flip(0)),
    "GEGLU": (htile.nn.GEGLU, lambda m, x: F.gelu(x) * x.flip(0)),
    "SwiGLU of halves": (htile.nn.SwiGLU, lambda m, x: F.silu(x[:, :32]) * x[:, 32:]),
    "GEGLU of halves": (htile.nn.GEGLU, lambda m, x: F.gelu(x[:, :32]) * x[:, 32:]),
    "AddRMSNorm": (
        lambda: htile.nn.AddRMSNorm(N), lambda m, x: F.rms_norm(x + x.flip(0), (N,), m.weight)
    ),
    "DyT": (lambda: htile.nn.DyT(N), lambda m, x: m.weight * torch.tanh(m.alpha * x) + m.bias),
}


def given(name, x):
    if name == "CrossEntropyLoss":
        return x, T[: len(x)]
    return (x, x.flip(0)) if name in ("SwiGLU", "GEGLU", "AddRMSNorm") else (x,)


@pytest.mark.parametrize("name", MADE)
def test_a_module_is_asked_once(gpu, name):
    """Then shortcuts take its calls, forward and backward, with other numbers of rows too."""
    make, right = MADE[name]
    module = make()
    for k, m in enumerate((5, 5, 4, 5)):
        x = (X[:m] + k).requires_grad_()
        first = torch.utils._pytree.tree_leaves(module(*given(name, x)))[0]
        wide = x.detach().double().requires_grad_()
        exact = right(copy.deepcopy(module).double(), wide)
        torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-5)
        g = torch.randn(first.shape)
        (found,) = torch.autograd.grad(first, x, g)
        (of_x,) = torch.autograd.grad(exact, wide, g.double())
        torch.testing.assert_close(found.double(), of_x, rtol=1e-3, atol=1e-5)
    assert len(gpu.long) == 1 and len(gpu.launched) == 8


def warm(gpu):
    norm = htile.nn.LayerNorm(N)
    for _ in range(3):
        norm(X), norm(X.clone().requires_grad_())
    assert len(gpu.long) == 2
    gpu.long.clear(), gpu.launched.clear()
    return norm


def test_a_row_of_another_length_is_refused_as_torch_does(gpu):
    warm(gpu)
    for norm in (htile.nn.LayerNorm(32), htile.nn.LayerNorm(32, elementwise_affine=False)):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            norm(X)
    plain = htile.nn.LayerNorm(N, elementwise_affine=False)
    plain(X), plain(X)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        htile.nn.LayerNorm(32, elementwise_affine=False)(X)


def test_what_is_left_to_torch_is_left_to_it(gpu):
    norm = warm(gpu)
    with torch.autocast("cpu", BF16):
        assert norm(X.bfloat16()).dtype is F.layer_norm(X.bfloat16(), (N,)).dtype
    with Watching():
        norm(X)
    torch.func.grad(lambda x: norm(x).sum())(X)
    torch.vmap(norm)(X[None])
    norm.double()(X.double())
    assert gpu.long == [] and gpu.launched == []


def test_a_fused_module_sees_what_has_changed(gpu, monkeypatch):
    monkeypatch.undo()  # the comparison takes place on the CPU
    with pytest.MonkeyPatch.context() as patch:
        for name in ("htile.run.rowwise", "htile.run.runner"):
            patch.setattr(f"{name}.runs_kernels", lambda device: False)
        model = torch.nn.Sequential(torch.nn.LayerNorm(N), torch.nn.GELU())
        assert len(htile.nn.fuse(model).fused) == 2
    norm, launched = model[0], gpu.launched
    for _ in range(3):
        torch.testing.assert_close(norm(X), F.layer_norm(X, (N,), norm.weight, norm.bias))
    before = len(launched)
    norm(X)
    assert len(launched) == before + 1
    norm.eps = 1.0
    torch.testing.assert_close(norm(X), F.layer_norm(X, (N,), norm.weight, norm.bias, 1.0))
    norm.eps = 1e-5
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.randn(5, 32))
    torch.testing.assert_close(norm(input=X), F.layer_norm(X, (N,), norm.weight, norm.bias))
    assert len(launched) == before + 1
