"""Every GPU of the machine, whichever is current."""

import pytest
import torch

from examples.softmax import arguments, softmax
from htile.testing import assert_close

from .matrix import BF16, assert_same_bits, seed

pytestmark = pytest.mark.gpu


def test_each_device_computes_the_same(device):
    seed("devices")
    (x,) = arguments(37, 1000, BF16, device)
    expected = softmax(x)
    assert_close(softmax, expected, x)
    for index in range(torch.cuda.device_count()):
        for current in range(torch.cuda.device_count()):
            with torch.cuda.device(current):
                there = x.to(f"cuda:{index}")
                result = softmax(there)
                assert result.device == there.device
                assert torch.cuda.current_device() == current
                assert_same_bits(result.cpu(), expected.cpu(), (index, current))
