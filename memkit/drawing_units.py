"""Which nodes of a compiled graph are drawn as one box: chains of pointwise functions, and the parts that came from one component."""

from __future__ import annotations

from collections import Counter

from memkit.compiler.ir import Graph, Node, Op

VIEWS = (Op.RENAME, Op.EXPAND, Op.GET, Op.SELECT)  # move no data: drawn as a part of an arrow
QUIET = (Op.CONST, Op.TENSOR, Op.PARAM)
PRODUCTS = 2  # in one box of pointwise functions
MANY = 8  # nodes of one component that are drawn as one box

Unit = list[Node]  # in the graph's order


def units(graph: Graph) -> list[Unit]:
    """A partition of the nodes that compute something, such that the boxes still form a graph without cycles."""
    nodes = [n for n in graph.nodes() if n.op not in VIEWS and n.op not in QUIET]
    found = _Parts(graph, nodes)
    for part in found.components():
        found.join(part)
    for node in reversed(nodes):
        users = found.users[node]
        if users and node not in found.fixed and node.op in (Op.POINTWISE, Op.EINSUM) and all(u.op is Op.POINTWISE for u in users):
            homes = {found.home[u] for u in users}
            if len(homes) == 1 and found.has_room(homes.pop(), node):
                found.join([node, users[0]])
    return found.ordered()


def source(node: Node) -> Node:
    """The node that made a value, views taken off; what a view of a loop's result shows is the GET."""
    while node.op in VIEWS and node.op is not Op.GET:
        node = node.args[0]
    return node


class _Parts:
    def __init__(self, graph: Graph, nodes: list[Node]) -> None:
        self.nodes, self.fixed = nodes, set[Node]()
        self.args = {n: list(dict.fromkeys(s for s in map(_maker, n.args) if s.op not in QUIET)) for n in nodes}
        self.users: dict[Node, list[Node]] = {n: [] for n in nodes}
        for node, args in self.args.items():
            for arg in args:
                self.users[arg].append(node)
        for result in graph.results:
            made = _maker(result)
            if self.users.get(made):
                self.fixed.add(made)  # a value that leaves the graph keeps a box that ends with it
        self.home = {n: i for i, n in enumerate(nodes)}
        self.parts = {i: [n] for i, n in enumerate(nodes)}

    def has_room(self, home: int, node: Node) -> bool:
        """Whether `node` may be drawn in this box: a tree of pointwise functions with few products at its leaves."""
        part = [*self.parts[home], node]
        return not self.fixed.intersection(part) and sum(n.op is Op.EINSUM for n in part) <= PRODUCTS

    def components(self) -> list[list[Node]]:
        """Connected nodes of one component, where there are many."""
        seen: set[Node] = set()
        found = []
        for start in self.nodes:
            if start in seen or not start.where:
                continue
            part, stack = [], [start]
            while stack:
                node = stack.pop()
                if node not in seen and node.where == start.where:
                    seen.add(node)
                    part.append(node)
                    stack += self.args[node] + self.users[node]
            if len(part) >= MANY:
                found.append(part)
        return found

    def join(self, nodes: list[Node]) -> None:
        """Put the parts of `nodes` together, unless a path would leave the part and come back."""
        homes = list(dict.fromkeys(self.home[n] for n in nodes))
        together = [n for h in homes for n in self.parts[h]]
        inside = set(together)
        reached = {u for n in together for u in self.users[n] if u not in inside}
        stack = list(reached)
        while stack:
            for user in self.users[stack.pop()]:
                if user in inside:
                    return
                if user not in reached:
                    reached.add(user)
                    stack.append(user)
        for home in homes[1:]:
            del self.parts[home]
        self.parts[homes[0]] = together
        self.home |= dict.fromkeys(together, homes[0])
        if len(homes) >= MANY:
            self.fixed |= inside

    def ordered(self) -> list[Unit]:
        """The parts, each after all it needs, and the nodes of each in the graph's order."""
        parts: dict[int, Unit] = {}
        for node in self.nodes:
            parts.setdefault(self.home[node], []).append(node)
        needs = {h: {self.home[a] for n in part for a in self.args[n]} - {h} for h, part in parts.items()}
        done: dict[int, Unit] = {}
        while len(done) < len(parts):
            ready = next(h for h in parts if h not in done and needs[h] <= done.keys())
            done[ready] = parts[ready]
        return list(done.values())


def _maker(node: Node) -> Node:
    """As `source`, and for a loop's result the loop."""
    while node.op in VIEWS:
        node = node.args[0]
    return node


def title(unit: Unit) -> str:
    """What a box does: `2 mul, add`, `product over f`, with the name of its last value in front."""
    last = unit[-1]
    wheres = {n.where for n in unit}
    if len(unit) >= MANY and len(wheres) == 1:
        return wheres.pop().removeprefix("layer.")
    name = f"{last.name} = " if last.name else ""
    if len(unit) == 1:
        return name + _one(last)
    return name + _functions(unit)


def details(unit: Unit) -> str:
    """What is inside a box of many nodes."""
    if len(unit) < MANY or len({n.where for n in unit}) != 1:
        return ""
    kinds = Counter("pointwise" if n.op is Op.POINTWISE else "product" if n.op is Op.EINSUM else n.op.value for n in unit)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())


def _functions(unit: Unit) -> str:
    parts: list[tuple[str, int]] = []
    for node in unit:
        fn = node.attrs["fn"] if node.op is Op.POINTWISE else _one(node)
        parts = [*parts[:-1], (fn, parts[-1][1] + 1)] if parts and parts[-1][0] == fn else [*parts, (fn, 1)]
    return ", ".join(fn if number == 1 else f"{number} {fn}" for fn, number in parts)


def _one(node: Node) -> str:
    a = node.attrs
    gone = [x for arg in node.args[:2] for x in arg.axes if x not in node.axes]
    words = {
        Op.POINTWISE: lambda: a["fn"],
        Op.EINSUM: lambda: f"product over {', '.join(dict.fromkeys(gone))}" if gone else "product",
        Op.REDUCE: lambda: f"{a['fn']} over {', '.join(a['over'])}",
        Op.DECAY: lambda: f"decay {a['axis']} to {a['new']}",
        Op.BAND: lambda: f"window band of {a['size']}",
        Op.SOLVE: lambda: "triangular solve",
        Op.SHIFT: lambda: f"shift {a['axis']} by {a['by']}",
        Op.TRIL: lambda: "lower triangle",
    }
    return words[node.op]() if node.op in words else node.op.value.replace("_", " ")
