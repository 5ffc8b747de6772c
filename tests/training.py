"""What the gradients of a row-wise function are: autograd's, of the user's own Python in float64.

`expected` maps the undecorated function over the rows by `torch.vmap` and differentiates that, so
it shares nothing with HTile's own derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import torch
from torch.utils import _pytree as pytree

import htile
from htile.frontend.graph import Role
from htile.frontend.roles import Call, classify
from htile.run.vmap import bodies_as_written

DRAWS = 3  # of cotangents, over which torch's own error is the largest
OF_ROWS = (Role.ROW, Role.PER_ROW)


def over_rows(f: htile.Rowwise, call: Call, args: tuple):
    """`f` of all rows, in the arguments' dtypes, as the call of which `call` tells the roles.

    The results are in autograd's graph of the arguments.
    """
    signature = f._signature
    values = signature.bind(args, {})
    rows = math.prod(call.lead)
    whole, dims = [], []
    for spec, value in zip(call.specs, values, strict=True):
        is_of_rows = spec.role in OF_ROWS
        if is_of_rows:
            value = value.expand((*call.lead, *spec.inner)).reshape((rows, *spec.inner))
        whole.append(value)
        dims.append(0 if is_of_rows else None)
    batched = [value for value, dim in zip(whole, dims, strict=True) if dim == 0]

    def one_row(*of_row):
        left = iter(of_row)
        both = zip(whole, dims, strict=True)
        return signature.invoke(tuple(next(left) if dim == 0 else v for v, dim in both))

    with bodies_as_written(), batched[0].device:
        found = torch.vmap(one_row)(*batched)
    return pytree.tree_map(lambda t: t.reshape((*call.lead, *t.shape[1:])), found)


def cotangents_of(results, seed: int = 0) -> list[torch.Tensor]:
    """A random cotangent for each floating result, in its dtype."""
    made = torch.Generator().manual_seed(seed)
    leaves = [t for t in pytree.tree_leaves(results) if has_gradient(t)]
    return [torch.randn(t.shape, generator=made).to(t) for t in leaves]


def has_gradient(result: torch.Tensor) -> bool:
    return result.is_floating_point() and result.requires_grad


def leaves_of(args: tuple) -> tuple[list, list[torch.Tensor]]:
    """New arguments that require grad where they are floating, and those of them."""
    made = [
        arg.detach().clone().requires_grad_()
        if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dtype.itemsize > 1
        else arg
        for arg in args
    ]
    return made, [arg for arg in made if isinstance(arg, torch.Tensor) and arg.requires_grad]


def gradients(
    results: list[torch.Tensor], leaves: list[torch.Tensor], cotangents: list[torch.Tensor],
    **options,
):  # fmt: skip
    """The gradients of results with these cotangents, by autograd."""
    pairs = zip(results, cotangents, strict=True)
    pairs = [(out, g.to(out.dtype)) for out, g in pairs if out.requires_grad]
    outs, cotangents = [out for out, _ in pairs], [g for _, g in pairs]
    return torch.autograd.grad(outs, leaves, cotangents, allow_unused=True, **options)


def expected(
    f: htile.Rowwise, dtype: torch.dtype, args: tuple, results: object,
    cotangents: list[torch.Tensor],
):  # fmt: skip
    """The gradients of `f` in `dtype`, for each floating argument one or None.

    results: what `f` returned; those of them count that have cotangents.
    """
    wide = [
        arg.detach().to(dtype)
        if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dtype.itemsize > 1
        else arg
        for arg in args
    ]
    call = classify(f._signature, f._signature.bind(args, {}))
    made, leaves = leaves_of(tuple(wide))
    wide_results = pytree.tree_leaves(over_rows(f, call, tuple(made)))
    both = zip(wide_results, pytree.tree_leaves(results), strict=True)
    outs = [out for out, result in both if has_gradient(result)]
    return gradients(outs, leaves, cotangents)


def assert_gradients(f: htile.Rowwise, *args, others: Sequence[tuple] = ()) -> None:
    """Assert that autograd through `f` gives the gradients of its Python, in the bound below.

    The error of each is at most twice that of torch's own float32 evaluation, plus two units in the
    last place of the gradient's largest magnitude. torch's error is the largest over several
    cotangents, because that of few numbers may be small by chance.

    others: arguments of the same shapes, over which torch's error is the largest as well. Where
        there are few rows, the rows have their part in the chance.
    """
    made, leaves = leaves_of(args)
    results = f(*made)
    outs = [t for t in pytree.tree_leaves(results) if has_gradient(t)]
    given = cotangents_of(results)
    found = gradients(outs, leaves, given)
    assert_no_gradient(f, args, results)
    exact = expected(f, torch.float64, args, results, given)
    errors = [0.0] * len(leaves)
    draws = max(DRAWS, 1 + len(others))
    for seed, drawn in zip(range(draws), cycle((args, *others)), strict=False):
        cotangents = cotangents_of(results, seed)
        pairs = zip(
            expected(f, torch.float32, drawn, results, cotangents),
            expected(f, torch.float64, drawn, results, cotangents), strict=True,
        )  # fmt: skip
        largest = [0.0 if right is None else largest_of(one - right) for one, right in pairs]
        errors = [*map(max, errors, largest)]
    for leaf, got, right, error in zip(leaves, found, exact, errors, strict=True):
        if right is None:
            assert got is None or not got.any()
            continue
        assert got.dtype == leaf.dtype and got.shape == leaf.shape
        unit = torch.finfo(leaf.dtype).eps * largest_of(right)
        torch.testing.assert_close(got.double(), right, rtol=0, atol=2 * error + 2 * unit)


def assert_no_gradient(f: htile.Rowwise, args: tuple, results: object) -> None:
    """Assert that a result of `f` that requires no grad has none: torch's are zeros, if any."""
    call = classify(f._signature, f._signature.bind(args, {}))
    made, leaves = leaves_of(args)
    both = zip(pytree.tree_leaves(over_rows(f, call, tuple(made))), pytree.tree_leaves(results),
               strict=True)  # fmt: skip
    for right, result in both:
        if has_gradient(right) and not result.requires_grad:
            found = torch.autograd.grad(
                right.double().sum(), leaves, retain_graph=True, allow_unused=True
            )
            assert all(g is None or not g.any() for g in found)


def largest_of(x: torch.Tensor) -> float:
    """The largest magnitude; 0 where there is no element."""
    return x.abs().max().item() if x.numel() else 0.0
