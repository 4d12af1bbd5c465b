"""Which values each member of a team makes and reads only in its own part: they lie in its own memory, and never leave its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep

from . import steps
from .choice import Choice
from .parts import apart
from .runs import joins, moved_axes, runs
from .step import is_small

if TYPE_CHECKING:
    from .text import Function

WHOLE = (Op.SCAN, Op.SOLVE, Op.DECAY, Op.SCATTER)  # steps that are not shared along the team's axis


def private(
    f: Function, items: Sequence[Node], reads: Mapping[Node, keep.Reads], chosen: Choice, carried: Sequence[Node] = ()
) -> set[Node]:
    """Of the values that `items` make, and of those that come in as `carried`, the ones that no member reads beyond its part."""
    if not f.team:
        return set()
    joined = {items[i] for run in runs(f, items, chosen.roots).values() for i in range(run.first, run.last + 1)}
    shared = {n for n in items if n not in joined and _is_shared(f, n, chosen)}
    found = shared | {n for n in carried if f.team in n.axes}
    for reader in items:
        seen = {n for n in reads[reader].all if n in found}
        if reader in shared:
            found -= seen if not joins(f, reader, f.team, chosen.roots, WHOLE) else set()
        elif seen:
            found -= seen - (set() if reader in joined else _in_parts(f, reader, chosen))
    return found


def _is_shared(f: Function, node: Node, chosen: Choice) -> bool:
    """Whether the step for a value is shared along the team's axis."""
    if node.op in WHOLE or (node.op is Op.FOLD and f.team in moved_axes(node)):
        return False
    return f.team in f.own(node) and "n" not in node.axes and not is_small(f, node, steps.work(f, node, chosen), chosen.roots)


def _in_parts(f: Function, reader: Node, chosen: Choice) -> set[Node]:
    """Of what a sum along the team's axis reads, that of which every member reads its part only."""
    parts = apart(f, reader, chosen)
    chain = chosen.chains.get(reader)
    rest = [n for n in (*chain.rest, *chain.products) if n not in parts] if chain else []
    inside = {n for part in parts for arg in part.args for n in _sources(arg, chosen.roots)}
    moved = {n for part in parts for arg in part.args if _moves(arg, f.team, chosen.roots) for n in _sources(arg, chosen.roots)}
    return inside - moved - {n for term in rest for n in _sources(term, chosen.roots)}


def _sources(node: Node, roots: set[Node]) -> set[Node]:
    """The kept values that a term is made of."""
    return {node} if node in roots or node.op in keep.PLACED else set(keep.reads(node, roots).all)


def _moves(node: Node, axis: str, roots: set[Node]) -> bool:
    """Whether an entry of a term is made of other entries of the axis, or of all."""
    stack, seen = [node], set()
    while stack:
        inner = stack.pop()
        if inner in seen or inner in roots or inner.op in keep.PLACED:
            continue
        seen.add(inner)
        if axis in keep.contracted(inner) or axis in moved_axes(inner):
            return True
        stack += keep.data(inner)
    return False
