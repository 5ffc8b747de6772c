"""The Jensen-Shannon divergence between two rows of log probabilities, and its gradient.

`beta` weighs the two distributions: 0.5 is the symmetric divergence. Rows whose label is `ignore`
have no loss and no gradient.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def jsd(log_q, log_p, label: htile.PerRow, beta: float = 0.5, ignore: htile.Static = -100):
    q, p = torch.exp(log_q), torch.exp(log_p)
    log_m = torch.log(beta * p + (1 - beta) * q)
    d = (1 - beta) * q * (log_q - log_m)
    is_valid = label != ignore
    loss = (beta * p * (log_p - log_m) + d).sum()
    return torch.where(is_valid, loss, 0.0), torch.where(is_valid, d, 0.0)


def arguments(m, n, dtype, device):
    log_q, log_p = torch.log_softmax(2 * torch.randn(2, m, n, device=device), -1).to(dtype)
    label = torch.randint(n, (m,), device=device)
    label[::4] = -100
    return log_q, log_p, label


def reference(log_q, log_p, label):
    log_q, log_p = log_q.double().requires_grad_(), log_p.double()
    log_m = torch.logaddexp(log_q, log_p) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    both = [F.kl_div(log_m, t, reduction="none", log_target=True).sum(-1) for t in (log_p, log_q)]
    loss = torch.stack(both).mean(0) * (label != -100)
    return loss.detach(), torch.autograd.grad(loss.sum(), log_q)[0]
