"""The sweeps in which a row is worked on.

Between two exchanges a thread does one sweep over its elements of the row. A row that is held in
registers is loaded once, and each sweep goes on from what the one before has computed. A row that
is worked on in loops over its chunks is read anew by each sweep, which computes again what it
needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from ..frontend.graph import Graph, Input, Output
from .choice.instructions import counting_cost, sweep_costs, value_costs
from .reductions import KTHVALUE, Part, Reduce
from .steps import Compute, Home


class Sweep(NamedTuple):
    """What a thread does between two exchanges.

    computes: what is computed, by id.
    rows, columns: inputs that it reads. If the row is held, only columns that no earlier sweep has
        read.
    parts: what its elements are added to.
    stores: what is written once it is computed.
    then: the exchanges that follow, and what is computed once a row between them.
    words: 32-bit registers for each element that are live at its widest point; of loops only.
    instructions: those of the code of each element; of loops only.
    is_loop: whether it goes over the chunks of the row.
    """

    computes: tuple[Compute, ...]
    rows: tuple[Input, ...] = ()
    columns: tuple[Input, ...] = ()
    parts: tuple[Part, ...] = ()
    stores: tuple[Output, ...] = ()
    then: tuple[Compute | Reduce, ...] = ()
    words: float = 1.0
    instructions: int = 0
    is_loop: bool = False

    @property
    def reduces(self) -> list[Reduce]:
        """The exchanges that follow it."""
        return [step for step in self.then if isinstance(step, Reduce)]

    def reads(self, home: Home) -> tuple[Input, ...]:
        """What it reads from global memory, if rows are at `home`."""
        return self.rows + self.columns if home is Home.REREAD else self.columns


class Sweeps:
    """All sweeps of a row, in order.

    loops: those that go over the chunks of the row.
    reduces: all reductions, in order.
    exchanges: how often threads wait for each other.
    slots: how many places of the exchange buffer the reductions take.
    scans: how many scans there are. Each takes a place for each vector of a thread.
    scan_words: 32-bit words of an element of all that they give.
    joint: the names of the entries whose results come from one exchange.
    has_wide_words: whether 64 bits are exchanged at a time, for several results or for integers.
    carries_two_stages: whether a loop carries reductions of two stages.
    words: registers for each element, at the widest point of all loops.
    """

    def __init__(self, graph: Graph, sweeps: Sequence[Sweep]):
        self.graph = graph
        self.all = tuple(sweeps)
        self.loops = [sweep for sweep in sweeps if sweep.is_loop]
        self.reduces = [reduce for sweep in sweeps for reduce in sweep.reduces]
        self.exchanges = sum(reduce.waits for reduce in self.reduces)
        self.slots = sum(reduce.slots for reduce in self.reduces)
        scanned = [id for reduce in self.reduces if reduce.is_scan for id in reduce.results]
        self.scans = len(scanned)
        self.scan_words = sum([graph[id].value.dtype.itemsize / 4 for id in scanned])
        at_once = {part.kind.name for r in self.reduces for part in r.parts if part.at_once}
        self.joint = tuple(sorted(at_once))
        dtypes = {graph[id].value.dtype for reduce in self.reduces for id in reduce.results}
        self.has_wide_words = bool(at_once) or torch.int64 in dtypes
        carried = {part for loop in self.loops for part in loop.parts}
        self.carries_two_stages = any(part.carries_two_stages for part in carried)
        self.words = max((loop.words for loop in self.loops), default=1.0)

    @cached_property
    def costs(self) -> tuple[int, int]:
        """Instructions for each element of the row, and those of them for MUFU."""
        found = [sweep_costs(self.graph, s.computes, s.parts) for s in self.all]
        if not self.loops:  # what a held row is reduced by
            reduces = [reduce for reduce in self.reduces if reduce.exchanges]
            found += [sweep_costs(self.graph, (), reduce.parts) for reduce in reduces]
        return sum([count for count, _ in found]), sum([special for _, special in found])

    @cached_property
    def counting_costs(self) -> int:
        """The part of `costs` that counts elements, in loops that need no registers for it."""
        parts = [part for reduce in self.reduces for part in reduce.parts]
        return sum([counting_cost(part) for part in parts if part.kind is KTHVALUE])

    @cached_property
    def value_costs(self) -> int:
        """Instructions of a thread for what its row has once."""
        steps = [step for sweep in self.all for step in (*sweep.computes, *sweep.then)]
        stored = [o for s in self.all for o in s.stores if not self.graph[o.id].value.spread]
        computes = [step for step in steps if isinstance(step, Compute)]
        return value_costs(self.graph, computes, len(stored))

    @cached_property
    def moved(self) -> tuple[int, int]:
        """How many rows and columns are loaded, without rows that are held; how many are stored."""
        loads = sum(len(s.rows) + len(s.columns) for s in self.all)
        return loads, sum(len(s.stores) for s in self.all)
