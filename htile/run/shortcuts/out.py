"""Repeated calls with `out=`: which results lie where, told by a few comparisons of addresses.

Their shortcut also checks that the results are laid out as they were, and that each lies apart from
the other tensors, or exactly over one of them, as it did.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch.utils import _pytree as pytree

from ..memory import are_disjoint, layout
from .shortcut import ONE, CallWriter
from .text import MISS, NotTold, tuple_of


class OutWriter(CallWriter):
    """Writes the shortcut of a call that writes to tensors of the caller."""

    def named_results(self) -> list[str]:
        return ["out"] if self.graph.structure == ONE else super().named_results()

    def parameters(self) -> list[inspect.Parameter]:
        return [*super().parameters(), inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY)]

    def memory(self) -> list[str]:
        workspace = self.workspace()
        return [*self._apart(), *workspace, *(self.is_elsewhere("_parts") if workspace else [])]

    def wrong_results(self, like: list[str]) -> list[str]:
        wrong = []
        for name, output in zip(self.written, self.outputs, strict=True):
            inner = self.inner_of(output)
            whole = inner == like and output.over is None
            shape = "_shape" if whole else tuple_of([*self.lead_of(output), *inner])
            wrong += [f"{name}.shape != {shape}"] if name != self.like else []
        return wrong

    def returned(self) -> list[str]:
        """Lines that return `out`."""
        # so that autograd sees that saved tensors were written to
        self.scope["_written"] = torch._C._increment_version
        return [f"_written({tuple_of(self.written)})", "return out"]

    def opened(self) -> list[str]:
        """Lines that take `out` apart, and leave if its structure is another one.

        They also leave if a result is not the argument that it was, or if the first one, which was
        none, is a row now: where calls of both kinds take turns, the wrong shortcut ends early.
        """
        model = pytree.tree_unflatten(range(len(self.results)), self.graph.structure)
        pairs = zip(self.results, self.written, strict=True)
        wrong = [f"{result} is not {name}" for result, name in pairs if result != name]
        if self.written[0] == self.results[0]:
            kind = self.first.outs[0].shape, self.first.outs[0].dtype
            rows = [name for name, t in self.tensors.items() if (t.shape, t.dtype) == kind]
            wrong += [f"{self.results[0]} is {row}" for row in rows]
        leave = [f"if {' or '.join(wrong)}:", *MISS] if wrong else []
        return [*self._taken_apart(model, "out"), *leave]

    def _taken_apart(self, model: object, name: str) -> list[str]:
        """Lines that take `name` apart; `model` is its structure over the indices of results."""
        kind = type(model)
        if kind is int:
            return []
        if kind not in (tuple, list, dict) and not hasattr(kind, "_fields"):
            raise NotTold
        self.scope[f"_kind_{name}"] = kind
        is_counted = kind is dict or not model  # others are unpacked
        size = f" or _len({name}) != {len(model)}" if is_counted else ""
        lines = [f"if _type({name}) is not _kind_{name}{size}:", *MISS]
        parts = [*(model.values() if kind is dict else model)]
        names = [self.results[part] if type(part) is int else f"_{name}_{k}"
                 for k, part in enumerate(parts)]  # fmt: skip
        if kind is dict:
            self.scope |= {f"_key_{name}_{k}": key for k, key in enumerate(model)}
            lines += [f"{part} = {name}.get(_key_{name}_{k})" for k, part in enumerate(names)]
        elif parts:
            lines.append(f"{', '.join(names)}, = {name}")
        for part, inside in zip(names, parts, strict=True):
            lines += self._taken_apart(inside, part)
        return lines

    def _apart(self) -> list[str]:
        """Lines that leave if a result lies otherwise beside another tensor than it did.

        Tensors that lay apart may lie anywhere apart. Tensors whose elements interleave, or that
        are the same memory, must have the distance at which that was checked.
        """
        pointers = {name: f"_p{k}" for k, name in enumerate(self.guarded)}
        wrong = []
        for k, a in enumerate(self.written):
            for b in (name for name in self.guarded if name not in self.written[: k + 1]):
                one, other, p, q = self.guarded[a], self.guarded[b], pointers[a], pointers[b]
                if are_disjoint(one, other):
                    tests = [f"{q} < {p} + {self._extent(a)}", f"{p} < {q} + {self._extent(b)}"]
                    if one.data_ptr() > other.data_ptr():  # first the test that failed before
                        tests.reverse()
                    wrong.append(" and ".join(tests))
                elif self.is_fixed or layout(one) == layout(other):
                    wrong.append(f"{p} - {q} != {one.data_ptr() - other.data_ptr()}")
                else:
                    raise NotTold
        read = [f"{p} = {name}.data_ptr()" for name, p in pointers.items()]
        return [*read, f"if {' or '.join(wrong)}:", *MISS] if wrong else []

    def _extent(self, name: str) -> str:
        """The bytes that a tensor spans, as text."""
        tensor, shape, changing = self.guarded[name], self.shapes[name], self.changing[name]
        size, fixed = tensor.element_size(), self.span(name) * tensor.element_size()
        if not changing:
            return str(fixed)
        if len(changing) > 1:  # it is contiguous
            return " * ".join([*changing, str(math.prod(n for n in shape if n is not None) * size)])
        step = tensor.stride(shape.index(None)) * size
        return f"{changing[0]} * {step}" + f" + {fixed - step}" * (fixed != step)
