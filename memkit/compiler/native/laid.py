"""Sums over windows in which every value has a place of its own: they lay values side by side, and an entry is found without a loop."""

from __future__ import annotations

from collections.abc import Callable

from memkit.compiler.ir import Node, Op


def laid(fold: Node, alone: Callable[[Node], bool] = lambda node: True) -> tuple[list[Node], set[Node]]:
    """The PLACE terms that a FOLD adds up, each at one index of its inner or outer axis, and all that lies between; nothing where it adds
    up other values, too.

    alone: whether nothing else reads a node.
    """
    a, found, inner, stack = fold.attrs, list[Node](), set[Node](), [fold.args[0]]
    while stack and a["step"] == 1:
        node = stack.pop()
        inner.add(node)
        if not alone(node):
            return [], set()
        if node.op is Op.POINTWISE and node.attrs["fn"] == "add" and all({*x.axes} == {*node.axes} for x in node.args):
            stack += reversed(node.args)
        elif node.op is Op.PLACE and node.attrs["axis"] in (a["inner"], a["outer"]):
            found.append(node)
        else:
            return [], set()
    return found, inner
