"""Kernels that torch computes on the CPU, so that calls take all of their ways without a GPU.

What stands for a compiled host function refuses the tensors that the compiled one would refuse: it
is made for dtypes, a number of dimensions, sizes of a row, neighbouring elements and alignment, and
all rows must be as many.
"""

import torch
from torch.utils import _pytree as pytree

from htile.frontend.graph import Role
from htile.frontend.reference import evaluate

OF_ROWS = (Role.ROW, Role.PER_ROW)


def computing(launched: list):
    """What `idle_gpu` loads. Each launch adds the kernel's name and its tensors to `launched`."""

    def load(kernel):
        traced, target = kernel.traced, kernel.plan.target
        inputs = {i.name: (i, traced[i.id].value.inner) for i in traced.inputs}
        repeated = dict(target.broadcast)

        def host(*given):
            names = kernel.graph.arguments
            results = given[len(names) : len(names) + len(traced.outputs)]
            named, lead = dict(zip(names, given, strict=False)), []
            for name, value in named.items():
                leaf, inner = inputs[name]
                if leaf.role is Role.SCALAR:
                    continue
                lead += _lead(name, value, leaf.dtype, tuple(inner), leaf.role, target, repeated)
            for output, result in zip(traced.outputs, results, strict=True):
                role = Role.ROW if output.over is None else Role.COLUMN
                lead += _lead(output.name, result, output.dtype, output.inner, role, target, {})
            if len({*lead}) > 1:
                raise ValueError(f"Mismatched sizes: {lead}")
            launched.append((kernel.name, given))
            with torch.no_grad():
                found = pytree.tree_leaves(evaluate(traced, named, lead=lead[0] if lead else ()))
                for result, value in zip(results, found, strict=True):
                    result.data.copy_(value)  # a kernel does not count versions, either

        return host

    return load


def _lead(name, value, dtype, inner, role, target, repeated) -> list[tuple[int, ...]]:
    """The leading shape of rows, if the tensor has it. Raises what a compiled function raises."""
    if value.dtype is not dtype or value.is_neg():
        raise TypeError(f"Mismatched dtype of {name}")
    own = target.lead if role in OF_ROWS else 0
    if role is Role.DEVICE_SCALAR:
        return []
    missing = sum(each is None for each in repeated.get(name, ()))
    if value.ndim != own - missing + len(inner) or tuple(value.shape[own - missing :]) != inner:
        raise ValueError(f"Mismatched shape of {name}")
    wide = role in (Role.ROW, Role.COLUMN) and len(inner) == 1 and inner[0] > 1
    if wide and value.stride(-1) != 1:
        raise ValueError(f"Mismatched strides of {name}")
    if wide and target.align == 16 and inner[0] * value.element_size() % 16 == 0:
        steps = [s * value.element_size() for n, s in zip(value.shape[:-1], value.stride()[:-1],
                 strict=True) if n > 1]  # fmt: skip
        if any(each % 16 for each in (value.data_ptr(), *steps)):
            raise ValueError(f"Misaligned {name}")
    return [] if name in repeated or role not in OF_ROWS else [tuple(value.shape[:own])]
