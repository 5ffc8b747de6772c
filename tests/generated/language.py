"""Small functions over the whole language, and what right arguments of each are.

`FUNCTIONS` has them by name, and `phrase` makes more: one expression each, of a value of any shape,
most of them wrong for it. tests.generated.wrong_calls draws calls to them, right and wrong.
"""

from __future__ import annotations

import linecache
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

import htile


class Kind(Enum):
    """What a parameter takes."""

    ROW = "row"
    VECTOR = "vector"  # which all rows share
    PER_ROW = "one number a row"
    INDEX = "one place a row"
    NUMBER = "a float, or a tensor of one"
    STATIC = "one of some values"


class Of(Enum):
    """Which dtypes the tensors of a parameter have."""

    FLOATS = "floats"
    INTEGERS = "int32 or int64"
    MASKS = "bool"
    STORED = "8 bits"
    ANY = "all of these"


@dataclass(frozen=True)
class Takes:
    """Right arguments of one parameter.

    inner: the shape of a row or vector for a length n; of an INDEX (n,), which it points into.
    values: of a STATIC, the right ones, then some that may be wrong.
    """

    kind: Kind
    inner: Callable[[int], tuple[int, ...]] = lambda n: (n,)
    of: Of = Of.FLOATS
    values: tuple = ()
    is_optional: bool = False


@dataclass(frozen=True)
class Entry:
    """A function with what its parameters take.

    steps: how far a result in 8 bits may be from the exact one, in units of the last place: the
        float32 number that is rounded may lie on the other side of a tie.
    beyond: what all of a row is where its index is beyond the row and torch raises. None for a
        function that has no such index.
    wraps: whether a negative index counts from the end.
    near: the relative error that float results may have.
    """

    function: htile.Rowwise
    takes: dict[str, Takes]
    steps: int = 0
    beyond: float | None = None
    wraps: bool = False
    near: float = 2e-5


FUNCTIONS: dict[str, Entry] = {}


def taking(
    steps: int = 0, beyond: float | None = None, wraps: bool = False, **takes: Takes
) -> Callable[[Callable], htile.Rowwise]:
    """Decorate a function and enter it in `FUNCTIONS`."""

    def enter(fn: Callable) -> htile.Rowwise:
        function = htile.rowwise(fn)
        FUNCTIONS[fn.__name__] = Entry(function, takes, steps, beyond, wraps)
        return function

    return enter


def row(*inner: int | Callable, of: Of = Of.FLOATS, is_optional: bool = False) -> Takes:
    """A row of these sizes; `times(k)` is k * n. Without any it is of shape (n,)."""
    sizes = inner or (times(1),)
    return Takes(
        Kind.ROW, lambda n: tuple(s(n) if callable(s) else s for s in sizes), of, (), is_optional
    )


def times(k: int) -> Callable[[int], int]:
    """k * n."""
    return lambda n: k * n


def vector(k: int = 1, of: Of = Of.FLOATS, is_optional: bool = False) -> Takes:
    """k * n numbers that all rows share."""
    return Takes(Kind.VECTOR, lambda n: (k * n,), of, (), is_optional)


def static(*values: object) -> Takes:
    """A Python value."""
    return Takes(Kind.STATIC, values=values, is_optional=True)


NAN = math.nan
X, INDEX, NUMBER = row(), Takes(Kind.INDEX), Takes(Kind.NUMBER, is_optional=True)
PER_ROW = Takes(Kind.PER_ROW)


# rows, vectors and numbers


@taking(x=X)
def softmax(x):
    return torch.softmax(x, -1)


@taking(x=X, w=vector(is_optional=True), b=vector(is_optional=True), eps=NUMBER)
def normed(x, w=None, b=None, eps: float = 1e-3):
    y = (x - x.mean()) * torch.rsqrt(x.var(correction=0) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


@taking(x=X, t=PER_ROW, s=NUMBER)
def scaled(x, t: htile.PerRow, s: htile.Scalar = 1.5):
    return {"y": x * t + s, "top": x.amax(-1, keepdim=True), "sum": (x * s).sum()}


@taking(x=X, y=X)
def exchanged(x, y):
    s = (x * y).mean()
    return x - s, y - s


@taking(x=X, low=NUMBER, high=PER_ROW)
def clamped(x, low: float = -0.5, high: htile.PerRow = 0.5):
    return x.clamp(low, None).clamp(max=high)


@taking(x=row(of=Of.ANY), kind=static(
    torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool,
    torch.float64, torch.complex64, torch.int16, None, "float32"))  # fmt: skip
def converted(x, kind=torch.float32):
    return x.to(kind) if isinstance(kind, torch.dtype | str) else x.abs()


@taking(x=row(of=Of.INTEGERS), y=row(of=Of.INTEGERS))
def whole_numbers(x, y):
    return x * 3 - y, x // 7, x % 5, torch.maximum(x, y).sum(), (x == y).sum(), -x.amin()


@taking(x=row(of=Of.MASKS), y=row(of=Of.MASKS))
def masks(x, y):
    return x & ~y, x ^ y, x.any(), (x | y).all(), x.sum(), torch.where(x, 1.0, y.float())


@taking(x=X, mode=static("relu", "square", "twice", "", None, 2, 1.5, True))
def chosen(x, mode="relu"):
    if mode == "relu":
        return torch.relu(x)
    return x * x if mode == "square" else x * 2


# parts, pairs and stacks


@taking(x=row(times(2)))
def swiglu(x):
    gate, up = x.chunk(2)
    return F.silu(gate) * up


@taking(x=row(times(2)), dy=X)
def swiglu_backward(x, dy):
    gate, up = x.chunk(2)
    share = torch.sigmoid(gate)
    return torch.cat((dy * up * share * (1 + gate * (1 - share)), dy * gate * share))


@taking(x=row(times(2), of=Of.ANY))
def swapped(x):
    first, second = x.chunk(2)
    return torch.cat((second, first))


@taking(x=row(times(2)), cos=vector(), sin=row())
def rotated(x, cos, sin):
    a, b = x[0::2], x[1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten()


@taking(x=row(times(4), of=Of.ANY))
def fours(x):
    a, b, c, d = x.view(-1, 4).unbind(-1)
    return torch.stack((d, c, b, a), -1).flatten(), torch.cat((a, d))


@taking(x=row(of=Of.ANY), k=static(1, 0, 2, -1, 5, 100, -100, 1.0, None, True, "1"))
def moved(x, k=1):
    return torch.cat((x[k:], x[:k]))


@taking(x=row(times(4)), size=static(1, 2, 4, (1, 2), (2, 2), 3, 0, -1, 100, 1.5, None))
def split(x, size=2):
    return tuple(part.sum() for part in x[:4].split(size)), x.roll(1)


@taking(x=row(3, times(1)), share=row(3))
def combined(x: htile.Inner[2], share: htile.Inner[1]):
    return (torch.softmax(share, -1)[:, None] * x).sum(0)


@taking(x=row(2, 3, times(1)))
def summed(x: htile.Inner[3]):
    return x.sum(0), x.amax((1, 2)), x[0, :, -1], x.flatten(0, 1).mean(0, keepdim=True)


@taking(a=row(3, 3), x=row(3, times(1)))
def mixed(a: htile.Inner[2], x: htile.Inner[2]):
    return (a[:, :, None] * x[None]).sum(1), a.mT, a / a.abs().sum(1, keepdim=True).clamp(min=0.1)


@taking(x=row(4), y=row(times(1)))
def crossed(x: htile.Inner[1], y):
    return x[:, None] * y[:3].sum(), torch.stack([y * each for each in x.unbind()])


@taking(x=X, shape=static((-1, 2), (2, -1), (-1,), (1, -1), (-1, 3), (0, -1), (-1, -1), 2, None))
def viewed(x, shape: htile.Static = (-1,)):
    return x.view(shape).sum(-1)


# groups and results in 8 bits


@taking(x=row(times(4)), steps=1)
def quantized(x):
    groups = x.view(4, -1)
    scale = groups.abs().amax(-1).clamp(min=0.01) / 448
    return (groups / scale[:, None]).flatten().to(torch.float8_e4m3fn), scale


@taking(x=X, steps=1)
def to_int8(x):
    scale = x.abs().amax().clamp(min=0.01) / 127
    return torch.round(x / scale).to(torch.int8), scale


@taking(q=row(of=Of.STORED), scale=PER_ROW, zero=NUMBER)
def from_8_bits(q, scale: htile.PerRow, zero: htile.Scalar = 3):
    return ((q.float() - zero) * scale).to(torch.bfloat16)


# indices, masks of columns, losses


@taking(x=row(of=Of.ANY), y=INDEX, beyond=NAN, wraps=True)
def picked(x, y: htile.PerRow):
    return x[y]


@taking(x=X, y=INDEX, beyond=NAN, wraps=True)
def less_the_element(x, y: htile.PerRow):
    return x - x[y]


@taking(x=X)
def less_the_counted(x):
    return x - x[(x > 0).sum() % x.shape[-1]]


@taking(x=X, k=static(0, -1, 1, 7, -100, 100, 1.0, None, True, "0"))
def numbered(x, k=0):
    return x[k]


@taking(x=X, y=INDEX, beyond=NAN)
def gathered(x, y: htile.PerRow):
    return x.gather(-1, y[..., None])


@taking(x=X, y=INDEX, beyond=0.0)
def hot(x, y: htile.PerRow):
    return torch.where(F.one_hot(y, x.shape[-1]) == 1, x, 0.0)


@taking(x=X, length=INDEX)
def causal(x, length: htile.PerRow):
    column = torch.arange(x.shape[-1])
    return torch.where(column <= length, x, 0.0), (column < length).sum()


@taking(x=X, is_hidden=row(of=Of.MASKS))
def masked_softmax(x, is_hidden):
    p = torch.softmax(torch.where(is_hidden, -torch.inf, x), -1)
    return torch.where(is_hidden.all(), 0.0, p)


@taking(x=X, y=INDEX, w=vector(is_optional=True), smoothing=static(0.0, 0.25, 1, 1.5, -1, None),
        beyond=NAN)
def class_loss(x, y: htile.PerRow, w=None, smoothing: htile.Static = 0.0):
    w = None if w is None else w.abs().clamp(0.5, 2.0).to(x.dtype)
    return F.cross_entropy(x, y, w, reduction="sum", label_smoothing=smoothing)


@taking(x=X, y=INDEX, ignored=static(-100, 0, 1, None, 0.5), beyond=NAN)
def class_score(x, y: htile.PerRow, ignored=-100):
    return F.nll_loss(x, y, reduction="none", ignore_index=ignored)


@taking(x=X, target=X)
def shares_loss(x, target):
    return F.cross_entropy(x, torch.softmax(target, -1)), F.mse_loss(x, target)


# tensors made inside


@taking(x=X, n=static(8, 4, 1, 0, -1, 2.5, None), value=static(2.0, 3, True, None, "1"))
def made(x, n=8, value: htile.Static = 2.0):
    ones = torch.ones(x.shape[-1])
    return x.sum() + torch.full((n,), value).sum(), x[:1] * torch.arange(n), x * ones


# ---- single expressions --------------------------------------------------------------------------

VALUES = (  # of every shape and dtype that a value of a row x, of n elements, may have
    "x", "x", "x.sum()", "x.amax(-1, keepdim=True)", "x[None]", "x.view(2, -1)", "x.view(-1, 1)",
    "x[:, None] * x", "x[0]", "x[:1]", "x[1:]", "torch.stack((x, -x))", "x > 0", "(x > 0).any()",
    "(x > 0).sum()", "torch.arange(x.shape[-1])", "torch.zeros(3)", "x.half()",
    "x.sum().bfloat16()", "x[None, :, None]", "(x * 4).int()", "x.expand(2, -1)", "torch.ones(())",
)  # fmt: skip
DIMS = ("0", "1", "-1", "-2", "2", "(0, 1)", "()", "None", "True", "1.5", "v")
PHRASES = (  # of such a value v; D is one of `DIMS`, K a small number
    "v.sum(D)", "v.mean(D)", "v.amax(D)", "v.amin(D, keepdim=True)", "v.prod(D)", "v.any(D)",
    "v.all(D, keepdim=True)", "v.max()", "v.max(D)", "v.min(D).values", "v.var(D)", "v.std(D)",
    "v.norm(dim=D)", "v.softmax(D)", "v.log_softmax(D)", "v.logsumexp(D)", "F.normalize(v, dim=D)",
    "v.chunk(K, D)[0]", "v.chunk(K)", "v.split(K, D)[-1]", "v.split((K, 1), D)", "v.unbind(D)",
    "v.tensor_split(K, D)[0]", "v.tensor_split((K,), D)", "v.select(D, K)", "v.narrow(D, 0, K)",
    "v.narrow(D, K, 1)", "v.roll(K, D)", "v.roll(K)", "F.glu(v, D)", "v[K]", "v[..., K]", "v[K:]",
    "v[:K]", "v[::K]", "v[K:, None]", "v[None]", "v[..., None, :]", "v[:, K]", "v[v]", "v[v > 0]",
    "v[v.shape[-1] - 1]", "v[[0]]", "v[True]", "v[0, 0]", "v[...]", "v[()]", "v.view(-1)",
    "v.view(K, -1)", "v.view(-1, K)", "v.view(v.shape)", "v.reshape(1, -1)", "v.view(())",
    "v.flatten()", "v.flatten(D)", "v.flatten(0, D)", "v.unflatten(D, (K, -1))", "v.ravel()",
    "v.squeeze(K)", "v.unsqueeze(D)", "v.expand(K, -1)", "v.expand(2, *v.shape)", "v.expand(K)",
    "v.expand_as(x)", "x + v.expand_as(x)", "torch.broadcast_to(v, (K, 2))", "v.T", "v.mT", "v.t()",
    "v.transpose(0, D)", "v.permute(D)", "v.movedim(0, D)", "v.permute(0, 1)",
    "torch.cat((v, v), D)", "torch.cat((v, x), D)", "torch.stack((v, v), D)", "torch.cat((v,))",
    "torch.stack((v, x))", "torch.cat(())", "torch.stack(())", "list(v)", "len(v)", "v.size(D)",
    "v.dim()", "v.numel()", "v.shape[-1] * x", "v.gather(D, v)",
    "v.gather(-1, v.long()[..., None])", "torch.take_along_dim(x, v, -1)", "x[v]",
    "F.one_hot(v, K)", "F.one_hot(v.long(), K)", "F.layer_norm(v, v.shape[-1:])",
    "F.rms_norm(v, (K,), None, 0.1)", "F.layer_norm(v, K)", "v @ v", "v @ x", "x @ v", "v.mm(v)",
    "torch.mv(v, x)", "torch.dot(x, v)", "v.matmul(x)", "v + x", "x * v", "x - v", "x / v",
    "v // K", "v % K", "v ** K", "v ** 0.5", "2 ** v", "v == x", "v < K", "v & v", "~v", "-v",
    "abs(v)", "v.clamp(K)", "v.clamp(v, x)", "torch.where(v > 0, v, x)", "torch.where(v, 1, 0)",
    "v.masked_fill(v > 0, K)", "torch.maximum(v, x)", "v.to(x.dtype)", "v.float()", "v.int()",
    "v.bool()", "v.type_as(x)", "torch.full_like(v, K)", "torch.zeros_like(v)",
    "torch.full((K,), 2.0)", "torch.arange(K)", "torch.arange(K, 8, K)", "torch.zeros(K, 2)",
    "torch.tensor([1, K])", "torch.ones(v.shape)", "F.cross_entropy(v, x)", "F.cross_entropy(x, v)",
    "F.nll_loss(x, v)", "F.mse_loss(v, x)", "F.mse_loss(v, x, reduction='none')",
    "v.cosine_similarity(x, D)", "F.kl_div(v, v)", "torch.addcmul(x, v, v)", "torch.hypot(v, x)",
    "torch.xlogy(v, v)", "v.isnan()", "v.sign()", "v.round()", "v.nan_to_num(0.0, 1.0, K)",
    "v.count_nonzero(D)", "v.cumsum(D)", "v.sort()", "v.topk(K)", "v.argmax(D)", "v.item()",
    "float(v)", "v.tolist()", "v.double()", "v.device", "v.dtype", "v.unknown", "v.add_(1)",
    "torch.add(v, x, alpha=K)", "torch.sub(v, x, alpha=0.5)", "F.gelu(v)",
    "F.gelu(v, approximate='K')", "F.silu(v)", "v.sum(dtype=torch.float32)",
    "v.mean(dtype=torch.int32)", "v.sum(D, dtype=torch.int16)", "torch.einsum('i,i->', v, x)",
    "F.linear(v, x)", "x.view(v)", "x[v:]", "x.roll(v)", "v.copysign(x)", "v.index_select(0, v)",
    "v.repeat(K)", "v.flip(0)", "torch.outer(x, v)", "torch.atan2(v, x)", "torch.frexp(v)",
    "v.frexp().exponent", "torch.ldexp(x, v)", "torch.ldexp(v, (x * 4).int())", "v.ldexp(K)",
)  # fmt: skip


def phrase(value: str, text: str, dim: str, size: int) -> Entry:
    """The function of a row that returns an expression of a value, with its dims and sizes."""
    body = re.sub(r"\bD\b", dim, re.sub(r"\bK\b", str(size), text))
    name = f"phrase_{zlib.crc32(f'{body} of {value}'.encode()):08x}"
    if name not in _phrases:
        source = f"def {name}(x):\n    v = {value}\n    return {body}\n"
        file = f"{name}.py"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        names = {"torch": torch, "F": F}
        exec(compile(source, file, "exec", dont_inherit=True), names)
        rounds = any(word in source for word in ("half", "bfloat16", "x.dtype"))
        near = 2e-2 if rounds else 2e-5  # torch goes on in 16 bits, HTile in float32
        _phrases[name] = Entry(htile.rowwise(names[name]), {"x": X}, near=near)
    return _phrases[name]


_phrases: dict[str, Entry] = {}
