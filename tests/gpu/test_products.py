"""Functions with matrix products on a GPU, in processes with a time limit."""

import pytest

from tests.products import FUNCTIONS
from tests.whole_rows import SHARED, WHOLE

from .test_handwritten_matmul import run

pytestmark = pytest.mark.gpu

NAMES = [f._signature.name for f in FUNCTIONS]
GROUPS = [NAMES[k::3] for k in range(3)]


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
@pytest.mark.parametrize("what", ["values", "layouts", "bits", "gradients", "chunks"])
def test_products(what, names):
    assert run("tests.gpu.row_products", what, *names).endswith("right\n")


@pytest.mark.parametrize("name", ["linear", "matmul", "gelu", "swiglu", "nll", "project", "masked"])
@pytest.mark.parametrize("what", ["forms", "turns"])
def test_forms_of_tiles(what, name):
    """Both schedules, all kinds of widths, clusters and cuts."""
    assert run("tests.gpu.row_products", what, name).endswith("right\n")


@pytest.mark.parametrize("name", [f._signature.name for f in WHOLE])
def test_rows_that_are_reduced_in_a_tile(name):
    assert run("tests.gpu.row_products", "whole", name).endswith("right\n")


@pytest.mark.parametrize("name", [f._signature.name for f in SHARED])
def test_rows_that_tiles_share(name):
    assert run("tests.gpu.row_products", "shared", name).endswith("right\n")


@pytest.mark.parametrize("name", ["gelu", "nll"])
def test_tuned_tiles(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path / "cache"))
    assert run("tests.gpu.row_products", "tuned", name).endswith("right\n")


@pytest.mark.parametrize("names", [["linear", "swiglu", "mlp"], ["nll", "project"]], ids="-".join)
@pytest.mark.parametrize("what", ["values", "layouts", "bits", "gradients"])
def test_products_as_without_wgmma(what, names):
    """Warps multiply by mma.sync, as they do where there is no wgmma."""
    assert run("tests.gpu.row_products", "warps", what, *names).endswith("right\n")


def test_logits_are_never_stored():
    assert run("tests.gpu.row_products", "memory", "nll").endswith("right\n")


@pytest.mark.parametrize("name", ["linear", "nll", "mlp"])
def test_graphs_and_streams(name):
    """10000 launches on two streams do not hang."""
    assert run("tests.gpu.row_products", "graphs", name).endswith("right\n")


@pytest.mark.parametrize("first", range(0, 128, 64))
def test_generated_programs(first):
    found = run("tests.gpu.product_programs", f"{first}:{first + 64}")
    assert "64 programs right" in found


def test_the_example_for_hopper_checks_itself():
    assert "B mn-major" in run("examples.handwritten_hopper_matmul")


def test_the_gallery():
    """At the sizes of models, against references in float64."""
    assert "7 of 7 kernels with products ran on cuda" in run("examples.gallery", "products")
