"""Positions as float32: which are computed so, that they are exact, and what they compile to."""

import re

import pytest
import torch

import htile
from htile.frontend.ops import Op
from htile.lower.passes.simplify import run_passes
from tests.generated.movements import interpreted
from tests.request_of import request_of

POSITIONS = {
    "alone": lambda n: torch.arange(n).float(),
    "from the end": lambda n: (n - 1 - torch.arange(n)).float(),
    "downwards": lambda n: torch.arange(n - 1, -1, -1).float(),
    "every third": lambda n: (3 * torch.arange(n) - 7).float(),
    "negative": lambda n: (-torch.arange(n)).float(),
    "of two": lambda n: (5 * (torch.arange(n) + 2) - torch.arange(n)).float(),
    "promoted": lambda n: torch.arange(n) * 0.5,
    "of int32": lambda n: torch.arange(n, dtype=torch.int32).float(),
    "large": lambda n: (2**20 * torch.arange(n)).float(),
    "not of all": lambda n: (torch.arange(n) * torch.arange(n)).float(),
    "beyond int32": lambda n: (torch.arange(n) + 2**31).float(),
}
NOT_EXACT = {"large", "not of all", "beyond int32"}


def function_of(position):
    return htile.rowwise(lambda x: x + position(x.shape[-1]))


@pytest.mark.parametrize("n", [1, 7, 64, 1003])
@pytest.mark.parametrize("name", POSITIONS)
def test_what_positions_are(name, n):
    """The passed graph has the numbers that torch has."""
    x = torch.zeros(2, n)
    traced = request_of(function_of(POSITIONS[name]), (x,)).specialization.traced
    (got,) = interpreted(run_passes(traced), traced, {"x": x}, (2,))
    expected = POSITIONS[name](n).expand(2, n)
    assert torch.equal(torch.as_tensor(got).float().view(2, n), expected)


@pytest.mark.parametrize("name", POSITIONS)
def test_which_are_computed_in_float32(name):
    x = torch.empty(4, 1003, device="meta")
    graph = function_of(POSITIONS[name]).inspect(x, arch="sm_90a").graph
    converted = [graph[n.inputs[0]].op for n in graph if n.op in (Op.CAST, Op.CONVERT)]
    assert (converted == [Op.INDEX]) == (name not in NOT_EXACT)


@pytest.mark.parametrize("n", [4096, 5003, 50257, 300000])
def test_no_column_is_converted(n):
    """The compiler would make integers of the columns again, and convert each of them."""
    x = torch.empty(64, n, dtype=torch.bfloat16, device="meta")
    function = function_of(POSITIONS["from the end"])
    assert not re.findall(r"cvt\.rn\.f32\.[su]", function.inspect(x, arch="sm_90a").ptx)


def test_rows_that_are_too_long_convert_each_column():
    function = function_of(POSITIONS["alone"])
    for n, conversions in ((2**23, 0), (2**23 + 8, 8)):
        x = torch.empty(1, n, dtype=torch.bfloat16, device="meta")
        kernel = function.inspect(x, arch="sm_90a")
        found = re.findall(r"cvt\.rn\.f32\.[su]", kernel.ptx)
        assert bool(found) == bool(conversions), n
