"""The text of one kernel: its items in steps, its loops, and the memory it keeps for itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from memkit.compiler.ir import Node, Op

from . import keep
from .layout import EVERY, LOOP, Kernel, Layout, copied, place_carry
from .memory import Buffer, Index, packed
from .solve import solve
from .tile import Config, Indices, Tiles, power
from .writer import Writer

FIRST = "first"  # the argument that says which item the first program of a part does
FAR = 1 << 31  # numbers that an offset of 32 bits reaches
STEPS = 36  # of one kernel at most: what the compiler computes at the head of a longer one stays in registers to its end, and spills


@dataclass(frozen=True)
class Source:
    """One kernel. pointers, strides: its arguments in order. scratch: numbers a program keeps for itself. split: (axis, block, length).

    part: (i, count), where this is one of several that go on in the same scratch: a program does one item, and FIRST follows the strides.
    """

    name: str
    text: str
    kind: int
    pointers: tuple[str, ...]
    strides: tuple[str, ...]
    scratch: int
    split: tuple[str, int, int] | None
    helpers: frozenset[str]
    tables: dict[tuple, str]
    config: Config
    part: tuple[int, int] = (0, 1)


def kernel_sources(layout: Layout, kernel: Kernel, name: str, first: int, config: Config, tables: dict[tuple, str]) -> list[Source]:
    """The text of `kernel`, in parts if it has more than STEPS steps. Their names are `name` and numbers from `first` on."""
    return KernelText(layout, kernel, config, tables).sources(name, first)


MINE = "mine has nothing yet: "  # stands where it is not known yet whether a program keeps anything


@dataclass(frozen=True)
class Level:
    """The steps of one graph. read: what each root reads; far: the roots that another step reads than the one that makes them."""

    steps: list[keep.Step]
    read: dict[Node, keep.Reads]
    far: set[Node]


@dataclass(frozen=True)
class Part:
    """The body of one kernel, and what it needs at its head."""

    place: tuple[int, int]
    steps: list[keep.Step]
    w: Writer
    used: dict[str, Buffer]
    helpers: set[str]
    lanes: set[int]


def new_writer(layout: Layout, tables: dict[tuple, str], depth: int) -> Writer:
    return Writer({*layout.names, *tables.values(), *(f"{name}_{a}" for name in layout.names for a in "nbhtsk")}, depth)


class KernelText(Tiles):
    def __init__(self, layout: Layout, kernel: Kernel, config: Config, tables: dict[tuple, str]) -> None:
        super().__init__(config, layout.tokens, new_writer(layout, tables, depth=2))
        self.layout, self.kernel, self.tables = layout, kernel, tables
        self.placed, self.roots, self.length = dict(layout.placed), set(layout.roots), {**layout.length}
        self.scratch = 0
        self.dirty: set[Node] = set()
        self.width: tuple[str, int, int] | None = None
        self.turn = "item"  # the innermost loop's variable
        self.count = 0

    # ---- the whole

    def sources(self, name: str, first: int) -> list[Source]:
        loops = [n for n in self.kernel.items if n.op is Op.SCAN]
        if self.kernel.kind == LOOP and len(loops) == 1:
            self.width = split_axis(loops[0], self)
            self.split = self.width and self.width[:2]
        at = {"g": Index("g"), **({"n": Index("n")} if self.kernel.kind == EVERY else {})}
        level = self.level(self.kernel.items)
        count = 1 if self.kernel.kind == LOOP else max(1, -(-len(level.steps) // STEPS))
        if count == 1:
            self.perform(level.steps, level, at)
            self.barrier()
            parts = [Part((0, 1), level.steps, self.w, self.used, self.helpers, self.lanes)]
        else:
            parts = [self._part(level, (i, count), at) for i in range(count)]
        return [self._source(f"{name}_{first + i}", part) for i, part in enumerate(parts)]

    def _part(self, level: Level, place: tuple[int, int], at: Indices) -> Part:
        """A kernel of its own, which finds in memory what those before it made."""
        self.w, self.used, self.helpers, self.lanes = new_writer(self.layout, self.tables, depth=1), {}, set(), set()
        self.dirty.clear()
        first, last = (len(level.steps) * i // place[1] for i in (place[0], place[0] + 1))
        steps = level.steps[first:last]
        self.perform(steps, level, at)
        return Part(place, steps, self.w, self.used, self.helpers, self.lanes)

    def _source(self, name: str, part: Part) -> Source:
        pointers = tuple(part.used)
        strides = tuple(s for b in part.used.values() for s in b.arguments) + ((FIRST,) if part.place[1] > 1 else ())
        lines = [x.replace(MINE, "mine += ") for x in part.w.lines if self.scratch or MINE not in x]
        text = self._head(name, pointers, strides, part) + "\n".join(lines) + "\n"
        return Source(
            name, text, self.kernel.kind, pointers, strides, self.scratch, self.width, frozenset(part.helpers), self.tables, self.config,
            part.place,
        )  # fmt: skip

    def _head(self, name: str, pointers: Sequence[str], strides: Sequence[str], part: Part) -> str:
        arguments = [p for p in pointers if p != "mine"] + list(strides) + ["scratch", "groups", "heads", "N", "LT", "nought"]
        cut, own = part.place[1] > 1, {n for step in part.steps for n in step.roots}
        made = ", ".join(dict.fromkeys(_called(n) for n in self.kernel.items if n in own))
        per = {EVERY: "every chunk n and head g", LOOP: "every head g, chunk after chunk"}.get(self.kernel.kind, "every head g")
        program = "tl.program_id(0)" + (" * tl.num_programs(1) + tl.program_id(1)" if self.split else "")
        count = "N * groups" if self.kernel.kind == EVERY else "groups"
        lines = [
            f'@triton.jit(do_not_specialize=["{FIRST}"])' if cut else "@triton.jit",
            f"def {name}(",
            *wrapped(arguments),
            "    D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, S: tl.constexpr,",
            "):",
            f'    """For {per}{f", part {part.place[0] + 1} of {part.place[1]}" if cut else ""}: {made[:1500]}."""',
            "    zero = tl.program_id(0) * 0",
            "    zero64 = zero.to(tl.int64)",
            "    G = groups + zero64",
            *(f"    lane{b} = tl.arange(0, {b})" for b in sorted(part.lanes)),
        ]
        if self.scratch:
            lines.append(f"    mine = scratch + ({program} + zero64) * {self.scratch}")
        if self.split:
            lines.append(f"    {self.split[0]}_start = tl.program_id(1) * {self.split[1]}")
        turn = []
        if self.kernel.kind == EVERY:
            turn += ["group = (item + zero) % groups", "n = (item + zero64) // G"]
        else:
            turn.append("group = item + zero")
        turn.append("batch, head = group // heads, group % heads")
        if self.scratch:
            turn.append("mine += nought & item")
        if cut:
            lines.append(f"    item = {FIRST} + tl.program_id(0)")
        else:
            lines.append(f"    for item in range(tl.program_id(0), {count}, tl.num_programs(0)):")
        lines += ["    " * part.w.depth + x for x in turn]
        return "\n".join(lines) + "\n"

    def private(self, node: Node, more: dict[str, int] | None = None) -> Buffer:
        """Memory of this program alone for a value, with further axes in front."""
        most = {**self.layout_most(node), **(more or {})}
        strides, size = packed([*(more or {}), *(a for a in node.axes if a not in ("n", "g") and a not in (more or {}))], most)
        first = self.scratch
        self.scratch += -(-size // 32) * 32
        far = " + zero64" if self.scratch > FAR else ""
        return Buffer("mine", strides, f"{first}{far}" if first else "")

    def layout_most(self, node: Node) -> dict[str, int]:
        return {a: self.most(length) for a, length in self.length[node].items()}

    # ---- steps

    def level(self, items: Sequence[Node]) -> Level:
        """The steps of everything that one graph makes."""
        steps = keep.schedule(
            items, self.roots, {n: self.layout_most(n) for n in items if n.op is not Op.SCAN}, (self.config.roots, self.config.sums)
        )
        owner = {n: i for i, step in enumerate(steps) for n in step.roots}
        read = {n: self.layout.reads(n) for n in items}
        far = {d for n in items for d in read[n].all if owner.get(d) != owner[n] or d in read[n].elsewhere}
        return Level(steps, read, far)

    def perform(self, steps: Sequence[keep.Step], level: Level, at: Indices) -> None:
        """Steps of a level, with a barrier before what others wrote is read."""
        for step in steps:
            if any(keep.source(d) in self.dirty for n in step.roots for d in level.read[n].all):
                self.barrier()
            for root in step.roots:
                if root.op is not Op.SCAN and root not in self.placed and root in level.far:
                    self.placed[root] = self.private(root)
            with self.w.block(""):
                self.step(step, at)
            self.dirty.update(n for n in step.roots if n in self.placed or n.op is Op.SCAN)

    def barrier(self) -> None:
        super().barrier()
        self.dirty.clear()

    def step(self, step: keep.Step, at: Indices) -> None:
        first = step.roots[0]
        if first.op is Op.SCAN:
            self.loop(first, at)
            return
        axes = [a for a in first.axes if a not in ("n", "g")]
        self.count += 1
        self.nil = self.w.let("nil", f"tl.multiple_of(nought & ({self.turn} + {self.count}), 64)")
        self._anew(self.nil)
        self.w.line(f"# {', '.join(map(_called, step.roots))} [{', '.join(axes)}]")
        if first.op is Op.SOLVE:
            width = step.tile[1]
            with ExitStack() as loops:
                here = self._single(first, [a for a in axes if a not in (first.attrs["rows"], width)], at, loops)
                solve(self, first, self.placed[first], here, width)
            return
        with ExitStack() as loops:
            here = self._single(first, [a for a in axes if a not in step.tile], at, loops)
            self._tile(first, step.tile, here, loops)
            for root in step.roots:
                value = self.w.remember(("value", root, tuple(here[a] for a in root.axes)), self.made(root, here))
                if root in self.placed:
                    self.write(self.placed[root], here, value)

    def _anew(self, nil: str) -> None:
        """Where a head's values start is another number to the compiler from here on: none is kept in registers for later."""
        self.w.line(f"g, b, h = group + {nil} + zero64, batch + {nil} + zero64, head + {nil} + zero64")

    def _single(self, node: Node, axes: Sequence[str], at: Indices, loops: ExitStack) -> dict[str, Index]:
        here = dict(at)
        for axis in axes:
            here[axis] = loops.enter_context(self.one_by_one(axis, self.length[node][axis]))
        return here

    def _tile(self, node: Node, tile: Sequence[str], here: dict[str, Index], loops: ExitStack) -> None:
        """The indices of a tile's axes, put into `here`."""
        length, c = self.length[node], self.config
        if len(tile) == 2:
            rows = power(self.most(length[tile[0]])) if node.op is Op.DECAY else c.rows
            cols = max(16, min(c.cols, 4096 // rows)) if node.op is Op.DECAY else c.cols
            here[tile[0]], rows = loops.enter_context(self.along(tile[0], length[tile[0]], rows, "row", True))
            here[tile[1]], cols = loops.enter_context(self.along(tile[1], length[tile[1]], cols, "col", True))
            loops.enter_context(self.shaped(2, rows, cols))
        elif tile:
            here[tile[0]], block = loops.enter_context(self.along(tile[0], length[tile[0]], c.line, "line", True))
            loops.enter_context(self.shaped(1, block))
        else:
            loops.enter_context(self.shaped(0))

    # ---- loops

    def loop(self, scan: Node, at: Indices) -> None:
        """A SCAN: carries start in slot 0; an iteration reads its slot and writes the next."""
        assert scan.body is not None
        body, k, m, axis = scan.body, scan.attrs["carries"], scan.attrs["slices"], scan.attrs["axis"]
        gets, count = self.layout.gets.get(scan, {}), self.layout.count(scan)
        carried = self.layout.carried.get(scan) or self._own_carries(scan, count)
        zero, save = ("zero64" if axis == "n" else "zero"), scan.attrs["save"]
        self._starts(scan, carried, at)
        step = self.w.name(f"{axis}_step")
        self.w.line(f"# {'backwards ' if scan.attrs['reverse'] else ''}along {axis}: {', '.join(p.attrs['name'] for p in body.params[:k])}")
        with self.w.block(f"for {step} in range(0, {count}):"):
            nil = self.w.let(
                "nil", f"(nought & {step}) + {zero}"
            )  # a 0 of this iteration: addresses are computed anew in each, not carried
            here = Index(self.w.let(axis, f"{count} - 1 - {step} + {nil}" if scan.attrs["reverse"] else f"{step} + {nil}"))
            slot = self.w.let("slot", f"{step} + {nil}" if save else f"{step} % 2 + {nil}")
            following = self.w.let("slot_after", f"{step} + 1 + {nil}" if save else f"({step} + 1) % 2 + {nil}")
            self._anew(nil)
            self.w.line(f"{MINE}{nil}")
            for param, outer in zip(body.params[k:], scan.args[k:], strict=True):
                self.alias[param] = outer, {axis: here} if param in body.params[k : k + m] else {}
            for param, result, buffer in zip(body.params, body.results, carried, strict=False):
                self.placed[param] = buffer.at(axis, slot)
                self.placed[result] = buffer.at(axis, following)
            for i, result in enumerate(body.results[k:], k):
                if i in gets:
                    self.placed[result] = self.placed[gets[i]].at(axis, here.text)
            self.dirty.clear()
            before, self.turn = self.turn, step
            level = self.level(self.layout.items(body))
            self.perform(level.steps, level, {a: i for a, i in at.items() if a != axis})
            self.turn = before
            self.barrier()

    def _starts(self, scan: Node, carried: Sequence[Buffer], at: Indices) -> None:
        assert scan.body is not None
        for param, outer, buffer in zip(scan.body.params, scan.args, carried, strict=False):
            copy = copied(outer).replace(axes=param.axes, name=param.attrs["name"])
            self.length[copy] = self.length[param]
            self.placed[copy] = buffer.at(scan.attrs["axis"], "0")
            tile = tuple(a for a in copy.axes if a not in ("n", "g"))[-2:]
            with self.w.block(""):
                self.step(keep.Step([copy], tile), at)
        self.barrier()

    def _own_carries(self, scan: Node, count: str) -> list[Buffer]:
        """Carries and outputs of a loop that no other kernel sees."""
        assert scan.body is not None
        axis, k, gets = scan.attrs["axis"], scan.attrs["carries"], self.layout.gets.get(scan, {})
        most = self.most(self.length[scan.args[k]][axis])
        carried = []
        for i, param in enumerate(scan.body.params[:k]):
            carried.append(self.private(param, {axis: most + 1 if scan.attrs["save"] else 2}))
            place_carry(scan, carried[i], i, gets, self.placed, count)
        for i, get in gets.items():
            if k <= i < len(scan.body.results):
                self.placed[get] = self.private(get)
        return carried


def wrapped(names: Sequence[str], width: int = 110) -> list[str]:
    """Arguments in lines."""
    lines, line = [], "   "
    for name in names:
        if len(line) + len(name) + 2 > width:
            lines.append(line)
            line = "   "
        line += f" {name},"
    return [*lines, line]


def split_axis(scan: Node, k: Tiles) -> tuple[str, int, int] | None:
    """(axis, block, length) of an axis along which programs can share a loop: every carry has it, nothing sums or moves along it."""
    assert scan.body is not None
    nodes = scan.body.nodes()
    carries = scan.body.params[: scan.attrs["carries"]]
    moving = (
        Op.RENAME,
        Op.SELECT,
        Op.SHIFT,
        Op.GATHER,
        Op.SCATTER,
        Op.BAND,
        Op.UNBAND,
        Op.WINDOWS,
        Op.FOLD,
        Op.MERGE,
        Op.SPLIT,
        Op.PLACE,
        Op.DECAY,
    )
    for axis in carries[0].axes if carries else ():
        if axis in ("g", "n") or not all(axis in c.axes for c in carries):
            continue
        blocked = any(
            n.op is Op.SCAN
            or axis in keep.contracted(n)
            or (n.op in moving and axis in _moved(n))
            or (n.op is Op.SOLVE and axis in _moved(n))
            for n in nodes
        )
        size = k.most(k.length[carries[0]][axis])
        block = min(power(size), k.config.cols)
        if not blocked and all(axis in r.axes for r in scan.body.results) and size > block:
            return axis, block, size
    return None


def _moved(node: Node) -> set[str]:
    """The axes an operation moves along."""
    a = node.attrs
    found = {a.get(key) for key in ("axis", "new", "slot", "outer", "inner", "rows", "cols")} - {None}
    for key in ("axes", "new"):
        found |= set(a[key]) if isinstance(a.get(key), tuple) else set()
    return {x for x in found if isinstance(x, str)} | {*a.get("names", {}), *a.get("names", {}).values()}


def _called(node: Node) -> str:
    """What comments call a value; of a loop, what it carries."""
    if node.op is Op.SCAN and node.body is not None:
        carried = ", ".join(p.attrs["name"] for p in node.body.params[: node.attrs["carries"]])
        return f"the loop over {node.attrs['axis']} that carries {carried}"
    return node.name or node.attrs.get("fn", node.op.value)
