"""The C++ text of single entries of values: operands are read at indices, and structure along time is arithmetic on these."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep
from memkit.compiler.kernels.lengths import Lengths
from memkit.compiler.simplify import uniform
from memkit.specs.errors import KernelError

from .arena import Memory
from .laid import laid
from .names import Names

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
LONG = 90  # characters of an expression, beyond which it gets a name
COPIES = 12  # matrices of one nest that are copied at most


class Index(NamedTuple):
    """The text of an index, the loops it changes in, and the text of when it is in range ("" for always)."""

    text: str
    uses: frozenset[str] = frozenset()
    guard: str = ""

    def moved(self, text: str, guard: str = "") -> Index:
        """Another index made of this one, in range where this one is and `guard` holds."""
        return Index(text, self.uses, both(self.guard, guard))


Indices = Mapping[str, Index]


class Value(NamedTuple):
    """The text of a value and the loops it changes in."""

    text: str
    uses: frozenset[str] = frozenset()


def both(*guards: str) -> str:
    return " && ".join(dict.fromkeys(g for g in guards if g))


@dataclass(frozen=True)
class View:
    """An array: the text of its first entry's address, strides by axis, and what memory it lies in."""

    pointer: str
    strides: Mapping[str, str]
    memory: Memory

    def at(self, axis: str, text: str) -> View:
        """The part of it at one index of an axis."""
        rest = {a: s for a, s in self.strides.items() if a != axis}
        return View(plus(self.pointer, times(text, self.strides[axis])), rest, self.memory)

    def offset(self, at: Indices) -> str:
        """The text of where an entry lies."""
        return plus(*(times(at[a].text, s) for a, s in self.strides.items()))


def times(a: str, b: str) -> str:
    if "0" in (a, b):
        return "0"
    return a if b == "1" else b if a == "1" else f"{a} * {b}"


def plus(*terms: str) -> str:
    return " + ".join(t for t in terms if t and t != "0") or "0"


@dataclass
class Nest:
    """Loops within each other, and what is computed at each depth: entry d of `lines` stands inside d loops."""

    loops: list[tuple[str, str]] = field(default_factory=list)  # variable, header
    lines: list[list[str]] = field(default_factory=lambda: [[]])
    after: list[list[str]] = field(default_factory=lambda: [[]])
    known: dict[tuple, Value] = field(default_factory=dict)

    def enter(self, variable: str, header: str) -> None:
        self.loops.append((variable, header))
        self.lines.append([])
        self.after.append([])

    def depth(self, uses: frozenset[str]) -> int:
        return max((i + 1 for i, (v, _) in enumerate(self.loops) if v in uses), default=0)

    def text(self) -> list[str]:
        """All of it, indented."""
        found = list(self.lines[0])
        for d, (_, header) in enumerate(self.loops):
            found.append(f"{'    ' * d}{header} {{")
            found += [f"{'    ' * (d + 1)}{x}" for x in self.lines[d + 1]]
        for d in reversed(range(len(self.loops))):
            found += [f"{'    ' * (d + 1)}{x}" for x in self.after[d + 1]]
            found.append("    " * d + "}")
        return found + self.after[0]


class Square(NamedTuple):
    """The two innermost loops of a nest that goes through a whole matrix: variables and lengths of rows and columns."""

    row: str
    rows: int
    column: str
    columns: int


class Entries:
    """Makes entries inside one nest. views: where kept values lie. tables: arrays of constants, by kind and values.

    square: set where `room` is free and holds COPIES of such matrices, for those that would be read across their rows.
    """

    spots: Mapping[tuple[tuple[int, ...], str], Index] = {}  # where a table of indices is known by arithmetic: by table and index

    square: Square | None = None

    def __init__(
        self, nest: Nest, views: Mapping[Node, View], length: Mapping[Node, Lengths], names: Names, tables: dict[tuple, str]
    ) -> None:
        self.nest, self.views, self.length, self.names, self.tables = nest, views, length, names, tables
        self.reads: list[tuple[View, dict[str, Index]]] = []
        self.copies: dict[str, int] = {}

    def value(self, node: Node, at: Indices) -> Value:
        """The text of `node` at these indices."""
        if node.op is Op.CONST:
            return Value(number(node.attrs["value"]))
        key = (node, tuple(at[a] for a in node.axes))
        if key in self.nest.known:
            return self.nest.known[key]
        if node in self.views:
            found = self.load(self.views[node], at)
        else:
            if node.op not in MAKERS:
                got = f"{node.op.value} in {node.where or 'the equation'}"
                raise KernelError(got, "an operation the C++ has", "backend: torch", "backend")
            found = MAKERS[node.op](self, node, at)
        self.nest.known[key] = found
        return found

    def load(self, view: View, at: Indices) -> Value:
        own = {a: at[a] for a in view.strides}
        self.reads.append((view, own))
        uses = frozenset().union(*(i.uses for i in own.values()))
        guard = both(*(i.guard for i in own.values()))
        pointer = view.pointer if re.fullmatch(r"\w+", view.pointer) else f"({view.pointer})"
        text = (not guard and self._turned(view, own)) or f"{pointer}[{view.offset(own)}]"
        return self.bound(Value(f"({guard} ? {text} : real(0))" if guard else text, uses))

    def _turned(self, view: View, own: Indices) -> str:
        """An entry of a matrix that lies column by column, from a copy that lies row by row; "" for all else."""
        q = self.square
        along = {own[a].text: s for a, s in view.strides.items() if s != "0" and own[a].uses}
        if q is None or set(along) != {q.row, q.column} or along[q.row] != "1" or not along[q.column].isdigit():
            return ""
        start = plus(view.pointer, view.offset({a: Index("0") if i.uses else i for a, i in own.items()}))
        if start not in self.copies and len(self.copies) == COPIES:
            return ""
        place = self.copies.setdefault(start, len(self.copies) * q.rows * q.columns)
        call = f"turned({q.columns}, {q.rows}, {start}, {along[q.column]}, {plus('room', str(place))}, {q.columns});"
        if call not in self.nest.lines[-3]:
            self.nest.lines[-3].append(call)
        return f"room[{plus(str(place), times(q.row, str(q.columns)), q.column)}]"

    def bound(self, value: Value, hint: str = "x") -> Value:
        """The value under a name, made as far out as it can be, unless it is short and made in the innermost loop."""
        depth = self.nest.depth(value.uses)
        if re.fullmatch(r"[\w.()-]+", value.text) or (depth == len(self.nest.loops) and len(value.text) < LONG):
            return value
        name = self.names.new(hint)
        self.nest.lines[depth].append(f"const real {name} = {value.text};")
        return Value(name, value.uses)

    def spot(self, table: tuple[int, ...], index: Index) -> Index:
        """The number in a table of indices."""
        known = self.spots.get((table, index.text))
        return index.moved(f"{self.table('index', table)}[{index.text}]") if known is None else known._replace(guard=index.guard)

    def table(self, kind: str, values: tuple) -> str:
        """The name of an array of constants."""
        if (kind, values) not in self.tables:
            self.tables[kind, values] = self.names.new(f"{kind}_table")
        return self.tables[kind, values]


def number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return "real(NAN)" if value != value else f"real({'-' if value < 0 else ''}INFINITY)"
    return f"real({value!r})"


# ---- makers: (entries, node, indices of the node's axes) -> value


def _pointwise(e: Entries, node: Node, at: Indices) -> Value:
    args = [e.value(a, at) for a in node.args]
    fn = node.attrs["fn"]
    return e.bound(Value(function(fn, [a.text for a in args]), _uses(args)), node.name or fn)


def function(fn: str, args: Sequence[str]) -> str:
    """The text of a pointwise function."""
    if fn in INFIX:
        return f"({args[0]} {INFIX[fn]} {args[1]})"
    return f"(-{args[0]})" if fn == "neg" else f"fn_{fn}({', '.join(args)})"


def _uses(values: Sequence[Value]) -> frozenset[str]:
    return frozenset().union(*(v.uses for v in values))


def _einsum(e: Entries, node: Node, at: Indices) -> Value:
    """A product without a sum."""
    a, b = (e.value(x, at) for x in node.args)
    return e.bound(Value(f"({a.text} * {b.text})", a.uses | b.uses), node.name or "mul")


def _rename(e: Entries, node: Node, at: Indices) -> Value:
    names = node.attrs["names"]
    return e.value(node.args[0], {old: at[names.get(old, old)] for old in node.args[0].axes})


def _expand(e: Entries, node: Node, at: Indices) -> Value:
    return e.value(node.args[0], at)


def last(e: Entries, node: Node, axis: str, index: int) -> str:
    return "0" if index == 0 else f"({e.length[node][axis].text} - 1)"


def _select(e: Entries, node: Node, at: Indices) -> Value:
    (x,), axis = node.args, node.attrs["axis"]
    return e.value(x, {**at, axis: Index(last(e, x, axis, node.attrs["index"]))})


def where(e: Entries, node: Node, condition: str, uses: frozenset[str], value: Value, other: str = "real(0)") -> Value:
    if other in ("real(0)", "real(0.0)") and value.text.startswith(f"({condition} ? ") and value.text.endswith(" : real(0))"):
        return value  # 0 where the condition does not hold, already
    return e.bound(Value(f"({condition} ? {value.text} : {other})", uses | value.uses), node.name or node.op.value)


def _shift(e: Entries, node: Node, at: Indices) -> Value:
    (x, fill), axis = node.args, node.attrs["axis"]
    here, ahead = at[axis], node.attrs["by"] == 1
    inside = f"{here.text} > 0" if ahead else f"{here.text} < {e.length[x][axis].text} - 1"
    value = e.value(x, {**at, axis: here.moved(f"({here.text} {'-' if ahead else '+'} 1)", inside)})
    edge = e.value(fill, at)
    return where(e, node, inside, here.uses | edge.uses, value, edge.text)


def _tril(e: Entries, node: Node, at: Indices) -> Value:
    rows, cols = at[node.attrs["rows"]], at[node.attrs["cols"]]
    inside = f"{cols.text} <= {plus(rows.text, str(node.attrs['diagonal']))}"
    return where(e, node, inside, rows.uses | cols.uses, e.value(node.args[0], at))


def _band(e: Entries, node: Node, at: Indices) -> Value:
    a = node.attrs
    t, s = at[a["axis"]], at[a["new"]]
    slot, uses = f"({s.text} - {t.text})", t.uses | s.uses
    inside = f"{slot} >= 0 && {slot} < {a['size']}"
    value = e.value(node.args[0], {**at, a["slot"]: Index(slot, uses, both(t.guard, s.guard, inside))})
    return where(e, node, inside, uses, value)


def _unband(e: Entries, node: Node, at: Indices) -> Value:
    a = node.attrs
    t, j = at[a["axis"]], at[a["slot"]]
    return e.value(node.args[0], {**at, a["new"]: Index(f"({t.text} + {j.text})", t.uses | j.uses, both(t.guard, j.guard))})


def _windows(e: Entries, node: Node, at: Indices) -> Value:
    a = node.attrs
    o, i = at[a["outer"]], at[a["inner"]]
    text = f"({plus(times(o.text, str(a['step'])), i.text)})"
    return e.value(node.args[0], {**at, a["axis"]: Index(text, o.uses | i.uses, both(o.guard, i.guard))})


def _merge(e: Entries, node: Node, at: Indices) -> Value:
    (t, j), size = node.attrs["axes"], node.attrs["size"]
    r = at[node.attrs["new"]]
    return e.value(node.args[0], {**at, t: r.moved(f"({r.text} / {size})"), j: r.moved(f"({r.text} % {size})")})


def _split(e: Entries, node: Node, at: Indices) -> Value:
    (t, j), size = node.attrs["new"], node.attrs["size"]
    a, b = at[t], at[j]
    joined = Index(f"({a.text} * {size} + {b.text})", a.uses | b.uses, both(a.guard, b.guard))
    return e.value(node.args[0], {**at, node.attrs["axis"]: joined})


def _place(e: Entries, node: Node, at: Indices) -> Value:
    axis = node.attrs["axis"]
    here = at[axis]
    spot = last(e, node, axis, node.attrs["index"])
    return where(e, node, f"{here.text} == {spot}", here.uses, e.value(node.args[0], at))


def _fold(e: Entries, node: Node, at: Indices) -> Value:
    """One whose terms are laid side by side; others are sums, and kept."""
    a, found = node.attrs, list[Value]()
    here = at[a["axis"]]
    for term in laid(node)[0]:
        free = a["outer"] if term.attrs["axis"] == a["inner"] else a["inner"]
        first, at_start = last(e, term, term.attrs["axis"], term.attrs["index"]), term.attrs["index"] == 0
        spot = here.text if at_start else f"({here.text} - {first})"
        inside = f"{spot} < {e.length[term][free].text}" if at_start else f"{here.text} >= {first}"
        value = e.value(term.args[0], {**at, free: here.moved(spot, inside)})
        found.append(where(e, node, inside, here.uses, value))
    return e.bound(Value(f"({' + '.join(v.text for v in found)})", _uses(found)), node.name or "fold")


def _gather(e: Entries, node: Node, at: Indices) -> Value:
    a = node.attrs
    new, first = at[a["new"]], keep.offset(node)
    if first is None:
        return e.value(node.args[0], {**at, a["axis"]: e.spot(tuple(a["index"]), new)})
    place = f"({new.text} + {first})" if first else new.text
    return e.value(node.args[0], {**at, a["axis"]: new.moved(place)})


def _scatter(e: Entries, node: Node, at: Indices) -> Value:
    """One whose index is i + offset; others are sums, and kept."""
    a = node.attrs
    new, first = at[a["new"]], keep.offset(node)
    if first is None:
        raise KernelError("a scatter inside a value", "one that is kept", "backend: torch", "backend")
    spot = f"({new.text} - {first})" if first else new.text
    inside = both(f"{spot} >= 0" if first else "", f"{spot} < {len(a['index'])}")
    return where(e, node, inside, new.uses, e.value(node.args[0], {**at, a["axis"]: new.moved(spot, inside)}))


def _tensor(e: Entries, node: Node, at: Indices) -> Value:
    """An array of constants, of any rank."""
    values, place, step = node.attrs["values"], [], 1
    shape: list[int] = []
    inner = values
    while isinstance(inner, tuple | list):
        shape.append(len(inner))
        inner = inner[0]
    for axis, size in zip(reversed(node.axes), reversed(shape), strict=True):
        place.insert(0, times(at[axis].text, str(step)))
        step *= size
    guard = both(*(at[a].guard for a in node.axes))
    text = f"{e.table('constant', tuple(flat(values)))}[{plus(*place)}]" if shape else number(values)
    return e.bound(Value(f"({guard} ? {text} : real(0))" if guard else text, _uses_of(at, node.axes)), "constant")


def _uses_of(at: Indices, axes: Sequence[str]) -> frozenset[str]:
    return frozenset().union(*(at[a].uses for a in axes))


def flat(values: object) -> list[float]:
    if not isinstance(values, tuple | list):
        return [float(values)]  # type: ignore[arg-type]
    return [x for v in values for x in flat(v)]


def _decay(e: Entries, node: Node, at: Indices) -> Value:
    """Of a gate that is the same everywhere, 0 or 1; others are kept."""
    t, s, factor = at[node.attrs["axis"]], at[node.attrs["new"]], uniform(node.args[0])
    if factor not in (0.0, 1.0):
        raise KernelError("a decay inside a value", "one that is kept", "backend: torch", "backend")
    return Value(f"({s.text} {'<=' if factor else '=='} {t.text} ? real(1) : real(0))", t.uses | s.uses)


MAKERS: Mapping[Op, Callable[[Entries, Node, Indices], Value]] = {
    Op.POINTWISE: _pointwise,
    Op.EINSUM: _einsum,
    Op.RENAME: _rename,
    Op.EXPAND: _expand,
    Op.SELECT: _select,
    Op.SHIFT: _shift,
    Op.TRIL: _tril,
    Op.BAND: _band,
    Op.UNBAND: _unband,
    Op.WINDOWS: _windows,
    Op.MERGE: _merge,
    Op.SPLIT: _split,
    Op.PLACE: _place,
    Op.FOLD: _fold,
    Op.GATHER: _gather,
    Op.SCATTER: _scatter,
    Op.TENSOR: _tensor,
    Op.DECAY: _decay,
}
