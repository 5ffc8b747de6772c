"""The device functions of random numbers: how they compile, and on a GPU what they give."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int64

from htile.compute import math as m
from htile.frontend.philox import uniform_of, word_of, words
from tests.frontend.test_random import KNOWN, WORDS, int64, seeds
from tests.primitives.device_code import ARCHS
from tests.primitives.elementwise import build, mixes, ptx
from tests.primitives.test_math_values import launch, no_gpu

WORD = {k: lambda *operands, k=k: m.philox(*operands, word=k) for k in range(4)}


@pytest.mark.parametrize("count", (1, 3, 8))
def test_every_mix_of_operands_compiles(count):
    calls = mixes(m.philox, 3, 3)
    build(calls, [Int64] * 3, [Int64] * len(calls), count)
    calls = mixes(m.word, 3, 3)
    build(calls, [Int64] * 3, [Int64] * len(calls), count)
    for function in (m.uniform, m.exponential):
        calls = mixes(function, 1, 3)
        build(calls, [Int64], [Float32] * len(calls), count)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture(arch):
    calls = [lambda v, s, k=k: WORD[k](*v) for k in range(4)]
    calls += [lambda v, s: m.word(*v), lambda v, s: m.uniform(v[0])]
    calls.append(lambda v, s: m.exponential(v[0]))
    build(calls, [Int64] * 3, [Int64] * 5 + [Float32] * 2, 2, arch)


def test_a_round_takes_two_products():
    """Of 32 bits by 32 bits to 64; in the first and the last rounds some halves are not needed."""
    text = ptx(lambda v, s: m.philox(v[0], s[1], 0), [Int64] * 2, Int64, 4)
    assert 4 * 17 <= text.count("mul.") <= 4 * 20
    assert text.count("mul.wide.u32") >= 4 * 11


def test_four_neighbouring_words_take_one_counter():
    def products(vec):
        text = ptx(lambda v, s: m.word(v[0], s[1], s[2], vec=vec), [Int64] * 3, Int64, 8)
        return text.count("mul.")

    assert 8 * 17 <= products(1) <= 8 * 20 and 2 * 17 <= products(8) == products(4) <= 2 * 20


def test_a_word_becomes_a_float_in_three_instructions():
    text = ptx(lambda v, s: m.uniform(v[0]), [Int64], Float32, 4)
    for instruction in ("cvt.rn.f32.u32", "fma.rn.f32", "min.f32"):
        assert text.count(instruction) == 4, instruction


@pytest.mark.gpu
@no_gpu
def test_values_of_philox():
    """The known answers, then any operands; of vectors, and of scalars beside them."""
    known = [(int64(*c[:2]), int64(*key), int64(*c[2:])) for c, key, _ in KNOWN]
    tensors = torch.stack([seeds(4096, k) for k in range(3)])
    tensors[:, : len(known)] = torch.tensor(known).T
    expected = torch.stack(words(*tensors))
    for k, (_, _, right) in enumerate(KNOWN):
        assert tuple(expected[:, k].tolist()) == right
    inputs = [x.cuda() for x in tensors]
    calls = [lambda v, s, k=k: WORD[k](*v) for k in range(4)]
    for found, right in zip(launch(calls, inputs, [Int64] * 3, [Int64] * 4), expected, strict=True):
        assert torch.equal(found.cpu(), right)
    first = [x.view(-1, 8)[:, :1].expand(-1, 8).reshape(-1) for x in tensors]
    for which in itertools.product((False, True), repeat=3):
        if not any(which):
            continue

        def call(v, s, which=which):
            return m.philox(*(v[k] if which[k] else s[k] for k in range(3)), word=1)

        (found,) = launch([call], inputs, [Int64] * 3, [Int64])
        chosen = [tensors[k] if which[k] else first[k] for k in range(3)]
        assert torch.equal(found.cpu(), words(*chosen)[1])


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("vec", (1, 4, 8))
def test_values_of_word(vec):
    index = torch.arange(4096) - 1024 * 4
    if vec == 1:
        index = index.flip(0)
    tensors = index, *(seeds(4096, k).view(-1, 8)[:, :1].expand(-1, 8).reshape(-1) for k in (1, 2))
    call = lambda v, s: m.word(*v, vec=vec)  # noqa: E731
    (found,) = launch([call], [x.cuda() for x in tensors], [Int64] * 3, [Int64])
    assert torch.equal(found.cpu(), word_of(*tensors))


@pytest.mark.gpu
@no_gpu
def test_values_of_exponential():
    """Within 2 ulp, over words near every power of two and near 2 ** 32, and over many others."""
    edges = torch.cat([2**k + torch.arange(-64, 64) for k in range(7, 33)])
    edges = torch.cat([edges, 2**32 - edges, 3 * edges // 2, torch.arange(2**32 - 64, 2**32)])
    w = torch.cat([edges.view(-1, 2)[:, 0], torch.randint(2**32, (8192,))])[:8192] % 2**32
    (found,) = launch([lambda v, s: m.exponential(v[0])], [w.cuda()], [Int64], [Float32])
    number, distance = (w.double() + 0.5) * 2.0**-32, ((2**32 - 1 - w).double() + 0.5) * 2.0**-32
    right = torch.where(number < 0.5, -number.log(), -torch.log1p(-distance))
    unit = torch.from_numpy(np.spacing(right.float().numpy())).double()
    errors = (found.cpu().double() - right).abs() / unit
    assert errors.max() <= 2, (w[errors.argmax()], errors.max())


@pytest.mark.gpu
@no_gpu
def test_values_of_uniform():
    w = torch.cat([WORDS, -WORDS])
    w = w[::6]  # a launch takes 8192
    w = w[: len(w) // 8 * 8]
    (found,) = launch([lambda v, s: m.uniform(v[0])], [w.cuda()], [Int64], [Float32])
    assert torch.equal(found.cpu(), uniform_of(w))
