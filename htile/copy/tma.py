"""Copies between global and shared memory that the tensor memory accelerator (TMA) makes.

One thread asks for a tile of a matrix, and an mbarrier of the pipeline tells when it is there. What
lies outside of the matrix is 0, and is not written. A tile that several thread blocks of a cluster
read is fetched once, each of them fetching a part (multicast).
"""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from htile.utils import Static


class GlobalToSharedLoader(Static):
    """Loads tiles of a matrix into the stages of a tile in shared memory.

    atom: made by `atom_of`, in the host function.
    gT: the matrix as tiles, (rows, columns, tiles along rows, tiles along columns).
    sT: the tile in shared memory, (rows, columns, stages).
    rank, count: which of how many thread blocks this one is that share the tile.
    mask: the thread blocks of the cluster that share it, a bit each.
    """

    def __init__(self, atom, gT: cute.Tensor, sT: cute.Tensor, rank, count: int, mask):
        self.atom, self.mask = atom, mask if count > 1 else 0
        parts = cute.group_modes(sT, 0, 2), cute.group_modes(gT, 0, 2)
        self.sT, self.gT = cpasync.tma_partition(atom, rank, cute.make_layout(count), *parts)

    @staticmethod
    def atom_of(mT: cute.Tensor, layout: cute.ComposedLayout, box: tuple[int, int], count: int):
        """(atom, tensor of coordinates) for boxes of a matrix, which `count` thread blocks share.

        layout: that of one stage in shared memory.
        """
        op = cpasync.CopyBulkTensorTileG2SOp()
        if count > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(op, mT, layout, box, num_multicast=count)

    def load(self, tile, k, stage, barrier) -> None:
        """Start to load chunk `k` of a tile into a stage; the barrier counts its bytes."""
        src, dst = self.gT[None, tile, k], self.sT[None, stage]
        cute.copy(self.atom, src, dst, tma_bar_ptr=barrier, mcast_mask=self.mask)


class SharedToGlobalStorer(Static):
    """Stores tiles from shared memory to a matrix.

    atom, mT: from `atom_of`. sT: the tiles in shared memory, (rows, columns, stages).
    """

    def __init__(self, atom, mT: cute.Tensor, sT: cute.Tensor, box: tuple[int, int]):
        self.atom, self.mT, self.sT, self.box = atom, mT, sT, box

    @staticmethod
    def atom_of(mT: cute.Tensor, layout: cute.ComposedLayout, box: tuple[int, int]):
        """(atom, tensor of coordinates) for boxes of a matrix."""
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mT, layout, box)

    def store(self, stage, offset: tuple) -> None:
        """Start to store a stage as the tile whose first element is `offset`, (row, column).

        One thread asks for it. The tile may reach behind the matrix, or lie there.
        """
        gT = cute.local_tile(cute.domain_offset(offset, self.mT), self.box, (0, 0))
        parts = cute.group_modes(self.sT, 0, 2), cute.group_modes(gT, 0, 2)
        sT, gT = cpasync.tma_partition(self.atom, 0, cute.make_layout(1), *parts)
        cute.copy(self.atom, sT[None, stage], gT)
        cute.arch.cp_async_bulk_commit_group()

    @staticmethod
    def wait(count: int) -> None:
        """Wait until all but the last `count` stores of this thread have read shared memory."""
        cute.arch.cp_async_bulk_wait_group(count, read=True)
