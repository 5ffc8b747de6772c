"""`cache`: lists the compiled kernels and tuned plans that are kept on disk, or removes them."""

from __future__ import annotations

import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from .terminal import UsageError, paint

if TYPE_CHECKING:
    from ..build.cache import Entry

SUMMARY = "list the compiled kernels that are kept on disk, or remove them and tuned plans"
EXAMPLES = ("cache", "cache --clear")
MOST_DTYPES = 60  # characters of a line for the arguments and results with their dtypes
SHOWN_DIGITS = 12  # of the 64 of a file's name: enough to tell which it is


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove all of them")
    parser.epilog = (
        "HTILE_CACHE_DIR names the folder (empty: no cache), HTILE_CACHE_SIZE its bound (512M).\n"
        "The last column is how a file's name begins. It is a zip archive: `unzip -p FOLDER/NAME*\n"
        "kernel.py` prints a kernel's source.\n\n"
        f"{parser.epilog}"
    )


def run(options: Namespace) -> int:
    from ..build.cache import cache_info, clear, entries

    info = cache_info()
    if info.folder is None:
        print("the cache is turned off: HTILE_CACHE_DIR is empty, or there is no home folder")
        return 0
    _check_folder(info.folder)
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
    lines = [_columns(entry) for entry in reversed(found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    return 0


def _check_folder(folder: Path) -> None:
    """Raise UsageError for what is there and is no folder that can be read."""
    try:
        os.scandir(folder).close()
    except FileNotFoundError:  # the first kernel makes it
        pass
    except OSError as error:
        raise UsageError(
            f"{folder} can not be read as a folder ({error.strerror}): name another one with "
            "HTILE_CACHE_DIR (empty: no cache)"
        ) from error


def _columns(entry: Entry) -> tuple[str, ...]:
    """What is known of a kernel: name, N, dtypes, architecture, size, last use, its file's name."""
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    size, short = f"{_bytes(entry.bytes):>8}", entry.path.name[:SHOWN_DIGITS]
    if entry.function is None:
        return "torn: compiled again when used", "", "", "", size, used, short
    length = re.search(r"\bN (?:= |(<= ))(\d+)", entry.about)
    n = f"N {length[1] or '= '}{length[2]}" if length else ""
    rest = " ".join(entry.about[length.end() :].strip("., ").split()) if length else ""
    return entry.function, n, _shortened(rest), entry.arch or "", size, used, short


def _shortened(text: str) -> str:
    """The text, or the beginning of a longer one."""
    return text if len(text) <= MOST_DTYPES else f"{text[: MOST_DTYPES - 1].rstrip()}…"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
