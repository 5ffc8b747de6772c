"""Passes: each takes a graph and returns a new one, before anything is planned.

`simplify.py` has the simple ones and says in which order all run. `space.py` places a graph on one
row, with `axes.py`, `collectives.py` and `placed.py`; `by_column.py` spares it some of the joins.
`ways.py` chooses among the ways to place a graph. `rewrite.py` is what most passes are made of.
"""
