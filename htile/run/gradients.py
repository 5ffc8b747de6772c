"""Calls whose gradients are asked for: a forward kernel, and a backward kernel when autograd runs.

So are calls inside torch.func, and calls with tangents. torch goes from one transform to the next.
In each of them it asks for gradients (`grad`, `vjp`), for tangents (`jvp`), or for the results of a
whole batch (`vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..errors import GradientError, UnsupportedError
from ..frontend.roles import classify
from .derivatives import Derivative, derivative_of, refuse_any_length, repeated_among
from .launch import Request
from .operands import (
    call_key,
    device_of,
    is_differentiated,
    is_inside_transform,
    refuse_transforms,
)
from .runner import Runner, keep, over_rows
from .specialize import Specialization
from .tangents import TANGENTS, tangents_of
from .vmap import batched, mapped_and_shared

if TYPE_CHECKING:
    from .rowwise import Rowwise


Results = Callable[[tuple], Sequence]  # of a graph, for the values of its parameters


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
            raise UnsupportedError(
                f"{signature.name}: out= inside torch.func or with tangents; return the result"
            )
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
            structure = request.specialization.traced.structure
            found = self._applied(request, holds), None if structure.is_leaf() else structure
            if holds and key is not None:
                keep(self._known, key, found)
        apply, structure = found
        results = apply(values)
        return results[0] if structure is None else pytree.tree_unflatten([*results], structure)

    def _applied(self, request: Request, holds: bool) -> Results:
        """What gives the results, which autograd differentiates, for calls like this one."""
        if request.specialization.has_products:
            return self._of_products(request)
        return recorded(self._runner(request, holds), request.values, request.call.lead)

    def _runner(self, request: Request, holds: bool) -> Runner:
        """The runner of a call's specialization; `holds` says whether it may be remembered."""
        known = self._runners.get(request.specialization)
        if known is None:
            specialization, own = request.specialization, (request.fastmath, dict(request.wanted))
            known = Runner(specialization.traced, specialization.specs, *own)
            if holds:
                keep(self._runners, request.specialization, known)
        return known


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
    derivative = derivative_of(run, tuple(wrt), repeated_among(run, wrt, lead)) if wrt else None
    if is_transformed:
        refuse_any_length(run.graph)
        forward = run if derivative is None else derivative.forward
        return _Transformed.apply(derivative, forward, lead, *values)[: len(run.graph.outputs)]
    if derivative is None:
        if not torch.is_grad_enabled():
            return run(values, lead)
        with torch.no_grad():  # where torch evaluates the graph, it is not to record that
            return run(values, lead)
    return _Function.apply(derivative, values, lead, *wrt.values())[: derivative.results]


def recorded(run: Runner, like: tuple, lead: tuple[int, ...]) -> Results:
    """`with_gradients` for values of which the same ones require grad as of these.

    What depends on that alone is found once, because it takes the host's time in each call.
    """
    usual = partial(with_gradients, run, lead=lead)
    wrt = [k for k, value in enumerate(like) if isinstance(value, torch.Tensor)]
    wrt = tuple(k for k in wrt if like[k].requires_grad)
    if is_inside_transform(like) or not wrt:
        return usual
    tensors = {run.parameters.names[k]: like[k] for k in wrt}
    derivative = derivative_of(run, tuple(tensors), repeated_among(run, tensors, lead))
    if derivative is None:
        return usual
    end = derivative.results

    def results(values: tuple) -> Sequence:
        if is_inside_transform(values) or not torch.is_grad_enabled():
            return usual(values)
        return _Function.apply(derivative, values, lead, *[values[k] for k in wrt])[:end]

    return results


def _requires_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


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


def _is_pushed() -> bool:
    """Whether tangents are asked for. A compiled graph does not set torch's level of them."""
    peek, jvp = torch._C._functorch.peek_interpreter_stack(), torch._C._functorch.TransformType.Jvp
    return forward_ad._current_level >= 0 or (peek is not None and peek.key() == jvp)


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
    """A call with all values, which torch takes from one level to the next.

    Without a derivative it has tangents only. Statistics of a derivative are results, too.
    """

    @staticmethod
    def forward(derivative: Derivative | None, run: Runner, lead: tuple[int, ...], *values):
        return run(values, lead)

    @staticmethod
    def setup_context(ctx, inputs, output):
        derivative, run, lead, *values = inputs
        ctx.derivative, ctx.run, ctx.lead = derivative, run, lead
        if derivative is None:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output)
        else:
            named = dict(zip(run.parameters.names, values, strict=True))
            wrt = [named[name] for name in derivative.wrt]
            _set_up(ctx, derivative, values, lead, wrt, output)
        if _is_pushed():  # a result without a gradient may have a tangent
            ctx.others = [None if isinstance(v, torch.Tensor) else v for v in values]
            ctx.save_for_forward(*(v if isinstance(v, torch.Tensor) else None for v in values))
            both = zip(output, run.has_gradient, strict=True)
            ctx.mark_non_differentiable(*(result for result, has_one in both if not has_one))

    @staticmethod
    def backward(ctx, *cotangents):
        found, derivative = {}, ctx.derivative
        if torch._C._functorch.peek_interpreter_stack() is None:
            refuse_mapped(ctx.run.graph.name, cotangents)
        if derivative is not None:
            both = zip(cotangents, derivative.has_gradient, strict=True)
            cotangents = [g if has_one else None for g, has_one in both]
            if any(g is not None for g in cotangents):
                found = dict(zip(derivative.wrt, _gradients(ctx, cotangents), strict=True))
        return None, None, None, *(found.get(name) for name in ctx.run.parameters.names)

    @staticmethod
    def jvp(ctx, *tangents):
        both = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = tuple([other if tensor is None else tensor for tensor, other in both])
        return _pushed(ctx, values, tangents[3:])

    @staticmethod
    def vmap(info, in_dims, derivative, run, lead, *values):
        dims, rows = in_dims[3:], (info.batch_size, *lead)
        if shared := mapped_and_shared(run, dims):
            run = run.unshared(shared)
        whole = batched(run, info.batch_size, dims, values, lead)
        if not shared and not run.graph.over_rows:
            results = _Transformed.apply(derivative, run, rows, *whole)
        else:  # another graph, which has a derivative of its own
            terms = with_gradients(run.of_terms if run.graph.over_rows else run, whole, rows)
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
    if all([g is None for g in cotangents]):  # as of statistics that second order does not reach
        return [None] * len(ctx.derivative.wrt)
    cotangents = tuple([None if g is None else g.resolve_neg() for g in cotangents])
    backward, given = ctx.derivative.arguments(ctx.values, ctx.saved_tensors, cotangents)
    results = with_gradients(backward.run, given, ctx.lead)
    found = [None if k is None else results[k] for k in backward.gradients]
    repeated = ctx.derivative.repeated
    if repeated:
        named = zip(ctx.derivative.wrt, found, ctx.like, strict=True)
        found = [
            g.sum_to_size(shape).to(dtype) if g is not None and name in repeated else g
            for name, g, (shape, dtype) in named
        ]
    if backward.scattered:
        from .tables import with_rows  # which few functions need

        found = with_rows(found, results, backward.scattered)
    return found


def _pushed(ctx, values: tuple, given: Sequence) -> tuple[torch.Tensor | None, ...]:
    """The tangent of each result that has a derivative.

    given: for each of the arguments its tangent, or None.
    """
    run, lead = ctx.run, ctx.lead
    if any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in given):
        raise GradientError(
            f"{run.graph.name}: tangents of a vectorized Jacobian of torch.autograd.functional are "
            "not supported; write torch.func.jacfwd"
        )
    given = [None if t is None or t._is_zerotensor() else t.resolve_neg() for t in given]
    named = zip(run.parameters.names, given, strict=True)
    pushed = tangents_of(run, tuple([name for name, t in named if t is not None]))
    results = ()
    if pushed is not None:
        lists = values, given
        results = with_gradients(pushed.run, tuple([lists[n][k] for n, k in pushed.sources]), lead)
    shapes = run.specialization.shapes(lead)
    places = [None] * len(shapes) if pushed is None else pushed.results
    first = next(v for v in values if isinstance(v, torch.Tensor))
    return tuple(
        None if not has_one else results[k] if k is not None
        else torch.zeros((), dtype=dtype, device=first.device).expand(shape)
        for k, (shape, dtype), has_one in zip(places, shapes, run.has_gradient, strict=True)
    )  # fmt: skip
