"""A graph as others see it: its nodes by id, its networkx.DiGraph, copies of it."""

import copy
import pickle
from dataclasses import replace

import networkx as nx
import pytest
import torch

from htile.errors import TraceError
from htile.frontend.graph import Builder, Graph, Role
from htile.frontend.roles import Spec
from htile.frontend.trace import trace


def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


@pytest.fixture
def graph() -> Graph:
    return trace(softmax, [Spec("x", Role.ROW, torch.float32, (8,))], 8)


def test_the_dag_has_every_node_and_operand(graph):
    dag = graph.dag
    assert type(dag) is nx.DiGraph and nx.is_directed_acyclic_graph(dag)
    assert list(dag) == list(range(len(graph)))
    assert [dag.nodes[id]["node"] for id in dag] == list(graph)
    assert set(dag.edges) == {(i, node.id) for node in graph for i in node.inputs}
    assert all(graph.users(id) == sorted(dag.successors(id)) for id in dag)


def test_the_dag_is_one_and_frozen(graph):
    assert graph.dag is graph.dag and nx.is_frozen(graph.dag)
    for change in (lambda dag: dag.add_node(99), lambda dag: dag.remove_edge(0, 1)):
        with pytest.raises(nx.NetworkXError, match="Frozen graph"):
            change(graph.dag)
    with pytest.raises(AttributeError):
        graph.nodes = ()


def test_nodes_by_id(graph):
    assert [graph[id].id for id in range(len(graph))] == [node.id for node in graph]
    for id in (-1, len(graph), None):
        with pytest.raises(KeyError):
            graph[id]


@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))],
    ids=["copy", "deepcopy", "pickle"],
)  # fmt: skip
def test_copies(graph, copied, seen):
    """Whether the dag was asked for before or not."""
    if seen:
        assert graph.dag
    other = copied(graph)
    assert other != graph and str(other) == str(graph) and list(other) == list(graph)
    assert nx.is_frozen(other.dag) and list(other.dag.edges) == list(graph.dag.edges)


def test_a_finished_builder_adds_nothing(graph):
    builder = Builder("f", 8)
    x = builder.add_input("x", Role.ROW, torch.float32, graph[0].value)
    whole = builder.finish([replace(graph.outputs[0], id=x)], None)
    with pytest.raises(TraceError, match="after its trace"):
        builder.add_const(1.0, graph[0].value)
    assert len(whole) == 1
