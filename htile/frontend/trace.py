"""From a user's function and the specs of its arguments to a `Graph`.

The function runs once, with a symbolic tensor for each argument that is not static. What torch or
Python refuses before HTile sees it is told again here, with the user's line.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree

from ..errors import HTileError, TraceError
from . import buckets as buckets  # fill the table, as what they import does
from . import channel_norms as channel_norms
from . import convolutions as convolutions
from . import eight_bits as eight_bits
from . import fake_quantize as fake_quantize
from . import flips as flips
from . import in_place as in_place
from . import joins as joins
from . import losses as losses
from . import matrices as matrices
from . import order_statistics as order_statistics
from . import pairs as pairs
from . import parts as parts
from . import pools as pools
from . import products as products
from . import row_losses as row_losses
from . import scans as scans
from . import selected as selected
from . import tables as tables
from . import windows as windows
from .captures import check_static, line_of
from .custom import CustomBackward
from .dynamic import Longest, as_counted, refuse_parts
from .factories import Factories
from .graph import Builder, Graph, Role
from .ops import Value, Varies, compute_dtype
from .promotion import NO_OPERAND
from .results import names_of, output_of
from .retold import RETOLD, retell
from .roles import Signature, Spec, written
from .tensor import Tensor

_VARIES = {
    Role.ROW: Varies.ROW, Role.PER_ROW: Varies.ROW, Role.COLUMN: Varies.SHARED,
    Role.MATRIX: Varies.SHARED,
}  # fmt: skip


def trace(
    fn: types.FunctionType, specs: Iterable[Spec], n: int, multiple: int | None = None,
    backward: CustomBackward | None = None,
) -> Graph:  # fmt: skip
    """The graph of `fn` for a row of `n` elements; `specs` say what each parameter is.

    multiple: of rows of up to `n` elements, as for `Graph`. backward: the user's backward pass.

    A parameter without a spec keeps its default. Raises an HTileError with the user's line.
    """
    signature, specs, loc = Signature(fn), tuple(specs), line_of(written(fn))
    check_static(fn, {spec.name: spec.value for spec in specs if spec.role is Role.STATIC})
    n = n if multiple is None else Longest(n)
    builder = Builder(re.sub(r"[^\w<>]", "_", fn.__name__), n, multiple)
    builder.records = torch.is_grad_enabled()
    builder.declared = signature.shared
    values = dict(zip(signature.names, signature.defaults, strict=True))
    values |= {spec.name: _argument(builder, spec) for spec in specs}
    try:
        with Factories(builder):
            result = (backward or signature.invoke)(tuple(values.values()))
    except RETOLD as error:
        retell(error)
        raise
    except HTileError as error:
        _name_the_absent(error, [name for name, value in values.items() if value is None])
        raise
    leaves, structure = pytree.tree_flatten_with_path(result)
    if not leaves:
        raise TraceError(f"{builder.name} returns no tensor: return what it computes", loc)
    names = names_of([path for path, _ in leaves])
    named = zip(names, leaves, strict=True)
    outputs = [output_of(builder, loc, name, leaf) for name, (_, leaf) in named]
    graph = builder.finish(outputs, structure)
    if Role.MATRIX in [spec.role for spec in specs]:
        matrices.check_uses(graph)
    if multiple is not None:
        graph = as_counted(graph)
        refuse_parts(graph)
    return graph


def _argument(builder: Builder, spec: Spec) -> object:
    if spec.role is Role.STATIC:
        return spec.value
    varies, spread = _VARIES.get(spec.role, Varies.SCALAR), spec.role in (Role.ROW, Role.COLUMN)
    inner = tuple(spec.inner) if builder.multiple is None or not spread else (builder.n,)
    value = Value(inner, varies, compute_dtype(spec.dtype), spread=spread)
    return Tensor(builder, builder.add_input(spec.name, spec.role, spec.dtype, value))


def _name_the_absent(error: HTileError, absent: list[str]) -> None:
    """Say which argument is the None that was computed with, if the user's line names one."""
    words = set(re.findall(r"\w+", error.loc.text)) if error.loc else ()
    named = [name for name in absent if name in words]
    if named and error.message == NO_OPERAND.format("NoneType"):
        given = f"the argument {named[0]} is None; write `if {named[0]} is not None:` before it"
        raise TraceError(f"{error.message}: {given}", error.loc) from None
