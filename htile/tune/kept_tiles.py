"""Tuned tiles of kernels of products on disk, beside tuned plans."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from ..build.arch import Arch
from ..lower.products.fused import Fused, Tile
from ..lower.products.tiles import tiles
from .kept import folder_there, of_graph, of_machine, read, write

BLOCK = 64  # rows; numbers of them that begin as many blocks have the same tuned tile


def recall_tile(
    default: Tile, kernel: Fused, major: str, rows: int, arch: Arch, device: torch.device | int
) -> Tile:
    """The tile that was tuned for such a kernel of products, or else the default."""
    if not folder_there():
        return default
    found = read(_about(kernel, major, rows, arch, device))
    possible = tiles(kernel, major, arch, rows)
    return next((tile for tile in possible if _properties(tile) == found), default)


def keep_tile(
    tile: Tile, kernel: Fused, major: str, rows: int, arch: Arch, device: torch.device | int
) -> Path | None:
    """Have later calls use this tile; returns the file that says so, or None as `keep` does."""
    return write(_about(kernel, major, rows, arch, device), _properties(tile))


def _properties(tile: Tile) -> dict[str, object]:
    """What a tile is, but for how many rows it loads, which follows from how many there are."""
    return {name: value for name, value in asdict(tile).items() if name != "a_rows"}


def _about(
    kernel: Fused, major: str, rows: int, arch: Arch, device: torch.device | int
) -> dict[str, object]:
    """What a tile is tuned for."""
    return {
        **of_machine(device),
        "graph": of_graph(kernel.graph),
        "products": [[repr(o.product), o.start] for o in kernel.operands],
        "columns": kernel.n,
        "major": major,
        "blocks of rows": -(-rows // BLOCK),
        "arch": arch.name,
    }
