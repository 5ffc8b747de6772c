"""Kernels that people write by hand, each as a function of one row, which is all in its file.

Each module of `NAMES` has:

- one decorated function of the module's name, which is all that a person writes;
- `arguments(m, n, dtype, device)`, which makes arguments of about m rows for it;
- `reference(*arguments)`, which is the same in float64 over all rows at once. It is written with
  other functions of torch, and gradients are autograd's, so that it shares no mistake with the
  function;
- `SIZE`, the numbers of rows and of elements that such a kernel has in a model;
- `VARIANTS`, where there are several: keyword arguments that the function and the reference take;
- `SMALL`, where rows of 64 and 33 elements make no sense: the lengths that the tests use instead.

Those of `PRODUCTS` multiply rows by matrices: `SIZE` and `arguments` have a further number, the
elements of the row that is multiplied, and `SMALL` has pairs. Their rows have 16 bits.

A reference returns what is not rounded yet, also where the function returns float8 or integers. How
near a result has to be to it is in `check.py`. `python -m examples.gallery` checks them all, and
counts how many kernels of the table in docs/language.md they are.
"""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

NAMES = (
    # norms
    "rmsnorm_casting",
    "layernorm_saved",
    "group_norm",
    "add_rmsnorm",
    "gated_rmsnorm",
    "grouped_rmsnorm",
    "modulated_norm",
    "dit_norm",
    "norm_tanh_norm",
    "polynorm",
    "dyt",
    "l2norm",
    "prefix_norm",
    "qk_norm",
    "xsa",
    "rwkv_gate",
    "shared_expert_gate",
    "attention_residual",
    "dropout_norms",
    # norms and rows that are quantized
    "add_rmsnorm_quantized",
    "add_rmsnorm_groups",
    "rmsnorm_static_fp8",
    "rmsnorm_fp4",
    "quantize",
    "quantize_groups",
    "quantize_zero_point",
    "dequantize_groups",
    "microscaling",
    "quantize_fp4",
    "bitlinear_norm",
    "swiglu_groups",
    # activations and gates
    "swiglu_halves",
    "swiglu_halves_backward",
    "swiglu_pairs",
    "swiglu_pairs_backward",
    "geglu",
    "geglu_backward",
    "activation",
    "gated_activation",
    "scaled_activation",
    "rwkv_mix",
    "topk_activation",
    "dropout_bits",
    "dropout_bits_backward",
    # rows of tables, and rotary embedding
    "token_shift",
    "expert_rows",
    "rotary",
    "rotary_positions",
    "rotary_three_positions",
    "rotary_fp8",
    "qk_norm_rotary",
    "norm_rotary_images",
    # stacks and small matrices
    "hyper_connections",
    "sinkhorn",
    "split_k",
    "merge_states",
    # softmax and losses over a vocabulary
    "softmax_temperature",
    "softmax_backward",
    "masked_softmax",
    "sparsemax",
    "sparsemax_backward",
    "cross_entropy_weighted",
    "cross_entropy_backward",
    "cross_entropy_training",
    "parallel_cross_entropy",
    "combine_cross_entropy",
    "z_loss",
    "jsd",
    "kl_distillation",
    "distances",
    "grpo",
    "l2_wrap",
    # experts
    "topk_softmax",
    "topk_softmax_backward",
    "router",
    "grouped_router",
    "router_scores",
    "router_quantized",
    "hash_router",
    # sampling
    "token_logprob",
    "sampling_probabilities",
    "gumbel_sample",
    "inverse_sample",
    "speculative_sample",
    "min_p",
    "top_p",
    "penalties",
)

PRODUCTS = (
    "linear_swiglu", "rmsnorm_linear", "linear_residual", "linear_gelu", "linear_cross_entropy",
    "linear_router",
)  # fmt: skip


def load(name: str) -> ModuleType:
    """The module of one kernel."""
    return import_module(f"examples.gallery.{name}")


def variants(name: str) -> tuple[dict, ...]:
    """The keyword arguments that a kernel is checked with, one dict for each variant."""
    return getattr(load(name), "VARIANTS", ({},))


def catalogue() -> dict[int, tuple[frozenset[str], str]]:
    """The table in docs/language.md: of each kernel what it is written as, and what is missing.

    It is written as modules of this folder, and as files with the names of their folders.
    """
    page = Path(__file__).parents[2] / "docs" / "language.md"
    rows = re.findall(
        r"^\| (\d+) \| [^|]+ \| ([^|]*) \| ([^|]*) \|$", page.read_text("utf-8"), re.M
    )
    return {
        int(number): (frozenset(re.findall(r"`([^`]+)`", names)), missing.strip())
        for number, names, missing in rows
    }


CASES = [(name, k) for name in NAMES for k in range(len(variants(name)))]
PRODUCT_CASES = [(name, k) for name in PRODUCTS for k in range(len(variants(name)))]
