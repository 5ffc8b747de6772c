"""What repeats along a row is computed for one chunk of a thread. Its PTX runs on numpy."""

import pytest
import torch

import htile
from htile.lower.patterns import periods
from htile.lower.periods import instructions_saved, once
from tests.lower.cases import BF16, F32
from tests.primitives.ptx_device import launch

HEAD = 32


def turned(x):
    """Factors that are the same in each group of 32, made of the number in the group."""
    place = torch.arange(HEAD).float()
    factor = torch.exp2(-torch.exp2(place * 0.125) * 0.25) + torch.exp2(place * -0.25)
    return (x.view(-1, HEAD) * factor).flatten().to(x.dtype)


def shifted(x, t: htile.PerRow):
    """They also depend on the row, and something else reads them in every chunk."""
    place = torch.arange(HEAD).float()
    factor = torch.exp2(-torch.exp2(place * 0.125) * 0.25 * t)
    both = factor * torch.exp2(place * 0.125 - t)
    return (x.view(-1, HEAD) * both + factor).flatten().to(x.dtype)


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def inspect(f, *args, **plan):
    return htile.rowwise(f).with_plan(**plan).inspect(*args, arch="sm_90a")


PLANS = {"threads_per_row": 32, "form": "held", "num_threads": 64, "cluster_n": 1}


def test_values_of_groups_repeat():
    kernel = inspect(turned, meta(64, 1024), **PLANS)
    found = periods(kernel.graph)
    names = {kernel.graph[id].op.value for id in found}
    assert {"and", "exp2", "mul"} <= names and set(found.values()) == {HEAD}
    product = next(o.id for o in kernel.graph.outputs)
    assert product not in found, "the result depends on x"


@pytest.mark.parametrize("f", (turned, shifted), ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_one_chunk_is_computed(f, dtype):
    """A thread has 8 chunks of 4 elements, or 4 of 8, which are 128 or 256 columns apart."""
    x = torch.randn(3, 1024).to(dtype)
    more = (torch.rand(3),) if f is shifted else ()
    kernel = inspect(f, x, *more, **PLANS)
    assert kernel.plan.chunks in (4, 8) and once(kernel.plan)
    assert "ctx.of_one_chunk(index0)" in kernel.source
    assert kernel.source.count("ctx.in_every_chunk(") == len(more) + 1
    assert (
        kernel.ptx.count("ex2.approx")
        == kernel.source.count("math.exp2(") * 32 / kernel.plan.chunks
    )
    out = torch.zeros(3, 1024).to(dtype)
    launch(kernel.ptx, (2, 1), [x, *more, out], is_emitted=True)
    expected = htile.rowwise(f)(x, *more)
    rtol = 1e-2 if dtype is BF16 else 1e-5
    torch.testing.assert_close(out.float(), expected.float(), rtol=rtol, atol=1e-5)


def test_chunks_that_lie_otherwise_compute_their_own():
    """With 4 threads a row, the chunks of a thread are 16 columns apart, half a group."""
    plan = PLANS | {"threads_per_row": 4}
    kernel = inspect(turned, meta(64, 128), **plan)
    assert kernel.plan.chunks == 8 and not once(kernel.plan)
    assert "_chunk(" not in kernel.source, "a loop over its vectors computes each"
    kernel = inspect(turned, meta(64, 128), **PLANS)
    assert kernel.plan.chunks == 1 and "chunk(" not in kernel.source


def test_loops_and_what_takes_little_stay_as_they_are():
    def small(x):
        return (x.view(-1, HEAD) * (torch.arange(HEAD) * 0.5)).flatten()

    assert "chunk(" not in inspect(small, meta(64, 1024), **PLANS).source
    kernel = inspect(turned, meta(64, 65536), form="loops")
    assert "_chunk(" not in kernel.source


def test_its_instructions_count_once():
    kernel = inspect(turned, meta(64, 1024), **PLANS)
    saved, special = instructions_saved(kernel.plan)
    ratio = 1 - 1 / kernel.plan.chunks
    assert special == 3 * ratio and saved > 12 * ratio


def test_it_changes_no_bit():
    """The same as what a row of 32 columns has, whose threads have one chunk."""
    x, t = torch.randn(8, 1024), torch.rand(8)
    found = []
    for plan in (PLANS, PLANS | {"threads_per_row": 256, "num_threads": 256}):
        kernel, out = inspect(shifted, x, t, **plan), torch.zeros(8, 1024)
        launch(kernel.ptx, (-(-8 // kernel.plan.rows_per_block), 1), [x, t, out], is_emitted=True)
        found.append(out)
    assert torch.equal(*found)
