"""The clipped policy loss of GRPO, its penalty for leaving a reference policy, and the gradient."""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def grpo(
    logits, token: htile.PerRow, old: htile.PerRow, anchor: htile.PerRow, advantage: htile.PerRow,
    beta: float = 0.04, low: float = 0.2, high: float = 0.28, temperature: float = 0.9,
):  # fmt: skip
    z = logits / temperature
    lse = torch.logsumexp(z, -1)
    logp = z[token] - lse
    ratio = torch.exp(logp - old)
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    away = torch.exp(anchor - logp)
    loss = -torch.minimum(plain, clipped) + beta * (away - (anchor - logp) - 1)
    dlogp = torch.where(plain <= clipped, -plain, 0.0) + beta * (1 - away)
    p = torch.exp(z - lse)
    slope = torch.where(torch.arange(z.shape[-1]) == token, 1 - p, -p)
    return loss, logp, dlogp * slope / temperature


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).to(dtype)
    token = torch.randint(n, (m,), device=device)
    logp = F.log_softmax(logits.float() / 0.9, -1).gather(-1, token[:, None])[:, 0]
    old, away = 0.3 * torch.randn(2, m, device=device)
    # not too near: a difference of almost equal numbers has few digits in float32
    anchor = logp + away + 0.3 * torch.sign(away)
    return logits, token, logp + old, anchor, torch.randn(m, device=device)


def reference(logits, token, old, anchor, advantage):
    x = logits.double().requires_grad_()
    logp = F.log_softmax(x / 0.9, -1).gather(-1, token[..., None])[..., 0]
    ratio, advantage = torch.exp(logp - old.double()), advantage.double()
    kept = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.28) * advantage)
    loss = 0.04 * (torch.expm1(anchor.double() - logp) - (anchor.double() - logp)) - kept
    return loss.detach(), logp.detach(), torch.autograd.grad(loss.sum(), x)[0]
