"""Kernels of products without wgmma: their PTX is run on the CPU, and compared with float64."""

from dataclasses import replace

import pytest
import torch

from htile.build.arch import arch_named
from htile.build.compile import build
from htile.run import products as running
from htile.testing import assert_close
from tests import products
from tests.primitives.ptx_device import launch
from tests.products import BF16, F16, arguments
from tests.test_matrices import run_steps

PROCESSORS = 108  # multiprocessors of an A100


def without_wgmma(name):
    """An architecture as if it had no wgmma."""
    return replace(arch_named(name), has_wgmma=False)


def run_kernel(arch, tile=None, seen=None, **order):
    """How `run_steps` evaluates the kernel of a product: its PTX, for `arch`."""

    def computed(kernel, found, rows):
        text = running.text_for(kernel, found, rows, without_wgmma(arch), PROCESSORS, False)
        assert text.tile.warps
        columns = [running._columns(found[o.product.matrix], o, kernel.n) for o in kernel.operands]
        columns = columns if text.major == "k" else [each.t() for each in columns]
        others = [running._argument(found[i.name], i, kernel.n) for i in kernel.others]
        made = {
            o.name: torch.full((rows, running.width(kernel, o)), torch.nan).to(o.dtype)
            for o in kernel.graph.outputs
        }
        tiles = -(-rows // text.tile.rows), -(-kernel.n // (text.tile.columns // len(columns)))
        left = found[kernel.operands[0].product.left]
        given = [left, *columns, *others, *made.values(), *tiles, rows]
        ptx = build(text.source, text.function, arch).ptx
        launch(ptx, (tiles[0] * tiles[1], 1), given, is_emitted=True, **order)
        return made

    return computed


def check(f, args, arch="sm_80", **order):
    found = run_steps(f, args, run_kernel(arch, **order))
    results = torch.utils._pytree.tree_unflatten(
        found, torch.utils._pytree.tree_structure(f(*args))
    )
    assert_close(f, results, *args)


@pytest.mark.parametrize("name", ["linear", "swiglu", "project", "nll", "statistics", "gelu"])
def test_x(name):
    f = getattr(products, name)
    check(f, arguments(f, 17, 136, 72))
