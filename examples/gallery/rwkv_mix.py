"""Six mixtures of a token and its difference from the one before: one row in, six rows out."""

import torch

import htile

SIZE = 8192, 4096


@htile.rowwise
def rwkv_mix(hidden, delta, r, w, k, v, a, g):
    return [hidden + delta * weight for weight in (r, w, k, v, a, g)]


def arguments(m, n, dtype, device):
    hidden, delta = torch.randn(2, m, n, device=device).to(dtype)
    return hidden, delta, *torch.rand(6, n, device=device).to(dtype).unbind()


def reference(hidden, delta, *weights):
    return [torch.addcmul(hidden.double(), delta.double(), w.double()) for w in weights]
