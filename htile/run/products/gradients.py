"""Calls with matrix products whose results autograd differentiates.

What is before and after the products are row functions, which have kernels for their gradients. The
gradients of a product are two products more, by torch. Products are computed again in chunks for
them, or stored once in float32; `chunks.py` has the former, and says when.
"""

from __future__ import annotations

import math

import torch
from torch.autograd import forward_ad

from ...errors import UnsupportedError
from ...lower.products.levels import Product
from ..differentiation.autograd import with_gradients
from ..launch import Request
from ..operands import device_of, runs_kernels
from ..vmap import shared_by_rows
from .calls import OF_ROWS, ProductLaunch, ProductStep, RowStep, key_of, steps_of
from .chunks import TrainedStep
from .operands import Values, flat


class TrainedProducts:
    """The results of calls of one kind, for values of the function's parameters.

    launch: what runs their kernels on a GPU; None on other devices.
    """

    def __init__(self, request: Request, device: torch.device | None = None):
        self.device = device or device_of(request.signature, request.values)
        traced = request.specialization.traced
        self.launch = self.launched(request)
        self.names, self.lead = request.signature.names, request.call.lead
        self.rows = math.prod(self.lead)
        self.inner = {s.name: s.inner for s in request.call.specs if s.role in OF_ROWS}
        self.results = tuple(output.name for output in traced.outputs)
        self.shapes = [shape for shape, _ in request.specialization.shapes(self.lead)]
        self.steps = [self.step(step) if isinstance(step, ProductStep) else step
                      for step in steps_of(request)]  # fmt: skip

    def launched(self, request: Request) -> ProductLaunch | None:
        return ProductLaunch(request, self.device) if runs_kernels(self.device) else None

    def step(self, step: ProductStep) -> TrainedStep:
        return TrainedStep(self, step)

    def __call__(self, values: tuple) -> list[torch.Tensor]:
        found: Values = dict(zip(self.names, values, strict=True))
        for name, inner in self.inner.items():
            found[name] = flat(found[name], (*self.lead, *inner), (self.rows, *inner))
        for step in self.steps:
            if isinstance(step, TrainedStep):
                step(found)
            else:
                self._run_rows(step, found)
        made = (found[key_of(name, self.results)] for name in self.results)
        return [each.reshape(shape) for each, shape in zip(made, self.shapes, strict=True)]

    def product(self, step: ProductStep, product: Product, found: Values) -> torch.Tensor:
        """The product of some rows and a matrix, in float32."""
        left, matrix = found[product.left], found[product.matrix]
        if self.launch is None:
            right = matrix.t() if product.is_transposed else matrix
            return torch.mm(left.double(), right.double()).float()
        kernel = step.alone[step.products.index(product)]
        return self.launch.stored(kernel, product, {product.left: left, product.matrix: matrix})

    def run_stored(self, step: ProductStep, found: Values) -> None:
        """Add the results of a step to `found`; its products are stored for the backward pass."""
        for product in step.products:
            operands = found[product.left], found[product.matrix]
            found[product.name] = _Product.apply(self, step, product, *operands)
        self._run_rows(step.whole, found)

    def _run_rows(self, step: RowStep, found: Values) -> None:
        given = tuple(found[name] for name in step.run.parameters.names)
        results = with_gradients(step.run, given, (self.rows,))
        for name, result in zip(step.results, results, strict=True):
            found[key_of(name, self.results)] = result


class _Product(torch.autograd.Function):
    """The product of rows (M, K) and a matrix, in float32."""

    @staticmethod
    def forward(of: TrainedProducts, step: ProductStep, product: Product, left, matrix):
        return of.product(step, product, {product.left: left, product.matrix: matrix})

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, product, left, matrix = inputs
        ctx.save_for_backward(left, matrix)
        ctx.save_for_forward(left, matrix)
        ctx.is_transposed = product.is_transposed

    @staticmethod
    def backward(ctx, gradient):
        left, matrix = ctx.saved_tensors
        gradient = gradient.to(left.dtype)
        of_left = of_matrix = None
        with torch.autocast(left.device.type, enabled=False):
            if ctx.needs_input_grad[3]:
                of_left = torch.mm(gradient, matrix if ctx.is_transposed else matrix.t())
            if ctx.needs_input_grad[4]:
                of_matrix = torch.mm(left.t(), gradient)
                of_matrix = of_matrix.t() if ctx.is_transposed else of_matrix
        return None, None, None, of_left, of_matrix

    @staticmethod
    def jvp(ctx, *tangents):
        of_left, of_matrix = tangents[3:]
        # torch turns forward mode off here, for the transforms around this one, too. With it, the
        # operands are to be without the tangents that they have in this one. torch has one level of
        # tangents, which a compiled graph does not tell forward_ad of.
        with forward_ad._set_fwd_grad_enabled(True):
            saved = ctx.saved_tensors
            left, matrix = (forward_ad.unpack_dual(each, level=0).primal for each in saved)
            terms = []
            for a, b in ((of_left, matrix), (left, of_matrix)):
                if a is not None and b is not None:
                    terms.append(torch.mm(a, b.t() if ctx.is_transposed else b).float())
            return sum(terms)

    @staticmethod
    def vmap(info, in_dims, of, step, product, left, matrix):
        if in_dims[4] is not None:
            raise UnsupportedError(shared_by_rows(step.whole.run.graph.name, product.matrix))
        rows = left.movedim(in_dims[3], 0)
        found = _Product.apply(of, step, product, rows.flatten(0, 1), matrix)
        return found.unflatten(0, rows.shape[:2]), 0
