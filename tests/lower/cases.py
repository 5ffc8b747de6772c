"""What the tests of the lowering share: every example, meta arguments, random graphs."""

import random

import torch

import htile
from examples import (
    absnorm,
    capped_softmax,
    causal_softmax,
    cross_entropy,
    layernorm,
    log_softmax,
    norm_softmax,
    rmsnorm,
    softmax,
    swiglu,
)
from htile.build.arch import ARCHS
from htile.frontend.graph import Builder, Graph, Output, Role
from htile.frontend.ops import Op, Value, Varies

# name -> (function, arguments(m, n, dtype, device))
EXAMPLES = {
    "softmax": (softmax.softmax, softmax.arguments),
    "log_softmax": (log_softmax.log_softmax, log_softmax.arguments),
    "rmsnorm": (rmsnorm.rmsnorm, rmsnorm.arguments),
    "rmsnorm_residual": (rmsnorm.rmsnorm, rmsnorm.residual_arguments),
    "layernorm": (layernorm.layernorm, layernorm.arguments),
    "swiglu": (swiglu.swiglu, swiglu.arguments),
    "absnorm": (absnorm.absnorm, absnorm.arguments),
    "capped_softmax": (capped_softmax.capped_softmax, capped_softmax.arguments),
    "norm_softmax": (norm_softmax.norm_softmax, norm_softmax.arguments),
    "causal_softmax": (causal_softmax.causal_softmax, causal_softmax.arguments),
    "cross_entropy": (cross_entropy.cross_entropy, cross_entropy.arguments),
}

ARCH = {arch.name: arch for arch in ARCHS.values()}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def example_kernel(name, n, dtype=BF16, arch="sm_90a", **plan):
    """The inspected kernel of an example; `plan` as in `with_plan`."""
    function, arguments = EXAMPLES[name]
    return function.with_plan(**plan).inspect(*arguments(2, n, dtype, "meta"), arch=arch)


def rows(*shapes, dtype=BF16):
    """Meta tensors of these shapes."""
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def kernel_of(fn, *args, arch="sm_90a", fastmath=False):
    """The inspected kernel of a plain function."""
    return htile.rowwise(fn, fastmath=fastmath).inspect(*args, arch=arch)


# functions that look rows of tables up: their arguments are rows x (M, N), positions and the table
def table_rotary(x, pos: htile.PerRow, table: htile.Shared):
    cos, sin = table[pos].chunk(2)
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


def table_norm(x, pos: htile.PerRow, table: htile.Shared):
    y = x + table[pos]
    return y * torch.rsqrt((y * y).mean() + 1e-6)


def table_after(x, pos: htile.PerRow, table: htile.Shared):
    first = torch.where(x == x.amax(), torch.arange(x.shape[-1]), x.shape[-1]).amin()
    return x * table[first] + table[pos]


def table_alone(x: htile.PerRow, pos: htile.PerRow, table: htile.Shared):
    row = table[pos]
    return row * x, row[-1], (row * table[pos - 1]).sum()


TABLES = {f.__name__: f for f in (table_rotary, table_norm, table_after, table_alone)}


def table_kernel(name, n, dtype=BF16, arch="sm_90a", length=9, shift=0, pitch=0, **plan):
    """The inspected kernel of such a function. The table begins `shift` elements behind an aligned
    address, and its rows are `pitch` elements further apart than they are long."""
    function = htile.rowwise(TABLES[name]).with_plan(**plan)
    (x,) = rows((2,) if name == "table_alone" else (2, n), dtype=dtype)
    whole = torch.empty(shift + length * (n + pitch), dtype=dtype)
    table = whole[shift:].view(length, n + pitch)[:, :n]
    pos = torch.empty(2, dtype=torch.int64)
    return function.inspect(torch.empty_like(x, device="cpu"), pos, table, arch=arch)


# functions that scan rows
def scan_alone(x):
    return x.cumsum(-1)


def scan_products(x):
    return (x > 0).cumsum(-1, dtype=torch.int32), x.cumprod(-1)


def scan_extremes(x):
    return x.cummax(-1).indices, x.flip(-1).logcumsumexp(-1).flip(-1)


def scan_inverse(weights, share: htile.PerRow):
    up_to = weights.cumsum(-1)
    return (up_to <= share * weights.sum()).sum()


def scan_groups(x):
    groups = x.softmax(-1).view(8, -1)
    return groups.cumsum(-1), groups.sum(-1).cumsum(-1), groups.cumsum(0)


OF_SCANS = scan_alone, scan_products, scan_extremes, scan_inverse, scan_groups
SCANS = {f.__name__: f for f in OF_SCANS}


def scan_kernel(name, n, dtype=F32, arch="sm_90a", **plan):
    """The inspected kernel of such a function."""
    values = rows((2,), dtype=F32) if name == "scan_inverse" else []
    function = htile.rowwise(SCANS[name]).with_plan(**plan)
    return function.inspect(*rows((2, n), dtype=dtype), *values, arch=arch)


# functions of rows of any length, each with how many rows, columns and labels it takes
def any_softmax(x):
    return x.softmax(-1), x.logsumexp(-1)


def any_layernorm(x, w, b):
    return torch.nn.functional.layer_norm(x, x.shape, w, b)


def any_rmsnorm(x, r, w):
    y = x + r
    return y * torch.rsqrt((y * y).sum() / y.shape[-1] + 1e-6) * w, y


def any_loss(x, y: htile.PerRow):
    return torch.nn.functional.cross_entropy(x, y, label_smoothing=0.1)


def any_ranks(x):
    return x.argmax(-1), x.amin(), x.topk(2).values


def any_scan(x):
    return x.cumsum(-1), (x > 0).cumsum(-1, dtype=torch.int32)


def any_norm_backward(g, x, w):
    """The gradient of x / sqrt(mean(x * x)) * w."""
    n = x.shape[-1]
    rstd = torch.rsqrt((x * x).sum() / n + 1e-6)
    gw, y = g * w, x * rstd
    return rstd * (gw - y * (gw * y).sum() / n)


def any_statistics(x, n: htile.PerRow):
    """Every kind of reduction, of the first n elements and of all, and the columns' numbers."""
    column = torch.arange(x.shape[-1])
    first = torch.where(column < n, x, 0.0)
    last = torch.where(column == x.shape[-1] - 1, x, 0.0).sum()
    positive = x > 0
    return (first.sum(), last, x.var(), x.std(correction=0), x.mean(), x.amax(), x.amin(),
            positive.any(), positive.all(), torch.where(positive, x, 1.0).clamp(max=1.0).prod(),
            x[n % x.shape[-1]], x.nansum(), first - x.mean())  # fmt: skip


ANY_LENGTH = {  # rows, columns and labels of each
    any_softmax: "x", any_layernorm: "xww", any_rmsnorm: "xxw", any_loss: "xy", any_ranks: "x",
    any_scan: "x", any_norm_backward: "xxw", any_statistics: "xy",
}  # fmt: skip


def any_length_arguments(f, m, n, dtype=BF16, device="meta"):
    """Arguments of such a function, `m` rows of `n` elements."""
    made = {
        "x": lambda: torch.randn(m, n, device=device).to(dtype),
        "w": lambda: torch.rand(n, device=device).add(0.5).to(dtype),
        "y": lambda: torch.arange(m, device=device) * 977 % n,
    }
    return [made[kind]() for kind in ANY_LENGTH[f]]


def any_length_kernel(name, n, dtype=BF16, arch="sm_90a", **plan):
    """The inspected kernel of such a function."""
    f = next(f for f in ANY_LENGTH if f.__name__ == name)
    function = htile.rowwise(f, dynamic_n=True).with_plan(**plan)
    return function.inspect(*any_length_arguments(f, 2, n, dtype), arch=arch)


ROW = Value((64,), Varies.ROW, F32, None, True)
COLUMN = Value((64,), Varies.SHARED, F32, None, True)
PER_ROW = Value((), Varies.ROW, F32)
SCALAR = Value((), Varies.SCALAR, F32)


def row_output(id, name="out"):
    return Output(name, id, F32, (64,), True)


def per_row_output(id, name="out"):
    return Output(name, id, F32, (), False)


def random_graph(seed: int, size: int = 40) -> Graph:
    """A graph of `size` operations over two rows, a column, a value a row, a scalar, constants."""
    rng = random.Random(seed)
    b = Builder(f"random{seed}", 64)
    numbers = [
        b.add_input("x", Role.ROW, F32, ROW),
        b.add_input("y", Role.ROW, BF16, ROW),
        b.add_input("w", Role.COLUMN, F32, COLUMN),
        b.add_input("t", Role.PER_ROW, F32, PER_ROW),
        b.add_input("s", Role.SCALAR, F32, SCALAR),
        b.add_const(0.5, SCALAR),
        b.add_const(-0.0, SCALAR),
    ]
    reductions = [Op.SUM, Op.MEAN, Op.MAX, Op.MIN, Op.PROD]
    for _ in range(size):
        kind = rng.random()
        if kind < 0.2:
            spread = [i for i in numbers if b[i].value.spread]
            numbers.append(b.add(rng.choice(reductions), (rng.choice(spread),)))
        elif kind < 0.45:
            numbers.append(b.add(rng.choice([Op.NEG, Op.TANH, Op.EXP]), (rng.choice(numbers),)))
        elif kind < 0.9:
            op = rng.choice([Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAXIMUM])
            numbers.append(b.add(op, rng.choices(numbers, k=2)))
        else:
            condition = b.add(Op.GT, rng.choices(numbers, k=2))
            numbers.append(b.add(Op.WHERE, (condition, *rng.choices(numbers, k=2))))
    spread = [i for i in numbers if b[i].value.spread and b[i].value.varies is Varies.ROW]
    single = [i for i in numbers if not b[i].value.spread and b[i].value.varies is Varies.ROW]
    outputs = [row_output(spread[-1], "last"), row_output(rng.choice(spread), "any")]
    outputs += [per_row_output(id, f"value{k}") for k, id in enumerate(single[-2:])]
    return b.finish(outputs, None)


# functions whose gradients have scans
def sums(x):
    return x.cumsum(-1)


def products(x):
    return x.cumprod(-1)


def sums_of_groups(x):
    return x.view(8, -1).cumsum(-1) * x.view(8, -1).cumsum(0)


GRADIENTS = {f.__name__: f for f in (sums, products, sums_of_groups)}


def scan_backward(name, n, dtype=F32, arch="sm_90a"):
    """The kernel of the gradient of one of `GRADIENTS`."""
    (x,) = rows((2, n), dtype=dtype)
    return htile.rowwise(GRADIENTS[name]).inspect(x.requires_grad_(), arch=arch).backward
