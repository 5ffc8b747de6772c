"""Prints what is computed of a tile of products: numbers of its rows, and then chunk after chunk.

Where rows are reduced in the tile that has all their columns, there is a loop over the chunks for
each stage of reductions, and each loop computes again what it needs: the sums are in registers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...frontend.graph import Graph, Node, Output, Role
from ...frontend.ops import REDUCTIONS, Op
from ..emission.expressions import (
    INDENT,
    literal,
    located,
    wrapped_call,
    wrapped_expression,
    written,
)
from ..emission.steps import CONVERTED
from ..reductions import OF_OP
from ..steps import Compute
from ..work import Work
from .fused import Fused


class Body:
    """The statements for a tile, of a kernel's text.

    values: the names of values, by node. depths: what `_depth` has found of nodes.
    tensors, results: the names of the tensors of inputs, and of results.
    staged: the result that is stored as whole tiles.
    """

    kernel: Fused
    graph: Graph
    work: Work
    values: dict[int, str]
    depths: dict[int, int]
    tensors: dict[int, str]
    results: list[str]
    staged: Output | None
    in_pairs: bool

    @property
    def computes(self) -> dict[int, Compute]:
        """What is computed, by node."""
        steps = [*self.work.before, *(s for sweep in self.work.held.all for s in sweep.computes)]
        return {step.id: step for step in steps}

    def _body(self, indent: str) -> list[str]:
        """The statements, of which one multiplies."""
        numbers, elements = self._inputs(indent)
        for id in sorted(self.computes):
            if self.graph[id].op is not Op.RESHAPE:
                self.values[id] = self._numbered(self.graph[id].op.value)
        lines: list[str] = []
        for stage, reductions in enumerate(self._stages()):
            goals = [node.inputs[0] for node in reductions] or [o.id for o in self.graph.outputs]
            needed, deeper = self._needed(goals), indent + INDENT
            loads, loop = self._loop_over_chunks(needed, indent)
            if not stage:
                numbers += self._computed(self._numbers(0), indent)
                loads = self._multiplied([*loads, *numbers], indent)
            parts = {node.id: self._numbered(node.op.value) for node in reductions}
            lines += loads
            for node in reductions:
                started = f"partial({OF_OP[node.op].combine})"
                started = "partial_mean()" if node.op is Op.MEAN else started
                lines.append(f"{indent}{parts[node.id]} = rows.{started}")
            lines.append(loop)
            lines += [line for id in needed for line in elements.get(id, ())]
            lines += self._computed([id for id in needed if id in self.computes], deeper)
            for node in reductions:
                value = self._operand(node.inputs[0], True)
                lines.append(f"{deeper}{parts[node.id]}.take(chunk, {value})")
            for node in reductions:
                self.values[node.id] = name = self._numbered(node.op.value)
                lines += located([f"{indent}{name} = {parts[node.id]}.reduced()"], node)
            lines += self._computed(self._numbers(stage + 1), indent) if reductions else []
        return lines + self._stores(indent + INDENT)

    def _loop_over_chunks(self, needed: list[int], indent: str) -> tuple[list[str], str]:
        """What begins to load other rows and columns ahead, and the head of the loop."""
        read = [i for i in self.graph.inputs if i.id in needed and i.id in self._loaded]
        if not read:
            return [], f"{indent}for chunk in rows.chunks():"
        args = [*(self.tensors[i.id] for i in read), f"in_pairs={self.in_pairs}"]
        names = ", ".join(self.values[i.id] for i in read)
        loads = wrapped_call(f"{indent}ahead = rows.prefetch(", args, ")")
        return loads, f"{indent}for chunk, {names} in rows.chunks(ahead):"

    @property
    def _loaded(self) -> set[int]:
        """The inputs that are elements of other rows and of columns."""
        products = {o.input.id for o in self.kernel.operands}
        of_elements = {i.id for i in self.graph.inputs if i.role in (Role.ROW, Role.COLUMN)}
        return of_elements - products

    def _inputs(self, indent: str) -> tuple[list[str], dict[int, list[str]]]:
        """What reads numbers of rows, and what makes elements of chunks, by input."""
        graph, deeper, loaded = self.graph, indent + INDENT, self._loaded
        live = {i for step in self.computes.values() for i in step.inputs}
        live |= {node.inputs[0] for node in graph if node.op in REDUCTIONS}
        live |= {output.id for output in graph.outputs}
        operands = {o.input.id: k for k, o in enumerate(self.kernel.operands)}
        numbers: list[str] = []
        elements: dict[int, list[str]] = {}
        for i in graph.inputs:
            if i.id not in live:
                continue
            if i.id in operands:
                self.values[i.id] = name = self._numbered("product")
                elements[i.id] = [f"{deeper}{name} = chunk.read({operands[i.id]})"]
            elif i.id in loaded:
                self.values[i.id] = name = self._numbered("loaded")
                if i.dtype in CONVERTED:
                    elements[i.id] = [self._converted(f"{deeper}{name} = ", name, i.dtype)]
            elif i.role is Role.SCALAR:
                self.values[i.id] = self.tensors[i.id]
            else:
                self.values[i.id] = name = self._numbered("given")
                tensor = self.tensors[i.id]
                is_one = i.role is Role.DEVICE_SCALAR
                text = f"{tensor}[0]" if is_one else f"rows.load_row_value({tensor})"
                numbers.append(self._converted(f"{indent}{name} = ", text, i.dtype))
        return numbers, elements

    def _stages(self) -> list[list[Node]]:
        """The reductions of each stage; the last one has none, and stores."""
        found = [node for node in self.graph if node.op in REDUCTIONS]
        last = max((self._depth(node.id) for node in found), default=0)
        return [[n for n in found if self._depth(n.id) == k + 1] for k in range(last)] + [[]]

    def _depth(self, id: int) -> int:
        """How many reductions are on the longest path to a node, itself included."""
        if id not in self.depths:
            node = self.graph[id]
            before = max((self._depth(i) for i in node.inputs), default=0)
            self.depths[id] = before + (node.op in REDUCTIONS)
        return self.depths[id]

    def _numbers(self, stage: int) -> list[int]:
        """The numbers of a row that are computed after so many stages of reductions."""
        nodes = [self.graph[id] for id in sorted(self.computes)]
        return [n.id for n in nodes if not n.value.spread and self._depth(n.id) == stage]

    def _needed(self, goals: Iterable[int]) -> list[int]:
        """The elements that goals are computed of, and the inputs among them, by id."""
        todo, seen, computes = list(goals), set(), self.computes
        while todo:
            id = todo.pop()
            if id not in seen and self.graph[id].value.spread:
                seen.add(id)
                todo += computes[id].inputs if id in computes else self.graph[id].inputs
        return sorted(seen)

    def _computed(self, ids: Iterable[int], indent: str) -> list[str]:
        """The assignments of some nodes."""
        lines: list[str] = []
        for id in ids:
            node = self.graph[id]
            if node.op is Op.RESHAPE:
                continue
            head = f"{indent}{self.values[id]} = "
            expression = self._expression(node, self.computes[id])
            lines += located(wrapped_expression(head, expression), node)
        return lines

    def _converted(self, start: str, text: str, dtype: torch.dtype) -> str:
        kind = CONVERTED.get(dtype)
        return f"{start}math.convert({text}, {kind})" if kind else start + text

    def _expression(self, node: Node, step) -> str:
        args = tuple(self._operand(i, node.value.spread) for i in step.inputs)
        return written(node, args, step.function, "chunk")

    def _operand(self, id: int, in_chunk: bool) -> str:
        node = self.graph[id]
        if node.op is Op.RESHAPE:
            return self._operand(node.inputs[0], in_chunk)
        if node.op is Op.CONST:
            return literal(node.arg, node.value.dtype)
        name = self.values[id]
        is_number = not node.value.spread and node.value.varies.value == "row"
        return f"chunk.of({name})" if in_chunk and is_number else name

    def _stores(self, indent: str) -> list[str]:
        lines, kernel = [], self.kernel
        for name, output in zip(self.results, self.graph.outputs, strict=True):
            value = self._operand(output.id, True)
            node = self.graph[output.id]
            if node.op is Op.GROUPED and output.inner != (self.graph.n,):
                lines.append(f"{indent}chunk.store_group({name}, {value})")
            elif output is self.staged:
                lines.append(f"{indent}chunk.store({value})")
            else:
                pairs = kernel.n % 2 == 0
                lines.append(f"{indent}chunk.store_direct({name}, {value}, in_pairs={pairs})")
        return lines
