"""Locks in forked processes: of the parent's threads only the one that forked goes on there.

A lock that another thread held at that moment would be held in the child for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock, get_ident
from weakref import WeakKeyDictionary

_LOCKS: WeakKeyDictionary[object, tuple[str, Callable[[], object]]] = WeakKeyDictionary()
_FORKS = hasattr(os, "register_at_fork")  # not on Windows


def renew_in_children(owner: object, name: str, make: Callable[[], object]) -> None:
    """In each process that is forked from now on, give an attribute a lock that nobody holds.

    This is for locks of what is whole at any moment, such as a table.

    owner: a module or another object, which has one such lock.
    make: the class of the lock.
    """
    _LOCKS[owner] = name, make


def hold_at_forks(lock: RLock) -> None:
    """Let forks wait until no other thread holds a lock.

    This is for locks of what a child could not go on with, such as an import or a compiler that is
    halfway. Where a signal ends the wait, the child has a lock that nobody holds.
    """
    waited = set()  # the threads that fork and have the lock

    def before() -> None:
        lock.acquire()
        waited.add(get_ident())

    def after() -> None:
        if get_ident() in waited:
            waited.discard(get_ident())
            lock.release()

    def after_in_child() -> None:
        if get_ident() not in waited:
            lock._at_fork_reinit()
        after()

    if _FORKS:
        os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _renew() -> None:
    for owner, (name, make) in list(_LOCKS.items()):
        setattr(owner, name, make())


if _FORKS:
    os.register_at_fork(after_in_child=_renew)
