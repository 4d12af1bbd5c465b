"""Work that no carry depends on is done after a loop, for all iterations at once."""

from __future__ import annotations

from dataclasses import replace

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.loops import STAYS, Loop, Outside, reached, rewrite_loops, too_wide
from memkit.compiler.passes.prune import prune

Place = tuple[str, int]


def sink(graph: Graph) -> Graph:
    """Move what only outputs need out of a scan over chunks: it reads the saved carries and stacked intermediate values.

    rewrite: w', y = scan(w, x, q: .. -> w + f(w, x), w * q)  ->  w', ws = scan(w, x: .. -> w + f(w, x)) saving w;  y = ws * q
    keeps: results up to the order of a sum's terms; loops over single tokens stay as they are, for a carry a token is too much to keep
    """
    moved = rewrite_loops(graph, _sunk)
    return graph if moved is graph else prune(moved)


def _sunk(loop: Loop, used: set[Place]) -> tuple[Node, dict[Place, Place | Node]]:
    places: dict[Place, Place | Node] = {place: place for place in used}
    carried = reached(c.result for c in loop.carries)
    late = [i for i, y in enumerate(loop.outputs) if ("output", i) in used and "t" in y.axes and y not in carried and y.op not in STAYS]
    edge, moves = _edge(loop, [loop.outputs[i] for i in late], carried)
    if not moves:
        return loop.rebuilt(), places
    late = [i for i in late if loop.outputs[i] in moves]
    outputs = (*loop.outputs, *(n for n in edge if n.op is not Op.PARAM))
    new = replace(loop, outputs=outputs).rebuilt(save=True)
    end = Loop.of(new)
    made = {i.param: i.value for i in (*loop.slices, *loop.consts)}
    for i, carry in enumerate(loop.carries):
        made[carry.param] = _get(new, end, ("saved", i), carry.param)
    for i, node in enumerate(outputs[len(loop.outputs) :], len(loop.outputs)):
        made[node] = _get(new, end, ("output", i), node)
    outside = Outside(loop.axis, made)
    places |= {("output", i): outside.node(loop.outputs[i]) for i in late}
    return new, places


def _get(scan: Node, loop: Loop, place: Place, node: Node) -> Node:
    return ir.get(scan, loop.index(*place), ir.order_axes((loop.axis,), node.axes)).replace(name=node.name, where=node.where)


def _edge(loop: Loop, outputs: list[Node], carried: set[Node]) -> tuple[list[Node], set[Node]]:
    """(nodes that stay and that moving nodes read, nodes that move) for the outputs that can move."""
    edge: dict[Node, None] = {}
    moves: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in moves or node in edge:
            continue
        if _can_move(node, loop) and (node not in carried or node.op in STAYS):
            moves.add(node)
            stack += node.args
        else:
            edge[node] = None
    return list(edge), moves


def _can_move(node: Node, loop: Loop) -> bool:
    return node.op not in (Op.PARAM, Op.SCAN, Op.GET) and loop.axis not in node.axes and not too_wide((loop.axis, *node.axes))
