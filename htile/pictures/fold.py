"""Finds the rounds of a loop in a graph, so that a picture can show one round for all of them.

A Python loop is traced as the same operations again and again. The search goes through the nodes
in the order of their ids, which is the order of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from ..frontend.graph import Graph
from ..frontend.ops import Op

LEAVES = frozenset({Op.INPUT, Op.CONST})
FEWEST_ROUNDS = 3  # rounds that are worth folding
FEWEST_HIDDEN = 6  # nodes that a fold must at least hide

Region = tuple[int, int, int]  # where the first round begins, steps of a round, rounds


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of the same steps; `steps[j][k]` is the id of the node of step j in round k."""

    steps: tuple[tuple[int, ...], ...]


def find_rounds(graph: Graph) -> list[Rounds]:
    """The loops of a graph, in the order of their ids.

    All rounds of a loop have the same operations of the same user lines. Where one round reads a
    value of its own, of the round before, or from before the loop, every other round reads the
    same value, its own counterpart of it, or an argument or constant of the same type. The first
    round may read any value from before the loop where the others read the round before.
    """
    steps = [node for node in graph if node.op not in LEAVES]
    place = {node.id: k for k, node in enumerate(steps)}

    def fit(here: int, there: int, start: int, size: int, is_first: bool) -> bool:
        """Whether a step may read `here`, where the same step of the next round reads `there`."""
        one, other = graph[here], graph[there]
        if one.op in LEAVES and one.op is other.op:
            return one.value == other.value
        at, to = place.get(here, -1), place.get(there, -1)
        if at < start:
            return here == there or (is_first and start <= to < start + size)
        return to == at + size

    def count(start: int, size: int, most: int) -> int:
        """How many rounds from `start` on, at most `most`, read what rounds may read."""
        for k in range(1, most):
            at = start + (k - 1) * size
            pairs = zip(steps[at : at + size], steps[at + size :], strict=False)
            if not all(
                fit(here, there, start, size, k == 1)
                for one, other in pairs
                for here, there in zip(one.inputs, other.inputs, strict=True)
            ):
                return k
        return most

    kinds = [(node.op, node.arg, node.value, node.loc, len(node.inputs)) for node in steps]
    ids = [node.id for node in steps]
    return [
        Rounds(tuple(tuple(ids[start + j : start + size * rounds : size]) for j in range(size)))
        for start, size, rounds in repetitions(kinds, FEWEST_HIDDEN, count)
    ]


def repetitions(
    kinds: Sequence[Hashable], fewest: int, count: Callable[[int, int, int], int]
) -> list[Region]:
    """Where a sequence repeats itself: regions that do not overlap and each hide many steps.

    fewest: steps that a region must at least hide.
    count: how many of at most so many rounds of a given start and size are rounds of one loop.
    """
    found, waiting = [], [(0, len(kinds))]
    while waiting:
        low, high = waiting.pop()
        best = _best(kinds, low, high, fewest, count)
        if best is not None:
            start, size, rounds = best
            found.append(best)
            waiting += [(low, start), (start + size * rounds, high)]
    return sorted(found)


def _best(
    kinds: Sequence[Hashable], low: int, high: int, fewest: int,
    count: Callable[[int, int, int], int],
) -> Region | None:  # fmt: skip
    """The region that hides most; of those that hide as many the one with the shortest rounds."""
    best, hidden = None, fewest - 1
    for size in range(1, (high - low) // FEWEST_ROUNDS + 1):
        for first, end in _alike(kinds, low, high, size):
            for start in range(first, end):
                most = (end - start) // size
                if most < FEWEST_ROUNDS or size * (most - 1) <= hidden:
                    break
                rounds = count(start, size, most)
                if rounds >= FEWEST_ROUNDS and size * (rounds - 1) > hidden:
                    best, hidden = (start, size, rounds), size * (rounds - 1)
    return best


def _alike(kinds: Sequence[Hashable], low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """First and end of each run whose kinds are the same every `size` steps."""
    first = None
    for k in range(low, high - size + 1):
        same = k < high - size and kinds[k] == kinds[k + size]
        if same and first is None:
            first = k
        elif not same and first is not None:
            yield first, k + size
            first = None
