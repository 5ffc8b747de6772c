"""`python -m tests.digests`: emit every cell, compile some, and say which groups
differ from the record.

`--update` replaces the record. It takes about 15 minutes on two cores, without a GPU. Names of
functions limit both to their groups: `python -m tests.digests --update layernorm counts`. The
resources are those of the ptxas that constraints.txt pins; another version gives others.
"""

import os
import sys

import torch

os.environ["HTILE_CACHE_DIR"] = ""  # what is compiled once is not used again

from . import record
from .cells import cells


def main() -> int:
    torch.set_num_threads(1)
    functions = {word for word in sys.argv[1:] if word != "--update"}
    found = record.take(c for c in cells() if not functions or c.function in functions)
    known = record.recorded() if record.RECORD.exists() else {}
    differing = [name for name in found if found[name] != known.get(name)]
    for name in differing:
        print(f"{name}\n  was {known.get(name)}\n  is  {found[name]}")
    spilling = [name for name, about in found.items() if about["stack"]]
    print(f"{len(differing)} of {len(found)} groups differ")
    print(f"with a stack frame: {', '.join(spilling) or 'none'}")
    if "--update" in sys.argv[1:]:
        merged = known | found
        record.write({name: merged[name] for name in record.groups(cells()) if name in merged})
        return 0
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
