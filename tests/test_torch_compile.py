"""Row-wise functions in torch.compile, torch.export and torch.utils.checkpoint, on the CPU.

Compiled calls run what eager ones run, so they have the same bits. Where torch's own code is
compiled beside them, results are held against float64.
"""

import io
import json
import os
import subprocess
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import htile
from htile.run import runner as running
from htile.run.operations import ops
from htile.testing import assert_close

REPO = Path(__file__).parents[1]
BACKENDS = ("eager", "aot_eager")
N = 64
SCALE, FACTORS = 1.0, (1.0, 2.0)
fullgraph = partial(torch.compile, fullgraph=True)


class Parts(NamedTuple):
    scaled: object
    others: list


@htile.rowwise
def rmsnorm(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean() + eps) * weight


@htile.rowwise
def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


@htile.rowwise
def parts(x, times: htile.Static, mask: htile.PerRow, offset):
    return Parts(x * times * mask, [x.sum(), {"moved": x + offset}])


@htile.rowwise
def looked_up(x: htile.Inner[2], table: htile.Shared, at: htile.PerRow):
    return x * table[at]


@htile.rowwise
def largest_of_rows(x):
    return htile.max_rows(x * 2)


@htile.rowwise
def sums(x, y):
    return (x * y).sum(), htile.sum_rows(x * y)


@htile.rowwise
def scaled(x):
    return x * SCALE


@htile.rowwise
def multiplied(x):
    return x * FACTORS[1]


@htile.rowwise
def branching(x):
    return x if x.sum() > 0 else -x


@htile.rowwise(dynamic_n=True)
def of_any_length(x):
    return x / x.sum()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.weight = torch.nn.Linear(N, N), torch.nn.Parameter(torch.rand(N))

    def forward(self, x):
        return softmax(rmsnorm(self.linear(x), self.weight) + 1)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Each test begins and ends without compiled code; `SCALE` and `FACTORS` are as above."""
    for name, value in (("SCALE", 1.0), ("FACTORS", (1.0, 2.0))):
        monkeypatch.setitem(globals(), name, value)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(found, right):
    """Whether two nests of tensors have the same structure, bits, dtypes and strides."""
    assert type(found) is type(right)
    pairs = list(zip(tree_leaves(found), tree_leaves(right), strict=True))
    return all(
        torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride() for a, b in pairs
    )


def gradients(function, *tensors):
    """The gradients of a function for all floating arguments, of a sum that tells rows apart."""
    tensors = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    leaves = tree_leaves(function(*tensors))
    total = sum((leaf * torch.arange(leaf.numel()).view(leaf.shape)).sum() for leaf in leaves)
    return torch.autograd.grad(total, [t for t in tensors if t.requires_grad])


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def operations(graph) -> list[str]:
    """The names of HTile's operations in a graph of torch, in order."""
    return [str(node.target) for node in graph.nodes if "htile" in str(node.target)]


CALLS = {
    "a weight": (lambda x, w: rmsnorm(x, w), (rows(5, N), rows(N))),
    "a number": (lambda x, w: rmsnorm(x, weight=w, eps=0.5), (rows(5, N), rows(N))),
    "an integer": (lambda x, w: rmsnorm(x, w, 1), (rows(5, N), rows(N))),
    "three dimensions": (lambda x, w: rmsnorm(x, w), (rows(2, 3, N), rows(N))),
    "rows that repeat": (lambda x, w: rmsnorm(x, w), (rows(2, 3, N), rows(1, 3, N))),
    "one row": (lambda x: softmax(x), (rows(N),)),
    "no rows": (lambda x: softmax(x), (rows(0, N),)),
    "a transpose": (lambda x: softmax(x.t()), (rows(N, 5),)),
    "bfloat16": (lambda x: softmax(x), (rows(5, N).bfloat16(),)),
    "a structure": (
        lambda x, m, o: parts(x, 3, offset=o, mask=m), (rows(5, N), rows(5), torch.tensor(2.0))
    ),
    "a static float": (
        lambda x, m, o: parts(x, 2.5, m, o), (rows(5, N), rows(5), torch.tensor(2.0))
    ),
    "a table": (
        lambda x, t, at: looked_up(x, t, at),
        (rows(5, 4, 8), rows(9, 8), torch.tensor([1, 8, 0, 1, 2])),
    ),
    "sums over rows": (lambda x, y: sums(x, y), (rows(5, N), rows(5, N, seed=1))),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_has_the_bits_and_the_strides_of_an_eager_one(name, backend):
    function, tensors = CALLS[name]
    assert same(fullgraph(function, backend=backend)(*tensors), function(*tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("no rows", "a table")])
def test_gradients_of_a_compiled_call_are_those_of_an_eager_one(name, backend):
    function, tensors = CALLS[name]
    compiled = fullgraph(function, backend=backend)
    assert same(gradients(compiled, *tensors), gradients(function, *tensors))


def test_results_are_right():
    """The comparisons above hold compiled calls against eager ones; this one against float64."""
    x, w = rows(5, N), rows(N)
    assert_close(rmsnorm, fullgraph(rmsnorm, backend="aot_eager")(x, w), x, w)
    found = gradients(fullgraph(lambda x: softmax(x), backend="aot_eager"), x)[0]
    right = gradients(lambda x: torch.softmax(x, -1), x.double())[0]
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_a_model_trains_compiled_as_it_does_in_eager_mode(backend):
    model, x = Model(), rows(6, N)
    compiled = fullgraph(model, backend=backend)
    exact = Model().double()
    exact.load_state_dict(model.state_dict())

    def of_torch(x):
        y = exact.linear(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * exact.weight
        return torch.softmax(y + 1, -1)

    for run in (model, compiled, of_torch):
        run(x.to(exact.weight.dtype if run is of_torch else x.dtype)).square().sum().backward()
        if run is not of_torch:
            found = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    right = [p.grad for p in exact.parameters()]
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), of_torch(x.double()), rtol=1e-5, atol=1e-6)


def test_forward_and_backward_are_one_operation_each():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    gradients(fullgraph(rmsnorm, backend=backend), rows(5, N), rows(N))
    assert [operations(each.graph) for each in graphs] == [["htile.run.default"]] * 2
    results = [len(tree_leaves(each.graph.output_node().args[0])) for each in graphs]
    assert results == [4, 2]  # y, what is kept of x, weight and the statistic; two gradients


@pytest.mark.parametrize("how", ["dynamic", "marked", "seen"])
def test_one_graph_serves_any_number_of_rows_and_a_new_length_has_its_own(how):
    compiled = fullgraph(lambda x: softmax(x + 1), backend="aot_eager",
                         dynamic=True if how == "dynamic" else None)  # fmt: skip
    first = rows(4, N)
    if how == "marked":
        torch._dynamo.mark_dynamic(first, 0)
    assert same(compiled(first), softmax(first + 1))
    for count in (5, 6, 7, 9):
        assert same(compiled(rows(count, N)), softmax(rows(count, N) + 1))
    assert compiled_graphs() == (2 if how == "seen" else 1)
    before = compiled_graphs()
    assert same(compiled(rows(5, 32)), softmax(rows(5, 32) + 1))
    assert compiled_graphs() == before + 1


def test_gradients_with_any_number_of_rows():
    compiled = fullgraph(lambda x, w: rmsnorm(x, w), backend="aot_eager", dynamic=True)
    for count in (4, 5, 7):
        tensors = rows(count, 3, N), rows(1, 3, N)
        assert same(gradients(compiled, *tensors), gradients(rmsnorm, *tensors))
    assert compiled_graphs() == 1


def test_numbers_and_dtypes_of_each_call_count():
    x, w = rows(5, N), rows(N)
    compiled = fullgraph(lambda x, w, eps: rmsnorm(x, w, eps), backend="aot_eager")
    for eps in (1e-6, 0.1, 0.5, 2):
        assert same(compiled(x, w, eps), rmsnorm(x, w, eps))
    assert same(compiled(x.half(), w, 0.5), rmsnorm(x.half(), w, 0.5))


# captured values


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_number_that_changes_is_traced_anew(backend, monkeypatch):
    def make(factor):
        def change(value):
            nonlocal factor
            factor = value

        return htile.rowwise(lambda x: x * factor), change

    (one, change), (other, _) = make(2.0), make(2.0)
    x = rows(3, N)
    compiled = fullgraph(lambda x: (scaled(x), one(x), other(x)), backend=backend)
    assert same(compiled(x), (x, x * 2, x * 2))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert same(compiled(x), (x * 3, x * 2, x * 2))
    change(5.0)
    assert same(compiled(x), (x * 3, x * 5, x * 2))
    change(2.0)
    assert same(compiled(x), (x * 3, x * 2, x * 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_that_torch_does_not_see_is_refused(backend, monkeypatch):
    x = rows(3, N).requires_grad_()
    compiled = fullgraph(lambda x: multiplied(x), backend=backend)
    assert torch.equal(compiled(x), x * 2)
    monkeypatch.setitem(globals(), "FACTORS", (1.0, 4.0))
    with pytest.raises(htile.TraceError, match="a value that it captures has changed") as caught:
        compiled(x)
    assert caught.value.loc.file == __file__
    torch.compiler.reset()
    assert torch.equal(compiled(x), x * 4)


PROGRAM = """
import json, sys
import torch, htile
from torch._dynamo.utils import counters
from htile.run.operations.ops import NAMED

@htile.rowwise
def norm(x, w):
    return x * torch.rsqrt((x * x).mean() + EPS) * w

torch.manual_seed(0)
x, w = torch.randn(4, 32, requires_grad=True), torch.rand(32, requires_grad=True)
compiled = torch.compile(lambda x, w: norm(x + 1, w), fullgraph=True)
pairs = [torch.autograd.grad((y(x, w) * x.detach()).sum(), (x, w))
         for y in (compiled, lambda x, w: norm(x + 1, w))]
print(json.dumps({
    "right": all(torch.allclose(a, b) for a, b in zip(*pairs)),
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "name": next(iter(NAMED)),
}))
"""


def test_the_next_process_takes_what_torch_has_cached_unless_the_function_is_another(tmp_path):
    """Also the backward graph, whose name only the cached graph holds."""
    environ = os.environ | {
        "PYTHONPATH": str(REPO),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    file, said = tmp_path / "program.py", []
    for eps in ("0.5", "0.5", "0.75"):
        file.write_text(PROGRAM.replace("EPS", eps), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, str(file)], env=environ, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        said.append(json.loads(run.stdout.splitlines()[-1]))
    assert all(each["right"] for each in said)
    assert [each["hits"] for each in said] == [0, 1, 0]
    first, again, other = (each["name"] for each in said)
    assert first == again != other


# out=


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_out_is_written_as_in_eager_mode(backend):
    def function(x, out):
        doubled = x * 2
        softmax(doubled, out=doubled)
        returned = softmax(x, out=out)
        softmax(x, out=x)
        return doubled + 1, returned

    given = [[rows(5, N), torch.empty(5, N)] for _ in range(2)]
    assert same(fullgraph(function, backend=backend)(*given[0]), function(*given[1]))
    assert same(given[0], given[1])


def test_out_of_a_structure():
    x, others = rows(5, N), (rows(5), torch.tensor(2.0))
    empty = parts(x, 3, *others)
    out = Parts(torch.empty(5, N), [torch.empty(5), {"moved": torch.empty(5, N)}])
    assert fullgraph(lambda x, out: parts(x, 3, *others, out=out) and None)(x, out) is None
    assert same(out, empty)


def test_named_tuples_of_one_name():
    """And of the names of other structures: each function gives its own."""
    kinds = [namedtuple("Pair", "first second"), namedtuple("Pair", "second first")]
    kinds += [namedtuple(name, "first second") for name in ("tuple", "list", "dict", "result")]

    def function(kind):
        return htile.rowwise(lambda x: kind(x + 1, [kind(x.sum(), x * 2)]))

    functions, x = [function(kind) for kind in kinds], torch.randn(3, N)
    results = torch.compile(lambda x: [f(x) for f in functions], backend="aot_eager")(x)
    for kind, f, found in zip(kinds, functions, results, strict=True):
        assert type(found) is type(found[1][0]) is kind
        assert same(found, f(x))
        outs = tree_map(torch.zeros_like, found)
        torch.compile(lambda x, out, f=f: f(x, out=out), backend="aot_eager")(x, outs)
        assert torch.equal(outs[1][0][1], x * 2)


def decorated_inside(x):
    @htile.rowwise
    def doubled(x):
        return x * 2

    return doubled(x) + 1


def test_a_function_that_is_decorated_in_compiled_code():
    x = rows(5, N)
    with pytest.raises(Unsupported, match=r"decorate the function with htile\.rowwise outside of"):
        fullgraph(decorated_inside, backend="eager")(x)
    assert same(torch.compile(decorated_inside, backend="eager")(x), x * 2 + 1)


# what is refused is a graph break, so that eager mode does what it does, or raises


def cause(function, *tensors) -> str:
    """What torch says with `fullgraph=True`."""
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        fullgraph(function, backend="eager")(*tensors)
    return str(caught.value)


def test_an_error_names_the_line_of_the_function():
    said = cause(lambda x: branching(x), rows(5, N))
    assert "write torch.where(condition, a, b)" in said
    assert "return x if x.sum() > 0 else -x" in said
    with pytest.raises(htile.TraceError, match=r"return x if x.sum\(\) > 0 else -x"):
        torch.compile(lambda x: branching(x), backend="eager")(rows(5, N))


def test_what_is_not_compiled_breaks_the_graph():
    x = rows(5, N)
    assert "dynamic_n=True in torch.compile" in cause(lambda x: of_any_length(x), x)
    broken = torch.compile(lambda x: of_any_length(x * 2), backend="eager")
    assert same(broken(x), of_any_length(x * 2))


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_is_carried_on_or_refused_not_dropped(backend, is_warm):
    """Whether the program is compiled before there are tangents, or with them."""
    x, compiled = rows(5, N), fullgraph(lambda x: softmax(x), backend=backend)
    if is_warm:
        compiled(x)
    with torch.autograd.forward_ad.dual_level():
        given = torch.autograd.forward_ad.make_dual(x, x)
        if is_warm and backend == "eager":  # which runs what was traced, under autograd
            found, right = (torch.autograd.forward_ad.unpack_dual(f(given)).tangent
                            for f in (compiled, softmax))  # fmt: skip
            assert same(found, right)
            return
        with pytest.raises((htile.GradientError, Unsupported), match=r"forward-mode|forward_ad"):
            compiled(given)


@pytest.mark.parametrize("tensor", ["x", "out"])
def test_out_is_refused_where_gradients_are_asked_for(tensor):
    x, out = rows(5, N), torch.empty(5, N)
    {"x": x, "out": out}[tensor].requires_grad_()
    assert "under torch.no_grad()" in cause(lambda x, out: softmax(x, out=out), x, out)
    kind = {"x": htile.GradientError, "out": htile.ArgumentError}[tensor]
    with pytest.raises(kind):
        torch.compile(lambda x, out: softmax(x, out=out), backend="eager")(x, out)


def test_wrong_arguments_are_told():
    x = rows(5, N)
    assert "takes 1 positional argument, got 2" in cause(lambda x: softmax(x, x), x)
    assert "takes no keyword argument 'axis'" in cause(lambda x: softmax(x, axis=1), x)
    assert "eps is a list" in cause(lambda x: rmsnorm(x, x, [1.0]), x)
    assert "the structure that the function returns" in cause(lambda x: softmax(x, out=(x,)), x)
    said = cause(lambda x: largest_of_rows(x), rows(5, N).requires_grad_())
    assert "has no derivative yet" in said and "return htile.max_rows(x * 2)" in said
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"ShapeError.*do not broadcast"):
        fullgraph(lambda x, y: sums(x, y), backend="eager")(x, rows(4, N))


# modes


@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_modes_and_autocast_are_as_in_eager_mode(backend):
    linear, w, x = torch.nn.Linear(N, N), rows(N), rows(5, N)

    def function(x):
        return rmsnorm(linear(x), w)

    def partly(x):
        with torch.no_grad():
            first = softmax(x)
        return first * softmax(x * 2)

    compiled = fullgraph(function, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype is torch.bfloat16 and same(compiled(x), function(x))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same(compiled(x), function(x)) and not compiled(x).requires_grad
            assert compiled(x).is_inference() is function(x).is_inference()
    assert compiled(x).requires_grad
    assert same(gradients(fullgraph(partly, backend=backend), x), gradients(partly, x))


def test_fake_tensors_have_the_shapes_of_results():
    with FakeTensorMode() as mode:
        found = softmax(torch.empty(4, N))
        kept = parts(mode.from_tensor(rows(5, N)), 3, torch.empty(5), torch.tensor(1.0))
    assert type(found) is FakeTensor and found.shape == (4, N)
    assert [tuple(leaf.shape) for leaf in tree_leaves(kept)] == [(5, N), (5,), (5, N)]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_one_operation(mode):
    x = rows(4, N)
    made = make_fx(lambda x: softmax(x) + 1, tracing_mode=mode)(x)
    assert operations(made.graph) == ["htile.run.default"]
    assert same(made(x), softmax(x) + 1)


# export


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs(strict, monkeypatch):
    class Scaled(Model):
        def forward(self, x):
            return scaled(super().forward(torch.relu(x)))

    model, x, y = Scaled(), rows(4, N), rows(7, N, seed=1)
    dynamic = {"x": {0: torch.export.Dim("rows")}}
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic, strict=strict)
    assert operations(program.graph) == ["htile.call.default"] * 3
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    right = model(y)
    monkeypatch.setitem(globals(), "SCALE", 2.0)  # a program is what was exported
    for each in (program, torch.export.load(file)):
        assert same(each.module()(y), right)
        assert same(gradients(each.module(), y), gradients(program.module(), y))
    decomposed = program.run_decompositions()
    assert operations(decomposed.graph) == ["htile.infer.default"] * 3
    infers = decomposed.module()
    with torch.no_grad():
        assert same(infers(y), right)
    with pytest.raises(htile.GradientError, match="decomposed for inference"):
        infers(y)
    with pytest.raises(htile.GradientError, match="decomposed for inference"):
        torch.func.grad(lambda y: infers(y).sum())(y)
    with torch.no_grad(), pytest.raises(htile.GradientError, match="forward-mode tangent"):
        torch.func.jvp(infers, (y,), (y,))


def test_torch_func_of_an_exported_program_is_refused():
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return scaled(x)

    program = torch.export.export(Scaled(), (rows(4, N),)).module()
    with pytest.raises(htile.UnsupportedError, match="apply it to the function itself"):
        torch.func.grad(lambda x: program(x).sum())(rows(4, N))
    with pytest.raises(RuntimeError, match="Batching rule not implemented for htile::call"):
        torch.vmap(program)(rows(3, 4, N))


def test_a_program_of_another_process_says_what_is_missing():
    with pytest.raises(htile.UnsupportedError, match="import the module that defines gone"):
        torch.ops.htile.run("gone/0123|x;;1", [rows(4, N)], [], [4])


# checkpoints


def counted(monkeypatch) -> list[str]:
    """The parts of derivatives that run from now on: `x,weight;;` forward, `x,weight;;10` back."""
    ran, computed = [], running.Runner.computed

    def count(self, *given):
        ran.append(self.name.partition("|")[2])
        return computed(self, *given)

    monkeypatch.setattr(running.Runner, "computed", count)
    return ran


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("policy", ["MUST_SAVE", "MUST_RECOMPUTE"])
def test_a_selective_checkpoint_saves_an_operation_or_runs_it_twice(policy, backend, monkeypatch):
    def choose(context, operation, *args, **kwargs):
        is_htile = operation is torch.ops.htile.run.default
        return CheckpointPolicy[policy if is_htile else "PREFER_RECOMPUTE"]

    def body(x, w):
        return rmsnorm(torch.relu(x) + 1, w)

    def function(x, w):
        contexts = partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(body, x, w, use_reentrant=False, context_fn=contexts)

    tensors = rows(5, N), rows(N)
    right = gradients(body, *tensors)
    ran = counted(monkeypatch)
    run = function if backend is None else fullgraph(function, backend=backend)
    assert same(gradients(run, *tensors), right)
    forward = ["x,weight;;"] * (1 if policy == "MUST_SAVE" else 2)
    assert ran == [*forward, "x,weight;;10"]


def test_the_operation_is_there_before_a_call():
    """A policy asks for it at the first operation of any library."""
    program = "import torch, htile; htile.rowwise(lambda x: -x); torch.ops.htile.run.default"
    subprocess.run([sys.executable, "-c", program], cwd=REPO, check=True)


def test_the_names_of_graphs_depend_on_all_of_htiles_text():
    assert REPO / "htile" == ops.HTILE


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_checkpoint_runs_the_forward_pass_again(backend):
    def function(x, w):
        return checkpoint(rmsnorm, x, w, use_reentrant=False)

    tensors = rows(5, N), rows(N)
    run = function if backend is None else fullgraph(function, backend=backend)
    assert same(gradients(run, *tensors), gradients(rmsnorm, *tensors))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_the_operations_keep_torchs_rules(with_gradients):
    x, w = rows(8, N), rows(N)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    fullgraph(rmsnorm, backend=keep)(x, w)
    (name,) = (n.args[0] for n in graphs[0].graph.nodes if str(n.target) == "htile.call.default")
    tensors, ops = [t.requires_grad_(with_gradients) for t in (x, w)], torch.ops.htile
    torch.library.opcheck(ops.call.default, (name, tensors, [1e-6]))
    if not with_gradients:
        torch.library.opcheck(ops.run.default, (name, tensors, [1e-6], [8]))
        torch.library.opcheck(ops.run_.default, (name, tensors, [1e-6], [torch.empty(8, N)]))
