"""Matrices made for every chunk go back into the loop that reads them: a kernel that holds the state makes them in passing."""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.loops import TOKENS, Input, Loop, rewrite_loops


def lodge(graph: Graph) -> Graph:
    """Move into a loop over chunks what only it reads and what is as large as a weight for every chunk.

    rewrite: d = einsum(x, y);  scan(w, d_n: .. w + d_n ..)   ->   scan(w, x_n, y_n: .. w + einsum(x_n, y_n) ..)
    keeps: results bit for bit
    """
    while True:
        users = graph.users()
        only = {n for n in users if len(users[n]) == 1 and n not in graph.results}

        def rewrite(loop: Loop, used: set[tuple[str, int]], only: set[Node] = only):
            return _lodged(loop, only), {place: place for place in used}

        after = rewrite_loops(graph, rewrite)
        if after is graph:
            return graph
        graph = after


def _fits(value: Node, axis: str, only: set[Node]) -> bool:
    widths = [a for a in value.axes if a not in ir.LEADING and a not in TOKENS]
    plain = value.op in (Op.EINSUM, Op.POINTWISE, Op.RENAME) and axis in value.axes and not set(value.axes) & set(TOKENS)
    return plain and len(widths) > 1 and value in only


def _lodged(loop: Loop, only: set[Node]) -> Node:
    chosen = next((s for s in loop.slices if _fits(s.value, loop.axis, only)), None)
    if chosen is None:
        return loop.node
    taken = {p.attrs["name"] for p in loop.body.params}
    slices, consts = [s for s in loop.slices if s is not chosen], list(loop.consts)
    inner: list[Node] = []
    for arg in chosen.value.args:
        if arg.op is Op.CONST:
            inner.append(arg)
            continue
        name = arg.name or "x"
        while name in taken:
            name += "_"
        taken.add(name)
        param = ir.param(name, tuple(a for a in arg.axes if a != loop.axis), arg.where)
        (slices if loop.axis in arg.axes else consts).append(Input(arg, param))
        inner.append(param)
    axes = tuple(a for a in chosen.value.axes if a != loop.axis)
    made = chosen.value.replace(args=tuple(inner), axes=axes)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node is chosen.param:
            return made
        return node if args == node.args else node.replace(args=args)

    body = ir.rebuild(loop.body, change)
    return loop.with_body(body, tuple(slices), tuple(consts)).rebuilt()
