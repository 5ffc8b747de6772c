"""RMS norm as Llama and as Gemma have it, and the reciprocal root that a backward pass needs.

Llama rounds the normalized row to the dtype of the model before it multiplies by the weight.
Gemma multiplies by 1 + weight in float32.
"""

import torch

import htile

SIZE = 8192, 4096
VARIANTS = ({"casting": "llama"}, {"casting": "gemma", "offset": 1.0})


@htile.rowwise
def rmsnorm_casting(
    x, weight, offset: float = 0.0, eps: float = 1e-6, casting: htile.Static = "llama"
):
    r = torch.rsqrt((x * x).mean() + eps)
    normed = x * r
    if casting == "llama":
        normed = normed.to(x.dtype)
    return normed * (offset + weight), r


def arguments(m, n, dtype, device):
    x = torch.randn(m, n, device=device).mul(3).to(dtype)
    return x, torch.randn(n, device=device).mul(0.1).to(dtype)


def reference(x, weight, offset=0.0, casting="llama"):
    r = x.double().pow(2).mean(-1).add(1e-6).pow(-0.5)
    normed = x.double() / x.double().pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    if casting == "llama":
        normed = normed.to(x.dtype).double()
    return normed * (weight.double() + offset), r
