"""Cross entropy of a vocabulary that is spread over devices: what one of them finds in its share.

`start` is the class of the first column. A label beyond this share has the logit 0 here, so that
the devices' results can be added up.
"""

import torch

import htile

SIZE = 4096, 32000


@htile.rowwise
def parallel_cross_entropy(logits, label: htile.PerRow, start: htile.PerRow):
    largest = logits.amax()
    own = label - start
    is_here = (own >= 0) & (own < logits.shape[-1])
    logit = logits[torch.where(is_here, own, 0)]
    return largest, torch.exp(logits - largest).sum(), torch.where(is_here, logit, 0.0)


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(4).to(dtype)
    label = torch.randint(3 * n, (m,), device=device)
    label[0] = n + 1  # one at least is in this share
    return logits, label, torch.full((m,), n, device=device)


def reference(logits, label, start):
    x, n = logits.double(), logits.shape[-1]
    largest = torch.sort(x, -1).values[..., -1]
    total = torch.exp(torch.logsumexp(x, -1) - largest)
    around = torch.cat((torch.zeros_like(x), x, torch.zeros_like(x)), -1)
    return largest, total, around.gather(-1, (label - start + n)[..., None])[..., 0]
