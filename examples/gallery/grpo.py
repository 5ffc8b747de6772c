"""Policy losses with a penalty for leaving a reference policy, and the gradient: GRPO and its kin.

GRPO clips the ratio of the new and the old policy. CISPO clips it as a weight that has no gradient.
SAPO bends it smoothly instead.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000
VARIANTS = ({"kind": "grpo"}, {"kind": "cispo"}, {"kind": "sapo"})


@htile.rowwise
def grpo(
    logits, token: htile.PerRow, old: htile.PerRow, anchor: htile.PerRow, advantage: htile.PerRow,
    beta: float = 0.04, low: float = 0.2, high: float = 0.28, temperature: float = 0.9,
    kind: htile.Static = "grpo",
):  # fmt: skip
    z = logits / temperature
    lse = torch.logsumexp(z, -1)
    logp = z[token] - lse
    ratio = torch.exp(logp - old)
    plain = ratio * advantage
    if kind == "grpo":
        gain = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantage)
        slope = torch.where(plain <= gain, plain, 0.0)
    elif kind == "cispo":
        slope = ratio.clamp(max=1 + high) * advantage
        gain = slope * logp
    else:
        share = torch.sigmoid(ratio - 1)
        gain, slope = 4 * share * advantage, 4 * share * (1 - share) * plain
    away = torch.exp(anchor - logp)
    loss = beta * (away - (anchor - logp) - 1) - gain
    dlogp = beta * (1 - away) - slope
    p = torch.exp(z - lse)
    is_token = torch.arange(z.shape[-1]) == token
    return loss, logp, dlogp * torch.where(is_token, 1 - p, -p) / temperature


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).to(dtype)
    token = torch.randint(n, (m,), device=device)
    logp = F.log_softmax(logits.float() / 0.9, -1).gather(-1, token[:, None])[:, 0]
    old, away = 0.3 * torch.randn(2, m, device=device)
    # not too near: a difference of almost equal numbers has few digits in float32
    anchor = logp + away + 0.3 * torch.sign(away)
    return logits, token, logp + old, anchor, torch.randn(m, device=device)


def reference(logits, token, old, anchor, advantage, kind="grpo"):
    x = logits.double().requires_grad_()
    logp = F.log_softmax(x / 0.9, -1).gather(-1, token[..., None])[..., 0]
    ratio, advantage = torch.exp(logp - old.double()), advantage.double()
    if kind == "grpo":
        gain = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.28) * advantage)
    elif kind == "cispo":
        gain = ratio.detach().clip(max=1.28) * advantage * logp
    else:
        gain = 4 / (1 + torch.exp(1 - ratio)) * advantage
    loss = 0.04 * (torch.expm1(anchor.double() - logp) - (anchor.double() - logp)) - gain
    return loss.detach(), logp.detach(), torch.autograd.grad(loss.sum(), x)[0]
