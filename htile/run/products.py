"""Calls of functions with matrix products: which kernels run, one after the other, and on what.

`htile.lower.products` cuts the function into levels. On GPUs that multiply by wgmma (sm_90a), a
level with products is one kernel, if what follows its products allows it (`emit_products.fused`).
If it does not, a kernel stores the products in float32 and a row kernel goes on from there. Other
GPUs, and operands that the tensor memory accelerator does not load, get their products from torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from ..build.arch import arch_of_capability
from ..build.compile import build, load
from ..errors import ArgumentError
from ..frontend.graph import Builder, Graph, Output, Role
from ..frontend.ops import REDUCTIONS
from ..lower import run_passes
from ..lower.column_groups import cut_reductions
from ..lower.emit_products import Fused, emit, fused
from ..lower.names import kernel_name
from ..lower.product_tiles import choose_tile
from ..lower.products import Level, Product, levels
from .gradients import Runner, _spec
from .launch import Request
from .operands import WIDEST_ACCESS

TENSOR_CORES = "sm_90a"  # the architecture that kernels with products are emitted for


@dataclass(frozen=True)
class RowStep:
    """A row kernel, and the names of its results."""

    run: Runner
    results: tuple[str, ...]


@dataclass(frozen=True)
class ProductStep:
    """Products, and what one kernel computes of them.

    kernel: None where torch computes them.
    alone: a kernel for each product that stores it in float32, and the row kernel that follows:
        what runs where `kernel` does not.
    """

    products: tuple[Product, ...]
    kernel: Fused | None
    then: RowStep | None
    alone: tuple[Fused, ...]
    whole: RowStep

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results of the kernel."""
        return tuple(o.name for o in self.kernel.graph.outputs)


_STEPS: WeakKeyDictionary[Graph, list] = WeakKeyDictionary()


def steps_of(request: Request) -> list[RowStep | ProductStep]:
    """What runs for a function with products, in order. It is found once for a traced graph."""
    traced = request.specialization.traced
    if traced not in _STEPS:
        own = request.fastmath, dict(request.wanted)
        _STEPS[traced] = [_step(level, *own) for level in levels(traced)]
    return _STEPS[traced]


def _step(level: Level, fastmath: bool, wanted: dict) -> RowStep | ProductStep:
    if not level.products:
        return _row_step(level.graph, fastmath, wanted)
    placed = run_passes(level.graph)
    graph, then = placed, None
    if any(node.op in REDUCTIONS for node in placed):
        cut = cut_reductions(placed)
        graph = None if cut is None else cut.of_groups
        then = None if cut is None else _row_step(cut.of_row, fastmath, wanted)
    kernel = None if graph is None else fused(graph, level.products, placed.n)
    whole = _row_step(level.graph, fastmath, wanted)
    alone = tuple(_stored(level.graph, product) for product in level.products)
    return ProductStep(level.products, kernel, then if kernel else None, alone, whole)


def _row_step(graph: Graph, fastmath: bool, wanted: dict) -> RowStep:
    specs = tuple(_spec(graph, i) for i in graph.inputs)
    return RowStep(Runner(graph, specs, fastmath, wanted), tuple(o.name for o in graph.outputs))


def _stored(graph: Graph, product: Product) -> Fused:
    """The kernel that stores a product in float32."""
    given = next(i for i in graph.inputs if i.name == product.name)
    value = graph[given.id].value
    builder = Builder(f"{graph.name}_{product.name}", value.inner[0])
    id = builder.add_input(given.name, Role.ROW, torch.float32, value)
    output = Output(product.name, id, torch.float32, value.inner, True)
    made = builder.finish([output], pytree.tree_structure((0,)))
    return fused(made, (product,), value.inner[0])


class ProductLaunch:
    """How to run a call with products: the steps, for values of the function's parameters."""

    kernel = source = None  # of a single one, as a Launch has it

    def __init__(self, request: Request, device: torch.device):
        specialization = request.specialization
        self.names = request.signature.names
        self.specs = {spec.name: spec for spec in request.call.specs}
        self.lead, self.device = request.call.lead, device
        self.rows = request.rows
        self.structure = specialization.traced.structure
        self.results = tuple(o.name for o in specialization.traced.outputs)
        self.shapes = specialization.shapes(self.lead)
        self.fastmath = request.fastmath
        self.steps = steps_of(request)
        self.arch = arch_of_capability(torch.cuda.get_device_capability(device))
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._loaded: dict[tuple, object] = {}
        if torch.cuda.is_current_stream_capturing():
            name = request.signature.name
            raise ArgumentError(
                f"{name}: the first call with arguments of this kind compiles or loads kernels, "
                "which can not be captured into a CUDA graph; call it once before the capture"
            )

    def __call__(self, values: tuple, outs: tuple = ()) -> object:
        """The results for these values, or `outs` with them."""
        found = {
            name: self._flat(name, value)
            for name, value in zip(self.names, values, strict=True)
        }  # fmt: skip
        for step in self.steps:
            if isinstance(step, RowStep):
                self._run_rows(step, found)
            else:
                self._multiply(step, found)
        made = [found[f"result {name}"].reshape(shape)
                for name, (shape, _) in zip(self.results, self.shapes, strict=True)]  # fmt: skip
        if outs:
            for out, result in zip(outs, made, strict=True):
                out.detach().copy_(result)
            made = outs
        return pytree.tree_unflatten(list(made), self.structure)

    def _flat(self, name: str, value: object) -> object:
        """An argument with one leading dimension, if it is one of rows."""
        spec = self.specs[name]
        if spec.role not in (Role.ROW, Role.PER_ROW):
            return value
        shape = (*self.lead, *spec.inner)
        value = value if value.shape == shape else value.expand(shape)
        return value.reshape((self.rows, *spec.inner))

    def _keep(self, name: str, tensor: torch.Tensor, found: dict) -> None:
        found[f"result {name}" if name in self.results else name] = tensor

    def _run_rows(self, step: RowStep, found: dict) -> None:
        values = tuple(found[name] for name in step.run.parameters.names)
        for name, result in zip(step.results, step.run(values, (self.rows,)), strict=True):
            self._keep(name, result, found)

    def _multiply(self, step: ProductStep, found: dict) -> None:
        if step.kernel is not None and self._launch(step.kernel, found):
            if step.then is not None:
                self._run_rows(step.then, found)
            return
        for kernel, product in zip(step.alone, step.products, strict=True):
            if not self._launch(kernel, found):
                left, right = found[product.left], found[product.matrix]
                right = right.t() if product.is_transposed else right
                found[product.name] = torch.mm(left, right, out_dtype=torch.float32)
        self._run_rows(step.whole, found)

    def _launch(self, kernel: Fused, found: dict) -> bool:
        """Whether the kernel computes its results here, which it then has done."""
        left = found[kernel.operands[0].product.left]
        if left.stride(-1) != 1:
            left = left.contiguous()
        rights = [_columns(found[o.product.matrix], o, kernel.n) for o in kernel.operands]
        majors = {_major(right) for right in rights}
        if self.arch.name != TENSOR_CORES or len(majors) != 1 or None in majors:
            return False
        (major,) = majors
        if not all(map(_is_loaded_by_tma, (left, *rights))):
            return False
        results = [
            torch.empty(
                (self.rows, kernel.n if o.inner[0] == kernel.graph.n else o.inner[0]),
                dtype=o.dtype, device=self.device)
            for o in kernel.graph.outputs
        ]  # fmt: skip
        others = [_argument(found[i.name], i, kernel.n) for i in kernel.others]
        if self.rows:
            function, clusters = self._function(kernel, major, _in_pairs(kernel, others))
            if function is None:
                return False
            rights = [right if major == "k" else right.t() for right in rights]
            function(left, *rights, *others, *results, clusters)
        for output, result in zip(kernel.graph.outputs, results, strict=True):
            self._keep(output.name, result, found)
        return True

    def _function(self, kernel: Fused, major: str, in_pairs: bool) -> tuple:
        """The loaded kernel, and how many clusters it has at most."""
        key = id(kernel), major, in_pairs
        if key not in self._loaded:
            tile = choose_tile(kernel, major, self.rows, self.processors)
            function = None
            if tile is not None:
                source = emit(kernel, tile, major, in_pairs, self.fastmath)
                function = load(build(source, kernel_name(kernel.graph), self.arch.name))
            clusters = self.processors // (tile.cluster if tile else 1)
            self._loaded[key] = function, clusters
        return self._loaded[key]


def _columns(matrix: torch.Tensor, operand, n: int) -> torch.Tensor:
    """The part of a matrix, as (n, K), that an operand's columns come of."""
    matrix = matrix if operand.product.is_transposed else matrix.t()
    return matrix[operand.start : operand.start + n]


def _major(matrix: torch.Tensor) -> str | None:
    """Which neighbours of a matrix (N, K) are contiguous; None if none are."""
    if matrix.stride(1) == 1:
        return "k"
    return "mn" if matrix.stride(0) == 1 else None


def _is_loaded_by_tma(matrix: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator loads a matrix: it is aligned to 16 bytes."""
    apart = max(matrix.stride(0), matrix.stride(1)) * matrix.element_size()
    return matrix.data_ptr() % WIDEST_ACCESS == 0 and apart % WIDEST_ACCESS == 0


def _in_pairs(kernel: Fused, others: list) -> bool:
    """Whether two neighbours of each row and column that is read may be loaded at a time."""
    both = zip(kernel.others, others, strict=True)
    read = [value for i, value in both if i.role in (Role.ROW, Role.COLUMN)]
    return kernel.n % 2 == 0 and all(
        value.data_ptr() % (2 * value.element_size()) == 0
        and all(step % 2 == 0 for step in value.stride()[:-1])
        for value in read
    )


def _argument(value: object, i, n: int) -> object:
    """An input as the kernel takes it: rows, columns and numbers of rows without other axes."""
    if i.role is Role.SCALAR:
        return float(value)
    if i.role is Role.DEVICE_SCALAR:
        return value.reshape(1)
    if i.role is Role.PER_ROW:
        return value.reshape(value.shape[0])
    start = i.view.start[0] if i.view is not None else 0
    value = value if value.stride(-1) == 1 else value.contiguous()
    return value[..., start : start + n]
