"""The tangents of a call's results, in forward mode: one kernel, beside that of the results.

It is made of the graph of the tangents (htile.frontend.tangents), which is a function of rows as
any other: its gradients are those of second order, and so are its tangents.
"""

from __future__ import annotations

from typing import NamedTuple

from ...frontend.tangents import tangents
from ..runner import Runner
from ..specialize import spec_of
from .derivatives import refuse_any_length

TANGENTS = "tangents"  # begins the name of such a graph, as one that comes of another


class Tangents(NamedTuple):
    """The graph of the tangents of a graph's results, for those of some of its arguments.

    sources: where each argument of `run` comes from: the number of a list, which has the arguments
        of the call or their tangents, and an index into that list.
    results: for each result of the call the index of its tangent, or None where that is 0.
    """

    run: Runner
    sources: tuple[tuple[int, int], ...]
    results: tuple[int | None, ...]


def tangents_of(run: Runner, wrt: tuple[str, ...]) -> Tangents | None:
    """The tangents of a runner's results, for those of the arguments `wrt`; None if all are 0."""
    if wrt not in run.tangents:
        run.tangents[wrt] = _made(run, wrt)
    return run.tangents[wrt]


def _made(run: Runner, wrt: tuple[str, ...]) -> Tangents | None:
    refuse_any_length(run.graph)
    pushed = tangents(run.graph, wrt)
    if pushed is None:
        return None
    graph, places = pushed.graph, {name: k for k, name in enumerate(run.parameters.names)}
    of = [(i.name, pushed.parameters.get(i.name)) for i in graph.inputs]
    sources = [(0, places[name]) if of is None else (1, places[of]) for name, of in of]
    specs = {spec.name: spec for spec in run.specs}
    specs = tuple([specs.get(i.name) or spec_of(graph, i) for i in graph.inputs])
    part = run, f"{TANGENTS}:{','.join(wrt)}"
    given = {out.name: k for k, out in enumerate(graph.outputs)}
    results = [given.get(f"t_{out.name}") for out in run.graph.outputs]
    made = Runner(graph, specs, run.fastmath, {}, part=part)
    return Tangents(made, tuple(sources), tuple(results))
