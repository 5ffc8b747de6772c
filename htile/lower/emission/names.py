"""The names of the emitted text: of the user's parameters, of tensors and of every value.

They are given in the order in which a kernel is printed, so that `max0` comes before `max1`. The
plan's description and the pictures use the same names.
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...frontend.graph import Graph, Input, Node, Output, Role
from ...frontend.ops import Op
from ..following import Following
from ..periods import once, read_by_others
from ..reductions import FOLLOWING, MOMENTS, PEAK, SOFTMAX, Part, Reduce
from ..steps import ChunkLoop, Compute, Home, Load, OwnMaxima, Prefetch, Step
from ..vectors import ends_at_vector
from .expressions import CUTLASS_TYPES, literal, written
from .stored_ranks import read_beside, stored_ranks

if TYPE_CHECKING:
    from ..plan import Plan

# Names of the emitted module and of Python. CuTe-DSL shadows `pred` inside a dynamic `if`.
RESERVED = frozenset(
    {
        *keyword.kwlist,
        *CUTLASS_TYPES.values(),
        *("ElementwiseTileConfig", "ElementwiseKernelContext", "ElementwiseLoader"),
        *("ElementwiseStorer", "GlobalToRegLoader", "_", "float", "config", "ctx", "l", "I", "O"),
        *("OverRows", "Parts", "RowLoop", "RowsAhead"),
        *("MatmulKernelContext", "MatmulTileConfig", "TileRows", "transposed"),
        *("WarpMatmulConfig", "WarpMatmulContext"),
        *("as_row_values", "as_rows", "expand", "lead", "table_of", "view_of"),
        *(f"m{k}" for k in range(64)),
        *("blocks", "chunk", "cuda", "cute", "cutlass", "fake_arguments", "j", "k", "loader", "m"),
        *("LOGADD", "make_fake_tensor", "math", "MEAN", "pred", "range", "s", "stream"),
        *("tiled_copy", "worth"),
    }
)

CHOSEN_FROM = (Role.TAKEN, Role.TABLE)  # What is at an index is read of such an input.
# What a loop carries for several reductions at once.
CARRIED = {SOFTMAX: "pair", MOMENTS: "triple", PEAK: "peak", FOLLOWING: "sums"}
# Their results are named where a thread computes with its own maxima, and where they are reduced.
NAMED_LATER = (PEAK, FOLLOWING)


def kernel_name(graph: Graph) -> str:
    """The name of the host function: the user's function's, made an identifier."""
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in graph.name).strip("_")
    name = name if name and not name[0].isdigit() else f"kernel_{name}"
    return name + "_" if name in RESERVED or name in ("cutlass", "htile") else name


class Names:
    """Every name of one plan's text, and what is loaded at its start.

    values: of nodes that are computed, reduced or passed, by id.
    tensors: of inputs and outputs, in the order of the kernel's parameters: the parameter, or the
        piece of one (`views.py`). Elements of a result that lie side by side have the name of the
        first.
    places: of the others, how far behind the first each of them lies.
    arguments: of what the host function takes, in its order; an input may be a piece of one.
    uncut: the inputs and outputs whose arguments the kernel takes uncut: all of its tensors, if two
        of them are of one argument, or none. cut_before: the others, which the host function cuts.
    opening: the steps that load what is loaded first, and tell where rows end.
    fragments: of inputs, as tiles in shared memory (`sX`) or registers (`tXrX`).
    staged: of columns that are on their way to shared memory.
    carried: of what a loop carries, by part.
    moments, found: of what an exchange brings for later results, by part and by what follows.
    ranks: of all ranks of a chain together, by part.
    stored_ranks: results that are such ranks. unprinted: nodes that no more is made of.
    kept: of results that loops keep on chip (`Plan.kept`), and of shifted ones of stretches.
    held: of values that a stretch keeps for all elements of a thread.
    trees: of what a stretch reduces vector by vector, by the reduction's id.
    prefetched: of the chunks that are on their way to a loop, by the loop's place in the steps.
    zeros: of what loops count columns from that loops before them have counted, by their place.
    once, repeated: what is computed of one chunk, and what of it becomes that of every chunk.
    totals: of what a loop over rows adds up, by the result. next_values: of the numbers
        of the next row or rows, by the input. block, loop, ahead, workspace,
        combining, grid: of what else there is for such results (`rows.py`).
    """

    def __init__(self, plan: Plan):
        self.plan, graph = plan, plan.graph
        self.function = kernel_name(graph)
        self._taken = set(RESERVED) | {self.function, f"{self.function}_kernel"}
        self._counts: dict[str, int] = {}
        self.values = {i.id: self._value(i) for i in graph.inputs if i.role not in CHOSEN_FROM}
        self._arguments: dict[tuple[type, str], str] = {}
        self.tensors = {i: self._tensor(i) for i in graph.inputs}
        self.places: dict[Output, int] = {}
        for first, *others in graph.outputs_beside:
            self.tensors[first] = self._tensor(first)
            for output in others:
                self.tensors[output] = self.tensors[first]
                self.places[output] = output.view.start[-1] - first.view.start[-1]
        self.arguments = tuple(self._arguments.values())
        self.uncut = self._uncut()
        uncut = {*self.uncut}
        self.cut_before = [a for a in self.tensors if a not in uncut] if uncut else [*self.tensors]
        # What is at an index is loaded from a tensor, which is no value.
        self.values |= {i.id: self.tensors[i] for i in graph.inputs if i.role in CHOSEN_FROM}
        self.once = once(plan)
        self.repeated = read_by_others(plan, self.once)
        self.fragments: dict[Input, str] = {}
        self.carried: dict[Part, str] = {}
        self.moments: dict[Part, str] = {}
        self.found: dict[Following, str] = {}
        self.ranks: dict[Part, str] = {}
        self.stored_ranks = stored_ranks(plan)
        self.unprinted = read_beside(plan, self.stored_ranks)
        self.prefetched: dict[int, str] = {}
        self.zeros = {k: self._numbered("zero") for k in _counting_again(plan)}
        self.totals: dict[Output, str] = {}
        if graph.over_rows:
            self.block, self.loop = self._unique("block"), self._unique("row_loop")
            self.ahead, self.workspace = self._unique("rows_ahead"), self._unique("mParts")
            self.combining = self._unique(f"{self.function}_combine")
            self.grid = self._unique("grid")
            self.totals = {output: self._numbered("total") for output in graph.over_rows}
            self.next_values = {
                i: self._unique(f"row_{self.values[i.id]}")
                for i in plan.work.loaded if i.role is Role.PER_ROW
            }  # fmt: skip
        ends = plan.work.ends
        opening = itertools.takewhile(lambda s: isinstance(s, Load) or s in ends, plan.steps)
        self.opening = tuple(opening)
        for i in (step.input for step in self.opening if isinstance(step, Load)):
            if i.role is not Role.ROW or plan.rows_home in (Home.REGISTERS, Home.PACKED):
                self.fragments[i] = self._unique("tXr" + self.tensors[i][1:])
            elif plan.rows_home is Home.SHARED:
                self.fragments[i] = self._unique("s" + self.tensors[i][1:])
        self.staged = {i: self._unique("staged" + self.tensors[i][1:]) for i in plan.staged_columns}
        self.kept = {o: self._unique("kept" + self.tensors[o][1:]) for o in plan.kept}
        for i in self.staged if plan.numerics.in_loops else ():
            self.fragments[i] = self._unique("s" + self.tensors[i][1:])
        self._name_steps(plan.steps)
        self.held: dict[int, str] = {}
        self.trees: dict[int, str] = {}
        for stretch in plan.stretches:
            for part in stretch.carried:
                id = part.results[0]
                self.trees[id] = self._unique(f"{self.values[id]}_tree")
            for i in stretch.columns:
                where = "s" if i in self.staged else "tXr"
                self.fragments[i] = self._unique(where + self.tensors[i][1:])
            for id in [id for id in stretch.kept if id not in self.held]:
                self.held[id] = self._unique(f"held_{self.values[id]}")
            for output in stretch.shifted(plan):
                self.kept[output] = self._unique("kept" + self.tensors[output][1:])

    def operand(self, id: int) -> str:
        """The text of a value that is read: its name, or the number itself."""
        node = self.plan.graph[id]
        if node.op is Op.RESHAPE:
            return self.operand(node.inputs[0])
        return literal(node.arg, node.value.dtype) if node.op is Op.CONST else self.values[id]

    def expression(self, step: Compute, ctx: str = "ctx") -> str:
        """The text of what a step computes; `ctx` is the context that knows the columns."""
        node = self.plan.graph[step.id]
        if node.op is Op.LT and (end := self._end_of_columns(node)) is not None:
            return f"{ctx}.below({end})"
        args = tuple(map(self.operand, step.inputs))
        if step.id in self.once:
            args = tuple(map(self._of_one_chunk, step.inputs, args))
        return written(node, args, step.function, ctx)

    def _end_of_columns(self, node: Node) -> int | None:
        """The column below which a comparison holds, if that is so of whole vectors."""
        if node.id in self.once:
            return None
        columns, end = self.plan.graph.operands(node)
        is_known = columns.op is Op.INDEX and end.op is Op.CONST and not end.value.spread
        is_whole = is_known and end.arg % self.plan.numerics.vec_size == 0
        return end.arg if is_whole and columns.value.dtype is torch.int32 else None

    def _of_one_chunk(self, id: int, text: str) -> str:
        """An operand of what is computed of one chunk."""
        node = self.plan.graph[id]
        is_whole = node.value.spread and node.op is not Op.CONST
        is_whole = is_whole and (id not in self.once or id in self.repeated)
        return f"ctx.of_one_chunk({text})" if is_whole else text

    def _name_steps(self, steps: Sequence[Step]) -> None:
        """Names in the order of the text."""
        graph, numerics = self.plan.graph, self.plan.numerics
        for k, step in enumerate(steps):
            match step:
                case ChunkLoop():
                    for part in step.parts:
                        if part.kind not in NAMED_LATER:
                            self._fresh(part.results[0])
                        if part.kind in CARRIED:
                            self.carried[part] = self._numbered(CARRIED[part.kind])
                        else:
                            self.carried[part] = self.values[part.results[0]]
                    for i in step.reads:
                        if i not in self.fragments:
                            self.fragments[i] = self._unique("tXr" + self.tensors[i][1:])
                    if step.reads and self.plan.placement.prefetch and k not in self.prefetched:
                        self.prefetched[k] = self._numbered("prefetched")
                    self._name_steps(step.steps)
                case OwnMaxima(part):
                    if part not in self.carried:
                        self.carried[part] = self._numbered(CARRIED[part.kind])
                    for id in part.maxima:
                        self._fresh(id)
                case Prefetch():
                    loop = next(j for j in range(k, len(steps)) if isinstance(steps[j], ChunkLoop))
                    self.prefetched[loop] = self._numbered("prefetched")
                case Reduce():
                    for part in dict.fromkeys(step.parts):
                        if part.chain is not None:
                            name = self.ranks[part] = self._numbered("ranks")
                            each = {id: f"{name}[{k}]" for k, id in enumerate(part.results)}
                            self.values |= each
                    made = step.results if numerics.in_loops else step.made(graph)
                    for id in made:
                        if id not in self.values:
                            self._fresh(id)
                    part = step.parts[0]
                    if part.kind is MOMENTS and part.at_once and step.exchanges:
                        self.moments[part] = self._numbered("moments")
                    if step.following is not None and step.exchanges:
                        self.found[step.following] = self._numbered("found")
                case Compute(id) if id not in self.values and graph[id].op is not Op.RESHAPE:
                    self._fresh(id)

    def _unique(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def argument(self, piece: Input | Output) -> str:
        """The host function's parameter that an input or output is, or is a piece of."""
        return self._arguments[type(piece), piece.name]

    def _value(self, i: Input) -> str:
        is_whole = i.view is None and i.formula is None
        return self._unique(i.name) if is_whole else self._piece(i.name)

    def _tensor(self, argument: Input | Output) -> str:
        key = type(argument), argument.name
        if key not in self._arguments:
            if argument.formula is not None:
                self._arguments[key] = self._unique(argument.name)
            elif isinstance(argument, Input) and argument.role is Role.SCALAR:
                self._arguments[key] = self.values[argument.id]
            else:
                camel = "".join(part[:1].upper() + part[1:] for part in argument.name.split("_"))
                self._arguments[key] = self._unique(f"m{camel}")
        name = self._arguments[key]
        if argument.formula is not None:
            return self.values[argument.id]
        return name if argument.view is None else self._piece(name)

    def _uncut(self) -> list[Input | Output]:
        """What the kernel of the rows takes, if two pieces of it are of one argument, or nothing.

        A number that the host function computes is not among it, and a result over all rows, which
        a second kernel stores, is not either.
        """
        if len({*self.tensors.values()}) == len(self.arguments):
            return []  # no argument has two
        taken = [a for a in self.tensors if a.formula is None]
        taken = [a for a in taken if not isinstance(a, Output) or a.over is None]
        pieces = {self.tensors[a]: self.argument(a) for a in taken}
        return taken if len({*pieces.values()}) < len(pieces) else []

    def whole(self, i: Input) -> str:
        """The arguments of what loads a row or a column whole, and not by chunks."""
        end = self.end(i)
        return ", ".join([self.chunk(i), *([f"end={end}"] if end else [])])

    def chunk(self, i: Input) -> str:
        """The arguments of what loads a chunk of a row or of a column."""
        there = self.there(i)
        return ", ".join([self.tensors[i], *([f"there={there}"] if there else [])])

    def end(self, piece: Input | Output) -> str | None:
        """The column from which on nothing of a row is loaded or stored; None if all of it is."""
        if isinstance(piece, Input) and piece.end is not None:
            return self.operand(piece.end)
        if piece.view is None or (there := piece.view.there(self.plan.graph.n)) is None:
            return None
        is_told = isinstance(piece, Output) or self.there(piece) is None
        return str(there[1]) if is_told else None

    def there(self, i: Input) -> tuple[int, int] | None:
        """Which columns are in the rows of an input that comes in aligned pieces; None if all are.
        """
        if i.view is None:
            return None
        plan = self.plan
        is_told = not plan.placement.shifted  # by the end alone
        is_told = is_told and ends_at_vector(i, plan.graph.n, plan.numerics.vec_size)
        return None if is_told else i.view.there(plan.graph.n)

    def _piece(self, whole: str) -> str:
        """`x0`, `x1`: the name of the whole and a count."""
        return self._numbered(f"{whole}_" if whole[-1].isdigit() else whole)

    def _fresh(self, id: int) -> None:
        """`max0`, `max1`: the operation and a count."""
        self.values[id] = self._numbered(self.plan.graph[id].op.value)

    def _numbered(self, what: str) -> str:
        while True:
            count = self._counts.get(what, 0)
            self._counts[what] = count + 1
            if (name := f"{what}{count}") not in self._taken:
                self._taken.add(name)
                return name


def _counting_again(plan: Plan) -> list[int]:
    """The places of loops that compute something of columns of which a loop before them did so too.

    The compiler would keep that for all elements of a thread, if the loops are written out. Only
    random words are worth it.
    """
    graph, found, is_counted = plan.graph, [], False
    if not (plan.numerics.in_loops and plan.is_unrolled) or any(n.op is Op.PHILOX for n in graph):
        return []
    for k, step in enumerate(plan.steps):
        if isinstance(step, ChunkLoop):
            computes = [each for each in step.steps if isinstance(each, Compute)]
            if any(graph[each.id].op is Op.INDEX for each in computes):
                found += [k] if is_counted else []
                is_counted = True
    return found


def value_names(plan: Plan) -> dict[int, str]:
    """The name that the emitted text has for each value, by the id of its node."""
    return dict(Names(plan).values)
