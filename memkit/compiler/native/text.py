"""The C++ of one graph: its steps in order, its loops, and the scratch memory they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.kernels import keep
from memkit.compiler.kernels.layout import settled
from memkit.compiler.kernels.lengths import Length, Lengths, lengths, shape
from memkit.compiler.kernels.memory import packed

from . import choice, families, loops, runs, steps
from .arena import Arena, Memory, Share, Waits
from .choice import Choice
from .entries import Entries, Index, Nest, View, flat, plus, times
from .names import Names
from .parts import Open
from .private import private
from .runs import Run
from .step import is_small
from .team import OUTER, team_axis


@dataclass(frozen=True)
class Source:
    """One emitted function. inputs, axes: names and axes of its parameters; results: label, axes and lengths of what it writes."""

    name: str
    text: str
    inputs: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, tuple[str, ...], tuple[Length, ...]], ...]


def source(graph: Graph, name: str, given: Mapping[str, Lengths], tokens: int, tables: dict[tuple, str]) -> Source:
    """The C++ of `graph`, whose parameters have the lengths `given`; `tokens` is the most tokens of a chunk."""
    return Function(settled(choice.addable(keep.unfused(graph))), given, tokens, tables).source(name)


class Function:
    def __init__(self, graph: Graph, given: Mapping[str, Lengths], tokens: int, tables: dict[tuple, str]) -> None:
        self.graph, self.tokens, self.tables = graph, tokens, tables
        self.names, self.arena, self.waits = Names(), Arena(), Waits()
        self.names.taken |= set(tables.values())
        self.length: dict[Node, dict[str, Length]] = {}
        self.gets: dict[Node, dict[int, Node]] = {}
        self.choices: dict[Graph, Choice] = {}
        self.places: dict[Node, choice.Place] = {}
        self._study(graph, [given[p.attrs["name"]] for p in graph.params])
        self.views: dict[Node, View] = {}
        self.lines: list[str] = []
        self.depth, self.owner = 1, 0
        self.wide: list[int] = []
        self.fixed: dict[str, Index] = {"g": Index("g")}  # indices of axes that no step goes through
        self.run: Run | None = None  # the run of steps that is being written, if one is
        self.own_arena = Arena()  # what each member of a team keeps for itself
        self.spread, self.open = Arena(), Open(self)  # what each member makes for all
        self.private: set[Node] = set()  # values of which each member makes, and reads, its part only
        self.team = self._team(graph)
        self.read: set[Node] = set()  # what steps read of the level that is being written
        self.adopted: set[Node] = set()  # results that their origin is made in the place of

    def _study(self, graph: Graph, given: Sequence[Lengths]) -> None:
        found = lengths(graph, given)
        self.length |= found
        self.choices[graph] = choice.chosen(graph, [r for r in graph.results if r.op not in keep.PLACED])
        self.places |= self.choices[graph].places
        for node in graph.nodes():
            if node.op is Op.SCAN and node.body is not None:
                self._study(node.body, [found[a] for a in node.args])
            if node.op is Op.GET:
                self.gets.setdefault(node.args[0], {})[node.attrs["index"]] = node

    def _team(self, graph: Graph) -> str:
        """The axis along which members own parts of all states, which then never go from one member's cache to another's; "" for none."""
        for scan in graph.nodes():
            if scan.body is not None:
                carries = scan.body.params[: scan.attrs["carries"]]
                return team_axis(scan.body, carries, [self.length[p] for p in carries], self.tokens)
        return ""

    # ---- the whole

    def source(self, name: str) -> Source:
        labels = self.graph.labels or tuple(f"result{i}" for i in range(len(self.graph.results)))
        for i, param in enumerate(self.graph.params):
            self.views[param] = self._argument("const real*", param.attrs["name"], f"in[{i}]", param)
        for i, (label, node) in enumerate(zip(labels, self.graph.results, strict=True)):
            if node.op in (Op.PARAM, Op.CONST, Op.TENSOR):
                raise AssertionError(f"result {label} has no step that makes it")
            self.views[node] = self._argument("real*", f"{label}_out", f"out[{i}]", node)
        self.adopt(self.graph)
        items, reads = self.items(self.graph)
        self.level(self.graph, items, reads)
        wide, own, apart = sum(self.wide), self.own_arena.peak, self.spread.peak
        spread = f"{self.arena.peak}{f' + N * {wide}' if wide else ''}"
        head = [
            f"static void {name}_head(", "    const real* const* in, real* const* out, long N, long G, long LT, long g,",
            "    real* mine, real* room, Team& team, long member) {", "    const long members = team.members;",
            *([f"    real* const wide = mine + {self.arena.peak};"] if wide else []),
            *(["    real* const own = room + product_room();"] if own else []),
            *([f"    real* const spread = mine + {spread};", f"    const long apart = {apart};"] if apart else []),
        ]  # fmt: skip
        call = f"{name}_head(in, out, N, G, LT, g, mine, room, team, member);"
        tail = [
            "}", "", f'extern "C" int {name}(const real* const* in, real* const* out, long N, long G, long LT, long threads) {{',
            f"    return for_heads(G, threads, {spread}{f' + members_of(G, threads) * {apart}' if apart else ''}, product_room() + {own},",
            "        [=](long g, real* mine, real* room, Team& team, long member) {", f"            {call}", "        });", "}",
        ]  # fmt: skip
        results = tuple(
            (label, r.axes, tuple(self.length[r][a] for a in r.axes)) for label, r in zip(labels, self.graph.results, strict=True)
        )
        params = self.graph.params
        inputs, axes = tuple(p.attrs["name"] for p in params), tuple(p.axes for p in params)
        return Source(name, "\n".join([*head, *self.lines, *tail]) + "\n", inputs, axes, results)

    def _argument(self, kind: str, hint: str, array: str, node: Node) -> View:
        """An array that came in or goes out: without gaps, axes in the order of the node's."""
        name, strides, step = self.names.new(hint), {}, "1"
        for axis in reversed(node.axes):
            strides[axis] = step
            length = "G" if axis == "g" else self.length[node][axis].text
            step = str(int(step) * int(length)) if step.isdigit() and length.isdigit() else times(step, length)
        strides = {a: s if s.isdigit() else f"({s})" for a, s in strides.items()}
        self.line(f"{kind} const {name} = {plus(array, times('g', strides.pop('g', '0')))};")
        return View(name, strides, Memory(f"{kind} {name}"))

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    # ---- memory

    def most(self, node: Node) -> dict[str, int]:
        return {a: length.at(self.tokens) for a, length in self.length[node].items()}

    def own(self, node: Node) -> list[str]:
        """The axes that a step for `node` goes through."""
        return [a for a in node.axes if a not in self.fixed]

    def sizes(self, *nodes: Node) -> dict[str, str]:
        return {a: length.text for node in nodes for a, length in self.length[node].items()}

    def scratch(self, node: Node, extra: Mapping[str, int] | None = None) -> View:
        """Room for a value, with gaps where a chunk is shorter than it may be. A value for every chunk lies in the part that grows."""
        name = self.names.new(node.name or node.attrs.get("fn", node.op.value))
        axes = [a for a in node.axes if a not in OUTER]
        strides, size = packed([*(extra or {}), *axes], {**self.most(node), **(extra or {})})
        if "n" in node.axes:
            size = -(-size // 16) * 16
            self.line(f"real* const {name} = wide + N * {sum(self.wide)};")
            self.wide.append(size)
            return View(name, {**strides, "n": str(size)}, Memory(f"wide {name}"))
        memory = self.arena.take(size)
        self.line(f"real* const {name} = mine + {memory.start};")
        return View(name, strides, memory)

    def own_scratch(self, node: Node, lone: str = "") -> View:
        """Room for a value that every member makes for itself. lone: where it lies if there is one member only."""
        name = self.names.new(node.name or node.attrs.get("fn", node.op.value))
        strides, size = packed([a for a in self.own(node) if a not in OUTER], self.most(node))
        memory = self.own_arena.take(size)
        self.line(f"real* const {name} = {f'members == 1 ? {lone} : ' if lone else ''}own + {memory.start};")
        return View(name, strides, memory._replace(space="own"))

    def place(self, node: Node, chosen: Choice) -> View:
        """Room for the value of a step."""
        if self.run is not None:
            return self.run.scratch(node)
        alone = "n" not in node.axes and is_small(self, node, steps.work(self, node, chosen), chosen.roots)
        return self.own_scratch(node) if alone or node in self.private else self.scratch(node)

    def give(self, memory: Memory) -> None:
        """What is not read any more makes room."""
        if memory.space == "own":
            self.own_arena.give(memory)
        elif memory.space == "mine":
            self.arena.give(memory)

    def view(self, node: Node) -> View | None:
        """The array in which `node` lies, if it lies in one."""
        if node in self.views:
            return self.views[node]
        if node.op is Op.TENSOR:
            name = Entries(Nest(), {}, {}, self.names, self.tables).table("constant", tuple(flat(node.attrs["values"])))
            strides, _ = packed(list(node.axes), dict(zip(node.axes, shape(node.attrs["values"]), strict=True)))
            return View(name, strides, Memory("constants"))
        inner = self.view(node.args[0]) if choice.is_view(node) else None
        if inner is None:
            return None
        a, strides = node.attrs, dict(inner.strides)
        if node.op is Op.RENAME:
            return View(inner.pointer, {a["names"].get(x, x): s for x, s in strides.items()}, inner.memory)
        if node.op is Op.SELECT:
            last = "0" if a["index"] == 0 else f"({self.length[node.args[0]][a['axis']].text} - 1)"
            return inner.at(a["axis"], last)
        if node.op is Op.WINDOWS:
            step = strides.pop(a["axis"])
            return View(inner.pointer, {**strides, a["outer"]: times(str(a["step"]), step), a["inner"]: step}, inner.memory)
        if node.op is Op.GATHER:
            step = strides.pop(a["axis"])
            return View(plus(inner.pointer, times(str(keep.offset(node)), step)), {**strides, a["new"]: step}, inner.memory)
        return View(inner.pointer, {**strides, **{x: "0" for x in node.axes if x not in strides and x != "g"}}, inner.memory)

    # ---- levels

    def items(self, graph: Graph) -> tuple[list[Node], dict[Node, keep.Reads]]:
        """The steps of one graph, arguments first, and what each reads."""
        roots = self.choices[graph].roots
        items = [n for n in graph.nodes() if n in roots or n.op is Op.SCAN]
        reads = {n: keep.scan_reads(n, roots) if n.op is Op.SCAN else keep.reads(n, roots) for n in items}
        return runs.gathered(self, families.gathered(items), reads, roots), reads

    def adopt(self, graph: Graph) -> None:
        """What a result is only another name of is made where the result lies."""
        for result in graph.results:
            if result.op is not Op.RENAME or result not in self.views:
                continue
            origin, back = result.args[0], {new: old for old, new in result.attrs["names"].items()}
            if origin in self.choices[graph].roots and origin not in graph.results and origin not in self.views:
                view = self.views[result]
                self.views[origin] = View(view.pointer, {back.get(a, a): s for a, s in view.strides.items()}, view.memory)
                self.adopted.add(result)

    def level(self, graph: Graph, items: Sequence[Node], reads: Mapping[Node, keep.Reads]) -> None:
        """The steps of one graph, in the order of `items`."""
        chosen = self.choices[graph]
        last: dict[Node, int] = {}
        for i, node in enumerate(items):
            for read in reads[node].all:
                last[read] = i
        mine: dict[Node, Memory] = {}
        outer, self.read = self.read, {keep.source(r) for n in items if n not in self.adopted for r in reads[n].all}
        found = runs.runs(self, items, chosen.roots)
        self.private |= private(self, items, reads, chosen)
        together: list[Node] = []
        for i, node in enumerate(items):
            run = found.get(i)
            if self.open.sums:
                self.open.add_up(None if run or node.op is Op.SCAN else reads[node].all)
            if run is not None:
                self.start_run(run, last)
            if node.op is Op.SCAN:
                mine |= loops.loop(self, node)
            elif node not in self.adopted:
                self.title(node)
                if node not in self.views:
                    self.views[node] = self.place(node, chosen)
                    if self.run is None or self.views[node].memory.space == "mine":
                        mine[node] = self.views[node].memory
                placed = self.views[node]
                together.append(node)
                following = [n for n in items[i + 1 : i + 2] if self.run is None and i + 1 not in found and n not in self.adopted]
                if not families.go_on(node, following):
                    steps.step(self, together, chosen)
                    together = []
                if self.views[node] is not placed:  # each member has one for itself
                    mine[node] = self.views[node].memory
            if self.run is not None and self.run.over(i):
                self.run = None
            if self.run is None:
                for read in [n for n in mine if last.get(n, i) <= i and n not in self.open.sums]:
                    self.give(mine.pop(read))
        self.open.add_up()
        self.read = outer
        for memory in mine.values():
            self.give(memory)

    def title(self, node: Node) -> None:
        """What the next lines make."""
        text = f"// {node.name or node.attrs.get('fn', node.op.value)} [{', '.join(node.axes)}]"
        self.line(text) if self.run is None else self.run.lines.append(text)

    def start_run(self, run: runs.Run, last: Mapping[Node, int]) -> None:
        """Write the steps that follow as one loop over the entries of the axis they share."""
        run.begin(last)
        self.run = run

    def barrier(self) -> None:
        self.line("team.wait();")
        self.waits.clear()
        self.open.waited()

    def before(self, reads: list[tuple[Memory, Share | None]], writes: list[tuple[Memory, Share]]) -> None:
        """A wait, if what a step touches needs one."""
        if self.waits.needed(reads, writes):
            self.barrier()
        self.waits.note(reads, writes)

