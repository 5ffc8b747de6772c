"""How long HTile itself takes: from a function to source, and from source to an object.

`python -m benchmarks.pipeline` prints each figure beside its bound. No GPU is used.
"""

import subprocess
import sys
import time
from statistics import median

import torch

import htile
from htile.build.arch import DEFAULT
from htile.build.compile import _build
from htile.lower import choose, plans_for, printed
from htile.lower.plan import Target

REPEATS = 20


def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


def long_function(nodes: int):
    """A function of about `nodes` operations: two reductions, the rest elementwise, none equal."""

    def chain(x, w):
        y = x
        for k in range(nodes // 5):
            y = torch.tanh(y * w) + x * (k + 1.5)
        return y - y.max(), y.mean()

    return chain


def arguments(n: int = 4096, count: int = 1) -> list[torch.Tensor]:
    """Meta tensors: a row, then columns."""
    row = torch.empty(8, n, dtype=torch.bfloat16, device="meta")
    return [row, *[row[0]] * (count - 1)]


def to_source(fn, args):
    """Trace, passes, plans and emission of a function that is new."""
    return htile.rowwise(fn).inspect(*args)


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def report(what: str, took: float, bound: float | None = None) -> bool:
    """Print a figure; returns whether it is within its bound."""
    right = bound is None or took < bound
    limit = "" if bound is None else f"   bound {bound * 1e3:6.0f} ms   {'ok' if right else 'OVER'}"
    print(f"{what:<52} {took * 1e3:8.2f} ms{limit}")
    return right


def main() -> int:
    """Print all figures; 1 if one is over its bound."""
    args = arguments()  # torch's first meta tensor takes 0.1 s
    first = seconds(lambda: to_source(softmax, args))
    ok = [report("softmax to source, first in the process", first, 0.030)]
    again = median(seconds(lambda: to_source(softmax, arguments())) for _ in range(REPEATS))
    ok.append(report("softmax to source, median", again, 0.030))

    args = arguments(count=2)
    for nodes in (250, 500, 1000):
        function = long_function(nodes)
        kernel = to_source(function, args)
        target = Target(kernel.graph.n, DEFAULT)
        took = median(seconds(lambda f=function: to_source(f, args)) for _ in range(REPEATS))

        def run(kernel=kernel, target=target):
            printed(kernel.traced, choose(plans_for(kernel.graph, target)))

        lowered = median(seconds(run) for _ in range(REPEATS))
        bound = 0.5 if nodes == 500 else None
        ok.append(report(f"{len(kernel.graph)} nodes to source, median", took, bound))
        report("    of which plans and emission", lowered)

    lowered = to_source(softmax, arguments()).lowered
    request = (lowered.source, lowered.function, DEFAULT.name)
    report("softmax to object, with the import of CuTe-DSL", seconds(lambda: _build(*request)))
    compiled = median(seconds(lambda: _build(*request)) for _ in range(5))
    ok.append(report("softmax to object, median", compiled, 0.5))

    code = "import time; t = time.perf_counter(); import htile; print(time.perf_counter() - t)"
    with_torch = f"import torch; {code}"
    run = [sys.executable, "-c", with_torch]
    report("import htile, after torch", float(subprocess.check_output(run, text=True)))
    return int(not all(ok))


if __name__ == "__main__":
    sys.exit(main())
