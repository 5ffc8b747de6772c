"""One value of each row, or a few that lie side by side: how a thread loads and stores them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from htile.compute.conversion import to_stored
from htile.copy.tile import RowTile


class RowValues(RowTile):
    """A row tile that loads and stores values of its row."""

    @cute.jit
    def load_row_value(self, mT):
        """Load this row's element of a tensor (M,). It is 0 if there is no such row."""
        value = mT.element_type(0)
        if self.row_in_bounds:
            value = to_stored(self._at_row(mT)[0], mT.element_type)
        return value

    def store_row_value(self, mT, value):
        """Store this row's element of a tensor (M,). One thread of the row does it."""
        self.store_row_values(mT, (0,), (value,))

    @cute.jit
    def store_row_values(self, mT, places: cutlass.Constexpr, values: tuple):
        """Store what lies so many places behind this row's element of a tensor (M,).

        One thread of the row does it, behind one branch and with one address.
        """
        if self._stores_row(self.tidx % self.config.threads_per_row == 0):
            elements = self._at_row(mT, max(places) + 1)
            for k in cutlass.range_constexpr(len(values)):
                value = to_stored(values[k], mT.element_type)
                # The elements are of Int8 where mT is Boolean, which a view forgets.
                elements[places[k]] = to_stored(value, elements.element_type)

    @cute.jit
    def store_ranked(
        self, mT, ranks: cutlass.Constexpr, first: cutlass.Constexpr,
        count: cutlass.Constexpr, of_key: cutlass.Constexpr, argument: cutlass.Constexpr,
    ):  # fmt: skip
        """Store what a function makes of `count` keys from a rank on, side by side.

        The first is this row's element of a tensor (M,). Each thread of the row stores one, and
        then every further one that is as many behind as there are threads.

        ranks: what `ranks` returns with `together`.
        of_key, argument: `math.key_value` and the dtype, or `math.key_index` and `smaller`.
        """
        threads = self.config.threads_per_row
        if self._stores_row(True):
            elements = self._at_row(mT, count)
            for k in cutlass.range(self.tidx % threads, count, threads, unroll=1):
                value = to_stored(of_key(ranks[first + k], argument), mT.element_type)
                elements[k] = to_stored(value, elements.element_type)

    @cute.jit
    def _stores_row(self, is_writer):
        """Whether a thread that would be a writer is one of the threads that store for the row.

        These are the first ones that work on it, where several CTAs or groups of threads do.
        """
        if const_expr(self.config.ctas > 1):
            is_writer = is_writer and self.cluster_y == 0
        if const_expr(self.config.abreast > 1):
            is_writer = is_writer and self.beside == 0
        if const_expr(self.row_in_bounds is not True):
            is_writer = is_writer and self.row_in_bounds
        return is_writer

    def _at_row(self, mT: cute.Tensor, count: int = 1) -> cute.Tensor:
        """This row's element of a tensor (M,) or ((...),), and `count - 1` behind it."""
        layout = cute.make_layout((*mT.shape,), stride=(*mT.stride,))
        offset = cute.crd2idx((self.row_place,), layout)
        return cute.make_tensor(mT.iterator + offset, cute.make_layout(count))
