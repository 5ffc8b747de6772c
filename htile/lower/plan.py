"""The plan: everything that the emitted kernel does, decided.

A `Plan` says which step follows which, what is reduced together behind one barrier, where values
live between the steps, which thread holds which element (numerics) and how a row gets there
(placement). `emit` prints it and decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

import torch

from ..build.arch import Arch
from ..frontend.graph import Graph, Input, Output
from ..frontend.ops import Op, dtype_name

ROWS = (1, 64, 256, 1024)  # from each on, other placements
LONG_N = 262144  # beyond it rows are very long
UNROLLED_CHUNKS = 8  # of a thread: loops over as many are written out


def rows_like(rows: int) -> tuple[int, int]:
    """From and below how many rows a batch is placed as one of `rows` is."""
    bounds = (*ROWS, 2**31)
    k = max((k for k, fewest in enumerate(ROWS) if fewest <= rows), default=0)
    return bounds[k], bounds[k + 1]


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan is made for.

    align: bytes that pointers and row strides of all row operands are a multiple of: 16, 8, 4,
        2 or 1; 16 also where each is as aligned as its own vectors are long.
    lead: how many leading dimensions the rows have.
    broadcast: inputs that the rows repeat; for each leading dimension whether the input has it:
        True, False (of size 1) or None (missing).
    aliases: outputs that are the same memory as an input, (output name, input name).
    rows: at least so many, one of ROWS: many may take fewer thread blocks each.
    """

    n: int
    arch: Arch
    align: int = 16
    fastmath: bool = False
    lead: int = 1
    broadcast: tuple[tuple[str, tuple[bool | None, ...]], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    rows: int = 1


class Home(Enum):
    """Where a value lives between the step that makes it and the last that reads it."""

    REGISTERS = "registers"
    SHARED = "shared"
    REREAD = "reread"
    RECOMPUTE = "recompute"


class Over(Enum):
    """What a reduction runs over."""

    COLUMNS = "columns"
    ROWS = "rows"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Monoid:
    """How partial results combine: an associative operation and its identity.

    combine: the `cute.ReductionOp` of `row_reduce`.
    identity: what a padded lane holds, as a Python number.
    """

    combine: str
    identity: float


# The reductions of the language. Their element map and their finish are ordinary nodes: a mean is
# a SUM and a division. ANY and ALL are MAX and MIN of 0 and 1.
MONOIDS: Mapping[Op, Monoid] = {
    Op.SUM: Monoid("ADD", 0.0),
    Op.PROD: Monoid("MUL", 1.0),
    Op.MAX: Monoid("MAX", float("-inf")),
    Op.MIN: Monoid("MIN", float("inf")),
    Op.ANY: Monoid("MAX", 0.0),
    Op.ALL: Monoid("MIN", 1.0),
}


class Form(Enum):
    """Which of an operation's device functions is used (DESIGN.md section 6)."""

    EXACT = "exact"
    BOUNDED = "bounded"  # the operand's range makes a short form as exact as the output needs
    SHARE = "a share"  # of a sum of exponentials, for 16-bit results, of what the exponential is of
    NUMBER = "by a number"  # as exact, through the reciprocal and one correction
    FAST = "fast"  # asked for by fastmath=True
    FMA = "fma"  # a * b + c, of the factors of a product that nobody else reads
    FMS = "fms"  # a * b - c
    FNMA = "fnma"  # c - a * b
    FACTORS = "factors"  # a product that a sum over the row alone reads, and adds by fma


@dataclass(frozen=True, slots=True)
class Load:
    """Bring an input on chip; a column is loaded while the rows are in flight."""

    input: Input
    home: Home = Home.REGISTERS


@dataclass(frozen=True, slots=True)
class Reload:
    """Bring a chunk of row inputs to registers, from `home`: shared memory, or global memory."""

    inputs: tuple[Input, ...]
    home: Home


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to load what a loop reads from global memory before the barrier that it waits for.

    Of `Placement.ahead` chunks; they come while the rows' reductions are exchanged.
    """

    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Evaluate one node of `inputs`: its own, or what a form takes in place of them."""

    id: int
    form: Form
    inputs: tuple[int, ...]


class Online(Enum):
    """What is gathered with a reduction for one of the next stage, relative to a reference."""

    SOFTMAX = "sum of exp(x - reference) with the maximum of x"
    WELFORD = "sum of (x - reference)**2 with the sum of x"


@dataclass(frozen=True, slots=True)
class Ahead:
    """A reduction that is gathered a stage ahead, by the loop that gathers `first`.

    A thread gathers it relative to a reference of its own. Once `first` is reduced, and `about`
    computed of it, what each thread has is moved to that reference, and reduced as a sum.
    """

    form: Online
    first: int
    about: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce operands together, behind one barrier; `results` are the nodes, in slot order.

    paired: max(x) and the sum of exp(x - max(x)) are one exchange of pairs, in one slot. A warp, or
        a thread in a loop, takes its own maximum at first. Where x is held, the second operand
        comes with the results.
    finite: of a pair, that the sum is of exp(x) where the maximum is infinite, as logsumexp takes
        it. Nothing else needs the exponentials then.
    ahead: for each result how it was gathered in the stage before; empty: the operands are there.
    carried: ahead, and the barrier of the stage before has brought what all warps have: there is
        none.
    """

    stage: int
    results: tuple[int, ...]
    operands: tuple[int, ...]
    monoids: tuple[Monoid, ...]
    slot: int
    over: Over = Over.COLUMNS
    paired: bool = False
    ahead: tuple[Ahead, ...] = ()
    finite: bool = False
    carried: bool = False

    @property
    def made(self) -> tuple[int, ...]:
        """The nodes that are there after the barrier."""
        has_exp = self.paired and not self.finite
        return self.results + self.operands[1:] if has_exp else self.results

    @property
    def gathered(self) -> list[tuple[int, int, Monoid]]:
        """What a loop gathers: result, operand and monoid; of a pair the maximum, with the sum."""
        each = list(zip(self.results, self.operands, self.monoids, strict=True))
        return each[:1] if self.paired else each

    @property
    def slots(self) -> int:
        """Of the reduction buffer."""
        return 1 if self.paired else len(self.results)


def has_wide_words(graph: Graph, reduces: Iterable[Reduce]) -> bool:
    """Whether what is exchanged for reductions is of 64 bits: such values, or pairs."""
    return any(
        reduce.paired or reduce.carried or graph[id].value.dtype is torch.int64
        for reduce in reduces
        for id in reduce.results
    )


@dataclass(frozen=True, slots=True)
class Store:
    """Write a result to global memory."""

    output: Output


@dataclass(frozen=True, slots=True)
class ColumnLoop:
    """Run steps for one chunk of columns after another, and gather the operands of `reduce`.

    ahead: the reduction of the next stage that is gathered too, which then has no loop.
    backwards: from the last chunk to the first, so that a row that is read again begins with what
        the loop before has read last, which is in the L2 cache still. Never where it gathers: the
        order of sums would depend on where rows are.
    padding: what a row that it reads holds behind its end, if not 0: then the identity of what it
        is reduced by.
    """

    steps: tuple[Step, ...]
    reduce: Reduce | None = None
    ahead: Reduce | None = None
    backwards: bool = False
    padding: float = 0.0

    @property
    def reads(self) -> tuple[Input, ...]:
        """The inputs that it reads from global memory: columns, and rows that are not kept."""
        rows = [i for s in self.steps if isinstance(s, Reload) and s.home is Home.REREAD
                for i in s.inputs]  # fmt: skip
        return (*rows, *(step.input for step in self.steps if isinstance(step, Load)))

    @property
    def writes(self) -> tuple[Output, ...]:
        """What it stores."""
        return tuple(step.output for step in self.steps if isinstance(step, Store))

    @property
    def is_online(self) -> bool:
        """Whether a reduction is gathered with one of the next stage."""
        return self.ahead is not None or (self.reduce is not None and self.reduce.paired)

    def online(self, result: int) -> Online | None:
        """The form in which a result of `reduce` is gathered with what needs it."""
        if self.reduce is not None and self.reduce.paired:
            return Online.SOFTMAX
        ahead = () if self.ahead is None else self.ahead.ahead
        return next((a.form for a in ahead if a.first == result), None)


Step = Load | Reload | Fetch | Compute | Reduce | Store | ColumnLoop


MOST_CHUNKS = 32  # of a streamed row that a sum has in one level
FOLDED = 16  # chunks that the inner level of one in two levels has


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which thread holds which element, so the order of every sum.

    Depends on N, dtypes and architecture, never on M or on alignment. A row has `cluster_n` shares,
    each with `threads_per_row` threads; with `Placement.shares` of 1 a share is a thread block's.

    paired: a maximum and the sum of exponentials below it are one exchange (`Reduce.paired`).
    reload: a row is worked on in loops over chunks, a vector a thread. Each reads the row again and
        computes again what was computed of it, so that registers hold no more than a chunk.
        Reductions gather chunk by chunk, those of the next stage too where they can (`Online`), a
        mean and the squares about it by two where chunks are few, even in number and whole.
    streamed: no shared memory holds the row, whatever its alignment, or it is read once, or very
        long; each loop reads it from global memory. Float sums of more than MOST_CHUNKS chunks go
        in two levels.
    """

    vec_size: int
    threads_per_row: int
    cluster_n: int = 1
    reload: bool = False
    paired: bool = False
    streamed: bool = False

    def chunks(self, n: int) -> int:
        """Vectors that a thread has of a row of n elements, padded ones included."""
        return -(-n // (self.vec_size * self.threads_per_row * self.cluster_n))

    def is_ragged(self, n: int) -> bool:
        """Whether threads have elements behind the end of a row of n elements."""
        return n % (self.vec_size * self.threads_per_row * self.cluster_n) > 0


@dataclass(frozen=True, slots=True)
class Placement:
    """How rows get to threads and back; free to change, no bit of a result depends on it.

    loader: `shared` (cp.async to shared memory, then registers) or `direct`.
    columns: `early` (loaded while the rows are in flight) or `late` (where they are first used).
    copy_bytes: the widest access.
    num_threads: of a thread block; where a row is worked on in loops, and there are more than it
        has, of several of its shares at a time.
    shares: of the `cluster_n` shares of a row, how many one thread block works on, each as a block
        of its own would, so that fewer make a cluster and pay for exchanges.
    unroll: chunks that the body of a loop over them has; all of them: there is no loop.
    ahead: how many chunks before it is used is loaded what a loop reads from global memory.
    blocks: thread blocks of a multiprocessor that registers leave room for, fewer if they would be
        spilled for it; 0: as the compiler likes.
    """

    num_threads: int
    loader: str
    columns: str
    copy_bytes: int
    shares: int = 1
    unroll: int = 1
    ahead: int = 0
    blocks: int = 0


@dataclass(frozen=True)
class Plan:
    """One kernel, decided. `homes` has every value that crosses a barrier."""

    graph: Graph
    target: Target
    prologue: tuple[Step, ...]
    steps: tuple[Step, ...]
    epilogue: tuple[Step, ...]
    homes: Mapping[int, Home]
    numerics: Numerics
    placement: Placement
    slots: int
    workspace: tuple[object, ...] = field(default=())
    aliases: tuple[tuple[str, str], ...] = field(default=())

    @property
    def rows_per_block(self) -> int:
        """Rows that one CTA works on."""
        return 1 if self.numerics.reload else self._groups

    @property
    def abreast(self) -> int:
        """Shares of a row that one CTA works on at a time, each with threads of its own."""
        return self._groups if self.numerics.reload else 1

    @property
    def turns(self) -> int:
        """Shares of a row that a thread works on one after the other."""
        return self.placement.shares // self.abreast

    @property
    def _groups(self) -> int:
        return self.placement.num_threads // self.numerics.threads_per_row

    @property
    def chunks(self) -> int:
        """Vectors of one row that a thread has."""
        return self.numerics.chunks(self.graph.n)

    @property
    def is_unrolled(self) -> bool:
        """Whether loops over chunks have every chunk in their body."""
        return self.placement.unroll == self.chunks

    @property
    def merges_pairs(self) -> bool:
        """Whether a mean and the squares about it are gathered two chunks at a time: numerics."""
        is_static = self.numerics.reload and self.chunks <= UNROLLED_CHUNKS
        return is_static and self.chunks % 2 == 0 and not self.is_ragged

    @property
    def folded(self) -> int:
        """Chunks that the inner level of a float sum has; 0 where it has one level."""
        return FOLDED if self.numerics.streamed and self.chunks > MOST_CHUNKS else 0

    def folds(self, loop: ColumnLoop) -> tuple[int, ...]:
        """The results of a loop's reductions that are gathered in two levels."""
        if loop.reduce is None or not self.folded:
            return ()
        gathered = loop.reduce.gathered
        return tuple(id for id, _, monoid in gathered if self._has_float_sum(loop, id, monoid))

    def _has_float_sum(self, loop: ColumnLoop, id: int, monoid: Monoid) -> bool:
        if loop.online(id) is not None:
            return True
        return monoid.combine == "ADD" and self.graph[id].value.dtype.is_floating_point

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
        """Dependent rounds of reduction."""
        return sum(isinstance(step, Reduce) for step in self.steps)

    def bytes_per_row(self) -> tuple[int, int]:
        """Bytes read and written for one row, columns that all rows share not counted."""
        g = self.graph
        read = sum(
            (g.n if i.role.value == "row" else 1) * i.dtype.itemsize
            for i in g.inputs
            if i.role.value in ("row", "per-row")
        )
        written = sum((g.n if o.is_row else 1) * o.dtype.itemsize for o in g.outputs)
        return read, written

    def bytes_read_again(self) -> int:
        """Bytes of one row that loops over chunks read from global memory after the first time."""
        loops = [step for step in self.steps if isinstance(step, ColumnLoop)]
        reads = [s for loop in loops for s in loop.steps if isinstance(s, Reload)]
        read = [i for s in reads if s.home is Home.REREAD for i in s.inputs]
        later = Counter(read) - Counter({*read})
        return self.graph.n * sum(i.dtype.itemsize for i in later.elements())

    def properties(self) -> dict[str, object]:
        """Numerics and placement by name, as `with_plan` takes them."""
        return {**asdict(self.numerics), **asdict(self.placement)}

    def layout(self) -> list[str]:
        """Numerics and placement in words, a line each."""
        num, place = self.numerics, self.placement
        rows = _count(self.rows_per_block, "row")
        return [
            f"numerics   {_count(num.threads_per_row, 'thread')} a row, {num.vec_size} adjacent "
            f"elements each, {self.elements_per_thread} in all, cluster {num.cluster_n}"
            f"{f', in {self.chunks} chunks' if num.reload else ''}"
            f"{', maximum and sum in one exchange' if num.paired else ''}"
            f"{f', summed {self.folded} at a time' if self.folded else ''}",
            f"placement  {place.num_threads} threads and "
            f"{rows if place.shares == 1 else f'{place.shares} shares of a row'} a CTA"
            f"{f', {self.abreast} at a time' if self.abreast > 1 else ''}, "
            f"{place.loader} loads, {place.columns} columns, {place.copy_bytes}-byte accesses"
            f"{f', {place.unroll} chunks at once' if num.reload else ''}"
            f"{f', {place.ahead} on their way' if place.ahead else ''}",
        ]

    def __str__(self) -> str:
        read, written = self.bytes_per_row()
        again = self.bytes_read_again()
        lines = [
            f"plan {self.graph.name}, N = {self.graph.n}, {self.target.arch.name}",
            *(f"  {line}" for line in self.layout()),
            f"  traffic    {read} bytes read and {written} written a row"
            f"{f', {again} read again' if again else ''}",
        ]
        lines += [f"  {line}" for line in _describe(self, self.prologue + self.steps)]
        crossing = ", ".join(f"%{id} {home.value}" for id, home in sorted(self.homes.items()))
        lines.append(f"  across barriers: {crossing or 'nothing'}")
        return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe(plan: Plan, steps: tuple[Step, ...]) -> list[str]:
    lines = []
    for step in steps:
        match step:
            case Load(input, home):
                where = "shared memory" if home is Home.SHARED else f"%{input.id}"
                if home is not Home.REREAD:  # that is read by the loops alone
                    lines.append(
                        f"load     {input.role.value} {input.name} ({dtype_name(input.dtype)}) "
                        f"-> {where}"
                    )
            case Reload(inputs, home):
                names = ", ".join(f"{i.name} -> %{i.id}" for i in inputs)
                where = "shared memory" if home is Home.SHARED else "global memory"
                lines.append(f"read     {names} from {where}")
            case Fetch(inputs):
                names = ", ".join(i.name for i in inputs)
                chunks = _count(plan.placement.ahead, "chunk")
                lines.append(f"fetch    {names} of {chunks}")
            case Compute(id, form, inputs):
                node = plan.graph[id]
                operands = ", ".join(f"%{i}" for i in inputs)
                short = "" if form is Form.EXACT else f" ({form.value})"
                lines.append(f"compute  %{id} = {node.op.value} {operands}{short}")
            case Reduce(stage, results, operands, monoids, slot, _, paired, ahead):
                pairs = ", ".join(
                    f"%{r} = {m.combine} of %{o}"
                    for r, m, o in zip(results, monoids, operands, strict=True)
                )
                if ahead:
                    done = "exchanged" if step.carried else "gathered"
                    pairs = ", ".join(
                        f"%{r} = {m.combine} of what %{a.first} was {done} with, about %{a.about}"
                        for r, m, a in zip(results, monoids, ahead, strict=True)
                    )
                held = not plan.numerics.reload and len(step.made) > len(results)
                too = f", as pairs{f', and %{operands[1]}' if held else ''}" if paired else ""
                lines.append(f"reduce   stage {stage}: {pairs}, slot {slot}{too}")
            case Store(output):
                lines.append(f"store    {output.name} ({dtype_name(output.dtype)}) <- %{output.id}")
            case ColumnLoop(inner, reduce):
                back = ", from the last to the first" if step.backwards else ""
                lines.append(f"for each chunk{back}")
                lines += [f"  {line}" for line in _describe(plan, inner)]
                if reduce is not None:
                    for result, id, _ in reduce.gathered:
                        form = step.online(result)
                        lines.append(f"  gather   %{id}{f', and the {form.value}' if form else ''}")
    return lines
