"""What is emitted for the benchmarks and for functions outside of them is what was recorded.

A change that should not alter kernels alters none of these digests. One that should is followed by
`python -m tests.digests --update`, and the difference is explained in its commit.
"""

import pytest

from htile.build.compile import build

from . import record
from .cells import ARCHS, cells, digest
from .functions import FUNCTIONS

GROUPS = record.groups(cells())


def test_every_group_is_recorded():
    assert list(record.recorded()) == list(GROUPS)
    assert len(FUNCTIONS) == 24


def test_no_kernel_has_a_stack_frame():
    """On no architecture: registers are spilled to it."""
    assert not [name for name, known in record.recorded().items() if known["stack"]]


@pytest.mark.parametrize("group", GROUPS)
def test_texts_are_as_recorded(group):
    found = record.texts(GROUPS[group])
    known = record.recorded()[group]
    assert found == {name: known[name] for name in found}


@pytest.mark.parametrize("function", dict.fromkeys(cell.function for cell in cells()))
def test_a_kernel_of_each_function_uses_no_more_than_recorded(function):
    """One cell on one architecture for each function; the command compiles all of them."""
    place = int(digest(function), 16)
    arch = ARCHS[place % len(ARCHS)]
    mine = [c for c in cells() if (c.function, c.arch, c.is_compiled) == (function, arch, True)]
    cell = mine[place % len(mine)]
    used = build(*record.emitted(cell)).resources
    known = record.recorded()[cell.group]
    assert used.registers <= known["registers"] and used.stack <= known["stack"], cell
