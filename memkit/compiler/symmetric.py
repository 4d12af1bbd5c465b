"""Which square products are symmetric for certain: one half of such a value, and of its cotangent, tells all.

Where it sits: above `autodiff`, whose rule for products it replaces where a backward function asks for `SYMMETRIC`.
"""

from __future__ import annotations

from collections.abc import Sequence

from memkit.compiler import autodiff, ir
from memkit.compiler.ir import Node, Op
from memkit.compiler.simplify import uniform

Pair = tuple[str, str]  # axes of rows and columns


def is_symmetric(node: Node) -> bool:
    """Whether an einsum is x x^T, or a product of polynomials in one such matrix."""
    pair = _outer(node)
    if pair is None:
        return False
    (a, called), (b, other) = (stripped(x) for x in node.args)
    return _leaf(node, pair, {}) is not None or _is_square(a, called, b, other, node)


def _outer(node: Node) -> Pair | None:
    """The axes of an einsum's rows and columns, if it has one of each."""
    if node.op is not Op.EINSUM:
        return None
    only = [[x for x in p.axes if x not in q.axes and x in node.axes] for p, q in (node.args, node.args[::-1])]
    return (only[0][0], only[1][0]) if len(only[0]) == len(only[1]) == 1 else None


def summed(node: Node) -> list[str]:
    """The axes that an einsum sums."""
    return [a for a in ir.order_axes(*(x.axes for x in node.args)) if a not in node.axes]


def stripped(node: Node) -> tuple[Node, dict[str, str]]:
    """The value behind renamed axes, and what each of its axes is called here."""
    names = {a: a for a in node.axes}
    while node.op is Op.RENAME:
        back = {new: old for old, new in node.attrs["names"].items()}
        node, names = node.args[0], {back.get(a, a): name for a, name in names.items()}
    return node, names


def _is_square(a: Node, called: dict[str, str], b: Node, other: dict[str, str], node: Node) -> bool:
    """x x^T: the same value twice, with one axis under two names and others summed."""
    if a is not b:
        return False
    moved = [x for x in a.axes if called[x] != other[x]]
    return len(moved) == 1 and called[moved[0]] in node.axes and other[moved[0]] in node.axes and bool(summed(node))


def _leaf(node: Node, pair: Pair, known: dict[tuple[Node, Pair], Node | None]) -> Node | None:
    """The one x x^T that a matrix is a polynomial in; a multiple of the identity counts as one in any, and gives itself."""
    base, names = stripped(node)
    back = {name: x for x, name in names.items()}
    if pair[0] not in back or pair[1] not in back:
        return None
    pair = back[pair[0]], back[pair[1]]
    key = base, pair
    if key not in known:
        known[key] = None  # while it is looked for
        known[key] = _leaf_of(base, pair, known)
    return known[key]


def _leaf_of(node: Node, pair: Pair, known: dict[tuple[Node, Pair], Node | None]) -> Node | None:
    if node.op is Op.DECAY and uniform(node.args[0]) == 0.0 and {node.attrs["axis"], node.attrs["new"]} == set(pair):
        return node
    if node.op is Op.POINTWISE and node.attrs["fn"] in ("add", "sub"):
        return _same([_leaf(x, pair, known) for x in node.args if set(pair) <= set(x.axes)], len(node.args))
    if node.op is Op.POINTWISE and node.attrs["fn"] in ("mul", "neg"):
        wide = [x for x in node.args if set(pair) & set(x.axes)]
        return _leaf(wide[0], pair, known) if len(wide) == 1 else None
    if node.op is not Op.EINSUM:
        return None
    (a, called), (b, other) = (stripped(x) for x in node.args)
    if _is_square(a, called, b, other, node) and not (_is_product(node, pair) and _leaf(node.args[0], _ends(node, 0, pair), known)):
        return node
    if not _is_product(node, pair):
        return None
    return _same([_leaf(x, _ends(node, i, pair), known) for i, x in enumerate(node.args)], 2)


def _is_product(node: Node, pair: Pair) -> bool:
    """Whether an einsum is a product of two square matrices, one with each end of the pair."""
    gone = summed(node)
    p, q = node.args
    ends = [[x for x in pair if x in arg.axes] for arg in (p, q)]
    return len(gone) == 1 and len(ends[0]) == len(ends[1]) == 1 and ends[0] != ends[1] and gone[0] in p.axes and gone[0] in q.axes


def _ends(node: Node, i: int, pair: Pair) -> Pair:
    arg = node.args[i]
    return next(x for x in pair if x in arg.axes), summed(node)[0]


def _same(leaves: list[Node | None], count: int) -> Node | None:
    """The leaf that all have, multiples of the identity aside."""
    if len(leaves) != count or None in leaves:
        return None
    others = {x for x in leaves if x is not None and x.op is not Op.DECAY}
    return None if len(others) > 1 else next(iter(others), leaves[0])


def _pulled(node: Node, grad: Node, wanted: Sequence[bool]) -> Sequence[Node | None]:
    """Reverse mode of an einsum. Of a symmetric y = x x^T, dx = (dy + dy^T) x is one product instead of two.

    A product of one polynomial p in x x^T with itself may pull the same way. The exact dp = dy p + p dy and this (dy + dy^T) p have
    one symmetric part, and no more of dp reaches x: the rule for x x^T takes the sum of a cotangent and its transpose.
    """
    pair, (a, b) = _outer(node), node.args
    if pair is None or stripped(a)[0] is not stripped(b)[0] or not is_symmetric(node):
        return autodiff.RULES[Op.EINSUM](node, grad, wanted)
    i, j = pair
    both = ir.add(grad, ir.rename(grad, {i: j, j: i}))
    return ir.einsum(both, b, over=[x for x in ir.order_axes(both.axes, b.axes) if x not in a.axes]), None


SYMMETRIC = {**autodiff.RULES, Op.EINSUM: _pulled}  # rules for cotangents of a graph's parameters: those inside are other values
