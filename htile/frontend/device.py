"""What `x.device` is while a function is traced: the name of no device."""

from __future__ import annotations

from typing import NoReturn

from ..errors import TraceError
from .hints import CHECKPOINT
from .lines import fail, used


class Device(str):
    """The device of a symbolic value; a graph serves every device, so no trace knows it.

    torch's factories take it, because it is text. It names no device, and tells nothing else.
    """

    __hash__ = None
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) or self._refuse(f"compared with {other!r}")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getattribute__(self, name: str):
        if name.startswith("_"):
            return super().__getattribute__(name)
        self._refuse(f"asked for its {name}")

    def __repr__(self) -> str:
        return "x.device"

    def __str__(self) -> str:
        self._refuse("asked for its name")

    def __format__(self, spec: str) -> str:
        return str(self)

    def __contains__(self, part: object) -> bool:
        self._refuse(f"asked whether its name has {part!r}")

    def _refuse(self, what: str) -> NoReturn:
        if used(r"\b(checkpoint)\("):  # it asks for the device of what it is given
            fail(TraceError, CHECKPOINT)
        fail(TraceError, f"x.device is {what}, but it is not known while tracing: "
             "the kernel runs where its inputs are")  # fmt: skip
