"""What other processes that tests start run in."""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """This process's variables and more. Packages are found of this repository and this process."""
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more
