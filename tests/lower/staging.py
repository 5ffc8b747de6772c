"""What plans take of shared memory beside rows, counted apart from what plans say."""

from collections import Counter

from htile.frontend.graph import Role
from htile.lower.steps import Home


def staged_bytes(plan):
    """Bytes for staged columns, and for shifted results that take the place of nothing else."""
    threads, vec = plan.placement.num_threads, plan.numerics.vec_size
    vectors = plan.turns * plan.chunks
    columns = [i.dtype.itemsize for i in plan.staged_columns]
    tile = threads * vectors * vec
    most = max(1, 48 * 1024 // (threads * 16))
    if not plan.placement.shifted:  # results that end inside a vector before the columns do
        short = [o for o in plan.graph.outputs if o.view and o.view.there(plan.graph.n)]
        cut = {o.dtype.itemsize for o in short if o.view.shape[0] % vec}
        held = 1 if plan.numerics.in_loops else min(vectors, most)
        return tile * sum(columns) + threads * held * vec * sum(cut)
    results = [o.dtype.itemsize for o in plan.graph.outputs if o.is_row]
    rows = [i.dtype.itemsize for i in plan.graph.inputs if i.role is Role.ROW]
    if plan.rows_home is Home.SHARED:
        own = list((Counter(results) - Counter(rows)).elements())
        return tile * sum(own)
    if plan.rows_home is Home.REREAD:
        vectors = 1
    if plan.rows_home is Home.REGISTERS:  # only results of the last sweep take a column's place
        last = [o.dtype.itemsize for o in plan.sweeps.all[-1].stores if o.is_row]
        taken = Counter(last) & Counter(columns)
    else:
        taken = Counter(results) & Counter(columns)
    own = (Counter(results) - taken).elements()
    return tile * sum(columns) + sum(threads * min(vectors, most) * vec * s for s in {*own})
