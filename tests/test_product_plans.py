"""The plans of products as text and as pictures, and what the command line shows of them."""

import re

import pytest
import torch
import torch.nn.functional as F

import htile
from htile import cli
from htile.errors import HTileError, LoweringError, UnsupportedError
from htile.pictures import graph_dot, plan_svg
from htile.pictures.products import draw_product_plan, moments_of
from htile.run.products.kernels import ProductKernel
from tests import products, whole_rows
from tests.products import FUNCTIONS, arguments
from tests.test_pictures import assert_no_labels_overlap, parse
from tests.whole_rows import gated_norm, norm_after

every_function = pytest.mark.parametrize(
    "f", (*FUNCTIONS, norm_after, gated_norm), ids=lambda f: f._signature.name
)
SWIGLU = ["show", "tests/products.py:swiglu", "--args",
          "x=bf16[4096,512] gate=bf16[1024,512] up=bf16[1024,512]"]  # fmt: skip
NLL = ["show", "tests/products.py:nll", "--args",
       "h=bf16[64,64] head=bf16[1000,64] label=i64[64]"]  # fmt: skip


def kernels_of(f, m=4096, n=512, k=256):
    is_whole = f in whole_rows.WHOLE[1:]
    return f.inspect(*(whole_rows.arguments(f, m, 96, 128) if is_whole else
                       arguments(f, m, n, k))).kernels  # fmt: skip


def test_the_plan_of_two_products():
    (kernel,) = kernels_of(products.swiglu)
    assert str(kernel.plan) == """\
plan swiglu, N = 512, K = 256, sm_90a
  numerics   2 products of x and gate, up (N, K) in bf16, sums over K in order
  placement  tiles of 128 rows and 128 columns of each product, 2 tiles of a cluster share what they
             load of matrices
  warps      1 warp loads, 2 warpgroups of 128 threads multiply and store
  stages     4 of 64 elements of K, 48 KiB each in shared memory
  for each tile of a thread block, loaded while the one before is stored
    for each 64 elements of K
      load      x and gate, up to a stage that is free, by the warp that loads
      multiply  64 rows a warpgroup, while the next stage is waited for; then the stage is free
    for each 32 columns of a thread's rows
      read      product0 from the sums in registers
      read      product1 from the sums in registers
      compute   sigmoid0 = sigmoid_near(product0)
      compute   mul0 = product0 * sigmoid0
      compute   mul1 = mul0 * product1
      store     out (bf16), tiles through shared memory"""


@every_function
def test_a_plan_says_what_the_source_does(f):
    """The tile, the stages, and every value that is computed, by its name in the source."""
    for kernel in kernels_of(f):
        if not isinstance(kernel, ProductKernel):
            continue
        tile, source = kernel.plan.tile, kernel.source
        assert f"tile=({tile.rows}, {tile.columns})" in source and f"stages={tile.stages}" in source
        names = re.findall(r"compute   (\w+) = |(?:load|read)      (\w+) (?:of|from)",
                           kernel.plan_text)  # fmt: skip
        assert all(re.search(rf"\b{a or b}\b", source) for a, b in names)
        made = {*re.findall(r"^ +(\w+) = (?:math|chunk|\w+ [-+*])", source, re.M)}
        assert made <= {a or b for a, b in names}
        assert all(output.name in kernel.plan_text for output in kernel.graph.outputs)


@every_function
@pytest.mark.parametrize("m", [8, 4096])
def test_a_picture_shows_all_of_a_plan(f, m):
    for kernel in kernels_of(f, m):
        if not isinstance(kernel, ProductKernel):
            continue
        ids, texts = parse(kernel.plan_svg())
        moments, bars = moments_of(kernel.plan)
        boxes = [box for moment in moments for box in moment.boxes + moment.beside]
        assert {f"node-{box.key}" for box in boxes} <= set(ids)
        assert_no_labels_overlap(draw_product_plan(kernel.plan))
        assert {f"kept-n{bar.id}" for bar in bars} <= set(ids)
        assert kernel.plan.title in texts and {"tensor cores", "stages", "sums"} <= set(texts)
        assert {i.name for i in kernel.plan.kernel.others} <= set(texts)
        assert kernel.plan_svg() == plan_svg(kernel.plan)
        assert kernel.graph_dot() == graph_dot(kernel.graph, kernel.plan.names)


def test_many_stages_have_few_boxes():
    (kernel,) = kernels_of(products.linear, 1)
    assert kernel.plan.tile.stages == 12
    shared = moments_of(kernel.plan)[0][1]
    assert [box.texts[0].left for box in shared.boxes] == ["stage 0", "stage 1", "9 more",
                                                          "stage 11"]  # fmt: skip


def test_the_levels_of_a_chain_are_plans_one_after_the_other():
    shown = products.mlp.inspect(*arguments(products.mlp, 4096, 1024, 512))
    first, second = shown.plan_text.split("\n\nkernel 2 of 2\n")
    assert first.startswith("kernel 1 of 2\nplan mlp, N = 1024, K = 512")
    assert "store     left0 (bf16)" in first and "load      left0 and down" in second


def test_the_cost_of_products_is_not_known():
    (kernel,) = kernels_of(products.linear)
    with pytest.raises(UnsupportedError, match="time it on a GPU"):
        kernel.cost()


OF_ONE = ("plan", "cost", "cubin", "lowered", "graph_dot", "graph_json", "graph_svg", "plan_svg")


def test_what_is_of_one_kernel_says_where_it_is():
    """`inspect` gives all kernels, and what it lacks of a `Kernel` raises an error of HTile."""
    shown = products.nll.inspect(*arguments(products.nll, 4096, 512, 256))
    for name in OF_ONE:
        assert hasattr(shown.kernels[0], name)
        with pytest.raises(UnsupportedError, match=rf"has 2 kernels: use \.kernels\[0\]\.{name}"):
            getattr(shown, name)


def test_all_that_a_kernel_has_is_there_or_raises_an_error():
    shown = products.nll.inspect(*arguments(products.nll, 4096, 512, 256))
    for name in dir(shown.kernels[1]):
        if not name.startswith("_"):
            try:
                getattr(shown, name)
            except HTileError as error:
                assert "use .kernels[0]" in str(error) or "first use" in str(error)


@pytest.mark.parametrize("name", ["training", "backward", "saved"])
def test_backward_kernels_are_compiled_at_their_first_use(name):
    with pytest.raises(UnsupportedError, match="Run one step before a capture"):
        getattr(products.gelu.inspect(*arguments(products.gelu, 64, 512, 256)), name)


@pytest.mark.parametrize("command", ["compile --backward", "show --backward", "show --joint"])
def test_the_command_line_says_so_too(command, capsys):
    verb, option = command.split()
    code = cli.main([verb, *SWIGLU[1:], option])
    assert code == 1 and "compiled at their first use" in capsys.readouterr().err


def test_a_plan_of_rows_for_products_alone_is_refused():
    args = arguments(products.gelu, 64, 512, 256)
    with pytest.raises(LoweringError, match=r"with_plan\(threads_per_row=32\) has no effect"):
        products.gelu.with_plan(threads_per_row=32).inspect(*args)
    softmax = arguments(products.softmax, 64, 512, 512)  # which takes two kernels
    *_, row = products.softmax.with_plan(threads_per_row=64).inspect(*softmax).kernels
    assert row.plan.properties()["threads_per_row"] == 64


def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@htile.rowwise
def residual(x, W: htile.Matrix, r):
    return r + F.linear(x, W)


APART = "made contiguous by each call: its rows are not equally far apart in memory"
COLUMNS = "made contiguous by each call: the elements of its rows are apart in memory"
COPIES = {
    "none": (meta(8, 64, 1024), meta(8, 64, 512), {}),
    "rows of a transpose": (meta(64, 8, 1024).transpose(0, 1), meta(8, 64, 512), {"x": APART}),
    "rows that repeat": (meta(8, 64, 1024), meta(8, 1, 512), {"r": APART}),
    "one row for all": (meta(8, 64, 1024), meta(1, 1, 512), {}),
    "columns": (meta(1024, 64).t(), meta(512, 64).t(), {"x": COLUMNS, "r": COLUMNS}),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_shown(name):
    x, r, copies = COPIES[name]
    shown = residual.inspect(x, meta(512, 1024), r)
    assert shown.copied == {*copies}
    assert shown.plan_text.count("copied") == len(copies)
    for argument, why in copies.items():
        assert f"copied     {argument} is {why}" in shown.plan_text


def test_products_torch_computes_are_named():
    x, weight = torch.randn(4, 15).bfloat16(), torch.randn(8, 15).bfloat16()
    shown = products.linear.inspect(x, weight)
    assert shown.plan_text.startswith("product0 is computed by torch\n")


def test_a_page_of_products(capsys):
    assert cli.main(SWIGLU) == 0
    out = capsys.readouterr().out
    titles = [text for text in out.splitlines() if text.startswith("== ")]
    parts = ["graph", "plan", "source", "resources, sm_90a", "cost"]
    assert titles == [f"== {part} ==" for part in parts]
    assert "2 products of x and gate, up" in out and "not known of kernels with products" in out


def test_one_section_of_several_kernels(capsys):
    assert cli.main([*NLL, "--plan"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kernel 1 of 2\nplan nll, N = 1000, K = 64") and "kernel 2 of 2" in out


def test_all_kernels_are_saved(capsys, tmp_path):
    assert cli.main([*NLL, "--resources", "--save", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("registers and 0 bytes of stack") == 2
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "plan.txt"]
    for number in "12":
        (kernel,) = (folder / number).iterdir()
        assert {"kernel.py", "kernel.ptx", "plan.svg", "graph.svg", "plan.txt"} <= {
            path.name for path in kernel.iterdir()
        }
