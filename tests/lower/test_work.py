"""What is computed of a graph is computed once a lowering."""

import pytest
import torch

import htile
from htile.lower import plan, reductions, schedule, work
from htile.lower.choice import enumeration, instructions
from htile.lower.patterns import Function
from htile.lower.precision import NEAR_OPS
from tests.lower.cases import BF16, EXAMPLES


@pytest.fixture
def counted(monkeypatch):
    """How often stages are assigned, steps listed and work begun."""
    counts = {"stages": 0, "steps": 0, "work": 0}

    def count(name, function):
        def counting(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr(reductions, "assign_stages", count("stages", reductions.assign_stages))
    monkeypatch.setattr(plan, "list_steps", count("steps", schedule.list_steps))
    monkeypatch.setattr(enumeration, "Work", count("work", work.Work))
    return counts


@pytest.mark.parametrize("n", [4096, 32768, 1 << 20])
@pytest.mark.parametrize("name", EXAMPLES)
def test_one_lowering_computes_each_thing_once(counted, name, n):
    function, arguments = EXAMPLES[name]
    fresh = htile.rowwise(function._fn)
    kernel = fresh.inspect(*arguments(64, n, BF16, "meta"), arch="sm_90a")
    assert name.split("_")[0] in kernel.source
    assert counted == {"stages": 1, "steps": 1, "work": 1}


def test_sweeps_of_a_function_of_four_stages():
    """A norm and a softmax: a sweep for each exchange and one for the result."""
    function, arguments = EXAMPLES["norm_softmax"]
    found = function.inspect(*arguments(4, 65536, BF16, "meta")).plan.work
    assert found.stages == 4 and found.has_pair
    assert [len(sweep.reduces) for sweep in found.held.all] == [1, 1, 1, 1, 0]
    assert [len(sweep.reduces) for sweep in found.held_joint.all] == [1, 1, 1, 0]
    assert [len(loop.parts) for loop in found.loops.loops] == [1, 1, 0]
    assert found.loops.carries_two_stages and found.loops.exchanges == 2
    assert found.held.slots == 4 and found.held_joint.slots == 3


def test_an_exponential_that_loops_would_repeat():
    assert EXAMPLES["softmax"][0].inspect(torch.empty(4, 64, device="meta")).plan.work.repeats_exp
    f = htile.rowwise(lambda x: torch.logsumexp(x, -1))
    assert not f.inspect(torch.empty(4, 64, device="meta")).plan.work.repeats_exp


def test_every_short_function_has_a_cost_of_its_own():
    pairs = [key for key in instructions.OP_COSTS if isinstance(key, tuple)]
    assert {op for op, function in pairs if function is Function.NEAR} == NEAR_OPS
