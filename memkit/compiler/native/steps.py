"""The C++ of one step: a kept value, made entry by entry, by products that add into it, or along time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from memkit.compiler.ir import Node, Op, order_axes
from memkit.compiler.kernels import keep
from memkit.compiler.symmetric import is_symmetric
from memkit.specs.errors import KernelError

from . import choice
from .arena import Memory, Share
from .choice import Choice
from .entries import COPIES, MAKERS, Entries, Index, Nest, Square, View, plus, times
from .products import product_of

if TYPE_CHECKING:
    from .text import Function

BLOCK = 4096  # numbers of a large value that are made at a time
FAR = 256  # numbers between two entries of an axis that threads may share anywhere: no vector, and no line of the cache, holds both
ROWS = 64  # from this length on, an axis is split before those behind it, whose entries lie closer together
SMALL = 1024  # entries of a value, times those of a sum, that one member of a team makes alone
FEW = 16  # rows and columns of a matrix that is copied to be read along its rows
ROOM = 65536  # numbers of `room`, as in products.cpp
ALL = None  # a share that is none: entries of other members, too


class Step:
    """One step under construction: its value, where it lies, and how a team shares it."""

    def __init__(self, f: Function, node: Node, work: int = 1, unsplit: Sequence[str] = ()) -> None:
        self.f, self.node, self.out = f, node, f.views[node]
        self.sizes, most = f.sizes(node), f.most(node)
        axes = f.own(node)
        able = [a for a in axes if a not in unsplit]
        self.split, self.owner = _split(able, axes, most), ""
        if f.run is not None:
            self.split = ""  # one member does all of an entry of the run
        elif prod(most[a] for a in axes) * work < SMALL or not self.split or most[self.split] < 2:
            self.split, self.owner = "", str(f.owner)
            f.owner += 1
        self.reads: list[tuple[Memory, Share | None]] = []
        self.lines: list[str] = []
        self.block = ""

    # ---- indices

    def in_blocks(self) -> str:
        """The loop that makes a large value a few rows at a time, so that its terms meet in the nearest cache; "" for a small one."""
        if self.f.run is not None:
            return ""
        most = self.f.most(self.node)
        rest = prod(most[a] for a in self.f.own(self.node) if a != self.split)
        if self.owner or most[self.split] * rest < 2 * BLOCK:
            return ""
        count = max(16, BLOCK // rest // 16 * 16)
        if 2 * count > most[self.split]:
            return ""
        first, last = self.part()
        self.block = self.f.names.new(f"{self.split}_first")
        self.count = f"fewer({count}, {last} - {self.block})"
        return f"for (long {self.block} = {first}; {self.block} < {last}; {self.block} += {count}) {{"

    def header(self, axis: str, variable: str, simd: bool = False, size: str = "") -> str:
        size = size or self.sizes[axis]
        mark = "IVDEP " if simd else ""
        if axis == self.split:
            end = f"{variable}_end"
            first, last = self.part()
            if self.block:
                return f"{mark}for (long {variable} = {self.block}, {end} = {self.block} + {self.count}; {variable} < {end}; ++{variable})"
            return (
                f"{mark}for (long {variable} = {first}, {end} = {last}; {variable} < {end}; ++{variable})"
            )
        return f"{mark}for (long {variable} = 0; {variable} < {size}; ++{variable})"

    def part(self) -> tuple[str, str]:
        """Where this member's part of the split axis begins and ends; at any entry if these lie far apart, else at whole vectors."""
        size, name = self.sizes[self.split], "exact_part" if self._exact() else "part"
        return f"{name}({size}, member, members)", f"{name}({size}, member + 1, members)"

    def _exact(self) -> bool:
        stride = self.out.strides[self.split]
        return not stride.isdigit() or int(stride) >= FAR

    def bounds(self) -> tuple[str, str]:
        """First and number of the split axis' entries that are this member's."""
        if self.block:
            return self.block, self.count
        first, last = self.part()
        return first, f"({last} - {first})"

    def enter(self, nest: Nest, axes: Sequence[str], simd: bool = True, sizes: dict[str, str] | None = None) -> dict[str, Index]:
        """Loops over `axes`, the last of them free of dependences."""
        at = dict(self.f.fixed)
        for i, axis in enumerate(axes):
            variable = self.f.names.new(axis)
            nest.enter(variable, self.header(axis, variable, simd and i == len(axes) - 1, (sizes or {}).get(axis, "")))
            at[axis] = Index(variable, frozenset({variable}))
        return at

    def entries(self, nest: Nest) -> Entries:
        return Entries(nest, Views(self.f), self.f.length, self.f.names, self.f.tables)

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
        if self.owner:
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
        f.before(self.reads, [(self.out.memory, self.share)])
        if self.owner:
            f.line(f"if (member == {self.owner} % members) {{")
        for line in self.lines:
            f.line(("    " if self.owner else "") + line)
        if self.owner:
            f.line("}")


def _split(able: Sequence[str], axes: Sequence[str], most: Mapping[str, int]) -> str:
    """The axis that a team shares: the first if whole matrices lie behind it, else the first that is long, else the longest."""
    if able and able[0] == axes[0] and len(axes) > 2 and most[axes[0]] > 3 and prod(most[a] for a in axes[1:]) >= BLOCK // 4:
        return able[0]
    return next((a for a in able if most[a] >= ROWS), max(able, key=lambda a: most[a], default=""))


class Views(dict):
    """The arrays of a function as `Entries` wants them: by node, views of arrays included."""

    def __init__(self, f: Function) -> None:
        self.f = f

    def __contains__(self, node: object) -> bool:
        return node in self.f.views

    def __getitem__(self, node: Node) -> View:
        return self.f.views[node]


def step(f: Function, node: Node, chosen: Choice) -> None:
    """The step that makes `node`."""
    if node in chosen.chains:
        _chain(f, node, chosen)
    elif choice.is_product(node):
        made = Step(f, node, _work(f, node))
        made.add(_product(made, node, fresh=True))
        made.done()
    elif node.op is Op.DECAY:
        _decay(f, node)
    elif node.op is Op.SOLVE:
        _solve(f, node)
    elif node.op is Op.FOLD or (node.op is Op.SCATTER and keep.offset(node) is None):
        _scattered(f, node)
    elif keep.contracted(node):
        _sum(f, node)
    else:
        made = Step(f, node)
        made.add(_entries(made, [node]))
        made.done()


def _work(f: Function, node: Node) -> int:
    sizes = {**f.most(node.args[1]), **f.most(node.args[0])}
    return prod(sizes[a] for a in keep.contracted(node)) // 8 + 1


def _entries(made: Step, terms: Sequence[Node]) -> list[str]:
    """Loops that write the sum of `terms` into every entry."""
    nest, node = Nest(), made.node
    at = made.enter(nest, made.f.own(node))
    entries = made.entries(nest)
    entries.square = made.square(at)
    if terms == [node]:
        text = MAKERS[node.op](entries, node, at).text
    else:
        text = " + ".join(entries.value(t, at).text for t in terms) or "real(0)"
    nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] = {text};")
    made.note(entries, at)
    return nest.text()


def _chain(f: Function, node: Node, chosen: Choice) -> None:
    """The terms that are no products first, then every product added."""
    chain = chosen.chains[node]
    made = Step(f, node, max(_work(f, p) for p in chain.products))
    block = made.in_blocks()
    if chain.rest:
        made.add(_entries(made, chain.rest))
    for i, product in enumerate(chain.products):
        made.add(_product(made, product, fresh=not chain.rest and i == 0))
    if block:
        made.lines = [block, *("    " + line for line in made.lines), "}"]
    made.done()


def _product(made: Step, node: Node, fresh: bool) -> list[str]:
    """Calls that add a product to the step's value, or write it where nothing is there yet."""
    f = made.f
    a, b = (f.view(arg) for arg in node.args)
    if a is None or b is None:
        raise KernelError(f"a product of {node.args} without arrays", "operands that are kept", "backend: torch", "backend")
    sizes = f.sizes(*node.args)
    p = product_of(node, (a, b, made.out), sizes, {**f.most(node.args[0]), **f.most(node.args[1])}, made.split, tuple(f.fixed))
    made.note_view(a)
    made.note_view(b)
    nest, at, begun = Nest(), {a: i.text for a, i in f.fixed.items() if a != "g"}, []
    for axis in p.loops:
        variable = f.names.new(axis)
        nest.enter(variable, made.header(axis, variable, size=p.sizes[axis]))
        at[axis] = variable
        begun += [f"{variable} > 0"] if axis in p.summed else []
    add = "1" if not fresh else " || ".join(begun) or "0"
    split = made.split if made.split in (p.rows, p.cols) else ""
    whole = fresh and not split and not p.summed & {*p.loops} and is_symmetric(node) and p.sizes[p.rows] == p.sizes[p.cols]
    name = "product_upper" if whole else "product"
    nest.lines[-1].append(p.call(name, at, add, split, made.bounds() if split else ("", "")))
    return nest.text()


def _sum(f: Function, node: Node) -> None:
    """A REDUCE, or an einsum that is no product of matrices."""
    widest = max(node.args, key=lambda a: len(a.axes))
    gone, own = list(keep.contracted(node)), f.own(node)
    sizes = f.sizes(*node.args)
    made = Step(f, node, prod({**f.most(node.args[-1]), **f.most(node.args[0])}[a] for a in gone))
    largest = node.op is Op.REDUCE and node.attrs["fn"] == "max"
    along = bool(own) and widest.axes[-1] == own[-1] and not largest
    nest = Nest()
    if along:
        made.add(_entries(made, []))
        at = made.enter(nest, [*own[:-1], *gone, own[-1]], sizes=sizes)
        entries = made.entries(nest)
        nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] += {_term(entries, node, at)};")
    else:
        at = made.enter(nest, own, simd=False)
        total = f.names.new("total")
        nest.lines[-1].append(f"real {total} = {'-real(INFINITY)' if largest else '0'};")
        depth = len(own)
        at |= made.enter(nest, [a for a in order_axes(widest.axes, gone) if a in gone], simd=False, sizes=sizes)
        if not largest:
            variable, header = nest.loops[-1]
            nest.loops[-1] = variable, f"SUM({total}) {header}"
        entries = made.entries(nest)
        term = _term(entries, node, at)
        nest.lines[-1].append(f"{total} = fn_maximum({total}, {term});" if largest else f"{total} += {term};")
        nest.after[depth].append(f"{made.out.pointer}[{made.out.offset(at)}] = {total};")
    made.note(entries, at)
    made.add(nest.text())
    made.done()


def _term(entries: Entries, node: Node, at: dict[str, Index]) -> str:
    at = at
    return " * ".join(entries.value(a, at).text for a in node.args)


def _scattered(f: Function, node: Node) -> None:
    """A FOLD or SCATTER: every entry of the operand is added where it belongs."""
    a, x = node.attrs, node.args[0]
    made = Step(f, node, unsplit=(a["axis"], a.get("new", "")))
    made.add(_entries(made, []))
    nest = Nest()
    axes = f.own(x)
    repeats = node.op is Op.SCATTER and axes[-1] == a["axis"]
    at = made.enter(nest, axes, simd=not repeats, sizes=f.sizes(x))
    entries = made.entries(nest)
    term = entries.value(x, at).text
    if node.op is Op.FOLD:
        o, i = at[a["outer"]], at[a["inner"]]
        spot, target = plus(times(o.text, str(a["step"])), i.text), a["axis"]
    else:
        spot, target = f"{entries.table('index', tuple(a['index']))}[{at[a['axis']].text}]", a["new"]
    place = made.out.offset({**at, target: Index(f"({spot})")})
    nest.lines[-1].append(f"{made.out.pointer}[{place}] += {term};")
    made.note(entries, at)
    made.add(nest.text())
    made.done()


def _decay(f: Function, node: Node) -> None:
    """Row t is row t - 1 times x[t], and 1 on the diagonal."""
    t, s = node.attrs["axis"], node.attrs["new"]
    made = Step(f, node, unsplit=(t, "n"))
    nest = Nest()
    rest = [a for a in node.axes if a not in ("g", "n", t, s)]
    at = made.enter(nest, [*(a for a in node.axes if a == "n"), t, s, *rest])
    entries = made.entries(nest)
    x = entries.value(node.args[0], {a: i for a, i in at.items() if a != s}).text
    above = made.out.offset({**at, t: Index(f"({at[t].text} - 1)")})
    row, col, p = at[t].text, at[s].text, made.out.pointer
    nest.lines[-1].append(
        f"{p}[{made.out.offset(at)}] = {col} < {row} ? {p}[{above}] * {x} : {col} == {row} ? real(1) : real(0);"
    )
    made.note(entries, at)
    made.add(nest.text())
    made.done()


def _solve(f: Function, node: Node) -> None:
    """The right-hand side is copied and solved in place, with the system's entries below the diagonal negated in rows of their own."""
    lower, right = node.args
    rows, cols, back = node.attrs["rows"], node.attrs["cols"], int(node.attrs["transpose"])
    batch = [a for a in node.axes if a in lower.axes and a not in ("g", rows, cols)]
    own = [a for a in node.axes if a not in ("g", rows, *batch)]
    made = Step(f, node, f.most(node)[rows] // 4 + 1, unsplit=(rows, *batch))
    made.add(copied_from(made, right))
    copy = lower.replace(axes=("g", *batch, rows, cols) if "g" in lower.axes else (*batch, rows, cols), name="below")
    f.length[copy] = f.length[lower]
    f.views[copy] = f.scratch(copy)
    below = Step(f, copy)
    nest = Nest()
    at = below.enter(nest, f.own(copy))
    entries = below.entries(nest)
    text = entries.value(lower, at).text
    nest.lines[-1].append(f"{below.out.pointer}[{below.out.offset(at)}] = {at[cols].text} < {at[rows].text} ? -{text} : real(0);")
    below.note(entries, at)
    below.add(nest.text())
    below.done()
    made.note_view(View("", {}, below.out.memory))
    nest, here = Nest(), {}
    most = f.most(node)
    width = made.split or max(own, key=lambda a: most[a], default="")
    for axis in (*batch, *(a for a in own if a != width)):
        variable = f.names.new(axis)
        nest.enter(variable, made.header(axis, variable))
        here[axis] = Index(variable)
    first, count = made.bounds() if made.split else ("0", made.sizes[width] if width else "1")
    step, apart = made.out.strides[rows], made.out.strides.get(width, "1")
    x = plus(made.out.pointer, *_moved(here, made.out), times(first, apart if width else "0"))
    low = plus(below.out.pointer, *_moved(here, below.out))
    nest.lines[-1].append(f"solve({made.sizes[rows]}, {count}, {low}, {below.out.strides[rows]}, {x}, {step}, {apart}, {back}, room);")
    made.add(nest.text())
    made.done()
    if f.views[copy].memory.space == "mine":
        f.arena.give(f.views[copy].memory)


def _moved(at: Mapping[str, Index], view: View) -> list[str]:
    """How far indices move along a view."""
    return [times(i.text, view.strides[a]) for a, i in at.items() if a in view.strides]


def copied_from(made: Step, node: Node) -> list[str]:
    """Loops that copy a value, repeated over the axes it lacks."""
    nest = Nest()
    at = made.enter(nest, made.f.own(made.node))
    entries = made.entries(nest)
    text = entries.value(node, at).text
    nest.lines[-1].append(f"{made.out.pointer}[{made.out.offset(at)}] = {text};")
    made.note(entries, at)
    return nest.text()
