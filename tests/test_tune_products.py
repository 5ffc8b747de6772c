"""The search for faster tiles of products, with made-up times of a pretended GPU."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch

from htile.build import cache
from htile.build.arch import DEFAULT
from htile.errors import ArgumentError
from htile.lower.products.tiles import tiles
from htile.run import ahead, rowwise, tuning
from htile.run.products import tiles as chosen
from htile.run.products.kernels import PROCESSORS, ProductKernel, ProductKernels
from htile.tune import tiles as search
from tests import products

CUDA = torch.device("cuda", 0)


def arguments(f=products.linear, m=2000, n=4096, k=512):
    return [v.to("meta") for v in products.arguments(f, m, n, k)]


class Machine:
    """A pretended GPU on which a call takes the sum of what its tiles take; most take 100 us."""

    def __init__(self, monkeypatch):
        self.name, self.costs, self.called, self.noise = "GPU X", {}, [], random.Random(0)
        cuda = {
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: self.name, "current_device": lambda: 0,
            "is_initialized": lambda: True, "is_current_stream_capturing": lambda: False,
            "device": lambda device: contextlib.nullcontext(),
        }  # fmt: skip
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        for module in (ahead, rowwise, tuning):
            monkeypatch.setattr(module, "device_of", lambda signature, values: CUDA)
        monkeypatch.setattr(tuning, "ProductLaunch", self.launch)
        monkeypatch.setattr(search, "time_on", self.time)
        monkeypatch.setattr(search, "building", lambda requests: contextlib.nullcontext(list))

    def launch(self, request, device):
        """In place of a launch: the call's tiles, as what would be shown has them."""
        found = [k.plan.tile for k in ProductKernels(request, DEFAULT).kernels
                 if isinstance(k, ProductKernel)]  # fmt: skip

        def call(values=None):
            self.called.append(found)
            return sum(self.costs.get(replace(tile, a_rows=0), 100.0) for tile in found)

        return call

    def time(self, device, contenders, rounds):
        assert device == CUDA
        return {
            name: [call() * self.noise.gauss(1, 0.01) for _ in range(rounds)]
            for name, call in contenders.items()
        }


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "cache"))
    yield Machine(monkeypatch)
    for f in products.FUNCTIONS:
        f._forget()


def tile_of(f, args):
    return next(k for k in f.inspect(*args).kernels if hasattr(k, "text")).plan.tile


def other(f, args, pick=0):
    """A tile that is not the default; they have the default's bits, as all have."""
    (kernel,) = [k for k in f.inspect(*args).kernels if hasattr(k, "text")]
    found = tiles(kernel.plan.kernel, "k", DEFAULT, len(args[0]))
    found.sort(key=lambda t: search.cycles(kernel.plan.kernel, t, len(args[0]), PROCESSORS))
    return [tile for tile in found[: search.MOST] if tile != kernel.plan.tile][pick]


def test_similar_calls_have_the_fastest_tile(machine):
    args, default = arguments(), tile_of(products.linear, arguments())
    best = other(products.linear, args, 5)
    machine.costs = {best: 80.0, other(products.linear, args, 7): 90.0}
    tuned = products.linear.tune(*args)
    (found,) = tuned.kernels
    assert (found.plan.tile, found.default.tile) == (best, default)
    assert found.tried == found.tiles > 20 and 19 < found.gain.median < 21
    assert found.file.parent == cache.cache_folder() / "tuned" and found.file.exists()
    for m in (1985, 2000, 2048):  # so many rows are 32 blocks
        assert tile_of(products.linear, arguments(m=m)) == best
    for more in ({"m": 1984}, {"m": 2049}, {"n": 4104}, {"k": 520}):
        assert tile_of(products.linear, arguments(**more)) != best
    machine.name = "GPU Y"
    assert tile_of(products.linear, args) == default


def test_both_schedules_are_tried(machine):
    args = arguments()
    products.linear.tune(*args)
    tried = {tile for (tile,) in machine.called}
    assert {tile.in_turns for tile in tried} == {True, False}
    assert {tile.rows for tile in tried} == {64, 128, 256}


def test_the_default_stays_where_nothing_is_faster(machine):
    args = arguments(products.gelu)
    (found,) = products.gelu.tune(*args).kernels
    assert found.plan is found.default and found.gain.median == 0
    assert "the default stays, " in str(found) and "none was faster" in str(found)
    machine.costs = {other(products.gelu, args): 50.0}
    told = str(products.gelu.tune(*args))
    assert "µs a call by default, now 5" in told and "% less" in told
    assert told.splitlines()[0].startswith("tuned gelu, N = 4096, on GPU X: ")
    assert any(line.startswith("  placement  tiles of") for line in told.splitlines())


def test_each_kernel_of_a_function_has_its_own(machine):
    args = arguments(products.mlp, n=4096, k=1024)
    first, second = products.mlp.tune(*args).kernels
    assert (first.plan.kernel.n, second.plan.kernel.n) == (4096, 1024)
    assert first.file != second.file


def test_a_tile_that_there_is_no_more_is_ignored(machine):
    args, default = arguments(), tile_of(products.linear, arguments())
    best = other(products.linear, args)
    machine.costs = {best: 50.0}
    (found,) = products.linear.tune(*args).kernels
    assert tile_of(products.linear, args) == best
    text = found.file.read_text()
    found.file.write_text(text.replace(f'"columns": {best.columns}', '"columns": 12', 1))
    assert tile_of(products.linear, args) == default
    found.file.write_text(text[:-20])
    assert tile_of(products.linear, args) == default


def test_no_tile_is_looked_up_before_cuda_is_used(machine, monkeypatch):
    args, default = arguments(), tile_of(products.linear, arguments())
    machine.costs = {other(products.linear, args): 50.0}
    products.linear.tune(*args)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tile_of(products.linear, args) == default


def test_wrong_use(machine, monkeypatch):
    with pytest.raises(ArgumentError, match="no rows"):
        products.linear.tune(*arguments(m=0))
    monkeypatch.setattr(tuning, "device_of", lambda signature, values: torch.device("cpu"))
    with pytest.raises(ArgumentError, match="got tensors on cpu"):
        products.linear.tune(*arguments())


def test_what_is_tried_and_noted_ends_with_its_block():
    args = arguments()
    (kernel,) = products.linear.inspect(*args).kernels
    own, tile = kernel.plan.kernel, replace(kernel.plan.tile, columns=64)
    call = own, "k", 2000, PROCESSORS, DEFAULT
    with chosen.choices() as noted:
        with chosen.trying(own, tile):
            assert chosen.choose_tile(*call) == tile
        assert chosen.choose_tile(*call) == kernel.plan.tile
    assert noted == [(call, kernel.plan.tile)]
    chosen.choose_tile(*call)
    assert len(noted) == 1
