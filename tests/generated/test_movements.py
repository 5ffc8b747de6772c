"""Random functions of parts: the traced reference and the placed graph against the oracle."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from htile.errors import UnsupportedError
from htile.frontend.graph import Role
from htile.frontend.ops import FROM_END, MOVEMENTS, TURNED, Op
from htile.frontend.reference import evaluate
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.lower.passes.bundles import bundle_neighbours
from htile.lower.passes.space import place
from htile.lower.passes.ways import place_well
from htile.testing import oracle

from .movements import interpreted, program

SEEDS = range(600)
REFUSED = 0.25  # of the programs at most: short rows have parts of all sizes


KINDS = {"parts": {}, "tables": {"tables": True}, "scans": {"scans": True}}


def placed_of(seed: int, sizes: str = "small", kind: str = "parts"):
    p = program(seed, sizes, **KINDS[kind])
    f = p.function()
    args = p.arguments(filled=sizes == "small")
    call = classify(f._signature, tuple(args))
    traced = trace(f._signature.fn, call.specs, call.n)
    return p, f, args, call, traced


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_placed_is_traced_is_the_oracle(seed, kind):
    p, f, args, call, traced = placed_of(seed, kind=kind)
    expected = [each.numpy() for each in pytree.tree_leaves(oracle(f, *args))]
    named = dict(zip(f._signature.names, args, strict=True))
    reference = pytree.tree_leaves(evaluate(traced, named, call.lead, torch.float64))
    for found, exact in zip(reference, expected, strict=True):
        assert found.shape == exact.shape and np.array_equal(found.numpy(), exact), p
    graphs = []
    for way in (place, place_well):
        try:
            graphs.append(way(traced))
        except UnsupportedError as error:
            said = "pieces", "across the rows", "elements of a cumsum", "alone of a cumsum"
            assert any(text in error.message for text in said), error.message
            assert error.loc is not None
    for graph in [*graphs, *map(bundle_neighbours, graphs)]:
        assert not any(node.op in MOVEMENTS and node.op is not Op.RESHAPE for node in graph), p
        results = interpreted(graph, traced, named, call.lead)
        for found, exact in zip(results, expected, strict=True):
            assert found.shape == exact.shape and np.array_equal(found, exact), f"{p}\n{graph}"


# Each of these takes the place of the cumulative sums of a program.
IN_PLACE_OF_SUMS = {Op.SUM_FROM_END: range(300)} | dict.fromkeys(
    (Op.CUMMAX, Op.CUMMIN, Op.MAX_FROM_END, Op.MIN_FROM_END), range(60)
)
SCANS = [(op, seed) for op, seeds in IN_PLACE_OF_SUMS.items() for seed in seeds]


@pytest.mark.parametrize(("op", "seed"), SCANS)
def test_other_scans(op, seed):
    p, f, args, call, traced = placed_of(seed, kind="scans")
    turned = {Op.CUMSUM: op}
    nodes = tuple(replace(node, op=turned.get(node.op, node.op)) for node in traced)
    traced = replace(traced, nodes=nodes)
    named = dict(zip(f._signature.names, args, strict=True))
    expected = pytree.tree_leaves(evaluate(traced, named, call.lead, torch.float64))
    try:
        placed = place(traced)
    except UnsupportedError as error:
        scan = f"of a {TURNED[op].value} from the end" if op in FROM_END else f"of a {op.value}"
        said = "pieces", "across the rows", f"elements {scan}", f"alone {scan}"
        assert any(text in error.message for text in said), error.message
        return
    for found, exact in zip(interpreted(placed, traced, named, call.lead), expected, strict=True):
        assert np.array_equal(found, exact.numpy()), f"{p}\n{placed}"


def test_few_are_refused():
    for sizes, kind in itertools.product(("small", "all"), KINDS):
        refused = 0
        for seed in SEEDS:
            try:
                place(placed_of(seed, sizes, kind)[-1])
            except UnsupportedError:
                refused += 1
        assert refused <= REFUSED * len(SEEDS), (sizes, kind, refused)


def test_lookups_are_reached():
    """Of rows and of single elements, of all of a table and of parts, at several indices."""
    views, most = [], 0
    for seed in SEEDS:
        try:
            graph = place(placed_of(seed, kind="tables")[-1])
        except UnsupportedError:
            continue
        tables = [i.view for i in graph.inputs if i.role is Role.TABLE]
        views += tables
        most = max(most, [node.op for node in graph].count(Op.LOOKUP))
    assert {view.steps is None for view in views} == {True, False}
    assert {view.at[0] for view in views} >= {0, 1} and {view.at[1] for view in views} >= {1, 2}
    assert most > 3 and any(not view.is_contiguous for view in views)


def test_scans_are_reached():
    """Of whole rows and of pieces that follow each other, and elements of those that do not."""
    scans, with_totals = 0, 0
    for seed in SEEDS:
        try:
            graph = place(placed_of(seed, kind="scans")[-1])
        except UnsupportedError:
            continue
        of = {i for node in graph if node.op is Op.CUMSUM for i in node.inputs}
        of_sums = {i for node in graph if node.op is Op.SUM for i in node.inputs}
        scans += bool(of)
        with_totals += bool(of & of_sums)
    assert scans > 100 and with_totals > 20, (scans, with_totals)


def test_bundles_are_reached():
    """Both of inputs and of outputs, and not of all that could be pairs."""
    ops, apart = set(), 0
    for seed in SEEDS:
        try:
            graph = bundle_neighbours(place(placed_of(seed)[-1]))
        except UnsupportedError:
            continue
        ops |= {node.op for node in graph}
        views = [each.view for each in (*graph.inputs, *graph.outputs) if each.view]
        apart += not all(view.is_contiguous for view in views)
    assert {Op.UNBUNDLE, Op.BUNDLE, Op.KEY, Op.KEY_INDEX, Op.KEY_VALUE} <= ops and apart


def test_groups_are_reached():
    """Groups that follow each other and others, with one element each, and bundles in groups."""
    sizes, reductions, of_groups, in_bundles = set(), set(), 0, 0
    for seed in SEEDS:
        for of in ("small", "all"):
            try:
                graph = bundle_neighbours(place(placed_of(seed, of)[-1]))
            except UnsupportedError:
                continue
            sizes.add(graph.group_size)
            reductions |= {node.arg[0] for node in graph if node.op is Op.GROUPED}
            views = [each.view for each in (*graph.inputs, *graph.outputs) if each.view]
            of_groups += any(view.is_of_groups for view in views)
            in_bundles += any(view.groups and view.width > 1 for view in views)
    assert len(sizes) > 4 and {Op.SUM, Op.MAX, Op.MIN} <= reductions
    assert of_groups > 10 and in_bundles
