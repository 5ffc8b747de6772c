"""What the examples and the demo share: the check against float64, and the same in plain torch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

import htile
from htile.testing import assert_close


def check(
    function: htile.Rowwise,
    arguments: Callable[..., tuple],
    shapes: tuple[tuple[int, int], ...] = ((7, 1000), (64, 4096)),
) -> None:
    """Run `function` on the GPU if there is one, else on the CPU; print its largest error."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for m, n in shapes:
            args = arguments(m, n, dtype, device)
            worst = assert_close(function, function(*args), *args)
            name = f"{function.__name__} {m}x{n} {str(dtype).removeprefix('torch.')} on {device}"
            print(f"{name:<44} right; largest error {worst:.2f} of the bound")


def _log_softmax(x):
    return F.log_softmax(x, -1), torch.logsumexp(x.float(), -1)


def _rmsnorm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _layernorm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _swiglu(gate, up):
    return F.silu(gate) * up


def _capped_softmax(logits, temperature):
    z = 30.0 * torch.tanh(logits.float() / 30.0) / temperature[:, None]
    p = F.softmax(z, -1)
    entropy = torch.logsumexp(z, -1) - (p * z).sum(-1)
    return {"probabilities": p.to(logits.dtype), "entropy": entropy}


def _absnorm(x, weight):
    scale = x.float().abs().mean(-1) + 1e-6
    return (x / scale[:, None] * weight).to(x.dtype), scale


def _norm_softmax(x):
    return F.softmax(4.0 * F.layer_norm(x, x.shape[-1:], eps=1e-5), -1)


def _causal_softmax(scores, q):
    is_seen = torch.arange(scores.shape[-1], device=scores.device) <= q[:, None]
    z = torch.where(is_seen, scores.float() * 0.125, -torch.inf)
    return F.softmax(z, -1).to(scores.dtype)


def _cross_entropy(logits, label):
    t = torch.tanh(logits.float() / 30.0)
    z, is_valid = 30.0 * t, label != -100
    lse = torch.logsumexp(z, -1)
    loss = F.cross_entropy(z, label, reduction="none", label_smoothing=0.1)
    expected = torch.full_like(z, 0.1 / z.shape[-1])
    expected += 0.9 * F.one_hot(label.clamp(min=0), z.shape[-1])
    slope = F.softmax(z, -1) * (1 + 2e-4 * lse[:, None]) - expected
    gradient = torch.where(is_valid[:, None], slope * (1 - t * t), 0.0)
    loss = torch.where(is_valid, loss + 1e-4 * lse * lse, 0.0)
    return {"loss": loss, "gradient": gradient.to(logits.dtype)}


# Each example over all rows, as a user of torch writes it without HTile.
TORCH: dict[str, Callable] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": _log_softmax,
    "rmsnorm": _rmsnorm,
    "layernorm": _layernorm,
    "swiglu": _swiglu,
    "capped_softmax": _capped_softmax,
    "absnorm": _absnorm,
    "norm_softmax": _norm_softmax,
    "causal_softmax": _causal_softmax,
    "cross_entropy": _cross_entropy,
}
