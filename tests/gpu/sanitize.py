"""Runs every example once a size, for compute-sanitizer; prints how many were right.

So it does with functions of parts and of elements at an index, whose results replace an argument
in some cases: there a thread may write what another one has still to read.

`--no-clusters` leaves out rows that are reduced over a cluster, or has one CTA work on them:
racecheck does not follow the fence and the relaxed cluster barrier between an mbarrier's
initialization and its first use, and reports those two writes as a race. Of the memory of other
blocks it sees nothing.

Functions with products run, too, with `--no-clusters` of so few rows that no tiles are shared.

Inputs come from the CPU and results are compared there, so that no other kernel runs on the GPU.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import examples
import htile
from examples.handwritten_rmsnorm import rmsnorm_fwd
from examples.handwritten_softmax import softmax_fwd
from examples.rmsnorm import residual_arguments, rmsnorm
from htile.testing import assert_close
from tests import products
from tests.forced_tiles import forced, fresh
from tests.lower.backward import BACKWARD
from tests.lower.cases import (
    any_layernorm,
    any_length_arguments,
    any_loss,
    any_norm_backward,
)

SHAPES = ((3, 17), (5, 1000), (4, 4096), (3, 1001))
LONG = ((2, 12000), (2, 15001))  # in chunks; of odd bf16 rows, which are shifted
DTYPES = (torch.bfloat16, torch.float32)
OF_SHARES = (1025, 12000)  # two shares of a row a CTA
OF_SHIFTED = (3, 9003)  # shifted rows that live in shared memory, in registers, or nowhere on chip
CLUSTERED = ((2, 20000), (3, 32768))
PARTED = ((5, 1000), (3, 1003))  # elements of a part; of odd ones too
SCANNED = ((70, 64), (3, 8191))  # several rows a warp; odd ones of many warps
INDEXED = ((5, 1000), (3, 1001), (2, 12000))
# Two rows and more for each group of a loop over rows; odd ones are not loaded ahead.
SUMMED = ((300, 4096), (2000, 1000), (2000, 1003))
SUMMED_IN_CLUSTERS = ((130, 16384),)
ANY = ((5, 1000), (3, 1003), (3, 129), (2, 12001))  # of any length: of both buckets, and in loops
# Functions, columns and elements of K. Most have columns that are not those of whole tiles.
PRODUCTS = ((products.linear, 512, 256), (products.swiglu, 136, 72), (products.nll, 296, 136),
            (products.project, 264, 64), (products.statistics, 256, 64),
            (products.masked, 136, 40), (products.mlp, 264, 128), (products.gelu, 1001, 72))
SHARED_PRODUCTS = ((products.softmax, 264, 72), (products.softmax, 1032, 40))
PRODUCT_ROWS, CLUSTERED_ROWS = (1, 40), (300,)
# More tiles of 128x128 than an H200 has multiprocessors, so some work on two in turns.
IN_TURNS = ((products.linear, 1080, 72), (products.gelu, 1080, 40), (products.nll, 1080, 72))
IN_TURNS_ROWS = 2100


class Case(NamedTuple):
    """A function and one size of its arguments, of each dtype.

    replaced: the argument that the result replaces.
    """

    function: htile.Rowwise
    arguments: Callable[..., tuple]
    m: int
    n: int
    replaced: int | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES


@htile.rowwise
def of_two_dtypes(x):
    """Results whose elements are of 4 bytes and of 1, stored one after the other."""
    return torch.exp(x.float()), x > 0


@htile.rowwise
def halves(x):
    gate, up = x.chunk(2)
    return torch.cat((F.silu(gate) * up, gate - up.mean()))


@htile.rowwise
def exchanged_halves(x):
    first, second = x.chunk(2)
    return torch.cat((second - first.amax(), first))


@htile.rowwise
def pairs(x):
    a, b = x[0::2], x[1::2]
    scale = torch.rsqrt((a * a + b * b).mean() + 1e-6)
    return torch.stack(((a * 0.6 - b * 0.8) * scale, (b * 0.6 + a * 0.8) * scale), -1).flatten()


@htile.rowwise
def fours(x):
    a, b, c, d = x.view(-1, 4).unbind(-1)
    return torch.stack((d, c - a.amax(), b, a), -1).flatten()


@htile.rowwise
def neighbours(x):
    """Pieces that reach beyond both ends of a row."""
    after = F.pad(x[2:], (0, 2))
    return x.roll(1, -1) - after, (x.roll(-5, -1) * after).sum()


@htile.rowwise
def less_the_element(x, y: htile.PerRow):
    return x - x[y]


@htile.rowwise
def softmax_less_the_element(x, y: htile.PerRow):
    return torch.softmax(x, -1) - x[y]


@htile.rowwise
def shares_up_to(x):
    """Two scans of one exchange, and a scan and a sum after it."""
    up_to, count = x.cumsum(-1), (x > 0).cumsum(-1)
    return up_to - count * x.amax(), (count % 3).cumsum(-1).sum()


@htile.rowwise
def summed_up(x):
    return x.cumsum(-1)


@htile.rowwise
def about_the_middle(x):
    """Elements by rank in two stages, of which the first has two."""
    return (x - x.kthvalue(x.shape[-1] // 3).values - x.median()).abs().median()


def parts_of(count: int) -> Callable[..., tuple]:
    """What makes a row of so many parts of N elements each."""

    def arguments(m: int, n: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor]:
        return (torch.randn(m, count * n, device=device).to(dtype),)

    return arguments


def row_and_index(m: int, n: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Rows, and the place of an element of each: in turns the last and the first one."""
    y = torch.arange(m, device=device) % 2 - 1
    return torch.randn(m, n, device=device).to(dtype), y


def of_backward(columns: int) -> Callable[..., tuple]:
    """What makes the arguments of a backward pass: two tensors of rows, and so many columns."""

    def arguments(m: int, n: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
        rows = [torch.randn(m, n, device=device).to(dtype) for _ in range(2)]
        return *rows, *(torch.rand(n, device=device).to(dtype) for _ in range(columns))

    return arguments


def cases(clusters: bool) -> Iterator[Case]:
    """Each kernel that is run."""
    for function, arguments in [*map(examples.load, examples.NAMES), (rmsnorm, residual_arguments)]:
        long = function.__name__ in ("softmax", "norm_softmax")
        for m, n in SHAPES + (LONG + CLUSTERED * clusters if long else ()):
            yield Case(function, arguments, m, n)
    yield Case(of_two_dtypes, examples.load("softmax")[1], 5, 1001)
    for f in (any_layernorm, any_loss, any_norm_backward):
        for m, n in ANY:
            yield Case(htile.rowwise(f, dynamic_n=True), partial(any_length_arguments, f), m, n)
    for f, columns in BACKWARD.values():
        for m, n in SUMMED + SUMMED_IN_CLUSTERS * clusters:
            yield Case(htile.rowwise(f), of_backward(columns), m, n)
    function, arguments = examples.load("layernorm")
    yield Case(function.with_plan(shares=2, loader="shared", cluster_n=2), arguments, *OF_SHARES)
    yield from shifted_in_loops()
    yield staged_in_parts()
    for m, n in LONG:
        yield Case(neighbours.with_plan(form="streamed", cluster_n=1), parts_of(1), m, n)
    for m, n in SHAPES + SCANNED + CLUSTERED * clusters:
        yield Case(shares_up_to, parts_of(1), m, n)
        yield Case(about_the_middle, parts_of(1), m, n)
        yield Case(neighbours, parts_of(1), m, n)
        for replaced in (None, 0):
            yield Case(summed_up, parts_of(1), m, n, replaced)
    for replaced in (None, 0):
        for m, n in PARTED:
            for function in (halves, exchanged_halves, pairs):
                yield Case(function, parts_of(2), m, n, replaced)
            yield Case(fours, parts_of(4), m, n, replaced)
        for m, n in INDEXED:
            for function in (less_the_element, softmax_less_the_element):
                yield Case(function, row_and_index, m, n, replaced)
        looped = softmax_less_the_element.with_plan(form="loops")
        yield Case(looped, row_and_index, m, n, replaced)


def shifted_in_loops() -> Iterator[Case]:
    """Loops over shifted rows, of 16 bits, wherever these live; also in place of what is read."""
    for name in ("softmax", "layernorm"):
        function, arguments = examples.load(name)
        for loader in ("shared", "packed", "direct"):
            looped = function.with_plan(form="loops", loader=loader, cluster_n=1)
            for replaced in (None, 0):
                yield Case(looped, arguments, *OF_SHIFTED, replaced, (torch.bfloat16,))


def staged_in_parts() -> Case:
    """Shifted rows, several of a thread block, of which each stores its result in two parts."""
    function, arguments = examples.load("softmax")
    held = function.with_plan(
        form="held", loader="direct", cluster_n=1, threads_per_row=32, num_threads=256
    )
    return Case(held, arguments, 37, 3319, None, (torch.bfloat16,))


def main(clusters: bool) -> None:
    right = 0
    for function, arguments, m, n, replaced, dtypes in cases(clusters):
        for dtype in dtypes:
            torch.manual_seed(0)
            args = arguments(m, n, dtype, "cpu")
            plan = function.inspect(*args, arch="sm_90a").plan
            exchanges = plan.work.stages and plan.numerics.cluster_n > plan.placement.shares
            if exchanges and not clusters:
                called = function.with_plan(cluster_n=1, form="loops")
            else:
                called = function
            given = [on_gpu(arg) for arg in args]
            result = called(*given, out=None if replaced is None else given[replaced])
            torch.cuda.synchronize()
            result = pytree.tree_map(torch.Tensor.cpu, result)
            assert_close(called, result, *args)
            right += 1
    by_hand(SHAPES + CLUSTERED[1:] * clusters)
    of_products(PRODUCTS, PRODUCT_ROWS + CLUSTERED_ROWS * clusters)
    of_products(SHARED_PRODUCTS * clusters, PRODUCT_ROWS + CLUSTERED_ROWS)
    in_turns()
    print(f"{right} kernels right")


def of_products(cases: tuple, rows: tuple[int, ...]) -> None:
    """Functions with products, of matrices (N, K) and of such that lie in memory as (K, N)."""
    for function, n, k in cases:
        for m in rows:
            args = products.arguments(function, m, n, k)
            for turned in (False, True) if n % 8 == 0 else (False,):  # else torch multiplies
                given = [
                    on_gpu(v.t()).t() if turned and kind is htile.Matrix else on_gpu(v)
                    for kind, v in zip(function._signature.kinds, args, strict=False)
                ]
                result = pytree.tree_map(torch.Tensor.cpu, function(*given))
                assert_close(function, result, *args)


def in_turns() -> None:
    """Products of warpgroups that work in turns."""
    for function, n, k in IN_TURNS:
        own, args = fresh(function), products.arguments(function, IN_TURNS_ROWS, n, k)
        with forced(alone_in_turns):
            result = pytree.tree_map(torch.Tensor.cpu, own(*map(on_gpu, args)))
        assert_close(function, result, *args)
    print(f"{len(PRODUCTS)} functions with products right, {len(IN_TURNS)} of them in turns")


def alone_in_turns(found: list) -> object:
    """The tile of which no other thread block shares anything."""
    return next(tile for tile in found if tile.in_turns and (tile.cluster, tile.parts) == (1, 1))


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that ends with 16 whole bytes, as every allocation of CUDA does.

    The sanitizer knows of no more than was asked for. Shifted rows are read in pieces of 16 bytes,
    and the last one of a tensor may reach beyond it.
    """
    size = -(-tensor.nbytes // 16) * 16
    memory = torch.zeros(size, dtype=torch.uint8)
    memory[: tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return memory.to("cuda")[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def by_hand(shapes: tuple) -> None:
    """The hand-written kernels, whose exchanges the emitted ones do not all have."""
    for m, n in shapes:
        torch.manual_seed(0)
        x, weight = torch.randn(m, n), torch.rand(n)
        row, column = on_gpu(x), on_gpu(weight)
        for online in (False, True):
            y = softmax_fwd(row, online_softmax=online).cpu()
            torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=1e-5, atol=0)
        y = rmsnorm_fwd(row, column).cpu().double()
        scale = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(y, x.double() * scale * weight, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main(clusters="--no-clusters" not in sys.argv)
