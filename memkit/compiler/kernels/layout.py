"""One graph cut into kernels: what runs before, in and after its loops, and where every value lies that more than one kernel sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.names import unused

from . import keep
from .functions import HELPERS
from .lengths import Length, Lengths, lengths
from .memory import Buffer, packed

RESERVED = (
    "triton", "tl", "torch", "zero", "zero64", "G", "g", "b", "h", "n", "item", "mine", "scratch",
    "group", "batch", "head", "groups", "heads", "N", "LT", "nought", "first", "some",
    "D", "F", "P", "S",
    "B", "H", "X", "sizes", "how", "like", "grid", *HELPERS, *(f"lane{1 << i}" for i in range(3, 13)),
)  # fmt: skip
GROUP, EVERY, LOOP = 0, 1, 2  # what a kernel's items are: every g; every (n, g); every g with a loop over n


def settled(graph: Graph) -> Graph:
    """The graph, and every body in it, with each result a node of its own, and one GET for each result of a loop."""
    gets: dict[tuple[Node, int], Node] = {}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else settled(node.body)
        node = node if args == node.args and body is node.body else node.replace(args=args, body=body)
        return gets.setdefault((node.args[0], node.attrs["index"]), node) if node.op is Op.GET else node

    graph = ir.rebuild(graph, change)
    seen: set[Node] = set()
    results = []
    for result in graph.results:
        if result in seen or result.op in (Op.PARAM, Op.CONST, Op.TENSOR):
            result = copied(result)
        seen.add(result)
        results.append(result)
    return Graph(graph.params, tuple(results), graph.labels)


def copied(node: Node) -> Node:
    return Node(Op.RENAME, (node,), node.axes, {"names": {}}, name=node.name or "copy")


@dataclass
class Kernel:
    """What one kernel makes, in order: roots and at most one loop over n."""

    kind: int
    items: list[Node] = field(default_factory=list)


@dataclass
class Array:
    """Memory that kernels share. kind: "result" has a batch and a head axis; "carry" has slots along the axis of a loop; "wide" neither."""

    name: str
    kind: str
    axes: tuple[str, ...]
    sizes: tuple[str, ...]


class Layout:
    """The plan of a graph's kernels. hidden: where values lie that another layout's kernels made."""

    def __init__(self, graph: Graph, given: Mapping[str, Lengths], tokens: int, hidden: Mapping[str, Buffer] | None = None) -> None:
        self.graph, self.tokens = settled(keep.unfused(graph)), tokens
        self.length: dict[Node, dict[str, Length]] = {}
        self.gets: dict[Node, dict[int, Node]] = {}
        self.roots: set[Node] = set()
        self._study(self.graph, [given[p.attrs["name"]] for p in self.graph.params])
        self.labels = dict(zip(self.graph.results, self.graph.labels, strict=True))
        self.phase: dict[Node, tuple[int, int]] = {}
        self.kernels = self._kernels()
        self.arrays: list[Array] = []
        self.placed: dict[Node, Buffer] = {}
        self.carried: dict[Node, list[Buffer]] = {}
        self.names: set[str] = {*RESERVED, *(p.attrs["name"] for p in self.graph.params)}
        for param in self.graph.params:
            name = param.attrs["name"]
            known = (hidden or {}).get(name)
            self.placed[param] = outside(name, param.axes) if known is None else Buffer(name, known.strides, known.fixed)
        self._place()

    def _study(self, graph: Graph, given: Sequence[Lengths]) -> None:
        found = lengths(graph, given)
        self.length |= found
        self.roots |= keep.choose_roots(graph, [r for r in graph.results if r.op not in keep.PLACED])
        for node in graph.nodes():
            if node.op is Op.SCAN and node.body is not None:
                self._study(node.body, [found[a] for a in node.args])
            if node.op is Op.GET:
                self.gets.setdefault(node.args[0], {})[node.attrs["index"]] = node

    def items(self, graph: Graph) -> list[Node]:
        """What the kernels make of one level: roots and loops, arguments first."""
        return [n for n in graph.nodes() if n in self.roots or n.op is Op.SCAN]

    def reads(self, node: Node) -> keep.Reads:
        return keep.scan_reads(node, self.roots) if node.op is Op.SCAN else keep.reads(node, self.roots)

    # ---- kernels

    def _kernels(self) -> list[Kernel]:
        """Roots and loops by phase: (how many loops or sums over n came before, kind)."""
        kernels: dict[tuple[int, int], Kernel] = {}
        for node in self.items(self.graph):
            kind = LOOP if node.op is Op.SCAN and node.attrs["axis"] == "n" else EVERY if "n" in node.axes else GROUP
            before = [self.phase[keep.source(d)] for d in self.reads(node).all if keep.source(d) in self.phase]
            level = max((p[0] for p in before), default=0)
            if any(p[0] == level and (p[1] > kind or p[1] == LOOP) for p in before):
                level += 1
            self.phase[node] = level, kind
            kernels.setdefault(self.phase[node], Kernel(kind)).items.append(node)
        return [kernels[p] for p in sorted(kernels)]

    # ---- memory

    def name(self, hint: str) -> str:
        return unused(hint, self.names)

    def most(self, node: Node) -> dict[str, int]:
        return {a: length.at(self.tokens) for a, length in self.length[node].items()}

    def _place(self) -> None:
        shared = self._shared()
        for kernel in self.kernels:
            for node in kernel.items:
                if node.op is Op.SCAN and self._is_seen(node):
                    self._place_loop(node)
                elif node in self.labels:
                    self.placed[node] = self._result(node, self.labels[node])
                elif node in shared:
                    self.placed[node] = self._wide(node.name or node.op.value, node)

    def _is_seen(self, scan: Node) -> bool:
        """Whether a loop's results leave the kernel that makes them."""
        if scan.attrs["axis"] == "n":
            return True
        gets = set(self.gets.get(scan, {}).values())
        read = {d for n in self.phase if self.phase[n] != self.phase[scan] for d in self.reads(n).all}
        return bool(gets & (read | set(self.labels)))

    def _shared(self) -> set[Node]:
        """The roots that another kernel reads than the one that makes them."""
        return {d for node in self.phase for d in self.reads(node).all if d in self.roots and self.phase[d] != self.phase[node]}

    def _wide(self, hint: str, node: Node) -> Buffer:
        name, most = self.name(hint), self.most(node)
        rest = [a for a in node.axes if a not in ("n", "g")]
        strides, size = packed(rest, most)
        sizes = [*(["N"] if "n" in node.axes else []), "G", *(str(most[a]) for a in rest)]
        self.arrays.append(Array(name, "wide", node.axes, tuple(sizes)))
        strides |= {"g": str(size), **({"n": f"(G * {size})"} if "n" in node.axes else {})}
        return Buffer(name, {a: strides[a] for a in node.axes})

    def _result(self, node: Node, label: str) -> Buffer:
        if label.startswith("saved_"):
            return self._wide(label, node)
        name = self.name(f"{label}_out")
        sizes = [s for a in node.axes for s in (("B", "H") if a == "g" else (self.length[node][a].text,))]
        self.arrays.append(Array(name, "result", node.axes, tuple(sizes)))
        return outside(name, node.axes)

    def _place_loop(self, scan: Node) -> None:
        """Carries get slots, one for each iteration and one more where they are saved, else two; outputs an array along the loop's axis."""
        assert scan.body is not None
        gets, k, axis = self.gets.get(scan, {}), scan.attrs["carries"], scan.attrs["axis"]
        self.carried[scan] = []
        for i, param in enumerate(scan.body.params[:k]):
            name, most = self.name(f"{param.attrs['name']}_slots"), self.most(param)
            strides, size = packed([a for a in param.axes if a != "g"], most)
            sizes = [str(most[a]) for a in param.axes if a != "g"]
            if axis == "n":
                strides |= {"g": str(size), "n": f"(G * {size})"}
                sizes = ["N + 1" if scan.attrs["save"] else "2", "G", *sizes]
            else:
                slots = self.tokens + 1 if scan.attrs["save"] else 2
                strides |= {axis: str(size), "g": str(size * slots)}
                sizes = ["G", str(slots), *sizes]
            self.arrays.append(Array(name, "carry", (axis, *param.axes), tuple(sizes)))
            self.carried[scan].append(Buffer(name, strides))
            place_carry(scan, self.carried[scan][i], i, gets, self.placed, self.count(scan))
        for i, get in gets.items():
            if k <= i < len(scan.body.results):
                self.placed[get] = self._result(get, self.labels[get]) if get in self.labels else self._wide(get.name or "out", get)

    def count(self, scan: Node) -> str:
        """The text of how many iterations a loop has."""
        return self.length[scan.args[scan.attrs["carries"]]][scan.attrs["axis"]].text

    def results(self) -> list[tuple[str, Buffer, Node]]:
        """For each label, where its value lies."""
        return [(label, self.placed[node], node) for node, label in self.labels.items()]


def place_carry(scan: Node, buffer: Buffer, i: int, gets: Mapping[int, Node], placed: dict[Node, Buffer], count: str) -> None:
    """Where the final value of carry `i` and the values its iterations started from are found."""
    assert scan.body is not None
    axis = scan.attrs["axis"]
    final, saved = gets.get(i), gets.get(len(scan.body.results) + i)
    if final is not None:
        placed[final] = buffer.at(axis, f"({count} + zero64)" if scan.attrs["save"] else f"({count} % 2 + zero64)")
    if saved is not None and not scan.attrs["reverse"]:
        placed[saved] = buffer
    elif saved is not None:
        step = buffer.strides[axis]
        placed[saved] = Buffer(buffer.name, {**buffer.strides, axis: f"-{step}"}, f"({count} - 1 + zero64) * {step}")


def outside(name: str, axes: Sequence[str]) -> Buffer:
    """An array that came in, or goes out, with strides of its own."""
    strides = tuple(f"{name}_{x}" for a in axes for x in (("b", "h") if a == "g" else (a,)))
    return Buffer(name, {a: f"{name}_{a}" for a in axes}, outside=True, arguments=strides)
