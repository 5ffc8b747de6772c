"""What `inspect` returns of a function with matrix products: its kernels, in the order they run."""

from __future__ import annotations

from functools import cached_property
from typing import NoReturn

import torch

from ..build.arch import Arch
from ..build.compile import Artifact, build, build_ahead
from ..build.cubin import Resources
from ..errors import CompileError, UnsupportedError
from ..frontend.graph import Graph
from .kernel import Kernel
from .launch import Request
from .products import (
    OF_ROWS,
    ProductStep,
    RowStep,
    Text,
    Values,
    flat,
    key_of,
    steps_of,
    text_for,
    width,
)

PROCESSORS = 132  # multiprocessors of an H100 and an H200, which the tile is chosen for


class ProductKernel:
    """One kernel of products and of what is computed of them."""

    def __init__(self, graph: Graph, text: Text, arch: str):
        self.graph, self.text, self.arch = graph, text, arch
        self.name, self.source, self.function = graph.name, text.source, text.function

    @cached_property
    def artifact(self) -> Artifact:
        """The compiled kernel. Raises CompileError where CuTe-DSL is not installed."""
        return build(self.source, self.function, self.arch)

    def build_ahead(self) -> None:
        """Compile the kernel, and keep it in the disk cache for other processes."""
        build_ahead(self.source, self.function, self.arch)

    @property
    def resources(self) -> Resources:
        """Registers, stack and shared memory."""
        return self.artifact.resources

    def __str__(self) -> str:
        try:
            used = str(self.resources)
        except CompileError as error:
            used = f"not compiled: {error.message}"
        tile = self.text.tile
        shape = f"{tile.rows}x{tile.columns}, clusters of {tile.cluster}, {tile.stages} stages"
        parts = {
            "graph": str(self.graph), "tile": shape, "source": self.source,
            f"resources, {self.arch}": used,
        }  # fmt: skip
        return "\n\n".join(f"== {title} ==\n{text.rstrip()}" for title, text in parts.items())


class ProductKernels:
    """The kernels of one specialization of a function with products, for one architecture.

    kernels: in the order in which they run; `ProductKernel` for products, and `Kernel` for rows.
    by_torch: the names of products that torch computes, because no kernel does here.
    """

    def __init__(self, request: Request, arch: Arch):
        self.traced = request.specialization.traced
        self.name, self.arch = request.signature.name, arch.name
        self._request, self._arch, self._rows = request, arch, request.rows
        self._results = tuple(output.name for output in self.traced.outputs)
        self.kernels: tuple[Kernel | ProductKernel, ...] = ()
        self.by_torch: tuple[str, ...] = ()
        inner = {s.name: s.inner for s in request.call.specs if s.role in OF_ROWS}
        found: Values = dict(request.given)
        for name, shape in inner.items():
            found[name] = flat(found[name], (*request.call.lead, *shape), (self._rows, *shape))
        for step in steps_of(request):
            if isinstance(step, ProductStep):
                self._multiply(step, found)
            else:
                self._run_rows(step, found)

    @property
    def source(self) -> str:
        """The text of all kernels."""
        return "\n\n".join(kernel.source for kernel in self.kernels)

    @property
    def training(self) -> NoReturn:
        """Raises UnsupportedError: the kernels of gradients are not shown for products."""
        raise UnsupportedError(
            f"{self.name}: the kernels of its gradients are those of the functions before and "
            "after its products, which are not shown; inspect these functions"
        )

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
        self.kernels += (ProductKernel(kernel.graph, text, self.arch),)
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
        told = "".join(f"{name} is computed by torch\n" for name in self.by_torch)
        return f"== traced ==\n{self.traced}\n{told}\n" + "\n\n".join(map(str, self.kernels))

    def __repr__(self) -> str:
        return f"<htile kernels {self.name}, {len(self.kernels)} of them, {self.arch}>"


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
