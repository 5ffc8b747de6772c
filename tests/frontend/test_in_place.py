"""In-place operators change a value for all who refer to it, as torch does, or raise."""

from __future__ import annotations

import operator
import re

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, HTileError, ShapeError, TraceError
from htile.testing import assert_close

M, N = 3, 9
BF16, I32 = torch.bfloat16, torch.int32


def arguments():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(M, N, generator=generator) for _ in range(2))
    i = torch.randint(1, 9, (M, N), generator=generator)
    return {"x": x, "y": y, "i": i, "j": i.int(), "k": x > 0, "w": y[0].clone(), "s": 1.5,
            "t": y[:, :1].clone(), "d": torch.tensor(2.0)}  # fmt: skip


def shift(t, by):
    t += by


def an_alias(x, y):
    r = x
    x += y
    return x, r


def a_caller(x, y):
    shift(x, y)
    return x * 2


def a_list(x, y):
    values = [x, x]
    values[0] += y
    return values[1]


def views(x, y):
    for view in (x[...], x[:], x.view(-1), x.view_as(y), +x, x.reshape(N)):
        view += y
    return x


def every_operator(x, y, i, k):
    x += y
    x -= 1
    x *= y
    x /= 2.0
    x **= 2
    z = x.clone()
    z //= 0.25
    x %= 1.5
    i += 2
    i //= 2
    i %= 5
    k &= y > 0
    k |= y > 1
    k ^= i > 2
    return x, z, i, k


def what_was_computed_before(x, y):
    e = x.exp()
    top = x.max()
    x += y
    return e * x, top


def a_copy(x, y):
    copies = (x.clone(), x * 1, x**1, x.abs(), torch.where(x > 0, x, x))
    x += y
    return (x, *copies)


def a_value_per_row(x, t):
    total = x.sum()
    same = total.sum()
    total += 1
    kept = t.amax(-1, keepdim=True)
    t *= 2
    return total, same, kept, t.max(dim=-1, keepdim=True).values


def an_accumulator(x, y):
    total = torch.zeros_like(x)
    for value in (x, y, x):
        total += value
    return total


def a_number(x, s: float):
    old = s
    s += 1
    s *= x.max()
    return x * old + s


def bf16(x, y):
    h = x.to(BF16)
    h += y.to(torch.float32)
    x += y.to(BF16)
    return h, x


def integers(j, i, x):
    j += i
    j *= x > 0
    x += i
    return j, x


def masks(k, x):
    k += x > 1
    k *= x < 2
    return k


def a_column(x, w):
    w *= 2.0
    return x * w


def inner(x, y):
    htile.rowwise(shift)(x, y)
    return x


@pytest.mark.parametrize(
    "f",
    [an_alias, a_caller, a_list, views, every_operator, what_was_computed_before, a_copy,
     a_value_per_row, an_accumulator, a_number, integers, masks, a_column, inner],
)  # fmt: skip
def test_it_is_torchs(f):
    compiled, given = htile.rowwise(f), arguments()
    args = [given[name] for name in compiled._signature.names]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    assert_close(compiled, compiled(*args), *args)
    assert all(map(operator.eq, map(str, args), map(str, before))), "arguments are not written"
    assert compiled.inspect(*args).source


def test_the_left_operand_keeps_its_dtype():
    given = arguments()
    x, y, i, j = (given[name] for name in "xyij")
    h, kept = htile.rowwise(bf16)(x, y)
    assert (h.dtype, kept.dtype) == (BF16, torch.float32)
    assert torch.equal(h, (x.to(BF16).float() + y).to(BF16))
    assert torch.equal(kept, x + y.to(BF16).float())
    assert htile.rowwise(inner)(x.to(BF16), y).dtype is BF16
    assert htile.rowwise(integers)(j, i, x)[0].dtype is I32


def float_view(x):
    y = x.float()
    y += 1
    return y, x


def view_of_another(x, y):
    z = x.contiguous()
    x += y
    return z


def detached(x):
    y = x.detach()
    y += 1
    return x


def new_axis(x):
    total = x.sum()
    kept = total[..., None]
    total += 1
    return x * kept


def element(x, t):
    one = t[0]
    one *= 2
    return x + t


def expanded(x, t):
    row = t.expand_as(x)
    t *= 2
    return row


def of_another_shape(x):
    total = x.sum()
    total += x
    return total


def of_all_rows(x, w):
    w += x
    return w


def of_a_device_scalar(x, d):
    d += x.sum()
    return x * d


def fraction(x, i):
    i += 0.5
    return x * i


def integer_mask(x, k):
    k += 1
    return x * k


@pytest.mark.parametrize(
    ("f", "kind", "words", "line"),
    [
        (float_view, TraceError, "x.float.*y.clone", "def float_view"),
        (float_view, TraceError, r"the argument x may .* `y [+]= 1` \(test_in_place.py:", "def"),
        (view_of_another, TraceError, "share memory in torch", "def view_of_another"),
        (detached, TraceError, "share memory in torch", "def detached"),
        (new_axis, TraceError, "share memory in torch", "return x [*] kept"),
        (new_axis, TraceError, r"this tensor may .* `total [+]= 1` \(test_in_place", "return x"),
        (element, TraceError, "share memory in torch", r"return x [+] t"),
        (expanded, TraceError, "share memory in torch", "def expanded"),
        (of_another_shape, ShapeError, r"shape \(\) with one of shape \(9,\)", "total [+]= x"),
        (of_all_rows, TraceError, "that all rows share", "w [+]= x"),
        (of_a_device_scalar, TraceError, "that all rows share", "d [+]= x.sum"),
        (fraction, DtypeError, "torch.float32 into torch.int64", "i [+]= 0.5"),
        (integer_mask, DtypeError, "torch.int64 into torch.bool", "k [+]= 1"),
    ],
)
def test_what_may_or_may_not_change_is_refused(f, kind, words, line):
    compiled, given = htile.rowwise(f), arguments()
    args = [given[name] for name in compiled._signature.names]
    with pytest.raises(HTileError, match=words) as caught:
        compiled(*args)
    assert type(caught.value) is kind
    assert re.match(line, caught.value.loc.text)


WHOLE = {
    "narrow": lambda z: z.narrow(0, 0, N), "split": lambda z: z.split(N)[0],
    "chunk": lambda z: z.chunk(1)[0], "tensor_split": lambda z: z.tensor_split(1)[0],
    "unbind": lambda z: z[None].unbind(0)[0], "to": lambda z: z.to(z.dtype),
    "type_as": lambda z: z.type_as(z), "unflatten": lambda z: z.unflatten(0, (N,)),
    "dropout": lambda z: F.dropout(z, 0.5, training=False),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_a_change_of_the_whole_of_a_tensor_is_seen_or_refused(name, dtype):
    """In torch it is the tensor itself or a view of all of it, so the tensor changes too."""
    whole = WHOLE[name]

    def f(x):
        z = x * 2
        y = whole(z)
        y += 1
        return z

    compiled, x = htile.rowwise(f), torch.ones(2, N, dtype=dtype)
    if name in ("unflatten", "dropout"):
        assert torch.equal(compiled(x), torch.full_like(x, 3.0))
        return
    with pytest.raises(TraceError, match="share memory in torch"):
        compiled(x)


def test_what_is_stale_may_be_made_from_the_argument():
    def f(row, w):
        h = row.contiguous()
        row *= 2
        return h + w

    given = arguments()
    words = r"^a tensor that is, or was made from, the argument row may .* `row [*]= 2` \("
    with pytest.raises(TraceError, match=words):
        htile.rowwise(f)(given["x"], given["w"])


def test_a_change_whose_source_is_not_there():
    names = {}
    exec("def f(x):\n    y = x.float()\n    y += 1\n    return x", names)
    with pytest.raises(TraceError, match="that an operator at <string>:3 has changed") as caught:
        htile.rowwise(names["f"])(arguments()["x"])
    assert "``" not in str(caught.value)


def test_dtype_and_shape_may_be_asked_for_after_a_change():
    @htile.rowwise
    def f(x):
        y = x.float()
        y += 1
        assert x.shape == (N,)
        return y.to(x.dtype)

    x = arguments()["x"].to(BF16)
    assert torch.equal(f(x), (x.float() + 1).to(BF16))
