"""Which values of a graph are kept in memory, and in which loops they are made. The rest is made anew wherever it is read.

A kept value is a `root`. Roots with the same axes that read each other entry by entry share one loop over tiles: a `Step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.simplify import uniform

from .functions import COSTLY

PLACED = (Op.PARAM, Op.CONST, Op.TENSOR, Op.GET, Op.SCAN)  # never made by a step of their own
SHAPE_ONLY = (Op.EXPAND, Op.PLACE, Op.FOLD)  # their second operand lends its lengths
HEAVY = 24  # reads after which a value is kept however seldom it is used


def unfused(graph: Graph) -> Graph:
    """The graph with masked products written out, in bodies too: scores, their mask, and the sum are steps a kernel chooses itself."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else unfused(node.body)
        if node.op is Op.MASKED_PRODUCT:
            z, x, c, d = args
            weighed = ir.mul(ir.einsum(z, x, over=node.attrs["contract"], name="scores"), c, name="masked")
            return ir.einsum(weighed, d, keep=node.axes, name=node.name).replace(where=node.where)
        return node if args == node.args and body is node.body else node.replace(args=args, body=body)

    return ir.rebuild(graph, change)


def contracted(node: Node) -> tuple[str, ...]:
    """The axes that an einsum or a reduction sums."""
    return tuple(a for a in ir.order_axes(*(x.axes for x in node.args)) if a not in node.axes) if node.op in (Op.EINSUM, Op.REDUCE) else ()


def is_sum(node: Node) -> bool:
    """Whether a value needs a loop over more than its own entries."""
    return bool(contracted(node)) or node.op is Op.FOLD or (node.op is Op.SCATTER and offset(node) is None)


def offset(node: Node) -> int | None:
    """Of a GATHER or SCATTER whose index is i + offset: that number."""
    index = node.attrs["index"]
    first = index[0]
    return first if tuple(index) == tuple(range(first, first + len(index))) else None


def is_entrywise(node: Node) -> bool:
    return node.op in (Op.POINTWISE, Op.RENAME) or (node.op is Op.EINSUM and not contracted(node))


def data(node: Node) -> tuple[Node, ...]:
    """The operands whose values are read."""
    return node.args[:1] if node.op in SHAPE_ONLY else node.args


def users_of(graph: Graph) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {node: [] for node in graph.nodes()}
    for node in list(found):
        for arg in dict.fromkeys(data(node)):
            found[arg].append(node)
    return found


def choose_roots(graph: Graph, results: Iterable[Node]) -> set[Node]:
    """The nodes of one graph (bodies aside) that are kept; every one of `results` that is not placed elsewhere is."""
    users, fixed = users_of(graph), set(results)
    roots: set[Node] = set()
    once: set[Node] = set()  # made once for every entry
    for node in reversed(graph.nodes()):
        if node.op in PLACED:
            continue
        single = users[node][0] if len(users[node]) == 1 else None
        fused = single is not None and node not in fixed and _same_entries(node, single) and single in once
        if (
            node in fixed
            or node.op is Op.SOLVE
            or (node.op is Op.DECAY and uniform(node.args[0]) not in (0.0, 1.0))
            or (is_sum(node) and not fused)
            or (node.op is Op.POINTWISE and not fused and (_finishes(node, users) or _costly(node, users[node])))
        ):
            roots.add(node)
        if fused or node in roots:
            once.add(node)
    return roots | _heavy(graph, roots, users)


def _same_entries(node: Node, user: Node) -> bool:
    return is_entrywise(user) and len(user.axes) == len(node.axes) and (user.op is Op.RENAME or set(user.axes) == set(node.axes))


def _finishes(node: Node, users: Mapping[Node, list[Node]]) -> bool:
    """Whether a sum that nothing else reads ends here."""
    found = list(node.args)
    for arg in found:
        if arg.op is Op.RENAME:
            found += arg.args
    return any(is_sum(a) and len(users[a]) == 1 and len(a.axes) == len(node.axes) for a in found)


def _costly(node: Node, users: Sequence[Node]) -> bool:
    return node.attrs["fn"] in COSTLY and (len(users) > 1 or any(not is_entrywise(u) for u in users)) and bool(node.axes)


def _heavy(graph: Graph, roots: set[Node], users: Mapping[Node, list[Node]]) -> set[Node]:
    """Values made of many reads, where they are used more than once or are too many."""
    reads: dict[Node, int] = {}
    found: set[Node] = set()
    for node in graph.nodes():
        parts = sum(reads[a] for a in data(node))
        if node in roots or node.op in PLACED:
            parts = 0 if node.op is Op.CONST else 1
        elif parts > HEAVY or (parts > 2 and len(users[node]) > 1) or (parts > 3 and any(u.op is Op.SCAN for u in users[node])):
            found.add(node)
            parts = 1
        reads[node] = parts
    return found


# ---- what a root reads


@dataclass
class Reads:
    """The kept or placed nodes a root is made of; `same` are those it reads only at its own entry."""

    all: dict[Node, None] = field(default_factory=dict)
    elsewhere: set[Node] = field(default_factory=set)

    @property
    def same(self) -> set[Node]:
        return set(self.all) - self.elsewhere


def reads(root: Node, roots: set[Node]) -> Reads:
    """What the making of `root` reads, inlined nodes looked through."""
    found, seen = Reads(), set()
    stack = [(a, is_entrywise(root) and root.op is not Op.RENAME) for a in data(root)]
    while stack:
        node, same = stack.pop()
        if (node, same) in seen:
            continue
        seen.add((node, same))
        same = same and set(node.axes) == set(root.axes)
        if node in roots or node.op in PLACED:
            found.all.setdefault(node)
            if not same:
                found.elsewhere.add(node)
        else:
            stack += [(a, same and is_entrywise(node) and node.op is not Op.RENAME) for a in data(node)]
    return found


def sums_inside(root: Node, roots: set[Node]) -> list[tuple[Node, dict[str, str]]]:
    """The sums made as part of `root`, with the root's name for each of their axes."""
    found: list[tuple[Node, dict[str, str]]] = []
    stack = [(root, {a: a for a in root.axes})]
    while stack:
        node, names = stack.pop()
        if is_sum(node):
            found.append((node, names))
        elif is_entrywise(node) and (node is root or node not in roots) and node.op not in PLACED:
            back = {new: old for old, new in node.attrs["names"].items()} if node.op is Op.RENAME else {}
            inner = {back.get(a, a): names[a] for a in node.axes}
            stack += [(a, {x: inner[x] for x in a.axes}) for a in node.args if a not in roots and a.op not in PLACED]
    return found


# ---- steps


@dataclass
class Step:
    """One loop over tiles. `tile` names the axes that lie in a tile, at most two; the others are gone through one by one."""

    roots: list[Node]
    tile: tuple[str, ...]
    sums: int = 0

    @property
    def alone(self) -> bool:
        return self.roots[0].op in (Op.SCAN, Op.DECAY, Op.SOLVE)


def tile_axes(root: Node, roots: set[Node], static: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of `root` (n and g aside) that make a tile: those of a product if there is one, else the last two."""
    axes = tuple(a for a in root.axes if a not in ("n", "g"))
    if root.op is Op.DECAY:
        widths = [a for a in axes if a not in (root.attrs["axis"], root.attrs["new"])]
        return (root.attrs["axis"], (*widths, root.attrs["new"])[0])
    if root.op is Op.SOLVE:
        return (root.attrs["rows"], next((a for a in reversed(axes) if a != root.attrs["rows"]), ""))
    if len(axes) > 2:
        for node, names in sums_inside(root, roots):
            if node.op is Op.EINSUM:
                pair = _factors(node, names, axes, static)
                if pair:
                    return pair
    return axes[-2:]


def _factors(node: Node, names: Mapping[str, str], axes: Sequence[str], static: Mapping[str, int]) -> tuple[str, ...]:
    """The longest axis that only the first factor has, and the longest that only the second has."""
    a, b = node.args
    pairs = []
    for own, other in ((a, b), (b, a)):
        only = [names[x] for x in own.axes if x not in other.axes and x in names and names[x] in axes]
        pairs.append(max(only, key=lambda x: static[x], default=""))
    return tuple(p for p in axes if p in pairs) if all(pairs) else ()


def schedule(items: Sequence[Node], roots: set[Node], static: Mapping[Node, Mapping[str, int]], most: tuple[int, int]) -> list[Step]:
    """The roots and loops of one level, arguments first, as steps in order; each waits for what it reads.

    most: the most roots, and the most sums, of one step: what registers hold.
    """
    steps: list[Step] = []
    at: dict[Node, int] = {}
    for node in items:
        read = reads(node, roots) if node.op is not Op.SCAN else scan_reads(node, roots)
        tile = () if node.op is Op.SCAN else tile_axes(node, roots, static[node])
        sums = 0 if node.op is Op.SCAN else len(sums_inside(node, roots))
        place = _place(steps, node, (tile, sums, most), read, at)
        steps[place].roots.append(node) if place < len(steps) else steps.append(Step([node], tile))
        steps[place].sums += sums
        at[node] = place
    return steps


def scan_reads(scan: Node, roots: set[Node]) -> Reads:
    found = Reads()
    for arg in scan.args:
        if arg in roots or arg.op in PLACED:
            found.all.setdefault(arg)
        else:
            found.all.update(reads(arg, roots).all)
    found.elsewhere = set(found.all)
    return found


def source(node: Node) -> Node:
    """The loop behind a GET, or the node itself."""
    return node.args[0] if node.op is Op.GET else node


def _place(steps: list[Step], node: Node, shape: tuple[tuple[str, ...], int, tuple[int, int]], read: Reads, at: Mapping[Node, int]) -> int:
    """The first step that a root may join, or the number of a new one."""
    first, (tile, sums, most) = 0, shape
    for dep in read.all:
        if source(dep) in at:
            first = max(first, at[source(dep)] + (dep in read.elsewhere))
    if node.op in (Op.SCAN, Op.DECAY, Op.SOLVE):
        return len(steps)
    for i in range(first, len(steps)):
        step = steps[i]
        fits = step.tile == tile and set(step.roots[0].axes) == set(node.axes) and not step.alone
        if fits and len(step.roots) < most[0] and step.sums + sums <= most[1]:
            return i
    return len(steps)
