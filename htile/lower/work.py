"""What one graph asks of a kernel, computed once for `choice`, `schedule` and the pictures.

`sweeps.py` describes the sweeps over a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Graph, Input, Node, Output, Role, memory_of
from ..frontend.ops import COLLECTIVES, SCANS, Op, Varies
from .choice.instructions import (
    ADDRESS,
    FREE_ADDRESSES,
    LEAVES,
    LOOKED_UP,
    sweep_costs,
    value_costs,
)
from .elements import Chosen, alike, elements, function_of_element, functions_of_alike
from .patterns import Function, ancestors, choose_function, is_largest_share, periods, strip
from .precision import seen_in_16_bits
from .ranks import chains
from .reductions import Part, Reduce, by_stage, carried_together, in_one_exchange, with_pairs
from .steps import Compute, Home
from .sweeps import Sweep, Sweeps
from .vectors import ends_at_vector, vector_size

# From so many inputs on, all are converted to float32 before the first is computed with. With fewer
# inputs, elements stay until then as they are in memory.
MANY_INPUTS = 6
SECTOR = 32  # bytes of memory that an access reads at least
LOAD_ORDER = (Role.ROW, Role.COLUMN, Role.PER_ROW, Role.DEVICE_SCALAR)  # of what is in memory


class Work:
    """What a graph asks of a kernel.

    loaded: the inputs in memory that are read, rows first: they are in flight while others load.
    rows, columns: those of them that are rows, and vectors that all rows share.
    beyond: the rows that reach beyond the ends of their tensor's (`View.there`). torn: those of
        them that begin or end inside a vector. cut: the results that end inside a vector before
        the columns do.
    lookups: rows of tables that indices choose. Where a row is held, each is loaded once; loops
        load a chunk of it wherever they read it.
    gathered: rows and columns whose elements the indices of another row choose.
    writes: the results that are whole rows.
    row_bytes, column_bytes: bytes of one element of all row inputs, and of all columns.
    narrowest: the same of the row that has the fewest and is no mask; 16 where there is none.
    is_wide: whether elements of the rows, in or out, have more than 16 bits.
    stages: how many rounds of reductions depend on each other.
    ends: what is computed before rows are loaded: where they may end (`Input.end`).
    elements: the node of a row by each value whose elements are some of it; see `elements.py`.
    early: what is computed as soon as rows are on their way: indices, and what is at them.
    early_in_loops: the same, if a row is worked on in loops. Rows of tables are not among it.
    has_pair: whether a maximum and the sum of exponentials below it can be one exchange.
    scans: the scans.
    needs_held: whether a row has to be held: there are scans, or elements of a rank.
    """

    def __init__(self, graph: Graph, fastmath: bool = False, in_tiles: bool = False):
        self.graph, self.fastmath, self.in_tiles = graph, fastmath, in_tiles
        read = {i for node in graph for i in node.inputs} | {out.id for out in graph.outputs}
        loaded = [i for i in graph.inputs if i.role in LOAD_ORDER and i.id in read]
        self.loaded = tuple(sorted(loaded, key=lambda i: LOAD_ORDER.index(i.role)))
        self.rows = tuple(i for i in self.loaded if i.role is Role.ROW)
        pieces = (*self.rows, *graph.outputs)
        viewed = [each for each in pieces if each.view is not None and each.over is None]
        beyond = [each for each in viewed if each.view.there(graph.n)] if viewed else viewed
        vec = vector_size(graph) if beyond else 1
        self.beyond = tuple([i for i in beyond if isinstance(i, Input)])
        torn = [each for each in beyond if not ends_at_vector(each, graph.n, vec)]
        self.torn = tuple([i for i in torn if isinstance(i, Input)])
        self.cut = tuple([o for o in torn if isinstance(o, Output)])
        self.columns = tuple(i for i in self.loaded if i.role is Role.COLUMN)
        self.lookups = tuple([n for n in graph if n.op is Op.LOOKUP and n.value.spread])
        sources = {n.inputs[0] for n in graph if n.op is Op.GATHER}
        self.gathered = tuple([i for i in graph.inputs if i.id in sources])
        self.writes = tuple(o for o in graph.outputs if o.is_row and o.over is None)
        self.row_bytes = sum(i.dtype.itemsize for i in self.of(Role.ROW))
        self.column_bytes = sum(i.dtype.itemsize for i in self.columns)
        sizes = [i.dtype.itemsize for i in self.rows if i.dtype is not torch.bool]
        self.narrowest = min(sizes, default=ACCESS_BYTES)
        self.elements = {} if in_tiles else elements(graph)
        self._seen_in_16_bits = seen_in_16_bits(graph)
        self._settled: dict[int, Chosen] = {}
        self.ends = self._ends()
        self.early = self._early()
        self._settled = {} if in_tiles else self._functions_of_alike()
        if self._settled:
            self.ends = self._ends()
            self.early = self._early()
        self.early_in_loops = tuple(s for s in self.early if not graph[s.id].value.spread)
        self.is_wide = any(a.dtype.itemsize > 2 for a in (*self.of(Role.ROW), *self.writes))
        self._held_words: dict[tuple, float] = {}
        self.chains = chains(graph)
        self._by_stage = by_stage(graph, self.chains)
        self._paired = with_pairs(graph, self._by_stage)
        self.stages = len(self._by_stage)
        self.has_pair = len(self._paired) < self.stages
        self.scans = tuple([node for node in graph if node.op in SCANS])
        self.needs_held = bool(self.scans or [n for n in graph if n.op is Op.KTHVALUE])

    def _ends(self) -> tuple[Compute, ...]:
        """Where rows may end, and what that is computed of."""
        return self._made({i.end for i in self.rows} - {None})

    def _early(self) -> tuple[Compute, ...]:
        """Loads of what is at indices that depend on no reduction, and their indices."""
        graph = self.graph
        found = [node for node in graph if node.op in (Op.TAKE, Op.LOOKUP)]
        takes = [node.id for node in found if not is_late(graph, node)]
        return tuple([step for step in self._made(takes) if step not in self.ends])

    def _made(self, ids: Iterable[int]) -> tuple[Compute, ...]:
        """All that is computed for these values of a row."""
        graph = self.graph
        made = [graph[id] for id in sorted(ancestors(graph, [graph[id] for id in ids]))]
        steps = [node for node in made if node.op not in LEAVES | {Op.RESHAPE}]
        return tuple([Compute(n.id, *self._function_of_value(n)) for n in steps])

    def _function_of_value(self, node: Node) -> Chosen:
        """The device function for a value that is computed early, and the nodes that it takes."""
        if node.id in self.elements or node.id in self._settled:
            return self._function(node)
        return Function.EXACT, node.inputs

    def _function(self, node: Node, in_loops: bool = False) -> Chosen:
        """The device function for a node, and the nodes that it takes."""
        near = node.value.spread and node.id in self._seen_in_16_bits
        if node.id in self._settled:
            return self._settled[node.id]
        if row := self.elements.get(node.id):
            return function_of_element(self.graph, node, row, self.fastmath, near)
        return choose_function(self.graph, node, self.fastmath, near, in_loops, self.in_tiles)

    def _functions_of_alike(self) -> dict[int, Chosen]:
        """Those of values that are computed alike, where each by itself would take another one."""
        graph, early = self.graph, {step.id for step in self.before}
        found: dict[int, Chosen] = {}
        for group in alike(graph):
            chosen = {node.id: self._function_of_value(node) if node.id in early
                      else self._function(node) for node in group}  # fmt: skip
            found |= functions_of_alike(graph, group, chosen, self.fastmath)
        divisors = {strip(graph, graph[graph[id].inputs[1]]).id for id in found
                    if graph[id].op is Op.DIV}  # fmt: skip
        for node in graph if divisors else ():  # the largest of what is divided equals its element
            if is_largest_share(graph, node):
                if strip(graph, graph[node.inputs[1]]).id in divisors:
                    found[node.id] = Function.SHARED, node.inputs
        return found

    @property
    def before(self) -> tuple[Compute, ...]:
        """What is computed before the first sweep."""
        return self.ends + self.early

    def source(self, node: Node) -> Input:
        """The table, or the row, that a node reads at an index."""
        return next(i for i in self.graph.inputs if i.id == node.inputs[0])

    def of(self, role: Role) -> list[Input]:
        return [i for i in self.graph.inputs if i.role is role]

    @property
    def is_map(self) -> bool:
        """Whether nothing is reduced: then bits do not depend on how threads divide a row."""
        return not self.stages

    @cached_property
    def periods(self) -> dict[int, int]:
        """After how many columns values repeat, by their ids."""
        return periods(self.graph)

    @cached_property
    def value_costs(self) -> int:
        """Instructions of a thread for what its row has before the first sweep, and addresses."""
        tensors = len(self.loaded) + len(self.lookups) + len(self.writes)
        addresses = ADDRESS * max(0, tensors - FREE_ADDRESSES)
        looked_up = LOOKED_UP * len(self.lookups)
        return value_costs(self.graph, self.before) + addresses + looked_up

    def rank_bytes(
        self, threads: int, threads_per_row: int, cluster_n: int, elements: int
    ) -> int:
        """Shared memory in which the threads of a CTA that hold rows list candidates for ranks."""
        each = threads, threads_per_row, cluster_n, elements
        return sum([chain.scratch(*each) for chain in self.chains])

    @cached_property
    def repeats_exp(self) -> bool:
        """Whether an exponential that a reduction needs is read after it: loops would repeat it."""
        crossing = set().union(*self.crossing(self.held, late_columns=False))
        return any(self.graph[id].op is Op.EXP for id in crossing)

    @cached_property
    def held(self) -> Sweeps:
        """A row that is held, each stage with an exchange of its own."""
        return self._hold(self._by_stage)

    @cached_property
    def held_joint(self) -> Sweeps:
        """A row that is held, with maxima and sums of exponentials in one exchange."""
        follows = None if self.has_pair else self.follows
        return self._hold(follows or self._paired, joined=follows is not None)

    @cached_property
    def follows(self) -> list[Reduce] | None:
        """All stages, the first two in one exchange, if no later element needs their maxima."""
        if self.stages < 2:
            return None
        joined = in_one_exchange(self.graph, self._by_stage)
        if joined is None:
            return None
        read = ancestors(self.graph, [self.graph[id] for id in joined[1].results])
        later = {*joined[1].parts[0].maxima}
        for node in self.graph:
            if not later.isdisjoint(node.inputs) and node.value.spread:
                if any(id not in read for id in self.graph.readers[node.id]):
                    return None
                later.add(node.id)
        return joined

    def _hold(self, reduces: Sequence[Reduce], joined: bool = False) -> Sweeps:
        """A sweep for each exchange, then one for each result, or for elements side by side.

        joined: whether one exchange brings the results of the first two stages.
        """
        graph = self.graph
        done = {node.id for node in graph if node.op in LEAVES} | {step.id for step in self.before}
        left = {i.id: i for i in self.columns}
        sweeps = []

        def columns_of(computes: tuple[Compute, ...], goals: tuple[int, ...]) -> tuple[Input, ...]:
            reads = {i for step in computes for i in step.inputs} | set(goals)
            return tuple(left.pop(i) for i in sorted(reads & left.keys()))

        def sweep(goals: tuple[int, ...], then: tuple = (), stores: tuple = ()) -> None:
            computes = self._needed(goals, done)
            columns = columns_of(computes, goals)
            sweeps.append(Sweep(computes, columns=columns, stores=stores, then=then))

        if joined:
            (first, second), reduces = reduces[:2], reduces[2:]
            sweep(first.operands(graph))
            part = second.parts[0]
            own = {*done, *part.maxima}
            computes = self._needed(second.operands(graph), own)
            columns = columns_of(computes, second.operands(graph))
            done |= {*first.results}
            needed = self._needed(part.references, done)
            then = (first, *needed, second)
            sweeps.append(Sweep(computes, columns=columns, parts=(part,), then=then))
            done |= {*second.results}
        for reduce in reduces:
            goals = reduce.operands(graph)
            sweep(goals[:1] if reduce.is_pair else goals, then=(reduce,))
            done.update(reduce.made(graph))
        for beside in graph.outputs_beside:
            sweep(tuple(output.id for output in beside), stores=beside)
        return Sweeps(graph, sweeps)

    def crossing(self, held: Sweeps, late_columns: bool) -> list[set[int]]:
        """For each exchange of a held row, the values made before it that are read after it."""
        exchanges = len(held.reduces)
        born = {i.id: 0 for i in self.loaded} | {step.id: 0 for step in self.before}
        read: dict[int, int] = {}
        for k, sweep in enumerate(held.all):
            k = min(k, exchanges)  # the sweeps of results follow the last exchange
            if late_columns:
                born |= {i.id: k for i in sweep.columns}
            born |= {step.id: k for step in sweep.computes}
            read |= {i: k for step in sweep.computes for i in step.inputs}
            read |= dict.fromkeys((o.id for o in sweep.stores), k)
            for reduce in sweep.reduces:
                read |= dict.fromkeys(reduce.operands(self.graph), k)
                # What a thread has scanned of its vectors waits for the rest in registers.
                born |= dict.fromkeys(reduce.made(self.graph), k + (not reduce.is_scan))
        return [{id for id in born if born[id] <= k < read.get(id, -1)} for k in range(exchanges)]

    def held_words(self, held: Sweeps, late_columns: bool) -> float:
        """Registers for each element of a held row, at the widest point.

        That is what is loaded at once at first, or what crosses an exchange.
        """
        key = held.joint, late_columns
        if key not in self._held_words:
            self._held_words[key] = self._widest(held, late_columns)
        return self._held_words[key]

    def _widest(self, held: Sweeps, late_columns: bool) -> float:
        loaded = self.rows + (held.all[0].columns if late_columns else self.columns)
        least = 1 if len(loaded) >= MANY_INPUTS else 0
        loading = sum(max(least, i.dtype.itemsize / 4) for i in loaded)
        loading += self._words(step.id for step in self.early)
        return max([loading, 1.0, *map(self._words, self.crossing(held, late_columns))])

    @cached_property
    def bytes_per_row(self) -> tuple[int, int]:
        """Bytes read and written for one row, without the columns that all rows share."""
        gathered = {i.name for i in self.gathered}
        read = [i for i in self.graph.inputs if i.role in (Role.ROW, Role.PER_ROW)
                and (i in self.loaded or i.name not in gathered)]  # fmt: skip
        written = [output for output in self.graph.outputs if output.over is None]
        sizes = ([memory_of(each, self.graph.n) for each in pieces] for pieces in (read, written))
        of_rows, of_results = map(sum, sizes)
        return of_rows + self.table_bytes + self._bytes_gathered(), of_results

    def _bytes_gathered(self) -> int:
        """Bytes read for one row of rows that are only read at indices of its columns.

        Each element is a sector of memory of its own, unless that is more than the whole row.
        """
        loaded, graph = {i.name for i in self.rows}, self.graph
        each = [i for i in self.gathered
                if i.name not in loaded and graph[i.id].value.varies is Varies.ROW]  # fmt: skip
        whole = [graph[i.id].value.inner[-1] * i.dtype.itemsize for i in each]
        return sum([min(bytes_, graph.n * SECTOR) for bytes_ in whole])

    @cached_property
    def table_bytes(self) -> int:
        """The bytes read for one row that are rows of tables."""
        return sum([self.bytes_looked_up(node) for node in self.lookups])

    def bytes_looked_up(self, node: Node) -> int:
        """The bytes that a lookup reads for one row: of the columns of the table that it needs."""
        first, end = node.arg or (0, self.graph.n)
        return memory_of(self.source(node), self.graph.n) * (end - first) // self.graph.n

    @cached_property
    def bytes_read_again(self) -> int:
        """Bytes of a row that loops over global memory read after they have read the row once."""
        read = [i for loop in self.loops.loops for i in loop.rows]
        again = sum(i.dtype.itemsize for i in read) - sum(i.dtype.itemsize for i in {*read})
        return self.graph.n * again

    @cached_property
    def loops(self) -> Sweeps:
        """As few loops as can be, then what is computed once a row.

        A loop carries the reductions of the next stage too, if it can carry all of them. The last
        loop stores the results that do not need its reductions.
        """
        graph = self.graph
        kept = {node.id for node in graph if node.op in LEAVES}
        kept |= {step.id for step in (*self.ends, *self.early_in_loops)}
        left, sweeps = self.writes, []
        waiting = with_pairs(graph, by_stage(graph)) if self.chains else list(self._paired)
        while waiting:
            first, *further = carried_together(graph, waiting)
            parts = tuple(dict.fromkeys(first.parts))
            if not further and (joined := in_one_exchange(graph, waiting)) is not None:
                waiting = joined
                first, *further = waiting[:2]
                sweeps.append(self._loop(kept, tuple(dict.fromkeys(first.parts)), ()))
                parts = further[0].parts[:1]
            del waiting[: 1 + len(further)]
            results = {id for reduce in (first, *further) for id in reduce.results}
            stores: tuple[Output, ...] = ()
            if left and not waiting and not results & ancestors(graph, left):
                stores, left = left, ()
            loop = self._loop(kept, parts, stores)
            then: tuple[Compute | Reduce, ...] = (first,)
            kept |= {*first.results}
            for following in further:
                references = dict.fromkeys(id for part in parts for id in part.references)
                then += (*self._needed(references, kept), following)
            kept |= results
            sweeps.append(loop._replace(then=then))
        if left:
            sweeps.append(self._loop(kept, (), left))
        values = tuple(output for output in graph.outputs if not output.is_row)
        computes = self._needed((output.id for output in values), kept, in_loops=True)
        return Sweeps(graph, [*sweeps, Sweep(computes, stores=values)])

    def _loop(self, kept: set[int], parts: tuple[Part, ...], stores: tuple[Output, ...]) -> Sweep:
        """A loop that adds to parts and stores results, from the inputs and `kept`."""
        operands = {id for part in parts for id in part.operands(self.graph)}
        goals = operands | {output.id for output in stores}
        maxima = {id for part in parts for id in part.maxima}
        computes = self._needed(goals, kept | maxima, in_loops=True)
        reads = goals.union(*(step.inputs for step in computes))
        rows = tuple(i for i in self.rows if i.id in reads)
        columns = tuple(i for i in self.columns if i.id in reads)
        # What each step makes, and what it reads. The widest point is found from the last one back.
        steps = [({i.id for i in rows}, set()), *(({i.id}, set()) for i in columns)]
        steps += [({step.id}, {*step.inputs}) for step in computes]
        steps += [(set(), {output.id}) for output in stores]
        steps.append((set(), operands))
        live: set[int] = set()
        words = 1.0
        for made, read in reversed(steps):
            live |= read
            words = max(words, self._words(live) + len(parts))
            live -= made
        count, _ = sweep_costs(self.graph, computes, parts)
        return Sweep(computes, rows, columns, parts, stores, (), words, count, is_loop=True)

    def homes_in_loops(self, rows: Home) -> dict[int, Home]:
        """Where values are that both sides of an exchange read, if loops read rows again."""
        loops = self.loops.loops
        made = Counter(s.id for loop in loops for s in loop.rows + loop.columns + loop.computes)
        again = {id for id, count in made.items() if count > 1 and self.graph[id].value.spread}
        # What is carried along with another reduction is not made for it, and may be made once.
        crossing = set().union(*self.crossing(self.held, late_columns=True))
        once = {id for id in crossing if not self.graph[id].value.spread}
        homes = dict.fromkeys(again, Home.RECOMPUTE) | dict.fromkeys(once, Home.REGISTERS)
        homes |= {i.id: Home.REREAD for i in self.columns if i.id in again}
        homes |= {i.id: rows for i in self.rows if i.id in again}
        return dict(sorted(homes.items()))

    def _words(self, ids: Iterable[int]) -> float:
        """Registers for an element of each of these nodes, without numbers and values of a row."""
        nodes = [self.graph[id] for id in ids]
        nodes = [node for node in nodes if node.id not in self.graph.equal_in_groups]
        vectors = [node.value for node in nodes if node.value.spread and node.op is not Op.CONST]
        return sum(max(1, value.dtype.itemsize / 4) for value in vectors)

    def _needed(
        self, goals: Iterable[int], done: set[int], in_loops: bool = False
    ) -> tuple[Compute, ...]:
        """What the goals still need, by id; adds it to `done`."""
        steps: dict[int, Compute] = {}
        todo = [id for id in goals if id not in done]
        while todo:
            id = todo.pop()
            if id not in steps:
                steps[id] = Compute(id, *self._function(self.graph[id], in_loops))
                todo += [i for i in steps[id].inputs if i not in done]
        done.update(steps)
        return tuple(steps[id] for id in sorted(steps))


def is_late(graph: Graph, take: Node) -> bool:
    """Whether the index of an element is known after a reduction only."""
    return any(graph[id].op in COLLECTIVES for id in ancestors(graph, [take]))
