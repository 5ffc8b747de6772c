"""`htile.nn`: modules beside those of torch, and `fuse`, on the CPU, where torch evaluates graphs.

What torch's own module gives in float64 is right. An error may be twice that of torch's module in
the same dtype, plus some units in the last place of the largest magnitude.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile import nn
from htile.nn import modules
from tests.training import largest_of

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
N = 48


def row(*shape, dtype=F32, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made).to(dtype)


def passes(module, args, dtype):
    """The results of a module in a dtype, and the gradients of its arguments and parameters."""
    module = copy.deepcopy(module).to(dtype)
    args = [
        a.detach().to(dtype).requires_grad_() if a.is_floating_point() else a for a in args
    ]  # fmt: skip
    results = pytree.tree_leaves(module(*args))
    of = [*(a for a in args if a.is_floating_point()), *module.parameters()]
    made = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(r.shape, generator=made).to(r) for r in results]
    return [*results, *torch.autograd.grad(results, of, cotangents)]


def assert_like(module, right, *args, dtype=F32):
    """Assert that a module gives what torch's gives, forward and backward, in dtypes too."""
    found, theirs = passes(module, args, dtype), passes(right, args, dtype)
    exact = passes(right, args, F64)
    for ours, own, truth in zip(found, theirs, exact, strict=True):
        assert ours.dtype is own.dtype and ours.shape == own.shape
        unit = torch.finfo(own.dtype).eps * largest_of(truth)
        bound = 2 * largest_of(own - truth) + 4 * unit
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=bound)


def shaken(module):
    """The module with random parameters, so that none of them leaves a result as it is."""
    made = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = 0.5 + torch.rand(parameter.shape, generator=made).to(parameter)
    return module


# ---- torch's modules -----------------------------------------------------------------------------

PAIRS = {
    "RMSNorm": (lambda m: m.RMSNorm(N), (3, 5, N)),
    "RMSNorm eps": (lambda m: m.RMSNorm(N, eps=1e-2), (4, N)),
    "RMSNorm plain": (lambda m: m.RMSNorm(N, elementwise_affine=False), (4, N)),
    "RMSNorm of two dimensions": (lambda m: m.RMSNorm((6, 8)), (3, 5, 6, 8)),
    "RMSNorm of one row": (lambda m: m.RMSNorm(N), (N,)),
    "LayerNorm": (lambda m: m.LayerNorm(N), (3, 5, N)),
    "LayerNorm without bias": (lambda m: m.LayerNorm(N, bias=False), (4, N)),
    "LayerNorm plain": (lambda m: m.LayerNorm(N, elementwise_affine=False, eps=1e-3), (2, 1, N)),
    "LayerNorm of two dimensions": (lambda m: m.LayerNorm((6, 8)), (3, 6, 8)),
    "LayerNorm of one row of two": (lambda m: m.LayerNorm((6, 8)), (6, 8)),
    "GroupNorm": (lambda m: m.GroupNorm(4, 12), (3, 12, 5, 7)),
    "GroupNorm of positions by the power of two": (lambda m: m.GroupNorm(1, 70), (2, 70, 16, 8)),
    "GroupNorm of many channels": (lambda m: m.GroupNorm(2, 40), (2, 40, 9)),
    "GroupNorm without positions": (lambda m: m.GroupNorm(4, 12, eps=1e-2), (3, 12)),
    "GroupNorm of one group": (lambda m: m.GroupNorm(1, 6), (2, 6, 11)),
    "GroupNorm of one channel": (lambda m: m.GroupNorm(6, 6), (2, 6, 3, 3)),
    "GroupNorm of one sample": (lambda m: m.GroupNorm(3, 6), (1, 6, 2, 3, 2)),
    "GroupNorm plain": (lambda m: m.GroupNorm(2, 90, affine=False), (3, 90, 7)),
    "Softmax": (lambda m: m.Softmax(-1), (3, 5, N)),
    "Softmax of one row": (lambda m: m.Softmax(0), (N,)),
    "Softmax by number": (lambda m: m.Softmax(2), (3, 5, N)),
    "LogSoftmax": (lambda m: m.LogSoftmax(dim=-1), (3, 5, N)),
}  # fmt: skip
FUNCTION = {
    "RMSNorm": "_rms_norm", "LayerNorm": "_layer_norm", "Softmax": "_softmax",
    "LogSoftmax": "_log_softmax", "GroupNorm": "_group_norm", "GroupNorm plain": "_layer_norm",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_modules_of_torch(called, name, dtype):
    make, shape = PAIRS[name]
    ours, theirs = shaken(make(nn)), shaken(make(torch.nn))
    assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
    assert_like(ours, theirs, row(*shape), dtype=dtype)
    assert called == [FUNCTION.get(name) or FUNCTION[name.split()[0]]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_group_norm_that_is_called_has_a_kernel(dtype):
    """Forward and backward, for the most channels, and for the most positions of many."""
    most = modules.TOGETHER // dtype.itemsize
    for channels, positions in ((modules.WRITTEN_OUT, 3137), (512, most), (65, most // 2), (70, 1)):
        x = torch.empty(2, 4, channels, positions, device="meta", dtype=dtype)
        for of_channels in DTYPES:
            weight = torch.empty(4, channels, device="meta", dtype=of_channels)
            kernel = modules._group_norm.inspect(x, weight, weight, 1e-5)
            assert kernel.source and kernel.backward.source


TARGET = torch.tensor([3, 0, 47, 5, 5, -100, 20])
LOSSES = [
    {},
    {"label_smoothing": 0.1},
    {"ignore_index": 5},
    {"weight": torch.linspace(0.5, 2.0, N)},
    {"weight": torch.linspace(0.5, 2.0, N), "label_smoothing": 0.2, "ignore_index": 5},
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("k", range(len(LOSSES)))
def test_cross_entropy(called, k, reduction, dtype):
    options = LOSSES[k] | {"reduction": reduction}
    ours, theirs = nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)
    target = TARGET if options.get("ignore_index", -100) == -100 else TARGET.clamp(min=0)
    assert_like(ours, theirs, row(7, N), target, dtype=dtype)
    assert_like(ours, theirs, row(N), target[0], dtype=dtype)
    assert called == ["_cross_entropy"] * 2


def test_a_mean_of_ignored_rows_alone_is_nan_as_in_torch():
    x, target = row(3, N), torch.full((3,), -100)
    assert nn.CrossEntropyLoss()(x, target).isnan() and F.cross_entropy(x, target).isnan()
    assert nn.CrossEntropyLoss(reduction="sum")(x, target) == 0


def test_what_no_kernel_gives_is_torchs_own(called):
    """Values in float64, other dimensions, probabilities: all to the bit what torch gives."""
    x, wide = row(3, 5, N), row(3, 5, N, dtype=F64)
    shares = torch.softmax(row(3, N, seed=1), -1)
    for ours, theirs, args in (
        (nn.RMSNorm(N, dtype=F64), torch.nn.RMSNorm(N, dtype=F64), (wide,)),
        (nn.LayerNorm(N, dtype=F64), torch.nn.LayerNorm(N, dtype=F64), (wide,)),
        (nn.GroupNorm(5, 5, dtype=F64), torch.nn.GroupNorm(5, 5, dtype=F64), (wide,)),
        (nn.GroupNorm(1, 21), torch.nn.GroupNorm(1, 21), (row(2, 21, 9),)),
        (nn.GroupNorm(1, 21), torch.nn.GroupNorm(1, 21), (row(2, 21, 16, 16),)),
        (nn.GroupNorm(2, 6), torch.nn.GroupNorm(2, 6), (row(2, 5, 6).transpose(1, 2),)),
        (nn.GroupNorm(2, 6), torch.nn.GroupNorm(2, 6), (row(2, 6, 0),)),
        (nn.Softmax(1), torch.nn.Softmax(1), (x,)),
        (nn.LogSoftmax(0), torch.nn.LogSoftmax(0), (x,)),
        (nn.Softmax(-1), torch.nn.Softmax(-1), (wide,)),
        (nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(), (row(3, N), shares)),
        (nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(),
         (row(3, 4, N), torch.zeros(3, N, dtype=torch.long))),
        (nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(),
         (row(3, N, dtype=F64), torch.zeros(3, dtype=torch.long))),
    ):  # fmt: skip
        assert torch.equal(ours(*args), theirs(*args))
    assert called == []
    for wrong in (lambda m: m.LayerNorm(N)(row(3, N + 1)), lambda m: m.RMSNorm(N)(row(3, 1)),
                  lambda m: m.GroupNorm(2, 6)(row(3, 5)), lambda m: m.GroupNorm(6, 6)(row(1, 6)),
                  lambda m: m.GroupNorm(2, 6)(row(6)), lambda m: m.GroupNorm(2, 6)(torch.ones(())),
                  lambda m: m.CrossEntropyLoss()(row(3, N), TARGET)):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            wrong(torch.nn)
        with pytest.raises(theirs.type) as ours:
            wrong(nn)
        assert str(ours.value) == str(theirs.value)


def on_meta(value):
    """A module, or the tensors among arguments, on the meta device."""
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to("meta")
    return tuple(each.to("meta") for each in value)


@pytest.mark.parametrize("name", PAIRS)
def test_of_meta_tensors_modules_give_what_torch_gives(called, name):
    make, shape = PAIRS[name]
    x = torch.empty(shape, device="meta", requires_grad=True)
    found, right = on_meta(make(nn))(x), on_meta(make(torch.nn))(x)
    assert found.is_meta and found.shape == right.shape and found.dtype is right.dtype
    found.sum().backward()
    assert x.grad.shape == shape and called == []


def test_of_meta_tensors_all_other_modules_give_what_they_do_elsewhere(called):
    x, target = row(4, N), torch.zeros(4, dtype=torch.long)
    calls = [
        (nn.CrossEntropyLoss(), (x, target)),
        (nn.CrossEntropyLoss(reduction="none"), (x, target)),
        (nn.AddRMSNorm(N), (x, x)),
        (nn.SwiGLU(), (x,)),
        (nn.SwiGLU(), (x, x)),
        (nn.GEGLU("tanh"), (x,)),
        (nn.GEGLU(), (x, x)),
        (nn.DyT(N), (x,)),
    ]
    for module, args in calls:
        right = pytree.tree_leaves(module(*args))
        called.clear()
        found = pytree.tree_leaves(on_meta(module)(*on_meta(args)))
        assert all(each.is_meta for each in found) and called == []
        assert [each.shape for each in found] == [each.shape for each in right]


def test_a_weight_of_another_dtype(called):
    """As under torch, the result has the dtype of the rows."""
    x = row(4, N, dtype=BF16)
    for name in ("RMSNorm", "LayerNorm"):
        ours, theirs = shaken(getattr(nn, name)(N)), shaken(getattr(torch.nn, name)(N))
        y, right = ours(x), theirs(x)
        assert y.dtype is right.dtype is BF16
        torch.testing.assert_close(y, right, rtol=2**-7, atol=0)
    assert called == ["_rms_norm", "_layer_norm"]


def test_under_autocast_torch_chooses_the_dtypes(called):
    x = row(4, N)
    with torch.autocast("cpu", BF16):
        assert nn.LayerNorm(N)(x).dtype is F32
        assert called == ["_layer_norm"]
        y = nn.LayerNorm(N)(x.to(BF16))
        assert y.dtype is torch.nn.LayerNorm(N)(x.to(BF16)).dtype
    assert called == ["_layer_norm"]


def operations(graph):
    """The names of the operations of torch that a compiled graph calls."""
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return [t.name() for t in targets if isinstance(t, torch._ops.OpOverload)]


def compiled_like(module, *calls):
    """The operations of a module in torch.compile, in one graph that serves all calls.

    Each call's results and gradients have the bits of those outside.
    """
    torch.compiler.reset()
    graphs, counts = [], []

    def backend(graph, example):
        graphs.append(graph)
        return aot_eager(graph, example)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for args in calls:
        given = [a.requires_grad_() if a.is_floating_point() else a for a in args]
        of = [*(a for a in given if a.requires_grad), *module.parameters()]
        found = []
        for each in (module, compiled):
            outs = pytree.tree_leaves(each(*given))
            found.append([*outs, *torch.autograd.grad([o.sin().sum() for o in outs], of)])
        assert all(map(torch.equal, *found))
        assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
        counts.append(len(graphs))
    assert len(set(counts)) == 1  # at the first call torch may trace twice
    return operations(graphs[-1])


BATCHES = (17, 11, 4)  # the first is no other size, which torch would take for the same one


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("name", [n for n, (_, shape) in PAIRS.items() if len(shape) > 2])
def test_in_torch_compile_a_module_is_one_operation(name, dtype):
    make, shape = PAIRS[name]
    module = shaken(make(nn)).to(dtype)
    calls = [(row(m, *shape[1:], dtype=dtype),) for m in BATCHES]
    assert compiled_like(module, *calls) == ["htile::call"]


def test_in_torch_compile_all_others_are_one_operation():
    pairs = [(row(m, 5, N), row(m, 5, N, seed=1)) for m in BATCHES]
    for module in (nn.SwiGLU(), nn.GEGLU("tanh"), nn.AddRMSNorm(N)):
        assert compiled_like(shaken(module), *pairs) == ["htile::call"]
    for module in (nn.SwiGLU(), nn.GEGLU(), nn.DyT(N)):
        assert compiled_like(shaken(module), *[(x,) for x, _ in pairs]) == ["htile::call"]
    for options in LOSSES[:3]:
        for reduction in ("mean", "sum", "none"):
            loss = nn.CrossEntropyLoss(**options, reduction=reduction)
            calls = [(row(m, N), torch.arange(m) % 6) for m in BATCHES]
            assert compiled_like(loss, *calls) == ["htile::call"]


def test_in_torch_compile_torchs_own_forward_is_what_it_is_outside():
    x, module = row(4, N), shaken(nn.RMSNorm(N))
    assert compiled_like(copy.deepcopy(module).double(), (x.double(),)) == []
    assert compiled_like(nn.Softmax(0), (row(4, N),)) == []
    with torch.autocast("cpu", BF16):
        assert compiled_like(module, (x,)) == ["htile::call"]
        assert compiled_like(copy.deepcopy(module).to(BF16), (x.detach().to(BF16),)) == []
    found = torch.compile(lambda x: torch.func.grad(lambda x: module(x).sum())(x), fullgraph=True,
                          backend="eager")(x.detach())  # fmt: skip
    right = torch.autograd.grad(module(x).sum(), x)[0]
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("strict", (False, True))
def test_an_exported_program_has_torchs_own_forward(called, strict):
    """So it runs where HTile is not installed."""
    module, x = shaken(nn.RMSNorm(N)), row(4, N)
    program = torch.export.export(module, (x,), strict=strict)
    assert called == [] and "htile" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), module(x))


def test_torch_func_and_tangents_are_torchs_own(called):
    x, module = row(N), nn.Softmax(-1)
    found = torch.func.grad(lambda x: module(x)[0])(x)
    right = torch.func.grad(lambda x: torch.softmax(x, -1)[0])(x)
    assert torch.equal(found, right)
    _, tangent = torch.func.jvp(module, (x,), (x,))
    assert torch.equal(tangent, torch.func.jvp(torch.nn.Softmax(-1), (x,), (x,))[1])
    assert called == []


@pytest.mark.parametrize("name", ("RMSNorm", "LayerNorm"))
def test_a_state_dict_fits_both(name):
    ours, theirs = getattr(nn, name)(N), shaken(getattr(torch.nn, name)(N))
    assert all(torch.equal(a, b) for a, b in zip(
        ours.state_dict().values(), getattr(torch.nn, name)(N).state_dict().values(), strict=True
    ))  # fmt: skip
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(row(3, N)), theirs(row(3, N)))
    theirs.load_state_dict(ours.state_dict())
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert [*loss.state_dict()] == [*torch.nn.CrossEntropyLoss(weight=torch.ones(3)).state_dict()]


# ---- modules of their own ------------------------------------------------------------------------


class PlainSwiGLU(torch.nn.Module):
    def forward(self, gate, up=None):
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return F.silu(gate) * up


class PlainGEGLU(torch.nn.GELU):
    def forward(self, gate, up=None):
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return super().forward(gate) * up


class PlainAddRMSNorm(torch.nn.RMSNorm):
    def forward(self, x, residual):
        return super().forward(x + residual), x + residual


class PlainDyT(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.full((1,), 0.5))
        self.weight = torch.nn.Parameter(torch.ones(n))
        self.bias = torch.nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return torch.tanh(self.alpha * x) * self.weight + self.bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_modules_of_their_own(called, dtype):
    x, other = row(3, 5, N), row(3, 5, N, seed=1)
    assert_like(nn.SwiGLU(), PlainSwiGLU(), x, other, dtype=dtype)
    assert_like(nn.SwiGLU(), PlainSwiGLU(), x, dtype=dtype)
    for how in ("none", "tanh"):
        assert_like(nn.GEGLU(how), PlainGEGLU(how), x, other, dtype=dtype)
        assert_like(nn.GEGLU(how), PlainGEGLU(how), x, dtype=dtype)
    assert_like(shaken(nn.AddRMSNorm(N)), shaken(PlainAddRMSNorm(N)), x, other, dtype=dtype)
    shape = 5, N
    assert_like(shaken(nn.AddRMSNorm(shape)), shaken(PlainAddRMSNorm(shape)), x, other, dtype=dtype)
    assert_like(shaken(nn.DyT(N)), shaken(PlainDyT(N)), x, dtype=dtype)
    assert_like(shaken(nn.DyT(N)), shaken(PlainDyT(N)), x[0, 0], dtype=dtype)
    assert len(called) == 10


def test_modules_of_their_own_in_float64_are_torchs(called):
    x, other = row(3, N, dtype=F64), row(3, N, dtype=F64, seed=1)
    assert torch.equal(nn.SwiGLU()(x), PlainSwiGLU()(x))
    assert torch.equal(nn.GEGLU("tanh")(x, other), PlainGEGLU("tanh")(x, other))
    ours, theirs = nn.AddRMSNorm(N, dtype=F64), PlainAddRMSNorm(N, dtype=F64)
    assert all(map(torch.equal, ours(x, other), theirs(x, other)))
    assert torch.equal(nn.DyT(N, dtype=F64)(x), PlainDyT(N).double()(x))
    assert called == []


def test_dyt_of_integers_is_torchs_own(called):
    """Which has the dtype of the parameters, and gradients of them."""
    x = torch.arange(2 * N, dtype=torch.int32).view(2, N) - N
    ours, theirs = shaken(nn.DyT(N)), shaken(PlainDyT(N))
    found, right = ours(x), theirs(x)
    assert found.dtype is F32 and torch.equal(found, right)
    found.sum().backward()
    right.sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert called == []


def test_dyt_begins_as_its_authors_do():
    ours, theirs = nn.DyT(N), PlainDyT(N)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert [*nn.DyT(N, bias=False).state_dict()] == ["alpha", "weight"]
    assert [*nn.DyT(N, elementwise_affine=False).state_dict()] == ["alpha"]
    assert repr(nn.DyT(N, alpha=0.8)) == f"DyT({N}, alpha=0.8)"
    assert repr(nn.GEGLU("tanh")) == "GEGLU(approximate='tanh')"


def test_halves_of_an_odd_length_are_refused():
    for module in (nn.SwiGLU(), nn.GEGLU()):
        with pytest.raises(htile.ShapeError, match=r"expected halves.*\(3, 7\); pass one of even"):
            module(row(3, 7))


def test_every_module_says_its_shapes():
    for name in nn.__all__:
        thing = getattr(nn, name)
        if isinstance(thing, type) and issubclass(thing, torch.nn.Module):
            assert "float32, bfloat16 or float16" in " ".join(thing.__doc__.split()), name
            assert thing.__module__ == modules.__name__
