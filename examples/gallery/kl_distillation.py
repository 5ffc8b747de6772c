"""The divergence of a student's logits from a teacher's, and its gradient: two softmaxes."""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def kl_distillation(student, teacher, scale: float = 1.0):
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    p = torch.exp(log_p)
    return scale * (p * (log_p - log_q)).sum(), scale * (torch.exp(log_q) - p)


def arguments(m, n, dtype, device):
    student, teacher = torch.randn(2, m, n, device=device).mul(3).to(dtype)
    return student, teacher


def reference(student, teacher):
    z = student.double().requires_grad_()
    log_p = F.log_softmax(teacher.double(), -1)
    loss = F.kl_div(F.log_softmax(z, -1), log_p, reduction="none", log_target=True).sum(-1)
    return loss.detach(), torch.autograd.grad(loss.sum(), z)[0]
