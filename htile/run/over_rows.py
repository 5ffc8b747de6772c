"""What calls are refused because a result is reduced over all rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..frontend.ops import Op

if TYPE_CHECKING:
    from .launch import Request


def refuse_no_maximum(request: Request) -> None:
    """Raise ArgumentError for a maximum over the rows of a call that has none."""
    if math.prod(request.call.lead):
        return
    for output in request.specialization.traced.over_rows:
        if output.over is Op.MAX:
            raise ArgumentError(
                f"{request.signature.name}: the result {output.name} is a maximum over all rows, "
                f"and there are none (leading shape {request.call.lead}); do not call it then"
            )
