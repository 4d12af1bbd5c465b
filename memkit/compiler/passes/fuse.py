"""Scores, their mask and the sum over their columns become one node, which a kernel can do in one pass."""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.passes.loops import TOKENS


def fuse(graph: Graph) -> Graph:
    """Find masked products, whatever the order of the factors and wherever a sign or a number stands between them.

    rewrite: einsum(mul(einsum(z, x), c), d)  ->  masked_product(z, x, c, d)
    keeps: results up to rounding (a number moves into c, a sign in front)
    """
    uses = _uses(graph)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else fuse(node.body)
        if node.op is Op.EINSUM:
            for weighed, d, inner in ((args[0], args[1], node.args[0]), (args[1], args[0], node.args[1])):
                found = _match(node, weighed, d, inner, uses)
                if found is not None:
                    return found
        return node if args == node.args and body is node.body else node.replace(args=args, body=body)

    return ir.rebuild(graph, change)


def _uses(graph: Graph) -> dict[Node, int]:
    found: dict[Node, int] = dict.fromkeys(graph.nodes(), 0)
    for node in (*(a for n in list(found) for a in n.args), *graph.results):
        found[node] += 1
    return found


def _match(node: Node, weighed: Node, d: Node, before: Node, uses: dict[Node, int]) -> Node | None:
    """The masked product that `node` = einsum(weighed, d) is, if it is one. `before` is `weighed` as the graph had it."""
    sign, factors = _factors(weighed, before, uses)
    for i, scores in enumerate(factors):
        rest = factors[:i] + factors[i + 1 :]
        found = _masked(node, scores, rest, d) if rest and scores.op is Op.EINSUM else None
        if found is not None:
            if sign > 0:
                return found.replace(name=node.name, axes=node.axes, where=node.where)
            found = found.replace(axes=node.axes, where=node.where)
            return ir.neg(found, name=node.name).replace(axes=node.axes, where=node.where)
    return None


def _masked(node: Node, scores: Node, factors: list[Node], d: Node) -> Node | None:
    z, x = scores.args
    weights = {a for f in factors for a in f.axes}
    contract = tuple(a for a in ir.order_axes(z.axes, x.axes) if a not in scores.axes)
    gone = [a for a in ir.order_axes(scores.axes, tuple(weights), d.axes) if a not in node.axes]
    if len(gone) != 1 or not contract or set(contract) & (weights | set(d.axes)) or not set(contract) <= set(z.axes) & set(x.axes):
        return None
    (cols,) = gone
    if cols in z.axes:
        z, x = x, z
    rows = [a for a in z.axes if a in TOKENS and a not in x.axes]
    if cols not in TOKENS or cols in z.axes or cols not in x.axes or cols not in d.axes or not rows:
        return None
    c = factors[0]
    for factor in factors[1:]:
        c = ir.mul(c, factor)
    found = ir.masked_product(z, x, c, d, contract, cols)
    return found if set(found.axes) == set(node.axes) else None


def _factors(node: Node, before: Node, uses: dict[Node, int]) -> tuple[int, list[Node]]:
    """The factors of a product, and the sign in front of it; what is read elsewhere too stays whole."""
    if node.op is not Op.POINTWISE or uses[before] > 1 or node.attrs["fn"] not in ("neg", "mul"):
        return 1, [] if node.op is Op.EINSUM and uses[before] > 1 else [node]
    parts = [_factors(a, b, uses) for a, b in zip(node.args, before.args, strict=True)]
    sign = -1 if node.attrs["fn"] == "neg" else 1
    for other, _ in parts:
        sign *= other
    return sign, [f for _, found in parts for f in found]
