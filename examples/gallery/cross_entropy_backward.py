"""The gradient of cross entropy from the logarithm that the forward pass has kept.

Each row has the gradient of its own loss. A row whose label is -100 has none. It may be written
over the logits.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def cross_entropy_backward(
    logits, lse: htile.PerRow, label: htile.PerRow, dloss: htile.PerRow, weight
):
    p = torch.exp(logits - lse)
    slope = torch.where(torch.arange(logits.shape[-1]) == label, p - 1, p)
    is_valid = label != -100
    factor = torch.where(is_valid, dloss * weight[torch.where(is_valid, label, 0)], 0.0)
    return slope * factor


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(2).to(dtype)
    label = torch.randint(n, (m,), device=device)
    label[::4] = -100
    lse, dloss = torch.logsumexp(logits.float(), -1), torch.randn(m, device=device)
    return logits, lse, label, dloss, torch.rand(n, device=device)


def reference(logits, lse, label, dloss, weight):
    n = logits.shape[-1]
    z = logits.detach().double().reshape(-1, n).requires_grad_()
    loss = F.cross_entropy(z, label.flatten(), weight.double(), reduction="none")
    (gradient,) = torch.autograd.grad(loss, z, dloss.double().flatten())
    return gradient.reshape(logits.shape)
