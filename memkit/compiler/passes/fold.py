"""Algebra on constants, in sums and along time, on top of what `simplify` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.loops import laid_out_as
from memkit.compiler.simplify import simplify, uniform


def fold(graph: Graph) -> Graph:
    """Apply the rules below and `simplify` until none applies.

    rewrite: c x + d x -> (c + d) x        einsum(c x, y) -> c einsum(x, y)
             windows of one slot -> the axis renamed        their fold -> the axis renamed back
             decay(c stretched over n) -> decay(c) stretched over n        decay(1) -> tril(1)
    keeps: results up to rounding
    """
    while (after := simplify(_once(graph))) is not graph:
        graph = after
    return graph


def _once(graph: Graph) -> Graph:
    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else fold(node.body)
        if args != node.args or body is not node.body:
            node = node.replace(args=args, body=body)
        rule = RULES.get(node.op)
        found = rule(node) if rule else None
        if found is None or found in node.args or found.op is Op.PARAM:
            return found or node
        return found.replace(name=found.name or node.name, where=found.where or node.where)

    return laid_out_as(graph, ir.rebuild(graph, change))


def _scaled(node: Node) -> tuple[float, Node]:
    """(c, x) of a node that is c * x with a plain number c."""
    if node.op is Op.POINTWISE:
        if node.attrs["fn"] == "neg":
            factor, x = _scaled(node.args[0])
            return -factor, x
        if node.attrs["fn"] == "mul":
            for one, x in (node.args, node.args[::-1]):
                if one.op is Op.CONST:
                    factor, x = _scaled(x)
                    return one.attrs["value"] * factor, x
    return 1.0, node


def _pointwise(node: Node) -> Node | None:
    """c x + d x, and c x - d x."""
    if node.attrs["fn"] not in ("add", "sub"):
        return None
    (c, x), (d, y) = map(_scaled, node.args)
    if x is not y or x.op is Op.CONST:
        return None
    total = c + d if node.attrs["fn"] == "add" else c - d
    return ir.mul(ir.const(total), x)


def _einsum(node: Node) -> Node | None:
    """A number in front of a factor is moved in front of the sum, where it meets others and where one call can take it in."""
    (c, a), (d, b) = map(_scaled, node.args)
    if c * d == 1.0 and a is node.args[0] and b is node.args[1]:
        return None
    return ir.mul(ir.const(c * d), node.replace(args=(a, b), name=""))


def _windows(node: Node) -> Node | None:
    """One slot a window: the windows are the entries; the slot axis has length one and repeats nothing."""
    a = node.attrs
    if a["size"] != 1 or a["step"] != 1:
        return None
    like = ir.tensor((1.0,), (a["inner"],))
    return ir.mul(ir.rename(node.args[0], {a["axis"]: a["outer"]}), like)


def _fold(node: Node) -> Node | None:
    a = node.attrs
    if a["size"] != 1 or a["step"] != 1:
        return None
    return ir.rename(ir.reduce(node.args[0], (a["inner"],)), {a["outer"]: a["axis"]})


def _decay(node: Node) -> Node | None:
    """What is the same along other axes decays the same along them; what never decays is a triangle of ones."""
    (x,), axis, new = node.args, node.attrs["axis"], node.attrs["new"]
    value = uniform(x)
    if x.op is Op.EXPAND and len(x.axes) > 1 and value is not None and set(x.args[1].axes) == set(x.axes):
        line = ir.expand(ir.const(value), _line(x.args[1], axis))
        return ir.expand(ir.decay(line, axis, new), x.args[1])
    if value == 1.0:
        wide = ir.mul(x, ir.rename(x, {axis: new}))
        return ir.tril(wide, axis, new)
    return None


def _line(like: Node, axis: str) -> Node:
    """A node with this axis alone, as long as in `like`: of its other axes the first entry."""
    for other in like.axes:
        if other != axis:
            like = ir.select(like, other, 0)
    return like


RULES: Mapping[Op, Callable[[Node], Node | None]] = {
    Op.POINTWISE: _pointwise,
    Op.EINSUM: _einsum,
    Op.WINDOWS: _windows,
    Op.FOLD: _fold,
    Op.DECAY: _decay,
}
