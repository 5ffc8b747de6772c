"""Trains models of `transformers` as they are, with `htile.nn.fuse` and with Liger's kernels.

    python -m benchmarks.models [--models llama gemma2 qwen3 t5 vit] [--steps 20]

Each model has random weights, the architecture of its library, and a few layers. A step is a
forward and a backward pass. The table says which modules are fused, how far the loss and the
gradients of each variant are from those of the same model in float32, and how long a step takes.
The error of the gradients is a share of their norm. The steps of the first two variants are timed
in turns; Liger's come after them, because some of its changes hold for all models. The host's time
is that until all work of a step is launched. Tensors are bfloat16. `--device cpu --tiny` tries
everything without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
import transformers

import htile.nn
from benchmarks.contenders import failures

SEED = 7
IN_TURNS = (("as it is", "fuse"), ("liger",))
WARM_UP = 3  # steps before any is timed
Batch = dict[str, torch.Tensor]


def sizes(tiny: bool) -> dict[str, int]:
    """The width, inner width, layers, heads, vocabulary, batch and length of each model."""
    if tiny:
        return dict(width=64, inner=128, layers=2, heads=4, vocabulary=256, batch=2, length=32)
    return dict(width=2048, inner=5632, layers=4, heads=16, vocabulary=32000, batch=4, length=2048)


def of_text(kind: str, width, inner, layers, heads, vocabulary, batch, length):
    """A decoder, and a batch of tokens that are their own labels."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=width // heads, max_position_embeddings=length, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokens = torch.randint(3, vocabulary, (batch, length))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model, dict(input_ids=tokens, labels=tokens)


def of_t5(width, inner, layers, heads, vocabulary, batch, length):
    """An encoder with a decoder, for texts of a quarter of the length."""
    config = transformers.T5Config(
        vocab_size=vocabulary, d_model=width, d_ff=inner, d_kv=width // heads, num_layers=layers,
        num_heads=heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    tokens = torch.randint(3, vocabulary, (batch, max(length // 4, 8)))
    return transformers.T5ForConditionalGeneration(config), dict(input_ids=tokens, labels=tokens)


def of_vit(width, inner, layers, heads, vocabulary, batch, length):
    """A classifier of images of 14 by 14 patches."""
    config = transformers.ViTConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, image_size=224, patch_size=16, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    count = batch * 8
    images = torch.randn(count, 3, 224, 224).bfloat16()
    labels = torch.randint(10, (count,))
    return transformers.ViTForImageClassification(config), dict(pixel_values=images, labels=labels)


MODELS: dict[str, Callable] = {
    "llama": lambda **given: of_text("Llama", **given),
    "gemma2": lambda **given: of_text("Gemma2", **given),
    "qwen3": lambda **given: of_text("Qwen3", **given),
    "t5": of_t5,
    "vit": of_vit,
}


def changed(model: torch.nn.Module, variant: str) -> str:
    """Change a model to a variant, and say what has changed."""
    if variant == "as it is":
        return ""
    if variant == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
        return ""
    report = htile.nn.fuse(model)
    kinds = [what.partition(",")[0] for what in report.fused.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    why = {
        f"{type(model.get_submodule(name)).__name__}: {reason}"
        for name, reason in report.left.items()
        if not isinstance(model.get_submodule(name), (torch.nn.Linear, torch.nn.Embedding))
    }
    lines = f"fused {counts or 'nothing'}", *(f"left {line}" for line in sorted(why))
    return "\n".join(f"  {line}" for line in lines)


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a batch; the gradients are those of the parameters."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.grad.float().cpu() for name, p in named if p.grad is not None}


def error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The norm of the errors of all gradients, as a share of the norm of all gradients."""
    assert found.keys() == right.keys()
    squares = [((found[name] - g).square().sum(), g.square().sum()) for name, g in right.items()]
    wrong, whole = torch.tensor(squares).double().sum(0)
    return (wrong / whole).sqrt().item()


@dataclass(frozen=True)
class Times:
    """Seconds of each step, and of them until all of its work is launched."""

    whole: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def timed(models: list[torch.nn.Module], batch: Batch, steps: int) -> list[Times]:
    """The times of each model, whose steps take turns."""
    times = [Times() for _ in models]
    for k in range(WARM_UP + steps):
        for model, own in zip(models, times, strict=True):
            _wait()
            begin = time.perf_counter()
            step(model, batch)
            launched = time.perf_counter()
            _wait()
            if k >= WARM_UP:
                own.host.append(launched - begin)
                own.whole.append(time.perf_counter() - begin)
    return times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(name: str, device: torch.device, tiny: bool, steps: int) -> None:
    """Print the table of one model."""
    torch.manual_seed(SEED)
    model, batch = MODELS[name](**sizes(tiny))
    model = model.bfloat16().train()
    count = sum(p.numel() for p in model.parameters())
    print(f"{name}: {count / 1e6:.0f} million parameters")
    batch = {key: value.to(device) for key, value in batch.items()}
    wide = copy.deepcopy(model).float().to(device)
    given = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    exact = step(wide, given), gradients(wide)
    del wide
    rows = []
    for variants in IN_TURNS:
        models = {variant: copy.deepcopy(model).to(device) for variant in variants}
        errors = []
        for variant, own in [*models.items()]:
            try:
                if told := changed(own, variant):
                    print(told)
                loss = (step(own, batch) - exact[0]).abs().item()
                errors.append((variant, loss, error(gradients(own), exact[1])))
            except failures() as problem:
                print(f"  {variant} takes no part: {str(problem)[:160]}")
                del models[variant]
        rows += zip(errors, timed([*models.values()], batch, steps), strict=True)
    first = median(rows[0][1].whole)
    print(f"  {'':10}{'loss - exact':>14}{'gradients':>11}{'ms a step':>11}{'time':>7}{'host':>8}")
    for (variant, loss, of_gradients), spent in rows:
        whole, host = 1e3 * median(spent.whole), 1e3 * median(spent.host)
        share = whole / first / 1e3
        print(f"  {variant:10}{loss:14.5f}{of_gradients:11.5f}{whole:11.2f}{share:7.3f}{host:8.2f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(argv)
    for name in given.models:
        compare(name, torch.device(given.device), given.tiny, given.steps)


if __name__ == "__main__":
    main()
