"""One step of C++ under construction: its value, where it lies, and how a team shares it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep
from memkit.compiler.kernels.functions import COSTLY

from .arena import Memory, Share
from .entries import COPIES, Entries, Index, Nest, Square, View

if TYPE_CHECKING:
    from .text import Function

BLOCK = 4096  # numbers of a large value that are made at a time
FAR = 16  # numbers between two entries of an axis that threads may share anywhere: no vector, and no line of the cache, holds both
ROWS = 64  # from this length on, an axis is split before those behind it, whose entries lie closer together
SMALL = 2048  # what it takes to make a value that is not worth sharing, in entries that are written
ALONE = 4000  # the same where sharing it would mean a wait, as it lacks the axis that a team shares: each member makes all of it
CHEAP = 1 << 18  # entries of a value whose every entry takes a member less to make than to fetch from another
FEW = 16  # rows and columns of a matrix that is copied to be read along its rows
ROOM = 65536  # numbers of `room`, as in products.cpp
SUMS = (Op.SCAN, Op.SOLVE, Op.SCATTER, Op.FOLD)  # whose entries are made of many
ALL = None  # a share that is none: entries of other members, too


class Step:
    """One step under construction: its value, where it lies, and how a team shares it."""

    def __init__(self, f: Function, node: Node, work: int = 1, unsplit: Sequence[str] = (), summed: bool = False) -> None:
        """summed: along the axis that the team shares; every member makes a value of its own of its part."""
        self.f, self.node, self.out = f, node, f.views[node]
        self.sizes, most = f.sizes(node), f.most(node)
        axes = f.own(node)
        able = [a for a in axes if a not in unsplit]
        self.split, self.owner, self.summed = _split(able, axes, most, f.team), "", summed
        self.alone = f.run is None and self.out.memory.space == "own" and node not in f.private  # every member makes all, for itself
        if f.run is not None or self.alone:
            self.split = ""  # one member does all of an entry of a run
        elif summed:
            self.split = f.team
        elif node not in f.private and (prod(most[a] for a in axes) * work < SMALL or not self.split or most[self.split] < 2):
            self.split, self.owner = "", str(f.owner)
            f.owner += 1
        self.reads: list[tuple[Memory, Share | None]] = []
        self.writes: list[tuple[Memory, Share]] = []  # besides the value
        self.lines: list[str] = []
        self.blocks: tuple[str, str, str] = "", "", ""  # an axis gone through in blocks, a block's first entry, how many it has

    # ---- indices

    def in_blocks(self, products: Sequence[Node], terms: int) -> str:
        """The loop that makes a large value a few rows at a time, so that its terms, these products among them, meet in the nearest
        cache; "" for a small one, and where every block would read more again than that spares."""
        if not self.split:
            return ""
        axis, most = self.f.own(self.node)[0], self.f.most(self.node)
        rest = prod(most[a] for a in self.f.own(self.node) if a != axis)
        count = max(16, BLOCK // rest // 16 * 16)
        if most[axis] * rest < 2 * BLOCK or 2 * count > most[axis]:
            return ""
        whole = [x for p in products for x in p.args if axis not in x.axes]
        again = sum(prod(self.f.most(x)[a] for a in self.f.own(x)) for x in whole) * (most[axis] // count - 1)
        if again > 2 * (terms - 1) * most[axis] * rest:  # which would be read and written once more for each term
            return ""
        first, last = self.part(axis)
        start = self.f.names.new(f"{axis}_first")
        self.blocks = axis, start, f"fewer({count}, {last} - {start})"
        return f"for (long {start} = {first}; {start} < {last}; {start} += {count}) {{"

    def header(self, axis: str, variable: str, simd: bool = False, size: str = "") -> str:
        blocked, start, count = self.blocks
        if axis == blocked:
            first, last = start, f"{start} + {count}"
        else:
            first, last = self.part(axis) if axis == self.split else ("0", size or self.sizes[axis])
        return f"{'IVDEP ' if simd else ''}for (long {variable} = {first}; {variable} < {last}; ++{variable})"

    def part(self, axis: str) -> tuple[str, str]:
        """Where this member's part of an axis begins and ends: at any entry if these lie far apart, else at whole vectors."""
        if axis != self.split:
            return "0", self.sizes[axis]
        size, name = self.sizes[axis], "exact_part" if self._exact() else "part"
        return f"{name}({size}, member, members)", f"{name}({size}, member + 1, members)"

    def _exact(self) -> bool:
        stride = self.out.strides.get(self.split, "1")
        return self.split != self.f.team and (not stride.isdigit() or int(stride) >= FAR)

    def bounds(self) -> dict[str, tuple[str, str]]:
        """First and number of the entries that are made, by axis, where these are not all."""
        axis, start, count = self.blocks
        found = {axis: (start, count)} if axis else {}
        if self.split and self.split not in found:
            first, last = self.part(self.split)
            found[self.split] = first, last if first == "0" else f"({last} - {first})"
        return found

    def enter(self, nest: Nest, axes: Sequence[str], simd: bool = True, sizes: dict[str, str] | None = None) -> dict[str, Index]:
        """Loops over `axes`, the last of them free of dependences."""
        at = dict(self.f.fixed)
        for i, axis in enumerate(axes):
            variable = self.f.names.new(axis)
            nest.enter(variable, self.header(axis, variable, simd and i == len(axes) - 1, (sizes or {}).get(axis, "")))
            at[axis] = Index(variable, frozenset({variable}))
        return at

    def entries(self, nest: Nest) -> Entries:
        return Entries(nest, self.f.views, self.f.length, self.f.names, self.f.tables)

    def square(self, at: Mapping[str, Index]) -> Square | None:
        """The loops over the last two axes of a run's step, where these are long enough for copies to pay."""
        last = self.f.own(self.node)[-2:]
        sizes = [self.sizes[a] for a in last]
        if self.f.run is None or len(last) < 2 or not all(s.isdigit() and int(s) >= FEW for s in sizes):
            return None
        rows, columns = map(int, sizes)
        return Square(at[last[0]].text, rows, at[last[1]].text, columns) if COPIES * rows * columns <= ROOM else None

    # ---- what was read and written

    @property
    def share(self) -> Share:
        """Which part of the value a member makes."""
        if self.owner or self.summed:
            return "owner", self.owner
        return self._share(self.out.strides.get(self.f.run.axis if self.f.run else self.split, "")) or ("", "")

    def note(self, entries: Entries, at: dict[str, Index]) -> None:
        axis = self.f.run.axis if self.f.run else self.split
        mine = at[axis].text if axis in at else ""
        for view, own in entries.reads:
            along = next((a for a, i in own.items() if mine and i.text == mine), "")
            self.reads.append((view.memory, self._share(view.strides[along] if along else "")))

    def note_view(self, view: View) -> None:
        self.reads.append((view.memory, self._share(view.strides.get(self.f.run.axis if self.f.run else self.split, ""))))

    def _share(self, stride: str) -> Share | None:
        if self.owner:
            return self.share
        if not stride or stride == "0":
            return ALL
        if self.f.run is not None:
            return f"exact {stride}", self.f.run.size
        return f"exact {stride}" if self._exact() else stride, self.sizes[self.split]

    def add(self, lines: Sequence[str]) -> None:
        self.lines += lines

    def done(self) -> None:
        """Put into the function, behind a wait where one is needed."""
        f = self.f
        if f.run is not None:
            f.run.take(self.lines, self.reads, self.out.memory, self.share)
            return
        reads = [(m, s) for m, s in self.reads if m.space != "own"]
        f.before(reads, [(m, s) for m, s in (*self.writes, (self.out.memory, self.share)) if m.space != "own"])
        if self.owner:
            f.line(f"if (member == {self.owner} % members) {{")
        for line in self.lines:
            f.line(("    " if self.owner else "") + line)
        if self.owner:
            f.line("}")


def _split(able: Sequence[str], axes: Sequence[str], most: Mapping[str, int], team: str) -> str:
    """The axis that a team shares: that of the states; or the first if whole matrices lie behind it, or is long; or the longest."""
    if team in able:
        return team
    if able and able[0] == axes[0] and len(axes) > 2 and most[axes[0]] > 3 and prod(most[a] for a in axes[1:]) >= BLOCK // 4:
        return able[0]
    return next((a for a in able if most[a] >= ROWS), max(able, key=lambda a: most[a], default=""))


def is_small(f: Function, node: Node, work: int, roots: Container[Node] = ()) -> bool:
    """Whether every member of a team had better make a value for itself than wait for another's. roots: what else is kept."""
    axes = f.own(node)
    count = prod(f.most(node)[a] for a in axes)
    if f.team in axes:
        return count * work < SMALL
    return count * work < ALONE or (count < CHEAP and _is_cheap(node, roots))


def _is_cheap(node: Node, roots: Container[Node]) -> bool:
    """Whether making an entry takes less than fetching it from another member's cache."""
    stack = [node]
    while stack:
        inner = stack.pop()
        moved = inner.op is Op.SCATTER and keep.offset(inner) is not None
        if keep.contracted(inner) or (inner.op in SUMS and not moved) or (inner.op is Op.POINTWISE and inner.attrs["fn"] in COSTLY):
            return False
        stack += [a for a in keep.data(inner) if a not in roots and a.op not in keep.PLACED]
    return True
