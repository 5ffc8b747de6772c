"""Reads out of a cubin what its kernel uses: registers, stack, shared memory, threads.

The file is a 64-bit ELF. The figures are attributes of its `.nv.info` sections, and are those that
`cuobjdump -res-usage` prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_REGISTERS, _FRAME_SIZE, _REQUIRED_THREADS = 0x2F, 0x11, 0x10  # EIATTR_*
_SYMBOL_TABLE = 2  # sh_type
_RECORD_WITH_LENGTH = 4  # the format of an attribute whose length follows


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel uses: registers and bytes of stack of a thread, bytes of shared memory of a
    thread block, threads of a thread block, and bytes of code."""

    registers: int
    stack: int
    static_shared: int
    dynamic_shared: int
    threads: int
    code_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers and {self.stack} bytes of stack a thread, "
            f"{self.threads} threads, {self.dynamic_shared} bytes of shared memory, "
            f"{self.code_bytes} bytes of code"
        )


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def read_resources(cubin: bytes, dynamic_shared: int) -> Resources:
    """The resources of the only kernel in a cubin."""
    sections = _sections(cubin)
    (text,) = (s for s in sections if s.name.startswith(".text."))
    kernel = text.name.removeprefix(".text.")
    symbols = _symbols(cubin, sections)
    registers = stack = threads = static_shared = 0
    for section in sections:
        if section.name == ".nv.info":
            for attribute, payload in _attributes(cubin, section):
                if attribute in (_REGISTERS, _FRAME_SIZE) and len(payload) == 8:
                    symbol, number = struct.unpack("<II", payload)
                    if symbols[symbol] == kernel:
                        if attribute == _REGISTERS:
                            registers = number
                        else:
                            stack = number
        elif section.name == f".nv.info.{kernel}":
            for attribute, payload in _attributes(cubin, section):
                if attribute == _REQUIRED_THREADS:
                    x, y, z = struct.unpack("<3I", payload[:12])
                    threads = x * y * z
        elif section.name == f".nv.shared.{kernel}":
            static_shared = section.size
    return Resources(registers, stack, static_shared, dynamic_shared, threads, text.size)


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names = raw[names_index][4]
    return [_Section(_text(cubin, names + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


def _symbols(cubin: bytes, sections: list[_Section]) -> list[str]:
    (table,) = (s for s in sections if s.kind == _SYMBOL_TABLE)
    names = sections[table.link].offset
    offsets = range(table.offset, table.offset + table.size, 24)
    return [_text(cubin, names + struct.unpack_from("<I", cubin, o)[0]) for o in offsets]


def _text(cubin: bytes, offset: int) -> str:
    return cubin[offset : cubin.index(b"\0", offset)].decode()


def _attributes(cubin: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    at, end = section.offset, section.offset + section.size
    while at + 4 <= end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if kind == _RECORD_WITH_LENGTH:
            yield attribute, cubin[at + 4 : at + 4 + length]
            at += 4 + length
        else:
            yield attribute, cubin[at + 2 : at + 4]
            at += 4
