"""Calls that are differentiated: their forward and backward kernels, and torch's graph of them.

`gradients.py` makes such a call and `autograd.py` its place in torch's graph. `derivatives.py` has
the backward graphs, `tangents.py` those of forward mode, and `tables.py` gradients that torch adds
up. `training.py` shows and times the passes.
"""
