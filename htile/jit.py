"""`@rowwise`: from a call to a launch. Specialize, look up, allocate, launch; and `inspect`.

A call is found again by the shapes, strides and dtypes of its tensors. The first one of its kind
goes the long way: roles, trace, lowering, compilation.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from .errors import ArgumentError, GradientError, UnsupportedError
from .frontend.captures import Captures, freeze
from .frontend.graph import Graph, Output, Role
from .frontend.roles import Call, Signature, Spec, Static, classify
from .frontend.tensor import Tensor as Symbolic
from .frontend.tensor import internal
from .frontend.trace import trace
from .lower import Lowered, lower, run_passes
from .lower.arch import DEFAULT, Arch, arch_named, arch_of_capability
from .lower.choice import vector_size
from .lower.compile import build, load
from .lower.plan import Target
from .reference import evaluate
from .report import Kernel

MAX_LAUNCHES = 4096  # remembered calls of one function; forgotten all at once beyond
WARN_SPECIALIZATIONS = 8
WIDEST_ACCESS = 16  # bytes


def rowwise(fn: Callable | None = None, *, fastmath: bool = False):
    """Make a function of one row into one fused kernel over all rows.

    Inside `fn` a tensor argument is one row of N elements; called, it takes tensors of shape
    `(*lead, N)` and returns what `fn` returns for each row: rows as `(*lead, N)`, one value a row
    as `(*lead)`, or `(*lead, 1)` with `keepdim=True`. Floating values are float32 inside; a row
    comes back in the dtype of the first 16- or 32-bit floating row argument, one value a row in
    float32, unless `.to(dtype)` says otherwise.

    CUDA tensors run the kernel, all others the reference: the same graph, evaluated by torch.

    fastmath: approximate tanh, log, log2, log10, sin and cos.

    Raises an HTileError that names the line for what can not be traced, and at a call for
    arguments that do not fit.
    """
    if fn is None:
        return functools.partial(rowwise, fastmath=fastmath)
    return Rowwise(fn, fastmath)


@dataclass(frozen=True)
class Launch:
    """One way to call: the kernel, and how to make its arguments from the caller's values.

    inputs: (index of the value, shape of the view that the kernel takes or None) in kernel order.
    outputs: (shape that is allocated, shape that is returned or None, dtype).
    """

    kernel: Callable | None
    inputs: tuple[tuple[int, tuple | None], ...]
    outputs: tuple[tuple[tuple, tuple | None, torch.dtype], ...]
    structure: object


class Rowwise:
    """A row-wise function; see `rowwise`."""

    def __init__(self, fn: Callable, fastmath: bool = False, wanted: Mapping | None = None):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._fastmath = fastmath
        self._wanted = dict(wanted or {})
        self._signature = Signature(fn)
        self._captures = Captures(fn)
        self._graphs: dict[object, tuple[Graph, Graph]] = {}
        self._launches: dict[object, Launch] = {}
        self._statics: dict[str, set] = {}

    def __call__(self, *args, **kwargs):
        values = self._signature.bind(args, kwargs)
        if any(type(value) is Symbolic for value in values):
            return self._fn(*args, **kwargs)  # called by a function that is being traced
        key = self._key(values)
        launch = None if key is None else self._launches.get(key)
        if launch is None:
            call = classify(self._signature, values)
            device = _device(self._signature, values)
            _refuse_gradients(self._signature, values)
            if device.type != "cuda":
                tensors = dict(zip(self._signature.names, values, strict=True))
                return evaluate(self._trace(call)[0], tensors, lead=call.lead)
            launch = self._prepare(call, values, device)
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            self._launches[key] = launch
        return _run(launch, values)

    def inspect(self, *args, arch: str | None = None, **kwargs) -> Kernel:
        """The kernel that a call with these arguments runs, without running it.

        The tensors may be on any device, `meta` included. arch: such as `sm_90a`; by default that
        of the tensors' GPU, else sm_90a.
        """
        values = self._signature.bind(args, kwargs)
        call = classify(self._signature, values)
        device = _device(self._signature, values)
        if arch is not None:
            target_arch = arch_named(arch)
        elif device.type == "cuda":
            target_arch = arch_of_capability(torch.cuda.get_device_capability(device))
        else:
            target_arch = DEFAULT
        lowered, _ = self._lower(call, values, target_arch)
        return Kernel(lowered, target_arch.name)

    def with_plan(self, **wanted) -> Rowwise:
        """This function with a plan of these properties in place of the default one.

        wanted: threads_per_row, cluster_n, vec_size (numerics: they change the order of sums),
        num_threads, loader ("shared" or "direct"), copy_bytes (placement: no bit changes).
        Raises LoweringError at the call where no plan has them.
        """
        return Rowwise(self._fn, self._fastmath, {**self._wanted, **wanted})

    def _key(self, values: tuple) -> object:
        """What tells calls apart that need different launches; None for what no call takes."""
        kinds = self._signature.kinds
        parts = map(_value_key, kinds, values)
        key = (self._captures.fingerprint(), torch.is_grad_enabled(), *parts)
        try:
            hash(key)
        except TypeError:  # a list, say: `classify` will refuse it in words
            return None
        return key

    def _trace(self, call: Call) -> tuple[Graph, Graph]:
        """The graph as traced, and after the passes."""
        key = (self._captures.fingerprint(), call.n, call.specs)
        if key not in self._graphs:
            self._warn_if_many(call.specs)
            traced = trace(self._fn, call.specs, call.n)
            self._graphs[key] = traced, run_passes(traced)
        return self._graphs[key]

    def _lower(self, call: Call, values: tuple, arch: Arch) -> tuple[Lowered, dict]:
        """The kernel's text, and for each tensor its (index among the values, 2-D view)."""
        traced, graph = self._trace(call)
        views = {
            spec.name: (index, _view(self._signature.name, spec, value, call))
            for index, (spec, value) in enumerate(zip(call.specs, values, strict=True))
            if isinstance(value, torch.Tensor)
        }
        rows = [views[i.name][1] for i in graph.inputs if i.role in (Role.ROW, Role.COLUMN)]
        target = Target(call.n, arch, _alignment(graph, rows), self._fastmath)
        return lower(traced, graph, target, self._wanted), views

    def _prepare(self, call: Call, values: tuple, device: torch.device) -> Launch:
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
        rows = math.prod(call.lead)
        if rows >= 2**31:
            raise UnsupportedError(f"{self._signature.name}: {rows} rows; the limit is 2^31 - 1")
        lowered, views = self._lower(call, values, arch)
        names = {name: index for index, name in enumerate(self._signature.names)}
        inputs = []
        for i in lowered.graph.inputs:
            view = views[i.name][1] if i.name in views else None
            value = values[names[i.name]]
            same = view is None or (view.shape == value.shape and view.stride() == value.stride())
            inputs.append((names[i.name], None if same else (view.shape, view.stride())))
        kernel = None
        if rows:
            kernel = load(build(lowered.source, lowered.function, arch.name))
            if folder := os.environ.get("HTILE_DUMP"):
                Kernel(lowered, arch.name).save(folder)
        outputs = tuple(_allocation(o, call, rows) for o in lowered.graph.outputs)
        return Launch(kernel, tuple(inputs), outputs, lowered.graph.structure)

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


def _value_key(kind: type | None, value: object) -> object:
    """One value's part of the key; pointers count by alignment, runtime numbers not at all."""
    if isinstance(value, torch.Tensor):
        return (
            type(value),
            value.dtype,
            value.shape,
            value.stride(),
            value.device,
            value.data_ptr() % WIDEST_ACCESS if value.device.type != "meta" else 0,
            value.requires_grad,
        )
    if type(value) is float and kind is not Static:
        return float
    return freeze(value)


def _frames_inside() -> int:
    """How far up the stack the user's frame is, for `warnings.warn` of the caller."""
    depth, frame = 1, sys._getframe(1)
    while frame is not None and internal(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back
    return depth


def _run(launch: Launch, values: tuple):
    """Allocate the outputs, launch on the current stream, return the user's structure."""
    arguments = []
    for index, view in launch.inputs:
        value = values[index]
        arguments.append(value if view is None else value.as_strided(*view))
    device = next(v.device for v in arguments if isinstance(v, torch.Tensor))
    results = []
    for shape, returned, dtype in launch.outputs:
        out = torch.empty(shape, dtype=dtype, device=device)
        arguments.append(out)
        results.append(out if returned is None else out.view(returned))
    if launch.kernel is not None:
        launch.kernel(*arguments)
    return pytree.tree_unflatten(results, launch.structure)


def _allocation(output: Output, call: Call, rows: int) -> tuple[tuple, tuple | None, torch.dtype]:
    """(shape that the kernel writes, shape that the user gets or None if the same, dtype)."""
    shape = (rows, call.n) if output.is_row else (rows,)
    returned = (*call.lead, call.n) if output.is_row else (*call.lead, *output.inner)
    return shape, None if returned == shape else returned, output.dtype


def _device(signature: Signature, values: tuple) -> torch.device:
    """The device of all tensors. Raises ArgumentError where they differ."""
    devices = {
        name: value.device
        for name, value in zip(signature.names, values, strict=True)
        if isinstance(value, torch.Tensor)
    }
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ArgumentError(
            f"{signature.name}: expected all tensors on one device, got {listed}; "
            "move them with .to(device)"
        )
    return next(iter(devices.values()))


def _refuse_gradients(signature: Signature, values: tuple) -> None:
    if torch.is_grad_enabled():
        for name, value in zip(signature.names, values, strict=True):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise GradientError(
                    f"{signature.name}: {name} requires grad, and HTile does not compute gradients "
                    f"yet; pass {name}.detach(), or call it under torch.no_grad()"
                )


def _view(function: str, spec: Spec, tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """The tensor as the kernel takes it: `(rows, N)`, `(rows,)`, or as it is."""
    if spec.role in (Role.ROW, Role.COLUMN) and call.n > 1 and tensor.stride(-1) != 1:
        raise UnsupportedError(
            f"{function}: the elements of {spec.name} are {tensor.stride(-1)} apart in memory "
            "along the last dimension, which is not supported yet; pass "
            f"{spec.name}.contiguous()"
        )
    if tensor.is_neg():
        raise UnsupportedError(
            f"{function}: {spec.name} is a negated view, whose memory holds the other sign; pass "
            f"{spec.name}.resolve_neg()"
        )
    if spec.role not in (Role.ROW, Role.PER_ROW):
        return tensor
    is_row = spec.role is Role.ROW
    if not is_row and spec.inner == (1,):
        tensor = tensor.squeeze(-1)
    full = (*call.lead, call.n) if is_row else call.lead
    flat = (math.prod(call.lead), call.n) if is_row else (math.prod(call.lead),)
    tensor = tensor.expand(full)
    try:
        return tensor.view(flat)
    except RuntimeError:
        raise UnsupportedError(
            f"{function}: the leading dimensions of {spec.name} (shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}) can not be merged into one, which is not supported yet; "
            f"pass {spec.name}.contiguous()"
        ) from None


def _alignment(graph: Graph, tensors: list[torch.Tensor]) -> int:
    """The alignment class: 16 if every vector is as aligned as it is long, else the least.

    In bytes. Outputs are allocated here and always as aligned as N allows.
    """
    vec = vector_size(graph)
    least = WIDEST_ACCESS
    for tensor in tensors:
        size = tensor.element_size()
        steps = tensor.data_ptr() if tensor.device.type != "meta" else 0
        if tensor.ndim == 2 and tensor.shape[0] > 1:
            steps |= tensor.stride(0) * size
        aligned = steps & -steps or WIDEST_ACCESS
        if aligned < min(vec * size, WIDEST_ACCESS):
            least = min(least, aligned)
    return least


