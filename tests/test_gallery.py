"""The kernels of examples/gallery: their results against float64, and what they compile to."""

import ast
import inspect
import re
import textwrap
import zlib
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import examples
from examples import gallery
from examples.gallery import (
    CASES,
    NAMES,
    PRODUCT_CASES,
    PRODUCTS,
    __main__,
    catalogue,
    load,
    variants,
)
from examples.gallery.check import Levels, compare, in_units
from tests.test_matrices import run_steps

REPO = Path(__file__).parents[1]
BF16, F32 = torch.bfloat16, torch.float32
M = 6  # rows: no other size is this, so that it tells what has rows
LENGTHS = 64, 33
PAIRS = (64, 40), (300, 128)  # columns of a matrix, and elements of the row that it multiplies
LONGEST_BODY = 25  # lines
IN_FLOAT32 = ("sinkhorn", "top_p")  # whatever the dtype of the model is
ROWS_IN_FLOAT32 = {"dropout_norms": (2,)}  # those of several results that are
# What each of these may be written over: from the arguments to `out=`.
IN_PLACE = {
    "add_rmsnorm": lambda args, made: (args[0], args[1]),
    "rotary": lambda args, made: args[0],
    "rotary_positions": lambda args, made: args[0],
    "qk_norm_rotary": lambda args, made: args[0],
    "swiglu_halves_backward": lambda args, made: (args[0], made[1]),
    "swiglu_pairs_backward": lambda args, made: args[0],
    "cross_entropy_backward": lambda args, made: args[0],
    "cross_entropy_training": lambda args, made: {**made, "gradient": args[0]},
    "softmax_temperature": lambda args, made: args[0],
    "min_p": lambda args, made: args[0],
    "penalties": lambda args, made: args[0],
}


def prepared(name, k, which=0, dtype=BF16):
    """The function of a case, its reference, arguments, and keyword arguments."""
    module = load(name)
    sizes = getattr(module, "SMALL", PAIRS if name in PRODUCTS else LENGTHS)[which]
    torch.manual_seed(zlib.crc32(name.encode()))
    args = module.arguments(M, *(sizes if name in PRODUCTS else (sizes,)), dtype, "cpu")
    return getattr(module, name), module.reference, args, variants(name)[k]


@pytest.mark.parametrize(("which", "dtype"), ((0, BF16), (1, BF16), (1, F32)), ids=str)
@pytest.mark.parametrize(("name", "k"), CASES)
def test_float64(name, k, which, dtype):
    f, reference, args, variant = prepared(name, k, which, dtype)
    result = f(*args, **variant)
    compare(result, reference(*args, **variant))
    for at, found in enumerate(pytree.tree_leaves(result)):
        if found.is_floating_point() and found.element_size() > 1:
            is_row = found.shape[-1] >= LENGTHS[1]
            is_wide = name in IN_FLOAT32 or at in ROWS_IN_FLOAT32.get(name, ())
            expected = dtype if is_row and not is_wide else F32
            assert found.dtype is expected


@pytest.mark.parametrize(("which", "dtype"), ((0, BF16), (1, torch.float16)), ids=str)
@pytest.mark.parametrize(("name", "k"), PRODUCT_CASES)
def test_products_in_float64(name, k, which, dtype):
    """What a call gives, and what the kernels do that a GPU runs, evaluated by torch."""
    f, reference, args, variant = prepared(name, k, which, dtype)
    exact = reference(*args, **variant)
    compare(f(*args, **variant), exact)
    structure = pytree.tree_structure(exact)
    compare(pytree.tree_unflatten(run_steps(f, args, variant), structure), exact)


@pytest.mark.parametrize("lead", ((1,), (2, 3), (3, 1, 2)), ids=str)
@pytest.mark.parametrize("name", (*NAMES, *PRODUCTS))
def test_leading_dimensions(name, lead):
    """A row means the same by itself and among others, whatever dimensions are before it."""
    f, reference, args, variant = prepared(name, 0)
    if args[0].shape[0] != M:
        return  # It has leading dimensions of its own, which the test above uses.

    def arranged(value):
        if not isinstance(value, torch.Tensor) or value.shape[0] != M:
            return value
        return value[:1] if lead == (1,) else value.reshape(*lead, *value.shape[1:])

    args = [arranged(value) for value in args]
    result = f(*args, **variant)
    for found in pytree.tree_leaves(result):
        assert found.shape[: len(lead)] == lead
    compare(result, reference(*args, **variant))


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name):
    f, reference, args, variant = prepared(name, 0)
    expected = f(*args, **variant)
    exact = reference(*args, **variant)
    out = IN_PLACE[name](args, pytree.tree_map(torch.empty_like, expected))
    assert f(*args, **variant, out=out) is out
    compare(out, exact)


@pytest.mark.parametrize(("name", "k"), CASES + PRODUCT_CASES)
def test_a_wrong_result_is_seen(name, k):
    """One element that is off by a few units of its dtype, in each result."""
    f, reference, args, variant = prepared(name, k)
    result = f(*args, **variant)
    exact = reference(*args, **variant)
    leaves, structure = pytree.tree_flatten(result)
    for at, leaf in enumerate(leaves):
        wrong = leaf.double().flatten()
        finite = torch.where(wrong.isfinite(), wrong.abs(), -1.0)
        element = finite.argmax()
        if leaf.is_floating_point():
            units = 100 if leaf.dtype is F32 else 3
            wrong[element] *= 1 - units * torch.finfo(leaf.dtype).eps
        elif leaf.dtype is torch.bool:
            wrong[element] = 1 - wrong[element]
        else:
            wrong[element] -= 2
        wrong = wrong.to(leaf.dtype).view(leaf.shape)
        changed = pytree.tree_unflatten([*leaves[:at], wrong, *leaves[at + 1 :]], structure)
        with pytest.raises(AssertionError, match=rf"result {at}: .* times the error"):
            compare(changed, exact)


def test_levels():
    """Each number is the nearest level, or either of two where it lies in their middle."""
    exact = Levels(torch.tensor([[3.2, 1.5, -2.7]]).double(), torch.tensor([[0.5]]).double())
    for counts, is_right in (([3, 2, -3], True), ([3, 1, -3], True), ([3, 3, -3], False),
                             ([4, 2, -3], False), ([3, 2, -2], False)):  # fmt: skip
        errors = in_units(torch.tensor([counts]).float() * 0.5, exact)
        assert (errors.max() <= 1) == is_right, counts


@pytest.mark.parametrize("name", (*NAMES, *PRODUCTS))
def test_a_person_reads_it_at_a_glance(name):
    f = getattr(load(name), name)
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(f)))).body
    assert function.end_lineno - function.body[0].lineno + 1 <= LONGEST_BODY
    assert load(name).__doc__


@pytest.mark.parametrize(("name", "k"), CASES)
def test_its_kernel_keeps_everything_in_registers(name, k):
    """For sm_90a, at the size that it has in a model."""
    module = load(name)
    m, n = module.SIZE
    args = module.arguments(2 * M, n, BF16, "cpu")
    function = getattr(module, name)
    used = function.inspect(*args, arch="sm_90a", **variants(name)[k]).resources
    assert m >= 1024 and not used.stack


@pytest.mark.parametrize(("name", "k"), PRODUCT_CASES)
def test_its_kernels_of_products_spill_nothing(name, k):
    """The same of kernels with matrices, of which only the router stores a product."""
    module = load(name)
    args = [v.to("meta") for v in module.arguments(2, *module.SIZE[1:], BF16, "meta")]
    shown = getattr(module, name).inspect(*args, arch="sm_90a", **variants(name)[k])
    assert all(kernel.resources.stack == 0 for kernel in shown.kernels) and not shown.by_torch
    stores = any("product0 (f32)" in kernel.plan_text.partition("store")[2]
                 for kernel in shown.kernels)  # fmt: skip
    assert stores == (name == "linear_router")


def test_every_file_is_listed():
    files = {path.stem for path in Path(gallery.__file__).parent.glob("*.py")}
    assert files == {*NAMES, *PRODUCTS, "__init__", "__main__", "check", "noise"}


def test_the_page_names_what_is_here():
    """docs/language.md: 90 kernels, each with examples that exist or with what is missing."""
    text = (REPO / "docs" / "language.md").read_text("utf-8")
    table = catalogue()
    assert list(table) == list(range(1, 91))
    named, written, in_part = set(), 0, 0
    for names, missing in table.values():
        assert names or missing
        for name in names:
            path = Path(name) if "/" in name else Path("examples", "gallery", f"{name}.py")
            assert (REPO / path).exists(), name
            assert path.parent.name == "gallery" or path.stem in examples.NAMES
            named.add(name)
        written += bool(names) and not missing
        in_part += bool(names) and bool(missing)
    assert set(NAMES) <= named, "each of the gallery is in the table"
    said = re.search(r"(\d+) of the 90\s+are written and tested here, and (\d+) more in part", text)
    assert said and (written, in_part) == tuple(map(int, said.groups()))
    readme = (REPO / "README.md").read_text("utf-8")
    said = re.search(r"has (\d+) of \[90 hand-written kernels\].*and parts of (\d+) more", readme)
    assert said and (written, in_part) == tuple(map(int, said.groups()))


def test_the_command_prints_a_line_for_each(capsys, monkeypatch):
    monkeypatch.setattr(__main__, "ROWS", M)
    monkeypatch.setattr(__main__, "CASES", CASES[:3])
    assert __main__.main() == 0
    *lines, count = capsys.readouterr().out.splitlines()
    paths = ["examples/causal_softmax.py", "examples/cross_entropy.py"]
    assert [line.split()[0] for line in lines] == [*(name for name, _ in CASES[:3]), *paths]
    assert all("right on" in line for line in lines)
    assert count.startswith("4 of the 90 kernels") and "3 variants of 4 functions, 0 wrong" in count


def test_the_command_goes_on_after_a_wrong_result(capsys, monkeypatch):
    module = load("dyt")
    monkeypatch.setattr(module, "reference", lambda *args: torch.zeros_like(args[0]).double())
    monkeypatch.setattr(__main__, "ROWS", M)
    monkeypatch.setattr(__main__, "CASES", [("dyt", 0), ("l2norm", 0)])
    assert __main__.main() == 1
    first, second, *_, count = capsys.readouterr().out.splitlines()
    assert "WRONG on cpu: result 0" in first and "right on cpu" in second
    assert count.startswith("1 of the 90 kernels") and "1 wrong" in count


def test_the_command_checks_products(capsys, monkeypatch):
    monkeypatch.setattr(__main__, "ROWS", 2)
    monkeypatch.setattr(__main__, "PRODUCT_CASES", [("rmsnorm_linear", 0), ("linear_router", 0)])
    assert __main__.check_products() == 0
    *lines, count = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["rmsnorm_linear", "linear_router"]
    assert count == "2 of 2 kernels with products ran on cpu and were right"


def test_swizzled_scales():
    """Tiles of 128 rows by 4 groups, as the tensor cores of Blackwell read them, are a view."""
    microscaling = load("microscaling").microscaling
    m, groups = 256, 8
    x = torch.randn(m, 32 * groups).to(BF16)
    plain = microscaling(x.view(m, groups, 32))
    # row m and group g lie at tile (m // 128, g // 4), then m % 32, m // 32 % 4 and g % 4
    tiles = torch.zeros(m // 128, groups // 4, 32, 4, 4).to(torch.float8_e8m0fnu)
    rows = x.view(m // 128, 4, 32, groups // 4, 4, 32)
    q = torch.empty(rows.shape, dtype=torch.float8_e4m3fn)
    microscaling(rows, out=(q, tiles.permute(0, 3, 2, 1, 4)))
    assert torch.equal(q.view(m, groups, 32).float(), plain[0].float())
    for row, group in ((0, 0), (37, 5), (200, 7), (255, 3)):
        tile = tiles[row // 128, group // 4]
        assert tile[row % 32, row // 32 % 4, group % 4] == plain[1][row, group]
