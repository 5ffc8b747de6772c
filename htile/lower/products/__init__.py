"""Functions with matrix products: how they are cut into kernels, their tiles, and their text.

`levels.py` cuts. `fused.py` says what one kernel computes, `tiles.py` which tile it has, and
`emit.py` prints it. All else, as expressions and names, is what row kernels have.
"""
