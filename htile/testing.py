"""Holds a row-wise function against its meaning: `torch.vmap` of the same function, in float64.

The oracle runs the user's own Python, not the traced graph, so it shares nothing with what it
checks. `assert_close` demands that the largest error is at most twice that of torch's own float32
evaluation, plus two units in the last place of the row's largest magnitude.
"""

from __future__ import annotations

import functools
import math
import types
from dataclasses import replace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .frontend.graph import Role
from .frontend.libraries import dropped_weight
from .frontend.over_rows import Term, terms_marked
from .frontend.roles import Spec, classify
from .run.rowwise import Rowwise
from .run.vmap import bodies_as_written

CHUNK = 1 << 24  # elements of one argument that the oracle works on at a time


def oracle(f: Rowwise, *args, dtype: torch.dtype = torch.float64, **kwargs):
    """What `f` means for these arguments, floating values computed in `dtype`.

    Takes what `f` takes and returns the same structure and shapes, unrounded. `f` may be a method
    of an object.
    """
    if isinstance(f, types.MethodType):
        f, args = f.__func__, (f.__self__, *args)
    signature = f._signature
    values = signature.bind(args, kwargs)
    call = classify(signature, values)
    rows = math.prod(call.lead)
    prepared, dims = [], []
    for spec, value in zip(call.specs, values, strict=True):
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if spec.role in (Role.ROW, Role.PER_ROW):
                value = value.expand((*call.lead, *spec.inner)).reshape((rows, *spec.inner))
        prepared.append(value)
        dims.append(0 if spec.role in (Role.ROW, Role.PER_ROW) else None)

    def cast(value):
        """A copy, for the function may change it in place."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype if value.is_floating_point() else value.dtype, copy=True)

    def run(rows_of):
        given = [rows_of(v) if d == 0 else v for v, d in zip(prepared, dims, strict=True)]
        chosen, batched = [], []

        def begin():
            chosen[:] = map(cast, given)
            batched[:] = [v for v, d in zip(chosen, dims, strict=True) if d == 0]

        def one_row(*row_values):
            left = iter(row_values)
            full = tuple(next(left) if d == 0 else v for v, d in zip(chosen, dims, strict=True))
            return signature.invoke(full)

        begin()
        device = batched[0].device  # where torch.arange puts its tensor
        with bodies_as_written(), terms_marked(), _Products(dtype), Bits(), Wide(dtype), device:
            try:
                with Assignments():
                    return torch.vmap(one_row)(*batched)
            except _RowByRow:
                pass
            except RuntimeError as error:  # Some functions of torch look at their arguments.
                if "data-dependent control flow" not in str(error):
                    raise
            begin()  # The first attempt may have changed its arguments in place.
            results = [one_row(*row) for row in zip(*batched, strict=True)]
        as_tensor = functools.partial(torch.as_tensor, device=device)  # a number of elements
        return pytree.tree_map(lambda *each: torch.stack([*map(as_tensor, each)]), *results)

    if not rows:  # vmap refuses an empty batch: take the shapes from one row of ones
        # 1 divides everything, but it is no index of a row of one element
        def filled(v):
            one = 1 if call.n > 1 or v.is_floating_point() else 0
            return v.new_full((1, *v.shape[1:]), one)

        none = pytree.tree_map(lambda t: t[:0], run(filled))
        return _of_all_rows([none], call.lead)
    step = max(1, CHUNK // max(map(_elements, call.specs)))
    chunks = [run(lambda v, k=k: v[k : k + step]) for k in range(0, rows, step)]
    return _of_all_rows(chunks, call.lead)


def _elements(spec: Spec) -> int:
    """How many elements a row takes of an argument: of what all rows share, a part."""
    if spec.role is Role.MATRIX:
        return max(spec.inner)
    return math.prod(spec.inner[spec.role is Role.COLUMN and len(spec.inner) > 1 :])


class _Products(TorchFunctionMode):
    """Computes products with matrices in one dtype: a row may be rounded to another one before.

    In float32 they have the error of tensor cores, which add the products of 16 elements of K at a
    time and cut off what is below the last bit: each time at most 2 ** -23 of the sum so far.
    Convolutions and einsums of rows alone take one dtype, too, and have no such error.
    """

    FUNCTIONS = (
        torch.nn.functional.linear, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm,
        torch.Tensor.__matmul__, torch.Tensor.__rmatmul__,
    )  # fmt: skip

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.l1_loss and (weight := dropped_weight()) is not None:
            kwargs = {**kwargs, "weight": weight}  # no mode is asked after this one
        if function not in (*self.FUNCTIONS, torch.einsum, torch.conv1d):
            return function(*args, **kwargs)
        args, kwargs = pytree.tree_map(
            lambda v: v.to(self.dtype) if _is_floating(v) else v, (args, kwargs)
        )
        product = function(*args, **kwargs)
        if self.dtype is not torch.float32 or function is torch.conv1d:
            return product
        added = args[0].shape[-1] if function is not torch.einsum else _added_by_a_matrix(args)
        if added is None:
            return product
        magnitudes, named = pytree.tree_map_only(torch.Tensor, torch.abs, (args, kwargs))
        terms, steps = function(*magnitudes, **named), added / 16
        return product - product.sign() * terms * steps * 2.0**-23


def _added_by_a_matrix(args: tuple) -> torch.Tensor | None:
    """How many products an einsum adds up; None where no operand is a matrix of all rows."""
    operands = [v for v in pytree.tree_leaves(args) if isinstance(v, torch.Tensor)]
    is_batched = torch._C._functorch.is_batchedtensor
    if all(v.ndim != 2 or is_batched(v) for v in operands):
        return None
    return torch.einsum(*pytree.tree_map_only(torch.Tensor, torch.ones_like, args))


class _Viewed(torch.autograd.Function):
    """`x.view(dtype)` of as many bytes, for which `torch.vmap` of torch 2.11 has no rule."""

    @staticmethod
    def forward(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.clone().view(dtype)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info, in_dims: tuple, x: torch.Tensor, dtype: torch.dtype) -> tuple:
        return _Viewed.apply(x, dtype), in_dims[0]


class _RowByRow(Exception):
    """Rows have tensors of different lengths, which `torch.vmap` cannot batch."""


class Assignments(TorchFunctionMode):
    """Assigns to the elements that a mask chooses: `torch.vmap` has no rule for `x[mask] = y`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_index = function is torch.Tensor.__getitem__ and _is_mask(args[1])
        if is_index or function in (torch.masked_select, torch.Tensor.masked_select):
            raise _RowByRow
        if function is not torch.Tensor.__setitem__ or not _is_mask(args[1]):
            return function(*args, **(kwargs or {}))
        x, mask, value = args
        mask = mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
        value = value.reshape(()).to(x.dtype) if isinstance(value, torch.Tensor) else value
        x.copy_(torch.where(mask, value, x))
        return None


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


class Bits(TorchFunctionMode):
    """Reads the bits of float32 where a number is computed in float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = (*args, *(kwargs or {}).values())
        if function is torch.Tensor.view and isinstance(given[1], torch.dtype):
            x, dtype = given
            return _Viewed.apply(x.float() if x.dtype is torch.float64 else x, dtype)
        return function(*args, **(kwargs or {}))


class Wide(TorchFunctionMode):
    """Computes in `dtype` what a function has in float32, as `x.float()` and `torch.ones(n)` are.

    HTile computes in float32 whatever is asked for. So where the meaning is computed in float64,
    nothing is rounded to float32 on the way. A constant keeps its value: `torch.tensor(0.1)` is the
    float32 next to 0.1. The dtype that the function sees is another one, so it must not ask for it.
    """

    # Their scale, the second argument, has to be float32.
    OF_SCALES = torch.fake_quantize_per_channel_affine, torch.fake_quantize_per_tensor_affine

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.dtype is torch.float32:
            return function(*args, **kwargs)
        if function is torch.Tensor.float:
            return args[0].to(self.dtype)
        if function in self.OF_SCALES:
            args = [_in_float32(each) if k == 1 else each for k, each in enumerate(args)]
            kwargs = {k: _in_float32(v) if k == "scale" else v for k, v in kwargs.items()}
            return function(*args, **kwargs)
        if function is not torch.Tensor.view:  # which reads bits
            args = [self.dtype if each is torch.float32 else each for each in args]
            kwargs = {k: self.dtype if v is torch.float32 else v for k, v in kwargs.items()}
        return pytree.tree_map(self._widened, function(*args, **kwargs))

    def _widened(self, value: object) -> object:
        is_narrow = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self.dtype) if is_narrow else value


def _in_float32(value: object) -> object:
    return value.to(torch.float32) if _is_floating(value) else value


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _of_all_rows(chunks: list, lead: tuple[int, ...]):
    """The results of rows that were worked on some at a time."""
    flat = [pytree.tree_flatten(chunk, lambda leaf: isinstance(leaf, Term)) for chunk in chunks]
    results = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if isinstance(parts[0], Term):
            total = replace(parts[0], value=torch.stack([part.reduced() for part in parts]))
            result = total.reduced()
            results.append(result if total.dtype is None else result.to(total.dtype))
        else:
            whole = torch.cat(parts)
            results.append(whole.reshape((*lead, *whole.shape[1:])))
    return pytree.tree_unflatten(results, flat[0][1])


def float32_errors(f: Rowwise, *args, **kwargs) -> list[float]:
    """The largest error of torch's own float32 evaluation of each result, 0.0 for integers."""
    exact = pytree.tree_leaves(oracle(f, *args, **kwargs))
    single = pytree.tree_leaves(oracle(f, *args, dtype=torch.float32, **kwargs))
    return [_largest((s.double() - e.double()).abs()) for s, e in zip(single, exact, strict=True)]


def _largest(errors: torch.Tensor) -> float:
    finite = errors[errors.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def assert_close(f: Rowwise, result, *args, torch_errors: list[float] | None = None, **kwargs):
    """Assert that `result`, what `f` returned for these arguments, is right; see the module.

    NaN and infinities must be where the oracle has them once rounded to the result's dtype, and
    integers and bools must be equal. Returns the largest error in units of the bound.

    torch_errors: `float32_errors` of more rows of the same kind, where these are too few for a
        largest error to mean anything.
    """
    expected = pytree.tree_leaves(oracle(f, *args, **kwargs))
    errors = float32_errors(f, *args, **kwargs) if torch_errors is None else torch_errors
    got = pytree.tree_leaves(result)
    assert len(got) == len(expected), f"{len(got)} results, expected {len(expected)}"
    worst = 0.0
    for k, (out, exact, error32) in enumerate(zip(got, expected, errors, strict=True)):
        assert out.shape == exact.shape, f"result {k}: shape {out.shape}, expected {exact.shape}"
        if out.numel():
            worst = max(worst, _compare(f"result {k} of {f.__name__}", out, exact, error32))
    return worst


def _compare(what: str, out: torch.Tensor, exact: torch.Tensor, error32: float) -> float:
    errors = in_bounds(out, exact, error32)
    worst = errors.max().item()
    if not out.is_floating_point():
        wrong = errors.isinf().sum().item()
        assert not wrong, f"{what}: {wrong} of {out.numel()} elements differ"
        return worst
    rounded = exact.to(out.dtype)
    special = ~(rounded.double().isfinite() & out.double().isfinite())
    assert not errors[special].isinf().any(), f"{what}: NaN or infinity differ"
    at = errors.argmax()
    assert worst <= 1, (
        f"{what}: {out.flatten()[at].item():.9g} in place of {exact.flatten()[at].item():.9g}, "
        f"{worst:.3g} times the bound; torch float32 errs by {error32:.3g}"
    )
    return worst


def in_bounds(out: torch.Tensor, exact: torch.Tensor, error32: float) -> torch.Tensor:
    """Each element's error in units of `assert_close`'s bound, of the shape of `out`.

    It is infinite where NaN, infinities, integers or bools differ.
    """
    if not out.is_floating_point():
        return torch.where(out == exact, 0.0, math.inf)
    # torch has few functions of float8
    dtype, out, exact = out.dtype, out.double(), exact.double()
    rounded = exact.to(dtype).double()
    if dtype is torch.float8_e8m0fnu:  # in the middle of two powers of two it may be either
        errors = torch.where(out.isnan() & rounded.isnan(), 0.0, (out / rounded).log2().abs())
        return errors.nan_to_num(nan=math.inf)
    same = (out == rounded) | (out.isnan() & rounded.isnan())
    finite = rounded.isfinite()
    magnitude = torch.where(finite, exact.abs(), 0.0)
    if magnitude.ndim:
        magnitude = magnitude.amax(-1, keepdim=True)
    bound = 2 * error32 + 2 * ulp(magnitude, dtype)
    errors = (out - exact).abs() / bound
    return torch.where(finite, errors, torch.where(same, 0.0, math.inf)).nan_to_num(nan=math.inf)


def ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at this magnitude."""
    info = torch.finfo(dtype)
    exponent = magnitude.double().clamp(min=info.smallest_normal).log2().floor()
    return info.eps * torch.exp2(exponent)
