"""The plan: everything that is decided about a kernel before its text is printed.

*Numerics* say which thread holds which element, and so in which order sums are taken. *Placement*
says how rows get to threads and back. The steps follow from these two and from the graph.
`emission` prints a plan and decides nothing.

A *vector* is a run of neighbouring elements that one thread holds. A *chunk* is one vector of each
thread. A *share* is one of the equal parts that a row is cut into. A *column* is an input that all
rows share. An *exchange* is where threads combine what they have of a row. A *sweep* is what a
thread does between two exchanges. A *CTA* is a thread block.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cached_property

from ..build.arch import Arch
from ..errors import LoweringError
from ..frontend.graph import Graph, Input, Output, Role
from .describe import describe, describe_layout
from .reductions import FOLLOWING, SUM, Part, Reduce
from .schedule import list_steps
from .shifting import staged_bytes
from .steps import ChunkLoop, Home, Step
from .stretches import Stretch, homes, stretches
from .sweeps import Sweeps
from .work import Work

ROWS = (1, 64, 256, 1024)  # From each of these numbers of rows on, placements may differ.
ONE_KERNEL_N = 2048  # Rows of at most so many elements have one kernel for these numbers of rows.
# If a thread needs this many registers or more for the values of the row that it holds, the
# compiler may spill some of them, in order to fit one more CTA on a multiprocessor. So the plan
# says how many CTAs are to fit, and the kernel is compiled again if it spills.
HELD_REGISTERS = 32
# A kernel that reads so many bytes of rows for each byte that it writes writes next to nothing.
READ_PER_WRITTEN = 8
# Bytes that such a kernel reads, up to which rows that are dropped first pay (docs/traps.md).
MOST_EVICTED_FIRST = 192 << 20
MORE_THREADS = 512  # the most threads of a CTA beside which the compiler may fit one CTA more


def rows_like(rows: int) -> tuple[int, int]:
    """(fewest, limit): a batch of fewest <= k < limit rows is placed as one of `rows` rows is."""
    k = max(bisect(ROWS, rows), 1)
    return ROWS[k - 1], (*ROWS, 2**31)[k]


def check_names(wanted: Iterable[str]) -> None:
    """Raise LoweringError for what is no property of a plan."""
    there = [field.name for kind in (Numerics, Placement) for field in fields(kind)]
    for name in wanted:
        if name not in there:
            raise LoweringError(f"a plan has no {name!r}; it has {', '.join(there)}")


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan is made for.

    align: 16, 8, 4, 2 or 1. Pointers and row strides of all row operands are multiples of so many
        bytes. It is 16 as well where each operand is as aligned as its own vectors are long.
    lead: how many leading dimensions the rows have.
    flat: whether the rows of every tensor are equally far apart, over all leading dimensions.
    broadcast: inputs that repeat over rows. For each leading dimension it says whether the input
        has it: True, False (of size 1) or None (missing).
    aliases: outputs that are the same memory as an input, as (output name, input name).
    rows: one of ROWS. There are at least so many rows. Where there are many, each may take fewer
        CTAs.
    joined: how many rows of the call are one of these, because they follow each other in memory and
        each element is computed by itself (htile.lower.joining).
    """

    n: int
    arch: Arch
    align: int = 16
    fastmath: bool = False
    lead: int = 1
    flat: bool = False
    broadcast: tuple[tuple[str, tuple[bool | None, ...]], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    rows: int = 1
    joined: int = 1


class Form(Enum):
    """How a row is kept between its sweeps.

    HELD: it is in registers.
    LOOPS: it is in shared memory, in global memory with the loader `direct`, or in registers with
        the loader `packed`. Each sweep is a loop over its chunks.
    STREAMED: it is in global memory, from where each sweep reads it in a loop. This is for rows
        that do not fit into shared memory, that are read only once, or that are very long.
    """

    HELD = "held"
    LOOPS = "loops"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which thread holds which element, and so the order of every sum.

    They depend on N, dtypes, the graph and the architecture, never on the number of rows or on
    alignment, so that a row's bits are the same in every batch. Where nothing is reduced, bits do
    not depend on them, and they may depend on the number of rows.

    vec_size: how many neighbouring elements a vector has. The row may end inside a vector.
    threads_per_row: how many threads work on each share of a row.
    cluster_n: how many shares a row has.
    joint: names of the pairs of reductions whose results come from one exchange (`Part.at_once`).
    merged: whether a mean and the squares about it are summed over two chunks at a time.
    folded: how many chunks are summed before their sum is added to the rest. Terms that are small
        beside a thread's whole sum then do not vanish in it. With 0, all are added one by one.
    groups: into how many groups rows are dealt, each of which adds its own up, for results that are
        reduced over all rows (`htile/lower/over_rows.py`). 0 without such results.
    """

    vec_size: int
    threads_per_row: int
    cluster_n: int = 1
    form: Form = Form.HELD
    joint: tuple[str, ...] = ()
    merged: bool = False
    folded: int = 0
    groups: int = 0

    def properties(self) -> dict[str, object]:
        """The fields by name, in plain values."""
        return {**asdict(self), "form": self.form.value, "joint": "+".join(self.joint)}

    @property
    def in_loops(self) -> bool:
        """Whether a row is worked on in loops over its chunks."""
        return self.form is not Form.HELD

    @property
    def step(self) -> int:
        """How many elements of a row all its threads have together in one vector each."""
        return self.vec_size * self.threads_per_row * self.cluster_n

    @property
    def is_between_powers(self) -> bool:
        """Whether the threads of a share are no power of two."""
        return self.threads_per_row & (self.threads_per_row - 1) > 0

    def chunks(self, n: int) -> int:
        """How many vectors of a share a thread has, padding included, if a row has n elements."""
        return -(-n // self.step)

    def share_bytes(self, work: Work) -> int:
        """Bytes of a share of all rows that are read, padding included."""
        elements = self.chunks(work.graph.n) * self.vec_size * self.threads_per_row
        return elements * sum(i.dtype.itemsize for i in work.rows)


@dataclass(frozen=True, slots=True)
class Placement:
    """How rows get to threads and back. No bit of a result depends on it.

    num_threads: how many threads a CTA has.
    loader: how rows get to registers: `shared` (by cp.async through shared memory) or `direct`.
        If rows are shifted, loops may find them in registers, as they are in memory (`packed`).
    columns: how columns are loaded. `early`: to registers, while the rows are on their way.
        `late`: where they are first used. `staged`: to shared memory while the rows are on their
        way, and from there where they are first used. What is used before the first exchange is
        then loaded early.
    copy_bytes: the widest memory access. If rows are shifted, this is for columns only.
    shifted: whether rows may begin anywhere in memory and end inside a vector. They are moved in
        aligned pieces as long as vectors, and shifted in registers.
    shares: how many of the `cluster_n` shares of a row one CTA works on, each as a CTA of its own
        would. The other CTAs of its cluster work on the other shares.
    abreast: how many of these shares the CTA works on at a time, each with threads of its own.
    unroll: how many chunks the body of a loop works on. If it is all of them, there is no loop.
    prefetch: how many chunks ahead of its use a loop loads what it reads from global memory.
    blocks: how many CTAs of a multiprocessor the registers suffice for. With 0, the compiler
        decides.
    apart: whether the CTAs of a row start apart from each other, in no cluster.
    """

    num_threads: int
    loader: str
    columns: str
    copy_bytes: int
    shifted: bool = False
    shares: int = 1
    abreast: int = 1
    unroll: int = 1
    prefetch: int = 0
    blocks: int = 0
    apart: bool = False


@dataclass(frozen=True)
class Plan:
    """All decisions about one kernel. Its steps follow from them and from the graph."""

    work: Work
    target: Target
    numerics: Numerics
    placement: Placement

    @property
    def graph(self) -> Graph:
        return self.work.graph

    @cached_property
    def sweeps(self) -> Sweeps:
        """What a thread does between exchanges."""
        if self.numerics.in_loops:
            return self.work.loops
        return self.work.held_joint if self.numerics.joint else self.work.held

    @cached_property
    def rows_home(self) -> Home:
        """Where a row lives between its sweeps."""
        if not self.numerics.in_loops:
            return Home.REGISTERS
        homes = {"shared": Home.SHARED, "packed": Home.PACKED, "direct": Home.REREAD}
        return homes[self.placement.loader]

    @property
    def _overwrites_a_number(self) -> bool:
        """Whether an output is the memory of an input of which a row has one element to load."""
        names = {name for _, name in self.target.aliases}
        return any(i.role is Role.PER_ROW and i.name in names for i in self.graph.inputs)

    @cached_property
    def late_columns(self) -> tuple[Input, ...]:
        """The columns of a held row that are loaded by the first sweep that reads them."""
        if self.placement.columns == "early":
            return ()
        first = 1 if self.placement.columns == "staged" else 0
        return tuple([i for sweep in self.sweeps.all[first:] for i in sweep.columns])

    @cached_property
    def staged_columns(self) -> tuple[Input, ...]:
        """The columns that come to shared memory while rows are on their way."""
        if self.placement.columns != "staged":
            return ()
        return self.work.columns if self.numerics.in_loops else self.late_columns

    @cached_property
    def places(self) -> dict[Output, Input]:
        """The results of a held row that take the place of a staged column, if rows are shifted.

        These are results of the last sweep, before which, or in which, all columns are read.
        """
        columns, found = list(self.staged_columns), {}
        for output in self.sweeps.all[-1].stores if columns and self.placement.shifted else ():
            same = [i for i in columns if i.dtype.itemsize == output.dtype.itemsize]
            if output.is_row and same:
                found[output] = same[0]
                columns.remove(same[0])
        return found

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What a thread does for its row, in order."""
        return list_steps(
            self.work,
            self.sweeps,
            self.rows_home,
            late_columns=self.late_columns,
            in_place=bool(self.target.aliases),
            waits=self._overwrites_a_number,
            prefetched=self.placement.prefetch > 0,
            staged=self.staged_columns,
        )

    @cached_property
    def kept(self) -> dict[Output, Input | None]:
        """Results that loops keep on chip until they are complete, if rows are shifted.

        A thread stores pieces of what other threads have made. So threads wait for each other once,
        and not for each chunk. Each value is the row or column whose place the result takes: its
        elements have as many bytes, and the loop that stores reads it for the last time. None means
        that the result has shared memory of its own.
        """
        if not (self.placement.shifted and self.rows_home in (Home.SHARED, Home.PACKED)):
            return {}
        inputs, found = list(self.work.rows), {}
        if self.rows_home is Home.PACKED:  # results are stored out of shared memory
            inputs = [*self.staged_columns, *inputs]
        loops = list(enumerate(self.sweeps.all))
        read = {i: k for k, sweep in loops for i in sweep.columns}
        stored = {output: k for k, sweep in loops for output in sweep.stores}
        for output in self.work.writes:
            same = [i for i in inputs if i.dtype.itemsize == output.dtype.itemsize]
            same = [i for i in same if read.get(i, 0) <= stored[output]][:1]
            inputs = [i for i in inputs if i not in same]
            found[output] = same[0] if same else None
        return found

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of shared memory of a CTA for rows, and to store shifted ones by."""
        num, place, work = self.numerics, self.placement, self.work
        tiles = 0
        if place.loader == "shared":
            tiles = self.rows_per_block * place.shares * num.share_bytes(work)
        if place.columns == "staged":
            sizes = [i.dtype.itemsize for i in self.staged_columns]
            tiles += place.num_threads * self.turns * self.elements_per_thread * sum(sizes)
        if not (place.shifted or work.cut):
            return tiles
        if not place.shifted:
            vectors = 1 if num.in_loops else self.turns * self.chunks
            return tiles + staged_bytes(work.cut, num.vec_size, vectors, place.num_threads)
        if self.rows_home is Home.REREAD:  # each chunk is stored by itself
            return staged_bytes(work.writes, num.vec_size, 1, place.num_threads)
        if self.rows_home in (Home.REGISTERS, Home.PACKED):
            taken = {*self.places, *(o for o, i in self.kept.items() if i in self.staged_columns)}
            staged = [output for output in work.writes if output not in taken]
            vectors = self.turns * self.chunks
            tiles += staged_bytes(staged, num.vec_size, vectors, place.num_threads)
        own = [o.dtype.itemsize for o, taken in self.kept.items() if taken is None]
        return tiles + place.num_threads * self.turns * self.elements_per_thread * sum(own)

    @property
    def homes(self) -> dict[int, Home]:
        """For each value that is computed before an exchange and read after it: where it lives."""
        if self.numerics.in_loops:
            return self.work.homes_in_loops(self.rows_home)
        crossing = self.work.crossing(self.sweeps, self.placement.columns != "early")
        found = dict.fromkeys(sorted(set().union(*crossing)), Home.REGISTERS)
        if not self.stretches:
            return found
        numbers = {id: home for id, home in found.items() if not self.graph[id].value.spread}
        return dict(sorted((numbers | homes(self)).items()))

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """How a held row is computed a vector at a time. None if whole rows are as good."""
        return stretches(self)

    @property
    def names_blocks(self) -> bool:
        """Whether the kernel's text says how many CTAs of a multiprocessor registers suffice for.

        If it does, a kernel that spills is compiled again for another number of CTAs
        (`htile/build/compile.py`).
        """
        if self.placement.blocks or self.numerics.in_loops:
            return True
        words = self.work.held_words(self.sweeps, self.placement.columns != "early")
        return words * self.elements_per_thread >= HELD_REGISTERS

    @property
    def may_have_more_blocks(self) -> bool:
        """Whether the compiler may take fewer registers for a second or a third CTA of an SM.

        It was measured for held rows that are reduced, where no CTA has several of them, and has
        MORE_THREADS threads at most.
        """
        is_measured = not self.numerics.in_loops and not self.numerics.groups
        is_alone = self.rows_per_block == 1 and self.placement.num_threads <= MORE_THREADS
        return bool(self.placement.blocks and self.sweeps.reduces) and is_measured and is_alone

    @property
    def rows_per_block(self) -> int:
        """Rows that one CTA works on."""
        num, place = self.numerics, self.placement
        return place.num_threads // (num.threads_per_row * place.abreast)

    @property
    def parts(self) -> int:
        """How many CTAs, or clusters, add rows up, at most. With few rows it is fewer."""
        return self.numerics.groups // self.rows_per_block

    @property
    def ctas(self) -> int:
        """How many CTAs work on one row."""
        return self.numerics.cluster_n // self.placement.shares

    @property
    def turns(self) -> int:
        """Shares of a row that a thread works on one after the other."""
        return self.placement.shares // self.placement.abreast

    @cached_property
    def chunks(self) -> int:
        """How many vectors of one share of a row a thread has, padding included."""
        return self.numerics.chunks(self.graph.n)

    @property
    def is_unrolled(self) -> bool:
        """Whether all chunks are written out one after the other, instead of a loop over them."""
        return self.placement.unroll == self.chunks

    def folds(self, loop: ChunkLoop) -> tuple[Part, ...]:
        """The parts of a loop that are summed in two levels (`Numerics.folded`)."""
        if not self.numerics.folded:
            return ()
        dtypes = {part: self.graph[part.results[0]].value.dtype for part in loop.parts}
        sums = [part for part, dtype in dtypes.items() if dtype.is_floating_point]
        return tuple(
            [p for p in sums if p.carries_two_stages or p.kind in (SUM, FOLLOWING)]
        )

    @property
    def is_ragged(self) -> bool:
        """Whether some vectors of threads reach beyond the end of a row."""
        return not self.graph.fills(self.numerics.step)

    @property
    def may_end_anywhere(self) -> bool:
        """Whether rows of another length in each call may end inside a vector."""
        multiple = self.graph.multiple
        return multiple is not None and multiple % self.numerics.vec_size > 0

    def pads(self, loop: ChunkLoop) -> bool:
        """Whether what a loop loads behind the end of a row becomes what its reductions ignore."""
        return bool(loop.padding) and self.is_ragged and not self.placement.shifted

    @property
    def elements_per_thread(self) -> int:
        """How many elements of one share of a row a thread has, padding included."""
        return self.chunks * self.numerics.vec_size

    @property
    def stages(self) -> int:
        """How many rounds of reductions depend on each other. One exchange may serve two."""
        return len(self.sweeps.reduces)

    @property
    def slots(self) -> int:
        """How many places the exchange buffer has."""
        return self.sweeps.slots + self.sweeps.scans * self.chunks

    def slot(self, reduce: Reduce) -> int:
        """The first place of the exchange buffer that an exchange takes."""
        return reduce.slot + reduce.scans * self.chunks

    def bytes_per_row(self) -> tuple[int, int]:
        """Bytes read and written for one row, without the columns that all rows share."""
        return self.work.bytes_per_row

    @property
    def evict_first_rows(self) -> int:
        """Of up to how many rows the L2 cache drops first what is loaded; 0 for none at all.

        A cache in which lines are dirty has to write them before it takes others. With this, rows
        take the place of rows that have been read (docs/traps.md). Kernels that look for elements
        of a rank have no policy: they are bound by instructions, and the policy takes three.
        """
        read, written = self.bytes_per_row()
        is_again = self.work.gathered or self.target.broadcast or self.bytes_read_again()
        is_other = is_again or self.numerics.groups or self.work.chains
        if is_other or READ_PER_WRITTEN * written > read:
            return 0
        return MOST_EVICTED_FIRST // read

    def bytes_read_again(self) -> int:
        """Bytes that loops read from global memory again, after they have read the row once."""
        return self.work.bytes_read_again if self.rows_home is Home.REREAD else 0

    def properties(self) -> dict[str, object]:
        """Numerics and placement by name, in plain values, as `with_plan` takes them."""
        return {**self.numerics.properties(), **asdict(self.placement)}

    layout = describe_layout
    __str__ = describe
