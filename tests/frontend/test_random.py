"""Random numbers: Philox, its words as numbers, and dropout, of symbolic and of torch's tensors.

The words are held against the published known answers, and against Philox in Python's integers.
"""

from __future__ import annotations

import math
import random as pythons
import re

import pytest
import torch
import torch.nn.functional as F

import htile
from benchmarks.instructions import counted
from htile.errors import DtypeError, HTileError, ShapeError, TraceError, UnsupportedError
from htile.frontend.philox import words
from htile.testing import assert_close, oracle
from tests.frontend.test_indices import exact, kernels_graph

I32, I64, F32, F64, BF16 = torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16
MASK = 0xFFFFFFFF
# The known answers of Random123 (D. E. Shaw Research), file kat_vectors: counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


def int64(low, high):
    """Two words as the halves of an int64."""
    x = low | high << 32
    return x - 2**64 if x >= 2**63 else x


def in_python(counter, key, subsequence):
    """Philox4x32-10 of three int64, as the paper writes it down, in integers without a width."""
    a, b, c, d = counter & MASK, counter >> 32 & MASK, subsequence & MASK, subsequence >> 32 & MASK
    first, second = key & MASK, key >> 32 & MASK
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ first, q & MASK, p >> 32 ^ d ^ second, p & MASK
        first, second = (first + 0x9E3779B9) & MASK, (second + 0xBB67AE85) & MASK
    return a, b, c, d


def seeds(count, seed=0):
    """Any int64."""
    draw = pythons.Random(seed)
    return torch.tensor([draw.randrange(-(2**63), 2**63) for _ in range(count)])


# ---- philox -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    given = int64(*counter[:2]), int64(*key), int64(*counter[2:])
    assert in_python(*given) == expected
    found = htile.philox(*(torch.tensor([x]) for x in given))
    assert tuple(x.item() for x in found) == expected
    assert all(x.dtype is I64 and x.shape == (1,) for x in found)
    f = htile.rowwise(lambda c, k, s: htile.philox(c, k, s))
    tensors = [torch.full((2, 3), x) for x in given]
    for graphs in (f(*tensors), kernels_graph(f, tensors, (2,))):
        assert tuple(x[0, 0].item() for x in graphs) == expected
    # numbers are folded into the graph
    folded = htile.rowwise(lambda x: tuple(x + w for w in htile.philox(
        torch.tensor(given[0]), given[1], given[2])))  # fmt: skip
    zeros = torch.zeros(2, 3, dtype=I64)
    for graphs in (folded(zeros), kernels_graph(folded, (zeros,), (2,))):
        assert tuple(x[1, 2].item() for x in graphs) == expected


def test_words_of_many_counters():
    counter, key, subsequence = (seeds(300, k) for k in range(3))
    found = torch.stack(htile.philox(counter, key, subsequence), -1)
    expected = [in_python(*each) for each in zip(*map(torch.Tensor.tolist, (
        counter, key, subsequence)), strict=True)]  # fmt: skip
    assert found.tolist() == [list(each) for each in expected]


def drawn(x, seed: htile.PerRow, step: htile.PerRow):
    column = torch.arange(x.shape[-1])
    a, b, c, d = htile.philox(column, seed)
    return (
        a, b ^ c, d & 7, htile.philox(column, seed, step)[2], htile.philox(step, seed)[0],
        x + htile.uniform(htile.philox(column, 5, step)[1]), htile.philox(seed, column.int())[3],
    )  # fmt: skip


@pytest.mark.parametrize("n", (1, 7, 64, 1003))
def test_a_kernel_gives_what_torch_gives(n):
    """The traced graph, the kernel's graph with columns in int32, and the function under vmap."""
    f = htile.rowwise(drawn)
    x, seed, step = torch.zeros(5, n), seeds(5), torch.arange(5, dtype=I32) - 2
    expected = [torch.stack(each) for each in zip(*map(drawn, x, seed, step), strict=True)]
    assert expected[0][3].tolist() == [in_python(k, int(seed[3]), 0)[0] for k in range(n)]
    for results in (f(x, seed, step), kernels_graph(f, (x, seed, step), (5,)),
                    torch.vmap(drawn)(x, seed, step), torch.vmap(f)(x, seed, step)):  # fmt: skip
        for found, right in zip(results, expected, strict=True):
            exact(found, right)
    assert_close(f, f(x, seed, step), x, seed, step)


def worded(x, seed: htile.PerRow, step: htile.PerRow):
    column = torch.arange(x.shape[-1])
    a, b = htile.random_words(column, seed), htile.random_words(column + 8, seed, step)
    return (
        a, b, htile.random_words(column + 3, 5, step),
        htile.random_words(x.shape[-1] - 1 - column, seed), htile.random_words(step, seed),
        x + htile.uniform(a), htile.random_words(seed, column),
        htile.random_words(column - 6, seed), htile.random_words(column, column + seed),
    )  # fmt: skip


@pytest.mark.parametrize("n", (2, 7, 64, 1003))
def test_a_word_of_each_index(n):
    """Each is that of a counter for four, in the graph, in the kernel's and on torch's tensors."""
    f = htile.rowwise(worded)
    x, seed, step = torch.zeros(5, n), seeds(5), torch.arange(5, dtype=I32) - 2
    expected = [torch.stack(each) for each in zip(*map(worded, x, seed, step), strict=True)]

    def right(indices, key, subsequence=0):
        return [in_python(i // 4, key, subsequence)[i % 4] for i in indices]

    for row, (key, step_) in enumerate(zip(seed.tolist(), step.tolist(), strict=True)):
        a, b, c, d, e, _, _, far, own = (each[row].tolist() for each in expected)
        assert a == right(range(n), key) and b == right(range(8, n + 8), key, step_)
        assert c == right(range(3, n + 3), 5, step_) and d == a[::-1]
        assert [e] == right([step_], key)
        assert far == right(range(-6, n - 6), key)
        keys = (torch.arange(n) + seed[row]).tolist()
        assert own == [right([k], keys[k])[0] for k in range(n)]
    for results in (f(x, seed, step), kernels_graph(f, (x, seed, step), (5,)),
                    torch.vmap(worded)(x, seed, step)):  # fmt: skip
        for found, wanted in zip(results, expected, strict=True):
            exact(found, wanted)


def test_only_columns_of_one_key_share_a_counter():
    x = torch.empty(4, 64, device="meta")
    seed, step = torch.empty(2, 4, dtype=I64, device="meta")
    source = htile.rowwise(worded).inspect(x, seed, step, arch="sm_90a").source
    calls = re.findall(r"math\.word\((.*)\)", source)
    of_fours = [call for call in calls if call.endswith("vec=ctx.vec_size")]
    assert len(calls) == 8 and len(of_fours) == 2


def test_shapes_broadcast_on_torchs_tensors():
    found = htile.philox(torch.arange(6), seeds(4)[:, None], torch.tensor(3, dtype=I32))
    assert all(x.shape == (4, 6) and x.dtype is I64 for x in found)
    for x, right in zip(found, htile.philox(torch.arange(6)[2], seeds(4)[1], 3), strict=True):
        assert x[1, 2] == right
    exact(htile.philox(0, seeds(4))[1], words(torch.zeros(4, dtype=I64), seeds(4), 0)[1])


def test_a_kernel_does_the_rounds_once():
    """A word takes about 45 instructions, and three more of one counter a few."""

    def count(dtype, used: int):
        def f(x, seed: htile.PerRow, used: htile.Static):
            given = htile.philox(torch.arange(x.shape[-1]), seed)[:used]
            total = given[0]
            for word in given[1:]:
                total = total ^ word
            return x + htile.uniform(total)

        x = torch.empty(64, 4096, dtype=dtype, device="meta")
        seed = torch.empty(64, dtype=I64, device="meta")
        return counted(htile.rowwise(f).inspect(x, seed, used, arch="sm_90a").cubin)[0]

    one, four, twice = count(F32, 1), count(F32, 4), count(BF16, 1)  # of 4, 4 and 8 elements
    assert 40 <= (twice - one) / 4 <= 48
    assert (four - one) / 4 <= 12


# ---- numbers between 0 and 1 --------------------------------------------------------------------

WORDS = torch.cat([
    ((torch.arange(-300, 300)[:, None] + 2 ** torch.arange(33)) & MASK).flatten(),
    torch.arange(0, 2**32, 999983),
])  # fmt: skip


def test_uniform():
    u = htile.uniform(WORDS)
    assert u.dtype is F32 and u.min() == 2.0**-33 and u.max() == 1 - 2.0**-24
    right = (WORDS.double() + 0.5) * 2.0**-32
    assert ((u.double() - right).abs() <= right * 2.0**-23).all()
    f = htile.rowwise(lambda w: htile.uniform(w))
    exact(f(WORDS[None]), u[None])
    exact(kernels_graph(f, (WORDS[None],), (1,)), u[None])
    exact(htile.uniform(WORDS.int()), u)  # the low 32 bits count


def test_exponential():
    """To two units in the last place, at both ends too."""
    w = torch.cat([WORDS, torch.tensor([0, MASK, 2**31, 2**31 - 1])])
    exact_u = (w.double() + 0.5) * 2.0**-32
    right = -torch.log1p(-((MASK - w).double() + 0.5) * 2.0**-32)
    torch.testing.assert_close(right, -torch.log(exact_u), rtol=1e-6, atol=1e-15)
    e = htile.exponential(w)
    assert e.dtype is F32
    assert ((e.double() - right).abs() <= 4 * 2.0**-24 * right).all()
    assert (e.min() > 0) and e.max() < 23
    naive = -torch.log(htile.uniform(w))
    assert ((naive.double() - right).abs() > 1e-3 * right).any(), "what it is there for"
    f = htile.rowwise(lambda w: htile.exponential(w))
    assert_close(f, f(w[None]), w[None])
    exact(f(w[None]), e[None])
    exact(htile.exponential(w.int()), e)


def test_their_distribution():
    """A million numbers: mean and variance, within five deviations of these."""
    w, other, *_ = htile.philox(torch.arange(10**6), 42)
    u, v, e = (x.double() for x in (htile.uniform(w), htile.uniform(other), htile.exponential(w)))
    for x, mean, variance, fourth in ((u, 1 / 2, 1 / 12, 1 / 80), (e, 1, 1, 9)):
        assert abs(x.mean() - mean) < 5 * (variance / 10**6) ** 0.5
        assert abs(x.var() - variance) < 5 * ((fourth - variance**2) / 10**6) ** 0.5
    assert abs(((u - 0.5) * (v - 0.5)).mean()) < 5 / 12 / 1000


# ---- dropout ------------------------------------------------------------------------------------


def mask_of(n, p, seed):
    """As it is defined, in Python's integers and fractions."""
    p = torch.tensor(p, dtype=F32).item()
    words = (in_python(k // 4, seed, 0)[k % 4] for k in range(n))
    return torch.tensor([(word + 0.5) * 2.0**-32 > p for word in words])


@pytest.mark.parametrize("dtype", (F32, BF16, torch.float16), ids=str)
@pytest.mark.parametrize("p", (0.0, 0.1, 0.5, 0.875, 1.0, 0, 1))
def test_dropout(p, dtype):
    """A function, its kernel's graph, and torch's tensors have one mask, which is that defined."""
    n, seed = 200, seeds(4)
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    keep = torch.stack([mask_of(n, p, s) for s in seed.tolist()])
    q = torch.tensor(p, dtype=F32).double()
    expected = torch.where(keep, x.double() / (1 - q), 0.0).to(dtype)
    for each in (0.0, -1.0, math.inf, math.nan):
        assert torch.equal(htile.dropout(torch.full((n,), each), p, int(seed[0])).bool(),
                           keep[0] & (each != 0.0))  # fmt: skip

    @htile.rowwise
    def f(x, s: htile.PerRow):
        return htile.dropout(x, p, s)

    for found in (f(x, seed), kernels_graph(f, (x, seed), (4,)), htile.dropout(x, p, seed)):
        assert torch.equal(found != 0, keep & (x != 0))
        torch.testing.assert_close(found, expected, rtol=2e-7 if dtype is F32 else 0, atol=0)
    assert_close(f, f(x, seed), x, seed)


P = (0.0, 1e-9, 2.0**-32, 0.001953125, 0.0019531251, 0.1, 0.3, 0.5, 0.75, 1 - 2.0**-24, 1.0)


def test_a_probability_that_is_given_at_run_time():
    """One a row, and a number for all; the mask is that of the same number in the function."""
    x, seed, p = torch.ones(len(P), 500), seeds(len(P)), torch.tensor(P)

    @htile.rowwise
    def of_rows(x, p: htile.PerRow, s: htile.PerRow):
        return htile.dropout(x, p, s)

    @htile.rowwise
    def of_all(x, p: float, s: htile.PerRow):
        return htile.dropout(x, p, s)

    fixed = torch.stack([htile.dropout(*each) for each in zip(x, P, seed, strict=True)])
    @htile.rowwise
    def of_kept(x, p, s):
        return htile.dropout(x, p, s)

    for found in (of_rows(x, p, seed), of_kept(x, p[:, None], seed[:, None]),
                  htile.dropout(x, p, seed), htile.dropout(x, p[:, None], seed)):  # fmt: skip
        assert torch.equal(found != 0, fixed != 0)
        torch.testing.assert_close(found, fixed, rtol=3e-7, atol=0)
    for number, row in zip(P, fixed, strict=True):
        found = of_all(x, number, seed)[P.index(number)]
        assert torch.equal(found != 0, row != 0)
    assert_close(of_rows, of_rows(x, p, seed), x, p, seed)


def test_where_a_word_is_the_last_that_is_dropped():
    """The bound itself, of probabilities whose product with 2 ** 32 is whole, half, or neither."""
    from htile.frontend.random import _kept_from

    for p in (*P, 1.5 * 2.0**-32, 2.5 * 2.0**-32, 3.4999 * 2.0**-32, 8388607.5 * 2.0**-32):
        (p,) = torch.tensor([p], dtype=F32).tolist()
        least, _ = _kept_from(p)
        assert (least + 0.5) * 2.0**-32 > p and not (least - 0.5) * 2.0**-32 > p
        for dtype in (F32, F64):
            assert _kept_from(torch.tensor(p, dtype=dtype))[0] == least


def test_dropout_of_one_seed_for_all_and_of_a_declared_row():
    @htile.rowwise
    def f(x, s: htile.Scalar):
        return htile.dropout(x, 0.25, s), htile.dropout(x.half(), 0.25, 7), htile.dropout(x, 0.5, s)

    x, s = torch.ones(3, 64, dtype=BF16), torch.tensor(11, dtype=I32)
    first, second, third = f(x, s)
    exact(first, htile.dropout(x, 0.25, 11))
    exact(second, htile.dropout(x.half(), 0.25, 7))
    exact(third, htile.dropout(x, 0.5, s))
    assert torch.equal(first[0], first[2])


def test_the_oracle_has_the_same_mask():
    f = htile.rowwise(lambda x, s: htile.dropout(x, 0.3, s[..., 0]))
    x, s = torch.rand(6, 100) + 0.5, seeds(6)[:, None]
    right = oracle(f, x, s)
    assert right.dtype is F64 and torch.equal(right != 0, f(x, s) != 0)
    assert 0.5 < (right != 0).double().mean() < 0.9


# ---- what is refused ----------------------------------------------------------------------------

REFUSED = {
    "floats as a counter": (lambda x, i: htile.philox(x, 1)[0], DtypeError, "counter is an"),
    "a float as a key": (lambda x, i: htile.philox(i, 1.0)[0], TraceError, "not a float"),
    "a key of 65 bits": (lambda x, i: htile.philox(i, 2**63)[0], DtypeError, "does not fit int64"),
    "floats as an index": (lambda x, i: htile.random_words(x, 1), DtypeError, "index is an"),
    "words of numbers": (lambda x, i: htile.random_words(1, 2), TraceError, "is a tensor, such as"),
    "a mask": (lambda x, i: htile.philox(i, i > 0)[0], DtypeError, "not bool"),
    "numbers alone": (lambda x, i: htile.philox(1, 2)[0], TraceError, "is a tensor, such as"),
    "uniform of floats": (lambda x, i: htile.uniform(x), DtypeError, "w.long()"),
    "uniform of a number": (lambda x, i: htile.uniform(7), TraceError, "w is a tensor"),
    "exponential of floats": (lambda x, i: htile.exponential(x), DtypeError, "htile.exponential"),
    "dropout of integers": (lambda x, i: htile.dropout(i, 0.5, 1), DtypeError, "x.float()"),
    "dropout of a number": (lambda x, i: htile.dropout(1.0, 0.5, 1), ShapeError, "x is a row"),
    "a float seed": (lambda x, i: htile.dropout(x, 0.5, 1.5), TraceError, "seed is a tensor"),
    "a row of floats as seed": (lambda x, i: htile.dropout(x, 0.5, x), DtypeError, "seed is"),
    "more than 1": (lambda x, i: htile.dropout(x, 1.5, 1), TraceError, "from 0 to 1"),
    "less than 0": (lambda x, i: htile.dropout(x, -0.1, 1), TraceError, "from 0 to 1"),
    "a NaN": (lambda x, i: htile.dropout(x, math.nan, 1), TraceError, "from 0 to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    """In a function with its line, and on torch's tensors."""
    body, error, message = REFUSED[name]
    x, i = torch.ones(2, 8), torch.ones(2, 8, dtype=I64)
    f = htile.rowwise(lambda x, i: body(x, i))
    with pytest.raises(error) as raised:
        f(x, i)
    assert message in raised.value.message and "test_random.py" in str(raised.value)
    with pytest.raises(error) as raised:
        body(x, i)
    assert message in raised.value.message


TORCHS = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "torch.nn.Dropout": lambda x: torch.nn.Dropout(0.5)(x),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "torch.rand": lambda x: x + torch.rand(x.shape[-1]),
    "torch.randn": lambda x: x + torch.randn(x.shape),
    "torch.randint": lambda x: x + torch.randint(5, x.shape),
    "torch.randperm": lambda x: x + torch.randperm(x.shape[-1]),
    "torch.normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
    "torch.rand_like": lambda x: x + torch.rand_like(x),
    "torch.randn_like": lambda x: x + torch.randn_like(x),
    "torch.bernoulli": lambda x: torch.bernoulli(x),
    "x.bernoulli": lambda x: x.bernoulli(0.5),
    "x.bernoulli_": lambda x: x.bernoulli_(0.5),
    "x.uniform_": lambda x: x.uniform_(),
    "torch.multinomial": lambda x: torch.multinomial(x, 1),
    "F.gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_random_numbers_are_refused(name):
    """Each names what to write: another call gives other numbers, which no kernel may."""
    body = TORCHS[name]
    f = htile.rowwise(lambda x: body(x))
    with pytest.raises((UnsupportedError, TraceError)) as raised:
        f(torch.ones(2, 8))
    text = str(raised.value)
    assert "htile.random_words" in text and "htile.dropout" in text and "test_random.py" in text


def test_they_are_functions_of_the_package():
    for name in ("philox", "random_words", "uniform", "exponential", "dropout"):
        assert getattr(htile, name).__doc__ and name in htile.__all__
    assert issubclass(DtypeError, HTileError)


def test_a_seed_a_row_is_the_same_for_every_batch():
    """As an argument of a row-wise function it is broadcast over the dimensions before it."""

    @htile.rowwise
    def f(x, seed: htile.PerRow, p: htile.PerRow):
        return htile.dropout(x, p, seed)

    x, seed = torch.ones(2, 8, 8), torch.arange(8)
    p = torch.tensor([0.5, (0.5 - 2.0**-25) * 2.0**-32, 2.0**-32, 0.25, 0.9, 0.1, 0.0, 0.75])
    each = torch.stack([f(x[k], seed, p) for k in range(2)])
    assert torch.equal(f(x, seed, p), each)
    assert torch.equal(htile.dropout(x, p, seed), each)
    for k, number in enumerate(p.tolist()):
        assert torch.equal(htile.dropout(x[0, k], number, seed[k]), each[0, k])
