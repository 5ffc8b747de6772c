"""The passes of a call that is differentiated: their kernels, what is kept, and their plans timed.

They are those of a call as it would be made: of the arguments that require grad, or if none does of
all that can have a gradient, with a cotangent for each result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...build.arch import Arch
from ...errors import GradientError
from ...frontend.derive import differentiable
from ...frontend.dtypes import dtype_name
from ...frontend.graph import Graph, Role
from ...lower.describe import describe_traffic
from ..kernel import Kernel
from ..launch import Request
from ..runner import Runner
from ..specialize import spec_of
from .derivatives import Backward, Derivative, derivative_of, repeated_among

if TYPE_CHECKING:
    from ..rowwise import Rowwise


class Saved(tuple):
    """The names of what a backward kernel reads of the forward pass; `str` tells of their bytes."""

    text: str

    def __new__(cls, names: Sequence[str], text: str) -> Saved:
        made = super().__new__(cls, names)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text


class Training:
    """The kernels of a call whose results are differentiated.

    forward, backward: those of the two passes. saved: the names of what the backward kernel reads
        of the forward pass: arguments, results and statistics.
    """

    def __init__(self, forward: Kernel, backward: Kernel, saved: Saved, both: Callable[[], Kernel]):
        self.forward, self.backward, self.saved, self._both = forward, backward, saved, both

    def __repr__(self) -> str:
        return f"<htile kernels of both passes: {self.forward!r}, {self.backward!r}>"

    @cached_property
    def joint(self) -> Kernel:
        """The kernel of both passes at once, of arguments and cotangents.

        No call runs it. It shows what both passes compute, and what the derivative is made of.
        """
        return self._both()


class Passes(NamedTuple):
    """The forward and the backward graph of a call, each with the values that it gets."""

    derivative: Derivative
    values: tuple
    backward: Backward
    given: tuple
    lead: tuple[int, ...]


def training_kernels(
    function: Rowwise, request: Request, arch: Arch, gpu: torch.device | None = None
) -> Training:
    """The kernels of a call like this one, where grad mode is on.

    Raises GradientError where no result has a gradient.

    gpu: the one whose tuned plans count.
    """
    run, request = _runner(function, request)
    passes = _passes(run, request.values, request.call.lead, is_real=False)
    if passes is None:
        told = f"{run.graph.name} has no floating result that depends on a tensor"
        raise GradientError(told, run.graph.last_line)
    derivative, backward, lead = passes.derivative, passes.backward, passes.lead
    kernels = [
        derivative.forward.kernel(passes.values, lead, arch, gpu),
        backward.run.kernel(passes.given, lead, arch, gpu),
    ]
    both = zip(backward.run.parameters.names, backward.sources, strict=True)
    names = [name for name, (number, _) in both if number == 1]
    text = _told(backward.run.graph, names, request.signature.names, kernels)
    return Training(*kernels, Saved(names, text), partial(_joint, passes, arch))


def _runner(function: Rowwise, request: Request) -> tuple[Runner, Request]:
    with torch.enable_grad():
        captured = function._captures.fingerprint()
        request, _ = function._request(request.call, captured, request.values)
    return function._differentiable._runner(request, holds=False), request


def _passes(run: Runner, values: tuple, lead: tuple[int, ...], is_real: bool) -> Passes | None:
    """The passes of a call; None where no result has a gradient.

    is_real: whether the forward pass runs, so that the backward pass has its results.
    """
    named = dict(zip(run.parameters.names, values, strict=True))
    leaves = {i.name: i for i in run.graph.inputs if i.role is not Role.SCALAR}
    floating = [name for name, i in leaves.items() if i.dtype.is_floating_point]
    wrt = [name for name in floating if named[name].requires_grad]
    wrt = wrt or [name for name in floating if leaves[name].dtype.itemsize > 1]
    if not differentiable(run.graph, wrt):
        return None
    repeated = repeated_among(run, {n: named[n] for n in wrt}, lead)
    derivative = derivative_of(run, tuple(wrt), repeated)
    forward = derivative.forward
    if is_real:
        with torch.no_grad():
            results = forward(values, lead)
    else:
        shapes = zip(forward.graph.outputs, forward.shapes(lead, run.length(values)), strict=True)
        results = tuple(torch.empty(s, dtype=o.dtype, device="meta") for o, s in shapes)
    cotangents = tuple(
        (torch.randn_like(result) if is_real else result)
        if has_one and k < derivative.results else None
        for k, (result, has_one) in enumerate(zip(results, derivative.has_gradient, strict=True))
    )  # fmt: skip
    kept = derivative.kept(values, tuple(results))
    backward, given = derivative.arguments(values, kept, cotangents)
    return Passes(derivative, values, backward, given, lead)


def passes_of(function: Rowwise, request: Request) -> Passes | None:
    """The passes of a call with these tensors, and with a random cotangent for each result.

    None where no result has a gradient.
    """
    run, request = _runner(function, request)
    return _passes(run, request.values, request.call.lead, is_real=True)


def _joint(passes: Passes, arch: Arch) -> Kernel:
    """The kernel of the joint graph, with the function's results."""
    of, derivative = passes.derivative.of, passes.derivative
    joint = derivative.joint(of.graph, differentiable(of.graph, derivative.wrt))
    outputs = *of.graph.outputs, *joint.outputs
    structure = pytree.tree_structure((0,) * len(outputs))
    graph = replace(joint, outputs=outputs, structure=structure, scattered=())
    specs, given = {spec.name: spec for spec in of.specs}, dict(
        zip(of.parameters.names, passes.values, strict=True)
    )
    given |= zip(passes.backward.run.parameters.names, passes.given, strict=True)
    specs = tuple(specs.get(i.name) or spec_of(graph, i) for i in graph.inputs)
    run = Runner(graph, specs, of.fastmath, {})
    return run.kernel(tuple(given[spec.name] for spec in specs), passes.lead, arch)


def _told(
    graph: Graph, names: Sequence[str], arguments: Sequence[str], kernels: Sequence[Kernel]
) -> str:
    """What is kept, a line each, and the bytes that both kernels move."""
    inputs, lines = {i.name: i for i in graph.inputs}, []
    for name in names:
        i = inputs[name]
        count = prod(graph[i.id].value.inner) * i.dtype.itemsize
        is_shared = i.role not in (Role.ROW, Role.PER_ROW)
        whose = "that all rows share" if is_shared else "a row"
        what = "an argument" if name in arguments else "a result"
        lines.append((name, f"{what} in {dtype_name(i.dtype)}, {count} bytes {whose}"))
    for name, kernel in zip(("forward", "backward"), kernels, strict=True):
        lines.append((name, describe_traffic(kernel.plan).removeprefix("traffic").strip()))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines)
