"""Compiles what the GPU tests run, in forked workers, before the first of them uses CUDA."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import htile
from htile.build import compile as compiler

from . import matrix

# `python -m tests.gpu` has compiled everything before, and runs several of these.
WORKERS = 2 if "HTILE_TESTS_CACHE" in os.environ else os.cpu_count()


@pytest.fixture(scope="session")
def arch():
    """The GPU's architecture."""
    return matrix.arch_of_the_gpu()


@pytest.fixture(scope="session")
def built(request, arch):
    """The results of all `jobs(arch)` of the collected modules, by job.

    A job that fails is left out: the test that needs it fails by itself.
    """
    assert not torch.cuda.is_initialized(), "workers must be forked before CUDA is used"
    modules = dict.fromkeys(item.module for item in request.session.items)
    jobs = matrix.jobs_of(modules, arch)
    context = multiprocessing.get_context("fork")
    # one thread each: torch's own do not survive a fork, and would be waited for
    with ProcessPoolExecutor(WORKERS, context, torch.set_num_threads, (1,)) as pool:
        futures = {job: pool.submit(job[0], *job[1]) for job in dict.fromkeys(jobs)}
    results = {job: f.result() for job, f in futures.items() if f.exception() is None}
    for (function, arguments), artifact in results.items():
        if function is compiler.build:
            source, _, arch = arguments
            compiler._ARTIFACTS.keep((source, arch), artifact)  # the disk cache has all of them
    print(f"compiled {len(results)} of {len(futures)} kernels ahead")
    return results


@pytest.fixture(scope="session")
def device(built):
    """The GPU, once everything is compiled."""
    matrix.poison_shortcuts()
    with matrix.poisoned_memory():
        assert torch.empty(3, device="cuda").isnan().all()
    return torch.device("cuda")


@pytest.fixture
def compiles_nothing(device):
    """Fail a test that compiles a kernel which was not listed in `jobs`."""
    before = htile.cache_info().compiled
    yield
    assert htile.cache_info().compiled == before, "a kernel was not compiled ahead"
