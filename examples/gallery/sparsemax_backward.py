"""The gradient of sparsemax, from its result: the mean over what is not 0 is taken away."""

import torch

import htile

SIZE = 8192, 4096


@htile.rowwise
def sparsemax_backward(dy, y):
    is_kept = y > 0
    mean = torch.where(is_kept, dy, 0.0).sum() / is_kept.sum()
    return torch.where(is_kept, dy - mean, 0.0)


def arguments(m, n, dtype, device):
    y = torch.relu(torch.randn(m, n, device=device) - 1)
    y[:, 0] = 1.0
    return torch.randn(m, n, device=device).to(dtype), y.to(dtype)


def reference(dy, y):
    kept = torch.sign(y.double())
    share = kept / kept.sum(-1, keepdim=True)
    return kept * dy.double() - kept * torch.einsum("...n,...n->...", share, dy.double())[..., None]
