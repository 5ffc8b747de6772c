"""Prints the product kernel for architectures without wgmma, over `htile/warp_matmul.py`.

What is computed of the products is printed as `emit.py` does.
"""

from __future__ import annotations

from ...frontend.graph import Output
from ..emission.expressions import INDENT, tuple_of, wrapped_call
from .emit import Text
from .fused import Fused, Tile


def emit(kernel: Fused, tile: Tile, major: str, in_pairs: bool, fastmath: bool = False) -> str:
    """The text of the kernel; the arguments are those of `emit.emit`."""
    return _Text(kernel, tile, major, in_pairs, fastmath).whole()


class _Text(Text):
    primitives = "from htile.warp_matmul import WarpMatmulConfig, WarpMatmulContext"
    launched_with = ("stream: cuda.CUstream",)
    given_last = ()

    def _staged(self) -> Output | None:
        return None

    def _loop(self) -> list[str]:
        return []  # a thread block has one tile

    def _config(self) -> list[str]:
        tile, kernel = self.tile, self.kernel
        args = [
            self.dtype,
            f"tile=({tile.rows}, {tile.columns})",
            f"stages={tile.stages}",
            f"products={len(kernel.operands)}",
            f'major="{self.major}"',
            f"chunk={kernel.chunk}",
            f"warps={tile.warps}",
        ]
        return wrapped_call("config = WarpMatmulConfig(", args, ")")

    def _operands(self) -> list[str]:
        return [f"{name}: cute.Tensor" for name in ("left", *self._rights())]

    def _tiles(self) -> list[str]:
        setup = [
            "left", tuple_of(self._rights()), "tiled_mma", "(tiles_m, tiles_n)",
            f"(rows_m, {self.kernel.n})",
        ]  # fmt: skip
        lines = [
            "    ctx = WarpMatmulContext(config)",
            *wrapped_call("    ctx.setup(", setup, ")"),
            "    cute.arch.griddepcontrol_wait()  # the kernel before has ended",
            "    rows = TileRows(ctx, ctx.index)",
            *self._body(INDENT),
            "    cute.arch.griddepcontrol_launch_dependents()  # the next may start",
        ]
        return [line for line in lines if self.tile.is_dependent or "griddepcontrol" not in line]

    def _multiplied(self, loads: list[str], indent: str) -> list[str]:
        """What is loaded before would take registers that the products need."""
        return [f"{indent}ctx.multiply()", *loads]

    def _passed(self) -> tuple[list[str], list[str]]:
        return [], ["mLeft", *self._matrices()]

    def _grid(self) -> list[str]:
        return ["grid=[tiles_m * tiles_n, 1, 1]", "block=config.block"]
