"""Calls with DTensors: each process computes the rows that it has, and nothing is sent.

Rows may be split over the processes in their leading dimensions. What all rows share is whole in
each process, and its gradient there is that of the rows of this process: a DTensor with partial
sums, which torch adds up where they are needed. A row itself is never split. HTile does not gather
the parts of one, so such a call is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from ..frontend.graph import Output, Role
from ..frontend.ops import Op
from ..frontend.roles import PLAIN, Call, Spec, classify

if TYPE_CHECKING:
    from .rowwise import Rowwise


class _Rows(NamedTuple):
    """How the rows of a call lie on its mesh.

    lead: the leading shape of all rows.
    split: for each dimension of the mesh the leading dimension that it splits, or None.
    """

    lead: tuple[int, ...]
    split: tuple[int | None, ...]

    def placements(self, output: Output) -> tuple[Placement, ...]:
        """The placements of a result: split as the rows are, or sums of each process's rows."""
        of_sum = output.over is not None
        return tuple(
            Replicate() if k is None else Partial("sum") if of_sum else Shard(k)
            for k in self.split
        )  # fmt: skip

    def gradient_of(self, tensor: DTensor) -> tuple[Placement, ...]:
        """The placements of an argument's gradient: partial sums where it is whole for rows that
        are split."""
        return tuple(
            Partial("sum") if k is not None and type(own) is Replicate else own
            for k, own in zip(self.split, tensor.placements, strict=True)
        )


def call_on_local_rows(function: Rowwise, args: tuple, kwargs: dict) -> object:
    """What a row-wise function gives for DTensors, as DTensors that are split as the rows are.

    Raises UnsupportedError where a process alone cannot compute that.
    """
    signature = function._signature
    if "out" in kwargs and "out" not in signature.names:
        raise UnsupportedError(f"{signature.name}: out= with DTensors; return the result")
    local, outputs, rows, mesh = _localized(function, signature.bind(args, kwargs))
    k = signature._positional
    given = dict(zip(signature.names[k:], local[k:], strict=True))
    leaves, structure = pytree.tree_flatten(function(*local[:k], **given))
    results = [_whole(*each, rows, mesh) for each in zip(leaves, outputs, strict=True)]
    return pytree.tree_unflatten(results, structure)


def local_values(function: Rowwise, values: tuple) -> tuple:
    """The values of a call with DTensors that the kernel of this process gets.

    Raises what the call raises.
    """
    return _localized(function, values)[0]


def _localized(
    function: Rowwise, values: tuple
) -> tuple[tuple, Sequence[Output], _Rows, DeviceMesh]:
    """The values of this process, the results of the function, the rows and their mesh."""
    signature = function._signature
    named = dict(zip(signature.names, values, strict=True))
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    mesh = _mesh_of(signature.name, tensors)
    like = tuple(_stand_in(v) if isinstance(v, torch.Tensor) else v for v in values)
    call = classify(signature, like)
    rows = _rows(signature.name, call, tensors)
    request, _ = function._request(call, function._captures.fingerprint(), like)
    outputs = request.specialization.traced.outputs
    _refuse_maximum(signature.name, outputs, rows)
    named |= {name: _local(tensor, rows) for name, tensor in tensors.items()}
    return tuple(named.values()), outputs, rows, mesh


def have_whole_rows(tensors: Sequence[torch.Tensor], inner: int = 1) -> bool:
    """Whether a function of rows takes these tensors, of which one or more are DTensors.

    The first tensor is one of rows, and so are all others of its rank. The rest is what rows share.

    inner: how many of the last dimensions are a row.

    Dynamo follows it. It knows the types of placements by `isinstance` only (torch 2.11).
    """
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        return False
    first = tensors[0]
    whole = (Replicate(),) * first.device_mesh.ndim
    own = all(
        isinstance(p, Replicate) or (
            isinstance(p, Shard) and not isinstance(p, _StridedShard)
            and p.dim % first.ndim < first.ndim - inner
        )
        for p in first.placements
    )
    return own and all(
        each.device_mesh == first.device_mesh
        and each.placements == (first.placements if each.ndim == first.ndim else whole)
        for each in tensors
    )


def _mesh_of(function: str, tensors: dict[str, torch.Tensor]) -> DeviceMesh:
    """The mesh of all tensors. Raises UnsupportedError where they have none, or several."""
    first = next(name for name, tensor in tensors.items() if isinstance(tensor, DTensor))
    mesh = tensors[first].device_mesh
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            raise UnsupportedError(
                f"{function}: {first} is a DTensor and {name} is a {type(tensor).__name__}, which "
                "may differ from process to process; pass torch.distributed.tensor."
                f"distribute_tensor({name}, mesh, placements), or {first}.to_local() with it"
            )
        if tensor.device_mesh != mesh:
            raise UnsupportedError(
                f"{function}: {first} and {name} are on different meshes, {mesh} and "
                f"{tensor.device_mesh}; call {name}.redistribute, or make both on one mesh"
            )
    return mesh


def _stand_in(tensor: DTensor) -> torch.Tensor:
    """A tensor without data, of the size of the parts together."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _rows(function: str, call: Call, tensors: dict[str, DTensor]) -> _Rows:
    """How the rows of a call are split. Raises UnsupportedError where not all agree on that."""
    specs = {spec.name: spec for spec in call.specs if spec.name in tensors}
    places = {name: _places(function, specs[name], call, each) for name, each in tensors.items()}
    split: list[int | None] = []
    for k, found in enumerate(zip(*places.values(), strict=True)):
        split.append(next((place for place in found if place is not None), None))
        if split[k] is None:
            continue
        whose = next(name for name, own in places.items() if own[k] is not None)
        for name, tensor in tensors.items():
            wanted = _dimension(specs[name], call, tensor, split[k])
            if places[name][k] != (None if wanted is None else split[k]):
                _refuse(
                    function, name, tensor, k, Replicate() if wanted is None else Shard(wanted),
                    f"while {whose} has {_written(tensors[whose].placements)}",
                )  # fmt: skip
    return _Rows(call.lead, tuple(split))


def _places(function: str, spec: Spec, call: Call, tensor: DTensor) -> list[int | None]:
    """For each dimension of the mesh the leading dimension of the rows that it splits, or None."""
    is_of_rows = spec.role in (Role.ROW, Role.PER_ROW)
    own = tensor.ndim - len(spec.inner) if is_of_rows else 0
    places: list[int | None] = []
    for k, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            places.append(None)
            continue
        if type(placement) is not Shard:
            why = "which are neither split rows nor whole ones"
            _refuse(function, spec.name, tensor, k, Replicate(), why)
        dimension = placement.dim % tensor.ndim
        if dimension >= own:
            why, wanted = "but all rows share it: it is whole in each process", Replicate()
            if is_of_rows:
                why = "which splits each row: a row is whole in one process"
                wanted = Shard(0) if own else wanted
            _refuse(function, spec.name, tensor, k, wanted, why)
        places.append(len(call.lead) - own + dimension)
    return places


def _dimension(spec: Spec, call: Call, tensor: DTensor, place: int) -> int | None:
    """The dimension of a tensor that is this leading dimension of the rows.

    None for a tensor that lacks it, or that repeats over it.
    """
    if spec.role not in (Role.ROW, Role.PER_ROW):
        return None
    dimension = place - len(call.lead) + tensor.ndim - len(spec.inner)
    has_it = dimension >= 0 and tensor.shape[dimension] == call.lead[place]
    return dimension if has_it else None


def _refuse(
    function: str, name: str, tensor: DTensor, k: int, wanted: Placement, why: str
) -> NoReturn:
    """Raise UnsupportedError for a placement, in dimension `k` of the mesh, and name another."""
    instead = list(tensor.placements)
    instead[k] = wanted
    raise UnsupportedError(
        f"{function}: {name} has the placements {_written(tensor.placements)}, {why}; HTile sends "
        f"nothing between processes: pass {name}.redistribute(placements={_written(instead)})"
    )


def _written(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def _refuse_maximum(function: str, outputs: Sequence[Output], rows: _Rows) -> None:
    """Raise UnsupportedError for a maximum over rows that are split: torch's collectives may drop
    its NaNs, and a process without rows has none."""
    for output in outputs:
        if output.over is Op.MAX and any(k is not None for k in rows.split):
            raise UnsupportedError(
                f"{function}: the result {output.name} is a maximum over all rows, which are split "
                "over processes; return a value of each row and take the maximum of the result, or "
                "pass rows that redistribute has made whole"
            )


def _local(tensor: DTensor, rows: _Rows) -> torch.Tensor:
    local = tensor.to_local(grad_placements=rows.gradient_of(tensor))
    return local if type(local) in PLAIN else local.clone()  # which waits for what is on its way


def _whole(local: torch.Tensor, output: Output, rows: _Rows, mesh: DeviceMesh) -> DTensor:
    """The DTensor whose local part this process has computed."""
    lead = () if output.over is not None else rows.lead
    shape = torch.Size((*lead, *local.shape[len(lead) :]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), mesh, rows.placements(output), run_check=False, shape=shape,
        stride=strides,
    )  # fmt: skip
