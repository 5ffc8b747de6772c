"""Rows of any length: `rowwise(dynamic_n=True)`.

The lengths of rows are divided into *buckets*, and one kernel serves all of a bucket. A function is
traced for the longest rows of it, its *capacity*. Whatever depends on the length depends on
`Op.LENGTH`, and the kernel reads the true one off its tensors. So the function may only work on
whole rows: a part of a row that may have any length has no length of its own.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import ShapeError, UnsupportedError
from .annotations import Inner, Shared
from .graph import Graph, Role
from .ops import MOVEMENTS, Op, Value
from .roles import Call, Signature, Spec

LEAST_CAPACITY = 64  # of rows of two or more elements
ONLY_WHOLE = (
    "{} of a row of any length (dynamic_n=True): only whole rows and single elements, as x[-1], "
    "are taken there. Write x.shape[-1] for the size of a row, torch.where to mask elements, pass "
    "parts as arguments, or leave dynamic_n out"
)
ACCESS_BYTES = 16  # The widest load or store moves this many, and a vector of the widest rows.


def capacity_of(n: int) -> int:
    """How many elements the longest rows of the bucket have that rows of n elements are in.

    It is a power of two or three quarters of one, and LEAST_CAPACITY or more. So less than a third
    of a row is idle, except for rows that are shorter than two thirds of LEAST_CAPACITY.
    """
    power = 1 << (n - 1).bit_length()
    capacity = 3 * power // 4 if 4 * n <= 3 * power else power
    return 1 if n == 1 else max(LEAST_CAPACITY, capacity)


def shortest_of(capacity: int) -> int:
    """How many elements the shortest rows of a bucket have."""
    is_power = capacity & (capacity - 1) == 0
    before = 3 * capacity // 4 if is_power else 2 * capacity // 3
    return before + 1 if capacity > LEAST_CAPACITY else 2


def in_bucket(signature: Signature, call: Call) -> Call:
    """The call as its bucket has it: rows of `capacity_of(n)` elements in place of n.

    Calls of a bucket whose rows are whole vectors have a kernel, and the others have one. Rows of
    one element are no row of any length: their kernel is the one that they have without dynamic_n.

    Raises UnsupportedError for arguments that are no whole rows.
    """
    if call.n == 1:
        return call
    capacity, n = capacity_of(call.n), call.n
    for spec, kind in zip(call.specs, signature.kinds, strict=True):
        is_marked = kind is not None and issubclass(kind, Shared | Inner)
        if spec.role in (Role.ROW, Role.COLUMN) and (is_marked or spec.inner != (n,)):
            what = f"has {spec.inner[-1]} elements a row"
            if is_marked:
                what = f"is annotated htile.{kind.__name__}"
            raise UnsupportedError(
                f"{signature.name}: {spec.name} {what}; where rows have any length "
                f"(dynamic_n=True), each row and each vector that all rows share has as many "
                f"elements as the longest row ({n}); leave dynamic_n out"
            )
    vector = vector_of(call.specs)
    specs = tuple(_at_capacity(spec, capacity) for spec in call.specs)
    multiple = 1 if n % vector else vector
    return call._replace(specs=specs, n=capacity, multiple=multiple, length=n)


def vector_of(specs: tuple[Spec, ...]) -> int:
    """How many elements a vector of the widest row or column has."""
    rows = [spec.dtype.itemsize for spec in specs if spec.role in (Role.ROW, Role.COLUMN)]
    return ACCESS_BYTES // max(rows)


def of_other_bucket(name: str, call: Call, graph: Graph) -> str:
    """Python text: whether `name`, a number of elements, is not of the call's bucket."""
    shortest = max(graph.least, shortest_of(call.n))
    tests, vector = [f"not {shortest} <= {name} <= {call.n}"], vector_of(call.specs)
    if vector > 1:
        tests.append(f"{name} % {vector}" if call.multiple > 1 else f"not {name} % {vector}")
    return " or ".join(tests)


def _at_capacity(spec: Spec, capacity: int) -> Spec:
    return replace(spec, inner=(capacity,)) if spec.role in (Role.ROW, Role.COLUMN) else spec


def refuse_parts(graph: Graph) -> None:
    """Raise UnsupportedError for a trace in which something is no whole row and no number."""
    for node in graph:
        has_rows = any(operand.value.spread for operand in graph.operands(node))
        is_moved = node.op in MOVEMENTS and has_rows
        is_many = node.op is Op.EXPAND and graph.n in node.arg
        is_other = node.value.spread and node.value.inner != (graph.n,)
        if node.op is Op.LOOKUP or is_moved or is_many or is_other:
            raise UnsupportedError(ONLY_WHOLE.format("a part or another shape"), node.loc)


class Longest(int):
    """The length of the longest rows of a bucket, in a trace: messages show it as n.

    It counts as the capacity, a number that the user's function does not have. So what tells of a
    shape tells of the user's rows, and a number that only equals the capacity is shown as it is.
    """

    def __repr__(self) -> str:
        return "n"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "n"


def as_counted(graph: Graph) -> Graph:
    """The graph of a trace with the capacity itself wherever it has `Longest`."""
    nodes = tuple(
        replace(node, arg=_counted(node.arg), value=_value_counted(node.value)) for node in graph
    )
    outputs = tuple(replace(output, inner=_counted(output.inner)) for output in graph.outputs)
    return replace(graph, n=int(graph.n), nodes=nodes, outputs=outputs)


def _counted(arg: object) -> object:
    if type(arg) is tuple:
        return tuple(_counted(each) for each in arg)
    return int(arg) if isinstance(arg, Longest) else arg


def _value_counted(value: Value) -> Value:
    return replace(value, inner=_counted(value.inner))


def check_length(name: str, graph: Graph, length: int) -> None:
    """Raise ShapeError for rows that are shorter than the function needs them."""
    if length < graph.least:
        raise ShapeError(
            f"{name}: rows of {length} elements, of which the function takes {graph.least}, by "
            f"topk or by an index; pass rows of at least {graph.least} elements"
        )
