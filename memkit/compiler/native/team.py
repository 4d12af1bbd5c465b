"""The axis along which a team's members own parts of all states, and the layout in which each part lies by itself."""

from __future__ import annotations

from collections.abc import Sequence

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.kernels.lengths import Lengths, lengths

FEWEST = 32  # entries of an axis that a team shares
OUTER = ("n", "g")  # axes that are not a head's own


def team_axis(body: Graph, carries: Sequence[Node], found: Sequence[Lengths], tokens: int) -> str:
    """The first axis that all states of a loop have and that is long enough to be shared; "" for none. found: the carries' lengths.

    None is shared where all states exist for every token: then members share the tokens.
    """
    states = [(p, size) for p, size in zip(carries, found, strict=True) if len({*p.axes} - {*OUTER}) > 1]
    if all(any({*p.axes, "t"} <= {*node.axes} for node in body.nodes()) for p, _ in states):
        return ""
    common = [a for a in (states[0][0].axes if states else ()) if a not in OUTER and all(a in p.axes for p, _ in states)]
    return next((a for a in common if min(size[a].at(tokens) for _, size in states) >= FEWEST), "")


def parted(graph: Graph, given: Sequence[Lengths], tokens: int) -> Graph:
    """The graph with its loops' states laid out by members: what one of them writes is nowhere next to what another does.

    given: the lengths of the graph's parameters. tokens: the most tokens of a chunk.
    """
    found = lengths(graph, given)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is Op.GET and args != node.args:
            return _got(node, args[0])
        new = node if args == node.args else node.replace(args=args)
        if node.body is None:
            return new
        k = node.attrs["carries"]
        axis = team_axis(node.body, node.body.params[:k], [found[a] for a in node.args[:k]], tokens)
        return new.replace(body=_body(node.body, k, axis)) if axis else new

    return ir.rebuild(graph, change)


def _got(node: Node, loop: Node) -> Node:
    """What a loop gives, from one whose states lie otherwise: where these are saved, they lie so, too."""
    assert loop.body is not None
    place = node.attrs["index"] - len(loop.body.results)
    axes = node.axes if place < 0 else ir.order_axes((loop.attrs["axis"],), loop.body.params[place].axes)
    return node.replace(args=(loop,), axes=axes)


def _body(body: Graph, carries: int, axis: str) -> Graph:
    """The body of a loop whose states have the axis first."""
    moved = {p: p.replace(axes=_first(p.axes, axis)) for p in body.params[:carries] if _first(p.axes, axis) != p.axes}
    new = ir.rebuild(body, lambda node, args: moved.get(node) or (node if args == node.args else node.replace(args=args)))
    ends = (ir.in_order(r, p.axes) for r, p in zip(new.results, new.params[:carries], strict=False))
    return Graph(new.params, (*ends, *new.results[carries:]), new.labels)


def _first(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    lead = tuple(a for a in axes if a in OUTER)
    return axes if axis not in axes else (*lead, axis, *(a for a in axes if a not in (*lead, axis)))
