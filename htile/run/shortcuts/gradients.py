"""Repeated calls that are differentiated: shortcuts of the forward and of the backward pass.

That of the forward pass allocates and launches as any shortcut does, and then makes a node of
autograd's graph. Its checks want `requires_grad` where it was, and no mode that watches operations,
as those that choose what a checkpoint keeps. That of the backward pass belongs to a `Derivative`,
whoever has made the node. It compares all tensors that the kernel reads with those of the first
backward pass: what was kept, which hooks may have moved, and the cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree

from ...frontend.captures import Captures
from ...frontend.graph import Role
from ..differentiation.derivatives import Backward, Derivative
from ..launch import Launch, Request
from ..operands import needs_copy
from .shortcut import ONE, CallWriter, Missed, add_after
from .text import NotTold, Writer, tuple_of


class RecordedWriter(CallWriter):
    """Writes the shortcut of a call whose results autograd differentiates.

    It launches the forward kernel of `derivative`.

    apply: makes the node of autograd's graph. It is given what the node keeps beside tensors, the
        tensors that it keeps, and the result or the results, in one tuple, and then the tensors
        that require grad. It returns the results.
    """

    def __init__(
        self, first: Request, missed: Missed | None, captures: Captures,
        watched: tuple[tuple, tuple], launch: Launch, derivative: Derivative, apply: Callable,
    ):  # fmt: skip
        super().__init__(first, missed, captures, watched, launch)
        self.derivative = derivative
        self.scope |= {"_derivative": derivative, "_apply": apply}
        if derivative.repeated:  # their gradients are summed to shapes that are no constants
            raise NotTold

    def modes(self) -> Iterator[str]:
        yield "_grad()"
        yield "not _watching()"

    def returned(self) -> list[str]:
        """Lines that return the results, which have the node, in the user's structure."""
        derivative, specs = self.derivative, self.first.call.specs
        numbers = (s.name if s.role is Role.SCALAR else "None" for s in specs)
        call = tuple_of(["_derivative", tuple_of(numbers), tuple_of(self.sizes), "()"])
        kept = [*(specs[k].name for k in derivative.kept_arguments),
                *(self.results[k] for k in derivative.kept_results)]  # fmt: skip
        count, recorded = derivative.results, self.results[: derivative.recorded]
        is_one, structure = len(recorded) == 1, derivative.of.graph.structure
        given = tuple_of([call, tuple_of(kept), recorded[0] if is_one else tuple_of(recorded)])
        found = f"_apply({', '.join([given, *derivative.wrt])})"
        if structure == ONE:
            return [f"return {found}" if is_one else f"return {found}[0]"]
        found = f"({found},)" if is_one else found
        found = f"{found}[:{count}]" if count < len(recorded) else found
        if structure == pytree.tree_structure((0,) * count):
            return [f"return {found}"]
        self.scope |= {"_structure": structure, "_unflatten": pytree.tree_unflatten}
        return [f"return _unflatten({found}, _structure)"]


class BackwardWriter(Writer):
    """Writes the shortcut of a backward pass.

    It takes what the node keeps beside tensors, the tensors that it keeps, and the cotangents. It
    returns a gradient for each argument of the node, None for the first one, which is no tensor.
    """

    def __init__(
        self, first: Request, missed: Missed | None, launch: Launch, derivative: Derivative,
        backward: Backward,
    ):  # fmt: skip
        super().__init__(first, missed, launch)
        self.derivative, self.backward = derivative, backward
        if derivative.repeated or any(backward.present[derivative.recorded :]):
            raise NotTold
        if backward.scattered:  # torch adds up what the kernel gives
            raise NotTold
        if not all(needs_copy(first.specs[name], self.tensors[name]) for name in first.copied):
            raise NotTold  # they begin inside a bundle of elements, which strides do not tell
        self.names = dict(zip(backward.sources, first.signature.names, strict=True))

    def function(self) -> Callable:
        """Write the text, and return the function that it defines."""
        return self.defined("(_call, _kept, _cotangents)", {})

    def opened(self) -> list[str]:
        derivative = self.derivative
        count = len(derivative.kept_arguments) + len(derivative.kept_results)
        kept = [self.names.get((1, k), f"_kept{k}") for k in range(count)]
        cotangents = [self.names.get((2, k), f"_g{k}") for k in range(derivative.recorded)]
        numbers = [f"{name} = _call[1][{k}]" for (of, k), name in self.names.items() if of == 0]
        unpacked = [f"{', '.join(kept)}, = _kept"] if kept else []
        return [*numbers, *unpacked, f"{', '.join(cotangents)}, = _cotangents"]

    def guards(self) -> list[str]:
        for k, is_there in enumerate(self.backward.present[: self.derivative.recorded]):
            if (2, k) not in self.names:
                yield f"_g{k} is {'not ' * is_there}None"
        yield from self.same_tensors()

    def modes(self) -> Iterator[str]:
        yield "not _grad()"  # what is differentiated again is a node of autograd's graph
        yield "not _watching()"

    def returned(self) -> list[str]:
        found = ["None" if k is None else self.results[k] for k in self.backward.gradients]
        return [f"return {tuple_of(['None', *found])}"]


def add_backward(
    derivative: Derivative, backward: Backward, values: tuple, lead: tuple[int, ...]
) -> None:
    """Add shortcuts for backward passes like this one, which no shortcut has taken.

    values: the arguments of its graph.
    """
    is_usual = not torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()
    if is_usual:
        add_after(derivative, BackwardWriter, backward.run, values, lead, derivative, backward)
