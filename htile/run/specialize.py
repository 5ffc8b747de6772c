"""What a row-wise function becomes for arguments of given roles and dtypes: traced once, kept."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..build.recent import Recent
from ..frontend.captures import Captures
from ..frontend.custom import CustomBackward
from ..frontend.graph import Graph, Input, Output, Role
from ..frontend.ops import Op
from ..frontend.roles import Call, Spec
from ..frontend.tensor import internal
from ..frontend.trace import trace
from ..lower import run_passes
from ..lower.joining import joined, rows_together

MAX_SPECIALIZATIONS = 256  # that one function remembers
WARN_SPECIALIZATIONS = 8  # values of one static parameter, from which on a warning is due


@dataclass(frozen=True)
class Specialization:
    """A function for arguments of these roles, dtypes and inner shapes.

    It refers to no tensor, and tells what a call computes and what its results are. `graph` is
    `traced` after the passes, and what kernels are made from: rows of `graph.n` elements. If there
    are products with matrices, it is `traced` itself, which htile.run.products.calls takes apart.
    """

    specs: tuple[Spec, ...]
    traced: Graph
    graph: Graph

    @cached_property
    def has_products(self) -> bool:
        """Whether rows are multiplied by matrices, so that there may be several kernels."""
        return Op.MATMUL in [node.op for node in self.traced]

    @cached_property
    def together(self) -> int:
        """How many rows are one where they follow each other in memory; 1 if none may be."""
        return 1 if self.has_products else rows_together(self.graph)

    @cached_property
    def joined_graph(self) -> Graph:
        """The graph of so many rows as one."""
        return joined(self.graph, self.together)

    def shapes(
        self, lead: tuple[int, ...], length: int | None = None
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The shape and dtype of each result for rows of the leading shape `lead`.

        length: how many elements the rows have, if that differs from call to call.
        """
        return tuple(
            ((*(lead if each.over is None else ()), *self.inner(each, length)), each.dtype)
            for each in self.traced.outputs
        )

    def inner(self, result: Output, length: object) -> tuple:
        """A result's shape for one row; `length` is that of a row of any length, else None."""
        is_row = self.traced[result.id].value.spread
        return (length,) if is_row and self.traced.multiple is not None else result.inner


def spec_of(graph: Graph, leaf: Input) -> Spec:
    """What an input of a graph is, as a parameter of a function."""
    return Spec(leaf.name, leaf.role, leaf.dtype, graph[leaf.id].value.inner)


class Specializations:
    """The specializations of one function: those used most recently."""

    def __init__(self, fn: Callable, captures: Captures):
        self._fn = fn
        self._captures = captures
        self.backward: CustomBackward | None = None  # that the user has written
        self._known: Recent[Specialization] = Recent(MAX_SPECIALIZATIONS)
        self._statics: dict[str, set] = {}

    def find(self, call: Call, captured: tuple) -> tuple[Specialization, bool]:
        """The specialization for a call, and whether it may be remembered for calls like it.

        captured: the fingerprint of the captured values that was taken when the call began. Where
            a captured or static value has changed by the end of the trace, nobody knows which one
            the trace has read, so the graph serves this call and no other.
        """
        # `torch.no_grad()` inside the function means something only where grad mode is on outside
        key = captured, torch.is_grad_enabled(), call.n, call.multiple, call.specs
        found = self._known.find(key)
        if found is not None:
            return found, True
        self._warn_if_many(call.specs)
        traced = trace(self._fn, call.specs, call.n, call.multiple, self.backward)
        found = Specialization(call.specs, traced, traced)
        if not found.has_products:
            found = replace(found, graph=run_passes(traced))
        # a new Spec has the guard of its value as that is now: a function may capture others
        specs = tuple(replace(spec) for spec in call.specs)
        holds = self._captures.fingerprint() == captured and specs == call.specs
        if holds:
            self._known.keep(key, found)
        return found, holds

    def _warn_if_many(self, specs: tuple[Spec, ...]) -> None:
        for spec in specs:
            seen = self._statics.setdefault(spec.name, set())
            if spec.role is not Role.STATIC or len(seen) == WARN_SPECIALIZATIONS:
                continue
            seen.add(spec.guard)
            if len(seen) == WARN_SPECIALIZATIONS:
                warnings.warn(
                    f"{self._fn.__name__} was compiled for {len(seen)} values of {spec.name!r}: "
                    "each one is a kernel of its own. If it is a number that changes, annotate it "
                    f"`{spec.name}: float` and it becomes an argument of one kernel",
                    stacklevel=_frames_inside(),
                )


def _frames_inside() -> int:
    """How far up the stack the user's frame is, as `warnings.warn` counts it for its caller."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and internal(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back
    return depth
