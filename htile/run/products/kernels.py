"""What `inspect` returns of a function with matrix products: its kernels, in the order they run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch

from ...build.arch import Arch
from ...build.compile import Artifact
from ...errors import UnsupportedError
from ...frontend.graph import Graph
from ...lower import Lowered
from ...lower.products.plan import ProductPlan
from ..kernel import COSTED_ROWS, Kernel
from ..launch import Request
from .calls import (
    OF_ROWS,
    ProductStep,
    RowStep,
    Text,
    key_of,
    refuse_plan,
    steps_of,
    text_for,
)
from .operands import Values, copied, flat, is_apart, width

PROCESSORS = 132  # multiprocessors of an H100 and an H200, which the tile is chosen for


class ProductKernel(Kernel):
    """One kernel of products and of what is computed of them."""

    def __init__(self, traced: Graph, plan: ProductPlan, text: Text, copied: frozenset[str]):
        lowered = Lowered(traced, plan.kernel.graph, plan, text.source, text.function)
        super().__init__(lowered, plan.arch, copied)
        self.text = text

    @property
    def plan(self) -> ProductPlan:
        """The tile, who loads and multiplies, and what is done with the sums."""
        return self.lowered.plan

    def cost(self, rows: int = COSTED_ROWS) -> NoReturn:
        """Raises UnsupportedError: the cost of products is not known."""
        raise UnsupportedError(f"{self.name}: {self.cost_text}; time it on a GPU")

    @property
    def cost_text(self) -> str:
        """That the cost is not known."""
        return "not known of kernels with products"

    @property
    def _names(self) -> dict[int, str]:
        return self.plan.names


class _OfOne:
    """What is of one kernel, and so asked of one of `kernels`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, kernels: ProductKernels | None, owner: type) -> _OfOne:
        if kernels is None:
            return self
        count, more = len(kernels.kernels), ""
        if self.name in OF_ALL:
            more = f", or .{OF_ALL[self.name]} of all"
        raise UnsupportedError(
            f"{kernels.name}: .{self.name} is of one kernel, and this function with products has "
            f"{count} kernel{'s' * (count > 1)}: use .kernels[0].{self.name}{more}"
        )


OF_ALL = {"plan": "plan_text", "cost": "cost_text", "cubin": "artifact", "plan_svg": "save(folder)",
          "graph_svg": "save(folder)"}  # fmt: skip


class ProductKernels:
    """The kernels of one specialization of a function with products, for one architecture.

    `kernels` has them in the order in which they run, each with all that a `Kernel` has. What is
    below is of all of them. `plan`, `cost`, `cubin`, `lowered`, `graph_dot`, `graph_json`,
    `graph_svg` and `plan_svg` are of one kernel, `kernels[0].plan`, and raise UnsupportedError
    here. So do `training`, `backward` and `saved`.

    by_torch: the names of products that torch computes, because no kernel does here.
    """

    plan, cost, cubin, lowered = _OfOne(), _OfOne(), _OfOne(), _OfOne()
    graph_dot, graph_json, graph_svg, plan_svg = _OfOne(), _OfOne(), _OfOne(), _OfOne()

    def __init__(self, request: Request, arch: Arch):
        self.traced = request.specialization.traced
        self.name, self.arch = request.signature.name, arch.name
        self._request, self._arch, self._rows = request, arch, request.rows
        self._results = tuple(output.name for output in self.traced.outputs)
        self.kernels: tuple[Kernel | ProductKernel, ...] = ()
        self.by_torch: tuple[str, ...] = ()
        inner = {s.name: s.inner for s in request.call.specs if s.role in OF_ROWS}
        found: Values = dict(request.given)
        self._apart: frozenset[str] = frozenset()  # what is copied before all kernels
        for name, shape in inner.items():
            whole, rows = (*request.call.lead, *shape), (self._rows, *shape)
            self._apart |= {name} if is_apart(found[name], whole, rows) else frozenset()
            found[name] = flat(found[name], whole, rows)
        for step in steps_of(request):
            if isinstance(step, ProductStep):
                self._multiply(step, found)
            else:
                self._run_rows(step, found)
        of_rows = [not isinstance(kernel, ProductKernel) for kernel in self.kernels]
        refuse_plan(self.name, request.wanted, any(of_rows))

    @property
    def copied(self) -> frozenset[str]:
        """The parameters whose tensors each call makes contiguous first, for any of the kernels."""
        names = self._apart.union(*(kernel.copied for kernel in self.kernels))
        return names.intersection(self._request.signature.names)

    @property
    def source(self) -> str:
        """The text of all kernels."""
        return self._of_each(lambda kernel: kernel.source)

    @property
    def graph(self) -> str:
        """The graphs of all kernels, as text."""
        return self._of_each(lambda kernel: kernel.graph)

    @property
    def plan_text(self) -> str:
        """The plans of all kernels in the order in which they run, what is copied before them, and
        what torch computes."""
        told = "".join(f"{line}\n" for line in self._told())
        return told + self._of_each(lambda kernel: kernel.plan_text)

    def _told(self) -> Iterator[str]:
        """What is done beside the kernels, as lines."""
        yield from (f"{name} is computed by torch" for name in self.by_torch)
        for name in sorted(self._apart):
            yield (f"copied     {name} is made contiguous by each call: its rows are not equally "
                   "far apart in memory")  # fmt: skip

    @property
    def artifact(self) -> tuple[Artifact, ...]:
        """The compiled kernels."""
        return tuple(kernel.artifact for kernel in self.kernels)

    @property
    def ptx(self) -> str:
        """The PTX of all kernels."""
        return self._of_each(lambda kernel: kernel.ptx)

    @property
    def resources(self) -> str:
        """Registers, stack and shared memory of each kernel, as text."""
        return self._of_each(lambda kernel: kernel.resources)

    @property
    def cost_text(self) -> str:
        """The cost of each kernel, as text, where it is known."""
        return self._of_each(lambda kernel: kernel.cost_text)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write all kernels under `folder/NAME-ARCH-DIGEST`, in a folder each; returns that folder.

        It compiles them. `plan.txt` has the plans in the order in which they run.
        """
        digest = hashlib.sha256(f"{self.arch}\n{self.source}".encode()).hexdigest()[:12]
        path = Path(folder) / f"{self.name}-{self.arch}-{digest}"
        for number, kernel in enumerate(self.kernels, 1):
            kernel.save(path / str(number))
        (path / "plan.txt").write_text(f"{self.plan_text}\n", encoding="utf-8")
        return path

    def _of_each(self, text: Callable[[Kernel], object]) -> str:
        """A text of each kernel, under its number where there are several."""
        count = len(self.kernels)
        heads = [f"kernel {k} of {count}\n" if count > 1 else "" for k in range(1, count + 1)]
        pairs = zip(heads, self.kernels, strict=True)
        return "\n\n".join(f"{head}{str(text(kernel)).rstrip()}" for head, kernel in pairs)

    @property
    def training(self) -> NoReturn:
        """Raises UnsupportedError: backward kernels are compiled at their first use only."""
        raise UnsupportedError(
            f"{self.name}: the backward kernels of products are neither shown nor compiled ahead; "
            "they are compiled at their first use, and the disk cache keeps them. Run one step "
            "before a capture or a measurement, forward and backward, with tensors as in later "
            "steps; compile(...) without backward compiles the kernels of calls without gradients"
        )

    @property
    def backward(self) -> NoReturn:
        """Raises UnsupportedError, as `training`."""
        return self.training

    @property
    def saved(self) -> NoReturn:
        """Raises UnsupportedError, as `training`."""
        return self.training

    def build_ahead(self) -> None:
        """Compile all kernels, and keep them in the disk cache for other processes."""
        for kernel in self.kernels:
            kernel.build_ahead()

    def _text(self, kernel, found: Values) -> Text | None:
        own = self._rows, self._arch, PROCESSORS, self._request.fastmath
        return text_for(kernel, found, *own)

    def _multiply(self, step: ProductStep, found: Values) -> None:
        text = None if step.kernel is None else self._text(step.kernel, found)
        if text is not None:
            self._add(step.kernel, text, found)
            if step.then is not None:
                self._run_rows(step.then, found)
            return
        for kernel, product in zip(step.alone, step.products, strict=True):
            text = self._text(kernel, found)
            if text is None:
                self.by_torch += (product.name,)
                found[product.name] = _empty((self._rows, kernel.n), torch.float32)
            else:
                self._add(kernel, text, found)
        self._run_rows(step.whole, found)

    def _add(self, kernel, text: Text, found: Values) -> None:
        fastmath = self._request.fastmath
        plan = ProductPlan(kernel, text.tile, text.major, self.arch, fastmath)
        self.kernels += (ProductKernel(self.traced, plan, text, copied(kernel, found)),)
        for output in kernel.graph.outputs:
            shape = self._rows, width(kernel, output)
            found[key_of(output.name, self._results)] = _empty(shape, output.dtype)

    def _run_rows(self, step: RowStep, found: Values) -> None:
        values = tuple(found[name] for name in step.run.parameters.names)
        self.kernels += (step.run.kernel(values, (self._rows,), self._arch),)
        results = zip(step.run.graph.outputs, step.run.shapes((self._rows,)), strict=True)
        for output, shape in results:
            found[key_of(output.name, self._results)] = _empty(shape, output.dtype)

    def __str__(self) -> str:
        """All kernels on one page; it compiles them."""
        told = "".join(f"{line}\n" for line in self._told())
        return f"== traced ==\n{self.traced}\n{told}\n" + "\n\n".join(map(str, self.kernels))

    def _repr_html_(self) -> str:
        """For notebooks: what each kernel shows."""
        return "\n".join(kernel._repr_html_() for kernel in self.kernels)

    def __repr__(self) -> str:
        return f"<htile kernels {self.name}, {len(self.kernels)} of them, {self.arch}>"


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
