"""Has kernels of products take given tiles, to run those that a size would not get by itself."""

from contextlib import contextmanager

import htile
from htile.build.compile import build_all
from htile.lower.products.tiles import tiles
from htile.run.products import calls as run
from htile.run.products.kernels import ProductKernel
from tests.products import some_tiles


@contextmanager
def forced(pick):
    """Calls in the block take `pick(tiles)`; it gets all that a kernel can have."""

    def choose(kernel, major, rows, processors, arch):
        return pick(tiles(kernel, major, arch))

    own, run.choose_tile = run.choose_tile, choose
    try:
        yield
    finally:
        run.choose_tile = own


def each_form(k):
    """A pick: number `k` of some tiles of each form."""
    return lambda found: (some := some_tiles(found))[k % len(some)]


def in_turns(found):
    """A pick: the widest tile that warpgroups work on in turns; cut where few are left."""
    own = [tile for tile in found if tile.in_turns]
    return max(own, key=lambda tile: (tile.parts, tile.cluster, tile.columns), default=None)


def count_of(f, args):
    """How many picks `each_form` has for a function."""
    most = 0

    def pick(found):
        nonlocal most
        most = max(most, len(some_tiles(found)))
        return found[0]

    with forced(pick):
        fresh(f).inspect(*args, arch="sm_90a")
    return most


def fresh(f):
    """The same function, which has forgotten its kernels."""
    return htile.rowwise(f._fn)


def compile_ahead(f, args, picks):
    """Compile the kernels of products of all picks in forked processes, before CUDA is used."""
    requests = []
    for pick in picks:
        with forced(pick):
            kernels = fresh(f).inspect(*args, arch="sm_90a").kernels
        own = [kernel.text for kernel in kernels if isinstance(kernel, ProductKernel)]
        requests += [(text.source, text.function, "sm_90a") for text in own]
    build_all(requests)
