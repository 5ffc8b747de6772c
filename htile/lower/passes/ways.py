"""Which of the ways to place a traced graph on one row its kernel is made of.

A row may be cut into pieces (`space.py`), or its parts may be computed of whole rows
(`by_column.py`). Few pieces are as fast as whole rows, and many are slow. So the ways are tried in
turn, and the one with the fewest nodes is taken.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod

from ...build.forks import renew_in_children
from ...errors import UnsupportedError
from ...frontend.graph import Builder, Graph, Node, Role
from ...frontend.ops import REDUCTIONS, Op
from .by_column import FEW_PIECES, choose_by_column, reduce_by_column
from .rewrite import rewrite
from .scans_of_joins import scans_of_joins
from .space import PADDED, TooLong, has_pairs, place, place_whole
from .sums_of_groups import of_whole_rows, with_own_shapes

# A kernel takes so many pieces of tensors. Each is a pointer and some strides, and a launch passes
# 32764 bytes at most.
MOST_TENSORS = 400
MOST_NODES = 1500  # nodes, where parts are chosen by the column: 1300 compile for a minute
FEW_NODES = 4  # nodes for each traced one, with which a kernel is not cut into many pieces
MOST_TRIED = 2 * MOST_NODES  # nodes of a placing, beyond which it is given up: it takes seconds
MORE_LIFTED = 16  # Joins stay if without them a graph had so many times a placed one's nodes.
LONGER = 2  # A way is given up once it has so many times the nodes of another.
SHALLOW = 64  # nodes, of which no chain comes near Python's limit of recursion
FRAMES_A_NODE = 8  # of Python's stack, that placing takes for each node of a chain
MORE_READ = 1.25  # Whole rows may take so many times as many elements as their parts.
_depth = threading.RLock()
renew_in_children(sys.modules[__name__], "_depth", threading.RLock)


def place_well(graph: Graph, in_groups: bool = True) -> Graph:
    """The placed graph of a traced one.

    Where rows would be cut into many pieces, parts of them are computed of whole rows if they can
    be, unless that reads much more. Where rows are refused either way, the error is that of the
    former.
    """
    if len(graph) < SHALLOW:
        return _with_scans_of_joins(graph, in_groups)
    with _deep_enough(graph):
        return _with_scans_of_joins(graph, in_groups)


@contextmanager
def _deep_enough(graph: Graph) -> Iterator[None]:
    """Let placing, which goes from a node to its operands, do so in a chain of all nodes.

    The limit is the process's, so one thread at a time changes it.
    """
    with _depth:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(before + FRAMES_A_NODE * len(graph))
        try:
            yield
        finally:
            sys.setrecursionlimit(before)


def _with_scans_of_joins(graph: Graph, in_groups: bool) -> Graph:
    """The placed graph, in which scans behind a start begin with it, unless that takes far more
    nodes: a row that begins elsewhere than in memory is loaded in smaller pieces."""
    joined, found = scans_of_joins(graph), None
    if joined is graph:
        return _with_sums_of_groups(graph, in_groups)
    with suppress(UnsupportedError):
        found = _with_sums_of_groups(joined, in_groups)
    try:
        other = _with_sums_of_groups(graph, in_groups)
    except UnsupportedError:
        if found is None:
            raise
        return found
    return found if found is not None and len(found) <= FEW_NODES * len(other) else other


def _with_sums_of_groups(graph: Graph, in_groups: bool) -> Graph:
    """The placed graph, in which sums over rows add up groups too, if that takes fewer nodes."""
    found, of_rows = None, of_whole_rows(graph)
    if of_rows is not graph:
        with suppress(UnsupportedError):
            found = with_own_shapes(_placed(of_rows, in_groups), graph)
    if found is None:
        return _placed(graph, in_groups)
    if len(found) > FEW_PIECES * len(graph):
        with suppress(UnsupportedError):
            return min(found, _placed(graph, in_groups), key=len)
    return found


def _placed(graph: Graph, in_groups: bool) -> Graph:
    best = refused = None
    with suppress(UnsupportedError):
        best = place(graph, in_groups, FEW_PIECES)
        if len(best) <= FEW_PIECES * len(graph):
            return best
    if in_groups and _has_groups_beyond(graph):
        with suppress(UnsupportedError, TooLong):
            found = place(graph, chosen=True, nodes=FEW_PIECES * len(graph))
            if len(found.inputs) <= FEW_PIECES * len(graph.inputs):
                return found
    whole, is_same = _in_whole_rows(graph, in_groups)
    chosen = _with_joins_chosen(graph, in_groups, (best, whole))
    is_left_out = chosen is None
    chosen = graph if chosen is None else chosen
    ways = [(chosen, False), (graph, False), (reduce_by_column(chosen), False)]
    ways += [(reduce_last(graph), False)]
    ways += [(graph, True)] if _has_reduced_rows(graph) else []
    is_only_cut = all([other is graph for other, _ in ways])
    if whole is not None and is_only_cut and len(whole) <= FEW_NODES * len(graph):
        return whole  # before rows are cut into many pieces, which takes long
    for other, by_use in dict.fromkeys(ways):
        known = [len(each) for each in (best, whole) if each is not None]
        most = LONGER * min(known) if known else None
        try:
            is_known = is_same and other is graph and not by_use
            found = whole if is_known else place(other, in_groups, by_use=by_use, nodes=most)
        except TooLong:
            is_left_out = True
            continue
        except UnsupportedError as error:
            refused = refused or error
            continue
        if best is None or (len(found) < len(best) and _read(found) <= MORE_READ * _read(best)):
            best = found
    if best is None and is_left_out:
        return whole
    if None not in (best, whole) and len(whole) < len(best):
        best = whole if _read(whole) <= MORE_READ * _read(best) else best
    if best is not None:
        return _with_parts_chosen(graph, _with_lifted_scans(graph, best, in_groups))
    for other in dict.fromkeys((graph, chosen, reduce_last(chosen))):
        with suppress(UnsupportedError):
            return _with_lifted_scans(graph, place(other, in_groups, apart=True), in_groups)
    moved = choose_by_column(graph, scans=True)
    ways = [(moved, False), (reduce_by_column(moved), False), (moved, True)]
    ways += [(reduce_last(moved), True)]
    for other, apart in dict.fromkeys(ways if moved is not graph else ()):
        with suppress(UnsupportedError):
            return place(other, in_groups, apart=apart)
    ways = (graph, reduce_by_column(graph), moved, reduce_by_column(moved), reduce_last(graph))
    for other in dict.fromkeys(ways if graph.multiple is None else ()):
        with suppress(UnsupportedError):
            try:
                found = place(other, in_groups=False, chosen=True, nodes=MOST_TRIED)
            except TooLong:
                count = f"more than {MOST_TRIED}"
            else:
                if len(found) <= MOST_NODES:
                    return _with_parts_chosen(graph, found)
                count = str(len(found))
            refused = UnsupportedError(_too_many(count), refused.loc)
    raise refused


def _with_joins_chosen(
    graph: Graph, in_groups: bool, known: tuple[Graph | None, ...]
) -> Graph | None:
    """The graph without joins that cut rows; None where it is far longer than a placed graph.

    known: the placed graphs that are known.
    """
    least = min([len(each) for each in known if each is not None], default=0)
    with suppress(TooLong):
        return choose_by_column(graph, nodes=MORE_LIFTED * (least or MOST_TRIED))
    if not least:
        try:
            place(graph, in_groups, nodes=MOST_TRIED)
        except (UnsupportedError, TooLong):
            return choose_by_column(graph)
    return None


def _in_whole_rows(graph: Graph, in_groups: bool) -> tuple[Graph | None, bool]:
    """The placed graph in which no axis is cut into pieces that are as long as a shorter one.

    Otherwise a row is cut into pieces of 32 elements where the 32 largest of it are a row, too,
    which are few enough to be numbers. None where no axis is shorter so, or rows are refused. The
    second result is whether nothing would be cut so in any case.
    """
    lengths = {node.value.inner[-1] for node in graph if node.value.spread and node.value.inner}
    longest = max(lengths, default=1)
    if not any([1 < size < longest and longest % size == 0 for size in lengths]):
        return None, False
    with suppress(UnsupportedError):
        return place_whole(graph, in_groups)
    return None, False


def _with_lifted_scans(graph: Graph, best: Graph, in_groups: bool) -> Graph:
    """The placed graph in which parts of scans are moved scans, where that has fewer nodes.

    A window that divides the row cuts it into pieces, of which each has a part of the scan.
    """
    if len(best) <= FEW_PIECES * len(graph):
        return best
    moved = choose_by_column(graph, scans=True)
    for other in dict.fromkeys((moved, reduce_by_column(moved)) if moved is not graph else ()):
        with suppress(UnsupportedError, TooLong):
            found = place(other, in_groups, nodes=len(best))
            best = found if _read(found) <= MORE_READ * _read(best) else best
    return best


def _with_parts_chosen(graph: Graph, best: Graph) -> Graph:
    """The placed graph whose joined rows are not cut, where that has far fewer nodes.

    A window that reaches over both ends of a padded row cuts the row into single elements.
    """
    has_few = len(best.inputs) <= FEW_PIECES * len(graph.inputs)
    if has_few or len(best) <= FEW_NODES * len(graph) or graph.multiple is not None:
        return best
    for other in dict.fromkeys((graph, reduce_by_column(graph), reduce_last(graph))):
        with suppress(UnsupportedError, TooLong):
            found = place(other, in_groups=False, chosen=True, nodes=len(best) // LONGER)
            best = found if _read(found) <= MORE_READ * _read(best) else best
    return best


def _too_many(nodes: str) -> str:
    return (f"a kernel of {nodes} operations, at most {MOST_NODES}: what is computed of a part of "
            "a row is computed again for each place that it is moved to, such as a convolution of "
            "a convolution, or the largest of a window in a gradient; take smaller windows, or "
            "make two functions of it")  # fmt: skip


def _has_groups_beyond(graph: Graph) -> bool:
    """Whether rows may be padded to whole groups, or groups cut back to a row.

    Then a joined row is reshaped, or what was reshaped is cut.
    """
    pairs = [(graph[i].op, node.op) for node in graph for i in node.inputs]
    return (Op.CAT, Op.RESHAPE) in pairs or (Op.RESHAPE, Op.SLICE) in pairs


def _has_reduced_rows(graph: Graph) -> bool:
    """Whether a reduction may be wanted as a row: of others its use changes nothing."""
    reductions = REDUCTIONS | {Op.KTHVALUE}
    return any([node.op in reductions and prod(node.value.inner) > 1 for node in graph])


def refuse_many_tensors(graph: Graph, placed: Graph) -> None:
    """Raise UnsupportedError where a kernel would take too many pieces of tensors."""
    pieces = len(placed.inputs) + len(placed.outputs)
    if pieces <= MOST_TENSORS:
        return
    rows = [graph[i.id].value.inner for i in graph.inputs if i.role is Role.ROW]
    lengths = sorted({shape[-1] for shape in rows if shape})
    told = ("pass parts of the rows to calls of their own, or groups as rows "
            "(x.unflatten(-1, (groups, -1)))")  # fmt: skip
    if len(lengths) > 1:
        told = f"rows have {' and '.join(map(str, lengths))} elements: pass rows of one length"
    elif any([has_pairs(graph, n) for n in lengths]):
        told = PADDED
    raise UnsupportedError(
        f"a kernel of {pieces} pieces and elements of tensors, at most {MOST_TENSORS}; {told}",
        graph[graph.outputs[-1].id].loc,
    )


def reduce_last(graph: Graph) -> Graph:
    """The graph whose reductions of an axis that is longer than the last one are of a last axis.

    An axis that is not the last is written out where it is reduced. Last, it may be the columns.
    """

    found = []

    def rule(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        shape = graph[node.inputs[0]].value.inner if node.op in REDUCTIONS else ()
        if len(shape) < 2 or node.arg in (None, -1) or shape[node.arg] <= shape[-1]:
            return None
        axes = *(each for each in range(-len(shape), 0) if each != node.arg), node.arg
        turned = new.add(Op.PERMUTE, inputs, axes, node.loc)
        found.append(node)
        return new.add(node.op, (turned,), -1, node.loc)

    turned = rewrite(graph, rule)
    return turned if found else graph


def _read(placed: Graph) -> int:
    """How many elements of rows of memory are read for each row, those one by one included."""
    found: dict[str, list[int]] = {}
    for i in placed.inputs:
        is_element = i.role is Role.PER_ROW and i.view is not None
        if i.role is Role.ROW or is_element:
            count = placed.n if i.view is None else i.view.count(placed.n) * i.view.width
            found.setdefault(i.name, [0, placed.n if i.view is None else prod(i.view.shape)])
            found[i.name][0] += 1 if is_element else count
    return sum([min(counted, whole) for counted, whole in found.values()])
