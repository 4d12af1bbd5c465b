"""A product of two views as calls of `product`: one axis each for rows, columns and sum, loops over all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from memkit.compiler.ir import Node

from . import choice
from .entries import View, plus, times

Sizes = Mapping[str, str]


@dataclass(frozen=True)
class Product:
    """One node's product. rows, cols, sums: the axes of the call ("" for none); loops: the others, outermost first."""

    a: View
    b: View
    c: View
    rows: str
    cols: str
    sums: str
    loops: tuple[str, ...]
    summed: frozenset[str]
    sizes: Mapping[str, str]
    bounds: Mapping[str, tuple[str, str]]  # first and count of axes of which only so much is done

    def call(self, name: str, at: Mapping[str, str], add: str, bounds: Mapping[str, tuple[str, str]]) -> str:
        """The text of a call of `name`. at: indices of the loops' axes. bounds: first and count of axes of which only so much is done."""
        places = []
        for view in (self.a, self.b, self.c):
            terms = [view.pointer, *(times(i, view.strides[x]) for x, i in at.items() if x in view.strides)]
            terms += [times(first, view.strides[x]) for x, (first, _) in bounds.items() if x in view.strides and x not in at]
            places.append(plus(*terms))
        counts = [bounds[x][1] if x in bounds else self.sizes[x] if x else "1" for x in (self.rows, self.cols, self.sums)]
        strides = [
            *(self.a.strides.get(x, "0") for x in (self.rows, self.sums)),
            *(self.b.strides.get(x, "0") for x in (self.sums, self.cols)),
            *(self.c.strides.get(x, "0") for x in (self.rows, self.cols)),
        ]
        parts = [
            ", ".join(counts), f"{places[0]}, {strides[0]}, {strides[1]}", f"{places[1]}, {strides[2]}, {strides[3]}",
            f"{places[2]}, {strides[4]}, {strides[5]}", f"{add}, room",
        ]  # fmt: skip
        return f"{name}({', '.join(parts)});"


def product_of(
    node: Node,
    views: tuple[View, View, View],
    sizes: Sizes,
    most: Mapping[str, int],
    bounds: Mapping[str, tuple[str, str]],
    fixed: Sequence[str],
) -> Product:
    """The longest axis of each kind goes into the call, after axes that lie behind each other were joined.

    bounds: first and count of axes of which only so much is done; these go into the call before longer ones. fixed: axes that are no
    longer there.
    """
    (a, b, c), (batch, rows, cols, sums) = views, ([x for x in axes if x not in fixed] for axes in choice.sides(node))
    sizes, most, done = dict(sizes), dict(most), dict(bounds)

    def join(axes: list[str], views: Sequence[View]) -> None:
        for outer, inner in permutations(list(axes), 2):
            if inner not in done and {outer, inner} <= set(axes) and _behind(outer, inner, views, sizes):
                axes.remove(outer)
                if outer in done:
                    first, count = done.pop(outer)
                    done[inner] = times(first, sizes[inner]), times(count, sizes[inner])
                sizes[inner] = str(int(sizes[outer]) * int(sizes[inner]))
                most[inner] *= most[outer]

    join(rows, (a, c))
    join(cols, (b, c))
    join(sums, (a, b))
    row, col, summed = (max(axes, key=lambda x: (x in done, most[x]), default="") for axes in (rows, cols, sums))
    loops = [x for x in (*batch, *rows, *cols, *sums) if x not in (row, col, summed)]
    return Product(a, b, c, row, col, summed, tuple(loops), frozenset(sums), sizes, done)


def _behind(outer: str, inner: str, views: Sequence[View], sizes: Sizes) -> bool:
    """Whether two axes make one in every view: a step along `outer` is as far as all of `inner`."""
    if not (sizes[inner].isdigit() and sizes[outer].isdigit()):
        return False
    pairs = [(view.strides[outer], view.strides[inner]) for view in views]
    return all(far.isdigit() and step.isdigit() and int(far) == int(step) * int(sizes[inner]) for far, step in pairs)
