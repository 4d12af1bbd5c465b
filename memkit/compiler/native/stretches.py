"""Where indices go on evenly: an axis that values are gathered along is gone through in stretches, in which they lie one behind another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep

from .entries import MAKERS, Entries, Index, Nest, plus

if TYPE_CHECKING:
    from .step import Step
    from .text import Function

SHORTEST = 8  # entries of a stretch, on average
KINDS = 3  # kinds of stretches of one axis at most: each has a loop of its own
PASSING = (Op.POINTWISE, Op.EINSUM, Op.EXPAND, Op.SELECT)  # an entry is made of entries at the same indices
Table = tuple[int, ...]
Write = Callable[[Nest, dict[str, Index], Entries], None]


class Kind(NamedTuple):
    """Stretches in which every table rises by the same step, 0 or 1: where they begin and end, and each table's first number in each."""

    begins: Table
    ends: Table
    steps: Mapping[Table, int]
    firsts: Mapping[Table, Table]


@cache
def kinds(tables: tuple[Table, ...]) -> tuple[Kind, ...]:
    """The stretches of tables of one length; none where they are short, or of many kinds."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    size, begin, count = len(tables[0]), 0, 0
    single: list[tuple[int, int]] = []
    while begin < size:
        steps, end = _rise(tables, begin), begin + 1
        while end < size and steps == _rise(tables, end - 1):
            end += 1
        even = steps is not None and set(steps) <= {0, 1}
        end = end if even else begin + 1
        (found.setdefault(steps, []) if even and steps else single).append((begin, end))
        begin, count = end, count + 1
    if not found or len(found) > KINDS or size < SHORTEST * count:
        return ()
    most = max(found, key=lambda steps: len(found[steps]))
    found[most] = sorted(found[most] + single)
    return tuple(_kind(tables, steps, parts) for steps, parts in found.items())


def _rise(tables: tuple[Table, ...], i: int) -> tuple[int, ...] | None:
    return tuple(t[i + 1] - t[i] for t in tables) if i + 1 < len(tables[0]) else None


def _kind(tables: tuple[Table, ...], steps: tuple[int, ...], parts: list[tuple[int, int]]) -> Kind:
    begins, ends = (tuple(part[i] for part in parts) for i in (0, 1))
    return Kind(begins, ends, dict(zip(tables, steps, strict=True)), {t: tuple(t[b] for b in begins) for t in tables})


def indexing(f: Function, terms: Sequence[Node], axis: str) -> list[Table]:
    """The tables by which entries of `terms`, made here, are gathered along an axis."""
    found: dict[Table, None] = {}
    stack, seen = [below for term in terms for below in _below(term, axis, found)], set()
    while stack:
        node, name = stack.pop()
        if node in f.views or node.op in keep.PLACED or (node, name) in seen:
            continue
        seen.add((node, name))
        stack += _below(node, name, found)
    return list(found)


def _below(node: Node, axis: str, found: dict[Table, None]) -> list[tuple[Node, str]]:
    """The operands of which an entry is made of one at the same index of the axis, and what they call it; takes a table into `found`."""
    if node.op is Op.GATHER and node.attrs["new"] == axis:
        if keep.offset(node) is None:
            found.setdefault(tuple(node.attrs["index"]))
        return []
    if node.op is Op.RENAME:
        back = {new: old for old, new in node.attrs["names"].items()}
        return [(node.args[0], back.get(axis, axis))]
    return [(x, axis) for x in keep.data(node) if axis in x.axes] if node.op in PASSING else []


def stretched(
    made: Step, axes: Sequence[str], tables: Sequence[Table], write: Write, sizes: dict[str, str] | None = None, simd: bool = True
) -> list[str]:
    """Loops over `axes`, the last in stretches of `tables` if they have any, and in these what `write` puts there.

    simd: whether the last may be gone through several entries at a time where it is not in stretches.
    """
    several: tuple[Kind | None, ...] = kinds(tuple(tables)) if tables and axes[-1] != made.blocks[0] else ()
    lines: list[str] = []
    for kind in several or (None,):
        nest = Nest()
        at = made.enter(nest, axes if kind is None else axes[:-1], simd=simd and kind is None, sizes=sizes)
        spots = {} if kind is None else _in_stretches(made, nest, at, axes[-1], kind)
        entries = made.entries(nest)
        entries.spots = spots
        write(nest, at, entries)
        made.note(entries, at)
        lines += nest.text()
    return lines


def _in_stretches(made: Step, nest: Nest, at: dict[str, Index], axis: str, kind: Kind) -> dict[tuple[Table, str], Index]:
    """The loops over the stretches and inside one. Returns where each table's number is, by table and index."""
    names, table, here = made.f.names, made.entries(nest).table, made.f.names.new(axis)
    number = names.new("stretch") if len(kind.begins) > 1 else ""
    if number:
        nest.enter(number, f"for (long {number} = 0; {number} < {len(kind.begins)}; ++{number})")

    def of(values: Table) -> str:
        return f"{table('index', values)}[{number}]" if number else str(values[0])

    found: dict[tuple[Table, str], Index] = {}
    for values, step in kind.steps.items():
        start = of(tuple(first - begin * step for first, begin in zip(kind.firsts[values], kind.begins, strict=True)))
        if number:
            name = names.new("first")
            nest.lines[-1].append(f"const long {name} = {start};")
            start = name
        uses = frozenset({number} if number else ())
        found[values, here] = Index(f"({plus(start, here)})", uses | {here}) if step else Index(start, uses)
    first, end = of(kind.begins), of(kind.ends)
    if axis == made.split:
        low, high = made.part(axis)
        first, end = f"later({first}, {low})", f"fewer({end}, {high})"
    nest.enter(here, f"IVDEP for (long {here} = {first}; {here} < {end}; ++{here})")
    at[axis] = Index(here, frozenset({here}))
    return found


def write_entries(made: Step, terms: Sequence[Node]) -> list[str]:
    """Loops that write the sum of `terms` into every entry."""
    f, node, axes = made.f, made.node, made.f.own(made.node)

    def write(nest: Nest, at: dict[str, Index], entries: Entries) -> None:
        entries.square = made.square(at)
        if terms == [node]:
            text = MAKERS[node.op](entries, node, at).text
        else:
            text = " + ".join(entries.value(t, at).text for t in terms) or "real(0)"
        nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] = {text};")

    return stretched(made, axes, indexing(f, terms, axes[-1]) if axes else [], write)


def write_all(steps: Sequence[Step]) -> list[str]:
    """Loops that write the values of several steps over the same entries, all made before one is stored: what they share is made once."""
    first, nodes = steps[0], [x.node for x in steps]
    axes = first.f.own(first.node)

    def write(nest: Nest, at: dict[str, Index], entries: Entries) -> None:
        names = [first.f.names.new("made") for _ in nodes]
        for name, node in zip(names, nodes, strict=True):
            nest.lines[-1].append(f"const real {name} = {MAKERS[node.op](entries, node, at).text};")
        for name, made in zip(names, steps, strict=True):
            nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] = {name};")

    return stretched(first, axes, indexing(first.f, nodes, axes[-1]), write)
