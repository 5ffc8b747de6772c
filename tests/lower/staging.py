"""What plans of shifted rows take of shared memory, counted apart from what plans say."""

from collections import Counter

from htile.frontend.graph import Role
from htile.lower.steps import Home


def staged_bytes(plan):
    """Bytes of shared memory through which shifted results go that take no row's place there."""
    threads, vec = plan.placement.num_threads, plan.numerics.vec_size
    vectors = plan.turns * plan.chunks
    results = [o.dtype.itemsize for o in plan.graph.outputs if o.is_row]
    rows = [i.dtype.itemsize for i in plan.graph.inputs if i.role is Role.ROW]
    if plan.rows_home is Home.SHARED:
        own = list((Counter(results) - Counter(rows)).elements())
        return sum(threads * vectors * vec * size for size in own)
    if plan.rows_home is Home.REREAD:
        vectors = 1
    most = max(1, 48 * 1024 // (threads * 16))
    return sum(threads * min(vectors, most) * vec * size for size in set(results))
