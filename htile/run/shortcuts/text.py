"""The text of a shortcut, as far as all shortcuts have it: the tensors, the results, the launch.

A `Writer` writes it for one launch. One call of torch's own `TensorGuards` compares all tensors and
the modes of torch with those of the first call: types, dtypes, devices, N, `requires_grad`,
dispatch keys (negation, transforms, inference). The compiled host function itself checks whatever
else tells launches apart: sizes of rows, strides, alignment. It does not compare the strides of
leading dimensions, which a kernel for rows that are equally far apart takes for granted; so the
shortcut does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd import forward_ad

from ...frontend.dynamic import of_other_bucket
from ...frontend.graph import Output, Role
from ...frontend.roles import Spec
from ...lower.plan import ROWS, rows_like
from ..launch import MAX_ROWS, Launch, Request, copied

# The exceptions by which the host function and the conversion of a tensor refuse. A launch that
# fails counts as refused too: the long way launches again, and raises.
REFUSED = (TypeError, ValueError, RuntimeError, BufferError)
MISS = ["    return None"]  # the line for a call that the shortcut does not take


def allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """The quickest function from sizes, strides and dtype to a tensor of this device.

    On the current GPU that is what Inductor calls, without torch's dispatcher. Where another GPU is
    the current one later, it makes tensors there: see `is_elsewhere`.
    """
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return torch._C._dynamo.guards._empty_strided_cuda

    def empty(sizes, strides, dtype):
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


def is_elsewhere(name: str, device: torch.device, miss: list[str]) -> list[str]:
    """Lines that leave if a result was made on another GPU; none where there is only one GPU."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return []
    return [f"if {name}.get_device() != {device.index}:", *miss]


class NotTold(Exception):
    """Cheap checks do not tell calls like the first one from others."""


class Writer:
    """Writes one shortcut; a subclass says what it takes and returns.

    scope: the values of the names in the text that begin with `_`.
    like: the name of an argument whose shape is that of the rows.
    sizes: the leading sizes of the rows as text: numbers, or names where they may change.
    length: likewise how many elements a row has, if each call may have rows of another length.
    results: the names of the results in the text.
    written: for each tensor of `out=` its result's name, or that of the argument that it is.
    guarded: the arguments and the tensors of `out=` by their names.
    shapes: for each of these the sizes that it must have, and None for sizes that may change.
    changing: for each of these the names of the sizes that may change.

    missed: what the shortcut calls for other sizes, if it is for the sizes of the first call.
    """

    def __init__(self, first: Request, missed: Callable[[], None] | None, launch: Launch):
        self.first, self.launch = first, launch
        self.graph, self.is_fixed = first.specialization.graph, missed is not None
        self.outputs = first.specialization.traced.outputs
        self.tensors = {n: v for n, v in first.given.items() if isinstance(v, torch.Tensor)}
        lead, length = first.call.lead, first.call.length
        self.length = str(length) if self.is_fixed else "_n"
        rows = {s.name: s.inner if length is None else (length,)
                for s in first.call.specs if s.role is Role.ROW}  # fmt: skip
        whole = (name for name in rows if self.tensors[name].shape == (*lead, *rows[name]))
        self.like = next(whole, None)
        if self.like is None:
            raise NotTold
        self.sizes = [str(n) if self.is_fixed else f"_m{k}" for k, n in enumerate(lead)]
        self.miss = ["    _missed()", *MISS] if self.is_fixed else MISS
        self.scope = {"_refused": REFUSED, "_missed": missed, "_type": type, "_len": len,
                      "_float": float}  # fmt: skip
        self.take_launch()
        self.results = self.named_results()
        named = zip(first.in_place, self.results, strict=False)
        self.written = [name or result for name, result in named]
        self.guarded = self.tensors | dict(zip(self.written, first.outs, strict=True))
        like = first.specs | dict(zip(self.written, self.outputs, strict=False))
        self.shapes, self.changing = {}, {}
        for name, tensor in self.guarded.items():
            own, shape = tensor.ndim - len(like[name].inner), tensor.shape
            sizes = {k: self.sizes[k - own] for k in range(own) if shape[k] == lead[k - own]}
            if self._has_length(like[name]):
                sizes[own] = self.length
            free = {} if self.is_fixed else sizes
            self.shapes[name] = [None if k in free else size for k, size in enumerate(shape)]
            self.changing[name] = [*free.values()]

    # What a subclass may say otherwise

    def take_launch(self) -> None:
        """Look at the launch. Raises NotTold where others are to be tried first."""
        if self.launch.kernel is None or not self.launch.is_widest:
            raise NotTold
        self.scope["_kernel"] = self.launch.kernel

    def named_results(self) -> list[str]:
        return [f"_out{k}" for k in range(len(self.outputs))]

    def opened(self) -> list[str]:
        """Lines before the checks."""
        return []

    def guards(self) -> Iterable[str]:
        """What must hold, as text."""
        return self.same_tensors()

    def modes(self) -> Iterator[str]:
        """What must hold of the modes of torch that `TensorGuards` does not see."""
        raise NotImplementedError

    def wrong_results(self, like: list[str]) -> list[str]:
        """What tells that the tensors of `out=` have wrong shapes; rows have the shape `like`."""
        return []

    def memory(self) -> list[str]:
        """Lines that make the results, and the other memory that the kernel needs."""
        lines = []
        for k, (name, output) in enumerate(zip(self.results, self.outputs, strict=True)):
            self.scope[f"_dtype{k}"] = output.dtype
            sizes = [*self.lead_of(output), *self.inner_of(output)]
            strides = [" * ".join(sizes[k + 1 :]) or "1" for k in range(len(sizes))]
            lines.append(f"{name} = _empty({tuple_of(sizes)}, {tuple_of(strides)}, _dtype{k})")
        return lines + self.workspace() + self.is_elsewhere(self.results[0])

    def launched(self) -> list[str]:
        """Lines that launch the kernel, which may refuse the tensors."""
        taken = [f"_copied_{n}" if n in self.first.copied else n for n in self.graph.arguments]
        parts = ["_parts"] if self.launch.workspace else []
        self.scope["_copy"] = copied
        copies = [f"_copied_{n} = _copy({n})" for n in self.graph.arguments
                  if n in self.first.copied]  # fmt: skip
        return [*copies, f"_kernel({', '.join([*taken, *self.results, *parts])})"]

    def returned(self) -> list[str]:
        """Lines that return."""
        raise NotImplementedError

    # What all have

    def lines(self) -> list[str]:
        """The body of the shortcut."""
        return [
            *self.opened(),
            f"if not ({' and '.join(self.guards())}):",
            *self.miss,
            *(self.rows_read() if not self.is_fixed and self.any_changes else []),
            *self.memory(),
            "try:",
            *(f"    {line}" for line in self.launched()),
            "except _refused:",
            *self.miss,
            *self.returned(),
        ]

    def defined(self, parameters: str, globals_: dict[str, object]) -> Callable:
        """The function of these parameters, with the names of `scope` beside the globals."""
        lines, made = self.lines(), {}
        text = [
            f"def _make({', '.join(self.scope)}):",
            f"    def _shortcut{parameters}:",
            *(f"        {line}" for line in lines),
            "    return _shortcut",
        ]
        name = f"<htile shortcut of {self.first.signature.name}>"
        exec(compile("\n".join(text), name, "exec"), globals_, made)
        return made["_make"](**self.scope)

    def _has_length(self, each: Spec | Output) -> bool:
        """Whether a tensor has rows, or what they share, of any length."""
        if self.graph.multiple is None:
            return False
        if isinstance(each, Spec):
            return each.role in (Role.ROW, Role.COLUMN)
        return self.first.specialization.traced[each.id].value.spread

    def lead_of(self, output: Output) -> list[str]:
        """The leading shape of a result, as text."""
        return self.sizes if output.over is None else []

    def inner_of(self, output: Output) -> list[str]:
        """The shape of a result behind the leading dimensions, as text."""
        return [*map(str, self.first.specialization.inner(output, self.length))]

    @property
    def device(self) -> torch.device:
        return self.tensors[self.like].device

    @property
    def any_changes(self) -> bool:
        """Whether rows may be of another number, or of another length."""
        return bool(self.sizes) or self.graph.multiple is not None

    def same_tensors(self) -> Iterator[str]:
        """What must hold of the tensors, of gradients and of transforms."""
        self.scope["_same"] = torch._C._dynamo.guards.TensorGuards(
            *self.guarded.values(),
            dynamic_dims_sizes=[*self.shapes.values()],
            dynamic_dims_strides=[self.strides_of(name) for name in self.guarded],
        ).check
        self.scope |= {"_ad": forward_ad, "_grad": torch.is_grad_enabled,
                       "_watching": torch._C._len_torch_dispatch_stack}  # fmt: skip
        yield f"_same({', '.join(self.guarded)})"
        yield "_ad._current_level < 0"
        yield from self.modes()
        for name, sizes in self.changing.items():
            if len(sizes) < 2 or name in self.first.copied:
                continue
            if self.written or self.guarded[name].is_contiguous():
                yield f"{name}.is_contiguous()"
            if self.first.is_flat and (name in self.written or self.is_read(name)):
                yield self._flat(name)

    def is_read(self, name: str) -> bool:
        """Whether the kernel takes an argument, so that the host function compares its sizes."""
        return name in self.graph.arguments

    def _flat(self, name: str) -> str:
        """The test that a tensor's rows are equally far apart, as text; see `operands.is_flat`.

        Of a contiguous tensor it is enough that the last leading dimension says how far: it may
        have size 1, and then any stride.
        """
        tensor, last = self.guarded[name], len(self.sizes) - 1
        step = f"{name}.stride({last})"
        if tensor.is_contiguous():
            sizes = [f"{name}.shape[{k}]" for k in range(last + 1, tensor.ndim)]
            return f"{step} == {' * '.join(sizes) or '1'}"
        tests, apart = [], f"{step} * {name}.shape[{last}]"
        for k in range(last - 1, -1, -1):
            tests.append(f"({name}.shape[{k}] == 1 or {name}.stride({k}) == {apart})")
            apart += f" * {name}.shape[{k}]"
        return " and ".join(tests)

    def strides_of(self, name: str) -> list[int | None]:
        """The strides that a tensor must have; None where any will do.

        Where results are written, sizes and strides must tell which bytes a tensor spans. So all
        strides count, or a tensor of several sizes that may change must be contiguous. With other
        numbers of rows, a result must not overlap itself, either.
        """
        tensor, shape = self.guarded[name], self.shapes[name]
        if self.is_fixed and len(self.sizes) > 1:  # they tell which rows are equally far apart
            return [*tensor.stride()]
        if not self.written or len(self.changing[name]) > 1:
            if self.written and not tensor.is_contiguous():
                raise NotTold
            return [*[None] * (tensor.ndim - 1), *tensor.stride()[-1:]]
        if name in self.written and self.changing[name]:
            if tensor.stride(shape.index(None)) < self.span(name):
                raise NotTold
        return [None if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True)]

    def span(self, name: str) -> int:
        """How many elements a tensor spans with the sizes that do not change."""
        steps = zip(self.shapes[name], self.guarded[name].stride(), strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps if size is not None)

    def rows_read(self) -> list[str]:
        """Lines that read how many rows there are, and leave if kernel or results have others."""
        joined, may_join = self.launch.joined, self.first.may_join
        fewest, beyond = rows_like(self.first.rows // joined)
        if joined > 1:  # a call of fewer rows, or of more than a kernel counts, is of another kind
            fewest, beyond = max(fewest * joined, ROWS[-1]), min(beyond * joined, MAX_ROWS + 1)
        lines = [f"_shape = {self.like}.shape"]
        lines += [f"{size} = _shape[{k}]" for k, size in enumerate(self.sizes)]
        wrong = [f"not {fewest} <= {' * '.join(self.sizes)} < {beyond}"] if self.sizes else []
        if may_join > joined:  # rows that may be joined have another kernel
            wrong += self._joinable(may_join)
        if self.graph.multiple is not None:
            lines.append("_n = _shape[-1]")
            wrong.append(of_other_bucket("_n", self.first.call, self.first.specialization.traced))
        like = [self.length] if self.graph.multiple is not None else [
            *map(str, self.first.specs[self.like].inner)]  # fmt: skip
        wrong += self.wrong_results(like)
        for name in self.tensors:
            if self.is_read(name):
                continue
            free = (k for k, size in enumerate(self.shapes[name]) if size is None)
            pairs = zip(free, self.changing[name], strict=True)
            wrong += [f"{name}.shape[{k}] != {size}" for k, size in pairs]
        return [*lines, f"if {' or '.join(wrong)}:", *self.miss]

    def _joinable(self, rows: int) -> list[str]:
        """The test that so many rows may be one, which those of the first call may not, as text.

        Arguments that repeat are told by their sizes.
        """
        first = self.first
        if first.call.lead[-1] % rows:
            return [f"{self.sizes[-1]} % {rows} == 0"]
        scattered = {*map(id, first.scattered)}
        apart = [name for name, tensor in self.guarded.items() if id(tensor) in scattered]
        return [] if first.repeats or not apart else [f"{apart[0]}.is_contiguous()"]

    def workspace(self) -> list[str]:
        """The line that makes memory for parts of results over all rows, if there are any.

        The memory is of the current stream, as a launch makes it, so a CUDA graph has it for each
        replay.
        """
        self.allocate()
        if not self.launch.workspace:
            return []
        self.scope["_bytes"] = torch.int8
        return [f"_parts = _empty(({self.launch.workspace},), (1,), _bytes)"]

    def allocate(self) -> None:
        """Have the function in the scope that makes memory."""
        self.scope["_empty"] = allocator(self.device)

    def is_elsewhere(self, name: str) -> list[str]:
        return is_elsewhere(name, self.device, self.miss)


def tuple_of(texts: Iterable[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"
