"""Times a linear layer and its cross entropy, forward and backward, and the memory that they take.

    python -m benchmarks.linear_cross_entropy [--sizes 4096x128256x4096] [--rounds 7]

A pass gives the mean loss and its gradients of the rows (M, K) and of the matrix (V, K), all in
bfloat16. Memory is the most that a pass allocates beside its arguments, its gradients included, and
`share` is that over the bytes of the logits in float32. Errors are those of the gradients, relative
to their norms, against float64. Calls are not captured, because some of them wait for the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.contenders import failures
from benchmarks.products import VOCABULARY, nll, normal
from htile.tune.timing import interleave

CONTENDERS = ("htile", "torch", "compile", "liger", "liger, float32 sums")
FLOPS = 6  # operations of an element of the three products M x V x K that a pass needs
ROWS = 1024  # of a chunk of the float64 reference

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_torch(h: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, head), labels)


def loss_of(contender: str) -> Loss:
    """The mean loss as a contender computes it. Raises ImportError if it is not installed."""
    if contender == "htile":
        return lambda h, head, labels: nll(h, head, labels).mean()
    if contender == "torch":
        return by_torch
    if contender == "compile":
        return torch.compile(by_torch, dynamic=False)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    dtype = torch.float32 if "float32" in contender else None
    liger = LigerFusedLinearCrossEntropyLoss(accum_dtype=dtype)
    return lambda h, head, labels: liger(head, h, labels)


def step(loss: Loss, h: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> tuple:
    """The gradients of one pass."""
    return torch.autograd.grad(loss(h, head, labels), (h, head))


def exact(h: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The gradients in float64, by chunks of rows and by hand."""
    wide, of_rows, of_head = head.double(), [], torch.zeros_like(head, dtype=torch.float64)
    for rows, label in zip(h.detach().double().split(ROWS), labels.split(ROWS), strict=True):
        g = torch.softmax(rows @ wide.t(), -1)
        g[torch.arange(len(label), device=label.device), label] -= 1
        g /= len(labels)
        of_rows.append(g @ wide)
        of_head += g.t() @ rows
    return [torch.cat(of_rows), of_head]


def memory(call: Callable) -> int:
    """The bytes that a call allocates at most, beside what is there."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(m: int, n: int, k: int, contenders: list[str], rounds: int) -> dict[str, dict]:
    """Milliseconds, bytes and errors of each contender that can take part."""
    torch.manual_seed(0)
    h, head = normal(m, k).requires_grad_(), (normal(n, k) * k**-0.5).requires_grad_()
    labels = torch.randint(0, n, (m,), device="cuda")
    with torch.no_grad():
        right = exact(h, head, labels)
    calls, found = {}, {}
    for contender in contenders:
        try:
            loss = loss_of(contender)
            gradients = step(loss, h, head, labels)
        except failures() as error:
            print(f"  {contender} takes no part: {str(error)[:120]}")
            continue
        pairs = zip(gradients, right, strict=True)
        found[contender] = {"errors": [((a - b).norm() / b.norm()).item() for a, b in pairs]}
        calls[contender] = lambda loss=loss: step(loss, h, head, labels)
    del right, gradients
    for contender, call in calls.items():
        found[contender]["bytes"] = memory(call)
    for contender, times in interleave(calls, rounds).items():
        found[contender]["ms"] = median(times) / 1e3
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = [f"{m}x{n}x{k}" for m, n, k in (*VOCABULARY, (8192, 32000, 1024))]
    parser.add_argument("--sizes", nargs="+", default=sizes, help="M x V x K: 4096x128256x4096")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU\n")
    print("| M x V x K | | ms | TFLOP/s of 3 products | GB | share | errors of h, head |")
    print("|---|---|---|---|---|---|---|")
    for size in options.sizes:
        m, n, k = map(int, size.split("x"))
        for name, found in measured(m, n, k, options.contenders, options.rounds).items():
            speed = FLOPS * m * n * k / found["ms"] / 1e9
            told = f"{found['bytes'] / 1e9:.2f} | {found['bytes'] / (4 * m * n):.2f}"
            errors = ", ".join(f"{error:.1e}" for error in found["errors"])
            print(f"| {size} | {name} | {found['ms']:.2f} | {speed:.0f} | {told} | {errors} |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
