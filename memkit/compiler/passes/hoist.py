"""Work that does not touch what goes round a loop is done before it, for all iterations at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.loops import MEASURES, STAYS, Input, Loop, Outside, rewrite_loops, too_wide
from memkit.compiler.passes.prune import prune


def hoist(graph: Graph) -> Graph:
    """Move nodes of a scan's body that depend on no carry out of the scan; there they have the scan's axis as well.

    rewrite: scan(w, x_n: .. w * f(x_n) ..)  ->  y = f(x);  scan(w, y_n: .. w * y_n ..)
             an output that depends on no carry  ->  no output
    keeps: results up to the order of a sum's terms
    """
    moved = rewrite_loops(graph, _hoisted)
    return graph if moved is graph else prune(moved)


def settle(graph: Graph) -> Graph:
    """Move nodes of a scan's body that are the same in every iteration out of the scan: of what hoist moves, what needs no slice.

    rewrite: scan(c: .. f(c) ..)  ->  y = f(c);  scan(y: .. y ..)
    keeps: results
    """
    moved = rewrite_loops(graph, partial(_hoisted, sliced=False))
    return graph if moved is graph else prune(moved)


def _hoisted(
    loop: Loop, used: set[tuple[str, int]], sliced: bool = True
) -> tuple[Node, dict[tuple[str, int], tuple[str, int] | Node]]:
    free = _free(loop, sliced)
    outside = Outside(loop.axis, {i.param: i.value for i in (*loop.slices, *loop.consts)})
    places: dict[tuple[str, int], tuple[str, int] | Node] = {place: place for place in used}
    for i, output in enumerate(loop.outputs):
        if output in free and ("output", i) in used:
            lifted = outside.node(output)
            if loop.axis in lifted.axes:
                places["output", i] = lifted
    needed = {i for i in range(len(loop.outputs)) if places.get(("output", i)) == ("output", i)}
    frontier = _frontier(loop, free, needed)
    if not frontier:
        return loop.rebuilt(), places
    taken = {p.attrs["name"] for p in loop.body.params}
    inputs = {node: _input(outside, node, taken, i) for i, node in enumerate(frontier)}
    new = _with(loop, inputs)
    return new.rebuilt(), places


def _free(loop: Loop, sliced: bool) -> set[Node]:
    """Nodes of the body that depend on no carry, have no axis that would be confused with the loop's, and are no matrix a token.

    sliced: whether they may depend on slices.
    """
    bound: set[Node] = {c.param for c in loop.carries} | {i.param for i in loop.slices if not sliced}
    order = loop.body.nodes()
    for node in order:
        args = node.args[:1] if node.op in MEASURES else node.args
        clash = loop.axis in node.axes or node.op in (Op.SCAN, Op.GET) or (node.args and too_wide((loop.axis, *node.axes)))
        if clash or any(a in bound for a in args) or (node.op in MEASURES and _measured(node, bound)):
            bound.add(node)
    return {n for n in order if n not in bound}


def _measured(node: Node, bound: set[Node]) -> bool:
    """Whether a length must be read from a carry."""
    return node.args[1] in bound


def _frontier(loop: Loop, free: set[Node], outputs: Iterable[int]) -> list[Node]:
    """The free nodes that are worth moving, and that something which stays reads: the last of each chain of them."""
    found: dict[Node, None] = {}
    stays = [n for n in loop.body.nodes() if n not in free]
    stack = [*(a for n in stays for a in n.args), *(c.result for c in loop.carries), *(loop.outputs[i] for i in outputs)]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node not in free:
            continue
        seen.add(node)
        if node.op in STAYS:
            stack += node.args
        else:
            found.setdefault(node)
    return [n for n in loop.body.nodes() if n in found]


def _input(outside: Outside, node: Node, taken: set[str], place: int) -> tuple[Input, bool]:
    """The input that takes the place of a node in the body, and whether it is a slice."""
    value = outside.node(node)
    name = node.name or f"x{place}"
    while name in taken:
        name += "_"
    taken.add(name)
    return Input(value, ir.param(name, node.axes, node.where)), outside.axis in value.axes


def _with(loop: Loop, inputs: dict[Node, tuple[Input, bool]]) -> Loop:
    """The loop with each of these nodes read from an input."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node in inputs:
            return inputs[node][0].param
        return node if args == node.args else node.replace(args=args)

    body = ir.rebuild(loop.body, change)
    slices = [i for i, sliced in inputs.values() if sliced]
    consts = [i for i, sliced in inputs.values() if not sliced]
    return loop.with_body(body, (*loop.slices, *slices), (*loop.consts, *consts))
