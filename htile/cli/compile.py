"""`compile`: fills the disk cache ahead of a deployment, on a machine with or without a GPU."""

from __future__ import annotations

import time
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CompileError
from .show import find, inspected
from .terminal import UsageError
from .values import GRAMMAR

if TYPE_CHECKING:
    from ..run.kernel import Kernel
    from ..run.rowwise import Rowwise

SUMMARY = "compile a row-wise function into the disk cache, for later processes; no GPU needed"
EXAMPLES = (
    'compile examples.softmax:softmax --args "x=bf16[64,8192]" --arch sm_90a --arch sm_100a',
    'compile mymodule:f --args "x=f16[8,512] w=f16[512]" --args "x=f16[8,768] w=f16[768]"',
    'compile examples.softmax:softmax --args "x=bf16[64,8192]" --backward',
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "function", metavar="MODULE:FUNCTION", help="the function, named as for `show`"
    )
    parser.add_argument(
        "--args", action="append", metavar="TEXT",
        help="its arguments, written as below; give it once for each kernel. A kernel is for one "
        "number of dimensions and any number of rows, but one row alone may have a kernel of its "
        "own, and for N > 2048 so may 64, 256 and 1024 rows and more. So may 1024 rows and more "
        "of an elementwise function, if they are no multiple of 16 bytes. Tensors begin at "
        "multiples of 16 bytes",
    )  # fmt: skip
    parser.add_argument(
        "--arch", action="append", metavar="NAME",
        help="the architecture, such as sm_100a (default: sm_90a); give it once for each",
    )  # fmt: skip
    parser.add_argument(
        "--backward", action="store_true",
        help="the kernels of both passes, too, for calls whose results are differentiated",
    )  # fmt: skip
    parser.epilog = f"{GRAMMAR}\n\n{parser.epilog}"


def run(options: Namespace) -> int:
    from ..build.cache import cache_folder, cache_limit

    folder = cache_folder()
    if folder is None:
        raise UsageError("the disk cache is turned off: set HTILE_CACHE_DIR to a folder")
    cache_limit()  # raises where it is no size, which a kernel that is there would not tell
    function, files = find(options.function), {}
    for text in options.args or [""]:
        for arch in options.arch or [None]:
            _compile(function, text, arch, options.backward, files)
    if gone := sum(not path.exists() for path in files):
        raise CompileError(
            f"{gone} of {len(files)} kernels had to leave the disk cache for the others: they take "
            f"{sum(files.values())} bytes together, {_limit()}"
        )
    print(f"in {folder}")
    return 0


def _limit() -> str:
    """What to say where kernels do not fit in the disk cache."""
    from ..build.cache import cache_limit

    return f"and HTILE_CACHE_SIZE allows {cache_limit()}: set it to more, such as 512M"


def _compile(
    function: Rowwise, text: str, arch: str | None, backward: bool, files: dict[Path, int]
) -> None:
    """Compile the kernels of a call. files: gets the file of each, and how large it is."""
    shown = inspected(function, text, arch)
    training = shown.training if backward else None
    for kernel in getattr(shown, "kernels", (shown,)):  # of a function with products, several
        _compile_kernel(kernel, files)
    if training is not None:
        _compile_kernel(training.forward, files, " with a gradient")
        _compile_kernel(training.backward, files)


def _compile_kernel(kernel: Kernel, files: dict[Path, int], what: str = "") -> None:
    from ..build.cache import path_of

    path = path_of(kernel.source, kernel.lowered.function, kernel.arch)
    there = path is not None and path.exists()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compiled kernels can not be kept", RuntimeWarning)
        try:
            kernel.build_ahead()
        except RuntimeWarning as warning:
            message = f"{kernel.name} can not be kept in the disk cache: {warning}"
            raise CompileError(message) from None
    took = time.perf_counter() - start
    if path is None or not path.exists():
        message = f"{kernel.name} is compiled, but can not be kept in the disk cache"
        raise CompileError(message if path is None else f"{message}: it does not fit, {_limit()}")
    files[path] = path.stat().st_size
    how = "was there" if there else f"compiled in {took:.1f} s"
    print(f"{kernel.name}{what}, N {kernel.graph.length_text}, {kernel.arch}: {how}", flush=True)
