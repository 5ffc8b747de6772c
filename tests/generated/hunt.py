"""`python -m tests.generated.hunt --seeds 0:5000`: other seeds than those of the tests, on the CPU.

Each program's reference is held against the oracle, and lowered; with --compile ARCH compiled. A
failure is printed with its program, reduced to what the wrong result needs.
"""

from __future__ import annotations

import argparse
import collections
import functools
import time
import traceback

from . import products
from .measure import check
from .programs import Program, program, reduced


def failure(p: Program, arch: str | None = None) -> str | None:
    """What is wrong with a program, or None. With an architecture: what its compilation says."""
    try:
        f, args = p.function(), p.arguments()
        if arch is not None:
            shown = f.inspect(*args, arch=arch)
            stack = max(k.resources.stack for k in getattr(shown, "kernels", (shown,)))
            return f"stack frame of {stack} bytes" if stack else None
        f.inspect(*args)
        check(p, f, f(*args), args, fair=True)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        return f"{type(error).__name__} at {where}: {error}"
    return None


def _same(kind: str, arch: str | None, p: Program) -> bool:
    return (failure(p, arch) or "").startswith(kind)


def main() -> None:
    """Print each failure, and how many there were of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:5000", help="FROM:TO")
    parser.add_argument("--sizes", default="small", choices=("small", "all"))
    parser.add_argument("--products", action="store_true", help="programs with matrix products")
    parser.add_argument("--compile", metavar="ARCH", help="compile each, such as for sm_90a")
    options = parser.parse_args()
    low, high = map(int, options.seeds.split(":"))
    make = products.program if options.products else program
    started, kinds = time.monotonic(), collections.Counter()
    for seed in range(low, high):
        p = make(seed, options.sizes)
        what = failure(p, options.compile)
        if what is None:
            continue
        kinds[" ".join(what.split()[:3])] += 1
        smaller = reduced(p, functools.partial(_same, what.partition(": ")[0], options.compile))
        print(f"{'-' * 100}\n{failure(smaller, options.compile)}\n{smaller}", flush=True)
    print(f"{high - low} programs, {time.monotonic() - started:.0f} s")
    for kind, count in kinds.most_common():
        print(f"{count:6} {kind}")


if __name__ == "__main__":
    main()
