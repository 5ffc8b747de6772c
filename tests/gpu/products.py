"""Runs a product written by hand on a GPU: `python -m tests.gpu.products shared bfloat16 k`.

It prints how many results were right. `test_handwritten_matmul.py` starts it in a process of its
own with a time limit, because a kernel whose barriers do not match hangs.
"""

import sys

import torch

from examples import handwritten_fused_matmul, handwritten_matmul, handwritten_matmul_registers
from examples.handwritten_matmul import error_bound

SEVERAL = (1, 17, 64, 129)  # numbers of rows with which a row must have the same bits
# M, N and K. Of lines of 16 bits, 8 elements are 16 bytes.
ALIGNED = ((1, 8, 8), (17, 136, 40), (64, 128, 64), (129, 1000, 264), (1000, 1000, 1000),
           (4096, 512, 4096), (0, 8, 8), (8, 0, 8), (16, 16, 0))  # fmt: skip
ODD_COLUMNS = ((300, 129, 72), (64, 4, 200), (5, 1, 8))
UNALIGNED = ((1, 1, 1), (77, 101, 50), (65, 130, 33))
FUSED = ((1, 8, 8, 8), (130, 136, 72, 24), (64, 64, 32, 128), (1000, 1000, 512, 304),
         (300, 2048, 1024, 136), (0, 8, 8, 8), (8, 0, 8, 8), (8, 8, 0, 8))  # fmt: skip
FUSED_ODD = ((300, 1000, 512, 129), (5, 64, 32, 1))  # if the rows of the last matrix are contiguous


def matrix(rows: int, columns: int, dtype: torch.dtype, major: str) -> torch.Tensor:
    """Random numbers. Beside the lines, which are apart by some 16 bytes, there is NaN."""
    shape = (rows, columns) if major == "k" else (columns, rows)
    step = shape[1] + -shape[1] % 8 + 8
    lines = torch.full((shape[0], step), torch.nan, device="cuda", dtype=dtype)[:, : shape[1]]
    lines.copy_(torch.randn(shape, device="cuda"))
    return lines if major == "k" else lines.T


def check(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, *what) -> None:
    """Raise AssertionError unless a result is within its bound."""
    error = (out.double() - exact).abs()
    is_wrong = ~(error <= bound)  # of NaN too
    assert not is_wrong.any(), (
        f"{what}: {int(is_wrong.sum())} of {out.numel()} are wrong, the first at "
        f"{is_wrong.nonzero()[0].tolist()}; the largest error is {error.max():.3g}"
    )


def of_one_product(name: str, dtype: torch.dtype, major: str) -> int:
    """Compare one product of every size with float64; how many there were."""
    module = {"shared": handwritten_matmul, "registers": handwritten_matmul_registers}[name]
    sizes = ALIGNED + (ODD_COLUMNS if major == "k" else ())
    sizes += UNALIGNED if name == "registers" else ()
    for m, n, k in sizes:
        a, b = matrix(m, k, dtype, "k"), matrix(n, k, dtype, major)
        out, exact = module.matmul(a, b), a.double() @ b.double().T
        check(out, exact, error_bound(a, b, exact, dtype), m, n, k)
        for rows in SEVERAL:
            assert module.matmul(a[:rows], b).equal(out[:rows]), f"{rows} of {m} rows: other bits"
        for shift in (1, 64):
            moved = matrix(m, k, dtype, "k").copy_(a.roll(shift, 0))
            assert module.matmul(moved, b).equal(out.roll(shift, 0)), "moved rows: other bits"
    return len(sizes)


def of_two_products(dtype: torch.dtype, majors: str) -> int:
    """Compare two products of every size with float64; how many there were."""
    b_major, c_major = majors.split(",")
    sizes = FUSED + (FUSED_ODD if c_major == "k" else ())
    for m, n, k, p in sizes:
        a, b = matrix(m, k, dtype, "k"), matrix(n, k, dtype, b_major)
        c = matrix(p, n, dtype, c_major)
        if dtype == torch.float16:  # the first product must be in its range
            a = a.mul_(k**-0.5 if k else 1)
        out = handwritten_fused_matmul.fused_matmul(a, b, c)
        exact = a.double() @ b.double().T @ c.double().T
        bound = handwritten_fused_matmul.error_bound(a, b, c, exact)
        check(out, exact, bound, m, n, k, p)
        for rows in SEVERAL:
            again = handwritten_fused_matmul.fused_matmul(a[:rows], b, c)
            assert again.equal(out[:rows]), f"{rows} of {m} rows: other bits"
    return len(sizes)


def main(name: str, dtype: str, majors: str) -> None:
    """Run one kernel; `majors` is that of B, or those of B and C of two products."""
    torch.manual_seed(0)
    of = getattr(torch, dtype)
    count = of_two_products(of, majors) if name == "fused" else of_one_product(name, of, majors)
    print(f"{count} sizes right")


if __name__ == "__main__":
    main(*sys.argv[1:])
