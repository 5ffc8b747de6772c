"""README.md, CONTRIBUTING.md, docs/: the code runs and prints what they show; links lead on."""

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import htile
from htile import cli
from tests import documents, reference_page
from tests.documents import PAGES, REPO, blocks, commands

RENEW = "run `python -m tests.documents --write` and read the diff"
READ = sorted({*PAGES, "CONTRIBUTING.md", "docs/errors.md", "docs/reference.md"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in which the code of a page runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(page, folder):
    names = {}
    ran = list(documents.run_page(page, on_gpu=False, names=names))
    assert len(ran) == sum(b.kind == "python" and not b.needs_gpu for b in blocks(page))
    for one in ran:
        if one.shown is not None:
            assert one.shown.fits(one.printed), (
                f"{page}, line {one.shown.line}: {RENEW}\n{one.printed}"
            )
    tensors = [value for value in names.values() if isinstance(value, torch.Tensor)]
    # as float64, because torch has no isfinite of float8
    assert all(t.double().isfinite().all() for t in tensors if not t.is_meta)


def test_outputs_stand_below_code_that_runs():
    """Otherwise nobody would compare them."""
    for page in PAGES:
        before = None
        for block in blocks(page):
            if block.is_output:
                assert before is not None and before.kind == "python", (page, block.line)
                assert not before.needs_gpu, (page, block.line)
            before = block


def test_every_title_says_what_is_done_with_a_block():
    titles = {
        "python": {"", documents.NEEDS_GPU},
        "sh": {"", documents.NEEDS_GPU},
        "text": {"", documents.OUTPUT, documents.VARYING},
    }
    for page in PAGES:
        text = (REPO / page).read_text(encoding="utf-8")
        assert text.count("\n```") == 2 * len(blocks(page)), f"{page}: a fence is not understood"
        for block in blocks(page):
            known = block.title in titles[block.kind]
            named = block.kind == "python" and (block.file or hasattr(htile, block.error or ""))
            assert known or named, f"{page}, line {block.line}: {block.title!r}"


def test_blocks_that_only_a_gpu_can_run_are_these():
    """They are left out here, and run by tests/gpu/test_documents.py."""
    left_out = Counter(
        page for page in PAGES for b in blocks(page) if b.kind == "python" and b.needs_gpu
    )
    assert left_out == {"README.md": 1, "docs/guide.md": 2}


COMMANDS = [(page, text) for page in PAGES for text, needs_gpu in commands(page) if not needs_gpu]
PYTHON = [(page, text) for page, text in COMMANDS if not text.startswith("make ")]


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=lambda value: value[:60])
def test_a_command_succeeds(page, text, folder):
    documents.write_files(page)
    done = documents.run_command(text, folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_of_make_have_targets():
    """What they do is not done here: `make test` would be run by itself."""
    found = {text for _, text in COMMANDS if text.startswith("make ")}
    assert {"make demo", "make test"} <= found
    for text in found:
        command = [*shlex.split(text), "-n", f"PYTHON={sys.executable}"]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_reference_is_made_of_the_tables():
    kept = reference_page.PAGE.read_text(encoding="utf-8")
    assert kept == reference_page.page(), f"docs/reference.md is old: {RENEW}"


def test_the_reference_has_every_function_and_public_name():
    text = reference_page.page()
    spellings = {spelling for spelling, _ in reference_page.FUNCTIONS.values()}
    missing = {spelling for spelling in spellings if f"`{spelling}`" not in text}
    missing -= {f"{spelling}_" for spelling in spellings}  # one sentence tells of all of them
    assert missing == {"x.double"}, "which is there to say that float64 is not"
    for name in htile.__all__:
        assert f"htile.{name}" in text or name in ("Rowwise", "__version__"), name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_a_page_is_not_too_long_to_be_read(page):
    assert len((REPO / page).read_text(encoding="utf-8").splitlines()) <= 150


LINK = re.compile(r"!?\[[^]]*\]\(([^)\s]*)\)")


def without_code(page):
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", (REPO / page).read_text("utf-8"), flags=re.S | re.M)


def anchors(path):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
            for heading in headings}  # fmt: skip


@pytest.mark.parametrize("page", READ)
def test_links_lead_to_something(page):
    path = REPO / page
    for target in LINK.findall(without_code(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        aim = path.parent / file if file else path
        assert aim.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(aim), f"{page}: {target}"


def test_the_command_of_the_readme_writes_the_pictures(tmp_path, monkeypatch, capsys):
    """No other pictures are kept. Coordinates to a point: versions of matplotlib differ below."""
    text = (REPO / "README.md").read_text("utf-8")
    (command,) = re.findall(r"^python -m htile (show .*--save) folder$", text, re.M)
    monkeypatch.chdir(REPO)
    assert cli.main([*shlex.split(command), str(tmp_path)]) == 0
    (saved,) = tmp_path.iterdir()
    assert f"saved in {saved}" in capsys.readouterr().err
    shown = {
        (REPO / page).parent / link
        for page in PAGES
        for link in LINK.findall(without_code(page))
        if link.endswith(".svg")
    }
    assert shown == {*(REPO / "docs" / "pictures").glob("*.svg")}
    assert {picture.name for picture in shown} == {"graph.svg", "plan.svg"}
    for picture in shown:
        kept, written = (re.sub(r"\.\d+", "", path.read_text("utf-8"))
                         for path in (picture, saved / picture.name))  # fmt: skip
        assert kept == written, f"{picture} is old: run the command, copy {picture.name} there"


PAGE = """\
# A page

```python
import htile
n = 2
```
```python title="needs a GPU"
n = 3
```
```python title="part.py"
print(n)
```
```text title="output"
2
```
```python title="raises ShapeError"
raise htile.ShapeError(f"{n} rows")
```
```text title="output; numbers vary"
ShapeError: 7 rows
```
"""


def test_blocks_run_in_order_in_one_namespace(folder, monkeypatch):
    monkeypatch.setattr(documents, "REPO", folder)
    Path("page.md").write_text(PAGE)
    on_cpu = [(one.printed, one.shown.fits(one.printed) if one.shown else None)
              for one in documents.run_page("page.md", on_gpu=False)]  # fmt: skip
    assert on_cpu == [("", None), ("2\n", True), ("ShapeError: 2 rows\n", True)]
    assert Path("part.py").read_text() == "print(n)\n"
    on_gpu = [one.printed for one in documents.run_page("page.md", on_gpu=True)]
    assert on_gpu == ["", "", "3\n", "ShapeError: 3 rows\n"]


def test_an_output_that_is_old_is_seen_and_renewed(folder, monkeypatch):
    monkeypatch.setattr(documents, "REPO", folder)
    Path("page.md").write_text(PAGE.replace("```\n2\n", "```\nold\n").replace("\n2\n", "\nold\n"))
    (_, part, _) = documents.run_page("page.md", on_gpu=False)
    assert not part.shown.fits(part.printed)
    assert documents.renewed("page.md") == PAGE


def test_an_error_that_is_not_raised_is_seen(folder, monkeypatch):
    monkeypatch.setattr(documents, "REPO", folder)
    Path("page.md").write_text('```python title="raises ShapeError"\nn = 1\n```\n')
    with pytest.raises(AssertionError, match=r"page\.md, line 2: nothing was raised"):
        list(documents.run_page("page.md", on_gpu=False))
