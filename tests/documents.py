"""The code in README.md and docs/: what is run, what it prints, and what is renewed.

    python -m tests.documents --write          renew docs/reference.md and the outputs in all pages
    python -m tests.documents --run README.md  run the Python of one page; on a GPU all of it

The blocks of one page share one namespace and run in order. The word after the fence and the title
of a block say what is done with it:

    python                       it runs, on the CPU and on a GPU
    python, "needs a GPU"        it runs on a GPU only
    python, "raises ShapeError"  it must raise that error of htile
    python, "name.py"            it runs, and is a file in the folder that the commands run in
    sh                           each line is a command, which must succeed
    sh, "needs a GPU"            the same, on a GPU only
    text, "output"               exactly what the block before it prints, on the CPU
    text, "output; numbers vary" the same but for its numbers
"""

from __future__ import annotations

import argparse
import contextlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import htile

from .processes import REPO, environment

MADE_ELSEWHERE = ("errors.md", "reference.md")  # by test_errors.py and reference_page.py
PAGES = (
    "README.md",
    *sorted(
        f"docs/{path.name}"
        for path in (REPO / "docs").glob("*.md")
        if path.name not in MADE_ELSEWHERE
    ),
)
NEEDS_GPU = "needs a GPU"
WIDTH = 100  # columns of a message that a page shows
OUTPUT, VARYING = "output", "output; numbers vary"

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    start, end: where its content begins and ends in the page's text.
    line: the line of the page on which its content begins.
    """

    kind: str
    title: str
    content: str
    start: int
    end: int
    line: int

    @property
    def needs_gpu(self) -> bool:
        """Whether it runs on a GPU only."""
        return self.title == NEEDS_GPU

    @property
    def error(self) -> str | None:
        """The name of the error that it raises."""
        return self.title.removeprefix("raises ") if self.title.startswith("raises ") else None

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        return self.title if self.title.endswith(".py") else None

    @property
    def is_output(self) -> bool:
        """Whether it is what the block before it prints."""
        return self.kind == "text" and self.title in (OUTPUT, VARYING)

    def fits(self, printed: str) -> bool:
        """Whether this output is what was printed."""
        if self.title == VARYING:
            return _NUMBER.sub("0", self.content) == _NUMBER.sub("0", printed)
        return self.content == printed


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = (REPO / page).read_text(encoding="utf-8")
    return [
        Block(m[1], m[2] or "", m[3], m.start(3), m.end(3), text.count("\n", 0, m.start(3)) + 1)
        for m in _FENCE.finditer(text)
    ]


def commands(page: str) -> list[tuple[str, bool]]:
    """Each command of a page, and whether it needs a GPU."""
    found = []
    for block in blocks(page):
        if block.kind == "sh":
            lines = block.content.replace("\\\n", " ").splitlines()
            texts = (line.partition(" # ")[0].strip() for line in lines)
            found += [(text, block.needs_gpu) for text in texts if text]
    return found


@dataclass(frozen=True)
class Ran:
    """A block that was run, what it printed, and the output that the page shows for it."""

    block: Block
    printed: str
    shown: Block | None


def run_page(page: str, on_gpu: bool, names: dict[str, object] | None = None) -> Iterator[Ran]:
    """Run the Python of a page, block by block, in the current folder.

    An error of a block names the page and the line on which the block begins.

    names: the namespace that the blocks share; afterwards it holds what they have assigned.
    """
    names = {} if names is None else names
    names["__name__"] = "example"
    found = blocks(page)
    for k, block in enumerate(found):
        if block.kind != "python" or (block.needs_gpu and not on_gpu):
            continue
        following = found[k + 1] if k + 1 < len(found) else None
        shown = following if following is not None and following.is_output else None
        yield Ran(block, run_python(page, block, names), shown)


def run_python(page: str, block: Block, names: dict[str, object]) -> str:
    """Run one block in the namespace `names`; returns what it printed."""
    file = f"{page}:{block.line}/{block.file or 'example.py'}"
    if block.file:
        Path(block.file).write_text(block.content, encoding="utf-8")
    linecache.cache[file] = (len(block.content), None, block.content.splitlines(True), file)
    code = compile(block.content, file, "exec", dont_inherit=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.error is None:
            exec(code, names)
            return printed.getvalue()
        try:
            exec(code, names)
        except getattr(htile, block.error) as error:
            text = f"{type(error).__name__}: {error}".replace(file, block.file or "example.py")
            return "".join(f"{_wrapped(line)}\n" for line in text.splitlines())
    raise AssertionError(f"{page}, line {block.line}: nothing was raised")


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def write_files(page: str, folder: str | os.PathLike = ".") -> None:
    """Write the blocks of a page that are files into a folder."""
    for block in blocks(page):
        if block.file:
            Path(folder, block.file).write_text(block.content, encoding="utf-8")


def run_command(text: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command as a shell would in a folder that has `examples`, with this interpreter."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(REPO / "examples", target_is_directory=True)
    command = re.sub(r"(?<!\S)python ", f"{shlex.quote(sys.executable)} ", text, count=1)
    environ = environment(COLUMNS="100")
    return subprocess.run(
        command, shell=True, cwd=folder, env=environ, capture_output=True, text=True
    )


@contextlib.contextmanager
def inside(folder: str | os.PathLike) -> Iterator[None]:
    """Work in another folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def renewed(page: str) -> str:
    """The text of a page with the outputs that its blocks print now, on the CPU."""
    text = (REPO / page).read_text(encoding="utf-8")
    ran = [one for one in run_page(page, on_gpu=False) if one.shown is not None]
    for one in reversed(ran):
        if not one.shown.fits(one.printed):
            text = text[: one.shown.start] + one.printed + text[one.shown.end :]
    return text


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Renew or run the code of README.md and docs/.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="renew outputs and docs/reference.md")
    what.add_argument("--run", metavar="PAGE", choices=PAGES, help="run the Python of a page")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        if options.run:
            on_gpu = torch.cuda.is_available()
            count = sum(1 for _ in run_page(options.run, on_gpu))
            print(f"{options.run}: {count} blocks ran")
            return
        from tests import reference_page

        made = {f"docs/{reference_page.PAGE.name}": reference_page.page()}
        for page, text in {**made, **{page: renewed(page) for page in PAGES}}.items():
            path = REPO / page
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8", newline="\n")
                print(f"renewed {page}")


if __name__ == "__main__":
    main()
