"""What `inspect` returns: everything about one kernel, as values, as files, as a page to read."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from ..build.compile import Artifact, build
from ..build.cubin import Resources
from ..errors import CompileError
from ..frontend.graph import Graph
from ..lower import Lowered
from ..lower.plan import Plan
from ..pictures import drawable, graph_dot, graph_json, graph_svg, plan_svg


class Kernel:
    """One specialization of a row-wise function, for one architecture.

    `traced` and `graph` (before and after the passes), `plan` and `source` are there at once;
    `ptx`, `cubin` and `resources` compile the kernel at first use and raise CompileError where
    CuTe-DSL is not installed. No GPU is needed for any of them.
    """

    def __init__(self, lowered: Lowered, arch: str, copied: frozenset[str] = frozenset()):
        self.lowered = lowered
        self.arch = arch
        self.copied = copied

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
        return self.lowered.plan

    @property
    def source(self) -> str:
        """The emitted CuTe-DSL module."""
        return self.lowered.source

    @cached_property
    def artifact(self) -> Artifact:
        """The compiled kernel; HTILE_DUMP names a folder that all of it is saved in."""
        artifact = build(self.source, self.lowered.function, self.arch)
        if folder := os.environ.get("HTILE_DUMP"):
            self.__dict__["artifact"] = artifact  # what `save` asks for
            self.save(folder)
        return artifact

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

    def graph_dot(self) -> str:
        """The graph as DOT text, a cluster for each stage."""
        return graph_dot(self.graph)

    def graph_json(self) -> str:
        """The graph as JSON: `networkx.node_link_graph(json.loads(text), edges="edges")`."""
        return graph_json(self.graph)

    def graph_svg(self) -> str:
        """The graph as a picture. Raises UnsupportedError without matplotlib."""
        return graph_svg(self.graph)

    def plan_svg(self) -> str:
        """A row's way through memory as a picture. Raises UnsupportedError without matplotlib."""
        return plan_svg(self.plan)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write all of it under `folder/NAME-ARCH-DIGEST`, one file each; returns that folder.

        The SVG pictures are among it if matplotlib is installed.
        """
        digest = hashlib.sha256(f"{self.arch}\n{self.source}".encode()).hexdigest()[:12]
        path = Path(folder) / f"{self.name}-{self.arch}-{digest}"
        path.mkdir(parents=True, exist_ok=True)
        texts = {
            "graph-traced.txt": str(self.traced),
            "graph.txt": str(self.graph),
            "graph.dot": self.graph_dot(),
            "graph.json": self.graph_json(),
            "plan.txt": str(self.plan),
            "kernel.py": self.source,
            "kernel.ptx": self.ptx,
            "resources.json": json.dumps(asdict(self.resources), indent=1),
        }
        if drawable():
            texts |= {"graph.svg": self.graph_svg(), "plan.svg": self.plan_svg()}
        for name, text in texts.items():
            (path / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        (path / "kernel.cubin").write_bytes(self.cubin)
        return path

    def __str__(self) -> str:
        """Graph, plan, source and resources on one page."""
        try:
            used = str(self.resources)
        except CompileError as error:
            used = f"not compiled: {error.message}"
        parts = {
            "graph": str(self.graph),
            "plan": str(self.plan),
            "source": self.source,
            f"resources, {self.arch}": used,
        }
        return "\n\n".join(f"== {title} ==\n{text.rstrip()}" for title, text in parts.items())

    def _repr_html_(self) -> str:
        """Both pictures, as text where matplotlib is missing, and the source: for notebooks."""
        parts = [_shown(str(self.graph), graph_svg, self.graph)]
        parts += [_shown(str(self.plan), plan_svg, self.plan), _shown(self.source)]
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"<htile kernel {self.name}, N = {self.graph.n}, {self.arch}>"


def _shown(text: str, draw: Callable[[object], str] | None = None, what: object = None) -> str:
    """A picture as HTML, or the text; an image of its own, since SVG's styles would leak."""
    import html  # which few processes need

    if draw is None or not drawable():
        return f"<pre>{html.escape(text)}</pre>"
    data = base64.b64encode(draw(what).encode()).decode()
    title = html.escape(text.partition("\n")[0])
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
