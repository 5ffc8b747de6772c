"""Which plans a graph has, how long each is expected to take, and which one is the default.

`enumeration.py` lists them, `cost.py` says how long they take, of `instructions.py` and
`registers.py`, and `default.py` chooses. `preference.py` has the plans that were measured to be
fast.
"""
