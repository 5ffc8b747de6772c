"""The gradient that pulls the largest logit of each row towards 0; of equal ones, the first."""

import torch

import htile

SIZE = 4096, 32000


@htile.rowwise
def l2_wrap(logits, weight: float = 1e-4):
    largest, first = logits.max(-1)
    return torch.where(torch.arange(logits.shape[-1]) == first, largest * weight, 0.0)


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(4).to(dtype),)


def reference(logits):
    # of equal ones numpy takes the first, and torch leaves open which one it takes
    index = logits.cpu().float().numpy().argmax(-1, keepdims=True)
    index = torch.from_numpy(index).to(logits.device)
    largest = logits.double().gather(-1, index)
    return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, index, largest * 1e-4)
