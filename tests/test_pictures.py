"""Pictures of graphs and plans: what they show, that nothing overlaps, the same bytes again."""

import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import networkx as nx
import pytest
import torch

import htile
from htile.frontend.graph import Role
from htile.frontend.ops import REDUCTIONS, Op, dtype_name
from htile.lower.reductions import Reduce, assign_stages
from htile.lower.steps import Home
from htile.pictures import graph_dot, graph_json, graph_svg, plan_svg
from htile.pictures.flow import arrange
from htile.pictures.memory import kept, segments_of
from htile.pictures.model import Kind, picture_of, shorten, text_width
from tests.lower.cases import BF16, EXAMPLES, example_kernel, kernel_of, random_graph, rows

REPO = Path(__file__).parents[1]


def chain(x):
    for i in range(120):
        x = torch.sin(x) * 1.01 if i % 2 else x + 0.5
    return x


def fan(x):
    total = x
    for i in range(48):
        total = total + torch.tanh(x * (i + 0.5)).sum()
    return torch.softmax(total, -1)


GRAPHS = {
    **{name: lambda name=name: example_kernel(name, 1000).graph for name in EXAMPLES},
    "traced": lambda: example_kernel("layernorm", 1000).traced,
    "chain": lambda: kernel_of(chain, *rows((4, 64))).graph,
    "fan": lambda: kernel_of(fan, *rows((4, 64))).graph,
    "60": lambda: random_graph(5, 50),
    "200": lambda: random_graph(3, 190),
}


@pytest.fixture(params=GRAPHS, scope="module")
def graph(request):
    return GRAPHS[request.param]()


def test_the_graphs_have_10_60_and_200_nodes():
    assert len(GRAPHS["softmax"]()) < 10 < len(GRAPHS["capped_softmax"]()) < 20
    assert 50 <= len(GRAPHS["60"]()) <= 70
    assert min(len(GRAPHS[name]()) for name in ("chain", "fan", "200")) >= 180


# ---- what a picture has ------------------------------------------------------------------------


def test_every_node_is_there_once_and_constants_are_written_in(graph):
    picture = picture_of(graph)
    keys = [box.key for box in picture.boxes]
    assert len(set(keys)) == len(keys)
    shown = [int(key[1:]) for key in keys if key.startswith("n")]
    assert shown == [node.id for node in graph if node.op is not Op.CONST]
    assert keys[len(shown) :] == [f"out{k}" for k in range(len(graph.outputs))]
    for box in picture.boxes:
        if box.key.startswith("n"):
            node = graph[int(box.key[1:])]
            for operand in graph.operands(node):
                named = str(operand.arg) if operand.op is Op.CONST else f"%{operand.id}"
                assert named in box.title


def test_lanes_are_stages_and_edges_never_go_back(graph):
    picture, stage = picture_of(graph), assign_stages(graph)
    lanes = {box.key: box.lane for box in picture.boxes}
    for key, lane in lanes.items():
        assert lane == (stage[int(key[1:])] if key[0] == "n" else max(stage.values()) + 1)
    wanted = {(f"n{out.id}", f"out{k}") for k, out in enumerate(graph.outputs)}
    for node in graph:
        wanted |= {(f"n{i}", f"n{node.id}") for i in node.inputs if f"n{i}" in lanes}
    assert set(picture.edges) == wanted and len(picture.edges) == len(wanted)
    assert all(lanes[a] <= lanes[b] for a, b in picture.edges)


def test_boxes_say_what_and_where():
    boxes = picture_of(example_kernel("softmax", 64).graph).boxes
    assert [(b.title, b.value, b.kind) for b in boxes] == [
        ("%0 = x", "row bf16 as f32[64]", Kind.ROW),
        ("%1 = max %0", "row f32[]", Kind.REDUCTION),
        ("%2 = sub %0, %1", "row f32[64]", Kind.ELEMENTWISE),
        ("%3 = exp %2", "row f32[64]", Kind.ELEMENTWISE),
        ("%4 = sum %3", "row f32[]", Kind.REDUCTION),
        ("%5 = div %3, %4", "row f32[64]", Kind.ELEMENTWISE),
        ("out = %5", "row bf16[64]", Kind.OUTPUT),
    ]
    assert boxes[3].source == "e = torch.exp(x - x.max())"
    assert re.fullmatch(r"softmax\.py:\d+", boxes[3].where)


def test_every_role_has_its_kind():
    def f(x, w, t: htile.PerRow, s: float):
        return x * w * t * s

    x, w, t = rows((4, 64), (64,), (4,))
    boxes = picture_of(kernel_of(f, x, w, t, 1.0).graph).boxes
    assert [b.kind for b in boxes[:4]] == [Kind.ROW, Kind.COLUMN, Kind.PER_ROW, Kind.SCALAR]


def test_long_text_is_cut_with_an_ellipsis():
    assert shorten("abcdef", 6) == "abcdef" and shorten("abcdefg", 6) == "abcde…"
    assert shorten("a\x1bb\nc", 9) == "a b c"
    assert text_width("漢字é") == 5 and shorten("漢字漢字", 5) == "漢字…"


# ---- where it lies -----------------------------------------------------------------------------


def apart(a, b):
    return a.right <= b.x or b.right <= a.x or a.bottom <= b.y or b.bottom <= a.y


def test_no_boxes_overlap_and_lanes_go_left_to_right(graph):
    picture = picture_of(graph)
    shape = arrange(picture)
    assert set(shape.boxes) == {box.key for box in picture.boxes}
    for a, b in itertools.combinations(shape.boxes.values(), 2):
        assert apart(a, b)
    for a, b in itertools.pairwise(shape.lanes):
        assert a.right <= b.x + 1e-6
    for box in picture.boxes:
        rect, lane = shape.boxes[box.key], shape.lanes[box.lane]
        assert lane.x < rect.x and rect.right < lane.right
        assert rect.y > 0 and rect.bottom < shape.height


def test_no_wire_runs_through_a_box(graph):
    picture = picture_of(graph)
    shape = arrange(picture)
    assert set(shape.wires) == set(picture.edges)
    for (start, end), points in shape.wires.items():
        assert all(0 < x < shape.width and 0 < y < shape.height for x, y in points)
        first, last = shape.boxes[start], shape.boxes[end]
        assert points[0][0] == first.right or points[0][1] == first.bottom
        assert points[-1][0] == last.x or points[-1][1] == last.y
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            assert abs(x0 - x1) < 1e-6 or abs(y0 - y1) < 1e-6, "upright or level"
            for box in shape.boxes.values():
                inside = (
                    max(x0, x1) > box.x + 0.1 and min(x0, x1) < box.right - 0.1
                    and max(y0, y1) > box.y + 0.1 and min(y0, y1) < box.bottom - 0.1
                )  # fmt: skip
                assert not inside


def test_no_two_wires_of_different_values_lie_on_each_other(graph):
    """They cross, upright over level, but never share a stretch: so each can be followed."""
    lines = {}
    for (start, _), points in arrange(picture_of(graph)).wires.items():
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            upright = abs(x0 - x1) < 1e-6
            at, low, high = (x0, *sorted((y0, y1))) if upright else (y0, *sorted((x0, x1)))
            lines.setdefault((upright, round(at, 3)), []).append((low, high, start))
    for there in lines.values():
        for (a, b, one), (c, d, other) in itertools.combinations(there, 2):
            assert one == other or min(b, d) - max(a, c) < 1e-6


def test_big_pictures_keep_the_shape_of_a_page():
    for name in ("60", "200", "chain", "fan"):
        shape = arrange(picture_of(GRAPHS[name]()))
        assert 0.8 < shape.width / shape.height < 3


# ---- SVG ---------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def parse(svg):
    root = ET.fromstring(svg)
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    return ids, [e.text for e in root.iter(f"{SVG}text")]


def test_the_svg_has_every_node_edge_and_line(graph):
    picture = picture_of(graph)
    ids, texts = parse(graph_svg(graph))
    assert sorted(i for i in ids if i.startswith("node-")) == sorted(
        f"node-{box.key}" for box in picture.boxes
    )
    assert {i for i in ids if i.startswith("edge-")} == {f"edge-{a}-{b}" for a, b in picture.edges}
    for box in picture.boxes:
        assert any(text == box.title or text.rstrip("…") in box.title for text in texts)
        assert not box.where or box.where in texts
    for line in {box.source for box in picture.boxes if box.source}:
        assert any(text.rstrip("…") and line.startswith(text.rstrip("…")) for text in texts)


def test_odd_text_is_shown_as_it_is():
    def größe(x):
        return x * 2.0  # <b> & "$x^2$" \alpha 漢字

    kernel = kernel_of(größe, *rows((4, 8)))
    _, texts = parse(kernel.graph_svg())
    assert any("größe" in text for text in texts)
    assert shorten(r'return x * 2.0  # <b> & "$x^2$" \alpha 漢字', 36) in texts
    assert '\\"$x^2$\\" \\\\alpha' in kernel.graph_dot()


def test_the_readers_own_settings_change_nothing():
    import matplotlib

    kernel = example_kernel("softmax", 64)
    before = kernel.graph_svg(), kernel.plan_svg()
    mine = {"svg.fonttype": "path", "font.size": 30, "lines.linewidth": 9, "figure.dpi": 33}
    with matplotlib.rc_context(mine):
        assert (kernel.graph_svg(), kernel.plan_svg()) == before
        assert matplotlib.rcParams["font.size"] == 30


# ---- DOT and JSON ------------------------------------------------------------------------------

STRING = r'"(?:[^"\\\n]|\\.)*"'
ID = rf"(?:\w+|{STRING})"
ATTRIBUTES = rf"\[(?:\s*{ID}=(?:[\w.]+|{STRING})\s*,?)*\]"
STATEMENT = re.compile(
    rf"\s*(?:subgraph \w+ \{{|\}}|{ID}(?: -> {ID})?(?:\s*{ATTRIBUTES})?;"
    rf"|(?:{ID}=(?:\w+|{STRING});?\s*)+)"
)


def test_dot_is_well_formed_with_a_cluster_a_stage(graph):
    text = graph_dot(graph)
    head, body = text.split("\n", 1)
    assert re.fullmatch(rf"digraph {STRING} \{{", head)
    at = 0
    while body[at:].strip():
        match = STATEMENT.match(body, at)
        assert match, body[at : at + 200]
        at = match.end()
    assert text.count("{") - text.count("}") == sum(
        s.count("{") - s.count("}") for s in re.findall(STRING, text)
    )
    picture = picture_of(graph)
    assert text.count("subgraph cluster_") == len(picture.lanes)
    for box in picture.boxes:
        assert len(re.findall(rf"^    {box.key} \[", text, re.M)) == 1
    assert {tuple(e) for e in re.findall(r"^  (\w+) -> (\w+)", text, re.M)} == set(picture.edges)


def test_json_is_read_by_networkx_and_has_all(graph):
    data = json.loads(graph_json(graph))
    read = nx.node_link_graph(data, edges="edges")
    assert set(read.edges) == set(graph.dag.edges)
    assert list(read) == list(graph.dag) and read.is_directed() and not read.is_multigraph()
    assert nx.node_link_data(read, edges="edges") == data
    stage = assign_stages(graph)
    for node in graph:
        seen = read.nodes[node.id]
        assert seen["op"] == node.op.value and seen["inputs"] == list(node.inputs)
        assert seen["inner"] == list(node.value.inner) and seen["spread"] is node.value.spread
        assert seen["dtype"] == dtype_name(node.value.dtype) and seen["stage"] == stage[node.id]
        assert (seen["kind"] == "reduction") is (node.op in REDUCTIONS)
        assert (seen["file"], seen["line"]) == (
            (node.loc.file, node.loc.line) if node.loc else (None, None)
        )
        for i in node.inputs:
            assert [node.inputs[k] for k in read.edges[i, node.id]["operands"]] == [i] * sum(
                i == other for other in node.inputs
            )
    assert [o["name"] for o in read.graph["outputs"]] == [o.name for o in graph.outputs]
    assert [i["role"] for i in read.graph["inputs"]] == [i.role.value for i in graph.inputs]


def test_json_has_no_number_that_json_lacks():
    kernel = kernel_of(lambda x: torch.where(x > 0, x, float("-inf")), *rows((4, 8)))
    nodes = json.loads(kernel.graph_json(), parse_constant=pytest.fail)["nodes"]
    assert "-inf" in [node["arg"] for node in nodes]


# ---- the plan ----------------------------------------------------------------------------------


def test_the_plan_shows_loads_stages_bars_and_stores():
    kernel = example_kernel("norm_softmax", 4096)
    ids, texts = parse(kernel.plan_svg())
    assert {"load-x", "store-out", *(f"stage{k}" for k in (1, 2, 3, 4))} <= set(ids)
    assert texts.count("8192 bytes a row") == 2
    assert {i for i in ids if i.startswith("kept-")} == {f"kept-n{i}" for i in kernel.plan.homes}
    assert "%14 = max %13" in texts and "%0 = x: kept in registers, 16384 bytes a row" in texts


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("n", [1000, 4096])
def test_what_is_kept_is_what_the_plan_says(name, n):
    plan = example_kernel(name, n).plan
    spans = kept(plan, segments_of(plan))
    assert {id: home for id, (_, _, home) in spans.items()} == dict(plan.homes)
    assert all(0 <= first < last <= plan.stages for first, last, _ in spans.values())


def test_what_is_read_or_computed_again_is_dashed_not_kept():
    kernel = example_kernel("norm_softmax", 65536, form="loops")
    spans = kept(kernel.plan, segments_of(kernel.plan))
    homes = kernel.plan.homes
    assert set(homes.values()) >= {Home.RECOMPUTE}
    assert {id: home for id, (_, _, home) in spans.items() if id in homes} == dict(homes)
    graph = kernel.graph
    assert not any(graph[id].value.spread for id in spans if id not in homes)
    _, texts = parse(kernel.plan_svg())
    assert any(text.startswith("again from") for text in texts)
    assert any(text.endswith(": computed again") for text in texts)


def test_a_row_in_chunks_is_read_again_from_the_second_loop_on():
    kernel = example_kernel("rmsnorm_residual", 1 << 20)
    assert kernel.plan.placement.loader == "direct" and kernel.plan.bytes_read_again() == 4 << 20
    assert "4194304 written a row, 4194304 read again" in str(kernel.plan)
    assert "load     row" not in str(kernel.plan), "the loops load it"
    rows = {i.id for i in kernel.graph.inputs if i.role is Role.ROW}
    assert {id for id, home in kernel.plan.homes.items() if home is Home.REREAD} == rows
    _, texts = parse(kernel.plan_svg())
    assert texts.count("again from global memory") == 2, "x and residual, once each"
    assert texts.count("registers, in chunks") == 2


def test_pairs_shares_and_fetched_columns_are_shown():
    plan = example_kernel("softmax", 131072).plan
    _, texts = parse(plan_svg(plan))
    (pair,) = [s for s in plan.steps if isinstance(s, Reduce)]
    peak, total = pair.results
    assert pair.is_pair and f"gathers %{peak} with %{total} about it" in texts
    assert "one barrier of 16 CTAs" in texts and "softmax in one exchange" in str(plan)
    plan = plans_of_many_rows("layernorm", 131072)
    _, texts = parse(plan_svg(plan))
    assert "4 shares a CTA, 2 at a time" in str(plan)
    assert "one barrier of 4 CTAs" in texts
    assert "fetches weight, bias" in texts and "prefetch  1 chunk of weight, bias" in str(plan)


def test_what_a_barrier_brings_for_the_next_stage_is_shown():
    plan = plans_of_many_rows("layernorm", 65536)
    _, texts = parse(plan_svg(plan))
    assert [text for text in texts if "barrier" in text and text != "across barriers"] == [
        "one barrier of 2 CTAs",
        "of what the barrier brought",
    ]
    total, squares = (s for s in plan.steps if isinstance(s, Reduce))
    assert "sum1 = sum of triple0, from the exchange before" in str(plan)
    assert total.exchanges and not squares.exchanges


def plans_of_many_rows(name, n):
    function, arguments = EXAMPLES[name]
    return function.inspect(*arguments(4096, n, BF16, "meta"), arch="sm_90a").plan


def test_what_is_gathered_ahead_is_shown_where_it_is():
    """Loop, barrier, what is done once a row, barrier, loop."""
    about = 6
    kernel = example_kernel("layernorm", 1 << 22)
    plan, graph = kernel.plan, kernel.graph
    total = next(s.results[0] for s in plan.steps if isinstance(s, Reduce) and not s.exchanges)
    spans = kept(plan, segments_of(plan))
    assert {id: home for id, (_, _, home) in spans.items() if id in plan.homes} == dict(plan.homes)
    assert not any(graph[id].value.spread for id in spans if id not in plan.homes)
    ids, texts = parse(kernel.plan_svg())
    assert {"segment0", "segment1", "segment2", "stage1", "stage2"} <= set(ids)
    assert texts.count("registers, in chunks") == 2 and texts.count("registers") == 1
    assert f"gathers %{total} too" in texts and f"%{total} as gathered, about %{about}" in texts
    assert texts.count("again from global memory") == 1
    assert "carry     triple0: sum and sum of x" in str(plan)


def test_a_late_column_is_loaded_where_it_is_used():
    ids, texts = parse(example_kernel("rmsnorm_residual", 4096).plan_svg())
    assert "load-weight" in ids and "8192 bytes for all rows" in texts


# ---- Kernel, notebooks, files ------------------------------------------------------------------


def test_notebooks_get_pictures():
    kernel = example_kernel("softmax", 64)
    assert kernel.graph._repr_svg_() == kernel.graph_svg() == graph_svg(kernel.graph)
    assert kernel.plan._repr_svg_() == kernel.plan_svg() == plan_svg(kernel.plan)
    page = kernel._repr_html_()
    assert page.count("<img ") == 2 and "data:image/svg+xml;base64," in page
    assert "&#x27;" in page or "&quot;" in page, "the source is escaped"
    assert "<pre>" in page and "row_reduce" in page


def run(code, *seeds):
    """What processes with these hash seeds print, side by side."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPO, text=True, env=os.environ | seed,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for seed in [{"PYTHONHASHSEED": s} for s in seeds] or [{}]
    ]  # fmt: skip
    results = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, errors
    return [printed for printed, _ in results]


DIGESTS = """
import hashlib
from tests.lower.cases import example_kernel
for n in (1000, 64):
    k = example_kernel("capped_softmax", n)
    for text in (k.graph_dot(), k.graph_json(), k.graph_svg(), k.plan_svg(), k._repr_html_()):
        print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_two_processes_draw_the_same_bytes():
    one, other = run(DIGESTS, "1", "2")
    assert one == other and len(set(one.split())) == 10


LAZY = """
import sys
import torch, htile
kernel = htile.rowwise(lambda x: x * 2).inspect(torch.empty(2, 8, device="meta"))
kernel.graph_dot(), kernel.graph_json(), str(kernel.plan)
assert not [m for m in sys.modules if m.partition(".")[0] in ("matplotlib", "PIL")]
kernel.graph_svg()
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""


def test_matplotlib_is_imported_when_something_is_drawn():
    run(LAZY)


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import torch, htile
kernel = htile.rowwise(lambda x: x * 2).inspect(torch.empty(2, 8, device="meta"))
for draw in (kernel.graph_svg, kernel.plan_svg):
    try:
        draw()
    except htile.UnsupportedError as error:
        assert "pip install matplotlib" in str(error), error
    else:
        raise AssertionError("drawn without matplotlib")
assert kernel.graph_dot().startswith("digraph") and kernel.graph_json().startswith("{")
assert kernel.graph._repr_svg_() is None and kernel.plan._repr_svg_() is None
assert kernel._repr_html_().count("<pre>") == 3
"""


def test_without_matplotlib_the_error_says_what_to_install():
    run(MISSING)
