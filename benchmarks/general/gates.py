"""Activations, gates and updates without a reduction, as people write them."""

import math

import torch
import torch.nn.functional as F

import htile

from .variant import COLUMN, MASK, PER_ROW, ROW, UNIFORM, WIDE, variant


@variant(ROW, ROW)
def geglu_tanh_gate(x, gate):
    return F.gelu(x, approximate="tanh") * gate


@variant(ROW, ROW)
def geglu_erf_gate(x, gate):
    return F.gelu(x) * gate


@variant(ROW, ROW)
def clamped_swiglu(gate, up, limit: float = 7.0):
    gate = torch.clamp(gate, max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (torch.clamp(up, -limit, limit) + 1)


@variant(ROW)
def mish_alone(x):
    return F.mish(x)


@variant(ROW, ROW, COLUMN)
def softplus_gate(x, gate, bias):
    return x * F.softplus(gate + bias)


@variant(ROW)
def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@variant(ROW, ROW)
def silu_backward(dy, x):
    s = torch.sigmoid(x)
    return dy * s * (1 + x * (1 - s))


@variant(ROW, ROW)
def gelu_backward(dy, x):
    below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return dy * (below + x * torch.exp(-0.5 * x * x) * 0.3989422804014327)


@variant(ROW, ROW, ROW)
def swiglu_backward(dy, gate, up):
    s = torch.sigmoid(gate)
    silu = gate * s
    return dy * up * s * (1 + gate * (1 - s)), dy * silu


@variant(ROW, COLUMN)
def biased_squared_relu(x, bias):
    r = F.relu(x + bias)
    return r * r


@variant(ROW)
def signed_log(x):
    return torch.sign(x) * torch.log1p(x.abs())


@variant(ROW, COLUMN)
def capped_with_bias(x, bias, cap: float = 30.0):
    return cap * torch.tanh((x + bias) / cap)


@variant(WIDE, ROW, WIDE, WIDE)
def adam_step(weight, gradient, mean, square, rate: float = 1e-3):
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square.abs() + 0.001 * gradient * gradient
    return weight - rate * mean / (torch.sqrt(square) + 1e-8), mean, square


@variant(ROW, ROW, ROW)
def lion_step(weight, gradient, mean, rate: float = 1e-3):
    update = torch.sign(0.9 * mean + 0.1 * gradient)
    return weight - rate * update, 0.99 * mean + 0.01 * gradient


@variant(ROW, ROW)
def inverse_root_gate(x, y):
    return x * torch.rsqrt(1 + x * x) * y


@variant(ROW, ROW, ROW, ROW)
def rotated(a, b, cosine, sine):
    return a * cosine - b * sine, b * cosine + a * sine


@variant(ROW, PER_ROW)
def repetition_penalty(logits, penalty: htile.PerRow):
    return torch.where(logits > 0, logits / penalty, logits * penalty)


@variant(ROW, ROW, MASK)
def dropped_residual(x, residual, mask, scale: float = 1.25):
    return residual + torch.where(mask, x * scale, 0.0)


@variant(ROW, PER_ROW, COLUMN)
def decay_gate(g, rate: htile.PerRow, bias):
    return -torch.exp(rate) * F.softplus(g + bias)


@variant(UNIFORM)
def logit(p):
    q = p * 0.6
    return torch.log(q) - torch.log1p(-q)


@variant(ROW, ROW)
def scaled_exponential(x, y):
    return torch.where(x > 0, 1.0507 * x, 1.7581 * torch.expm1(x)) * y


@variant(ROW, UNIFORM)
def root_of_power(x, base):
    return torch.sqrt(base * base + x * x) - base
