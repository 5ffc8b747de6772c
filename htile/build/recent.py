"""A table that is bounded: it forgets what was used least recently."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from .forks import renew_in_children

T = TypeVar("T")


class Recent(Generic[T]):
    """At most `limit` entries; threads may share it."""

    def __init__(self, limit: int):
        self._limit, self._lock = limit, threading.Lock()
        self._entries: OrderedDict[Hashable, T] = OrderedDict()
        renew_in_children(self, "_lock", threading.Lock)

    def find(self, key: Hashable) -> T | None:
        """The entry of this key, which counts as used now; None where there is none."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def keep(self, key: Hashable, entry: T) -> None:
        """Enter it as used now."""
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
