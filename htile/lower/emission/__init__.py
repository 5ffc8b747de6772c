"""Emission: prints a plan as the source of a kernel. It decides nothing.

`emit.py` prints a kernel, with `steps.py`, `rows.py` (loops over rows), `views.py` (pieces of
tensors) and `host.py` (the host function). `names.py` gives values their names, and
`expressions.py` has the text of each operation.
"""
