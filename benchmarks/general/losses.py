"""Softmaxes, losses, statistics, quantization and filters as people write them."""

import torch
import torch.nn.functional as F

import htile

from .variant import COLUMN, MASK, PER_ROW, ROW, UNIFORM, variant


@variant(ROW, PER_ROW)
def softmax_with_temperature(x, temperature: htile.PerRow):
    return torch.softmax(x / temperature, -1)


@variant(ROW, COLUMN)
def biased_softmax(x, bias, scale: float = 0.125):
    return torch.softmax(x * scale + bias, -1)


@variant(ROW, MASK)
def masked_softmax_with_zeros(x, mask, scale: float = 0.125):
    z = torch.where(mask, x * scale, float("-inf"))
    return torch.where(mask, torch.softmax(z, -1), 0.0)


@variant(ROW)
def softmax_off_by_one(x):
    peak = torch.clamp(x.max(), min=0.0)
    e = torch.exp(x - peak)
    return e / (torch.exp(-peak) + e.sum())


@variant(ROW, PER_ROW)
def softmax_with_sink(x, sink: htile.PerRow):
    peak = torch.maximum(x.max(), sink)
    e = torch.exp(x - peak)
    total = e.sum() + torch.exp(sink - peak)
    return e / total, peak + torch.log(total)


@variant(ROW, ROW)
def softmax_times(x, value):
    return torch.softmax(x, -1) * value


@variant(ROW, ROW)
def log_softmax_backward(dy, y):
    return dy - torch.exp(y) * dy.sum()


@variant(ROW)
def softmax_and_entropy(x):
    p = torch.softmax(x, -1)
    return p, -(p * torch.log(p + 1e-12)).sum()


@variant(ROW)
def softmax_of_softmax(x):
    return torch.softmax(4.0 * torch.softmax(x, -1), -1)


@variant(ROW)
def capped_log_softmax(x, cap: float = 30.0):
    return torch.log_softmax(cap * torch.tanh(x / cap), -1)


@variant(ROW)
def normalized_sigmoid(x):
    s = torch.sigmoid(x)
    return s / s.sum()


@variant(ROW)
def normalized_softplus(x):
    s = F.softplus(x)
    return s / s.sum()


@variant(ROW)
def normalized_squared_relu(x):
    r = F.relu(x)
    r = r * r
    return r / (r.sum() + 1e-6)


@variant(ROW, UNIFORM)
def gumbel_softmax(x, u, temperature: float = 0.7):
    return torch.softmax((x - torch.log(-torch.log(u * 0.6))) / temperature, -1)


@variant(ROW)
def softmin(x):
    return torch.softmax(-x, -1)


@variant(ROW, PER_ROW)
def loss_with_z_term(logits, target: htile.PerRow):
    lse = torch.logsumexp(logits, -1)
    return lse - target + 1e-4 * lse * lse, lse


@variant(ROW, PER_ROW)
def capped_smoothed_loss(logits, target: htile.PerRow, cap: float = 30.0, smooth: float = 0.1):
    z = cap * torch.tanh(logits / cap)
    lse = torch.logsumexp(z, -1)
    return lse - (1 - smooth) * target - smooth * z.mean()


@variant(ROW, PER_ROW)
def loss_gradient(logits, upstream: htile.PerRow, smooth: float = 0.1):
    p = torch.softmax(logits, -1)
    return (p - smooth / logits.shape[-1]) * upstream


@variant(ROW, UNIFORM)
def sigmoid_focal_loss(x, target):
    p = torch.sigmoid(x)
    loss = F.softplus(x) - x * target
    missed = p + target - 2 * p * target
    return (loss * missed * missed).mean()


@variant(ROW, UNIFORM)
def binary_cross_entropy(x, target):
    return (torch.clamp(x, min=0.0) - x * target + torch.log1p(torch.exp(-x.abs()))).mean()


@variant(ROW, ROW)
def kl_of_logits(x, y):
    p, q = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
    return (torch.exp(p) * (p - q)).sum()


@variant(ROW, ROW)
def jensen_shannon(x, y, beta: float = 0.5):
    p, q = torch.softmax(x, -1), torch.softmax(y, -1)
    m = torch.log(beta * p + (1 - beta) * q)
    return (beta * p * (torch.log(p) - m) + (1 - beta) * q * (torch.log(q) - m)).sum()


@variant(ROW, ROW)
def jensen_shannon_gradient(q, p, beta: float = 0.5):
    left, right = torch.exp(q), torch.exp(p)
    m = torch.log((1 - beta) * left + beta * right)
    return (1 - beta) * left * (q - m), ((1 - beta) * left * (q - m) + beta * right * (p - m)).sum()


@variant(ROW, ROW)
def cosine_loss(x, y):
    return 1 - (x * y).sum() * torch.rsqrt((x * x).sum() * (y * y).sum() + 1e-12)


@variant(ROW, ROW)
def huber_loss(x, y, delta: float = 1.0):
    d = (x - y).abs()
    return torch.where(d < delta, 0.5 * d * d, delta * (d - 0.5 * delta)).mean()


@variant(ROW, ROW)
def mean_and_largest_error(x, y):
    d = x - y
    return (d * d).mean(), d.abs().max()


@variant(ROW, ROW, MASK, PER_ROW)
def clipped_policy_loss(new, old, mask, advantage: htile.PerRow):
    ratio = torch.exp(new - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -torch.where(mask, gain, 0.0).sum() / torch.clamp(mask.sum(), min=1)


@variant(ROW, PER_ROW)
def hinge_loss(x, target: htile.PerRow):
    return F.relu(x - target + 1.0).sum()


@variant(ROW)
def logsumexp_of_row(x):
    return torch.logsumexp(x, -1)


@variant(ROW)
def four_statistics(x):
    return x.min(), x.max(), x.mean(), x.std()


@variant(ROW, PER_ROW)
def contrastive_loss(similarity, positive: htile.PerRow, temperature: float = 0.07):
    return torch.logsumexp(similarity / temperature, -1) - positive / temperature


@variant(ROW)
def kurtosis(x):
    d = x - x.mean()
    squared = d * d
    variance = squared.mean()
    return (squared * squared).mean() / (variance * variance + 1e-12)


@variant(ROW, jumps=True)
def fake_int8(x):
    scale = torch.clamp(x.abs().max(), min=1e-8) / 127.0
    return torch.round(x / scale) * scale, scale


@variant(ROW, jumps=True)
def fake_uint8(x):
    low, high = x.min(), x.max()
    scale = torch.clamp(high - low, min=1e-8) / 255.0
    return torch.round((x - low) / scale).clamp(0.0, 255.0), scale, low


@variant(ROW, ROW)
def swiglu_then_scale(gate, up):
    y = F.silu(gate) * up
    scale = torch.clamp(y.abs().max(), min=1e-8) / 448.0
    return y / scale, scale


@variant(ROW)
def winsorized(x):
    mean, deviation = x.mean(), x.std()
    return torch.minimum(torch.maximum(x, mean - 3 * deviation), mean + 3 * deviation)


@variant(ROW, PER_ROW, jumps=True)
def minimum_probability_filter(logits, fraction: htile.PerRow):
    return torch.where(logits < logits.max() + torch.log(fraction * 0.1), float("-inf"), logits)


@variant(ROW, jumps=True)
def outliers_of_mean(x):
    return torch.where(x > x.mean() + 2 * x.std(), x, 0.0)


@variant(ROW)
def shrunk(x):
    threshold = 0.1 * x.abs().max()
    return torch.sign(x) * F.relu(x.abs() - threshold)


@variant(ROW, jumps=True)
def collision_threshold(logits):
    p = torch.softmax(logits, -1)
    return torch.where(p < (p * p).sum(), 0.0, p)


@variant(ROW, PER_ROW, PER_ROW)
def softmax_gradient_with_scale(dy, peak: htile.PerRow, scale: htile.PerRow):
    e = torch.exp(dy - peak)
    return e * scale - e * (e * dy).sum()
