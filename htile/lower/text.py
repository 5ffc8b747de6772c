"""Lines of Python text: calls and assignments that are broken where they are too long."""

from __future__ import annotations

from collections.abc import Iterable

from ..frontend.graph import Node

WIDTH = 100  # characters of a line
INDENT = " " * 4


def wrapped_call(head: str, args: list[str], tail: str) -> list[str]:
    """One line if it fits; else the arguments on a line of their own; else one a line."""
    joined = ", ".join(args)
    if len(head) + len(joined) + len(tail) <= WIDTH:
        return [head + joined + tail]
    indent = " " * (len(head) - len(head.lstrip()))
    return [head, *lines_of(args, indent + INDENT), indent + tail]


def wrapped_expression(head: str, expression: str) -> list[str]:
    """An assignment; a long call with its arguments below, a long operation in parentheses."""
    if len(head) + len(expression) <= WIDTH:
        return [head + expression]
    if expression.startswith("math."):
        name, _, args = expression.removesuffix(")").partition("(")
        return wrapped_call(f"{head}{name}(", args.split(", "), ")")
    left, operator, right = expression.split(" ")
    indent = " " * (len(head) - len(head.lstrip()))
    return [f"{head}(", f"{indent}    {left}", f"{indent}    {operator} {right}", f"{indent})"]


def lines_of(args: list[str], indent: str) -> list[str]:
    """Arguments on one line if they fit, else one a line."""
    joined = indent + ", ".join(args)
    return [joined] if len(joined) <= WIDTH else [f"{indent}{arg}," for arg in args]


def located(lines: list[str], node: Node) -> list[str]:
    """The lines with the user's line as a comment at the end, where it fits."""
    comment = f"  # {node.loc.short}" if node.loc else ""
    last = lines[-1] + comment if len(lines[-1]) + len(comment) <= WIDTH else lines[-1]
    return [*lines[:-1], last]


def tuple_of(parts: Iterable[str]) -> str:
    """A tuple of expressions."""
    parts = list(parts)
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
