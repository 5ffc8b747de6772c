"""What torch or Python refuses before HTile sees it, told again with the user's line.

torch checks some arguments before it asks `__torch_function__`, and Python knows nothing of rows.
"""

from __future__ import annotations

import inspect
import re
import traceback
import types
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

import torch

from ..errors import HTileError, Location, ShapeError, TraceError, an
from .dtypes import DTYPES
from .hints import REFERENCE, advice
from .libraries import internal, library_of
from .reads import reads_of
from .tensor import FUNCTIONS

RETOLD = (TypeError, RuntimeError, ValueError, IndexError, AttributeError)  # what `retell` knows

MOST_NESTED = 100  # calls of one function of the user, of which a RecursionError is its own
_ENDLESS = (
    "a function calls itself until Python's limit is reached: what ends it must be known while "
    "tracing, such as a number that each call lowers, `if depth == 0: return x`"
)

_ARGUMENT = re.compile(r"(\w+)\(\): argument '(\w+)' .*must be (.+), not (\w+)")
_COMBINATION = re.compile(r"(\w+)\(\) received an invalid combination.* got (\(.*\)), but")
_ELEMENTS = re.compile(r" of (\([^()]*\)|\[[^\[\]]*\])")  # as in `list of [int, int]`
_LISTED = re.compile(r"expected Tensor as element (\d+) in argument 0, but got (\w+)")
_SIGNATURE = re.compile(r"^(\w+)\(\) ((?:takes|got|missing) .*)")
_MISSING = re.compile(r"missing .*arguments?: (.+)")
_REFUSED = re.compile(r"'Tensor' (object|and)|and 'Tensor'|must be real number, not Tensor")
_NAME = re.compile(r"module '(torch(?:\.\w+)*)' has no attribute '(\w+)'")
_NUMBERS = "int", "float", "bool"
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
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
        spelled, takes = _known(_of_torch(name), name)
        got, remedy = an(kind), f": it is {takes}" if takes else ""
        if kind == "NoneType":
            got, remedy = "None", f": pass one, or branch before it, `if {argument} is not None:`"
        elif name == "linear":
            remedy = ": pass the weight as an argument, annotated `weight: htile.Matrix`"
        elif expected == "Tensor" and kind in _NUMBERS:
            remedy = f": {_instead(spelled)}"
        tell(f"{spelled} takes {an(expected)} as {argument!r}, not {got}{remedy}")
    if match := _COMBINATION.search(text):
        tell(_of_kinds(*match.groups()))
    if match := _LISTED.search(text):
        remedy = ": write torch.full_like(x, value)" if match[2] in _NUMBERS else ""
        tell(f"torch joins tensors, and element {match[1]} of the list is {an(match[2])}{remedy}")
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
    if (match := _SIGNATURE.match(text)) and (function := _called(frame, match[1])):
        tell(_of_signature(function, match[2]))
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


def _of_torch(name: str) -> Callable | None:
    """The function of torch that calls itself so in its errors, as `special_xlogy`."""
    place, _, last = name.partition("_")
    place = getattr(torch, place, None)
    if isinstance(place, types.ModuleType) and hasattr(place, last):
        return getattr(place, last)
    return getattr(torch, name, None) or getattr(torch.nn.functional, name, None)


def _known(function: Callable | None, name: str) -> tuple[str, inspect.Signature | None]:
    """How a function of torch is spelled, and which arguments it takes here, where that is known.

    name: what it calls itself.
    """
    if function not in FUNCTIONS:
        return f"torch.{name}", None
    spelled, entry = FUNCTIONS[function]
    takes = inspect.signature(entry)
    kinds = [each.kind for each in takes.parameters.values()]
    return spelled, None if inspect.Parameter.VAR_KEYWORD in kinds else takes


def _called(frame: types.FrameType, name: str) -> Callable | None:
    """The function of torch by this name that the code of a frame calls.

    None where the code names a function of the user that has the name too: the error may be its
    own then. What the code names is looked up, because there need not be a text of it.
    """
    reads, local = reads_of(frame.f_code), frame.f_locals
    scope = frame.f_builtins | frame.f_globals | local
    held = [*local.values()]
    held += [vars(m).get(n) for m in local.values() if isinstance(m, types.ModuleType)
             for n in reads.attributes]  # fmt: skip
    for path in reads.paths:
        value = scope.get(path.name)
        for attribute in path.attributes:
            value = vars(value).get(attribute) if isinstance(value, types.ModuleType) else None
        held.append(value)
    found = [f for f in held if isinstance(f, _FUNCTIONS) and f.__name__ == name]
    return found[0] if found and all(library_of(each) == "torch" for each in found) else None


def _of_kinds(name: str, given: str) -> str:
    """The message for a call of a function of torch with arguments of these kinds.

    given: as torch has it: (Tensor, int, alpha=str).
    """
    spelled, takes = _known(_of_torch(name), name)
    given = _ELEMENTS.sub("", given).replace("NoneType", "None")
    words = [each.rpartition("=") for each in given[1:-1].split(", ") if each]
    has_number = any(kind in _NUMBERS for _, _, kind in words)
    if takes is not None and name != "round":
        named = {word: kind for word, _, kind in words if word}
        try:
            takes.bind(*(kind for word, _, kind in words if not word), **named)
        except TypeError as error:
            if match := re.search("missing a required.* argument: (.+)", str(error)):
                return f"{spelled} is called without {match[1]}: it is {takes}"
            has_number = False
    remedy = _instead(spelled) if has_number else f"it is {takes}" if takes else REFERENCE
    return f"{spelled} does not take {given}: {remedy}"


def _of_signature(function: Callable, told: str) -> str:
    """The message for a call of a function of torch that Python refuses, as it is told."""
    spelled, takes = _known(function, function.__name__)
    names = []
    if match := _MISSING.match(told):
        names = re.findall(r"\w+", match[1])
        told = "is called without " + match[1].replace('"', "'")
    if takes is None or any(
        name in takes.parameters and takes.parameters[name].default is not inspect.Parameter.empty
        for name in names
    ):  # such as the dim of a softmax, which a method may be called without
        return f"{spelled} {told}"
    return f"{spelled} {told}: it is {takes}"


def _instead(spelled: str) -> str:
    """What to write for a number in the place of a tensor."""
    name = spelled.rpartition(".")[2]
    clamp = {"maximum": "min", "max": "min", "minimum": "max", "min": "max"}.get(name)
    if name == "round":
        return "write torch.round(x, decimals=2) for a number of decimals"
    if clamp:
        name = {"max": "maximum", "min": "minimum"}.get(name, name)
        return f"write torch.{name}(x, torch.full_like(x, 0.0)) or x.clamp({clamp}=0.0)"
    return f"write torch.full_like(x, value) for a number in {spelled}"
