"""The memory that emulated kernels read and write: tensors, and what a thread block shares.

A load or store of a warp is one access of numpy to all of its addresses.
"""

from __future__ import annotations

import numpy as np
import torch

SHARED_BYTES = 227 * 1024  # what a thread block may use at most, on sm_90
SHARED_START = 1024  # the address of dynamic shared memory, aligned as kernels ask for it
APART = 1 << 33  # bytes between tensors: offsets that wrap at 32 bits lead nowhere


class Bytes:
    """What `Memory` and `Shared` have in common: accesses of many addresses.

    What `at` asserts of one address is asserted of all: bytes between the lowest and the highest
    are of the same tensor.
    """

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The bytes at some addresses, a line of so many for each."""
        found = self._pieces(addresses, size)
        if found is None:
            return np.stack([self.at(int(address), size) for address in addresses])
        pieces, which = found
        return pieces[which].view(np.uint8).reshape(len(addresses), size)

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write lines of bytes to some addresses, from the first to the last."""
        size = values.shape[1]
        found = self._pieces(addresses, size)
        if found is None:
            for address, line in zip(addresses, values, strict=True):
                self.at(int(address), size)[:] = line
            return
        pieces, which = found
        pieces[which] = np.ascontiguousarray(values).view(pieces.dtype)[:, 0]

    def _pieces(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The bytes of a tensor in pieces of one size, and which of them are at some addresses.

        None if the addresses are none, or of several tensors.
        """
        if not len(addresses):
            return None
        low, high = int(addresses.min()), int(addresses.max())
        self.at(low, size), self.at(high, size)
        flat, start = self._tensor_at(low)
        if self._tensor_at(high)[1] != start:
            return None
        for address in addresses[addresses % size != 0]:
            self.at(int(address), size)  # which says that it is not aligned
        whole = flat[: len(flat) // size * size].view(np.dtype((np.void, size)))
        return whole, (addresses - start) // size


class Memory(Bytes):
    """Global memory: tensors far apart from each other. No byte beside them may be used."""

    def __init__(self, tensors):
        self.bytes, self.start = [], []
        for i, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self.bytes.append(flat)
            self.start.append((i + 1) * APART)
        self.address = [
            start + tensor.storage_offset() * tensor.element_size()
            for start, tensor in zip(self.start, tensors, strict=True)
        ]

    def at(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address, as a view."""
        which = address // APART - 1
        assert 0 <= which < len(self.bytes), f"no tensor is at {address:#x}"
        offset = address - self.start[which]
        assert address % size == 0, f"{address:#x} is not aligned to {size} bytes"
        assert offset + size <= len(self.bytes[which]), f"tensor {which} ends before {address:#x}"
        return self.bytes[which][offset : offset + size]

    def _tensor_at(self, address: int) -> tuple[np.ndarray, int]:
        """The bytes of the tensor at an address, and where it starts."""
        which = address // APART - 1
        return self.bytes[which], self.start[which]


class Shared(Bytes):
    """The shared memory of a thread block. It holds NaNs at first."""

    def __init__(self, size: int):
        self.bytes = np.full(size, 0xFF, np.uint8)

    def at(self, address: int, size: int) -> np.ndarray:
        offset = address - SHARED_START
        assert address % size == 0, f"{address:#x} is not aligned to {size} bytes"
        assert 0 <= offset <= len(self.bytes) - size, f"shared memory does not reach {address:#x}"
        return self.bytes[offset : offset + size]

    def _tensor_at(self, address: int) -> tuple[np.ndarray, int]:
        return self.bytes, SHARED_START
