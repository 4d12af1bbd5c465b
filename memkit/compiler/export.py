"""A graph as a networkx graph: for pattern search, for isomorphism between two rules, for drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memkit.compiler.ir import Graph, Node, Op

if TYPE_CHECKING:
    import networkx


def to_networkx(graph: Graph) -> networkx.MultiDiGraph:
    """Edges go from operand to user and carry `position`, the operand's place.

    Node attributes: op, fn ("" where there is none), axes, attrs, name, where, body (a networkx graph, for a loop),
    param and result (positions in the graph's interface, None and () elsewhere). Vertices number `graph.nodes()`.
    """
    import networkx

    found = networkx.MultiDiGraph(labels=graph.labels)
    order = graph.nodes()
    number = {node: i for i, node in enumerate(order)}
    params = {node: i for i, node in enumerate(graph.params)}
    for node in order:
        found.add_node(
            number[node],
            op=node.op.value,
            fn=node.attrs.get("fn", ""),
            axes=node.axes,
            attrs=dict(node.attrs),
            name=node.name,
            where=node.where,
            body=None if node.body is None else to_networkx(node.body),
            param=params.get(node),
            result=tuple(i for i, r in enumerate(graph.results) if r is node),
        )
        for position, arg in enumerate(node.args):
            found.add_edge(number[arg], number[node], position=position)
    return found


COMMUTATIVE = frozenset(("add", "mul", "maximum", "minimum", "eq"))


def unordered(node: Node) -> bool:
    """Whether the operands of `node` may change places, so that a comparison should not ask for their positions."""
    return node.op is Op.EINSUM or (node.op is Op.POINTWISE and node.attrs["fn"] in COMMUTATIVE)
