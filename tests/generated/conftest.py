"""Compiles what the generated GPU tests run in forked workers, and prints what kinds there were."""

import subprocess
import sys

import pytest
import torch

from htile.build import cache
from htile.build.arch import arch_of_capability

from . import test_on_gpu

CAPABILITY = "import torch; print(*torch.cuda.get_device_capability())"


@pytest.fixture(scope="session")
def device(request):
    """The GPU. What tests/gpu has not compiled already with the jobs of all modules is compiled."""
    asked = subprocess.run([sys.executable, "-c", CAPABILITY], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    arch = arch_of_capability(tuple(map(int, asked.stdout.split()))).name
    if not all(cache.path_of(*args).exists() for _, args in test_on_gpu.jobs(arch)):
        assert not torch.cuda.is_initialized(), "workers must be forked before CUDA is used"
        test_on_gpu.compile_ahead(arch)
    return torch.device("cuda")


def pytest_terminal_summary(terminalreporter):
    """How often each kind of plan was reached, and how many results exceed the strict measure."""
    for line in test_on_gpu.summary():
        terminalreporter.write_line(line)
