"""`htile.nn` on a GPU, in bfloat16: modules beside torch's, and fused models beside themselves."""

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from examples.char_transformer import compare
from htile import nn
from htile.nn import fuse
from htile.run.rowwise import Rowwise
from tests.lookalikes import NORMS, Block
from tests.test_fuse import OF_TORCH
from tests.test_nn import (
    LOSSES,
    PAIRS,
    PlainAddRMSNorm,
    PlainDyT,
    PlainGEGLU,
    PlainSwiGLU,
    largest_of,
    passes,
    row,
    shaken,
)

from .matrix import BF16, F32

pytestmark = pytest.mark.gpu

ROWS, N = 300, 48
FUSED = {norm.__name__: lambda norm=norm: norm(N) for norm in NORMS} | OF_TORCH


@pytest.fixture
def calls(monkeypatch):
    """The names of the row-wise functions that are called with tensors on the GPU."""
    names, before, taken = [], Rowwise.__call__, Rowwise._taken

    def call(self, *args, **kwargs):
        if args[0].is_cuda:
            names.append(self.__name__)
        return before(self, *args, **kwargs)

    def short(self, *args):
        found = taken(self, *args)
        names.extend([self.__name__] * (found is not None))
        return found

    monkeypatch.setattr(Rowwise, "__call__", call)
    monkeypatch.setattr(Rowwise, "_taken", short)
    return names


def assert_like(module, right, *args, dtype):
    """Assert that a module gives what torch's gives on the same GPU, forward and backward."""
    found, theirs = passes(module, args, dtype), passes(right, args, dtype)
    exact = passes(right, args, torch.float64)
    for ours, own, truth in zip(found, theirs, exact, strict=True):
        assert ours.is_cuda and ours.dtype is own.dtype and ours.shape == own.shape
        unit = torch.finfo(own.dtype).eps * largest_of(truth)
        bound = 2 * largest_of(own - truth) + (4 if dtype is BF16 else 64) * unit
        torch.testing.assert_close(ours.double(), truth.double(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", (BF16, F32), ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_modules_of_torch(device, calls, name, dtype):
    make, shape = PAIRS[name]
    ours, theirs = (shaken(make(m)).to(device) for m in (nn, torch.nn))
    assert_like(ours, theirs, row(*shape).to(device), dtype=dtype)
    assert len(calls) == 1


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("k", range(len(LOSSES)))
def test_cross_entropy(device, calls, k, reduction):
    options = LOSSES[k] | {"reduction": reduction}
    ours, theirs = (m.CrossEntropyLoss(**options).to(device) for m in (nn, torch.nn))
    target = torch.arange(ROWS, device=device) % N
    target[::7] = options.get("ignore_index", -100)
    assert_like(ours, theirs, row(ROWS, N).to(device), target, dtype=BF16)
    assert calls == ["_cross_entropy"]


def test_modules_of_their_own(device, calls):
    x, other = row(ROWS, N).to(device), row(ROWS, N, seed=1).to(device)
    pairs = (
        (nn.SwiGLU(), PlainSwiGLU(), (x, other)),
        (nn.SwiGLU(), PlainSwiGLU(), (x,)),
        (nn.GEGLU("tanh"), PlainGEGLU("tanh"), (x, other)),
        (nn.AddRMSNorm(N), PlainAddRMSNorm(N), (x, other)),
        (nn.DyT(N), PlainDyT(N), (x,)),
    )
    for ours, theirs, args in pairs:
        assert_like(shaken(ours).to(device), shaken(theirs).to(device), *args, dtype=BF16)
    assert len(calls) == len(pairs)


@pytest.mark.parametrize("name", FUSED)
def test_fused_modules(device, calls, name):
    own = shaken(FUSED[name]()).to(device)
    ours = copy.deepcopy(own)
    assert list(fuse(ours).fused) == [""]
    assert calls == [], "the comparison takes place on the CPU"
    assert_like(ours, own, row(3, 100, N if "weight" in own.state_dict() else 64).to(device),
                dtype=BF16)  # fmt: skip
    assert len(calls) == 1


def test_a_fused_model(device, calls):
    own = Block(N).to(device, BF16)
    model = copy.deepcopy(own)
    report = fuse(model)
    assert_like(model, own, row(ROWS, N).to(device), dtype=BF16)
    assert calls == ["LlamaRMSNorm", "GELU", "LlamaRMSNorm"]
    report.undo()
    x = row(ROWS, N, dtype=BF16).to(device)
    assert all(map(torch.equal, *map(pytree.tree_leaves, (model(x), own(x)))))
    assert len(calls) == 3


def test_under_autocast_dtypes_are_torchs(device, calls):
    for name in ("LayerNorm", "Softmax"):
        make, shape = PAIRS[name]
        x = row(*shape, dtype=BF16).to(device)
        for module in (make(nn).to(device), make(torch.nn).to(device)):
            fuse(module)
            with torch.autocast("cuda", BF16):
                assert module(x).dtype is F32
    assert calls == []


def test_a_transformer_learns_the_same(device, calls):
    theirs, ours = compare(60, "cuda")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0.05, atol=0)
    assert ours[-1] < 0.75 * ours[0] and len(calls) == 60 * 10
