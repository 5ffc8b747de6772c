"""Every mistake of a traced function: its class, the words that help, and the user's line."""

from __future__ import annotations

import inspect
import math
import operator
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import htile
from htile.errors import DtypeError, HTileError, ShapeError, TraceError, UnsupportedError
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.frontend.roles import Spec
from htile.frontend.tensor import Tensor
from htile.frontend.trace import trace

N = 8
WEIGHT = torch.ones(N)
ARRAY = np.ones(N)
SPECS = {
    "x": Spec("x", Role.ROW, torch.float32, (N,)),
    "y": Spec("y", Role.ROW, torch.float32, (N,)),
    "w": Spec("w", Role.COLUMN, torch.float32, (N,)),
    "i": Spec("i", Role.ROW, torch.int64, (N,)),
    "j": Spec("j", Role.ROW, torch.int32, (N,)),
    "k": Spec("k", Role.ROW, torch.bool, (N,)),
    "t": Spec("t", Role.PER_ROW, torch.float32, (1,)),
    "s": Spec("s", Role.SCALAR, torch.float32),
}


def asserted(x):
    assert (x > 0).all()
    return x


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def while_loop(x):
    while x.max() > 1:
        x = x / 2
    return x


def both(x):
    return x if x.sum() > 0 and x.max() < 1 else -x


def assign(x):
    x[x.sum()] = 1.0
    return x


def assign_masked(x):
    x[x < 0] = x * 2
    return x


def assign_in_two(x):
    x[:, 0] = 1.0


def sizes(x):
    shape = x.shape
    return x / shape[1]


def unpack(x):
    _, n = x.shape
    return x / n


def star(*x):
    return x


def star_star(**x):
    return x


def endless(x):
    return endless(x + 1)


# name: (function, class, words of the message)
MISTAKES = {
    "if": (branch, TraceError, "torch.where(condition, a, b)"),
    "while": (while_loop, TraceError, "torch.where"),
    "and": (both, TraceError, "`&`"),
    "not": (lambda x: not x, TraceError, "`~`"),
    "in": (lambda x: 3 in x, TraceError, "`in`"),
    "built-in max": (lambda x: max(x, 0), TraceError, "torch.maximum"),
    "built-in min": (lambda x, y: min(x, y), TraceError, "torch.minimum"),
    "built-in max of one": (lambda x: max(x), TraceError, "torch.maximum"),
    "len of a number": (lambda x: x * len(x.sum()), ShapeError, "it is one number"),
    "float": (lambda x: float(x.sum()), TraceError, "x.to(dtype)"),
    "int": (lambda x: int(x.sum()), TraceError, "x.to(dtype)"),
    "index": (lambda x, i: [1, 2][i], TraceError, "static argument"),
    "range": (lambda x, i: list(range(i.max())), TraceError, "static argument"),
    "math.exp": (lambda x: math.exp(x), TraceError, "write torch.exp"),
    "math.exp beside torch.tensor": (
        lambda x: math.exp(x.sum()) * torch.tensor(2.0), TraceError, "write torch.exp(x)"
    ),
    "math.exp in torch.tensor": (
        lambda x: torch.tensor(math.exp(x.sum())), TraceError, "write torch.exp(x)"
    ),
    "math.sqrt beside float": (
        lambda x: x * float(x.sum()) * math.sqrt(2.0), TraceError, "x.to(dtype) for float(x)"
    ),
    "math.sqrt of a scalar": (lambda x, s: x * math.sqrt(s), TraceError, "write torch.sqrt"),
    "beyond the end": (lambda x: x[8], ShapeError, "index 8 of an axis of 8 elements"),
    "nothing of a row": (lambda x: x[8:], ShapeError, "a part without elements"),
    "two indices": (lambda x: x[0, 1], ShapeError, "2 indices of a value of shape (8,)"),
    "a leading dimension": (lambda x: x[:, 1:], ShapeError, "write x[:n] for x[:, :n]"),
    "an index of a number": (lambda x: x.sum()[:, None], ShapeError, "x[..., None]"),
    "assignment to a leading dimension": (assign_in_two, ShapeError, "write x[:n] for x[:, :n]"),
    "a vector of another length": (lambda x, w: x[:4] * 2 * w, ShapeError, "htile.PerRow"),
    "a negative step": (lambda x: x[::-1], ShapeError, "steps of 1 and more"),
    "computed bounds": (lambda x, i: x[: i.max()], UnsupportedError, "computed bounds"),
    "masking": (lambda x: x[x > 0], UnsupportedError, "torch.where(mask, x, other)"),
    "lists of other lengths": (
        lambda x: x.view(2, 4)[[0, 1, 1], [1, 0]], ShapeError, "[0, 1, 1] and [1, 0]: lists of"
    ),
    "a list of masks": (lambda x: x[[True, False] * 4], UnsupportedError, "[0, 2, 4, 6]"),
    "a range of indices": (lambda x: x.view(2, 4)[:, range(2)], UnsupportedError, "list [0, 1]"),
    "a list of computed indices": (
        lambda x: x[[0, x.argmax()]], UnsupportedError, "torch.stack((x[i], x[j]))"
    ),
    "lists in lists": (lambda x: x[[[0], [1]]], UnsupportedError, "or a list of numbers"),
    "lists of too many axes": (lambda x: x[:, [0, 1]], ShapeError, "2 indices of a value"),
    "a list of indices beyond the end": (lambda x: x[[0, 8]], ShapeError, "index 8 of an axis"),
    "an empty list of indices": (lambda x: x[[]], UnsupportedError, "write numbers and slices"),
    "indexing with text": (lambda x: x["0"], UnsupportedError, "write numbers and slices"),
    "cond": (
        lambda x: torch.cond(x.sum() > 0, lambda v: v, lambda v: -v, (x,)), TraceError,
        "write torch.where(condition, a, b), and a loop",
    ),
    "vmap": (lambda x: torch.vmap(lambda v: v * v)(x), TraceError, "belong around the call"),
    "polygamma": (lambda x: torch.polygamma(1, x), UnsupportedError, "no accurate form"),
    "assignment": (assign, DtypeError, "an index is an integer, write y.long()"),
    "masked assignment": (assign_masked, UnsupportedError, "torch.where(mask, value, x)"),
    "transpose_": (lambda x: x.transpose_(0, -1), TraceError, "x = x.transpose(...)"),
    "torch.dropout_": (lambda x: torch.dropout_(x, 0.5, True), UnsupportedError, "htile.dropout"),
    "inplace=": (lambda x: F.dropout(x, inplace=True), UnsupportedError, "htile.dropout"),
    "out=": (lambda x, y: torch.add(x, x, out=y), TraceError, "assign the result"),
    "unknown function": (lambda x: torch.bincount(x), UnsupportedError, "torch.bincount is not"),
    "unknown method": (lambda x: x.mode(), UnsupportedError, "x.mode is not supported; x.topk"),
    "ranks of a mask": (lambda x: (x > 0).argmax(), DtypeError, "argmax of bool: it takes"),
    "dropout1d of a row": (
        lambda x: F.dropout1d(x, training=False), ShapeError, "write F.dropout(x, training=False)"
    ),
    "alpha_dropout": (
        lambda x: F.alpha_dropout(x, training=True), UnsupportedError, "random numbers"
    ),
    "rrelu": (lambda x: F.rrelu(x, training=True), UnsupportedError, "random numbers"),
    "dropout2d": (lambda x: F.dropout2d(x), UnsupportedError, "random numbers"),
    "batch_norm": (
        lambda x, y: F.batch_norm(x[None], y, y, training=True), UnsupportedError,
        "torch.rsqrt(running_var"
    ),
    "broadcast_tensors": (
        lambda x: torch.broadcast_tensors(x, x[:3]), ShapeError, "shapes (8,), (3,): they do not"
    ),
    "broadcast_tensors of a number": (
        lambda x: torch.broadcast_tensors(x, 2.0), TraceError, "write torch.full_like(x, 2.0)"
    ),
    "a batch of two with three targets": (
        lambda x: F.cross_entropy(x.view(2, 4), torch.tensor([0, 1, 2])), ShapeError, "for each"
    ),
    "a window of a device": (
        lambda x: x * torch.hann_window(8, device="cuda"), TraceError, "device=x.device"
    ),
    "logspace of a negative base": (
        lambda x: x * torch.logspace(0, 1, 8, base=-2.0), UnsupportedError, "one above 0"
    ),
    "a function as a method": (lambda x: x.var_mean(), UnsupportedError, "write torch.var_mean"),
    "a function of F as a method": (lambda x: x.gelu(), UnsupportedError, "write F.gelu"),
    "a function of F in place": (lambda x: x.gelu_(), TraceError, "write x = F.gelu(x)"),
    "an index beside a number": (
        lambda x: x.view(2, 4)[1, x.argmax()], UnsupportedError, "write m[0][y] for m[0, y]"
    ),
    "logspace of ints": (
        lambda x: x * torch.logspace(0, 7, 8, dtype=torch.int64), UnsupportedError, "torch.logspace"
    ),
    "recursion": (endless, TraceError, "a function calls itself until Python's limit"),
    "matmul of other sizes": (lambda x: x.view(2, 4) @ x, ShapeError, "must be as long as"),
    "matmul of numbers": (lambda x: x.sum() @ x, ShapeError, "expected a row or a small matrix"),
    "matmul by a number": (lambda x: x @ 2.0, ShapeError, "expected a row or a small matrix"),
    "matmul of integers": (lambda i: i @ i, DtypeError, "x.float()"),
    "matmul of two dtypes": (lambda x: x.half() @ x.bfloat16(), DtypeError, "y.to(x.dtype)"),
    "mv of rows": (lambda x: torch.mv(x, x), ShapeError, "expected a small matrix"),
    "dot of matrices": (lambda x: x.view(2, 4).dot(x), ShapeError, "expected a row;"),
    "einsum of too many letters": (lambda x: torch.einsum("ij->i", x), ShapeError, "a letter for"),
    "einsum of too few": (lambda x: torch.einsum("i,i", x), ShapeError, "a letter for each axis"),
    "einsum of a diagonal": (
        lambda x: torch.einsum("ii->i", x[:4].view(2, 2)), UnsupportedError, "a letter stands once"
    ),
    "einsum to a letter from nowhere": (
        lambda x: torch.einsum("i->j", x), UnsupportedError, "those of the result in an operand"
    ),
    "einsum of two sizes": (
        lambda x: torch.einsum("i,i", x, x[:3]), ShapeError, "i has 8 and 3 elements"
    ),
    "einsum of signs": (lambda x: torch.einsum("i;i", x), TraceError, '"k,kn->n"'),
    "einsum of integers": (lambda i: torch.einsum("i->", i), DtypeError, "x.float()"),
    "outer of matrices": (lambda x: torch.outer(x.view(2, 4), x), ShapeError, "a[..., None] * b"),
    "inner of matrices": (lambda x: torch.inner(x.view(2, 4), x), ShapeError, "expected a row"),
    "repeat of too few axes": (lambda x: x.view(2, 4).repeat(2), ShapeError, "for each axis"),
    "repeat of no times": (lambda x: x.repeat(0), ShapeError, "1 and more"),
    "repeat_interleave of a row": (
        lambda x, i: x.repeat_interleave(i), UnsupportedError, "by a Tensor: it takes one number"
    ),
    "pad of one end": (lambda x: F.pad(x, (1,)), ShapeError, "two integers for each axis"),
    "pad of nothing": (lambda x: F.pad(x, (-4, -4)), ShapeError, "leaves no elements"),
    "pad by another way": (
        lambda x: F.pad(x, (1, 1), mode="symmetric"), UnsupportedError, "it is 'constant'"
    ),
    "diff of one element": (lambda x: x[:1].diff(), ShapeError, "diff 1 times of an axis of 1"),
    "complex": (lambda x: torch.complex(x, x), UnsupportedError, "a, b = x[0::2], x[1::2]"),
    "decimals of integers": (lambda i: i.round(decimals=1), DtypeError, "leave decimals out"),
    "decimals without their name": (
        lambda x: torch.round(x, 2), TraceError, "write torch.round(x, decimals=2) for a number of"
    ),
    "round of Python": (lambda x: round(x, 2), TraceError, "write x.round(decimals=2)"),
    "x.round": (lambda x: x.round(-1), TraceError, "write x.round(decimals=-1)"),
    "half a decimal": (lambda x: x.round(decimals=0.5), TraceError, "a Python integer"),
    "a checkpoint": (
        lambda x: checkpoint(torch.exp, x, use_reentrant=False), TraceError, "write f(x) for"
    ),
    "a checkpoint of old": (
        lambda x: checkpoint(torch.exp, x, use_reentrant=True), TraceError, "around the call of"
    ),
    "requires_grad": (
        lambda x: x * 2 if x.requires_grad else x, UnsupportedError, "`trains: bool`"
    ),
    "F.linear": (lambda x, y: F.linear(x, y), UnsupportedError, "annotate the weight"),
    "F.dropout": (lambda x: F.dropout(x), UnsupportedError, "random numbers"),
    "device": (lambda x: torch.ones(2, device="cuda"), TraceError, "device=x.device"),
    "device of a value": (lambda x: torch.tensor(x, device="cpu"), TraceError, "device=x.device"),
    "device of zeros_like": (
        lambda x: torch.zeros_like(x, device="cpu"), TraceError, "leave it out"
    ),
    "device compared": (lambda x: x.device == "cuda", TraceError, "where its inputs are"),
    "device compared, left": (
        lambda x: operator.eq("cuda", x.device), TraceError, "where its inputs are"
    ),
    "device told apart": (lambda x: x.device != "cpu", TraceError, "where its inputs are"),
    "device type": (lambda x: x.device.type, TraceError, "asked for its type"),
    "device as text": (lambda x: str(x.device), TraceError, "asked for its name"),
    "device in a text": (lambda x: f"{x.device}", TraceError, "asked for its name"),
    "device in words": (lambda x: "cuda" in x.device, TraceError, "its name has 'cuda'"),
    "device of torch": (lambda x: torch.device(x.device), TraceError, "where its inputs are"),
    "device of a window": (
        lambda x: x * torch.kaiser_window(8, device=x.device), TraceError, "pass it as"
    ),
    "item": (lambda x: x.sum().item(), UnsupportedError, "write x.max() for x.max().item()"),
    "tolist": (lambda x: x.tolist(), UnsupportedError, "a, b, c = x.unbind()"),
    "cuda": (lambda x: x.cuda(), UnsupportedError, "x.cuda"),
    "view": (lambda x: x.view(3, 4), ShapeError, "the sizes do not fit"),
    "view of two unknown sizes": (lambda x: x.view(-1, -1), ShapeError, "one of them -1"),
    "transpose": (lambda x: x.transpose(0, 1), ShapeError, "dim=1"),
    "permute": (lambda x: x.view(2, 4).permute(0, 0), ShapeError, "permute"),
    "flip": (lambda x: x.repeat(9).flip(0), UnsupportedError, "pass x.flip(-1) as an argument"),
    "fliplr of a row": (lambda x: x.fliplr(), ShapeError, "write x.flip(-1)"),
    "flipud of a number": (lambda x: x.sum().flipud(), ShapeError, "it has one element"),
    "rot90 of one axis": (lambda x: x.view(2, 4).rot90(1, (1, -1)), ShapeError, "two of them"),
    "diag_embed above": (lambda x: x.diag_embed(1), ShapeError, "for the main diagonal"),
    "tuples of a matrix": (lambda x: torch.cartesian_prod(x.view(2, 4)), ShapeError, "takes rows"),
    "too many choices": (lambda x: torch.combinations(x, 9), ShapeError, "there are none"),
    "blocks of three axes": (
        lambda x: torch.block_diag(x.view(2, 2, 2)), ShapeError, "it takes matrices"),
    "tensordot of a number": (lambda x: torch.tensordot(x, x.sum(), 0), ShapeError, "with axes"),
    "tensordot of other axes": (
        lambda x: torch.tensordot(x, x, ([0], [])), ShapeError, "expected as many"),
    "power of a row": (lambda x: torch.matrix_power(x, 2), ShapeError, "a square matrix"),
    "power 0": (lambda x: x[:4].view(2, 2).matrix_power(0), UnsupportedError, "torch.eye"),
    "spectral norm": (
        lambda x: torch.linalg.matrix_norm(x.view(2, 4), 2), UnsupportedError, "'fro'"),
    "asserted": (asserted, TraceError, "check the arguments before the call"),
    "steps of a row": (lambda x: [k for k in range(x.argmax())], TraceError, "that any row has"),
    "added in place": (
        lambda x: x.index_put_((x.argmax(),), x, accumulate=True), TraceError, "scatter_add"),
    "patches": (lambda x: F.unfold(x.view(1, 1, 2, 4), 2), UnsupportedError, "not of one row"),
    "an image": (lambda x: F.avg_pool2d(x.view(1, 2, 4), 2), UnsupportedError, ".mean((1, 3))"),
    "a distribution": (
        lambda x: torch.distributions.Normal(x, 1.0, validate_args=True).log_prob(x),
        UnsupportedError, "validate_args=False",
    ),
    "matrix_exp": (
        lambda x: torch.matrix_exp(x.view(2, 4)[:, :2]), UnsupportedError, "series, torch.eye(n)"
    ),
    "pad": (lambda x: F.pad(x, (0, x.argmax())), UnsupportedError, "F.pad by a computed number"),
    "pixel_shuffle": (
        lambda x: F.pixel_shuffle(x.view(4, 1, 2), 2), UnsupportedError, "permute(0, 3, 1, 4, 2)"
    ),
    "pixel_unshuffle": (
        lambda x: F.pixel_unshuffle(x.view(1, 2, 4), 2), UnsupportedError, "permute(0, 2, 4, 1, 3)"
    ),
    "select_scatter": (lambda x: x.select_scatter(x[0], 0, 3), UnsupportedError, "x.clone()"),
    "slice_scatter": (lambda x: x.slice_scatter(x[:4], 0, 1, 5), UnsupportedError, "x.clone()"),
    "diagonal_scatter": (
        lambda x: x.view(2, 4).diagonal_scatter(x[:2]), UnsupportedError, "torch.eye"
    ),
    "torch.maximum": (lambda x: torch.maximum(x, 0.0), TraceError, "x.clamp(min=0.0)"),
    "torch.minimum": (lambda x: torch.minimum(x, 1), TraceError, "x.clamp(max=0.0)"),
    "torch.minimum, reflected": (lambda x: torch.minimum(1.0, x), TraceError, "full_like"),
    "torch.max": (lambda x: torch.max(x, 0.5), TraceError, "torch.maximum(x, torch.full_like"),
    "torch.logical_and": (lambda k: torch.logical_and(k, True), TraceError, "torch.full_like"),
    "torch.exp, too many": (lambda x: torch.exp(x, 3), TraceError, "torch.exp"),
    "torch.tensor": (lambda x: torch.tensor(x), TraceError, "it is a tensor already"),
    "torch.tensor of a list": (lambda x: torch.tensor([1.0, x]), TraceError, "torch.stack"),
    "torch.tensor of a text": (lambda x: torch.tensor([x.sum(), "a"]), TraceError, "torch.stack"),
    "linspace of ints": (
        lambda x: x * torch.linspace(0, 7, 8, dtype=torch.int64), UnsupportedError, "torch.arange"
    ),
    "full_like of a row": (lambda x: torch.full_like(x, x), TraceError, "'fill_value'"),
    "full_like of a sum": (lambda x: torch.full_like(x, x.sum()), TraceError, "value.expand_as"),
    "full of a sum": (lambda x: torch.full((8,), x.sum()) * x, TraceError, "value.expand"),
    "full_like of nothing": (lambda x: torch.full_like(x, None), TraceError, "'fill_value'"),
    "captured tensor": (lambda x: x * WEIGHT, TraceError, "pass it as an argument"),
    "captured tensor, left": (lambda x: WEIGHT * x, TraceError, "pass it as an argument"),
    "captured tensor in torch": (lambda x: torch.add(x, WEIGHT), TraceError, "as an argument"),
    "captured parameter": (
        lambda x: F.layer_norm(x, (N,), torch.nn.Parameter(WEIGHT)), TraceError, "as an argument"
    ),
    "captured in a list": (lambda x: torch.cat([x, WEIGHT]), TraceError, "as an argument"),
    "a number in a list": (lambda x: torch.stack([x, 1.0]), TraceError, "element 1 of the list"),
    "shapes that do not join": (
        lambda x: torch.stack((x, x[:4])), ShapeError, "torch.stack of shapes (8,), (4,)"
    ),
    "values of other axes": (
        lambda x: torch.cat((x, x.view(2, 4))), ShapeError, "torch.cat of shapes (8,), (2, 4)"
    ),
    "shapes that do not go together": (
        lambda x: x + x[1:], ShapeError, "values of shapes (7,) and (8,) do not go together"
    ),
    "a sum of parts": (lambda x: x.split(3, 0)[0] + x.split([3, 4]), ShapeError, "split of 8"),
    "numpy array": (lambda x: x * ARRAY, TraceError, "numpy array"),
    "numpy array, left": (lambda x: ARRAY * x, TraceError, "numpy array"),
    "numpy function": (lambda x: np.exp(x), TraceError, "torch.exp"),
    "np.asarray": (lambda x: np.asarray(x), TraceError, "numpy"),
    "format": (lambda x: f"{x:.2f}", TraceError, "'.2f' formats a number"),
    "unpacked shape": (unpack, ShapeError, "n = x.shape[-1]"),
    "second size": (lambda x: x / x.shape[1], ShapeError, "n = x.shape[-1]"),
    "typo": (lambda x: x.sofmax(-1), UnsupportedError, "did you mean softmax"),
    "a near name, another function": (
        lambda x: torch.channel_shuffle(x, 2), UnsupportedError,
        "channel_shuffle is not supported; docs/reference.md",
    ),
    "argwhere": (lambda x: torch.argwhere(x > 0), UnsupportedError, "write (x != 0).sum()"),
    "bilinear": (
        lambda x: F.bilinear(x, x, x), UnsupportedError, "bilinear is not supported; docs/reference"
    ),
    "embedding_bag": (lambda x: F.embedding_bag(x, x), UnsupportedError, "write F.embedding(ids"),
    "gammainc": (lambda x: torch.special.gammainc(x, x), UnsupportedError, "no accurate form"),
    "multigammaln": (
        lambda x: torch.special.multigammaln(x, 2), UnsupportedError, "no accurate form"
    ),
    "a tensor that torch makes": (
        lambda x: x * torch.kaiser_window(N), TraceError, "a real tensor of torch.kaiser_window ("
    ),
    "second size behind a name": (sizes, ShapeError, "n = x.shape[-1]"),
    "a name that torch lacks": (
        lambda x: torch.softmx(x), TraceError, "torch has no softmx; did you mean softmax"
    ),
    "a name that F lacks": (
        lambda x: F.layernorm(x, (N,)), TraceError, "torch.nn.functional has no layernorm; did you"
    ),
    "torch.gelu": (lambda x: torch.gelu(x), TraceError, "torch has no gelu; write F.gelu"),
    "torch.silu": (lambda x: torch.silu(x), TraceError, "torch has no silu; write F.silu"),
    "torch.leaky_relu": (lambda x: torch.leaky_relu(x), TraceError, "write F.leaky_relu"),
    "F.exp": (lambda x: F.exp(x), TraceError, "has no exp; write torch.exp or x.exp"),
    "F.rsqrt": (lambda x: F.rsqrt(x), TraceError, "has no rsqrt; write torch.rsqrt or x.rsqrt"),
    "torch.special.silu": (lambda x: torch.special.silu(x), TraceError, "write F.silu"),
    "torch.nn.gelu": (lambda x: torch.nn.gelu(x), TraceError, "torch.nn has no gelu; write F.gelu"),
    "F.float16": (lambda x: x.to(F.float16), TraceError, "write torch.float16"),
    "typo of a dtype": (lambda x: x.to(torch.flaot16), TraceError, "did you mean float16"),
    "a module without functions of a row": (
        lambda x: torch.cuda.flor(x), TraceError, "torch.cuda has no flor; docs/reference.md lists"
    ),
    "typo of torch": (
        lambda x: torch.special.polygamma(1, x), UnsupportedError, "no accurate form"
    ),
    "nothing like it": (lambda x: x.qqqq(), UnsupportedError, "docs/reference.md lists"),
    "chunk": (lambda x: x.chunk(0), ShapeError, "chunk into 0 parts"),
    "narrow": (lambda x: x.narrow(0, 4, 8), ShapeError, "narrow(0, 4, 8)"),
    "group_norm of a row": (lambda x: F.group_norm(x, 2), ShapeError, "F.group_norm(x[None]"),
    "group_norm of groups that do not fit": (
        lambda x: F.group_norm(x[None], 3), ShapeError, "expected a divisor of 8"),
    "group_norm with a weight of each group": (
        lambda x: F.group_norm(x[None], 2, x[:2]), ShapeError, "one number for each channel"),
    "group_norm of single numbers": (
        lambda x: F.group_norm(x[None], 8), ShapeError, "its own mean"),
    "instance_norm of single numbers": (
        lambda x: F.instance_norm(x[None]), ShapeError, "its own mean"),
    "instance_norm that changes its statistics": (
        lambda x, y: F.instance_norm(x.view(1, 2, 4), y[:2], y[:2]), UnsupportedError,
        "leave running_mean and running_var out"),
    "batch_norm without statistics": (
        lambda x: F.batch_norm(x[None], None, None), UnsupportedError, "htile.sum_rows"),
    "torch.batch_norm": (
        lambda x, y: torch.batch_norm(x[None], y, y, y, y, False, 0.1, 1e-5, False),
        UnsupportedError, "F.batch_norm"),
    "bits": (lambda x: x.bfloat16().view(torch.int16), UnsupportedError, "x.float().view(torch"),
    "size_average": (
        lambda x, y: F.mse_loss(x, y, size_average=False), TraceError, "reduction='mean'"
    ),
    "reduction": (lambda x, y: F.mse_loss(x, y, reduction="max"), TraceError, "'none', 'mean'"),
    "lerp": (lambda x, y: torch.lerp(x.half(), y.float(), 0.5), DtypeError, "y.to(x.dtype)"),
    "heaviside": (lambda x, i: torch.heaviside(x, i), DtypeError, "y.to(x.dtype)"),
    "addcdiv of integers": (lambda x, i, j: torch.addcdiv(x, i, j), DtypeError, "tensor1 / tensor"),
    "alpha of integers": (lambda i, j: torch.sub(i, j, alpha=0.5), DtypeError, "x.float()"),
    "alpha of a mask": (lambda x, k: torch.add(x, k, alpha=True), DtypeError, "alpha=1"),
    "masked_fill": (lambda x, y: x.masked_fill(x > 0, y), ShapeError, "torch.where(mask"),
    "norm in 16 bits": (lambda x: x.norm(dtype=torch.half), DtypeError, "convert the result"),
    "string": (lambda x: x + "a", TraceError, "got str"),
    "None": (lambda x: x * None, TraceError, "got NoneType"),
    "list": (lambda x: x * [1.0], TraceError, "got list"),
    "dim": (lambda x: x.sum(dim=1), ShapeError, "write dim=-1"),
    "dim of softmax": (lambda x: F.softmax(x, dim=2), ShapeError, "dim=2"),
    "one dim twice": (lambda x: x.sum(dim=(0, -1)), ShapeError, "names an axis twice"),
    "dim of a stack": (lambda x: x.view(2, 4).sum(2), ShapeError, "the axes 0 to 1"),
    "softmax of a stack": (lambda x: x.view(2, 4).softmax(None), ShapeError, "give one axis"),
    "F.normalize": (lambda x: F.normalize(x), ShapeError, "write dim=-1"),
    "normalized_shape": (lambda x: F.layer_norm(x, (4,)), ShapeError, "x.shape[-1:]"),
    "layer_norm of a number": (lambda t: F.layer_norm(t, (1,)), ShapeError, "a row has shape"),
    "expand": (lambda x: x.expand(4), ShapeError, "expand"),
    "size": (lambda x: x * x.size(1), ShapeError, "size(1)"),
    "unsqueeze": (lambda x: x.unsqueeze(3), ShapeError, "unsqueeze(3)"),
    "squeeze": (lambda x: x.squeeze(1), ShapeError, "dim=1"),
    "double": (lambda x: x.double(), DtypeError, "float64 is not supported"),
    "to float64": (lambda x: x.to(torch.float64), DtypeError, "float64"),
    "sum to float64": (lambda x: x.sum(dtype=torch.float64), DtypeError, "float64"),
    "ones in float8": (lambda x: torch.ones_like(x, dtype=torch.float8_e5m2), DtypeError, "e5m2"),
    "a resize in place": (lambda x: x.resize_(4), TraceError, "write a new value"),
    "random in place": (lambda x: x.uniform_(), TraceError, "write a new value"),
    "a shift": (lambda x: x << 1, DtypeError, "<< of f32"),
    "cov of a number": (lambda x: x.sum().cov(), ShapeError, "it takes a row or a matrix"),
    "cov with weights": (lambda x: x.cov(fweights=x), UnsupportedError, "(w * d * d).sum()"),
    "igamma": (lambda x: torch.igamma(x, x), UnsupportedError, "no accurate form"),
    "memory": (lambda x: x.stride(), UnsupportedError, "no memory of its own"),
    "to nothing": (lambda x: x.to(), TraceError, "take a dtype inside a row"),
    "type of a tensor": (lambda x: x.type(), TraceError, "x.type() take a dtype"),
    "to a device": (lambda x: x.to("cuda"), TraceError, "devices do not change"),
    "mean of integers": (lambda i: i.mean(), DtypeError, "x.float()"),
    "var of integers": (lambda i: i.var(), DtypeError, "variance of i64"),
    "softmax of integers": (lambda i: i.softmax(-1), DtypeError, "softmax of i64"),
    "norm of integers": (lambda i: i.norm(), DtypeError, "norm of i64"),
    "integers to a negative power": (lambda i: i**-2, DtypeError, "x.float() ** -2"),
    "integers to a tensor": (lambda i, j: i**j, UnsupportedError, "x.float()"),
    "minus of masks": (lambda k: k - k, DtypeError, "a ^ b"),
    "one minus a mask": (lambda k: 1 - k, DtypeError, "~k"),
    "negated mask": (lambda k: -k, DtypeError, "neg of bool"),
    "mask // mask": (lambda k: k // k, DtypeError, "floordiv of bool"),
    "bits of floats": (lambda x, y: (x > 0) & y, DtypeError, "compare the numbers first"),
    "an inverted float": (lambda x: ~x, DtypeError, "~ of f32"),
    "where of numbers": (lambda x, y: torch.where(x, x, y), DtypeError, "x != 0"),
    "integer too large": (lambda j: j + 2**40, DtypeError, "x.long()"),
    "integer much too large": (lambda x: x + 10**400, DtypeError, "does not fit f32"),
    "integer of 71 bits": (lambda x: x + 2**70, DtypeError, "write it as a float"),
    "parts of a number": (lambda x: x.sum().chunk(2), ShapeError, "chunk of a value of shape ()"),
    "split of a number": (lambda x: x.sum().split(1), ShapeError, "split of a value of shape ()"),
    "tensor_split of a number": (lambda x: x.sum().tensor_split(2), ShapeError, "has no axis"),
    "narrowed number": (lambda x: x.sum().narrow(0, 0, 1), ShapeError, "has no axis"),
    "selected of a number": (lambda x: x.sum().select(0, 0), ShapeError, "has no axis"),
    "unbound number": (lambda x: x.sum().unbind(), ShapeError, "has no axis"),
    "rolled number": (lambda x: x.sum().roll(1, 0), ShapeError, "has no axis"),
    "unflattened number": (lambda x: x.sum().unflatten(0, (1, 1)), ShapeError, "has no axis"),
    "glu of a number": (lambda x: F.glu(x.sum()), ShapeError, "has no axis"),
    "list of a number": (lambda x: list(x.sum()), ShapeError, "has no axis"),
    "length of a number": (lambda x: len(x.sum()), ShapeError, "len of a value of shape ()"),
    "flattened number": (lambda x: x.sum().flatten(1), ShapeError, "dim=1"),
    "squeezed number": (lambda x: x.sum().squeeze((0, 1)), ShapeError, "dim=1"),
    "moved axis of a number": (lambda x: x.sum().movedim(0, 2), ShapeError, "dim=2"),
    "glu of an odd axis": (lambda x: F.glu(x[1:]), ShapeError, "two halves of one length"),
    "glu of integers": (lambda i: F.glu(i), DtypeError, "x.float()"),
    "flatten backwards": (lambda x: x.view(2, 4).flatten(1, 0), ShapeError, "comes after"),
    "t of three axes": (lambda x: x.view(2, 2, 2).t(), ShapeError, "x.transpose(0, -1)"),
    "tensor_split into none": (lambda x: x.tensor_split(0), ShapeError, "into 0 parts"),
    "tensor_split backwards": (lambda x: x.tensor_split((3, 2)), ShapeError, "without elements"),
    "expand of a new axis": (lambda x: x.expand(-1, 8), ShapeError, "to (-1, 8)"),
    "expand to nothing": (lambda x: x.sum().expand(0), ShapeError, "to (0,)"),
    "expand to a fraction": (lambda x: x.expand(1.5, 8), ShapeError, "to (1.5, 8)"),
    "view of a tensor": (lambda x: x.view(x), ShapeError, "expected integers"),
    "size of several": (lambda x: x.size((0, 1)), ShapeError, "size((0, 1))"),
    "slice of text": (lambda x: x["1":], TraceError, "write integers"),
    "split by text": (lambda x: x.split("2"), TraceError, "an argument that x.split"),
    "any of no axis": (lambda x: x.any(()), ShapeError, "leave dim out"),
    "logsumexp of no axis": (lambda x: x.logsumexp(()), ShapeError, "leave dim out"),
    "layer_norm of no axis": (lambda x: F.layer_norm(x.sum(), ()), ShapeError, "a row has shape"),
    "integers // 0": (lambda i: i // 0, TraceError, "integers by zero"),
    "integers % 0": (lambda i: i % 0, TraceError, "integers by zero"),
    "a factory of less than nothing": (lambda x: x + torch.zeros(-1), TraceError, "torch.zeros: "),
    "a factory of a huge number": (
        lambda x: x + torch.full((8,), 2**70), TraceError, "torch.full: "),
    "a factory without a step": (lambda x: torch.arange(0, 8, 0), TraceError, "torch.arange: "),
    "cross_entropy of a stack": (
        lambda x: F.cross_entropy(x.view(2, 4), x), ShapeError, "the scores of one row"),
    "cross_entropy of other shares": (
        lambda x: F.cross_entropy(x, x[:1]), ShapeError, "one for each class"),
    "cross_entropy of other weights": (
        lambda x: F.cross_entropy(x, x, x[:1]), ShapeError, "a weight for each class"),
    "ignore_index": (
        lambda x, t: F.nll_loss(x, t, ignore_index=0.5), TraceError, "expected a Python integer"),
    "clamp to nothing": (lambda x: x.clamp(), TraceError, "min, max or both"),
    "rounding_mode": (lambda x: torch.div(x, x, rounding_mode="up"), TraceError, "'floor'"),
    "unknown keyword": (lambda x: x.sum(where=x > 0), UnsupportedError, "keepdim=False"),
    "nuclear norm": (lambda x: torch.norm(x, p="nuc"), UnsupportedError, "'nuc'"),
    "gelu": (lambda x: F.gelu(x, approximate="no"), TraceError, "'none' or 'tanh'"),
    "returns nothing": (lambda x: None, TraceError, "returns None"),
    "returns a number": (lambda x: 1.0, TraceError, "returns a float as out"),
    "returns a number in a dict": (lambda x: {"n": 1, "x": x}, TraceError, "an int as n"),
    "returns a tensor": (lambda x: (x, WEIGHT), TraceError, "a real tensor as out1"),
    "returns an empty tuple": (lambda x: (), TraceError, "returns no tensor"),
    "depends on no row": (lambda x, w: (x, w * 2), TraceError, "out1 of <lambda> does not depend"),
    "depends on nothing": (lambda x: torch.zeros_like(x), TraceError, "combine it with a row"),
    "*args": (star, UnsupportedError, "*x"),
    "**kwargs": (star_star, UnsupportedError, "**x"),
}  # fmt: skip


def traced(fn):
    parameters = inspect.signature(fn).parameters.values()
    specs = [SPECS[p.name] for p in parameters if p.default is p.empty]
    return trace(fn, specs, N)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    fn, kind, words = MISTAKES[name]
    with pytest.raises(HTileError) as caught:
        traced(fn)
    error = caught.value
    assert type(error) is kind, error
    assert words in error.message
    lines, first = inspect.getsourcelines(fn)
    assert error.loc is not None and error.loc.file == __file__
    assert first <= error.loc.line < first + len(lines)
    for foreign in ("invalid combination", "must be Tensor", "argument 'input'", "htile/frontend"):
        assert foreign not in str(error).replace(__file__, "")


EXACT_LINES = {branch: "if x.sum() > 0:", assign: "x[x.sum()] = 1.0"}


@pytest.mark.parametrize("fn", EXACT_LINES)
def test_the_line_is_the_users(fn):
    with pytest.raises(HTileError) as caught:
        traced(fn)
    assert caught.value.loc.text == EXACT_LINES[fn]
    assert EXACT_LINES[fn] in str(caught.value)


def test_set_grad_enabled_says_what_to_write():
    def f(x):
        with torch.set_grad_enabled(False):
            return x * 2

    with pytest.raises(HTileError, match=r"write `with torch.no_grad\(\):`"):
        htile.rowwise(f)(torch.ones(2, 4))


def test_a_tuple_of_the_user_is_not_taken_for_a_shape():
    def f(x):
        shape, weights = x.shape, (1.0,)
        assert shape == (N,)
        return x * weights[1]

    with pytest.raises(IndexError):
        traced(f)


def shape_of_the_users(x, shape=(2.0,)):
    return x * shape[1]


def word_in_a_comment(x):
    w = (1.0,)
    return x * w[3]  # one per size


def shape_beside_a_tuple(x):
    n = x.shape
    w = (1.0,)
    return x * w[1] / n[-1]


OWN_TUPLES = [shape_of_the_users, word_in_a_comment, shape_beside_a_tuple]


@pytest.mark.parametrize("f", OWN_TUPLES)
def test_an_index_error_of_the_users_tuple_stays(f):
    with pytest.raises(IndexError, match="tuple index out of range"):
        traced(f)


def test_a_shape_unpacked_from_a_name():
    def f(x):
        sizes = x.shape
        _, n = sizes  # rows and columns
        return x / n

    with pytest.raises(ShapeError, match=r"n = x\.shape"):
        traced(f)


def test_other_errors_do_not_look_at_the_local_names(monkeypatch):
    class Size:
        """Stands for torch.Size: to ask whether a local value is one fails."""

    def wrong(x):
        raise TypeError("mine")

    monkeypatch.setattr(torch, "Size", Size())
    with pytest.raises(TypeError, match=r"^mine$"):
        traced(wrong)


def test_modules_whose_names_begin_with_torch_keep_their_errors():
    for name in ("torchvision", "torch_utils"):
        module = types.ModuleType(name)
        with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'gelu'"):
            traced(lambda x, module=module: module.gelu(x))


def test_what_is_deferred_has_the_line_that_asked_for_it():
    def f(x):
        found = x.max(-1)
        return x * 2, found.indices

    graph = traced(f)
    lines = {node.loc.text for node in graph if node.op in (Op.KEY, Op.KEY_INDEX)}
    assert lines == {"found = x.max(-1)"}


def test_a_helpers_line_is_named_not_its_callers():
    def helper(x):
        return x.bincount()

    with pytest.raises(UnsupportedError) as caught:
        traced(lambda x: helper(x) + 1)
    assert caught.value.loc.text == "return x.bincount()"


def test_an_argument_that_is_none_is_named():
    def f(x, w=None, b=None):
        return x * w

    with pytest.raises(TraceError, match="got NoneType: the argument w is None; write `if w is"):
        trace(f, [SPECS["x"], *(Spec(name, Role.STATIC) for name in "wb")], N)


def test_names_that_no_kernel_may_have():
    def f(x):
        return x * 2

    f.__name__ = 'it\'s """ a name\n'
    text = "def g(x):\n    return x * 2"
    names = {}
    exec(compile(text, "two\nlines.py", "exec"), names)
    x = torch.empty(2, N, device="meta")
    for fn in (f, names["g"]):
        compile(htile.rowwise(fn).inspect(x).source, "emitted", "exec")


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_float32_are_infinite():
    f = htile.rowwise(lambda x: (x * 1e300, torch.maximum(x, torch.full_like(x, -1e39))))
    x = torch.tensor([[2.0, -1.0, 0.0]])
    product, larger = f(x)
    assert torch.equal(larger, x)
    assert product[0, :2].tolist() == [math.inf, -math.inf] and product[0, 2].isnan()
    assert f.inspect(x).resources.stack == 0


def test_the_default_device_changes_nothing():
    x = torch.randn(3, N)
    f = htile.rowwise(lambda x: x.softmax(-1) * (2.0 * 3) + x.sum().exp2() + x.max() % 0.7)
    expected = f(x)
    with torch.device("meta"):
        again = htile.rowwise(f._fn)
        result = again(x)
        assert again.inspect(x).source == f.inspect(x).source
    assert torch.equal(result, expected)


def test_errors_of_the_user_pass_through():
    def wrong(x):
        raise TypeError("mine")

    def missing(x):
        return x.sum() + undefined  # noqa: F821

    def own_arguments(x):
        return missing(x, 3)

    for fn, kind in ((wrong, TypeError), (missing, NameError)):
        with pytest.raises(kind) as caught:
            traced(fn)
        assert not isinstance(caught.value, HTileError)
    with pytest.raises(TypeError, match="positional argument"):
        traced(own_arguments)


def test_protocols_see_a_plain_object():
    def f(x):
        assert not hasattr(x, "__cuda_array_interface__") and not hasattr(x, "_private")
        assert x is not None and x != "a"
        assert x in {x: 1} and hash(x) == hash(x)
        assert "row f32[8]" in repr(x) and "row f32[8]" in f"{x}"
        assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and isinstance(x, Tensor)
        assert not isinstance(x, torch.nn.Parameter)
        return x * np.float32(2.0) + np.float64(1.0) + np.int64(3)

    traced(f)


def test_augmented_assignment_is_fine():
    def f(x):
        x += 1
        x *= 2
        return x

    assert len(traced(f)) == 5


def test_values_do_not_outlive_their_trace():
    kept = []
    traced(lambda x: kept.append(x) or x)
    with pytest.raises(TraceError, match="another trace"):
        traced(lambda x: x + kept[0])
    for use in (torch.exp, torch.neg, lambda x: x + 1, lambda x: x + x, torch.zeros_like):
        with pytest.raises(TraceError, match=rf"after its trace(?s:.*){Path(__file__).name}"):
            use(kept[0])
