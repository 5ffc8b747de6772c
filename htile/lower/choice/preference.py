"""Which plans were measured to be fast, by the form of the work and the length of the row.

The cost model does not tell plans apart that differ by a few per cent. Of those, `default` takes
the one that is the closest to this table. It was measured on an H200, on rows that are not shifted.
"""

from __future__ import annotations

from functools import partial
from math import log2
from typing import NamedTuple

from ...build.arch import Arch
from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Role
from ..plan import Form, Plan, Target
from ..reductions import VERY_LONG_N
from ..work import Work

MANY_ROWS = 1024  # So many rows fill a GPU.
SHORT_N = 8192  # Rows of more elements are divided over CTAs.


def closest_first(plans: list[Plan]) -> list[Plan]:
    """The plans as they are preferred by what was measured, the usual one first."""
    preference = _prefer(plans[0].work, plans[0].target)
    return sorted(plans, key=partial(_distance, preference=preference))


class Preference(NamedTuple):
    """What the default plan is closest to; `Numerics` and `Placement` say more.

    threads: how many threads work on a share of a row. It is the most if `clustered` is False.
    elements: how many elements of a row a thread has.
    clustered: whether a row may be divided over the CTAs of a cluster.
    block: how many threads a CTA has that holds rows in registers, if a row takes no more.
    two_rows: whether a CTA has two rows where one takes 256 threads.
    """

    form: Form
    threads: int
    elements: float
    loader: str
    columns: str = "late"
    clustered: bool = True
    block: int = 128
    two_rows: bool = False
    shares: int = 1
    abreast: int = 1


def _distance(plan: Plan, preference: Preference) -> tuple:
    """How far a plan is from what is preferred; lower is better.

    Numerics come first. Numbers of threads that are no powers of two were not measured.

    Held rows that are shifted, or accessed in less than 16 bytes, are loaded directly, whatever is
    preferred for others. Shifted rows always are; for the others an asynchronous copy takes 1.1
    times as long.
    """
    num, place = plan.numerics, plan.placement
    threads, elements, in_loops = num.threads_per_row, plan.elements_per_thread, num.in_loops
    padding = elements * threads * num.cluster_n / plan.target.n - 1
    fits = threads <= preference.threads
    if preference.clustered:
        fits = threads == preference.threads
    is_short = num.vec_size * plan.work.narrowest < ACCESS_BYTES
    loader = preference.loader if in_loops or not (place.shifted or is_short) else "direct"
    block = 512 if preference.two_rows and threads == 256 else max(preference.block, threads)
    return (
        num.is_between_powers,
        in_loops != (preference.form is not Form.HELD),
        (num.form is Form.STREAMED) != (preference.form is Form.STREAMED),
        num.cluster_n > 1 and not preference.clustered,
        not fits,
        abs(log2(elements / preference.elements)) + 4 * padding,
        -threads,
        not num.joint,
        0 if in_loops else abs(place.num_threads - block),
        place.loader != loader,
        (place.columns == "early") != (preference.columns == "early"),
        abs(place.shares - preference.shares),
        abs(place.abreast - preference.abreast),
    )


def _prefer(work: Work, target: Target) -> Preference:
    """The table, as measured on an H200; docs/traps.md has the figures.

    Short rows stay in registers. Long rows stay in shared memory, divided over a cluster, and are
    worked on in loops. Rows that are only read and very long rows are streamed.
    """
    n = work.graph.n
    if work.needs_held and n > SHORT_N:  # not measured
        is_one = target.arch.max_cluster == 1
        return Preference(Form.HELD, 1024 if is_one else 512, 16, "direct", clustered=not is_one)
    if n > VERY_LONG_N:
        fits = work.row_bytes * n <= 16 * target.arch.shared_bytes
        if len(work.loops.loops) == 2 and work.stages == 1 and fits:  # another loop is one too many
            return Preference(Form.LOOPS, 1024, n / (16 * 1024), "shared")
        return Preference(Form.STREAMED, 512, n / (8 * 512), "direct", shares=8)
    if work.is_map:
        return _prefer_map(work, target)
    return _prefer_long(work, target.arch) if n > SHORT_N else _prefer_short(work, target)


def _prefer_map(work: Work, target: Target) -> Preference:
    """Where nothing is reduced."""
    n = work.graph.n
    if n <= SHORT_N:
        threads = 256 if work.columns else 512
        two_rows = _pairs_pay(target)
        return Preference(Form.HELD, threads, 16, "direct", clustered=False, two_rows=two_rows)
    if n <= 131072 and target.arch.max_cluster > 1:
        return Preference(Form.HELD, 256, 32, "direct")
    return Preference(Form.LOOPS, 512, 32, "direct")


def _prefer_short(work: Work, target: Target) -> Preference:
    """A thread has 32 bytes of a row with little padding, and a CTA has 128 threads.

    Where little is left to do after the last exchange, rows of up to 128 elements take 16 bytes a
    thread and CTAs of 256 threads, and many rows of 256 threads take CTAs of two rows.

    Rows with more than two stages come through shared memory. So do many rows of more than 2048
    elements, but not beside columns: shared memory is taken from the L1 cache that columns live in.

    Columns are loaded late, because early ones cost registers, so rows in flight. One column beside
    a single row is loaded early. So are the columns of a single row of 32-bit elements, of which a
    thread has fewer. Rows of any length take more registers, so that their CTAs of 512 threads
    would be two in place of three of a multiprocessor.
    """
    n, columns, stages = work.graph.n, work.columns, work.stages
    narrow = 1 if work.is_wide else 2  # as many bytes a thread
    if not work.writes or (stages > 2 and n > 4096):
        loader = "shared" if work.writes else "direct"
        return Preference(Form.HELD, 512 // narrow, 16 * narrow, loader, clustered=False)
    few_threads = columns and (stages > 1 or n <= 4096)
    threads, elements, block = 512 if few_threads else 1024, 8 * narrow, 128
    is_light = stages == 1 or (stages == 2 and work.repeats_exp)
    if is_light and n <= 128 and not work.is_wide:
        elements, block = 8, 256
    direct = columns or (stages <= 2 and (n <= 2048 or target.rows < 256))
    loader = "direct" if direct else "shared"
    takes_few = len(work.columns) == 1 or (work.is_wide and n <= 4096)
    takes_few &= n <= 2048 or work.is_wide or work.graph.multiple is None
    when = "early" if takes_few and len(work.of(Role.ROW)) == 1 else "late"
    block_of = {"clustered": False, "block": block, "two_rows": is_light and _pairs_pay(target)}
    return Preference(Form.HELD, threads // narrow, elements, loader, when, **block_of)


def _pairs_pay(target: Target) -> bool:
    """Whether rows are so many and so long that CTAs of two pay; longer ones were not measured."""
    return 2048 < target.n <= 4096 and target.rows >= MANY_ROWS


def _prefer_long(work: Work, arch: Arch) -> Preference:
    """A row is divided over as many CTAs as the cluster allows, most of 256 threads.

    So few rows keep a GPU busy. Many rows need no cluster: there a CTA takes several shares.
    """
    n, columns, stages, loops = work.graph.n, work.columns, work.stages, work.loops
    if not work.writes and len(loops.loops) == 1:
        elements, abreast = 64 if n <= 16384 else 32, 2 if n > 65536 else 1
        return Preference(Form.STREAMED, 256, elements, "direct", shares=16, abreast=abreast)
    if n <= 16384 and stages > 2:
        return Preference(Form.HELD, 256, 32, "direct", clustered=False)
    longest_held = 0
    if not columns and (stages == 1 or work.repeats_exp) and stages <= 2:
        longest_held = 131072 if work.is_wide else 65536 if work.has_pair else 32768
    if n <= longest_held:
        return Preference(Form.HELD, 256, 16 if n <= 16384 else 32, "shared")
    if arch.max_cluster == 1:
        return Preference(Form.LOOPS, 1024, 32, "shared")
    if stages > 2:
        return Preference(Form.LOOPS, 256, 64, "shared", shares=2 if n > 32768 else 1)
    is_online = loops.carries_two_stages
    threads = 512 if n > 131072 and columns and not is_online else 256
    elements = max(16 if n <= 32768 else 32, n // (threads * arch.max_cluster))
    shares = abreast = 1
    is_small = columns and 16384 < n <= 32768 and work.row_bytes == 2  # 64 KiB at most
    if is_online and (columns or loops.exchanges > 1 or n <= 32768):
        abreast = 2
        if is_small:
            threads, elements, abreast = 128, 32, 4
        shares = abreast * max(1, 64 // elements)
    elif is_small:
        shares = 2
    return Preference(Form.LOOPS, threads, elements, "shared", shares=shares, abreast=abreast)
