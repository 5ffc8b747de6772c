"""In-place operators change a value for all who refer to it, as torch does, or raise."""

from __future__ import annotations

import operator
import re

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, HTileError, ShapeError, TraceError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check

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


def methods(x, y, i, k):
    z = x.clone()
    z.sub_(y.max()).exp_().mul_(2).clamp_(max=3.0).masked_fill_(k, -1.0)
    torch.relu_(z).add_(y, alpha=0.5)
    i.add_(1).bitwise_and_(3)
    k.logical_not_()
    x.lerp_(y, 0.25).eq_(0.0)
    return z, i, k, x, y.zero_() + z, torch.empty_like(z).copy_(i), z.new_empty(N).fill_(2.0) * z


def through_modules(x, y):
    F.silu(x, inplace=True)
    torch.nn.LeakyReLU(0.2, inplace=True)(y)
    return x, F.elu_(y), F.dropout(x, training=False, inplace=True)


def an_alias_of_a_method(x, y):
    r = x
    assert x.mul_(y) is x and F.relu(x, inplace=True) is x
    return r


def at_places(x, y, t):
    x[0] = y.sum()
    x[-1], x[2:4] = 3.0, t[0]
    x[1:8:3] = -1.0
    y[...] = x * 2
    y[:] = y + 1
    t[...] = 2.0
    return x, y, t


def parts_of_rows(x, y):
    a, b, c = torch.empty_like(x), torch.zeros_like(x), x.new_zeros(N + 2)
    a[::3], a[1::3], a[2::3] = x[6:], -x[:3], y[:3]
    b[:4], b[5:] = x[5:], y[:4]
    c[1:-1] = x
    return a, b, c


def parts_of_matrices(x, y):
    m, r = x.view(3, 3) * 1, y[:3]
    m[0] = r
    m[:, 1] = r
    m[..., 2] = m[..., 0].clone()
    m[1:] = m[1:] * 2
    m[:, ::3] = 5.0
    return m, m[1]


def parts_in_place(x, y):
    """Of a part, of a part of a part, of one that is given away and set, and of matrices."""
    a, b, c, m = x.clone(), y.clone(), x * y, x.view(3, 3).clone()
    a[:4] += y[5:]
    a[::3] *= 2
    a[-1] -= a[0]
    a[2:7].mul_(3).clamp_(max=1)
    few = b[2:8]
    fewer = few[1:3]
    fewer *= 5
    few += 1
    half = c[:4]
    half += 1
    c[4:8] = half
    m[0] += 1
    m[:, 1] *= m[:, 2]
    m[1][1:] -= y[:2]
    return a, b, few, c, m


def a_part_of_no_axes(x, t):
    one = t[0]
    one *= 2
    return x + t


@pytest.mark.parametrize(
    "f",
    [an_alias, a_caller, a_list, views, every_operator, what_was_computed_before, a_copy,
     a_value_per_row, an_accumulator, a_number, integers, masks, a_column, inner, methods,
     through_modules, an_alias_of_a_method, at_places, parts_of_rows,
     parts_of_matrices, parts_in_place, a_part_of_no_axes],
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


def overlapping(x):
    first, second = x[:4], x[2:6]
    second += 1
    return first * 2


def changed_as_a_whole(x):
    part = x[:4]
    part += 1
    x *= 2
    return part + 1


def expanded(x, t):
    row = t.expand_as(x)
    t *= 2
    return row


def repeated(x):
    rows = x.expand(2, -1)
    return rows.add_(1)


def filled_with_a_row(x, y):
    return x.fill_(y)


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


def at_a_fraction(x):
    x[x.sum()] = 0.0
    return x


def another_row_at_an_index(x, y, i):
    x[i[0]] = y
    return x


def several_at_other_indices(x, y):
    x[x.topk(3).indices] = y[:2]
    return x


def at_many_indices(x):
    y = torch.cat([x] * 8)
    y[torch.arange(70)] = 0.0
    return y


def a_row_at_a_mask(x, y):
    x[x > 0] = y
    return x


def at_a_mask_of_a_part(x):
    x[x[:3] > 0] = 0.0
    return x


def at_a_mask_beside_others(x):
    x[..., x > 0] = 0.0
    return x


def beyond_the_end(x):
    x[9] = 0.0
    return x


def nothing(x):
    x[4:4] = 0.0
    return x


def a_longer_part(x):
    x[:3] = x[:4]
    return x


def floats_among_integers(x, i):
    i[:3] = x[:3]
    return i


def every_other(x):
    x[::2] = x[:5]
    return x


def an_axis_too_many(x):
    x[:, 0] = 0.0
    return x


def a_text(x):
    x[0] = "a"
    return x


def a_view_of_what_was_assigned_to(x):
    a = x[:3]
    x[0] = 1.0
    return a * 2


def deleted(x):
    del x[0]
    return x


def transposed(x):
    return x.t_()


@pytest.mark.parametrize(
    ("f", "kind", "words", "line"),
    [
        (float_view, TraceError, "x.float.*y.clone", "def float_view"),
        (float_view, TraceError, r"the argument x may .* `y [+]= 1` \(test_in_place.py:", "def"),
        (view_of_another, TraceError, "share memory in torch", "def view_of_another"),
        (detached, TraceError, "share memory in torch", "def detached"),
        (new_axis, TraceError, "share memory in torch", "return x [*] kept"),
        (new_axis, TraceError, r"this tensor may .* `total [+]= 1` \(test_in_place", "return x"),
        (overlapping, TraceError, "share memory in torch", r"return first [*] 2"),
        (changed_as_a_whole, TraceError, "share memory in torch", r"return part [+] 1"),
        (expanded, TraceError, "share memory in torch", "def expanded"),
        (repeated, TraceError, "that expand repeats", "return rows.add_"),
        (filled_with_a_row, ShapeError, "without axes, got one of shape", "return x.fill_"),
        (of_another_shape, ShapeError, r"shape \(\) to one of shape \(9,\)", "total [+]= x"),
        (of_all_rows, TraceError, "that all rows share", "w [+]= x"),
        (of_a_device_scalar, TraceError, "that all rows share", "d [+]= x.sum"),
        (fraction, DtypeError, "torch.float32 into torch.int64", "i [+]= 0.5"),
        (integer_mask, DtypeError, "torch.int64 into torch.bool", "k [+]= 1"),
        (at_a_fraction, DtypeError, "an index is an integer, write y.long", "x.x.sum.*. = 0"),
        (another_row_at_an_index, ShapeError, r"= value of shape \(9,\): .* \(\)", "x.i.0.. ="),
        (several_at_other_indices, ShapeError, r"shape \(2,\) at 3 indices", "x.x.topk"),
        (at_many_indices, UnsupportedError, "a vector of at most 64", "y.torch.arange"),
        (a_row_at_a_mask, UnsupportedError, "x = torch.where.mask, value, x", "x.x > 0. ="),
        (at_a_mask_of_a_part, ShapeError, r"a mask of shape \(3,\)", "x.x.:3. > 0. ="),
        (at_a_mask_beside_others, UnsupportedError, "with a mask of all of x", "x...., x > 0. ="),
        (beyond_the_end, ShapeError, "index 9 of an axis of 9 elements", "x.9. = 0"),
        (nothing, ShapeError, "x.4:4. = y: .* has no elements", "x.4:4. ="),
        (a_longer_part, ShapeError, "x.:3. = y of shape .4,.: .* shape .3,.", "x.:3. ="),
        (floats_among_integers, DtypeError, "torch.float32 into torch.int64", "i.:3. ="),
        (every_other, UnsupportedError, "x.::2. = y: .* x = torch.where", "x.::2."),
        (an_axis_too_many, ShapeError, "2 indices of a value of shape", "x.:, 0. ="),
        (a_text, TraceError, "got str", "x.0. ="),
        (a_view_of_what_was_assigned_to, TraceError, "`x.0. = 1.0`", "return a"),
        (deleted, TraceError, "cannot be deleted", "del x.0."),
        (transposed, TraceError, "x = x.t", "return x.t_"),
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


def row_at_an_index(x, i: htile.PerRow):
    y = x.view(3, 4) * 1
    y[i % 3] = x[:4]
    return y


def at_a_negative_index(x, i: htile.PerRow):
    y = x * 1
    y[i - 12] = x.sum()
    return y


def at_one_more(x, i: htile.PerRow):
    y = x * 1
    y[i] += 1.5
    return y


def of_the_largest(x):
    found, kept = x.topk(3), torch.full_like(x, -torch.inf)
    kept[found.indices] = found.values
    return kept.softmax(-1)


def ones_at_the_largest(x):
    mask = torch.zeros_like(x)
    mask[x.topk(3).indices] = 1
    return x * mask


def listed(x):
    y = x * 2
    y[[0, 2, -1]] = 0.5
    y[[3, 4]] = x[:2]
    return y


def listed_in_axes(x):
    m = x.view(3, 4) * 2
    m[:, [0, 2]] = 0.5
    m[[0, 2], 1:3] += x[:2]
    m[..., [3, 0]] = x[:6].view(3, 2)
    m[[0, 1], [1, -1]] = x[:2]
    m[1, [0, 1]] *= 3
    m[[1, 2], :] = m[[2, 1], :]
    return m


def without_the_largest(x):
    y = x * 2
    y[x.argmax()] = -torch.inf
    return y.softmax(-1)


def masked(x):
    y = x * 2
    y[x > 0.5] = 0.25
    y[(y < 0) & (x < -0.5)] = x.sum()
    return y


def masked_rows(x):
    y = x.view(3, 4) * 1
    y[y.sum(-1) > 0] = 0
    return y


def a_masked_part(x):
    y = x * 1
    part = y[4:]
    part[part > 0] = 0.0
    return y


def parts_of_several_axes(x):
    m = x.view(3, 4) * 1
    m[1, 2] = 0.5
    m[:2, :2] = x[:2]
    m[2, -1] += 3.0
    m[:2, ::2] *= 2
    m[0, ...] = m[0] + 1
    t = x.view(2, 3, 2) * 2
    t[1, :, 0] = x[:3]
    t[-1, 1:, 1] = 7.0
    return m, t.flatten()


def a_part_of_two_axes_that_changes(x):
    m = x.view(3, 4) * 1
    piece = m[1:, 1:3]
    piece += 1
    piece[0, 0] = -2.0
    return m


def listed_in_axes_apart(x):
    t = x.view(2, 3, 2) * 1
    t[[0, 1, 1], :, [1, 0, 0]] = x[:9].view(3, 3)
    t[0, [2, 2]] = x[3:7].view(2, 2)  # the last counts
    return t


def test_lists_of_axes_apart_and_of_equal_places():
    """torch.vmap, which the others are compared with, moves the axis of the list here."""
    x = torch.randn(4, 12)
    expected = torch.stack([listed_in_axes_apart(row) for row in x])
    assert torch.equal(htile.rowwise(listed_in_axes_apart)(x), expected)


def behind_several_ellipses(x):
    m = x.view(3, 4) * 1
    m[..., 1, ...] = 0.5
    m[1, ..., ..., 2:] = x[:2]
    x = x * 2
    x[..., ..., [3, 5]] = 4.0
    return m, x


ASSIGNED = (
    behind_several_ellipses,
    parts_of_several_axes, a_part_of_two_axes_that_changes, row_at_an_index,
    at_a_negative_index, at_one_more, of_the_largest, ones_at_the_largest, listed,
    listed_in_axes, without_the_largest, masked, masked_rows, a_masked_part,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("f", ASSIGNED)
def test_what_a_mask_or_an_index_chooses(f, dtype):
    """As torch has it for each row by itself, and for what is derived of it."""
    compiled = htile.rowwise(f)
    x, i = torch.randn(5, 12).to(dtype), torch.tensor([0, 11, 3, 2, 2])
    args = (x, i) if len(compiled._signature.names) > 1 else (x,)
    result = compiled(*args)
    rows = [f(*(arg[k].clone() for arg in args)) for k in range(5)]
    several = result if isinstance(result, tuple) else (result,)
    for k, found in enumerate(several):
        exact = torch.stack([row[k] if isinstance(row, tuple) else row for row in rows])
        assert found.dtype == exact.dtype
        torch.testing.assert_close(found, exact)
    assert_close(compiled, result, *args)
    if dtype is torch.float32:
        check(compiled, *args)


def test_parts_of_several_axes_of_long_rows():
    def f(x: htile.Inner[2], y):
        x[1, 3:] = y[3:]
        x[0, 2] = 7.0
        x[:2, 60] = 1.0
        return x

    x, y = torch.randn(4, 3, 100), torch.randn(4, 100)
    expected = x.clone()
    expected[:, 1, 3:], expected[:, 0, 2], expected[:, :2, 60] = y[:, 3:], 7.0, 1.0
    assert torch.equal(htile.rowwise(f)(x, y), expected)
    assert not htile.rowwise(f).inspect(x.to("meta"), y.to("meta"), arch="sm_90a").resources.stack


def test_integers_at_a_mask_and_places_that_are_not_there():
    def f(x, i: htile.PerRow):
        x[i] = 9
        x[x == 3] = -1
        return x

    x, i = torch.arange(12).repeat(3, 1), torch.tensor([12, -13, 4])
    found = htile.rowwise(f)(x, i)
    expected = torch.where(x == 3, -1, x)
    expected[2, 4] = 9
    assert torch.equal(found, expected)


BYTES_PUT = {
    "an element": lambda x, v: x.__setitem__(0, v),
    "a part": lambda x, v: x.__setitem__(slice(1, 9, 2), v),
    "a mask": lambda x, v: x.__setitem__(x > 5, v),
    "places": lambda x, v: x.__setitem__([0, -1], v),
    "an index": lambda x, v: x.__setitem__(x[0].long() // 2, v),
    "masked_fill_": lambda x, v: x.masked_fill_(x < 7, v),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("name", BYTES_PUT)
def test_a_number_in_integers_of_8_bits(name, dtype):
    """torch wraps negative ones of uint8, and takes no other number that does not fit."""
    x, put = torch.arange(24).view(2, 12).to(dtype), BYTES_PUT[name]

    def f(x, value: htile.Static):
        y = x.clone()
        put(y, value)
        return y

    for value in (-1, -128, -255, -256, 127, 200, 255, 256, True, 2.7, -0.5, 255.5, 2**70, -1e9):
        try:
            expected = torch.stack([f(row, value) for row in x])
        except (RuntimeError, OverflowError, ValueError):
            with pytest.raises(DtypeError, match="does not fit"):
                htile.rowwise(f)(x, value)
            continue
        found = htile.rowwise(f)(x, value)
        assert found.dtype is dtype and torch.equal(found, expected), value


def test_a_number_in_integers_of_8_bits_compiles():
    def f(x, i: htile.PerRow):
        y = x.clone()
        y[0], y[i], y[x > 3] = -1, 7, x[1]
        return y

    x, i = torch.arange(8, dtype=torch.uint8).repeat(2, 1), torch.tensor([2, 9])
    expected = torch.tensor([[255, 1, 7, 3, 1, 1, 1, 1], [255, 1, 2, 3, 1, 1, 1, 1]])
    assert torch.equal(htile.rowwise(f)(x, i), expected.to(torch.uint8))
    assert not htile.rowwise(f).inspect(x.to("meta"), i.to("meta"), arch="sm_90a").resources.stack


def test_gradients_of_what_is_assigned():
    def f(x, y):
        out = torch.empty_like(x)
        out[:4], out[4:] = x[5:] * y[:4], y[:5]
        out[2:6] *= x[:4]
        return out.masked_fill_(out > 1, 0.0).mul_(x.sum())

    x, y = (torch.randn(M, N, dtype=torch.float64) for _ in range(2))
    ones = torch.ones(M, N, dtype=torch.float64)
    want = torch.autograd.functional.vjp(torch.vmap(f), (x, y), ones)[1]
    mine = x.float().requires_grad_(), y.float().requires_grad_()
    got = torch.autograd.grad(htile.rowwise(f)(*mine).sum(), mine)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.float())


def test_rows_of_any_length_change_as_a_whole():
    @htile.rowwise(dynamic_n=True)
    def f(x):
        x.clamp_(max=0)
        x[:] = x * 2
        return x

    x = torch.randn(M, 100)
    assert torch.equal(f(x), x.clamp(max=0) * 2)
    part = htile.rowwise(nothing_at_the_start, dynamic_n=True)
    with pytest.raises(UnsupportedError, match="dynamic_n=True"):
        part(x)


def nothing_at_the_start(x):
    x[:3] = 0.0
    return x
