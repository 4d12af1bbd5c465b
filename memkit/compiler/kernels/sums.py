"""Sums over axes: products of tiles where two factors allow it, else entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from memkit.compiler.ir import Node, Op, order_axes

from . import keep
from .lengths import Length
from .memory import Index, Value, both
from .tile import Indices, Tiles


def contract(k: Tiles, node: Node, at: Indices) -> Value:
    """An EINSUM or REDUCE at these indices."""
    over = keep.contracted(node)
    length = {a: k.length[x][a] for x in node.args for a in x.axes}
    inner = [a for a in over if a not in ("n",)]
    if k.rank == 2:
        pair = _product_axes(k, node, at, inner)
        if pair:
            return _product(k, node, at, pair, over, length)
        return _one_by_one(k, node, at, over, length)
    if k.rank == 1:
        return _lines(k, node, at, over, inner, length)
    return _total(k, node, at, over, inner, length)


def _longest(k: Tiles, axes: Sequence[str], length: dict[str, Length]) -> str:
    return max(axes, key=lambda a: k.most(length[a]))


def _product_axes(k: Tiles, node: Node, at: Indices, inner: Sequence[str]) -> tuple[Node, Node, list[str]] | None:
    """(left, right, the axes that a product of tiles can sum): left has the rows, right the columns, and neither the other's."""
    if node.op is not Op.EINSUM:
        return None
    shared = [a for a in inner if all(a in x.axes for x in node.args)]
    for left, right in (node.args, node.args[::-1]):
        along = [frozenset().union(*(at[a].dims for a in x.axes if a in at)) for x in (left, right)]
        if shared and along[0] == {0} and along[1] == {1}:
            return left, right, shared
    return None


def _product(
    k: Tiles, node: Node, at: Indices, pair: tuple[Node, Node, list[str]], over: Sequence[str], length: dict[str, Length]
) -> Value:
    left, right, shared = pair
    axis = _longest(k, shared, length)
    rows, cols = k.blocks
    total = k.w.let(node.name or "total", f"tl.zeros({k.shape()}, F)")
    with ExitStack() as loops:
        here = dict(at)
        for other in (a for a in over if a != axis):
            here[other] = loops.enter_context(k.one_by_one(other, length[other]))
        line, block = loops.enter_context(k.along(axis, length[axis], k.config.inner, "line"))
        across = Index(f"{line.text}[None, :]", frozenset({1}), f"{line.guard}[None, :]" if line.guard else "")
        down = Index(f"{line.text}[:, None]", frozenset({0}), f"{line.guard}[:, None]" if line.guard else "")
        with k.shaped(2, rows, block):
            a = operand(k, left, {**here, axis: across})
        with k.shaped(2, block, cols):
            b = operand(k, right, {**here, axis: down})
        kind = "F" if k.config.exact else "D"
        k.w.line(f"{total} = tl.dot({a}.to({kind}), {b}.to({kind}), {total}, input_precision=P, out_dtype=F)")
    return Value(total, frozenset({0, 1}))


def operand(k: Tiles, node: Node, at: Indices) -> str:
    """A whole tile of a factor, 0 where its indices are out of range."""
    value = k.value(node, at)
    text = k.whole(value)
    guard = both(*(at[a].guard for a in node.axes))
    if (value.masked and value.dims >= {0, 1}) or not guard:
        return text if text.isidentifier() else k.w.let("operand", text)
    return k.w.let("operand", f"tl.where({guard}, {text}, 0.0)")


def _term(k: Tiles, node: Node, at: Indices) -> Value:
    values = [k.value(x, at) for x in node.args]
    dims = frozenset().union(*(v.dims for v in values))
    return values[0] if len(values) == 1 else Value(k.w.let("term", f"{values[0].text} * {values[1].text}"), dims)


def _start(k: Tiles, node: Node) -> str:
    largest = node.op is Op.REDUCE and node.attrs["fn"] == "max"
    empty = f'tl.full({k.shape()}, float("-inf"), F)' if largest else f"tl.zeros({k.shape()}, F)"
    scalar = 'float("-inf") + zero.to(F)' if largest else "zero.to(F)"
    return k.w.let(node.name or "total", empty if k.rank else scalar)


def _more(k: Tiles, node: Node, total: str, term: str) -> None:
    largest = node.op is Op.REDUCE and node.attrs["fn"] == "max"
    k.w.line(f"{total} = tl.maximum({total}, {term})" if largest else f"{total} += {term}")


def _one_by_one(k: Tiles, node: Node, at: Indices, over: Sequence[str], length: dict[str, Length]) -> Value:
    total = _start(k, node)
    with ExitStack() as loops:
        here = dict(at)
        for axis in over:
            here[axis] = loops.enter_context(k.one_by_one(axis, length[axis]))
        _more(k, node, total, _term(k, node, here).text)
    return Value(total, frozenset(range(k.rank)))


def _folded(k: Tiles, node: Node, term: Value, guard: str, axis: int | None) -> str:
    """The sum (or maximum) of a tile over one of its dimensions, or over all of it."""
    largest = node.op is Op.REDUCE and node.attrs["fn"] == "max"
    text = k.whole(term, frozenset(range(k.rank)))
    if guard:
        text = f"tl.where({guard}, {text}, {'float(' + chr(34) + '-inf' + chr(34) + ')' if largest else '0.0'})"
    fold = "tl.max" if largest else "tl.sum"
    if axis is not None:
        return f"{fold}({text}, {axis})"
    return f"{fold}({fold}({text}, 1), 0)" if k.rank == 2 else f"{fold}({text}, 0)"


def _lines(k: Tiles, node: Node, at: Indices, over: Sequence[str], inner: Sequence[str], length: dict[str, Length]) -> Value:
    """A vector: tiles with the summed axis across, folded."""
    if not inner:
        return _one_by_one(k, node, at, over, length)
    axis = _longest(k, inner, length)
    total = _start(k, node)
    (rows,) = k.blocks
    with ExitStack() as loops:
        here = {a: Index(f"{i.text}[:, None]", i.dims, f"{i.guard}[:, None]" if i.guard else "") if i.dims else i for a, i in at.items()}
        for other in (a for a in over if a != axis):
            here[other] = loops.enter_context(k.one_by_one(other, length[other]))
        across, block = loops.enter_context(k.along(axis, length[axis], max(16, min(k.config.inner, 4096 // rows)), "col"))
        here[axis] = across
        with k.shaped(2, rows, block):
            _more(k, node, total, _folded(k, node, _term(k, node, here), across.guard, 1))
    return Value(total, frozenset({0}))


def _total(k: Tiles, node: Node, at: Indices, over: Sequence[str], inner: Sequence[str], length: dict[str, Length]) -> Value:
    """A number: whole tiles folded."""
    if not inner:
        return _one_by_one(k, node, at, over, length)
    tile = order_axes(inner)[-2:]
    total = _start(k, node)
    with ExitStack() as loops:
        here = dict(at)
        for other in (a for a in over if a not in tile):
            here[other] = loops.enter_context(k.one_by_one(other, length[other]))
        forms = ("line",) if len(tile) == 1 else ("row", "col")
        sizes = (k.config.line,) if len(tile) == 1 else (k.config.rows, k.config.cols)
        blocks = []
        for axis, form, most in zip(tile, forms, sizes, strict=True):
            here[axis], block = loops.enter_context(k.along(axis, length[axis], most, form))
            blocks.append(block)
        with k.shaped(len(tile), *blocks):
            guard = both(*(here[a].guard for a in tile))
            _more(k, node, total, _folded(k, node, _term(k, node, here), guard, None))
    return Value(total)
