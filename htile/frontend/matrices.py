"""Products of a row and a matrix that all rows share: `F.linear(x, W)`, `x @ W`, `x @ W.T`.

The matrix is an argument that is annotated htile.Matrix, or the transpose of one. Both operands
have 16 bits, and sums are float32. So the left operand is a row argument of 16 bits, or a value
that `.to` has rounded to such a dtype, or one whose elements are unchanged elements of those. A row
times or divided by one value of the row is the same as the product times or divided by that value,
and becomes that. Nothing else is rounded without the user's word. Heads of a row, as in
`x.view(4, 16) @ W`, are multiplied one by one, and their products are stacked.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from ..errors import DtypeError, ShapeError, UnsupportedError
from .dtypes import HALVES, dtype_name
from .graph import Builder, Graph, Input, Node, Role
from .joins import stack
from .ops import MOVEMENTS, Op, Varies
from .parts import MOST_PARTS, unbind
from .tensor import Tensor, fail, node


class Found(NamedTuple):
    """A matrix argument, and whether it was transposed."""

    input: Input
    is_transposed: bool


def _matrix(x: Tensor) -> Found | None:
    """The matrix argument that a value is, or is the transpose of; None for other values."""
    if 0 in x._sizes:  # a part without elements
        return None
    builder, id, is_transposed = x._builder, x._id, False
    while builder[id].op is Op.PERMUTE and builder[id].arg == (-1, -2):
        id, is_transposed = builder[id].inputs[0], not is_transposed
    given = next((i for i in builder.inputs if i.id == id and i.role is Role.MATRIX), None)
    return None if given is None else Found(given, is_transposed)


def is_matrix(x: Tensor) -> bool:
    """Whether a value is a matrix argument, or the transpose of one."""
    return _matrix(x) is not None


def refuse_left(a: object, b: object, what: str) -> None:
    """Raise UnsupportedError for a matrix argument on the left of a row."""
    found = _matrix(a) if isinstance(a, Tensor) else None
    if found is not None:
        name = found.input.name
        left, right = (f"{name}.T", name) if found.is_transposed else (name, f"{name}.T")
        fail(UnsupportedError, f"{what} of {left}, an htile.Matrix, and what is multiplied from "
             f"the left: a row stands on the left of the matrix, write x @ {right} for {left} @ x")


def multiplied(x: object, matrix: Tensor, what: str) -> Tensor:
    """x @ matrix (..., N), of a row (K,) or up to 64 heads (..., K), and a matrix (K, N)."""
    found, (k, n) = _matrix(matrix), tuple(matrix._sizes)
    if matrix._builder.multiple is not None:
        fail(UnsupportedError, f"{what} in a function of rows of any length (dynamic_n=True): "
             "leave dynamic_n out")  # fmt: skip
    if isinstance(x, Tensor) and x.ndim == 1 and not x._value.spread:
        fail(UnsupportedError, f"{what} of one number of the row, expanded to ({x._sizes[0]},): "
             f"multiply the sums of {found.input.name} by that number, {found.input.name}.sum(...) "
             "is a column that all rows share")  # fmt: skip
    axes = x.ndim if isinstance(x, Tensor) and not is_matrix(x) else 0
    if not axes or (what == "mm" and axes > 2):
        shape = tuple(x._sizes) if isinstance(x, Tensor) else x
        fail(ShapeError, f"{what} of {shape} and the matrix {found.input.name}: expected a row "
             f"({k},) or heads (..., {k}) of a row on the left; a batch is leading dimensions of "
             "the row")  # fmt: skip
    if x._sizes[-1] != k:
        fail(ShapeError, f"{what} of a row of {x._sizes[-1]} elements and the matrix "
             f"{found.input.name}, whose columns have {k}: they must be as long; F.linear takes a "
             "matrix (N, K), and x @ W one of (K, N)")  # fmt: skip
    if axes > 1:
        heads = prod(x._sizes[:-1])
        if heads > MOST_PARTS:
            fail(UnsupportedError, f"{what} of {tuple(x._sizes)} and the matrix "
                 f"{found.input.name} ({k}, {n}): {heads} heads would be {heads} products, at most "
                 f"{MOST_PARTS} are written out; pass the heads as rows, in a tensor "
                 f"(..., {heads}, {k})")  # fmt: skip
        return stack([multiplied(head, matrix, what) for head in unbind(x)])
    left, factors = _left(x, found.input, what)
    given = Tensor(x._builder, found.input.id)
    product = node(Op.MATMUL, left, given, arg=found.is_transposed)
    for op, factor in factors:
        product = product * factor if op is Op.MUL else product / factor
    return product


def _left(x: Tensor, matrix: Input, what: str) -> tuple[Tensor, list[tuple[Op, Tensor]]]:
    """The left operand, of 16 bits, and what its product is multiplied or divided by.

    These are numbers of the row, the outermost one first.
    """
    builder, factors = x._builder, []
    value = builder[x._id]
    while value.op in (Op.MUL, Op.DIV) and _dtype(x) is None:
        rows = [i for i in value.inputs if builder[i].value.spread]
        others = [i for i in value.inputs if not builder[i].value.spread]
        if len(rows) != 1 or builder[others[0]].value.varies is Varies.SHARED:
            break
        if value.op is Op.DIV and value.inputs[0] != rows[0]:  # a number divided by the row
            break
        factors.append((value.op, Tensor(builder, others[0])))
        x = Tensor(builder, rows[0])
        value = builder[x._id]
    dtype = _dtype(x)
    if dtype is None and x._value.varies is Varies.ROW:
        dtype = _unchanged(builder, x._id)
        if dtype is not None:
            x = _in_memory(x, dtype)
            value = builder[x._id]
    if dtype is None:
        fail(UnsupportedError, f"{what} of a value that is computed in float32: tensor cores "
             f"multiply 16-bit floats; round it, x.to({matrix.dtype}), or multiply and "
             "divide after the product by what is one number of the row")  # fmt: skip
    if dtype is not matrix.dtype:
        names = f"{dtype_name(dtype)} and {dtype_name(matrix.dtype)}"
        fail(DtypeError, f"{what} of a row and a matrix of different dtypes, {names}: round the "
             f"row, x.to({matrix.dtype}), or pass {matrix.name} in {dtype}")  # fmt: skip
    if value.op is Op.CAST and builder[value.inputs[0]].op is Op.INPUT:
        given = Tensor(builder, value.inputs[0])
        x = given if _dtype(given) is dtype else x  # it had that dtype before
    return x, factors


def _dtype(x: Tensor) -> torch.dtype | None:
    """The 16-bit float that a value is exactly; None for what is computed in float32."""
    value = x._builder[x._id]
    if value.op is Op.INPUT:
        given = next(i for i in x._builder.inputs if i.id == value.id)
        return given.dtype if given.dtype in HALVES and given.role is Role.ROW else None
    return value.arg if value.op is Op.CAST and value.arg in HALVES else None


def _unchanged(builder: Builder, id: int) -> torch.dtype | None:
    """The 16-bit float whose unchanged elements a value has; None for what is computed in float32.

    These are parts of arguments and of rounded values in any order, and what is joined of them.
    """
    value = builder[id]
    if value.op is Op.INPUT:
        given = next(i for i in builder.inputs if i.id == id)
        return given.dtype if given.dtype in HALVES else None
    if value.op is Op.CAST:
        return value.arg if value.arg in HALVES else None
    if value.op is Op.LOOKUP:
        return _unchanged(builder, value.inputs[0])
    if value.op not in (*MOVEMENTS, Op.STOP):
        return None
    dtypes = {_unchanged(builder, i) for i in value.inputs}
    return dtypes.pop() if len(dtypes) == 1 else None


def _in_memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Unchanged elements as a row in memory: the argument that all of them are, or a new row."""
    builder, id = x._builder, x._id
    while builder[id].op is Op.RESHAPE:
        id = builder[id].inputs[0]
    whole = Tensor(builder, id)
    if _dtype(whole) is dtype and whole._value.inner == x._value.inner:
        return whole
    return node(Op.CAST, x, arg=dtype)  # which is exact


def check_uses(graph: Graph) -> None:
    """Raise UnsupportedError where a matrix is read by anything but a product."""
    matrices = {i.id: i.name for i in graph.inputs if i.role is Role.MATRIX}
    for id, name in matrices.items():
        for user in _users(graph, id):
            fail(UnsupportedError, f"{user.op.value} of {name}, which is annotated htile.Matrix: "
                 "it is only multiplied by rows, F.linear(x, W), x @ W or x @ W.T. A tensor whose "
                 "elements a row reads is annotated htile.Shared", user.loc)  # fmt: skip


def _users(graph: Graph, id: int) -> list[Node]:
    """What reads a matrix or its transpose, without products."""
    found = []
    for user in map(graph.__getitem__, graph.users(id)):
        is_turned = user.op is Op.PERMUTE and user.arg == (-1, -2)
        if user.op is not Op.MATMUL:
            found += _users(graph, user.id) if is_turned else [user]
    return found


def linear_of_a_matrix(input, weight, bias=None):
    """F.linear by a matrix argument: the products of a row or of heads with the matrix's rows."""
    product = multiplied(input, weight.T, "F.linear")
    return product if bias is None else product + bias
