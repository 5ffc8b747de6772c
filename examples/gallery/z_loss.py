"""The z-loss: the weighted square of the logarithm of the sum of exponentials, and its gradient."""

import torch

import htile

SIZE = 4096, 32000


@htile.rowwise
def z_loss(logits, weight: float = 1e-4):
    lse = torch.logsumexp(logits, -1)
    return weight * lse * lse, 2 * weight * lse * torch.exp(logits - lse)


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(4).to(dtype),)


def reference(logits):
    z = logits.double().requires_grad_()
    loss = 1e-4 * z.exp().sum(-1).log().square()
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]
