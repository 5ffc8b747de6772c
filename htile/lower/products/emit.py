"""Prints the kernel of products and of what is computed of them, over the primitives of matmul.py.

What is printed for each element is what a row kernel has (`emission/expressions.py`). Only where
values come from and go to differs: a product is read from the accumulators of a tile.
`emit_warp.py` prints the kernel for architectures without wgmma.
"""

from __future__ import annotations

import re

import torch

from ...frontend.graph import Output, Role
from ...frontend.ops import dtype_name
from ..emission.expressions import CUTLASS_TYPES, INDENT, lines_of, tuple_of, wrapped_call
from ..emission.names import kernel_name
from ..work import Work
from .body import Body
from .fused import Fused, Tile


def emit(kernel: Fused, tile: Tile, major: str, in_pairs: bool, fastmath: bool = False) -> str:
    """The text of the kernel, its host function and the arguments that it is compiled with.

    major: "k" if the matrices lie in memory as (N, K), "mn" if they do as (K, N).
    in_pairs: whether two neighbours of what is read beside them may be loaded at a time.
    """
    return Text(kernel, tile, major, in_pairs, fastmath).whole()


def computed(kernel: Fused, fastmath: bool = False) -> tuple[dict[int, str], dict[int, str]]:
    """The names of a kernel's values in its text, and the expressions of those it computes."""
    text = Text(kernel, Tile(0), "k", False, fastmath)
    text.whole()
    made = {id: step for id, step in text.computes.items() if id in text.values}
    expressions = {id: text._expression(kernel.graph[id], step) for id, step in made.items()}
    return text.values, expressions


class Text(Body):
    """The text of a kernel; a subclass prints other ways to multiply."""

    primitives = "from htile.matmul import MatmulKernelContext, MatmulTileConfig"
    launched_with = ("clusters: Int32", "stream: cuda.CUstream")
    given_last = ("Int32(1)",)  # what stands for the clusters

    def __init__(self, kernel: Fused, tile: Tile, major: str, in_pairs: bool, fastmath: bool):
        self.kernel, self.tile, self.graph = kernel, tile, kernel.graph
        self.major, self.in_pairs = major, in_pairs
        self.work = Work(kernel.graph, fastmath, in_tiles=True)
        self.name = kernel_name(kernel.graph)
        self.counts: dict[str, int] = {}
        self.values: dict[int, str] = {}
        self.depths: dict[int, int] = {}
        self.tensors = {i.id: self._named("m", i.name) for i in kernel.others}
        self.results = [self._named("m", o.name) for o in self.graph.outputs]
        self.dtype = CUTLASS_TYPES[self._left_dtype()]
        self.staged = self._staged()

    def _staged(self) -> Output | None:
        """The result that is stored as whole tiles."""
        return self.kernel.staged

    def _left_dtype(self) -> torch.dtype:
        return self.kernel.operands[0].product.dtype

    def _named(self, prefix: str, name: str) -> str:
        camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        return self._numbered(prefix + camel + "_")

    def _numbered(self, what: str) -> str:
        count = self.counts[what] = self.counts.get(what, -1) + 1
        return f"{what}{count}"

    def whole(self) -> str:
        parts = [
            self._config(), self._loop(), self._kernel(), self._host(), self._fake_arguments(),
        ]  # fmt: skip
        text = "\n\n\n".join("\n".join(part) for part in parts if part)
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
            *(["import cutlass"] if "cutlass." in text else []),
            "import cutlass.cute as cute",
            f"from cutlass import {', '.join(types)}",
            "",
            *sorted([
                *(["from htile.compute import math"] if "math." in text else []),
                "from htile.compute.tile_rows import TileRows",
                self.primitives,
                "from htile.utils import make_fake_tensor"
                + (", transposed" if "transposed(" in text else ""),
            ]),
        ]  # fmt: skip

    def _config(self) -> list[str]:
        tile, kernel, staged = self.tile, self.kernel, self.staged
        args = [
            self.dtype,
            f"tile=({tile.rows}, {tile.columns})",
            f"cluster=({tile.cluster}, {kernel.shares})",
            f"stages={tile.stages}",
            f"products={len(kernel.operands)}",
            f'majors=("{self.major}",)',
            f"chunk={kernel.chunk}",
            f"stored={CUTLASS_TYPES[staged.dtype] if staged else None}",
            *([f"a_rows={tile.a_rows}"] if tile.a_rows else []),
            f"warp_groups={tile.warp_groups}",
            *(["in_turns=True"] if tile.in_turns else []),
            *([f"parts={tile.parts}"] if tile.parts > 1 else []),
            *([f"exchanges={len(kernel.exchanges)}"] if kernel.exchanges else []),
            *([f"words={max(kernel.exchanges)}"] if kernel.exchanges else []),
        ]
        return wrapped_call("config = MatmulTileConfig(", args, ")")

    # The kernel

    def _kernel(self) -> list[str]:
        params = [*self._operands(), *self._tensors()]
        params += ["tiled_mma: cute.TiledMma", "tiles_m: Int32", "tiles_n: Int32", "rows_m: Int32"]
        head = wrapped_call(f"def {self.name}_kernel(", params, "):")
        return ["@cute.kernel", *head, *self._tiles()]

    def _operands(self) -> list[str]:
        """The parameters for both operands, and for the result that is stored as whole tiles."""
        atoms = ["left", *self._rights(), *(["out"] if self.staged else [])]
        both = [p for a in atoms for p in (f"{a}_atom: cute.CopyAtom", f"{a}: cute.Tensor")]
        return both + [f"{atom}: cute.CopyAtom" for atom in self._narrow_atoms()]

    def _rights(self) -> list[str]:
        return [f"right{k}" for k in range(len(self.kernel.operands))]

    def _tiles(self) -> list[str]:
        """The statements of the kernel."""
        setup = [
            "(left_atom, left)", tuple_of(f"({each}_atom, {each})" for each in self._rights()),
            "(out_atom, out)" if self.staged else "None", "tiled_mma", "(tiles_m, tiles_n)",
            f"(rows_m, {self.kernel.n})",
            *([tuple_of(self._narrow_atoms())] if self.tile.parts > 1 else []),
        ]  # fmt: skip
        tensors = [name.split(":")[0] for name in self._tensors()]
        work, first = f"{self.name}_tiles(", ["ctx", "tile", *tensors]
        loops = wrapped_call(f"        {work}", first, ")")
        if self.tile.parts > 1:
            loops = wrapped_call(f"        tile = {work}", first, ")")
            loops += wrapped_call(f"        {work}", ["ctx.narrow", "tile", *tensors], ")")
        return [
            "    ctx = MatmulKernelContext(config)",
            *wrapped_call("    ctx.setup(", setup, ")"),
            "    cute.arch.griddepcontrol_wait()  # the kernel before has ended",
            "    if ctx.is_loader:",
            "        ctx.load_tiles()",
            "    else:",
            "        tile = ctx.begin()",
            *loops,
            "        ctx.end()",
            "    cute.arch.griddepcontrol_launch_dependents()  # the next may start",
        ]

    def _narrow_atoms(self) -> list[str]:
        """What loads the matrices' parts of narrower tiles, if there are any."""
        count = len(self.kernel.operands) if self.tile.parts > 1 else 0
        return [f"right{k}_narrow" for k in range(count)]

    def _loop(self) -> list[str]:
        """The function that works on the tiles of a context, wide or narrow ones."""
        args = ["ctx", "ctx.index_of(tile)", *(["tile"] if self.kernel.exchanges else [])]
        return [
            "@cute.jit",
            *wrapped_call(f"def {self.name}_tiles(", ["ctx", "tile", *self._tensors()], "):"),
            "    while ctx.index_of(tile) < ctx.total:",
            f"        rows = TileRows({', '.join(args)})",
            *self._body(INDENT * 2),
            "        tile += ctx.step",
            "    return tile",
        ]

    def _tensors(self) -> list[str]:
        """The parameters of the kernel that the work on a tile has."""
        results = zip(self.results, self.graph.outputs, strict=True)
        direct = [f"{n}: cute.Tensor" for n, o in results if o is not self.staged]
        return self._given() + direct

    def _given(self) -> list[str]:
        """The parameters that are no products."""
        kind = {Role.SCALAR: "Float32"}
        return [f"{self.tensors[i.id]}: {kind.get(i.role, 'cute.Tensor')}"
                for i in self.kernel.others]  # fmt: skip

    def _multiplied(self, loads: list[str], indent: str) -> list[str]:
        """The statement that multiplies, beside those that load something else."""
        return [*loads, f"{indent}ctx.multiply(tile)"]

    # The host function

    def _host(self) -> list[str]:
        kernel, outputs, staged = self.kernel, self.graph.outputs, self.staged
        count = len(kernel.operands)
        params = ["mLeft: cute.Tensor", *(f"mRight{k}: cute.Tensor" for k in range(count))]
        params += self._given() + [f"{name}: cute.Tensor" for name in self.results]
        params += self.launched_with
        lines, passed = self._passed()
        passed += [self.tensors[i.id] for i in kernel.others]
        passed += [n for n, o in zip(self.results, outputs, strict=True) if o is not staged]
        lines.append(f"    tiles_m, tiles_n = config.tiles(mLeft.shape[0], {kernel.n})")
        passed += ["config.tiled_mma()", "Int32(tiles_m)", "Int32(tiles_n)"]
        passed += ["Int32(mLeft.shape[0])"]
        launch = [
            *self._grid(),
            "stream=stream",
            *(["use_pdl=True"] if self.tile.is_dependent else []),
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

    def _passed(self) -> tuple[list[str], list[str]]:
        """What the host function does with operands, and what it passes of them to the kernel."""
        lines, passed = ["    left_atom, left = config.left_atom(mLeft)"], ["left_atom", "left"]
        for name, matrix in zip(self._rights(), self._matrices(), strict=True):
            lines.append(f"    {name}_atom, {name} = config.right_atom({matrix})")
            passed += [f"{name}_atom", name]
        if self.staged:
            name = self.results[self.graph.outputs.index(self.staged)]
            lines.append(f"    out_atom, out = config.store_atom({name})")
            passed += ["out_atom", "out"]
        for name, matrix in zip(self._narrow_atoms(), self._matrices(), strict=False):
            lines.append(f"    {name}, _ = config.narrow.right_atom({matrix})")
            passed.append(name)
        return lines, passed

    def _matrices(self) -> list[str]:
        """The matrices as (N, K)."""
        names = [f"mRight{k}" for k in range(len(self.kernel.operands))]
        return names if self.major == "k" else [f"transposed({name})" for name in names]

    def _grid(self) -> list[str]:
        return [
            "grid=[*config.cluster, cutlass.min(clusters, tiles_m * tiles_n)]",
            "block=config.block",
            "cluster=[*config.cluster, 1]",
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
                width, step = n, 8 if output is self.staged else 2 if n % 2 == 0 else 1
            else:
                step = 1
            args.append(f"make_fake_tensor({dtype}, (m, {width}), {step})")
        args += self.given_last
        return [
            "def fake_arguments():",
            '    """What stands for the tensors when the kernel is compiled."""',
            "    m = cute.sym_int()",
            *wrapped_call("    return (", args, ")"),
        ]
