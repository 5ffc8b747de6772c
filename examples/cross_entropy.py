"""Cross entropy of soft-capped logits, and its gradient with respect to them, in one kernel.

Labels are smoothed, and a z-loss, the square of the logarithm of the sum of exponentials, keeps
that sum near 1. Rows whose label is `ignore` have no loss and no gradient.
"""

import torch
import torch.nn.functional as F

import htile
from examples.run import check


@htile.rowwise
def cross_entropy(
    logits, label: htile.PerRow, z_weight: float = 1e-4, cap: float = 30.0,
    smoothing: htile.Static = 0.1, ignore: htile.Static = -100,
):  # fmt: skip
    t = torch.tanh(logits / cap)
    z = cap * t
    lse = torch.logsumexp(z, -1)
    loss = F.cross_entropy(z, label, reduction="none", ignore_index=ignore,
                           label_smoothing=smoothing)  # fmt: skip
    is_label = torch.arange(z.shape[-1]) == label
    even = smoothing / z.shape[-1]
    expected = torch.where(is_label, 1 - smoothing + even, even)
    slope = torch.exp(z - lse) * (1 + 2 * z_weight * lse) - expected
    is_valid = label != ignore
    return {
        "loss": torch.where(is_valid, loss + z_weight * lse * lse, 0.0),
        "gradient": torch.where(is_valid, slope * (1 - t * t), 0.0),
    }


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(10).to(dtype)
    label = torch.randint(n, (m,), device=device)
    return logits, torch.where(torch.arange(m, device=device) % 8 == 7, -100, label)


def main():
    check(cross_entropy, arguments)


if __name__ == "__main__":
    main()
