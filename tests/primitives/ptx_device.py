"""Runs the PTX of a kernel over tiles, lane by lane with numpy, where there is no GPU.

It knows the instructions that such kernels use, and raises AttributeError for any other. An access
outside the tensors of the call, or one that is not aligned, raises AssertionError. A warp runs as
far as it can before another one does, and cp.async moves its bytes either at once or when the
thread waits for them: whatever needs a barrier or a wait that is not there goes wrong in one of
the two.
"""

import itertools
import operator
import re
import struct
from functools import cache

import numpy as np
import torch

from tests.primitives.device_memory import SHARED_BYTES, SHARED_START, Memory, Shared

WARP = 32  # lanes
ALL = np.ones(WARP, bool)  # all lanes of a warp; `is ALL` tells it from others at once

ROUNDED = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
INTEGERS = {
    "s8": np.int8, "u8": np.uint8, "b8": np.uint8, "s16": np.int16, "u16": np.uint16,
    "b16": np.uint16, "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "s64": np.int64,
    "u64": np.uint64, "b64": np.uint64,
}  # fmt: skip
# A register's dtype, and that of its bits, by the name that an instruction has for it.
KINDS = {kind: (np.dtype(of), np.dtype(f"u{np.dtype(of).itemsize}"))
         for kind, of in INTEGERS.items()}  # fmt: skip
BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
FLOAT = np.dtype(np.float32), np.dtype(np.uint32)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # what conversions make of a NaN of 16 bits
COMPARE = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
           "eq": operator.eq, "ne": operator.ne}  # fmt: skip
# How many of the machine's instructions some of 64 bits take.
WIDE = dict.fromkeys(("setp", "selp", "and", "or", "xor", "add", "sub"), 2) | {"max": 3, "min": 3}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def parse(ptx: str) -> tuple[list, dict]:
    """(instructions, labels) of the only kernel of a PTX module.

    An instruction is (predicate or None, whether it is negated, its opcode's parts, operands).
    """
    body = re.sub(r"//.*", "", ptx[ptx.index("\n{") + 2 : ptx.rindex("}")])
    instructions, labels = [], {}
    for statement in body.split(";"):
        while match := re.match(r"\s*(\$\w+):", statement):
            labels[match[1]] = len(instructions)
            statement = statement[match.end() :]
        statement = " ".join(statement.split())
        if not statement or statement[0] == ".":  # the end, or a declaration
            continue
        match = re.fullmatch(r"(?:@(!?)(%p\d+) )?([\w.:]+) ?(.*)", statement)
        assert match, f"not understood: {statement}"
        operands = [
            tuple(part.strip() for part in text[1:-1].split(",")) if text[0] == "{" else text
            for text in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", match[4])
        ]
        instructions.append((match[2], match[1] == "!", match[3].split("."), operands))
    return instructions, labels


@cache
def _number(text: str, kind: str) -> np.ndarray:
    """A number in the text of a kernel, for 32 lanes. Nobody writes to it."""
    dtype, bits = KINDS.get(kind, FLOAT)
    if text.startswith("0f"):
        return np.full(WARP, int(text[2:], 16), np.uint32).view(dtype)
    number = int(text.removesuffix("U"), 0)
    return np.full(WARP, number % (1 << 8 * dtype.itemsize), bits).view(dtype)


@cache
def _parts_of_address(text: str) -> tuple[str, str, int]:
    """The register or number of an address, the dtype of it, and the number of bytes behind it."""
    base, _, offset = text[1:-1].partition("+")
    return base, "u64" if base.startswith("%rd") else "u32", int(offset or 0)


class Warp:
    """32 lanes, each at an instruction of its own. Those that are furthest behind go first.

    together: at which instruction all lanes are. If it is None, `place` says where each of them is.
    """

    def __init__(self, program, index, block, parameters, shared, memory, late):
        self.instructions, self.labels = program
        self.block, self.parameters = block, parameters
        self.shared, self.memory, self.late = shared, memory, late
        self.thread = np.arange(WARP, dtype=np.uint32) + np.uint32(WARP * index)
        self.registers = {}
        self.special = {"%tid.x": self.thread, "%laneid": self.thread % WARP,
                        "%ctaid.x": block[0], "%ctaid.y": block[1],
                        "__dynamic_shmem__0": SHARED_START}  # fmt: skip
        self.together, self.place, self.executed = 0, np.zeros(WARP, np.int64), 0
        self.started, self.groups = [], []  # copies by cp.async, of all lanes together

    @property
    def has_ended(self) -> bool:
        return self.behind >= len(self.instructions)

    @property
    def behind(self) -> int:
        """The instruction of those lanes that are furthest behind."""
        return int(self.place.min()) if self.together is None else self.together

    def _next(self) -> tuple[int, np.ndarray]:
        """The same, and which lanes are there."""
        at = self.behind
        if self.together is None:
            active = self.place == at
            if not active.all():
                return at, active
            self.together = at
        return at, ALL

    def _go(self, lanes: np.ndarray, to: int) -> None:
        """Some lanes go on with an instruction."""
        if lanes is ALL:
            self.together = to
        elif lanes.any():
            if self.together is not None:
                self.place, self.together = np.full(WARP, self.together), None
            self.place[lanes] = to

    def _where(self, active: np.ndarray, predicate: str | None, negated: bool) -> np.ndarray:
        """Those lanes for which the predicate of an instruction holds."""
        if not predicate:
            return active
        holds = active & (self.registers[predicate] != negated)
        return ALL if holds.all() else holds

    def run(self) -> None:
        """Go on until a barrier of the block, or the end."""
        while not self.has_ended:
            at, there = self._next()
            predicate, negated, opcode, operands = self.instructions[at]
            active = self._where(there, predicate, negated)
            self._go(there, at + 1)
            self.executed += WIDE.get(opcode[0], 1) if opcode[-1][1:] == "64" else 1
            if opcode[0] == "bra":
                self._go(active, self.labels[operands[0]])
            elif opcode[0] == "ret":
                self._go(active, len(self.instructions))
            elif opcode[0] == "bar":
                assert active.all(), "all lanes of a warp meet a barrier together"
                if opcode[1] != "warp":
                    return
            else:
                getattr(self, f"_{opcode[0]}")(active, opcode, operands)

    # ---- operands

    def _value(self, text, kind: str) -> np.ndarray:
        """An operand as 32 numbers of a dtype such as s32 or f32. Nobody writes to them."""
        dtype, unsigned = KINDS.get(kind, FLOAT)
        if isinstance(text, tuple):
            half = f"u{dtype.itemsize * 4}"
            parts = np.stack([self._value(part, half) for part in text], 1)
            return parts.view(dtype)[:, 0]
        if text in self.registers:
            bits = self.registers[text]
            if bits.dtype == bool:
                return bits
            return (bits if bits.dtype == unsigned else bits.astype(unsigned)).view(dtype)
        if text in self.special:
            return np.full(WARP, self.special[text], dtype)
        return _number(text, kind)

    def _set(self, active, name: str, values: np.ndarray) -> None:
        """Registers are kept as bits, except predicates."""
        if name == "_":
            return
        if values.dtype != bool:
            values = np.ascontiguousarray(values).view(BITS[values.dtype.itemsize])
        if active is not ALL and name in self.registers and not active.all():
            values = np.where(active, values, self.registers[name])
        self.registers[name] = values

    def _address(self, text: str) -> np.ndarray:
        base, kind, offset = _parts_of_address(text)
        return self._value(base, kind).astype(np.int64) + offset

    # ---- arithmetic

    def _mov(self, active, opcode, operands):
        target, source = operands
        kind = opcode[1]
        value = self._value(source, kind)
        if not isinstance(target, tuple):
            self._set(active, target, value)
            return
        halves = value[:, None].view(f"u{value.dtype.itemsize // 2}")
        for i, part in enumerate(target):
            self._set(active, part, halves[:, i])

    def _calculate(self, active, function, opcode, operands):
        """A function of operands of one dtype. Two floats in 64 bits (f32x2) are taken apart."""
        is_pair = opcode[-1] == "f32x2"
        values = [self._value(text, "b64" if is_pair else opcode[-1]) for text in operands[1:]]
        values = [value.view(np.float32) for value in values] if is_pair else values
        with np.errstate(all="ignore"):
            result = function(*values)
        if "NaN" in opcode:  # PTX says which NaN it is
            result = np.where(np.isnan(result), np.uint32(0x7FFFFFFF).view(np.float32), result)
        self._set(active, operands[0], result.view(np.uint64) if is_pair else result)

    def _add(self, active, opcode, operands):
        self._calculate(active, np.add, opcode, operands)

    def _sub(self, active, opcode, operands):
        self._calculate(active, np.subtract, opcode, operands)

    def _fma(self, active, opcode, operands):
        self._calculate(active, _fused, opcode, operands)

    def _abs(self, active, opcode, operands):
        self._calculate(active, np.abs, opcode, operands)

    def _max(self, active, opcode, operands):
        is_loud = "NaN" in opcode or opcode[-1][0] != "f"
        self._calculate(active, np.maximum if is_loud else np.fmax, opcode, operands)

    def _min(self, active, opcode, operands):
        is_loud = "NaN" in opcode or opcode[-1][0] != "f"
        self._calculate(active, np.minimum if is_loud else np.fmin, opcode, operands)

    def _lg2(self, active, opcode, operands):
        self._calculate(active, np.log2, opcode, operands)

    def _sqrt(self, active, opcode, operands):
        self._calculate(active, np.sqrt, opcode, operands)

    def _copysign(self, active, opcode, operands):
        sign, size, kind = operands[1], operands[2], opcode[-1]
        found = np.copysign(self._value(size, kind), self._value(sign, kind))
        self._set(active, operands[0], found)

    def _ex2(self, active, opcode, operands):
        self._calculate(active, np.exp2, opcode, operands)

    def _rcp(self, active, opcode, operands):
        self._calculate(active, np.reciprocal, opcode, operands)

    def _rsqrt(self, active, opcode, operands):
        self._calculate(active, lambda x: np.reciprocal(np.sqrt(x)), opcode, operands)

    def _tanh(self, active, opcode, operands):
        self._calculate(active, np.tanh, opcode, operands)

    def _neg(self, active, opcode, operands):
        self._set(active, operands[0], -self._value(operands[1], opcode[1]))

    def _mul(self, active, opcode, operands):
        if opcode[1] == "hi":
            dtype, _ = KINDS[opcode[2]]
            a, b = (self._value(text, opcode[2]).astype(object) for text in operands[1:])
            self._set(active, operands[0], ((a * b) >> 8 * dtype.itemsize).astype(dtype))
            return
        if opcode[1] != "wide":
            self._calculate(active, np.multiply, opcode, operands)
            return
        wide = np.int64 if opcode[2][0] == "s" else np.uint64
        a, b = (self._value(text, opcode[2]).astype(wide) for text in operands[1:])
        self._set(active, operands[0], a * b)

    def _mad(self, active, opcode, operands):
        a, b, c = (self._value(text, opcode[2]) for text in operands[1:])
        assert opcode[1] == "lo"
        self._set(active, operands[0], a * b + c)

    def _div(self, active, opcode, operands):
        a, b = (self._value(text, opcode[1]) for text in operands[1:])
        quotient = a / b if opcode[-1] == "f32" else np.fix(a / b)  # exact for 32 bits
        self._set(active, operands[0], quotient.astype(a.dtype))

    def _rem(self, active, opcode, operands):
        a, b = (self._value(text, opcode[1]) for text in operands[1:])
        self._set(active, operands[0], np.fmod(a, b))

    def _bitwise(self, active, opcode, operands):
        kind = "u32" if opcode[1] == "pred" else opcode[1]
        a, b = (self._value(text, kind) for text in operands[1:])
        self._set(active, operands[0], BITWISE[opcode[0]](a, b))

    _and = _or = _xor = _bitwise

    def _not(self, active, opcode, operands):
        value = self.registers[operands[1]] if opcode[1] == "pred" else None
        value = self._value(operands[1], opcode[1]) if value is None else value
        self._set(active, operands[0], ~value)

    def _shl(self, active, opcode, operands):
        a, by = self._value(operands[1], opcode[1]), self._value(operands[2], "u32")
        self._set(active, operands[0], a << by.astype(a.dtype))

    def _shr(self, active, opcode, operands):
        a, by = self._value(operands[1], opcode[1]), self._value(operands[2], "u32")
        self._set(active, operands[0], a >> by.astype(a.dtype))

    def _setp(self, active, opcode, operands):
        a, b = (self._value(text, opcode[2]) for text in operands[1:])
        self._set(active, operands[0], _compared(opcode[1], a, b))

    def _prmt(self, active, opcode, operands):
        """Four of the eight bytes of two words, as the digits of a number choose them."""
        low, high = (self._value(text, "u32") for text in operands[1:3])
        each = np.stack((low, high), 1).view(np.uint8)
        chosen = self._value(operands[3], "u32")[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
        found = np.take_along_axis(each, (chosen & 7).astype(np.int64), 1)
        repeats = (chosen & 8).astype(bool)  # the sign of the byte
        found = np.where(repeats, (found.view(np.int8) >> 7).view(np.uint8), found)
        self._set(active, operands[0], np.ascontiguousarray(found).view(np.uint32)[:, 0])

    def _selp(self, active, opcode, operands):
        a, b = (self._value(text, opcode[1]) for text in operands[1:3])
        self._set(active, operands[0], np.where(self.registers[operands[3]], a, b))

    def _cvt(self, active, opcode, operands):
        if opcode[2] in ("bf16x2", "f16x2"):
            high, low = (self._value(text, "f32") for text in operands[1:])
            dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[opcode[2]]
            pair = torch.from_numpy(np.stack((low, high), 1)).to(dtype)
            self._set(active, operands[0], pair.view(torch.uint8).numpy().view(np.uint32)[:, 0])
        elif opcode[-2] in ("f16", "bf16"):
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[opcode[-2]]
            value = torch.from_numpy(self._value(operands[1], "f32").copy()).to(dtype)
            self._set(active, operands[0], value.view(torch.int16).numpy())
        elif opcode[-1] in ("f16", "bf16"):
            value = _floats(self._value(operands[1], "u16"), opcode[-1]).astype(np.float32)
            self._set(active, operands[0], np.where(np.isnan(value), NAN, value))
        else:
            value = self._value(operands[1], opcode[-1])
            for way in ROUNDED.keys() & {*opcode}:
                value = ROUNDED[way](value)
            self._set(active, operands[0], value.astype(INTEGERS.get(opcode[-2], np.float32)))

    def _shfl(self, active, opcode, operands):
        assert opcode[1] == "sync" and active.all()
        assert opcode[2] in ("idx", "bfly", "up", "down")
        source, lane = self._value(operands[2], "u32") % np.uint32(WARP), np.arange(WARP)
        if opcode[2] in ("up", "down"):
            last = {"up": "0", "down": "31"}[opcode[2]]
            assert operands[3] == last, "the whole warp is one segment"
            there = lane - source if opcode[2] == "up" else lane + source
            source = np.where((there >= 0) & (there < WARP), there, lane)
        elif opcode[2] == "idx":
            source = self._in_segment(source, self._value(operands[3], "u32"))
        if opcode[2] == "bfly":
            source = source ^ np.arange(WARP, dtype=np.uint32)
        self._set(active, operands[0], self._value(operands[1], "u32")[source])

    @staticmethod
    def _in_segment(source: np.ndarray, clamp: np.ndarray) -> np.ndarray:
        """The lane that idx reads of, where the mask in `clamp` divides the warp into segments."""
        mask, lane = clamp >> np.uint32(8) & np.uint32(31), np.arange(WARP, dtype=np.uint32)
        return (lane & mask) | (source & ~mask)

    def _redux(self, active, opcode, operands):
        assert opcode[1] == "sync" and active.all()
        values = self._value(operands[1], opcode[3])
        found = {"max": values.max, "min": values.min, "add": values.sum}[opcode[2]]()
        self._set(active, operands[0], np.full(WARP, found, values.dtype))

    def _vote(self, active, opcode, operands):
        assert opcode[1:] == ["sync", "all", "pred"] and active.all()
        self._set(active, operands[0], np.full(WARP, bool(self._value(operands[1], "u32").all())))

    def _popc(self, active, opcode, operands):
        bits = self._value(operands[1], "u32")
        counts = np.unpackbits(bits[:, None].view(np.uint8), axis=1).sum(1)
        self._set(active, operands[0], counts.astype(np.uint32))

    def _griddepcontrol(self, active, opcode, operands):
        """There is no kernel before or after."""

    # ---- memory

    def _access(self, opcode, operands):
        """(names of registers, addresses, bytes of each element, the memory) of a load or store."""
        if any(["cache_hint" in part for part in opcode]):
            operands = operands[:-1]  # a policy of the cache, which changes no value
        target, place = operands if opcode[0] == "ld" else operands[::-1]
        target = target if isinstance(target, tuple) else (target,)
        memory = {"shared": self.shared, "global": self.memory}[opcode[1]]
        return target, self._address(place), int(opcode[-1][1:]) // 8, memory

    def _atom(self, active, opcode, operands):
        assert opcode[1:] == ["shared", "cta", "add", "u32"]
        address = self._address(operands[1])
        added, before = self._value(operands[2], "u32"), np.zeros(WARP, np.uint32)
        for lane in np.flatnonzero(active):
            place = self.shared.at(int(address[lane]), 4).view(np.uint32)
            before[lane] = place[0]
            place[0] += added[lane]
        self._set(active, operands[0], before)

    def _ld(self, active, opcode, operands):
        if opcode[1] == "param":
            name, _, offset = operands[1][1:-1].partition("+")
            names = operands[0] if isinstance(operands[0], tuple) else (operands[0],)
            data, size = self.parameters[int(name.rpartition("_")[2])], int(opcode[-1][1:]) // 8
            for i, each in enumerate(names):
                at = int(offset or 0) + i * size
                bits = np.frombuffer(data[at : at + size], f"u{size}")
                self._set(active, each, np.repeat(bits, WARP))
            return
        names, addresses, size, memory = self._access(opcode, operands)
        found = np.zeros((WARP, len(names)), f"u{size}")
        if active.any():
            found[active] = memory.load(addresses[active], size * len(names)).view(found.dtype)
        for i, each in enumerate(names):
            self._set(active, each, found[:, i])

    def _st(self, active, opcode, operands):
        names, addresses, size, memory = self._access(opcode, operands)
        values = np.stack([self._value(each, f"u{8 * size}") for each in names], 1)
        memory.store(addresses[active], values[active].view(np.uint8))

    def _cp(self, active, opcode, operands):
        if opcode[2] == "commit_group":
            self.groups.append(self.started)
            self.started = []
        elif opcode[2] == "wait_group":
            keep = int(operands[0])
            ready = self.groups[: len(self.groups) - keep]
            self.groups = self.groups[len(ready) :]
            for copy in itertools.chain.from_iterable(ready):
                self._arrive(*copy)
        else:
            assert opcode[1] == "async" and opcode[2] in ("cg", "ca"), "which caches is no matter"
            assert opcode[3:] == ["shared", "global"]
            size = int(operands[2])
            read = self._value(operands[3], "u32") if len(operands) > 3 else np.full(WARP, size)
            to, source = self._address(operands[0]), self._address(operands[1])
            copy = to[active], source[active], read[active].astype(np.int64), size
            if self.late:
                self.started.append(copy)
            else:
                self._arrive(*copy)

    def _arrive(self, to: np.ndarray, source: np.ndarray, read: np.ndarray, size: int) -> None:
        """Copy the first bytes of pieces of so many, of which the rest is 0."""
        pieces = np.zeros((len(to), size), np.uint8)
        if read.any():
            pieces[read > 0] = self.memory.load(source[read > 0], size)
            pieces[np.arange(size) >= read[:, None]] = 0
        self.shared.store(to, pieces)

    # ---- matrices

    def _ldmatrix(self, active, opcode, operands):
        assert active.all()
        names = operands[0] if isinstance(operands[0], tuple) else (operands[0],)
        # Rows of 16 bytes: those of matrix i are where lanes 8 i to 8 i + 7 say.
        places = self._address(operands[1])[: 8 * len(names)]
        rows = self.shared.load(places, 16).view(np.uint16)
        for i, name in enumerate(names):
            matrix = rows[8 * i : 8 * i + 8]
            matrix = matrix.T if "trans" in opcode else matrix
            pairs = np.ascontiguousarray(matrix).view(np.uint32)  # lane 4 r + c: pair c of row r
            self._set(active, name, pairs.reshape(WARP))

    def _stmatrix(self, active, opcode, operands):
        assert active.all() and "trans" not in opcode
        names = operands[1] if isinstance(operands[1], tuple) else (operands[1],)
        rows = [self._value(name, "u32").reshape(8, 4).view(np.uint8) for name in names]
        self.shared.store(self._address(operands[0])[: 8 * len(names)], np.concatenate(rows))

    def _mma(self, active, opcode, operands):
        assert active.all() and opcode[3:6] == ["m16n8k16", "row", "col"] and opcode[6] == "f32"
        d, a, b, c = operands
        # Each register as a matrix 8x8 of its pairs, lane 4 r + c holding pair c of row r.
        bits = np.stack([self._value(name, "u32") for name in (*a, *b)])
        pairs = _floats(bits.view(np.uint16), opcode[7]).reshape(6, 8, 8).astype(np.float64)
        a0, a1, a2, a3, b0, b1 = pairs  # of a: rows 0 and 8 of columns 0, then of columns 8
        left = np.concatenate((np.hstack((a0, a2)), np.hstack((a1, a3))))
        product = left @ np.hstack((b0, b1)).T  # of b: one row for each column of the product
        sums = np.stack([self._value(name, "f32") for name in c], 1).reshape(8, 4, 2, 2)
        # of lane 4 r + q: rows r and r + 8, columns 2 q and 2 q + 1
        sums = sums + product.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3)
        for i, name in enumerate(d):
            self._set(active, name, sums.reshape(WARP, 4)[:, i].astype(np.float32))


def _floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of 16 bits each, in float32 or float16."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else bits.view("f2")


def _compared(how: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A comparison of setp: num asks whether both are numbers, nan whether one is not.

    Other names of three letters are comparisons that hold of NaN, too.
    """
    if len(how) == 2:
        return COMPARE[how](a, b)
    either = np.isnan(a) | np.isnan(b)
    if how in ("num", "nan"):
        return either if how == "nan" else ~either
    return COMPARE[how[:2]](a, b) | either


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c: the product of two floats is exact in 64 bits."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def parameter_of(tensor: torch.Tensor, address: int) -> bytes:
    """A matrix as a kernel's parameter: the pointer, both sizes, and the stride that is not 1."""
    stride = tensor.stride(0) if tensor.stride(1) == 1 else tensor.stride(1)
    return struct.pack("<QiiQ", address, *tensor.shape, stride)


def parameters_of_emitted(
    ptx: str, arguments: list, addresses: list[int], is_uncut: bool = False
) -> list[bytes]:
    """The parameters of an emitted kernel: tensors and numbers.

    Of a tensor they are the pointer, the number of rows if the kernel does not know it, and the
    distance of the rows if they are any, as its size tells. Of one with more leading dimensions
    they are the sizes of these, from the last to the first, and their strides; if it is uncut,
    from the first to the last.
    """
    sizes = re.findall(r"_param_\d+(?:\[(\d+)\])?[,\n]", ptx[: ptx.index("\n{")])
    packed, places = [], iter(addresses)
    for value, size in zip(arguments, sizes, strict=True):
        if not isinstance(value, torch.Tensor):
            packed.append(struct.pack("<i" if isinstance(value, int) else "<f", value))
            continue
        if value.ndim > 2 and size != "24":
            is_value = int(size) == 8 + 12 * value.ndim + 4 * (value.ndim % 2)  # one for each row
            lead = value.ndim - (not is_value)
            order = slice(None) if is_uncut else slice(None, None, -1)
            sizes_of = struct.pack(f"<{lead}i{'xxxx' * (lead % 2)}", *value.shape[:lead][order])
            strides = struct.pack(f"<{lead}Q", *value.stride()[:lead][order])
            packed.append(struct.pack("<Q", next(places)) + sizes_of + strides)
            assert len(packed[-1]) == int(size), (len(packed[-1]), size, value.shape)
            continue
        rows = (len(value),) if size == "24" else ()
        apart = (value.stride(0),) if size in ("16", "24") else ()
        form = {0: "<Q", 1: "<QQ", 2: "<QixxxxQ"}[len(rows) + len(apart)]
        packed.append(struct.pack(form, next(places), *rows, *apart))
    return packed


def launch(
    ptx: str, grid: tuple[int, int], arguments: list, late=True, reverse=False, is_emitted=False,
    is_uncut=False,
):  # fmt: skip
    """Run a kernel whose parameters are matrices, which are tensors in the memory of the host.

    late: whether cp.async moves its bytes when they are waited for, or at once.
    reverse: whether the last warp goes first.
    is_emitted: whether it is the kernel of a row function, which has other parameters too.
    is_uncut: whether such a kernel itself takes the pieces of its tensors.

    Returns about how many instructions of the machine a warp has executed, in the mean.
    """
    executed: list[int] = []
    program = parse(ptx)
    (threads,) = re.findall(r"\.reqntid (\d+)", ptx)
    memory = Memory([each for each in arguments if isinstance(each, torch.Tensor)])
    if is_emitted:
        parameters = parameters_of_emitted(ptx, arguments, memory.address, is_uncut)
    else:
        parameters = [
            parameter_of(tensor, address)
            for tensor, address in zip(arguments, memory.address, strict=True)
        ]
    for block in itertools.product(*map(range, grid)):
        shared = Shared(SHARED_BYTES)
        warps = [
            Warp(program, i, block, parameters, shared, memory, late)
            for i in range(int(threads) // WARP)
        ]
        every = warps
        while warps:
            for warp in reversed(warps) if reverse else warps:
                warp.run()
            assert len({warp.has_ended for warp in warps}) == 1, "a warp ends before a barrier"
            warps = [warp for warp in warps if not warp.has_ended]
        executed += [warp.executed for warp in every]
    return sum(executed) / len(executed)
