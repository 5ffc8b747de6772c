"""What bounds a kernel of the gallery: the bytes that it must move, its instructions, or waits.

Bytes are those of the arguments and results, each once. Instructions are counted in the machine
code for sm_90a, as it is written out, which no GPU is needed for. Waits are those that the cost
model expects, for the registers that the compiled kernel has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.instructions import counted
from htile.build.arch import arch_named
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.frontend.roles import classify
from htile.lower.choice.cost import (
    CONSTANTS,
    H200,
    MOST_BLOCKS,
    MOST_THREADS,
    Cost,
    estimate,
    features,
)
from htile.lower.vectors import WARP

ISSUED, SPECIAL = 4 * WARP, 16  # of a multiprocessor in a cycle: instructions, and those of MUFU
GRANTED = 8  # A thread's registers are a multiple of this.
SURE = 1.25  # The cost model tells waits apart from memory by so much.
SECTOR = 32  # bytes that are read of memory for one element


def bytes_read(tensors: Iterable[tuple[torch.Tensor, int]]) -> int:
    """Bytes that a call has to read of its tensors, of each no more than the number beside it.

    Tensors that are parts of the same memory are read once.
    """
    spans: dict[int, list[tuple[int, int]]] = {}
    sizes: dict[int, int] = {}
    for t, most in tensors:
        if t.numel():
            storage, own = t.untyped_storage()._cdata, t.element_size()
            sides = [(n, far) for n, far in zip(t.shape, t.stride(), strict=True) if far]
            start = t.storage_offset() * own
            reach = sum((n - 1) * far for n, far in sides) + 1
            spans.setdefault(storage, []).append((start, start + reach * own))
            sizes[storage] = sizes.get(storage, 0) + min(most, math.prod(n for n, _ in sides) * own)
    return sum(min(sizes[each], _covered(spans[each])) for each in spans)


def _covered(spans: list[tuple[int, int]]) -> int:
    """Bytes of the union of spans of memory."""
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


@dataclass(frozen=True)
class Bounds:
    """Of one call of so many rows.

    read, written: bytes. instructions, special: for an element of the row, and those for MUFU.
    registers: of a thread. resident: thread blocks on a multiprocessor. issued: nanoseconds that
    the instructions take, or those for MUFU if they take longer. cost: as the model expects it.
    """

    rows: int
    read: int
    written: int
    instructions: float
    special: float
    registers: int
    resident: int
    issued: float
    cost: Cost

    @property
    def memory(self) -> float:
        """Nanoseconds that the bytes take."""
        return (self.read + self.written) / H200.memory

    @property
    def kind(self) -> str:
        """What takes longest. The model has to expect waits that are longer by SURE times."""
        waits = max(self.cost.waits, self.cost.blocks, self.cost.accesses)
        times = {"memory": max(self.memory, self.cost.cache), "instructions": self.issued}
        times["waits"] = waits / SURE
        return max(times, key=times.__getitem__)


def bounds(function, args: tuple, variant: dict, arch: str) -> Bounds:
    """What bounds a call, whose arguments may be on the meta device."""
    kernel = function.inspect(*args, arch=arch, **variant)
    count, special = counted(kernel.cubin)
    plan, used, target = kernel.plan, kernel.resources, arch_named(arch)
    signature = function._signature
    values = signature.bind(args, variant)
    call = classify(signature, values)
    rows, elements = math.prod(call.lead), plan.elements_per_thread * plan.turns
    most: dict[str, int] = {}  # bytes of a row that are read of what indices choose, by argument
    for node in kernel.graph:
        if node.op in (Op.LOOKUP, Op.TAKE):
            source = plan.work.source(node)
            of_row = plan.graph.n * source.dtype.itemsize if node.value.spread else SECTOR
            most[source.name] = most.get(source.name, 0) + of_row
    whole = {i.name for i in kernel.graph.inputs if i.role in (Role.ROW, Role.COLUMN)}
    read = bytes_read(
        (t, rows * most[name] if name in most and name not in whole else t.nbytes)
        for name, t in zip(signature.names, values, strict=True)
        if isinstance(t, torch.Tensor)
    )
    threads = plan.placement.num_threads
    registers = -(-used.registers // GRANTED) * GRANTED
    fit = target.registers // (registers * threads), MOST_THREADS // threads, MOST_BLOCKS
    resident = max(1, min(*fit, target.fitting(used.dynamic_shared)))
    found = features(plan, rows)._replace(resident=resident, lacking=0.0)
    cycles = H200.multiprocessors * H200.clock
    issued = found.threads * max(count / ISSUED, special / SPECIAL) / cycles
    return Bounds(
        rows, read, rows * plan.work.bytes_per_row[1], count / elements, special / elements,
        used.registers, resident, issued, Cost(*estimate(found, H200, CONSTANTS)),
    )  # fmt: skip


def table(labelled: Iterable[tuple[str, Bounds]]) -> Iterator[str]:
    """A line for each, and how many are of each kind."""
    kinds: Counter[str] = Counter()
    yield (
        "| kernel | rows | MB read | MB written | instructions an element | MUFU | registers | "
        "CTAs | bound by | expected |"
    )
    yield "|---" * 10 + "|"
    for label, found in labelled:
        kinds[found.kind] += 1
        cells = [
            label, str(found.rows), f"{found.read / 1e6:.1f}", f"{found.written / 1e6:.1f}",
            f"{found.instructions:.1f}", f"{found.special:.1f}", str(found.registers),
            str(found.resident), found.kind, str(found.cost),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    yield ", ".join(f"{count} by {kind}" for kind, count in kinds.items())
