"""The defaults of a tile configuration, and what it refuses."""

import pytest
from cutlass import BFloat16, Float16, Float32, Int64

from htile.config import ElementwiseTileConfig


@pytest.mark.parametrize(
    ("N", "threads_per_row", "num_threads", "cluster_n"),
    [
        (1, 8, 128, 1),
        (64, 8, 128, 1),
        (65, 16, 128, 1),
        (128, 16, 128, 1),
        (129, 32, 128, 1),
        (3072, 32, 128, 1),
        (3073, 64, 128, 1),
        (4096, 64, 128, 1),
        (6144, 64, 128, 1),
        (6145, 128, 128, 1),
        (16384, 128, 128, 1),
        (16385, 256, 256, 2),
        (32768, 256, 256, 2),
        (32769, 256, 256, 4),
        (65536, 256, 256, 4),
        (131072, 256, 256, 8),
        (131073, 256, 256, 16),
        (262144, 256, 256, 16),
    ],
)
def test_tables_of_16_bits(N, threads_per_row, num_threads, cluster_n):
    config = ElementwiseTileConfig(Float16, N)
    assert (config.threads_per_row, config.num_threads) == (threads_per_row, num_threads)
    assert config.cluster_n == cluster_n


def test_threads_are_whole_warps_or_divide_one():
    for threads in (96, 160, 224, 992):
        config = ElementwiseTileConfig(Float32, 4096, threads_per_row=threads)
        assert config.num_threads % threads == 0 and config.warps_per_row == threads // 32
    assert ElementwiseTileConfig(Float32, 4096, threads_per_row=96, num_threads=192).rows == 2
    assert ElementwiseTileConfig(Float32, 64, threads_per_row=16, num_threads=96).rows == 6
    for threads in (0, 3, 24, 48, 100):
        with pytest.raises(ValueError, match="threads_per_row must be 1, 2, 4, 8, 16 or a mul"):
            ElementwiseTileConfig(Float32, 4096, threads_per_row=threads, num_threads=96)
    with pytest.raises(ValueError, match="threads_per_row must be 1, 2, 4, 8, 16 or a mul"):
        ElementwiseTileConfig(Float32, 4096, threads_per_row=0)
    for threads in (0, 100, 1056):
        with pytest.raises(ValueError, match="num_threads must be a multiple of 32, at most 1024"):
            ElementwiseTileConfig(Float32, 4096, threads_per_row=32, num_threads=threads)
    with pytest.raises(ValueError, match="128 threads do not work on 1 of 1 shares"):
        ElementwiseTileConfig(Float32, 4096, threads_per_row=96, num_threads=128)


def test_cluster_counts_bytes():
    clusters = [
        ElementwiseTileConfig(Float32, n).cluster_n for n in (8192, 8193, 16384, 65536, 65537)
    ]
    assert clusters == [1, 2, 2, 8, 16]


@pytest.mark.parametrize("N", [1, 7, 64, 1000, 3072, 4096, 4097, 50257, 131072, 262144])
def test_tile_covers_the_row(N):
    config = ElementwiseTileConfig(BFloat16, N)
    vec_size = config.vec_size(BFloat16, Float32)
    rows, columns = config.tiler_mn(vec_size)
    step = vec_size * config.threads_per_row * config.cluster_n
    assert N % vec_size == 0 and vec_size in (1, 2, 4)
    assert rows * config.threads_per_row == config.num_threads
    assert N <= columns * config.cluster_n < N + step
    assert config.is_even(vec_size) == (columns * config.cluster_n == N)


def test_shares_abreast_have_threads_of_their_own():
    sizes = dict(cluster_n=8, shares=4, threads_per_row=256)
    one, two = (ElementwiseTileConfig(BFloat16, 32768, abreast=n, **sizes) for n in (1, 2))
    assert (one.num_threads, one.turns, two.num_threads, two.turns) == (256, 4, 512, 2)
    assert one.rows == two.rows == 1 and one.ctas == two.ctas == 2
    assert one.tiler_mn(8) == (1, 16384) and two.tiler_mn(8) == (2, 8192)
    assert one.is_even(8) and two.is_even(8)
    assert one.reduce_layout.shape == two.reduce_layout.shape == (1, (8, 8), 1)
    with pytest.raises(ValueError, match="256 threads do not work on 2 of 4 shares"):
        ElementwiseTileConfig(BFloat16, 32768, abreast=2, num_threads=256, **sizes)
    with pytest.raises(ValueError, match="512 threads do not work on 2 of 1 shares"):
        ElementwiseTileConfig(BFloat16, 32768, abreast=2, **sizes | {"shares": 1})


def test_overrides():
    config = ElementwiseTileConfig(
        BFloat16, 4096, cluster_n=2, stage=3, num_threads=256, threads_per_row=128
    )
    assert config.tiler_mn(8) == (2, 2048)
    assert config.reduce_layout.shape == (2, (4, 2), 3)
    assert config.cluster == [1, 2, 1]
    wide = ElementwiseTileConfig(BFloat16, 4096, threads_per_row=512, reduction_dtype=Int64)
    assert wide.num_threads == 512
    assert wide.reduce_layout.shape == (1, (16, 1), 1) and wide.reduce_layout.dtype is Int64


@pytest.mark.parametrize(
    "wrong",
    [
        {"N": 0},
        {"N": 64, "cluster_n": 2},
        {"N": 4096, "cluster_n": 32},
        {"N": 4096, "threads_per_row": 48},
        {"N": 4096, "num_threads": 32},
        {"N": 4096, "num_threads": 2048, "threads_per_row": 64},
        {"N": 4096, "copy_bytes": 3},
    ],
)
def test_refused(wrong):
    with pytest.raises(ValueError):
        ElementwiseTileConfig(BFloat16, **wrong)


@pytest.mark.parametrize("vec_size", [3, 16, 0, 32])
def test_refused_vectors(vec_size):
    with pytest.raises(ValueError):
        ElementwiseTileConfig(BFloat16, 1000).tiler_mn(vec_size)
