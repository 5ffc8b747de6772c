"""What tests read out of compiled kernels: stack frames, instructions, accesses and depths."""

import re
import struct
from collections import Counter
from collections.abc import Iterator

import cutlass.cute as cute

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


def compile_for(host, *args, arch="sm_90a"):
    """Compile a @cute.jit host function for fake tensors, keeping PTX and cubin."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin"
    return cute.compile(host, *args, stream, options=options, no_jit_engine=True)


def sections(cubin: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The name and the content of every section of a cubin, which is an ELF file."""
    offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    for name, kind, _, _, start, length in headers:
        at = headers[names][4] + name
        is_empty = kind == 8  # NOBITS: it has a size, and no bytes in the file
        yield cubin[at : cubin.index(b"\0", at)], b"" if is_empty else cubin[start : start + length]


def stack_frame(cubin: bytes) -> int:
    """The bytes of the largest stack frame of a cubin's functions (records 0x11 of .nv.info)."""
    largest = 0
    for name, content in sections(cubin):
        at = 0
        while name == b".nv.info" and at + 4 <= len(content):
            form, attribute, extent = struct.unpack_from("<BBH", content, at)
            if form == 4 and attribute == 0x11:
                largest = max(largest, struct.unpack_from("<II", content, at + 4)[1])
            at += 4 + (extent if form == 4 else 0)
    return largest


def machine_instructions(cubin: bytes) -> int:
    """The instructions of a cubin, of 16 bytes each, without the NOPs that fill it up."""
    code = b"".join(content for name, content in sections(cubin) if name.startswith(b".text"))
    opcodes = struct.unpack(f"<{len(code) // 2}H", code)[::8]
    return sum(opcode & 0xFFF != 0x918 for opcode in opcodes)


def accesses(ptx: str) -> Counter:
    """How many memory accesses there are by name and bytes, such as ("ld.global", 16)."""
    found = Counter()
    for space, count, bits in re.findall(
        r"\b((?:ld|st)\.(?:global|shared))(?:\.v(\d))?\.b(\d+)", ptx
    ):
        found[space, int(count or 1) * int(bits) // 8] += 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (\d+)", ptx):
        found["cp.async", int(size)] += 1
    return found


def depth(ptx: str, opcode: str) -> int:
    """The length of the longest chain of `opcode` instructions in straight-line PTX."""
    level, longest = {}, 0
    for line in ptx.splitlines():
        words = re.findall(r"%\w+", line)
        if words:
            above = max((level.get(w, 0) for w in words[1:]), default=0)
            level[words[0]] = above + (opcode in line)
            longest = max(longest, level[words[0]])
    return longest
