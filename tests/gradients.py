"""Holds derivatives against torch's: float64 autograd of `torch.vmap` of the same Python function.

`gradients` evaluates a joint graph in float64, `autograd` runs the user's own function. They share
the arguments and the cotangents, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from htile.frontend.derive import derive, differentiable
from htile.frontend.dynamic import in_bucket
from htile.frontend.graph import Graph, Role
from htile.frontend.ops import Op
from htile.frontend.reference import EVALUATE, evaluate
from htile.frontend.roles import classify
from htile.frontend.scattered import Scattered
from htile.frontend.tangents import tangents
from htile.frontend.trace import trace
from htile.run.rowwise import Rowwise
from htile.run.vmap import bodies_as_written
from htile.testing import Assignments, Bits, Wide

F64 = torch.float64


@dataclass
class Call:
    """A traced function with its arguments, floating ones in float64.

    wrt: the floating tensors among them.
    outputs: the names of the results that have a derivative.
    length: how many elements the rows have, if the graph is one of rows of any length.
    """

    f: Rowwise
    graph: Graph
    values: dict[str, object]
    roles: dict[str, Role]
    lead: tuple[int, ...]
    wrt: tuple[str, ...]
    outputs: tuple[str, ...]
    length: int | None = None

    def evaluated(self, graph: Graph, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a joint graph gives for the arguments and these gradients, in float64."""
        return evaluate(graph, {**self.values, **more}, self.lead, F64, length=self.length)


def called(f: Rowwise, *args, **kwargs) -> Call:
    """The trace of `f` for these arguments."""
    values = f._signature.bind(args, kwargs)
    call = classify(f._signature, values)
    inners = {spec.name: tuple(spec.inner) for spec in call.specs}
    call = in_bucket(f._signature, call) if f._dynamic_n else call
    graph = trace(f._fn, call.specs, call.n, call.multiple)
    roles = {spec.name: spec.role for spec in call.specs}
    named = dict(zip(f._signature.names, values, strict=True))
    wrt = tuple(
        name
        for name, v in named.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.element_size() > 1
    )
    for name, value in named.items():
        if roles.get(name) in (Role.ROW, Role.PER_ROW):
            named[name] = value.expand((*call.lead, *inners[name])).clone()
        if name in wrt:
            named[name] = named[name].detach().to(F64, copy=True)
    outputs = differentiable(graph, wrt)
    return Call(f, graph, named, roles, call.lead, wrt, outputs, call.length)


def results(call: Call, given: dict[str, object]) -> dict[str, torch.Tensor]:
    """What the function's own Python gives for its parameters, by the names of the outputs."""
    rows = [name for name, role in call.roles.items() if role in (Role.ROW, Role.PER_ROW)]

    def of_row(*values):
        row = dict(zip(rows, values, strict=True))
        return call.f._signature.invoke(tuple({**given, **row}.values()))

    run = of_row
    for _ in call.lead:
        run = torch.vmap(run)
    with bodies_as_written(), Bits(), Wide(F64), Assignments(), _AsMeant():
        out = run(*(given[name] for name in rows)) if rows else of_row()
    names = [out.name for out in call.graph.outputs]
    return dict(zip(names, pytree.tree_leaves(out), strict=True))


EXTREMES = {
    torch.max: torch.amax, torch.min: torch.amin, torch.Tensor.max: torch.amax,
    torch.Tensor.min: torch.amin,
}  # fmt: skip


class _AsMeant(TorchFunctionMode):
    """What torch's own derivatives are held back from, where HTile differs on purpose.

    Conversions between floats have the slope 1, and what follows is in float64: torch rounds the
    gradient of a conversion to the dtype that it converts to. Equal elements share the gradient of
    `x.max()`, as they do of `x.amax()` and of `x.max()` outside of vmap. The slope of `ldexp` is
    2 ** e: torch 2.13 has 0 for negative exponents, because it computes the power in integers.
    """

    NAMES = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
    CONVERSIONS = frozenset(getattr(torch.Tensor, name) for name in NAMES)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in EXTREMES and len(args) == 1 and not kwargs:
            return EXTREMES[func](args[0])
        if func in (torch.ldexp, torch.Tensor.ldexp):
            return args[0] * 2.0 ** args[1].double()
        result = func(*args, **kwargs)
        if func not in self.CONVERSIONS or not result.is_floating_point():
            return result
        x = args[0]
        if not x.is_floating_point() or result.dtype in (torch.float32, F64):
            return x.double()
        return x + (result.double() - x).detach()


def cotangents(call: Call, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random gradient for each result that has a derivative."""
    torch.manual_seed(seed)
    outputs = {out.name: out for out in call.graph.outputs}
    inners = {
        name: (call.length,) if out.is_row and call.length else out.inner
        for name, out in outputs.items()
    }
    return {name: torch.randn((*call.lead, *inners[name]), dtype=F64) for name in call.outputs}


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
    found = call.evaluated(joint, {f"d_{name}": g for name, g in given.items()})
    for of in joint.scattered:
        g = scattered(of, found.pop(of.rows), found.pop(of.at), call.values[of.table])
        found[f"d_{of.table}"] = found.get(f"d_{of.table}", 0) + g
    return {name.removeprefix("d_"): g for name, g in found.items()}


def scattered(of: Scattered, added: torch.Tensor, at: torch.Tensor, table: torch.Tensor):
    """The gradient of a table to whose rows this is added, by autograd of its movements."""
    if of.of_each_row:
        return torch.zeros_like(table).scatter_add(-1, *torch.broadcast_tensors(at, added))
    table = torch.zeros_like(table).requires_grad_()
    moved = table
    for op, arg, _ in reversed(of.moves):
        moved = EVALUATE[op]((moved,), arg, F64) if op is not Op.RESHAPE else moved.reshape(arg)
    assert moved.shape == of.shape
    g = torch.zeros_like(moved).index_add(0, at.flatten(), added.reshape(-1, *of.shape[1:]))
    return torch.autograd.grad(moved, table, g)[0]


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


def check(f: Rowwise, *args, tolerance: float = 1e-9, wrt=None, **kwargs) -> Call:
    """Assert that the gradients of `f` are torch's, with respect to `wrt` or to all parameters."""
    call = called(f, *args, **kwargs)
    if wrt is not None:
        call = replace(call, wrt=wrt, outputs=differentiable(call.graph, wrt))
    given = cotangents(call)
    exact = autograd(call, given)
    assert_close(gradients(call, given), exact, f._signature.name, tolerance)
    return call


def check_tangents(f: Rowwise, *args, tolerance: float = 1e-9, wrt=None, **kwargs) -> None:
    """Assert that the tangents of `f` are torch's, with respect to `wrt` or to all parameters.

    Those of results of 8 bits are rounded to so many, and so they are not compared here.
    """
    call = called(f, *args, **kwargs)
    wrt = call.wrt if wrt is None else wrt
    torch.manual_seed(0)
    given = {name: torch.randn_like(call.values[name]) for name in wrt}

    def of(*values):
        found = results(call, call.values | dict(zip(wrt, values, strict=True)))
        return {out.name: found[out.name] for out in call.graph.outputs
                if out.dtype.is_floating_point and out.dtype.itemsize > 1}  # fmt: skip

    _, exact = torch.func.jvp(of, tuple(call.values[name] for name in wrt), tuple(given.values()))
    pushed, found = tangents(call.graph, wrt), {}
    if pushed is not None:
        both = {name: given[of] for name, of in pushed.parameters.items()}
        found = call.evaluated(pushed.graph, both)
        found = {name.removeprefix("t_"): t for name, t in found.items()}
        found = {name: t for name, t in found.items() if name in exact}
    assert_close(found, exact, f"tangents of {f._signature.name}", tolerance)


def check_second(f: Rowwise, *args, tolerance: float = 1e-8, **kwargs) -> None:
    """Assert that the gradients of the gradients of `f` are torch's."""
    call = called(f, *args, **kwargs)
    given = cotangents(call)
    exact, more = autograd(call, given, second=1)
    joint = derive(call.graph, call.wrt, call.outputs)
    wide = [out.name for out in call.graph.outputs if out.dtype.itemsize > 1]
    leaves = (*call.wrt, *(f"d_{name}" for name in given if name in wide))
    exact = {name: exact[name] for name in leaves}
    names = [out.name for out in joint.outputs]
    wanted = [name for name in differentiable(joint, leaves) if name in names]
    if not wanted:  # the gradients were found to be 0 everywhere
        assert all(g is None or g.abs().max() <= tolerance for g in exact.values())
        return
    twice = derive(joint, leaves, wanted)
    tensors = {f"d_{name}": g for name, g in given.items()}
    found = call.evaluated(twice, tensors | {f"d_{name}": more[name] for name in wanted})
    assert twice.nodes[: len(joint)] == joint.nodes
    found = {name.removeprefix("d_"): g for name, g in found.items()}
    assert_close(found, exact, f"{f._signature.name} twice", tolerance)
