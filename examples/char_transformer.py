"""A small transformer that reads characters, trained as it is and fused by `htile.nn.fuse`.

    python -m examples.char_transformer               # a few hundred steps
    python -m examples.char_transformer --steps 20

It is made of torch's modules and of a norm of its own, and learns the docstrings of Python's own
library. Both models begin with the same parameters and see the same text, so the two losses, which
are printed side by side, should differ by rounding alone.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import time

import torch

import htile
import htile.nn

STEPS = 300
CONTEXT, BATCH = 64, 32  # characters of a sample, and samples of a step
WIDTH, HEADS, LAYERS = 64, 4, 2
MODULES = "argparse ast collections csv decimal difflib doctest functools heapq inspect logging re"
PRINTED = 10  # lines of losses


class Norm(torch.nn.Module):
    """A root-mean-square norm as libraries of models write it."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Block(torch.nn.Module):
    """Attention, then two layers with a GELU between them; each adds to what it is given."""

    def __init__(self):
        super().__init__()
        self.before, self.between = Norm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.softmax, self.activation = torch.nn.Softmax(-1), torch.nn.GELU()

    def forward(self, x, mask):
        parts = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = parts.movedim(-2, 1).unbind(-2)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mixed = self.softmax(scores + mask) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(self.activation(self.up(self.between(x))))


class Model(torch.nn.Module):
    """The scores of the next character behind each one."""

    def __init__(self, characters: int):
        super().__init__()
        self.of_character = torch.nn.Embedding(characters, WIDTH)
        self.of_place = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(WIDTH), torch.nn.Linear(WIDTH, characters)
        ahead = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
        self.register_buffer("mask", ahead, persistent=False)

    def forward(self, text):
        x = self.of_character(text) + self.of_place.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def load_text() -> tuple[torch.Tensor, int]:
    """The docstrings of some modules of Python as numbers, and how many characters there are."""
    modules = map(importlib.import_module, MODULES.split())
    members = [member for module in modules for member in (module, *vars(module).values())]
    found = dict.fromkeys(text for m in members if isinstance(text := m.__doc__, str))
    text = "\n".join(found)
    known = {character: k for k, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def train(
    model: torch.nn.Module, loss: torch.nn.Module, text: torch.Tensor, steps: int
) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of all but the first."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    drawn = torch.Generator().manual_seed(1)
    losses, begun = [], 0.0
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=drawn)
        sample = text[starts + torch.arange(CONTEXT + 1)].to(device)
        scores = model(sample[:, :-1])
        found = loss(scores.flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
        if step == 0:  # kernels are compiled by now
            begun = time.perf_counter()
    return losses, time.perf_counter() - begun


def compare(steps: int, device: str) -> tuple[list[float], list[float]]:
    """The losses of the model as it is and fused, which are printed, too."""
    torch.manual_seed(0)
    text, characters = load_text()
    plain = Model(characters).to(device)
    fused = copy.deepcopy(plain)
    report = htile.nn.fuse(fused)
    print(f"{len(text)} characters on {device}; {len(report.fused)} modules are fused:")
    print(report)
    theirs, torch_seconds = train(plain, torch.nn.CrossEntropyLoss(), text, steps)
    ours, seconds = train(fused, htile.nn.CrossEntropyLoss(), text, steps)
    print(f"{'step':>5} {'torch':>8} {'fused':>8}")
    for step in sorted({*range(0, steps, max(1, steps // PRINTED)), steps - 1}):
        print(f"{step:5} {theirs[step]:8.4f} {ours[step]:8.4f}")
    print(f"{torch_seconds:.1f} s and {seconds:.1f} s, without the first step")
    return theirs, ours


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{STEPS} by default")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compare(parser.parse_args().steps, device)


if __name__ == "__main__":
    main()
