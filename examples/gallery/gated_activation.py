"""Gated activations of one row that holds the gate and then the other half: FATReLU and PowGLU.

FATReLU keeps the gate where it is above a threshold. PowGLU raises positive gates to a power that
falls as they grow.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336
VARIANTS = ({"kind": "fatrelu"}, {"kind": "powglu"})


@htile.rowwise
def gated_activation(
    x, threshold: float = 0.5, power: float = 3.0, kind: htile.Static = "fatrelu"
):
    gate, up = x.chunk(2)
    if kind == "fatrelu":
        return F.threshold(gate, threshold, 0.0) * up
    base = torch.where(gate > 0, gate, 1.0)
    raised = torch.exp(power / (torch.sqrt(base) + 1) * torch.log(base))
    return torch.where(gate > 0, raised, gate) * torch.sigmoid(gate) * up


def arguments(m, n, dtype, device):
    return (torch.randn(m, 2 * n, device=device).mul(2).to(dtype),)


def reference(x, kind="fatrelu"):
    gate, up = x.double().tensor_split(2, -1)
    if kind == "fatrelu":
        return gate * (gate > 0.5) * up
    positive = gate.clamp(min=0)
    raised = positive ** (3 / (positive.sqrt() + 1))
    return (raised * (gate > 0) + gate.clamp(max=0)) / (1 + torch.exp(-gate)) * up
