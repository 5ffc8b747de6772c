"""The kernels of examples/gallery on the GPU: against float64, and rows in batches of all sizes."""

import pytest
import torch
from torch.utils import _pytree as pytree

from examples.gallery import CASES, NAMES, load, variants
from examples.gallery.check import compare
from htile.frontend.graph import Role
from htile.frontend.roles import classify

from .matrix import BF16, assert_same_bits, job, run, seed
from .test_out import compile_in_place

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

ROWS = 60  # which the kernels with several heads and batch entries can divide
ODD = 1003  # elements, so that rows begin anywhere
BATCHES = (1, 3, 64, 5000)  # rows; 60 and fewer have one kernel, and longer batches others
ALONE = 7  # the row that is also run by itself
PLACES = ("as in a model", "small")
# Which arguments the results of these may be written over.
IN_PLACE = {
    "add_rmsnorm": (0, 1),
    "rotary": (0,),
    "rotary_positions": (0,),
    "qk_norm_rotary": (0,),
    "swiglu_pairs_backward": (0,),
    "cross_entropy_backward": (0,),
    "penalties": (0,),
}


def prepared(name, k, place, device):
    """A function of the gallery, its reference, arguments for it, and keyword arguments."""
    module = load(name)
    n = module.SIZE[1] if place == PLACES[0] else getattr(module, "SMALL", (ODD,))[-1]
    seed(name, place)
    args = module.arguments(ROWS, n, BF16, device)
    return getattr(module, name), module.reference, args, variants(name)[k]


def chosen(rows, places):
    """A copy of some rows; of float8 by the bytes, because torch may not index it."""
    bits = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    return bits[torch.tensor(places, device=rows.device)].view(rows.dtype)


def picked(f, args, variant, places):
    """The arguments of the rows at some places, which have one leading dimension; and the leading
    shape of all rows."""
    values = f._signature.bind(tuple(args), variant)
    call = classify(f._signature, values)
    found = {}
    for spec, value in zip(call.specs, values, strict=True):
        if isinstance(value, torch.Tensor) and spec.role in (Role.ROW, Role.PER_ROW):
            value = value.expand((*call.lead, *spec.inner)).reshape(-1, *spec.inner)
            # Rows of their own memory: where they begin there does not depend on the device.
            value = chosen(value, places)
        found[spec.name] = value
    return found, call.lead


def alone(f, args, variant):
    """The arguments of one row, and the leading shape of all."""
    return picked(f, args, variant, [ALONE])


def places_of(m):
    """Which rows a batch of m has: the one that is first and last too, and others between."""
    return [ALONE, *(k % ROWS for k in range(1, m - 1)), ALONE][:m]


def every():
    for name, k in CASES:
        for place in PLACES:
            yield name, k, place


def jobs(arch):
    for name, k, place in every():
        f, _, args, variant = prepared(name, k, place, "cpu")
        yield job(f, args, arch, **variant)
        yield job(f, (), arch, **alone(f, args, variant)[0])
        if place == PLACES[0]:
            without_memory = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
            for m in BATCHES:  # a kernel serves many numbers of rows, so these are few more
                yield job(f, (), arch, **picked(f, without_memory, variant, places_of(m))[0])
    for name, replaced in IN_PLACE.items():
        for place in PLACES:
            f, _, args, _ = prepared(name, 0, place, "cpu")
            yield compile_in_place(f, args, replaced, arch)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "k"), CASES)
def test_float64(name, k, place, device):
    f, reference, args, variant = prepared(name, k, place, device)
    compare(run(f, *args, **variant), reference(*args, **variant))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "k"), CASES)
def test_bits_of_a_row_do_not_depend_on_the_others(name, k, place, device):
    f, _, args, variant = prepared(name, k, place, device)
    one, lead = alone(f, args, variant)

    def row(found):
        return found.reshape(-1, *found.shape[len(lead) :])[ALONE : ALONE + 1]

    together = pytree.tree_map(row, run(f, *args, **variant))
    assert_same_bits(run(f, **one), together, name)


@pytest.mark.parametrize(("name", "k"), CASES)
def test_bits_of_rows_in_batches_of_every_size(name, k, device):
    """A row by itself, first, last and between: each of its results has the bits that it has in a
    batch of `ROWS`, for rows as long as in a model."""
    f, _, args, variant = prepared(name, k, PLACES[0], device)
    known = run(f, **picked(f, args, variant, [*range(ROWS)])[0])
    for m in BATCHES:
        places = places_of(m)
        found = run(f, **picked(f, args, variant, places)[0])
        expected = pytree.tree_map(lambda rows, at=places: chosen(rows, at), known)
        assert_same_bits(found, expected, (name, m))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name, place, device):
    f, _, args, _ = prepared(name, 0, place, device)
    expected = run(f, *args)
    replaced = tuple(args[k] for k in IN_PLACE[name])
    run(f, *args, out=replaced if len(replaced) > 1 else replaced[0])
    assert_same_bits(replaced, pytree.tree_leaves(expected), name)


def test_all_of_them_are_here():
    assert {name for name, _, _ in every()} == set(NAMES)
