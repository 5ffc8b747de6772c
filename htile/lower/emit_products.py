"""Prints the kernel of products and of what is computed of them, over the primitives of matmul.py.

What is printed for each element is what a row kernel has (`expressions.py`). Only where values come
from and go to differs: a product is read from the accumulators of a tile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ..frontend.dtypes import HALVES
from ..frontend.graph import Graph, Input, Node, Output, Role
from ..frontend.ops import SCANS, Op, dtype_name
from .column_groups import GROUP
from .emit_steps import CONVERTED
from .expressions import (
    CUTLASS_TYPES,
    INDENT,
    lines_of,
    literal,
    located,
    tuple_of,
    wrapped_call,
    wrapped_expression,
    written,
)
from .names import kernel_name
from .patterns import Function
from .products import Product
from .work import Work

ROLES = (Role.ROW, Role.COLUMN, Role.PER_ROW, Role.SCALAR, Role.DEVICE_SCALAR)
LOADED = (*HALVES, torch.float32, torch.int32, torch.int64)  # dtypes of what bodies read
UNFUSED = frozenset({
    Op.LENGTH, Op.TAKE, Op.LOOKUP, Op.BUNDLE, Op.UNBUNDLE, Op.KEY, Op.KEY_INDEX, Op.KEY_VALUE,
}) | SCANS  # fmt: skip
WIDTHS = (1, 2, 4)  # numbers of products that a tile has side by side
CHUNK = 32  # columns that a thread works on at a time where there are no groups


@dataclass(frozen=True)
class Operand:
    """One product of a kernel: the columns from `start` on of a product of the function."""

    input: Input
    product: Product
    start: int


@dataclass(frozen=True)
class Tile:
    """The tile of a kernel; `MatmulTileConfig` says what the numbers are."""

    columns: int
    rows: int = 128
    cluster: int = 1
    stages: int = 4
    a_rows: int = 0
    warp_groups: int = 2


@dataclass(frozen=True)
class Fused:
    """What one kernel computes of the products of one row.

    graph: a placed graph. operands: its inputs that are products. n: their columns, of which the
        graph may have more, for whole groups.
    """

    graph: Graph
    operands: tuple[Operand, ...]
    n: int

    @property
    def chunk(self) -> int:
        """Columns of a chunk: those of a group, if there are groups."""
        return GROUP if self.graph.group_size is not None else CHUNK

    @property
    def others(self) -> list[Input]:
        """The inputs that are no products, in the order in which the host function takes them."""
        return [i for i in self.graph.inputs if i.id not in {o.input.id for o in self.operands}]

    @property
    def staged(self) -> Output | None:
        """The result that is stored as whole tiles: the first of 16 bits whose rows are aligned."""
        if self.graph.group_size is not None or self.n % 8:
            return None
        return next((o for o in self.graph.outputs if o.dtype in HALVES), None)


def fused(graph: Graph, products: tuple[Product, ...], n: int) -> Fused | None:
    """What a placed graph is as one kernel; None where one kernel does not compute it.

    Its products must have one left operand, and its results must be rows, or one number for each
    group. A thread works on one group at a time, so all groups have `GROUP` columns.
    """
    named = {product.name: product for product in products}
    operands = []
    for i in graph.inputs:
        view = i.view
        if view is not None and (len(view.shape) > 1 or not view.is_contiguous or view.groups):
            return None
        if view is not None and (view.width > 1 or view.at is not None):
            return None
        if i.name in named:
            start = 0 if view is None else view.start[0]
            operands.append(Operand(i, named[i.name], start))
        elif i.role not in ROLES or i.dtype not in LOADED:
            return None
    lefts = {o.product.left for o in operands}
    is_whole = all(o.is_row and o.view is None and o.over is None for o in graph.outputs)
    is_body = not any(
        node.op in UNFUSED or (node.op is Op.GROUPED and node.arg[1] != GROUP) for node in graph
    )
    if len(lefts) != 1 or not is_whole or not is_body:
        return None
    if len(operands) not in WIDTHS or any(o.dtype not in LOADED for o in graph.outputs):
        return None
    if any(i.view is not None for i in graph.inputs if i.role not in (Role.ROW, Role.COLUMN)):
        return None
    return Fused(graph, tuple(operands), n)


def emit(kernel: Fused, tile: Tile, major: str, in_pairs: bool, fastmath: bool = False) -> str:
    """The text of the kernel, its host function and the arguments that it is compiled with.

    major: "k" if the matrices lie in memory as (N, K), "mn" if they do as (K, N).
    in_pairs: whether two neighbours of what is read beside them may be loaded at a time.
    """
    return _Text(kernel, tile, major, in_pairs, fastmath).whole()


class _Text:
    def __init__(self, kernel: Fused, tile: Tile, major: str, in_pairs: bool, fastmath: bool):
        self.kernel, self.tile, self.graph = kernel, tile, kernel.graph
        self.major, self.in_pairs = major, in_pairs
        self.work = Work(kernel.graph, fastmath)
        self.name = kernel_name(kernel.graph)
        self.counts: dict[str, int] = {}
        self.values: dict[int, str] = {}
        self.tensors = {i.id: self._named("m", i.name) for i in kernel.others}
        self.results = [self._named("m", o.name) for o in self.graph.outputs]
        self.dtype = CUTLASS_TYPES[self._left_dtype()]

    def _left_dtype(self) -> torch.dtype:
        return self.kernel.operands[0].product.dtype

    def _named(self, prefix: str, name: str) -> str:
        camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        return self._numbered(prefix + camel + "_")

    def _numbered(self, what: str) -> str:
        count = self.counts[what] = self.counts.get(what, -1) + 1
        return f"{what}{count}"

    def whole(self) -> str:
        parts = [self._config(), self._kernel(), self._host(), self._fake_arguments()]
        text = "\n\n\n".join("\n".join(part) for part in parts)
        return "\n".join(self._head(text)) + "\n\n" + text + "\n"

    def _head(self, text: str) -> list[str]:
        count = len(self.kernel.operands)
        types = [t for t in dict.fromkeys(CUTLASS_TYPES.values()) if re.search(rf"\b{t}\b", text)]
        types = sorted({*types, "Int32"})
        return [
            f'"""{self.graph.name}: rows of N = {self.kernel.n}, {count} product'
            f'{"s" * (count > 1)} of {dtype_name(self._left_dtype())}."""',
            "",
            "import cuda.bindings.driver as cuda",
            "import cutlass",
            "import cutlass.cute as cute",
            f"from cutlass import {', '.join(types)}",
            "",
            *(["from htile.compute import math"] if "math." in text else []),
            "from htile.compute.tile_rows import TileRows",
            "from htile.matmul import MatmulKernelContext, MatmulTileConfig",
            "from htile.utils import make_fake_tensor"
            + (", transposed" if "transposed(" in text else ""),
        ]

    def _config(self) -> list[str]:
        tile, kernel = self.tile, self.kernel
        staged = kernel.staged
        args = [
            self.dtype,
            f"tile=({tile.rows}, {tile.columns})",
            f"cluster=({tile.cluster}, 1)",
            f"stages={tile.stages}",
            f"products={len(kernel.operands)}",
            f'majors=("{self.major}",)',
            f"chunk={kernel.chunk}",
            f"stored={CUTLASS_TYPES[staged.dtype] if staged else None}",
            *([f"a_rows={tile.a_rows}"] if tile.a_rows else []),
            f"warp_groups={tile.warp_groups}",
        ]
        return wrapped_call("config = MatmulTileConfig(", args, ")")

    # The kernel

    def _kernel(self) -> list[str]:
        kernel, outputs = self.kernel, self.graph.outputs
        count = len(kernel.operands)
        atoms = ["left", *(f"right{k}" for k in range(count))]
        params = [p for a in atoms for p in (f"{a}_atom: cute.CopyAtom", f"{a}: cute.Tensor")]
        staged = kernel.staged
        params += ["out_atom: cute.CopyAtom", "out: cute.Tensor"] if staged else []
        params += self._given()
        params += [f"{n}: cute.Tensor" for n, o in zip(self.results, outputs, strict=True)
                   if o is not staged]  # fmt: skip
        params += ["tiled_mma: cute.TiledMma", "tiles_m: Int32", "tiles_n: Int32", "rows_m: Int32"]
        rights = tuple_of(f"(right{k}_atom, right{k})" for k in range(count))
        setup = [
            "(left_atom, left)", rights, "(out_atom, out)" if staged else "None", "tiled_mma",
            "(tiles_m, tiles_n)", f"(rows_m, {kernel.n})",
        ]  # fmt: skip
        return [
            "@cute.kernel",
            *wrapped_call(f"def {self.name}_kernel(", params, "):"),
            "    ctx = MatmulKernelContext(config)",
            *wrapped_call("    ctx.setup(", setup, ")"),
            "    cute.arch.griddepcontrol_wait()  # the kernel before has ended",
            "    if ctx.is_loader:",
            "        ctx.load_tiles()",
            "    else:",
            "        ctx.begin()",
            "        index, chunks = ctx.first + 0, Int32(0)",
            "        while index < ctx.total:",
            "            rows = TileRows(ctx, index)",
            *self._body(INDENT * 3),
            "            chunks += ctx.chunks",
            "            index += ctx.stride",
            "        ctx.end()",
            "    cute.arch.griddepcontrol_launch_dependents()  # the next may start",
        ]

    def _given(self) -> list[str]:
        """The parameters that are no products."""
        kind = {Role.SCALAR: "Float32"}
        return [f"{self.tensors[i.id]}: {kind.get(i.role, 'cute.Tensor')}"
                for i in self.kernel.others]  # fmt: skip

    def _body(self, indent: str) -> list[str]:
        """What is computed of a tile: numbers of its rows first, then chunk after chunk."""
        graph, sweeps = self.graph, self.work.held.all
        steps = [*self.work.before, *(step for sweep in sweeps for step in sweep.computes)]
        computes = {step.id: step for step in steps}
        live = {i for step in computes.values() for i in step.inputs}
        live |= {output.id for output in graph.outputs}
        before, inside, deeper = [], [], indent + INDENT
        ahead: list[str] = []  # tensors of which the chunks have elements
        operands = {o.input.id: k for k, o in enumerate(self.kernel.operands)}
        for i in graph.inputs:
            if i.id not in live:
                continue
            if i.id in operands:
                self.values[i.id] = name = self._numbered("product")
                inside.append(f"{deeper}{name} = chunk.read({operands[i.id]})")
            elif i.role in (Role.ROW, Role.COLUMN):
                self.values[i.id] = name = self._numbered("loaded")
                ahead.append(self.tensors[i.id])
                if i.dtype in CONVERTED:
                    inside.append(self._converted(f"{deeper}{name} = ", name, i.dtype))
            elif i.role is Role.SCALAR:
                self.values[i.id] = self.tensors[i.id]
            else:
                self.values[i.id] = name = self._numbered("given")
                tensor = self.tensors[i.id]
                is_one = i.role is Role.DEVICE_SCALAR
                text = f"{tensor}[0]" if is_one else f"rows.load_row_value({tensor})"
                before.append(self._converted(f"{indent}{name} = ", text, i.dtype))
        for id in sorted(computes):
            node, step = graph[id], computes[id]
            if node.op is Op.RESHAPE:
                continue
            lines = inside if node.value.spread else before
            self.values[id] = self._numbered(node.op.value)
            head = f"{deeper if node.value.spread else indent}{self.values[id]} = "
            lines += located(wrapped_expression(head, self._expression(node, step)), node)
        inside += self._stores(deeper)
        lines, loop, taken = [], "rows.chunks()", ["chunk"]
        if ahead:
            args = [*ahead, f"in_pairs={self.in_pairs}"]
            lines = wrapped_call(f"{indent}ahead = rows.prefetch(", args, ")")
            loop = "rows.chunks(ahead)"
            taken += [f"loaded{k}" for k in range(len(ahead))]
        lines += [*before, f"{indent}ctx.multiply(chunks)"]
        return [*lines, f"{indent}for {', '.join(taken)} in {loop}:", *inside]

    def _converted(self, start: str, text: str, dtype: torch.dtype) -> str:
        kind = CONVERTED.get(dtype)
        return f"{start}math.convert({text}, {kind})" if kind else start + text

    def _expression(self, node: Node, step) -> str:
        function, inputs = step.function, step.inputs
        if function is Function.FOURS:  # a thread has pairs of neighbours
            function = Function.EXACT
        args = tuple(self._operand(i, node.value.spread) for i in inputs)
        return written(node, args, function, "chunk")

    def _operand(self, id: int, in_chunk: bool) -> str:
        node = self.graph[id]
        if node.op is Op.RESHAPE:
            return self._operand(node.inputs[0], in_chunk)
        if node.op is Op.CONST:
            return literal(node.arg, node.value.dtype)
        name = self.values[id]
        is_number = not node.value.spread and node.value.varies.value == "row"
        return f"chunk.of({name})" if in_chunk and is_number else name

    def _stores(self, indent: str) -> list[str]:
        lines, kernel = [], self.kernel
        for name, output in zip(self.results, self.graph.outputs, strict=True):
            value = self._operand(output.id, True)
            node = self.graph[output.id]
            if node.op is Op.GROUPED and output.inner != (self.graph.n,):
                lines.append(f"{indent}chunk.store_group({name}, {value})")
            elif output is kernel.staged:
                lines.append(f"{indent}chunk.store({value})")
            else:
                pairs = kernel.n % 2 == 0
                lines.append(f"{indent}chunk.store_direct({name}, {value}, in_pairs={pairs})")
        return lines

    # The host function

    def _host(self) -> list[str]:
        kernel, outputs = self.kernel, self.graph.outputs
        count, staged = len(kernel.operands), kernel.staged
        params = ["mLeft: cute.Tensor", *(f"mRight{k}: cute.Tensor" for k in range(count))]
        params += self._given() + [f"{name}: cute.Tensor" for name in self.results]
        params += ["clusters: Int32", "stream: cuda.CUstream"]
        passed = ["left_atom", "left"]
        lines = ["    left_atom, left = config.left_atom(mLeft)"]
        for k in range(count):
            right = f"mRight{k}" if self.major == "k" else f"transposed(mRight{k})"
            lines.append(f"    right{k}_atom, right{k} = config.right_atom({right})")
            passed += [f"right{k}_atom", f"right{k}"]
        if staged:
            name = self.results[outputs.index(staged)]
            lines.append(f"    out_atom, out = config.store_atom({name})")
            passed += ["out_atom", "out"]
        passed += [self.tensors[i.id] for i in kernel.others]
        passed += [n for n, o in zip(self.results, outputs, strict=True) if o is not staged]
        lines.append(f"    tiles_m, tiles_n = config.tiles(mLeft.shape[0], {kernel.n})")
        passed += ["config.tiled_mma()", "Int32(tiles_m)", "Int32(tiles_n)"]
        passed += ["Int32(mLeft.shape[0])"]
        launch = [
            "grid=[*config.cluster, cutlass.min(clusters, tiles_m * tiles_n)]",
            "block=config.block",
            "cluster=[*config.cluster, 1]",
            "stream=stream",
            "use_pdl=True",
            "min_blocks_per_mp=1",
            "preferred_smem_carveout=-1",
        ]
        return [
            "@cute.jit",
            *wrapped_call(f"def {self.name}(", params, "):"),
            *lines,
            *wrapped_call(f"    {self.name}_kernel(", passed, ").launch("),
            *lines_of(launch, " " * 8),
            "    )",
        ]

    def _fake_arguments(self) -> list[str]:
        kernel, n = self.kernel, self.kernel.n
        operand = kernel.operands[0].product
        k = operand.k
        args = [f"make_fake_tensor({self.dtype}, (m, {k}), 8)"]
        shape = f"({n}, {k})" if self.major == "k" else f"({k}, {n})"
        args += [f"make_fake_tensor({self.dtype}, {shape}, 8)" for _ in kernel.operands]
        for i in kernel.others:
            dtype = CUTLASS_TYPES[i.dtype]
            pair = 2 if self.in_pairs else 1
            if i.role is Role.ROW:
                args.append(f"make_fake_tensor({dtype}, (m, {n}), {pair})")
            elif i.role is Role.COLUMN:
                align = pair * i.dtype.itemsize
                args.append(f"make_fake_tensor({dtype}, ({n},), align={align})")
            elif i.role is Role.SCALAR:
                args.append("Float32(0)")
            elif i.role is Role.DEVICE_SCALAR:
                args.append(f"make_fake_tensor({dtype}, (1,))")
            else:
                args.append(f"make_fake_tensor({dtype}, (m,), any_stride=True)")
        for output in self.graph.outputs:
            dtype, (width,) = CUTLASS_TYPES[output.dtype], output.inner
            if width == self.graph.n:
                width, step = n, 8 if output is kernel.staged else 2 if n % 2 == 0 else 1
            else:
                step = 1
            args.append(f"make_fake_tensor({dtype}, (m, {width}), {step})")
        args.append("Int32(1)")
        return [
            "def fake_arguments():",
            '    """What stands for the tensors when the kernel is compiled."""',
            "    m = cute.sym_int()",
            *wrapped_call("    return (", args, ")"),
        ]
