"""DTensors and FSDP2: several processes compute what one process does, on the CPU with gloo.

tests/distributed.py is what each process runs. Here plain torch computes the same in float64.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import htile
import htile.nn
from htile.errors import UnsupportedError
from tests import distributed as run
from tests.processes import REPO, environment

SECONDS = 100  # after which processes are ended that have not found each other


def processes(runs, world, folder, *device):
    """What each of `world` processes has found, by name, after these runs.

    device: "cuda" for processes that have a GPU each.
    """
    command = [sys.executable, "-m", "tests.distributed", runs]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder), *device], cwd=REPO, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(told)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(world)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    runs = "split_rows,of_each_role,one_row,products,fully_sharded,in_16_bits"
    return processes(runs, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def two_that_compile(tmp_path_factory):
    return processes("compiled", 2, tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return processes("of_each_role", 4, tmp_path_factory.mktemp("four"))


def assert_each_found(found, name, exact, error=1e-5):
    """Assert that every process has found these tensors and no others.

    error: that of the largest element, beside a tenth.
    """
    for each in found:
        own = {k.removeprefix(f"{name}: "): t for k, t in each.items() if k.startswith(f"{name}: ")}
        assert {*own} == {*exact}
        for key, right in exact.items():
            assert own[key].shape == right.shape
            far = (own[key].double() - right).abs().max()
            assert far <= error * (0.1 + right.abs().max()), (key, far)


# ---- training ------------------------------------------------------------------------------------


def rms_norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def gated(h):
    gate, up = h.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def test_training_with_rows_that_are_split(two):
    """Losses and the gradients of all parameters, over steps that use them."""
    x = run.drawn(run.BATCH, run.TOKENS, run.WIDTH).double().requires_grad_()
    of = {name: p.double().requires_grad_() for name, p in run.parameters().items()}
    exact = {}
    for step in range(run.STEPS):
        h = gated((rms_norm(x) * of["weight"] * of["gain"]) @ of["up"].T)
        logits = (rms_norm(h) * of["scale"]) @ of["head"].T
        loss = F.cross_entropy(logits.flatten(0, 1), run.labels().flatten())
        wrt = {"x": x, **of}
        exact[f"loss{step}"] = loss
        for (name, p), g in zip(
            wrt.items(), torch.autograd.grad(loss, [*wrt.values()]), strict=True
        ):
            exact[f"{name}{step}"] = g
            with torch.no_grad():
                p -= run.RATE * g
    assert_each_found(two, "split_rows", exact)


def test_torch_compile(two_that_compile):
    """In one graph, forward and backward, for rows of which processes have different numbers."""
    exact = {}
    for tokens in run.SEVERAL:
        x = run.drawn(5, tokens, run.WIDTH).double().requires_grad_()
        of = {name: p.double().requires_grad_() for name, p in run.parameters().items()}
        h = rms_norm(x) * of["weight"] * of["gain"]
        loss = (gated(rms_norm(h) * of["scale"] + h) ** 2).sum()
        wrt = {"x": x, **{name: of[name] for name in ("weight", "gain", "scale")}}
        gradients = torch.autograd.grad(loss, [*wrt.values()])
        for way in ("static", "dynamic"):
            exact[f"{way} loss {tokens}"] = loss
            names = (f"{way} {name} {tokens}" for name in wrt)
            exact |= zip(names, gradients, strict=True)
    assert_each_found(two_that_compile, "compiled", exact)


class Plain:
    """The modules of `run.Block` in plain torch."""

    RMSNorm, LayerNorm = torch.nn.RMSNorm, torch.nn.LayerNorm

    class SwiGLU(torch.nn.Module):
        def forward(self, h):
            return gated(h)


def test_training_with_fsdp(two):
    """Of the parameters and of the batch each process has a part; in bfloat16 for one step."""
    model = run.Model(Plain).double()
    optimizer, exact = torch.optim.SGD(model.parameters(), run.RATE), {}
    x = run.drawn(run.BATCH, run.TOKENS, run.WIDTH).double()
    for step in range(run.STEPS):
        loss = F.cross_entropy(model(x).flatten(0, 1), run.labels().flatten())
        loss.backward()
        exact[f"loss{step}"] = loss
        exact |= {f"{name}{step}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    assert_each_found(two, "fully_sharded", exact)
    first = {name: each for name, each in exact.items() if name.endswith("0")}
    assert_each_found(two, "in_16_bits", first, error=2e-2)


# ---- rows of all kinds ---------------------------------------------------------------------------


def assert_of_each_role(found, ways):
    of = {name: each.double().requires_grad_() for name, each in run.arguments().items()}
    y = torch.softmax(of["x"] + of["repeated"], -1) * of["weight"] * of["table"][1] * of["gain"]
    y = y + of["shift"][..., None]
    results = {"y": y, "most": y.amax(-1), "total": (y * of["x"]).sum((0, 1))}
    run.objective(results).backward()
    exact = {f"{way} {name}": each for way in ways for name, each in results.items()}
    exact |= {f"{way} no_grad {name}": each for way in ways for name, each in results.items()}
    exact |= {f"{way} d_{name}": each.grad for way in ways for name, each in of.items()}
    assert_each_found(found, "of_each_role", exact)


def test_arguments_of_each_role(two):
    assert_of_each_role(two, ("rows", "second"))


def test_meshes_of_two_dimensions(four):
    assert_of_each_role(four, ("both", "first", "twice", "whole"))


def test_a_process_without_rows(two):
    x, of = run.drawn(1, run.WIDTH).double().requires_grad_(), run.parameters()
    weight, gain = (of[name].double().requires_grad_() for name in ("weight", "gain"))
    y = rms_norm(x) * weight * gain
    y.square().sum().backward()
    exact = {"y": y, "d_x": x.grad, "d_weight": weight.grad, "d_gain": gain.grad}
    assert_each_found(two, "one_row", exact)


def test_products_with_a_matrix(two):
    x = run.drawn(run.BATCH, run.TOKENS, run.WIDTH).bfloat16().double().requires_grad_()
    head = run.parameters()["head"].bfloat16().double().requires_grad_()
    loss = F.cross_entropy((x @ head.T).flatten(0, 1), run.labels().flatten(), reduction="none")
    loss.sum().backward()
    exact = {"loss": loss.view(run.BATCH, run.TOKENS), "d_x": x.grad, "d_head": head.grad}
    assert_each_found(two, "products", exact, error=1e-2)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A mesh of this process alone, on which tensors are split as on any other."""
    meeting = tmp_path_factory.mktemp("alone") / "meeting"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


X, W, S = run.drawn(4, 6, 8), run.drawn(8, seed=1), run.drawn(4, 6, seed=2)


@htile.rowwise
def scaled(x, weight=None, shift: htile.PerRow = 0.0):
    y = x if weight is None else x * weight
    return y + shift


@htile.rowwise
def added(x, residual):
    return x + residual


@htile.rowwise
def largest(x):
    return htile.max_rows(x)


@htile.rowwise
def product(x, w: htile.Matrix):
    return F.linear(x, w)


ROWS, SECOND, LAST, WHOLE = (Shard(0),), (Shard(1),), (Shard(2),), (Replicate(),)
PARTIAL = (Partial("sum"),)
REFUSED = {
    "a split row": (
        lambda put: scaled(put(X, LAST)),
        r"x has the placements \[Shard\(dim=2\)\], which splits each row.*"
        r"x\.redistribute\(placements=\[Shard\(dim=0\)\]\)",
    ),
    "a split row, counted from the end": (
        lambda put: scaled(put(X, (Shard(-1),))), r"x has .*which splits each row"
    ),
    "one row that is split": (
        lambda put: scaled(put(X[0, 0], ROWS)),
        r"x has .*splits each row.*redistribute\(placements=\[Replicate\(\)\]\)",
    ),
    "a split vector": (
        lambda put: scaled(put(X, ROWS), put(W, ROWS)),
        r"weight has .*all rows share it.*weight\.redistribute\(placements=\[Replicate\(\)\]\)",
    ),
    "a split matrix": (
        lambda put: product(put(X.bfloat16(), ROWS), put(X[0].bfloat16(), ROWS)),
        r"w has .*all rows share it.*w\.redistribute",
    ),
    "partial sums": (
        lambda put: scaled(put(X, PARTIAL)),
        r"x has the placements \[Partial\(sum\)\], which are neither split.*x\.redistribute",
    ),
    "partial sums of a vector": (
        lambda put: scaled(put(X, ROWS), put(W, PARTIAL)), r"weight has .*weight\.redistribute"
    ),
    "rows that are split otherwise": (
        lambda put: added(put(X, ROWS), put(X, SECOND)),
        r"residual has .*Shard\(dim=1\).*while x has \[Shard\(dim=0\)\].*"
        r"residual\.redistribute\(placements=\[Shard\(dim=0\)\]\)",
    ),
    "rows that are whole": (
        lambda put: added(put(X, WHOLE), put(X, ROWS)),
        r"x has .*Replicate.*while residual has .*x\.redistribute\(placements=\[Shard\(dim=0\)\]\)",
    ),
    "values of rows that are whole": (
        lambda put: scaled(put(X, ROWS), None, put(S, WHOLE)),
        r"shift has .*shift\.redistribute\(placements=\[Shard\(dim=0\)\]\)",
    ),
    "a row that repeats, but is split": (
        lambda put: added(put(X, SECOND), put(X[:1], ROWS)), r"residual has .*residual\.redistribut"
    ),
    "plain rows": (lambda put: added(put(X, ROWS), X), "residual is a Tensor.*distribute_tensor"),
    "a plain vector": (
        lambda put: scaled(put(X, ROWS), torch.nn.Parameter(W)),
        "weight is a Parameter.*distribute_tensor",
    ),
    "a vector beside plain rows": (
        lambda put: scaled(X, put(W, WHOLE)), "weight is a DTensor and x is a Tensor"
    ),
    "a maximum over all rows": (
        lambda put: largest(put(X, ROWS)), "a maximum over all rows, which are split.*redistribute"
    ),
    "out=": (lambda put: scaled(put(X, ROWS), out=put(X, ROWS)), "out= with DTensors"),
    "out= for plain rows": (lambda put: scaled(X, out=put(X, ROWS)), "out= with DTensors"),
    "inspect": (lambda put: scaled.inspect(put(X, LAST)), r"x has .*which splits each row"),
    "tune": (lambda put: scaled.tune(put(X, LAST)), r"x has .*which splits each row"),
    "torch.compile with out=": (
        lambda put: _compiled(lambda x, out: scaled(x, out=out), put(X, ROWS), put(X, ROWS)),
        "out= with DTensors",
    ),
}


def _compiled(function, *args):
    """The call in torch.compile, where it breaks the graph."""
    torch.compiler.reset()
    return torch.compile(function, backend="eager")(*args)


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_process_cannot_compute_is_refused(mesh, name):
    """In training too. Nothing is sent to another process, and no placement is changed."""
    call, message = REFUSED[name]

    def put(tensor, placements):
        return DTensor.from_local(tensor, mesh, placements, run_check=False)

    def put_to_train(tensor, placements):
        return put(tensor, placements).requires_grad_()

    for each in (put, put_to_train):
        with pytest.raises(UnsupportedError, match=message):
            call(each)


def test_torch_compile_says_why_placements_are_refused(mesh):
    x = DTensor.from_local(X, mesh, LAST, run_check=False)
    with pytest.raises(RuntimeError, match=r"x has .*which splits each row"):
        _compiled(lambda x: scaled(x), x)


@pytest.mark.parametrize("backward", (False, True))
def test_inspect_and_compile_are_those_of_a_process(mesh, backward):
    """The kernel of as many rows as the process has."""
    x = distribute_tensor(X, mesh, ROWS).requires_grad_(backward)
    weight = distribute_tensor(W, mesh, WHOLE)
    kernel = scaled.inspect(x, weight)
    assert kernel.source == scaled.inspect(X, W).source
    plain = scaled.inspect(X.clone().requires_grad_(backward), W)
    assert kernel.backward.source == plain.backward.source
    assert scaled.compile(x, weight, backward=backward).plan.stages == kernel.plan.stages


def test_meshes_that_differ(mesh):
    square = init_device_mesh("cpu", (1, 1))
    x, residual = distribute_tensor(X, mesh, ROWS), distribute_tensor(X, square, [Shard(0)] * 2)
    with pytest.raises(UnsupportedError, match="x and residual are on different meshes"):
        added(x, residual)


def test_a_maximum_over_rows_that_are_whole(mesh):
    found = largest(distribute_tensor(X, mesh, WHOLE))
    assert found.placements == WHOLE and torch.equal(found.full_tensor(), X.amax((0, 1)))


# ---- modules -------------------------------------------------------------------------------------


MODULES = {
    "RMSNorm": (lambda m: m.RMSNorm(8), ROWS),
    "LayerNorm of two dimensions": (lambda m: m.LayerNorm((6, 8)), ROWS),
    "LayerNorm without parameters": (lambda m: m.LayerNorm(8, elementwise_affine=False), SECOND),
    "GroupNorm": (lambda m: m.GroupNorm(2, 6), ROWS),
    "Softmax": (lambda m: m.Softmax(-1), SECOND),
}


OTHERS = {
    "LayerNorm": (htile.nn.LayerNorm((6, 8), elementwise_affine=False), SECOND,
                  lambda x: F.layer_norm(x, (6, 8))),
    "Softmax": (htile.nn.Softmax(-1), LAST, lambda x: torch.softmax(x, -1)),
    "SwiGLU": (lambda x: htile.nn.SwiGLU()(x, x), LAST, lambda x: F.silu(x) * x),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_kernels_for_rows_that_are_split(mesh, called, name):
    make, placements = MODULES[name]
    ours, theirs = make(htile.nn), make(torch.nn).double()
    for key, parameter in [*ours.named_parameters()]:
        setattr(ours, key, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, WHOLE)))
    y = ours(distribute_tensor(X, mesh, placements))
    assert y.placements == placements and len(called) == 2  # once more with the rows of the process
    torch.testing.assert_close(y.full_tensor().double(), theirs(X.double()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_torchs_own_forward_runs_for_rows_in_parts(mesh, called, name):
    module, placements, right = OTHERS[name]
    y = module(distribute_tensor(X, mesh, placements))
    torch.testing.assert_close(y.full_tensor(), right(X))
    assert called == []


def test_cross_entropy(mesh, called):
    """Of all rows: a mean is that over all processes."""
    target = torch.tensor([3, 0, 7, -100])
    x, label = distribute_tensor(X[:, 0], mesh, ROWS), distribute_tensor(target, mesh, ROWS)
    for reduction in ("mean", "sum", "none"):
        found = htile.nn.CrossEntropyLoss(reduction=reduction)(x, label).full_tensor()
        right = F.cross_entropy(X[:, 0].double(), target, reduction=reduction)
        torch.testing.assert_close(found.double(), right, rtol=0, atol=1e-6)
    assert len(called) == 6
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        htile.nn.CrossEntropyLoss()(x, target)
