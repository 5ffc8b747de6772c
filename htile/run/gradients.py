"""Calls whose gradients are asked for: a forward kernel, and a backward kernel when autograd runs.

A `Derivative` is made for one specialization of a function and the arguments that require grad. Its
backward graph is found and planned in the forward call, so what has no gradient is refused there,
with the user's line. The backward graph is a function of rows as any other: a gradient of second
order is the `Derivative` of that graph. For it the statistics that a forward pass keeps are results
too, which only autograd sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..build.arch import Arch
from ..errors import GradientError, UnsupportedError
from ..frontend.derive import derive, differentiable
from ..frontend.graph import Graph, Role
from ..frontend.roles import classify
from ..frontend.saved import Split, split
from .kernel import Kernel
from .launch import Request
from .operands import (
    call_key,
    device_of,
    is_differentiated,
    is_inside_transform,
    refuse_transforms,
)
from .runner import Runner, keep, over_rows
from .specialize import Specialization, spec_of
from .vmap import batched

if TYPE_CHECKING:
    from .rowwise import Rowwise


Results = Callable[[tuple], Sequence]  # of a graph, for the values of its parameters
NO_TANGENTS = (
    "a row-wise function does not carry forward-mode tangents (torch.func.jvp, jacfwd, hessian) "
    "yet; write torch.func.vjp, jacrev, or jacrev(jacrev(f))"
)


class DifferentiableCalls:
    """The calls of one row-wise function whose results autograd differentiates.

    of_products: makes what gives the results of a function with matrix products.
    """

    def __init__(self, function: Rowwise, of_products: Callable[[Request], Results]):
        self._function, self._of_products = function, of_products
        self._runners: dict[Specialization, Runner] = {}
        self._known: dict[object, tuple[Results, object]] = {}

    def __call__(self, values: tuple, outs: tuple) -> object:
        """What the function returns for these values of its parameters."""
        function = self._function
        signature, captures = function._signature, function._captures
        if outs and is_inside_transform(values):
            raise UnsupportedError(f"{signature.name}: out= inside torch.func; return the result")
        if outs:
            raise GradientError(
                f"{signature.name}: out= with arguments that require grad; return the result, or "
                "call it under torch.no_grad()"
            )
        captured = captures.watched()[1]
        key = call_key(captured, signature, values, (), ())
        found = None if key is None else self._known.get(key)
        if found is None:
            call = classify(signature, values)
            refuse_transforms(signature, values)
            device_of(signature, values)
            request, holds = function._request(call, captured, values)
            found = self._applied(request, holds), request.specialization.traced.structure
            if holds and key is not None:
                keep(self._known, key, found)
        apply, structure = found
        return pytree.tree_unflatten([*apply(values)], structure)

    def _applied(self, request: Request, holds: bool) -> Results:
        """What gives the results, which autograd differentiates, for calls like this one."""
        if request.specialization.has_products:
            return self._of_products(request)
        return partial(with_gradients, self._runner(request, holds), lead=request.call.lead)

    def _runner(self, request: Request, holds: bool) -> Runner:
        """The runner of a call's specialization; `holds` says whether it may be remembered."""
        known = self._runners.get(request.specialization)
        if known is None:
            specialization, own = request.specialization, (request.fastmath, dict(request.wanted))
            known = Runner(specialization.traced, specialization.specs, *own)
            if holds:
                keep(self._runners, request.specialization, known)
        return known

    def kernels(self, request: Request, arch: Arch) -> Training:
        """The kernels of a call like this one, where grad mode is on."""
        with torch.enable_grad():
            captured = self._function._captures.fingerprint()
            request, _ = self._function._request(request.call, captured, request.values)
        run = self._runner(request, holds=False)
        return training_kernels(run, request.values, request.call.lead, arch)


class Training(NamedTuple):
    """The kernels of a call whose results are differentiated.

    saved: the names of what the backward kernel reads of the forward pass: arguments, results and
        statistics.
    """

    forward: Kernel
    backward: Kernel
    saved: tuple[str, ...]


class Backward(NamedTuple):
    """A backward graph for some cotangents.

    sources: where each argument of `run` comes from: the number of a list, which has the arguments
        of the forward pass, what is kept of it, and the cotangents, and an index into that list.
    gradients: for each argument that requires grad the index of its gradient, or None.
    """

    run: Runner
    sources: tuple[tuple[int, int], ...]
    gradients: tuple[int | None, ...]


class Derivative:
    """The forward and backward kernels of a graph for the arguments that require grad.

    wrt: their names.
    repeated: those of them that have fewer rows than the call. Their gradients are summed by torch
        from those of all rows, which are float32.
    """

    def __init__(self, of: Runner, wrt: tuple[str, ...], repeated: frozenset[str]):
        graph = of.graph
        if graph.multiple is not None:
            raise GradientError(
                f"{graph.name}: gradients of rows of any length (dynamic_n=True) are not computed "
                "yet; leave dynamic_n out"
            )
        self.of, self.wrt, self.repeated = of, wrt, repeated
        self.results = len(graph.outputs)
        self._split = self._sufficient(graph)
        forward = self._split.forward
        self.forward = of
        if len(forward.outputs) > self.results:
            part = of, part_name(wrt, repeated)
            own = of.specs, of.fastmath, of.wanted
            self.forward = Runner(forward, *own, of.specialization, part)
        names = differentiable(forward, wrt)
        self.has_gradient = tuple(o.name in names for o in forward.outputs)
        rows = self._split.kept
        kept = {i.name for i in graph.inputs if i.role is not Role.ROW or i.id in rows}
        self._arguments = tuple(
            k for k, spec in enumerate(of.specs)
            if spec.name in kept and spec.role not in (Role.SCALAR, Role.STATIC)
        )  # fmt: skip
        self._results = tuple(sorted({*self._split.results.values()}))
        self._backward: dict[tuple[bool, ...], Backward] = {}

    def _sufficient(self, graph: Graph) -> Split:
        """The cut for the gradients of all results; what it keeps suffices for each of them."""
        names = differentiable(graph, self.wrt)
        joint = self._joint(graph, names)
        found = split(graph, joint)
        for name in names if len(names) > 1 else ():
            alone = self._joint(found.forward, (name,))
            if split(found.forward, alone, found) is None:
                return split(graph, joint, whole=True)
        return found

    def _joint(self, graph: Graph, cotangents: tuple[str, ...]) -> Graph:
        joint = derive(graph, self.wrt, cotangents)
        outputs = tuple(
            replace(o, dtype=torch.float32) if o.name.removeprefix("d_") in self.repeated else o
            for o in joint.outputs
        )
        return replace(joint, outputs=outputs)

    def kept(self, values: tuple, results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """What backward passes read of a forward pass: some of its arguments and results."""
        return [*(values[k] for k in self._arguments), *(results[k] for k in self._results)]

    def gradients(
        self, values: tuple, kept: Sequence, cotangents: tuple, lead: tuple[int, ...]
    ) -> list[torch.Tensor | None]:
        """The gradient of each argument of `wrt`, in its dtype; None where there is none.

        values: the arguments of the forward pass; of its tensors only what is kept is read.
        kept: what `kept` gave. cotangents: for each result of `forward` one, or None.
        """
        backward, given = self.arguments(values, kept, cotangents)
        found = with_gradients(backward.run, given, lead)
        return [None if k is None else found[k] for k in backward.gradients]

    def arguments(self, values: tuple, kept: Sequence, cotangents: tuple) -> tuple[Backward, tuple]:
        """The backward graph for these cotangents, and its arguments; see `gradients`."""
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
        joint = self._joint(graph, tuple(graph.outputs[k].name for k in there))
        cut = split(graph, joint, self._split)
        if cut is None:
            raise GradientError(
                f"{of.graph.name}: this gradient, of second order or of some of the results, reads "
                "values that the forward pass does not keep; return the reduction that it goes "
                "through, too, or compute that in a function of its own"
            )
        specs = {spec.name: spec for spec in of.specs}
        specs = {i.name: specs.get(i.name) or spec_of(cut.backward, i) for i in cut.backward.inputs}
        part = of, part_name(self.wrt, self.repeated, present)
        run = Runner(cut.backward, tuple(specs.values()), of.fastmath, {}, part=part)
        sources = {spec.name: (0, k) for k, spec in enumerate(of.specs)}
        sources |= {of.specs[k].name: (1, place) for place, k in enumerate(self._arguments)}
        count = len(self._arguments)
        sources |= {n: (1, count + self._results.index(k)) for n, k in cut.results.items()}
        given = zip(joint.inputs[len(graph.inputs) :], there, strict=True)
        sources |= {i.name: (2, k) for i, k in given}
        gradients = {o.name: k for k, o in enumerate(joint.outputs)}
        return Backward(
            run,
            tuple(sources[name] for name in specs),
            tuple(gradients.get(f"d_{name}") for name in self.wrt),
        )


def with_gradients(
    run: Runner, values: tuple, lead: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """The results of a graph; autograd knows how they depend on tensors that require grad."""
    wrt, is_transformed = {}, is_inside_transform(values)
    if torch.is_grad_enabled():
        named = zip(run.parameters.names, values, strict=True)
        tensors = ((name, v) for name, v in named if isinstance(v, torch.Tensor))
        requires_grad = is_differentiated if is_transformed else _requires_grad
        wrt = {name: tensor for name, tensor in tensors if requires_grad(tensor)}
    derivative = derivative_of(run, tuple(wrt), _repeated(run, wrt, lead)) if wrt else None
    if is_transformed:
        forward = run if derivative is None else derivative.forward
        return _Transformed.apply(derivative, forward, lead, *values)[: len(run.graph.outputs)]
    if derivative is None:
        with torch.no_grad():  # where torch evaluates the graph, it is not to record that
            return run(values, lead)
    return _Function.apply(derivative, values, lead, *wrt.values())[: derivative.results]


def _requires_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def derivative_of(
    run: Runner, wrt: tuple[str, ...], repeated: frozenset[str]
) -> Derivative | None:
    """The derivative of a runner's graph; None where no result depends on these arguments."""
    key = wrt, repeated
    if key not in run.derivatives:
        has_any = differentiable(run.graph, wrt)
        run.derivatives[key] = Derivative(run, *key) if has_any else None
    return run.derivatives[key]


def part_name(
    wrt: tuple[str, ...], repeated: frozenset[str], present: tuple[bool, ...] | None = None
) -> str:
    """The name of a derivative's forward graph, or of its backward graph for some cotangents."""
    there = "" if present is None else "".join("01"[each] for each in present)
    return f"{','.join(wrt)};{','.join(sorted(repeated))};{there}"


def part_named(run: Runner, name: str) -> Runner:
    """The runner that `part_name` names, of a derivative of this one."""
    wrt, repeated, there = name.split(";")
    of = tuple(wrt.split(",")), frozenset(repeated.split(",") if repeated else ())
    derivative = derivative_of(run, *of)
    if there:
        return derivative.backward(tuple([each == "1" for each in there])).run
    return derivative.forward


def _repeated(
    run: Runner, tensors: Mapping[str, torch.Tensor], lead: tuple[int, ...]
) -> frozenset[str]:
    """The names of those arguments that have fewer rows than the call."""
    return frozenset(
        name for name, tensor in tensors.items()
        if name in run.inner and tensor.shape[: tensor.ndim - run.inner[name]] != lead
    )  # fmt: skip


def training_kernels(run: Runner, values: tuple, lead: tuple[int, ...], arch: Arch) -> Training:
    """The kernels of a call for which all tensors that can have gradients require them.

    values: tensors of any device. Only those that require grad do, if any does.
    """
    named = dict(zip(run.parameters.names, values, strict=True))
    leaves = {i.name: i for i in run.graph.inputs if i.role is not Role.SCALAR}
    floating = [name for name, i in leaves.items() if i.dtype.is_floating_point]
    wrt = [name for name in floating if named[name].requires_grad]
    wrt = wrt or [name for name in floating if leaves[name].dtype.itemsize > 1]
    if not differentiable(run.graph, wrt):
        raise GradientError(f"{run.graph.name} has no floating result that depends on a tensor")
    derivative = Derivative(run, tuple(wrt), _repeated(run, {n: named[n] for n in wrt}, lead))
    forward, results = derivative.forward, []
    for output, shape in zip(forward.graph.outputs, forward.shapes(lead), strict=True):
        results.append(torch.empty(shape, dtype=output.dtype, device="meta"))
    kept = derivative.kept(values, tuple(results))
    cotangents = tuple(
        result if has_one and k < derivative.results else None
        for k, (result, has_one) in enumerate(zip(results, derivative.has_gradient, strict=True))
    )
    backward, given = derivative.arguments(values, kept, cotangents)
    return Training(
        forward.kernel(values, lead, arch), backward.run.kernel(given, lead, arch),
        tuple(
            name for name, (number, _) in zip(
                backward.run.parameters.names, backward.sources, strict=True
            ) if number == 1
        ),
    )  # fmt: skip


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether `torch.func` made the tensor, or autograd maps over it (`is_grads_batched`)."""
    made = torch._C._functorch
    return made.is_legacy_batchedtensor(tensor) or made.is_functorch_wrapped_tensor(tensor)


def refuse_mapped(name: str, cotangents: tuple[torch.Tensor | None, ...]) -> None:
    """Raise GradientError for a backward pass of which `torch.vmap` makes several."""
    if any(g is not None and _is_mapped(g) for g in cotangents):
        raise GradientError(
            f"{name}: a backward pass inside torch.vmap, as vectorized Jacobians have it, is not "
            "supported yet; write vectorize=False"
        )


class _Function(torch.autograd.Function):
    """A `Derivative` in autograd's graph. Statistics are results, too: see the module."""

    @staticmethod
    def forward(ctx, derivative: Derivative, values: tuple, lead: tuple[int, ...], *wrt):
        results = derivative.forward(values, lead)
        _set_up(ctx, derivative, values, lead, wrt, results)
        return results

    @staticmethod
    def backward(ctx, *cotangents):
        refuse_mapped(ctx.derivative.of.graph.name, cotangents)
        return None, None, None, *_gradients(ctx, cotangents)


class _Transformed(torch.autograd.Function):
    """The same inside torch.func, with all values, which torch takes from one level to the next.

    Without a derivative it is a graph that only `torch.vmap` maps over.
    """

    @staticmethod
    def forward(derivative: Derivative | None, run: Runner, lead: tuple[int, ...], *values):
        return run(values, lead)

    @staticmethod
    def setup_context(ctx, inputs, output):
        derivative, run, lead, *values = inputs
        ctx.names = run.parameters.names
        if derivative is None:
            ctx.derivative = None
            ctx.mark_non_differentiable(*output)
            return
        named = dict(zip(ctx.names, values, strict=True))
        _set_up(ctx, derivative, values, lead, [named[name] for name in derivative.wrt], output)

    @staticmethod
    def backward(ctx, *cotangents):
        found = {}
        if ctx.derivative is not None:
            found = dict(zip(ctx.derivative.wrt, _gradients(ctx, cotangents), strict=True))
        return None, None, None, *(found.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx, *tangents):
        raise GradientError(NO_TANGENTS)

    @staticmethod
    def vmap(info, in_dims, derivative, run, lead, *values):
        whole = batched(run, info.batch_size, in_dims[3:], values, lead)
        rows = info.batch_size, *lead
        over = run.graph.over_rows
        if not over:
            results = _Transformed.apply(derivative, run, rows, *whole)
        elif any(isinstance(v, torch.Tensor) and is_differentiated(v) for v in whole):
            raise GradientError(
                f"{run.graph.name}: a gradient of sums over rows inside torch.vmap, which is "
                "differentiated again, is not supported yet; call it for each element of the batch"
            )
        else:
            terms = _Transformed.apply(None, run.of_terms, rows, *whole)
            both = zip(terms, run.graph.outputs, strict=True)
            results = tuple(over_rows(result, output, 1, len(rows)) for result, output in both)
        return results, (0,) * len(results)


def _set_up(ctx, derivative, values, lead, wrt, results) -> None:
    """Keep what a backward pass reads; `wrt` are the values of `derivative.wrt`."""
    ctx.derivative, ctx.lead = derivative, lead
    ctx.values = tuple([None if isinstance(v, torch.Tensor) else v for v in values])
    ctx.like = [(value.shape, value.dtype) for value in wrt] if derivative.repeated else ()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*derivative.kept(values, results))
    both = zip(results, derivative.has_gradient, strict=True)
    ctx.mark_non_differentiable(*(result for result, has_one in both if not has_one))


def _gradients(ctx, cotangents: tuple) -> Sequence[torch.Tensor | None]:
    """The gradients of what the derivative is for."""
    cotangents = tuple([None if g is None else g.resolve_neg() for g in cotangents])
    found = ctx.derivative.gradients(ctx.values, ctx.saved_tensors, cotangents, ctx.lead)
    repeated = ctx.derivative.repeated
    if repeated:
        named = zip(ctx.derivative.wrt, found, ctx.like, strict=True)
        found = [
            g.sum_to_size(shape).to(dtype) if g is not None and name in repeated else g
            for name, g, (shape, dtype) in named
        ]
    return found
