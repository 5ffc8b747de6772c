"""Pictures of graphs and plans: what they show, that nothing overlaps, the same bytes again."""

import ast
import functools
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
import torch.nn.functional as F

import htile
from htile.frontend.graph import Role
from htile.frontend.ops import REDUCTIONS, Op, dtype_name
from htile.lower.emission.names import value_names
from htile.lower.reductions import Reduce, assign_stages
from htile.lower.steps import Home
from htile.pictures import graph_dot, graph_json, graph_svg, plan_svg
from htile.pictures.boxes import GUTTER, INSET, size_of
from htile.pictures.canvas import GLYPH
from htile.pictures.flow import draw_graph
from htile.pictures.fold import find_rounds, repetitions
from htile.pictures.layout import arrange, settle
from htile.pictures.memory import draw_plan
from htile.pictures.model import (
    MEANING,
    Band,
    Box,
    Edge,
    Kind,
    Picture,
    Style,
    Text,
    kind_of,
    picture_of,
)
from htile.pictures.names import all_names, flowed, shorten, strip, text_width
from htile.pictures.segments import kept, moments_of, segments_of
from tests.lower.cases import BF16, EXAMPLES, F32, example_kernel, kernel_of, random_graph, rows

REPO = Path(__file__).parents[1]
PAGE = 1600, 2400  # pixels


def chain(x):
    for i in range(120):
        x = torch.sin(x) * 1.01 if i % 2 else x + 0.5
    return x


def fan(x):
    total = x
    for i in range(48):
        total = total + torch.tanh(x * (i + 0.5)).sum()
    return torch.softmax(total, -1)


def smoothed_loss(logits, target: htile.PerRow, label: htile.PerRow, smoothing: float = 0.1):
    lse = torch.logsumexp(logits, -1)
    nll = lse - label
    smooth = lse - logits.mean()
    z = 1e-4 * lse * lse
    return (1 - smoothing) * nll + smoothing * smooth + z * target


def moments(x):
    mean = x.mean()
    d = x - mean
    var = (d * d).mean()
    std = torch.sqrt(var)
    skew = (d * d * d).mean() / (std * std * std)
    return {"mean": mean, "std": std, "skew": skew, "kurtosis": (d**4).mean() / (var * var)}


def six_stages(x, y, w, b):
    x = F.layer_norm(x + y, x.shape, w, b)
    p = torch.softmax(x, -1)
    q = p * y
    q = q / q.abs().max()
    return F.layer_norm(q, x.shape, w, b), p


def sinkhorn(x):
    u = x - x.max()
    for _ in range(20):
        u = u - torch.logsumexp(u, -1)
        u = 0.5 * (u + torch.tanh(u))
    return torch.exp(u)


def newton(x):
    z = x - x.max()
    tau = (z.sum() - 1) / 100
    for _ in range(20):
        p = torch.clamp(z - tau, min=0.0)
        f = (p * p).sum() - 1.0
        tau = tau + f / (2.0 * p.sum())
    return torch.clamp(z - tau, min=0.0) ** 2


def unlike(x):
    """20 rounds of which no two are the same."""
    for k in range(20):
        x = x - x.max() if k % 2 else x / x.abs().sum()
        for _ in range(k % 7):
            x = torch.tanh(x) if k % 3 else x * x
        x = x + torch.exp(x).mean() if k % 5 else x
    return x


def sixty_four():
    """The sum of 64 rows, as a user writes it: in one line."""
    names = [f"x{k}" for k in range(64)]
    space = {"torch": torch}
    exec(f"def total({', '.join(names)}): return torch.softmax({' + '.join(names)}, -1)", space)
    return kernel_of(space["total"], *rows(*[(4, 512)] * 64))


KERNELS = {
    **{name: lambda name=name: example_kernel(name, 1000) for name in EXAMPLES},
    "chain": lambda: kernel_of(chain, *rows((4, 64))),
    "fan": lambda: kernel_of(fan, *rows((4, 64))),
    "loss": lambda: kernel_of(smoothed_loss, *rows((4, 4096)), *rows((4,), (4,), dtype=F32)),
    "moments": lambda: kernel_of(moments, *rows((4, 4096))),
    "six stages": lambda: kernel_of(six_stages, *rows((4, 4096), (4, 4096), (4096,), (4096,))),
    "sinkhorn": lambda: kernel_of(sinkhorn, *rows((4, 1024))),
    "newton": lambda: kernel_of(newton, *rows((4, 1024))),
    "unlike": lambda: kernel_of(unlike, *rows((4, 1024))),
    "64 inputs": sixty_four,
}
RANDOM = {f"{size} random {seed}": (seed, size) for seed, size in
          [(5, 50), (0, 190), (1, 190), (2, 190), (3, 190)]}  # fmt: skip


@functools.cache
def case(name):
    """(graph, names of the source or None, plan or None)."""
    if name in RANDOM:
        return random_graph(*RANDOM[name]), None, None
    kernel = KERNELS[name]()
    return kernel.graph, value_names(kernel.plan), kernel.plan


@functools.cache
def drawn_of(name):
    """(graph, names of the source or None, its picture)."""
    graph, names, _ = case(name)
    return graph, names, picture_of(graph, names)


@pytest.fixture(params=[*KERNELS, *RANDOM], scope="module")
def drawn(request):
    return drawn_of(request.param)


@functools.cache
def shape_of(name):
    """Where everything of a picture lies."""
    return arrange(drawn_of(name)[2])


@pytest.fixture(params=[*KERNELS, *RANDOM], scope="module")
def laid(request):
    """(picture, where everything lies)."""
    return drawn_of(request.param)[2], shape_of(request.param)


@pytest.fixture(params=KERNELS, scope="module")
def plan(request):
    return case(request.param)[2]


def test_the_graphs_are_small_and_large():
    assert len(case("softmax")[0]) < 10 < len(case("capped_softmax")[0]) < 20
    large = ("chain", "fan", "sinkhorn", "unlike", "0 random 190")
    assert min(len(case(name)[0]) for name in RANDOM if "190" in name) >= 190
    assert min(len(case(name)[0]) for name in large if name in KERNELS) >= 120


def test_values_have_the_names_of_the_source(plan):
    names = value_names(plan)
    source = case_source(plan)
    for id, name in names.items():
        node = plan.graph[id]
        if node.op is not Op.INPUT:
            assert name.rstrip("_").rstrip("0123456789") == node.op.value
            assert re.search(rf"\b{name}\b(?:, \w+)* = ", source), name
    assert len(set(names.values())) == len(names)
    loaded = [i for i in plan.graph.inputs if i.role not in (Role.TAKEN, Role.TABLE)]
    loaded = [i for i in loaded if i.formula is None]  # others are numbered, as pieces are
    assert {names[i.id] for i in loaded} == {i.name for i in loaded}


def case_source(plan):
    from htile.lower import emit

    return emit(plan)


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_a_plan_names_are_made_in_the_same_manner(name):
    """They are those of the source where it has the order of the user's code."""
    graph, known, _ = case(name)
    made = all_names(graph)
    assert set(made) == {node.id for node in graph if node.op is not Op.CONST}
    if name in ("softmax", "rmsnorm", "swiglu", "absnorm"):
        assert made.items() >= known.items()
    whole = all_names(graph, known)
    assert whole.items() >= known.items()
    real = [whole[n.id] for n in graph if n.op not in (Op.CONST, Op.RESHAPE)]
    assert len(set(real)) == len(real)


def test_names_of_the_emitted_module_are_left_to_it():
    def f(m, blocks):
        return m + blocks

    graph = kernel_of(f, *rows((4, 8), (4, 8))).graph
    assert [all_names(graph)[i.id] for i in graph.inputs] == ["m_", "blocks_"]


def test_names_in_rows_are_cut_in_the_middle():
    names = [f"x{k}" for k in range(200)]
    found = flowed(names)
    assert len(found) == 8 and max(map(len, found)) <= 40
    assert found[0].startswith("x0, x1") and found[-1] == "… x199: 200 in all"
    assert flowed(["weight", "bias"]) == ["weight, bias"]


def test_long_text_is_cut_with_an_ellipsis():
    assert shorten("abcdef", 6) == "abcdef" and shorten("abcdefg", 6) == "abcde…"
    assert shorten("a\x1bb\nc", 9) == "a b c"
    assert text_width("漢字é") == 5 and shorten("漢字漢字", 5) == "漢字…"


def rounds_of(graph):
    """Of each node of a loop, its counterparts in all rounds."""
    return {id: ids for found in find_rounds(graph) for ids in found.steps for id in ids}


def inside_its_reader(graph, names):
    """Nodes without a name in the source, in any round, which their only reader has inside."""
    rounds = rounds_of(graph)
    return {
        n.id
        for n in graph
        if names is not None and n.op not in (Op.CONST, Op.RESHAPE)
        and not names.keys() & set(rounds.get(n.id, (n.id,)))
    }  # fmt: skip


def lines_of(picture):
    """Each node's own line: the box, and the text."""
    return {
        id: (box, next(t for t in box.texts if t.left.startswith(f"{name} = ")))
        for box in picture.boxes
        if box.kind in (Kind.ELEMENTWISE, Kind.REDUCTION)
        for id, name in zip(
            box.ids,
            [t.left.partition(" = ")[0] for t in box.texts if t.style is not Style.FAINT],
            strict=True,
        )
    }


def test_every_value_has_one_line_and_constants_are_written_in(drawn):
    graph, names, picture = drawn
    rounds, inside = rounds_of(graph), inside_its_reader(graph, names)
    lines = lines_of(picture)
    wanted = {
        n.id
        for n in graph
        if n.op not in (Op.INPUT, Op.CONST, Op.RESHAPE)
        and n.id not in inside
        and rounds.get(n.id, (n.id,))[0] == n.id
    }
    assert set(lines) == wanted
    assert sum(len(box.ids) for box in picture.boxes) == len(wanted) + len(graph.inputs)
    called = all_names(graph, names)
    for id, (_, text) in lines.items():
        assert text.left.startswith(f"{called[id]} = ")
        for operand in graph.operands(graph[id]):
            operand = graph[strip(graph, operand.id)]
            if operand.id not in inside:
                named = str(operand.arg) if operand.op is Op.CONST else called[operand.id]
                assert named in text.left.partition(" = ")[2]
        assert dtype_name(graph[id].value.dtype) in text.right


def test_a_line_stands_for_all_rounds_of_its_loop(drawn):
    graph, names, picture = drawn
    rounds, inside = rounds_of(graph), inside_its_reader(graph, names)
    lines = lines_of(picture)
    for id, (box, _) in lines.items():
        assert box.rounds == len(rounds.get(id, (id,)))
    shown = {i for id in lines for i in rounds.get(id, (id,))}
    assert (
        shown | inside
        == {n.id for n in graph if n.op not in (Op.INPUT, Op.CONST, Op.RESHAPE)} | inside
    )


def test_edges_are_what_boxes_read(drawn):
    graph, names, picture = drawn
    rounds, inside = rounds_of(graph), inside_its_reader(graph, names)
    box_of = {id: box.key for box in picture.boxes for id in box.ids}
    wanted = {}

    def read(box, id, is_first):
        for i in graph[id].inputs:
            source = strip(graph, i)
            if source in inside:
                read(box, source, is_first)
            elif graph[source].op is Op.INPUT or (is_first and graph[source].op is not Op.CONST):
                add(box, source)

    def add(box, source):
        start = box_of[rounds.get(source, (source,))[0]]
        if start != box:
            wanted.setdefault((start, box), set()).add(source)

    for id, box in box_of.items():
        for k, each in enumerate(rounds.get(id, (id,))):
            read(box, each, k == 0)
    for k, out in enumerate(graph.outputs):
        source = strip(graph, out.id)
        if graph[source].op is not Op.CONST:
            add(f"out{k}", source)
    called = all_names(graph, names)
    assert {(e.start, e.end): set(e.names) for e in picture.edges} == {
        ends: {called[i] for i in ids} for ends, ids in wanted.items()
    }
    for edge in picture.edges:
        ids = wanted[edge.start, edge.end]
        assert edge.wide is any(graph[i].value.spread for i in ids)
    order = {box.key: k for k, box in enumerate(picture.boxes)}
    assert all(order[e.start] < order[e.end] for e in picture.edges), "boxes are in order"


def test_a_box_is_in_the_stage_that_first_needs_it(drawn):
    graph, _, picture = drawn
    stage, rounds = assign_stages(graph), rounds_of(graph)
    assert [band.stage for band in picture.bands] == sorted({b.stage for b in picture.boxes})
    returned = {out.id for out in graph.outputs}
    where = {id: box.stage for box in picture.boxes for id in box.ids}
    for id, at in where.items():
        readers = [graph[k] for k in graph.users(id)]
        if graph[id].op in REDUCTIONS or id in returned or not readers:
            assert at == stage[id] or graph[id].op is Op.INPUT
        elif id not in rounds and not any(r.id in rounds or r.id not in where for r in readers):
            needed = [stage[r.id] - 1 if r.op in REDUCTIONS else where[r.id] for r in readers]
            assert at >= stage[id] and (at == min(needed) or graph[id].op is Op.INPUT)
    stages = {box.key: box.stage for box in picture.boxes}
    assert all(stages[e.start] <= stages[e.end] for e in picture.edges)


def test_the_reductions_of_a_stage_are_one_box():
    for name in ("loss", "moments", "newton"):
        _, _, picture = drawn_of(name)
        reduced = [(b.stage, b.rounds) for b in picture.boxes if b.kind is Kind.REDUCTION]
        assert len(set(reduced)) == len(reduced), name
    boxes = [b for b in drawn_of("moments")[2].boxes if b.kind is Kind.REDUCTION]
    assert [len(box.ids) for box in boxes] == [1, 3]


def texts_of(box):
    return [(t.left, t.right) if t.right else t.left for t in box.texts]


def test_boxes_say_what_and_where():
    picture = picture_of(example_kernel("softmax", 64).graph)
    assert picture.headline == "softmax, one row of N = 64"
    assert [texts_of(box) for box in picture.boxes] == [
        ["x", "row bf16 as f32[64]"],
        [("e = torch.exp(x - x.max())", "softmax.py:11"), ("max0 = max(x)", "f32")],
        [
            ("e = torch.exp(x - x.max())", "softmax.py:11"),
            ("sub0 = x - max0", "f32[64]"),
            ("exp0 = exp(sub0)", "f32[64]"),
        ],
        [("return e / e.sum()", "softmax.py:12"), ("sum0 = sum(exp0)", "f32")],
        [("return e / e.sum()", "softmax.py:12"), ("div0 = exp0 / sum0", "f32[64]")],
        ["out = div0", "row bf16[64]"],
    ]
    assert [(b.stage, b.name, b.what) for b in picture.bands] == [
        (0, "stage 0", "before any reduction"),
        (1, "stage 1", "max behind one barrier"),
        (2, "stage 2", "sum behind one barrier"),
    ]


def test_a_loss_is_a_box_for_each_of_its_lines():
    _, _, picture = drawn_of("loss")
    last = [box for box in picture.boxes if box.stage == 2 and box.kind is Kind.ELEMENTWISE]
    heads = [[t.left.split(" = ")[0] for t in b.texts if t.style is Style.FAINT] for b in last]
    ours = "return (1 - smoothing) * nll + smoothing * smooth + z * target"
    assert sorted(head for head, *rest in heads if not rest) == sorted(
        ["lse", "nll", "smooth", "z", ours]
    )


def test_a_product_that_is_part_of_an_fma_is_written_into_it():
    """The source has no name for it."""
    graph, _, picture = drawn_of("layernorm")
    texts = [text.left for box in picture.boxes for text in box.texts]
    assert "add1 = mul1 * weight + bias" in texts
    assert not any(text.startswith("mul2") for text in texts)
    without = [text.left for box in picture_of(graph).boxes for text in box.texts]
    assert "add1 = mul2 + bias" in without and "mul2 = mul1 * weight" in without


def test_what_is_written_into_another_has_parentheses_where_they_count():
    kernel = kernel_of(lambda x, y: (x * y - y) * x, *rows((4, 8), (4, 8)))
    graph = kernel.graph
    (sub,) = (n.id for n in graph if n.op is Op.SUB)
    known = {n.id: f"v{n.id}" for n in graph if n.op is not Op.CONST and n.id != sub}
    mul, _, out = (n.id for n in graph if n.op is not Op.INPUT)
    texts = [t.left for box in picture_of(graph, known).boxes for t in box.texts]
    assert f"v{out} = (v{mul} - v1) * v0" in texts


def test_every_role_has_its_kind():
    def f(x, w, t: htile.PerRow, s: float):
        return x * w * t * s

    x, w, t = rows((4, 64), (64,), (4,))
    graph = kernel_of(f, x, w, t, 1.0).graph
    kinds = [kind_of(graph, graph[i.id]) for i in graph.inputs]
    assert kinds == [Kind.ROW, Kind.COLUMN, Kind.PER_ROW, Kind.SCALAR]


def test_arguments_of_one_type_that_the_same_boxes_read_share_a_box():
    _, _, picture = drawn_of("layernorm")
    assert ["weight, bias", "column bf16 as f32[1000]"] in [texts_of(b) for b in picture.boxes]
    boxes = [texts_of(b) for b in drawn_of("six stages")[2].boxes]
    assert ["x", "row bf16 as f32[4096]"] in boxes, "y is read elsewhere too"


def test_a_constant_may_be_returned():
    def f(x):
        return x, x.sum() * 0.0

    picture = picture_of(kernel_of(f, *rows((4, 8))).graph)
    (out,) = [box for box in picture.boxes if box.key == "out0"]
    assert texts_of(out)[0] == "out0 = x"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("sinkhorn", [(13, 20)]),
        ("newton", [(9, 20)]),
        ("chain", [(3, 60)]),
        ("fan", [(4, 48)]),
        ("64 inputs", [(1, 63)]),
        ("loss", []),
        ("six stages", []),
        ("unlike", []),
    ],
)
def test_the_rounds_of_a_python_loop_are_found(name, wanted):
    found = find_rounds(case(name)[0])
    assert [(len(rounds.steps), len(rounds.steps[0])) for rounds in found] == wanted


@pytest.mark.parametrize("name", [*KERNELS, *RANDOM])
def test_the_steps_of_all_rounds_do_and_read_the_same(name):
    """Told from the nodes alone: each operand is the round's own, the one before's, or the same."""
    graph = case(name)[0]
    for found in find_rounds(graph):
        where = {id: (j, k) for j, ids in enumerate(found.steps) for k, id in enumerate(ids)}
        first = min(where)
        for ids in found.steps:
            nodes = [graph[id] for id in ids]
            assert len({(n.op, n.arg, n.value, n.loc) for n in nodes}) == 1
            for operands in zip(*(n.inputs for n in nodes), strict=True):
                if all(graph[i].op in (Op.INPUT, Op.CONST) for i in operands):
                    assert len({(graph[i].op, graph[i].value) for i in operands}) == 1
                    continue
                later = {
                    (where[i][0], k - where[i][1]) if i in where else i
                    for k, i in enumerate(operands)
                    if k
                }
                assert len(later) == 1, "all rounds but the first read alike"
                (one,) = later
                start = operands[0]
                if isinstance(one, tuple) and one[1] == 0:
                    assert where[start] == (one[0], 0)
                elif isinstance(one, tuple):
                    assert one[1] == 1 and start < first
                else:
                    assert start == one < first


def changed(x):
    for k in range(20):
        x = x - x.max()
        x = torch.tanh(x) if k == 7 else torch.exp(x)
        x = x * 0.5
    return x


def test_a_round_that_differs_is_shown():
    graph = kernel_of(changed, *rows((4, 64))).graph
    picture = picture_of(graph)
    assert [len(r.steps[0]) for r in find_rounds(graph)] == [7, 12]
    assert sum(box.rounds == 1 and box.kind is Kind.REDUCTION for box in picture.boxes) == 1
    assert any("tanh" in text.left for box in picture.boxes for text in box.texts)


def returns_all(x):
    values = []
    for _ in range(4):
        x = torch.exp(x - x.max())
        values.append(x.sum())
    return x, values[0] - values[3] + values[1] * values[2]


def test_what_reads_a_round_names_that_round():
    graph = kernel_of(returns_all, *rows((4, 64))).graph
    picture = picture_of(graph)
    (reader,) = [b for b in picture.boxes if any(t.left.startswith("add") for t in b.texts)]
    found = [t.left for t in reader.texts if t.style is not Style.FAINT]
    assert found == ["sub4 = sum0 - sum3", "mul0 = sum1 * sum2", "add0 = sub4 + mul0"]
    (edge,) = [edge for edge in picture.edges if edge.end == reader.key]
    assert set(edge.names) == {"sum0", "sum1", "sum2", "sum3"}


def test_notes_say_what_becomes_of_a_value_of_a_loop():
    texts = [text.left for box in drawn_of("sinkhorn")[2].boxes for text in box.texts]
    at = texts.index("mul0 = 0.5 * add1")
    assert texts[at + 1 : at + 3] == [
        "mul0 is sub0 of the next round", "mul19 is that of the last round"
    ]  # fmt: skip
    assert "exp20 = exp(mul19)" in texts
    texts = [text.left for box in drawn_of("fan")[2].boxes for text in box.texts]
    assert "mul0 = x * 0.5 … 47.5" in texts, "constants differ by round"
    texts = [text.left for box in drawn_of("64 inputs")[2].boxes for text in box.texts]
    assert "add0 = x0 + x1 … x63" in texts, "arguments differ by round"


def test_the_stages_of_all_rounds_are_named():
    names = [band.name for band in drawn_of("sinkhorn")[2].bands]
    wanted = ["stage 0", "stage 1", "stages 2, 4 … 40", "stages 3, 5 … 41", "stage 41"]
    assert names == wanted


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        ("abcabcabc", [(0, 3, 3)]),
        ("xabababy", [(1, 2, 3)]),
        ("abab", []),
        ("aaaa", [(0, 1, 4)]),
        ("abababxcdcdcd", [(0, 2, 3), (7, 2, 3)]),
        ("abcdefg", []),
    ],
)
def test_repetitions_of_a_sequence(kinds, wanted):
    assert repetitions(kinds, 3, lambda start, size, most: most) == wanted


def apart(a, b):
    return a.right <= b.x or b.right <= a.x or a.bottom <= b.y or b.bottom <= a.y


def test_boxes_and_tags_are_apart_and_in_their_bands(laid):
    picture, shape = laid
    assert set(shape.boxes) == {box.key for box in picture.boxes}
    rects = [*shape.boxes.values(), *(tag.rect for tag in shape.tags)]
    for a, b in itertools.combinations(rects, 2):
        assert apart(a, b)
    for (_, a), (_, b) in itertools.combinations(shape.bands, 2):
        assert a.right <= b.x or b.right <= a.x or a.bottom <= b.y + 1e-6 or b.bottom <= a.y + 1e-6
    for box in picture.boxes:
        rect = shape.boxes[box.key]
        assert (rect.width, rect.height) == (size_of(box).width, size_of(box).height)
        inside = [
            band
            for band, place in shape.bands
            if place.x + GUTTER < rect.x and rect.right < place.right
            and place.y < rect.y and rect.bottom < place.bottom
        ]  # fmt: skip
        assert [band.stage for band in inside] == [box.stage]


def test_every_edge_is_a_wire_or_a_tag(laid):
    picture, shape = laid
    tagged = {}
    for tag in shape.tags:
        tagged.setdefault(tag.end, []).append(tag)
    for edge in picture.edges:
        if (edge.start, edge.end) not in shape.wires:
            tags = tagged[edge.end]
            texts = {tag.text for tag in tags if tag.start == edge.start}
            assert texts >= set(edge.names) or tags[-1].text.endswith(" more")
    ends = {(edge.start, edge.end) for edge in picture.edges}
    assert set(shape.wires) <= ends and {(t.start, t.end) for t in shape.tags} <= ends
    boxes = shape.boxes
    for tag in shape.tags:
        to = boxes[tag.end]
        assert tag.rect.right < to.x and to.x - tag.rect.right < 20
        assert to.y <= tag.rect.y, "beside the box"


def test_wires_go_down_past_the_boxes(laid):
    """A bend of a wire lies within the rectangle of its ends."""
    _, shape = laid
    for (start, end), points in shape.wires.items():
        first, last = shape.boxes[start], shape.boxes[end]
        assert points[0] == (pytest.approx(first.centre[0]), first.bottom)
        assert last.x < points[-1][0] < last.right and points[-1][1] == last.y
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            assert y0 <= y1
            for box in [*shape.boxes.values(), *(tag.rect for tag in shape.tags)]:
                assert not (
                    max(x0, x1) > box.x + 0.1 and min(x0, x1) < box.right - 0.1
                    and y1 > box.y + 0.1 and y0 < box.bottom - 0.1
                )  # fmt: skip


def test_wires_of_different_boxes_part(laid):
    """No two enter a box at one place or pass a layer at one place: each can be followed."""
    _, shape = laid
    places = {}
    for (start, _), points in shape.wires.items():
        for x, y in points[1:]:
            places.setdefault(round(y, 3), {}).setdefault(start, set()).add(x)
    for there in places.values():
        for (one, xs), (other, others) in itertools.combinations(there.items(), 2):
            assert one == other or min(abs(a - b) for a in xs for b in others) > 1


def crossings(shape):
    """How often wires of different boxes cross in a bend."""
    bends = [
        (start, *a, *b)
        for (start, _), points in shape.wires.items()
        for a, b in itertools.pairwise(points)
    ]
    return sum(
        s != t and (y0, y1) == (v0, v1) and (x0 - u0) * (x1 - u1) < 0
        for (s, x0, y0, x1, y1), (t, u0, v0, u1, v1) in itertools.combinations(bends, 2)
    )


@pytest.mark.parametrize("name", ["softmax", "loss", "six stages", "sinkhorn", "newton"])
def test_where_wires_need_not_cross_none_does(name):
    assert crossings(shape_of(name)) == 0


def test_boxes_are_ordered_so_that_few_wires_cross():
    """A ladder whose boxes are given in the wrong order: a1 to d2, b1 to c2, c1 to b2, d1 to a2."""
    keys = "abcd"
    boxes = [Box(f"{key}{k}", Kind.ELEMENTWISE, [Text(key)]) for k in (1, 2, 3, 4) for key in keys]
    edges = [
        Edge(f"{one}{k}", f"{other}{k + 1}", (one,), True)
        for k in (1, 2, 3)
        for one, other in zip(keys, reversed(keys) if k % 2 else "badc", strict=True)
    ]
    picture = Picture("ladder", tuple(boxes), tuple(edges), (Band(0, "stage 0", ""),))
    assert crossings(arrange(picture)) == 0


def test_a_rows_order_and_gaps_are_kept_and_places_are_the_closest():
    assert settle([0, 10, 20], [1, 1, 1], [5, 5]) == [0, 10, 20]
    assert settle([0, 0], [1, 1], [4]) == [-2, 2]
    assert settle([0, 0], [3, 1], [4]) == [-1, 3]
    assert settle([9, 0, 0], [1, 1, 1], [2, 2]) == [1, 3, 5]


def test_what_does_not_fold_goes_on_in_further_columns():
    shape = shape_of("unlike")
    assert len({rect.x for _, rect in shape.bands}) > 1
    assert shape.width <= PAGE[0] and shape.height <= PAGE[1]


# ---- what is drawn -----------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def parse(svg):
    root = ET.fromstring(svg)
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    return ids, [e.text for e in root.iter(f"{SVG}text")]


def labels(canvas):
    """(text, left, top, right, bottom) of every text."""
    for text in canvas.figure.axes[0].texts:
        x, y = text.get_position()
        size = text.get_fontsize()
        wide = text_width(text.get_text()) * GLYPH * size
        left = x - wide if text.get_horizontalalignment() == "right" else x
        yield text.get_text(), left, y - size / 2, left + wide, y + size / 2


def assert_no_labels_overlap(canvas):
    width, height = (72 * size for size in canvas.figure.get_size_inches())
    found = list(labels(canvas))
    for text, left, top, right, bottom in found:
        assert min(left, top) >= 0 and right <= width + 0.1 and bottom <= height, text
    for (s, a, b, c, d), (t, e, f, g, h) in itertools.combinations(found, 2):
        assert c <= e + 0.1 or g <= a + 0.1 or d <= f + 0.1 or h <= b + 0.1, (s, t)


@pytest.mark.parametrize("name", [*KERNELS, *RANDOM])
def test_pictures_fit_a_page_and_no_labels_overlap(name):
    graph, names, plan = case(name)
    for draw, what in ((lambda: draw_graph(graph, names), graph), (lambda: draw_plan(plan), plan)):
        if what is not None:
            canvas = draw()
            assert_no_labels_overlap(canvas)
            width, height = (72 * size for size in canvas.figure.get_size_inches())
            assert width <= PAGE[0] and height <= PAGE[1], (width, height)


@pytest.mark.parametrize("name", ["softmax", "loss", "six stages", "newton", "50 random 5"])
def test_the_svg_has_every_box_wire_and_line(name):
    graph, names, picture = drawn_of(name)
    ids, texts = parse(graph_svg(graph, names))
    wanted = sorted(f"node-{box.key}" for box in picture.boxes)
    assert sorted(i for i in ids if i.startswith("node-")) == wanted
    shape = shape_of(name)
    assert {i for i in ids if i.startswith("edge-")} == {f"edge-{a}-{b}" for a, b in shape.wires}
    assert {i for i in ids if i.startswith("tag-")} == {
        f"tag-{tag.start}-{tag.end}" for tag in shape.tags
    }
    for box in picture.boxes:
        for text in box.texts:
            assert any(t and text.left.startswith(t.rstrip("…").rstrip()) for t in texts)
            assert not text.right or text.right in texts
    for band in picture.bands:
        assert band.name in texts


@pytest.mark.parametrize("name", ["softmax", "loss", "layernorm", "sinkhorn", "six stages"])
def test_a_legend_explains_what_is_drawn(name):
    graph, names, plan = case(name)
    picture = picture_of(graph, names)
    _, texts = parse(graph_svg(graph, names))
    for kind in Kind:
        assert (MEANING[kind] in texts) is any(box.kind is kind for box in picture.boxes)
    assert "N elements" in texts and "one number" in texts
    has_tags = bool(shape_of(name).tags)
    assert ("read from elsewhere in the picture" in texts) is has_tags
    has_rounds = any(box.rounds > 1 for box in picture.boxes)
    assert ("n rounds of a loop, of which the first is shown" in texts) is has_rounds
    _, texts = parse(plan_svg(plan))
    assert {MEANING[Kind.REDUCTION], MEANING[Kind.OUTPUT], "barrier", "moves on"} <= set(texts)


def test_odd_text_is_shown_as_it_is():
    def größe(x):
        return x * 2.0  # <b> & "$x^2$" \alpha 漢字

    kernel = kernel_of(größe, *rows((4, 8)))
    _, texts = parse(kernel.graph_svg())
    assert any("größe" in text for text in texts)
    assert r'return x * 2.0  # <b> & "$x^2$" \alpha 漢字'[:30] in " ".join(texts)
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


def test_dot_is_well_formed_with_a_cluster_a_stage(drawn):
    graph, names, picture = drawn
    text = graph_dot(graph, names)
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
    assert text.count("subgraph cluster_") == len(picture.bands)
    for box in picture.boxes:
        assert len(re.findall(rf"^    {box.key} \[", text, re.M)) == 1
    edges = re.findall(r"^  (\w+) -> (\w+)( \[penwidth=2\])?;", text, re.M)
    assert sorted((a, b, bool(wide)) for a, b, wide in edges) == sorted(
        (e.start, e.end, e.wide) for e in picture.edges
    )


def test_pictures_show_no_objects_of_python(drawn):
    graph, names, _ = drawn
    for text in (graph_dot(graph, names), graph_json(graph, names), graph_dot(graph)):
        assert not re.search(r"<\w+\.\w+|\bOp\.|\bSlope\.|<class|object at 0x", text)


def test_a_reduction_of_each_group_in_pictures():
    def normed(x):
        groups = x.view(-1, 32)
        return (groups / (groups * groups).sum(-1, keepdim=True)).flatten()

    kernel = htile.rowwise(normed).inspect(torch.empty(2, 256, device="meta"))
    assert "sum(mul0) of each 32" in kernel.graph_dot()
    nodes = json.loads(kernel.graph_json())["nodes"]
    assert ["sum", 32] in [node["arg"] for node in nodes]
    maximum = htile.rowwise(lambda x: x.clamp(min=0.0) * x.max(-1).values)
    text = maximum.inspect(torch.empty(2, 256, device="meta")).traced
    assert "Slope" not in graph_dot(text) and "Slope" not in graph_json(text)


def test_dot_has_the_names_of_the_source_and_the_rounds():
    graph, names, _ = case("layernorm")
    assert "add1 = mul1 * weight + bias" in graph_dot(graph, names)
    assert r'[label="× 20\l' in graph_dot(case("sinkhorn")[0])


def test_json_is_read_by_networkx_and_has_all(drawn):
    graph, names, _ = drawn
    data = json.loads(graph_json(graph, names))
    read = nx.node_link_graph(data, edges="edges")
    assert set(read.edges) == set(graph.dag.edges)
    assert list(read) == list(graph.dag) and read.is_directed() and not read.is_multigraph()
    assert nx.node_link_data(read, edges="edges") == data
    stage, called = assign_stages(graph), all_names(graph, names)
    for node in graph:
        seen = read.nodes[node.id]
        assert seen["name"] == called.get(node.id)
        assert (seen["name"] is None) is (node.op is Op.CONST)
        if names is not None and node.id in names:
            assert seen["name"] == names[node.id]
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


def of_plan(plan):
    return moments_of(plan, all_names(plan.graph, value_names(plan)))


def test_nothing_of_a_plan_overlaps(plan):
    """Boxes and bars as they are drawn, by their names in the SVG."""
    canvas = draw_plan(plan)
    patches = [p for p in canvas.figure.axes[0].patches if p.get_gid()]
    rects = [p.get_bbox() for p in patches]
    assert len({p.get_gid() for p in patches}) == len(patches)
    for a, b in itertools.combinations(rects, 2):
        assert a.x1 <= b.x0 or b.x1 <= a.x0 or a.ymax <= b.ymin or b.ymax <= a.ymin
    width, height = (72 * size for size in canvas.figure.get_size_inches())
    for rect in rects:
        assert rect.x0 > INSET and rect.x1 < width and rect.ymin > 0 and rect.ymax < height


def test_the_plan_shows_loads_stages_bars_and_stores():
    kernel = example_kernel("norm_softmax", 4096)
    ids, texts = parse(kernel.plan_svg())
    assert {"node-load-x", "node-store-out"} | {f"node-stage{k}" for k in (1, 2, 3, 4)} <= set(ids)
    assert texts.count("8192 bytes a row") == 2
    assert {i for i in ids if i.startswith("kept-")} == {f"kept-n{i}" for i in kernel.plan.homes}
    assert "max0 = max(mul2)" in texts and "mul2 = sub0 * mul1" in texts
    _, bars = of_plan(kernel.plan)
    assert bars[0].texts == ("x", "in registers", "16384 bytes") and bars[0].is_kept


def test_the_plan_has_the_lines_of_the_source(plan):
    """Every value that is computed, with its device function; constants are shorter."""
    written = set()
    for node in ast.walk(ast.parse(case_source(plan))):
        if isinstance(node, ast.Assign):
            text = ast.unparse(node).replace("math.", "").replace("Float32.inf", "inf")
            text = text.replace("Float32(float('nan'))", "nan").replace("negative_zero()", "-0.0")
            text = re.sub(r"Int(?:32|64)\((-?\d+)\)", r"\1", text)
            taken = r"(?:convert\()?ctx\.load_element\((\w+), (\w+)\)(?:, \w+\))?"
            written.add(re.sub(taken, r"\1[\2]", text))
    lines = [
        text.left
        for moment in of_plan(plan)[0]
        for box in moment.boxes
        if box.key.startswith("segment")
        for text in box.texts
        if text.style is Style.PLAIN
    ]
    assert lines and {ast.unparse(ast.parse(line)) for line in lines} <= written


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("n", [1000, 4096])
def test_what_is_kept_is_what_the_plan_says(name, n):
    plan = example_kernel(name, n).plan
    spans = kept(plan, segments_of(plan))
    assert {id: home for id, (_, _, home) in spans.items()} == dict(plan.homes)
    assert all(0 <= first < last <= plan.stages for first, last, _ in spans.values())
    _, bars = of_plan(plan)
    assert {bar.id for bar in bars} == set(plan.homes)


def test_the_rounds_of_a_loop_are_one_in_the_plan():
    plan = case("sinkhorn")[2]
    moments, bars = of_plan(plan)
    assert plan.stages == 41 and sum(moment.is_barrier for moment in moments) < 8
    names = [moment.place for moment in moments if moment.is_barrier]
    assert any(re.fullmatch(r"stages 3, 5 … 39", name) for name in names), names
    rounds = {box.rounds for moment in moments for box in moment.boxes}
    assert rounds == {1, 19}
    shown = {bar.texts[0] for bar in bars}
    assert {"x", "sub0", "where0"} <= shown and len(bars) < 8
    assert all(0 <= bar.first < bar.last < len(moments) for bar in bars)


def test_what_is_read_or_computed_again_is_dashed_not_kept():
    kernel = example_kernel("norm_softmax", 65536, form="loops")
    spans = kept(kernel.plan, segments_of(kernel.plan))
    homes = kernel.plan.homes
    assert set(homes.values()) >= {Home.RECOMPUTE}
    assert {id: home for id, (_, _, home) in spans.items() if id in homes} == dict(homes)
    graph = kernel.graph
    assert not any(graph[id].value.spread for id in spans if id not in homes)
    moments, bars = of_plan(kernel.plan)
    again = [box for moment in moments for box in moment.beside if box.dashed]
    assert again and all(box.texts[-2].left.startswith("again from") for box in again)
    assert {bar.texts[1] for bar in bars if not bar.is_kept} >= {"computed again"}
    _, texts = parse(kernel.plan_svg())
    assert "read or computed again, not kept" in texts


def test_a_row_in_chunks_is_read_again_from_the_second_loop_on():
    kernel = example_kernel("rmsnorm_residual", 1 << 20)
    assert kernel.plan.placement.loader == "direct" and kernel.plan.bytes_read_again() == 4 << 20
    rows = {i.id: i.name for i in kernel.graph.inputs if i.role is Role.ROW}
    assert {id for id, home in kernel.plan.homes.items() if home is Home.REREAD} == set(rows)
    moments, _ = of_plan(kernel.plan)
    again = [box for moment in moments for box in moment.beside if box.dashed]
    assert [texts_of(box)[:2] for box in again] == [["x, residual", "again from global memory"]]
    chunked = f"in {kernel.plan.chunks} chunks"
    assert [m.what for m in moments if m.place == "registers"].count(chunked) == 2


def test_pairs_shares_and_fetched_columns_are_shown():
    plan = example_kernel("softmax", 131072).plan
    moments, _ = of_plan(plan)
    texts = {text.left for moment in moments for box in moment.boxes for text in box.texts}
    (pair,) = [s for s in plan.steps if isinstance(s, Reduce)]
    assert pair.is_pair and "carries max0, and sum0 relative to it" in texts
    assert "one barrier of 16 CTAs" in [moment.what for moment in moments]
    plan = plans_of_many_rows("layernorm", 131072)
    moments, _ = of_plan(plan)
    texts = {text.left for moment in moments for box in moment.boxes for text in box.texts}
    assert "one barrier of 4 CTAs" in [moment.what for moment in moments]
    assert "prefetches weight, bias" in texts


def test_what_a_barrier_brings_for_the_next_stage_is_shown():
    plan = plans_of_many_rows("layernorm", 65536)
    moments, _ = of_plan(plan)
    barriers = [(m.what, m.is_barrier) for m in moments if m.place.startswith("stage")]
    assert barriers == [
        ("one barrier of 2 CTAs", True),
        ("of what the barrier before brought", False),
    ]
    _, squares = (s for s in plan.steps if isinstance(s, Reduce))
    assert not squares.exchanges


def plans_of_many_rows(name, n):
    function, arguments = EXAMPLES[name]
    return function.inspect(*arguments(4096, n, BF16, "meta"), arch="sm_90a").plan


def test_what_is_gathered_ahead_is_shown_where_it_is():
    """Loop, barrier, what is done once a row, barrier, loop."""
    kernel = example_kernel("layernorm", 1 << 22)
    plan, graph = kernel.plan, kernel.graph
    spans = kept(plan, segments_of(plan))
    assert {id: home for id, (_, _, home) in spans.items() if id in plan.homes} == dict(plan.homes)
    assert not any(graph[id].value.spread for id in spans if id not in plan.homes)
    moments, _ = of_plan(plan)
    keys = [box.key for moment in moments for box in moment.boxes]
    assert keys == [
        "load-x", "segment0", "stage1", "segment1", "stage2", "segment2", "store-out"
    ]  # fmt: skip
    texts = [text.left for moment in moments for box in moment.boxes for text in box.texts]
    assert "carries sum0 along" in texts and "sum0 as carried, now about mean0" in texts
    assert [m.what for m in moments if m.place == "registers"] == [
        f"in {plan.chunks} chunks", "", f"in {plan.chunks} chunks"
    ]  # fmt: skip


def test_a_late_column_is_loaded_where_it_is_used():
    plan = example_kernel("rmsnorm_residual", 4096).plan
    moments, _ = of_plan(plan)
    (late,) = [m for m in moments if any(box.key.startswith("load-weight") for box in m.beside)]
    assert texts_of(late.beside[0]) == ["weight", "column bf16", "8192 bytes for all rows"]
    assert "mul2 = mul1 * weight" in [text.left for text in late.boxes[0].texts]


def test_a_kernel_without_work_after_its_barrier_has_a_box_there():
    moments, _ = of_plan(kernel_of(lambda x: x.sum(), *rows((4, 4096))).plan)
    assert [texts_of(m.boxes[0])[0] for m in moments if m.place == "registers"] == [
        "reads x", "nothing to compute"
    ]  # fmt: skip


def test_notebooks_get_pictures():
    kernel = example_kernel("softmax", 64)
    assert kernel.graph._repr_svg_() == graph_svg(kernel.graph)
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
from htile.lower.emission.names import value_names
from htile.pictures import graph_dot, graph_json, graph_svg, plan_svg
from tests.lower.cases import example_kernel, random_graph
from tests.test_pictures import KERNELS
for name in ("capped_softmax", "newton"):
    k = KERNELS[name]()
    names = value_names(k.plan)
    for draw in (graph_dot, graph_json, graph_svg):
        print(hashlib.sha256(draw(k.graph, names).encode()).hexdigest())
    print(hashlib.sha256(plan_svg(k.plan).encode()).hexdigest())
print(hashlib.sha256(graph_svg(random_graph(5, 50)).encode()).hexdigest())
"""


def test_two_processes_draw_the_same_bytes():
    one, other = run(DIGESTS, "1", "2")
    assert one == other and len(set(one.split())) == 9


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
