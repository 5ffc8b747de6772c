"""The log probability, the rank and the entropy of sampled tokens, and some tokens' beside it."""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000
OTHERS = 3


@htile.rowwise
def token_logprob(logits, token: htile.PerRow, others: htile.Inner[1], temperature: float = 1.0):
    z = logits / temperature
    lse = torch.logsumexp(z, -1)
    logp = z - lse
    return {
        "logprob": logp[token],
        "rank": (logits >= logits[token]).sum(),
        "entropy": -(torch.exp(logp) * logp).sum(),
        "others": torch.stack([logp[other] for other in others.unbind()]),
    }


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(4).to(dtype)
    token = torch.randint(n, (m,), device=device)
    return logits, token, torch.randint(n, (m, OTHERS), device=device)


def reference(logits, token, others):
    logp = F.log_softmax(logits.double(), -1)
    own = logits.gather(-1, token[..., None])
    return {
        "logprob": logp.gather(-1, token[..., None])[..., 0],
        "rank": torch.count_nonzero(logits >= own, -1),
        "entropy": torch.special.entr(logp.exp()).sum(-1),
        "others": logp.gather(-1, others),
    }
