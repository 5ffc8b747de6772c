"""Calls of functions with matrix products: `calls.py` runs their kernels one after the other.

`tiles.py` says which tile each kernel has, and `kernels.py` is what `inspect` returns. Gradients
are in `gradients.py`, `chunks.py` and `derivatives.py`. In torch's graphs a call is made of the
operations of `operations.py`.
"""
