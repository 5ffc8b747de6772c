"""SwiGLU of two tensors: the gate through SiLU, times the other."""

import torch
import torch.nn.functional as F

import htile
from examples.run import check


@htile.rowwise
def swiglu(gate, up):
    return F.silu(gate) * up


def arguments(m, n, dtype, device):
    return torch.randn(m, n, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)


def main():
    check(swiglu, arguments)


if __name__ == "__main__":
    main()
