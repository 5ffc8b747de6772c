"""`@rowwise`: from a call to a launch. Specialize, look up, allocate, launch; and `inspect`.

A call is found again by the shapes, strides and dtypes of its tensors. The first one of its kind
goes the long way: roles, trace, lowering, compilation.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

from ..build.arch import ARCHS, DEFAULT, Arch, arch_named, arch_of_capability
from ..build.compile import build_ahead, load
from ..errors import ArgumentError, TraceError, UnsupportedError
from ..frontend.captures import Captures
from ..frontend.graph import Graph, Role
from ..frontend.reference import evaluate
from ..frontend.roles import Call, Signature, Spec, classify
from ..frontend.tensor import Tensor as Symbolic
from ..frontend.tensor import fail, internal
from ..frontend.trace import trace
from ..lower import Lowered, choose, plans_for, printed, run_passes
from ..lower.plan import Plan, Target, rows_like
from ..tune.kept import recall
from .kernel import Kernel
from .operands import (
    WIDEST_ACCESS,
    alignment,
    are_rows_of_vmap,
    as_copied,
    device_of,
    has_one_twice,
    needs_copy,
    own_dimensions,
    refuse_gradients,
    tensor_key,
    value_key,
)
from .out import check_aliases, check_out, copy_into, find_aliases, in_order
from .shortcut import MISS, shortcut

if TYPE_CHECKING:
    from ..tune.search import Tuned

MAX_LAUNCHES = 4096  # remembered calls of one function; forgotten all at once beyond
MAX_SHORTCUTS = 5  # of one function
MAX_MISSES = 3  # of a shortcut of fixed sizes
_SHORTCUTS = threading.Lock()  # held while those of a function are replaced
WARN_SPECIALIZATIONS = 8


def rowwise(fn: Callable | None = None, *, fastmath: bool = False):
    """Make a function of one row into one fused kernel over all rows.

    Inside `fn` a tensor argument is one row of N elements; called, it takes tensors of shape
    `(*lead, N)` and returns what `fn` returns for each row: rows as `(*lead, N)`, one value a row
    as `(*lead)`, or `(*lead, 1)` with `keepdim=True`. Floating values are float32 inside; a row
    comes back in the dtype of the first 16- or 32-bit floating row argument, one value a row in
    float32, unless `.to(dtype)` says otherwise.

    CUDA tensors run the kernel, all others the reference: the same graph, evaluated by torch. A
    row whose elements are not neighbours in memory is copied first; nothing else ever is.

    `out=` takes one tensor, or the structure that `fn` returns (dicts by their keys, in any order),
    to write the results to. One may be the very memory of a row argument (in place); any other
    overlap raises.

    fastmath: approximate tanh, log, log2, log10, sin and cos, in all of the kernel. A row-wise
        function that `fn` calls becomes part of it: its own fastmath and plan do not count.

    Raises an HTileError that names the line for what can not be traced, and at a call for
    arguments that do not fit.
    """
    if fn is None:
        return functools.partial(rowwise, fastmath=fastmath)
    return Rowwise(fn, fastmath)


@dataclass(frozen=True)
class Launch:
    """One way to call: the kernel, and how to make its arguments from the caller's values.

    inputs: for each, in kernel order, (index of the value, whether to make it contiguous first).
    outputs: the shape and dtype of each.
    source: the text that the kernel was compiled from; it is None where there are no rows.
    is_widest: whether its accesses are as wide as they can be, and no input is copied. A narrower
        kernel takes tensors of any alignment, so it must not be the one that is tried first.
    """

    kernel: Callable | None
    source: str
    inputs: tuple[tuple[int, bool], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    structure: object
    device: torch.device
    is_widest: bool


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
        self._graphs: dict[object, tuple[Graph, Graph]] = {}
        self._launches: dict[object, Launch] = {}
        self._statics: dict[str, set] = {}
        self._shortcuts: tuple[Callable, ...] = ()

    def __call__(self, *args, **kwargs):
        if is_dynamo_compiling():
            return _call_of_htile_rowwise_is_not_supported_by_torch_compile(self, args, kwargs)
        for call in self._shortcuts:
            try:
                result = call(*args, **kwargs)
            except (TypeError, NameError, ValueError):  # see `shortcut`
                break
            if result is not MISS:
                return result
        return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict):
        """A call of any kind; one that may come again gets a shortcut."""
        out = None
        if "out" in kwargs and "out" not in self._signature.names:
            out = kwargs.pop("out")
        values = self._signature.bind(args, kwargs)
        if any(type(value) is Symbolic for value in values):  # by a function that is being traced
            if out is not None:
                name = f"{self._signature.name}(out=...)"
                fail(TraceError, f"{name} inside a traced function; assign the result")
            return self._fn(*args, **kwargs)
        leaves, structure = ((), None) if out is None else pytree.tree_flatten(out)
        outs = tuple(leaves)
        aliases = self._aliases(values, outs)
        key = self._key(values, outs, aliases)
        launch = None if key is None else self._launches.get(key)
        if launch is None or (out is not None and structure != launch.structure):
            if are_rows_of_vmap(values):
                return self._fn(*args, **kwargs)
            call = classify(self._signature, values)
            refuse_gradients(self._signature, values)
            device = device_of(self._signature, values)
            graph = self._trace(call)[0]
            if out is not None:
                ordered = in_order(out, structure, graph.structure)
                if ordered is not out:
                    self(*args, **kwargs, out=ordered)
                    return out
                check_out(self._signature.name, graph, call, out, device)
                check_aliases(self._signature.name, call, aliases)
            if device.type != "cuda":
                tensors = dict(zip(self._signature.names, values, strict=True))
                result = evaluate(graph, tensors, lead=call.lead)
                return result if out is None else copy_into(out, result)
            launch = self._prepare(call, values, outs, aliases, device)
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            if key is not None:
                self._launches[key] = launch
            if key is not None and not outs:
                self._add_shortcut(call, values, launch)
        result = _run(launch, values, outs)
        if out is None:
            return result
        increment_version(outs)  # what autograd has saved of them is no longer theirs
        return out

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

        The tensors may be on any device, `meta` included. arch: such as `sm_90a`; by default that
        of the tensors' GPU, else sm_90a.
        """
        values = self._signature.bind(args, kwargs)
        call = classify(self._signature, values)
        device = device_of(self._signature, values)
        gpu = device if device.type == "cuda" else None
        if arch is not None:
            target_arch = arch_named(arch)
            if gpu and ARCHS.get(torch.cuda.get_device_capability(gpu)) != target_arch:
                gpu = None
        elif gpu:
            target_arch = arch_of_capability(torch.cuda.get_device_capability(gpu))
        else:
            target_arch = DEFAULT
        lowered, _ = self._lower(call, values, (), (), target_arch, gpu)
        return Kernel(lowered, target_arch.name)

    def compile(self, *args, arch: str | None = None, **kwargs) -> Kernel:
        """Compile, ahead of a call, the kernel that `inspect` shows, into the disk cache.

        Takes what `inspect` takes, and needs no GPU. The kernel is of the dtypes, N, number of
        leading dimensions, broadcast sizes and alignment of these tensors, and serves any number of
        rows, though one row alone may have a kernel of its own, and for N > 2048 so may 64, 256
        and 1024 rows and more. `meta` tensors count as allocated by torch, so that rows lie at
        multiples of 16 bytes if N and the strides are such; for rows that begin elsewhere pass a
        view of a CPU tensor, `torch.empty(4, 4097)[:, 1:]`.
        """
        kernel = self.inspect(*args, arch=arch, **kwargs)
        build_ahead(kernel.source, kernel.lowered.function, kernel.arch)
        return kernel

    def tune(
        self, *args, seconds: float = 60.0, numerics: bool = False, progress: bool = True, **kwargs
    ) -> Tuned:
        """Time the kernel's plans on the GPU with these CUDA tensors, and keep the fastest.

        Each is timed beside the default, in turns, with a cold L2; a plan wins only where it is
        faster beyond the noise, twice. Calls of the same kind run it from then on, in this process
        and in later ones (it is kept in the disk cache, for the GPU's name); `htile cache --clear`
        forgets it. The results of these calls are thrown away, and the arguments are not written.
        What this function has launched so far is looked up again at its next call.

        seconds: no other plan is begun after so long.
        numerics: try plans as well that sum in another order, so that bits change: then for every
            batch of these N and dtypes. Without it, no bit of a result changes.
        progress: show a bar on stderr, if that is a terminal.
        Parameters of `fn` with such names are passed by position. Raises ArgumentError for tensors
        that are not on a GPU, without rows, in a capture, and where the disk cache is turned off.
        """
        from ..tune import search as tune  # which few calls need

        values = self._signature.bind(args, kwargs)
        call = classify(self._signature, values)
        refuse_gradients(self._signature, values)
        device = device_of(self._signature, values)
        tune.check(self._signature.name, device, math.prod(call.lead), seconds)
        self._check_rows(call)
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
        traced, graph = self._trace(call)
        target, copied = self._target(call, values, (), (), arch)
        named = zip(self._signature.names, values, strict=True)
        whole = tuple(v.contiguous() if copied.get(name) else v for name, v in named)

        def prepare(plan: Plan) -> Callable[[], object]:
            launch = self._launch(call, printed(traced, plan), {}, arch, device)
            return functools.partial(_run, launch, whole, ())

        plans = plans_for(graph, target, self._wanted)
        tuned = tune.tune(plans, self._wanted, device, prepare, seconds, numerics, progress)
        self._launches.clear()
        with _SHORTCUTS:
            self._shortcuts = ()
        return tuned

    def with_plan(self, **wanted) -> Rowwise:
        """This function with a plan of these properties in place of the default one.

        wanted: threads_per_row, cluster_n, form (numerics: they change bits); num_threads, loader
        ("shared" or "direct"), columns ("early" or "late"), shares (placement: no bit changes).
        Raises LoweringError at the call where no plan has them.
        """
        return Rowwise(self._fn, self._fastmath, {**self._wanted, **wanted}, self._base)

    def _aliases(self, values: tuple, outs: tuple) -> tuple[tuple[int, str], ...]:
        """Which result is written over which argument."""
        if any(not isinstance(out, torch.Tensor) for out in outs):
            return ()  # `check_out` says so
        return find_aliases(self._signature, values, outs)

    def _key(self, values: tuple, outs: tuple, aliases: tuple) -> object:
        """What tells calls apart that need different launches; None for what no call takes."""
        if forward_ad._current_level >= 0:
            return None  # a tangent is no part of a tensor's key: `refuse_gradients` looks
        try:
            key = (
                self._captures.fingerprint(),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),  # of this and the next, only shortcuts differ
                torch.is_autocast_enabled("cuda"),
                has_one_twice(values),
                aliases,
                *map(value_key, self._signature.kinds, values),
                *map(tensor_key, outs),
            )
            hash(key)
        except (TypeError, AttributeError, RuntimeError):
            return None  # a list, or a tensor without memory: `classify` will refuse it in words
        return key

    def _trace(self, call: Call) -> tuple[Graph, Graph]:
        """The graph as traced, and after the passes."""
        key = (self._captures.fingerprint(), call.n, call.specs)
        if key not in self._graphs:
            self._warn_if_many(call.specs)
            traced = trace(self._fn, call.specs, call.n)
            self._graphs[key] = traced, run_passes(traced)
        return self._graphs[key]

    def _lower(
        self,
        call: Call,
        values: tuple,
        outs: tuple,
        aliases: tuple,
        arch: Arch,
        device: torch.device | None = None,
    ) -> tuple[Lowered, dict[str, bool]]:
        """The kernel's text, and for each of its tensors whether it is made contiguous first.

        device: the GPU whose tuned plans count.
        """
        target, copied = self._target(call, values, outs, aliases, arch)
        traced, graph = self._trace(call)
        plans = plans_for(graph, target, self._wanted)
        plan = choose(plans) if device is None else recall(plans, self._wanted, device)
        return printed(traced, plan), copied

    def _target(
        self, call: Call, values: tuple, outs: tuple, aliases: tuple, arch: Arch
    ) -> tuple[Target, dict[str, bool]]:
        """What plans are made for, and for each tensor whether it is made contiguous first."""
        graph = self._trace(call)[1]
        name = self._signature.name
        given = dict(zip(self._signature.names, values, strict=True))
        specs = {spec.name: spec for spec in call.specs}
        tensors = {i.name: given[i.name] for i in graph.inputs}
        tensors = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        copied = {n: needs_copy(name, specs[n], t) for n, t in tensors.items()}
        rows = [
            as_copied(tensors[i.name]) if copied[i.name] else tensors[i.name]
            for i in graph.inputs
            if i.role in (Role.ROW, Role.COLUMN)
        ]
        rows += [t for t, o in zip(outs, graph.outputs, strict=False) if o.is_row]
        repeated = {n: own_dimensions(specs[n], t, call.lead) for n, t in tensors.items()}
        target = Target(
            call.n,
            arch,
            alignment(graph, rows),
            self._fastmath,
            len(call.lead),
            tuple((n, own) for n, own in repeated.items() if own is not None),
            tuple((graph.outputs[k].name, n) for k, n in aliases),
            rows_like(math.prod(call.lead))[0],
        )
        return target, copied

    def _prepare(
        self, call: Call, values: tuple, outs: tuple, aliases: tuple, device: torch.device
    ) -> Launch:
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
        self._check_rows(call)
        lowered, copied = self._lower(call, values, outs, aliases, arch, device)
        return self._launch(call, lowered, copied, arch, device)

    def _check_rows(self, call: Call) -> None:
        rows = math.prod(call.lead)
        if rows >= 2**31:
            raise UnsupportedError(f"{self._signature.name}: {rows} rows; the limit is 2^31 - 1")

    def _launch(
        self,
        call: Call,
        lowered: Lowered,
        copied: Mapping[str, bool],
        arch: Arch,
        device: torch.device,
    ) -> Launch:
        """How to call a kernel, which is compiled and loaded."""
        rows, kernel = math.prod(call.lead), None
        if rows and torch.cuda.is_current_stream_capturing():
            kernel = self._launched(lowered.source, device)
        elif rows:
            kernel = load(Kernel(lowered, arch.name).artifact)
        index = {n: k for k, n in enumerate(self._signature.names)}
        inputs = tuple((index[i.name], copied.get(i.name, False)) for i in lowered.graph.inputs)
        outputs = tuple(((*call.lead, *o.inner), o.dtype) for o in lowered.graph.outputs)
        structure, align = lowered.graph.structure, lowered.plan.target.align
        is_widest = align == WIDEST_ACCESS and not any(copied.values())
        return Launch(kernel, lowered.source, inputs, outputs, structure, device, is_widest)

    def _launched(self, source: str, device: torch.device) -> Callable:
        """The kernel of this text, which the device has: CUDA loads it there at its first launch.

        Raises ArgumentError where there is none.
        """
        for launch in list(self._launches.values()):
            if launch.kernel is not None and launch.source == source and launch.device == device:
                return launch.kernel
        raise ArgumentError(
            f"{self._signature.name}: the first call with arguments of this kind compiles or loads "
            "a kernel, which can not be captured into a CUDA graph; call it once before the "
            f"capture ({self._signature.name}.compile(...) compiles ahead of that call, for all "
            "processes)"
        )

    def _add_shortcut(self, call: Call, values: tuple, launch: Launch) -> None:
        """For the first few kinds of calls; the others are looked up."""
        if launch.kernel is None or not launch.is_widest or len(self._shortcuts) >= MAX_SHORTCUTS:
            return
        if has_one_twice(values):
            return  # a shortcut tells it from two tensors: it would take no call
        make = functools.partial(
            shortcut, self._signature, self._captures, call, values, self._trace(call)[1],
            launch.kernel, rows_like(math.prod(call.lead)),
        )  # fmt: skip
        added = make()
        if added is None:
            return
        with _SHORTCUTS:
            first = () if self._shortcuts or not call.lead else (self._of_these_sizes(make),)
            self._shortcuts += (*first, added)

    def _of_these_sizes(self, make: Callable[..., Callable]) -> Callable:
        """The shortcut of a first call's sizes, the first until it has missed some calls."""
        left = MAX_MISSES

        def missed():
            nonlocal left
            left -= 1
            if left <= 0:
                with _SHORTCUTS:
                    self._shortcuts = tuple(each for each in self._shortcuts if each is not first)

        first = make(missed=missed)
        return first

    def _warn_if_many(self, specs: tuple[Spec, ...]) -> None:
        for spec in specs:
            if spec.role is Role.STATIC:
                seen = self._statics.setdefault(spec.name, set())
                seen.add(spec.guard)
                if len(seen) == WARN_SPECIALIZATIONS:
                    warnings.warn(
                        f"{self._signature.name} was compiled for {WARN_SPECIALIZATIONS} values of "
                        f"{spec.name!r}: each one is a kernel of its own. If it is a number that "
                        f"changes, annotate it `{spec.name}: float` and it becomes an argument of "
                        "one kernel",
                        stacklevel=_frames_inside(),
                    )

    def __repr__(self) -> str:
        return f"<htile.rowwise {self._signature.name}>"


@torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo with htile: a second
def _call_of_htile_rowwise_is_not_supported_by_torch_compile(function, args, kwargs):
    """A graph break for `torch.compile`; `fullgraph=True` shows the name of this function."""
    return function(*args, **kwargs)


def _frames_inside() -> int:
    """How far up the stack the user's frame is, for `warnings.warn` of the caller."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and internal(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back
    return depth


def _run(launch: Launch, values: tuple, outs: tuple):
    """Allocate the outputs, launch on the current stream, return the user's structure."""
    arguments = [values[k].contiguous() if copy else values[k] for k, copy in launch.inputs]
    outs = outs or [_empty(shape, dtype, launch.device) for shape, dtype in launch.outputs]
    if launch.kernel is not None:
        launch.kernel(*arguments, *outs)
    return pytree.tree_unflatten(outs, launch.structure)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with memory. Raises UnsupportedError where torch makes another kind of tensor."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if type(made) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(made):
        return made
    raise UnsupportedError(
        "torch makes no plain tensors here, as inside torch.func (grad, vmap, jvp) and "
        "FakeTensorMode; call a rowwise function outside"
    )


def _with_plan(function: Rowwise, wanted: Mapping) -> Rowwise:
    return function.with_plan(**wanted)
