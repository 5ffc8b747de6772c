"""Register tiles: named views of the fragments that a thread holds."""

import cutlass.cute as cute
from cutlass import Numeric


class RegTile:
    """A register fragment of `shape` and `dtype`. Its elements are not initialised."""

    def __init__(self, shape: tuple, dtype: type[Numeric]):
        self.fragment = cute.make_rmem_tensor(shape, dtype)

    @property
    def shape(self) -> tuple:
        """The shape of the fragment."""
        return self.fragment.shape

    @property
    def dtype(self) -> type[Numeric]:
        """The element type of the fragment."""
        return self.fragment.element_type

    def load(self) -> cute.TensorSSA:
        """The values as one vector of the fragment's shape."""
        return self.fragment.load()

    def store(self, values: cute.TensorSSA) -> None:
        """Set the values from a vector of the same shape and dtype."""
        self.fragment.store(values)

    def fill(self, value: Numeric | float) -> None:
        """Set every element to `value`."""
        self.fragment.fill(value)


class VectorRegTile(RegTile):
    """The fragment of one thread in a row tile, of shape ((vec_size, 1), 1, num_vectors)."""

    def __init__(self, vec_size: int, num_vectors: int, dtype: type[Numeric]):
        super().__init__(((vec_size, 1), 1, num_vectors), dtype)

    @property
    def vec_size(self) -> int:
        """How many neighbouring elements a vector has."""
        return self.shape[0][0]

    @property
    def num_vectors(self) -> int:
        """How many vectors the thread has along the row."""
        return self.shape[2]
