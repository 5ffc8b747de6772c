"""`make demo`: what HTile makes of a function, and every example, checked.

On a GPU the examples are timed beside torch's own functions and a copy of as many bytes. Without
one they run through the reference, and are compiled for sm_90a all the same.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

import htile
from examples import NAMES, load
from examples.run import TORCH
from htile.lower.emission.names import value_names
from htile.pictures.model import Style, picture_of
from htile.run.kernel import Kernel
from htile.testing import assert_close
from htile.tune.timing import interleave

SHOWN = "softmax"  # the example that is shown in full
CHECKED = 64, 4096  # rows and elements that are checked against float64
TIMED = 32768, 4096  # rows and elements that are timed
ROUNDS = 20
DTYPE = torch.bfloat16
CODES = {"bold": "1", "faint": "2", "green": "32"}
NO_GPU = (
    "There is no GPU here, so the examples run through the reference, which is the same graph "
    "evaluated by torch. Their kernels are compiled for sm_90a all the same."
)
COLUMNS = (
    "error: the largest one against float64, in units of what is allowed. of a copy: the speed "
    "beside a copy of as many bytes. faster: than torch's own functions for the same thing."
)


def main() -> None:
    """Print the demo for the machine at hand."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    page = Page(shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty() and not is_plain)
    if torch.cuda.is_available():
        rows, n = TIMED
        page.title(f"Every example on {torch.cuda.get_device_name()}")
        print(page.wrapped(f"{rows} rows of {n} elements, bfloat16, cold L2. {COLUMNS}\n"))
        print(f"\n{page.faint(heading(page))}")
        measured = []
        for name in NAMES:
            measured.append(measure(name))
            print(table_line(measured[-1], page), flush=True)
        print(f"\n{page.wrapped(summary(measured))}")
        show(SHOWN, "cuda", page)
    else:
        print(page.wrapped(NO_GPU))
        show(SHOWN, "cpu", page)
        page.title(
            "Every example: its error in units of what is allowed, and its kernel for sm_90a"
        )
        for name in NAMES:
            print(check_line(name, page), flush=True)
    print(f"\n{page.wrapped(cache_text())}")


class Page:
    """Text for a terminal of so many columns, of which 80 to 120 are used."""

    def __init__(self, columns: int, colours: bool):
        self.width, self.colours = max(80, min(120, columns)), colours
        try:
            "█▏…".encode(sys.stdout.encoding or "ascii")
            self.blocks = " ▏▎▍▌▋▊▉█"
        except UnicodeEncodeError:
            self.blocks = " #"

    def paint(self, text: str, colour: str) -> str:
        """The text in a colour of CODES, if there are colours."""
        return f"\x1b[{CODES[colour]}m{text}\x1b[0m" if self.colours and text else text

    def faint(self, text: str) -> str:
        """What is said beside the matter."""
        return self.paint(text, "faint")

    def title(self, text: str) -> None:
        """Print the title of a section."""
        print(f"\n{self.paint(text, 'bold')}\n")

    def wrapped(self, text: str) -> str:
        """A paragraph."""
        return textwrap.fill(text, self.width)

    def fitted(self, text: str) -> str:
        """Lines of code or of a plan. One that is too long loses its comment, or is broken."""
        lines = []
        for line in text.rstrip().splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            code, mark, comment = line.partition("  # ")
            if len(line) > self.width and len(code) <= self.width:
                lines.append(code)
            elif len(line) > self.width:
                lines += textwrap.wrap(line, self.width, subsequent_indent=indent + " " * 8,
                                       drop_whitespace=True, break_on_hyphens=False)  # fmt: skip
            else:
                lines.append(code + self.faint(mark + comment))
        return "\n".join(lines)

    def bar(self, share: float, width: int) -> str:
        """A bar of a share of `width`, at most all of it."""
        steps = len(self.blocks) - 1
        filled = round(max(0.0, min(share, 1.0)) * width * steps)
        full, part = divmod(filled, steps)
        text = self.blocks[-1] * full + (self.blocks[part] if part else "")
        return self.paint(text.ljust(width), "green")


def show(name: str, device: str, page: Page) -> None:
    """The user's lines, the graph with its stages, the plan, the kernel, what it compiled to."""
    function, arguments = load(name)
    kernel = function.inspect(*arguments(*CHECKED, DTYPE, device))
    page.title(f"1. What you write: examples/{name}.py")
    print(inspect.getsource(inspect.unwrap(function)).rstrip())
    page.title("2. The graph, stage by stage")
    print("\n".join(graph_lines(kernel, page)))
    page.title("3. The plan")
    print(page.fitted(str(kernel.plan)))
    page.title("4. The kernel that is emitted, all of it")
    print(page.fitted(kernel.source))
    page.title(f"5. What it compiles to, for {kernel.arch}")
    print(page.wrapped(f"{compiled_text(kernel)}: {resources_text(kernel)}."))


def graph_lines(kernel: Kernel, page: Page) -> Iterable[str]:
    """Each value with its type, under the user's line and the stage that it belongs to."""
    picture = picture_of(kernel.graph, value_names(kernel.plan))
    for band in picture.bands:
        yield f"{band.name:<10} {page.faint(band.what)}"
        for box in picture.boxes:
            if box.stage != band.stage:
                continue
            rows = box.texts if box.ids else [box.texts[0]]
            for text in rows:
                room = page.width - 16 - len(text.right)
                left = textwrap.shorten(text.left, room, placeholder=" ...")
                line = f"             {left.ljust(room)}  {text.right}".rstrip()
                yield page.faint(line) if text.style is Style.FAINT else line


def compiled_text(kernel: Kernel) -> str:
    """How the kernel came to be: compiled just now, or taken from the cache."""
    before, start = htile.cache_info(), time.perf_counter()
    try:
        kernel.artifact  # noqa: B018 (it is compiled when it is first asked for)
    except htile.CompileError as error:
        return f"not compiled ({error.message})"
    seconds, after = time.perf_counter() - start, htile.cache_info()
    if after.compiled > before.compiled:
        return f"compiled in {seconds:.2f} s"
    return "from the cache" if after.hits > before.hits else "already compiled"


def resources_text(kernel: Kernel) -> str:
    """What the kernel uses."""
    try:
        return str(kernel.resources)
    except htile.CompileError:
        return "its resources are not known"


def cache_text() -> str:
    """What this process compiled, and where it is kept."""
    info = htile.cache_info()
    where = f"They are kept in {info.folder}." if info.folder else "The cache is turned off."
    return f"Kernels compiled: {info.compiled}; taken from the cache: {info.hits}. {where}"


def check_line(name: str, page: Page) -> str:
    """One example through the reference, and its kernel compiled for sm_90a."""
    function, arguments = load(name)
    args = arguments(*CHECKED, DTYPE, "cpu")
    worst = assert_close(function, function(*args), *args)
    kernel = function.inspect(*args, arch="sm_90a")
    how = compiled_text(kernel)
    line = f"{name:<15} error {worst:4.2f}   stages {kernel.plan.stages}"
    if how.startswith("not compiled"):
        return f"{line}   {how}"
    return f"{line}   registers {kernel.resources.registers:>3}   {page.faint(how)}"


@dataclass(frozen=True)
class Measured:
    """One example on a GPU.

    error: the largest one against float64, in units of the bound.
    bytes: what the kernel reads and writes.
    times: microseconds of each launch of `htile`, of `torch`'s own functions, and of a `copy` of as
        many bytes.
    """

    name: str
    error: float
    bytes: int
    times: dict[str, list[float]]

    def took(self, contender: str) -> float:
        """The median time, in microseconds."""
        return median(self.times[contender])

    @property
    def share(self) -> float:
        """The speed of HTile's kernel over that of the copy."""
        return self.took("copy") / self.took("htile")

    @property
    def speedup(self) -> float:
        """How many times as fast as torch's own functions HTile's kernel is."""
        return self.took("torch") / self.took("htile")


def measure(
    name: str,
    device: str = "cuda",
    shape: tuple[int, int] = TIMED,
    timer: Callable[[dict[str, Callable], int], dict[str, list[float]]] = interleave,
) -> Measured:
    """Check one example, and time it with `timer`."""
    function, arguments = load(name)
    args = arguments(*CHECKED, DTYPE, device)
    error = assert_close(function, function(*args), *args)
    args = arguments(*shape, DTYPE, device)
    moved = sum(function.inspect(*args).plan.bytes_per_row()) * shape[0]
    source = torch.empty(moved // 2, dtype=torch.int8, device=device)
    copy = torch.empty_like(source)
    contenders = {
        "htile": lambda: function(*args),
        "torch": lambda: TORCH[name](*args),
        "copy": lambda: copy.copy_(source),
    }
    return Measured(name, error, moved, timer(contenders, ROUNDS))


def heading(page: Page) -> str:
    """The names of the columns."""
    return _row("", "error", "time", "GB/s", "of a copy", "", "torch", "faster", page)


def table_line(m: Measured, page: Page) -> str:
    """One example as a line of the table."""
    took, beside = m.took("htile"), m.took("torch")
    return _row(
        m.name, f"{m.error:.2f}", f"{took:.1f} us", f"{m.bytes / took / 1e3:.0f}", f"{m.share:.0%}",
        page.bar(m.share, bar_width(page)), f"{beside:.1f} us",
        page.paint(f"{m.speedup:>7.1f} x", "bold"), page,
    )  # fmt: skip


def bar_width(page: Page) -> int:
    """Columns that the table has for bars."""
    return min(30, page.width - 68)


def _row(
    name: str, error: str, took: str, speed: str, share: str, bar: str, torch: str, faster: str,
    page: Page,
) -> str:  # fmt: skip
    bar = bar or " " * bar_width(page)
    return f"{name:<15}{error:>6}{took:>11}{speed:>6}{share:>10} {bar}{torch:>10}{faster:>9}"


def summary(measured: Sequence[Measured]) -> str:
    """The geometric means."""
    share = math.exp(sum(math.log(m.share) for m in measured) / len(measured))
    speedup = math.exp(sum(math.log(m.speedup) for m in measured) / len(measured))
    return (
        f"On average {share:.0%} of the speed of a copy, and {speedup:.1f} times as fast as torch "
        "(geometric means). A kernel may be faster than the copy where it reads and writes in "
        "another proportion."
    )


if __name__ == "__main__":
    main()
