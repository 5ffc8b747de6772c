"""`python -m htile`: look at what a row-wise function becomes, and check the installation."""

import os
import sys

from .cli import main

if __name__ == "__main__":
    try:
        try:
            status = main()
        finally:  # even where argparse exits
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` reads no more, and the interpreter's own flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
