"""From a call (a `Request`) to a loaded kernel and how its arguments are made (a `Launch`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..build.arch import Arch, arch_of_capability
from ..build.compile import load
from ..errors import ArgumentError, LoweringError, UnsupportedError
from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Graph, Role
from ..frontend.ops import Op
from ..frontend.roles import Call, Signature, Spec
from ..lower import Lowered, choose, plans_for, printed
from ..lower.over_rows import workspace_bytes
from ..lower.plan import ROWS, Plan, Target, rows_like
from ..lower.vectors import is_vector
from ..tune.kept import recall
from .kernel import Kernel
from .operands import alignment, as_copied, is_flat, needs_copy, own_dimensions, splits_bundles
from .specialize import Specialization

MAX_ROWS = 2**31 - 1  # of one call: rows are counted in 32 bits


@dataclass(frozen=True)
class Request:
    """A call, as plans are made for it.

    wanted: the properties that a plan must have.
    values: one for each parameter.
    outs: the tensors of `out=`, one for each result, or none.
    aliases: (index in `outs`, parameter) for each result that is exactly an argument's memory.
    """

    signature: Signature
    fastmath: bool
    wanted: Mapping[str, object]
    call: Call
    specialization: Specialization
    values: tuple
    outs: tuple[torch.Tensor, ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()

    @property
    def rows(self) -> int:
        """How many rows the call has. Raises UnsupportedError for more than a kernel counts."""
        rows = math.prod(self.call.lead)
        if rows > MAX_ROWS:
            raise UnsupportedError(
                f"{self.signature.name}: {rows} rows; the limit is 2^31 - 1. Call it for parts of "
                "the rows"
            )
        return rows

    @cached_property
    def given(self) -> dict[str, object]:
        """The values by parameter."""
        return dict(zip(self.signature.names, self.values, strict=True))

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The specs by parameter."""
        return {spec.name: spec for spec in self.call.specs}

    @cached_property
    def in_place(self) -> tuple[str | None, ...]:
        """For each of `outs` the parameter whose argument is the very same object."""
        names = {id(value): name for name, value in self.given.items()}
        return tuple(names.get(id(out)) for out in self.outs)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the kernel reads, by parameter."""
        read = {name: self.given[name] for name in self.specialization.graph.arguments}
        return {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}

    @cached_property
    def copied(self) -> frozenset[str]:
        """The parameters whose tensors are made contiguous before each launch."""
        specs, inputs = self.specs, self.specialization.graph.inputs
        return frozenset(
            name
            for name, tensor in self.tensors.items()
            if needs_copy(specs[name], tensor)
            or splits_bundles([i for i in inputs if i.name == name], tensor)
        )

    @property
    def may_join(self) -> int:
        """How many rows are joined if they follow each other in memory (htile.lower.joining).

        It is 1 for few rows.
        """
        is_many = self.rows >= ROWS[-1] and self.call.lead
        return self.specialization.together if is_many else 1

    @cached_property
    def joined(self) -> int:
        """How many rows of the call become one row of the kernel, if it has such a plan."""
        joined, lead = self.may_join, self.call.lead
        if joined == 1 or self.copied or lead[-1] % joined or self.repeats or self.scattered:
            return 1
        is_aligned = self._aligned(self.specialization.joined_graph) == ACCESS_BYTES
        return joined if is_aligned else 1

    @property
    def repeats(self) -> bool:
        """Whether the rows of an argument repeat over a leading dimension."""
        rows = (t for name, t in self.tensors.items() if self.specs[name].role is Role.ROW)
        return any([t.shape[:-1] != self.call.lead for t in rows])

    @property
    def scattered(self) -> list[torch.Tensor]:
        """The arguments and results whose rows do not follow each other in memory."""
        rows = [t for name, t in self.tensors.items() if self.specs[name].role is Role.ROW]
        return [t for t in (*rows, *self.outs) if not t.is_contiguous()]

    @property
    def begins_anywhere(self) -> bool:
        """Whether rows are not joined only because of the addresses at which tensors begin."""
        rows = self.may_join
        if rows == self.joined or self.call.lead[-1] % rows:
            return False
        return not (self.copied or self.repeats or self.scattered)

    def graph(self, joined: int) -> Graph:
        """What a kernel computes if it joins so many rows."""
        return self.specialization.graph if joined == 1 else self.specialization.joined_graph

    def _aligned(self, graph: Graph) -> int:
        """`Target.align`, of this graph."""
        vectors = [
            (as_copied(self.tensors[i.name]) if i.name in self.copied else self.tensors[i.name], i)
            for i in graph.inputs
            if i.role is Role.ROW or is_vector(graph, i)
        ]
        results = zip(self.specialization.traced.outputs, self.outs, strict=False)
        written = {result.name: out for result, out in results}
        rows = [o for o in graph.outputs if o.is_row and o.over is None]
        vectors += [(written.get(o.name), o) for o in rows]
        if graph is not self.specialization.graph:  # whose rows are several of the call
            vectors = [(t if t is None else t.view(-1, graph.n), each) for t, each in vectors]
        return alignment(graph, vectors)

    @cached_property
    def is_flat(self) -> bool:
        """Whether several leading dimensions can count as one, for the rows of all tensors.

        Results that are allocated here are contiguous.
        """
        lead = len(self.call.lead)
        if lead < 2:
            return False
        of_rows = [
            (name, tensor) for name, tensor in self.tensors.items()
            if self.specs[name].role in (Role.ROW, Role.PER_ROW)
        ]  # fmt: skip
        results = zip(self.outs, self.specialization.traced.outputs, strict=False)
        return all(is_flat(out, lead) for out, each in results if each.over is None) and all(
            own_dimensions(self.specs[name], tensor, self.call.lead) is None
            and (name in self.copied or is_flat(tensor, lead))
            for name, tensor in of_rows
        )

    def target(self, arch: Arch, joined: int = 1) -> Target:
        """What plans are made for if they join so many rows into one."""
        specs, graph = self.specs, self.graph(joined)
        results = self.specialization.traced.outputs
        repeated = {n: own_dimensions(specs[n], t, self.call.lead) for n, t in self.tensors.items()}
        return Target(
            n=graph.n,
            arch=arch,
            align=self._aligned(graph),
            fastmath=self.fastmath,
            lead=len(self.call.lead),
            flat=self.is_flat,
            broadcast=tuple((n, own) for n, own in repeated.items() if own is not None),
            aliases=tuple((results[k].name, name) for k, name in self.aliases),
            rows=rows_like(self.rows // joined)[0],
            joined=joined,
        )

    def plans(self, arch: Arch) -> list[Plan]:
        """Every plan that has what is wanted. A function with products has tiles, no plans."""
        if self.specialization.has_products:
            raise UnsupportedError(
                f"{self.signature.name} has products with matrices, whose tiles follow from the "
                "number of rows, or from tune: there are no plans to ask for"
            )
        if self.joined > 1:
            with suppress(LoweringError if self.wanted else ()):
                return self._plans(arch, self.joined)
        return self._plans(arch, 1)

    def _plans(self, arch: Arch, joined: int) -> list[Plan]:
        """Every plan that joins so many rows into one."""
        return plans_for(self.graph(joined), self.target(arch, joined), self.wanted)

    def lower(self, arch: Arch, gpu: torch.device | None = None) -> Lowered:
        """The kernel's text. A plan that was tuned on `gpu` goes before the default one."""
        plans = self.plans(arch)
        plan = choose(plans) if gpu is None else recall(plans, self.wanted, gpu)
        return printed(self.specialization.traced, plan)


class Launch(NamedTuple):
    """One way to call: the kernel, and how to make its arguments from the caller's values.

    kernel: None where there are no rows.
    inputs: for each, in kernel order, (index of the value, whether to make it contiguous first).
    outputs: the shape and dtype of each.
    is_widest: whether its accesses are as wide as they can be. A narrower kernel takes tensors of
        any alignment, so it must not be the one that is tried first.
    workspace: bytes of memory that the kernel needs beside, for parts of results over all rows.
    sums: which outputs are sums over all rows.
    joined: how many rows of a call are one row of the kernel.
    """

    kernel: Callable | None
    source: str
    inputs: tuple[tuple[int, bool], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    structure: object
    device: torch.device
    is_widest: bool
    workspace: int = 0
    sums: tuple[int, ...] = ()
    joined: int = 1


def prepare(
    request: Request,
    device: torch.device,
    known: Iterable[Launch] = (),
    lowered: Lowered | None = None,
) -> Launch:
    """How to launch the call's kernel on this GPU; it is compiled and loaded.

    known: the launches of this function so far. While a CUDA graph is captured, only their kernels
        can be launched, since CUDA loads a kernel at its first launch; ArgumentError otherwise.
    lowered: the kernel, if it is another one than calls have.
    """
    if lowered is None:
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
        lowered = request.lower(arch, device)
    kernel, target, name = None, lowered.plan.target, request.signature.name
    if request.rows and torch.cuda.is_current_stream_capturing():
        same = (each for each in known if (each.source, each.device) == (lowered.source, device))
        kernel = next((each.kernel for each in same if each.kernel is not None), None)
        if kernel is None:
            raise ArgumentError(
                f"{name}: the first call with arguments of this kind compiles or loads a kernel, "
                "which can not be captured into a CUDA graph; call it once before the capture "
                f"({name}.compile(...) compiles ahead of that call, for all processes)"
            )
    elif request.rows:
        kernel = load(Kernel(lowered, target.arch.name).artifact)
    index = {name: k for k, name in enumerate(request.signature.names)}
    return Launch(
        kernel=kernel,
        source=lowered.source,
        inputs=tuple((index[name], name in request.copied) for name in lowered.graph.arguments),
        outputs=request.specialization.shapes(request.call.lead, request.call.length),
        structure=lowered.graph.structure,
        device=device,
        is_widest=target.align == ACCESS_BYTES and not request.begins_anywhere,
        joined=target.joined,
        workspace=workspace_bytes(lowered.plan),
        sums=tuple(k for k, each in enumerate(lowered.traced.outputs) if each.over is Op.SUM),
    )


def run(launch: Launch | Callable, values: tuple, outs: tuple = ()) -> object:
    """Launch on the current stream; returns `outs` or new results in the user's structure.

    A launch of several kernels is a function of the same values (htile.run.products.calls).
    """
    if not isinstance(launch, Launch):
        return launch(values, outs)
    return pytree.tree_unflatten(results_of(launch, values, outs), launch.structure)


def results_of(launch: Launch, values: tuple, outs: Sequence = ()) -> Sequence[torch.Tensor]:
    """Launch on the current stream; returns `outs` or new results in the kernel's order."""
    arguments = [copied(values[k]) if copy else values[k] for k, copy in launch.inputs]
    outs = outs or [_empty(shape, dtype, launch.device) for shape, dtype in launch.outputs]
    if launch.kernel is None:
        for k in launch.sums:  # over no rows
            outs[k].detach().zero_()
    elif launch.workspace:
        parts = _empty((launch.workspace,), torch.int8, launch.device)
        launch.kernel(*arguments, *outs, parts)
    else:
        launch.kernel(*arguments, *outs)
    return outs


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in memory of its own, also of a contiguous view that begins anywhere."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with memory. Raises UnsupportedError where torch makes another kind of tensor."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if type(made) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(made):
        return made
    raise UnsupportedError(
        "torch makes no plain tensors here, as inside torch.func (grad, vmap, jvp) and "
        "FakeTensorMode; call a rowwise function outside"
    )
