"""The plan: everything that the emitted kernel does, decided.

*Numerics* say which thread holds which element, so in which order sums are taken. *Placement* says
how rows get to threads and back. The steps follow from the two and from what the graph asks for.
`emit` prints a plan and decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property

from ..build.arch import Arch
from ..frontend.graph import Graph
from .describe import describe, describe_layout
from .reductions import SUM, VERY_LONG_N, Part
from .schedule import list_steps
from .steps import ColumnLoop, Home, Step
from .work import Sweeps, Work

__all__ = ["ROWS", "VERY_LONG_N", "Form", "Numerics", "Placement", "Plan", "Target", "rows_like"]

ROWS = (1, 64, 256, 1024)  # numbers of rows from each of which on placements differ
# Registers of a thread for the values of a held row. From so many on the compiler may spill some,
# in order to fit one more thread block.
MANY_WORDS = 32


def rows_like(rows: int) -> tuple[int, int]:
    """From how many rows on, and below how many, a batch is placed as one of `rows` rows is."""
    bounds = (*ROWS, 2**31)
    k = max((k for k, fewest in enumerate(ROWS) if fewest <= rows), default=0)
    return bounds[k], bounds[k + 1]


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan is made for.

    align: 16, 8, 4, 2 or 1 bytes that pointers and row strides of all row operands are a multiple
        of; 16 also where each operand is as aligned as its own vectors are long.
    lead: how many leading dimensions the rows have.
    broadcast: inputs that the rows repeat. For each leading dimension it says whether the input has
        it: True, False (of size 1) or None (missing).
    aliases: outputs that are the same memory as an input, as (output name, input name).
    rows: one of ROWS; there are at least so many rows, and many may take fewer CTAs each.
    """

    n: int
    arch: Arch
    align: int = 16
    fastmath: bool = False
    lead: int = 1
    broadcast: tuple[tuple[str, tuple[bool | None, ...]], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    rows: int = 1


class Form(Enum):
    """How a row is kept between its sweeps."""

    HELD = "held"  # in registers
    LOOPS = "loops"  # in memory; each sweep is a loop over its chunks, a vector a thread
    # The same for a row that shared memory does not hold, whatever its alignment, or that is read
    # only once, or that is very long: each loop reads it from global memory.
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which thread holds which element, so the order of every sum.

    They depend on N, dtypes, the graph and the architecture, never on the number of rows or on
    alignment, so that a row's bits are the same in every batch. A row has `cluster_n` shares, each
    of which is worked on by `threads_per_row` threads.

    vec_size: neighbouring elements that a thread holds.
    joint: names of the reductions whose results come of one exchange (`Part.at_once`).
    merged: whether a mean and the squares about it are summed over two chunks at a time.
    folded: chunks that are summed before they are added to the rest, so that terms that are small
        beside a thread's whole sum do not vanish in it; 0: all are added one by one.
    """

    vec_size: int
    threads_per_row: int
    cluster_n: int = 1
    form: Form = Form.HELD
    joint: tuple[str, ...] = ()
    merged: bool = False
    folded: int = 0

    def properties(self) -> dict[str, object]:
        """The fields by name, in plain values."""
        return {**asdict(self), "form": self.form.value, "joint": "+".join(self.joint)}

    @property
    def in_loops(self) -> bool:
        """Whether a row is worked on in loops over its chunks."""
        return self.form is not Form.HELD

    @property
    def step(self) -> int:
        """Elements of a row that all its threads hold in one vector each."""
        return self.vec_size * self.threads_per_row * self.cluster_n

    def chunks(self, n: int) -> int:
        """Vectors that a thread has of a row of n elements, padded ones included."""
        return -(-n // self.step)

    def is_ragged(self, n: int) -> bool:
        """Whether threads have elements behind the end of a row of n elements."""
        return n % self.step > 0


@dataclass(frozen=True, slots=True)
class Placement:
    """How rows get to threads and back. No bit of a result depends on it.

    num_threads: threads of a CTA.
    loader: `shared` (cp.async to shared memory, then registers) or `direct`.
    columns: `early` (loaded while the rows are in flight) or `late` (where they are first used).
    copy_bytes: the widest memory access.
    shares: how many of the `cluster_n` shares of a row one CTA works on, each as a CTA of its own
        would. Fewer CTAs then make a cluster and wait for each other.
    abreast: how many of them it works on at a time, each with threads of its own.
    unroll: chunks in the body of a loop over them; where it is all of them, there is no loop.
    prefetch: how many chunks before it is used a loop loads what it reads from global memory.
    blocks: CTAs of a multiprocessor that registers leave room for; 0: the compiler decides.
    """

    num_threads: int
    loader: str
    columns: str
    copy_bytes: int
    shares: int = 1
    abreast: int = 1
    unroll: int = 1
    prefetch: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Plan:
    """One kernel, decided."""

    work: Work
    target: Target
    numerics: Numerics
    placement: Placement

    @property
    def graph(self) -> Graph:
        """What is computed."""
        return self.work.graph

    @property
    def sweeps(self) -> Sweeps:
        """What a thread does between exchanges."""
        if self.numerics.in_loops:
            return self.work.loops
        return self.work.held_joint if self.numerics.joint else self.work.held

    @property
    def rows_home(self) -> Home:
        """Where a row lives between its sweeps."""
        if not self.numerics.in_loops:
            return Home.REGISTERS
        return Home.SHARED if self.placement.loader == "shared" else Home.REREAD

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What a thread does for its row, in order."""
        return list_steps(
            self.work,
            self.rows_home,
            joint=bool(self.numerics.joint),
            late_columns=self.placement.columns == "late",
            in_place=bool(self.target.aliases),
            prefetched=self.placement.prefetch > 0,
        )

    @property
    def homes(self) -> dict[int, Home]:
        """Where each value lives that crosses an exchange."""
        if self.numerics.in_loops:
            return self.work.homes_in_loops(self.rows_home)
        late = self.placement.columns == "late"
        crossing = self.work.crossing(late, bool(self.numerics.joint))
        return dict.fromkeys(sorted(set().union(*crossing)), Home.REGISTERS)

    @property
    def names_blocks(self) -> bool:
        """Whether the text says for how many thread blocks of an SM registers are spared.

        Where it does, a kernel that spills is compiled again for others (`htile/build/compile.py`).
        """
        if self.placement.blocks or self.numerics.in_loops:
            return True
        late, joint = self.placement.columns == "late", bool(self.numerics.joint)
        return self.work.held_words(late, joint) * self.elements_per_thread >= MANY_WORDS

    @property
    def rows_per_block(self) -> int:
        """Rows that one CTA works on."""
        return self.placement.num_threads // (self.numerics.threads_per_row * self.abreast)

    @property
    def abreast(self) -> int:
        """Shares of a row that one CTA works on at a time."""
        return self.placement.abreast

    @property
    def turns(self) -> int:
        """Shares of a row that a thread works on one after the other."""
        return self.placement.shares // self.abreast

    @property
    def chunks(self) -> int:
        """Vectors of one share of a row that a thread has."""
        return self.numerics.chunks(self.graph.n)

    @property
    def is_unrolled(self) -> bool:
        """Whether loops over chunks are written out."""
        return self.placement.unroll == self.chunks

    def folds(self, loop: ColumnLoop) -> tuple[Part, ...]:
        """The parts of a loop that are sums in two levels."""
        if not self.numerics.folded:
            return ()
        return tuple(part for part in loop.parts if self._has_float_sum(part))

    def _has_float_sum(self, part: Part) -> bool:
        is_float = self.graph[part.results[0]].value.dtype.is_floating_point
        return part.is_joint or (part.kind is SUM and is_float)

    @property
    def is_ragged(self) -> bool:
        """Whether threads have elements behind the end of a row."""
        return self.numerics.is_ragged(self.graph.n)

    @property
    def elements_per_thread(self) -> int:
        """Elements of one row that a thread holds, padded lanes included."""
        return self.chunks * self.numerics.vec_size

    @property
    def stages(self) -> int:
        """Dependent rounds of reductions."""
        return len(self.sweeps.reduces)

    def bytes_per_row(self) -> tuple[int, int]:
        """Bytes read and written for one row, without the columns that all rows share."""
        g = self.graph
        read = sum(
            (g.n if i.role.value == "row" else 1) * i.dtype.itemsize
            for i in g.inputs
            if i.role.value in ("row", "per-row")
        )
        written = sum((g.n if o.is_row else 1) * o.dtype.itemsize for o in g.outputs)
        return read, written

    def bytes_read_again(self) -> int:
        """Bytes of one row that loops read from global memory after the first time."""
        if self.rows_home is not Home.REREAD:
            return 0
        read = [i for loop in self.work.loops.loops for i in loop.rows]
        again = Counter(read) - Counter({*read})
        return self.graph.n * sum(i.dtype.itemsize for i in again.elements())

    def bytes_of_columns(self) -> int:
        """Bytes of the vectors that all rows share; each row reads them, most often from L2."""
        return self.graph.n * sum(i.dtype.itemsize for i in self.work.columns)

    def properties(self) -> dict[str, object]:
        """Numerics and placement by name, in plain values, as `with_plan` takes them."""
        return {**self.numerics.properties(), **asdict(self.placement)}

    def layout(self) -> list[str]:
        """Numerics and placement in words, a line each."""
        return describe_layout(self)

    def __str__(self) -> str:
        return describe(self)
