"""What `inspect` returns: everything about one kernel, as values, as files, as a page to read."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..build.arch import DEFAULT
from ..build.compile import Artifact, build, build_ahead
from ..build.cubin import Resources
from ..errors import ArgumentError, CompileError, GradientError, UnsupportedError
from ..frontend.graph import Graph
from ..lower import Lowered
from ..lower.choice.cost import Cost, cost
from ..lower.emission.names import value_names
from ..lower.plan import Plan
from ..pictures import drawable, graph_dot, graph_json, graph_svg, plan_svg

if TYPE_CHECKING:
    from .differentiation.training import Training

COSTED_ROWS = 1 << 16  # The cost is for so many rows if no number is given; they fill any GPU.


class Kernel:
    """One specialization of a row-wise function, for one architecture.

    `traced` and `graph` (before and after the passes), `plan` and `source` are there at once.
    `artifact`, `ptx`, `cubin` and `resources` compile the kernel at first use, and raise
    CompileError where CuTe-DSL is not installed; `artifact.seconds` is None where the disk cache
    had it. From then on `plan` and `source` show what was compiled, which may be for fewer thread
    blocks than planned, where registers would have been spilled. No GPU is needed.

    copied: the parameters whose rows' elements are apart in memory, so that each call makes their
        tensors contiguous first.
    train: gives the kernels of a call whose results are differentiated.
    """

    def __init__(
        self, lowered: Lowered, arch: str, copied: frozenset[str] = frozenset(),
        train: Callable[[], Training] | None = None,
    ):  # fmt: skip
        self.lowered = lowered
        self.arch = arch
        self.copied = copied
        self._train = train

    @property
    def name(self) -> str:
        """The function's name."""
        return self.lowered.graph.name

    @property
    def traced(self) -> Graph:
        """The graph as traced, before any pass."""
        return self.lowered.traced

    @property
    def graph(self) -> Graph:
        """The graph that the kernel computes."""
        return self.lowered.graph

    @property
    def plan(self) -> Plan:
        """The stages, and how the row is laid over threads."""
        plan, compiled = self.lowered.plan, self.__dict__.get("artifact")
        if compiled is None or compiled.blocks == plan.placement.blocks:
            return plan
        return replace(plan, placement=replace(plan.placement, blocks=compiled.blocks))

    @cached_property
    def training(self) -> Training:
        """The forward and the backward kernel of such a call that is differentiated, and `saved`.

        Tensors that require grad have gradients, or all floating ones if none does. Cotangents are
        contiguous. Raises GradientError for what has no gradient.
        """
        if self._train is None:
            raise GradientError(
                f"{self.name}: the gradients of a backward kernel are found when they are asked "
                "for, by torch.autograd.grad(..., create_graph=True)"
            )
        return self._train()

    @property
    def backward(self) -> Kernel:
        """The kernel that computes the gradients."""
        return self.training.backward

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of what the forward pass keeps for the backward kernel."""
        return self.training.saved

    @property
    def source(self) -> str:
        """The emitted CuTe-DSL module."""
        compiled = self.__dict__.get("artifact")
        return self.lowered.source if compiled is None else compiled.source

    @cached_property
    def artifact(self) -> Artifact:
        """The compiled kernel; HTILE_DUMP names a folder that all of it is saved in."""
        artifact = build(self.lowered.source, self.lowered.function, self.arch)
        if folder := os.environ.get("HTILE_DUMP"):
            self.__dict__["artifact"] = artifact  # `save` asks for it
            try:
                self.save(folder)
            except OSError as error:
                del self.__dict__["artifact"]
                raise ArgumentError(
                    f"HTILE_DUMP={folder!r}: {error.filename or folder} can not be written "
                    f"({error.strerror or error}), so {self.name} can not be saved there; name a "
                    "folder that can be written, or unset HTILE_DUMP"
                ) from None
        return artifact

    def build_ahead(self) -> None:
        """Compile the kernel, and keep it in the disk cache for other processes."""
        build_ahead(self.lowered.source, self.lowered.function, self.arch)
        if os.environ.get("HTILE_DUMP"):
            _ = self.artifact  # which is saved there

    @property
    def ptx(self) -> str:
        """The kernel's PTX."""
        return self.artifact.ptx

    @property
    def cubin(self) -> bytes:
        """The kernel's machine code, for `nvdisasm` or `cuobjdump`."""
        return self.artifact.cubin

    @property
    def resources(self) -> Resources:
        """Registers, stack and shared memory."""
        return self.artifact.resources

    @property
    def plan_text(self) -> str:
        """The plan as text, with what is copied before each launch."""
        copies = [
            f"\n  copied     {name} is made contiguous by each call: the elements of its rows are "
            "apart in memory"
            for name in sorted(self.copied)
        ]
        return f"{self.plan}{''.join(copies)}"

    def cost(self, rows: int = COSTED_ROWS) -> Cost:
        """The expected time for so many rows on an H200, and what bounds it.

        It is computed from the plan, and off by a tenth in the mean. `print` it, or read its parts.
        Raises UnsupportedError for kernels of other architectures.
        """
        if self.arch != DEFAULT.name:
            raise UnsupportedError(
                f"{self.name}: the cost of a kernel for {self.arch} is not known, only that of one "
                f'for {DEFAULT.name}; inspect it with arch="{DEFAULT.name}", or time it on its GPU'
            )
        if rows < 1:
            raise ArgumentError(f"{self.name}: cost({rows!r}); expected a number of rows above 0")
        return cost(self.plan, max(1, rows // self.plan.target.joined))

    @property
    def cost_text(self) -> str:
        """The cost for many rows as text; it is known of one architecture."""
        if self.arch != DEFAULT.name:
            return f"not known for {self.arch}"
        return f"{self.cost()}, for {COSTED_ROWS} rows on an H200"

    @property
    def _names(self) -> dict[int, str]:
        return value_names(self.plan)

    def graph_dot(self) -> str:
        """The graph as DOT text, a cluster for each stage."""
        return graph_dot(self.graph, self._names)

    def graph_json(self) -> str:
        """The graph as JSON: `networkx.node_link_graph(json.loads(text), edges="edges")`."""
        return graph_json(self.graph, self._names)

    def graph_svg(self) -> str:
        """The graph as a picture. Raises UnsupportedError without matplotlib."""
        return graph_svg(self.graph, self._names)

    def plan_svg(self) -> str:
        """A row's way through memory as a picture. Raises UnsupportedError without matplotlib."""
        return plan_svg(self.plan)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write all of it under `folder/NAME-ARCH-DIGEST`, one file each; returns that folder.

        There are SVG pictures too if matplotlib is installed. It compiles the kernel.
        """
        text = f"{self.arch}\n{self.lowered.source}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        path = Path(folder) / f"{self.name}-{self.arch}-{digest}"
        path.mkdir(parents=True, exist_ok=True)
        resources = self.resources  # once it is compiled, plan and source are those that run
        texts = {
            "graph-traced.txt": str(self.traced),
            "graph.txt": str(self.graph),
            "graph.dot": self.graph_dot(),
            "graph.json": self.graph_json(),
            "plan.txt": self.plan_text,
            "kernel.py": self.source,
            "kernel.ptx": self.ptx,
            "resources.json": json.dumps(asdict(resources), indent=1),
        }
        if drawable():
            texts |= {"graph.svg": self.graph_svg(), "plan.svg": self.plan_svg()}
        for name, text in texts.items():
            (path / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        (path / "kernel.cubin").write_bytes(self.cubin)
        return path

    def __str__(self) -> str:
        """Graph, plan, source and resources on one page; it compiles the kernel."""
        try:
            used = str(self.resources)
        except CompileError as error:
            used = f"not compiled: {error.message}"
        parts = {
            "graph": str(self.graph),
            "plan": self.plan_text,
            "source": self.source,
            f"resources, {self.arch}": used,
            "cost": self.cost_text,
        }
        return "\n\n".join(f"== {title} ==\n{text.rstrip()}" for title, text in parts.items())

    def _repr_html_(self) -> str:
        """For notebooks: both pictures, or text where matplotlib is missing, and the source."""
        parts = [_shown(str(self.graph), self.graph_svg), _shown(self.plan_text, self.plan_svg)]
        parts.append(_shown(self.source))
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"<htile kernel {self.name}, N {self.graph.length_text}, {self.arch}>"


def _shown(text: str, draw: Callable[[], str] | None = None) -> str:
    """A picture as HTML, or the text. It is an image, since the styles of inline SVG would leak."""
    import html  # few processes need it

    if draw is None or not drawable():
        return f"<pre>{html.escape(text)}</pre>"
    data = base64.b64encode(draw().encode()).decode()
    title = html.escape(text.partition("\n")[0])
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
