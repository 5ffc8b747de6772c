"""Gradients of products by chunks of rows, so that no product is stored as a whole.

Forward runs the kernels of a call without gradients, and keeps nothing but its arguments. Backward
goes from one chunk of rows to the next: it computes the products of a chunk again, in float32, then
a row kernel gives their gradients and those of all else that the step reads, and torch multiplies
the former by the rows and by the matrices.

The gradient of a product is rounded to the dtype of the operands for these two products, as that
of a linear layer's result is in torch. This changes each of its elements by at most half a unit of
the last place, up or down, so the sums over them are about as exact as their own rounding is. Sums
over chunks are float32, in the order of the chunks, and are rounded once.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

import torch

from ..differentiation.autograd import refuse_mapped
from .calls import OF_ROWS, ProductStep, key_of
from .derivatives import Gradient, gradient_of
from .operands import GIVES_FLOAT32, Values

if TYPE_CHECKING:
    from .gradients import TrainedProducts

Tensors = dict[str, torch.Tensor]  # by argument, or by result

CHUNK_BYTES = 2**27  # that the temporary values of a chunk may take, whatever the matrices are
CHUNK_STEP = 128  # rows that a chunk has a multiple of, if it has as many: they fill tiles
FLOPS_PER_BYTE = 200  # operations of tensor cores in the time of a byte of memory: 790 T / 4 T
STORED_SHARE = 4  # times the bytes of the rows before and after them that stored products may take


class TrainedStep:
    """The results and gradients of one step with products, for calls of one kind.

    names: the arguments of the step, operands of its products among them. results: its results.
    """

    def __init__(self, of: TrainedProducts, step: ProductStep):
        self.of, self.step, self.results = of, step, step.whole.results
        graph = step.whole.run.graph
        widths = {i.name: graph[i.id].value.inner[-1:] for i in graph.inputs}
        self._widths = {p.name: widths[p.name][0] for p in step.products}
        arguments = [i for i in graph.inputs if i.name not in self._widths]
        operands = [name for p in step.products for name in (p.left, p.matrix)]
        self.names = tuple(dict.fromkeys([*(i.name for i in arguments), *operands]))
        sizes = {i.name: prod(graph[i.id].value.inner) * i.dtype.itemsize
                 for i in arguments if i.role in OF_ROWS}  # fmt: skip
        sizes |= {p.left: p.k * p.dtype.itemsize for p in step.products}
        self._of_rows = frozenset(sizes)
        self._over_rows = frozenset(o.name for o in graph.outputs if o.over is not None)
        self._row_bytes = sum(sizes.values()) + sum(
            prod(o.inner) * o.dtype.itemsize for o in graph.outputs if o.over is None
        )
        matrices = {p.matrix: p.k * self._widths[p.name] * p.dtype.itemsize for p in step.products}
        self._matrix_bytes = sum(matrices.values())

    def __call__(self, found: Values) -> None:
        """Add the results to `found`; autograd knows how they depend on what is there."""
        values = tuple([found[name] for name in self.names])
        needed = frozenset()
        if torch.is_grad_enabled():
            tensors = ((n, v) for n, v in zip(self.names, values, strict=True)
                       if isinstance(v, torch.Tensor))  # fmt: skip
            needed = frozenset(name for name, value in tensors if value.requires_grad)
        gradient = gradient_of(self.step, needed) if needed else None
        if gradient is None:
            with torch.no_grad():
                results = self.computed(dict(found))
        elif self._is_stored(gradient):
            self.of.run_stored(self.step, found)
            return
        else:
            results = _InChunks.apply(self, gradient.results, *values)
        for name, result in zip(self.results, results, strict=True):
            found[key_of(name, self.of.results)] = result

    def _is_stored(self, gradient: Gradient) -> bool:
        """Whether the products are stored for the backward pass, which else multiplies again.

        To store a product moves 4 bytes an element more than to have it in chunks, because forward
        would not write it. To multiply again takes less time than that if K is small. Otherwise it
        takes a third more products. That is saved where those that are stored take no more memory
        than a chunk would, or not much more than the rows that are there before and after them, as
        in a layer. Logits take many times that. Gradients of tables need a row kernel of its own.
        """
        if gradient.has_tables:
            return True
        read = [p for p in self.step.products if gradient.reads(p)]
        size = sum(self._widths[p.name] * torch.float32.itemsize for p in read)
        if sum(2 * p.k * self._widths[p.name] for p in read) <= size * FLOPS_PER_BYTE:
            return False
        return size * self.of.rows <= CHUNK_BYTES or size <= STORED_SHARE * self._row_bytes

    def _chunks(self, row_bytes: int) -> list[slice]:
        """Which rows each chunk has, if it takes so much temporary memory for a row; one at least.

        Rows that take none are one chunk, because sums over rows are not put together from chunks.

        A chunk may take as much as the matrices. The float32 sums of their gradients are rounded
        into as much memory, when the last chunk's is free again. With K = 4096 this is about 1300
        rows, with which all products of a chunk take five times as long as adding to these sums.
        """
        rows = self.of.rows
        if not row_bytes:
            return [slice(0, rows)]
        size = max(CHUNK_BYTES, self._matrix_bytes) // row_bytes
        size = max(1, size - size % CHUNK_STEP if size > CHUNK_STEP else size)
        return [slice(k, min(k + size, rows)) for k in range(0, max(rows, 1), size)]

    def _part(self, found: Values, rows: slice) -> Values:
        """The arguments of a chunk."""
        return {name: found[name][rows] if name in self._of_rows else found[name]
                for name in self.names}  # fmt: skip

    # Forward

    def computed(self, found: Values) -> list[torch.Tensor]:
        """The results, as a call without gradients computes them.

        Where no kernel computes them without storing the products, these are stored in chunks.
        """
        launch, run = self.of.launch, self.step.whole.run
        if launch is not None and launch.run_fused(self.step, found):
            made = [found[key_of(name, self.of.results)] for name in self.results]
            shapes = run.shapes((self.of.rows,))
            return [each.reshape(shape) for each, shape in zip(made, shapes, strict=True)]
        row_bytes = sum(self._widths.values()) * torch.float32.itemsize
        chunks = self._chunks(0 if self._over_rows else row_bytes)
        parts = [self._computed_in(found, rows) for rows in chunks]
        if len(parts) == 1:
            return [*parts[0]]
        with torch.autocast(self.of.device.type, enabled=False):  # which casts what torch.cat takes
            return [torch.cat(each) for each in zip(*parts, strict=True)]

    def _computed_in(self, found: Values, rows: slice) -> tuple[torch.Tensor, ...]:
        part, run = self._part(found, rows), self.step.whole.run
        for product in self.step.products:
            part[product.name] = self.of.product(self.step, product, part)
        return run(tuple([part[name] for name in run.parameters.names]), (rows.stop - rows.start,))

    # Backward

    def gradients(self, found: Values, needed: frozenset[str], cotangents: Tensors) -> Tensors:
        """The gradients of the arguments that need one, for the cotangents of some results."""
        gradient = gradient_of(self.step, needed, tuple(cotangents))
        if gradient is None:
            return {}
        row_bytes = sum(
            self._widths[p.name] * torch.float32.itemsize * gradient.reads(p)
            + self._widths[p.name] * p.dtype.itemsize * (p.name in gradient.names)
            for p in self.step.products
        )
        chunks = self._chunks(row_bytes)
        sums = _Gradients(found, self.of.rows, len(chunks))
        for rows in chunks:
            given = {name: g if name in self._over_rows else g[rows]
                     for name, g in cotangents.items()}  # fmt: skip
            self._add_chunk(sums, rows, gradient, self._part(found, rows), needed, given)
        return sums.results()

    def _add_chunk(
        self, sums: _Gradients, rows: slice, gradient: Gradient, part: Values,
        needed: frozenset[str], cotangents: Tensors,
    ) -> None:  # fmt: skip
        """Add what a chunk of rows contributes. Its temporary memory is free again afterwards."""
        made = self._by_rows(gradient, part, cotangents, rows.stop - rows.start)
        for name in gradient.over_rows:
            sums.add(name, made.pop(name))
        products = [p for p in self.step.products if gradient.has(p)]
        terms = Counter(name for p in products for name in (p.left, p.matrix))
        terms.update(made.keys())
        of_products = [made.pop(product.name) for product in products]
        for product, g in zip(products, of_products, strict=True):
            left, matrix = part[product.left], part[product.matrix]
            if product.left in needed:
                dtype = left.dtype if terms[product.left] == 1 else torch.float32
                right = matrix if product.is_transposed else matrix.t()
                made[product.left] = multiplied(g, right, dtype, made.get(product.left))
            if product.matrix in needed:
                operands = (g.t(), left) if product.is_transposed else (left.t(), g)
                sums.add_product(product.matrix, *operands, terms[product.matrix] == 1)
        for name, g in made.items():
            sums.put(name, rows, g)

    def _by_rows(self, gradient: Gradient, part: Values, cotangents: Tensors, rows: int) -> Tensors:
        """The gradients that a row kernel gives for a chunk, and those that are cotangents."""
        made = {name: cotangents[result] for name, result in gradient.same.items()}
        run = gradient.run
        if run is not None:
            read = [p for p in self.step.products if gradient.reads(p)]
            part = part | {p.name: self.of.product(self.step, p, part) for p in read}
            both = zip(run.parameters.names, gradient.sources, strict=True)
            values = [part[name] if of is None else cotangents[of] for name, of in both]
            made |= zip(gradient.names, run(tuple(values), (rows,)), strict=True)
        return made

    def gradients_again(
        self, found: Values, needed: frozenset[str], cotangents: Tensors
    ) -> Tensors:
        """The same as autograd differentiates it again. For that the products are stored."""
        with torch.enable_grad():
            # The gradient of an argument is not to go through others that were computed of it.
            found = found | {name: found[name].view_as(found[name]) for name in needed}
            inputs = {name: found[name] for name in needed}
            self.of.run_stored(self.step, found)
            results = {name: found[key_of(name, self.of.results)] for name in cotangents}
            names = [name for name, result in results.items() if result.requires_grad]
            gradients = torch.autograd.grad(
                [results[n] for n in names], [*inputs.values()], [cotangents[n] for n in names],
                create_graph=True, allow_unused=True,
            )  # fmt: skip
        return dict(zip(inputs, gradients, strict=True))


class _Gradients:
    """The gradients of a step's arguments, as chunks of rows give them one after the other."""

    def __init__(self, like: Values, rows: int, chunks: int):
        self._like, self._rows, self._chunks = like, rows, chunks
        self._found: Tensors = {}

    def put(self, name: str, rows: slice, part: torch.Tensor) -> None:
        """The gradient of some rows."""
        if self._chunks == 1:
            self._found[name] = part
            return
        like = self._like[name]
        if name not in self._found:
            self._found[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._found[name][rows] = part.reshape(len(part), *like.shape[1:])

    def add(self, name: str, part: torch.Tensor) -> None:
        """What a chunk adds to a gradient, in float32."""
        self._found[name] = self._found[name].add_(part) if name in self._found else part

    def add_product(self, name: str, a: torch.Tensor, b: torch.Tensor, is_only: bool) -> None:
        """The same as a product, which may be the only one of the chunk."""
        is_all = is_only and self._chunks == 1
        dtype = self._like[name].dtype if is_all else torch.float32
        self._found[name] = multiplied(a, b, dtype, self._found.get(name))

    def results(self) -> Tensors:
        """All gradients, in the dtypes and shapes of the arguments."""
        made = {}
        for name in [*self._found]:  # and the memory of each sum is free when it is rounded
            like = self._like[name]
            made[name] = self._found.pop(name).to(like.dtype).reshape(like.shape)
        return made


def multiplied(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, total: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of two matrices in this dtype, added to a float32 `total` if there is one."""
    if not a.is_cuda:
        exact = torch.mm(a.double(), b.double())
        return exact.to(dtype) if total is None else total.add_(exact)
    if not GIVES_FLOAT32 and (total is not None or dtype is not a.dtype):
        wide = torch.mm(a.float(), b.float())
        return wide.to(dtype) if total is None else total.add_(wide)
    if total is not None:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return torch.mm(a, b) if dtype is a.dtype else torch.mm(a, b, out_dtype=dtype)


class _InChunks(torch.autograd.Function):
    """A step with products in autograd's graph. It keeps arguments only."""

    @staticmethod
    def forward(ctx, of: TrainedStep, differentiable: tuple[str, ...], *values):
        results = of.computed(dict(zip(of.names, values, strict=True)))
        is_tensor = [isinstance(value, torch.Tensor) for value in values]
        both = [*zip(values, is_tensor, strict=True)]
        ctx.of, ctx.others = of, [None if is_one else value for value, is_one in both]
        ctx.save_for_backward(*(value if is_one else None for value, is_one in both))
        ctx.set_materialize_grads(False)
        both = zip(of.results, results, strict=True)
        ctx.mark_non_differentiable(*(r for name, r in both if name not in differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        of = ctx.of
        refuse_mapped(of.step.whole.run.graph.name, cotangents)
        both = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if tensor is None else tensor for tensor, other in both]
        asked = zip(of.names, ctx.needs_input_grad[2:], strict=True)
        needed = frozenset(name for name, is_asked in asked if is_asked)
        given = {name: g.resolve_neg() for name, g in zip(of.results, cotangents, strict=True)
                 if g is not None}  # fmt: skip
        find = of.gradients_again if torch.is_grad_enabled() else of.gradients
        found = dict(zip(of.names, values, strict=True))
        with torch.autocast(of.of.device.type, enabled=False):
            gradients = find(found, needed, given) if given else {}
        return None, None, *(gradients.get(name) for name in of.names)
