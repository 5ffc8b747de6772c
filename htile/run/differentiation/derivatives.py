"""The forward and backward graphs of calls that are differentiated, and what is kept between them.

A `Derivative` is made for one specialization of a function and the arguments that require grad. Its
backward graph is found and planned in the forward call, so what has no gradient is refused there,
with the user's line. The backward graph is a function of rows as any other: a gradient of second
order is the `Derivative` of that graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...errors import GradientError, UnsupportedError
from ...frontend.custom import kept_by
from ...frontend.derive import derive, differentiable
from ...frontend.graph import Graph, Role
from ...frontend.ops import MOVEMENTS
from ...frontend.saved import Split, split
from ...frontend.scattered import Scattered
from ...lower.passes.derivable import derivable, with_known
from ...lower.patterns import count_short_functions
from ...lower.vectors import vector_size
from ..runner import Runner
from ..specialize import spec_of


class Backward(NamedTuple):
    """A backward graph for some cotangents.

    present: for each result of the forward pass whether it has a cotangent.
    sources: where each argument of `run` comes from: the number of a list, which has the arguments
        of the forward pass, what is kept of it, and the cotangents, and an index into that list.
    gradients: for each argument that requires grad the index of its gradient, or None.
    scattered: for each part of a gradient that is to be added up of rows (`tables.py`) which
        gradient that is, and the indices of what is added and of where.
    """

    run: Runner
    present: tuple[bool, ...]
    sources: tuple[tuple[int, int], ...]
    gradients: tuple[int | None, ...]
    scattered: tuple[tuple[int, int, int, Scattered], ...]


class Derivative:
    """The forward and backward kernels of a graph for the arguments that require grad.

    wrt: their names.
    repeated: those of them that have fewer rows than the call. Their gradients are summed by torch
        from those of all rows, which are float32.
    kept_arguments, kept_results: which arguments and results of `forward` a backward pass reads.
    kept_statistics: the places of statistics among all that is kept.
    has_gradient: for each result of `forward` whether it has a derivative.
    hides_statistics: whether the statistics, if there are any, are no results of autograd's node.
        It costs time of each pass if they are. They must be where an argument that they depend on
        is not kept: a gradient of second order goes through them.
    recorded: how many results of `forward` are those of the node.
    without_gradient: the indices of those that have no derivative.
    """

    def __init__(self, of: Runner, wrt: tuple[str, ...], repeated: frozenset[str]):
        self.of, self.wrt, self.repeated = of, wrt, repeated
        self.results = len(of.graph.outputs)
        for graph in (derivable(of.graph), of.graph):
            self._split = self._sufficient(graph)
            self.forward = self._forward()
            if self.forward is None:
                joint = self.joint(graph, differentiable(graph, wrt))
                self._split, self.forward = split(graph, joint, named=frozenset()), of
            if self._computes_as_inference():
                break
        forward = self._split.forward
        names = differentiable(forward, wrt)
        self.has_gradient = tuple(o.name in names for o in forward.outputs)
        rows = self._split.kept
        kept = {i.name for i in graph.inputs if i.role is not Role.ROW or i.id in rows}
        self.kept_arguments = tuple(
            k for k, spec in enumerate(of.specs)
            if spec.name in kept and spec.role not in (Role.SCALAR, Role.STATIC)
        )  # fmt: skip
        self.kept_results = tuple(sorted({*self._split.results.values()}))
        count = len(self.kept_arguments)
        self.kept_statistics = tuple(
            count + place for place, k in enumerate(self.kept_results) if k >= self.results
        )
        self.hides_statistics = self._hides_statistics(kept)
        self.recorded = self.results if self.hides_statistics else len(forward.outputs)
        self.without_gradient = tuple(
            k for k, has_one in enumerate(self.has_gradient[: self.recorded]) if not has_one
        )
        self._backward: dict[tuple[bool, ...], Backward] = {}
        self.shortcuts: tuple[Callable, ...] = ()  # of backward passes; see shortcuts/gradients.py
        self.tries = 0  # to add some

    def _forward(self) -> Runner | None:
        """What runs the forward pass; None where no kernel with the numerics of an inference also
        gives the statistics.

        That is so where those are of columns that an inference does not read, and where they would
        show the errors of short functions. A backward pass that keeps arguments alone finds them
        again.
        """
        of, graph = self.of, self._split.forward
        if len(graph.outputs) == self.results:
            return of
        part = of, part_name(self.wrt, self.repeated)
        try:
            found = Runner(graph, of.specs, of.fastmath, of.wanted, of.specialization, part)
        except UnsupportedError:
            return None
        own, usual = found.specialization.graph, of.specialization.graph
        fits = own.n == usual.n and vector_size(own) == vector_size(usual)
        fits &= count_short_functions(own) == count_short_functions(usual)
        return found if fits else None

    def _computes_as_inference(self) -> bool:
        """Whether the forward kernel computes the elements of an inference, so has its bits."""
        kernels = self.forward.specialization.graph, self.of.specialization.graph
        own, usual = (
            Counter(node.op for node in graph if node.value.spread and node.op not in MOVEMENTS)
            for graph in kernels
        )
        return own == usual

    def _hides_statistics(self, kept: set[str]) -> bool:
        """Whether autograd need not know of the statistics, because those that they depend on are
        kept.

        kept: the names of the arguments that are.
        """
        forward, hidden = self.forward.graph, self.results
        names = {output.name for output in forward.outputs[hidden:]}
        others = [name for name in self.wrt if name not in kept]
        return bool(names) and all(
            names.isdisjoint(differentiable(forward, (name,))) for name in others
        )

    def _sufficient(self, graph: Graph) -> Split:
        """The cut for the gradients of all results; what it keeps suffices for each of them."""
        names = differentiable(graph, self.wrt)
        joint = self.joint(graph, names)
        named = kept_by(graph)
        found = split(graph, joint, named=named)
        if named is not None:
            return found
        for name in names if len(names) > 1 else ():
            alone = self.joint(found.forward, (name,))
            if split(found.forward, alone, found) is None:
                return split(graph, joint, whole=True)
        return found

    def joint(self, graph: Graph, cotangents: tuple[str, ...]) -> Graph:
        """What a graph computes, and the gradients of the arguments for these results."""
        joint = with_known(derive(graph, self.wrt, cotangents))
        in_float32 = {f"d_{name}" for name in (*self.repeated, *(s.table for s in joint.scattered))}
        outputs = tuple(
            replace(o, dtype=torch.float32) if o.name in in_float32 else o for o in joint.outputs
        )
        return replace(joint, outputs=outputs)

    def kept(self, values: tuple, results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """What backward passes read of a forward pass: some of its arguments and results."""
        return [*(values[k] for k in self.kept_arguments), *(results[k] for k in self.kept_results)]

    def arguments(self, values: tuple, kept: Sequence, cotangents: tuple) -> tuple[Backward, tuple]:
        """The backward graph for these cotangents, and its arguments.

        values: the arguments of the forward pass; of its tensors only what is kept is read.
        kept: what `kept` gave. cotangents: for each result of `forward` one, or None; those of
            statistics may be left out.
        """
        cotangents = *cotangents, *(None,) * (len(self.has_gradient) - len(cotangents))
        present = tuple([g is not None for g in cotangents])
        backward = self.backward(present)
        lists = values, kept, cotangents
        return backward, tuple([lists[number][k] for number, k in backward.sources])

    def backward(self, present: tuple[bool, ...]) -> Backward:
        """The backward graph for the cotangents that are `present`."""
        known = self._backward.get(present)
        return known or self._backward.setdefault(present, self._backward_for(present))

    def _backward_for(self, present: tuple[bool, ...]) -> Backward:
        """The same, made anew. It reads no more than what is kept."""
        graph, of = self._split.forward, self.of
        there = [k for k, is_there in enumerate(present) if is_there]
        joint = self.joint(graph, tuple(graph.outputs[k].name for k in there))
        cut = split(graph, joint, self._split, named=kept_by(graph))
        if cut is None:
            raise GradientError(
                f"{of.graph.name}: this gradient, of second order or of some of the results, reads "
                "values that the forward pass does not keep; return the reduction that it goes "
                "through, too, or compute that in a function of its own",
                graph.last_line,
            )
        specs = {spec.name: spec for spec in of.specs}
        specs = {i.name: specs.get(i.name) or spec_of(cut.backward, i) for i in cut.backward.inputs}
        part = of, part_name(self.wrt, self.repeated, present)
        try:
            run = Runner(cut.backward, tuple(specs.values()), of.fastmath, {}, part=part)
        except UnsupportedError as error:
            told = f"the gradient of {of.graph.name}: {error.message}"
            raise UnsupportedError(told, error.loc) from None
        sources = {spec.name: (0, k) for k, spec in enumerate(of.specs)}
        sources |= {of.specs[k].name: (1, place) for place, k in enumerate(self.kept_arguments)}
        count = len(self.kept_arguments)
        sources |= {n: (1, count + self.kept_results.index(k)) for n, k in cut.results.items()}
        given = zip(joint.inputs[len(graph.inputs) :], there, strict=True)
        sources |= {i.name: (2, k) for i, k in given}
        gradients = {o.name: k for k, o in enumerate(joint.outputs)}
        scattered = tuple(
            (self.wrt.index(of.table), gradients[of.rows], gradients[of.at], of)
            for of in joint.scattered
        )
        return Backward(
            run,
            present,
            tuple(sources[name] for name in specs),
            tuple(gradients.get(f"d_{name}") for name in self.wrt),
            scattered,
        )


def refuse_any_length(graph: Graph) -> None:
    """Raise GradientError for a graph of rows of any length, in a transform."""
    if graph.multiple is not None:
        raise GradientError(
            f"{graph.name}: torch.func and tangents of rows of any length (dynamic_n=True) are not "
            "supported yet; leave dynamic_n out"
        )


def derivative_of(
    run: Runner, wrt: tuple[str, ...], repeated: frozenset[str]
) -> Derivative | None:
    """The derivative of a runner's graph; None where no result depends on these arguments."""
    key = wrt, repeated
    if key not in run.derivatives:
        has_any = differentiable(run.graph, wrt)
        run.derivatives[key] = Derivative(run, *key) if has_any else None
    return run.derivatives[key]


def repeated_among(
    run: Runner, tensors: Mapping[str, torch.Tensor], lead: tuple[int, ...]
) -> frozenset[str]:
    """The names of those arguments that have fewer rows than the call."""
    return frozenset(
        name for name, tensor in tensors.items()
        if name in run.inner and (
            tensor.ndim - run.inner[name] != len(lead)  # first, for sizes may be symbols of torch
            or tensor.shape[: len(lead)] != lead
        )
    )  # fmt: skip


def part_name(
    wrt: tuple[str, ...], repeated: frozenset[str], present: tuple[bool, ...] | None = None
) -> str:
    """The name of a derivative's forward graph, or of its backward graph for some cotangents."""
    there = "" if present is None else "".join("01"[each] for each in present)
    return f"{','.join(wrt)};{','.join(sorted(repeated))};{there}"
