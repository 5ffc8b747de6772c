"""Activations that are multiplied by a number of each row: squared relu, and the gate SiTU.

The number is what a router gives a token. SiTU bounds the gate and the other half by tanh.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 7168
VARIANTS = ({"kind": "squared relu"}, {"kind": "situ"})


@htile.rowwise
def scaled_activation(
    x, factor: htile.PerRow, gate_bound: float = 7.0, up_bound: float = 5.0,
    kind: htile.Static = "squared relu",
):  # fmt: skip
    if kind == "squared relu":
        return F.relu(x).square() * factor
    gate, up = x.chunk(2)
    gate = gate_bound * torch.tanh(gate / gate_bound) * torch.sigmoid(gate)
    return gate * up_bound * torch.tanh(up / up_bound) * factor


def arguments(m, n, dtype, device):
    x = torch.randn(m, 2 * n, device=device).mul(3).to(dtype)
    return x, torch.rand(m, device=device)


def reference(x, factor, kind="squared relu"):
    x, factor = x.double(), factor.double()[..., None]
    if kind == "squared relu":
        return x.clamp(min=0) * x * factor
    gate, up = x.tensor_split(2, -1)
    gate = 7 * (1 - 2 / (1 + torch.exp(gate * 2 / 7))) / (1 + torch.exp(-gate))
    return gate * 5 * (1 - 2 / (1 + torch.exp(up * 2 / 5))) * factor
