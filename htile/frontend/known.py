"""What is known of a node of a backward graph although the nodes that say so are not in it."""

from __future__ import annotations

from enum import Enum


class Known(Enum):
    """A fact that a short device function needs, as the operation's `arg`.

    A kernel sees by the nodes around an exponential that its operand has had its maximum
    subtracted. In a backward graph that maximum is an argument, for the forward pass has kept it.
    """

    ORDINARY = "ordinary"  # of DIV: the divisor is from 2 ** -126 to 2 ** 126 in magnitude
    SHARE = "share"  # of EXP: of an element less the largest; of DIV: by the sum of such

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"
