"""The gradient of a dropout whose mask is stored as bits, 32 elements to an int32."""

import torch

import htile

SIZE = 262144, 128
SMALL = 64, 96
VARIANTS = {}, {"p": 0.5}


@htile.rowwise
def dropout_bits_backward(gradient, bits: htile.Inner[1], p: float = 0.1):
    keep = bits[:, None] >> torch.arange(32, dtype=torch.int32) & 1
    return torch.where(keep.flatten() == 1, gradient / (1 - p), 0.0)


def arguments(m, n, dtype, device):
    bits = torch.randint(-(2**31), 2**31, (m, n // 32), device=device, dtype=torch.int32)
    return torch.randn(m, n, device=device).to(dtype), bits


def reference(gradient, bits, p=0.1):
    flags = bits.long().remainder(2**32).unsqueeze(-1) // 2 ** torch.arange(32, device=bits.device)
    keep = flags.remainder(2).flatten(-2)
    return gradient.double() * keep / (1 - p)
