"""The code and the commands of README.md and docs/, as they stand, on the GPU."""

import re
import subprocess
import sys

import pytest

from examples import NAMES
from tests import documents
from tests.documents import PAGES, REPO, blocks, commands

pytestmark = pytest.mark.gpu

COMMANDS = [
    (page, text)
    for page in PAGES
    for text, _ in commands(page)
    if not text.startswith("make ")  # `make demo` is below, and `make gpu-test` runs this
]


def run(command, folder):
    environ = documents.environment(COLUMNS="100")
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_all_of_the_python_of_a_page_runs(page, tmp_path):
    """In a process of its own: this one must not use CUDA, since later tests fork it."""
    count = sum(block.kind == "python" for block in blocks(page))
    text = run([sys.executable, "-m", "tests.documents", "--run", page], tmp_path)
    assert f"{page}: {count} blocks ran" in text


@pytest.mark.parametrize(("page", "text"), COMMANDS, ids=lambda value: value[:60])
def test_a_command_succeeds(page, text, tmp_path):
    documents.write_files(page, tmp_path)
    done = documents.run_command(text, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if text.startswith("HTILE_DUMP="):
        assert [*(tmp_path / "dump").glob("halved-*/kernel.py")], "the kernel was not saved"


def test_the_demo_shows_a_share_of_a_copy_for_every_example():
    text = run(["make", "demo", f"PYTHON={sys.executable}"], REPO)
    for name in NAMES:
        line = rf"^{name} +\d\.\d\d +[\d.]+ us +\d+ +\d+%.* [\d.]+ x$"
        assert len(re.findall(line, text, re.M)) == 1, f"{name}\n{text}"
