"""What each of several processes computes for tests/test_distributed.py, with gloo on the CPU.

    python -m tests.distributed RUN RANK WORLD FOLDER [cuda]

With `cuda` each of them has a GPU of its own, and they speak through NCCL
(tests/gpu/test_distributed.py).
It saves what it has found as FOLDER/RANK.pt: whole tensors by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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

WAIT = timedelta(seconds=60)  # for the other processes
BATCH, TOKENS, WIDTH, CLASSES = 4, 3, 24, 11
STEPS, RATE = 3, 0.5  # of training
DEVICE = "cpu"  # of all tensors in the processes


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def labels() -> torch.Tensor:
    made = torch.Generator().manual_seed(9)
    return torch.randint(0, CLASSES, (BATCH, TOKENS), generator=made).to(DEVICE)


# ---- training with rows that are split -----------------------------------------------------------


@htile.rowwise
def rms_norm(x, weight, gain, eps: float = 1e-6):
    """A norm with a shared vector and a 0-d tensor."""
    return x * torch.rsqrt((x * x).mean() + eps) * weight * gain


@htile.rowwise
def cross_entropy(logits, label: htile.PerRow):
    """The loss of each row."""
    return F.cross_entropy(logits, label)


def parameters() -> dict[str, torch.Tensor]:
    """What the model below begins with."""
    return {
        "weight": 1 + drawn(WIDTH, seed=1) / 4,
        "gain": torch.tensor(1.5, device=DEVICE),
        "up": drawn(2 * WIDTH, WIDTH, seed=2) / 4,
        "scale": 1 + drawn(WIDTH, seed=3) / 4,
        "head": drawn(CLASSES, WIDTH, seed=4) / 4,
    }


def split_rows() -> dict[str, torch.Tensor]:
    """Losses and gradients of a model whose batch is split over the processes."""
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    whole = [Replicate()]
    x = distribute_tensor(drawn(BATCH, TOKENS, WIDTH), mesh, [Shard(0)]).requires_grad_()
    label = distribute_tensor(labels(), mesh, [Shard(0)])
    of = {
        name: distribute_tensor(p, mesh, whole).requires_grad_() for name, p in parameters().items()
    }
    norm, gate = htile.nn.RMSNorm(WIDTH, eps=1e-6), htile.nn.SwiGLU()
    norm.weight = torch.nn.Parameter(of.pop("scale"))
    of["scale"], found = norm.weight, {}
    for step in range(STEPS):
        h = gate(F.linear(rms_norm(x, of["weight"], of["gain"]), of["up"]))
        loss = cross_entropy(F.linear(norm(h), of["head"]), label).mean()
        wrt = {"x": x, **of}
        gradients = torch.autograd.grad(loss, [*wrt.values()])
        assert not isinstance(h.to_local(), DTensor) and h.placements == (Shard(0),)
        found[f"loss{step}"] = loss.full_tensor()
        for (name, p), g in zip(wrt.items(), gradients, strict=True):
            found[f"{name}{step}"] = g.full_tensor()
            with torch.no_grad():
                p -= RATE * g.redistribute(placements=p.placements)
    return found


# ---- rows of all kinds ---------------------------------------------------------------------------


@htile.rowwise
def many(x, repeated, weight, shift: htile.PerRow, table: htile.Shared, gain: htile.Scalar):
    """Arguments of each role; results that are rows, values of rows, and a sum over all rows."""
    y = torch.softmax(x + repeated, -1) * weight * table[1] * gain + shift
    return {"y": y, "most": y.amax(), "total": htile.sum_rows(y * x)}


LEAD = 5, 3  # of no multiple of two, so that processes have different numbers of rows


def arguments() -> dict[str, torch.Tensor]:
    """Those of `many`."""
    return {
        "x": drawn(*LEAD, 8), "repeated": drawn(LEAD[1], 8, seed=1), "weight": drawn(8, seed=2),
        "shift": drawn(*LEAD, seed=3), "table": drawn(2, 8, seed=4),
        "gain": torch.tensor(0.7, device=DEVICE),
    }  # fmt: skip


def of_each_role() -> dict[str, torch.Tensor]:
    """Results and gradients of `many` with rows that are split in several ways."""
    world, found = torch.distributed.get_world_size(), {}
    if world == 4:
        mesh = init_device_mesh(DEVICE, (2, 2))
        ways = {
            "both": ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
            "first": ([Shard(0), Replicate()], [Replicate(), Replicate()]),
            "twice": ([Shard(0), Shard(0)], [Replicate(), Replicate()]),
            "whole": ([Replicate(), Replicate()], [Replicate(), Replicate()]),
        }
    else:
        mesh = init_device_mesh(DEVICE, (world,))
        ways = {"rows": ([Shard(0)], [Replicate()]), "second": ([Shard(1)], [Shard(0)])}
    for way, (of_rows, of_repeated) in ways.items():
        of = {"x": of_rows, "shift": of_rows, "repeated": of_repeated}
        given = {
            name: distribute_tensor(
                each, mesh, of.get(name, [Replicate()] * mesh.ndim)
            ).requires_grad_()
            for name, each in arguments().items()
        }
        results = many(**given)
        assert all(results[name].placements == tuple(of_rows) for name in ("y", "most"))
        is_split = [type(p) is Shard for p in of_rows]
        sums = tuple(Partial("sum") if k else Replicate() for k in is_split)
        assert results["total"].placements == sums
        objective(results).backward()
        assert given["weight"].grad.placements == sums
        found |= {f"{way} {name}": each.full_tensor() for name, each in results.items()}
        found |= {f"{way} d_{name}": each.grad.full_tensor() for name, each in given.items()}
        with torch.no_grad():
            again = many(**{name: each.detach() for name, each in given.items()})
        found |= {f"{way} no_grad {name}": each.full_tensor() for name, each in again.items()}
    return found


def objective(results: dict[str, torch.Tensor]) -> torch.Tensor:
    """A number that depends on all results, and not linearly."""
    return sum((each * each).sum() for each in results.values())


def one_row() -> dict[str, torch.Tensor]:
    """Results and gradients of one row, of which all processes but the first have none."""
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    x = distribute_tensor(drawn(1, WIDTH), mesh, [Shard(0)]).requires_grad_()
    of = parameters()
    weight, gain = (
        distribute_tensor(of[name], mesh, [Replicate()]).requires_grad_()
        for name in ("weight", "gain")
    )
    y = rms_norm(x, weight, gain)
    y.square().sum().backward()
    found = {"y": y, "d_x": x.grad, "d_weight": weight.grad, "d_gain": gain.grad}
    return {name: each.full_tensor() for name, each in found.items()}


SEVERAL = 3, 4  # tokens of one graph after the other


def compiled() -> dict[str, torch.Tensor]:
    """Losses and gradients of a function with modules in torch.compile, without a graph break.

    The graph for a second number of tokens is that for any number.
    """
    mesh, found = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),)), {}
    gate, norm = htile.nn.SwiGLU(), htile.nn.RMSNorm(WIDTH, eps=1e-6)
    of = {
        name: distribute_tensor(p, mesh, [Replicate()]).requires_grad_()
        for name, p in parameters().items() if name in ("weight", "gain", "scale")
    }  # fmt: skip
    norm.weight = of["scale"] = torch.nn.Parameter(of["scale"].detach())

    def loss_of(x):
        h = rms_norm(x, of["weight"], of["gain"])
        y = gate(norm(h) + h)
        assert y.placements == (Shard(0),)
        return (y * y).sum()

    for way in ("static", "dynamic"):
        torch.compiler.reset()
        options = {"fullgraph": True, "backend": "aot_eager", "dynamic": way == "dynamic"}
        graph = torch.compile(loss_of, **options)
        for tokens in SEVERAL:
            x = distribute_tensor(drawn(5, tokens, WIDTH), mesh, [Shard(0)]).requires_grad_()
            loss = graph(x)
            wrt = {"x": x, **of}
            found[f"{way} loss {tokens}"] = loss.full_tensor()
            for name, g in zip(wrt, torch.autograd.grad(loss, [*wrt.values()]), strict=True):
                found[f"{way} {name} {tokens}"] = g.full_tensor()
    return found


@htile.rowwise
def linear_cross_entropy(h, head: htile.Matrix, label: htile.PerRow):
    """The loss of each row, of its product with a matrix."""
    z = F.linear(h, head)
    return z.logsumexp(-1) - z[label]


def products() -> dict[str, torch.Tensor]:
    """Losses and gradients of a function with a product, in bfloat16."""
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    x, head = drawn(BATCH, TOKENS, WIDTH).bfloat16(), parameters()["head"].bfloat16()
    x = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    head = distribute_tensor(head, mesh, [Replicate()]).requires_grad_()
    loss = linear_cross_entropy(x, head, distribute_tensor(labels(), mesh, [Shard(0)]))
    loss.sum().backward()
    found = {"loss": loss, "d_x": x.grad, "d_head": head.grad}
    return {name: each.full_tensor() for name, each in found.items()}


# ---- FSDP2 ---------------------------------------------------------------------------------------


class Norm(torch.nn.Module):
    """A norm as libraries of models write it, which `fuse` finds."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(torch.nn.Module):
    """Norm, gate and product, with the modules of `of`, htile.nn or a float64 stand-in of it."""

    def __init__(self, of):
        super().__init__()
        self.norm, self.gate = of.RMSNorm(WIDTH, eps=1e-6), of.SwiGLU()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.last = of.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.last(self.gate(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Two blocks, a norm that `fuse` finds, and a linear layer."""

    def __init__(self, of):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(of), Block(of)])
        self.own, self.head = Norm(), torch.nn.Linear(WIDTH, CLASSES, bias=False)
        for seed, parameter in enumerate(self.parameters()):
            new = drawn(*parameter.shape, seed=seed).to(parameter.device)
            parameter.data = new / 4 + (parameter.ndim == 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.own(x))


def fully_sharded(dtype: torch.dtype | None = None, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Losses and gradients of a model whose parameters are split, as FSDP2 does it.

    dtype: that of the forward and backward passes.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found, loss_of, model = {}, htile.nn.CrossEntropyLoss(), Model(htile.nn).to(DEVICE)
    assert "own" in htile.nn.fuse(model).fused
    options = {"mesh": init_device_mesh(DEVICE, (world,)), "mp_policy": MixedPrecisionPolicy(dtype)}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    x, label = drawn(BATCH, TOKENS, WIDTH).chunk(world)[rank], labels().chunk(world)[rank]
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(steps):
        loss = loss_of(model(x).flatten(0, 1), label.flatten())
        loss.backward()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        found[f"loss{step}"] = mean / world
        for key, parameter in model.named_parameters():
            found[f"{key}{step}"] = parameter.grad.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
    return found


def in_16_bits() -> dict[str, torch.Tensor]:
    """The same in bfloat16, for one step."""
    return fully_sharded(torch.bfloat16, steps=1)


RUNS: dict[str, Callable[[], dict]] = {
    "split_rows": split_rows, "of_each_role": of_each_role, "fully_sharded": fully_sharded,
    "in_16_bits": in_16_bits, "one_row": one_row, "products": products, "compiled": compiled,
}  # fmt: skip


def main() -> None:
    global DEVICE
    run, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    DEVICE = sys.argv[5] if len(sys.argv) > 5 else DEVICE
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank,
        world_size=world, timeout=WAIT,
    )  # fmt: skip
    found = {}
    for name in run.split(","):
        found |= {f"{name}: {key}": value.detach() for key, value in RUNS[name]().items()}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
