"""The little language of `--args`: `x=bf16[4096,8192] eps=1e-6` gives parameters their values.

Tensors are made on the `meta` device: they have a dtype, sizes and strides, but no memory.
"""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING, NoReturn

from .terminal import UsageError

if TYPE_CHECKING:
    import torch

GRAMMAR = """\
--args "name=value name=value ...", where a value is
  dtype[sizes]           a tensor: bf16[4096,8192]; f32[] is one of no dimensions
  dtype[sizes:strides]   with strides, in elements: bf16[4096,8192:16384,1]
  1e-6   -3   True   None   'text'   f16      a Python value; the last is a dtype
dtypes: f32 bf16 f16 i32 i64 bool e4m3 e5m2 e8m0 i8 u8, and torch's own names (float8_e4m3fn)"""

WORDS = {"True": True, "False": False, "None": None}
MOST_DIGITS = 1000  # of a number; Python itself converts no more than 4300
MOST_SHOWN = 40  # characters that a message quotes

_NAME = re.compile(r"[^\W\d]\w*")
_DTYPE = re.compile(r"[^\W\d][\w.]*")
_INTEGER = re.compile(r"[+-]?\d+(?![\w.])")
_FLOAT = re.compile(r"[+-]?(?:inf|nan|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_SIZE = re.compile(r"\d+(?![\w.])")
_SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r"[^\s\[\]:,=]+")  # what a message quotes


def parse(text: str) -> dict[str, object]:
    """The value of each name in `text`. Raises UsageError, which shows the place of a mistake."""
    return _Parser(text).arguments()


class _Parser:
    """Reads `text` from the position `at` on; each method reads what it is named for."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def arguments(self) -> dict[str, object]:
        values: dict[str, object] = {}
        self.space()
        while self.at < len(self.text):
            start = self.at
            name = self.match(_NAME) or self.fail("expected the name of a parameter")
            if name in values:
                self.fail(f"{name} is given twice", start)
            self.space()
            self.expect("=", f"expected '=' after {name}")
            self.space()
            values[name] = self.value()
            end = self.at
            self.space()
            if self.at == end < len(self.text):
                self.fail("expected a space before the next name")
        return values

    def value(self) -> object:
        start = self.at
        if number := self.match(_INTEGER):
            return self.integer(number, start)
        if number := self.match(_FLOAT):
            return float(number)
        if string := self.match(_STRING):
            return self.string(string, start)
        word = self.match(_DTYPE)
        if word in WORDS:
            return WORDS[word]
        if word is None:
            self.fail("expected a value")
        import torch

        from ..frontend.dtypes import DTYPES

        short = {known.name: known.dtype for known in DTYPES.values()}
        dtype = short.get(word, getattr(torch, word.removeprefix("torch."), None))
        if not isinstance(dtype, torch.dtype):
            self.fail(f"{word!r} is no dtype (a string is written in quotes)", start)
        if not self.accept("["):
            return dtype
        return self.tensor(dtype, start)

    def tensor(self, dtype: torch.dtype, start: int) -> torch.Tensor:
        import torch

        sizes = self.numbers()
        before = self.at
        strides = self.numbers() if self.accept(":") else None
        self.expect("]", "expected a number, ',' or ']'")
        if strides is not None and len(strides) != len(sizes):
            self.fail(f"{len(sizes)} sizes, but {len(strides)} strides", before)
        count = extent = math.prod(max(size, 1) for size in sizes)
        if strides is not None:
            spans = (max(n - 1, 0) * step for n, step in zip(sizes, strides, strict=True))
            extent = 1 + sum(spans)
        if max(count, extent, *(strides or ())) * dtype.itemsize >= 2**63:
            self.fail("this tensor is larger than any memory", start)
        if strides is None:
            return torch.empty(sizes, dtype=dtype, device="meta")
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")

    def numbers(self) -> list[int]:
        """Numbers with commas between them, or none at all."""
        found: list[int] = []
        self.space()
        while self.at < len(self.text) and self.text[self.at] not in ":]":
            start = self.at
            size = self.match(_SIZE) or self.fail("expected a number")
            found.append(self.integer(size, start))
            self.space()
            if not self.accept(","):
                break
            self.space()
            if self.text[self.at : self.at + 1] in (":", "]"):
                self.fail("expected a number")
        return found

    def integer(self, digits: str, start: int) -> int:
        if len(digits) > MOST_DIGITS:
            self.fail(f"a number of {len(digits)} digits; the limit is {MOST_DIGITS}", start)
        return int(digits)

    def string(self, literal: str, start: int) -> str:
        try:
            return ast.literal_eval(literal)
        except (SyntaxError, ValueError):
            self.fail("this is no Python string", start)

    def match(self, pattern: re.Pattern) -> str | None:
        """The text that fits the pattern here, which is passed; None where none does."""
        found = pattern.match(self.text, self.at)
        if not found:
            return None
        self.at = found.end()
        return found.group()

    def accept(self, character: str) -> bool:
        """Whether the character is here; it is passed then."""
        there = self.text.startswith(character, self.at)
        self.at += there
        return there

    def expect(self, character: str, message: str) -> None:
        if not self.accept(character):
            self.fail(message)

    def space(self) -> None:
        self.match(_SPACE)

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise UsageError for the place `at`, or for where we are."""
        at = self.at if at is None else at
        token = _TOKEN.match(self.text, at)
        found = token.group() if token else self.text[at : at + 1]
        found = found if len(found) <= MOST_SHOWN else f"{found[:MOST_SHOWN]}…"
        got = f"got {found!r}" if found else "the text ends"
        shown = "".join(c if c.isprintable() else " " for c in self.text)
        where = f"{message} at position {at + 1}" + f", {got}" * message.startswith("expected")
        raise UsageError(f"--args: {where}\n  {shown}\n  {' ' * at}^\n{GRAMMAR}")
