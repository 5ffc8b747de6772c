"""Distances of two rows of probabilities, with gradients: KL divergence and total variation."""

import torch

import htile

SIZE = 4096, 32000
VARIANTS = ({"kind": "kl"}, {"kind": "tvd"})


@htile.rowwise
def distances(x, target, kind: htile.Static = "kl"):
    """For "kl", x holds logarithms of probabilities; for "tvd", probabilities."""
    if kind == "kl":
        return (torch.xlogy(target, target) - target * x).sum(), -target
    return 0.5 * (x - target).abs().sum(), 0.5 * torch.sign(x - target)


def arguments(m, n, dtype, device):
    x, target = torch.softmax(torch.randn(2, m, n, device=device), -1).to(dtype)
    return x, target


def reference(x, target, kind="kl"):
    x, target = x.double().requires_grad_(), target.double()
    if kind == "kl":
        loss = torch.nn.functional.kl_div(x, target, reduction="none").sum(-1)
    else:
        loss = torch.cdist(x[..., None, :], target[..., None, :], p=1)[..., 0, 0] / 2
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]
