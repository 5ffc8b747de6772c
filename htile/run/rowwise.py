"""`@rowwise`: a Python function of one row that is called with tensors of many rows.

A call asks the shortcuts first, each of which is a function for calls like an earlier one
(`shortcuts/shortcut.py`). If none takes it, it goes the long way, `_call`, which makes a key of
what tells kinds of calls apart. If a launch is remembered under that key, it runs.

A call of a new kind finds the role of each argument (`frontend/roles.py`). It gets a trace
(`specialize.py`), and then a plan and a kernel (`launch.py`). If the tensors are on no GPU, torch
evaluates the traced graph instead.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ..build.arch import arch_of_capability
from ..errors import ArgumentError, TraceError
from ..frontend.captures import Captures
from ..frontend.dynamic import check_length, in_bucket
from ..frontend.reference import evaluate
from ..frontend.roles import Call, Signature, classify
from ..frontend.tensor import Tensor as Symbolic
from ..frontend.tensor import fail
from ..lower import check_names
from . import vmap
from .ahead import Ahead
from .detours import detour_of
from .launch import Launch, Request, prepare, run
from .operands import (
    call_key,
    device_of,
    is_inside_transform,
    refuse_tracers,
    refuse_transforms,
    runs_kernels,
    wants_gradients,
)
from .operations import ops  # noqa: F401 (registers htile::run, which a checkpoint may name)
from .operations.known import numbered
from .out import check_out, find_aliases, in_order
from .over_rows import refuse_no_maximum
from .shortcuts.out import OutWriter
from .shortcuts.shortcut import CallWriter, add, clear
from .specialize import Specializations

if TYPE_CHECKING:
    from ..frontend.custom import CustomBackward
    from .differentiation.gradients import DifferentiableCalls
    from .shortcuts.text import Writer

MAX_LAUNCHES = 4096  # remembered calls of one function; forgotten all at once beyond


def rowwise(
    fn: Callable | None = None, *, fastmath: bool = False, dynamic_n: bool = False, **unknown
):
    """Make a function of one row into one fused kernel over all rows.

    Inside `fn` a tensor argument is one row of N elements. The decorated function takes tensors of
    shape `(*lead, N)` and returns what `fn` returns for each row: rows as `(*lead, N)`, one value
    per row as `(*lead)`, or as `(*lead, 1)` with `keepdim=True`. Floating values are float32
    inside. A row of them comes back in the dtype of the first row argument of 16-bit or wider
    floats, and one of them per row in float32, unless `.to(dtype)` says otherwise. An `htile.Inner`
    argument counts as a row; shared vectors, tensors `(*lead, 1)` and `htile.PerRow` do not. Where
    no argument counts, a row has the dtype of the first table or matrix, and else float32.

        @htile.rowwise
        def rmsnorm(x, weight, eps: float = 1e-6):
            return x * torch.rsqrt((x * x).mean() + eps) * weight

        y = rmsnorm(x, w)           # x: (4, 128, 4096) bfloat16, w: (4096,); y: as x
        rmsnorm(x, w, out=x)        # in place

    CUDA tensors go through the kernel; for all others torch evaluates the same graph. A tensor is
    copied first if the elements of its rows are not neighbours in memory. Functions with matrix
    products also copy one whose rows are not equally far apart. No other tensor is copied.

    Where arguments require grad, results have gradients (docs/training.md).

    `out=` takes the tensors that the results are written to: one tensor, or the structure that `fn`
    returns (dicts by their keys, in any order). Each may be the very memory of a row argument or of
    a value for each row. Any other overlap raises ArgumentError. `torch.vmap(f)` treats the batch
    as a leading dimension.

    fastmath: use approximate tanh, log, log2, log10, sin and cos in all of the kernel. If `fn`
        calls a row-wise function, that becomes part of the kernel: its own fastmath, dynamic_n and
        plan do not count.
    dynamic_n: serve rows of up to N elements with one kernel (and with another one where rows are
        not whole 16-byte vectors). N is the next power of two, or three quarters of it.
        `x.shape[-1]` then has no Python number inside `fn`, and only whole rows may be worked on:
        parts, groups and tables raise UnsupportedError. Bits depend on N.

    Raises TraceError or UnsupportedError, with the line of `fn`, for what can not be traced,
    ArgumentError, ShapeError or DtypeError for arguments that do not fit, and GradientError where
    tensors require grad and the function has no gradient yet. All of them are HTileErrors.
    """
    if unknown:
        told = ", ".join(f"{name}=" for name in unknown)
        raise ArgumentError(
            f"htile.rowwise({told}): its options are fastmath=True and dynamic_n=True; a plan is "
            "chosen by with_plan(...) of the decorated function"
        )
    if fn is None:
        return functools.partial(rowwise, fastmath=fastmath, dynamic_n=dynamic_n)
    if is_dynamo_compiling():
        return _htile_rowwise_in_compiled_code(fn, fastmath, dynamic_n)
    return Rowwise(fn, fastmath, dynamic_n=dynamic_n)


rowwise.__signature__ = inspect.Signature(  # without the options that there are not
    [p for p in inspect.signature(rowwise).parameters.values() if p.kind is not p.VAR_KEYWORD]
)


@torch._disable_dynamo  # `torch.compiler.disable` would import torch._dynamo too, for a second
def _htile_rowwise_in_compiled_code(fn: Callable, fastmath: bool, dynamic_n: bool) -> Rowwise:
    """A graph break for torch.compile, which shows the reason with `fullgraph=True`."""
    return Rowwise(fn, fastmath, dynamic_n=dynamic_n)


_htile_rowwise_in_compiled_code._torchdynamo_disable = True
_htile_rowwise_in_compiled_code._torchdynamo_disable_msg = (
    "decorate the function with htile.rowwise outside of what torch.compile compiles"
)


class Rowwise(Ahead):
    """A row-wise function; see `rowwise`."""

    def __init__(
        self,
        fn: Callable,
        fastmath: bool = False,
        wanted: Mapping | None = None,
        base: Rowwise | None = None,
        dynamic_n: bool = False,
    ):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._fastmath, self._dynamic_n = fastmath, dynamic_n
        self._wanted = dict(wanted or {})
        self._base = base or self  # the one that the name of `fn` means
        self._variants = weakref.WeakSet() if base is None else base._variants  # with other plans
        self._variants.add(self)
        self._signature = Signature(fn)
        self._captures = Captures(fn) if base is None else base._captures
        known = None if base is None else base._specializations
        self._specializations = known or Specializations(fn, self._captures)
        self._launches: dict[object, Launch] = {}
        self._number = numbered(self)
        self._reads: Callable[[], tuple] | None = None  # for Dynamo; see operations/compiled.py
        self._returning: tuple[Callable, ...] = ()  # the shortcuts of calls without out=
        self._writing: tuple[Callable, ...] = ()  # those of calls with it
        self._forget()

    def _forget(self) -> None:
        """Forget launches and shortcuts, so that the next call of each kind chooses a plan anew."""
        self._launches.clear()
        self._differentiated: DifferentiableCalls | None = None
        self._buckets: dict[object, Launch] = {}  # of rows of any length, the launch of a bucket
        clear(self, "_returning", "_writing")

    def __call__(self, *args, **kwargs):
        if is_dynamo_compiling():
            from .operations.compiled import call  # which Dynamo reads

            return call(self, args, kwargs)
        try:
            for call in self._writing if kwargs and "out" in kwargs else self._returning:
                result = call(*args, **kwargs)
                if result is not None:
                    return result
        except (TypeError, NameError, ValueError):  # see `CallWriter`
            pass
        return self._call(args, kwargs)

    def _taken(self, *args) -> object:
        """What a shortcut gives; None if none takes the call, or if torch compiles or watches.

        This is for callers with conditions of their own, such as modules. They have made every call
        that left a shortcut, so what a shortcut takes fits their conditions, too.
        """
        if is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
            return None
        try:
            for call in self._returning:
                result = call(*args)
                if result is not None:
                    return result
        except (TypeError, NameError, ValueError):  # see `CallWriter`
            pass
        return None

    def _call(self, args: tuple, kwargs: dict):
        """A call that no shortcut takes."""
        out = None
        if "out" in kwargs and "out" not in self._signature.names:
            out = kwargs.pop("out")
            if out is None:
                return self(*args, **kwargs)
        signature = self._signature
        values = signature.bind(args, kwargs)
        if any(type(value) is Symbolic for value in values):  # by a function that is being traced
            if out is not None:
                name = f"{signature.name}(out=...)"
                fail(TraceError, f"{name} inside a traced function; assign the result")
            return self._fn(*args, **kwargs) if self._backward is None else self._backward(values)
        refuse_tracers(signature, values)
        if vmap.is_inside(values):
            return vmap.call_over_batch(self, signature, values, out)
        # the key is what tells kinds of calls apart
        leaves, structure = ((), None) if out is None else pytree.tree_flatten(out)
        outs = tuple(leaves)
        if detour := detour_of((*values, *outs)):
            return detour(self, args, kwargs if out is None else {**kwargs, "out": out})
        if wants_gradients(values) or is_inside_transform(values):
            return self._differentiable(values, out is not None)
        aliases = find_aliases(signature, values, outs)
        watched = self._captures.watched()
        key = call_key(watched[1], signature, values, outs, aliases)
        launch, of_products = None if key is None else self._launches.get(key), None
        if launch is None or (out is not None and structure != launch.structure):
            # the call is of a new kind
            call = classify(signature, values)
            refuse_transforms(signature, values)
            device = device_of(signature, values)
            request, holds = self._request(call, watched[1], values, outs, aliases)
            refuse_no_maximum(request.specialization.traced, request.call.lead)
            if out is not None:
                ordered = in_order(out, structure, request.specialization.graph.structure)
                if ordered is not out:
                    self(*args, **kwargs, out=ordered)
                    return out
                check_out(request, out, device)
            if not runs_kernels(device):
                traced = request.specialization.traced
                lead, length = request.call.lead, request.call.length
                result = evaluate(traced, request.given, lead=lead, length=length)
                if out is None:
                    return result
                for target, value in zip(outs, pytree.tree_leaves(result), strict=True):
                    target.detach().copy_(value)  # they share no memory
                return out
            # the launch may not be remembered if a static value has changed since the key was made
            holds &= key == call_key(watched[1], signature, values, outs, aliases)
            if request.specialization.has_products:
                from .products.calls import ProductLaunch  # which other functions do not need

                launch = ProductLaunch(request, device)
            else:
                launch = self._prepared(request, device, holds)
            if holds and key is not None:
                if len(self._launches) >= MAX_LAUNCHES:
                    self._launches.clear()
                self._launches[key] = launch
                if not request.specialization.has_products:
                    writer = OutWriter if outs else CallWriter
                    self._add_shortcuts(writer, request, watched, launch)
                elif not outs:
                    of_products = request
        result = run(launch, values, outs)
        if of_products is not None:  # it knows its kernels now
            from .shortcuts.products import add_products

            add_products(self, "_returning", of_products, launch, self._captures, watched)
        if out is None:
            return result
        increment_version(outs)  # so that autograd sees that saved tensors were written to
        return out

    @property
    def _differentiable(self) -> DifferentiableCalls:
        """The calls whose results autograd differentiates."""
        if self._differentiated is None:
            # Inference needs neither.
            from .differentiation.gradients import DifferentiableCalls
            from .products.operations import trained_products

            self._differentiated = DifferentiableCalls(self, trained_products)
        return self._differentiated

    def _request(
        self, call: Call, captured: tuple, values: tuple, outs: tuple = (), aliases: tuple = ()
    ) -> tuple[Request, bool]:
        """The call with its specialization, and whether that may be remembered.

        `Specializations.find` says when it may not.
        """
        if self._dynamic_n:
            call = in_bucket(self._signature, call)
        specialization, holds = self._specializations.find(call, captured)
        if call.length is not None:
            check_length(self._signature.name, specialization.traced, call.length)
        own = self._signature, self._fastmath, self._wanted
        return Request(*own, call, specialization, values, outs, aliases), holds

    def name_over_rows(self, values: Iterable[object]) -> str | None:
        """The name of a result that is reduced over all rows, for a call with these values."""
        values = tuple(values)
        call = classify(self._signature, values)
        request, _ = self._request(call, self._captures.fingerprint(), values)
        return next((o.name for o in request.specialization.traced.over_rows), None)

    def _prepared(self, request: Request, device: torch.device, holds: bool) -> Launch:
        """How to launch a call's kernel: like earlier calls of its bucket, if there were any.

        holds: whether it may be remembered.
        """
        known = [*self._launches.values()]
        if not self._dynamic_n:
            return prepare(request, device, known)
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
        key = request.specialization, request.target(arch), request.copied, device, not request.rows
        launch = self._buckets.get(key)
        if launch is None:
            launch = prepare(request, device, known)
            if holds:
                if len(self._buckets) >= MAX_LAUNCHES:
                    self._buckets.clear()
                self._buckets[key] = launch
        call = request.call
        return launch._replace(outputs=request.specialization.shapes(call.lead, call.length))

    def _add_shortcuts(self, writer: type[Writer], request: Request, *more: object) -> None:
        """Add shortcuts for calls like this one, unless the function has enough of them."""
        names = ["_writing" if request.outs else "_returning"]
        if "out" in self._signature.names:  # it is an argument like any other
            names = ["_writing", "_returning"]
        for name in names:
            add(self, name, writer, request, self._captures, *more)

    def __get__(self, instance, owner=None):
        """Bind as a method. `self` is a static argument, such as a frozen dataclass."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self):
        """Pickle it as functions are, by its name. With a plan, pickle the name and the plan."""
        if self._base is not self:
            return functools.partial(self._base.with_plan, **self._wanted), ()
        return self._fn.__qualname__

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    @property
    def _backward(self) -> CustomBackward | None:
        """The backward pass that the user has written, with which calls are traced."""
        return self._specializations.backward

    def backward(self, fn: Callable) -> Callable:
        """Make `fn` the backward pass of this function, in place of the one that HTile derives.

            @softmax.backward
            def softmax_backward(out, d_out):
                return out * (d_out - (out * d_out).sum())

        fn: a function of one row, too. Its parameters say what a forward pass keeps: some of this
            function's parameters, of its results (`out`; `out0`, `out1`...; or the keys and fields
            of what it returns), and of their gradients (`d_out`). It returns a gradient for each
            tensor of a call that can have one, in the order of the parameters: of the shape that
            the tensor has for one row, or a number, or None. HTile sums what all rows share.

        It is transposed for forward mode, derived for second order, and used where other row-wise
        functions call this one. Returns `fn`. Calls raise HTileErrors with a line of `fn` where it
        does not fit.
        """
        from ..frontend.custom import CustomBackward  # which few functions need

        self._specializations.backward = CustomBackward(self._signature, fn)
        self._captures.follow(fn)
        for each in self._variants:
            each._forget()
        return fn

    def with_plan(self, **wanted) -> Rowwise:
        """This function with a plan of these properties in place of the default one.

        wanted: any field of a plan. Some are numerics, which change bits: threads_per_row,
            cluster_n (how many shares a row has), form ("held", "loops" or "streamed"). Others are
            placement, which changes no bit: num_threads, loader ("shared", "direct" or "packed"),
            columns ("early", "late" or "staged"), shares. `inspect(...).plan.properties()` has all.

            wide = softmax.with_plan(threads_per_row=256, loader="shared")

        Raises LoweringError for other names. A call raises it if no plan has these values, and if
        all its kernels multiply by matrices.
        """
        check_names(wanted)
        more = {**self._wanted, **wanted}
        return Rowwise(self._fn, self._fastmath, more, self._base, self._dynamic_n)

    def __repr__(self) -> str:
        return f"<htile.rowwise {self._signature.name}>"
