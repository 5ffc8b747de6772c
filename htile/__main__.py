"""`python -m htile`: look at what a row-wise function becomes, and check the installation."""

import os
import sys

from .cli import main

if __name__ == "__main__":
    try:
        try:
            status = main()
        finally:  # also where argparse exits
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`: nobody reads on, and the interpreter's flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
