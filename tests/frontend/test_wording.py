"""Messages that users found hard to follow, and what they say to write, which is run beside torch.
"""

from __future__ import annotations

import pytest
import torch

import htile
from htile.errors import UnsupportedError

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
    x, t, near = torch.randn(4, 100), torch.randn(7), torch.randint(7, (4, 100))

    def at_once(x, near, t: htile.Shared):
        return x + t[near]

    message = refused(UnsupportedError, at_once, x, near, t)
    assert "a choice between rows" not in message and "indexing t, of 7 elements" in message
    assert "z = torch.where(y == k, t[k], z) for k in range(1, 7)" in message

    @htile.rowwise
    def by_choices(x, near, t: htile.Shared):
        z = t[0]
        for k in range(1, 7):
            z = torch.where(near == k, t[k], z)
        return x + z

    assert torch.equal(by_choices(x, near, t), x + t[near])


def test_a_row_of_indices_into_rows_of_a_table():
    def summed(x, near, t: htile.Shared):
        return x + t[near].sum(-1)

    near = torch.zeros(4, 100, dtype=torch.int64)
    message = refused(UnsupportedError, summed, torch.randn(4, 100), near, torch.randn(7, 8))
    assert "by 100 indices of a row, each of which chooses a part of shape (8,)" in message
    assert "ids.flatten() as htile.PerRow" in message


# ---- movements -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [-1, 1, -33 - 2])
def test_a_roll_of_many_elements(shift):
    x = torch.randn(4, 67)
    message = refused(UnsupportedError, lambda x: torch.roll(x, shift), x)
    written = message.partition(": pass ")[2]
    assert written.endswith(" as an argument") and "as in torch.roll" in message
    assert torch.equal(eval(written.removesuffix(" as an argument")), x.roll(shift, -1))
    assert message == refused(
        UnsupportedError, lambda x: torch.cat((x[-shift % 67 :], x[: -shift % 67])), x
    )


def test_the_longest_roll():
    x = torch.randn(4, 64)
    assert torch.equal(htile.rowwise(lambda x: x.roll(1, -1))(x), x.roll(1, -1))


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
