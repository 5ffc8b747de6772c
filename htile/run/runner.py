"""A graph as a function of tensors: kernels on a GPU, the reference elsewhere; see `Runner`.

Calls that are differentiated are made of runners: one for the forward graph, one for each backward
graph. So are calls that torch compiles or exports (`operations`): there a runner is one operation
of torch's graph, which knows it by its `name`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..build.arch import Arch, arch_of_capability
from ..errors import UnsupportedError
from ..frontend.derive import differentiable
from ..frontend.graph import Graph, Output, Role
from ..frontend.ops import Op
from ..frontend.reference import evaluate
from ..frontend.roles import PLAIN, Call, Spec
from ..frontend.unshared import unshared
from ..lower import run_passes
from .kernel import Kernel
from .launch import Launch, Request, prepare, results_of
from .operands import refuse_tangent, runs_kernels, tensor_key, without_modes
from .specialize import Specialization, spec_of

if TYPE_CHECKING:
    from .differentiation.derivatives import Derivative
    from .differentiation.tangents import Tangents

Result = TypeVar("Result")
Made = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # the shape and dtype of each result
OF_ROWS = (Role.ROW, Role.PER_ROW)
MAX_LAUNCHES = 256  # remembered of one graph


def keep(known: dict, key: object, value: object) -> None:
    """Remember a value; of too many all are forgotten at once."""
    if len(known) >= MAX_LAUNCHES:
        known.clear()
    known[key] = value


class Parameters(NamedTuple):
    """The name of a graph and of its arguments, in place of a user's signature."""

    name: str
    names: tuple[str, ...]


class Operation:
    """What may be one operation of torch's graph, which knows it by its name.

    It has the `graph` whose name errors show, the `specs` of its arguments, and `computed`, which
    gives its results as numbers.
    """

    def __call__(self, values: tuple, lead: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """The results, in order. torch's modes make of them what they like."""
        first = next(v for v in values if isinstance(v, torch.Tensor))
        if torch._C._len_torch_dispatch_stack() or type(first) not in PLAIN:
            from .operations.ops import run_in_graph  # which few processes need

            return run_in_graph(self, values, lead)
        return self.computed(values, lead, first.device)


class Runner(Operation):
    """Runs one graph on tensors of any device, and remembers the launches.

    specs: what its arguments are, in the order in which `__call__` takes them.
    like: a graph whose numerics the kernel takes over, so that common results have the same bits.
    inner: for each argument of rows how many of its dimensions are those of a row.
    part: for a graph that comes from another runner's graph, that runner, and which graph it is.
    """

    def __init__(
        self, graph: Graph, specs: tuple[Spec, ...], fastmath: bool, wanted: dict,
        like: Specialization | None = None, part: tuple[Operation, str] | None = None,
    ):  # fmt: skip
        self.graph, self.specs = graph, specs
        self.parameters = Parameters(graph.name, tuple(spec.name for spec in specs))
        self.fastmath, self.wanted, self.like, self._part = fastmath, wanted, like, part
        with without_modes():
            self.specialization = Specialization(specs, graph, run_passes(graph))
        self.inner = {spec.name: len(spec.inner) for spec in specs if spec.role in OF_ROWS}
        self.derivatives: dict[object, Derivative | None] = {}
        self.tangents: dict[tuple[str, ...], Tangents | None] = {}
        self._unshared: dict[tuple[str, ...], Runner] = {}
        self._launches: dict[object, tuple[Launch, bool]] = {}
        self._buckets: dict[object, Launch] = {}  # of rows of any length, the launch of a bucket

    @cached_property
    def name(self) -> str:
        """The name by which torch's graphs call it; see operations/ops.py."""
        from .operations.ops import content_name  # which few processes need

        if self._part is None:
            return f"{content_name(self)}!"  # no root of a compiled graph; see `ops.Root`
        of, which = self._part
        return f"{of.name}|{which}"

    def become_part(self, of: Operation, which: str) -> Runner:
        """Have the name of a part of another operation from now on."""
        self._part = of, which
        return self

    @cached_property
    def has_gradient(self) -> tuple[bool, ...]:
        """For each result whether it has a derivative with respect to any argument."""
        names = differentiable(self.graph, self.parameters.names)
        return tuple(o.name in names for o in self.graph.outputs)

    @cached_property
    def of_terms(self) -> Runner:
        """A runner of what each row adds, where the results of the graph are sums over all rows."""
        outputs = tuple(
            o if o.over is None else replace(o, over=None, dtype=self.graph[o.id].value.dtype)
            for o in self.graph.outputs
        )
        graph = replace(self.graph, outputs=outputs)
        return Runner(graph, self.specs, self.fastmath, self.wanted, part=(self, "terms"))

    def unshared(self, names: tuple[str, ...]) -> Runner:
        """A runner for arguments of these names that differ from row to row, if all rows shared
        them."""
        found = self._unshared.get(names)
        if found is None:
            graph = unshared(self.graph, names)
            made = {i.name: spec_of(graph, i) for i in graph.inputs if i.name in names}
            specs = tuple(made.get(spec.name) or spec for spec in self.specs)
            part = self, f"unshared:{','.join(names)}"
            found = Runner(graph, specs, self.fastmath, self.wanted, part=part)
            self._unshared[names] = found
        return found

    def length(self, values: tuple) -> int | None:
        """How many elements the rows of a call have, if each call may have rows of other ones."""
        if self.graph.multiple is None:
            return None
        whole = (self.graph.n,)
        both = zip(self.specs, values, strict=True)
        return next(v.shape[-1] for s, v in both if s.role is Role.ROW and s.inner == whole)

    def computed(
        self, values: tuple, lead: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """The results as numbers, of the kernel or of the reference."""
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():  # none is dropped
            for name, value in zip(self.parameters.names, values, strict=True):
                if isinstance(value, torch.Tensor):
                    refuse_tangent(self.graph.name, name, value)
        if not runs_kernels(device):
            given = dict(zip(self.parameters.names, values, strict=True))
            found = evaluate(self.graph, given, lead=lead, length=self.length(values))
            return tuple(pytree.tree_leaves(found))
        key = _key(values, lead)
        found = self._launches.get(key)
        if found is None:
            arch = arch_of_capability(torch.cuda.get_device_capability(device))
            known = [launch for launch, _ in self._launches.values()]

            def prepared(request: Request) -> Launch:
                if self.graph.multiple is None:
                    return prepare(request, device, known)
                kind = request.target(arch), request.copied, device, not request.rows
                if kind not in self._buckets:
                    keep(self._buckets, kind, prepare(request, device, known))
                call, of = request.call, request.specialization
                return self._buckets[kind]._replace(outputs=of.shapes(call.lead, call.length))

            found = self.lowered(prepared, values, lead, arch, device)
            keep(self._launches, key, found)
        launch, is_of_terms = found
        results = tuple(results_of(launch, values))
        if not is_of_terms:
            return results
        both = zip(results, self.graph.outputs, strict=True)
        return tuple(over_rows(result, output, 0, len(lead)) for result, output in both)

    def launch_of(self, values: tuple, lead: tuple[int, ...]) -> Launch | None:
        """The launch of a call that has been made; None where torch computed or added up."""
        launch, is_of_terms = self._launches.get(_key(values, lead), (None, True))
        return None if is_of_terms else launch

    def request(self, values: tuple, lead: tuple[int, ...]) -> Request:
        """A call of the graph."""
        graph = self.graph
        call = Call(self.specs, graph.n, lead, graph.multiple, self.length(values))
        return Request(
            self.parameters, self.fastmath, self.wanted, call, self.specialization, values
        )

    def lowered(
        self, lower: Callable[[Request], Result], values: tuple, lead: tuple[int, ...], arch: Arch,
        gpu: torch.device | None = None,
    ) -> tuple[Result, bool]:  # fmt: skip
        """What `lower` makes of a call, and whether its results are the terms of each row.

        They are if no kernel adds up rows as long as these, or of any length. Then torch adds them.
        """
        try:
            if self.graph.multiple is not None and self.graph.over_rows:
                raise UnsupportedError("sums over rows of any length")
            return lower(self._request(self.specialization, values, lead, arch, gpu)), False
        except UnsupportedError:
            if not self.graph.over_rows:
                raise
        return lower(self._request(self.of_terms.specialization, values, lead, arch, gpu)), True

    def _request(
        self, of: Specialization, values: tuple, lead: tuple[int, ...], arch: Arch,
        gpu: torch.device | None,
    ) -> Request:  # fmt: skip
        """The call as plans are made for it."""
        request = replace(self.request(values, lead), specialization=of)
        if self.like is None:
            return request
        usual = replace(request, specialization=self.like).lower(arch, gpu).plan
        if usual.target.joined > 1:  # nothing is reduced, so bits hang on no numerics
            return request
        return replace(request, wanted={**self.wanted, **usual.numerics.properties()})

    def kernel(
        self, values: tuple, lead: tuple[int, ...], arch: Arch, gpu: torch.device | None = None
    ) -> Kernel:
        """The kernel of a call with tensors of any device.

        gpu: the one whose tuned plans count.
        """

        def lower(request: Request) -> Kernel:
            return Kernel(request.lower(arch, gpu), arch.name, request.copied)

        return self.lowered(lower, values, lead, arch, gpu)[0]

    def shapes(self, lead: tuple[int, ...], length: int | None = None) -> list[tuple[int, ...]]:
        """The shapes of the results for rows of this leading shape, and of this length."""
        return [shape for shape, _ in self.specialization.shapes(lead, length)]

    def made(self, tensors: list[torch.Tensor], lead: tuple[int, ...]) -> Made:
        """The shape and dtype of each result of a call with these tensors."""
        return self.specialization.shapes(lead)


def _key(values: tuple, lead: tuple[int, ...]) -> tuple:
    """A key that differs for calls of one graph that need different launches."""
    return lead, *[tensor_key(v) for v in values if isinstance(v, torch.Tensor)]


def over_rows(result: torch.Tensor, output: Output, first: int, end: int) -> torch.Tensor:
    """A result over all rows, of what each row adds; other results as they are.

    first, end: which of the leading dimensions are reduced.
    """
    if output.over is None:
        return result
    if first == end:  # an empty tuple of dimensions means all of them to torch
        return result.to(output.dtype)
    reduce = torch.sum if output.over is Op.SUM else torch.amax
    return reduce(result, tuple(range(first, end))).to(output.dtype)
