"""The plan of a kernel of products as text: its tile, who loads and multiplies, what follows."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cached_property

from ...frontend.graph import Input, Output, Role
from ...frontend.ops import REDUCTIONS, Op, dtype_name
from ..emission.expressions import WIDTH
from ..patterns import strip
from .column_groups import GROUP
from .emit import computed
from .fused import Fused, Tile
from .tiles import WARP_K

K_CHUNK = 64  # elements of K that a stage has
OF_TILES = (Role.ROW, Role.COLUMN)  # What chunks read; the others are numbers of a row or of all.


@dataclass(frozen=True)
class ProductPlan:
    """How a kernel of products works: the tile, the stages of K, and what is done with the sums.

    major: whether the matrices lie in memory as (N, K), "k", or as (K, N), "mn".
    """

    kernel: Fused
    tile: Tile
    major: str
    arch: str
    fastmath: bool = False

    @cached_property
    def _computed(self) -> tuple[dict[int, str], dict[int, str]]:
        return computed(self.kernel, self.fastmath)

    @property
    def names(self) -> dict[int, str]:
        """The names of values in the emitted text, by node."""
        return self._computed[0]

    @property
    def title(self) -> str:
        """What it is a plan of."""
        product = self.kernel.operands[0].product
        return f"plan {self.kernel.graph.name}, N = {self.kernel.n}, K = {product.k}, {self.arch}"

    @property
    def left(self) -> str:
        """The name of the left operand."""
        return self.kernel.operands[0].product.left

    @property
    def matrices(self) -> list[str]:
        """The names of the matrices, with the columns of those of which a part is read."""
        parts = [o.product.matrix for o in self.kernel.operands]
        return [f"{o.product.matrix}[{o.start}:{o.start + self.kernel.n}]"
                if parts.count(o.product.matrix) > 1 else o.product.matrix
                for o in self.kernel.operands]  # fmt: skip

    @property
    def columns(self) -> int:
        """Columns of each product in a tile."""
        return self.tile.columns // len(self.kernel.operands)

    @property
    def stage_elements(self) -> int:
        """Elements of K that a stage has."""
        return WARP_K if self.tile.warps else K_CHUNK

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage takes."""
        return 2 * self.stage_elements * (self.tile.rows + self.tile.columns)

    @property
    def workers(self) -> list[str]:
        """Who multiplies, and so stores."""
        kind, count = "warpgroup", self.tile.warp_groups
        if self.tile.warps:
            kind, count = "warp", self.tile.warps
        return [f"{kind} {k}" for k in range(count)]

    @property
    def worker_rows(self) -> int:
        """Rows of a tile that a worker multiplies."""
        return self.tile.rows if self.tile.in_turns else self.tile.rows // len(self.workers)

    @property
    def staged(self) -> Output | None:
        """The result that goes through shared memory."""
        return None if self.tile.warps else self.kernel.staged

    def layout(self) -> list[str]:
        """What is said of the plan as a whole, a line each."""
        tile, kernel = self.tile, self.kernel
        count = len(kernel.operands)
        of = f"{count} products" if count > 1 else "the product"
        order = "(N, K)" if self.major == "k" else "(K, N)"
        dtype = dtype_name(kernel.operands[0].product.dtype)
        numerics = [f"{of} of {self.left} and {', '.join(self.matrices)} {order} in {dtype}",
                    "sums over K in order"]  # fmt: skip
        if kernel.graph.group_size is not None:
            numerics.append(f"groups of {GROUP} columns reduced")
        if kernel.is_whole:
            where = "tile that has" if kernel.shares == 1 else f"{kernel.shares} tiles that have"
            numerics.append(f"rows reduced in the {where} all their columns")
        shape = f"tiles of {tile.rows} rows and {self.columns} columns"
        placement = [shape + " of each product" * (count > 1)]
        if tile.cluster > 1:
            placement.append(f"{tile.cluster} tiles of a cluster share what they load of matrices")
        if kernel.shares > 1:
            placement.append(f"{kernel.shares} tiles of a cluster share what they load of "
                             f"{self.left}, and exchange what they have of each row")  # fmt: skip
        if tile.a_rows:
            placement.append(f"{tile.a_rows} rows are loaded")
        if tile.parts > 1:
            placement.append(f"those of the last wave are cut in {tile.parts}")
        groups = f"{tile.warp_groups} warpgroup{'s' * (tile.warp_groups > 1)}"
        warps = f"1 warp loads, {groups} of 128 threads multiply and store"
        warps += ", each its own tiles, in turns" if tile.in_turns else ""
        if tile.warps:
            warps = f"{tile.warps} warps load, multiply and store"
        return [
            f"numerics   {', '.join(numerics)}",
            f"placement  {', '.join(placement)}",
            f"warps      {warps}",
            f"stages     {tile.stages} of {self.stage_elements} elements of K, "
            f"{self.stage_bytes >> 10} KiB each in shared memory",
        ]

    def loads(self) -> list[tuple[str, str]]:
        """What a stage is loaded from: a name, and how much of it."""
        rows = self.tile.a_rows or self.tile.rows
        k = self.stage_elements
        matrices = [(name, f"{self.columns} x {k}") for name in self.matrices]
        return [(self.left, f"{rows} x {k}"), *matrices]

    def given(self, of_tiles: bool) -> list[Input]:
        """What is read beside products: that of chunks, or numbers of rows and of all."""
        return [i for i in self.kernel.others if (i.role in OF_TILES) == of_tiles]

    def computes(self, of_elements: bool) -> list[str]:
        """What is computed of elements, or once for a row before, as lines.

        Reductions of whole rows, and numbers that depend on them, are among what is of elements.
        """
        graph, (names, expressions) = self.kernel.graph, self._computed
        texts = {id: text.replace("math.", "") for id, text in expressions.items()}
        inside = {node.id for node in graph if node.value.spread}
        if self.kernel.is_whole:
            for node in graph:
                if node.op in REDUCTIONS:
                    of = names[strip(graph, graph[node.inputs[0]]).id]
                    texts[node.id] = f"{node.op.value} of {of} in the row"
                if inside & {*node.inputs}:
                    inside.add(node.id)
        return [
            f"{names[id]} = {text}" for id, text in sorted(texts.items())
            if graph[id].op is not Op.RESHAPE and (id in inside) == of_elements
        ]  # fmt: skip

    def stores(self) -> list[tuple[str, str]]:
        """The results, and how each gets to memory."""
        kernel, found = self.kernel, []
        for output in kernel.graph.outputs:
            of_groups = output.inner != (kernel.graph.n,)
            how = f"a number for each {GROUP} columns" if of_groups else "from registers"
            how = "tiles through shared memory" if output is self.staged else how
            found.append((f"{output.name} ({dtype_name(output.dtype)})", how))
        return found

    def __str__(self) -> str:
        lines = [f"  {line}" for line in self.layout()]
        lines.append("  for the tile of a thread block" if self.tile.warps else
                     "  for each tile of a thread block, loaded while the one before is stored")
        lines += self._reads(False) + [f"    compute   {text}" for text in self.computes(False)]
        lines.append(f"    for each {self.stage_elements} elements of K")
        both = " and ".join((self.loads()[0][0], ", ".join(self.matrices)))
        rows, worker = self.worker_rows, self.workers[0].split()[0]
        who = "all warps" if self.tile.warps else "the warp that loads"
        lines.append(f"      load      {both} to a stage that is free, by {who}")
        lines.append(f"      multiply  {rows} rows a {worker}, while the "
                     "next stage is waited for; then the stage is free")  # fmt: skip
        if self.tile.in_turns:
            lines.append("    meanwhile the other warpgroup works on the sums of the tile before")
        again = ", and again after each stage of reductions" if self.kernel.is_whole else ""
        lines.append(f"    for each {self.kernel.chunk} columns of a thread's rows{again}")
        for operand in self.kernel.operands:
            if operand.input.id in self.names:
                name = self.names[operand.input.id]
                lines.append(f"      read      {name} from the sums in registers")
        lines += [f"  {line}" for line in self._reads(True)]
        lines += [f"      compute   {text}" for text in self.computes(True)]
        lines += [f"      store     {name}, {how}" for name, how in self.stores()]
        wrapped = [
            part for line in lines
            for part in textwrap.wrap(line, WIDTH, subsequent_indent=" " * (len(line) - len(
                line.lstrip()) + 11), break_long_words=False)
        ]  # fmt: skip
        return "\n".join([self.title, *wrapped])

    def _reads(self, of_tiles: bool) -> list[str]:
        return [
            f"    load      {self.names.get(i.id, i.name)} of {i.role.value} {i.name} "
            f"({dtype_name(i.dtype)})" for i in self.given(of_tiles)
        ]  # fmt: skip
