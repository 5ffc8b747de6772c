"""Repeated calls of functions with matrix products: one text, and kernels by the number of rows.

Which tile a kernel has follows from the number of rows, so a call of a new number goes the long way
once, and adds its kernels to the shortcut of its kind. All strides are those of the first call,
unless the rows have several leading dimensions: then they are contiguous, and kernels see one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...frontend.captures import Captures
from ...frontend.graph import Input, Role
from ...frontend.ops import Op
from ..launch import Request
from ..operands import has_one_twice
from ..products.calls import OF_ROWS, Multiply, ProductLaunch, Rows, key_of
from ..products.operands import argument, columns_of
from .shortcut import MAX_SHORTCUTS, CallWriter, replace_shortcuts
from .text import NotTold, tuple_of

MAX_NUMBERS = 4096  # of rows whose kernels a shortcut has; forgotten all at once beyond


class ProductWriter(CallWriter):
    """Writes the shortcut of calls like the first one, which `launch` has run.

    rows: the number of rows, as text.
    found: the name in the text of each value so far, and a tensor that is laid out as it.
    taken: the kernels for this number of rows, and what they are given beside tensors.
    """

    launch: ProductLaunch
    any_changes = True  # kernels are looked up by the number of rows, whatever it is

    def take_launch(self) -> None:
        lead, specs = self.first.call.lead, self.first.call.specs
        self.rows = "_m0" if len(lead) == 1 else "_rows" if lead else "1"
        self.scope |= {"_view": torch._C._dynamo.guards._reinterpret_tensor, "_kernels": {}}
        self.found: dict[str, tuple[str, object]] = {}
        self.flattened, self.allocated, self.calls, self.taken = [], [], [], []
        for spec in specs:
            value = self.first.given[spec.name]
            text = spec.name
            if spec.role in OF_ROWS and len(lead) != 1:
                if value.shape != (*lead, *spec.inner) or not value.is_contiguous():
                    raise NotTold
                value, text = value.reshape(self.launch.rows, *spec.inner), f"_flat_{spec.name}"
                self.flattened.append(f"{text} = {self._viewed(spec.name, value, 0, True)}")
            elif spec.role in OF_ROWS and value.shape != (*lead, *spec.inner):
                raise NotTold
            self.found[spec.name] = text, value
        for action in self.launch.actions or ():
            if isinstance(action, Multiply):
                self._multiply(action)
            elif isinstance(action, Rows):
                self._run_rows(action)
            else:
                raise NotTold  # torch multiplies

    def _viewed(self, name: str, tensor: torch.Tensor, offset: int, of_rows: bool) -> str:
        """A view of a tensor as text; `of_rows`: whether its first dimension are the rows."""
        sizes = [*map(str, tensor.shape)]
        sizes[:1] = [self.rows] if of_rows else sizes[:1]
        return f"_view({name}, {tuple_of(sizes)}, {tuple(tensor.stride())}, {offset})"

    def _passed(self, name: str, tensor: torch.Tensor, of_rows: bool) -> str:
        """What a kernel is given: the value of this name, or a view of it such as `tensor`."""
        text, value = self.found[name]
        offset = tensor.storage_offset() - value.storage_offset()
        if tensor.shape == value.shape and tensor.stride() == value.stride() and not offset:
            return text
        return self._viewed(text, tensor, offset, of_rows)

    def _multiply(self, action: Multiply) -> None:
        kernel, major, number = action.kernel, action.major, len(self.calls)
        left, value = self.found[action.left]
        given = [left]
        if value.stride(-1) != 1 or action.function is None:
            raise NotTold
        for operand in kernel.operands:
            name = operand.product.matrix
            part = columns_of(self.found[name][1], operand, kernel.n)
            given.append(self._passed(name, part if major == "k" else part.t(), False))
        for i in kernel.others:
            text, value = self.found[i.name]
            if i.role is Role.SCALAR:
                given.append(self._number(text, i))
                continue
            if i.role in (Role.ROW, Role.COLUMN) and value.stride(-1) != 1:
                raise NotTold
            given.append(self._passed(i.name, argument(value, i, kernel.n), i.role in OF_ROWS))
        results = [self._result(name, (n,), dtype, True) for name, n, dtype in action.made]
        self.taken += [action.function, action.clusters]
        self.calls.append(f"_k{number}({', '.join([*given, *results])}, *_c{number})")

    def _number(self, text: str, i: Input) -> str:
        """A Python float, or what is computed of it; a quotient would raise where it is by zero."""
        if i.formula is None:
            return text
        if Op.DIV in i.formula.ops:
            raise NotTold
        return i.formula.text(text)

    def _run_rows(self, action: Rows) -> None:
        launch, number = action.launch, len(self.calls)
        names, outputs = action.run.parameters.names, action.run.specialization.traced.outputs
        if launch is None or launch.kernel is None or not launch.is_widest:
            raise NotTold
        if any(is_copied for _, is_copied in launch.inputs):
            raise NotTold
        given = [self.found[names[k]][0] for k, _ in launch.inputs]
        for name, each in zip(action.keys, outputs, strict=True):
            given.append(self._result(name, each.inner, each.dtype, each.over is None))
        if launch.workspace:
            self.scope["_bytes"] = torch.int8
            self.allocated.append(f"_parts{number} = _empty((_c{number},), (1,), _bytes)")
            given.append(f"_parts{number}")
        self.taken += [launch.kernel, launch.workspace]
        self.calls.append(f"_k{number}({', '.join(given)})")

    def _result(
        self, name: str, inner: tuple[int, ...], dtype: torch.dtype, of_rows: bool
    ) -> str:
        """The name of a result that is allocated."""
        text = f"_v{len(self.allocated)}"
        self.scope[f"_dtype{text}"] = dtype
        like = torch.empty((self.launch.rows,) * of_rows + inner, dtype=dtype, device="meta")
        sizes = ([self.rows] if of_rows else []) + [*map(str, inner)]
        made = f"_empty({tuple_of(sizes)}, {tuple(like.stride())}, _dtype{text})"
        self.allocated.append(f"{text} = {made}")
        self.found[name] = text, like
        return text

    def strides_of(self, name: str) -> list[int | None]:
        return [*self.guarded[name].stride()] if len(self.sizes) < 2 else super().strides_of(name)

    def is_read(self, name: str) -> bool:
        return True  # of each is checked, by the kernels or by the view that they are given

    def rows_read(self) -> list[str]:
        lines = [f"_shape = {self.like}.shape"] if self.sizes else []
        lines += [f"{size} = _shape[{k}]" for k, size in enumerate(self.sizes)]
        if len(self.sizes) > 1:
            lines.append(f"_rows = {' * '.join(self.sizes)}")
        names = [f"{letter}{k}" for k in range(len(self.calls)) for letter in ("_k", "_c")]
        return [
            *lines,
            f"_taken = _kernels.get({self.rows})",
            "if _taken is None:",
            *self.miss,
            f"{', '.join(names)}, = _taken",
        ]

    def memory(self) -> list[str]:
        self.allocate()
        return [*self.allocated, *self.is_elsewhere("_v0"), *self._same_leads(), *self.flattened]

    def _same_leads(self) -> list[str]:
        """Lines that leave where rows have other leading shapes, which flat ones do not tell."""
        specs, count = self.first.call.specs, len(self.sizes)
        names = [s.name for s in specs if s.role in OF_ROWS and s.name != self.like]
        wrong = [f"{name}.shape[:{count}] != {tuple_of(self.sizes)}" for name in names]
        return [f"if {' or '.join(wrong)}:", *self.miss] if wrong and count > 1 else []

    def launched(self) -> list[str]:
        return self.calls

    def returned(self) -> list[str]:
        made = []
        for name, output in zip(self.launch.results, self.outputs, strict=True):
            text, _ = self.found[key_of(name, self.launch.results)]
            if len(self.sizes) != 1 and output.over is None:
                sizes = [*self.sizes, *map(str, output.inner)]
                strides = [" * ".join(sizes[k + 1 :]) or "1" for k in range(len(sizes))]
                text = f"_view({text}, {tuple_of(sizes)}, {tuple_of(strides)}, 0)"
            made.append(text)
        self.results = made
        return super().returned()

    def key(self) -> tuple:
        """What calls have in common that may share a shortcut, whatever their numbers of rows."""
        first = self.first
        tensors = [
            (name, type(t), t.dtype, t.device, t.requires_grad, t.is_neg(), t.is_inference(),
             tuple(self.shapes[name]), tuple(self.strides_of(name)))
            for name, t in self.guarded.items()
        ]  # fmt: skip
        modes = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda"),
        )  # fmt: skip
        text = tuple(self.lines())
        others = tuple((n, repr(v)) for n, v in first.given.items() if n not in self.tensors)
        return text, tuple(tensors), modes, others, self.watched[1]


def add_products(
    owner: object, name: str, first: Request, launch: ProductLaunch, captures: Captures,
    watched: tuple[tuple, tuple],
) -> None:  # fmt: skip
    """Add the kernels of a call to the shortcut for its kind, or a shortcut if there is none.

    owner, name: the object that has the tuple of shortcuts, and the name of the attribute.
    """
    if any(n.startswith("_") for n in first.given) or has_one_twice(first.values):
        return
    try:
        writer = ProductWriter(first, None, captures, watched, launch)
        kind = ProductWriter, writer.key()
        known = [each for each in getattr(owner, name) if each.kind[0] is ProductWriter]
        shortcut = next((each for each in known if each.kind == kind), None)
        if shortcut is None:
            if len(known) >= MAX_SHORTCUTS:
                return
            shortcut = writer.function()
            shortcut.kind, shortcut.kernels = kind, writer.scope["_kernels"]
            replace_shortcuts(owner, name, (shortcut,))
    except NotTold:
        return
    kernels: dict[int, tuple[Callable | tuple | int, ...]] = shortcut.kernels
    if len(kernels) >= MAX_NUMBERS:
        kernels.clear()
    kernels[launch.rows] = tuple(writer.taken)
