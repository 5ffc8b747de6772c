"""What training wants of cross entropy: loss, z-loss, whether the guess is right, and the gradient.

Logits are capped, labels smoothed and classes weighted. The gradient may be written over the
logits.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def cross_entropy_training(
    logits, label: htile.PerRow, weight, cap: float = 30.0, scale: float = 0.5,
    z_weight: float = 1e-4, smoothing: htile.Static = 0.1,
):  # fmt: skip
    t = torch.tanh(logits / cap)
    z, column, n = cap * t, torch.arange(logits.shape[-1]), logits.shape[-1]
    lse, is_valid = torch.logsumexp(z, -1), label != -100
    loss = F.cross_entropy(z, label, weight, reduction="none", label_smoothing=smoothing)
    first = torch.where(z == z.amax(), column, n).amin()
    own = (1 - smoothing) * weight[torch.where(is_valid, label, 0)]
    total = own + smoothing / n * weight.sum() + 2 * z_weight * lse
    slope = total * torch.exp(z - lse) - smoothing / n * weight
    slope = torch.where(column == label, slope - own, slope) * (1 - t * t)
    return {
        "loss": torch.where(is_valid, loss, 0.0),
        "z_loss": torch.where(is_valid, z_weight * lse * lse, 0.0),
        "is_right": first == label,
        "gradient": torch.where(is_valid, scale * slope, 0.0),
    }


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(2).to(dtype)
    label = torch.where(torch.arange(m, device=device) % 2 == 0, logits.float().argmax(-1), 1)
    label[::5] = -100
    return logits, label, torch.rand(n, device=device)


def reference(logits, label, weight):
    n = logits.shape[-1]
    x = logits.double().requires_grad_()
    z = 30 * torch.tanh(x / 30)
    loss = F.cross_entropy(z.reshape(-1, n), label.flatten(), weight.double(), reduction="none",
                           label_smoothing=0.1).reshape(label.shape)  # fmt: skip
    z_loss = 1e-4 * torch.logsumexp(z, -1).square() * (label != -100)
    (gradient,) = torch.autograd.grad((loss + z_loss).sum(), x)
    # of equal logits numpy takes the first
    largest = torch.from_numpy(logits.float().cpu().numpy().argmax(-1)).to(label.device)
    return {
        "loss": loss.detach(), "z_loss": z_loss.detach(), "is_right": largest == label,
        "gradient": gradient / 2,
    }  # fmt: skip
