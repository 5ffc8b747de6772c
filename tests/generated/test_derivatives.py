"""Derivatives of random functions: of joint graphs in float64 against torch's autograd.

Where bounds are equal, or ranks are asked of equal elements, torch has one of several slopes. Such
programs are left out.
"""

import contextlib
import math

import pytest
import torch

from htile.errors import UnsupportedError
from htile.frontend.derive import derive
from htile.lower.passes.simplify import run_passes
from tests.gradients import assert_close, called, check, check_second

from . import movements
from .programs import program

PROGRAMS, PARTS = range(400), range(150)
REFUSED_BY_TORCH = ("is not implemented", "doesn't match the broadcast shape")


def _is_at_a_tie(p):
    bounds = [line.partition("clamp(")[2].strip(")").split(", ") for line in p.lines]
    is_of_bounds = any(len(b) == 3 and b[1] == b[2] for b in bounds)
    return is_of_bounds or "topk" in p.text


def _is_checked(p, seed):
    """Whether a program has a derivative that is torch's; the second one of some programs, too."""
    f, args = p.function(), p.arguments()
    call = called(f, *args)
    if not call.outputs or 0 in call.lead:
        return False
    try:
        check(f, *args, tolerance=1e-7)
        if seed % 5 == 0:
            check_second(f, *args, tolerance=1e-6)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None
    return True


def test_programs():
    checked = refused = 0
    for seed in PROGRAMS:
        p = program(seed)
        if _is_at_a_tie(p):
            continue
        try:
            checked += _is_checked(p, seed)
        except RuntimeError as error:  # torch has no derivative, or loses the shape of one
            assert any(text in str(error) for text in REFUSED_BY_TORCH), p
            refused += 1
    assert checked >= 200 and refused <= 20


@pytest.mark.parametrize("kind", ({}, {"scans": True}), ids=("parts", "scans"))
def test_parts(kind):
    """Functions of parts, joined and moved; most of their derivatives are kernels, too."""
    checked = placed = 0
    for seed in PARTS:
        p = movements.program(seed, "small", **kind)
        if "topk" in p.text or "sort" in p.text or not _is_checked(p, seed):
            continue
        checked += 1
        call = called(p.function(), *p.arguments())
        with contextlib.suppress(UnsupportedError):
            run_passes(derive(call.graph, call.wrt, call.outputs))
            placed += 1
    assert checked >= 60 and placed >= 0.85 * checked


def test_the_comparison_finds_errors():
    """Gradients that are wrong by one part in a million, or absent, do not pass."""
    right = {"x": torch.tensor([1.0, 2.0, math.nan], dtype=torch.float64)}
    assert_close({"x": right["x"].clone()}, right, "equal", 1e-7)
    wrong = ({"x": right["x"] * (1 + 1e-6)}, {}, {"x": right["x"].nan_to_num()})
    for found in wrong:
        with pytest.raises(AssertionError):
            assert_close(found, right, "another", 1e-7)
