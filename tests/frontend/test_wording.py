"""Messages that users found hard to follow, and what they say to write, which is run beside torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, ShapeError, TraceError, UnsupportedError

IDS = torch.tensor([0, 1, 2, 1])


def refused(kind, fn, *values):
    """The message that a call of a row-wise function raises; its class is `kind`."""
    with pytest.raises(kind) as caught:
        htile.rowwise(fn)(*values)
    assert type(caught.value) is kind and caught.value.loc is not None
    return caught.value.message


# ---- tables --------------------------------------------------------------------------------------


def test_two_indices_of_a_table():
    x, t = torch.randn(4, 8), torch.randn(3, 3, 8)

    def both(x, i: htile.PerRow, j: htile.PerRow, t: htile.Shared):
        return x * t[i, j]

    message = refused(UnsupportedError, both, x, IDS, IDS, t)
    assert "pass t.flatten(0, 1), and write t[i * 3 + j] for t[i, j]" in message
    assert "computed value" not in message

    @htile.rowwise
    def flat(x, i: htile.PerRow, j: htile.PerRow, t: htile.Shared):
        return x * t[i * 3 + j]

    j = IDS.flip(0)
    assert torch.equal(flat(x, IDS, j, t.flatten(0, 1)), x * t[IDS, j])


def test_a_row_of_indices_into_a_table():
    x, t, near = torch.randn(4, 100), torch.randn(70), torch.randint(70, (4, 100))

    def at_once(x, near, t: htile.Shared):
        return x + t.cumsum(0)[near]

    message = refused(UnsupportedError, at_once, x, near, t)
    assert "only of a row that is computed elementwise from arguments" in message
    found = htile.rowwise(at_once)(x, near % 64, t[:64])
    torch.testing.assert_close(found, x + t[:64].cumsum(0)[near % 64])


def test_a_row_of_indices_into_rows_of_a_table():
    def summed(x, near, t: htile.Shared):
        return x + t[near].sum(-1)

    near = torch.zeros(4, 100, dtype=torch.int64)
    message = refused(UnsupportedError, summed, torch.randn(4, 100), near, torch.randn(7, 8))
    assert "by 100 indices of a row, each of which chooses a part of shape (8,)" in message
    assert "ids.flatten() as htile.PerRow" in message


# ---- normalizations ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_local_response_norm(size):
    x, alpha, beta, k = torch.randn(4, 12), 0.5, 0.75, 1.5
    message = refused(UnsupportedError, lambda x: F.local_response_norm(x, size), x)
    written = message.partition("of a row of channels write ")[2]
    names = {"size": size, "alpha": alpha, "beta": beta, "k": k, "F": F}
    found = htile.rowwise(eval(f"lambda x: {written}", names))(x)
    expected = F.local_response_norm(x[:, :, None], size, alpha, beta, k)[:, :, 0]
    torch.testing.assert_close(found, expected)


def test_norms_over_channels_of_a_row():
    """What the message says to write is torch's norm of a batch of one."""
    x, groups, mean = torch.randn(4, 12), 3, torch.randn(12)
    var = mean.square()
    message = refused(ShapeError, lambda x: F.group_norm(x, 3), x)
    f = eval(f"lambda x: {message.partition(' write ')[2]}", {"F": F, "groups": groups})
    torch.testing.assert_close(htile.rowwise(f)(x), F.group_norm(x, groups))
    message = refused(ShapeError, lambda x, mean, var: F.batch_norm(x, mean, var), x, mean, var)
    f = eval(f"lambda x, mean, var: {message.partition(' write ')[2]}", {"F": F})
    torch.testing.assert_close(htile.rowwise(f)(x, mean, var), F.batch_norm(x, mean, var))
    message = refused(ShapeError, lambda x: F.instance_norm(x), x)
    f = eval(f"lambda x: {message.partition(' write ')[2]}", {"F": F})
    torch.testing.assert_close(htile.rowwise(f)(x), F.instance_norm(x[:, None])[:, 0])


def test_the_mean_of_a_batch_of_divergences():
    """As the reference has it: 'batchmean' of one row divides by N, in torch.vmap too."""
    x, y = torch.randn(4, 12).log_softmax(-1), torch.rand(4, 12)
    total = htile.rowwise(lambda x, y: F.kl_div(x, y, reduction="sum"))(x, y)
    torch.testing.assert_close(total.mean(), F.kl_div(x, y, reduction="batchmean"))
    own = htile.rowwise(lambda x, y: F.kl_div(x, y, reduction="batchmean"))(x, y)
    torch.testing.assert_close(own[0], F.kl_div(x[0], y[0], reduction="batchmean"))


# ---- what is not there ---------------------------------------------------------------------------

WRITTEN = {
    "F.scaled_dot_product_attention(q, k, v)": ("of small matrices write ", {}),
    "x * x.element_size()": ("write ", {}),
}  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN)
def test_what_is_not_there(text):
    """What the message says to write is what torch gives."""
    before, names = WRITTEN[text]
    arguments = [name for name in "xabqkv" if re.search(rf"\b{name}\b", text)]
    arguments = [name for name in arguments if name not in names]
    roles = ", ".join(name if name == "x" else f"{name}: htile.Inner[2]" for name in arguments)
    names = {"torch": torch, "F": F, "htile": htile, **names}

    def function(body):
        space = dict(names)
        exec(f"def f({roles}):\n    return {body}\n", space)
        return space["f"]

    values = [torch.randn(4, *((12,) if name == "x" else (3, 3))) for name in arguments]
    message = refused(UnsupportedError, function(text), *values)
    written = message.partition(before)[2].partition(", with")[0]
    written = f"x * {written}" if text.startswith("x *") else written
    expected = torch.stack([function(text)(*row) for row in zip(*values, strict=True)])
    torch.testing.assert_close(htile.rowwise(function(written))(*values), expected)


def test_the_formula_of_a_small_matrix():
    m = torch.randn(4, 2, 2)

    def f(m: htile.Inner[2]):
        return torch.linalg.det(m)

    assert "a * d - b * c with (a, b), (c, d) = (r.unbind() for r in m.unbind())" in refused(
        UnsupportedError, f, m)

    @htile.rowwise
    def written(m: htile.Inner[2]):
        (a, b), (c, d) = (r.unbind() for r in m.unbind())
        return a * d - b * c

    torch.testing.assert_close(written(m), torch.linalg.det(m))


def test_the_part_of_a_frequency():
    x, k, n = torch.randn(4, 12), 3, 12
    message = refused(UnsupportedError, lambda x: torch.fft.rfft(x), x)
    written = message.partition("frequency k is ")[2].partition(", with sin")[0]
    space = {"torch": torch, "math": math, "t": torch.arange(n), "n": n, "k": k}
    part = torch.stack([eval(written, space, {"x": row}) for row in x])
    torch.testing.assert_close(part, torch.fft.rfft(x)[:, k].real)


@pytest.mark.parametrize("made", [
    lambda x, n: torch.ones(n), lambda x, n: torch.zeros(n, 2), lambda x, n: torch.arange(n),
    lambda x, n: torch.full((n,), 2.0), lambda x, n: torch.arange(0, n),
])  # fmt: skip
def test_a_size_that_a_row_decides(made):
    def f(x, n: htile.PerRow):
        return (x.sum() * made(x, n)).sum()

    message = refused(TraceError, f, torch.randn(4, 8), IDS)
    assert "not supported" not in message and "a size that a row decides" in message
    space = {"torch": torch, "htile": htile}
    exec(f"def g(x, n: htile.PerRow):\n    return {message.partition('as in ')[2]}.sum()", space)
    x = torch.randn(4, 8)
    expected = torch.stack([row[:n].sum() for row, n in zip(x, IDS, strict=True)])
    torch.testing.assert_close(htile.rowwise(space["g"])(x, IDS), expected)


# ---- movements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-1, 1, -33 - 2])
def test_a_roll_of_many_elements(shift):
    """Of matrices of 8 bits. Others are moved along themselves by any number of elements."""

    def rolled(x: htile.Inner[2]):
        return torch.roll(x, shift, -1)

    def joined(x: htile.Inner[2]):
        return torch.cat((x[:, -shift % 67 :], x[:, : -shift % 67]), -1)

    x = torch.randint(256, (4, 3, 67), dtype=torch.uint8)
    message = refused(UnsupportedError, rolled, x)
    written = message.partition(": pass ")[2]
    assert written.endswith(" as an argument") and "as in torch.roll" in message
    assert torch.equal(eval(written.removesuffix(" as an argument")), x.roll(shift, -1))
    assert message == refused(UnsupportedError, joined, x)
    assert torch.equal(htile.rowwise(rolled)(x.float()), x.float().roll(shift, -1))


@pytest.mark.parametrize("n", [64, 65, 1000])
def test_a_roll_of_a_row(n):
    x = torch.randn(4, n)
    assert torch.equal(htile.rowwise(lambda x: x.roll(1, -1))(x), x.roll(1, -1))


def test_elements_apart_of_a_row_that_is_moved():
    """Every second one is loaded as one of a pair; one of three, which are no bundle, by itself."""

    def moved(x, step: htile.Static):
        return x.roll(301, -1)[::step]

    x, longer = torch.randn(4, 1000), torch.randn(4, 999)
    assert torch.equal(htile.rowwise(moved)(longer, 3), longer.roll(301, -1)[:, ::3])
    kernel = htile.rowwise(moved).inspect(longer, 3, arch="sm_90a")
    assert kernel.graph.n == 333 and {i.view.width for i in kernel.graph.inputs} == {1}
    assert torch.equal(htile.rowwise(moved)(x, 2), x.roll(301, -1)[:, ::2])
    kernel = htile.rowwise(moved).inspect(x, 2, arch="sm_90a")
    assert kernel.graph.n == 500 and {i.view.width for i in kernel.graph.inputs} == {2}


@pytest.mark.parametrize("place", [slice(10, 20, 2), slice(0, None, 3), slice(1, 60, 2)])
def test_values_that_are_stored_with_a_step(place):
    x = torch.randn(4, 64)

    def added(x):
        x[place] += 1
        return x

    message = refused(UnsupportedError, added, x)
    assert "divides them" not in message and "with k = torch.arange(64) write x = " in message
    written = message.partition(" write x = ")[2].partition(", where y is")[0]
    mine = eval(written, {"torch": torch, "k": torch.arange(64), "x": x, "y": x + 1})
    expected = x.clone()
    expected[:, place] += 1
    assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    ("part", "mask"),
    [
        (lambda x, i, j: x[:i], lambda k, i, j: k < j),
        (lambda x, i, j: x[i:], lambda k, i, j: k >= i),
        (lambda x, i, j: x[i:j], lambda k, i, j: (k >= i) & (k < j)),
    ],
)
def test_a_part_that_ends_at_a_value_of_each_row(part, mask):
    def read(x, i: htile.PerRow, j: htile.PerRow):
        return x * part(x, i, j).sum()

    def write(x, i: htile.PerRow, j: htile.PerRow):
        part(Setter(x), i, j)
        return x

    class Setter:
        def __init__(self, x):
            self.x = x

        def __getitem__(self, index):
            self.x[index] = 0

    x, i, j = torch.randn(4, 8), torch.tensor([0, 1, 2, 3]), torch.tensor([5, 6, 7, 8])
    told = [refused(UnsupportedError, f, x, i, j) for f in (read, write)]
    assert told[0] == told[1] and "math.exp" not in told[0]
    chosen = eval(told[0].partition("write torch.where(")[2].partition(", x, 0)")[0],
                  {"torch": torch, "x": x, "i": i[:, None], "j": j[:, None]})  # fmt: skip
    assert torch.equal(chosen, mask(torch.arange(8), i[:, None], j[:, None]))


def test_a_slice_that_no_integer_bounds():
    def assigned(x):
        x[: 1.5] = 0
        return x

    assert "write integers" in refused(TraceError, assigned, torch.randn(4, 8))


# ---- values and arguments ------------------------------------------------------------------------


def test_none_in_the_place_of_a_tensor():
    x = torch.randn(4, 8)
    message = refused(TraceError, lambda x: F.linear(x, None), x)
    assert message.startswith("F.linear takes a Tensor as 'weight', not None: pass one, or branch")
    assert "full_like" not in message
    assert "annotated `weight: htile.Matrix`" in refused(TraceError, lambda x: F.linear(x, 2.0), x)
    assert "torch.full_like(x, value)" in refused(TraceError, lambda x: torch.exp(2) * x, x)


WRONG = {  # torch's reason, which is told with the arguments that HTile takes
    "torch.softmax(x)": "torch.softmax is called without 'dim'",
    "torch.softmax(x, -1, foo=1)": "torch.softmax got an unexpected keyword argument 'foo': it",
    "F.gelu()": "F.gelu is called without 'input': it is (input, *, approximate='none')",
    "F.gelu(x, 'tanh')": "F.gelu takes 1 positional argument but 2 were given: it is (input, *, ",
    "F.cross_entropy(x)": "F.cross_entropy is called without 'target': it is (input, target, ",
    "named(x)": "torch.gather is called without 'dim', 'index': it is (input, dim, index, ",
    "torch.special.ndtr()": "torch.special.ndtr is called without 'input': it is (input)",
    "torch.lerp(x, x)": "torch.lerp is called without 'weight': it is (input, end, weight)",
    "torch.add(x)": "torch.add is called without 'other': it is (input, other, *, alpha=1)",
    "torch.clamp()": "torch.clamp is called without 'input': it is (input, min=None, max=None)",
    "torch.special.xlogy(x)": "torch.special.xlogy is called without 'other': it is (input, other)",
    "torch.where(x > 0, x, 'a')":
        "torch.where does not take (Tensor, Tensor, str): it is (condition, input, other)",
    "torch.where(x > 0, None, x)":
        "torch.where does not take (Tensor, None, Tensor): it is (condition, input, other)",
    "torch.sum(x, foo=[1, 2])": "torch.sum does not take (Tensor, foo=list): it is (input, dim=",
    "torch.add(x, 'a')": "torch.add takes a Tensor as 'other', not a str: it is (input, other, *, ",
    "torch.cat([x, 'a'])": "torch joins tensors, and element 1 of the list is a str",
    "torch.max(x, 2.0)": "torch.max does not take (Tensor, float): write torch.maximum(x, torch.",
    "torch.round(x, 2)": "torch.round does not take (Tensor, int): write torch.round(x, ",
    "torch.cat([x, 1.0])":
        "torch joins tensors, and element 1 of the list is a float: write torch.full_like(x, ",
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_of_torchs_functions(call):
    """Of a function whose text is nowhere the same is said."""
    names = {"torch": torch, "F": F, "named": torch.gather}
    exec(f"def softmax(x):\n    return {call}", names)  # its own name does not matter
    message = refused(TraceError, names["softmax"], torch.randn(4, 8))
    assert message.startswith(WRONG[call])
    assert ("full_like" in message) == ("full_like" in WRONG[call] or "torch.max(" in call)


def test_wrong_arguments_where_torch_is_imported_inside():
    def f(x):
        import torch.nn.functional as functional

        return functional.gelu()

    assert "F.gelu is called without 'input'" in refused(TraceError, f, torch.randn(4, 8))


def test_wrong_arguments_of_the_users_own_function_stay_the_users_error():
    names = {"torch": torch}
    exec("def softmax(x, dim):\n    return torch.softmax(x, dim)", names)
    softmax = names["softmax"]
    with pytest.raises(TypeError, match=r"^softmax\(\) missing 1 required positional argument"):
        htile.rowwise(lambda x: softmax(torch.softmax(x, -1)))(torch.randn(4, 8))


@pytest.mark.parametrize("number", [0xFFFFFFFFFFFFFFFF, 0x8000000000000000])
def test_an_integer_of_64_bits_without_a_sign(number):
    i = torch.randint(-5, 5, (4, 8))
    message = refused(DtypeError, lambda i: i & number, i)
    assert "x.long()" not in message
    same = int(message.partition("for its 64 bits write ")[2].partition(";")[0])
    assert same % 2**64 == number
    assert torch.equal(htile.rowwise(lambda i: i & same)(i), i & same)
    beyond = refused(DtypeError, lambda i: i + 2**70, i)
    assert "64 bits" not in beyond and "x.float(), and write 1.18" in beyond
    assert "x.long()" in refused(DtypeError, lambda i: i + 2**40, i.int())


def test_short_forms_of_to_for_sums_over_rows():
    x = torch.randn(4, 8)

    @htile.rowwise
    def sums(x):
        whole = htile.sum_rows(x.long())
        return htile.sum_rows(x).bfloat16(), htile.max_rows(x).half().float(), whole.int()

    total, most, whole = sums(x)
    assert (total.dtype, most.dtype, whole.dtype) == (torch.bfloat16, torch.float32, torch.int32)
    assert torch.equal(most, x.amax(0)) and torch.equal(whole, x.long().sum(0).int())
    htile.testing.assert_close(sums, (total, most, whole), x)
    for wrong in (lambda x: htile.sum_rows(x).int(), lambda x: htile.sum_rows(x).double()):
        assert "convert it outside" in refused(DtypeError, wrong, x)


def test_a_matrix_on_the_left_of_a_row():
    x, w = torch.randn(4, 64).bfloat16(), torch.randn(64, 64).bfloat16()

    def transposed(x, W: htile.Matrix):
        return W.t() @ x

    def plain(x, W: htile.Matrix):
        return torch.mv(W, x)

    assert "write x @ W for W.T @ x" in refused(UnsupportedError, transposed, x, w)
    assert "write x @ W.T for W @ x" in refused(UnsupportedError, plain, x, w)


def test_the_article_of_a_type():
    assert "returns an int as out1" in refused(TraceError, lambda x: (x, 3), torch.randn(4, 8))
    assert "returns a float as out1" in refused(TraceError, lambda x: (x, 3.0), torch.randn(4, 8))


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "logsumexp", "max", "min"])
def test_keepdim_without_dim_where_torch_raises(name):
    x = torch.randn(4, 8)
    with pytest.raises(TypeError):
        getattr(x, name)(keepdim=True)
    message = refused(TraceError, lambda x: getattr(x, name)(keepdim=True), x)
    assert f"write x.{name}(-1, keepdim=True)" in message
    by_dim = htile.rowwise(lambda x: getattr(x, name)(dim=-1, keepdim=True))
    by_axis = htile.rowwise(lambda x: getattr(x, name)(axis=-1, keepdims=True))
    for kept in (by_dim, by_axis):
        result = kept(x)
        assert (result if isinstance(result, torch.Tensor) else result[0]).shape == (4, 1)


def test_keepdim_without_dim_where_torch_takes_it():
    x = torch.randn(4, 8)
    for name in ("amax", "amin", "any", "all", "var", "norm", "argmax", "nansum"):
        f = htile.rowwise(lambda x, name=name: getattr(x, name)(keepdim=True))
        assert f(x).shape == (4, 1)


def test_prelu_with_a_weight_of_each_channel():
    def of_columns(x, w: htile.Shared):
        return F.prelu(x[None], w)[0]

    def of_groups(x, w: htile.Shared):
        return F.prelu(x.view(2, 4, -1), w).flatten()

    x, w = torch.randn(3, 64), torch.rand(64)
    for f, weight in ((of_columns, w), (of_groups, w[:4].contiguous())):
        given = x.clone().requires_grad_(), weight.clone().requires_grad_()
        exact = x.double().requires_grad_(), weight.double().requires_grad_()
        result = htile.rowwise(f)(*given)
        expected = torch.stack([f(row, exact[1]) for row in exact[0]])
        torch.testing.assert_close(result.double(), expected)
        found = torch.autograd.grad(result.sin().sum(), given)
        for one, other in zip(found, torch.autograd.grad(expected.sin().sum(), exact), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedError, match="one for each channel"):
        htile.rowwise(lambda x, w: F.prelu(x, w))(x, w)


def test_prelu_with_a_weight_of_each_row():
    x, w = torch.randn(4, 8), torch.randn(4, 1)

    @htile.rowwise
    def prelu(x, w: htile.Inner[1]):
        return F.prelu(x, w)

    assert torch.equal(prelu(x, w), torch.where(x > 0, x, w * x))
    assert torch.equal(prelu(x, w[0]), F.prelu(x, w[0]))
    given = [t.clone().requires_grad_() for t in (x, w[0])]
    exact = [t.clone().requires_grad_() for t in (x, w[0])]
    prelu(*given).sum().backward()
    F.prelu(*exact).sum().backward()
    for ours, theirs in zip(given, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert prelu.inspect(x.to("meta"), w.to("meta")).source


# ---- the dtype of a result, as the guide has it --------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


def the_table() -> list[tuple[str, str]]:
    """The cells of the guide's table of results, each with its dtype."""
    text = GUIDE.read_text(encoding="utf-8").partition("| a row, in bfloat16 | ")[2]
    lines = text.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert len(cells) == 8 and all(len(each) == 2 for each in cells)
    return [pair for row, single in cells for pair in ((row, "bfloat16"), (single, "float32"))]


@pytest.mark.parametrize(("cell", "dtype"), the_table())
def test_the_dtype_of_a_result(cell, dtype):
    x, shape = torch.randn(4, 32).bfloat16(), re.search(r"shape \((.*)\)", cell)
    table = torch.randn([int(k) for k in shape[1].split(",")] if shape else (8, 32)).bfloat16()

    names = {"torch": torch, "htile": htile}
    source = f"def f(x, t: htile.Shared):\n    return {cell.split('`')[1]}\n"
    exec(compile(source, "<the guide>", "exec"), names)
    assert str(htile.rowwise(names["f"])(x, table).dtype) == f"torch.{dtype}"


def test_long_products_are_no_exception():
    @htile.rowwise
    def product(x, t: htile.Shared):
        return x @ t

    for k in (64, 65):
        result = product(torch.ones(4, k).bfloat16(), torch.ones(k, 8).bfloat16())
        assert result.dtype is torch.bfloat16
    assert product(torch.ones(4, 8).bfloat16(), torch.ones(8, 70).bfloat16()).dtype is (
        torch.bfloat16
    )


def test_a_refusal_of_the_whole_kernel_names_a_line():
    """A gradient or a function of too many pieces is about no step of its own."""

    def state(x, step, a: htile.Shared, b: htile.Inner[1], h: htile.Inner[2]):
        d = F.softplus(step)
        y = torch.exp(d[:, None] * a) * h
        return y + (d * x)[:, None] * b

    shapes = (2, 64), (2, 64), (64, 64), (2, 64), (2, 64, 64)
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with pytest.raises(UnsupportedError, match="the gradient of state") as caught:
        htile.rowwise(state).inspect(*args).backward  # noqa: B018
    assert caught.value.loc.text == "y = torch.exp(d[:, None] * a) * h"
