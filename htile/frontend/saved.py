"""What a forward pass keeps for its backward pass, and the backward graph that reads it.

`htile.frontend.derive` gives the *joint* graph, which computes a function and its gradients from
the function's arguments. `split` cuts it in two. The backward graph reads three kinds of things:

- *arguments*, which are there already;
- row *results*, where they take fewer bytes than the rows that they are computed of, or as many;
- *statistics*: small values of each row behind a reduction, such as the maximum and the sum of a
  softmax. The forward graph returns them too, and no reduction is repeated.

All other values are computed again. What is kept takes the fewest bytes that it can (`cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch.utils import _pytree as pytree

from .cut import UNLIMITED, cheapest_cut
from .graph import Builder, Graph, Node, Output, Role
from .ops import COLLECTIVES, EXTREMES, MOVEMENTS, Op, Varies

SMALL = 8  # a statistic has at most 1 / SMALL of a row's elements
# A rounded result may stand for itself where its error stays as it is, relative to each element.
KEEPS_ERRORS = MOVEMENTS | {Op.MUL, Op.NEG, Op.CONVERT}
EXACT = MOVEMENTS - {Op.CAT} | {Op.ABS, Op.NEG, Op.CAST, Op.CONVERT}  # the same bits in any kernel
BEGINS = COLLECTIVES | {Op.TAKE, Op.GATHER, Op.LOOKUP}


@dataclass(frozen=True)
class Split:
    """A forward and a backward graph.

    forward: the function's graph. Behind its results there are the statistics.
    backward: its inputs are arguments of the function and cotangents, `d_<result>`, under their own
        names, and those of `results`. Its outputs are those of the joint graph.
    results: for each input that is a result of the forward graph the index of that result.
    kept: the nodes of all that is kept: rows that are arguments, and those results.
    """

    forward: Graph
    backward: Graph
    results: dict[str, int]
    kept: frozenset[int]


def split(
    graph: Graph, joint: Graph, kept: Split | None = None, whole: bool = False,
    named: frozenset[int] | None = None,
) -> Split | None:  # fmt: skip
    """Cut the joint graph of a traced `graph`, whose first nodes are those of `graph`.

    kept: another cut of the same function, whose `forward` is `graph`. Only what that one keeps may
        be kept then. The result is None where this does not suffice.
    whole: keep all rows that are arguments, which suffices for any other cut.
    named: keep what is needed of these nodes, which suffices.
    """
    cut = _Cut(graph, joint)
    found = cut.cheapest(kept, whole) if named is None else cut.needed_of(named)
    return None if found is None else cut.split(found)


class _Cut:
    """The cut of one joint graph.

    needed: the nodes of the forward graph that the derived nodes read.
    behind: the forward values that a reduction, a scan or an index is behind.
    widest: how many elements the longest rows have that are arguments.
    """

    def __init__(self, graph: Graph, joint: Graph):
        self.graph, self.joint = graph, joint
        self.inputs = {i.id: i for i in joint.inputs}
        self.results = self._by_node(enumerate(graph.outputs))
        self.row_arguments = frozenset(i.id for i in graph.inputs if i.role is Role.ROW)
        self.widest = max((prod(graph[id].value.inner) for id in self.row_arguments), default=1)
        self.behind: set[int] = set()
        for node in graph:
            if node.op in BEGINS or not self.behind.isdisjoint(node.inputs):
                self.behind.add(node.id)
        count = len(graph)
        live = self._live((o.id for o in joint.outputs), lambda node: node.id < count)
        self.needed = sorted(id for id in live if id < count)
        self.readers: dict[int, list[Node]] = {}
        for id in sorted(live):
            if id >= count:
                for operand in joint[id].inputs:
                    self.readers.setdefault(operand, []).append(joint[id])

    @cached_property
    def compared(self) -> set[int]:
        """The largest and smallest of computed values, and those of a rank, which are compared with
        these again.

        The backward kernel might compute the values with other bits than the forward one did. Then
        none would be equal to a maximum that is kept, so it is found again.
        """
        found = set()
        for id in self.needed:
            node = self.graph[id]
            readers = self.readers.get(id, ())
            todo = [reader for reader in readers if reader.op in MOVEMENTS]
            readers = [*readers, *(r for each in todo for r in self.readers.get(each.id, ()))]
            is_compared = any(reader.op is Op.EQ for reader in readers)
            if node.op in EXTREMES and is_compared:
                operand = self.graph[node.inputs[0]]
                while operand.op in EXACT:
                    operand = self.graph[operand.inputs[0]]
                if operand.op is not Op.INPUT:
                    found.add(id)
        return found

    def cheapest(self, kept: Split | None, whole: bool) -> frozenset[int] | None:
        """The nodes to keep; see `split`. None where no allowed set suffices."""
        reached = sorted(self._live(self.needed, lambda node: False))
        nodes = [self.graph[id] for id in reached if self.graph[id].value.varies is Varies.ROW]
        costs = {node.id: self._bytes(node, whole) for node in nodes}
        # The element of a key is kept beside the key: a gradient of second order goes through it.
        begins = {
            n.id for n in nodes if (n.op in BEGINS and self._is_small(n)) or n.op is Op.KEY_VALUE
        } - self.compared
        if kept is not None:
            costs = {id: cost if id in kept.kept else UNLIMITED for id, cost in costs.items()}
        found = self._cut(costs, begins)
        if found is None and kept is not None:  # repeat what is not kept, if its row is there
            found = self._cut(costs, begins & kept.kept)
        return found if found is None or not whole else found | self.row_arguments

    def needed_of(self, named: frozenset[int]) -> frozenset[int]:
        """What the joint graph reads of these nodes, and of arguments, where they are kept."""
        ids = (out.id for out in self.joint.outputs)
        live = self._live(ids, lambda node: node.id in named)
        return frozenset(live & (named | self.row_arguments))

    def _cut(self, costs: dict[int, int], begins: set[int]) -> frozenset[int] | None:
        """The cheapest cut behind row arguments and these nodes."""
        operands = {
            id: () if id in begins else costs.keys() & {*self.graph[id].inputs} for id in costs
        }
        sources = begins | (costs.keys() & self.row_arguments)
        return cheapest_cut(costs, operands, sorted(sources), sorted(costs.keys() & {*self.needed}))

    def _bytes(self, node: Node, whole: bool) -> int:
        """Bytes of each row that keeping a value takes; unlimited where it can not be kept.

        whole: whether no result stands for itself.
        """
        size = prod(node.value.inner)
        if node.id in self.row_arguments:
            return self.inputs[node.id].dtype.itemsize * size
        if node.id in self.compared:
            return UNLIMITED
        if node.op is Op.KEY_VALUE or (node.id in self.behind and self._is_small(node)):
            return node.value.dtype.itemsize * size
        outputs = [o for o in self.graph.outputs if o.id == node.id and self._may_stand(o)]
        sizes = [o.dtype.itemsize * size for o in outputs]
        return UNLIMITED if whole else min(sizes, default=UNLIMITED)

    def split(self, kept: frozenset[int]) -> Split:
        """The two graphs, with these nodes kept."""
        joint, taken = self.joint, {i.name for i in self.joint.inputs}
        live = self._live((o.id for o in joint.outputs), lambda node: node.id in kept)
        of_length = self._of_any_length(live)
        live, kept = live | of_length, kept | of_length
        new = Builder(f"{self.graph.name}_backward", self.graph.n, self.graph.multiple)
        new.least = self.graph.least
        outputs, results, ids = [*self.graph.outputs], {}, {}

        def leaf(node: Node, output: Output) -> int:
            """An input for a result of the forward graph."""
            name = output.name
            while name in taken:
                name += "_"
            taken.add(name)
            results[name] = outputs.index(output)
            # what was declared of the value does not count any more
            value = replace(node.value, stored=None, spread=output.is_row)
            return new.add_input(name, _role(output), output.dtype, value)

        for node in (joint[id] for id in sorted(live)):
            if node.op is Op.INPUT:
                of = self.inputs[node.id]
                ids[node.id] = new.add_input(of.name, of.role, of.dtype, node.value)
            elif node.id in kept:
                k = self.results.get(node.id)
                if k is None or (self._is_small(node) and not self._is_exact(outputs[k])):
                    outputs.append(_statistic(node, {o.name for o in outputs} | taken))
                    k = -1
                ids[node.id] = leaf(node, outputs[k])
            else:
                ids[node.id] = new.copied(node, [ids[i] for i in node.inputs])
        forward = self.graph
        if len(outputs) > len(forward.outputs):
            structure = pytree.tree_structure([0] * len(outputs))
            forward = replace(forward, outputs=tuple(outputs), structure=structure)
        gradients = [replace(o, id=ids[o.id]) for o in joint.outputs]
        backward = new.finish(gradients, pytree.tree_structure([0] * len(gradients)))
        return Split(forward, backward, results, kept)

    def _of_any_length(self, live: set[int]) -> set[int]:
        """The row argument to keep for its length, if rows have any length and none is read.

        A row that is read may be the gradient of a result, too.
        """
        if self.graph.multiple is None:
            return set()
        rows = [id for id, of in self.inputs.items() if of.role is Role.ROW]
        whole = [id for id in rows if self.joint[id].value.inner == (self.graph.n,)]
        is_told = not live.isdisjoint(whole)
        return set() if is_told else {min(self.row_arguments.intersection(whole))}

    def _by_node(self, numbered: Iterable[tuple[int, Output]]) -> dict[int, int]:
        """The index of a result for each node that is one, of an exact one if there is any."""
        ordered = sorted(numbered, key=lambda each: (not self._is_exact(each[1]), each[0]))
        return {output.id: k for k, output in reversed(ordered) if output.over is None}

    def _is_exact(self, output: Output) -> bool:
        """Whether nothing is rounded when a result is stored."""
        return output.dtype is self.graph[output.id].value.dtype

    def _live(self, ids: Iterable[int], ends: Callable[[Node], bool]) -> set[int]:
        """What these nodes are computed of. The operands of a node that `ends` are left out."""
        found: set[int] = set()
        todo = list(ids)
        while todo:
            id = todo.pop()
            if id not in found:
                found.add(id)
                node = self.joint[id]
                todo += () if ends(node) else node.inputs
        return found

    def _is_small(self, node: Node) -> bool:
        """Whether a value takes little memory beside a row. A row of one element does not."""
        size = prod(node.value.inner)
        return not node.value.spread and (size == 1 or size * SMALL <= self.widest)

    def _may_stand(self, output: Output) -> bool:
        """Whether a result in memory is as good as the value that it was rounded from.

        It is if nothing was rounded, or if the backward graph reads it as a factor only. The
        exponential of a logarithm in bfloat16 is wrong by 3 per cent.
        """
        if not output.is_row or output.over is not None or not output.dtype.is_floating_point:
            return False
        if self._is_exact(output):
            return True
        if output.dtype.itemsize < torch.bfloat16.itemsize or output.id not in self.needed:
            return False
        todo, seen = [output.id], set()
        while todo:
            id = todo.pop()
            for reader in self.readers.get(id, ()):
                if reader.op in (Op.SUM, Op.MEAN) or reader.id in seen:
                    continue
                is_divided = reader.op is Op.DIV and id not in reader.inputs[1:]
                if reader.op not in KEEPS_ERRORS and not is_divided:
                    return False
                seen.add(reader.id)
                todo.append(reader.id)
        return True


def _statistic(node: Node, names: Collection[str]) -> Output:
    """The output that a statistic becomes, under a name of its own: `rsqrt0`."""
    k = next(k for k in range(len(names) + 1) if f"{node.op.value}{k}" not in names)
    value, name = node.value, f"{node.op.value}{k}"
    return Output(name, node.id, value.dtype, value.inner, prod(value.inner) > 1)


def _role(output: Output) -> Role:
    return Role.ROW if output.is_row else Role.PER_ROW
