"""5000 random calls on the GPU: each right, or refused; no CUDA error, no poisoned context."""

import pytest
import torch

from htile.build.compile import build
from tests import fuzz

pytestmark = pytest.mark.gpu
SEED, COUNT = 0, 5000


def jobs(arch):
    """What the calls compile."""
    for source, function in fuzz.kernels(SEED, COUNT, arch):
        yield build, (source, function, arch)


@pytest.mark.filterwarnings("ignore")
def test_random_calls(device, built):
    seen = fuzz.run(SEED, COUNT, "cuda")
    torch.cuda.synchronize()
    print(dict(seen))
    assert seen["right"] > COUNT // 4 and seen["own"] + seen["number"] < COUNT // 50
    for kind in ("Argument", "Shape", "Dtype", "Unsupported", "Trace", "Gradient"):
        assert seen[f"{kind}Error"], f"no {kind}Error was drawn"
