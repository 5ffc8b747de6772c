"""What to write instead of the functions of torch that HTile does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

_TORCH = torch, torch.nn.functional, torch.Tensor, torch.special, torch.linalg
REFERENCE = "docs/reference.md lists what there is"

_RANKS = (
    "x.topk(k) and x.sort() of at most 64 elements, single elements of longer ones, as "
    "x.sort().values[k], x.kthvalue(k), x.quantile(q) and x.argmax() are there"
)
_PRODUCT = "write a @ b for the product of rows and small matrices, or (a * b).sum(dim)"
_PARTS = "write it with torch.cat, torch.stack and slices"
_COMPLEX = "complex numbers are two floats each: take them apart, a, b = x[0::2], x[1::2]"
_INACCURATE = "no accurate form of it is built yet"
_MEMORY = "a row has no memory of its own while tracing; leave it out"
RANDOM = (
    "random numbers of a kernel come of a counter and a seed: htile.dropout(x, p, seed), or "
    "htile.uniform(htile.random_words(torch.arange(x.shape[-1]), seed)); rows of one seed have the "
    "same numbers, so give each its own (seed: htile.PerRow)"
)
DRAWS = "rand", "randn", "randint", "randperm", "normal"  # functions of torch, of sizes alone
CHECKPOINT = (
    "torch.utils.checkpoint inside the function: write f(x) for checkpoint(f, x), because little "
    "is kept for a backward pass anyway, or put the checkpoint around the call of the function"
)
CUSTOM_FUNCTION = (
    "a torch.autograd.Function, whose backward pass cannot be seen here: give the whole row-wise "
    "function one of its own, with @f.backward, or write a value whose gradient is that of another "
    "one as x + (y - x).detach(); where no gradient is wanted, call it in torch.no_grad()"
)
TRUTH = (
    "the truth of a symbolic value is not known while tracing, so `if`, `while`, `and`, `or`, "
    "`not`, `in` and the built-in max and min cannot read it: write torch.where(condition, a, b), "
    "`&` `|` `~`, torch.maximum or torch.minimum, or make it a static argument (htile.Static)"
)
ASSERTED = (
    "the truth of a symbolic value is not known while tracing, so `assert` cannot read it: leave "
    "it out, or check the arguments before the call"
)
VALUE = "a symbolic value has no Python number while tracing"
NUMBER = (
    f"{VALUE}: write the torch spelling (torch.exp(x) "
    "for math.exp(x), x.to(dtype) for float(x) and int(x)), or make it a static argument "
    "(htile.Static)"
)
STEPS = (
    f"{VALUE}, so range() cannot count to it: loop to the largest number that any row has, and "
    "keep what rows have already, x = torch.where(k < n, step(x), x), or make it a static argument "
    "(htile.Static)"
)
ITERATION = (
    "the elements of a row cannot be visited one by one: write an expression of the whole row, "
    "or a reduction (x.sum(), x.max()) for the built-in sum(x) and max(x). x.unbind(-1) gives the "
    "elements of a short row"
)
RAGGED = (
    "it can be reduced, as in x[mask].mean(), or assigned to the same elements, as in "
    "x[mask] *= 2; for anything else write torch.where(mask, x, other)"
)
OTHER_MASK = "write a mask of the shape of x, or torch.where(mask, x, other)"
NOTHING = "{}: there are none in a row, so leave it out where sizes may be 0"
STALE = (
    "{} may share memory in torch with the tensor that {} has changed in place (as x and x.float() "
    "do), so it may have changed too: write y = y + ... for y += ..., or y = y.clone()"
)
_INDEX = (
    "x[y] is the element at one index a row; another one is put there by "
    "torch.where(torch.arange(x.shape[-1]) == y, value, x), several by "
    "x.scatter(-1, indices, values), and x.scatter_add(-1, indices, values) adds to them"
)
_WINDOWS = (
    "windows of k neighbours are x[0:m], x[1:m + 1], ..., each with m = n - k + 1 elements; groups "
    "that do not overlap are x.view(-1, k)"
)
SIZE = (
    "a size that a row decides is not known while tracing: the first n of the elements are a mask, "
    "torch.arange(x.shape[-1]) < n, as in torch.where(torch.arange(x.shape[-1]) < n, x, 0.0)"
)
_FREQUENCIES = (
    "the part of a frequency k is (x * torch.cos(2 * math.pi * k * t / n)).sum(), with sin for the "
    "other one, and t = torch.arange(n); for all of them call it outside the function"
)
_DECOMPOSED = (
    "matrices are not decomposed in a kernel: write the formula of a small one, as a * d - b * c "
    "with (a, b), (c, d) = (r.unbind() for r in m.unbind()), or call it outside the function"
)
HINTS = {
    name: hint
    for names, hint in {
        "mode unique": _RANKS,
        "addbmm": _PRODUCT,
        "addr": "write input + a[:, None] * b",
        "conv_transpose1d": _WINDOWS,
        "max_pool1d_with_indices": "for return_indices=True write x.view(-1, k).max(-1), which has "
        "values and indices of groups that do not overlap",
        "adaptive_max_pool1d_with_indices": "for return_indices=True write x.view(k, -1).max(-1)",
        "dstack": _PARTS,
        "index_put": _INDEX,
        "select_scatter slice_scatter": "write y = x.clone(), and then y[index] = value",
        "diagonal_scatter": "write torch.where(torch.eye(n, dtype=torch.bool), values, x)",
        "pixel_shuffle": "write x.view(c, r, r, h, w).permute(0, 3, 1, 4, 2)"
        ".reshape(c, h * r, w * r)",
        "pixel_unshuffle": "write x.view(c, h, r, w, r).permute(0, 2, 4, 1, 3).reshape(-1, h, w)",
        "masked_scatter": "it has no fixed length: write torch.where(mask, x, other)",
        "complex polar view_as_complex view_as_real": _COMPLEX,
        "histc": "count by comparisons, (x < edge).sum(), one for each edge",
        "bincount": "of k bins write F.one_hot(x, k).sum(0), and with weights "
        "torch.zeros(k).scatter_add(0, x, weights)",
        "linspace": "of symbolic ends write a + (b - a) * torch.arange(n) / (n - 1)",
        "_is_all_true": "values are not known while tracing: call "
        "torch.distributions.Distribution.set_default_validate_args(False) once, or give each "
        "distribution validate_args=False",
        "renorm": "write x * (maxnorm / x.norm()).clamp(max=1.0)",
        "avg_pool2d max_pool2d adaptive_avg_pool2d adaptive_max_pool2d": "of groups of a small "
        "image that do not overlap write x.view(h // k, k, w // k, k).mean((1, 3)), or .amax",
        "unfold fold conv2d conv3d conv_transpose2d conv_transpose3d": "the patches of an image "
        "are not of one row: call it outside the function",
        "meshgrid": "write x[:, None] and y[None, :], which broadcast",
        "item": "a number of the row is used as it is: write x.max() for x.max().item()",
        "tolist": "the numbers of a short row are a, b, c = x.unbind(), and are used as they are",
        "numpy equal allclose": "values are not known while tracing",
        "device cuda cpu is_cuda": "the kernel runs where its inputs are",
        "is_contiguous stride data_ptr storage_offset layout is_leaf": _MEMORY,
        "requires_grad": "who calls the function knows it: pass it as an argument, `trains: bool`",
        "grad grad_fn backward": "gradients are those of results, outside; see docs/training.md",
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout": RANDOM,
        "feature_alpha_dropout rand_like randn_like randint_like bernoulli multinomial": RANDOM,
        "poisson rrelu gumbel_softmax": RANDOM,
        "instance_norm batch_norm": "write F.instance_norm or F.batch_norm, which take their "
        "arguments in another order",
        "local_response_norm": "of a row of channels write x / (k + alpha * F.avg_pool1d(F.pad(x * "
        "x, (size // 2, (size - 1) // 2))[None], size, 1)[0]) ** beta",
        "fft ifft rfft irfft hfft ihfft fft2 fftn rfft2 rfftn stft istft": _FREQUENCIES,
        "det inverse inv solve svd svdvals qr eig eigh eigvals eigvalsh cholesky lu": _DECOMPOSED,
        "logdet slogdet pinv pinverse lstsq matrix_rank solve_triangular": _DECOMPOSED,
        "matrix_exp": "of a small matrix write the first terms of its series, torch.eye(n) + m + "
        "m @ m / 2, or call it outside the function",
        "ones zeros full empty arange": SIZE,
        "real conj": "the numbers of a row are real: leave it out",
        "element_size itemsize nbytes": "write x.dtype.itemsize",
        "scaled_dot_product_attention": "of small matrices write "
        "(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v",
        "polygamma igamma igammac gammainc gammaincc multigammaln": _INACCURATE,
        "nonzero argwhere": "write (x != 0).sum() to count",
        "embedding_bag": "write F.embedding(ids, table).sum(0), or .mean(0)",
        "short": "int16 is not there; write x.int()",
        "double": "float64 is not supported; write x.float()",
    }.items()
    for name in names.split()
}


def advice(name: str, known: Iterable[str]) -> str:
    """What to write for a name that HTile does not have: a hint, or the nearest of the known.

    A name that torch has was meant, so that one like it is another function.
    """
    if name in HINTS:
        return HINTS[name]
    near = [] if any(hasattr(place, name) for place in _TORCH) else nearest(name, known)
    return f"did you mean {' or '.join(near)}? {REFERENCE}" if near else REFERENCE


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that one may have meant, the nearest first; three at most."""
    return difflib.get_close_matches(name, sorted(set(known)), 3, 0.7)
