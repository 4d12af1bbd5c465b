"""A multiple of a value goes into the matrix that the same value is multiplied with."""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.symmetric import stripped, summed


def absorb(graph: Graph) -> Graph:
    """Make one product of a multiple of a value and a square matrix times it.

    rewrite: a x + einsum(m, x) over one axis, m square, a a number  ->  einsum(m + a I, x)
    keeps: results up to rounding
    """
    users, results = graph.users(), set(graph.results)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else absorb(node.body)
        if node.op is Op.POINTWISE and node.attrs["fn"] == "add":
            for (multiple, product), old in zip((args, args[::-1]), (node.args[1], node.args[0]), strict=True):
                found = _absorbed(multiple, product) if len(users[old]) == 1 and old not in results else None
                if found is not None:
                    return found.replace(axes=node.axes, name=node.name, where=node.where)
        return node if args == node.args and body is node.body else node.replace(args=args, body=body)

    return ir.rebuild(graph, change)


def _absorbed(multiple: Node, product: Node) -> Node | None:
    """The one product that the sum of a multiple of a value and a product is, if it is one."""
    if multiple.op is not Op.POINTWISE or multiple.attrs["fn"] != "mul" or product.op is not Op.EINSUM:
        return None
    number, x = multiple.args if multiple.args[0].op is Op.CONST else multiple.args[::-1]
    gone = summed(product)
    if number.op is not Op.CONST or len(gone) != 1 or set(x.axes) != set(product.axes):
        return None
    value, called = stripped(x)
    for m, other in (product.args, product.args[::-1]):
        same, names = stripped(other)
        moved = [a for a in value.axes if same is value and names[a] != called[a]]
        if [names[a] for a in moved] == gone and {called[moved[0]], *gone} <= set(m.axes) and called[moved[0]] not in other.axes:
            return product.replace(args=(_more(m, number, called[moved[0]], gone[0]), other))
    return None


def _more(m: Node, number: Node, row: str, column: str) -> Node:
    """m + number I."""
    line = m
    for axis in (a for a in m.axes if a != row):
        line = ir.select(line, axis, 0)
    identity = ir.decay(ir.expand(ir.const(0.0), line), row, column, name="I")
    return ir.add(m, ir.mul(number, identity))
