"""A forward function that saves its state at few chunks, and one that makes the states between them again.

The states at all chunk starts are by far the most of what a backward pass needs of a memory with large weights. Made again a part at a
time, from what the forward saved of its products, they never leave the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import ir
from .ir import Graph, Node, Op
from .passes import prune
from .passes.loops import Input, Loop


@dataclass(frozen=True)
class Checkpoints:
    """thin: the forward graph without the stacks of states. states: these stacks, from the state at a part's start and what `thin` saved.

    stacks: label of a stack -> the name of the state it holds.
    """

    thin: Graph
    states: Graph
    stacks: dict[str, str]


def checkpoints(forward: Graph) -> Checkpoints | None:
    """Both graphs of a forward that saves; None where its state does not simply go round one loop over chunks."""
    labelled = dict(zip(forward.labels, forward.results, strict=True))
    saved = {label: node for label, node in labelled.items() if label.startswith("saved_")}
    scans = {node.args[0] for node in saved.values() if node.op is Op.GET}
    if len(scans) != 1 or any(node.op is not Op.GET for node in saved.values()):
        return None
    (scan,) = scans
    loop = Loop.of(scan)
    kinds = {label: loop.kind(node.attrs["index"]) for label, node in saved.items()}
    stacks = {}
    for label, (kind, place) in kinds.items():
        if kind != "saved":
            continue
        start = loop.carries[place].start
        name = start.attrs.get("name", "") if start.op is Op.PARAM else ""
        final = labelled.get(name)
        if final is None or final.op is not Op.GET or final.args[0] is not scan or loop.kind(final.attrs["index"]) != ("carry", place):
            return None
        stacks[label] = name
    if scan.attrs["axis"] != "n" or len(stacks) != len(loop.carries):
        return None
    kept = {label: loop.outputs[place] for label, (kind, place) in kinds.items() if kind == "output"}
    return Checkpoints(_thin(forward, stacks), _states(forward, loop, kept, {n: saved[n] for n in stacks}), stacks)


def _thin(forward: Graph, stacks: dict[str, str]) -> Graph:
    pairs = [(label, r) for label, r in zip(forward.labels, forward.results, strict=True) if label not in stacks]
    scan = next(iter(r.args[0] for label, r in zip(forward.labels, forward.results, strict=True) if label in stacks))

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node is scan:
            return node.replace(args=args, attrs={**node.attrs, "save": False})
        return node if args == node.args else node.replace(args=args)

    return ir.rebuild(Graph(forward.params, tuple(r for _, r in pairs), tuple(label for label, _ in pairs)), change)


def _states(forward: Graph, loop: Loop, kept: dict[str, Node], stacks: dict[str, Node]) -> Graph:
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
    scan = replace(loop, carries=carries, slices=slices, outputs=()).rebuilt(save=True)
    results = tuple(ir.get(scan, carried + loop.kind(node.attrs["index"])[1], node.axes) for node in stacks.values())
    graph = prune(Graph((*forward.params, *outside.values()), results, tuple(stacks)))
    used = set(graph.nodes()) - set(graph.params)
    read = {arg for node in used for arg in node.args} | set(graph.results)
    return Graph(tuple(p for p in graph.params if p in read), graph.results, graph.labels)
