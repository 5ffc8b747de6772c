"""Calls of functions with matrix products: which kernels run, one after the other, and on what.

`htile.lower.products.levels` cuts the function into levels. A level with products is one kernel, if
what follows its products allows it (`fused.fused`). If it does not, a kernel stores the products in
float32 and a row kernel goes on from there. Operands that are not aligned to 16 bytes get their
products from torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from ...build.arch import Arch, arch_of_capability
from ...build.compile import build, load
from ...errors import ArgumentError, LoweringError
from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Builder, Graph, Output, Role
from ...lower.emission.names import kernel_name
from ...lower.products import emit as emit_products
from ...lower.products import emit_warp as emit_warp_products
from ...lower.products.fused import Fused, Tile, fused
from ...lower.products.levels import Level, Product, levels
from ...lower.products.tile_kernel import sharing, tile_kernel
from ...lower.products.tiles import clusters_of
from ..launch import Launch, Request
from ..runner import OF_ROWS, Runner
from ..specialize import spec_of
from .operands import (
    Values,
    argument,
    by_torch,
    columns_of,
    dense,
    flat,
    has_lines,
    in_pairs,
    is_whole,
    major_of,
    width,
)
from .tiles import choose_tile


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
    major = major_of(columns[0])
    if 1 in columns[0].shape:  # TMA of a matrix of one line was seen to be an illegal instruction
        return None
    if not has_lines(dense(found[left]), "k") or not all(has_lines(c, major) for c in columns):
        return None
    tile = choose_tile(kernel, major, rows, processors, arch)
    if tile is None or (tile.warps and not all(is_whole(each, major) for each in columns)):
        return None
    others = [argument(found[i.name], i, kernel.n) for i in kernel.others]
    emit = emit_warp_products.emit if tile.warps else emit_products.emit
    source = emit(kernel, tile, major, in_pairs(kernel, others), fastmath)
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
        results = []
        for key, n, dtype in self.made:
            result = found.get(written_to(key))
            if result is None or result.shape != (rows, n):
                result = torch.empty(rows, n, dtype=dtype, device=self.device)
            results.append(result)
        if self.function is not None and rows:
            self.function(dense(left), *given, *others, *results, *self.clusters)
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
        self.name, self.wanted = request.signature.name, request.wanted
        self.rows, self.device = request.rows, device
        outputs = enumerate(specialization.traced.outputs)
        self.copied = {k for k, _ in request.aliases} | {k for k, o in outputs if o.over}
        self.structure = specialization.traced.structure
        self.results = tuple(o.name for o in specialization.traced.outputs)
        self.keys = tuple(key_of(name, self.results) for name in self.results)
        self.shapes = specialization.shapes(self.lead)
        self.inner = {s.name: s.inner for s in request.call.specs if s.role in OF_ROWS}
        self.steps = steps_of(request)
        self.arch = arch_of_capability(torch.cuda.get_device_capability(device))
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.actions: list[Action] | None = None
        self._stored: dict[str, tuple[int, Action]] = {}  # with the most rows that it takes
        self._fused_steps: dict[str, list[Action]] = {}
        if torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                f"{self.name}: the first call with arguments of this kind compiles or loads "
                "kernels, which can not be captured into a CUDA graph; call it once before the "
                "capture"
            )

    def __call__(self, values: tuple, outs: tuple = ()) -> object:
        """The results for these values, or `outs` with them."""
        found: Values = dict(zip(self.names, values, strict=True))
        for name, inner in self.inner.items():
            found[name] = flat(found[name], (*self.lead, *inner), (self.rows, *inner))
        own = self._own(outs) if outs else {}
        found.update(own)
        if self.actions is None:
            actions = [action for step in self.steps for action in self._begun(step, found)]
            refuse_plan(self.name, self.wanted, any(isinstance(a, Rows) for a in actions))
            self.actions = actions
        else:
            for action in self.actions:
                action(found)
        made = [found[key] for key in self.keys]
        if outs:
            for out, result, key in zip(outs, made, self.keys, strict=True):
                if result is not own.get(written_to(key)):
                    out.detach().copy_(result.reshape(out.shape))
            return pytree.tree_unflatten([*outs], self.structure)
        if len(self.lead) != 1:
            made = [m.reshape(shape) for m, (shape, _) in zip(made, self.shapes, strict=True)]
        return pytree.tree_unflatten(made, self.structure)

    def _own(self, outs: tuple) -> Values:
        """The tensors of `out=` that kernels of products may write to, by `written_to`.

        They lie as results that are allocated, and are no arguments. All others are copied to, and
        so is what a row kernel gives.
        """
        found: Values = {}
        for k, (key, out) in enumerate(zip(self.keys, outs, strict=True)):
            lies = out.is_contiguous() and out.data_ptr() % ACCESS_BYTES == 0 and not out.is_neg()
            if lies and k not in self.copied and out.numel() and self.rows:
                found[written_to(key)] = out.detach().view(self.rows, -1)
        return found

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
        own = kernel, text.tile, self.processors
        clusters = () if text.tile.warps else (clusters_of(*own),)
        made = tuple((key_of(o.name, self.results), width(kernel, o), o.dtype)
                     for o in kernel.graph.outputs)  # fmt: skip
        return Multiply(kernel, function, text.major, clusters, made, self.device)

    def run_fused(self, step: ProductStep, found: Values) -> bool:
        """Run a step without storing its products; whether it has kernels that do so."""
        key = step.products[0].name
        if key not in self._fused_steps:
            actions = self._fused(step, found)
            refuse_plan(self.name, self.wanted, self._has_rows(actions))
            self._fused_steps[key] = actions
        for action in self._fused_steps[key]:
            action(found)
        return bool(self._fused_steps[key])

    def _has_rows(self, actions: list[Action]) -> bool:
        """Whether a row kernel runs beside those of one step, or is one of them."""
        known = [actions, *self._fused_steps.values()]
        has_others = len(self.steps) > len(known) or not all(known)
        return has_others or any(isinstance(a, Rows) for each in known for a in each)

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


def written_to(key: str) -> str:
    """The name of the tensor that is to have the value of that name."""
    return f"out {key}"


def refuse_plan(name: str, wanted: Mapping[str, object], has_rows: bool) -> None:
    """Raise LoweringError where a plan is wanted of a call that has no row kernel."""
    if wanted and not has_rows:
        given = ", ".join(f"{key}={value!r}" for key, value in wanted.items())
        raise LoweringError(
            f"{name}: with_plan({given}) has no effect, because all kernels of this call multiply "
            "by matrices and have tiles, not the plans of rows; leave with_plan out. f.tune(...) "
            "tries other tiles"
        )
