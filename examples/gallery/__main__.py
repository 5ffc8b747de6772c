"""`python -m examples.gallery [products]`: each kernel against its reference, and a count.

With `products` those with matrices alone, at the size that they have in a model but for the rows.
"""

import sys

import torch

import examples
from htile.testing import assert_close

from . import CASES, PRODUCT_CASES, PRODUCTS, catalogue, load, variants
from .check import compare

ROWS = 60  # as the GPU tests have, so that both take the same compiled kernels
ELSEWHERE = 4096  # elements of the rows of examples that are not in this folder


def main() -> int:
    """Check all kernels, on the GPU if there is one; how many are wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    kernels = catalogue()
    paths = sorted({name for names, _ in kernels.values() for name in names if "/" in name})
    wrong = [name for name, k in CASES if not _is_right(name, k, device)]
    wrong += [path for path in paths if not _is_example_right(path, device)]
    ran = {name for name, _ in CASES} | set(paths)
    right = [missing for names, missing in kernels.values() if names and names <= ran - {*wrong}]
    whole = sum(not missing for missing in right)
    print(
        f"{whole} of the {len(kernels)} kernels of docs/language.md ran on {device} and were right,"
        f" and {len(right) - whole} in part; {len(CASES)} variants of {len(ran)} functions,"
        f" {len(wrong)} wrong"
    )
    return len(wrong)


def check_products() -> int:
    """Check the kernels with matrices, on the GPU if there is one; how many are wrong."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    right = [_is_right(name, k, device) for name, k in PRODUCT_CASES]
    print(f"{sum(right)} of {len(right)} kernels with products ran on {device} and were right")
    return right.count(False)


def _is_right(name: str, k: int, device: str) -> bool:
    """Run a variant of a kernel of the gallery, and say how it went."""
    module, variant = load(name), variants(name)[k]
    args = module.arguments(ROWS, *module.SIZE[1:], torch.bfloat16, device)
    chosen = " ".join(str(value).removeprefix("torch.") for value in variant.values())
    start = f"{name:<24} {chosen:<14}"
    try:
        result = getattr(module, name)(*args, **variant)
        k = module.SIZE[2] if name in PRODUCTS else 0
        worst = compare(result, module.reference(*args, **variant), k)
    except AssertionError as error:
        print(f"{start} WRONG on {device}: {error}")
        return False
    print(f"{start} right on {device}; largest error {worst:.2f} of the bound")
    return True


def _is_example_right(path: str, device: str) -> bool:
    """The same of an example beside the gallery, against the function itself in float64."""
    function, arguments = examples.load(path.rpartition("/")[2].removesuffix(".py"))
    args = arguments(ROWS, ELSEWHERE, torch.bfloat16, device)
    try:
        worst = assert_close(function, function(*args), *args)
    except AssertionError as error:
        print(f"{path:<39} WRONG on {device}: {error}")
        return False
    print(f"{path:<39} right on {device}; largest error {worst:.2f} of the bound")
    return True


if __name__ == "__main__":
    check = check_products if sys.argv[1:] == ["products"] else main
    sys.exit(min(check(), 1))
