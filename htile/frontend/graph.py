"""The dataflow graph: frozen nodes that hold ids, shown as a networkx.DiGraph.

A `Graph` never changes. `Builder` makes one node after another and ends in a graph; a pass reads a
graph and builds a new one. Order is always by id: an operand's id is lower than its user's.
networkx is imported when `Graph.dag` is first asked for: a call needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, ClassVar

import torch

from ..errors import Location, TraceError
from .ops import INFER, SCANS, Op, Value, Varies, dtype_name
from .slopes import Slope

if TYPE_CHECKING:
    import networkx as nx

    from .formulas import Formula


class Role(Enum):
    """What a tensor or number is to the row; it comes from rank and annotation, never from size."""

    ROW = "row"  # (*lead, N), or (*lead, *inner) annotated htile.Inner[k]
    COLUMN = "column"  # (N,), shared by all rows, or any shape annotated htile.Shared
    TAKEN = "taken"  # a row or column of which only elements at indices are read, in placed graphs
    MATRIX = "matrix"  # (N, K) or (K, N), annotated htile.Matrix, which rows are multiplied by
    TABLE = "table"  # shared by all rows, of which indices choose rows, in placed graphs
    PER_ROW = "per-row"  # (*lead, 1), or (*lead) annotated htile.PerRow
    SCALAR = "scalar"  # a Python float, given at run time
    DEVICE_SCALAR = "device scalar"  # a 0-d tensor, or (1,) annotated htile.Scalar
    STATIC = "static"  # bool, int, str, None, dtype, annotated htile.Static


@dataclass(frozen=True, slots=True)
class Node:
    """One value. `inputs` are ids; `arg` is the static part of the operation."""

    id: int
    op: Op
    inputs: tuple[int, ...]
    arg: object
    value: Value
    loc: Location | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Which elements of a tensor a piece of it has: for column k those at `start + k * steps`.

    These have one number for each axis of the tensor behind the leading dimensions. `shape` is that
    of these axes, and `steps` are None for a piece of one element. A piece of a row or of a stack
    may reach beyond its ends (`there`).

    width: how many neighbouring elements of the tensor are one element of the piece, a bundle.
    of: the tensor's dtype, if the piece's is another one, because it has bundles.
    at: of a table (axis, step, count): the index of a row counts the axis in steps from the start,
        and there are so many.
    groups: (size, far), if columns are groups of `size` neighbours: column k lies at `start +
        k // size * far + k % size * steps`. None where `start + k * steps` says it all.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    steps: tuple[int, ...] | None
    width: int = 1
    of: torch.dtype | None = None
    at: tuple[int, int, int] | None = None
    groups: tuple[int, tuple[int, ...]] | None = None

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements of the piece, or of each group of it, are neighbours along the
        tensor's last axis."""
        return self.steps is None or self.steps == (0,) * (len(self.shape) - 1) + (self.width,)

    def there(self, n: int) -> tuple[int, int] | None:
        """Which of n columns are in the tensor: the first one, and the one behind the last.

        None if all are, as they have to be in a piece whose columns lie in groups, and in a row of
        a table. What the kernel has in other columns is any number of the row.
        """
        if not self.steps or self.at is not None or self.groups is not None:
            return None
        first, end = 0, n
        widths = (*(1,) * (len(self.shape) - 1), self.width)
        for start, step, size, width in zip(
            self.start, self.steps, self.shape, widths, strict=True
        ):
            if step:
                first = max(first, -(start // step))
                end = min(end, (size - width - start) // step + 1)
        return None if (first, end) == (0, n) else (first, end)

    @property
    def is_of_groups(self) -> bool:
        """Whether all columns of a group are one element of the tensor."""
        return self.groups is not None and not any(self.steps)

    def meets(self, other: View, n: int) -> bool:
        """Whether a thread may write the one piece while others read the other, of n columns.

        It may not if they have an element in common, unless both have it in the same column.
        """
        if self.steps is not None and self == other:
            return False
        return bool(self._places(n) & other._places(n))

    def _places(self, n: int) -> set[int]:
        """The elements as numbers of the flat tensor."""
        steps = self.steps or (0,) * len(self.start)
        flat = [prod(self.shape[k + 1 :]) for k in range(len(self.shape))]
        first = sum(each * size for each, size in zip(self.start, flat, strict=True))
        step = sum(each * size for each, size in zip(steps, flat, strict=True))
        count, far = self.groups or (n, steps)
        jump = sum(each * size for each, size in zip(far, flat, strict=True))
        starts = (first + k * jump for k in range(n // count))
        groups = [range(s, s + (count - 1) * step + 1, step) if step else (s,) for s in starts]
        return {place + k for group in groups for place in group for k in range(self.width)}

    def count(self, n: int) -> int:
        """How many elements of the tensor the n columns have: fewer where groups repeat them."""
        if self.groups is None:
            return n
        size, far = self.groups
        return n // size if self.is_of_groups else n if any(far) else size

    def elements(self, n: int) -> str:
        """`[0, 128:256]`, for a piece of n columns; `[0:32, 0:128]` for one in groups."""
        steps = self.steps or (0,) * len(self.start)
        first, end = self.there(n) or (0, n)
        size, far = self.groups or (n if first else end, (0,) * len(steps))
        shown = [
            _span(first, step, size, self.width, jump, n // size)
            for first, step, jump in zip(self.start, steps, far, strict=True)
        ]
        if self.at is not None:
            axis, step, count = self.at
            first = self.start[axis]
            shown[axis] = f"{first}:{first + step * (count - 1) + 1}"
            shown[axis] += f":{step}" if step > 1 else ""
        return f"[{', '.join(shown)}]"


def _span(first: int, step: int, size: int, width: int, far: int, count: int) -> str:
    """`0:128`, which elements of an axis are meant; `0:8:2` for each second one.

    far, count: where there are groups, how far one lies behind the other, and how many there are.
    """
    if not step:
        return _span(first, far, count, 1, 0, 1) if far else str(first)
    span = f"{first}:{first + (size - 1) * step + width}" + (f":{step}" if step > width else "")
    return f"{span} of {count} * {far}" if far else span


@dataclass(frozen=True, slots=True)
class Input:
    """A leaf that the caller passes: the parameter, its role, and its dtype in memory.

    view: which piece of the tensor it is; None for the whole.
    end: the node of an int32 of each row, from which column on nothing is read; None if all of the
        row may be. What is loaded there does not show.
    formula: how the number is computed of a Python float; None for the float itself, as it is.
    """

    name: str
    role: Role
    dtype: torch.dtype
    id: int
    view: View | None = None
    end: int | None = None
    formula: Formula | None = None
    over: ClassVar[None] = None  # as of an output that each row has

    def there(self, n: int) -> tuple[int, int] | None:
        """Which of n columns are in memory, as of `View.there`; None if all are."""
        return None if self.view is None else self.view.there(n)


@dataclass(frozen=True, slots=True)
class Output:
    """A result: its name, node, dtype in memory, and whether it is a row or one value per row.

    A row output has shape `(*lead, N)`, a per-row output `(*lead, *inner)`, inner `()` or `(1,)`.

    view: which piece of the result it is; None for the whole. Before a graph is placed, `inner` may
        be any shape, and `is_row` says whether its last axis comes from a row.
    over: the reduction over all rows, `Op.SUM` or `Op.MAX`, of which it is the result. It has shape
        `inner` then, without leading dimensions. None if each row has a result of its own.
    groups: into how many groups of neighbours the columns are divided, which such a sum adds up,
        too. `inner` is that of one group, once the graph is placed.
    """

    name: str
    id: int
    dtype: torch.dtype
    inner: tuple[int, ...]
    is_row: bool
    view: View | None = None
    over: Op | None = None
    groups: int = 1
    formula: ClassVar[None] = None  # as of an input that is not computed


def tensor_dtype(piece: Input | Output) -> torch.dtype:
    """The dtype of the tensor that an input or output is a piece of."""
    return (piece.view.of if piece.view is not None else None) or piece.dtype


def memory_of(piece: Input | Output, n: int) -> int:
    """The bytes that a piece has in memory: of a row of n columns, or of its one number."""
    is_row = piece.is_row if isinstance(piece, Output) else piece.role is not Role.PER_ROW
    count = n if piece.view is None else piece.view.count(n)
    return (count if is_row else 1) * piece.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Graph:
    """A function of one row, as dataflow; a node's id is its place in `nodes`.

    n: how many elements the rows have; the longest of them, before a graph is placed.
    `structure` rebuilds what the user's function returned (a torch pytree specification).
    multiple: if not None, the rows of a call have any multiple of this up to n elements
        (`rowwise(dynamic_n=True)`). What is there for n elements is there for so many then.
    least: how many they must have.
    scattered: of a joint graph the outputs that are gradients of tables (htile.frontend.scattered).
    """

    name: str
    n: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    structure: object
    nodes: tuple[Node, ...] = field(repr=False)
    multiple: int | None = None
    least: int = 1
    scattered: tuple = ()

    def fills(self, step: int) -> bool:
        """Whether all rows have the same multiple of so many elements."""
        return self.multiple is None and self.n % step == 0

    def __getitem__(self, id: int) -> Node:
        try:
            if id >= 0:
                return self.nodes[id]
        except (IndexError, TypeError):
            pass
        raise KeyError(id)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def last_line(self) -> Location | None:
        """The user's line of the last step that has one, for an error that is about no step."""
        return next((node.loc for node in reversed(self.nodes) if node.loc is not None), None)

    @cached_property
    def dag(self) -> nx.DiGraph:
        """Ids, each with its `node`, and an edge from each operand to its user; frozen."""
        import networkx as nx

        dag = nx.DiGraph()
        dag.add_nodes_from((node.id, {"node": node}) for node in self)
        dag.add_edges_from((i, node.id) for node in self for i in node.inputs)
        return nx.freeze(dag)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each node the ids of those that read it, as often as they do; its own if returned."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for i in node.inputs:
                found[i].append(node.id)
        for output in self.outputs:
            found[output.id].append(output.id)
        return tuple(map(tuple, found))

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments that are read, each once: an input may be a piece of one."""
        return tuple(dict.fromkeys(i.name for i in self.inputs))

    @cached_property
    def group_size(self) -> int | None:
        """How many columns a group of a placed graph has; None if it has no groups."""
        views = [each.view for each in (*self.inputs, *self.outputs) if each.view is not None]
        sizes = [node.arg[1] for node in self if node.op is Op.GROUPED]
        sizes += [view.groups[0] for view in views if view.groups is not None]
        return sizes[0] if sizes else None

    @cached_property
    def over_rows(self) -> tuple[Output, ...]:
        """The outputs that are reductions over all rows."""
        return tuple([output for output in self.outputs if output.over is not None])

    @cached_property
    def equal_in_groups(self) -> frozenset[int]:
        """The nodes whose elements are equal in each group of columns."""
        if self.group_size is None:
            return frozenset()
        views = ((i.id, i.view) for i in self.inputs)
        found = {id for id, view in views if view is not None and view.is_of_groups}
        for node in self:
            rows = [o.id for o in self.operands(node) if o.value.spread and o.op is not Op.CONST]
            is_equal = node.value.spread and rows and found.issuperset(rows)
            is_equal = is_equal and node.op not in SCANS
            if node.op is Op.GROUPED or is_equal or self._is_group_number(node):
                found.add(node.id)
        return frozenset(found)

    def _is_group_number(self, node: Node) -> bool:
        """Whether it is the number of the group that a column is in."""
        if node.op is not Op.RSHIFT:
            return False
        column, count = self.operands(node)
        is_shifted = column.op is Op.INDEX and count.op is Op.CONST
        return is_shifted and 1 << count.arg == self.group_size

    @cached_property
    def outputs_beside(self) -> tuple[tuple[Output, ...], ...]:
        """The outputs in order, those together that are elements of a result side by side."""
        found: dict[object, list[Output]] = {}
        for output in self.outputs:
            is_element = not output.is_row and output.view is not None and output.over is None
            key = (output.name, output.view.start[:-1]) if is_element else output
            found.setdefault(key, []).append(output)
        return tuple(map(tuple, found.values()))

    def users(self, id: int) -> list[int]:
        """The ids of the nodes that read this one, ascending."""
        return sorted(set(self.readers[id]) - {id})

    def operands(self, node: Node) -> tuple[Node, ...]:
        """The nodes that this one reads, in order."""
        return tuple([self[i] for i in node.inputs])

    def __str__(self) -> str:
        inputs = {i.id: self._told(i) for i in self.inputs}
        lines = [f"graph {self.name}, one row of N {self.length_text}"]
        for node in self:
            arg = dtype_name(node.arg) if isinstance(node.arg, torch.dtype) else repr(node.arg)
            arg = f"slope {node.arg.value}" if isinstance(node.arg, Slope) else arg
            arg = str(node.arg) if node.op is Op.CUSTOM else arg
            arg = node.arg + inputs[node.id] if node.op is Op.INPUT else arg
            arg = f"{node.arg[0].value} of {node.arg[1]}" if node.op is Op.GROUPED else arg
            read = [f"%{i}" for i in node.inputs] + [arg] * (node.arg is not None)
            what = f"{node.op.value} {', '.join(read)}"
            where = f"  # {node.loc.short}" if node.loc else ""
            lines.append(f"  %{node.id:<3} = {what:<32} : {node.value!s:<24}{where}".rstrip())
        for out in self.outputs:
            kind = "row" if out.is_row else f"per-row {list(out.inner)}"
            kind += f", {out.over.value} over all rows" if out.over is not None else ""
            name = out.name + (out.view.elements(self.n) if out.view else "")
            lines.append(f"  return {name} = %{out.id} as {dtype_name(out.dtype)} {kind}")
        return "\n".join(lines)

    @property
    def length_text(self) -> str:
        """`= 4096`, or `<= 4096` where the rows of each call may have another length."""
        return f"{'=' if self.multiple is None else '<='} {self.n}"

    def _told(self, i: Input) -> str:
        piece = i.view.elements(self.n) if i.view else ""
        if i.formula is not None and i.formula.op is not None:
            piece += f" as {i.formula.text(i.name)}"
        end = f", below %{i.end}" if i.end is not None else ""
        return f"{piece} ({i.role.value} {dtype_name(i.dtype)}{end})"


class Builder:
    """Makes the nodes of one graph; after `finish` it adds none.

    records: whether grad mode was on where a trace began, so that what is computed in
        `torch.no_grad()` or `torch.inference_mode()` inside the function has no gradient.
    declared: the names of arguments that are annotated htile.Shared.
    tables: the inputs of which indices in a row choose elements, tables whatever their shape is.
    """

    def __init__(self, name: str, n: int, multiple: int | None = None):
        self.name, self.n, self.multiple, self.least = name, n, multiple, 1
        self.records = False
        self.declared: frozenset[str] = frozenset()
        self.inputs: list[Input] = []
        self.tables: set[int] = set()
        self._nodes: list[Node] = []
        self._is_finished = False

    @classmethod
    def after(cls, graph: Graph, name: str) -> Builder:
        """A builder that has the nodes of a graph already, with their ids."""
        builder = cls(name, graph.n, graph.multiple)
        builder.least = graph.least
        builder.inputs, builder._nodes = [*graph.inputs], [*graph.nodes]
        return builder

    def __getitem__(self, id: int) -> Node:
        return self._nodes[id]

    def __len__(self) -> int:
        return len(self._nodes)

    def behind(self, id: int) -> set[int]:
        """A value and all that it is computed of."""
        known, todo = {id}, [id]
        while todo:
            new = set(self._nodes[todo.pop()].inputs) - known
            known |= new
            todo += new
        return known

    def add(
        self, op: Op, inputs: Iterable[int] = (), arg: object = None, loc: Location | None = None
    ) -> int:
        """Add an operation; its value is inferred. Returns the id."""
        inputs = tuple(inputs)
        value = INFER[op](tuple([self[i].value for i in inputs]), arg)
        return self._add(op, inputs, arg, value, loc)

    def add_input(
        self, name: str, role: Role, dtype: torch.dtype, value: Value, view: View | None = None,
        formula: Formula | None = None,
    ) -> int:  # fmt: skip
        """Add a leaf that the caller passes."""
        id = self._add(Op.INPUT, (), name, value, None)
        self.inputs.append(Input(name, role, dtype, id, view, formula=formula))
        return id

    def add_const(self, number: object, value: Value, loc: Location | None = None) -> int:
        """Add a number that is fixed in the kernel."""
        return self._add(Op.CONST, (), number, value, loc)

    def add_index(
        self, size: int, dtype: torch.dtype = torch.int64, loc: Location | None = None
    ) -> int:
        """Add the numbers from 0 to size - 1; a trace has them in int64, a kernel in int32."""
        return self._add(Op.INDEX, (), size, Value((size,), Varies.SHARED, dtype, spread=True), loc)

    def copied(self, node: Node, inputs: Iterable[int]) -> int:
        """Add a node of another graph, which is no input, with these operands."""
        if node.op in (Op.CONST, Op.INDEX, Op.LENGTH):
            return self._add(node.op, (), node.arg, node.value, node.loc)
        return self.add(node.op, inputs, node.arg, node.loc)

    def _add(self, op, inputs, arg, value, loc) -> int:
        if self._is_finished:
            text = "a symbolic value is used after its trace: return what is to be kept"
            raise TraceError(text, loc)
        id = len(self._nodes)
        self._nodes.append(Node(id, op, inputs, arg, value, loc))
        return id

    def finish(
        self, outputs: Iterable[Output], structure: object, nodes: Iterable[Node] | None = None
    ) -> Graph:
        """The graph of what was added, or of these of its nodes, numbered anew; verified."""
        self._is_finished = True
        inputs, nodes = tuple(self.inputs), tuple(self._nodes if nodes is None else nodes)
        more = self.multiple, self.least
        graph = Graph(self.name, self.n, inputs, tuple(outputs), structure, nodes, *more)
        verify(graph)
        return graph


def verify(graph: Graph) -> None:
    """Assert what every pass must keep: order, inferred values, named leaves, live outputs."""
    named = {i.id: i for i in graph.inputs}
    for id, node in enumerate(graph):
        assert node.id == id, f"not the node of id {id}: {node}"
        assert all([0 <= i < id for i in node.inputs]), f"operand after its user: {node}"
        if node.op is Op.INPUT:
            assert node.id in named and named[node.id].name == node.arg, f"unnamed input: {node}"
        elif node.op is Op.INDEX:
            assert node.value.inner == (node.arg,), f"of another row: {node}"
        elif node.op is not Op.CONST:
            values = tuple([o.value for o in graph.operands(node)])
            assert node.value == INFER[node.op](values, node.arg), f"value differs: {node}"
    assert graph.outputs, f"{graph.name} has no outputs"
    for out in graph.outputs:
        assert 0 <= out.id < len(graph), f"output {out.name} is no node"
