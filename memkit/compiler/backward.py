"""A graph and its gradient as two graphs that hand over saved values: the forward and the backward function of a rule."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from . import ir
from .autodiff import Rule, saving, vjp
from .ir import Graph, Node, Op, param


def backward(
    graph: Graph, wrt: Sequence[str], keep: Callable[[Graph], Container[Node]] | None = None, rules: Mapping[Op, Rule] | None = None
) -> tuple[Graph, Graph]:
    """(forward, backward). Forward is `graph` with what backward needs of its loops and solves as extra results.

    backward params: those of `graph` it uses, the saved values under their labels in forward, and "grad_" + label for
    each result. Its results are labelled by the names in `wrt` and laid out like those parameters; a missing name has a
    gradient of zero. Beside the carries of loops, solves and what a loop hands out, the values that `keep` chooses of each level are
    saved; all others are computed again. rules: of reverse mode, in place of the usual ones.
    """
    labels = graph.labels or tuple(f"result{i}" for i in range(len(graph.results)))
    forward = saving(graph, keep)
    cotangents = [param(f"grad_{label}", r.axes) for label, r in zip(labels, forward.results, strict=True)]
    found = zip(wrt, vjp(forward.results, cotangents, [forward.param(n) for n in wrt], rules), strict=True)
    grads = {name: ir.in_order(grad, forward.param(name).axes) for name, grad in found if grad is not None}
    inside = set(forward.nodes())
    chosen = keep(forward) if keep is not None else ()
    saved: dict[Any, Node] = {}
    sources: list[Node] = []

    def hold(node: Node) -> Node:
        key = (node.args[0], node.attrs["index"]) if node.op is Op.GET else node
        if key not in saved:
            saved[key] = param(f"saved_{len(saved)}", node.axes, node.where)
            sources.append(node)
        return saved[key]

    def cut(node: Node, args: tuple[Node, ...]) -> Node:
        if (node in inside and (node.op is Op.SOLVE or node in chosen)) or (node.op is Op.GET and node.args[0] in inside):
            return hold(node)
        return node if args == node.args else node.replace(args=args)

    pulled = ir.rebuild(Graph((), tuple(grads.values())), cut).results
    used = set(Graph((), pulled).nodes())
    kept = [(s, p) for s, p in zip(sources, saved.values(), strict=True) if p in used]
    params = tuple(p for p in (*forward.params, *(p for _, p in kept), *cotangents) if p in used)
    results = (*forward.results, *(s for s, _ in kept))
    widened = Graph(forward.params, results, (*labels, *(p.attrs["name"] for _, p in kept)))
    return _without_idle_saves(widened), Graph(params, pulled, tuple(grads))


def _without_idle_saves(graph: Graph) -> Graph:
    """Loops whose saved carries nobody reads do not save."""
    users = graph.users()

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        attrs = node.attrs
        if node.body is not None and all(user.attrs["index"] < len(node.body.results) for user in users[node]):
            attrs = {**attrs, "save": False} if attrs["save"] else attrs
        return node if args == node.args and attrs is node.attrs else node.replace(args=args, attrs=attrs)

    return ir.rebuild(graph, change)
