"""What the tensors of a call are to a kernel: device, alignment, dimensions, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError, GradientError, UnsupportedError
from ..frontend.annotations import Scalar, Static
from ..frontend.captures import freeze
from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Graph, Input, Output, Role
from ..frontend.roles import Signature, Spec, stands_in
from ..lower.vectors import ends_at_vector, vector_size


def call_key(
    captured: tuple, signature: Signature, values: tuple, outs: tuple, aliases: tuple
) -> object:
    """A key that differs for calls that need different launches; None for what no call takes."""
    if forward_ad._current_level >= 0:
        return None  # a tensor's key does not show whether it has a tangent
    try:
        key = (
            captured,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),  # this and the next one matter to shortcuts only
            torch.is_autocast_enabled("cuda"),
            has_one_twice(values),
            aliases,
            *map(_value_key, signature.kinds, values),
            *map(tensor_key, outs),
        )
        hash(key)
    except (TypeError, AttributeError, RuntimeError):
        return None  # a list, or a tensor without memory: `classify` will refuse it in words
    return key


def _value_key(kind: type | None, value: object) -> object:
    """One value's part of the key; numbers that are given at run time count by their type only."""
    if isinstance(value, torch.Tensor):
        return tensor_key(value)
    if type(value) is float and kind is not Static:
        return float
    if type(value) is int and kind in (float, Scalar) and abs(value) < 2**63:
        return float  # a larger one is no number that a kernel takes: `classify` says so
    return freeze(value)


def tensor_key(value: torch.Tensor) -> tuple:
    """A tensor's part of the key; its address counts by alignment."""
    return (
        type(value),
        value.dtype,
        value.shape,
        value.stride(),
        value.device,
        0 if value.is_meta else value.data_ptr() % ACCESS_BYTES,
        value.requires_grad,
        value.is_neg(),
        value.is_inference(),
    )


def has_one_twice(values: tuple) -> bool:
    """Whether one tensor is two of the arguments."""
    tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
    return len(set(tensors)) < len(tensors)


def device_of(signature: Signature, values: tuple) -> torch.device:
    """The device of all tensors. Raises ArgumentError where they differ."""
    named = _tensors(signature, values)
    if len({value.device for _, value in named}) > 1:
        listed = ", ".join(f"{name} on {value.device}" for name, value in named)
        raise ArgumentError(
            f"{signature.name}: expected all tensors on one device, got {listed}; "
            "move them with .to(device)"
        )
    return named[0][1].device


def is_distributed(values: Iterable[object]) -> bool:
    """Whether a DTensor is among them. There is none before torch's module of them is imported."""
    return any(is_dtensor(type(value)) for value in values)


def is_dtensor(kind: object) -> bool:
    """Whether it is the type of DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(kind, type) and issubclass(kind, module.DTensor)


def runs_kernels(device: torch.device) -> bool:
    """Whether calls with tensors of this device run a kernel; the reference serves all others."""
    return device.type == "cuda"


def _tensors(signature: Signature, values: tuple) -> list[tuple[str, torch.Tensor]]:
    named = zip(signature.names, values, strict=True)
    return [(name, value) for name, value in named if isinstance(value, torch.Tensor)]


def is_recorded(values: tuple) -> bool:
    """Whether torch traces the call, as `torch.export` does: it makes a graph of what is called."""
    if any(isinstance(value, torch.Tensor) and stands_in(type(value)) for value in values):
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    return any(mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def refuse_fake(signature: Signature, values: tuple) -> None:
    """Raise UnsupportedError for what torch traces with, where a kernel of tensors is asked for."""
    if is_recorded(values):
        raise UnsupportedError(
            f"{signature.name}: torch traces here, with FakeTensors; to see the kernel of a call "
            f"without data pass meta tensors to {signature.name}.inspect, "
            "torch.empty(..., device='meta')"
        )


def refuse_tracers(signature: Signature, values: tuple) -> None:
    """Raise UnsupportedError where torch.fx or torch.jit records what it sees of a call."""
    fx = sys.modules.get("torch.fx.proxy")
    is_fx = fx is not None and any(isinstance(value, fx.Proxy) for value in values)
    if is_fx or torch._C._is_tracing():
        tracer = "torch.fx.symbolic_trace" if is_fx else "torch.jit.trace"
        raise UnsupportedError(
            f"{signature.name}: {tracer} cannot record a call of a row-wise function; in what "
            "torch.export.export(module, args) records it is one operation"
        )


def without_modes() -> AbstractContextManager:
    """In here torch computes with numbers, also where it records what a program does."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def refuse_transforms(signature: Signature, values: tuple) -> None:
    """Raise UnsupportedError for `functionalize`, and for what is left of other transforms."""
    transforms = torch._C._functorch
    has_ended = transforms.peek_interpreter_stack() is None
    for name, value in _tensors(signature, values):
        if transforms.is_functionaltensor(value) or (
            has_ended and transforms.is_functorch_wrapped_tensor(value)
        ):
            raise UnsupportedError(
                f"{signature.name}: {name} is inside torch.func.functionalize, or comes of a "
                "transform that has ended, which is not supported; call it outside"
            )


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside those of transforms that have ended, as a backward pass behind them has it.

    The outer tensor says that it needs no gradient where an outer transform, or autograd, asks for
    one.
    """
    while torch._C._functorch.is_dead_tensor_wrapper(tensor):
        tensor = torch._C._functorch.unwrap_if_dead(tensor)
    return tensor


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a forward-mode tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def refuse_tangent(function: str, name: str, tensor: torch.Tensor) -> None:
    """Raise GradientError for a tensor whose tangent would be dropped."""
    if has_tangent(tensor):
        raise GradientError(
            f"{function}: {name} carries a forward-mode tangent, which is not carried on here; "
            f"pass forward_ad.unpack_dual({name}).primal"
        )


def is_inside_transform(values: tuple) -> bool:
    """Whether a transform of torch.func works on one of these values, or one has a tangent."""
    is_any = torch._C._functorch.peek_interpreter_stack() is not None
    if not is_any and forward_ad._current_level < 0:
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(is_any and is_wrapped(value) for value in tensors) or any(map(has_tangent, tensors))


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a gradient for the tensor may be asked for, in any transform around the call."""
    transforms = torch._C._functorch
    levels = transforms.get_interpreter_stack() or ()
    forward = [each.level() for each in levels if each.key() == transforms.TransformType.Jvp]
    while transforms.is_functorch_wrapped_tensor(tensor):
        if transforms.is_gradtrackingtensor(tensor):
            if transforms.maybe_get_level(tensor) not in forward:
                return tensor.is_floating_point()
        tensor = transforms.get_unwrapped(tensor)
    return tensor.requires_grad


def wants_gradients(values: tuple) -> bool:
    """Whether autograd records how the results depend on one of these values."""
    return torch.is_grad_enabled() and any(
        value.requires_grad for value in values if isinstance(value, torch.Tensor)
    )


def needs_copy(spec: Spec, tensor: torch.Tensor) -> bool:
    """Whether a row's elements are apart in memory."""
    whole = spec.role in (Role.ROW, Role.COLUMN)
    return whole and tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def splits_bundles(pieces: Iterable[Input | Output], tensor: torch.Tensor) -> bool:
    """Whether bundles of elements are not as aligned as they are wide."""
    widest = max((each.view.width for each in pieces if each.view is not None), default=1)
    if widest == 1:
        return False
    return _address_bits(tensor) % (widest * tensor.element_size()) > 0


def _address_bits(tensor: torch.Tensor) -> int:
    """The bits that are set in some row's address; the lowest of them is the alignment."""
    found = tensor.data_ptr() if tensor.device.type != "meta" else 0
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if length > 1:
            found |= stride * tensor.element_size()
    return found


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and strides of a contiguous copy."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def own_dimensions(spec: Spec, tensor: torch.Tensor, lead: tuple) -> tuple[bool | None, ...] | None:
    """For each leading dimension whether the tensor has it: True, False (size 1), None (missing).

    It is None as a whole if the tensor has them all.
    """
    if spec.role not in (Role.ROW, Role.PER_ROW):
        return None
    sizes = tensor.shape[: tensor.ndim - len(spec.inner)]
    missing = len(lead) - len(sizes)
    own = (None,) * missing + tuple(s == n for s, n in zip(sizes, lead[missing:], strict=True))
    return None if all(own) else own


def is_flat(tensor: torch.Tensor, lead: int) -> bool:
    """Whether the rows of a tensor with so many leading dimensions are equally far apart.

    The stride of a dimension of size 1 does not count, except for the last dimension, whose stride
    the kernel takes as the distance.
    """
    *sizes, size = tensor.shape[:lead]
    *strides, step = tensor.stride()[:lead]
    apart = step * size
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != apart:
            return False
        apart *= size
    return True


def alignment(graph: Graph, pieces: list[tuple[torch.Tensor | None, Input | Output]]) -> int:
    """The alignment class in bytes: 16 if every vector is as aligned as it is long, else the least.

    pieces: rows, columns and tables of the placed graph, and the tensor of each; None for a result
        that is allocated here, whose whole rows are as aligned as N allows. Rows that end inside a
        vector do not count, because they may begin anywhere (`Placement.shifted`).
    """
    least, vec = ACCESS_BYTES, vector_size(graph)
    ends_inside = (graph.multiple or graph.n) % vec > 0
    for tensor, piece in pieces:
        size, view = piece.dtype.itemsize, piece.view
        is_torn = view is not None and view.there(graph.n)
        is_torn = is_torn and not ends_at_vector(piece, graph.n, vec)
        if is_torn or (view is not None and view.is_of_groups):
            continue  # aligned pieces are loaded, or an element a vector
        if view is not None and not view.is_contiguous:
            least = min(least, size)
            continue
        own = size // view.width if view is not None else size
        is_row = not isinstance(piece, Input) or piece.role is Role.ROW
        if (ends_inside and is_row) or (tensor is None and view is None):
            continue
        steps = view.start[-1] * own if view is not None else 0
        steps |= view.groups[1][-1] * own if view is not None and view.groups else 0
        steps |= view.shape[-1] * own if tensor is None else _address_bits(tensor)
        aligned = steps & -steps or ACCESS_BYTES
        if aligned < min(vec * size, ACCESS_BYTES):
            least = min(least, aligned)
    return least
