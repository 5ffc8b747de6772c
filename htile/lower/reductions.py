"""The table of reductions and scans, and which reductions of a function share an exchange.

An entry says how elements and partial results combine. What comes before it, elementwise, and what
comes after it, once a row, are ordinary nodes: a norm is `SUM` and a square root. A row that is
worked on in loops over its chunks would need one loop for each stage. `SOFTMAX` and `MOMENTS` save
a loop: they carry two reductions at once, although the second one needs the result of the first.
`FOLLOWING` saves an exchange, of maxima and of sums that need them (`following.py`).

The scans of a stage have an exchange of their own, and its elements of a rank take one for each of
their bits. Both need a row that is held in registers: no loop carries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ..frontend.graph import Graph
from ..frontend.ops import COLLECTIVES, SCANS, TURNED, Op
from .following import Following, following
from .patterns import strip, subtracted
from .ranks import Chain, least_zero_bits


class Reduction(NamedTuple):
    """One way to reduce or scan a row.

    combine: what joins two partial results, as the emitted text names it.
    identity: what leaves a partial result as it is; a padded lane holds it. Padded lanes do not
        count in a mean, so any number will do.
    slots: how many places of the exchange buffer one exchange takes. A place has 64 bits if the
        exchange brings several results at once, and 32 or the bits of the result's type if not.
        A scan takes a place for each vector of a thread, which the plan decides.
    from_end: of a scan, whether each element is combined with all behind it.
    """

    name: str
    combine: str
    identity: float
    slots: int = 1
    from_end: bool = False


ADD, MUL = "cute.ReductionOp.ADD", "cute.ReductionOp.MUL"
LARGER, SMALLER = "cute.ReductionOp.MAX", "cute.ReductionOp.MIN"
SUM = Reduction("sum", ADD, 0.0)
MEAN = Reduction("mean", "MEAN", 0.0)
PROD = Reduction("prod", MUL, 1.0)
MAX = Reduction("max", LARGER, -inf)
MIN = Reduction("min", SMALLER, inf)
ANY = Reduction("any", LARGER, 0.0)  # The elements are 0 or 1.
ALL = Reduction("all", SMALLER, 1.0)  # The elements are 0 or 1.
# A thread carries the maximum m of the x that it has seen, and the sum of exp(x - m).
SOFTMAX = Reduction("softmax", LARGER, -inf)
# A thread carries the mean of the x that it has seen, and the sum of squares about that mean.
MOMENTS = Reduction("moments", "MEAN", 0.0, slots=2)
# A thread has maxima of its own elements, and sums relative to them.
PEAK, FOLLOWING = Reduction("peak", LARGER, -inf), Reduction("following", ADD, 0.0)
# A thread has its first keys in order. One exchange gives all ranks of a chain.
RANKS = Reduction("ranks", LARGER, -inf)
# All threads count the elements below a number, once for each bit of the one that is looked for.
KTHVALUE = Reduction("kthvalue", ADD, inf)

PLAIN = (SUM, PROD, MAX, MIN, ANY, ALL)  # what can share an exchange with maxima and their sums

SCANNED: Mapping[Op, Reduction] = {
    Op.CUMSUM: Reduction("cumsum", ADD, 0.0, slots=0),
    Op.CUMPROD: Reduction("cumprod", MUL, 1.0, slots=0),
    Op.CUMMAX: Reduction("cummax", LARGER, -inf, slots=0),
    Op.CUMMIN: Reduction("cummin", SMALLER, inf, slots=0),
    Op.LOGCUMSUMEXP: Reduction("logcumsumexp", "LOGADD", -inf, slots=0),
}
SCANNED |= {
    TURNED[op]: each._replace(name=TURNED[op].value, from_end=True)
    for op, each in SCANNED.items()
    if op in TURNED
}

OF_OP: Mapping[Op, Reduction] = {
    Op.SUM: SUM, Op.MEAN: MEAN, Op.PROD: PROD, Op.MAX: MAX, Op.MIN: MIN, Op.ANY: ANY, Op.ALL: ALL,
    Op.KTHVALUE: KTHVALUE, **SCANNED,
}  # fmt: skip

# One exchange gives a mean and the squares about it, except for rows of more than JOINT_N and not
# more than VERY_LONG_N elements. There a lane would combine what four warps send of two reductions,
# and many rows lose more by that than a second exchange takes.
JOINT_N = 65536
VERY_LONG_N = 262144


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that threads carry from element to element, and the reductions that it gives.

    results: the nodes of the reductions. The operand of the first one is what is reduced; for
        FOLLOWING, so are the operands of the others.
    references: for each further result, the node that it is relative to; for FOLLOWING, those of
        all maxima.
    at_once: whether one exchange brings all results. Otherwise the first result has an exchange,
        and the others have the next.
    finite: whether a sum of SOFTMAX is relative to 0 where the maximum is infinite, as logsumexp
        takes it, and nothing else reads the exponentials.
    chain: of RANKS, what its results are the ranks of.
    zero_bits: of KTHVALUE, how many of the lowest bits of every element are known to be zero.
    following: of FOLLOWING, the maxima, and how its sums move.
    """

    kind: Reduction
    results: tuple[int, ...]
    references: tuple[int, ...] = ()
    at_once: bool = False
    finite: bool = False
    chain: Chain | None = None
    zero_bits: int = 0
    following: Following | None = None

    @property
    def carries_two_stages(self) -> bool:
        return self.kind in (SOFTMAX, MOMENTS)

    @property
    def maxima(self) -> tuple[int, ...]:
        """The maxima that sums follow; a thread takes those of its own elements."""
        return self.following.maxima if self.following else ()

    def operands(self, graph: Graph) -> tuple[int, ...]:
        """The nodes whose elements are reduced."""
        results = self.results if self.following else self.results[:1]
        return tuple([graph[id].inputs[0] for id in results])


@dataclass(frozen=True, slots=True)
class Reduce:
    """One stage of reductions. All threads of the row have its results after it.

    results: the nodes of the reductions.
    parts: for each result, in the order of their slots, the part that gives it.
    slot: how many places of the exchange buffer the reductions before it take.
    scans: how many scans the stages before it have.
    exchanges: whether threads wait for each other. They do not where an exchange before has brought
        what is needed.
    following: of two stages in one exchange, the maxima of the first and how the sums of the second
        move.
    """

    stage: int
    results: tuple[int, ...]
    parts: tuple[Part, ...]
    slot: int = 0
    scans: int = 0
    exchanges: bool = True
    following: Following | None = None

    @property
    def is_scan(self) -> bool:
        """Whether its results are rows: they are scans."""
        return self.parts[0].kind in SCANNED.values()

    @property
    def is_by_rank(self) -> bool:
        """Whether its results are elements of a rank."""
        return self.parts[0].kind is KTHVALUE

    @property
    def zero_bits(self) -> int:
        """How many of the lowest bits are known to be zero, of all elements that are ranked."""
        return min(part.zero_bits for part in self.parts)

    @property
    def waits(self) -> int:
        """How often threads wait for each other."""
        return 32 - self.zero_bits if self.parts[0].kind is KTHVALUE else self.exchanges

    @property
    def is_pair(self) -> bool:
        """Whether this one exchange gives a maximum and the sum of exponentials below it."""
        return self.parts[0].at_once and self.parts[0].kind is SOFTMAX

    @property
    def slots(self) -> int:
        """Places of the exchange buffer that it takes; scans take others."""
        if not self.exchanges or self.is_scan:
            return 0
        if self.parts[0].kind is KTHVALUE:
            return self.waits * len(self.results)
        if self.following is not None:
            return -(-(len(self.results) + len(self.following.moves)) // 2)  # a place has two
        if self.parts[0].at_once:
            return self.parts[0].kind.slots
        chains = dict.fromkeys([part.chain for part in self.parts if part.chain is not None])
        saved = sum([len(chain.results) - chain.slots for chain in chains])
        return len(self.results) - saved

    def operands(self, graph: Graph) -> tuple[int, ...]:
        """The nodes that are reduced: one for each result, all keys for ranks, and for an element
        of a rank all pieces of its row and the rank."""
        found: list[int] = []
        for id, part in zip(self.results, self.parts, strict=True):
            if part.kind is KTHVALUE:
                found += graph[id].inputs
            elif part.chain is None:
                found.append(graph[id].inputs[0])
            elif id == part.results[0]:
                found += part.chain.keys
        return tuple(found)

    def made(self, graph: Graph) -> tuple[int, ...]:
        """The nodes of a held row that are there after it.

        A pair brings the exponentials too, unless they are relative to 0 for an infinite maximum.
        """
        brings_more = self.is_pair and not self.parts[0].finite
        return self.results + (self.operands(graph)[1:] if brings_more else ())


def _relative_sum(graph: Graph, id: int) -> Part | None:
    """What carries a sum of exp(x - max(x)) or of (x - mean(x))**2 together with that max or mean.

    A thread sums the terms relative to a reference of its own, and moves the sum later.
    """
    if graph[id].op is not Op.SUM:
        return None
    (term,) = graph.operands(graph[id])
    if len({*term.inputs}) != 1:
        return None
    difference = graph[term.inputs[0]]
    kind, op = (SOFTMAX, Op.MAX) if term.op is Op.EXP else (MOMENTS, Op.MEAN)
    first = subtracted(graph, difference, op)
    if term.op not in (Op.EXP, Op.MUL) or first is None:
        return None
    return Part(kind, (first.id, id), (difference.inputs[1],))


def assign_stages(graph: Graph, chains: Sequence[Chain] = ()) -> dict[int, int]:
    """The stage of every node: how many reductions and scans are on its longest path from the
    inputs, itself included.

    chains: those whose ranks are found in one stage.
    """
    stage: dict[int, int] = {}
    first = {id: chain.results[0] for chain in chains for id in chain.results[1:]}
    for node in graph:
        if node.id in first:
            stage[node.id] = stage[first[node.id]]
            continue
        before = max((stage[i] for i in node.inputs), default=0)
        stage[node.id] = before + (node.op in COLLECTIVES)
    return stage


def by_stage(graph: Graph, chains: Sequence[Chain] = ()) -> list[Reduce]:
    """The exchanges of each stage: its reductions in order, its scans, and its elements of a rank.

    Reductions of chains come last in their stage.
    """
    stage = assign_stages(graph, chains)
    ranks = {c.results[0]: Part(RANKS, c.results, chain=c) for c in chains}
    chained = {id for chain in chains for id in chain.results}
    parts: dict[tuple[int, int], list[Part]] = {}
    for node in graph:
        if node.op in COLLECTIVES and node.id not in chained:
            by_rank = node.op is Op.KTHVALUE
            bits = least_zero_bits(graph, node.inputs[:-1]) if by_rank else 0
            key = stage[node.id], 2 if by_rank else int(node.op in SCANS)
            part = Part(OF_OP[node.op], (node.id,), zero_bits=bits)
            parts.setdefault(key, []).append(part)
    for id, part in ranks.items():
        parts.setdefault((stage[id], 0), []).append(part)
    return _numbered(_exchange_of(k, each) for (k, _), each in sorted(parts.items()))


def _exchange_of(stage: int, parts: list[Part]) -> Reduce:
    results = [(id, part) for part in parts for id in part.results]
    return Reduce(stage, tuple(id for id, _ in results), tuple(part for _, part in results))


def with_pairs(graph: Graph, reduces: list[Reduce]) -> list[Reduce]:
    """The same, but a maximum and the sum of exponentials below it are one exchange of pairs.

    That is done where each of the two is alone in its stage.
    """
    joined: list[Reduce] = []
    for reduce in reduces:
        if joined and (pair := _pair(graph, joined[-1], reduce)):
            reduce = replace(joined.pop(), results=pair.results, parts=(pair, pair))
        joined.append(reduce)
    return _numbered(joined)


def _pair(graph: Graph, first: Reduce, second: Reduce) -> Part | None:
    """The part of both, if `first` is max(x) alone and `second` the sum of exp(x - max(x)) alone.

    If 0 stands for an infinite maximum, nothing else may read the exponentials.
    """
    if (len(first.results), len(second.results)) != (1, 1):
        return None
    part = _relative_sum(graph, second.results[0])
    if part is None or part.kind is not SOFTMAX or part.results[0] != first.results[0]:
        return None
    finite = strip(graph, graph[part.references[0]]).id != first.results[0]
    (exp,) = second.operands(graph)
    if finite and set(graph.readers[exp]) != {*second.results}:
        return None
    return replace(part, at_once=True, finite=finite)


def in_one_exchange(graph: Graph, reduces: Sequence[Reduce]) -> list[Reduce] | None:
    """The same stages, if sums of the second follow maxima of the first.

    Then a thread sums with maxima of its own, and one exchange brings the results of both. It takes
    fewer places of the buffer, so that later stages have others.
    """
    first, *later = reduces
    is_plain = all(part.kind in PLAIN for part in first.parts)
    is_narrow = all(graph[id].value.dtype.itemsize <= 4 for id in first.results)
    if not (later and is_plain and is_narrow):
        return None
    found = following(graph, first.results, later[0].results)
    if found is None:
        return None
    results = later[0].results
    part = Part(FOLLOWING, results, found.references, at_once=True, following=found)
    peaks = {id: Part(PEAK, (id,)) for id in found.maxima}
    own = zip(first.results, first.parts, strict=True)
    parts = tuple([peaks.get(id, each) for id, each in own])
    both = (
        replace(first, parts=parts, following=found),
        replace(later[0], parts=(part,) * len(results), exchanges=False, following=found),
    )
    saved = later[0].slot + later[0].slots - first.slot - both[0].slots
    return [*both, *(replace(each, slot=each.slot - saved) for each in later[1:])]


def carried_together(graph: Graph, reduces: Sequence[Reduce]) -> tuple[Reduce, ...]:
    """The first of these stages as a loop carries it, and the next one if it carries that too.

    It does if each reduction of the next stage is relative to one of the first. If one of them is
    not, that one needs a loop of its own, in which the others cost nothing.
    """
    reduce, *later = reduces[:2]
    sums = [_relative_sum(graph, id) for following in later for id in following.results]
    fits = all(along is not None and along.results[0] in reduce.results for along in sums)
    if reduce.is_pair or not later or not fits:
        return (reduce,)
    alone = len(reduce.results) == len(sums) == 1
    parts = {}
    for part in reduce.parts:
        if along := [each for each in sums if each.results[0] == part.results[0]]:
            kind = along[0].kind
            results = part.results + tuple(each.results[1] for each in along)
            references = tuple(each.references[0] for each in along)
            at_once = alone and kind is MOMENTS and not JOINT_N < graph.n <= VERY_LONG_N
            part = Part(kind, results, references, at_once)
        parts |= dict.fromkeys(part.results, part)
    exchanges = not any(part.at_once for part in parts.values())
    return (
        replace(reduce, parts=tuple(parts[id] for id in reduce.results)),
        replace(later[0], parts=tuple(parts[id] for id in later[0].results), exchanges=exchanges),
    )


def _numbered(reduces: Iterable[Reduce]) -> list[Reduce]:
    """The exchanges with stages and slots that follow each other."""
    numbered, slot, scans = [], 0, 0
    for stage, reduce in enumerate(reduces, 1):
        numbered.append(replace(reduce, stage=stage, slot=slot, scans=scans))
        slot, scans = slot + reduce.slots, scans + reduce.is_scan * len(reduce.results)
    return numbered
