"""How near the results of a kernel have to be to those of its reference in float64."""

from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from htile.testing import ulp

UNITS = 1.0  # of the last place of a row's largest magnitude, in the dtype of the result
UNITS_32 = 32.0  # of float32's last place there: what the arithmetic may lose
TERMS_AT_A_TIME = 16  # of a sum of products that tensor cores add in one step
NEAR = 1e-3  # of a level or of a unit: a number so near the middle of two may become either


@dataclass(frozen=True)
class Levels:
    """A reference of floats that are whole multiples of a step: how many steps, not rounded yet."""

    counts: torch.Tensor
    step: torch.Tensor


@dataclass(frozen=True)
class Nibbles:
    """A reference of 4 bits an element, two of them a byte: the elements, not rounded yet.

    The first of two is the lower half of the byte. The levels are those of e2m1. Elements that are
    divided by a scale of 8 bits are given for both of its `roundings`.
    """

    values: torch.Tensor
    others: torch.Tensor | None = None


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def roundings(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a scale may become in float8_e4m3fn: two numbers if it is in the middle of them."""
    a_little = 2.0**-20
    less, more = scale * (1 - a_little), scale * (1 + a_little)
    return less.to(torch.float8_e4m3fn).double(), more.to(torch.float8_e4m3fn).double()


def compare(result, expected, k: int = 0) -> float:
    """The largest error in units of what is allowed; raises AssertionError where it is above 1.

    k: the length of the sums in products with matrices. Tensor cores add 16 terms at a time, and
        cut off what is below the last place of the sum so far, so that errors add up.
    """
    found = pytree.tree_leaves(result)
    exact = pytree.tree_leaves(expected)
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)
    worst = 0.0
    for place, (out, right) in enumerate(zip(found, exact, strict=True)):
        errors = in_units(out, right, k)
        worst = max(worst, errors.max().item())
        at = errors.argmax()
        number = out.flatten()[at].item()
        told = f"result {place}: {number:.9g}, {worst:.3g} times the error that is allowed"
        assert worst <= 1, told
    return worst


def in_units(out: torch.Tensor, exact, k: int = 0) -> torch.Tensor:
    """Each element's error in units of what is allowed; infinite where NaN or infinities differ."""
    if isinstance(exact, Levels):
        return _of_levels(out.double(), exact, _rounding(exact.counts * exact.step, out.dtype, k))
    if isinstance(exact, Nibbles):
        both = (exact.values, exact.values if exact.others is None else exact.others)
        return torch.minimum(*(_of_nibbles(out, values) for values in both))
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    if not exact.is_floating_point():  # whole numbers by nature, as counts are
        return torch.where(out == exact, 0.0, torch.inf)
    if not out.is_floating_point():
        return (out.double() - exact).abs() / (0.5 + NEAR)
    if out.dtype is torch.float8_e8m0fnu:  # the power of two that is nearest
        return ((out.double() / exact - 1).abs() * 3 / (1 + NEAR)).nan_to_num(nan=torch.inf)
    if out.element_size() == 1:  # the nearest one, for each element by itself
        return (out.double() - exact).abs() / (ulp(exact.abs(), out.dtype) * (0.5 + NEAR))
    out, dtype = out.double(), out.dtype
    errors = (out - exact).abs() / _rounding(exact, dtype, k)
    same = (out == exact) | (out.isnan() & exact.isnan())
    return torch.where(exact.isfinite(), errors, torch.where(same, 0.0, torch.inf)).nan_to_num(
        nan=torch.inf
    )


def _of_levels(out: torch.Tensor, exact: Levels, rounding: torch.Tensor) -> torch.Tensor:
    """The level must be the nearest one, or either of two if the number is in their middle."""
    errors = (out - exact.counts.round() * exact.step).abs()
    is_between = (exact.counts - exact.counts.floor() - 0.5).abs() < NEAR
    for level in (exact.counts.floor(), exact.counts.ceil()):
        other = (out - level * exact.step).abs()
        errors = torch.where(is_between & (other < errors), other, errors)
    return errors / rounding


def _of_nibbles(out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """For each byte 0 where its levels are the nearest ones, or those of two that are as near."""
    codes = torch.stack((out & 15, out >> 4), -1).flatten(-2).long()
    levels = torch.tensor(E2M1, dtype=torch.float64, device=out.device)
    levels = torch.cat((levels, -levels))
    distance = (exact[..., None] - levels).abs().amin(-1)
    is_near = (exact - levels[codes]).abs() <= distance + 2 * NEAR
    return torch.where(is_near, 0.0, torch.inf).unflatten(-1, (-1, 2)).amax(-1)


def _rounding(exact: torch.Tensor, dtype: torch.dtype, k: int) -> torch.Tensor:
    """What the arithmetic and one rounding may change, for each row."""
    magnitude = torch.where(exact.isfinite(), exact.abs(), 0.0)
    if magnitude.ndim:
        magnitude = magnitude.amax(-1, keepdim=True)
    lost = UNITS_32 + k / TERMS_AT_A_TIME
    return UNITS * ulp(magnitude, dtype) + lost * ulp(magnitude, torch.float32)
