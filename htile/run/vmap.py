"""A call inside `torch.vmap`: the batch becomes the first dimension of the rows.

So `torch.vmap(f)(x)` is `f(x)`, in values and dtypes. Nested batches are several dimensions. If
vmap maps over what all rows of a call share, that becomes a row of each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedError
from ..frontend.annotations import Matrix, PerRow, Scalar, Shared
from ..frontend.graph import Role
from ..frontend.roles import Signature

if TYPE_CHECKING:
    from .rowwise import Rowwise
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

    A transform within has the call first, such as `torch.func.vjp` of a weight in a batch of rows.
    """
    made = torch._C._functorch
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    mapped = [made.maybe_get_level(t) for t in tensors if made.is_batchedtensor(t)]
    return bool(mapped) and max(mapped) == max(map(made.maybe_get_level, tensors))


def call_over_batch(call: Rowwise, signature: Signature, values: tuple, out: object) -> object:
    """What `call`, a row-wise function, gives for the whole batch, as `torch.vmap` shows it.

    Raises UnsupportedError for `out=`, and for an argument of which the batch makes neither a row
    nor one value a row.
    """
    if _AS_WRITTEN.get():
        return signature.invoke(values)
    if out is not None:
        raise UnsupportedError(f"{signature.name}: out= inside torch.vmap; return the result")
    # A graph of its own has what is shared as rows; there is none of rows of any length.
    if not call._dynamic_n and _maps_over_shared(signature, values):
        return call._differentiable(values, False)
    return _OverBatch.apply(call, signature, *values)


def _maps_over_shared(signature: Signature, values: tuple) -> bool:
    """Whether the innermost vmap maps over what all rows of a call share, matrices excepted."""
    made, kinds = torch._C._functorch, dict(zip(signature.names, signature.kinds, strict=True))
    named = zip(signature.names, values, strict=True)
    tensors = {name: value for name, value in named if isinstance(value, torch.Tensor)}
    levels = {n: made.maybe_get_level(v) for n, v in tensors.items() if made.is_batchedtensor(v)}
    mapped = [name for name, level in levels.items() if level == max(levels.values())]
    ranks = _Ranks(kinds, {name: value.dim() for name, value in tensors.items()})
    is_any = any(kinds[name] is not Matrix and ranks.is_shared(name) for name in mapped)
    return is_any and ranks.has_rows and all(kinds[name] is not Matrix for name in mapped)


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


class _Ranks:
    """How many dimensions the tensors of one call have, which tells their roles.

    of_rows: of those whose role is told by their dimensions. most: of the rows.
    has_rows: whether there are any.
    """

    def __init__(self, kinds: dict[str, type | None], dims: dict[str, int]):
        self._kinds = kinds
        annotated = PerRow, Scalar, Shared, Matrix
        self.of_rows = {name: dim for name, dim in dims.items() if kinds[name] not in annotated}
        # those that the rows have, if each value makes a row
        per_row = [1 + dim for name, dim in dims.items() if kinds[name] is PerRow]
        self.most = max([*self.of_rows.values(), *per_row], default=0) if self.of_rows else 0
        self.has_rows = bool(self.most or per_row)

    def is_shared(self, name: str) -> bool:
        """Whether all rows of the call share the tensor."""
        least = max(1, min(self.most, 2))
        return self._kinds[name] is not PerRow and self.of_rows.get(name, 0) < least


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
    tensors = {name: v for name, v in whole.items() if isinstance(v, torch.Tensor)}
    dims_of_call = {name: v.dim() - (name in mapped) for name, v in tensors.items()}
    ranks = _Ranks(kinds, dims_of_call)
    for name, dim in mapped.items():
        if kinds[name] is Matrix:
            raise UnsupportedError(shared_by_rows(signature.name, name))
        if ranks.is_shared(name):
            raise UnsupportedError(
                f"{signature.name}: torch.vmap maps over {name}, which all rows of a call share; "
                f"call {signature.name} outside torch.vmap, with the batch as the first dimension "
                f"of each argument: {name} as a row, or as one value a row (htile.PerRow)"
            )
        value = whole[name].movedim(dim, 0)
        missing = ranks.most - value.dim() + (kinds[name] is not PerRow)
        whole[name] = value.reshape(batch, *(1,) * missing, *value.shape[1:])
    # If only values of rows are mapped, the rows are repeated, unless these values make the rows.
    of_rows = ranks.of_rows
    if ranks.most in of_rows.values() and not mapped.keys() & of_rows.keys():
        name = max(of_rows, key=of_rows.get)
        whole[name] = whole[name].expand(batch, *whole[name].shape)
    return [*whole.values()]
