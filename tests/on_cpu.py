"""Kernels that torch computes on the CPU, so that calls take all of their ways without a GPU.

What stands for a compiled host function refuses the tensors that the compiled one would refuse: it
is made for dtypes, a number of dimensions, sizes of a row, neighbouring elements and alignment, and
all rows must be as many.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from benchmarks.idle import idle_gpu
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from htile.lower.products.column_groups import GROUP
from htile.run.differentiation import autograd
from htile.run.products import calls as products
from htile.run.rowwise import Rowwise

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
            length = _length(traced, inputs, named)
            for name, value in named.items():
                leaf, inner = inputs[name]
                if leaf.role is Role.SCALAR:
                    continue
                inner = tuple(inner) if length is None or not inner else (length,)
                lead += _lead(name, value, leaf.dtype, inner, leaf.role, target, repeated)
            for output, result in zip(traced.outputs, results, strict=True):
                role = Role.ROW if output.over is None else Role.COLUMN
                inner = output.inner if length is None or not output.inner else (length,)
                lead += _lead(output.name, result, output.dtype, inner, role, target, {})
            if len({*lead}) > 1:
                raise ValueError(f"Mismatched sizes: {lead}")
            launched.append((kernel.name, given))
            with torch.no_grad():
                found = evaluate(traced, named, lead=lead[0] if lead else (), length=length)
                found = pytree.tree_leaves(found)
                for result, value in zip(results, found, strict=True):
                    result.data.copy_(value)  # a kernel does not count versions, either

        return host

    return load


def _length(traced, inputs, named) -> int | None:
    """How many elements rows of any length have, in the memory of the first one."""
    if traced.multiple is None:
        return None
    rows = (name for name, (i, inner) in inputs.items() if i.role is Role.ROW and name in named)
    return next(named[name].shape[-1] for name in rows)


@contextmanager
def watched_passes(monkeypatch, functions):
    """A GPU that the CPU stands for, and on which these functions have run nothing yet.

    `launched` has each kernel's name and tensors, `long` which passes took the long way.
    """
    launched, long = [], []
    call, gradients = Rowwise._call, autograd._gradients

    def called(self, args, kwargs):
        long.append("forward")
        return call(self, args, kwargs)

    def found(*args):
        long.append("backward")
        return gradients(*args)

    monkeypatch.setattr(Rowwise, "_call", called)
    monkeypatch.setattr(autograd, "_gradients", found)
    for f in functions:
        f._forget()
    with idle_gpu(computing(launched)):
        yield SimpleNamespace(launched=launched, long=long)
    for f in functions:  # they would launch nothing in the tests of other modules, too
        f._forget()


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


def multiplying(launched: list, monkeypatch):
    """What `idle_gpu` loads of products, whose text tells which kernel it is.

    The operands are aligned, and lie as TMA reads them: their lines do not overlap.
    """
    known = {}
    text_for = products.text_for

    def noted(kernel, *rest):
        text = text_for(kernel, *rest)
        if text is not None:
            known[text.source] = kernel, text
        return text

    monkeypatch.setattr(products, "text_for", noted)

    def load(source):
        kernel, text = known[source]
        count, graph = len(kernel.operands), kernel.graph
        first = kernel.operands[0].product

        def host(left, *given):
            rights, given = given[:count], given[count:]
            others, results = given[: len(kernel.others)], given[len(kernel.others) :]
            rows = left.shape[0]
            shape = (kernel.n, first.k) if text.major == "k" else (first.k, kernel.n)
            for matrix, sizes in ((left, (rows, first.k)), *((r, shape) for r in rights)):
                _check_lines(matrix, sizes, first.dtype)
            parts = [r if text.major == "k" else r.t() for r in rights]
            values = {o.input.id: left.double() @ part.double().t()
                      for o, part in zip(kernel.operands, parts, strict=True)}  # fmt: skip
            for i, value in zip(kernel.others, others, strict=True):
                if isinstance(value, torch.Tensor):
                    if value.dtype is not i.dtype:
                        raise TypeError(f"Mismatched dtype of {i.name}")
                    if i.role in OF_ROWS and len(value) != rows:
                        raise ValueError(f"Mismatched rows of {i.name}")
                values[i.id] = value
            launched.append((text.function, (left, *rights, *others, *results)))
            found = results_of_groups(kernel, values, rows)
            for output, result in zip(graph.outputs, results, strict=False):
                if result.dtype is not output.dtype or len(result) != rows:
                    raise TypeError(f"Mismatched result {output.name}")
                result.data.copy_(found[output.name])

        return host

    return load


def _check_lines(matrix, sizes, dtype) -> None:
    step = matrix.stride(0) * matrix.element_size()
    if matrix.dtype is not dtype or tuple(matrix.shape) != sizes or matrix.stride(1) != 1:
        raise ValueError("Mismatched operand")
    if matrix.data_ptr() % 16 or step % 16:
        raise ValueError("Misaligned operand")
    assert matrix.stride(0) >= sizes[1] or len(matrix) == 1, "no check of the host function"


def results_of_groups(kernel, values: dict, rows: int) -> dict:
    """The results of a kernel of products by name, of its inputs by node, as the kernel takes them.

    What it takes of a Python float is computed already (`Input.formula`).
    """
    graph, missing = kernel.graph, kernel.graph.n - kernel.n
    padded = {}
    for i in graph.inputs:
        value = values[i.id]
        if isinstance(value, torch.Tensor) and graph[i.id].value.spread:
            value = F.pad(value.detach().float(), (0, missing), value=7.0)
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        padded[f"input{i.id}"] = value
    whole = replace(
        graph,
        inputs=tuple(
            replace(i, name=f"input{i.id}", view=None, formula=None) for i in graph.inputs
        ),
        outputs=tuple(replace(o, inner=(graph.n,)) for o in graph.outputs),
        nodes=tuple(replace(n, arg=f"input{n.id}") if n.op is Op.INPUT else n for n in graph),
    )
    made = evaluate(whole, padded, (rows,))
    return {
        o.name: each[:, : kernel.n] if o.inner[0] == graph.n else each[:, ::GROUP]
        for o, each in zip(graph.outputs, made, strict=True)
    }
