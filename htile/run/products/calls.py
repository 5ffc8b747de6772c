"""Calls of functions with matrix products: which kernels run, one after the other, and on what.

`htile.lower.products.levels` cuts the function into levels. A level with products is one kernel, if
what follows its products allows it (`fused.fused`). If it does not, a kernel stores the products in
float32 and a row kernel goes on from there. Operands that are not aligned to 16 bytes get their
products from torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from ...build.arch import Arch, arch_of_capability
from ...build.compile import build, load
from ...errors import ArgumentError
from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Builder, Graph, Output, Role
from ...lower.emission.names import kernel_name
from ...lower.products import emit as emit_products
from ...lower.products import emit_warp as emit_warp_products
from ...lower.products.fused import Fused, Operand, Tile, fused
from ...lower.products.levels import Level, Product, levels
from ...lower.products.tile_kernel import sharing, tile_kernel
from ..launch import Launch, Request
from ..runner import OF_ROWS, Runner
from ..specialize import spec_of
from .tiles import choose_tile

GIVES_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()  # of operands of 16 bits, on a GPU


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


_STEPS: WeakKeyDictionary[Graph, list] = WeakKeyDictionary()


def steps_of(request: Request) -> list[RowStep | ProductStep]:
    """What runs for a function with products, in order. It is found once for a traced graph."""
    traced = request.specialization.traced
    if traced not in _STEPS:
        own = request.fastmath, dict(request.wanted)
        _STEPS[traced] = [_step(level, *own) for level in levels(traced, sharing)]
    return _STEPS[traced]


def _step(level: Level, fastmath: bool, wanted: dict) -> RowStep | ProductStep:
    if not level.products:
        return _row_step(level.graph, fastmath, wanted)
    found = tile_kernel(level)
    whole = _row_step(level.graph, fastmath, wanted)
    alone = tuple(_stored(level.graph, product) for product in level.products)
    if found is None:
        return ProductStep(level.products, None, None, alone, whole)
    then = None if found.rest is None else _row_step(found.rest, fastmath, wanted)
    return ProductStep(level.products, found.kernel, then, alone, whole)


def _row_step(graph: Graph, fastmath: bool, wanted: dict) -> RowStep:
    specs = tuple(spec_of(graph, i) for i in graph.inputs)
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


Values = dict[str, object]  # arguments by parameter, and what the steps have computed by name
Action = Callable[[Values], None]  # a kernel, on the values so far: `Rows`, `Multiply` or torch


@dataclass(frozen=True)
class Text:
    """The emitted kernel for some operands; `major` says how the matrices lie in memory."""

    source: str
    function: str
    tile: Tile
    major: str


def text_for(
    kernel: Fused, found: Values, rows: int, arch: Arch, processors: int, fastmath: bool
) -> Text | None:
    """The kernel for operands of any device such as these; None where it does not take them."""
    left = kernel.operands[0].product.left
    columns = [columns_of(found[o.product.matrix], o, kernel.n) for o in kernel.operands]
    major = _major(columns[0])
    if 1 in columns[0].shape:  # TMA of a matrix of one line was seen to be an illegal instruction
        return None
    if not _has_lines(_dense(found[left]), "k") or not all(_has_lines(c, major) for c in columns):
        return None
    tile = choose_tile(kernel, major, rows, processors, arch)
    if tile is None or (tile.warps and not all(_is_whole(each, major) for each in columns)):
        return None
    others = [argument(found[i.name], i, kernel.n) for i in kernel.others]
    emit = emit_warp_products.emit if tile.warps else emit_products.emit
    source = emit(kernel, tile, major, _in_pairs(kernel, others), fastmath)
    return Text(source, kernel_name(kernel.graph), tile, major)


@dataclass
class Rows:
    """A row kernel that is run on the values so far.

    keys: the names of its results there.
    launch: how it was launched the first time; None where torch added up rows.
    """

    run: Runner
    keys: tuple[str, ...]
    rows: int
    launch: Launch | None = None
    has_run: bool = False

    def __call__(self, found: Values) -> None:
        values = tuple([found[name] for name in self.run.parameters.names])
        found.update(zip(self.keys, self.run(values, (self.rows,)), strict=True))
        if not self.has_run:
            self.launch, self.has_run = self.run.launch_of(values, (self.rows,)), True


@dataclass(frozen=True)
class Multiply:
    """A kernel of products that is run on the values so far.

    function: None where there are no rows.
    clusters: what it is given behind the results.
    made: the name, the width and the dtype of each result.
    """

    kernel: Fused
    function: Callable[..., None] | None
    major: str
    clusters: tuple[int, ...]
    made: tuple[tuple[str, int, torch.dtype], ...]
    device: torch.device

    @property
    def left(self) -> str:
        """The name of the rows that are multiplied."""
        return self.kernel.operands[0].product.left

    def __call__(self, found: Values) -> None:
        kernel, left = self.kernel, found[self.left]
        given = [columns_of(found[o.product.matrix], o, kernel.n) for o in kernel.operands]
        given = given if self.major == "k" else [each.t() for each in given]
        others = [argument(found[i.name], i, kernel.n) for i in kernel.others]
        rows = left.shape[0]
        results = [torch.empty(rows, n, dtype=dtype, device=self.device)
                   for _, n, dtype in self.made]  # fmt: skip
        if self.function is not None and rows:
            self.function(_dense(left), *given, *others, *results, *self.clusters)
        for (key, _, _), result in zip(self.made, results, strict=True):
            found[key] = result


class ProductLaunch:
    """How to run calls of one kind that have products.

    What is found out of the tensors of the first call holds for all such calls: their sizes,
    strides and alignments are the same.
    """

    kernel = source = None  # of a single one, as a Launch has it

    def __init__(self, request: Request, device: torch.device):
        specialization, self.lead = request.specialization, request.call.lead
        self.names, self.fastmath = request.signature.names, request.fastmath
        self.rows, self.device = request.rows, device
        self.structure = specialization.traced.structure
        self.results = tuple(o.name for o in specialization.traced.outputs)
        self.shapes = specialization.shapes(self.lead)
        self.inner = {s.name: s.inner for s in request.call.specs if s.role in OF_ROWS}
        self.steps = steps_of(request)
        self.arch = arch_of_capability(torch.cuda.get_device_capability(device))
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.actions: list[Action] | None = None
        self._stored: dict[str, tuple[int, Action]] = {}  # with the most rows that it takes
        self._fused_steps: dict[str, list[Action]] = {}
        if torch.cuda.is_current_stream_capturing():
            name = request.signature.name
            raise ArgumentError(
                f"{name}: the first call with arguments of this kind compiles or loads kernels, "
                "which can not be captured into a CUDA graph; call it once before the capture"
            )

    def __call__(self, values: tuple, outs: tuple = ()) -> object:
        """The results for these values, or `outs` with them."""
        found: Values = dict(zip(self.names, values, strict=True))
        for name, inner in self.inner.items():
            found[name] = flat(found[name], (*self.lead, *inner), (self.rows, *inner))
        if self.actions is None:
            self.actions = [action for step in self.steps for action in self._begun(step, found)]
        else:
            for action in self.actions:
                action(found)
        made = [found[key_of(name, self.results)] for name in self.results]
        if len(self.lead) != 1:
            made = [m.reshape(shape) for m, (shape, _) in zip(made, self.shapes, strict=True)]
        if outs:
            for out, result in zip(outs, made, strict=True):
                out.detach().copy_(result)
            made = outs
        return pytree.tree_unflatten(list(made), self.structure)

    def _begun(self, step: RowStep | ProductStep, found: Values) -> Iterator[Action]:
        """Run a step for the first time; gives how, one kernel after the other."""
        for action in self._actions_of(step, found):
            action(found)
            yield action

    def _actions_of(self, step: RowStep | ProductStep, found: Values) -> Iterator[Action]:
        """The kernels of a step. What one computes is in `found` before the next is asked for."""
        if isinstance(step, RowStep):
            yield self._of_rows(step)
            return
        fused = self._fused(step, found)
        if fused:
            yield from fused
            return
        for kernel, product in zip(step.alone, step.products, strict=True):
            yield self._of_products(kernel, found) or partial(by_torch, product)
        yield self._of_rows(step.whole)

    def _fused(self, step: ProductStep, found: Values) -> list[Action]:
        """The kernels of a step that do not store its products; none if it has no such kernels."""
        kernel = None if step.kernel is None else self._of_products(step.kernel, found)
        if kernel is None:
            return []
        return [kernel] if step.then is None else [kernel, self._of_rows(step.then)]

    def _of_rows(self, step: RowStep) -> Rows:
        keys = tuple(key_of(name, self.results) for name in step.results)
        return Rows(step.run, keys, self.rows)

    def _of_products(self, kernel: Fused, found: Values) -> Multiply | None:
        """The kernel for operands such as these; None where it does not take them.

        It takes fewer rows, too.
        """
        rows = found[kernel.operands[0].product.left].shape[0]
        text = text_for(kernel, found, rows, self.arch, self.processors, self.fastmath)
        if text is None:
            return None
        function = load(build(text.source, text.function, self.arch.name)) if rows else None
        clusters = () if text.tile.warps else (self.processors // text.tile.cluster,)
        made = tuple((key_of(o.name, self.results), width(kernel, o), o.dtype)
                     for o in kernel.graph.outputs)  # fmt: skip
        return Multiply(kernel, function, text.major, clusters, made, self.device)

    def run_fused(self, step: ProductStep, found: Values) -> bool:
        """Run a step without storing its products; whether it has kernels that do so."""
        key = step.products[0].name
        if key not in self._fused_steps:
            self._fused_steps[key] = self._fused(step, found)
        for action in self._fused_steps[key]:
            action(found)
        return bool(self._fused_steps[key])

    def stored(self, kernel: Fused, product: Product, found: Values) -> torch.Tensor:
        """A product in float32, of its two operands; `kernel` is the one that stores it."""
        rows = found[product.left].shape[0]
        most, action = self._stored.get(product.name, (-1, None))
        if rows > most:
            action = self._of_products(kernel, found) or partial(by_torch, product)
            self._stored[product.name] = rows, action
        action(found)
        return found[product.name]


def key_of(name: str, results: tuple[str, ...]) -> str:
    """The name of a value: a result may have that of an argument."""
    return f"result {name}" if name in results else name


def flat(value: torch.Tensor, whole: tuple, flat: tuple) -> torch.Tensor:
    """An argument of rows with one leading dimension."""
    if value.shape == flat:
        return value
    return value.expand(whole).reshape(flat)


def _dense(left: torch.Tensor) -> torch.Tensor:
    return left if left.stride(-1) == 1 else left.contiguous()


def width(kernel: Fused, output: Output) -> int:
    """How many elements a result has of a row: its columns, or its groups of them."""
    return kernel.n if output.inner[0] == kernel.graph.n else output.inner[0]


def by_torch(product: Product, found: Values) -> None:
    """A product in float32, as torch computes it.

    torch 2.7 gives a product the dtype of its operands, as torch does on a CPU. There they become
    float32 first, which holds them exactly, as TF32 does.
    """
    left, right = found[product.left], found[product.matrix]
    right = right.t() if product.is_transposed else right
    if GIVES_FLOAT32 and left.is_cuda:
        found[product.name] = torch.mm(left, right, out_dtype=torch.float32)
    else:
        found[product.name] = torch.mm(left.float(), right.float())


def columns_of(matrix: torch.Tensor, operand: Operand, n: int) -> torch.Tensor:
    """The part of a matrix, as (n, K), that an operand's columns come of."""
    matrix = matrix if operand.product.is_transposed else matrix.t()
    is_whole = operand.start == 0 and len(matrix) == n
    return matrix if is_whole else matrix[operand.start : operand.start + n]


def _major(matrix: torch.Tensor) -> str:
    """Along which dimension of a matrix (N, K) a line of contiguous elements can be."""
    return "k" if matrix.stride(1) == 1 else "mn"


def _has_lines(matrix: torch.Tensor, major: str) -> bool:
    """Whether the lines of a matrix (N, K) are what kernels load: TMA, or cp.async.

    They are contiguous and do not overlap, and they begin at multiples of 16 bytes. A tensor on the
    meta device has an address, too: that of a view is its offset.
    """
    between, along = (0, 1) if major == "k" else (1, 0)
    apart, size = matrix.stride(between), matrix.element_size()
    is_line = matrix.stride(along) == 1 and apart >= matrix.shape[along]
    return is_line and matrix.data_ptr() % ACCESS_BYTES == apart * size % ACCESS_BYTES == 0


def _is_whole(matrix: torch.Tensor, major: str) -> bool:
    """Whether the lines of operands, of which this is the right one, are whole pieces of 16 bytes.

    The tensor memory accelerator knows where a line ends, and cp.async copies whole pieces.
    """
    lengths = {matrix.shape[1], matrix.shape[1 if major == "k" else 0]}
    return all(n * matrix.element_size() % ACCESS_BYTES == 0 for n in lengths)


def _in_pairs(kernel: Fused, others: list) -> bool:
    """Whether two neighbours of each row and column that is read may be loaded at a time."""
    both = zip(kernel.others, others, strict=True)
    read = [value for i, value in both if i.role in (Role.ROW, Role.COLUMN)]
    return kernel.n % 2 == 0 and all(
        value.data_ptr() % (2 * value.element_size()) == 0
        and all(step % 2 == 0 for step in value.stride()[:-1])
        for value in read
    )


def argument(value: object, i, n: int) -> object:
    """An input as the kernel takes it: rows, columns and numbers of rows without other axes."""
    if i.role is Role.SCALAR:
        return float(value)
    if i.role is Role.DEVICE_SCALAR:
        return value.reshape(1)
    if i.role is Role.PER_ROW:
        return value if value.ndim == 1 else value.reshape(value.shape[0])
    start = i.view.start[0] if i.view is not None else 0
    value = value if value.stride(-1) == 1 else value.contiguous()
    is_whole = start == 0 and value.shape[-1] == n
    return value if is_whole else value[..., start : start + n]
