"""PolyNorm: the normalized first, second and third powers of a row, weighted and added up.

The three weights are one small tensor on the device. Its annotation says that it is no value for
each row, also where there are three rows. The reciprocal roots are results too, for a backward
pass.
"""

import torch

import htile

SIZE = 8192, 4096


@htile.rowwise
def polynorm(x, weights: htile.Inner[1], bias: htile.Scalar, eps: float = 1e-6):
    powers = [x * x * x, x * x, x]
    roots = [torch.rsqrt((p * p).mean() + eps) for p in powers]
    y = sum(w * r * p for w, r, p in zip(weights.unbind(), roots, powers, strict=True))
    return y + bias, torch.stack(roots)


def arguments(m, n, dtype, device):
    weights = torch.tensor([0.5, 0.3, 0.2], device=device)
    bias = torch.tensor([0.1], device=device)
    return torch.randn(m, n, device=device).to(dtype), weights, bias


def reference(x, weights, bias):
    powers = torch.stack([x.double() ** k for k in (3, 2, 1)], -2)
    roots = (powers.square().mean(-1) + 1e-6).rsqrt()
    y = torch.einsum("k,...k,...kn->...n", weights.double(), roots, powers)
    return y + bias.double(), roots
