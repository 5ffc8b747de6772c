"""What kernels of products with TMA and wgmma compute, by running their PTX without a GPU."""

import functools
import itertools
import re

import pytest
import torch
from torch.utils import _pytree as pytree

from htile.build.compile import build
from htile.lower.emission.names import kernel_name
from htile.lower.products.emit import emit
from htile.lower.products.fused import Tile
from htile.run.products import operands
from htile.testing import assert_close
from tests import products
from tests.primitives.hopper_device import Map, launch
from tests.products import arguments
from tests.test_matrices import run_steps

K_CHUNK = 64  # elements of K of a box
BLOCK = 64  # rows of a box that is stored


def matrices(tile, major, rights):
    """How TMA knows the matrices: as parts of wide tiles, and of narrower ones.

    The thread blocks of a cluster along the rows load a part of each.
    """
    found = []
    for parts in sorted({1, tile.parts}):
        columns = tile.columns // len(rights) // parts
        box = columns // tile.cluster, K_CHUNK
        if major == "mn":
            box = K_CHUNK // tile.cluster, 64 if columns % 64 == 0 else 32
        found.append([Map(right, box) for right in rights])
    return found


def evaluated(tile, clusters=2, change=None, **order):
    """How `run_steps` evaluates the kernel of a product: its PTX, with a tile.

    clusters: how many the grid has at most. change: a function of the PTX.
    """

    def evaluate(kernel, found, rows):
        given = [operands.columns_of(found[o.product.matrix], o, kernel.n) for o in kernel.operands]
        major = operands.major_of(given[0])
        given = given if major == "k" else [each.t() for each in given]
        others = [operands.argument(found[i.name], i, kernel.n) for i in kernel.others]
        source = emit(kernel, tile, major, operands.in_pairs(kernel, others))
        made = {
            o.name: torch.full((rows, operands.width(kernel, o)), torch.nan).to(o.dtype)
            for o in kernel.graph.outputs
        }
        box = (tile.a_rows or tile.rows) // kernel.shares, K_CHUNK
        left = Map(found[kernel.operands[0].product.left], box)
        wide, *narrow = matrices(tile, major, given)
        staged = [Map(made[kernel.staged.name], (BLOCK, kernel.chunk))] if kernel.staged else []
        direct = [made[o.name] for o in kernel.graph.outputs if o is not kernel.staged]
        count = [-(-rows // (tile.rows * tile.cluster))]
        count.append(-(-kernel.n // (tile.columns // len(given) * kernel.shares)))
        cut = itertools.chain(*narrow)
        passed = [left, *wide, *staged, *cut, *others, *direct, *count, rows]
        ptx = build(source, kernel_name(kernel.graph), "sm_90a").ptx
        ptx = ptx if change is None else change(ptx)
        grid = tile.cluster, kernel.shares, min(clusters, count[0] * count[1])
        launch(ptx, grid, passed, **order)
        return made

    return evaluate


def results(f, args, tile, **how):
    return run_steps(f, args, computed=evaluated(tile, **how))


def check(f, args, tile, **how):
    found = results(f, args, tile, **how)
    assert_close(f, pytree.tree_unflatten(found, pytree.tree_structure(f(*args))), *args)
    return found


def text_of(tile):
    schedule = "-in-turns" if tile.in_turns else ""
    cut = f"-cut-in-{tile.parts}" if tile.parts > 1 else ""
    return f"{tile.rows}x{tile.columns}-{tile.cluster}{cut}{schedule}"


SIZE = 140, 424, 136  # M, N and K, which no tile fills
LINEAR = arguments(products.linear, *SIZE)
TILES = (
    Tile(72, 64, 1, 3, warp_groups=1), Tile(136, 64, 2, 2, warp_groups=1),
    Tile(64, 64, 2, 3, warp_groups=1), Tile(248, 128, 1, 2), Tile(168, 128, 2, 2),
    Tile(152, 256, 2, 2), Tile(192, 256, 1, 2), Tile(128, 128, 1, 2, in_turns=True),
    Tile(192, 128, 2, 2, in_turns=True), Tile(136, 128, 2, 4, in_turns=True),
)  # fmt: skip


@functools.cache
def of_tiles_in_use():
    """The result of a tile that was in use when the promise of equal bits was measured."""
    return check(products.linear, LINEAR, Tile(256, 128, 2, 4))


@pytest.mark.parametrize("tile", TILES, ids=text_of)
def test_no_bit_depends_on_the_tile_or_the_schedule(tile):
    (found,), (expected,) = check(products.linear, LINEAR, tile), of_tiles_in_use()
    assert found.equal(expected)


@pytest.mark.parametrize("tile", [
    Tile(192, 128, 1, 2, parts=2), Tile(256, 128, 2, 2, parts=2),
    Tile(256, 128, 1, 2, in_turns=True, parts=2),
], ids=text_of)  # fmt: skip
def test_tiles_that_are_left_are_cut(tile):
    """Each thread block has one whole tile or two, so that either warpgroup begins with cut ones.
    """
    args = arguments(products.linear, 300, 424, 72)
    expected = check(products.linear, args, Tile(128, 128))
    for clusters in (2, 4):
        (found,) = results(products.linear, args, tile, clusters=clusters)
        assert found.equal(*expected)


@pytest.mark.parametrize("columns", [32, 64, 96, 160, 192])
def test_matrices_that_lie_the_other_way(columns):
    """The swizzled lines of (K, N) have 64 columns, or 32 where that leaves some."""
    args = [LINEAR[0], LINEAR[1].t().contiguous().t()]
    many = [Tile(columns, 128, 2, 2, in_turns=columns > 64)] if columns > 32 else []
    for tile in (Tile(columns, 64, 1, 2, warp_groups=1), *many):
        (found,) = results(products.linear, args, tile)
        assert found.equal(*of_tiles_in_use())


@pytest.mark.parametrize("m", [1, 17, 64, 129])
def test_bits_of_a_row_in_several_numbers_of_rows(m):
    for tile in (Tile(176, 128, 2, 2, in_turns=True), Tile(48, 64, 1, 3, 16, warp_groups=1)):
        if tile.a_rows < m and tile.a_rows:
            continue
        (found,) = results(products.linear, [LINEAR[0][:m], LINEAR[1]], tile)
        assert found.equal(of_tiles_in_use()[0][:m])


@pytest.mark.parametrize(("f", "columns"), [
    (products.gelu, 144), (products.swiglu, 176), (products.packed_swiglu, 192),
    (products.masked, 136), (products.norm_linear, 160), (products.mlp, 192),
    (products.bounded, 128), (products.nll, 128), (products.statistics, 128),
    (products.project, 128),
], ids=lambda value: getattr(getattr(value, "_signature", None), "name", None))  # fmt: skip
def test_functions_in_turns(f, columns):
    """Other rows, columns, labels, groups and stores; each against float64, with one chunk of K."""
    args = arguments(f, 140, 264, 40)
    check(f, args, Tile(columns, 128, 2, 3, in_turns=True))


@pytest.mark.parametrize("n", [264, 256])
def test_elements_at_labels(n):
    """At both ends of each group and of the row, of rows that have infinities and NaN elsewhere."""
    labels = torch.tensor([0, 1, 127, 128, 129, 254, 255, n - 1, -1, -n])
    h, head, _ = arguments(products.nll, len(labels), n, 40)
    head[3], head[200] = torch.inf, torch.nan
    h = h.abs()
    tile = Tile(128, 64, 1, 3, warp_groups=1)
    made = []

    def evaluate(kernel, found, rows):
        made.append(evaluated(tile)(kernel, found, rows))
        return made[-1]

    run_steps(products.nll, (h, head, labels), computed=evaluate)
    (name,) = [name for name in made[0] if name.startswith("max")][1:]
    z = (h.double() @ head.double().T).float()
    torch.testing.assert_close(made[0][name].amax(1), z[range(len(labels)), labels])


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_orders_of_what_happens(late, seed):
    """One thread block has all tiles, with two stages for four chunks of K."""
    args = arguments(products.linear, 130, 264, 200)
    for tile in (Tile(128, 128, 1, 2, in_turns=True), Tile(176, 128, 2, 2, in_turns=True)):
        check(products.linear, args, tile, clusters=1, late=late, seed=seed)


WAIT = r"// begin inline asm\s*\{[^}]*try_wait[^}]*\}\s*// end inline asm"


@pytest.mark.parametrize(("pattern", "which"), [
    (r"setmaxnreg\.inc(?:.|\n)*?" + WAIT, "the turn that is waited for"),
    (r"mbarrier\.arrive\.shared\.b64[ \t]*%rd[^;]*;", "the turn that is given"),
    (r"wgmma\.wait_group\.sync\.aligned[ \t]*1;", "the products that still read"),
    (r"wgmma\.wait_group\.sync\.aligned[ \t]*0;", "the products that still write"),
    (r"cp\.async\.bulk\.wait_group\.read[ \t]*\d;", "the stores that still read"),
    (r"bar\.sync[ \t]*%r\d+, 128;", "the other warps"),
], ids=lambda value: value.replace(" ", "-") if value.startswith("the ") else "")  # fmt: skip
def test_every_wait_is_needed(pattern, which):
    """Without one, some order gives a wrong result, or a warp waits for ever."""
    f, args = products.linear, arguments(products.linear, 130, 264, 200)
    exact = args[0].double() @ args[1].double().T

    def change(ptx):
        if not re.search(pattern, ptx):
            pytest.fail(f"not in the PTX: {which}")
        return re.sub(pattern, lambda match: re.sub(WAIT, "", match[0])
                      if "setmaxnreg" in match[0] else "", ptx)  # fmt: skip

    for late, seed in itertools.product((True, False), range(3)):
        try:
            (found,) = results(
                f, args, Tile(128, 128, 2, 2, in_turns=True), clusters=1, change=change,
                late=late, seed=seed,
            )  # fmt: skip
        except AssertionError as error:
            assert "for ever" in str(error) or "barrier counts" in str(error)
            return
        if not ((found.double() - exact).abs() < 0.1).all():
            return
    pytest.fail(f"nothing depends on {which}")
