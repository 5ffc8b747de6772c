"""What every example's `main()` does: run the function and hold it against float64."""

import torch

from htile.testing import assert_close


def check(function, arguments, shapes=((7, 1000), (64, 4096))) -> None:
    """Run `function` on the GPU if there is one, else on the CPU; print its largest error."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for m, n in shapes:
            args = arguments(m, n, dtype, device)
            worst = assert_close(function, function(*args), *args)
            name = f"{function.__name__} {m}x{n} {str(dtype).removeprefix('torch.')} on {device}"
            print(f"{name:<44} right; largest error {worst:.2f} of the bound")
