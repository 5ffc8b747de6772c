"""Calls of row-wise functions as operations of torch, where torch makes graphs of programs.

`htile::call` is a call as the user wrote it. Where torch looks for gradients it becomes calls of
`htile::run` (`ops.py`): one of the forward graph, with what it keeps, and one of each backward
graph. `htile::run_` is a call with `out=`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch.library import register_fake
from torch.utils import _pytree as pytree

from ...errors import TraceError, UnsupportedError
from ...frontend.captures import line_of
from ...frontend.roles import classify, written
from ..differentiation.autograd import with_gradients
from ..differentiation.derivatives import derivative_of
from ..differentiation.gradients import part_named
from ..launch import Request
from ..operands import device_of, is_recorded, refuse_transforms
from ..runner import Operation, Runner
from .ops import KEPT, LIBRARY, NAMED, TAGS, Named, check, content_name, runner_named, values_of

if TYPE_CHECKING:
    from ..products.operations import ProductRunner
    from ..rowwise import Rowwise

for _schema in (
    "call(str function, Tensor[] tensors, float[] numbers) -> Tensor[]",
    "run_(str function, Tensor[] tensors, float[] numbers, Tensor(a!)[] out) -> ()",
):
    LIBRARY.define(_schema, tags=TAGS)
CALL, RUN_ = torch.ops.htile.call.default, torch.ops.htile.run_.default


@dataclass(frozen=True)
class Root:
    """A specialization of a function, as torch's graphs call it.

    captured: the fingerprints of captured values for which it is what the function computes. None
        for an exported program, which keeps what it was exported with.
    """

    function: Rowwise
    runner: Runner | ProductRunner
    captured: set[tuple] | None

    def results(self, values: tuple, lead: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """Those of a call; autograd knows how they depend on tensors that require grad."""
        if self.runner.specialization.has_products:
            return self.runner.results(values, lead)
        return with_gradients(self.runner, values, lead)

    def refuse_no_derivative(self, wrt: tuple[str, ...]) -> None:
        """Raise GradientError where there is no derivative for these arguments."""
        if self.runner.specialization.has_products:
            self.runner.refuse_no_derivative(wrt)
        else:
            derivative_of(self.runner, wrt, frozenset())

    def check(self) -> None:
        """Raise TraceError where the function would compute something else by now."""
        if self.captured is None:
            return
        function = self.function
        if function._captures.fingerprint() not in self.captured:
            raise TraceError(
                f"{function._signature.name}: a value that it captures has changed since "
                "torch.compile traced the call; call torch.compiler.reset() after such a change, "
                "or pass the value as an argument",
                line_of(written(function._fn)),
            )


_ROOTS: dict[str, Root] = {}  # by the names of their graphs


def root_of(function: Rowwise, request: Request, captured: tuple, is_kept: bool) -> Root:
    """The root for a call, with the name under which torch's graphs find it.

    captured: the fingerprint of what was captured when the call was traced.
    is_kept: whether the graph is to compute the same, whatever becomes of captured values.
    """
    runner, part = _runner(request)
    digest = content_name(runner)
    for k in count():  # functions of the same content are told apart, for they capture other things
        name = f"{digest}{KEPT * is_kept}{f'~{k}' if k else ''}"
        root = _ROOTS.setdefault(name, Root(function, runner, None if is_kept else set()))
        if root.function is function:
            break
    if root.runner is runner:
        runner.name = name
        NAMED[name] = Named(runner, root.check, part, None if is_kept else function._captures)
    if root.captured is not None:
        root.captured.add(captured)
    return root


def _runner(request: Request) -> tuple[Runner | ProductRunner, Callable]:
    """What runs the whole function, and what finds the parts of it by their names."""
    if request.specialization.has_products:
        from ..products.operations import ProductRunner, part_of_products

        return ProductRunner(request), part_of_products
    own = request.fastmath, dict(request.wanted)
    return Runner(request.specialization.traced, request.specialization.specs, *own), part_named


def call_transformed(
    function: str, tensors: list[torch.Tensor], numbers: list[float]
) -> list[torch.Tensor]:
    """`htile::call` where torch.func works on the tensors: a function of a compiled graph.

    Inside an operation torch's transforms have no way to another one. Whoever compiles the graph
    goes through this function, and finds the operations of forward and backward graphs in it.
    """
    runner, root = runner_named(function), _ROOTS[function]
    signature, values = root.function._signature, _values(runner, tensors, numbers)
    lead = classify(signature, values).lead
    refuse_transforms(signature, values)
    device_of(signature, values)
    if not is_recorded(values):
        check(function, lead)
    return [*root.results(values, lead)]


def call_distributed(
    function: str, tensors: list[torch.Tensor], numbers: list[float]
) -> list[torch.Tensor]:
    """`htile::call` of DTensors, a function of a compiled graph, too: torch goes through it, from
    them to what this process has of each, and back."""
    runner, root = runner_named(function), _ROOTS[function]
    values, k = _values(runner, tensors, numbers), root.function._signature._positional
    named = dict(zip(runner.parameters.names[k:], values[k:], strict=True))
    return pytree.tree_leaves(root.function(*values[:k], **named))


def _values(runner: Operation, tensors: list[torch.Tensor], numbers: list[float]) -> tuple:
    """One for each parameter; a symbol of a number becomes the number, as in an operation."""
    return values_of(runner.specs, tensors, [float(number) for number in numbers])


def _call(function: str, tensors: list[torch.Tensor], numbers: list[float]) -> list[torch.Tensor]:
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        raise UnsupportedError(
            f"{runner_named(function).graph.name}: torch.func of a program that torch has compiled "
            "or exported is not supported yet; apply it to the function itself"
        )
    return call_transformed(function, tensors, numbers)


def _run_with_out(
    function: str, tensors: list[torch.Tensor], numbers: list[float], out: list[torch.Tensor]
) -> None:
    root = _ROOTS[function]
    root.check()
    values = values_of(root.runner.specs, tensors, numbers)
    signature, structure = root.function._signature, root.runner.graph.structure
    k = signature._positional
    named = dict(zip(signature.names[k:], values[k:], strict=True))
    root.function(*values[:k], **named, out=pytree.tree_unflatten(out, structure))


LIBRARY.impl("call", _call, "CompositeImplicitAutograd")
LIBRARY.impl("run_", _run_with_out, "CompositeExplicitAutograd")
register_fake("htile::run_", lambda function, tensors, numbers, out: None, lib=LIBRARY)
