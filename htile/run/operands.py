"""What the tensors of a call are to a kernel: their device and alignment, which dimensions they
have of their own, which are copied first, which can not be used; and their part of a call's key."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError, GradientError, UnsupportedError
from ..frontend.captures import freeze
from ..frontend.graph import Graph, Role
from ..frontend.roles import Scalar, Signature, Spec, Static
from ..lower.enumeration import vector_size

WIDEST_ACCESS = 16  # bytes


def value_key(kind: type | None, value: object) -> object:
    """One value's part of the key; runtime numbers count by their type only."""
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
        value.data_ptr() % WIDEST_ACCESS if value.device.type != "meta" else 0,
        value.requires_grad,
        value.is_neg(),
        value.is_inference(),
    )


def has_one_twice(values: tuple) -> bool:
    """Whether one tensor is two of the arguments."""
    tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
    return len(set(tensors)) < len(tensors)


def are_rows_of_vmap(values: tuple) -> bool:
    """Whether the call is for one row already: `torch.vmap` of a function that calls this one."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    wrapped = torch._C._functorch.is_batchedtensor
    return any(map(wrapped, tensors)) and all(t.dim() <= 1 for t in tensors)


def device_of(signature: Signature, values: tuple) -> torch.device:
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


def refuse_gradients(signature: Signature, values: tuple) -> None:
    """Raise GradientError or UnsupportedError for tensors that a derivative is asked of."""
    tensors = [
        (name, value)
        for name, value in zip(signature.names, values, strict=True)
        if isinstance(value, torch.Tensor)
    ]
    for name, value in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise UnsupportedError(
                f"{signature.name}: {name} is inside torch.func (vmap, grad, jvp), which is not "
                "supported yet; call it outside, with the batch as leading dimensions"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
            raise GradientError(
                f"{signature.name}: {name} carries a forward-mode tangent, and HTile does not "
                f"compute gradients yet; pass forward_ad.unpack_dual({name}).primal"
            )
    if torch.is_grad_enabled():
        for name, value in tensors:
            if value.requires_grad:
                raise GradientError(
                    f"{signature.name}: {name} requires grad, and HTile does not compute gradients "
                    f"yet; pass {name}.detach(), or call it under torch.no_grad()"
                )


def needs_copy(function: str, spec: Spec, tensor: torch.Tensor) -> bool:
    """Whether the elements of a row are apart in memory, so that it is made contiguous."""
    if tensor.is_neg():
        raise UnsupportedError(
            f"{function}: {spec.name} is a negated view, whose memory holds the other sign; pass "
            f"{spec.name}.resolve_neg()"
        )
    whole = spec.role in (Role.ROW, Role.COLUMN)
    return whole and tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def as_copied(tensor: torch.Tensor) -> torch.Tensor:
    """The shape and strides of a contiguous copy."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def own_dimensions(spec: Spec, tensor: torch.Tensor, lead: tuple) -> tuple[bool | None, ...] | None:
    """For each leading dimension whether the tensor has it: True, False (size 1), None (missing).

    None as a whole if it has them all.
    """
    if spec.role not in (Role.ROW, Role.PER_ROW):
        return None
    sizes = tensor.shape[: tensor.ndim - len(spec.inner)]
    missing = len(lead) - len(sizes)
    own = (None,) * missing + tuple(s == n for s, n in zip(sizes, lead[missing:], strict=True))
    return None if all(own) else own


def alignment(graph: Graph, tensors: list[torch.Tensor]) -> int:
    """The alignment class: 16 if every vector is as aligned as it is long, else the least.

    In bytes. Outputs that are allocated here are always as aligned as N allows.
    """
    vec = vector_size(graph)
    least = WIDEST_ACCESS
    for tensor in tensors:
        size = tensor.element_size()
        steps = tensor.data_ptr() if tensor.device.type != "meta" else 0
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if length > 1:
                steps |= stride * size
        aligned = steps & -steps or WIDEST_ACCESS
        if aligned < min(vec * size, WIDEST_ACCESS):
            least = min(least, aligned)
    return least
