"""`htile.nn.fuse`: what is fused in whole models, what is left, and that both go on as before."""

from __future__ import annotations

import copy
import io
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F

import htile
from examples.char_transformer import compare
from htile.nn import fuse
from tests.lookalikes import NORMS, Block, LlamaRMSNorm
from tests.test_nn import BF16, F32, F64, N, assert_like, row, shaken


def fused(module):
    """The module alone, fused."""
    report = fuse(module)
    assert list(report.fused) == [""] and not report.left, str(report)
    return module


def reason(module):
    """Why a module is left."""
    report = fuse(module)
    assert "forward" not in vars(module) and not report.fused, str(report)
    assert list(report.left) == [""]
    return report.left[""]


def test_what_is_left_names_the_module_that_is_there_for_it():
    for module in (torch.nn.LayerNorm((3, 8)), torch.nn.GroupNorm(2, 8)):
        assert reason(module).endswith(f"; use htile.nn.{type(module).__name__}")
    assert "use htile.nn" not in reason(torch.nn.Linear(8, 8))


def test_what_is_no_module_is_refused():
    with pytest.raises(htile.ArgumentError, match="got a function"):
        fuse(lambda x: x)


# ---- what is fused -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_users(called, norm, dtype):
    own = shaken(norm(N))
    ours = fused(copy.deepcopy(own))
    called.clear()
    assert_like(ours, own, row(3, 5, N), dtype=dtype)
    assert called == [norm.__name__]


OF_TORCH = {
    "LayerNorm": lambda: torch.nn.LayerNorm(N),
    "LayerNorm without bias": lambda: torch.nn.LayerNorm(N, bias=False),
    "RMSNorm": lambda: torch.nn.RMSNorm(N),
    "GELU": torch.nn.GELU,
    "PReLU": torch.nn.PReLU,
    "SiLU": torch.nn.SiLU,
    "GLU": torch.nn.GLU,
    "Softmax": lambda: torch.nn.Softmax(-1),
    "LogSoftmax": lambda: torch.nn.LogSoftmax(-1),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_modules_of_torch(called, name):
    own = shaken(OF_TORCH[name]())
    ours = fused(copy.deepcopy(own))
    called.clear()
    for dtype in (F32, BF16):
        assert_like(ours, own, row(3, 5, N), dtype=dtype)
    assert called == [name.split()[0]] * 2


class Gated(torch.nn.Module):
    """Two inputs, two results, a buffer and an optional argument."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, n))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, gate, up, bias=None):
        y = F.silu(gate + self.shift) * up * self.scale
        return (y if bias is None else y + bias), gate.amax(-1)


def test_several_inputs_and_results(called):
    own = shaken(Gated(N))
    ours = fused(copy.deepcopy(own))
    called.clear()
    x, up = row(3, N), row(3, N, seed=1)
    assert_like(ours, own, x, up)
    assert called == ["Gated"]
    for args, more in (((x, up, x), {}), ((x, up), {"bias": up}), ((x, up[:1]), {})):
        assert all(map(torch.equal, ours(*args, **more), own(*args, **more)))
    assert called == ["Gated"], "its own forward takes other arguments"


# ---- what is left --------------------------------------------------------------------------------


class Rescaled(torch.nn.Module):
    """It adds up over the batch, which a function of a row cannot see."""

    def forward(self, x):
        return x / x.abs().max()


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


class Doubling(torch.nn.Module):
    """Changes the tensor of its caller, which no gradient tells."""

    def forward(self, x):
        with torch.no_grad():
            x *= 2
        return x + 1


class CountingInABuffer(torch.nn.Module):
    """As BatchNorm counts batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return x * 2


class Averaging(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(N))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1
        return x * 2


class Caching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", None)

    def forward(self, x):
        self.last = x * 2
        return self.last


class Keeping(torch.nn.Module):
    def forward(self, x):
        self.last = x
        return x * 2


class Listed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = [1.0, 2.0]

    def forward(self, x):
        return x * self.factors[1]


class Unregistered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(N)

    def forward(self, x):
        return x * self.scale


class Remembering(torch.nn.Module):
    """It keeps a tensor under a name that its constructor has made."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = y = x.softmax(-1) * x
        return y


class Masking(torch.nn.Module):
    """Its gradient in torch is NaN, and only the comparison can tell."""

    def forward(self, x):
        return torch.where(x < 100, x, (x * 0).sqrt())


class Blind(torch.nn.Module):
    def forward(self, x):
        with torch.no_grad():
            return torch.exp(x)


class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class TwoLengths(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.a


LEFT = {
    "Linear": (lambda: torch.nn.Linear(4, 8), r"weight has the shape \(8, 4\); rows share vectors"),
    "Embedding": (lambda: torch.nn.Embedding(9, 4), "rows share vectors"),
    "LSTM": (lambda: torch.nn.LSTM(4, 4), "rows share vectors"),
    "Dropout": (torch.nn.Dropout, "F.dropout is not supported"),
    "BatchNorm": (lambda: torch.nn.BatchNorm1d(N), "its forward refuses a row: ValueError"),
    "Identity": (torch.nn.Identity, "it computes nothing"),
    "in place": (lambda: torch.nn.ReLU(inplace=True), "changes its argument input"),
    "in place without gradients": (Doubling, "changes its argument x"),
    "another dim": (lambda: torch.nn.Softmax(1), "a row has one axis"),
    "a dim by rank": (torch.nn.Softmax, r"gives other values for rows of shape \(2, 3, 64\)"),
    "a mean": (torch.nn.MSELoss, "returns other tensors"),
    "the batch": (Rescaled, r"gives other values for rows of shape \(5, 64\) in f32"),
    "counts": (Counting, "its forward stores an attribute, self.calls, so it is no function"),
    "remembers": (Remembering, "its forward stores an attribute, self.last, so it is no function"),
    "counts in a buffer": (CountingInABuffer, "its forward changes self.calls"),
    "keeps in a buffer": (Averaging, "its forward stores self.average"),
    "keeps in a buffer that was none": (Caching, "its forward stores self.last"),
    "keeps": (Keeping, "its forward stores self.last"),
    "a list": (Listed, "reads self.factors: it is a mutable list"),
    "a tensor": (Unregistered, "reads self.scale, a tensor that is no parameter or buffer"),
    "a gradient of its own": (Masking, "gives other values"),
    "branches": (Branching, "the truth of a symbolic value is not known"),
    "lengths": (TwoLengths, "its parameters have several lengths: 4, 8"),
    "of htile.nn": (lambda: htile.nn.RMSNorm(N), "which has its kernel"),
    "Dropout in eval": (lambda: torch.nn.Dropout().eval(), "it computes nothing"),
    "float64": (lambda: LlamaRMSNorm(N).to(F64), "weight: dtype float64 is not supported"),
    "no forward": (torch.nn.Module, "it has no forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_and_why(name):
    make, why = LEFT[name]
    assert re.search(why, reason(make()))


def module_of(function):
    """A module whose forward is this function."""
    return type("Made", (torch.nn.Module,), {"forward": function})()


COUNTS = "its forward decides by how many rows it is given"
BRANCHES = {
    "size of an axis": lambda self, x: x * 3 if x.size(0) == 1 else x * 2,
    "shape": lambda self, x: x * 3 if x.shape[0] < 1000 else x * 2,
    "arithmetic": lambda self, x: x * 3 if 2 * x.shape[0] % 7 > 5 else x * 2,
    "whole shape": lambda self, x: x * 3 if tuple(x.shape) == (7, 16) else x * 2,
    "length": lambda self, x: x * 3 if len(x) < 1000 else x * 2,
    "elements": lambda self, x: x * 3 if x.numel() > 100000 else x * 2,
    "truth": lambda self, x: x * 3 if x.shape[0] - 100 else x * 2,
    "of what is computed": lambda self, x: x * 3 if (x * 2).shape[0] > 100 else x * 2,
    "a half": lambda self, x: x * 3 if x.shape[0] / 2 > 100 else x * 2,
    "a square": lambda self, x: x * 3 if x.shape[0] ** 2 > 10000 else x * 2,
    "less": lambda self, x: x * 3 if -x.shape[0] < -100 else x * 2,
    "converted": lambda self, x: x * 3 if int(x.shape[0]) > 100 else x * 2,
    "bits": lambda self, x: x * 3 if x.shape[0] & 64 else x * 2,
    "rounded up": lambda self, x: x * 3 if math.ceil(x.shape[0] / 64) > 100 else x * 2,
    "digits": lambda self, x: x * 3 if x.shape[0].bit_length() > 20 else x * 2,
    "a remainder": lambda self, x: x * 3 if divmod(x.shape[0], 64)[1] == 63 else x * 2,
    "all elements": lambda self, x: x * 3 if x.flatten().shape[0] > 100000 else x * 2,
    "another order": lambda self, x: x * 3 if x.transpose(0, -1).shape[-1] > 1000 else x * 2,
    "two axes": lambda self, x: x * 3 if x.dim() == 3 and x.shape[0] == x.shape[1] else x * 2,
    "torch.numel": lambda self, x: x * 3 if torch.numel(x) > 100000 else x * 2,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_forward_that_decides_by_the_number_of_rows_is_left(name):
    """One row does not tell, and the batches of the comparison may all be on one side."""
    assert COUNTS in reason(module_of(BRANCHES[name]))


ALIASES = {
    "parts": lambda self, x: (x[..., :4], x[..., 4:]),
    "itself beside another": lambda self, x: (x, x.softmax(-1)),
    "a view beside another": lambda self, x: (x.exp(), x.unflatten(-1, (2, -1))),
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_forward_that_returns_its_argument_is_left(name):
    """What is changed in place afterwards would not change the argument."""
    assert "it returns its argument or a part of it" in reason(module_of(ALIASES[name]))


SIZES = {
    "of the row": lambda self, x: x * 3 if x.shape[-1] > 1000 else x * 2,
    "of two arguments": lambda self, x: x.expand(x.shape) * 2 if x.shape == (x + 1).shape else x,
    "for a view": lambda self, x: x.view(*x.shape[:-1], 4, -1).softmax(-1).flatten(-2),
    "for a constant": lambda self, x: x.new_ones(x.shape) + x,
    "of no rows": lambda self, x: x * 2 if x.numel() == 0 or 0 in x.shape else x * 3,
    "of a part": lambda self, x: x * 3 if x.unflatten(-1, (4, -1)).size(-2) == 1 else x * 2,
    "copied": lambda self, x: x * copy.deepcopy(x.shape[-1]),
    "of torch": lambda self, x: x.expand(torch.broadcast_shapes(x.shape, (x.shape[-1],))) * 2,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_forward_that_uses_sizes_is_fused(name, called):
    own = module_of(SIZES[name])
    ours = fused(copy.deepcopy(own))
    called.clear()
    assert_like(ours, own, row(3, 5, N))
    assert called


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(N))

    def forward(self, x):
        return F.dropout(x * self.weight, 0.5, self.training)


def test_dropout_in_eval_mode(called):
    """In training mode the module's own forward runs."""
    model = Dropping().eval()
    assert htile.nn.fuse(model).fused
    called.clear()
    x = torch.ones(3, N)
    assert torch.equal(model(x), x) and called
    called.clear()
    assert (model.train()(x) == 0).any() and not called


def test_a_module_without_gradients():
    model = Blind()
    assert htile.nn.fuse(model).fused
    x = torch.randn(2, 3, N, requires_grad=True)
    y = model(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, x.detach().exp())


def test_modules_with_hooks_are_left():
    for kind in ("forward", "forward_pre", "full_backward"):
        module = LlamaRMSNorm(N)
        getattr(module, f"register_{kind}_hook")(lambda *args: None)
        assert reason(module).startswith("it has hooks")


def test_a_trial_changes_nothing():
    for module in (Counting(), Keeping(), torch.nn.BatchNorm1d(N), LlamaRMSNorm(N)):
        state, held = copy.deepcopy(module.state_dict()), set(vars(module))
        torch.manual_seed(3)
        before = torch.get_rng_state()
        fuse(module).undo()
        assert torch.equal(torch.get_rng_state(), before)
        assert set(vars(module)) == held and getattr(module, "calls", 0) == 0
        assert all(map(torch.equal, module.state_dict().values(), state.values()))


# ---- a fused model -------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", (True, False))
def test_a_model(called, norm, training):
    """Of modules of several kinds, inside another module."""
    torch.manual_seed(0)
    own = torch.nn.Sequential(Block(N, norm)).train(training)
    model = copy.deepcopy(own)
    report = fuse(model)
    assert list(report.fused) == ["0.before", "0.after", "0.activation"]
    assert list(report.left) == ["0.up", "0.down", "0.dropout"]
    text = str(report)
    assert f"fused 0.before: {norm.__name__}, for rows in f32, bf16, f16" in text
    assert "left 0.up: its weight has the shape (96, 48)" in text
    called.clear()
    assert_like(model, own, row(4, N))
    assert called == [norm.__name__, "GELU", norm.__name__]
    assert model.train(not training)(row(4, N)).shape == (4, N)


def test_undo(called):
    model = Block(N)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    report = fuse(model)
    again = fuse(model)
    assert not again.fused
    assert again.left["before"] == "its forward has been replaced already"
    again.undo()
    assert "forward" in vars(model.before)
    report.undo()
    report.undo()
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    called.clear()
    model(row(4, N))
    assert called == []


def test_a_state_dict_is_as_before():
    own, model = Block(N), Block(N)
    fuse(model)
    assert [*model.state_dict()] == [*own.state_dict()]
    held = io.BytesIO()
    torch.save(model.state_dict(), held)
    held.seek(0)
    own.load_state_dict(torch.load(held))
    x = row(4, N)
    torch.testing.assert_close(own(x), model(x))
    model.load_state_dict({k: 1.5 * v for k, v in own.state_dict().items()})
    own.load_state_dict(model.state_dict())
    torch.testing.assert_close(own(x), model(x))


def test_a_copy_has_its_own_parameters(called):
    model = LlamaRMSNorm(N)
    fuse(model)
    twin = copy.deepcopy(model)
    twin.weight.data.mul_(2)
    called.clear()
    x = row(4, N)
    torch.testing.assert_close(twin(x), 2 * model(x))
    assert called == ["LlamaRMSNorm"] * 2
    twin(x).sum().backward()
    assert twin.weight.grad is not None and model.weight.grad is None


def test_a_pickled_model_is_one_that_is_not_fused():
    model = fused(LlamaRMSNorm(N))
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    loaded = torch.load(held, weights_only=False)
    assert loaded.forward.__func__ is LlamaRMSNorm.forward and loaded.forward.__self__ is loaded


def test_attributes_that_change(called):
    """A kernel fixes what the forward reads, so its own forward serves other values."""
    model, own, x = fused(LlamaRMSNorm(N)), LlamaRMSNorm(N), 0.01 * row(4, N)
    model.variance_epsilon = own.variance_epsilon = 0.1
    called.clear()
    assert torch.equal(model(x), own(x)) and called == []
    model.variance_epsilon = 1e-6
    torch.testing.assert_close(model(x), LlamaRMSNorm(N)(x))
    assert called == ["LlamaRMSNorm"]


SCALE = 2.0


class Answering(torch.nn.Module):
    def __getattr__(self, name):
        return SCALE if name == "scale" else super().__getattr__(name)

    def forward(self, x):
        return torch.softmax(x * self.scale, -1)


class Measured(torch.nn.Module):
    def __len__(self):
        return int(SCALE)

    def forward(self, x):
        return torch.softmax(x * len(self), -1)


class Activated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = lambda x: x * SCALE

    def forward(self, x):
        return self.activation(torch.softmax(x, -1))


class Asking(torch.nn.Module):
    def forward(self, x):
        y = torch.softmax(x, -1)
        y = y * (self.gain if hasattr(self, "gain") else 1.0) * getattr(self, "share", 1.0)
        return self.after(y) if hasattr(self, "after") else y


class Registered(torch.nn.Module):
    def forward(self, x):
        y = torch.softmax(x, -1)
        return y * self.gain if "gain" in self._parameters else y


def rescaled(module):
    global SCALE
    SCALE *= 1.5


def gain():
    return torch.nn.Parameter(torch.full((1,), 3.0))


CHANGES = {
    "what __getattr__ reads": (Answering, rescaled),
    "what __len__ reads": (Measured, rescaled),
    "what a function that is an attribute reads": (Activated, rescaled),
    "an attribute that was not there": (Asking, lambda m: setattr(m, "gain", 3.0)),
    "a parameter that was not there": (Asking, lambda m: setattr(m, "gain", gain())),
    "a parameter that was not registered": (Registered, lambda m: setattr(m, "gain", gain())),
    "a module that was not there": (Asking, lambda m: setattr(m, "after", torch.nn.Sigmoid())),
    "an attribute that its class lacked": (Asking, lambda m: setattr(type(m), "share", 3.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_forward_reads_changes(name, called):
    kind, change = CHANGES[name]
    kind = type(kind.__name__, (kind,), {})  # whose attributes no other test has
    own, fused = kind(), kind()
    assert htile.nn.fuse(fused).fused
    x, before = torch.randn(3, N), None
    for step in (lambda module: None, change):
        step(own)
        if step is not rescaled:
            step(fused)
        torch.testing.assert_close(fused(x), own(x))
        assert before is None or not torch.allclose(own(x), before), "the step changes it"
        before = own(x)


def test_parameters_that_are_replaced(called):
    model, x = fused(torch.nn.LayerNorm(N, bias=False)), row(4, N)
    model.weight = torch.nn.Parameter(torch.full((N,), 2.0))
    called.clear()
    torch.testing.assert_close(model(x), F.layer_norm(x, (N,), torch.full((N,), 2.0)))
    assert called == ["LayerNorm"]
    model.bias = torch.nn.Parameter(torch.ones(N))
    assert torch.equal(model(x), F.layer_norm(x, (N,), model.weight, model.bias))
    assert called == ["LayerNorm"]


def test_calls_that_no_kernel_serves_are_the_modules_own(called):
    own = shaken(torch.nn.LayerNorm(N))
    model = fused(copy.deepcopy(own))
    called.clear()
    x = row(4, N)
    assert torch.equal(model(x[0]), own(x[0]))
    assert torch.equal(model(input=x), own(input=x))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), own(x))
    jacobian = torch.func.jacrev(model)(x[0])
    assert torch.equal(jacobian, torch.func.jacrev(own)(x[0]))
    assert torch.equal(copy.deepcopy(model).double()(x.double()), own.double()(x.double()))
    assert called == []
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model(row(4, N + 1))


def test_a_fused_model_takes_meta_tensors(called):
    model = fused(LlamaRMSNorm(N)).to("meta")
    called.clear()
    found = model(torch.empty(4, N, device="meta", dtype=BF16))
    assert found.is_meta and found.shape == (4, N) and called == []


def test_hooks_that_are_added_later_run():
    model, seen = fused(LlamaRMSNorm(N)), []
    model.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    model(row(4, N))
    assert seen == [(4, N)]


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = Block(N)
    report = fuse(model)
    assert list(report.fused) == ["before", "after", "activation"]
    model = model.to_empty(device="cpu")
    torch.nn.init.ones_(model.before.weight)
    torch.testing.assert_close(model.before(row(4, N)), LlamaRMSNorm(N)(row(4, N)))


@pytest.mark.parametrize(
    "mode", (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", BF16))
)
def test_fuse_compares_alike_in_every_mode(mode):
    model = Block(N)
    with mode():
        report = fuse(model)
    assert str(report) == str(fuse(Block(N)))
    assert list(report.fused) == ["before", "after", "activation"]


def test_warnings_of_torch_about_the_comparison_are_not_told():
    """Rows of 16 bits beside a weight of 32 are a case that the user may not have."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fused(torch.nn.RMSNorm(N))
    finally:
        torch.set_warn_always(always)


def test_modules_that_are_the_same_share_their_kernels():
    model = torch.nn.Sequential(*(LlamaRMSNorm(N) for _ in range(3)), LlamaRMSNorm(N, eps=1e-5))
    fuse(model)
    functions = [module.forward.__func__ for module in model]
    assert functions[0] is functions[1] is functions[2] is not functions[3]


def test_a_transformer_learns_the_same(capsys):
    """The example: the losses of both models differ by rounding, which grows from step to step."""
    theirs, ours = compare(12, "cpu")
    assert len(ours) == len(theirs) == 12
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=0)
    assert ours[-1] < 0.8 * ours[0]
    said = capsys.readouterr().out
    assert "9 modules are fused" in said and "left head: its weight has the shape" in said
