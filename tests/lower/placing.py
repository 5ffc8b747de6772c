"""What placing makes of a function, beside the function in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch.utils import _pytree as pytree

import htile
from htile.frontend.graph import Graph
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.testing import oracle
from tests.generated.movements import interpreted


def placed_and_values(f: Callable, args: tuple, way: Callable) -> tuple[Graph, list[np.ndarray]]:
    """The placed graph of a function, and the results that it means for these arguments.

    way: places a traced graph, `place` or `place_well`.
    """
    signature = htile.rowwise(f)._signature
    call = classify(signature, args)
    traced = trace(f, call.specs, call.n)
    placed = way(traced)
    named = dict(zip(signature.names, args, strict=True))
    return placed, interpreted(placed, traced, named, call.lead)


def assert_placed_right(f: Callable, args: tuple, way: Callable, bound: float) -> Graph:
    """The placed graph, whose results differ from the exact ones by at most the bound."""
    placed, values = placed_and_values(f, args, way)
    expected = pytree.tree_leaves(oracle(htile.rowwise(f), *args))
    for found, exact in zip(values, expected, strict=True):
        assert found.shape == exact.shape
        np.testing.assert_allclose(found, exact.numpy(), rtol=bound, atol=bound)
    return placed
