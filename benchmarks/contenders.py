"""Who takes part: from a kernel and its tensors to a function of no arguments that computes it.

A contender that is not installed, or has no such kernel, raises `Absent` with the reason, which
the tables show.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from benchmarks.kernels import Kernel, labels
from htile import HTileError
from htile.build.compile import load
from htile.frontend.graph import Graph

NAMES = (
    *("htile", "bare", "empty_like", "handwritten", "quack", "liger", "compile", "autotune"),
    *("eager", "limit"),
)
PARTS = ("bare", "empty_like")  # of a call: they compute no result that could be checked
WHAT = {
    "htile": "the emitted kernel",
    "bare": "the compiled function alone, called with results allocated before",
    "empty_like": "torch.empty_like alone, once a result",
    "handwritten": "the same by hand over HTile's primitives (examples/handwritten_*.py)",
    "quack": "quack-kernels",
    "liger": "liger-kernel",
    "compile": "torch.compile",
    "autotune": "torch.compile, mode max-autotune-no-cudagraphs",
    "eager": "torch",
    "limit": "a kernel that moves the same bytes in as many reads and writes",
}


class Absent(Exception):
    """The contender cannot take part, and why."""


def failures() -> tuple[type[Exception], ...]:
    """What a contender raises where it cannot do a cell; all else is a defect of the benchmark."""
    kinds = [Absent, HTileError, RuntimeError, ValueError, TypeError, AssertionError, KeyError]
    kinds += [AttributeError, NotImplementedError, IndexError, ImportError]
    try:
        from triton.errors import TritonError

        kinds.append(TritonError)
    except ImportError:
        pass
    try:
        from cutlass.base_dsl.common import DSLBaseError

        kinds.append(DSLBaseError)
    except ImportError:
        pass
    return tuple(kinds)


def build(name: str, kernel: Kernel, args: tuple) -> Callable[[], object]:
    """`name`'s function for these tensors. Raises Absent, or what the contender's package does."""
    try:
        return _BUILD[name](kernel, args)
    except ImportError as error:
        raise Absent(f"not installed ({error})") from error


def _htile(kernel, args):
    function = kernel.function
    return lambda: function(*args)


def _bare(kernel, args):
    compiled = kernel.function.inspect(*args)
    return functools.partial(
        load(compiled.artifact), *inputs(kernel, compiled.graph, args), *_results(kernel, args)
    )


def inputs(kernel: Kernel, graph: Graph, args: tuple) -> list:
    """What the compiled function of `graph` takes before its results."""
    call = inspect.signature(kernel.function).bind(*args)
    call.apply_defaults()
    return [call.arguments[i.name] for i in graph.inputs]


def _empty_like(kernel, args):
    results = _results(kernel, args)
    if len(results) == 1:
        return functools.partial(torch.empty_like, results[0])
    return lambda: [torch.empty_like(result) for result in results]


def _results(kernel, args):
    return pytree.tree_leaves(kernel.function(*args))


def _eager(kernel, args):
    function = kernel.eager
    return lambda: function(*args)


def _compiled(mode):
    def make(kernel, args):
        function = torch.compile(kernel.eager, dynamic=False, mode=mode)
        with _no_loops_over_rows():
            function(*args)
        return lambda: function(*args)

    return make


@contextlib.contextmanager
def _no_loops_over_rows():
    """Have `torch.vmap` raise RuntimeError for an operation that it would call once a row."""
    switch = torch._C._functorch._set_vmap_fallback_enabled
    before = torch._C._functorch._is_vmap_fallback_enabled()
    switch(False)
    try:
        yield
    finally:
        switch(before)


def _handwritten(kernel, args):
    from examples.handwritten_rmsnorm import layernorm_fwd, rmsnorm_fwd
    from examples.handwritten_softmax import softmax_fwd

    joined = functools.partial(rmsnorm_fwd, return_residual=True)
    table = {
        "softmax": softmax_fwd,
        "rmsnorm": rmsnorm_fwd,
        "rmsnorm_residual": lambda x, w, r: joined(x, w, None, r),
        "layernorm": layernorm_fwd,
        "layernorm_fp32_columns": layernorm_fwd,
    }
    return _of("examples/", table, kernel, args)


def _quack(kernel, args):
    from quack.cross_entropy import cross_entropy_fwd
    from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd
    from quack.softmax import softmax_bwd, softmax_fwd

    def norm(x, weight, bias):  # it takes float32 columns only
        wide = weight.float(), bias.float()
        return lambda: layernorm_fwd(x, *wide, eps=1e-5)

    def loss(x, target_logit):
        target = labels(*x.shape, x.device)
        return lambda: cross_entropy_fwd(x, target, target_logit, return_lse=True)

    if kernel.name in ("layernorm", "layernorm_fp32_columns"):
        return norm(*args)
    if kernel.name == "cross_entropy":
        return loss(*args)
    table = {
        "softmax": softmax_fwd,
        "rmsnorm": lambda x, w: rmsnorm_fwd(x, w, eps=1e-6)[0],
        "rmsnorm_residual": lambda x, w, r: rmsnorm_fwd(x, w, residual=r, eps=1e-6)[:2],
        "softmax_backward": softmax_bwd,
    }
    return _of("quack", table, kernel, args)


def _liger(kernel, args):
    from liger_kernel import ops
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    if kernel.name == "cross_entropy":
        raise Absent("its loss returns no logsumexp, and waits for the GPU twice a call")
    if kernel.name == "softmax_backward":
        settings = calculate_settings(args[0].shape[1])
        return lambda: _softmax_backward(*args, *settings, False)
    joined = ops.LigerFusedAddRMSNormFunction.apply
    table = {
        "softmax": ops.LigerSoftmaxFunction.apply,
        "rmsnorm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "rmsnorm_residual": lambda x, w, r: joined(x, r, w, 1e-6, 0.0, "llama", False),
        "layernorm": lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "swiglu": ops.LigerSiLUMulFunction.apply,
    }
    return _of("liger", table, kernel, args)


def _of(package: str, table: dict, kernel: Kernel, args: tuple) -> Callable[[], object]:
    if kernel.name not in table:
        raise Absent(f"{package} has no such kernel")
    function = table[kernel.name]
    return lambda: function(*args)


_BUILD = {
    "htile": _htile,
    "bare": _bare,
    "empty_like": _empty_like,
    "handwritten": _handwritten,
    "quack": _quack,
    "liger": _liger,
    "compile": _compiled(None),
    "autotune": _compiled("max-autotune-no-cudagraphs"),
    "eager": _eager,
}
