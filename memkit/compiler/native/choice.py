"""Which values of a graph are kept in memory on a CPU. The rest is made anew wherever it is read.

A kept value is a root, made by a step of its own. A root that is a sum with matrix products among its terms is a `Chain`:
the products add into it, and are never kept themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.kernels import keep
from memkit.compiler.kernels.functions import COSTLY
from memkit.compiler.simplify import uniform
from memkit.compiler.symmetric import is_symmetric

from .families import relatives
from .laid import laid

OFTEN = 2  # times that a GATHER reads an entry before its operand is kept
HEAVY = 12  # reads after which a value is kept however seldom it is used


@dataclass(frozen=True)
class Chain:
    """root = sum of `rest` + sum of `products`."""

    rest: tuple[Node, ...]
    products: tuple[Node, ...]


class Place(NamedTuple):
    """Where a product belongs in a longer value: its axis `inner` is `axis` of that, from entry `first` on."""

    inner: str
    axis: str
    first: int


@dataclass
class Choice:
    """roots: what is kept. chains: of these, the sums that take in products. places: of products that make a part of such a sum only.
    laid: sums that lay values side by side."""

    roots: set[Node] = field(default_factory=set)
    chains: dict[Node, Chain] = field(default_factory=dict)
    places: dict[Node, Place] = field(default_factory=dict)
    laid: set[Node] = field(default_factory=set)


def is_view(node: Node) -> bool:
    """Whether a value is another look at the memory of its operand."""
    return node.op in (Op.RENAME, Op.SELECT, Op.WINDOWS, Op.EXPAND) or (node.op is Op.GATHER and keep.offset(node) is not None)


def base(node: Node) -> Node:
    """The value whose memory a view looks at."""
    while is_view(node):
        node = node.args[0]
    return node


def operand(node: Node) -> Node:
    """What must lie in memory for a product, or a loop, to read `node`."""
    found = base(node)
    return node if found.op is Op.CONST else found


def sides(node: Node) -> tuple[list[str], list[str], list[str], list[str]]:
    """Of an einsum: axes that both operands and the result have, that only the first has, that only the second has, that are summed."""
    a, b = node.args
    gone = keep.contracted(node)
    rows = [x for x in a.axes if x not in b.axes and x in node.axes]
    cols = [x for x in b.axes if x not in a.axes and x in node.axes]
    return [x for x in node.axes if x not in rows and x not in cols], rows, cols, list(gone)


def is_product(node: Node) -> bool:
    """Whether a value is a product of two matrices, or of a matrix and a vector."""
    if node.op is not Op.EINSUM or not keep.contracted(node):
        return False
    _, rows, cols, gone = sides(node)
    return bool(rows or cols) and all(x in arg.axes for x in gone for arg in node.args)


def addable(graph: Graph) -> Graph:
    """x - a b as x + (-a) b, and a product under other names as a product of operands under these, in bodies too: sums take in both."""
    users = graph.users()

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else addable(node.body)
        if node.op is Op.RENAME and is_product(args[0]) and len(users[node.args[0]]) == 1:
            return _renamed(args[0], node)
        if node.op is Op.POINTWISE and node.attrs["fn"] == "sub" and is_product(args[1]) and len(users[node.args[1]]) == 1:
            a, b = args[1].args
            small = b if len(b.axes) < len(a.axes) or (b.op is Op.POINTWISE and a.op is not Op.POINTWISE) else a
            product = args[1].replace(args=tuple(ir.neg(x) if x is small else x for x in (a, b)))
            return node.replace(args=(args[0], product), attrs={"fn": "add"})
        return node if args == node.args and body is node.body else node.replace(args=args, body=body)

    return ir.rebuild(graph, change)


def _renamed(product: Node, node: Node) -> Node:
    """The product that a RENAME of a product is; what it sums gets a name that nothing else has."""
    taken = {*node.axes, *(a for x in product.args for a in x.axes)}
    names = dict(node.attrs["names"])
    for axis in keep.contracted(product):
        if axis in node.axes:
            names[axis] = next(n for i in range(len(taken) + 1) if (n := f"{axis}{'_' * (i + 1)}") not in taken)
    return product.replace(args=tuple(ir.rename(x, names) for x in product.args), axes=node.axes)


def chosen(graph: Graph, results: Iterable[Node]) -> Choice:
    """What is kept of one graph, bodies aside; `results` are, unless they have a place of their own."""
    users, fixed = keep.users_of(graph), set(results)
    found = Choice({r for r in fixed if r.op not in keep.PLACED})
    members: set[Node] = set()
    nodes = graph.nodes()
    for node in reversed(nodes):
        if node not in members and _is_add(node):
            chain, inner = _chain(node, users, fixed)
            if chain.products:
                found.chains[node] = chain
                found.roots.add(node)
                members |= inner
        if node.op is Op.FOLD:
            terms, inner = laid(node, lambda inside: len(users[inside]) == 1 and inside not in fixed)
            places, products = _places(node, terms, users, fixed)
            if places:
                found.chains[node] = Chain((), tuple(places))
                found.places |= places
            elif terms:
                found.laid.add(node)
            members |= inner | products
    absorbed = {p for c in found.chains.values() for p in c.products}
    for node in reversed(nodes):
        if node.op not in keep.PLACED and node not in absorbed and _is_kept(node, users, found, members):
            found.roots.add(node)
        if is_product(node) or node.op is Op.SCAN or _repeats(node):
            found.roots |= {x for x in map(operand, node.args) if x.op not in keep.PLACED}
    found.roots |= relatives(nodes, found.roots)
    found.roots |= _heavy(graph, found.roots | absorbed | members, users)
    return found


def _repeats(node: Node) -> bool:
    """Whether a value reads every entry of its operand again and again."""
    return node.op is Op.GATHER and len(node.attrs["index"]) >= OFTEN * node.attrs["size"]


def _is_add(node: Node) -> bool:
    return node.op is Op.POINTWISE and node.attrs["fn"] == "add"


def _chain(top: Node, users: Mapping[Node, Sequence[Node]], fixed: set[Node]) -> tuple[Chain, set[Node]]:
    """The terms of a sum, and the sums and products inside that are nothing of their own."""
    rest: list[Node] = []
    products: list[Node] = []
    inner: set[Node] = set()
    stack = list(reversed(top.args))
    while stack:
        node = stack.pop()
        alone = len(users[node]) == 1 and node not in fixed and set(node.axes) == set(top.axes)
        if alone and _is_add(node) and node.args[0] is not node.args[1]:
            inner.add(node)
            stack += reversed(node.args)
        elif alone and is_product(node) and not is_symmetric(node):
            inner.add(node)
            products.append(node)
        else:
            rest.append(node)
    return Chain(tuple(rest), tuple(products)), inner


def _places(
    fold: Node, terms: Sequence[Node], users: Mapping[Node, Sequence[Node]], fixed: set[Node]
) -> tuple[dict[Node, Place], set[Node]]:
    """The products that a FOLD lays at one index of the window each, and what lies between; nothing where it lays other values, too."""
    a, places, inner = fold.attrs, dict[Node, Place](), set[Node]()
    if len({*terms}) < len(terms) or any(term.attrs["axis"] != a["inner"] for term in terms):
        return {}, set()
    stack = [(x.args[0], 0 if x.attrs["index"] == 0 else a["size"] - 1) for x in reversed(terms)]
    while stack:
        node, first = stack.pop()
        if len(users[node]) != 1 or node in fixed:
            return {}, set()
        inner.add(node)
        if _is_add(node) and node.args[0] is not node.args[1]:
            stack += [(x, first) for x in reversed(node.args)]
        elif is_product(node) and a["outer"] in sides(node)[1] + sides(node)[2] and not is_symmetric(node):
            places[node] = Place(a["outer"], a["axis"], first)
        else:
            return {}, set()
    return places, inner


def _is_kept(node: Node, users: Mapping[Node, Sequence[Node]], found: Choice, members: set[Node]) -> bool:
    own = users[node]
    inside = len(own) == 1 and keep.is_entrywise(own[0]) and set(own[0].axes) == set(node.axes) and not is_product(own[0])
    if node in found.laid:
        return not inside or own[0].op is Op.RENAME
    if node.op is Op.SOLVE or (node.op is Op.DECAY and uniform(node.args[0]) not in (0.0, 1.0)):
        return True
    if keep.is_sum(node):
        return True
    if not keep.is_entrywise(node) or node.op is Op.RENAME or node in members or inside:
        return False
    costly = node.op is Op.POINTWISE and node.attrs["fn"] in COSTLY
    return bool(node.axes) and (costly or (len(own) > 1 and _parts(node, found.roots) > 2))


def _parts(node: Node, roots: set[Node]) -> int:
    """How much is read to make a value, as far as that matters."""
    total, stack = 0, [node]
    while stack and total <= 3:
        for arg in keep.data(stack.pop()):
            if arg in roots or arg.op in keep.PLACED or not keep.is_entrywise(arg):
                total += arg.op is not Op.CONST
            else:
                stack.append(arg)
    return total


def _heavy(graph: Graph, roots: set[Node], users: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Values made of too many reads, or of several and used more than once."""
    reads: dict[Node, int] = {}
    found: set[Node] = set()
    for node in graph.nodes():
        parts = sum(reads[a] for a in keep.data(node))
        if node in roots or node.op in keep.PLACED:
            parts = int(node.op is not Op.CONST)
        elif node.axes and (parts > HEAVY or (parts > 3 and len(users[node]) > 1)):
            found.add(node)
            parts = 1
        reads[node] = parts
    return found
