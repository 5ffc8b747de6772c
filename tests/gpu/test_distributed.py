"""DTensors and FSDP2 on GPUs, through NCCL: a process for each GPU, of which there are up to two.

With one GPU its process has all rows. What is computed is that of tests/test_distributed.py.
"""

import pytest
import torch

from tests import test_distributed as on_cpu

pytestmark = pytest.mark.gpu

MOST = 2  # processes; the rows of the tests are for so many


@pytest.fixture(scope="module")
def each(tmp_path_factory):
    """What each process has found."""
    world = min(torch.cuda.device_count(), MOST)
    runs = "split_rows,of_each_role,one_row,products,fully_sharded,in_16_bits"
    return on_cpu.processes(runs, world, tmp_path_factory.mktemp("nccl"), "cuda")


def test_training_with_rows_that_are_split(each):
    on_cpu.test_training_with_rows_that_are_split(each)


def test_training_with_fsdp(each):
    on_cpu.test_training_with_fsdp(each)


def test_arguments_of_each_role(each):
    on_cpu.test_arguments_of_each_role(each)


def test_a_process_without_rows(each):
    on_cpu.test_a_process_without_rows(each)


def test_products_with_a_matrix(each):
    on_cpu.test_products_with_a_matrix(each)
