"""Special functions and losses of a row on a GPU, against float64."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.testing import assert_close

from .matrix import BF16, F32, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

ROWS, N = 5, 1003
ANY, ABOVE, SHARE = (lambda x: x), (lambda x: x.abs() + 0.01), (lambda x: x.sigmoid())
# Each with what makes its operand of normal numbers; the gamma function has poles below 0.
SPECIAL = {
    "erfc": (lambda x: torch.erfc(x), ANY),
    "erfcx": (lambda x: torch.special.erfcx(x), ANY),
    "ndtr": (lambda x: torch.special.ndtr(x), ANY),
    "log_ndtr": (lambda x: torch.special.log_ndtr(x), ANY),
    "erfinv": (lambda x: torch.erfinv(x), SHARE),
    "ndtri": (lambda x: torch.special.ndtri(x), SHARE),
    "lgamma": (lambda x: x.lgamma(), ABOVE),
    "digamma": (lambda x: x.digamma(), ABOVE),
    "i0": (lambda x: torch.i0(x), ANY),
    "i0e": (lambda x: torch.special.i0e(x), ANY),
    "i1": (lambda x: torch.special.i1(x), ANY),
    "i1e": (lambda x: torch.special.i1e(x), ANY),
}
LOSSES = {
    "margin_ranking": lambda x, y: F.margin_ranking_loss(x, y, y.sign()),
    "hinge_embedding": lambda x, y: F.hinge_embedding_loss(x, y.sign(), reduction="sum"),
    "triplet_margin": lambda x, y: F.triplet_margin_loss(x, y, x * y, margin=50.0),
    "multilabel_soft_margin": lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).float()),
}
FUNCTIONS = {name: htile.rowwise(f) for name, (f, _) in SPECIAL.items()}
FUNCTIONS |= {name: htile.rowwise(f) for name, f in LOSSES.items()}


def arguments(name, dtype, device):
    seed(name, dtype)
    x, y = torch.randn(2, ROWS, N) * 2
    if name in LOSSES:
        return x.to(device, dtype), y.to(device, dtype)
    return (SPECIAL[name][1](x).to(device, dtype),)


def jobs(arch):
    for name, f in FUNCTIONS.items():
        for dtype in (F32, BF16):
            yield job(f, arguments(name, dtype, "meta"), arch)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=short)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name, dtype, device):
    args = arguments(name, dtype, device)
    assert_close(FUNCTIONS[name], run(FUNCTIONS[name], *args), *args)
