"""`cache`: lists the compiled kernels and tuned plans that are kept on disk, or removes them."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from .terminal import UsageError, paint

if TYPE_CHECKING:
    from ..build.cache import Entry

SUMMARY = "list the compiled kernels that are kept on disk, or remove them and tuned plans"
EXAMPLES = ("cache", "cache --clear")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    parser.epilog = (
        "HTILE_CACHE_DIR names the folder (empty: no cache), HTILE_CACHE_SIZE its bound (512M).\n"
        "A file is a zip archive: `unzip -p FILE kernel.py` is a kernel's source.\n\n"
        f"{parser.epilog}"
    )


def run(options: Namespace) -> int:
    from ..build.cache import cache_info, clear, entries

    info = cache_info()
    if info.folder is None:
        print("the cache is turned off: HTILE_CACHE_DIR is empty, or there is no home folder")
        return 0
    if options.clear:
        try:
            removed = clear()
        except OSError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from error
        plans = f" and {_count(info.tuned, 'tuned plan')}" if info.tuned else ""
        print(f"removed {_count(removed, 'kernel')}{plans} from {info.folder}")
        return 0
    found = entries()
    size = sum(entry.bytes for entry in found)
    kernels = _count(len(found), "kernel")
    title = f"{info.folder}: {kernels}, {_bytes(size)} of {_bytes(info.limit)}"
    if info.tuned:
        title += f", {_count(info.tuned, 'tuned plan')}"
    print(paint(title, "bold", sys.stdout))
    width = max((len(_name(entry)) for entry in found), default=0)
    for entry in reversed(found):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        print(f"{_name(entry):<{width}}  {_bytes(entry.bytes):>8}  {used}  {entry.path.name}")
    return 0


def _name(entry: Entry) -> str:
    return f"{entry.function}  {entry.arch}" if entry.function else "torn: compiled again when used"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
