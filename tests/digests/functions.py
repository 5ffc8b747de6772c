"""Twenty-four row-wise functions that no benchmark measures.

They keep a change of the lowering honest: what it emits for them is recorded beside what it emits
for the benchmarks. They differ in what makes plans differ: stages from none to six, one to 64 row
inputs, columns, values per row, several results, masks, integers, and costly device functions.
"""

import torch
import torch.nn.functional as F

import htile

BF16, F32 = torch.bfloat16, torch.float32


@htile.rowwise
def gated_layernorm(x, gate, residual, scale, shift, weight, bias, gain):
    h = residual + x * torch.sigmoid(gate)
    y = F.layer_norm(h, h.shape[-1:], weight, bias)
    return y * (1 + scale) * gain + shift, h


@htile.rowwise
def norm_of_six(a, b, c, d, e, f):
    h = a + b * c + d * e - f
    return h * torch.rsqrt((h * h).mean() + 1e-6)


@htile.rowwise
def divergence_of_three(p, q, r):
    logs = [torch.log_softmax(t, -1) for t in (p, q, r)]
    first = (logs[0].exp() * (logs[0] - logs[1])).sum()
    return first + (logs[1].exp() * (logs[1] - logs[2])).sum()


@htile.rowwise
def clipped_adam(weight, gradient, mean, square, rate: float, limit: float):
    scale = torch.clamp(limit / (gradient.norm() + 1e-6), max=1.0)
    gradient = gradient * scale
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.99 * square + 0.01 * gradient * gradient
    return weight - rate * mean / (torch.sqrt(square) + 1e-8), mean, square


@htile.rowwise
def norm_softmax_norm(x):
    y = F.layer_norm(x, x.shape[-1:])
    return F.layer_norm(F.softmax(y, -1), x.shape[-1:])


@htile.rowwise
def mish_gate(x, gate):
    return F.mish(x) * F.softplus(gate)


@htile.rowwise
def four_activations(x, y):
    return F.softplus(x) * torch.tanh(y) + torch.sigmoid(x) * torch.erf(y)


@htile.rowwise
def standardized_softmax(x):
    z = (x - x.mean()) / (x.std() + 1e-5)
    return torch.softmax(z, -1)


@htile.rowwise
def poly_norm(x, a: htile.Scalar, b: htile.Scalar, c: htile.Scalar):
    def unit(u):
        return u * torch.rsqrt((u * u).mean() + 1e-6)

    return a * unit(x) + b * unit(x * x) + c * unit(x * x * x)


@htile.rowwise
def product_of_softmaxes(x, y):
    p = torch.softmax(x, -1) * torch.softmax(y, -1)
    return p / p.sum()


@htile.rowwise
def norm_of_norm(x, first, second):
    h = F.rms_norm(x, x.shape[-1:], first, 1e-6)
    return F.rms_norm(h + x, x.shape[-1:], second, 1e-6)


@htile.rowwise
def above_half_maximum(x):
    peak = x.abs().max()
    return torch.where(x.abs() > 0.5 * peak, x, torch.zeros_like(x)), peak


@htile.rowwise
def moments(x):
    d = x - x.mean()
    deviation = torch.sqrt((d * d).mean() + 1e-12)
    z = d / deviation
    return (z * z * z).mean(), (z * z * z * z).mean() - 3.0


@htile.rowwise
def minimum_probability(logits, fraction: htile.PerRow):
    floor = logits.max() + torch.log(fraction)
    kept = torch.where(logits < floor, torch.full_like(logits, float("-inf")), logits)
    return torch.softmax(kept, -1)


@htile.rowwise
def masked_softmax(x, mask, scale: float):
    z = torch.where(mask, x * scale, torch.full_like(x, -1e4))
    return torch.softmax(z, -1)


@htile.rowwise
def smoothed_loss(logits, target: htile.PerRow, smoothing: float):
    lse = torch.logsumexp(logits, -1)
    return lse - (1 - smoothing) * target - smoothing * logits.mean(), 1e-4 * lse * lse


@htile.rowwise
def log_cosh(x, y):
    d = (x - y).abs()
    return (d + F.softplus(-2.0 * d) - 0.6931471805599453).mean()


@htile.rowwise
def fake_quantized(x, weight):
    h = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    scale = h.abs().max() / 127.0
    return torch.clamp(torch.round(h / scale), -127, 127) * scale, scale


@htile.rowwise
def counts(tokens, weights):
    used = tokens > 0
    return used.sum(), (used & (tokens < 1000)).any(), torch.where(used, weights, 0.0).sum()


@htile.rowwise
def geglu_tanh(x, gate, bias):
    return x * F.gelu(gate + bias, approximate="tanh")


@htile.rowwise
def cosine(x, y):
    return (x * y).sum() / (x.norm() * y.norm()).clamp(min=1e-8)


@htile.rowwise
def wide_columns(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


@htile.rowwise
def tempered_entropy(logits, temperature: htile.PerRow):
    logp = torch.log_softmax(logits / temperature, -1)
    return -(logp.exp() * logp).sum(), logp


@htile.rowwise
def sum_of_squares_of_64(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    a16, a17, a18, a19, a20, a21, a22, a23, a24, a25, a26, a27, a28, a29, a30, a31,
    a32, a33, a34, a35, a36, a37, a38, a39, a40, a41, a42, a43, a44, a45, a46, a47,
    a48, a49, a50, a51, a52, a53, a54, a55, a56, a57, a58, a59, a60, a61, a62, a63,
):  # fmt: skip
    given = list(locals().values())
    total = given[0] * given[0]
    for each in given[1:]:
        total = total + each * each
    return total / total.sum()


# name -> (function, its parameters in order): `row`, `column`, `per-row` and `scalar` take the
# dtype of the case; those with a dtype of their own name it; a number is passed as it is.
FUNCTIONS = {
    "gated_layernorm": (gated_layernorm, ["row"] * 5 + ["column"] * 3),
    "norm_of_six": (norm_of_six, ["row"] * 6),
    "divergence_of_three": (divergence_of_three, ["row"] * 3),
    "clipped_adam": (clipped_adam, ["row", "row", ("row", F32), ("row", F32), 1e-3, 1.0]),
    "norm_softmax_norm": (norm_softmax_norm, ["row"]),
    "mish_gate": (mish_gate, ["row"] * 2),
    "four_activations": (four_activations, ["row"] * 2),
    "standardized_softmax": (standardized_softmax, ["row"]),
    "poly_norm": (poly_norm, ["row", 0.5, 0.25, 0.125]),
    "product_of_softmaxes": (product_of_softmaxes, ["row"] * 2),
    "norm_of_norm": (norm_of_norm, ["row", "column", "column"]),
    "above_half_maximum": (above_half_maximum, ["row"]),
    "moments": (moments, ["row"]),
    "minimum_probability": (minimum_probability, ["row", ("per-row", F32)]),
    "masked_softmax": (masked_softmax, ["row", ("row", torch.bool), 0.125]),
    "smoothed_loss": (smoothed_loss, ["row", ("per-row", F32), 0.1]),
    "log_cosh": (log_cosh, ["row"] * 2),
    "fake_quantized": (fake_quantized, ["row", "column"]),
    "counts": (counts, [("row", torch.int32), "row"]),
    "geglu_tanh": (geglu_tanh, ["row", "row", "column"]),
    "cosine": (cosine, ["row"] * 2),
    "wide_columns": (wide_columns, ["row", ("column", F32), ("column", F32)]),
    "tempered_entropy": (tempered_entropy, ["row", ("per-row", F32)]),
    "sum_of_squares_of_64": (sum_of_squares_of_64, ["row"] * 64),
}


def arguments(name: str, m: int, n: int, dtype: torch.dtype) -> list:
    """Meta tensors and numbers that the function of this name takes for `m` rows of `n`."""
    shapes = {"row": (m, n), "column": (n,), "per-row": (m,)}

    def make(parameter):
        if isinstance(parameter, float):
            return parameter
        role, own = parameter if isinstance(parameter, tuple) else (parameter, dtype)
        return torch.empty(shapes[role], dtype=own, device="meta")

    return [make(parameter) for parameter in FUNCTIONS[name][1]]
