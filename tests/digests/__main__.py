"""`python -m tests.digests`: compile every cell and say which groups differ from the record.

`--update` replaces the record. It takes about 25 minutes on two cores, without a GPU.
"""

import os
import sys

import torch

os.environ["HTILE_CACHE_DIR"] = ""  # what is compiled once is not used again

from . import record
from .cells import cells


def main() -> int:
    torch.set_num_threads(1)
    found = record.take(cells())
    known = record.recorded() if record.RECORD.exists() else {}
    differing = [name for name in found if found[name] != known.get(name)]
    for name in differing:
        print(f"{name}\n  was {known.get(name)}\n  is  {found[name]}")
    spilling = [name for name, about in found.items() if about["stack"]]
    print(f"{len(differing)} of {len(found)} groups differ")
    print(f"with a stack frame: {', '.join(spilling) or 'none'}")
    if "--update" in sys.argv[1:]:
        record.write(found)
        return 0
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
