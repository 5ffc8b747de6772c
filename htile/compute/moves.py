"""How a sum of products with exponentials changes when the maxima below them do.

Lowering finds it in a graph (`htile/lower/following.py`), and kernels apply it (`following.py`
beside this). So this module imports nothing of CuTe-DSL.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """How a sum moves from one set of maxima to another.

    powers: the maxima, by their places, of whose exponentials its terms are a product. A place may
        be there more than once.
    slopes: for each maximum, how much the sum changes if that falls by 1, in units of the sum
        `base`. There are none where the terms have no exponents.
    base: the place of the plain sum of exponentials among all sums.
    """

    powers: tuple[int, ...]
    slopes: tuple[float, ...] = ()
    base: int = 0
