"""The two hand-written kernels compile for every architecture without a stack frame."""

import math

import pytest
import torch

from examples.handwritten_rmsnorm import compile_rmsnorm
from examples.handwritten_softmax import alignment, compile_softmax
from tests.primitives.device_code import ARCHS, stack_frame

BF16, F32 = torch.bfloat16, torch.float32
KEEP = {"options": "--keep-cubin --keep-ptx"}
# x, weight, bias, residual, out, residual out, rstd, mean; None: absent
RMSNORM = (BF16, BF16, None, None, BF16, None, None, None)
RESIDUAL = (BF16, BF16, None, BF16, BF16, BF16, F32, None)
LAYERNORM = (F32, F32, F32, F32, F32, F32, F32, F32)


def align_of(dtype, N):
    return math.gcd(16, N * dtype.itemsize)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("N", [1, 7, 1000, 4096, 4097, 16384, 131072, 262144])
def test_softmax(N, dtype, online):
    align = align_of(dtype, N)
    compiled = compile_softmax(dtype, N, "sm_90a", align=align, online_softmax=online, **KEEP)
    assert stack_frame(compiled.__cubin__) == 0
    assert "div." not in compiled.__ptx__


@pytest.mark.parametrize("dtypes", [RMSNORM, RESIDUAL, LAYERNORM], ids=["rms", "rmsres", "ln"])
@pytest.mark.parametrize("N", [7, 3000, 4096, 6144, 16384, 131072, 262144])
def test_norms(N, dtypes):
    is_layernorm = dtypes is LAYERNORM
    align = align_of(dtypes[0], N)
    compiled = compile_rmsnorm(N, "sm_90a", *dtypes, align=align, is_layernorm=is_layernorm, **KEEP)
    assert stack_frame(compiled.__cubin__) == 0


@pytest.mark.parametrize("arch", [a for a in ARCHS if a != "sm_90a"])
@pytest.mark.parametrize("N", [1000, 6144, 8192])
def test_architectures(N, arch):
    assert stack_frame(compile_softmax(BF16, N, arch, **KEEP).__cubin__) == 0
    assert stack_frame(compile_rmsnorm(N, arch, *RESIDUAL, **KEEP).__cubin__) == 0
    layernorm = compile_rmsnorm(N, arch, *LAYERNORM, is_layernorm=True, **KEEP)
    assert stack_frame(layernorm.__cubin__) == 0


def test_too_long_without_clusters():
    with pytest.raises(ValueError, match="need clusters"):
        compile_softmax(BF16, 65536, "sm_80")


def test_alignment():
    x = torch.empty(4, 100, dtype=BF16)
    step = 2 * x.element_size()
    assert alignment(x) == math.gcd(16, x.data_ptr(), 200)
    assert alignment(x[:, 2:]) == math.gcd(16, x.data_ptr() + step, 200)
    assert alignment(torch.empty(64)) == 16
