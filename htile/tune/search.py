"""The search behind `Rowwise.tune`: plans timed beside the default, and what came of it.

A plan counts as faster if the ratio of its times to the default's, paired by round, has a 95 %
interval below 1. The best of many such plans may have been lucky, so it is timed again before it
wins, and its gain is that of the second run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from ..build.cache import cache_folder
from ..build.compile import building
from ..errors import ArgumentError, CompileError
from ..lower import Lowered, choose
from ..lower.choice.cost import cost
from ..lower.plan import Plan
from .kept import Wanted, in_force, keep, recall
from .statistics import Estimate, paired
from .timing import Contenders, Times, interleave

ROUNDS = 40  # in which a plan is timed beside the default
AGAIN = 160  # rounds of the second run, of a plan that was faster in the first


class BesideDefault:
    """What both results of `tune` say of a winner and the default, whose times are their fields."""

    @property
    def gain(self) -> Estimate:
        """How many per cent of the default's time the winner saves."""
        return self.ratio.map(lambda ratio: 100 * (1 - ratio))

    def _told(self, heading: str, timed: str) -> list[str]:
        """The lines of both. timed: what takes the times."""
        if self.plan is self.default:
            times = f"the default stays, {self.default_us:.2f} µs{timed}: none was faster beyond "
            times += "the noise"
        else:
            gain = self.gain
            times = f"{self.default_us:.2f} µs{timed} by default, now {self.us:.2f} µs: "
            times += f"{gain.median:.1f} % less (95 % interval {gain.low:.1f} to {gain.high:.1f})"
        lines = [times, *self.plan.layout(), f"kept in {self.file}" if self.file else "not kept"]
        return [heading, *(f"  {line}" for line in lines)]


@dataclass(frozen=True)
class Tuned(BesideDefault):
    """What `tune` found; `str` says it in words.

    gpu: the name of the GPU.
    plan: the winner; it is `default` where nothing was faster beyond the noise.
    tried, plans: how many plans were timed, and how many there are, the default included.
    seconds: how long the search took.
    us, default_us: the medians of both in microseconds, of the same rounds.
    ratio: the winner's time over the default's, with its 95 % interval.
    file: the file that keeps the winner; None where it could not be written.
    forward, backward: what was found for the two passes of calls that are differentiated; None
        where they were not tuned, and where the forward pass is the kernel of all other calls.
    """

    gpu: str
    plan: Plan
    default: Plan
    tried: int
    plans: int
    seconds: float
    us: float
    default_us: float
    ratio: Estimate
    file: Path | None
    forward: Tuned | None = None
    backward: Tuned | None = None

    def __str__(self) -> str:
        graph = self.plan.graph
        lines = self._told(
            f"tuned {graph.name}, N {graph.length_text}, on {self.gpu}: {self.tried} of "
            f"{self.plans} plans tried in {self.seconds:.1f} s",
            "",
        )
        if self.plan.numerics != self.default.numerics and not self.plan.work.is_map:
            lines.insert(-1, "  sums are in another order than by default, so bits differ")
        passes = (("the forward pass", self.forward), ("the backward pass", self.backward))
        lines += [f"{name}: {tuned}" for name, tuned in passes if tuned is not None]
        return "\n".join(lines)


def check(function: str, device: torch.device, rows: int, seconds: float) -> None:
    """Raise ArgumentError for a call that can not be tuned; `Rowwise.tune` says which."""
    name = f"{function}.tune"
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ArgumentError(f"{name}: seconds={seconds!r}; expected a number above 0")
    if device.type != "cuda":
        raise ArgumentError(
            f"{name} times plans on the GPU that is to run them, got tensors on {device}; pass "
            "CUDA tensors of the shapes and strides that count"
        )
    if not rows:
        raise ArgumentError(f"{name}: there are no rows to time; pass as many as count")
    if torch.cuda.is_current_stream_capturing():
        raise ArgumentError(f"{name} can not be captured into a CUDA graph; call it before")
    if cache_folder() is None:
        raise ArgumentError(
            f"{name} keeps the fastest plan in the disk cache, which is turned off; set "
            "HTILE_CACHE_DIR to a folder"
        )


def tune(
    plans: list[Plan],
    wanted: Wanted,
    device: torch.device,
    rows: int,
    lower: Callable[[Plan], Lowered],
    prepare: Callable[[Lowered], Callable[[], object]],
    seconds: float,
    numerics: bool,
    progress: bool,
) -> Tuned:
    """Search for the fastest plan, and keep it.

    plans: all plans of the graph on its target that have what is `wanted`.
    rows: how many rows the arguments have.
    lower: prints a plan's kernel.
    prepare: compiles and loads a kernel, and returns a function that launches it.
    numerics: whether plans of other numerics than those in force are tried as well.
    """
    current = recall(plans, wanted, device)
    allowed = plans if numerics else in_force(plans, wanted, device)
    tried = candidates(allowed, current, rows, lower)
    of_plan = {id(one.plan): one for one in tried}

    def measure(contenders: Contenders, rounds: int) -> Times:
        return time_on(device, contenders, rounds)

    start = time.monotonic()
    with (
        building(map(_request, tried)) as built,
        shown(tried[0].graph.name, len(tried), progress) as show,
    ):

        def prepared(plan: Plan) -> Callable[[], object]:
            lowered = of_plan[id(plan)]
            with contextlib.suppress(CompileError, BrokenExecutor):  # `prepare` tries it again
                built(_request(lowered))
            return prepare(lowered)

        found = search([one.plan for one in tried], prepared, measure, seconds, show)
    took = time.monotonic() - start
    return Tuned(
        gpu=torch.cuda.get_device_name(device),
        plan=found.plan,
        default=tried[0].plan,
        tried=found.tried,
        plans=len(tried),
        seconds=took,
        us=found.us,
        default_us=found.default_us,
        ratio=found.ratio,
        file=keep(found.plan, wanted, device, numerics),
    )


def _request(lowered: Lowered) -> tuple[str, str, str]:
    return lowered.source, lowered.function, lowered.plan.target.arch.name


def candidates(
    plans: list[Plan], current: Plan, rows: int, lower: Callable[[Plan], Lowered]
) -> list[Lowered]:
    """The default, the plan that runs now, then the others, by their expected time for these rows.

    Each plan is printed once, by `lower`. Of several with the same text only the first is listed.
    """
    expected = sorted(plans, key=lambda plan: cost(plan, rows).time)
    ordered = {id(plan): plan for plan in (choose(plans), current, *expected)}
    texts: dict[str, Lowered] = {}
    for lowered in map(lower, ordered.values()):
        texts.setdefault(lowered.source, lowered)
    return list(texts.values())


@dataclass(frozen=True)
class Found:
    """The fastest plan, how many were timed, and its times beside those of the default."""

    plan: Plan
    tried: int
    us: float
    default_us: float
    ratio: Estimate


def search(
    plans: list[Plan],
    prepare: Callable[[Plan], Callable[[], object]],
    measure: Callable[[Contenders, int], Times],
    seconds: float,
    show: Callable[[int, str], None] = lambda done, text: None,
    clock: Callable[[], float] = time.monotonic,
    name: Callable[[Plan], str] | None = None,
) -> Found:
    """The fastest of `plans`; the first of them is the default.

    name: what `show` is told of a plan; of a tile it is another function.
    measure: times functions side by side for a number of rounds, as `timing.interleave` does.
    show: called with the number of plans that are done and a description of the next step.
    """
    start = clock()
    default, name = plans[0], name or _short
    show(0, "the default")
    call = prepare(default)
    own = measure({"default": call}, ROUNDS)["default"]
    found = Found(default, 1, median(own), median(own), Estimate(1.0, 1.0, 1.0))

    def beside(other: Callable[[], object], rounds: int) -> tuple[Times, Estimate]:
        times = measure({"default": call, "plan": other}, rounds)
        return times, paired(times["plan"], times["default"])

    faster = []
    for k, plan in enumerate(plans[1:], 1):
        if clock() - start >= seconds:
            break
        show(k, name(plan))
        other = prepare(plan)
        _, ratio = beside(other, ROUNDS)
        found = replace(found, tried=k + 1)
        if ratio.high < 1:
            faster.append((ratio.median, k, other))
    for _, k, other in sorted(faster, key=lambda one: one[:2]):
        show(found.tried, f"again, {name(plans[k])}")
        times, ratio = beside(other, AGAIN)
        if ratio.high < 1:
            us, default_us = median(times["plan"]), median(times["default"])
            return Found(plans[k], found.tried, us, default_us, ratio)
    return found


def time_on(device: torch.device, contenders: Contenders, rounds: int) -> Times:
    """`interleave` on one of several GPUs."""
    with torch.cuda.device(device):
        return interleave(contenders, rounds)


@contextlib.contextmanager
def shown(name: str, total: int, progress: bool) -> Iterator[Callable[[int, str], None]]:
    """A function that shows on a terminal how far the search is: a bar of rich, or else lines.

    It takes the number of plans that are done and a description of the next step.
    """
    if not progress or not sys.stderr.isatty():
        yield lambda done, text: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda done, text: print(f"{name}: {done} of {total}, {text}", file=sys.stderr)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done, text: bar.update(task, completed=done, description=f"{name}: {text}")


def _short(plan: Plan) -> str:
    num, place = plan.numerics, plan.placement
    return f"{num.threads_per_row} threads a row, {place.num_threads} a CTA, {place.loader} loads"
