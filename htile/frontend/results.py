"""What a function returns, as the outputs of a graph."""

from __future__ import annotations

from math import prod

from ..errors import Location, ShapeError, TraceError, an
from .graph import Builder, Output
from .hints import NOTHING
from .ops import Varies
from .over_rows import OverRows
from .returned import returned_dtype
from .tensor import Ragged, Tensor, is_real


def names_of(paths: list[tuple]) -> list[str]:
    """`out` for a single result, keys and fields where there are any, else `out0`, `out1`..."""
    if paths == [()]:
        return ["out"]
    names = []
    for i, path in enumerate(paths):
        keys = [getattr(k, "key", getattr(k, "name", None)) for k in path]
        named = all(isinstance(k, str) for k in keys) and "_".join(keys).isidentifier()
        name = "_".join(keys) if named else f"out{i}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def output_of(builder: Builder, loc: Location, name: str, leaf: object) -> Output:
    if isinstance(leaf, Ragged):
        leaf._refuse()
    if is_real(leaf):
        if not leaf.numel():
            what = f"a tensor without elements, of shape {tuple(leaf.shape)}"
            raise ShapeError(NOTHING.format(f"{builder.name} returns {what}"), loc)
        remedy = "pass it as an argument, or return it outside"
        raise TraceError(f"{builder.name} returns a real tensor as {name}: {remedy}", loc)
    if not isinstance(leaf, Tensor) or leaf._builder is not builder:
        what = "None" if leaf is None else an(type(leaf).__name__)
        remedy = "return only tensors that are computed from the arguments"
        raise TraceError(f"{builder.name} returns {what} as {name}: {remedy}", loc)
    is_over = isinstance(leaf, OverRows)  # its node is what one row adds
    node = builder[leaf._node if is_over else leaf._current(loc)]
    value = node.value
    if value.varies is not Varies.ROW:
        what = f"the output {name} of {builder.name} does not depend on any row"
        remedy = "compute it outside the function, or combine it with a row"
        raise TraceError(f"{what}: {remedy}", node.loc or loc)
    is_row = value.spread or prod(value.inner) > 1
    if is_over:
        return Output(name, node.id, leaf.dtype, value.inner, is_row, over=leaf._over)
    return Output(name, node.id, returned_dtype(builder, value), value.inner, is_row)
