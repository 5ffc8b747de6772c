"""What a function becomes for arguments of given roles and dtypes: without tensors, bounded."""

import gc
import types

import pytest
import torch

import htile
from htile.build.recent import Recent
from htile.run import specialize
from tests.request_of import request_of


@htile.rowwise
def norm(x, weight, shift: htile.PerRow, gain: float = 1.0, *, mode: str = "plain"):
    y = x * torch.rsqrt((x * x).mean() + 1e-6) * weight * gain + shift
    return {"y": y.half(), "top": y.amax(-1, keepdim=True), "sum": y.sum()}


ARGS = torch.randn(2, 3, 64), torch.randn(64), torch.randn(2, 3)
LEAVES = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType


def reached(value):
    """All that a value refers to, directly or not; classes, modules and functions end the way."""
    found, left = {}, [value]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, LEAVES):
            found[id(one)] = one
            left += gc.get_referents(one)
    return list(found.values())


def test_it_refers_to_no_tensor_and_tells_the_results():
    specialization = request_of(norm, ARGS).specialization
    objects = reached(specialization)
    assert specialization.graph in objects and len(objects) > 100
    assert not [one for one in objects if isinstance(one, torch.Tensor)]
    assert [spec.name for spec in specialization.specs] == list(norm._signature.names)
    assert [result.name for result in specialization.graph.outputs] == ["y", "top", "sum"]
    for lead in ((2, 3), (7,), (0, 5)):
        shapes = specialization.shapes(lead)
        expected = norm(torch.randn(*lead, 64), ARGS[1], torch.randn(lead))
        assert shapes == tuple((tuple(t.shape), t.dtype) for t in expected.values())
    assert torch.utils._pytree.tree_structure(norm(*ARGS)) == specialization.graph.structure


def test_shapes_and_addresses_do_not_count():
    first = request_of(norm, ARGS).specialization
    others = torch.randn(5, 64), torch.randn(64), torch.randn(5)
    assert request_of(norm, others).specialization is first
    assert request_of(norm, (others[0].half(), *others[1:])).specialization is not first


def test_those_used_last_are_remembered(monkeypatch):
    monkeypatch.setattr(specialize, "MAX_SPECIALIZATIONS", 3)
    f = htile.rowwise(lambda x: x * 2)
    first = request_of(f, (torch.ones(2, 8),)).specialization
    for n in range(9, 30):
        f(torch.ones(2, n))
        assert request_of(f, (torch.ones(2, 8),)).specialization is first, "it is in use"
    assert len(f._specializations._known) == 3


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_table_of_recent_entries(limit):
    table = Recent(limit)
    for k in range(10):
        assert table.find(k) is None
        table.keep(k, str(k))
        assert table.find(k) == str(k) and len(table) == min(k + 1, limit)
        if limit > 1:
            assert table.find(0) == "0", "asking for it keeps it"
    table.keep(9, "nine")
    assert table.find(9) == "nine" and len(table) == limit
