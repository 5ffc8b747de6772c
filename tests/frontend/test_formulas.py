"""Numbers that are computed of Python floats: in float64, as torch's Python has them."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.formulas import Formula, formulas
from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from htile.testing import assert_close

X = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))


@htile.rowwise
def average(mean, x, beta: float = 0.999):
    return beta * mean + (1 - beta) * x * x


FUNCTIONS = {
    "1 - beta": lambda x, b: x * (1 - b),
    "beta - 1": lambda x, b: x * (b - 1),
    "a quotient": lambda x, b: x / (1 - b),
    "a product": lambda x, b: x * ((1 - b) * 3),
    "a square": lambda x, b: x * (1 - b**2),
    "a negative": lambda x, b: x * -(b - 1),
    "several steps": lambda x, b: x * (((2 * b - 1) / 4 - 0.25) / 0.5 + 1e-9),
    "the float too": lambda x, b: x * b + (b - 1),
    "of a number of the row": lambda x, b: (1 - b) * x.sum(),
    "in a comparison": lambda x, b: torch.where(x * 1e-5 > 1 - b, x, 0.0),
}

# Options of torch's functions, of which optimizers take such numbers.
OPTIONS = {
    "alpha of add": lambda x, b: x.abs().add(x, alpha=1 - b),
    "alpha of sub": lambda x, b: torch.sub(x, 2.0, alpha=b) + x.sum().sub(x[0], alpha=1 - b),
    "value of addcmul": lambda x, b: x.addcmul(x, x.cos(), value=1 - b),
    "value of addcdiv": lambda x, b: x.addcdiv(x, x.abs() + 1, value=-b),
    "beta of softplus": lambda x, b: F.softplus(x, beta=b) + F.softplus(x, threshold=b),
    "value of pad": lambda x, b: F.pad(x[3:], (1, 2), value=b) * x,
}


def typed(f):
    def function(x, beta: float):
        return f(x, beta)

    return htile.rowwise(function)


@pytest.mark.parametrize("beta", (0.9, 0.999, 0.9999999))
def test_a_moving_average_keeps_its_digits(beta):
    found = average(torch.zeros_like(X), X, beta)
    assert_close(average, found, torch.zeros_like(X), X, beta)
    exact = (1 - beta) * X.double() ** 2
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_float64(name):
    f = typed(FUNCTIONS[name])
    for beta in (0.99999, 1.00001, 0.5):
        assert_close(f, f(X, beta), X, beta)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    f = typed(OPTIONS[name])
    for beta in (0.999, 1.0, 2.5):
        assert_close(f, f(X, beta), X, beta)
        assert_close(f, f(X.bfloat16(), beta), X.bfloat16(), beta)


def test_a_float_is_no_alpha_of_integers():
    f = typed(lambda x, b: x.add(x, alpha=b))
    with pytest.raises(htile.DtypeError, match=r"make it htile\.Static"):
        f(X.int(), 2.0)
    padded = typed(lambda x, b: F.pad(x[1:], (0, 1), value=b))
    with pytest.raises(htile.DtypeError, match=r"by a symbolic value"):
        padded(X.int(), 2.0)


def test_a_row_is_no_alpha():
    """torch refuses all but numbers."""
    for wrong in (lambda x, b: x.add(x, alpha=x), lambda x, b: x.sub(x, alpha=x.sum())):
        with pytest.raises(htile.TraceError, match=r"one number for all rows"):
            typed(wrong)(X, 2.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_placed_graph_has_the_same_values(name):
    f = typed(FUNCTIONS[name])
    graph = f.inspect(X, 0.99999, arch="sm_90a").graph
    found = evaluate(graph, {"x": X, "beta": 0.99999}, lead=(4,))
    torch.testing.assert_close(found, f(X, 0.99999), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_host_function_computes_them(name):
    kernel = typed(FUNCTIONS[name]).inspect(X, 0.99999, arch="sm_90a")
    numbers = [i for i in kernel.graph.inputs if i.name == "beta"]
    assert numbers and all(i.formula is not None for i in numbers)
    assert "beta: Float64" in kernel.source and "beta0 = Float32(" in kernel.source
    assert kernel.resources.registers > 0  # it compiles


def test_what_loses_no_digits_stays_in_the_kernel():
    some = lambda x, b: x * b, lambda x, b: x * (2 * b), lambda x, b: x / -b, lambda x, b: x + b
    for f in some:
        assert "Float64" not in typed(f).inspect(X, 0.5, arch="sm_90a").source


def test_the_text_of_a_formula():
    twice = Formula(Op.MUL, (2.0, Formula()))
    less = Formula(Op.SUB, (twice, 1.0))
    assert less.text("b") == "(2.0 * b) - 1.0" and less.cancels and not twice.cancels
    assert Formula(Op.NEG, (less,)).text("b") == "-((2.0 * b) - 1.0)"
    assert Formula(Op.DIV, (1.0, less)).value(torch.tensor(2.0, dtype=torch.float64)) == 1 / 3


def test_gradients_use_them_too():
    x = X.clone().requires_grad_()
    f = typed(lambda x, b: (x * (1 - b)).square().sum())
    f(x, 0.99999).sum().backward()
    exact = 2 * X.double() * (1 - 0.99999) ** 2
    torch.testing.assert_close(x.grad.double(), exact, rtol=1e-6, atol=0)
    backward = f.inspect(x, 0.99999, arch="sm_90a").backward
    assert "beta: Float64" in backward.source


def test_a_formula_has_one_float():
    @htile.rowwise
    def f(x, a: float, b: float):
        return x * (a - b), x * (1 - a) * (1 - b)

    graph = f.inspect(X, 0.5, 0.25, arch="sm_90a").lowered.traced
    assert sorted(i.name for i, _ in formulas(graph).values()) == ["a", "b"]
    assert_close(f, f(X, 0.5, 0.25), X, 0.5, 0.25)
