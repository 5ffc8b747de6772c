"""Norms as people write them, forward and backward, alone or with what stands around them."""

import torch
import torch.nn.functional as F

import htile

from .variant import COLUMN, MASK, PER_ROW, ROW, WIDE, variant


def unit(x, eps=1e-6):
    """The row over its root mean square."""
    return x * torch.rsqrt((x * x).mean() + eps)


@variant(ROW, COLUMN)
def gemma_norm(x, weight, eps: float = 1e-6):
    return unit(x, eps) * (1 + weight)


@variant(ROW, COLUMN)
def norm_and_factor(x, weight, eps: float = 1e-6):
    factor = torch.rsqrt((x * x).mean() + eps)
    return x * factor * weight, factor


@variant(ROW, COLUMN, jumps=True)  # from one bfloat16 to the next
def llama_norm(x, weight, eps: float = 1e-6):
    return unit(x, eps).to(torch.bfloat16).float() * weight


@variant(ROW, ROW, ROW, COLUMN, COLUMN)
def layernorm_of_three(a, b, c, weight, bias):
    h = a + b + c
    return F.layer_norm(h, h.shape[-1:], weight, bias), h


@variant(ROW)
def l2_normalized(x, eps: float = 1e-12):
    length = torch.sqrt((x * x).sum() + eps)
    return x / length, length


@variant(ROW, ROW, COLUMN)
def norm_then_gate(x, gate, weight):
    return unit(x) * weight * F.silu(gate)


@variant(ROW, ROW, COLUMN)
def gate_then_norm(x, gate, weight):
    return unit(x * F.silu(gate)) * weight


@variant(ROW, ROW, ROW)
def modulated_layernorm(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


@variant(ROW, ROW, ROW, ROW, ROW)
def gate_residual_layernorm_modulate(x, gate, residual, scale, shift):
    h = residual + x * gate
    return F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift, h


@variant(ROW, COLUMN, COLUMN)
def norm_with_two_weights(x, first, second):
    y = unit(x)
    return y * first, y * second


@variant(ROW)
def polynomial_norm(x, a: float = 0.2, b: float = 0.3, c: float = 0.5, d: float = 0.1):
    return a * unit(x * x * x) + b * unit(x * x) + c * unit(x) + d


@variant(ROW, COLUMN, COLUMN)
def dynamic_tanh(x, weight, bias, alpha: float = 0.5):
    return torch.tanh(alpha * x) * weight + bias


@variant(ROW, COLUMN, COLUMN)
def layernorm_with_statistics(x, weight, bias, eps: float = 1e-5):
    mean = x.mean()
    centered = x - mean
    factor = torch.rsqrt((centered * centered).mean() + eps)
    return centered * factor * weight + bias, mean, factor


@variant(ROW, ROW, PER_ROW, COLUMN)
def row_scaled_residual_norm(x, residual, scale: htile.PerRow, weight):
    h = x * scale + residual
    return unit(h) * weight, h


@variant(ROW, ROW)
def without_projection(y, v):
    direction = v / torch.clamp(v.norm(), min=1e-6)
    return y - (y * direction).sum() * direction


@variant(ROW, ROW, COLUMN)
def shared_expert_gate(y, h, weight):
    return torch.sigmoid((h * weight).sum()) * y


@variant(ROW, COLUMN, COLUMN, ROW, ROW)
def norm_tanh_scale_norm(x, first, second, scale, shift):
    h = unit(x) * first * torch.tanh(scale) + shift
    return unit(h) * second


@variant(ROW)
def over_range(x):
    low, high = x.min(), x.max()
    return (x - low) / (high - low + 1e-6)


@variant(ROW)
def over_largest_magnitude(x):
    return x / torch.clamp(x.abs().max(), min=1e-6)


@variant(ROW)
def fourth_power_norm(x):
    squared = x * x
    return x * torch.rsqrt(torch.sqrt((squared * squared).mean() + 1e-6))


@variant(ROW)
def clipped_standard_score(x):
    score = (x - x.mean()) / (x.std() + 1e-5)
    return score.clamp(-3.0, 3.0)


@variant(ROW, COLUMN, COLUMN)
def softmax_of_layernorm_sum(x, weight, bias):
    y = F.layer_norm(x, x.shape[-1:], weight, bias)
    return torch.softmax(x + y, -1)


@variant(ROW, ROW, COLUMN, PER_ROW)
def rmsnorm_backward(dy, x, weight, factor: htile.PerRow):
    normed = x * factor
    scaled = dy * weight
    return (scaled - normed * (normed * scaled).mean()) * factor


@variant(ROW, ROW, COLUMN, PER_ROW, PER_ROW)
def layernorm_backward(dy, x, weight, mean: htile.PerRow, factor: htile.PerRow):
    normed = (x - mean) * factor
    scaled = dy * weight
    return (scaled - scaled.mean() - normed * (normed * scaled).mean()) * factor


@variant(ROW, ROW, ROW, COLUMN)
def rmsnorm_backward_recomputed(dy, x, residual_gradient, weight):
    factor = torch.rsqrt((x * x).mean() + 1e-6)
    normed, scaled = x * factor, dy * weight
    return (scaled - normed * (normed * scaled).mean()) * factor + residual_gradient


@variant(ROW, ROW)
def l2_backward(dy, x):
    factor = torch.rsqrt((x * x).sum() + 1e-12)
    y = x * factor
    return (dy - y * (dy * y).sum()) * factor


@variant(ROW, ROW, ROW, COLUMN)
def gated_norm_backward(dy, x, gate, weight):
    factor = torch.rsqrt((x * x).mean() + 1e-6)
    s = torch.sigmoid(gate)
    normed, scaled = x * factor, dy * weight * gate * s
    dx = (scaled - normed * (normed * scaled).mean()) * factor
    dgate = dy * normed * weight * s * (1 + gate * (1 - s))
    return dx, dgate


@variant(ROW, ROW, COLUMN, COLUMN)
def layernorm_of_gelu(x, residual, weight, bias):
    h = residual + F.gelu(x)
    return F.layer_norm(h, h.shape[-1:], weight, bias)


@variant(ROW, COLUMN, jumps=True)
def norm_then_fake_int8(x, weight):
    y = unit(x) * weight
    scale = torch.clamp(y.abs().max(), min=1e-8) / 127.0
    return torch.round(y / scale).clamp(-128.0, 127.0), scale


@variant(ROW, ROW, COLUMN)
def residual_norm_and_largest(x, residual, weight):
    h = x + residual
    y = unit(h) * weight
    return y, h, torch.clamp(y.abs().max(), max=100.0) / 448.0


@variant(ROW, MASK)
def masked_layernorm(x, mask):
    count = torch.clamp(mask.sum(), min=1)
    mean = torch.where(mask, x, 0.0).sum() / count
    centered = torch.where(mask, x - mean, 0.0)
    return centered * torch.rsqrt((centered * centered).sum() / count + 1e-5)


@variant(WIDE, COLUMN)
def float32_stream_norm(x, weight):
    return (unit(x) * weight).to(torch.bfloat16)


@variant(ROW, ROW, COLUMN)
def two_norms_added(x, y, weight):
    return unit(x) * weight + unit(y)


@variant(ROW)
def centered_by_log_sum(x):
    return x - torch.logsumexp(x, -1) + x.mean()
