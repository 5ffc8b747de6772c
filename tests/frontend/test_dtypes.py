"""Every function over dtypes and dimensions: torch's dtype and value for one row, or a refusal.

torch runs the function on each row by itself. Under vmap a value per row counts as one without an
axis too, but not for `where`, `addcmul` and some others, so vmap cannot be asked here.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import DtypeError, HTileError
from htile.frontend.dtypes import DTYPES, STORAGE, compute_dtype, dtype_name
from htile.frontend.functions import FUNCTIONS
from htile.frontend.graph import Role
from htile.frontend.reference import evaluate
from htile.frontend.roles import Spec
from htile.frontend.trace import trace
from htile.lower.emission.expressions import CUTLASS_TYPES

M, N = 2, 5
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
KINDS = {
    1: [(dtype, shape) for dtype in (F32, BF16, F16, I32, I64, BOOL) for shape in ((N,), (), (1,))],
    2: [(dtype, shape) for dtype in (F32, BF16, I32, I64, BOOL) for shape in ((N,), ())],
    3: [(dtype, shape) for dtype in (F32, BF16, I64) for shape in ((N,), ())],
}
NUMBERS = [2, 0.5, True]
# Functions that take more than values, and those that have tests of their own.
LEFT_OUT = {
    "layer_norm", "native_layer_norm", "rms_norm", "normalize", "expand", "view_as", "reshape_as",
    "expand_as", "type", "type_as", "reshape", "view", "unsqueeze", "squeeze", "broadcast_to",
    "threshold", "full_like", "masked_fill", "where", "numel", "is_complex", "is_floating_point",
    "logsumexp", "softmax", "log_softmax", "cosine_similarity",
    "permute", "t", "narrow", "split", "chunk", "tensor_split", "unbind", "transpose", "swapaxes",
    "swapdims", "movedim", "moveaxis", "unflatten", "flatten", "ravel", "select", "roll", "flip",
    "cat", "concat", "concatenate", "stack", "split_with_sizes", "dropout", "dropout_", "tile",
    "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
    "feature_dropout", "feature_dropout_", "take",
    "einsum",
    "float_power",  # torch gives float64
    "quantile", "nanquantile",  # torch takes shares from 0 to 1 alone
    "bucketize", "searchsorted",  # of sorted rows
    "scatter", "scatter_add", "scatter_reduce", "index_fill", "index_copy", "index_add",
    "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
}  # fmt: skip
OWN = {}  # a spelling of each function
for _known, (_spelling, _function) in FUNCTIONS.items():
    _place, _, _name = _spelling.rpartition(".")
    if _place == "torch" and _name not in LEFT_OUT and _name != "round":
        OWN.setdefault(_function, (_spelling, _known))


def arity(function) -> int:
    kinds = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in kinds)


def sample(dtype, shape, seed):
    numbers = torch.randint(1, 4, (M, *shape), generator=torch.Generator().manual_seed(seed))
    if dtype is BOOL:
        return numbers > 1
    return numbers.to(dtype) if dtype in (I32, I64) else numbers.float() * 0.5


def combinations(count):
    kinds = KINDS[count]
    yield from itertools.product(kinds, repeat=count)
    if count == 2:
        yield from ((kind, number) for kind in kinds for number in NUMBERS)
        yield from ((number, kind) for kind in kinds for number in NUMBERS)


def compare(function, operands) -> str | None:
    """What differs; None where torch refuses too, or HTile refuses."""
    tensors = {f"a{k}": kind for k, kind in enumerate(operands) if isinstance(kind, tuple)}
    values = {name: sample(*kind, seed) for seed, (name, kind) in enumerate(tensors.items())}

    def call(given):
        declared = {
            name: x.to(tensors[name][0]) if x.is_floating_point() else x
            for name, x in given.items()
        }
        return function(*(declared.get(f"a{k}", o) for k, o in enumerate(operands)))

    names = ", ".join(tensors)
    traced = eval(
        f"lambda r, {names}: call(dict(zip({list(tensors)}, ({names},))))", {"call": call}
    )
    specs = [
        Spec(name, Role.ROW if shape == (N,) else Role.PER_ROW, values[name].dtype, shape)
        for name, (_, shape) in tensors.items()
    ]
    try:
        graph = trace(traced, [Spec("r", Role.ROW, I64, (N,)), *specs], N)
        results = evaluate(graph, values | {"r": torch.ones(M, N, dtype=I64)}, lead=(M,))
    except HTileError:
        return None
    try:
        rows = [call({name: x[m] for name, x in values.items()}) for m in range(M)]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"torch refuses: {error}"
    leaves = zip(*map(pytree.tree_leaves, rows), strict=True)
    for got, want in zip(pytree.tree_leaves(results), map(torch.stack, leaves), strict=True):
        if got.dtype is not want.dtype or got.shape != want.shape:
            return f"{got.dtype} {tuple(got.shape)}, torch {want.dtype} {tuple(want.shape)}"
        if not torch.allclose(got.double(), want.double(), 2e-2, 2e-2, equal_nan=True):
            return f"{got}, torch {want}"
    return None


REDUCES = (
    "sum", "prod", "amax", "amin", "max", "min", "mean", "var", "std", "norm", "dist", "dot",
    "matmul", "inner", "trapezoid", "cov", "corrcoef",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", OWN, ids=lambda function: OWN[function][0])
def test_dtype_and_value_are_torchs(function):
    spelling, known = OWN[function]
    if spelling.endswith(("topk", "kthvalue")):  # torch leaves open which of equal ones it gives
        every, known = known, lambda *operands: every(*operands).values
    reduces = any(word in spelling for word in REDUCES)
    for operands in combinations(arity(function) or 1):
        if reduces and any(kind[0] in (BF16, F16) for kind in operands if isinstance(kind, tuple)):
            continue
        difference = compare(known, operands)
        assert difference is None, f"{spelling} of {operands}: {difference}"


def test_what_was_found_by_hand():
    n, m = (I64, (N,)), (BOOL, (N,))
    mean = lambda x: x * x.float().mean().to(F32)  # noqa: E731
    assert compare(lambda x: mean(x.to(BF16)), [(F32, (N,))]) is None
    for f, operands in (
        (lambda i: torch.nn.functional.hardtanh(i, -1.5, 2.5), [n]),
        (lambda i: torch.nn.functional.relu6(i), [n]),
        (lambda k, h: torch.add(k, h, alpha=2), [m, m]),
        (lambda k, h: torch.add(k, h, alpha=False), [m, m]),
        (lambda i, k: torch.add(i, k, alpha=2), [(I32, (N,)), m]),
        (lambda k, x: torch.sub(x, 2, alpha=0.5), [m, (F32, (N,))]),
        (lambda x: x.sum(dtype=F16), [(F32, (N,))]),
        (lambda x: x.prod(dtype=BF16), [(F32, (N,))]),
        (lambda x: x.sum(dtype=BOOL), [(F32, (N,))]),
        (lambda i: i.mean(dtype=BF16), [n]),
        (lambda i: i.softmax(-1, dtype=F16), [n]),
        (lambda x, t, k: x.masked_fill(k, t), [(BF16, (N,)), (F32, ()), m]),
        (lambda t, x: t.expand_as(x), [(BF16, ()), n]),
        (lambda k, x, t: torch.where(k, x, t), [m, (I64, (N,)), (BF16, ())]),
        (lambda i, t: i.clamp(min=t), [n, (BF16, ())]),
    ):
        assert compare(f, operands) is None, compare(f, operands)


def test_the_table_of_dtypes():
    taken = {dtype for dtype, known in DTYPES.items() if known.computed}
    assert taken == set(CUTLASS_TYPES) == {F32, BF16, F16, I32, I64, BOOL} | STORAGE
    for dtype in STORAGE:
        assert compute_dtype(dtype) is dtype
    for dtype in taken - STORAGE:
        assert DTYPES[dtype].cute == CUTLASS_TYPES[dtype]
        assert compute_dtype(dtype) is (F32 if dtype.is_floating_point else dtype)
    assert dtype_name(BF16) == "bf16" and dtype_name(torch.float64) == "float64"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_integers_of_8_bits_are_masks_and_compared(dtype):
    def f(x, m, o):
        chosen = torch.where(m.bool(), x, 0), torch.where(m != 0, x, 1), (m > 2).sum(-1)
        return *chosen, m == o, torch.logical_not(m), m.to(torch.bool) & (o < 2), m <= 3, m > 1.5

    x = torch.randn(4, 100)
    m, o = torch.randint(-3 if dtype is torch.int8 else 0, 5, (2, 4, 100)).to(dtype)
    for found, exact in zip(htile.rowwise(f)(x, m, o), f(x, m, o), strict=True):
        assert found.dtype is exact.dtype and torch.equal(found, exact)
    with pytest.raises(DtypeError, match="the number 300 does not fit"):
        htile.rowwise(lambda m: m == 300)(m)  # torch wraps the number
