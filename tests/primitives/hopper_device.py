"""Runs the PTX of kernels with TMA, mbarriers and wgmma (sm_90a), where there is no GPU.

It adds to `ptx_device.py` what these kernels use. The warps of all thread blocks of a cluster take
turns in an order that is drawn, and what is asynchronous happens as late as it may, or at any time:
TMA moves a tile when nothing else can go on, wgmma reads shared memory when it is waited for, and a
store does so, too. So a stage that is given back too early is overwritten before it is read. If no
warp can go on, an AssertionError says so.

What it does not know: proxies and their fences, the order of registers that wgmma is still writing,
and clusters whose thread blocks are not all running.
"""

from __future__ import annotations

import random
import re
import struct
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.primitives.device_memory import SHARED_BYTES, SHARED_START, Memory, Shared
from tests.primitives.ptx_device import ALL, INTEGERS, WARP, Warp, parse

RANK = 24  # The address of shared memory of another thread block has its rank + 1 from this bit on.
PARAMETER = 1 << 40  # the address of the first parameter, for those that are passed by address
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SWIZZLES = {1: 128, 2: 64, 3: 32, 0: 0}  # bytes of a line, by the mode in a descriptor


def swizzled(address: np.ndarray, line: int) -> np.ndarray:
    """Where pieces of 16 bytes are moved to in lines of 128, 64 or 32 bytes."""
    bits = {128: 7, 64: 3, 32: 1, 0: 0}[line]
    return address ^ (((address >> 7) & bits) << 4)


@dataclass
class Map:
    """A matrix as TMA knows it: boxes of (rows, elements of a line).

    matrix: its lines are contiguous. box: what one instruction copies. The lines of a box in shared
        memory are swizzled.
    """

    matrix: torch.Tensor
    box: tuple[int, int]

    @property
    def line(self) -> int:
        return self.box[1] * self.matrix.element_size()

    def places(self, start: int) -> np.ndarray:
        """The address in shared memory of each element of a box."""
        assert start % 128 == 0, "TMA writes to multiples of 128 bytes"
        size = self.matrix.element_size()
        linear = np.arange(self.box[0] * self.box[1]).reshape(self.box) * size
        return swizzled(start + linear, self.line)

    def inside(self, column: int, row: int) -> tuple[slice, slice]:
        """Which part of the box at these coordinates is in the matrix."""
        lines = self.matrix.stride(0) * self.matrix.element_size()
        assert self.matrix.stride(1) == 1 and lines % 16 == 0, "TMA reads lines of 16 bytes each"
        ends = (len(self.matrix) - row, self.matrix.shape[1] - column)
        return tuple(slice(0, max(0, min(size, end)))
                     for size, end in zip(self.box, ends, strict=True))  # fmt: skip

    def load(self, column: int, row: int) -> np.ndarray:
        """The bits of a box; what is outside of the matrix is 0."""
        found = torch.zeros(self.box, dtype=self.matrix.dtype)
        rows, columns = self.inside(column, row)
        found[rows, columns] = self.matrix[row : row + rows.stop, column : column + columns.stop]
        return found.view(torch.int16).numpy().view(np.uint16)

    def store(self, column: int, row: int, bits: np.ndarray) -> None:
        """Write those elements of a box that are in the matrix."""
        rows, columns = self.inside(column, row)
        values = torch.from_numpy(bits.view(np.int16).copy()).view(self.matrix.dtype)
        target = self.matrix[row : row + rows.stop, column : column + columns.stop]
        target.copy_(values[rows, columns])


@dataclass
class Mbarrier:
    """A barrier in shared memory: how many arrivals and bytes its phase still waits for."""

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1, bytes: int = 0) -> None:
        self.bytes += bytes
        self.pending -= count
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def complete(self, bytes: int) -> None:
        self.arrive(0, -bytes)


@dataclass
class Gathering:
    """A barrier that a number of threads meet at: of a block, or of the cluster."""

    arrived: int = 0
    generation: int = 0

    def arrive(self, needed: int) -> int:
        """The generation that is over when all are there."""
        awaited = self.generation
        self.arrived += WARP
        assert self.arrived <= needed, "more threads than the barrier counts"
        if self.arrived == needed:
            self.arrived, self.generation = 0, self.generation + 1
        return awaited


@dataclass
class Block:
    """A thread block: its place in the grid, its memory and its barriers."""

    rank: int
    place: tuple[int, int, int]
    cluster: Cluster
    shared: Shared = field(default_factory=lambda: Shared(SHARED_BYTES))
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    gatherings: dict[int, Gathering] = field(default_factory=dict)

    @property
    def words(self) -> np.ndarray:
        """Its shared memory as 16-bit words."""
        return self.shared.bytes.view(np.uint16)

    def at(self, address: np.ndarray) -> np.ndarray:
        """Which words are at some addresses."""
        assert address.min() >= SHARED_START and address.max() < SHARED_START + SHARED_BYTES
        return (address - SHARED_START) // 2


@dataclass
class Cluster:
    """Thread blocks that run at the same time.

    moves: boxes that are on their way. words: so are these, from one thread block to another.
    """

    threads: int
    grid: tuple[int, int, int]
    late: bool
    rng: random.Random
    blocks: list[Block] = field(default_factory=list)
    moves: list = field(default_factory=list)
    words: list = field(default_factory=list)
    gathering: Gathering = field(default_factory=Gathering)
    warps: list = field(default_factory=list)

    @property
    def on_their_way(self) -> int:
        """How many boxes and words have not arrived."""
        return len(self.moves) + len(self.words)

    def move(self, k: int) -> None:
        """Let a box arrive, or a word."""
        if k >= len(self.moves):
            block, address, value, barrier = self.words.pop(k - len(self.moves))
            assert any(warp.own is block and not warp.has_ended for warp in self.warps)
            block.shared.at(address, len(value))[:] = value
            block.mbarriers[barrier].complete(len(value))
            return
        box, blocks, start, barrier = self.moves.pop(k)
        for block in blocks:
            block.words[block.at(box[0].places(start))] = box[0].load(*box[1])
            block.mbarriers[barrier].complete(box[0].box[0] * box[0].line)


class HopperWarp(Warp):
    """A warp that waits at mbarriers, and multiplies together with the others of its warpgroup."""

    def __init__(self, program, index, block: Block, parameters, memory, grid):
        super().__init__(program, index, block.place, parameters, block.shared, memory, True)
        self.own, self.cluster, self.index = block, block.cluster, index
        self.own_special = {
            "%cluster_ctarank": block.rank, "%ctaid.z": block.place[2], "%nctaid.z": grid[2],
        }  # fmt: skip
        self.awaited: int | None = None  # of a barrier of the block, or of the cluster
        self.products, self.product_groups = [], []
        self.stores, self.store_groups = [], []

    def run(self) -> bool:
        """Go on until something is waited for; whether anything was done."""
        moved = False
        while not self.has_ended:
            at, there = self._next()
            predicate, negated, opcode, operands = self.instructions[at]
            active = self._where(there, predicate, negated)
            self._go(there, at + 1)
            if opcode[0] == "bra":
                self._go(active, self.labels[operands[0]])
            elif opcode[0] == "ret":
                self._go(active, len(self.instructions))
            elif active is not ALL and not active.any():
                continue
            elif getattr(self, f"_{opcode[0]}")(active, opcode, operands) is False:
                assert active.all(), "all lanes of a warp wait together"
                self._go(ALL, at)
                return moved
            elif opcode[0] in ("mbarrier", "bar", "barrier") and self.cluster.rng.random() < 0.3:
                return True  # another warp may go first
            moved = True
        self._finish_stores(0)
        return moved

    def _value(self, text, kind):
        if text in self.registers:
            return super()._value(text, kind)
        if text in self.own_special:
            return np.full(WARP, self.own_special[text], np.uint32)
        if isinstance(text, str) and (match := re.fullmatch(r"\w+_param_(\d+)", text)):
            return np.full(WARP, PARAMETER + int(match[1]), np.uint64)
        return super()._value(text, kind)

    def _one(self, text: str, kind: str, active) -> int:
        return int(self._value(text, kind)[np.flatnonzero(active)[0]])

    def _place(self, text: str, active) -> tuple[Block, int]:
        """The thread block and the address in it that an address of shared memory means."""
        address = int(self._address(text)[np.flatnonzero(active)[0]])
        rank = address >> RANK
        block = self.cluster.blocks[rank - 1] if rank else self.own
        return block, address & ((1 << RANK) - 1)

    # ---- what does nothing here

    def _nothing(self, active, opcode, operands):
        """Of the order of memory, or of the number of registers."""

    _fence = _setmaxnreg = _nothing

    # ---- arithmetic that other kernels do not have

    def _cvta(self, active, opcode, operands):
        self._set(active, operands[0], self._value(operands[1], "u64"))

    def _mul(self, active, opcode, operands):
        if opcode[1] != "hi":
            super()._mul(active, opcode, operands)
            return
        a, b = (self._value(text, opcode[2]).astype(np.int64) for text in operands[1:])
        self._set(active, operands[0], (a * b >> 32).astype(INTEGERS[opcode[2]]))

    def _mov(self, active, opcode, operands):
        if opcode[1] == "pred" and operands[1] not in self.registers:
            self._set(active, operands[0], np.full(WARP, operands[1] != "0"))
        else:
            super()._mov(active, opcode, operands)

    def _cvt(self, active, opcode, operands):
        target, source = operands[0], operands[-1]
        if opcode[1] == "rn" and opcode[2] in DTYPES:
            rounded = torch.from_numpy(self._value(source, opcode[3])).to(DTYPES[opcode[2]])
            self._set(active, target, rounded.view(torch.int16).numpy())
        elif "s8" in opcode:  # a register has 16 bits at least
            byte = self._value(source, "u16").astype(np.int8)
            self._set(active, target, byte.astype(INTEGERS.get(opcode[1], np.int16)))
        else:
            super()._cvt(active, opcode, operands)

    def _elect(self, active, opcode, operands):
        lanes, name = np.zeros(WARP, bool), operands[0].partition("|")[2]
        lanes[np.flatnonzero(active)[0]] = True
        self._set(active, name, lanes)

    def _mapa(self, active, opcode, operands):
        address, rank = (self._value(text, "u32") for text in operands[1:])
        self._set(active, operands[0], address + ((rank + np.uint32(1)) << np.uint32(RANK)))

    # ---- barriers

    def _mbarrier(self, active, opcode, operands):
        if opcode[1] == "try_wait":
            block, address = self._place(operands[1], active)
            parity = self._one(operands[2], "u32", active)
            if block.mbarriers[address].phase % 2 == parity:
                return False
            self._set(active, operands[0], np.ones(WARP, bool))
            return True
        at = operands[0] if opcode[1] == "init" else operands[1]
        given = operands[-1] if operands[-1] != at else None
        for lane in np.flatnonzero(active):
            alone = np.arange(WARP) == lane
            block, address = self._place(at, alone)
            count = 1 if given is None else self._one(given, "u32", alone)
            if opcode[1] == "init":
                block.mbarriers[address] = Mbarrier(count)
            elif opcode[2] == "expect_tx":
                block.mbarriers[address].arrive(bytes=count)
            else:
                block.mbarriers[address].arrive(count)
        return True

    def _await(self, gathering: Gathering, needed: int) -> bool:
        if self.awaited is None:
            self.awaited = gathering.arrive(needed)
        if gathering.generation == self.awaited:
            return False
        self.awaited = None
        return True

    def _bar(self, active, opcode, operands):
        assert opcode[1] == "sync" and active.all()
        number = self._one(operands[0], "u32", active)
        needed = self._one(operands[1], "u32", active) if operands[1:] else self.cluster.threads
        return self._await(self.own.gatherings.setdefault(number, Gathering()), needed)

    def _barrier(self, active, opcode, operands):
        assert opcode[1] == "cluster" and active.all()
        if opcode[2] == "arrive":
            self.awaited = self.cluster.gathering.arrive(
                self.cluster.threads * len(self.cluster.blocks)
            )
            return True
        return self._await(self.cluster.gathering, 0)

    # ---- words that are sent to another thread block

    def _st(self, active, opcode, operands):
        if opcode[1] != "async":
            super()._st(active, opcode, operands)
            return
        values = self._value(operands[1], "u32")
        for lane in np.flatnonzero(active):
            alone = np.arange(WARP) == lane
            block, address = self._place(operands[0], alone)
            target, barrier = self._place(operands[2], alone)
            assert target is block, "a word and its barrier are in one thread block"
            value = values[lane : lane + 1].view(np.uint8).copy()
            self.cluster.words.append((block, address, value, barrier))

    # ---- copies of boxes

    def _cp(self, active, opcode, operands):
        assert opcode[1:3] == ["async", "bulk"]
        if opcode[3] == "commit_group":
            self.store_groups.append(self.stores)
            self.stores = []
        elif opcode[3] == "wait_group":
            self._finish_stores(int(operands[0]))
        else:
            is_load = opcode[5].startswith("shared")
            tensor, place = operands[1 if is_load else 0], operands[0 if is_load else 1]
            name, *coordinates = re.findall(r"%\w+", tensor)
            which = self._one(name, "u64", active) - PARAMETER
            at = tuple(self._one(text, "s32", active) for text in coordinates)
            box = self.parameters[which], at
            block, start = self._place(place, active)
            if not is_load:
                self.stores.append((box, start))
                return
            mask = 1 << self.own.rank
            if "multicast::cluster" in opcode:
                mask = self._one(operands[3], "u16", active)
            targets = [b for b in self.cluster.blocks if mask >> b.rank & 1]
            assert block is self.own
            self.cluster.moves.append((box, targets, start, self._place(operands[2], active)[1]))

    def _finish_stores(self, keep: int) -> None:
        """Read what all but the last groups store, as late as that may be."""
        ready = self.store_groups[: len(self.store_groups) - keep]
        self.store_groups = self.store_groups[len(ready) :]
        for (target, at), start in (each for group in ready for each in group):
            target.store(*at, self.own.words[self.own.at(target.places(start))])

    # ---- products

    def _wgmma(self, active, opcode, operands):
        assert active.all()
        if opcode[1] == "mma_async":
            self.products.append((opcode, operands, *(
                self._one(text, "u64", active) for text in operands[1:3]),
                bool(self.registers[operands[3]][0])))  # fmt: skip
            if not self.cluster.late:
                self._multiply(*self.products.pop())
        elif opcode[1] == "commit_group":
            self.product_groups.append(self.products)
            self.products = []
        elif opcode[1] == "wait_group":
            count = len(self.product_groups) - int(operands[0])
            ready, self.product_groups = self.product_groups[:count], self.product_groups[count:]
            for product in (each for group in ready for each in group):
                self._multiply(*product)

    def _multiply(self, opcode, operands, left: int, right: int, adds: bool) -> None:
        """This warp's 16 of 64 rows of a product."""
        m, n, k = map(int, re.fullmatch(r"m(\d+)n(\d+)k(\d+)", opcode[4]).groups())
        dtype = DTYPES[opcode[6]]
        names, majors = operands[0], operands[6:8]
        assert m == 64 and len(names) == n // 2 and operands[4:6] == ["1", "1"]
        row = np.arange(16) + 16 * (self.index % 4)
        a = self._operand(left, row, k, majors[0] == "1", dtype)
        b = self._operand(right, np.arange(n), k, majors[1] == "1", dtype)
        with np.errstate(all="ignore"):
            product = (a @ b.T).reshape(2, 8, n // 8, 4, 2)
        # Lane 4 r + q has rows r and r + 8, columns 2 q and 2 q + 1 of each 8.
        product = product.transpose(1, 3, 2, 0, 4).reshape(WARP, len(names))
        if adds:
            held = np.stack([self.registers[name] for name in names], 1)
            product = held.view(np.float32) + product
        bits = np.ascontiguousarray(product.astype(np.float32).T).view(np.uint32)
        self.registers.update(zip(names, bits, strict=True))

    def _operand(self, descriptor: int, rows: np.ndarray, k: int, is_turned: bool, dtype):
        """Rows of an operand in shared memory, as a matrix of float64."""
        start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        line = SWIZZLES[descriptor >> 62]
        column = np.arange(k)[None, :]
        row = rows[:, None]
        if is_turned:  # lines of neighbouring rows, one for each column
            wide = line // 2
            address = row // wide * leading + row % wide * 2
            address = address + column // 8 * stride + column % 8 * line
        else:
            address = row // 8 * stride + row % 8 * line + 2 * column
        words = self.own.words[self.own.at(swizzled(start + address, line))]
        return torch.from_numpy(words.view(np.int16)).view(dtype).double().numpy()


def readable(ptx: str) -> str:
    """The PTX with what is in braces written out, and each of its names only once."""
    count = 0

    def opened(match: re.Match) -> str:
        nonlocal count
        count += 1
        text = "\n".join(each for each in match[1].splitlines() if each.strip() not in "{}")
        text = re.sub(r"\b(LAB_WAIT|DONE)\b", rf"$\g<1>{count}", text)
        return re.sub(r"(?<![%.\w])(P1|p)\b(?!:)", f"%p{10**6 + count}", text)

    return re.sub(r"// begin inline asm(.*?)// end inline asm", opened, ptx, flags=re.DOTALL)


def parameters_of(ptx: str, arguments: list, addresses: list[int]) -> list:
    """The parameters of a kernel: matrices of TMA, tensors, numbers, and bytes that nothing reads.

    Of a matrix of TMA whose number of rows is not known, the coordinates have that number.
    """
    sizes = re.findall(r"_param_\d+(?:\[(\d+)\])?[,\n]", ptx[: ptx.index("\n{")])
    found, places, left = [], iter(addresses), list(arguments)
    for size in sizes:
        if size == "1":  # the product, which is known when the kernel is compiled
            found.append(b"\0")
            continue
        if size == "4" and isinstance(found[-1], Map):
            found.append(struct.pack("<i", len(found[-1].matrix)))
            continue
        value = left.pop(0)
        if isinstance(value, torch.Tensor):
            rows = (len(value),) if size == "24" else ()
            apart = (value.stride(0),) if size in ("16", "24") else ()
            form = {0: "<Q", 1: "<QQ", 2: "<QixxxxQ"}[len(rows) + len(apart)]
            found.append(struct.pack(form, next(places), *rows, *apart))
        elif isinstance(value, Map):
            assert size == "128"
            found.append(value)
        else:
            found.append(struct.pack("<i" if isinstance(value, int) else "<f", value))
    assert not left
    return found


def launch(
    ptx: str, grid: tuple[int, int, int], arguments: list, late: bool = True, seed: int = 0
) -> None:
    """Run a kernel whose clusters have grid[0] x grid[1] thread blocks.

    arguments: in the order of the parameters, without those that are no memory of the call.
    late: whether everything that is asynchronous happens when it is waited for.
    seed: of the order in which warps and boxes go.
    """
    program = parse(readable(ptx))
    (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    memory = Memory(tensors)
    parameters = parameters_of(ptx, arguments, memory.address)
    rng = random.Random(seed)
    for z in range(grid[2]):
        cluster = Cluster(int(threads), grid, late, rng)
        places = [(x, y, z) for y in range(grid[1]) for x in range(grid[0])]
        cluster.blocks = [Block(rank, place, cluster) for rank, place in enumerate(places)]
        warps = [
            HopperWarp(program, i, block, parameters, memory, grid)
            for block in cluster.blocks
            for i in range(int(threads) // WARP)
        ]
        cluster.warps = list(warps)
        while warps:
            rng.shuffle(warps)
            moved = False
            for warp in warps:
                moved |= warp.run()
                while cluster.on_their_way and not late and rng.random() < 0.3:
                    cluster.move(rng.randrange(cluster.on_their_way))
                    moved = True
            if not moved:
                assert cluster.on_their_way, "all warps wait for ever"
                cluster.move(rng.randrange(cluster.on_their_way))
            warps = [warp for warp in warps if not warp.has_ended]
        assert not cluster.on_their_way, "a thread block has ended before its last box came"
