"""The general case: many row functions at many lengths, half of which nothing may be fitted to.

`population.py` says which functions and lengths there are and which half each belongs to.
`variant.py` makes a kernel of a function, `norms.py`, `losses.py` and `gates.py` have functions as
people write them, and `programs.py` has random ones. `suite.py` measures the default plans,
`regret.py` measures all plans, and `summary.py` says what came of both.
"""
