"""Functions with matrix products as operations of torch: in its graphs, and inside torch.func.

A call whose results nobody differentiates is one operation. A call that is differentiated is one
for each of its steps, in both directions, because a backward pass begins and ends between steps.
Each operation finds out of the tensors of a call which kernels run, as calls outside do.

Inside torch.func the products are stored, and their gradients are products of torch, which its
transforms know: a batch of them, where `torch.vmap` makes one for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch.autograd import forward_ad
from torch.compiler import is_exporting
from torch.utils import _pytree as pytree

from ...frontend.derive import differentiable
from ...frontend.graph import Graph, Role
from ...frontend.reference import evaluate
from ...frontend.roles import Call, Spec
from ...lower.products.levels import Product
from ..differentiation.derivatives import derivative_of, part_name
from ..differentiation.gradients import part_named
from ..launch import Request
from ..operands import (
    device_of,
    is_inside_transform,
    is_recorded,
    refuse_tangent,
    runs_kernels,
    tensor_key,
    wants_gradients,
)
from ..runner import Made, Operation, Parameters, keep
from ..specialize import spec_of
from .calls import ProductStep, RowStep, steps_of
from .chunks import Tensors, TrainedStep
from .derivatives import Gradient, gradient_of
from .gradients import TrainedProducts
from .operands import Values

STEP, ROWS, PRODUCT = "step", "rows", "product"  # what a part is, in its name
NO_TENSORS = (Role.SCALAR, Role.STATIC)


class ProductRunner(Operation):
    """The whole function: one operation where its results are not differentiated.

    parts: what is one operation where they are, by the ends of their names.
    """

    def __init__(self, request: Request):
        self.fastmath, self.wanted = request.fastmath, dict(request.wanted)
        # The steps of another graph would have the names of its parts.
        self.graph = replace(request.specialization.traced)
        self.specialization = replace(
            request.specialization, traced=self.graph, graph=self.graph
        )
        self.specs = self.specialization.specs
        self.parameters = Parameters(self.graph.name, tuple(spec.name for spec in self.specs))
        self.n = request.call.n
        self.steps = steps_of(self._request(()))
        self.parts: dict[str, Operation] = {}
        for k, step in enumerate(self.steps):
            rows = step if isinstance(step, RowStep) else step.whole
            self.parts[f"{k} {ROWS}"] = rows.run.become_part(self, f"{k} {ROWS}")
            if isinstance(step, ProductStep):
                self.parts[f"{k} {STEP}"] = StepForward(self, k)
                for number, product in enumerate(step.products):
                    name = f"{k} {PRODUCT} {number}"
                    self.parts[name] = StoredProduct(self, step, product, name)
        self._known: dict[object, TrainedProducts] = {}

    def _request(self, lead: tuple[int, ...]) -> Request:
        call = Call(self.specs, self.n, lead)
        return Request(
            self.parameters, self.fastmath, self.wanted, call, self.specialization, ()
        )

    @cached_property
    def name(self) -> str:
        """The name by which torch's graphs call it, unless a root gives it another one."""
        from ..operations.ops import content_name  # which few processes need

        return f"{content_name(self)}!"

    def made(self, tensors: list[torch.Tensor], lead: tuple[int, ...]) -> Made:
        return self.specialization.shapes(lead)

    def results(self, values: tuple, lead: tuple[int, ...]) -> list[torch.Tensor]:
        """The results of a call; autograd knows how they depend on tensors that require grad."""
        is_transformed = is_inside_transform(values)
        if not is_transformed and not wants_gradients(values):
            with torch.no_grad():
                return [*self(values, lead)]
        device = next(v.device for v in values if isinstance(v, torch.Tensor))
        if is_transformed or is_recorded(values):
            return self.operations(lead, device)(values)
        return self.trained(self, values, lead, device)(values)

    def operations(self, lead: tuple[int, ...], device: torch.device) -> Operations:
        """What computes the same in steps, each of which torch's graphs and transforms see."""
        return Operations(self, self._request(lead), device)

    def trained(
        self, of: Operation, values: tuple, lead: tuple[int, ...], device: torch.device
    ) -> TrainedProducts:
        """What computes the whole or a part for tensors such as these."""
        key = of, lead, device, *(tensor_key(v) for v in values if isinstance(v, torch.Tensor))
        found = self._known.get(key)
        if found is None:
            found = TrainedProducts(self._request(lead), device)
            keep(self._known, key, found)
        return found

    def computed(
        self, values: tuple, lead: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        _refuse_tangents(self, values)
        if runs_kernels(device):
            results = self.trained(self, values, lead, device).launch(values)
        else:
            given = dict(zip(self.parameters.names, values, strict=True))
            results = evaluate(self.graph, given, lead=lead)
        return tuple(pytree.tree_leaves(results))

    def refuse_no_derivative(self, wrt: tuple[str, ...]) -> None:
        """Raise GradientError where a step has no derivative for these arguments."""
        known, results = {*wrt}, {output.name for output in self.graph.outputs}
        for step in self.steps:
            if isinstance(step, RowStep):
                of = tuple(name for name in step.run.parameters.names if name in known)
                if of and derivative_of(step.run, of, frozenset()) is not None:
                    known |= {*differentiable(step.run.graph, of)} - results
                continue
            operands = {name for p in step.products for name in (p.left, p.matrix)}
            of = frozenset(known & ({*step.whole.run.parameters.names} | operands))
            gradient = gradient_of(step, of) if of else None
            known |= {*(() if gradient is None else gradient.results)} - results


def _refuse_tangents(operation: Operation, values: tuple) -> None:
    """Raise GradientError for forward-mode tangents, which a graph of torch would drop."""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return
    for spec, value in zip(operation.specs, values, strict=True):
        if isinstance(value, torch.Tensor):
            refuse_tangent(operation.graph.name, spec.name, value)


def part_of_products(of: Operation, name: str) -> Operation:
    """The operation whose name ends with `name`, behind that of a whole one or of a part."""
    if isinstance(of, ProductRunner):
        return of.parts[name]
    if isinstance(of, StepForward):
        return of.gradient_named(name)
    return part_named(of, name)


@dataclass(frozen=True, eq=False)
class StepForward(Operation):
    """The results of a step with products, which are not stored."""

    of: ProductRunner
    number: int
    _gradients: dict[str, StepGradient] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        return f"{self.of.name}|{self.number} {STEP}"

    @cached_property
    def step(self) -> TrainedStep:
        """The step without tensors, as that of a call without rows."""
        return self.of.operations((0,), torch.device("meta")).steps[self.number]

    @property
    def graph(self) -> Graph:
        return self.step.step.whole.run.graph

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """Those of the step's arguments, among which are the operands of its products."""
        own = {i.name: spec_of(self.graph, i) for i in self.graph.inputs}
        return tuple(own.get(name) or Spec(name, Role.ROW) for name in self.step.names)

    def made(self, tensors: list[torch.Tensor], lead: tuple[int, ...]) -> Made:
        return self.step.step.whole.run.made(tensors, lead)

    def trained(self, values: tuple, lead: tuple[int, ...], device: torch.device) -> TrainedStep:
        """The step of a call with tensors such as these."""
        return self.of.trained(self, values, lead, device).steps[self.number]

    def computed(
        self, values: tuple, lead: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        _refuse_tangents(self, values)
        found = dict(zip(self.step.names, values, strict=True))
        return tuple(self.trained(values, lead, device).computed(found))

    def gradient(self, needed: frozenset[str], cotangents: tuple[str, ...]) -> StepGradient:
        """The gradients of the arguments that need one, for the cotangents of these results."""
        present = tuple(name in cotangents for name in self.step.results)
        name = part_name(tuple(n for n in self.step.names if n in needed), frozenset(), present)
        return self._gradients.setdefault(name, StepGradient(self, name, needed, cotangents))

    def gradient_named(self, name: str) -> StepGradient:
        """The same, of which this is the end of the name."""
        needed, _, present = name.split(";")
        both = zip(self.step.results, present, strict=True)
        cotangents = tuple(result for result, is_there in both if is_there == "1")
        return self.gradient(frozenset(needed.split(",")), cotangents)


@dataclass(frozen=True, eq=False)
class StepGradient(Operation):
    """The gradients of a step, whose products are computed again in chunks of rows.

    A gradient that is a cotangent as it is, of which `same` tells, is no result.
    """

    of: StepForward
    part: str
    needed: frozenset[str]
    cotangents: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.of.name}|{self.part}"

    @property
    def graph(self) -> Graph:
        return self.of.graph

    @cached_property
    def _gradient(self) -> Gradient | None:
        return gradient_of(self.of.step.step, self.needed, self.cotangents)

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        return *self.of.specs, *(Spec(name, Role.ROW) for name in self.cotangents)

    @cached_property
    def same(self) -> dict[str, str]:
        """For some arguments the result whose cotangent is their gradient."""
        found = self._gradient.same if self._gradient is not None else {}
        return {name: result for name, result in found.items() if name in self.needed}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The arguments whose gradients are computed."""
        found = self._gradient
        if found is None:
            return ()
        products = [p for p in self.of.step.step.products if found.has(p)]
        names = {*found.names, *(name for p in products for name in (p.left, p.matrix))}
        return tuple(n for n in self.of.step.names if n in self.needed and n in names)

    def made(self, tensors: list[torch.Tensor], lead: tuple[int, ...]) -> Made:
        is_tensor = [spec.name for spec in self.of.specs if spec.role not in NO_TENSORS]
        of = dict(zip(is_tensor, tensors, strict=False))
        return tuple((of[name].shape, of[name].dtype) for name in self.names)

    def computed(
        self, values: tuple, lead: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        _refuse_tangents(self, values)
        count = len(self.of.specs)
        step = self.of.trained(values[:count], lead, device)
        found = dict(zip(step.names, values[:count], strict=True))
        given = dict(zip(self.cotangents, values[count:], strict=True))
        with torch.autocast(device.type, enabled=False):
            gradients = step.gradients(found, self.needed, given)
        return tuple(gradients[name].contiguous() for name in self.names)


@dataclass(frozen=True, eq=False)
class StoredProduct(Operation):
    """A product of rows and a matrix, in float32."""

    of: ProductRunner
    step: ProductStep
    product: Product
    part: str

    @property
    def name(self) -> str:
        return f"{self.of.name}|{self.part}"

    @property
    def graph(self) -> Graph:
        return self.of.graph

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        return Spec(self.product.left, Role.ROW), Spec(self.product.matrix, Role.ROW)

    def made(self, tensors: list[torch.Tensor], lead: tuple[int, ...]) -> Made:
        n = tensors[1].shape[0 if self.product.is_transposed else 1]
        return (((*lead, n), torch.float32),)

    def computed(
        self, values: tuple, lead: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        _refuse_tangents(self, values)
        trained = self.of.trained(self, values, lead, device)
        found = dict(zip((self.product.left, self.product.matrix), values, strict=True))
        return (trained.product(self.step, self.product, found),)


class Operations(TrainedProducts):
    """The results of a call as those of operations."""

    def __init__(self, runner: ProductRunner, request: Request, device: torch.device):
        self.runner = runner
        super().__init__(request, device)

    def launched(self, request: Request) -> None:
        """Each operation has kernels of its own."""

    def step(self, step: ProductStep) -> StepOfOperations:
        return StepOfOperations(self, step)

    def part(self, step: ProductStep, *which: object) -> Operation:
        """The operation of a step that has this name."""
        return self.runner.parts[" ".join(map(str, (self.runner.steps.index(step), *which)))]

    def product(self, step: ProductStep, product: Product, found: Values) -> torch.Tensor:
        left, matrix = found[product.left], found[product.matrix]
        operation = self.part(step, PRODUCT, step.products.index(product))
        return operation((left, matrix), left.shape[:1])[0]


class StepOfOperations(TrainedStep):
    """A step whose results and gradients are those of operations."""

    of: Operations

    @cached_property
    def _operation(self) -> StepForward:
        return self.of.part(self.step, STEP)

    def __call__(self, found: Values) -> None:
        if is_inside_transform(tuple(found[name] for name in self.names)):
            self.of.run_stored(self.step, found)
        else:
            super().__call__(found)

    def _is_stored(self, gradient: Gradient) -> bool:
        """As outside; torch traces anew where the number of rows changes that.

        For an exported program, in which the call stays as it is, only shapes are asked for now.
        """
        return not is_exporting() and super()._is_stored(gradient)

    def computed(self, found: Values) -> list[torch.Tensor]:
        values = tuple(found[name] for name in self.names)
        return [*self._operation(values, (self.of.rows,))]

    def gradients(self, found: Values, needed: frozenset[str], cotangents: Tensors) -> Tensors:
        operation = self._operation.gradient(needed, tuple(cotangents))
        made = {n: cotangents[g].reshape(found[n].shape) for n, g in operation.same.items()}
        if operation.names:
            values = *(found[name] for name in self.names), *cotangents.values()
            made |= zip(operation.names, operation(values, (self.of.rows,)), strict=True)
        return made


_TRANSFORMED: WeakKeyDictionary[Graph, ProductRunner] = WeakKeyDictionary()


def trained_products(request: Request) -> TrainedProducts:
    """What gives the results of a call that is differentiated, for values of the parameters."""
    if not is_inside_transform(request.values):
        return TrainedProducts(request)
    traced = request.specialization.traced
    runner = _TRANSFORMED.get(traced) or _TRANSFORMED.setdefault(traced, ProductRunner(request))
    return runner.operations(request.call.lead, device_of(request.signature, request.values))
