"""Holds the result of a generated program against the oracle.

`check` uses the measure of `assert_close` with the errors of several batches, this one and others.
Device functions err by a unit or two where torch's err by half a one; along a program of them that
can add up to more than twice torch's error. `fair_errors` are therefore those of a float32
evaluation in which each such function errs by up to one more unit, and sums and products are
halving trees (of equal values the partial ones err alike); they are used where the strict measure
is exceeded.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils import _pytree as pytree

from htile.frontend.ops import Op
from htile.frontend.reference import EVALUATE, evaluate
from htile.testing import assert_close, float32_errors, oracle, ulp
from tests.request_of import request_of

APPROXIMATE = (
    Op.SQRT, Op.RSQRT, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P, Op.SIN,
    Op.COS, Op.TANH, Op.SIGMOID, Op.ERF, Op.POW, Op.SUM, Op.MEAN, Op.PROD, Op.CUMSUM, Op.CUMPROD,
    Op.LOGCUMSUMEXP, Op.LOGSUMEXP_FROM_END,
)  # fmt: skip
BATCHES = 3


def reference(f, args):
    """What the graph of `f` gives, evaluated by torch, on any device."""
    request = request_of(f, args)
    named = dict(zip(f._signature.names, args, strict=True))
    call = request.call
    return evaluate(request.specialization.traced, named, lead=call.lead, length=call.length)


@contextlib.contextmanager
def approximate():
    """In here `reference` has functions that err by up to one more unit in the last place."""

    def noisy(rule):
        def evaluated(values, arg, dtype):
            exact = rule(values, arg, dtype)
            if not exact.is_floating_point():
                return exact
            noise = 2 * torch.rand(exact.shape, device=exact.device, dtype=torch.float64) - 1
            return (exact.double() * (1 + noise * 2.0**-23)).to(exact.dtype)

        return evaluated

    def halving(combine):
        def evaluated(values, arg, dtype):
            (x,) = values
            while x.shape[-1] > 1:
                half = x.shape[-1] // 2
                x = torch.cat(
                    [combine(x[..., :half], x[..., half : 2 * half]), x[..., 2 * half :]], -1
                )
            return x

        return evaluated

    total = halving(torch.add)

    def mean(values, arg, dtype):
        return total(values, arg, dtype) / values[0].shape[-1]

    before = {op: EVALUATE[op] for op in APPROXIMATE}
    rules = before | {Op.SUM: total, Op.MEAN: mean, Op.PROD: halving(torch.mul)}
    rules |= {Op.CUMSUM: lambda values, arg, dtype: values[0].cumsum(-1)}
    rules |= {Op.CUMPROD: lambda values, arg, dtype: values[0].cumprod(-1)}
    EVALUATE.update({op: noisy(rule) for op, rule in rules.items()})
    try:
        yield
    finally:
        EVALUATE.update(before)


def strict_errors(program, f, device="cpu", elements=1 << 13) -> list[float]:
    """torch's float32 errors over several batches; never below what float64 itself errs by."""
    batches = [program.many(device, k, elements) for k in range(BATCHES)]
    errors = [[e * 2.0**-44 for e in program.errors]]
    errors += [float32_errors(f, *batch) for batch in batches]
    return list(map(max, *errors))


def fair_errors(program, f, device="cpu", elements=1 << 13) -> list[float]:
    """The same, of functions that are a unit less exact; not counting the rounding to 16 bits."""
    worst = [0.0] * len(program.errors)
    for k in range(BATCHES):
        args = program.many(device, k, elements)
        with approximate():
            results = pytree.tree_leaves(reference(f, args))
        exacts = pytree.tree_leaves(oracle(f, *args))
        for i, (out, exact) in enumerate(zip(results, exacts, strict=True)):
            if out.is_floating_point():
                error = (out.double() - exact.double()).abs()
                if out.dtype is not torch.float32:
                    error = (error - ulp(exact.double().abs(), out.dtype) / 2).clamp(min=0)
                worst[i] = max(worst[i], error.max().item())
    return worst


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """bool, integer or floating; `where` under vmap forgets that a value per row has no axis."""
    return dtype is torch.bool, dtype.is_floating_point


def check(program, f, result, args, device="cpu", elements=1 << 13, fair=False) -> float:
    """Assert that `result` is right; returns its error in units of the strict bound."""
    expected = oracle(f, *args)
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True)
    for k, (out, exact) in enumerate(pairs):
        assert _kind(out.dtype) == _kind(exact.dtype), (k, out.dtype, exact.dtype)
    strict = strict_errors(program, f, device, elements)
    strict = list(map(max, strict, float32_errors(f, *args)))
    try:
        return assert_close(f, result, *args, torch_errors=strict)
    except AssertionError:
        if not fair:
            raise
    errors = list(map(max, strict, fair_errors(program, f, device, elements)))
    assert_close(f, result, *args, torch_errors=errors)
    return 2.0
