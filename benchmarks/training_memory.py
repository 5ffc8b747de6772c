"""Measures the peak memory of a forward and a backward pass, for `python -m benchmarks.training`.

It is what `torch.cuda.max_memory_allocated` says, less what was allocated before: the arguments and
the gradient of the result. So the result, what is kept of the forward pass, the gradients and all
memory in between are counted, and nothing that a library keeps from one call to the next.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

import htile.nn
from benchmarks.contenders import failures
from benchmarks.training import KERNELS, LOSS, forward

SHAPES = ((32768, 4096), (8192, 16384), (4096, 32768), (12000, 11008))
DTYPE, DEVICE = torch.bfloat16, "cuda"
MIB = 1 << 20  # bytes

Found = dict[str, dict[str, int]]  # by kernel and shape, and by contender: bytes


def loss(contender: str) -> Callable:
    """The mean cross entropy of logits and labels. Raises ImportError if there is none."""
    if contender == "htile":
        return htile.nn.CrossEntropyLoss()
    if contender == "torch":
        return F.cross_entropy
    if contender == "compile":
        return torch.compile(F.cross_entropy, dynamic=False)
    if contender == "quack":
        import quack

        return lambda x, label: quack.cross_entropy(x, label, reduction="mean")
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss()


def peak(step: Callable[[], object]) -> int:
    """How many bytes a step takes at its peak beside what is there before, once it is warm."""
    for _ in range(2):
        step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def step_of(name: str, contender: str, m: int, n: int) -> Callable[[], object]:
    """A forward and a backward pass of rows (m, n)."""
    torch.manual_seed(0)
    if name == LOSS:
        function, label = loss(contender), torch.randint(n, (m,), device=DEVICE)
        x = torch.randn(m, n, device=DEVICE, dtype=DTYPE, requires_grad=True)
        # Liger writes its gradient over the logits, so each step has logits that are new
        return lambda: torch.autograd.grad(function(x * 1, label), x)
    kernel = KERNELS[name]
    function = forward(kernel, contender)
    rows = [torch.randn(m, n, device=DEVICE, dtype=DTYPE) for _ in range(kernel.rows)]
    vectors = [torch.rand(n, device=DEVICE, dtype=DTYPE) for _ in range(kernel.vectors)]
    leaves = [each.requires_grad_() for each in rows + vectors]
    cotangent = torch.randn(m, *[n] * (not kernel.reduces), device=DEVICE, dtype=DTYPE)
    return lambda: torch.autograd.grad(function(*leaves), leaves, cotangent)


def measured(
    names: Sequence[str], shapes: Sequence[tuple[int, int]], contenders: Sequence[str]
) -> Found:
    """What each contender takes; one that fails takes no part."""
    found: Found = {}
    for name in names:
        for m, n in shapes:
            cell = found[f"{name} {m}x{n}"] = {}
            for contender in contenders:
                try:
                    cell[contender] = peak(step_of(name, contender, m, n))
                except failures() as error:
                    print(f"  {contender} takes no part in {name} {m}x{n}: {str(error)[:120]}")
    return found


def table(found: Found, contenders: Sequence[str]) -> str:
    """The peaks in MiB."""
    lines = [f"| peak of | {' | '.join(contenders)} |", f"|---|{'---|' * len(contenders)}"]
    for cell, of in found.items():
        texts = [f"{of[c] / MIB:.1f}" if c in of else "–" for c in contenders]
        lines.append(f"| {cell} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main(
    names: Sequence[str], shapes: Sequence[tuple[int, int]], contenders: Sequence[str],
    file: Path | None,
) -> None:  # fmt: skip
    """Print the table, and write the bytes to a file of JSON."""
    found = measured(names, shapes, contenders)
    print(table(found, contenders))
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
