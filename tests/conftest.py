"""What all tests share: the `gpu` mark, golden files, calls, and folders of their own."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

# A question to the driver's library, not to CUDA: workers are forked later and must find a process
# that never used CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# CuTe-DSL writes what it keeps (PTX, cubin) into the working folder unless told otherwise.
os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp(prefix="htile-tests-"))

# Not the user's compiled kernels: a folder of this run, which its workers share, or the one that
# `python -m tests.gpu` makes for several runs.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
SHARED = os.environ.get("HTILE_TESTS_CACHE")
if not IS_WORKER:
    os.environ["HTILE_CACHE_DIR"] = SHARED or tempfile.mkdtemp(prefix="htile-tests-cache-")
CACHE = os.environ["HTILE_CACHE_DIR"]

GOLDEN = Path(__file__).parent / "golden"


def has_gpu() -> bool:
    """Whether torch is a CUDA build and sees a GPU; initializes nothing."""
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden with what is emitted"
    )
    parser.addoption("--part", metavar="K/N", help="only every N-th test, from the K-th on")
    parser.addoption(
        "--full-product", action="store_true",
        help="compile all functions in all ways, where tests take some that have each pair",
    )  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """Skip what needs a GPU where there is none; run tests/gpu, which forks workers, first."""
    if part := config.getoption("--part"):
        first, step = map(int, part.split("/"))
        items[:] = items[first::step]
    if any(item.get_closest_marker("gpu") for item in items) and not has_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    items.sort(key=lambda item: item.path.parent.name != "gpu")


def pytest_unconfigure():
    if not IS_WORKER and not SHARED:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture
def called(monkeypatch):
    """The names of the row-wise functions that are called."""
    from htile.run.rowwise import Rowwise  # as late as possible: workers are forked

    names = []
    before = Rowwise.__call__

    def call(self, *args, **kwargs):
        names.append(self.__name__)
        return before(self, *args, **kwargs)

    monkeypatch.setattr(Rowwise, "__call__", call)
    return names


@pytest.fixture
def golden(request):
    """`golden(name, text)`: assert that `text` is what tests/golden/<name> holds."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.exists(), f"{path} is missing: run pytest --update-golden and read it"
        assert text == path.read_text(encoding="utf-8"), (
            f"differs from {path}: if that is meant, run pytest --update-golden and read the diff"
        )

    return check
