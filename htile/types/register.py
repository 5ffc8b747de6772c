"""Register tiles: named views of the fragments that a thread holds."""

import cutlass.cute as cute


class RegTile:
    """A register fragment of `shape` and `dtype`, uninitialised."""

    def __init__(self, shape, dtype):
        self.fragment = cute.make_rmem_tensor(shape, dtype)

    @property
    def shape(self):
        """Shape of the fragment."""
        return self.fragment.shape

    @property
    def dtype(self):
        """Element type of the fragment."""
        return self.fragment.element_type

    def load(self) -> cute.TensorSSA:
        """The values as one vector."""
        return self.fragment.load()

    def store(self, values: cute.TensorSSA):
        """Set the values from a vector of the same shape and dtype."""
        self.fragment.store(values)

    def fill(self, value):
        """Set every element to `value`."""
        self.fragment.fill(value)


class VectorRegTile(RegTile):
    """The fragment of one thread in a row tile: shape ((vec_size, 1), 1, num_vectors)."""

    def __init__(self, vec_size: int, num_vectors: int, dtype):
        super().__init__(((vec_size, 1), 1, num_vectors), dtype)

    @property
    def vec_size(self) -> int:
        """Contiguous elements of a vector."""
        return self.shape[0][0]

    @property
    def num_vectors(self) -> int:
        """Vectors along the row."""
        return self.shape[2]
