"""What every check of the doctor returns."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis.

    name: what was checked.
    status: OK; or WARN, if something is missing or odd but HTile works; or FAIL, if it does not.
    found: what is there.
    advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def dotted(version: tuple[int, ...]) -> str:
    """A version as text, such as `12.8`."""
    return ".".join(map(str, version))
