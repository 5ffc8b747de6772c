"""`python -m examples.gallery`: every kernel against its reference, one line each."""

import torch

from . import CASES, load, variants
from .check import compare

ROWS = 64


def main() -> None:
    """Check all kernels, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    for name, k in CASES:
        module, variant = load(name), variants(name)[k]
        args = module.arguments(ROWS, module.SIZE[1], torch.bfloat16, device)
        function = getattr(module, name)
        worst = compare(function(*args, **variant), module.reference(*args, **variant))
        chosen = " ".join(str(value).removeprefix("torch.") for value in variant.values())
        print(f"{name:<24} {chosen:<14} right on {device}; largest error {worst:.2f} of the bound")


if __name__ == "__main__":
    main()
