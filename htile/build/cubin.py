"""Reads out of a cubin what its kernel uses: registers, stack, shared memory, threads.

The file is a 64-bit ELF. The figures are attributes of its `.nv.info` sections, and are those that
`cuobjdump -res-usage` prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import CompileError

_REGISTERS, _FRAME_SIZE, _REQUIRED_THREADS = 0x2F, 0x11, 0x10  # EIATTR_*
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


class _Section(NamedTuple):
    offset: int = 0
    size: int = 0


def read_resources(cubin: bytes, dynamic_shared: int, function: str = "") -> Resources:
    """The resources of the only kernel in a cubin, or of that with `function` in its name."""
    sections = _sections(cubin)
    texts = [name for name in sections if name.startswith(".text.")]
    (text,) = texts if len(texts) == 1 else [name for name in texts if function in name]
    kernel = text.removeprefix(".text.")
    symbols, names = sections[".symtab"], sections[".strtab"].offset
    figures = {}
    for attribute, payload in _attributes(cubin, sections[".nv.info"]):
        if attribute in (_REGISTERS, _FRAME_SIZE):
            symbol, figure = struct.unpack("<II", payload)
            (name,) = struct.unpack_from("<I", cubin, symbols.offset + 24 * symbol)
            if _text(cubin, names + name) == kernel:
                figures[attribute] = figure
    of_kernel = dict(_attributes(cubin, sections[f".nv.info.{kernel}"]))
    if _REGISTERS not in figures or _REQUIRED_THREADS not in of_kernel:
        raise CompileError(f"the machine code of {kernel} does not name its registers and threads")
    x, y, z = struct.unpack("<3I", of_kernel[_REQUIRED_THREADS])
    return Resources(
        registers=figures[_REGISTERS],
        stack=figures.get(_FRAME_SIZE, 0),
        static_shared=sections.get(f".nv.shared.{kernel}", _Section()).size,
        dynamic_shared=dynamic_shared,
        threads=x * y * z,
        code_bytes=sections[text].size,
    )


def _sections(cubin: bytes) -> dict[str, _Section]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + k * size) for k in range(count)]
    names = headers[names_index][4]
    return {_text(cubin, names + h[0]): _Section(h[4], h[5]) for h in headers}


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
