"""Runs every example once a size, for compute-sanitizer; prints how many were right.

`--no-clusters` leaves out rows that are reduced over a cluster, or has one CTA work on them:
racecheck does not follow the fence and the relaxed cluster barrier between an mbarrier's
initialization and its first use, and reports those two writes as a race. Of the memory of other
blocks it sees nothing.

Inputs come from the CPU and results are compared there, so that no other kernel runs on the GPU.
"""

import sys
from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

import examples
import htile
from examples.handwritten_rmsnorm import rmsnorm_fwd
from examples.handwritten_softmax import softmax_fwd
from examples.rmsnorm import residual_arguments, rmsnorm
from htile.testing import assert_close

SHAPES = ((3, 17), (5, 1000), (4, 4096), (3, 1001))
LONG = ((2, 12000), (2, 15001))  # in chunks; of odd bf16 rows, streamed
DTYPES = (torch.bfloat16, torch.float32)
OF_SHARES = (1025, 12000)  # two shares of a row a CTA
CLUSTERED = ((2, 20000), (3, 32768))


@htile.rowwise
def of_two_dtypes(x):
    """Results whose elements are of 4 bytes and of 1, stored one after the other."""
    return torch.exp(x.float()), x > 0


def cases(clusters: bool) -> Iterator[tuple]:
    """(function, its arguments, M, N) of each kernel that is run."""
    for function, arguments in [*map(examples.load, examples.NAMES), (rmsnorm, residual_arguments)]:
        long = function.__name__ in ("softmax", "norm_softmax")
        for m, n in SHAPES + (LONG + CLUSTERED * clusters if long else ()):
            yield function, arguments, m, n
    yield of_two_dtypes, examples.load("softmax")[1], 5, 1001
    function, arguments = examples.load("layernorm")
    yield function.with_plan(shares=2, loader="shared", cluster_n=2), arguments, *OF_SHARES


def main(clusters: bool) -> None:
    right = 0
    for function, arguments, m, n in cases(clusters):
        for dtype in DTYPES:
            torch.manual_seed(0)
            args = arguments(m, n, dtype, "cpu")
            plan = function.inspect(*args, arch="sm_90a").plan
            exchanges = plan.work.stages and plan.numerics.cluster_n > plan.placement.shares
            if exchanges and not clusters:
                called = function.with_plan(cluster_n=1, form="loops")
            else:
                called = function
            result = called(*map(on_gpu, args))
            torch.cuda.synchronize()
            result = pytree.tree_map(torch.Tensor.cpu, result)
            assert_close(called, result, *args)
            right += 1
    by_hand(SHAPES + CLUSTERED[1:] * clusters)
    print(f"{right} kernels right")


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
