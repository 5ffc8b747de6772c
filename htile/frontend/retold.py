"""What torch or Python refuses before HTile sees it, told again with the user's line.

torch checks some arguments before it asks `__torch_function__`, and Python knows nothing of rows.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from typing import NoReturn

import torch

from ..errors import HTileError, Location, ShapeError, TraceError, an
from .dtypes import DTYPES
from .hints import REFERENCE, advice
from .libraries import internal
from .tensor import FUNCTIONS

RETOLD = (TypeError, RuntimeError, ValueError, IndexError, AttributeError)  # what `retell` knows

MOST_NESTED = 100  # calls of one function of the user, of which a RecursionError is its own
_ENDLESS = (
    "a function calls itself until Python's limit is reached: what ends it must be known while "
    "tracing, such as a number that each call lowers, `if depth == 0: return x`"
)

_ARGUMENT = re.compile(r"(\w+)\(\): argument '(\w+)' .*must be (.+), not (\w+)")
_COMBINATION = re.compile(r"(\w+)\(\) received an invalid combination of arguments")
_LISTED = re.compile(r"expected Tensor as element (\d+) in argument 0, but got (\w+)")
_SIGNATURE = re.compile(r"^(\w+)\(\) (?:takes|got|missing) ")
_REFUSED = re.compile(r"'Tensor' (object|and)|and 'Tensor'|must be real number, not Tensor")
_NAME = re.compile(r"module '(torch(?:\.\w+)*)' has no attribute '(\w+)'")
_MODULES = {"torch", "torch.nn", "torch.nn.functional", "torch.special", "torch.linalg"}
_SHAPE = re.compile(r"not enough values to unpack|tuple index out of range")


def retell(error: Exception) -> None:
    """Raise an HTileError for what torch, numpy or Python refused to do with a symbolic tensor."""
    stack = list(traceback.walk_tb(error.__traceback__))
    users = [(frame, line) for frame, line in stack if not internal(frame.f_code.co_filename)]
    if not users:
        return
    frame, line = users[-1]
    if isinstance(error, RecursionError):
        code, times = Counter(frame.f_code for frame, _ in users).most_common(1)[0]
        if times > MOST_NESTED:
            line = next(line for frame, line in reversed(users) if frame.f_code is code)
            raise TraceError(_ENDLESS, Location(code.co_filename, line)) from None
    text, loc = str(error), Location(frame.f_code.co_filename, line)

    def tell(message: str, kind: type[HTileError] = TraceError) -> NoReturn:
        raise kind(message, loc) from None

    if _SHAPE.match(text):
        held = "|".join(name for name, v in frame.f_locals.items() if isinstance(v, torch.Size))
        uses = rf"\b({held or '(?!)'})\[(?!(-1|0)\])|(?<!=)= *({held or '(?!)'})\s*(#|$)"
        if re.search(rf"\.(shape|size\(\))|{uses}", loc.text):
            tell("inside the function a row has the shape (N,), without the leading dimensions: "
                 "write n = x.shape[-1]", ShapeError)  # fmt: skip
    if match := _ARGUMENT.search(text):
        name, argument, expected, kind = match.groups()
        place = "torch" if hasattr(torch, name) else "F"
        got, remedy = an(kind), f": {_instead(name)}" if expected == "Tensor" else ""
        if kind == "NoneType":
            got, remedy = "None", f": pass one, or branch before it, `if {argument} is not None:`"
        elif name == "linear":
            remedy = ": pass the weight as an argument, annotated `weight: htile.Matrix`"
        tell(f"{place}.{name} takes {an(expected)} as {argument!r}, not {got}{remedy}")
    if match := _COMBINATION.search(text):
        tell(f"torch.{match[1]} does not take these arguments: {_instead(match[1])}")
    if match := _LISTED.search(text):
        remedy = "write torch.full_like(x, value) for a number"
        tell(f"torch joins tensors, and element {match[1]} of the list is a {match[2]}: {remedy}")
    if "Invalid device string: 'x.device'" in text:
        tell("torch.device(x.device) inside the function: the kernel runs where its inputs are")
    if re.search("not support ufuncs|unsupported operand.*numpy", text):
        tell("numpy cannot compute with a symbolic value: write the torch function (torch.exp)")
    if match := _NAME.match(text):
        tell(f"{match[1]} has no {match[2]}; {_elsewhere(*match.groups())}")
    if "higher order operator" in text:
        tell("torch.cond and torch.while_loop inside the function: write torch.where(condition, a, "
             "b), and a loop of a known number of rounds")  # fmt: skip
    if frame is not stack[-1][0]:
        return
    if (match := _SIGNATURE.match(text)) and re.search(rf"\b(torch|F)\.{match[1]}\(", loc.text):
        tell(f"torch.{match[1]} does not take these arguments")
    if _REFUSED.search(text):
        tell(f"this cannot be done with a symbolic value: {text.splitlines()[0]}")


def _elsewhere(module: str, name: str) -> str:
    """What to write for a name that a module of torch lacks: its spelling in another module."""
    if module not in _MODULES:
        return REFERENCE
    dtypes = [str(dtype) for dtype, of in DTYPES.items() if of.computed]
    known = {s: s.rpartition(".")[2] for s in (*dtypes, *(s for s, _ in FUNCTIONS.values()))}
    found = sorted(spelling for spelling, last in known.items() if last == name)
    return f"write {' or '.join(found)}" if found else advice(name, known.values())


def _instead(name: str) -> str:
    clamp = {"maximum": "min", "max": "min", "minimum": "max", "min": "max"}.get(name)
    if name == "round":
        return "write torch.round(x, decimals=2) for a number of decimals"
    if clamp:
        name = {"max": "maximum", "min": "minimum"}.get(name, name)
        return f"write torch.{name}(x, torch.full_like(x, 0.0)) or x.clamp({clamp}=0.0)"
    return f"write torch.full_like(x, value) for a number in torch.{name}"
