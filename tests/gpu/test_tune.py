"""Tuning on the GPU: what wins computes the same, and later processes run it."""

import pytest
import torch

import htile
from htile.build import cache
from htile.lower import plans_for
from htile.testing import assert_close
from htile.tune.kept import keep

from .matrix import BF16, assert_same_bits, run, seed
from .test_cache import said, start

pytestmark = pytest.mark.gpu

M, N = 2048, 1824  # of no other test


@htile.rowwise
def norm(x, weight, eps: float = 1e-6):
    y = x * torch.rsqrt((x * x).mean() + eps) * weight
    return {"y": y, "top": y.amax()}


@pytest.fixture
def args(device, tmp_path, monkeypatch):
    """Arguments, and a cache that no other test uses."""
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "cache"))
    seed("tune")
    norm._forget()
    yield torch.randn(M, N, device=device, dtype=BF16), torch.randn(N, device=device, dtype=BF16)
    norm._forget()


def properties(f, *args):
    return f.inspect(*args).plan.properties()


def test_a_tuned_function_keeps_its_bits(args):
    before = [t.clone() for t in args]
    expected = run(norm, *args)
    tuned = norm.tune(*args, seconds=120, progress=False)
    assert 1 < tuned.tried == tuned.plans and tuned.us > 0 and tuned.default_us > 0
    assert tuned.plan is tuned.default or tuned.gain.low > 0
    assert tuned.file.exists() and htile.cache_info().tuned == 1
    assert_same_bits(list(args), before, "arguments are not written")
    result = run(norm, *args)
    assert properties(norm, *args) == tuned.plan.properties()
    assert_same_bits(result, expected)
    assert_close(norm, result, *args)
    assert_same_bits(run(norm, *args), expected, "by its shortcut")
    assert_same_bits(run(norm, args[0][:7], args[1])["y"], expected["y"][:7])


def test_other_numerics_are_those_of_every_batch(args):
    tuned = norm.tune(*args, seconds=30, numerics=True, progress=False)
    assert tuned.tried > 1
    result = run(norm, *args)
    assert_close(norm, result, *args)
    for rows in (slice(0, 1), slice(3, 10)):  # another kind of call: few rows
        assert_same_bits(run(norm, args[0][rows], args[1])["y"], result["y"][rows])
    assert norm.inspect(args[0][:1], args[1]).plan.numerics == tuned.plan.numerics


FRESH = """
import json, torch, htile
from htile.testing import assert_close

@htile.rowwise
def norm(x, weight, eps: float = 1e-6):
    y = x * torch.rsqrt((x * x).mean() + eps) * weight
    return {"y": y, "top": y.amax()}

torch.manual_seed(5)
x = torch.randn(2048, 1824, device="cuda", dtype=torch.bfloat16)
w = torch.randn(1824, device="cuda", dtype=torch.bfloat16)
assert_close(norm, norm(x, w), x, w)
info = htile.cache_info()
print(json.dumps([norm.inspect(x, w).plan.properties(), info.compiled, info.hits]))
"""


def test_a_later_process_runs_what_was_kept(args):
    """It runs a plan that was kept, and not the default, whichever is faster."""
    plan = norm.inspect(*args).plan
    same = [p for p in plans_for(plan.graph, plan.target) if p.numerics == plan.numerics]
    other = [p for p in same if p.placement != plan.placement][-1]
    expected = run(norm, *args)
    assert keep(other, {}, args[0].device, numerics=False)
    norm._forget()
    result = run(norm, *args)
    assert properties(norm, *args) == other.properties()
    assert_same_bits(result, expected)
    assert_close(norm, result, *args)
    norm.compile(*args)
    assert said(start(cache.cache_folder(), FRESH)) == [other.properties(), 0, 1]
