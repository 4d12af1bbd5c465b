"""Equal work is done once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op

COMMUTE = ("add", "mul", "maximum", "minimum", "eq")


def dedupe(graph: Graph) -> Graph:
    """One node for all that have equal operands, whatever the order of a sum's or product's operands, or of the axes.

    rewrite: y = a * b;  z = b * a  ->  y = z = a * b
    keeps: results bit for bit where the order of two factors does not change a rounding; the axes' order of results
    """
    seen: dict[Any, Node] = {}
    results = set(graph.results)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else dedupe(node.body)
        if args != node.args or body is not node.body:
            node_now = node.replace(args=args, body=body)
        else:
            node_now = node
        if node.op is Op.PARAM:
            return node_now
        first = seen.setdefault(_key(node_now), node_now)
        if node in results and first.axes != node.axes:  # the order of a result's axes is what the caller sees
            return seen.setdefault((_key(node_now), node.axes), ir.einsum(first, ir.const(1.0), keep=node.axes))
        return first

    return ir.rebuild(graph, change)


def _key(node: Node) -> Any:
    args = node.args
    if node.op is Op.EINSUM or node.attrs.get("fn") in COMMUTE:
        args = tuple(sorted(args, key=id))
    axes = node.axes if node.op is Op.TENSOR else frozenset(node.axes)
    return node.op, args, axes, _frozen(node.attrs), node.body


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
