"""Constants that two modules have, because one of them cannot import the other.

`import htile` imports no CuTe-DSL, so what plans a kernel cannot read the numbers of primitives.
"""

import pytest

from htile import matmul, warp_matmul
from htile.compute import parts, tile_reduce
from htile.copy import row_loop
from htile.lower import over_rows
from htile.lower.emission import rows
from htile.lower.products import fused, plan, tiles

PAIRS = {
    "columns of a combining block": (rows.COMBINED, parts.COLUMNS),
    "the same of groups": (rows.COMBINED_OF_GROUPS, parts.COLUMNS_OF_GROUPS),
    "its threads": (rows.COMBINING_THREADS, parts.THREADS),
    "turns of loops over rows": (over_rows.TURNS, row_loop.TURNS),
    "elements of K of a stage": (plan.K_CHUNK, matmul.K_CHUNK),
    "the same without wgmma": (tiles.WARP_K, warp_matmul.K_CHUNK),
    "bytes of store stages": (
        tiles.STORED_BYTES,
        2 * matmul.BLOCK * fused.CHUNK * matmul.MatmulTileConfig.STORE_STAGES,
    ),
    "buffers of exchanges": (tiles.EXCHANGE_BUFFERS, matmul.MatmulTileConfig.buffers),
    "words of a mean": (fused.WORDS_OF_MEAN, len(tile_reduce.RowMeans.OPS)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_both_are_the_same(name):
    ours, theirs = PAIRS[name]
    assert ours == theirs
