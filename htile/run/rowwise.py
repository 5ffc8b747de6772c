"""`@rowwise`: a Python function of one row that is called with tensors of many rows.

A call goes like this. `__call__` asks the shortcuts, each of which is a function for calls like an
earlier one (`shortcut.py`). Where none takes the call, `_call` binds its arguments, takes the
fingerprint of the captured values once, and looks for a launch that is remembered under it. A call
of a new kind gets roles, a trace (`specialize.py`), and a plan and a kernel (`launch.py`). Where
the tensors are on no GPU, torch evaluates the traced graph instead.
"""

from __future__ import annotations

import functools
import math
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ..build.arch import ARCHS, DEFAULT, arch_named, arch_of_capability
from ..build.compile import build_ahead
from ..errors import TraceError
from ..frontend.captures import Captures
from ..frontend.reference import evaluate
from ..frontend.roles import Call, Signature, classify
from ..frontend.tensor import Tensor as Symbolic
from ..frontend.tensor import fail
from ..lower import printed
from ..lower.plan import Plan
from . import vmap
from .kernel import Kernel
from .launch import Launch, Request, launch_of, prepare, run
from .operands import call_key, device_of, refuse_fake, refuse_gradients, runs_kernels
from .out import check_aliases, check_out, copy_into, find_aliases, in_order
from .shortcut import shortcut
from .specialize import Specializations

if TYPE_CHECKING:
    from ..tune.search import Tuned

MAX_LAUNCHES = 4096  # remembered calls of one function; forgotten all at once beyond
MAX_SHORTCUTS = 5  # of calls with out=, and as many of calls without it; then none is added
MAX_MISSES = 3  # calls of other sizes, after which a shortcut of fixed sizes goes
_SHORTCUTS = threading.Lock()  # held while the shortcuts of a function are replaced


def rowwise(fn: Callable | None = None, *, fastmath: bool = False):
    """Make a function of one row into one fused kernel over all rows.

    Inside `fn` a tensor argument is one row of N elements; called, it takes tensors of shape
    `(*lead, N)` and returns what `fn` returns for each row: rows as `(*lead, N)`, one value a row
    as `(*lead)`, or `(*lead, 1)` with `keepdim=True`. Floating values are float32 inside; a row
    comes back in the dtype of the first 16- or 32-bit floating row argument, one value a row in
    float32, unless `.to(dtype)` says otherwise.

        @htile.rowwise
        def rmsnorm(x, weight, eps: float = 1e-6):
            return x * torch.rsqrt((x * x).mean() + eps) * weight

        y = rmsnorm(x, w)           # x: (4, 128, 4096) bfloat16, w: (4096,); y: as x
        rmsnorm(x, w, out=x)        # in place

    CUDA tensors run the kernel, all others the reference: the same graph, evaluated by torch. A
    row whose elements are not neighbours in memory is copied first; nothing else ever is.

    `out=` takes one tensor, or the structure that `fn` returns (dicts by their keys, in any order),
    to write the results to. One may be the very memory of a row argument (in place); any other
    overlap raises ArgumentError. `torch.vmap(f)` treats the batch as a leading dimension.

    fastmath: approximate tanh, log, log2, log10, sin and cos, in all of the kernel. A row-wise
        function that `fn` calls becomes part of it: its own fastmath and plan do not count.

    Raises an HTileError that names the line for what can not be traced, and at a call for
    arguments that do not fit: ArgumentError, ShapeError, DtypeError, GradientError for tensors that
    require grad, UnsupportedError for what is not built yet.
    """
    if fn is None:
        return functools.partial(rowwise, fastmath=fastmath)
    return Rowwise(fn, fastmath)


class Rowwise:
    """A row-wise function; see `rowwise`."""

    def __init__(
        self,
        fn: Callable,
        fastmath: bool = False,
        wanted: Mapping | None = None,
        base: Rowwise | None = None,
    ):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._fastmath = fastmath
        self._wanted = dict(wanted or {})
        self._base = base or self  # the one that the name of `fn` means
        self._signature = Signature(fn)
        self._captures = Captures(fn)
        self._specializations = Specializations(fn, self._captures)
        self._launches: dict[object, Launch] = {}
        self._forget()

    def _forget(self) -> None:
        """Have the next call of each kind take the long way, and look for its plan anew."""
        self._launches.clear()
        with _SHORTCUTS:
            self._returning: tuple[Callable, ...] = ()  # the shortcuts of calls without out=
            self._writing: tuple[Callable, ...] = ()  # those of calls with it

    def __call__(self, *args, **kwargs):
        if is_dynamo_compiling():
            return _call_of_htile_rowwise(self, args, kwargs)
        try:
            for call in self._writing if kwargs and "out" in kwargs else self._returning:
                result = call(*args, **kwargs)
                if result is not None:
                    return result
        except (TypeError, NameError, ValueError):  # see `shortcut`
            pass
        return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict):
        """A call that no shortcut takes."""
        out = None
        if "out" in kwargs and "out" not in self._signature.names:
            out = kwargs.pop("out")
            if out is None:
                return self(*args, **kwargs)
        values = self._signature.bind(args, kwargs)
        if any(type(value) is Symbolic for value in values):  # by a function that is being traced
            if out is not None:
                name = f"{self._signature.name}(out=...)"
                fail(TraceError, f"{name} inside a traced function; assign the result")
            return self._fn(*args, **kwargs)
        if vmap.is_inside(values):
            return vmap.call_over_batch(self, self._signature, values, out)
        # what tells kinds of calls apart
        leaves, structure = ((), None) if out is None else pytree.tree_flatten(out)
        outs = tuple(leaves)
        refuse_fake(self._signature, values, outs)
        aliases = find_aliases(self._signature, values, outs)
        watched = self._captures.watched()
        key = call_key(watched[1], self._signature, values, outs, aliases)
        launch = None if key is None else self._launches.get(key)
        if launch is None or (out is not None and structure != launch.structure):
            # a kind that is new
            call = classify(self._signature, values)
            refuse_gradients(self._signature, values)
            device = device_of(self._signature, values)
            request, holds = self._request(call, watched[1], values, outs, aliases)
            specialization = request.specialization
            if out is not None:
                ordered = in_order(out, structure, specialization.structure)
                if ordered is not out:
                    self(*args, **kwargs, out=ordered)
                    return out
                check_out(self._signature.name, specialization, call, out, device)
                check_aliases(self._signature.name, call, aliases)
            if not runs_kernels(device):
                tensors = dict(zip(self._signature.names, values, strict=True))
                result = evaluate(specialization.traced, tensors, lead=call.lead)
                return result if out is None else copy_into(out, result)
            # nor may a static value have changed since the key was made
            holds &= key == call_key(watched[1], self._signature, values, outs, aliases)
            launch = prepare(request, device, [*self._launches.values()])
            if holds and key is not None:
                if len(self._launches) >= MAX_LAUNCHES:
                    self._launches.clear()
                self._launches[key] = launch
                self._add_shortcuts(request, launch, watched)
        result = run(launch, values, outs)
        if out is None:
            return result
        increment_version(outs)  # what autograd has saved of them is no longer theirs
        return out

    def _request(
        self, call: Call, captured: tuple, values: tuple, outs: tuple = (), aliases: tuple = ()
    ) -> tuple[Request, bool]:
        """The call with its specialization, and whether that may be remembered; see `find`."""
        specialization, holds = self._specializations.find(call, captured)
        own = self._signature, self._fastmath, self._wanted
        return Request(*own, call, specialization, values, outs, aliases), holds

    def _add_shortcuts(self, request: Request, launch: Launch, watched: tuple) -> None:
        """Give calls like this one shortcuts, unless the function has enough of them.

        The first call in which these results are arguments gets one for its own sizes as well,
        which goes after some calls of other sizes.
        """
        name = "_writing" if request.outs else "_returning"
        known = getattr(self, name)
        if launch.kernel is None or not launch.is_widest or len(known) >= MAX_SHORTCUTS:
            return
        make = functools.partial(shortcut, request, launch.kernel, self._captures, watched)
        left = MAX_MISSES

        def missed() -> None:
            nonlocal left
            left -= 1
            if left <= 0 and of_any_size:
                self._set_shortcuts(name, lambda these: [f for f in these if f is not of_this_size])

        of_any_size, of_this_size = make(), None
        is_new = not any(each.in_place == request.in_place for each in known)
        if request.call.lead and (is_new or of_any_size is None):
            of_this_size = make(missed)
        added = [each for each in (of_this_size, of_any_size) if each is not None]
        self._set_shortcuts(name, lambda these: [*these, *added])

    def _set_shortcuts(self, name: str, change: Callable[[tuple], list]) -> None:
        with _SHORTCUTS:
            setattr(self, name, tuple(change(getattr(self, name))))
            if "out" in self._signature.names:  # it is an argument like any other
                self._writing = self._returning

    def __get__(self, instance, owner=None):
        """As a method: `self` is a static argument, so a frozen dataclass, say."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self):
        """Pickled like a function: by its name, or as the one of that name with a plan."""
        if self._base is not self:
            return _with_plan, (self._base, self._wanted)
        return self._fn.__qualname__

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def inspect(self, *args, arch: str | None = None, **kwargs) -> Kernel:
        """The kernel that a call with these arguments runs, without running it.

        It takes what a call takes, but `out=`. The tensors may be on any device, `meta` included,
        so no GPU is needed:

            x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
            print(softmax.inspect(x, arch="sm_100a"))

        arch: the architecture; by default that of the tensors' GPU, else sm_90a.

        Raises what a call raises for its arguments, and CompileError for an unknown architecture.
        """
        values = self._signature.bind(args, kwargs)
        refuse_fake(self._signature, values)
        call = classify(self._signature, values)
        device = device_of(self._signature, values)
        request, _ = self._request(call, self._captures.fingerprint(), values)
        gpu = device if runs_kernels(device) else None
        capability = torch.cuda.get_device_capability(gpu) if gpu else None
        if arch is not None:
            chosen = arch_named(arch)
            gpu = gpu if ARCHS.get(capability) == chosen else None
        else:
            chosen = arch_of_capability(capability) if gpu else DEFAULT
        return Kernel(request.lower(chosen, gpu), chosen.name, request.copied)

    def compile(self, *args, arch: str | None = None, **kwargs) -> Kernel:
        """Compile, ahead of a call, the kernel that `inspect` shows, into the disk cache.

        It takes what `inspect` takes, and needs no GPU:

            x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
            softmax.compile(x, arch="sm_90a")

        The kernel is of the dtypes, N, number of leading dimensions, broadcast sizes and alignment
        of these tensors, and serves any number of rows, though one row alone may have a kernel of
        its own, and for N > 2048 so may 64, 256 and 1024 rows and more. `meta` tensors count as
        allocated by torch, so that rows lie at multiples of 16 bytes if N and the strides are such;
        for rows that begin elsewhere pass a view of a CPU tensor, `torch.empty(4, 4097)[:, 1:]`.

        Raises what `inspect` raises, and CompileError where CuTe-DSL is not installed.
        """
        kernel = self.inspect(*args, arch=arch, **kwargs)
        build_ahead(kernel.lowered.source, kernel.lowered.function, kernel.arch)
        return kernel

    def tune(
        self, *args, seconds: float = 60.0, numerics: bool = False, progress: bool = True, **kwargs
    ) -> Tuned:
        """Time the kernel's plans on the GPU with these CUDA tensors, and keep the fastest.

        Each plan is timed beside the default one, in turns, with a cold L2; a plan wins only where
        it is faster beyond the noise, twice. From then on calls of the same kind run it, in this
        process and in later ones: the disk cache keeps it, by the name of the GPU, until
        `htile cache --clear`. The results of the timed calls are thrown away, and the arguments are
        not written.

            print(softmax.tune(logits, seconds=30))

        seconds: no other plan is begun after so long.
        numerics: try plans as well that sum in another order. The winner's bits are then those of
            every batch of these N and dtypes; without it, no bit of a result changes.
        progress: show a bar on stderr, if that is a terminal.

        A parameter of `fn` with such a name is passed by position. Raises ArgumentError for tensors
        that are not on a GPU, without rows, in a capture, and where the disk cache is turned off.
        """
        from ..tune import search as tune  # which few calls need

        values = self._signature.bind(args, kwargs)
        call = classify(self._signature, values)
        refuse_gradients(self._signature, values)
        device = device_of(self._signature, values)
        tune.check(self._signature.name, device, math.prod(call.lead), seconds)
        request, _ = self._request(call, self._captures.fingerprint(), values)
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
        plans = request.plans(arch)
        named = zip(self._signature.names, values, strict=True)
        whole = tuple(v.contiguous() if name in request.copied else v for name, v in named)
        request = replace(request, values=whole)

        def prepare(plan: Plan) -> Callable[[], object]:
            lowered = printed(request.specialization.traced, plan)
            return functools.partial(run, launch_of(request, lowered, device), whole)

        tuned = tune.tune(plans, self._wanted, device, prepare, seconds, numerics, progress)
        self._forget()
        return tuned

    def with_plan(self, **wanted) -> Rowwise:
        """This function with a plan of these properties in place of the default one.

        wanted: threads_per_row, cluster_n, form (numerics: they change bits); num_threads, loader
            ("shared" or "direct"), columns ("early" or "late"), shares (placement: no bit changes).

            wide = softmax.with_plan(threads_per_row=256, loader="shared")

        Raises LoweringError at the call where no plan has them.
        """
        return Rowwise(self._fn, self._fastmath, {**self._wanted, **wanted}, self._base)

    def __repr__(self) -> str:
        return f"<htile.rowwise {self._signature.name}>"


def _with_plan(function: Rowwise, wanted: Mapping) -> Rowwise:
    return function.with_plan(**wanted)


@torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo with htile: a second
def _call_of_htile_rowwise(function: Rowwise, args: tuple, kwargs: dict):
    """A graph break for `torch.compile`; with `fullgraph=True` torch shows the reason below."""
    return function(*args, **kwargs)


_call_of_htile_rowwise._torchdynamo_disable = True
_call_of_htile_rowwise._torchdynamo_disable_msg = (
    "HTile does not support torch.compile yet: a call of a row-wise function is a graph break. "
    "Compile without fullgraph=True, or call the function outside torch.compile"
)
