"""The networkx form: nothing of the graph is lost, and isomorphism sees structure, not names."""

import networkx
from networkx.algorithms.isomorphism import categorical_edge_match, categorical_node_match

from memkit.compiler import ir
from memkit.compiler.export import to_networkx, unordered
from memkit.compiler.ir import Graph, param
from tests.compiler.test_autodiff import nested_graph


def product(names, flip=False, fn="gelu"):
    w, x = param(names[0], ("v", "k")), param(names[1], ("k",))
    operands = (x, w) if flip else (w, x)
    return Graph((w, x), (ir.pointwise(fn, ir.einsum(*operands, keep=("v",))),), ("y",))


def same(a, b):
    nodes, edges = categorical_node_match(["op", "fn", "axes"], ["", "", ()]), categorical_edge_match("position", 0)

    def edge_match(x, y):
        return edges(x[0], y[0])

    return networkx.is_isomorphic(to_networkx(a), to_networkx(b), nodes, edge_match)


def test_nodes_edges_and_interface():
    found = to_networkx(product("wx"))
    assert [d["op"] for _, d in found.nodes(data=True)] == ["param", "param", "einsum", "pointwise"]
    assert found.nodes[3]["fn"] == "gelu" and found.nodes[3]["axes"] == ("v",)
    interface = [(d["param"], d["result"]) for _, d in found.nodes(data=True)]
    assert interface == [(0, ()), (1, ()), (None, ()), (None, (0,))]
    assert sorted((u, v, d["position"]) for u, v, d in found.edges(data=True)) == [(0, 2, 0), (1, 2, 1), (2, 3, 0)]
    assert found.graph["labels"] == ("y",)


def test_an_operand_used_twice_has_two_edges():
    x = param("x", ("k",))
    found = to_networkx(Graph((x,), (ir.mul(x, x),)))
    assert sorted(d["position"] for *_, d in found.edges(data=True)) == [0, 1]


def test_isomorphism():
    assert same(product("wx"), product("ab"))
    assert not same(product("wx"), product("wx", fn="silu"))
    assert not same(product("wx"), product("wx", flip=True))


def test_operands_that_may_change_places():
    x = param("x", ("k",))
    assert unordered(ir.mul(x, x)) and unordered(ir.einsum(x, x))
    assert not unordered(ir.sub(x, x)) and not unordered(ir.neg(x))


def test_loops_hold_their_bodies():
    found = to_networkx(nested_graph()[0])
    (outer,) = (d for _, d in found.nodes(data=True) if d["op"] == "scan")
    (inner,) = (d for _, d in outer["body"].nodes(data=True) if d["op"] == "scan")
    assert inner["attrs"]["axis"] == "t"
    assert inner["body"].number_of_nodes() > 4
