"""Text of torch expressions over named axes: the layer between the graph and Python's syntax.

A `Value` knows in which order its dimensions really lie, so that a view is written only where two values must line up.
Everything here is text in, text out; nothing knows of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# how tightly the outermost operation of an expression binds
COMPARE, SUM, PRODUCT, UNARY, ATOM = range(5)


class Product(NamedTuple):
    """A batched matrix product [g, a, c] x [g, c, b] that an addition may still take in."""

    left: Value
    right: Value
    scale: float


@dataclass(frozen=True)
class Value:
    """An expression and the order of its dimensions."""

    text: str
    axes: tuple[str, ...] = ()  # the actual order of the dimensions
    rank: int = ATOM
    kind: str = "tensor"  # "tensor" | "bool" | "number": a Python float, no tensor at all
    product: Product | None = None
    factors: tuple[Value, Value] | None = None  # of an elementwise product, aligned with `axes`

    def bound(self, rank: int) -> str:
        """The text, in parentheses where an operation of this rank would tear it apart."""
        return self.text if self.rank >= rank else f"({self.text})"

    def then(self, suffix: str, axes: Sequence[str]) -> Value:
        """The same followed by a method call or an index."""
        if not suffix:
            return replace(self, axes=tuple(axes))
        if suffix == ".mT" and self.rank == ATOM and self.text.endswith(suffix):
            return Value(self.text[: -len(suffix)], tuple(axes), kind=self.kind)
        return Value(self.bound(ATOM) + suffix, tuple(axes), kind=self.kind)

    @property
    def named(self) -> bool:
        return self.text.isidentifier()


def number(value: float) -> Value:
    text = repr(value) if value == value and abs(value) != float("inf") else f'float("{value}")'
    return Value(text, rank=UNARY if text.startswith("-") else ATOM, kind="number")


def call(function: str, args: Sequence[Value | str | int], axes: Sequence[str]) -> Value:
    texts = [a.text if isinstance(a, Value) else str(a) for a in args]
    return Value(f"{function}({', '.join(texts)})", tuple(axes))


def infix(sign: str, rank: int, a: Value, b: Value, axes: Sequence[str]) -> Value:
    # a @ b next to * is legal Python without parentheses, and unreadable
    left = f"({a.text})" if " @ " in a.text and a.rank == PRODUCT and sign != "+" and sign != "-" else a.bound(rank)
    return Value(f"{left} {sign} {b.bound(rank + 1)}", tuple(axes), rank)


def times(a: Value, b: Value, order: Sequence[str]) -> Value:
    """The elementwise product, over dimensions in this order."""
    a, b = arrange(a, order), arrange(b, order)
    return replace(infix("*", PRODUCT, a, b, order), factors=(a, b))


# ---- views


def permute(value: Value, order: Sequence[str]) -> Value:
    """The same value with its dimensions in another order."""
    order = tuple(order)
    if value.axes == order:
        return value
    n = len(order)
    moved = [i for i in range(n) if value.axes[i] != order[i]]
    if len(moved) == 2:
        return value.then(".mT" if moved == [n - 2, n - 1] else f".transpose({moved[0]}, {moved[1]})", order)
    for axis in order:
        rest = [a for a in value.axes if a != axis]
        at = order.index(axis)
        if (*rest[:at], axis, *rest[at:]) == order:
            return value.then(f".movedim({value.axes.index(axis)}, {at})", order)
    return value.then(f".permute({', '.join(str(value.axes.index(a)) for a in order)})", order)


def arrange(value: Value, order: Sequence[str]) -> Value:
    """`value` ready to be broadcast against `order`: permuted, with a dimension of one for each later axis it lacks."""
    if value.kind == "number" or not value.axes:
        return value
    value = permute(value, [a for a in order if a in value.axes])
    first = next(i for i, a in enumerate(order) if a in value.axes)
    slots = ["None" if a not in value.axes else ":" for a in order[first:]]
    if "None" not in slots:
        return value
    front = slots[: len(slots) - slots[::-1].index("None")]  # positions from the left; what follows needs no mention
    back = ["...", *slots[slots.index("None") :]]
    slots = back if slots[-1] == "None" or len(back) < len(front) else front
    return value.then(f"[{', '.join(slots)}]", order[first:])


def index(value: Value, axis: str, text: str, new: Sequence[str]) -> Value:
    """value[.., text, ..] at one axis; `new` are the axes of the result."""
    at = value.axes.index(axis)
    behind = len(value.axes) - at - 1
    slots = [":"] * at + [text] if at <= behind else ["...", text] + [":"] * behind
    return value.then(f"[{', '.join(slots)}]", new)


def dims(value: Value, axes: Sequence[str]) -> str:
    """The dimensions of `axes`, counted from the end: one number, or a tuple."""
    found = sorted(value.axes.index(a) - len(value.axes) for a in axes)
    return str(found[0]) if len(found) == 1 else f"({', '.join(map(str, found))})"


def broadcast_order(values: Sequence[Value], axes: Sequence[str]) -> tuple[str, ...]:
    """An order of `axes` in which the fewest values need a permutation; the given one where that is no worse."""
    orders = [tuple(axes), *(v.axes for v in values if set(v.axes) == set(axes))]

    def moves(order: tuple[str, ...]) -> int:
        return sum(list(v.axes) != [a for a in order if a in v.axes] for v in values)

    return min(orders, key=moves)


# ---- contraction

Namer = Callable[[Value], Value]  # gives an expression a name, so that it may be read twice


def contract(a: Value, b: Value, axes: Sequence[str], bind: Namer) -> Value:
    """The product of a and b summed over every axis that `axes` lacks, as the cheapest of three: multiply, dot, matrix product."""
    a, b = (_sum_lonely(x, y, axes) for x, y in ((a, b), (b, a)))
    shared = [x for x in a.axes if x in b.axes and x not in axes]
    left = [x for x in a.axes if x not in b.axes]
    right = [x for x in b.axes if x not in a.axes]
    for one, other in ((a, b), (b, a)):
        if one.text == "1.0":
            return other
    if not shared:
        order = broadcast_order((a, b), axes)
        return times(a, b, order)
    if not left and not right:
        order = broadcast_order((a, b), a.axes)
        both = times(a, b, order)
        return both.then(f".sum({dims(both, shared)})", [x for x in order if x not in shared])
    if not right or (left and _last(axes, right, left)):
        return matrix_product(a, b, axes, shared, bind)
    return matrix_product(b, a, axes, shared, bind)


def _sum_lonely(x: Value, other: Value, axes: Sequence[str]) -> Value:
    lonely = [a for a in x.axes if a not in other.axes and a not in axes]
    return x.then(f".sum({dims(x, lonely)})", [a for a in x.axes if a not in lonely]) if lonely else x


def _last(axes: Sequence[str], right: Sequence[str], left: Sequence[str]) -> bool:
    """Whether the free axes of the right operand come last in the result, as they do in a matrix product."""
    free = [x for x in axes if x in right or x in left]
    return free[-1] in right


def matrix_product(a: Value, b: Value, axes: Sequence[str], shared: Sequence[str], bind: Namer) -> Value:
    """a [batch, left, shared] @ b [batch, shared, right], several axes in one place being merged and cut apart again."""
    batch = [x for x in a.axes if x in b.axes and x in axes]
    batch.sort(key=list(axes).index)
    left = [x for x in axes if x in a.axes and x not in b.axes]
    right = [x for x in axes if x in b.axes and x not in a.axes]
    if not batch and len(shared) == 1 and len(right) <= 1:  # torch folds the leading axes of the left operand by itself
        return infix("@", PRODUCT, permute(a, [*left, *shared]), permute(b, [*shared, *right]), [*left, *right])
    a, b = permute(a, [*batch, *left, *shared]), permute(b, [*batch, *shared, *right])
    groups = (left, right)
    a, b = (bind(x) if len(group) > 1 else x for x, group in zip((a, b), groups, strict=True))
    sizes = [f"{x.text}.shape[{x.axes.index(g[0])}:{x.axes.index(g[-1]) + 1}]" for x, g in zip((a, b), groups, strict=True) if len(g) > 1]
    n = len(batch)
    a, b = _merge(_merge(a, n + len(left), shared), n, left), _merge(_merge(b, n + len(shared), right), n, shared)
    if not right:
        b = b.then("[..., None]", [*b.axes, "1"])
    if not left:
        a = a.then("[..., None, :]", [*a.axes[:-1], "1", a.axes[-1]])
    merged = [*batch, "left", "right"]
    if n == 1:
        out = replace(call("torch.bmm", (a, b), merged), product=Product(a, b, 1.0))
    else:
        out = infix("@", PRODUCT, a, b, merged)
    return _cut(out, batch, left, right, sizes)


def _merge(x: Value, at: int, group: Sequence[str]) -> Value:
    """The dimensions from `at` on, as many as the group has, read as one; their name does not matter any more."""
    if len(group) < 2:
        return x
    axes = [*x.axes[:at], "+".join(group), *x.axes[at + len(group) :]]
    return x.then(f".flatten({at}, {at + len(group) - 1})", axes)


def _cut(out: Value, batch: Sequence[str], left: Sequence[str], right: Sequence[str], sizes: list[str]) -> Value:
    axes, n = [*batch, *left, *right], len(batch)
    if not right:
        out = out.then("[..., 0]", [*batch, "left"])
    if not left:
        out = out.then("[..., 0, :]", [*batch, "right"])
    if len(right) > 1:
        out = out.then(f".unflatten(-1, {sizes.pop()})", [*batch, *left[:1], *right])
    if len(left) > 1:
        out = out.then(f".unflatten({n}, {sizes.pop()})", axes)
    return replace(out, axes=tuple(axes), product=out.product if len(left) == len(right) == 1 else None)


def as_runs(values: Sequence[float]) -> list[tuple[float, int, int]]:
    """(first, how many, step) of the runs that numbers fall into; only whole numbers rise."""
    found: list[tuple[float, int, int]] = []
    for value in values:
        if found:
            first, count, step = found[-1]
            rise = value - first if isinstance(value, int) and isinstance(first, int) else 0 if value == first else None
            if rise == step * count and (step or not rise):
                found[-1] = first, count + 1, step
                continue
            if count == 1 and rise == 1:
                found[-1] = first, 2, 1
                continue
        found.append((value, 1, 0))
    return found


def short_runs(values: Sequence[float]) -> list[tuple[float, int, int]] | None:
    """The runs of a long table that goes on and on evenly, or None."""
    runs = as_runs(values)
    return runs if len(values) > 64 and 4 * len(runs) < len(values) else None
