"""The steps of a kernel, in the order in which a thread carries them out for its row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..frontend.graph import Input, Output
from .patterns import Function
from .reductions import Part, Reduce


class Home(Enum):
    """Where a value lives between the step that makes it and the last that reads it."""

    REGISTERS = "registers"
    PACKED = "packed"  # It is in registers, with as many bits as in memory, and read by loops.
    SHARED = "shared"
    REREAD = "reread"  # It is in global memory, and is read from there again.
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Load:
    """Bring an input to its home on chip. If loops read it again (REREAD), nothing is done here."""

    input: Input
    home: Home = Home.REGISTERS


@dataclass(frozen=True, slots=True)
class Reload:
    """Bring a chunk of row inputs to registers, from shared (SHARED) or global memory (REREAD).

    If it is in registers already (PACKED), it is converted to what is computed with.
    """

    inputs: tuple[Input, ...]
    home: Home


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to load the first chunks that the next loop reads, before the exchange in between."""

    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Evaluate a node. `inputs` are its own, or what its device function takes instead."""

    id: int
    function: Function
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Wait for all threads of the row: some read elements that others will overwrite."""


@dataclass(frozen=True, slots=True)
class Store:
    """Write a result to global memory."""

    output: Output


@dataclass(frozen=True, slots=True)
class OwnMaxima:
    """From here on, a thread computes with the maxima of its own elements (FOLLOWING)."""

    part: Part


@dataclass(frozen=True, slots=True)
class ChunkLoop:
    """Run steps for one chunk of the row after another.

    parts: what the elements of each chunk are added to.
    backwards: whether it goes from the last chunk to the first. It then begins with what the loop
        before has read last from global memory, which the L2 cache still holds. A loop that adds to
        parts never does so, because the order of sums would depend on where rows lie.
    padding: what a row that it reads from global memory holds behind its end. It is the identity of
        the row's only reduction where that saves a select, and else 0.
    reads: the rows and columns that it reads from global memory.
    """

    steps: tuple[Step, ...]
    parts: tuple[Part, ...] = ()
    backwards: bool = False
    padding: float = 0.0
    reads: tuple[Input, ...] = ()


Step = Load | Reload | Prefetch | Compute | OwnMaxima | Reduce | Fence | Store | ChunkLoop
