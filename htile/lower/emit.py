"""Prints a plan as the source text of one CuTe-DSL kernel over HTile's primitives.

It decides nothing: each step of the plan has a way to be printed, each operation an expression in
`EMIT`. The same plan gives the same text, in every process.
"""

from __future__ import annotations

import itertools
import keyword
import re
import textwrap
from collections.abc import Callable, Iterable
from math import copysign, inf, isnan

import torch

from ..frontend.graph import Graph, Input, Node, Output, Role
from ..frontend.ops import Op, dtype_name
from .plan import (
    ColumnLoop,
    Compute,
    Fetch,
    Form,
    Home,
    Load,
    Online,
    Plan,
    Reduce,
    Reload,
    Step,
    Store,
    has_wide_words,
)

WIDTH = 100  # of a line

CUTLASS_TYPES = {
    torch.float32: "Float32",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.int32: "Int32",
    torch.int64: "Int64",
    torch.bool: "Boolean",
}

# Names of the emitted module and of Python; `pred` is shadowed inside a dynamic `if` by CuTe-DSL.
RESERVED = frozenset(
    {
        *keyword.kwlist,
        *CUTLASS_TYPES.values(),
        *("ElementwiseTileConfig", "ElementwiseKernelContext", "ElementwiseLoader"),
        *("ElementwiseStorer", "GlobalToRegLoader", "_", "float", "config", "ctx", "l", "I", "O"),
        *("as_row_values", "as_rows", "lead", *(f"m{k}" for k in range(64))),
        *("blocks", "chunk", "cuda", "cute", "cutlass", "fake_arguments", "k", "loader", "m"),
        *("make_fake_tensor", "math", "pred", "range", "s", "stream", "tiled_copy"),
    }
)

# Of a reduction that one of the next stage is gathered with: its name, and how it starts.
GATHERED = {
    Online.SOFTMAX: ("pair", "softmax_pair"),
    Online.WELFORD: ("triple", "welford_triple"),
}

Expression = Callable[[Node, tuple[str, ...], Form], str]


def _binary(symbol: str) -> Expression:
    return lambda node, args, form: f"{args[0]} {symbol} {args[1]}"


def _call(name: str) -> Expression:
    return lambda node, args, form: f"math.{name}({', '.join(args)})"


def _by_form(otherwise: Expression, **names: str) -> Expression:
    """The function named for a form, such as `bounded="exp_bounded"`."""

    def expression(node: Node, args: tuple[str, ...], form: Form) -> str:
        name = names.get(form.name.lower())
        return (_call(name) if name else otherwise)(node, args, form)

    return expression


def _fast(name: str) -> Expression:
    def expression(node: Node, args: tuple[str, ...], form: Form) -> str:
        return f"math.{name}({args[0]}{', fastmath=True' if form is Form.FAST else ''})"

    return expression


def _convert(node: Node, args: tuple[str, ...], form: Form) -> str:
    """To another kind of number; a 16-bit dtype is a rounding of a float32."""
    if node.value.stored in (torch.bfloat16, torch.float16) and node.op is Op.CAST:
        return f"math.round_to({args[0]}, {CUTLASS_TYPES[node.value.stored]})"
    return f"math.convert({args[0]}, {CUTLASS_TYPES[node.value.dtype]})"


def _leaf(node: Node, args: tuple[str, ...], form: Form) -> str:
    raise AssertionError(f"{node} is not computed")


# fmt: off
EMIT: dict[Op, Expression] = {
    **dict.fromkeys((Op.INPUT, Op.CONST, Op.RESHAPE), _leaf),
    **dict.fromkeys((Op.SUM, Op.PROD, Op.MAX, Op.MIN, Op.ANY, Op.ALL), _leaf),
    Op.NEG: lambda node, args, form: f"-{args[0]}",
    Op.ADD: _by_form(_binary("+"), fma="fma"),
    Op.SUB: _by_form(_binary("-"), fms="fms", fnma="fnma"),
    Op.MUL: _by_form(_binary("*"), factors="product"),
    Op.DIV: _by_form(
        _call("div"), bounded="div_bounded", number="div_number", share="exp_share"),
    Op.EXP: _by_form(_call("exp"), bounded="exp_bounded"),
    **{op: _fast(op.value) for op in (Op.TANH, Op.LOG, Op.LOG2, Op.LOG10, Op.SIN, Op.COS)},
    **{op: _call(op.value) for op in (
        Op.ABS, Op.SIGN, Op.SQRT, Op.RSQRT, Op.EXP2, Op.EXPM1, Op.LOG1P, Op.SIGMOID, Op.ERF,
        Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC, Op.FLOORDIV, Op.MOD, Op.POW, Op.MAXIMUM, Op.MINIMUM,
        Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE, Op.WHERE)},
    Op.NOT: _call("logical_not"), Op.AND: _call("logical_and"), Op.OR: _call("logical_or"),
    Op.XOR: _call("logical_xor"),
    Op.CAST: _convert, Op.CONVERT: _convert,
}
# fmt: on


def emit(plan: Plan) -> str:
    """The text of the kernel, its host function and the arguments that it is compiled with."""
    return _Printer(plan).module()


def arguments(plan: Plan) -> list[Input | Output]:
    """The parameters of the host function in order, the stream left out."""
    return [*plan.graph.inputs, *plan.graph.outputs]


def kernel_name(plan: Plan) -> str:
    """The name of the host function: the user's function's, made an identifier."""
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in plan.graph.name).strip("_")
    name = name if name and not name[0].isdigit() else f"kernel_{name}"
    return name + "_" if name in RESERVED or name in ("cutlass", "htile") else name


class _Printer:
    """Names every value of one plan and prints its steps."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.graph: Graph = plan.graph
        self.function = kernel_name(plan)
        self.taken = set(RESERVED) | {self.function, f"{self.function}_kernel"}
        self.names: dict[int, str] = {}
        self.forms: dict[int, Form] = {}
        self.counts: dict[str, int] = {}
        for i in self.graph.inputs:
            self.names[i.id] = self._unique(i.name)
        self.tensors = {a: self._tensor_name(a) for a in arguments(plan)}
        rows = [i for i in self.graph.inputs if i.role is Role.ROW]
        self.rows = [s.input for s in plan.steps if isinstance(s, Load) and s.input in rows]
        self.primary = (self.rows or rows)[0]
        self.reduces = [s for s in plan.steps if isinstance(s, Reduce)]
        self.stage = 0
        self.fragments: dict[str, str] = {}
        self.ahead: str | None = None  # the chunks that are on their way for the next loop
        self.in_flight: dict[Input, str] = {}  # fragments that a loop has of a chunk
        self.row_fragments: dict[Input, str] = {}  # names of such fragments
        self.gathered: dict[int, str] = {}  # what has a reduction of the next stage with it
        self.carried: str | None = None  # what an exchange has brought for the next stage
        self.depth = 1  # of indentation

    def module(self) -> str:
        """Docstring, imports, configuration, kernel, host function, arguments."""
        parts = (self._config(), self._kernel(), self._host(), self._fake_arguments())
        text = "\n\n\n".join("\n".join(part) for part in parts)
        return "\n".join(self._docstring() + self._imports(text)) + "\n\n" + text + "\n"

    def _unique(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _tensor_name(self, argument: Input | Output) -> str:
        if isinstance(argument, Input) and argument.role is Role.SCALAR:
            return self.names[argument.id]
        camel = "".join(part[:1].upper() + part[1:] for part in argument.name.split("_"))
        return self._unique(f"m{camel}")

    def _fresh(self, node: Node) -> str:
        """`max0`, `max1`: the operation and a count."""
        return self._numbered(node.op.value)

    def _numbered(self, what: str) -> str:
        while True:
            count = self.counts.get(what, 0)
            self.counts[what] = count + 1
            if (name := f"{what}{count}") not in self.taken:
                self.taken.add(name)
                return name

    def _docstring(self) -> list[str]:
        def show(argument: Input | Output) -> str:
            return f"{argument.name} {dtype_name(argument.dtype)}"

        graph = self.graph
        takes = ", ".join(map(show, graph.inputs))
        gives = ", ".join(map(show, graph.outputs))
        title = f'"""{graph.name}: one row of N = {graph.n}'
        return [f"{title}.", "", *_wrap(f"{takes} -> {gives}", ""), '"""', ""]

    def _imports(self, text: str) -> list[str]:
        types = sorted(t for t in CUTLASS_TYPES.values() if _mentions(text, t))
        verbs = ("ElementwiseLoader", "GlobalToRegLoader", "ElementwiseStorer")
        verbs = [name for name in verbs if f"{name}(" in text]
        dataflow = ["ElementwiseKernelContext", *verbs]
        utils = [u for u in ("as_row_values", "as_rows", "make_fake_tensor") if f"{u}(" in text]
        lines = [
            "import cuda.bindings.driver as cuda",
            *(["import cutlass"] if "cutlass.range" in text else []),
            "import cutlass.cute as cute",
            f"from cutlass import {', '.join(types)}",
            "",
            *(["from htile.compute import math"] if "math." in text else []),
            "from htile.config import ElementwiseTileConfig",
            f"from htile.dataflow import {', '.join(sorted(dataflow))}",
            f"from htile.utils import {', '.join(utils)}",
        ]
        return lines

    def _config(self) -> list[str]:
        num, place = self.plan.numerics, self.plan.placement
        wide = has_wide_words(self.graph, self.reduces)
        args = [
            CUTLASS_TYPES[self.primary.dtype],
            f"N={self.graph.n}",
            f"num_threads={place.num_threads}",
            f"threads_per_row={num.threads_per_row}",
            f"cluster_n={num.cluster_n}",
            f"stage={self.plan.slots}",
            *([f"shares={place.shares}"] if place.shares > 1 else []),
            *([f"abreast={self.plan.abreast}"] if self.plan.abreast > 1 else []),
            *(["reduction_dtype=Int64"] if wide else []),
            *([f"copy_bytes={place.copy_bytes}"] if place.copy_bytes < 16 else []),
        ]
        lines = _wrapped_call("config = ElementwiseTileConfig(", args, ")")
        if place.blocks or num.reload:
            what = "for which registers are spared" if place.blocks else "as the compiler likes"
            lines.append(f"blocks = {place.blocks}  # of an SM, {what}")
        return lines

    def _shared(self) -> bool:
        return self.plan.placement.loader == "shared" and bool(self.rows)

    def _kernel(self) -> list[str]:
        params = [self._parameter(a) for a in arguments(self.plan)]
        params.append("tiled_copy: cute.TiledCopy")
        lines = ["@cute.kernel"]
        lines += _wrapped_call(f"def {self.function}_kernel(", params, "):")
        vec = self.plan.numerics.vec_size
        setup = [self.tensors[self.primary], f"config.tiler_mn({vec})", "tiled_copy"]
        if not self._shared():
            setup.append("shared=False")
        elif len(self.rows) > 1:
            extra = [CUTLASS_TYPES[i.dtype] for i in self.rows[1:]]
            setup.append(f"extra_smem_tensors=({', '.join(extra)},)")
        lines.append("    ctx = ElementwiseKernelContext(config)")
        lines += _wrapped_call("    ctx.setup(", setup, ")")
        dependent = self.plan.target.arch.dependent_launch
        if dependent:
            lines.append("    cute.arch.griddepcontrol_wait()  # the kernel before has ended")
        lines += self._loads()
        if dependent:
            lines.append("    cute.arch.griddepcontrol_launch_dependents()  # the next may start")
        self.started = False
        first = set(itertools.takewhile(lambda step: isinstance(step, Load), self.plan.steps))
        steps = self.plan.prologue + self.plan.steps + self.plan.epilogue
        steps = [step for step in steps if step not in first]
        if self.plan.numerics.reload:
            return lines + self._in_chunks(steps)
        return lines + [line for step in steps for line in self._step(step, "ctx")]

    def _step(self, step: Step, ctx: str) -> list[str]:
        """The lines of one step; `ctx` is the name of the context whose elements it works on."""
        lines = [] if self.started else self._stage_comment()
        self.started = not isinstance(step, Reduce)
        match step:
            case Load(i):
                fragment = self.in_flight.get(i, f"{ctx}.load_column({self.tensors[i]})")
                return lines + self._assign(self.names[i.id], f"{fragment}.load()", i)
            case Reload(inputs, home):
                for i in inputs:
                    fragment = self.in_flight.get(i)
                    if home is Home.SHARED:
                        fragment = f"{ctx}.read_row({self.fragments[i.name]})"
                    lines += self._assign(self.names[i.id], f"{fragment}.load()", i)
                return lines
            case Compute():
                return lines + self._compute(step)
            case Reduce():
                return lines + self._reduce(step)
            case Store(output):
                return lines + self._store(output, ctx)
        raise AssertionError(f"{step} is not printed")

    def _in_chunks(self, steps: list[Step]) -> list[str]:
        """Loops over chunks, and what is done once a row between and after them."""
        lines = []
        between = [k for k, step in enumerate(steps) if isinstance(step, ColumnLoop | Reduce)]
        rest = between[-1] + 1 if between else 0
        for k, step in enumerate(steps[:rest]):
            match step:
                case ColumnLoop():
                    lines += self._loop(step)
                case Fetch():
                    lines += self._start(next(s for s in steps[k:] if isinstance(s, ColumnLoop)))
                case Reduce():
                    lines += self._reduce_gathered(step)
                case Compute():
                    lines += self._step(step, "ctx")
        return lines + [line for step in steps[rest:] for line in self._step(step, "ctx")]

    def _start(self, loop: ColumnLoop) -> list[str]:
        """Start to load what the next loop reads."""
        self.ahead = self._numbered("ahead")
        args = [str(self.plan.placement.ahead), *(self.tensors[i] for i in loop.reads)]
        if loop.backwards:
            args.append("backwards=True")
        if loop.padding and self.plan.is_ragged:
            args.append(f"padding={_literal(loop.padding, torch.float32)}")
        return _wrapped_call(f"    {self.ahead} = ctx.ahead(", args, ")")

    def _reduce_gathered(self, step: Reduce) -> list[str]:
        """The reduction of what a loop has gathered, in this stage or, ahead, in the one before."""
        lines = [] if self.started else self._stage_comment()
        self.started = False
        if step.paired:
            self.names[step.results[1]] = self._fresh(self.graph[step.results[1]])
            results = ", ".join(self.names[id] for id in step.results)
            pair = self.gathered[step.results[0]]
            finite = ", finite=True" if step.finite else ""
            return [*lines, f"    {results} = ctx.reduce_pair({pair}, slot={step.slot}{finite})"]
        if step.carried:
            (result,), (ahead,) = step.results, step.ahead
            self.names[result] = self._fresh(self.graph[result])
            moments = f"{self.carried}.about({self._operand(ahead.about)})"
            return [*lines, f"    {self.names[result]} = {moments}"]
        if self._carries(step):
            (result,) = step.results
            self.carried = self._numbered("moments")
            args = [self.gathered[result], f"slot={step.slot}"]
            head = f"    {self.names[result]}, {self.carried} = ctx.reduce_triple("
            return lines + _wrapped_call(head, args, ")")
        if step.ahead:
            self.names |= {id: self._fresh(self.graph[id]) for id in step.results}
            pairs = ((self.gathered[a.first], self._operand(a.about)) for a in step.ahead)
            found = [f"{name}.about({reference})" for name, reference in pairs]
        else:
            found = [
                f"{self.gathered[id]}.first" if id in self.gathered else self.names[id]
                for id in step.results
            ]
        results = ", ".join(self.names[id] for id in step.results)
        given = f"({', '.join(found)})" if len(found) > 1 else found[0]
        args = [given, f"slot={step.slot}"]
        return lines + _wrapped_call(f"    {results} = ctx.reduce_partials(", args, ")")

    def _carries(self, step: Reduce) -> bool:
        """Whether the exchange of a stage is that of the next one too."""
        return any(
            following.carried and following.ahead[0].first in step.results
            for following in self.reduces
        )

    def _gather(self, loop: ColumnLoop) -> list[str]:
        """The start of everything that a loop gathers."""
        lines = []
        folded = self.plan.folds(loop)
        for id, _, monoid in loop.reduce.gathered:
            node, form = self.graph[id], loop.online(id)
            self.names[id] = self._fresh(node)
            dtype = self.graph[node.inputs[0]].value.dtype
            kind = [] if dtype is torch.float32 else [CUTLASS_TYPES[dtype]]
            args = ", ".join([f"cute.ReductionOp.{monoid.combine}", *kind])
            start = "two_level_sum()" if id in folded else f"partial({args})"
            if form is not None:
                name, start = GATHERED[form]
                in_pairs = form is Online.WELFORD and self.plan.merges_pairs
                start += "(in_pairs=True)" if in_pairs else "()"
                self.gathered[id] = self._numbered(name)
            lines.append(f"    {self._gathered_name(id)} = ctx.{start}")
        return lines

    def _gathered_name(self, id: int) -> str:
        """The name of what a loop gathers for a reduction, with what it gathers ahead."""
        return self.gathered.get(id, self.names[id])

    def _loop(self, loop: ColumnLoop) -> list[str]:
        """What it gathers, and its body."""
        lines = self._stage_comment()
        self.started = True
        if loop.reduce is not None:
            lines += self._gather(loop)
        self._name_fragments(loop)
        if loop.reads and self.ahead is None:
            lines += self._start(loop)
        turns = self.plan.turns
        if turns > 1:
            lines.append(f"    for s in cutlass.range_constexpr({turns}):")
            self.depth += 1
        outer = self.depth
        for headers in self._headers(loop):
            for head, args, tail in headers:
                lines += _wrapped_call(self._indent() + head, args, tail)
                self.depth += tail.endswith(":")
            lines += self._body(loop)
            self.depth = outer
        if turns > 1 and loop.reduce is not None:  # nothing more is taken in this share
            lines += self._folds([id for id, _, _ in loop.reduce.gathered])
        self.depth, self.in_flight, self.ahead = 1, {}, None
        return lines

    def _name_fragments(self, loop: ColumnLoop) -> None:
        """Names for what a loop has of a chunk from global memory."""
        for i in loop.reads:
            if i not in self.row_fragments:
                self.row_fragments[i] = self._unique("tXr" + self.tensors[i][1:])
        self.in_flight = {i: self.row_fragments[i] for i in loop.reads}

    def _headers(self, loop: ColumnLoop) -> list[list[tuple[str, list, str]]]:
        """What is above each of a loop's bodies, of its groups of chunks and of the rest.

        Calls that open a loop or begin its body, as head, arguments and tail.
        """
        plan, place = self.plan, self.plan.placement
        if not loop.reads:
            over = ("for k in cutlass.range_constexpr(", ["ctx.num_chunks"], "):")
            if not plan.is_unrolled:
                unroll = f"unroll={place.unroll}"
                over = ("for k in cutlass.range(", ["ctx.num_chunks", unroll], "):")
            share = ["s"] if plan.turns > 1 else []
            return [[over, ("chunk = ctx.chunk(", ["k", *share], ")")]]
        share = ["share=s"] if plan.turns > 1 else []
        names = ", ".join(["chunk", *self.in_flight.values()])

        def take(first: object, count: int) -> tuple[str, list, str]:
            args = [str(first), str(count), *share]
            return f"for {names} in {self.ahead}.take(", args, "):"

        if plan.is_unrolled:
            return [[take(0, plan.chunks)]]
        step = place.ahead
        most = plan.chunks // step * step - step  # the rest is of static numbers
        over = ("for k in cutlass.range(", ["0", str(most), str(step), "unroll=1"], "):")
        return [[over, take("k", step)], [take(most, plan.chunks - most)]]

    def _body(self, loop: ColumnLoop) -> list[str]:
        """What is done with one chunk."""
        lines, folded = [], self.plan.folds(loop)
        for step in loop.steps:
            lines += self._step(step, "chunk")
        if loop.reduce is not None:
            for id, operand, _ in loop.reduce.gathered:
                name = self._gathered_name(id)
                args = [name, self._reduced(operand)]
                args += ["padded=True"] if loop.padding and self.plan.is_ragged else []
                call = f"{name} = chunk.accumulate({', '.join(args)})"
                lines.append(_located(self._indent() + call, self.graph[id]))
        if folded:
            last = self.plan.folded - 1  # a power of two less one: `&` leaves no branch if unrolled
            lines.append(f"{self._indent()}if chunk.k & {last} == {last}:")
            lines += [f"    {line}" for line in self._folds(folded)]
        return lines

    def _folds(self, results: Iterable[int]) -> list[str]:
        """What is gathered for results in two levels, added up."""
        share = "s" if self.plan.turns > 1 else ""
        names = map(self._gathered_name, results)
        return [f"{self._indent()}{name} = {name}.fold({share})" for name in names]

    def _parameter(self, argument: Input | Output) -> str:
        name = self.tensors[argument]
        if isinstance(argument, Input) and argument.role is Role.SCALAR:
            return f"{name}: Float32"
        return f"{name}: cute.Tensor"

    def _loads(self) -> list[str]:
        """What is loaded before anything is computed; the rows are in flight meanwhile."""
        first = itertools.takewhile(lambda step: isinstance(step, Load), self.plan.steps)
        loads = [step.input for step in first]
        lines = [""] if loads or self.rows else []
        fragments = self.fragments
        chunks = self.plan.numerics.reload
        has_loader = bool(self.rows) and (self._shared() or not chunks)
        if has_loader:
            kind = "ElementwiseLoader" if self._shared() else "GlobalToRegLoader"
            lines.append(f"    loader = {kind}(ctx)")
        for i in loads:
            tensor = self.tensors[i]
            if i.role is Role.ROW and chunks:
                if has_loader:
                    fragments[i.name] = self._unique("s" + tensor[1:])
                    lines.append(f"    {fragments[i.name]} = loader.keep({tensor})")
                continue
            fragments[i.name] = self._unique("tXr" + tensor[1:])
            if i.role is Role.ROW:
                lines.append(f"    {fragments[i.name]} = loader.start({tensor})")
            elif i.role is Role.COLUMN:
                lines.append(f"    {fragments[i.name]} = ctx.load_column({tensor})")
            elif i.role is Role.PER_ROW:
                lines += self._assign(self.names[i.id], f"ctx.load_row_value({tensor})", i)
            else:
                lines += self._assign(self.names[i.id], f"{tensor}[0]", i)
        if has_loader:
            lines.append("    loader.finish()")
        lines = lines if lines != [""] else []
        for i in loads:
            if i.role in (Role.ROW, Role.COLUMN) and not chunks:
                lines += self._assign(self.names[i.id], f"{fragments[i.name]}.load()", i)
        return lines

    def _assign(self, name: str, expression: str, i: Input) -> list[str]:
        start = f"{self._indent()}{name} = "
        if i.dtype is torch.bool:  # Int8 after a view
            return _wrapped_call(f"{start}math.convert(", [expression, "Boolean"], ")")
        if i.dtype.is_floating_point and i.dtype is not torch.float32:
            return _wrapped_call(f"{start}math.convert(", [expression, "Float32"], ")")
        return [start + expression]

    def _indent(self) -> str:
        return " " * 4 * self.depth

    def _stage_comment(self) -> list[str]:
        """A blank line and what the next steps are for."""
        if self.stage < self.plan.stages:
            self.stage += 1
            ops = (self.graph[id].op.value for id in self.reduces[self.stage - 1].results)
            return ["", f"    # stage {self.stage}: {', '.join(ops)}"]
        return ["", "    # output"]

    def _operand(self, id: int) -> str:
        node = self.graph[id]
        if node.op is Op.RESHAPE:
            return self._operand(node.inputs[0])
        if node.op is Op.CONST:
            return _literal(node.arg, node.value.dtype)
        return self.names[id]

    def _compute(self, step: Compute) -> list[str]:
        node = self.graph[step.id]
        if node.op is Op.RESHAPE:
            return []
        args = tuple(map(self._operand, step.inputs))
        expression = EMIT[node.op](node, args, step.form)
        if node.id not in self.names:  # a value that is computed again keeps its name
            self.names[node.id] = self._fresh(node)
        lines = _wrapped_expression(f"{self._indent()}{self.names[node.id]} = ", expression)
        return [*lines[:-1], _located(lines[-1], node)]

    def _reduce(self, step: Reduce) -> list[str]:
        nodes = [self.graph[id] for id in step.made]
        for node in nodes:
            self.names[node.id] = self._fresh(node)
        results = ", ".join(self.names[id] for id in step.made)
        if step.paired:
            x = self._operand(step.operands[0])
            call = f"ctx.online_softmax({x}, slot={step.slot})"
            if step.finite:
                call = f"ctx.online_logsumexp({x}, slot={step.slot})"
            return [_located(f"    {results} = {call}", nodes[0])]
        values = ", ".join(self._reduced(id) for id in step.operands)
        ops = ", ".join(f"cute.ReductionOp.{m.combine}" for m in step.monoids)
        if len(nodes) > 1:
            values, ops = f"({values})", f"({ops})"
        lines = _wrapped_call(
            f"    {results} = ctx.row_reduce(", [values, ops, f"slot={step.slot}"], ")"
        )
        return [*lines[:-1], _located(lines[-1], nodes[0])]

    def _reduced(self, id: int) -> str:
        """An operand of a reduction; a number gets its type, which the reduction asks for."""
        node = self.graph[id]
        text = self._operand(id)
        return f"{CUTLASS_TYPES[node.value.dtype]}({text})" if node.op is Op.CONST else text

    def _store(self, output: Output, ctx: str) -> list[str]:
        value, tensor = self._operand(output.id), self.tensors[output]
        if output.is_row:
            return [f"{self._indent()}ElementwiseStorer({ctx}).store({tensor}, {value})"]
        return [f"{self._indent()}{ctx}.store_row_value({tensor}, {value})"]

    def _host(self) -> list[str]:
        params = [self._parameter(a) for a in arguments(self.plan)] + ["stream: cuda.CUstream"]
        vec = self.plan.numerics.vec_size
        passed = [self.tensors[a] for a in arguments(self.plan)]
        counted = self.tensors[self.graph.outputs[0]]
        collapsed = [line for a in arguments(self.plan) for line in self._collapse(a)]
        rows = f"cute.size({counted}, mode=[0])" if collapsed else f"{counted}.shape[0]"
        blocks = self.plan.placement.blocks or self.plan.numerics.reload
        launch = [
            f"grid=config.grid({rows})",
            "block=config.block",
            "cluster=config.cluster",
            "stream=stream",
            *(["use_pdl=True"] if self.plan.target.arch.dependent_launch else []),
            *(["min_blocks_per_mp=blocks", "preferred_smem_carveout=-1"] if blocks else []),
        ]
        return [
            "@cute.jit",
            *_wrapped_call(f"def {self.function}(", params, "):"),
            f"    tiled_copy = config.make_vector_copy({vec}).tiled_copy_2d()",
            *([f"    lead = {self._lead()}"] if self.plan.target.broadcast else []),
            *collapsed,
            *_wrapped_call(
                f"    {self.function}_kernel(",
                [*passed, "tiled_copy"],
                ").launch(",
            ),
            *_lines_of(launch, " " * 8),
            "    )",
        ]

    def _lead(self) -> str:
        """The rows' leading shape, which every output has."""
        out = self.graph.outputs[0]
        rank = self.plan.target.lead
        return f"{self.tensors[out]}.shape[:{rank}]"

    def _collapse(self, argument: Input | Output) -> list[str]:
        """Lines that make one mode of an argument's leading dimensions, where it is not one."""
        is_row, inner = _row_shape(self.graph, argument)
        if inner is None:
            return []
        own = dict(self.plan.target.broadcast).get(argument.name)
        own = own if isinstance(argument, Input) else None
        if self.plan.target.lead == 1 and own is None and (is_row or not inner):
            return []
        name = self.tensors[argument]
        args = [name] if is_row else [name, str(len(inner))]
        args += [] if own is None else ["lead", _tuple(map(str, own))]
        verb = "as_rows" if is_row else "as_row_values"
        return [f"    {name} = {verb}({', '.join(args)})"]

    def _fake_shape(self, argument: Input | Output, last: tuple[int, ...]) -> list[str]:
        """Sizes and strides of a tensor with leading dimensions, for `make_fake_tensor`."""
        lead = self._sizes()
        own = dict(self.plan.target.broadcast).get(argument.name)
        if own is not None and isinstance(argument, Input):
            lead = [s if has else "1" for s, has in zip(lead, own, strict=True) if has is not None]
        return [*lead, *map(str, last)]

    def _sizes(self) -> list[str]:
        count = self.plan.target.lead
        return ["m"] if count == 1 else [f"m{k}" for k in range(count)]

    def _fake_arguments(self) -> list[str]:
        """What stands for the tensors when the host function is compiled."""
        n = self.graph.n
        args = []
        for a in arguments(self.plan):
            dtype = CUTLASS_TYPES[a.dtype]
            if isinstance(a, Input) and a.role is Role.SCALAR:
                args.append("Float32(0)")
            elif isinstance(a, Input) and a.role is Role.COLUMN:
                args.append(f"make_fake_tensor({dtype}, ({n},), {self._divisibility(a)})")
            elif isinstance(a, Input) and a.role is Role.DEVICE_SCALAR:
                shape = "(1,)" if self.graph[a.id].value.inner else "()"
                args.append(f"make_fake_tensor({dtype}, {shape}, stride={shape})")
            else:
                is_row, inner = _row_shape(self.graph, a)
                shape = self._fake_shape(a, (n,) if is_row else inner)
                last = [str(self._divisibility(a))] if is_row else ["any_stride=True"]
                args.append(f"make_fake_tensor({', '.join([dtype, _tuple(shape), *last])})")
        return [
            "def fake_arguments():",
            '    """What stands for the tensors when the kernel is compiled."""',
            *(f"    {m} = cute.sym_int()" for m in self._sizes()),
            *_wrapped_call("    return (", args, ")" if len(args) > 1 else ",)"),
        ]

    def _divisibility(self, argument: Input | Output) -> int:
        """Elements that a row's or column's pointer and stride are declared a multiple of."""
        return access_bytes(self.plan, argument.dtype) // argument.dtype.itemsize


def _row_shape(graph: Graph, argument: Input | Output) -> tuple[bool, tuple[int, ...] | None]:
    """(is it whole rows, its shape after the leading dimensions; None if it has none)."""
    if isinstance(argument, Output):
        return argument.is_row, argument.inner
    if argument.role not in (Role.ROW, Role.PER_ROW):
        return False, None
    return argument.role is Role.ROW, graph[argument.id].value.inner


def _tuple(parts: Iterable[str]) -> str:
    parts = list(parts)
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def access_bytes(plan: Plan, dtype: torch.dtype) -> int:
    """Bytes that pointers and strides of a row of this dtype must be a multiple of."""
    natural = plan.numerics.vec_size * dtype.itemsize
    return max(min(natural, plan.placement.copy_bytes), dtype.itemsize)


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def _located(line: str, node: Node) -> str:
    """The line with the user's line as a comment, where both fit."""
    comment = f"  # {node.loc.short}" if node.loc else ""
    return line + comment if len(line) + len(comment) <= WIDTH else line


def _literal(number: object, dtype: torch.dtype) -> str:
    """A Python literal of this dtype."""
    if dtype is torch.bool:
        return repr(bool(number))
    if dtype is not torch.float32:
        return f"{CUTLASS_TYPES[dtype]}({int(number)})"
    number = float(number)
    if isnan(number):
        return 'Float32(float("nan"))'
    if number in (inf, -inf):
        return f"{'-' if number < 0 else ''}Float32.inf"
    if number == 0 and copysign(1, number) < 0:
        return "math.negative_zero()"
    return f"({number!r})" if number < 0 else repr(number)


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _wrapped_call(head: str, args: list[str], tail: str) -> list[str]:
    """One line if it fits; else the arguments on a line of their own; else one a line."""
    joined = ", ".join(args)
    if len(head) + len(joined) + len(tail) <= WIDTH:
        return [head + joined + tail]
    indent = " " * (len(head) - len(head.lstrip()))
    return [head, *_lines_of(args, indent + " " * 4), indent + tail]


def _wrapped_expression(head: str, expression: str) -> list[str]:
    """An assignment; a long call with its arguments below, a long operation in parentheses."""
    if len(head) + len(expression) <= WIDTH:
        return [head + expression]
    if expression.startswith("math."):
        name, _, args = expression.removesuffix(")").partition("(")
        return _wrapped_call(f"{head}{name}(", args.split(", "), ")")
    left, operator, right = expression.split(" ")
    indent = " " * (len(head) - len(head.lstrip()))
    return [f"{head}(", f"{indent}    {left}", f"{indent}    {operator} {right}", f"{indent})"]


def _lines_of(args: list[str], indent: str) -> list[str]:
    """Arguments on one line if they fit, else one a line."""
    joined = indent + ", ".join(args)
    return [joined] if len(joined) <= WIDTH else [f"{indent}{arg}," for arg in args]
