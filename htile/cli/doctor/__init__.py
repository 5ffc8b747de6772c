"""`doctor`: says what is installed, whether it fits together, and what to do.

`examination.py` gathers the facts of this machine and asks the checks, each of which is a function
of plain facts: `machine.py` has those of driver, GPUs and folders, `packages.py` those of Python,
torch and CuTe-DSL, and `trial.py` compiles and runs a small kernel. Nothing is changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from ... import __version__
from ..terminal import paint

if TYPE_CHECKING:
    from .check import Check

SUMMARY = "check the installation: packages, driver, GPU, folders, a compile and a run"
EXAMPLES = ("doctor", "doctor --json")
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
NAME_WIDTH = 20  # characters of a line for the name of its check


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(options: Namespace) -> int:
    from .check import FAIL, OK, WARN
    from .examination import examine

    checks = []
    for check in examine():
        checks.append(check)
        if not options.json:
            print(line(check), flush=True)
    failed, warned = (sum(c.status == s for c in checks) for s in (FAIL, WARN))
    if options.json:
        report = {"htile": __version__, "ok": not failed, "checks": [asdict(c) for c in checks]}
        print(json.dumps(report, indent=1))
    else:
        status = FAIL if failed else OK
        text = f"HTile {__version__} works here" if not failed else "HTile does not work here"
        counts = f"{len(checks)} checks, {failed} failed, {warned} warnings"
        print(f"\n{paint(text, COLOURS[status], sys.stdout)}: {counts}")
    return 1 if failed else 0


def line(check: Check) -> str:
    """The check as text: status, name and what was found, and what to do on the lines below."""
    indent = " " * (6 + NAME_WIDTH)
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    wrap = {"width": width, "break_long_words": False, "break_on_hyphens": False}
    found = textwrap.fill(
        check.found, initial_indent=indent, subsequent_indent=indent, **wrap
    ).lstrip()
    status = paint(f"{check.status:<4}", COLOURS[check.status], sys.stdout)
    text = f"{status}  {check.name:<{NAME_WIDTH}}{found}"
    if check.advice:
        advice = textwrap.fill(
            check.advice, initial_indent=indent, subsequent_indent=f"{indent}  ", **wrap
        ).lstrip()
        text += f"\n{indent}{paint(advice, COLOURS[check.status], sys.stdout)}"
    return text
