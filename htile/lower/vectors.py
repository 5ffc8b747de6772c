"""How long the vectors of a row are, and whether rows are shifted: by N, dtypes and the graph."""

from __future__ import annotations

from math import gcd

from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Graph, Input, Output, Role
from ..frontend.ops import SCANS

WARP = 32  # threads
# Vectors end where a row ends, if such vectors have WHOLE_BYTES or more, in the mean of all rows.
# Otherwise vectors have ACCESS_BYTES and rows are shifted, if a row has SHIFTED_VECTORS vectors or
# more. Rows whose alignment is less than SHIFTED_ALIGN bytes are shifted too. All vectors have
# WORD_BYTES or more then, because words of so many bytes are shifted.
WHOLE_BYTES = 4
SHIFTED_VECTORS = 32
SHIFTED_ALIGN = 8
WORD_BYTES = 4
VECTOR_REGISTERS = 128  # One vector of each row and each column may take this many.


def vector_size(graph: Graph) -> int:
    """How many neighbouring elements a vector has: 16 bytes of the widest row or column.

    The size divides N and the length of shorter results, if rows are short or such vectors are long
    enough (`WHOLE_BYTES`; two elements for a scan, which takes as long for a vector as for an
    element). Then every vector of a contiguous tensor is as aligned as it is long. Other rows end
    inside a vector, and so do rows whose groups a warp would not hold otherwise. The size is
    smaller if a thread's registers would not hold a vector of each of many inputs, and if groups of
    columns are smaller.
    """
    rows, columns = _sizes(graph)
    inputs = len(columns) + sum(i.role is Role.ROW for i in graph.inputs)
    vec = ACCESS_BYTES // max(rows + columns)
    vec = min(vec, graph.group_size or vec)
    while vec > 1 and vec * inputs > VECTOR_REGISTERS:
        vec //= 2
    whole = gcd(graph.multiple or graph.n, vec)
    for output in graph.outputs:
        if output.view is None or output.over is not None:
            continue
        if there := output.view.there(graph.n):
            whole = gcd(whole, there[1])
    if _lies_apart(graph):
        return whole
    is_long = graph.n >= SHIFTED_VECTORS * vec and vec * min(rows + columns) >= WORD_BYTES
    is_short = whole * sum(rows) < WHOLE_BYTES * len(rows)
    is_short |= whole == 1 and any(node.op in SCANS for node in graph)
    splits_groups = (graph.group_size or 1) > WARP * whole  # a warp would not have all of one
    return vec if (is_long and is_short) or splits_groups else whole


def _sizes(graph: Graph) -> tuple[list[int], ...]:
    """Bytes of an element of each row, in and out, and of each column and table.

    A value with one element a group is not counted unless there is nothing else, because it is not
    loaded in vectors. If rows have single values only, the size is a word.
    """
    rows = [i for i in graph.inputs if i.role is Role.ROW]
    rows += [o for o in graph.outputs if o.is_row and o.over is None]
    columns = [i for i in graph.inputs if is_vector(graph, i)]
    found = tuple(
        [each.dtype.itemsize for each in pieces if each.view is None or not each.view.is_of_groups]
        for pieces in (rows, columns)
    )
    if any(found):
        return found
    return [each.dtype.itemsize for each in rows or columns] or [WORD_BYTES], []


def is_vector(graph: Graph, i: Input) -> bool:
    """Whether an input that is no row is loaded in vectors: a column, or rows of a table."""
    return i.role is Role.COLUMN or (i.role is Role.TABLE and graph[i.id].value.spread)


def _lies_apart(graph: Graph) -> bool:
    """Whether some piece has elements that are no neighbours in memory."""
    pieces = (*graph.inputs, *graph.outputs)
    views = [each.view for each in pieces if each.view is not None and each.over is None]
    return not all([view.is_contiguous or view.is_of_groups for view in views])


def _has_groups_apart(graph: Graph) -> bool:
    """Whether some piece has groups that do not follow each other in memory."""
    pieces = (*graph.inputs, *graph.outputs)
    views = [each.view for each in pieces if each.view is not None and each.over is None]
    return any([view.groups is not None for view in views])


def ends_at_vector(piece: Input | Output, n: int, vec: int) -> bool:
    """Whether a row of fewer than n elements is the first of the n columns, in whole vectors.

    Predicates of whole vectors then keep a kernel from what is behind the row's end.
    """
    if piece.view is None:
        return False
    there = piece.view.there(n)
    return there is not None and there[0] == 0 and there[1] % vec == 0


def is_shifted(graph: Graph, align: int) -> bool:
    """Whether rows are shifted: those that end inside a vector, or whose alignment is too little.

    align: as in `Target`.
    """
    vec = vector_size(graph)
    if _lies_apart(graph) or _has_groups_apart(graph):
        return False  # an element at a time, or a group
    if (graph.multiple or graph.n) % vec:
        return True
    rows, columns = _sizes(graph)
    least = min(rows + columns) * vec
    return align < min(SHIFTED_ALIGN, least) and least >= WORD_BYTES
