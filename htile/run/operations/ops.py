"""`htile::run`, the operation that a graph of rows is where torch makes graphs of programs.

torch does not look inside. It asks only for the shapes, dtypes and strides of the results, which
follow from the traced graph: no kernel is compiled for them.

A graph has a name: the function's, with a digest of what the graph computes and of HTile's own
text, and so the same in each process. That is how the caches of torch know a function from its
former self. The name of a backward graph says how it comes of the forward graph, so that a process
whose graph comes from such a cache finds it too.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.library import Library, register_fake

from ...errors import GradientError, UnsupportedError
from ...frontend.graph import Graph, Role
from ...frontend.ops import Op
from ...frontend.roles import Spec
from ..operands import refuse_tangent, wants_gradients
from ..over_rows import refuse_no_maximum
from ..shortcuts.operations import OperationWriter
from ..shortcuts.shortcut import add_after

if TYPE_CHECKING:
    from ...frontend.captures import Captures
    from ..products.operations import ProductRunner
    from ..runner import Operation, Runner

HTILE = Path(__file__).parents[2]
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
LIBRARY = Library("htile", "DEF")
for _name in ("run", "infer"):
    _schema = "(str graph, Tensor[] tensors, float[] numbers, SymInt[] lead) -> Tensor[]"
    LIBRARY.define(_name + _schema, tags=TAGS)
RUN, INFER = torch.ops.htile.run.default, torch.ops.htile.infer.default
KEPT = "="  # ends the name of the graph of an exported program


@dataclass(eq=False)
class Named:
    """A graph that has a name.

    check: raises where the graph is no longer what the user's function computes.
    part: the runner of a graph that comes of a runner's graph, by the rest of its name.
    captures: what `check` looks at.
    shortcuts: for repeated calls; see shortcuts/operations.py.
    """

    runner: Operation
    check: Callable[[], None] | None = None
    part: Callable[[Operation, str], Operation] | None = None
    captures: Captures | None = None
    shortcuts: tuple[Callable, ...] = ()
    tries: int = 0  # to add some


NAMED: dict[str, Named] = {}  # all that torch's graphs have called


def content_name(runner: Runner | ProductRunner) -> str:
    """The name and a digest of what a runner computes, without the lines of the user's file."""
    graph = runner.graph
    parts = (
        _contents(graph),
        [repr(each) for each in (*graph.inputs, *graph.outputs)],
        (graph.n, graph.multiple, graph.least),
        [(spec.name, spec.role.value, str(spec.dtype), spec.inner) for spec in runner.specs],
        (runner.fastmath, sorted((name, repr(value)) for name, value in runner.wanted.items())),
        _own_text(),
    )
    return f"{graph.name}/{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]}"


def _contents(graph: Graph | None) -> list[tuple]:
    """The nodes of a graph; of a result whose backward pass the user has written, also that."""
    if graph is None:
        return []
    found = [(node.op.name, node.inputs, repr(node.value)) for node in graph]
    for k, node in enumerate(graph):
        if node.op is not Op.CUSTOM:
            found[k] += (repr(node.arg),)
            continue
        call, values = node.arg.call, [graph[i].value for i in node.inputs[1:]]
        back = call.graph(values, range(len(call.results)), graph)
        names = [] if back is None else [(out.name, out.id) for out in back.outputs]
        found[k] += (node.arg.result, names, _contents(back))
    return found


@functools.cache
def _own_text() -> str:
    """A digest of the text of HTile, whose next version may give the same graph other shapes."""
    digest = hashlib.sha256()
    for path in sorted(HTILE.rglob("*.py")):
        digest.update(path.relative_to(HTILE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def run_in_graph(
    runner: Operation, values: tuple, lead: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """The results of a runner as those of an operation, which torch's modes see.

    Of an exported program that is decomposed it is `htile::infer`, which refuses gradients: whoever
    has the program may ask for them, and the graph has no backward part.
    """
    operation = INFER if KEPT in runner.name and "|" not in runner.name else RUN
    NAMED.setdefault(runner.name, Named(runner))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return tuple(operation(runner.name, tensors, _numbers(runner.specs, values), lead))


def _numbers(specs: Sequence[Spec], values: Sequence) -> list[float]:
    """Those of the arguments that are numbers."""
    both = zip(specs, values, strict=True)
    return [float(value) for spec, value in both if spec.role is Role.SCALAR]


def values_of(specs: Sequence[Spec], tensors: list[torch.Tensor], numbers: list[float]) -> tuple:
    """One value for each parameter."""
    tensors, numbers, values = iter(tensors), iter(numbers), []
    for spec in specs:
        is_static, is_number = spec.role is Role.STATIC, spec.role is Role.SCALAR
        values.append(spec.value if is_static else next(numbers if is_number else tensors))
    return tuple(values)


def runner_named(name: str) -> Operation:
    """The runner of this name, which may be a part of one that this process knows."""
    known = NAMED.get(name)
    if known is None:
        whole, is_part, part = name.rpartition("|")
        root = NAMED.get(name.partition("|")[0])
        if not is_part or root is None or root.part is None:
            raise UnsupportedError(
                f"the graph {name} is not known to this process; import the module that defines "
                f"{name.partition('/')[0]}, and trace or export the program again"
            )
        known = NAMED.setdefault(name, Named(root.part(runner_named(whole), part)))
    return known.runner


def check(name: str, lead: tuple[int, ...]) -> None:
    """Raise for a forward graph that is not what its function computes, and for no maximum."""
    root = _checked(name)
    if root is not None:
        root.check()
        refuse_no_maximum(root.runner.graph, lead)


def _checked(name: str) -> Named | None:
    """The root of a forward graph, if it may cease to be what its function computes."""
    whole, *parts = name.split("|")
    root = NAMED.get(whole)
    is_backward = any(";" in part and not part.endswith(";") for part in parts)
    return None if root is None or root.check is None or is_backward else root


def _refuse_gradients(runner: Operation, tensors: list[torch.Tensor]) -> None:
    if wants_gradients(tuple(tensors)):
        raise GradientError(
            f"{runner.graph.name}: this program was decomposed for inference, so its results have "
            "no gradients; run it under torch.no_grad()"
        )


def _run(
    graph: str, tensors: list[torch.Tensor], numbers: list[float], lead: list[int]
) -> list[torch.Tensor]:
    known = NAMED.get(graph)
    for shortcut in known.shortcuts if known is not None else ():
        found = shortcut(tensors, numbers, lead)
        if found is not None:
            return found
    runner, lead = runner_named(graph), tuple(lead)
    _refuse_gradients(runner, tensors)
    check(graph, lead)
    values = values_of(runner.specs, tensors, numbers)
    results = [*runner.computed(values, lead, tensors[0].device)]
    if hasattr(runner, "launch_of"):  # it has one graph
        known, root = NAMED[graph], _checked(graph)
        captures = None if root is None else root.captures
        add_after(known, OperationWriter, runner, values, lead, captures)
    return results


def _run_fake(
    graph: str, tensors: list[torch.Tensor], numbers: list[float], lead: list[int]
) -> list[torch.Tensor]:
    made, device = runner_named(graph).made(tensors, tuple(lead)), tensors[0].device
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in made]


def _infer(
    graph: str, tensors: list[torch.Tensor], numbers: list[float], lead: list[int]
) -> list[torch.Tensor]:
    """What autograd and the transforms of torch.func call; `_run` does not see what these track."""
    runner = runner_named(graph)
    for tensor in tensors:
        refuse_tangent(runner.graph.name, "an argument", tensor)
    _refuse_gradients(runner, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return INFER(graph, tensors, numbers, lead)


for _name in ("run", "infer"):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    register_fake(f"htile::{_name}", _run_fake, lib=LIBRARY)
LIBRARY.impl("infer", _infer, "Autograd")
