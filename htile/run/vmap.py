"""A call inside `torch.vmap`: the batch becomes the first dimension of the rows.

So `torch.vmap(f)(x)` is `f(x)`, in values and dtypes. Nested batches are several dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedError
from ..frontend.annotations import Matrix, PerRow, Scalar, Shared
from ..frontend.graph import Role
from ..frontend.roles import Signature

if TYPE_CHECKING:
    from .runner import Runner

_AS_WRITTEN: ContextVar[bool] = ContextVar("htile_bodies_as_written", default=False)


@contextlib.contextmanager
def bodies_as_written() -> Iterator[None]:
    """In here a call inside `torch.vmap` runs the Python function itself, in the caller's dtypes.

    `htile.testing` holds results against that.
    """
    token = _AS_WRITTEN.set(True)
    try:
        yield
    finally:
        _AS_WRITTEN.reset(token)


def is_inside(values: tuple) -> bool:
    """Whether `torch.vmap` maps over a tensor of the call, and no transform within it over another.

    What is within has the call first, such as `torch.func.vjp` of a weight in a batch of rows.
    """
    made = torch._C._functorch
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    mapped = [made.maybe_get_level(t) for t in tensors if made.is_batchedtensor(t)]
    return bool(mapped) and max(mapped) == max(map(made.maybe_get_level, tensors))


def call_over_batch(call: Callable, signature: Signature, values: tuple, out: object) -> object:
    """What `call`, a row-wise function, gives for the whole batch, as `torch.vmap` shows it.

    Raises UnsupportedError for `out=`, and for an argument of which the batch makes neither a row
    nor one value a row.
    """
    if _AS_WRITTEN.get():
        return signature.invoke(values)
    if out is not None:
        raise UnsupportedError(f"{signature.name}: out= inside torch.vmap; return the result")
    return _OverBatch.apply(call, signature, *values)


class _OverBatch(torch.autograd.Function):
    """Through it torch hands out the tensors that it maps over, each with its dimension."""

    @staticmethod
    def forward(call, signature, *values):
        raise AssertionError("it is called only for tensors that vmap maps over")

    @staticmethod
    def setup_context(ctx, inputs, output):
        """`torch.func` asks for it; nothing is saved."""

    @staticmethod
    def vmap(info, in_dims, call, signature, *values):
        whole = _with_batch(signature, info.batch_size, in_dims[2:], values)
        if not is_inside(tuple(whole)) and (name := call.name_over_rows(whole)):
            raise UnsupportedError(
                f"{signature.name}: its result {name} is reduced over all rows, which torch.vmap "
                "would take together; call it for each element of the batch, or outside torch.vmap"
            )
        k = signature._positional
        named = dict(zip(signature.names[k:], whole[k:], strict=True))
        return call(*whole[:k], **named), 0  # the batch is the first dimension of each result


def batched(
    run: Runner, batch: int, dims: tuple, values: tuple, lead: tuple[int, ...]
) -> tuple:
    """The arguments of a runner with the batch as the first dimension of the rows.

    dims: for each value the dimension that vmap maps over; None for one that is not mapped.
    """
    whole = []
    for spec, value, dim in zip(run.specs, values, dims, strict=True):
        if isinstance(value, torch.Tensor) and dim is not None:
            value = value.movedim(dim, 0)
            missing = 1 + len(lead) + len(spec.inner) - value.dim()
            value = value.reshape(batch, *(1,) * missing, *value.shape[1:])
        whole.append(value)
    return tuple(whole)


def mapped_and_shared(run: Runner, dims: tuple) -> tuple[str, ...]:
    """The names of the arguments that vmap maps over, although all rows of a call share them."""
    both = zip(run.specs, dims, strict=True)
    return tuple([
        spec.name for spec, dim in both
        if dim is not None and spec.role in (Role.COLUMN, Role.DEVICE_SCALAR, Role.MATRIX)
    ])  # fmt: skip


def shared_by_rows(function: str, name: str) -> str:
    """Why an argument may not differ from sample to sample, and what to do."""
    return (
        f"{function}: torch.vmap maps over {name}, which all rows of a call share; call {function} "
        "for each element of the batch, or outside torch.vmap"
    )


def _with_batch(
    signature: Signature, batch: int, dims: tuple[int | None, ...], values: tuple
) -> list[object]:
    """The values with the batch as the first dimension of the rows.

    dims: for each value the dimension that vmap maps over; None for one that is not mapped.
    """
    kinds = dict(zip(signature.names, signature.kinds, strict=True))
    whole = dict(zip(signature.names, values, strict=True))
    named = zip(signature.names, dims, strict=True)
    mapped = {name: dim for name, dim in named if isinstance(dim, int)}  # a static tuple has more
    ranks = {  # in one call, of the tensors whose role is told by their dimensions
        name: value.dim() - (name in mapped)
        for name, value in whole.items()
        if isinstance(value, torch.Tensor) and kinds[name] not in (PerRow, Scalar, Shared, Matrix)
    }
    per_row = [  # the dimensions of the rows that one call has, if each value makes a row
        1 + value.dim() - (name in mapped)
        for name, value in whole.items()
        if isinstance(value, torch.Tensor) and kinds[name] is PerRow
    ]
    rank = max([*ranks.values(), *per_row], default=0) if ranks else 0
    for name, dim in mapped.items():
        if kinds[name] is Matrix:
            raise UnsupportedError(shared_by_rows(signature.name, name))
        if kinds[name] is not PerRow and ranks.get(name, 0) < max(1, min(rank, 2)):
            raise UnsupportedError(
                f"{signature.name}: torch.vmap maps over {name}, which all rows of a call share; "
                f"call {signature.name} outside torch.vmap, with the batch as the first dimension "
                f"of each argument: {name} as a row, or as one value a row (htile.PerRow)"
            )
        value = whole[name].movedim(dim, 0)
        missing = rank - value.dim() + (kinds[name] is not PerRow)
        whole[name] = value.reshape(batch, *(1,) * missing, *value.shape[1:])
    # If only values of rows are mapped, the rows are repeated, unless these values make the rows.
    if rank in ranks.values() and not mapped.keys() & ranks.keys():
        name = max(ranks, key=ranks.get)
        whole[name] = whole[name].expand(batch, *whole[name].shape)
    return [*whole.values()]
