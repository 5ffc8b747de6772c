"""Random numbers that a function of a row computes: `htile.philox` and what is made of its words.

Each takes symbolic tensors inside a row-wise function, and torch's tensors everywhere else, also
under `torch.vmap`. Both give the same words, the same uniform numbers and the same masks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch

from ..errors import DtypeError, ShapeError, TraceError, an
from .factories import index
from .ops import Op
from .philox import exponential_of, uniform_of, word_of, words
from .promotion import FLOAT, INT64, convert, scalar
from .tensor import Tensor, call, fail, node

INTEGERS = (torch.int32, torch.int64)
RANGE = 2.0**32  # of a word


def _either(name: str, symbolic: Callable, real: Callable, *args: object) -> object:
    """What `symbolic` gives if an argument is symbolic, else what `real` gives."""
    if any(isinstance(x, Tensor) for x in args):
        return call(f"htile.{name}", symbolic, args, {})
    return real(*args)


def _dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a value is computed in."""
    return x._value.dtype if isinstance(x, Tensor) else x.dtype


def _integers(name: str, **operands: object) -> None:
    """Refuse what is neither an integer of 32 or 64 bits nor a number that int64 holds."""
    for what, x in operands.items():
        if isinstance(x, torch.Tensor):
            if (dtype := _dtype(x)) not in INTEGERS:
                told = str(dtype).removeprefix("torch.")
                fail(DtypeError, f"htile.{name}: {what} is an integer of 32 or 64 bits, not "
                     f"{told}: convert it, {what}.long()")  # fmt: skip
        elif type(x) is not int:
            fail(TraceError, f"htile.{name}: {what} is a tensor of integers or a Python int, not "
                 f"{an(type(x).__name__)}")  # fmt: skip
        elif not -(2**63) <= x < 2**63:
            fail(DtypeError, f"htile.{name}: {what}={x} does not fit int64")


def _some_tensor(name: str, **operands: object) -> None:
    """Refuse numbers alone: of those the words would have no device, and no graph."""
    if not any(isinstance(x, torch.Tensor) for x in operands.values()):
        fail(TraceError, f"htile.{name}: {' or '.join(operands)} is a tensor, such as "
             "torch.arange(x.shape[-1])")  # fmt: skip


def philox(
    counter: torch.Tensor | int, key: torch.Tensor | int, subsequence: torch.Tensor | int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words of 32 bits, as unsigned numbers in int64: Philox4x32-10.

    They are a function of the arguments alone (Salmon, Moraes, Dror and Shaw, "Parallel
    random numbers: as easy as 1, 2, 3", SC 2011). So that words are independent, no counter may
    occur twice with one key. The arguments are int64, or int32 with their sign, or Python integers.
    At least one of them is a tensor, and they are broadcast. Four words of one counter cost about
    as much as one.

    counter: its low and its high half are words 0 and 1 of the counter of 128 bits.
    key: its low and its high half are the two words of the key; such as a seed.
    subsequence: its low and its high half are words 2 and 3 of the counter.

    Raises DtypeError for other dtypes, and TraceError for what is no tensor and no integer.
    """
    operands = {"counter": counter, "key": key, "subsequence": subsequence}
    _integers("philox", **operands)
    _some_tensor("philox", **operands)
    return _either("philox", _symbolic_philox, _real_philox, counter, key, subsequence)


def _symbolic_philox(counter, key, subsequence):
    operands = _as_int64((counter, key, subsequence))
    return tuple(node(Op.PHILOX, *operands, arg=word) for word in range(4))


def _as_int64(given: tuple) -> list[Tensor]:
    """Symbolic tensors and Python integers, of which one is a tensor, as tensors of int64."""
    like = next(x for x in given if isinstance(x, Tensor))
    return [convert(x, INT64) if isinstance(x, Tensor) else scalar(like, x, INT64) for x in given]


def _real_philox(counter, key, subsequence):
    given = (counter, key, subsequence)
    return words(*(x.long() if isinstance(x, torch.Tensor) else x for x in given))


def random_words(
    index: torch.Tensor | int, key: torch.Tensor | int, subsequence: torch.Tensor | int = 0
) -> torch.Tensor:
    """One random word of 32 bits for each index, as an unsigned number in int64.

    It is word `index % 4` of `htile.philox(index // 4, key, subsequence)`. Neighbouring indices
    share a counter, so words for `torch.arange(x.shape[-1])` take a quarter of what as many calls
    of `htile.philox` take. So that words are independent, no index may occur twice with one key and
    one subsequence, and no counter of `htile.philox` be used beside them.

    The arguments are int64, or int32 with their sign, or Python integers. At least one of them is a
    tensor, and they are broadcast.

    Raises DtypeError for other dtypes, and TraceError for what is no tensor and no integer.
    """
    operands = {"index": index, "key": key, "subsequence": subsequence}
    _integers("random_words", **operands)
    _some_tensor("random_words", **operands)
    symbolic, real = _symbolic_words, _real_words
    return _either("random_words", symbolic, real, index, key, subsequence)


def _symbolic_words(*given):
    return node(Op.WORD, *_as_int64(given))


def _real_words(*given):
    return word_of(*(x.long() if isinstance(x, torch.Tensor) else x for x in given))


def uniform(w: torch.Tensor) -> torch.Tensor:
    """(w + 0.5) * 2 ** -32 in float32, between 0 and 1: never 0, and never 1.

    w is rounded to float32 (the nearest one), then the sum is. From w = 2 ** 32 - 128 on that would
    be 1, and is 1 - 2 ** -24, the largest number below 1. The smallest is 2 ** -33. A kernel and
    torch give the same bits.

    w: words of `htile.philox`, of any shape; of other integers the low 32 bits count.

    Raises DtypeError where w is not an integer.
    """
    _integers("uniform", w=w)
    _some_tensor("uniform", w=w)
    return _either("uniform", lambda w: node(Op.UNIFORM, convert(w, INT64)), _real_uniform, w)


def _real_uniform(w):
    return uniform_of(w.long())


def exponential(w: torch.Tensor) -> torch.Tensor:
    """-log((w + 0.5) * 2 ** -32) in float32: exponentially distributed, with a mean of 1.

    The logarithm is of the exact number and not of `htile.uniform(w)`, which has lost its distance
    from 1: above 1/2 it is `log1p` of minus that distance, (2 ** 32 - 0.5 - w) * 2 ** -32. So it is
    never 0 nor infinite, but between 2 ** -33 and 22.9, and -torch.log of it is Gumbel noise.

    w: words of `htile.philox`, of any shape; of other integers the low 32 bits count.

    Raises DtypeError where w is not an integer.
    """
    _integers("exponential", w=w)
    _some_tensor("exponential", w=w)
    symbolic, real = _symbolic_exponential, _real_exponential
    return _either("exponential", symbolic, real, w)


def _symbolic_exponential(w):
    return node(Op.EXPONENTIAL, convert(w, INT64))


def _real_exponential(w):
    return exponential_of(w.long())


def dropout(
    x: torch.Tensor, p: torch.Tensor | float, seed: torch.Tensor | int
) -> torch.Tensor:
    """x / (1 - p) where an element is kept, and 0 where it is dropped, with a probability of p.

    Element k of a row is kept where (w + 0.5) * 2 ** -32 > p for w =
    htile.random_words(torch.arange(N), seed)[k]. They are compared as integers, so exactly, for the
    float32 nearest to p. A backward pass computes the same mask of the same seed. Rows of one seed
    have one mask.

    x: a row; outside row-wise functions rows of any leading shape. Floats of any dtype, which the
        result has too.
    p: from 0 to 1, a number or one a row. With p = 1 nothing is kept.
    seed: int64 or int32, one a row or one for all.

    Raises DtypeError, ShapeError or TraceError where an argument is not that.
    """
    if not isinstance(x, torch.Tensor) or not x.ndim:
        fail(ShapeError, "htile.dropout: x is a row, a tensor of one dimension or more")
    if not _dtype(x).is_floating_point:
        told = str(_dtype(x)).removeprefix("torch.")
        fail(DtypeError, f"htile.dropout of {told} is not defined: convert it first, x.float()")
    _integers("dropout", seed=seed)
    if not isinstance(p, torch.Tensor) and not (type(p) in (int, float) and 0 <= p <= 1):
        fail(TraceError, f"htile.dropout: p is a number from 0 to 1 or a tensor, not {p!r}")
    return _either("dropout", _dropout, _dropout, x, p, seed)


def _dropout(x, p, seed):
    n = x._sizes[-1] if isinstance(x, Tensor) else x.shape[-1]
    columns = index(x._builder, n) if isinstance(x, Tensor) else torch.arange(n, device=x.device)
    word = random_words(columns, _beside(x, seed))
    least, scale = _kept_from(_beside(x, p))
    kept = torch.where(word >= least, _wide(x) * scale, 0.0)
    return kept if isinstance(x, Tensor) else kept.to(x.dtype)


def _kept_from(p: torch.Tensor | float) -> tuple:
    """The least word w with (w + 0.5) * 2 ** -32 > p, and 1 / (1 - p).

    It is the product of p and 2 ** 32, rounded to the nearest, and up in the middle of two.
    """
    if not isinstance(p, torch.Tensor):
        (p,) = struct.unpack("f", struct.pack("f", p))
        return math.floor(p * RANGE + 0.5), 1 / (1 - p) if p < 1 else 0.0
    p = _wide(p)
    product = (p if isinstance(p, Tensor) else p.float()) * RANGE
    below = torch.floor(product)
    least = torch.where(product - below >= 0.5, below + 1, below)
    return least.long(), 1 / (1 - p)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in float32, or float64 if it is; a symbolic one declares nothing."""
    if isinstance(x, Tensor):
        return convert(x, FLOAT)
    return x if x.dtype is torch.float64 else x.float()


def _beside(x: torch.Tensor, value: torch.Tensor | int) -> torch.Tensor | int:
    """One value a row with an axis for the row's elements."""
    is_of_rows = isinstance(value, torch.Tensor) and 0 < value.ndim < x.ndim
    return value[..., None] if is_of_rows else value
