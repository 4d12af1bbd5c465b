"""Products of small matrices with one long one are regrouped, so that the long one is read twice and not at every step.

An iteration such as Newton-Schulz' x <- a x + (b A + c A A) x with A = x x^T then runs on the small side alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op

WORTH = 1.5  # how many times as long as it has rows a matrix must be: a step costs 4 products of its rows' square then, against 2 with it


class Matrix(NamedTuple):
    """A node and which of its axes are rows and columns."""

    node: Node
    row: str
    col: str


class Left(NamedTuple):
    """A value y = c x + m x: a number (or one a batch entry) and a square matrix before one long matrix, whose rows lie along `axis`."""

    x: Node
    axis: str
    c: Node
    m: Matrix


def regroup(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """Carry the left factors of a chain of such steps, and the products of its values with themselves, on the small side.

    rewrite: y = c x + m x;  z = d y + p y;  y y^T     ->  M = c I + m;  P = d I + p;  z = (P M) x;  M M A, where A = x x^T
    keeps: results up to rounding; only where m is a polynomial in A, so that both are symmetric and commute. `sizes` are of axes;
           one without a size stands for few entries.
    """
    return ir.rebuild(graph, _Regroup(sizes).change)


@dataclass
class _Regroup:
    sizes: Mapping[str, int]
    step: dict[Node, Left] = field(default_factory=dict)  # from the value before
    whole: dict[Node, Left] = field(default_factory=dict)  # from the first value of the chain
    square: dict[tuple[Node, str], Matrix] = field(default_factory=dict)  # x x^T, by x and its axis of rows
    moved: set[Node] = field(default_factory=set)  # those whose square is made on the small side

    def change(self, node: Node, args: tuple[Node, ...]) -> Node:
        new = node if args == node.args else node.replace(args=args)
        if new.op is Op.POINTWISE and new.attrs["fn"] in ("add", "sub"):
            return self._step(new)
        return self._square(new) if new.op is Op.EINSUM else new

    def _step(self, node: Node) -> Node:
        """A sum that may be c x + m x."""
        found = _step_of(node)
        if found is None:
            return node
        before = self.whole.get(found.x)
        if before is None or found.x not in self.moved or before.axis != found.axis:
            self.step[node] = found
            self.whole[node] = found
            return node
        joined = _product(_whole(found), _whole(before))
        whole = Left(before.x, before.axis, ir.const(0.0), joined)
        made = ir.in_order(_applied(whole).replace(name=node.name, where=node.where), node.axes)
        self.step[made], self.whole[made] = found, whole
        return made

    def _square(self, node: Node) -> Node:
        """A product that may be y y^T."""
        found = _square_of(node)
        if found is None:
            return node
        y, axis, matrix = found
        step = self.step.get(y)
        known = self.square.get((step.x, axis)) if step is not None and step.axis == axis else None
        if step is None or known is None or not _is_polynomial(step.m, known) or not self._pays(y, axis, node):
            self.square[y, axis] = matrix
            return node
        whole = _whole(step)
        total = _product(whole, _product(whole, known))
        made = ir.rename(total.node, {total.row: matrix.row, total.col: matrix.col})
        made = ir.in_order(made.replace(name=node.name, where=node.where), node.axes)
        self.square[y, axis] = Matrix(made, matrix.row, matrix.col)
        self.moved.add(y)
        return made

    def _pays(self, y: Node, axis: str, node: Node) -> bool:
        rows, long = self.sizes.get(axis, 0), 1
        for a in y.axes:
            if a != axis and a not in node.axes:
                long *= self.sizes.get(a, 0)
        return rows > 0 and long > WORTH * rows


def _stripped(node: Node) -> tuple[Node, dict[str, str]]:
    """The value behind renamed axes, and what each of its axes is called here."""
    names = {a: a for a in node.axes}
    while node.op is Op.RENAME:
        back = {new: old for old, new in node.attrs["names"].items()}
        node, names = node.args[0], {back.get(a, a): name for a, name in names.items()}
    return node, names


def _terms(node: Node) -> tuple[Node, Node]:
    """(c, x) of a term c * x, where c lacks the last two axes of x."""
    if node.op is Op.POINTWISE and node.attrs["fn"] == "mul":
        for c, x in (node.args, node.args[::-1]):
            if set(x.axes) == set(node.axes) and not set(c.axes) & set(x.axes[-2:]):
                return c, x
    return ir.const(1.0), node


def _step_of(node: Node) -> Left | None:
    """The sum as c x + m x, if it is that."""
    sign = ir.const(-1.0 if node.attrs["fn"] == "sub" else 1.0)
    for flip in (False, True):
        (c, x), (d, product) = (_terms(a) for a in (node.args[::-1] if flip else node.args))
        c, d = (ir.mul(sign, c), d) if flip else (c, ir.mul(sign, d))
        if product.op is not Op.EINSUM or x.op is Op.CONST:
            continue
        base, names = _stripped(x)
        for m, other in (product.args, product.args[::-1]):
            same, called = _stripped(other)
            moved = [a for a in base.axes if same is base and called[a] != names[a]]
            if len(moved) != 1 or base is not x:
                continue
            row, col = names[moved[0]], called[moved[0]]
            gone = {a for arg in product.args for a in arg.axes} - set(product.axes)
            rest = set(x.axes) - {row}
            if gone == {col} and {row, col} <= set(m.axes) and set(m.axes) - {row, col} <= rest and set(product.axes) == set(x.axes):
                return Left(x, row, c, Matrix(ir.mul(d, m), row, col))
    return None


def _square_of(node: Node) -> tuple[Node, str, Matrix] | None:
    """(y, its axis of rows, the matrix) where a product is y y^T."""
    (a, called), (b, other) = (_stripped(x) for x in node.args)
    if a is not b:
        return None
    moved = [x for x in a.axes if called[x] != other[x]]
    if len(moved) != 1:
        return None
    row, col = called[moved[0]], other[moved[0]]
    gone = [called[x] for x in a.axes if called[x] not in node.axes]
    if row not in node.axes or col not in node.axes or not gone or any(called[x] != x for x in a.axes if x != moved[0]):
        return None
    return a, moved[0], Matrix(node, row, col)


def _is_polynomial(m: Matrix, a: Matrix) -> bool:
    """Whether m is made of a by products with itself, sums and numbers: then it commutes with a and is as symmetric."""
    base, names = _stripped(m.node)
    whole, called = _stripped(a.node)
    if base is whole:
        pair = {names[x] for x in base.axes if called[x] in (a.row, a.col)}
        return pair == {m.row, m.col} and all(names[x] == called[x] for x in base.axes if called[x] not in (a.row, a.col))
    if m.row not in names.values() or m.col not in names.values():
        return False
    back = {name: x for x, name in names.items()}
    row, col = back[m.row], back[m.col]
    if base.op is Op.POINTWISE and base.attrs["fn"] in ("add", "sub"):
        return all({row, col} <= set(x.axes) and _is_polynomial(Matrix(x, row, col), a) for x in base.args)
    if base.op is Op.POINTWISE and base.attrs["fn"] == "mul":
        return any(
            not {row, col} & set(c.axes) and {row, col} <= set(x.axes) and _is_polynomial(Matrix(x, row, col), a)
            for c, x in (base.args, base.args[::-1])
        )
    if base.op is Op.EINSUM:
        gone = [x for x in base.args[0].axes if x in base.args[1].axes and x not in base.axes]
        return len(gone) == 1 and any(
            row in p.axes and col not in p.axes and col in q.axes and row not in q.axes
            and _is_polynomial(Matrix(p, row, gone[0]), a) and _is_polynomial(Matrix(q, gone[0], col), a)
            for p, q in (base.args, base.args[::-1])
        )  # fmt: skip
    return False


def _aligned(m: Matrix, like: Matrix) -> Matrix:
    """m with the axis names of `like`."""
    spare = f"{like.row}_{like.col}_"  # a step between, where the names are exchanged
    node = ir.rename(ir.rename(m.node, {m.row: spare}), {m.col: like.col}) if m.col != like.col else ir.rename(m.node, {m.row: spare})
    return Matrix(ir.rename(node, {spare: like.row}), like.row, like.col)


def _whole(left: Left) -> Matrix:
    """c I + m."""
    m = left.m
    if left.c.op is Op.CONST and left.c.attrs["value"] == 0.0:
        return m
    line = m.node
    for axis in (a for a in m.node.axes if a != m.row):
        line = ir.select(line, axis, 0)
    identity = ir.decay(ir.expand(ir.const(0.0), line), m.row, m.col, name="I")
    return Matrix(ir.add(ir.mul(left.c, identity), m.node), m.row, m.col)


def _product(p: Matrix, m: Matrix) -> Matrix:
    """p m, with the axis names of m."""
    between = f"{m.col}_in"
    p = _aligned(p, m)
    made = ir.einsum(ir.rename(p.node, {p.col: between}), ir.rename(m.node, {m.row: between}), over=(between,))
    return Matrix(made, m.row, m.col)


def _applied(left: Left) -> Node:
    """m x."""
    x = ir.rename(left.x, {left.axis: left.m.col})
    m = ir.rename(left.m.node, {left.m.row: left.axis})
    return ir.einsum(m, x, over=(left.m.col,))
