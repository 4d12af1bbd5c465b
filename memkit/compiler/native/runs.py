"""Steps that share their first axis as one loop over it: a token's matrices are made one after another, while the cache holds them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep
from memkit.compiler.kernels.memory import packed
from memkit.compiler.kernels.text import _moved as moved_axes

from .arena import Memory, Share
from .entries import Index, View

if TYPE_CHECKING:
    from .text import Function

FEWEST = 3  # steps of a run that make a matrix for every entry of the axis
MATRIX = 1024  # numbers of a value, for one entry, that count as a matrix


class Run:
    """The steps `first` to `last` of a level, for one entry of `axis` after another; a team's members take an equal part of the entries."""

    def __init__(self, f: Function, items: Sequence[Node], first: int, last: int, axis: str) -> None:
        self.f, self.items, self.first, self.last, self.axis = f, items, first, last, axis
        self.size = f.length[items[first]][axis].text
        self.lines: list[str] = []
        self.reads: list[tuple[Memory, Share | None]] = []
        self.writes: list[tuple[Memory, Share]] = []
        self.private: dict[Node, Memory] = {}
        self.kept: Mapping[Node, int] = {}

    def begin(self, kept: Mapping[Node, int]) -> None:
        """kept: the last step that reads each value."""
        self.kept, self.variable = kept, self.f.names.new(self.axis)
        self.f.fixed[self.axis] = Index(self.variable)

    def scratch(self, node: Node) -> View:
        """Room for a value: a member's own, without the axis, if no step behind the run reads it."""
        f = self.f
        if self.kept.get(node, self.last + 1) > self.last or "n" in node.axes:
            return f.scratch(node)
        name = f.names.new(node.name or node.attrs.get("fn", node.op.value))
        strides, size = packed(f.own(node), f.most(node))
        memory = self.private[node] = f.own_arena.take(size)
        self.lines.append(f"real* const {name} = own + {memory.start};")
        return View(name, strides, memory._replace(space="own"))

    def take(self, lines: Sequence[str], reads: Sequence[tuple[Memory, Share | None]], out: Memory, share: Share) -> None:
        """Add a step."""
        self.lines += lines
        self.reads += [(m, s) for m, s in reads if m.space != "own"]
        if out.space != "own":
            self.writes.append((out, share))

    def over(self, i: int) -> bool:
        """Whether step i was the last; then the loop is written."""
        f = self.f
        for node in [n for n in self.private if self.kept[n] <= i]:
            f.own_arena.give(self.private.pop(node))
        if i < self.last:
            return False
        del f.fixed[self.axis]
        written = {m for m, _ in self.writes}
        f.before([(m, s) for m, s in self.reads if m not in written or s is not None], self.writes)
        v, size = self.variable, self.size
        first, last = (f"exact_part({size}, member{more}, members)" for more in ("", " + 1"))
        f.line(f"for (long {v} = {first}, {v}_end = {last}; {v} < {v}_end; ++{v}) {{")
        for line in self.lines:
            f.line("    " + line)
        f.line("}")
        return True


def runs(f: Function, items: Sequence[Node], roots: set[Node]) -> dict[int, Run]:
    """The runs of a level, by their first step."""
    found: dict[int, Run] = {}
    start = 0
    while start < len(items):
        axis = _first(f, items[start])
        stop = start
        while stop < len(items) and axis and joins(f, items[stop], axis, roots):
            stop += 1
        matrices = sum(_rest(f, n, axis) >= MATRIX for n in items[start:stop])
        if matrices >= FEWEST:
            found[start] = Run(f, items, start, stop - 1, axis)
            start = stop
        else:
            start += 1
    return found


def gathered(f: Function, items: Sequence[Node], reads: Mapping[Node, keep.Reads], roots: set[Node]) -> list[Node]:
    """The items with a run put right behind a run that it reads, where no step that cannot join them has to come in between.

    Then they are one run: what the first makes for the second is nobody else's, and never leaves the cache.
    """
    order = list(items)
    sources = {node: {keep.source(r) for r in reads[node].all} for node in items}
    for _ in items:
        found = runs(f, order, roots).values()
        moved = next((m for a, b in combinations(found, 2) if (m := _joined(f, order, sources, a, b, roots))), None)
        if moved is None:
            break
        order = moved
    return order


def _joined(
    f: Function, items: list[Node], sources: Mapping[Node, set[Node]], a: Run, b: Run, roots: set[Node]
) -> list[Node] | None:
    """The items with what lies between two runs before or behind both; None where there is nothing to gain, or no such order."""
    first, between, second = items[a.first : a.last + 1], items[a.last + 1 : b.first], items[b.first : b.last + 1]
    made, later, needed = set(first), list[Node](), list[Node]()
    if a.axis != b.axis or not between or not any(made & sources[node] for node in second):
        return None
    for node in between:
        if sources[node] & {*made, *later}:
            later.append(node)
    wanted = set().union(*(sources[node] for node in second))
    for node in reversed(later):
        if node in wanted:
            needed.insert(0, node)
            wanted |= sources[node]
    if not all(joins(f, node, a.axis, roots) for node in needed):
        return None
    before, after = [n for n in between if n not in later], [n for n in later if n not in needed]
    return [*items[: a.first], *before, *first, *needed, *second, *after, *items[b.last + 1 :]]


def _first(f: Function, node: Node) -> str:
    axes = f.own(node)
    return axes[0] if len(axes) > 2 and node.op is not Op.SCAN and axes[0] != "n" and f.most(node)[axes[0]] > 1 else ""


def _rest(f: Function, node: Node, axis: str) -> int:
    most = f.most(node)
    return prod(most[a] for a in f.own(node) if a != axis)


def joins(f: Function, node: Node, axis: str, roots: set[Node], whole: Container[Op] = (Op.SCAN, Op.SOLVE, Op.DECAY, Op.FOLD)) -> bool:
    """Whether a step makes each entry of the axis of the same entry of what it reads. whole: steps that are no part of anything."""
    if node.op in whole or axis not in node.axes or node in f.adopted:
        return False
    if node.op is Op.SCATTER and keep.offset(node) is None:
        return False
    stack, seen = [node], set()
    while stack:
        inner = stack.pop()
        if inner in seen:
            continue
        seen.add(inner)
        if axis in keep.contracted(inner) or axis in moved_axes(inner):
            return False
        stack += [a for a in keep.data(inner) if a not in roots and a.op not in keep.PLACED]
    return True
