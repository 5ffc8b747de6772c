"""Holds derivatives against torch's: float64 autograd of `torch.vmap` of the same Python function.

`gradients` evaluates a joint graph in float64, `autograd` runs the user's own function. They share
the arguments and the cotangents, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from htile.frontend.derive import derive, differentiable
from htile.frontend.graph import Graph, Role
from htile.frontend.reference import evaluate
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.run.rowwise import Rowwise
from htile.run.vmap import bodies_as_written

F64 = torch.float64


@dataclass
class Call:
    """A traced function with its arguments, floating ones in float64.

    wrt: the floating tensors among them.
    outputs: the names of the results that have a derivative.
    """

    f: Rowwise
    graph: Graph
    values: dict[str, object]
    roles: dict[str, Role]
    lead: tuple[int, ...]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]


def called(f: Rowwise, *args, **kwargs) -> Call:
    """The trace of `f` for these arguments."""
    values = f._signature.bind(args, kwargs)
    call = classify(f._signature, values)
    graph = trace(f._fn, call.specs, call.n, call.multiple)
    roles = {spec.name: spec.role for spec in call.specs}
    named = dict(zip(f._signature.names, values, strict=True))
    wrt = tuple(
        name
        for name, v in named.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.element_size() > 1
    )
    for name in wrt:
        value = named[name].detach().to(F64, copy=True)
        if roles[name] in (Role.ROW, Role.PER_ROW):
            inner = value.shape[value.dim() - len(_spec(call, name).inner) :]
            value = value.expand((*call.lead, *inner)).clone()
        named[name] = value
    return Call(f, graph, named, roles, call.lead, wrt, differentiable(graph, wrt))


def _spec(call, name):
    return next(spec for spec in call.specs if spec.name == name)


def results(call: Call, given: dict[str, object]) -> dict[str, torch.Tensor]:
    """What the function's own Python gives for its parameters, by the names of the outputs."""
    rows = [name for name, role in call.roles.items() if role in (Role.ROW, Role.PER_ROW)]

    def of_row(*values):
        row = dict(zip(rows, values, strict=True))
        return call.f._signature.invoke(tuple({**given, **row}.values()))

    run = of_row
    for _ in call.lead:
        run = torch.vmap(run)
    with bodies_as_written():
        out = run(*(given[name] for name in rows)) if rows else of_row()
    names = [out.name for out in call.graph.outputs]
    return dict(zip(names, pytree.tree_leaves(out), strict=True))


def cotangents(call: Call, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random gradient for each result that has a derivative."""
    torch.manual_seed(seed)
    outputs = {out.name: out for out in call.graph.outputs}
    return {
        name: torch.randn((*call.lead, *outputs[name].inner), dtype=F64) for name in call.outputs
    }


def autograd(call: Call, given: dict[str, torch.Tensor], second: int | None = None):
    """torch's gradients of the parameters, None where there is none.

    second: a seed; then those of the gradients themselves, with respect to the parameters and to
        the cotangents, for random cotangents of them (`seconds`).
    """
    values = {
        name: v.clone().requires_grad_() if name in call.wrt else v
        for name, v in call.values.items()
    }
    given = {name: g.clone().requires_grad_(second is not None) for name, g in given.items()}
    out = results(call, values)
    pairs = [(out[name], g) for name, g in given.items() if out[name].requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], [values[n] for n in call.wrt], [g for _, g in pairs],
        allow_unused=True, create_graph=second is not None,
    )  # fmt: skip
    first = dict(zip(call.wrt, found, strict=True))
    if second is None:
        return first
    more = seconds({f"d_{name}": g for name, g in first.items() if g is not None}, second)
    pairs = [(first[n], more[f"d_{n}"]) for n in call.wrt if f"d_{n}" in more]
    pairs = [(g, more) for g, more in pairs if g.requires_grad]
    leaves = {n: values[n] for n in call.wrt} | {f"d_{name}": g for name, g in given.items()}
    found = torch.autograd.grad(
        [g for g, _ in pairs], [*leaves.values()], [m for _, m in pairs], allow_unused=True
    )
    return dict(zip(leaves, found, strict=True)), more


def seconds(first: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A random gradient for each of these gradients."""
    torch.manual_seed(seed)
    return {name: torch.randn(g.shape, dtype=F64) for name, g in first.items()}


def gradients(call: Call, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the joint graph, in float64, by the names of the parameters."""
    joint = derive(call.graph, call.wrt, call.outputs)
    assert joint.nodes[: len(call.graph)] == call.graph.nodes
    tensors = {**call.values, **{f"d_{name}": g for name, g in given.items()}}
    found = evaluate(joint, tensors, call.lead, F64)
    return {name.removeprefix("d_"): g for name, g in found.items()}


def assert_close(found: dict, exact: dict, what: str, tolerance: float = 1e-9) -> None:
    """Assert that gradients are torch's: NaN and infinities at their places, None for zeros."""
    assert set(found) <= set(exact), what
    for name, right in exact.items():
        if name not in found:
            none = right is None or not right.any()
            assert none, f"{what}: no gradient of {name}"
            continue
        mine = found[name]
        right = torch.zeros_like(mine) if right is None else right
        assert mine.shape == right.shape, f"{what}: d_{name} has shape {tuple(mine.shape)}"
        finite = right[right.isfinite()].abs()
        scale = finite.max().item() if finite.numel() else 0.0
        torch.testing.assert_close(
            mine, right, rtol=tolerance, atol=tolerance * (1e-3 + scale), equal_nan=True,
            msg=lambda text, name=name: f"{what}: d_{name}: {text}",
        )  # fmt: skip


def check(f: Rowwise, *args, tolerance: float = 1e-9, **kwargs) -> Call:
    """Assert that the gradients of `f` are torch's."""
    call = called(f, *args, **kwargs)
    given = cotangents(call)
    exact = autograd(call, given)
    assert_close(gradients(call, given), exact, f._signature.name, tolerance)
    return call


def check_second(f: Rowwise, *args, tolerance: float = 1e-8, **kwargs) -> None:
    """Assert that the gradients of the gradients of `f` are torch's."""
    call = called(f, *args, **kwargs)
    given = cotangents(call)
    exact, more = autograd(call, given, second=1)
    joint = derive(call.graph, call.wrt, call.outputs)
    leaves = (*call.wrt, *(f"d_{name}" for name in given))
    names = [out.name for out in joint.outputs]
    wanted = [name for name in differentiable(joint, leaves) if name in names]
    twice = derive(joint, leaves, wanted)
    tensors = {**call.values, **{f"d_{name}": g for name, g in given.items()}}
    tensors |= {f"d_{name}": more[name] for name in wanted}
    found = evaluate(twice, tensors, call.lead, F64)
    assert twice.nodes[: len(joint)] == joint.nodes
    found = {name.removeprefix("d_"): g for name, g in found.items()}
    assert_close(found, exact, f"{f._signature.name} twice", tolerance)
