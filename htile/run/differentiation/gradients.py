"""Calls whose gradients are asked for: a forward kernel, and a backward kernel when autograd runs.

So are calls inside torch.func, and calls with tangents. `autograd.py` has what torch's graph is
made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from ...errors import GradientError, UnsupportedError
from ...frontend.roles import classify
from ..launch import Request
from ..operands import call_key, device_of, is_inside_transform, refuse_transforms
from ..over_rows import refuse_no_maximum
from ..runner import Runner, keep
from ..shortcuts.gradients import RecordedWriter
from ..specialize import Specialization
from .autograd import ENTRY, Recorded
from .derivatives import derivative_of
from .tangents import TANGENTS, tangents_of

if TYPE_CHECKING:
    from ..rowwise import Rowwise


Results = Callable[[tuple], Sequence]  # of a graph, for the values of its parameters


class DifferentiableCalls:
    """The calls of one row-wise function whose results autograd differentiates.

    of_products: makes what gives the results of a function with matrix products.
    """

    def __init__(self, function: Rowwise, of_products: Callable[[Request], Results]):
        self._function, self._of_products = function, of_products
        self._runners: dict[Specialization, Runner] = {}
        self._known: dict[object, tuple[Results, object]] = {}

    def __call__(self, values: tuple, has_out: bool) -> object:
        """What the function returns for these values of its parameters; `out=` is refused."""
        function = self._function
        signature, captures = function._signature, function._captures
        if has_out and is_inside_transform(values):
            raise UnsupportedError(
                f"{signature.name}: out= inside torch.func or with tangents; return the result"
            )
        if has_out:
            raise GradientError(
                f"{signature.name}: out= with arguments that require grad; return the result, or "
                "call it under torch.no_grad()"
            )
        watched = captures.watched()
        captured = watched[1]
        key = call_key(captured, signature, values, (), ())
        found = None if key is None else self._known.get(key)
        is_new = found is None
        if is_new:
            call = classify(signature, values)
            refuse_transforms(signature, values)
            device_of(signature, values)
            request, holds = function._request(call, captured, values)
            refuse_no_maximum(request.specialization.traced, request.call.lead)
            structure = request.specialization.traced.structure
            found = self._applied(request, holds), None if structure.is_leaf() else structure
            if holds and key is not None:
                keep(self._known, key, found)
        apply, structure = found
        results = apply(values)
        if is_new and holds and key is not None:
            self._add_shortcuts(request, apply, watched)
        return results[0] if structure is None else pytree.tree_unflatten([*results], structure)

    def _applied(self, request: Request, holds: bool) -> Results:
        """What gives the results, which autograd differentiates, for calls like this one."""
        if request.specialization.has_products:
            return self._of_products(request)
        return Recorded(self._runner(request, holds), request.values, request.call.lead)

    def _add_shortcuts(self, request: Request, apply: Results, watched: tuple) -> None:
        """Add shortcuts for calls like this one, if a kernel was launched."""
        derivative = apply.derivative if isinstance(apply, Recorded) else None
        if derivative is None or torch._C._len_torch_dispatch_stack():
            return
        launch = derivative.forward.launch_of(request.values, request.call.lead)
        if launch is not None:
            first = replace(request, specialization=derivative.forward.specialization)
            self._function._add_shortcuts(RecordedWriter, first, watched, launch, derivative, ENTRY)

    def _runner(self, request: Request, holds: bool) -> Runner:
        """The runner of a call's specialization; `holds` says whether it may be remembered."""
        known = self._runners.get(request.specialization)
        if known is None:
            specialization, own = request.specialization, (request.fastmath, dict(request.wanted))
            known = Runner(specialization.traced, specialization.specs, *own)
            if holds:
                keep(self._runners, request.specialization, known)
        return known


def part_named(run: Runner, name: str) -> Runner:
    """The runner of this name, of what comes of this one's graph."""
    kind, is_other, names = name.partition(":")
    if is_other:
        names = tuple(names.split(","))
        return tangents_of(run, names).run if kind == TANGENTS else run.unshared(names)
    wrt, repeated, there = name.split(";")
    of = tuple(wrt.split(",")), frozenset(repeated.split(",") if repeated else ())
    derivative = derivative_of(run, *of)
    if there:
        return derivative.backward(tuple([each == "1" for each in there])).run
    return derivative.forward
