"""The text that computes one tile of a value: operands are read at indices, and structure along time is arithmetic on these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from memkit.compiler.ir import Node, Op
from memkit.compiler.simplify import uniform
from memkit.specs.errors import KernelError

from . import functions, keep
from .lengths import Length, Lengths, shape
from .memory import Buffer, Index, Value, both
from .writer import Writer

Indices = Mapping[str, Index]


@dataclass(frozen=True)
class Config:
    """Sizes of a kernel's tiles. They change registers and speed, never results beyond the order of sums.

    rows, cols: of a tile of results. inner: how much of a sum is loaded at once. line: entries of a vector at once.
    roots, sums: the most values, and sums among them, made in one loop over tiles. settle: a barrier must be told to wait for stores.
    registers: what a thread may have, told to the compiler, which else spills a little so that more programs share a processor.
    exact: operands of products are float32, whatever type sequences come in: then results, too, are other ones.
    """

    rows: int = 64
    cols: int = 64
    inner: int = 64
    line: int = 256
    warps: int = 4
    stages: int = 1
    roots: int = 4
    sums: int = 3
    settle: bool = False
    registers: int = 0  # 0: the compiler decides
    exact: bool = False

    def options(self) -> dict[str, int]:
        """What a launch tells the compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, **({"maxnreg": self.registers} if self.registers else {})}


def power(size: int, least: int = 16) -> int:
    """The smallest power of two that is not below `size` nor `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


class Tiles:
    """One kernel's text: where kept values lie (`placed`), what a loop body's parameters stand for (`alias`), how long axes are."""

    def __init__(self, config: Config, tokens: int, writer: Writer) -> None:
        self.config, self.tokens, self.w = config, tokens, writer
        self.roots: set[Node] = set()
        self.placed: dict[Node, Buffer] = {}
        self.alias: dict[Node, tuple[Node, dict[str, Index]]] = {}
        self.length: dict[Node, Lengths] = {}
        self.tables: dict[tuple, str] = {}  # (kind, values) -> buffer name
        self.used: dict[str, Buffer] = {}
        self.helpers: set[str] = set()
        self.lanes: set[int] = set()
        self.rank = 0
        self.blocks: tuple[int, ...] = ()
        self.split: tuple[str, int] | None = None
        self.nil = ""  # a 0 that the compiler cannot see through, of this step alone

    # ---- indices

    def most(self, length: Length) -> int:
        return length.at(self.tokens)

    def lane(self, block: int) -> str:
        self.lanes.add(block)
        return f"lane{block}"

    @contextmanager
    def along(self, axis: str, length: Length, most: int, form: str, anew: bool = False) -> Iterator[tuple[Index, int]]:
        """A tile's index along an axis, in a loop where one tile does not hold it. form: "line", "row" or "col". Gives the block too.

        anew: addresses are computed in each turn of the loop, and take no registers from one to the next.
        """
        block = min(power(self.most(length)), most)
        shaped = {"line": "{}", "row": "{}[:, None]", "col": "{}[None, :]"}[form]
        dims = frozenset({0 if form == "line" or form == "row" else 1})
        exact = not length.times and not length.chunks
        lane = self.lane(block)
        if self.split and axis == self.split[0]:
            block = self.split[1]
            name = self.w.let(f"{axis}_", shaped.format(f"({axis}_start + {self.lane(block)}{f' + {self.nil}' if self.nil else ''})"))
            yield Index(name, dims, "" if exact and length.plus % block == 0 else f"({name} < {length.text})"), block
        elif self.most(length) <= block:
            name = self.w.let(f"{axis}_", shaped.format(f"({lane} + {self.nil})" if self.nil else lane))
            yield Index(name, dims, "" if exact and length.plus == block else f"({name} < {length.text})"), block
        else:
            first, before = self.w.name(f"{axis}_first"), self.nil
            with self.w.block(f"for {first} in range(0, {length.text}, {block}):"):
                if anew:
                    self.nil = self.w.let("nil", f"tl.multiple_of(nought & {first}, 64)")
                name = self.w.let(f"{axis}_", shaped.format(f"({first} + {lane}{f' + {self.nil}' if self.nil else ''})"))
                yield Index(name, dims, "" if exact and length.plus % block == 0 else f"({name} < {length.text})"), block
            self.nil = before

    @contextmanager
    def one_by_one(self, axis: str, length: Length, reverse: bool = False) -> Iterator[Index]:
        """A loop over single entries of an axis."""
        count = self.w.name(f"{axis}_count")
        with self.w.block(f"for {count} in range(0, {length.text}):"):
            zero = "zero64" if length.chunks else "zero"
            text = f"{length.text} - 1 - {count} + {zero}" if reverse else f"{count} + {zero}"
            yield Index(self.w.let(f"{axis}_", text))

    @contextmanager
    def shaped(self, rank: int, *blocks: int) -> Iterator[None]:
        """Inside, tiles have these blocks."""
        before = self.rank, self.blocks
        self.rank, self.blocks = rank, blocks
        try:
            yield
        finally:
            self.rank, self.blocks = before

    def shape(self) -> str:
        return f"({', '.join(map(str, self.blocks))}{',' if len(self.blocks) == 1 else ''})"

    def barrier(self) -> None:
        """All that this program stored is there for all of its threads."""
        if self.config.settle:
            self.helpers.add("settle")
            self.w.line("settle()")
        self.w.line("tl.debug_barrier()")

    # ---- values

    def value(self, node: Node, at: Indices) -> Value:
        """The text of `node` at these indices."""
        if node.op is Op.CONST:
            return Value(number(node.attrs["value"]))
        key = ("value", node, tuple(at[a] for a in node.axes))
        known = self.w.known(key)
        if known is not None:
            return known
        if node in self.alias:
            outer, more = self.alias[node]
            return self.value(outer, {**at, **more})
        found = self.load(node, at) if node in self.placed else self.made(node, at)
        return self.w.remember(key, found)

    def made(self, node: Node, at: Indices) -> Value:
        """The value of `node`, computed here."""
        if node.op not in MAKERS:
            raise KernelError(
                f"{node.op.value} in {node.where or 'the equation'}", "an operation that a kernel has", "backend: torch", "backend"
            )
        return MAKERS[node.op](self, node, at)

    def load(self, node: Node, at: Indices) -> Value:
        return self.read(self.placed[node], at, f"{node.name or node.attrs.get('fn', 'x')}_tile")

    def read(self, buffer: Buffer, at: Indices, hint: str, cast: bool = True) -> Value:
        same, differs, guard = buffer.address(at)
        self.used[buffer.name] = buffer
        place = " + ".join(p for p in (buffer.name, f"({same})" if same else "", f"({differs})" if differs else "") if p)
        mask = f", mask={guard}, other=0" if guard else ""
        return Value(self.w.let(hint, f"tl.load({place}{mask}){'.to(F)' if cast and buffer.outside else ''}"), buffer.dims(at), True)

    def write(self, buffer: Buffer, at: Indices, value: Value) -> None:
        same, differs, guard = buffer.address(at)
        self.used[buffer.name] = buffer
        place = " + ".join(p for p in (buffer.name, f"({same})" if same else "", f"({differs})" if differs else "") if p)
        self.w.line(f"tl.store({place}, {value.text}{f', mask={guard}' if guard else ''})")

    def bind(self, node: Node, text: str, dims: frozenset[int], masked: bool = False) -> Value:
        hint = node.name or node.attrs.get("fn", node.op.value)
        return Value(self.w.let(hint, text), dims, masked)

    def whole(self, value: Value, dims: frozenset[int] = frozenset({0, 1})) -> str:
        """The text of a value that certainly fills the tile."""
        return value.text if value.dims >= dims else f"tl.broadcast_to({value.text}, {self.shape()})"

    def table(self, kind: str, values: tuple) -> str:
        """The name of an array of constants."""
        if (kind, values) not in self.tables:
            self.tables[kind, values] = self.w.name(f"{kind}_table")
        return self.tables[kind, values]


def number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


def _dims(values: list[Value]) -> frozenset[int]:
    return frozenset().union(*(v.dims for v in values))


# ---- makers: (kernel, node, indices of the node's axes) -> value


def _pointwise(k: Tiles, node: Node, at: Indices) -> Value:
    args = [k.value(a, at) for a in node.args]
    return k.bind(node, functions.text(node, [_wrapped(a.text) for a in args], k.helpers.add), _dims(args))


def _wrapped(text: str) -> str:
    return f"({text})" if text.startswith("-") else text


def _rename(k: Tiles, node: Node, at: Indices) -> Value:
    names = node.attrs["names"]
    return k.value(node.args[0], {old: at[names.get(old, old)] for old in node.args[0].axes})


def _expand(k: Tiles, node: Node, at: Indices) -> Value:
    return k.value(node.args[0], at)


def _select(k: Tiles, node: Node, at: Indices) -> Value:
    (x,), axis = node.args, node.attrs["axis"]
    last = f"{k.length[x][axis].text} - 1"
    return k.value(x, {**at, axis: Index("0" if node.attrs["index"] == 0 else f"({last})")})


def where(k: Tiles, node: Node, condition: str, dims: frozenset[int], value: Value, other: str = "0.0") -> Value:
    return k.bind(node, f"tl.where({condition}, {value.text}, {other})", dims | value.dims)


def _shift(k: Tiles, node: Node, at: Indices) -> Value:
    (x, fill), axis = node.args, node.attrs["axis"]
    here = at[axis]
    inside = f"({here.text} > 0)" if node.attrs["by"] == 1 else f"({here.text} < {k.length[x][axis].text} - 1)"
    step = "- 1" if node.attrs["by"] == 1 else "+ 1"
    value = k.value(x, {**at, axis: here.moved(f"({here.text} {step})", inside)})
    edge = k.value(fill, at)
    return where(k, node, inside, here.dims | edge.dims, value, edge.text)


def _tril(k: Tiles, node: Node, at: Indices) -> Value:
    rows, cols, diagonal = at[node.attrs["rows"]], at[node.attrs["cols"]], node.attrs["diagonal"]
    value = k.value(node.args[0], at)
    return where(
        k, node, f"{cols.text} <= {rows.text} + {diagonal}" if diagonal else f"{cols.text} <= {rows.text}", rows.dims | cols.dims, value
    )


def _band(k: Tiles, node: Node, at: Indices) -> Value:
    a = node.attrs
    t, s = at[a["axis"]], at[a["new"]]
    slot = f"({s.text} - {t.text})"
    inside = f"({slot} >= 0) & ({slot} < {a['size']})"
    dims = t.dims | s.dims
    value = k.value(node.args[0], {**at, a["slot"]: Index(slot, dims, both(t.guard, s.guard, inside))})
    return where(k, node, inside, dims, value)


def _unband(k: Tiles, node: Node, at: Indices) -> Value:
    a = node.attrs
    t, j = at[a["axis"]], at[a["slot"]]
    return k.value(node.args[0], {**at, a["new"]: Index(f"({t.text} + {j.text})", t.dims | j.dims, both(t.guard, j.guard))})


def _windows(k: Tiles, node: Node, at: Indices) -> Value:
    a = node.attrs
    o, i = at[a["outer"]], at[a["inner"]]
    step = "" if a["step"] == 1 else f" * {a['step']}"
    return k.value(node.args[0], {**at, a["axis"]: Index(f"({o.text}{step} + {i.text})", o.dims | i.dims, both(o.guard, i.guard))})


def _merge(k: Tiles, node: Node, at: Indices) -> Value:
    (t, j), size = node.attrs["axes"], node.attrs["size"]
    r = at[node.attrs["new"]]
    return k.value(node.args[0], {**at, t: r.moved(f"({r.text} // {size})"), j: r.moved(f"({r.text} % {size})")})


def _split(k: Tiles, node: Node, at: Indices) -> Value:
    (t, j), size = node.attrs["new"], node.attrs["size"]
    a, b = at[t], at[j]
    return k.value(
        node.args[0], {**at, node.attrs["axis"]: Index(f"({a.text} * {size} + {b.text})", a.dims | b.dims, both(a.guard, b.guard))}
    )


def _place(k: Tiles, node: Node, at: Indices) -> Value:
    axis = node.attrs["axis"]
    here = at[axis]
    spot = "0" if node.attrs["index"] == 0 else f"{k.length[node][axis].text} - 1"
    return where(k, node, f"{here.text} == {spot}", here.dims, k.value(node.args[0], at))


def _gather(k: Tiles, node: Node, at: Indices) -> Value:
    a = node.attrs
    new, first = at[a["new"]], keep.offset(node)
    if first is not None:
        return k.value(node.args[0], {**at, a["axis"]: new.moved(f"({new.text} + {first})") if first else new})
    index = k.read(Buffer(k.table("index", a["index"]), {a["new"]: "1"}), at, "index", cast=False)
    return k.value(node.args[0], {**at, a["axis"]: new.moved(index.text)})


def _scatter(k: Tiles, node: Node, at: Indices) -> Value:
    """Every entry sums the entries that go there, in order."""
    a = node.attrs
    new, first = at[a["new"]], keep.offset(node)
    if first is not None:
        spot = f"({new.text} - {first})" if first else new.text
        inside = f"({spot} >= 0) & ({spot} < {len(a['index'])})" if first else f"({spot} < {len(a['index'])})"
        return where(k, node, inside, new.dims, k.value(node.args[0], {**at, a["axis"]: new.moved(spot, inside)}))
    origins: list[list[int]] = [[] for _ in range(a["size"])]
    for i, to in enumerate(a["index"]):
        origins[to].append(i)
    most = max(map(len, origins))
    rows = tuple(tuple(own + [-1] * (most - len(own))) for own in origins)
    total = k.w.let(node.name or "total", f"tl.zeros({k.shape()}, F)" if k.rank else "0.0 + zero")
    with k.one_by_one("origin", Length(most)) as count:
        table = Buffer(k.table("origin", rows), {a["new"]: str(most), "origin": "1"})
        index = k.read(table, {**at, "origin": count}, "index", cast=False)
        value = k.value(node.args[0], {**at, a["axis"]: new.moved(index.text, f"({index.text} >= 0)")})
        k.w.line(f"{total} += tl.where({index.text} >= 0, {value.text}, 0.0)")
    return Value(total, frozenset(range(k.rank)))


def _fold(k: Tiles, node: Node, at: Indices) -> Value:
    """Every entry sums the windows it lies in."""
    a = node.attrs
    (x, _), s = node.args, at[a["axis"]]
    total = k.w.let(node.name or "total", f"tl.zeros({k.shape()}, F)" if k.rank else "0.0 + zero")
    with k.one_by_one(a["inner"], Length(a["size"])) as inner:
        start = f"({s.text} - {inner.text})"
        outer = start if a["step"] == 1 else f"({start} // {a['step']})"
        inside = f"({start} >= 0) & ({outer} < {k.length[x][a['outer']].text})" + (
            "" if a["step"] == 1 else f" & ({start} % {a['step']} == 0)"
        )
        value = k.value(x, {**at, a["outer"]: s.moved(outer, inside), a["inner"]: inner})
        k.w.line(f"{total} += tl.where({inside}, {value.text}, 0.0)")
    return Value(total, frozenset(range(k.rank)))


def _decay(k: Tiles, node: Node, at: Indices) -> Value:
    """Running products down a tile that holds the whole axis; ones above the diagonal keep a factor 0 exact."""
    axis, new = node.attrs["axis"], node.attrs["new"]
    row, col = at[axis], at[new]
    constant = uniform(node.args[0])
    if constant in (0.0, 1.0):
        return k.bind(node, f"tl.where({row.text} {'>=' if constant else '=='} {col.text}, 1.0, 0.0)", row.dims | col.dims)
    x = k.value(node.args[0], at)
    below = both(f"({row.text} > {col.text})", row.guard)
    factor = k.bind(node, f"tl.where({below}, {x.text}, 1.0)", x.dims | row.dims | col.dims)
    scanned = k.w.let(node.name or "decay", f"tl.cumprod({k.whole(factor)}, 0)")
    return where(k, node, f"{row.text} >= {col.text}", frozenset({0, 1}), Value(scanned, frozenset({0, 1})))


def _tensor(k: Tiles, node: Node, at: Indices) -> Value:
    strides, step = {}, 1
    for axis, size in reversed(list(zip(node.axes, shape(node.attrs["values"]), strict=True))):
        strides[axis], step = str(step), step * size
    return k.read(Buffer(k.table("number", _tuples(node.attrs["values"])), strides), at, node.name or "numbers", cast=False)


def _tuples(values: object) -> tuple:
    return tuple(map(_tuples, values)) if isinstance(values, tuple | list) else values  # type: ignore[return-value]


def _einsum(k: Tiles, node: Node, at: Indices) -> Value:
    if keep.contracted(node):
        from .sums import contract

        return contract(k, node, at)
    a, b = (k.value(x, at) for x in node.args)
    text = a.text if b.text == "1.0" else f"{_wrapped(a.text)} * {_wrapped(b.text)}"
    return k.bind(node, text, a.dims | b.dims)


def _reduce(k: Tiles, node: Node, at: Indices) -> Value:
    from .sums import contract

    return contract(k, node, at)


MAKERS: Mapping[Op, Callable[[Tiles, Node, Indices], Value]] = {
    Op.POINTWISE: _pointwise, Op.RENAME: _rename, Op.EXPAND: _expand, Op.SELECT: _select, Op.SHIFT: _shift, Op.TRIL: _tril, Op.BAND: _band,
    Op.UNBAND: _unband, Op.WINDOWS: _windows, Op.MERGE: _merge, Op.SPLIT: _split, Op.PLACE: _place, Op.GATHER: _gather,
    Op.SCATTER: _scatter,
    Op.FOLD: _fold, Op.DECAY: _decay, Op.TENSOR: _tensor, Op.EINSUM: _einsum, Op.REDUCE: _reduce,
}  # fmt: skip
