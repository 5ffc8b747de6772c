"""Graphs of rows in autograd's graph, and in the transforms of torch.func.

torch goes from one transform to the next. In each of them it asks for gradients (`grad`, `vjp`),
for tangents (`jvp`), or for the results of a whole batch (`vmap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from ...errors import GradientError
from ..operands import is_differentiated, is_inside_transform, unwrapped
from ..runner import Runner, over_rows
from ..shortcuts.gradients import add_backward
from ..vmap import batched, mapped_and_shared
from .derivatives import Derivative, derivative_of, refuse_any_length, repeated_among
from .tangents import tangents_of


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
    given = derivative, values, lead
    return tuple(_Function.apply(given, *wrt.values())[: derivative.results])


class Recorded:
    """`with_gradients` for values of which the same ones require grad as of `like`.

    What depends on that alone is found once, because it takes the host's time in each call.

    derivative: None where no result depends on what requires grad, and inside transforms.
    """

    def __init__(self, run: Runner, like: tuple, lead: tuple[int, ...]):
        self.run, self.lead, self.derivative = run, lead, None
        tensors = [k for k, value in enumerate(like) if isinstance(value, torch.Tensor)]
        self._wrt = tuple(k for k in tensors if like[k].requires_grad)
        if self._wrt and not is_inside_transform(like):
            named = {run.parameters.names[k]: like[k] for k in self._wrt}
            self.derivative = derivative_of(run, tuple(named), repeated_among(run, named, lead))

    def __call__(self, values: tuple) -> Sequence[torch.Tensor]:
        derivative = self.derivative
        if derivative is None or is_inside_transform(values) or not torch.is_grad_enabled():
            return with_gradients(self.run, values, self.lead)
        wrt = [values[k] for k in self._wrt]
        return _Function.apply((derivative, values, self.lead), *wrt)[: derivative.results]


def _requires_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


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
            f"{name}: a backward pass of many cotangents at once is not supported here, as "
            "torch.autograd.grad(..., is_grads_batched=True) and the Jacobians of "
            "torch.autograd.functional with vectorize=True ask for; write torch.func.jacrev, or "
            "torch.vmap of what torch.func.vjp returns, or vectorize=False"
        )


class Call(NamedTuple):
    """What a node of autograd's graph keeps of a call beside tensors.

    numbers: the arguments that are numbers, in the places of all; None for all others.
    like: the shape and dtype of each argument that requires grad, where some have fewer rows.
    """

    derivative: Derivative
    numbers: tuple
    lead: tuple[int, ...]
    like: tuple[tuple[torch.Size, torch.dtype], ...]


class _Function(torch.autograd.Function):
    """A `Derivative` in autograd's graph."""

    @staticmethod
    def forward(ctx, given: tuple[Derivative, tuple, tuple[int, ...]], *wrt):
        derivative, values, lead = given
        results = derivative.forward(values, lead)
        _set_up(ctx, derivative, values, lead, wrt, results)
        results = results[: derivative.recorded]
        ctx.mark_non_differentiable(*(results[k] for k in derivative.without_gradient))
        return results

    @staticmethod
    def backward(ctx, *cotangents):
        call, kept = ctx.call, ctx.saved_tensors  # for which hooks run: once only
        for shortcut in call[0].shortcuts:
            found = shortcut(call, kept, cotangents)
            if found is not None:
                return found
        refuse_mapped(call[0].of.graph.name, cotangents)
        return None, *_gradients(call, _with_history(call, kept), cotangents)


class _Launched(_Function):
    """The same where a shortcut has launched the forward kernel.

    given: a `Call` or its parts, the tensors that are kept, and the result or the results.
    """

    @staticmethod
    def forward(ctx, given: tuple[tuple, tuple, torch.Tensor | tuple], *wrt):
        ctx.call, kept, results = given
        ctx.save_for_backward(*kept)
        if type(results) is tuple:  # the cotangent of a single result is always there
            ctx.set_materialize_grads(False)
            if unmarked := ctx.call[0].without_gradient:
                ctx.mark_non_differentiable(*(results[k] for k in unmarked))
        return results


class _Statistics(torch.autograd.Function):
    """The statistics of a forward pass that is over, as functions of the arguments that it kept."""

    @staticmethod
    def forward(ctx, given: tuple[Call, tuple], *wrt):
        ctx.call, kept = given
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        derivative = ctx.call[0]
        found = tuple(kept[k].clone() for k in derivative.kept_statistics)
        both = zip(found, derivative.has_gradient[derivative.results :], strict=True)
        ctx.mark_non_differentiable(*(each for each, has_one in both if not has_one))
        return found

    @staticmethod
    def backward(ctx, *cotangents):
        call, kept = ctx.call, ctx.saved_tensors
        refuse_mapped(call[0].of.graph.name, cotangents)
        given = *(None,) * call[0].results, *cotangents
        return None, *_gradients(call, _with_history(call, kept), given)


def _with_history(call: Call, kept: tuple) -> tuple:
    """What was kept, with what autograd has to know of it for a gradient of second order."""
    derivative, *_ = call
    if not torch.is_grad_enabled() or not derivative.hides_statistics:
        return kept
    names = (derivative.of.specs[k].name for k in derivative.kept_arguments)
    named = dict(zip(names, kept, strict=False))  # what is not kept has no part in them
    found = _Statistics.apply((call, kept), *(named.get(name) for name in derivative.wrt))
    known = dict(zip(derivative.kept_statistics, found, strict=True))
    return tuple(known.get(k, tensor) for k, tensor in enumerate(kept))


def quick(function: type[torch.autograd.Function]) -> Callable:
    """What makes a node of autograd's graph, as `function.apply` does outside of transforms.

    torch's own entry in C takes some microseconds of Python less, and the node finds its backward
    pass where torch looks for it. Neither is public: where torch has them no more, its public way
    is taken.
    """
    node = getattr(function, "_backward_cls", None)
    if hasattr(node, "apply"):
        node.apply = function.backward
    entry = vars(getattr(torch._C, "_FunctionBase", object)).get("apply")
    return entry.__get__(None, function) if hasattr(entry, "__get__") else function.apply


ENTRY = quick(_Launched)


class _Transformed(torch.autograd.Function):
    """A call with all values, which torch takes from one level to the next.

    Without a derivative it has tangents only. The statistics of a derivative are always results.
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
            both = zip(output, derivative.has_gradient, strict=True)
            ctx.mark_non_differentiable(*(result for result, has_one in both if not has_one))
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
            cotangents = tuple([g if has_one else None for g, has_one in both])
            gradients = _gradients(ctx.call, ctx.saved_tensors, cotangents)
            found = dict(zip(derivative.wrt, gradients, strict=True))
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
    numbers = tuple([None if isinstance(v, torch.Tensor) else v for v in values])
    like = tuple([(v.shape, v.dtype) for v in wrt]) if derivative.repeated else ()
    ctx.call = Call(derivative, numbers, lead, like)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*derivative.kept(values, results))


def _gradients(call: Call, kept: tuple, cotangents: tuple) -> Sequence[torch.Tensor | None]:
    """The gradients of what the derivative is for, by the tensors that were kept.

    There may be no cotangent at all, where what follows has none for any of the results.
    """
    derivative, numbers, lead, like = call
    if all([g is None for g in cotangents]):
        return [None] * len(derivative.wrt)
    cotangents = tuple([None if g is None else g.resolve_neg() for g in cotangents])
    kept = tuple([unwrapped(tensor) for tensor in kept])
    backward, given = derivative.arguments(numbers, kept, cotangents)
    results = with_gradients(backward.run, given, lead)
    add_backward(derivative, backward, given, lead)
    found = [None if k is None else results[k] for k in backward.gradients]
    if backward.scattered:
        from .tables import with_rows  # which few functions need

        found = with_rows(found, results, backward.scattered, derivative.repeated)
    if derivative.repeated:
        named = zip(derivative.wrt, found, like, strict=True)
        found = [
            g.sum_to_size(shape).to(dtype) if g is not None and name in derivative.repeated else g
            for name, g, (shape, dtype) in named
        ]
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
