"""A forward function that saves its state at few chunks, and one that makes the states between them again.

The states at all chunk starts are by far the most of what a backward pass needs of a memory with large weights. Made again a part at a
time, from what the forward saved of its products, they never leave the cache.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from . import ir
from .ir import Graph, Node, Op
from .passes import prune
from .passes.loops import Input, Loop, put_in


@dataclass(frozen=True)
class Checkpoints:
    """thin: the forward graph without the stacks of states. states: these stacks, from the state at a part's start and what `thin` saved.

    stacks: label of a stack -> the name of the state it holds. What else goes round starts from states and chunks; its stacks, and what
    was saved of before or behind the loop, `states` makes, too.
    """

    thin: Graph
    states: Graph
    stacks: dict[str, str]


def checkpoints(forward: Graph) -> Checkpoints | None:
    """Both graphs of a forward that saves; None where its state does not simply go round one loop over chunks."""
    labelled = dict(zip(forward.labels, forward.results, strict=True))
    saved = {label: node for label, node in labelled.items() if label.startswith("saved_")}
    scans = {node.args[0] for node in saved.values() if node.op is Op.GET}
    if len(scans) != 1:
        return None
    (scan,) = scans
    loop = Loop.of(scan)
    kinds = {label: loop.kind(x.attrs["index"]) if x.op is Op.GET else ("outside", 0) for label, x in saved.items()}
    kept = {label: loop.outputs[place] for label, (kind, place) in kinds.items() if kind == "output"}
    made = {label: x for label, x in saved.items() if label not in kept}
    starts = [c.start.attrs["name"] if c.start.op is Op.PARAM else "" for c in loop.carries]
    stacks = {label: starts[place] for label, (kind, place) in kinds.items() if kind == "saved" and starts[place]}
    held = {name for name in starts if name}
    if scan.attrs["axis"] != "n" or held != {*stacks.values()} or not held <= {*labelled} or _reads_outputs(loop, made):
        return None
    return Checkpoints(_thin(forward, scan, made), _states(forward, loop, kept, made), stacks)


def _reads_outputs(loop: Loop, made: Mapping[str, Node]) -> bool:
    """Whether something needs what only the whole loop gives."""
    below = Graph((), tuple(made.values())).nodes()
    return any(x.op is Op.GET and x.args[0] is loop.node and loop.kind(x.attrs["index"])[0] == "output" for x in below)


def _thin(forward: Graph, scan: Node, made: Container[str]) -> Graph:
    pairs = [(label, r) for label, r in zip(forward.labels, forward.results, strict=True) if label not in made]

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node is scan:
            return node.replace(args=args, attrs={**node.attrs, "save": False})
        return node if args == node.args else node.replace(args=args)

    return ir.rebuild(Graph(forward.params, tuple(r for _, r in pairs), tuple(label for label, _ in pairs)), change)


def _states(forward: Graph, loop: Loop, kept: Mapping[str, Node], made: Mapping[str, Node]) -> Graph:
    """The loop that only makes its carries; what the forward kept comes in as slices."""
    outside = {label: ir.param(label, ("n", *(a for a in node.axes if a != "n"))) for label, node in kept.items()}
    inside = {node: ir.param(label, node.axes) for label, node in kept.items()}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node in inside:
            return inside[node]
        return node if args == node.args else node.replace(args=args)

    carried = len(loop.carries)
    body = ir.rebuild(Graph(loop.body.params, loop.body.results[:carried]), change)
    carries = tuple(c._replace(result=r) for c, r in zip(loop.carries, body.results, strict=True))
    slices = (*loop.slices, *(Input(outside[label], inside[node]) for label, node in kept.items()))
    fewer = replace(loop, carries=carries, slices=slices, outputs=())
    scan = fewer.rebuilt(save=True)
    results = put_in(Graph((), tuple(made.values())), loop, fewer, scan).results
    graph = prune(Graph((*forward.params, *outside.values()), results, tuple(made)))
    used = set(graph.nodes()) - set(graph.params)
    read = {arg for node in used for arg in node.args} | set(graph.results)
    return Graph(tuple(p for p in graph.params if p in read), graph.results, graph.labels)
