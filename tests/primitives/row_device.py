"""Runs the PTX of a kernel over rows where there is no GPU, one cluster of thread blocks at a time.

It knows what such kernels use beyond those over tiles: shifts, warps that synchronize, and the
exchange over a cluster. Warps run in turn, each as far as it can, from the first or from the last.
"""

import itertools
import operator
import random
import re
import struct

import numpy as np
import torch

from tests.primitives import ptx_device
from tests.primitives.device_memory import SHARED_BYTES, Memory, Shared
from tests.primitives.ptx_device import INTEGERS, WARP

NARROW = {"bf16": torch.bfloat16, "f16": torch.float16}
RANK = 1 << 24  # bytes between the shared memories of the blocks of a cluster
# The loop around an attempt to wait, as CuTe-DSL writes it.
WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;.*?try_wait\.parity\.\S+ P1, (\[%r\d+\]), (\S+), .*?\}", re.S
)


class Barrier:
    """An mbarrier in shared memory: arrivals and bytes that its phase still waits for."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def change(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        if not self.pending and not self.bytes:
            self.pending, self.phase = self.count, self.phase ^ 1


class RowWarp(ptx_device.Warp):
    """A warp of a thread block of a cluster.

    rank: the block's, of those of the cluster. cluster: the (shared memory, its mbarriers) of all.
    turns: random numbers that say when the warp lets others overtake it.
    """

    def __init__(self, *arguments, rank, cluster, turns):
        super().__init__(*arguments)
        self.rank, self.cluster, self.turns = rank, cluster, turns

    def run(self) -> str:
        """Go on until all lanes wait, or the end: "block", "cluster", "bytes" or "end".

        Or "turn": the lanes have waited for each other only, and other warps run first.
        """
        while not self.has_ended:
            at, there = self._next()
            predicate, negated, opcode, operands = self.instructions[at]
            active = self._where(there, predicate, negated)
            if opcode[0] == "mbarwait" and active.any():
                bar = self._barriers[int(self._address(operands[0])[active][0])]
                if bar.phase == int(self._value(operands[1], "u32")[active][0]):
                    return "bytes"
            self._go(there, at + 1)
            if opcode[0] == "bra":
                self._go(active, self.labels[operands[0]])
            elif opcode[0] == "ret":
                self._go(active, len(self.instructions))
            elif opcode[0] in ("bar", "barrier") and opcode[1] != "warp":
                assert active.all(), "all lanes of a warp meet a barrier together"
                if opcode[:2] == ["barrier", "cluster"] and opcode[2] == "arrive":
                    continue
                return "cluster" if opcode[1] == "cluster" else "block"
            elif opcode[0] in ("bar", "mbarwait"):
                assert opcode[0] != "bar" or active.all(), "all lanes of a warp synchronize"
                if opcode[0] == "bar" and self.turns.random() < 0.5:
                    return "turn"
            else:
                getattr(self, f"_{opcode[0]}")(active, opcode, operands)
        return "end"

    @property
    def _barriers(self) -> dict[int, Barrier]:
        return self.cluster[self.rank][1]

    def _value(self, text, kind):
        if text in self.registers:
            return super()._value(text, kind)
        special = {"%cluster_ctarank": self.rank, "%laneid": np.arange(WARP),
                   "%cluster_nctarank": len(self.cluster), "%ctaid.y": self.block[1]}  # fmt: skip
        if isinstance(text, str) and text in special:
            return np.broadcast_to(special[text], WARP).astype(INTEGERS.get(kind, np.uint32))
        if text in ("-1", "0xffffffff") and kind.startswith("u"):
            text = str(2 ** int(kind[1:]) - 1)
        return super()._value(text.removesuffix("U") if isinstance(text, str) else text, kind)

    # ---- arithmetic

    def _calculate(self, active, function, opcode, operands):
        """A function of operands of one dtype. float32 is exact enough for those of 16 bits."""
        if opcode[-1] not in NARROW:
            super()._calculate(active, function, opcode, operands)
            return
        wide = [self._number(text, opcode[-1]) for text in operands[1:]]
        with np.errstate(all="ignore"):
            found = torch.from_numpy(function(*wide)).to(NARROW[opcode[-1]])
        self._set(active, operands[0], found.view(torch.int16).numpy().view(np.uint16))

    def _number(self, text: str, dtype: str) -> np.ndarray:
        """An operand; floats of 16 bits as those of float32."""
        if dtype not in NARROW:
            return self._value(text, dtype)
        bits = torch.from_numpy(self._value(text, "u16").view(np.int16).copy())
        return bits.view(NARROW[dtype]).float().numpy()

    def _shf(self, active, opcode, operands):
        low, high, by = (self._value(each, "u32").astype(np.uint64) for each in operands[1:])
        both = high << np.uint64(32) | low
        by = by % 32 if opcode[2] == "wrap" else np.minimum(by, 32)
        found = both >> by if opcode[1] == "r" else both << by >> np.uint64(32)
        self._set(active, operands[0], found.astype(np.uint32))

    def _prmt(self, active, opcode, operands):
        low, high, which = (self._value(each, "u32") for each in operands[1:])
        parts = np.stack((low, high), 1).view(np.uint8)
        if opcode[-1] == "f4e":  # four bytes from one on
            which = 0x3210 + 0x1111 * (which & 3)
        found = np.zeros((WARP, 4), np.uint8)
        for i in range(4):
            nibble = which >> np.uint32(4 * i) & 15
            byte = parts[np.arange(WARP), nibble & 7]
            sign = np.where(byte >> 7, 0xFF, 0).astype(np.uint8)
            found[:, i] = np.where(nibble & 8, sign, byte)
        self._set(active, operands[0], found.view(np.uint32)[:, 0])

    def _cvt(self, active, opcode, operands):
        if opcode[-2] not in NARROW:
            super()._cvt(active, opcode, operands)
            return
        found = torch.from_numpy(self._value(operands[1], opcode[-1]).copy()).to(NARROW[opcode[-2]])
        self._set(active, operands[0], found.view(torch.int16).numpy().view(np.uint16))

    def _mul(self, active, opcode, operands):
        if opcode[1] != "hi":
            super()._mul(active, opcode, operands)
            return
        wide = np.int64 if opcode[2][0] == "s" else np.uint64
        a, b = (self._value(each, opcode[2]).astype(wide) for each in operands[1:])
        self._set(active, operands[0], (a * b >> wide(32)).astype(INTEGERS[opcode[2]]))

    def _neg(self, active, opcode, operands):
        if opcode[1] not in ("bf16x2", "f16x2"):
            super()._neg(active, opcode, operands)
            return
        self._set(active, operands[0], self._value(operands[1], "u32") ^ np.uint32(0x80008000))

    def _lg2(self, active, opcode, operands):
        self._calculate(active, np.log2, opcode, operands)

    def _sqrt(self, active, opcode, operands):
        self._calculate(active, np.sqrt, opcode, operands)

    def _setp(self, active, opcode, operands):
        a, b = (self._number(text, opcode[-1]) for text in operands[1:3])
        name, is_float = opcode[1], "f" in opcode[-1]
        if name in ("nan", "num"):
            found = (np.isnan(a) | np.isnan(b)) == (name == "nan")
        elif name[-1] == "u" and name[:-1] in ptx_device.COMPARE and is_float:
            found = ptx_device.COMPARE[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)
        else:
            found = {**ptx_device.COMPARE, "hs": operator.ge, "lo": operator.lt,
                     "hi": operator.gt, "ls": operator.le}[name](a, b)  # fmt: skip
            if name == "ne" and is_float:
                found &= ~np.isnan(a) & ~np.isnan(b)
        self._set(active, operands[0], found)

    def _vote(self, active, opcode, operands):
        assert active.all()
        given = self.registers[operands[1]]
        if opcode[2] == "ballot":
            bits = np.packbits(given, bitorder="little").view(np.uint32)
            self._set(active, operands[0], np.repeat(bits, WARP))
        else:
            found = given.all() if opcode[2] == "all" else given.any()
            self._set(active, operands[0], np.full(WARP, found))

    def _redux(self, active, opcode, operands):
        assert active.all()
        reduce = {"add": np.add, "max": np.maximum, "min": np.minimum}[opcode[2]].reduce
        given = self._value(operands[1], opcode[3])
        self._set(active, operands[0], np.repeat(reduce(given).astype(given.dtype), WARP))

    def _elect(self, active, opcode, operands):
        self._set(active, operands[0].rpartition("|")[2], np.arange(WARP) == 0)

    def _fence(self, active, opcode, operands):
        """One warp runs at a time."""

    # ---- the exchange over a cluster

    def _mbarrier(self, active, opcode, operands):
        at = operands[0] if opcode[1] == "init" else operands[1]
        number = self._value(operands[-1], "u32")
        for lane in np.flatnonzero(active):
            address = int(self._address(at)[lane])
            if opcode[1] == "init":
                self._barriers[address] = Barrier(int(number[lane]))
            else:
                assert opcode[1:3] == ["arrive", "expect_tx"]
                self._barriers[address].change(1, int(number[lane]))

    def _mapa(self, active, opcode, operands):
        address, rank = (self._value(each, "u32") for each in operands[1:])
        self._set(active, operands[0], address + rank * np.uint32(RANK))

    def _st(self, active, opcode, operands):
        if opcode[1] != "async":
            super()._st(active, opcode, operands)
            return
        names = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
        size = int(opcode[-1][1:]) // 8
        values = np.stack([self._value(each, f"u{8 * size}") for each in names], 1)
        to, bars = self._address(operands[0]), self._address(operands[2])
        for lane in np.flatnonzero(active):
            (rank, address), (bar_rank, bar) = (divmod(int(a[lane]), RANK) for a in (to, bars))
            assert rank == bar_rank
            shared, barriers = self.cluster[rank]
            shared.at(address, size * len(names))[:] = values[lane].view(np.uint8)
            barriers[bar].change(0, -size * len(names))


def parse(ptx: str) -> tuple[list, dict]:
    """As `ptx_device.parse`, of a kernel that waits for what other blocks of a cluster send."""
    ptx = WAIT.sub(r"mbarwait \1, \2;", ptx).replace("::", "_")
    return ptx_device.parse(ptx)


def launch(
    kernel,
    arguments: list,
    rows: int,
    reverse: bool = False,
    blocks: int | None = None,
    late: bool = True,
) -> None:
    """Run what `inspect` returned for so many rows; of two kernels the first one.

    arguments: of the kernel in order, results last: tensors in the memory of the host, and numbers.
    reverse: whether the last warp goes first.
    blocks: how many thread blocks or clusters run, if not as many as the rows need.
    late: whether cp.async moves its bytes when they are waited for, or at once.
    """
    memory = Memory([each for each in arguments if isinstance(each, torch.Tensor)])
    ptx = _first_kernel(kernel.ptx)
    parameters = ptx_device.parameters_of_emitted(ptx, arguments, memory.address)
    _launch(kernel, memory, parameters, rows, reverse, blocks, late)


def _first_kernel(ptx: str) -> str:
    """The text up to the end of the first kernel."""
    return ptx[: ptx.index("\n}") + 2]


def launch_pieces(kernel, named: dict[str, torch.Tensor], rows: int, reverse: bool = False) -> None:
    """Run what `inspect` returned for so many rows, of which it or the host takes pieces.

    named: its arguments and results, of one leading dimension, in the memory of the host.
    """
    memory = Memory(list(named.values()))
    addresses = dict(zip(named, memory.address, strict=True))
    sizes = re.findall(r"_param_\d+(?:\[(\d+)\])?[,\n]", kernel.ptx[: kernel.ptx.index("\n{")])
    parameters, graph = [], kernel.plan.graph
    pieces = *graph.inputs, *graph.outputs
    if len(sizes) < len(pieces):  # it takes tensors uncut
        order = dict.fromkeys(piece.name for piece in pieces)
        uncut, starts = [named[name] for name in order], [addresses[name] for name in order]
        parameters = ptx_device.parameters_of_emitted(kernel.ptx, uncut, starts, is_uncut=True)
        return _launch(kernel, memory, parameters, rows, reverse)
    for piece, size in zip(pieces, sizes, strict=True):
        tensor, view = named[piece.name], piece.view
        start = 0 if view is None else np.dot(view.start, tensor.stride()[1:])
        address = addresses[piece.name] + int(start) * tensor.element_size()
        rows_of = (rows,) if size == "24" else ()
        apart = (tensor.stride(0) // (1 if view is None else view.width),) if size != "8" else ()
        form = ("<Q", "<QQ", "<QixxxxQ")[len(rows_of) + len(apart)]
        parameters.append(struct.pack(form, address, *rows_of, *apart))
    _launch(kernel, memory, parameters, rows, reverse)


def _launch(
    kernel,
    memory: Memory,
    parameters: list[bytes],
    rows: int,
    reverse: bool,
    blocks: int | None = None,
    late: bool = True,
) -> None:
    plan, ptx = kernel.plan, _first_kernel(kernel.ptx)
    program = parse(ptx)
    (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
    ctas = plan.numerics.cluster_n // plan.placement.shares
    for row in range(-(-rows // plan.rows_per_block) if blocks is None else blocks):
        cluster = [(Shared(SHARED_BYTES), {}) for _ in range(ctas)]
        order = itertools.product(range(ctas), range(int(threads) // WARP))
        turns = random.Random(row)
        warps = [
            RowWarp(program, i, (row, rank), parameters, cluster[rank][0], memory, late,
                    rank=rank, cluster=cluster, turns=turns)
            for rank, i in order
        ]  # fmt: skip
        _run(warps[::-1] if reverse else warps)


def _run(warps: list[RowWarp]) -> None:
    """Run all warps of a cluster to their ends."""
    state = dict.fromkeys(warps, "bytes")  # all may run
    while set(state.values()) != {"end"}:
        ready = [warp for warp in warps if state[warp] in ("bytes", "turn")]
        before = [warp.behind for warp in ready]
        for warp in ready:
            state[warp] = warp.run()
        moved = any(w.behind != at for w, at in zip(ready, before, strict=True))
        moved |= "turn" in state.values()
        for rank in {warp.rank for warp in warps}:
            of_block = [warp for warp in warps if warp.rank == rank]
            if {state[warp] for warp in of_block} == {"block"}:
                state |= dict.fromkeys(of_block, "bytes")
                moved = True
        if set(state.values()) == {"cluster"}:
            state, moved = dict.fromkeys(warps, "bytes"), True
        assert moved or set(state.values()) == {"end"}, f"all wait: {sorted(state.values())}"
