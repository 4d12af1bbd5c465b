"""Which square products are symmetric for certain: one half of such a value, and of its cotangent, tells all.

Where it sits: above `autodiff`, whose rule for products it replaces where a backward function asks for `SYMMETRIC`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memkit.compiler import autodiff, ir
from memkit.compiler.ir import Node, Op
from memkit.compiler.simplify import uniform

Pair = tuple[str, str]  # axes of rows and columns
Pulled = Sequence[Node | None] | Mapping[Node, Node]


def is_symmetric(node: Node) -> bool:
    """Whether an einsum is x x^T, or a product of polynomials in one such matrix."""
    pair = outer(node)
    if pair is None:
        return False
    (a, called), (b, other) = (stripped(x) for x in node.args)
    return leaf(node, pair) is not None or _is_square(a, called, b, other, node)


def outer(node: Node) -> Pair | None:
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


def leaf(node: Node, pair: Pair, known: dict[tuple[Node, Pair], Node | None] | None = None) -> Node | None:
    """The one x x^T that a matrix is a polynomial in; a multiple of the identity counts as one in any, and gives itself."""
    known = {} if known is None else known
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
        return _same([leaf(x, pair, known) for x in node.args if set(pair) <= set(x.axes)], len(node.args))
    if node.op is Op.POINTWISE and node.attrs["fn"] in ("mul", "neg"):
        wide = [x for x in node.args if set(pair) & set(x.axes)]
        return leaf(wide[0], pair, known) if len(wide) == 1 else None
    if node.op is not Op.EINSUM:
        return None
    (a, called), (b, other) = (stripped(x) for x in node.args)
    if _is_square(a, called, b, other, node) and not (_is_product(node, pair) and leaf(node.args[0], _ends(node, 0, pair), known)):
        return node
    if not _is_product(node, pair):
        return None
    return _same([leaf(x, _ends(node, i, pair), known) for i, x in enumerate(node.args)], 2)


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


def _rows_and_columns(node: Node, seen: set[Node]) -> Pair | None:
    """The axes of rows and columns of a sum of multiples of matrix products, if a product is found."""
    base, names = stripped(node)
    if base in seen:
        return None
    seen.add(base)
    if base.op is Op.POINTWISE and base.attrs["fn"] in ("add", "sub", "mul", "neg"):
        found = next(filter(None, (_rows_and_columns(x, seen) for x in base.args if len(x.axes) == len(base.axes))), None)
    else:
        found = outer(base)
    return None if found is None or not set(found) <= set(names) else (names[found[0]], names[found[1]])


def _polynomial(node: Node, grad: Node, wanted: Sequence[bool]) -> Pulled:
    return _through(node, grad) or autodiff.RULES[node.op](node, grad, wanted)


def _product(node: Node, grad: Node, wanted: Sequence[bool]) -> Pulled:
    return _through(node, grad) or _square(node, grad, wanted)


def _through(node: Node, grad: Node) -> Mapping[Node, Node]:
    """Reverse mode of a polynomial y in a = x x^T, right down to x; empty where a node is none.

    The derivative of y along a symmetric matrix is its own transpose, so da is that along dy's symmetric part: forward mode, in which a
    product p q of two polynomials takes p dq + dp q. That too is symmetric, so one half of it will do; and dx = (da + da^T) x = 2 da x.
    """
    pair = _rows_and_columns(node, set())
    square = None if pair is None else leaf(node, pair)
    if pair is None or square is None or square is node or square.op is not Op.EINSUM or not _of_numbers(node, square):
        return {}
    i, j = outer(square) or pair
    grad = ir.rename(ir.add(grad, ir.rename(grad, {pair[0]: pair[1], pair[1]: pair[0]})), {pair[0]: i, pair[1]: j})
    along = _along(node, {square: grad})
    if along is None:
        return {}
    along = ir.rename(along, {pair[0]: i, pair[1]: j})
    x, names = stripped(square.args[0])
    pulled = ir.einsum(along, square.args[1], over=(j,))
    return {x: ir.rename(pulled, {name: axis for axis, name in names.items()})}


def _of_numbers(node: Node, square: Node) -> bool:
    """Whether a polynomial in a square has numbers for factors, which nobody wants a gradient of."""
    stack, seen = [node], {square}
    while stack:
        inner = stack.pop()
        if inner in seen:
            continue
        seen.add(inner)
        factors = inner.args if inner.op is Op.POINTWISE and inner.attrs["fn"] == "mul" else ()
        if factors and not any(uniform(x) is not None for x in factors):
            return False
        stack += [x for x in inner.args if uniform(x) is None]
    return True


def _along(node: Node, known: dict[Node, Node | None]) -> Node | None:
    """The derivative of a polynomial in a matrix, whose own is known; None for 0."""
    if node not in known:
        moving = [x.axes and node.op is not Op.DECAY and uniform(x) is None for x in node.args]
        known[node] = _derived(node, [_along(x, known) if moves else None for x, moves in zip(node.args, moving, strict=True)])
    return known[node]


def _derived(node: Node, slopes: Sequence[Node | None]) -> Node | None:
    there = [x for x in slopes if x is not None]
    if not there:
        return None
    if node.op is Op.RENAME:
        return ir.rename(there[0], node.attrs["names"])
    if node.op is Op.POINTWISE:
        fn = node.attrs["fn"]
        if fn in ("mul", "neg"):
            return node.replace(args=tuple(x if s is None else s for x, s in zip(node.args, slopes, strict=True)), name="")
        first, second = slopes
        return ir.pointwise(fn, first, second) if first and second else first or (ir.neg(there[0]) if fn == "sub" else there[0])
    (p, q), (dp, dq) = node.args, slopes
    if stripped(p)[0] is stripped(q)[0]:
        i, j = outer(node) or ("", "")
        half = ir.einsum(p, there[-1], keep=node.axes)
        return ir.add(half, ir.rename(half, {i: j, j: i}))
    halves = [ir.einsum(a, b, keep=node.axes) for a, b in ((dp, q), (p, dq)) if a is not None and b is not None]
    pair = outer(node)
    return halves[0] if len(halves) == 1 or pair is None else ir.symmetric(ir.add(halves[0], halves[1]), *pair)


def _square(node: Node, grad: Node, wanted: Sequence[bool]) -> Pulled:
    """Reverse mode of an einsum. Of a symmetric y = x x^T, dx = (dy + dy^T) x is one product instead of two.

    A product of one polynomial p in x x^T with itself may pull the same way. The exact dp = dy p + p dy and this (dy + dy^T) p have
    one symmetric part, and no more of dp reaches x: the rule for x x^T takes the sum of a cotangent and its transpose.
    """
    pair, (a, b) = outer(node), node.args
    if pair is None or stripped(a)[0] is not stripped(b)[0] or not is_symmetric(node):
        return autodiff.RULES[Op.EINSUM](node, grad, wanted)
    i, j = pair
    both = ir.add(grad, ir.rename(grad, {i: j, j: i}))
    return ir.einsum(both, b, over=[x for x in ir.order_axes(both.axes, b.axes) if x not in a.axes]), None


def _loop(node: Node, found: Mapping[int, Node], wanted: Sequence[bool]) -> Sequence[Node | None]:
    return autodiff.pull_scan(node, found, wanted, _IN_LOOPS)


# Rules for cotangents of a graph's parameters: those inside are other values. In loops an x x^T on its own is often half masked, and its
# two products then take no more than one of the whole.
_IN_LOOPS = {**autodiff.RULES, Op.EINSUM: _polynomial, Op.POINTWISE: _polynomial, Op.SCAN: _loop}
SYMMETRIC = {**_IN_LOOPS, Op.EINSUM: _product}
