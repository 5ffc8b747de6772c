"""The command line. Each command is a module or a package of this folder, named in COMMANDS.

It has SUMMARY and EXAMPLES, the text of its help, `add_arguments(parser)`, and `run(options)`,
which prints and returns the exit code. The code is 0, or 1 where something is wrong with a function
or an installation (HTileError), or 2 where something is wrong with the command itself (UsageError).
torch, whose import takes a second or two, is imported only where a command runs, not for its help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import HTileError
from .terminal import UsageError, paint

COMMANDS = ("show", "compile", "cache", "doctor")
PROGRAM = "python -m htile"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if hasattr(sys.stdout, "reconfigure"):  # show a name as well as the terminal can
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except UsageError as error:
        print(paint(f"htile {options.command}: {error}", "red", sys.stderr), file=sys.stderr)
        return 2
    except HTileError as error:
        text = f"{type(error).__name__}: {error}"
        print(paint(text, "red", sys.stderr), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    modules = {name: import_module(f"{__name__}.{name}") for name in COMMANDS}
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Plain PyTorch math for one row, run on every row as one fused GPU kernel.",
        epilog=_examples(module.EXAMPLES for module in modules.values()),
        formatter_class=layout,
    )
    parser.add_argument("--version", action="version", version=f"htile {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, module in modules.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}.",
            epilog=_examples([module.EXAMPLES]),
            formatter_class=layout,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _examples(groups) -> str:
    lines = [f"  {PROGRAM} {line}" for group in groups for line in group]
    return "\n".join(["examples:", *lines])
