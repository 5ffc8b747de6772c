"""Calls as operations of torch, where torch makes graphs of programs: compile, export, modes.

`compiled.py` is what torch.compile reads. `ops.py` has the operation of one graph of rows, and
`roots.py` that of a whole call. `known.py` gives functions the numbers by which graphs name them.
"""
