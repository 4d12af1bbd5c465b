"""Loops lose what nobody reads. (Nodes outside loops need no pass: a graph holds only what its results are made of.)"""

from __future__ import annotations

from dataclasses import replace

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.loops import Carry, Input, Loop, reached, rewrite_loops

Place = tuple[str, int]


def prune(graph: Graph) -> Graph:
    """Drop carries, slices, constants, outputs and saved stacks of scans that no result depends on.

    rewrite: w, y, z = scan(w, x, v: .. -> w', y, z) with z unread and v only in z   ->   w, y = scan(w, x: .. -> w', y)
             a carry that is its own new value   ->   a constant;   an input given twice   ->   given once
    keeps: results bit for bit
    """
    return rewrite_loops(graph, _pruned)


def _pruned(loop: Loop, used: set[Place]) -> tuple[Node, dict[Place, Place | Node]]:
    loop, fixed = _fixed_carries(loop, used)
    loop = _merged_inputs(loop)
    kept = [i for i in range(len(loop.outputs)) if ("output", i) in used]
    needed = _needed_carries(loop, used, kept)
    places: dict[Place, Place | Node] = dict(fixed)
    places |= {("output", i): ("output", at) for at, i in enumerate(kept)}
    places |= {(kind, i): (kind, at) for at, i in enumerate(needed) for kind in ("carry", "saved")}
    carries = tuple(loop.carries[i] for i in needed)
    outputs = tuple(loop.outputs[i] for i in kept)
    inside = reached([*(c.result for c in carries), *outputs])
    slices = tuple(s for s in loop.slices if s.param in inside) or loop.slices[:1]  # one tells the number of iterations
    consts = tuple(c for c in loop.consts if c.param in inside)
    new = replace(loop, carries=carries, slices=slices, consts=consts, outputs=outputs)
    return new.rebuilt(any(kind == "saved" for kind, _ in used)), places


def _fixed_carries(loop: Loop, used: set[Place]) -> tuple[Loop, dict[Place, Node]]:
    """Carries that never change become constants; their places are renumbered only later, so they stay as carries nobody needs."""
    found: dict[Place, Node] = {}
    for i, carry in enumerate(loop.carries):
        if carry.result is carry.param and ("saved", i) not in used and set(carry.start.axes) == set(carry.param.axes):
            found["carry", i] = carry.start
            loop = replace(loop, consts=(*loop.consts, Input(carry.start, carry.param)))
            blank = ir.param(f"{carry.param.attrs['name']}_fixed", carry.param.axes)
            loop = replace(loop, carries=(*loop.carries[:i], Carry(carry.start, blank, blank), *loop.carries[i + 1 :]))
    used.difference_update(found)
    return loop, found


def _needed_carries(loop: Loop, used: set[Place], outputs: list[int]) -> list[int]:
    needed = {i for i in range(len(loop.carries)) if {("carry", i), ("saved", i)} & used}
    while True:
        inside = reached([*(loop.carries[i].result for i in needed), *(loop.outputs[i] for i in outputs)])
        more = {i for i, carry in enumerate(loop.carries) if carry.param in inside} - needed
        if not more:
            return sorted(needed)
        needed |= more


def _merged_inputs(loop: Loop) -> Loop:
    """One parameter where two were given the same node."""
    instead: dict[Node, Node] = {}
    kept: list[list[Input]] = []
    for group in (loop.slices, loop.consts):
        first: dict[tuple[Node, tuple[str, ...]], Node] = {}
        for value, param in group:
            if first.setdefault((value, param.axes), param) is not param:
                instead[param] = first[value, param.axes]
        kept.append([i for i in group if i.param not in instead])
    if not instead:
        return loop

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is Op.PARAM:
            return instead.get(node, node)
        return node if args == node.args else node.replace(args=args)

    body = ir.rebuild(loop.body, change)
    return loop.with_body(body, tuple(kept[0]), tuple(kept[1]))
