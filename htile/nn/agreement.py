"""Whether a row-wise function agrees with the module that it was made from, on random rows.

Both are compared with the module in float64, and the error of the function may be a few times that
of the module itself, which is how much of it the dtype explains.
"""

from __future__ import annotations

import warnings

import torch
from torch.utils import _pytree as pytree

from ..errors import HTileError
from ..frontend.dtypes import dtype_name
from ..run.rowwise import Rowwise
from .counts import counts_rows
from .guards import DTYPES
from .stand_in import Forward

# What a forward may raise for rows that it is not made for.
USER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
# Leading shapes, and the magnitude of the rows. One magnitude a batch, because an error counts
# beside the largest element; the small one shows what a norm adds to the variance.
BATCHES = (((5,), 1.0), ((2, 3), 0.01), ((2, 1, 3), 4.0))
OWN_ERRORS = 4  # how many times the error of the module itself is allowed
# And so many units in the last place of the largest element. A float32 sum in another order has an
# error of some units of its largest term, which may be far larger than the sum.
UNITS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


def agreeing_dtypes(
    forward: Forward, row: Rowwise, shapes: tuple, dtypes: tuple[torch.dtype, ...], length: int
) -> tuple[tuple[torch.dtype, ...], ...] | str:
    """For which dtypes of inputs and tensors both agree; else why they do not.

    dtypes: those of the module's tensors. In these both have to agree, and in float32.
    """
    agreed: dict[tuple[torch.dtype, ...], None] = {}  # in the order in which they were tried
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    first = floating[0] if floating and floating[0] in DTYPES else torch.float32
    uniform = [(dtype, dtype) for dtype in dict.fromkeys((first, *DTYPES))]
    mixed = [(dtype, torch.float32) for dtype in DTYPES[1:]] if dtypes else []
    for of_rows, of_tensors in (*uniform, *mixed):
        of_all = *(of_rows for _ in forward.inputs), *(
            of_tensors if dtype.is_floating_point else dtype for dtype in dtypes
        )
        with (
            torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False),
            warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")  # of torch, about dtypes that the user did not ask for
            reason = _disagreement(forward, row, shapes, of_all, length)
        if reason is None:
            agreed[of_all] = None
        elif of_rows is of_tensors and of_rows in (first, torch.float32):
            return reason
    return tuple(agreed)


def _disagreement(
    forward: Forward, row: Rowwise, shapes: tuple, dtypes: tuple[torch.dtype, ...], length: int
) -> str | None:
    count = len(forward.inputs)
    for lead, scale in BATCHES:
        drawn = torch.Generator().manual_seed(len(lead))
        told = f"rows of shape {(*lead, length)} in {dtype_name(dtypes[0])}"

        def draw(shape, of=drawn):
            return torch.randn(shape, generator=of, device="cpu", dtype=torch.float64)

        values = [draw((*lead, length)) * scale for _ in range(count)]
        values += [1 + 0.25 * draw(shape) for shape in shapes]
        values = [value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]
        wide = [v.double() if v.is_floating_point() else v for v in values]
        try:
            own, exact = _passes(forward, values), _passes(forward, wide)
            if counts_rows(forward, values, count):
                return "its forward decides by how many rows it is given"
            if _returns_memory(forward, values):
                return "it returns its argument or a part of it, of which a kernel makes a copy"
        except USER_ERRORS as error:
            return f"its own forward refuses {told}: {first_line(error)}"
        try:
            found = _passes(row, values)
        except HTileError as error:
            return error.message
        if found[1] != own[1]:
            return f"as a function of rows it returns other tensors for {told}"
        for ours, theirs, truth in zip(found[0], own[0], exact[0], strict=True):
            if not _agree(ours, theirs, truth):
                return f"as a function of rows it gives other values for {told}"
    return None


def first_line(error: Exception) -> str:
    """An error of a forward in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _passes(function: Forward | Rowwise, values: list[torch.Tensor]) -> tuple[list, object]:
    """The results and gradients of a function, and what tells results of other kinds apart."""
    values = [v.requires_grad_() if v.is_floating_point() else v for v in map(_copy, values)]
    leaves = [v for v in values if v.requires_grad]
    results, structure = pytree.tree_flatten(function(*values))
    outs = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    drawn = torch.Generator().manual_seed(100 + len(outs))  # other numbers than the rows'
    cotangents = [
        torch.randn(r.shape, generator=drawn, device="cpu", dtype=torch.float64).to(r.dtype)
        for r in outs
    ]
    found = [None] * len(leaves)
    if outs:
        found = [*torch.autograd.grad(outs, leaves, cotangents, allow_unused=True)]
    kinds = [
        (r.shape, r.dtype, r.requires_grad) if isinstance(r, torch.Tensor) else (type(r), r)
        for r in results
    ]
    return [*results, *found], (str(structure), kinds, [g is None for g in found])


def _returns_memory(forward: Forward, values: list[torch.Tensor]) -> bool:
    """Whether some result lies in the memory of what the forward is given."""
    with torch.no_grad():
        results = pytree.tree_leaves(forward(*values))
    given = {value.untyped_storage().data_ptr() for value in values}
    found = [r.untyped_storage().data_ptr() for r in results if isinstance(r, torch.Tensor)]
    return not given.isdisjoint(found)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def _agree(ours: object, own: object, truth: object) -> bool:
    if not isinstance(own, torch.Tensor):
        return True  # None, where there is no gradient: `_passes` tells of all others
    if not own.is_floating_point():
        return torch.equal(ours, own)
    ours, own, truth = ours.detach().double(), own.detach(), truth.detach().double()
    units, own = UNITS[own.dtype] * torch.finfo(own.dtype).eps, own.double()
    counts = own.isfinite() & truth.isfinite()  # in float16 the module itself may overflow
    if not counts.any():
        return torch.equal(ours.isfinite(), own.isfinite())
    ours, own, truth = ours[counts], own[counts], truth[counts]
    bound = OWN_ERRORS * (own - truth).abs().max() + units * truth.abs().max()
    return bool(((ours - truth).abs() <= bound).all())
