"""Penalties for tokens that the prompt or the output has already, and the temperature.

Repetition divides positive logits and multiplies negative ones. Frequency counts how often a
token came; presence counts it once.
"""

import torch

import htile

SIZE = 4096, 32000


@htile.rowwise
def penalties(
    logits, counts, in_prompt, repetition: htile.PerRow, frequency: htile.PerRow,
    presence: htile.PerRow, temperature: htile.PerRow,
):  # fmt: skip
    came = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    z = torch.where(came | in_prompt, repeated, logits)
    return (z - frequency * counts - presence * came) / temperature


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(4).to(dtype)
    counts = torch.randint(-5, 4, (m, n), device=device, dtype=torch.int32).clamp(min=0)
    in_prompt = torch.rand(m, n, device=device) < 0.1
    return logits, counts, in_prompt, *torch.rand(4, m, device=device).add(0.5).unbind()


def reference(logits, counts, in_prompt, *numbers):
    repetition, frequency, presence, temperature = (x.double()[..., None] for x in numbers)
    z, came = logits.double().clone(), counts.bool()
    factor = torch.where(z > 0, 1 / repetition, repetition)
    z *= factor.masked_fill(~(came | in_prompt), 1.0)
    return (z - frequency * counts.double() - presence * came.double()) / temperature
