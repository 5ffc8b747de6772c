"""Which plans a graph has, how long each is expected to take, and which one is the default.

`enumeration.py` lists the plans. `cost.py` says how long they take, from what `instructions.py` and
`registers.py` estimate. `default.py` chooses. `preference.py` has the plans that were measured to
be fast.
"""
