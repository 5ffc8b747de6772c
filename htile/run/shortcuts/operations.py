"""Repeated calls of an operation of torch's graphs: a shortcut for what `htile::run` is given.

It takes the tensors, the numbers and the leading shape, and returns a list of new tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...frontend.captures import Captures
from ...frontend.graph import Role
from ..launch import Launch, Request
from .shortcut import CallWriter, Missed


class OperationWriter(CallWriter):
    """Writes the shortcut of an operation.

    captures: the values that the user's function captures, if they are to be what they were.
    """

    def __init__(
        self, first: Request, missed: Missed | None, launch: Launch, captures: Captures | None
    ):
        watched = ((), ()) if captures is None else captures.watched()
        super().__init__(first, missed, captures, watched, launch)

    def function(self):
        """Write the text, and return the function that it defines."""
        names = {} if self.captures is None else self.captures.fn.__globals__
        return self.defined("(_tensors, _numbers, _lead)", names)

    def opened(self) -> list[str]:
        specs = [spec for spec in self.first.call.specs if spec.role is not Role.STATIC]
        lines = []
        for name, is_number in (("_tensors", False), ("_numbers", True)):
            taken = [s.name for s in specs if (s.role is Role.SCALAR) is is_number]
            lines += [f"{', '.join(taken)}, = {name}"] if taken else []
        return lines

    def guards(self) -> Iterator[str]:
        yield from self.same_tensors()
        if self.captures is not None:
            yield from self.same_captures()

    def returned(self) -> list[str]:
        return [f"return [{', '.join(self.results)}]"]
