"""Runs every example once a size, for compute-sanitizer; prints how many were right.

Inputs come from the CPU and results are compared there, so that no other kernel runs on the GPU.
"""

import torch
from torch.utils import _pytree as pytree

import examples
from examples.rmsnorm import residual_arguments, rmsnorm
from htile.testing import assert_close

SHAPES = ((3, 17), (5, 1000), (4, 4096))


def main() -> None:
    functions = [*map(examples.load, examples.NAMES), (rmsnorm, residual_arguments)]
    right = 0
    for function, arguments in functions:
        for m, n in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                torch.manual_seed(0)
                args = arguments(m, n, dtype, "cpu")
                result = function(*(a.to("cuda") for a in args))
                torch.cuda.synchronize()
                result = pytree.tree_map(torch.Tensor.cpu, result)
                assert_close(function, result, *args)
                right += 1
    print(f"{right} kernels right")


if __name__ == "__main__":
    main()
