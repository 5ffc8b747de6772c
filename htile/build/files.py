"""Files that appear whole or not at all, and are read without waiting for anybody."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import warnings
from pathlib import Path


def read_file(path: Path) -> bytes:
    """The content of a regular file. A pipe or a device raises OSError; nobody waits for it."""
    with open(path, "rb", opener=without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return file.read()


def without_waiting(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=)` does, without waiting for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def replace_file(path: Path, content: bytes, what: tuple[str, str]) -> bool:
    """Write a whole file at once, or nothing and a warning; returns whether it is there.

    what: for the warning, what can not be kept, and what follows from that.
    """
    folder = path.parent
    unfinished = folder / f"{path.stem}.{secrets.token_hex(8)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "xb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        warnings.warn(
            f"{what[0]} can not be kept in {folder} ({error.strerror or error}), so that "
            f"{what[1]}: make it a folder that can be written, or name another one with "
            "HTILE_CACHE_DIR (empty: none)",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
