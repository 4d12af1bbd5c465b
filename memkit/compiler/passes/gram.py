"""A matrix that is multiplied again and again by polynomials in its own x x^T: what is iterated is the small square, not the wide x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memkit.compiler import ir
from memkit.compiler.autodiff import unused
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.simplify import uniform
from memkit.compiler.symmetric import leaf, outer, stripped, summed

STEEP = 2  # degree of a polynomial from which on x x^T is made of x again: its rounding grows with every factor, as x's does not
WIDE = 1.5  # columns for each row, from which on it pays: a factor saves 1.5 products with x and takes 1.5 of squares


class Applied(NamedTuple):
    """A value q y, where q is a polynomial in y y^T."""

    q: Node
    row: str  # axis of q's rows, and of the value's
    column: str  # of q's columns, and of y's rows
    wide: str  # of y's columns, and of the value's
    square: Node  # y y^T
    y: Node


def gram(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Multiply polynomials in one y y^T with each other, and only the last product with y.

    Newton-Schulz iterations, x <- (a I + b x x^T + c (x x^T)^2) x, are such factors. That they can be taken on the Gram matrix, and that
    this needs a fresh start before it loses precision, is from Gram Newton-Schulz (Dao AI Lab, 2026).

    rewrite: einsum(x, x), x = q y and q a polynomial in y y^T  ->  (q q) (y y^T)
             einsum(p, x), p a polynomial in y y^T too          ->  (p q) y
    keeps: results up to rounding
    """
    known: dict[Node, Applied] = {}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else gram(node.body, sizes)
        new = node if args == node.args and body is node.body else node.replace(args=args, body=body)
        if new.op is not Op.EINSUM or len(summed(new)) != 1:
            return new
        a, b = (known.get(stripped(x)[0]) for x in args)
        if a is not None and a is b:
            return _squared(a, new) or new
        joined = _joined(new, b) if b is not None else None
        found = joined or _applied(new, sizes)
        if joined is not None:
            new = ir.einsum(joined.q, joined.y, keep=new.axes).replace(name=new.name, where=new.where)
        if found is not None:
            known[new] = found
        return new

    return ir.rebuild(graph, change)


def _applied(node: Node, sizes: Mapping[str, int]) -> Applied | None:
    """A product of a polynomial in y y^T and y, if the node is one and y is wide."""
    (column,), (q, y) = summed(node), node.args
    value, names = stripped(y)
    rows = [a for a in q.axes if a in node.axes and a not in y.axes]
    back = {name: a for a, name in names.items()}
    if len(rows) != 1 or column not in back:
        return None
    square = leaf(q, (rows[0], column))
    if square is None or square.op is not Op.EINSUM or any(stripped(x)[0] is not value for x in square.args):
        return None
    wide = [a for a in value.axes if a != back[column] and stripped(square.args[0])[1][a] == summed(square)[0]]
    if len(wide) != 1 or not _is_gram(square, back[column], wide[0], {a: names[a] for a in value.axes}):
        return None
    if sizes.get(wide[0], 0) < WIDE * sizes.get(back[column], sizes.get(wide[0], 0)):
        return None
    return Applied(q, rows[0], column, names[wide[0]], square, y)


def _is_gram(node: Node, row: str, wide: str, names: Mapping[str, str]) -> bool:
    """Whether an einsum of one value with itself sums over its axis `wide` and has its `row` twice; all other axes have these names."""
    pair, sides = outer(node), [stripped(x)[1] for x in node.args]
    rest = [a for a in sides[0] if a not in (row, wide)]
    ends = tuple(side[row] for side in sides)
    return ends == pair and all([side[wide]] == summed(node) and all(side[a] == names[a] for a in rest) for side in sides)


def _squared(x: Applied, node: Node) -> Node | None:
    """x x^T as q q (y y^T): all three are symmetric, and commute."""
    value, pair, between = stripped(node.args[0])[0], outer(node), outer(x.square)
    if pair is None or between is None or not _is_gram(node, x.row, x.wide, {a: a for a in value.axes}):
        return None
    if _degree(x.q, {x.square: 1}) > STEEP:
        return None
    i, j = pair
    taken = (*node.axes, *x.q.axes, *x.square.axes)
    k = unused(taken, i)
    l = unused((*taken, k), i)
    twice = ir.einsum(ir.rename(x.q, {x.row: i, x.column: k}), ir.rename(x.q, {x.row: k, x.column: l}), over=(k,))
    square = ir.rename(x.square, dict(zip(between, (l, j), strict=True)))
    return ir.einsum(twice, square, keep=node.axes).replace(name=node.name, where=node.where)


def _joined(node: Node, x: Applied) -> Applied | None:
    """A product of a polynomial in y y^T and x = q y: the polynomial times q, and that times y."""
    (column,), (p, view) = summed(node), node.args
    rows = [a for a in p.axes if a in node.axes and a not in view.axes]
    names = stripped(view)[1]
    if len(rows) != 1 or names.get(x.row) != column or any(names[a] != a for a in names if a != x.row):
        return None
    if rows[0] in x.y.axes or leaf(p, (rows[0], column)) is not x.square:
        return None
    k = unused((*node.axes, *p.axes, *x.q.axes), column)
    q = ir.einsum(ir.rename(p, {column: k}), ir.rename(x.q, {x.row: k}), over=(k,))
    return Applied(q, rows[0], x.column, x.wide, x.square, x.y)


def _degree(node: Node, known: dict[Node, int]) -> int:
    """Of a polynomial in a matrix whose own is known."""
    if node not in known:
        own = [_degree(x, known) for x in node.args if x.axes and node.op is not Op.DECAY and uniform(x) is None]
        known[node] = sum(own) if node.op is Op.EINSUM else max(own, default=0)
    return known[node]
