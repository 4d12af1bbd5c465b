"""The one graph of the compiler: nodes with named axes, built by plain functions.

Where it sits: `trace` and the plans build it, passes rewrite it, `verify` checks it, `interpret` runs it, the emitters print it.

Grammar (every value is one `Node`; axes are names, unique within a node, and data meets by name, never by position)::

    graph  ::= params -> results
    node   ::= PARAM name | CONST value | TENSOR values
             | POINTWISE fn(a, b, ..)          axes: union of the operands', broadcast by name
             | EINSUM(a, b) -> axes            sums every axis of a, b that `axes` lacks; always two operands
             | REDUCE fn over axes (a) | EXPAND(a, like) | RENAME old->new (a) | GATHER / SCATTER axis by index (a)
             | DECAY t->t,s (x) | BAND t,j->t,s (g) | UNBAND (m) | TRIL t,s (m) | SHIFT t (x, fill)
             | WINDOWS s->outer,inner (x) | FOLD (x) | MERGE t,j->r (x) | SPLIT r->t,j (x) | SELECT t (x) | PLACE (x, like)
             | SOLVE i,j (L, b) | MASKED_PRODUCT(z, x, c, d) | SCAN body | GET i (scan)

Axis letters: n chunk, g batch and head in one, t token (row), u/s token (column), j window slot,
r row and c column of a solve; others are widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class Op(Enum):
    """The closed set of operations. `interpret.py` holds each one's meaning, `autodiff.py` each one's pullback."""

    PARAM = "param"  # attrs: name
    CONST = "const"  # attrs: value (float); axes ()
    TENSOR = "tensor"  # attrs: values (nested tuples of float); a constant array
    POINTWISE = "pointwise"  # attrs: fn, a key of FUNCTIONS; symmetric (rows, columns) where a sum is known to be: no part of its meaning
    EINSUM = "einsum"  # attrs: none, the node's axes say what is kept
    REDUCE = "reduce"  # attrs: fn ("sum" | "max"), over (axes)
    EXPAND = "expand"  # (x, like): x repeated over the axes of like that it lacks
    RENAME = "rename"  # attrs: names (old -> new)
    GATHER = "gather"  # attrs: axis, new, index (ints), size (length of axis): out[.., i] = x[.., index[i]]
    SCATTER = "scatter"  # attrs: axis, new, index, size: the transpose of GATHER, adding up repeats
    DECAY = "decay"  # attrs: axis t, new s: out[t, s] = prod_{s < r <= t} x[r] for s <= t, else 0; s has t's length
    BAND = "band"  # attrs: axis t, slot j, new s, size of j: out[t, t + j] = x[t, j], else 0; s is t + j - 1 long
    UNBAND = "unband"  # attrs: axis t, slot j, new s, size of j: the transpose of BAND
    TRIL = "tril"  # attrs: rows, cols, diagonal: keeps x[t, s] where s <= t + diagonal, zero elsewhere
    SHIFT = "shift"  # (x, fill) attrs: axis, by (1 | -1): by 1 gives [fill, x_0, ..], by -1 gives [x_1, .., fill]; fill lacks axis
    WINDOWS = "windows"  # attrs: axis s, outer, inner, size, step: out[o, i] = x[o * step + i], i < size
    FOLD = "fold"  # (x, like) the transpose of WINDOWS, same attrs; like has WINDOWS's input axes
    MERGE = "merge"  # attrs: axes (t, j), new r, size (the length of j): r = t * size + j
    SPLIT = "split"  # attrs: axis r, new (t, j), size: the inverse of MERGE; size is the length of j
    SELECT = "select"  # attrs: axis, index (0 | -1): drops the axis
    PLACE = "place"  # (x, like) attrs: axis, index: zeros shaped like `like`, x at index; the transpose of SELECT
    SOLVE = "solve"  # (L, b) attrs: rows i, cols j, transpose: x with (I + tril(L, -1)) x = b, or its transpose; b has axis i, x too
    MASKED_PRODUCT = "masked_product"  # (z, x, c, d): ((z x^T) * c) d in one pass; attrs: contract (width of z x^T), cols s
    SCAN = "scan"  # body over axis n; attrs: axis, carries, slices, reverse, save
    GET = "get"  # attrs: index; picks one result of a SCAN


class GraphError(Exception):
    """A graph that breaks its own grammar: a fault of memkit, not of a user."""


# pointwise functions and their number of operands; `autodiff.py` has each one's derivative in terms of these alone
FUNCTIONS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "pow"), 2),
        **dict.fromkeys(("neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "square", "log1p", "expm1"), 1),
        **dict.fromkeys(("tanh", "sigmoid", "erf", "sin", "cos", "cosh", "sinh", "gelu", "gelu_slope", "silu", "silu_slope"), 1),
        **dict.fromkeys(("softplus", "floor", "ceil", "round", "atan"), 1),
        "where": 3,
    }
)

LEADING = ("n", "g", "t", "u", "s", "j", "i", "r", "c")  # these come first, in this order; widths follow as they appear


def order_axes(*groups: Iterable[str]) -> tuple[str, ...]:
    """The canonical order of a set of axes: n, g, t, u, s, j, i, r, c, then widths in order of first appearance."""
    seen = list(dict.fromkeys(axis for group in groups for axis in group))
    rank = {axis: i for i, axis in enumerate(LEADING)}
    return tuple(sorted(seen, key=lambda axis: rank.get(axis, len(LEADING))))


@dataclass(frozen=True, eq=False)  # identity is the key: a node is a place in a graph
class Node:
    op: Op
    args: tuple[Node, ...] = ()
    axes: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    body: Graph | None = None  # SCAN only
    name: str = ""  # a hint for the emitted variable
    where: str = ""  # spec path, "layer.memory"; every pass keeps it

    def replace(self, **changes: Any) -> Node:
        values = {f: getattr(self, f) for f in ("op", "args", "axes", "attrs", "body", "name", "where")}
        return Node(**{**values, **changes})

    def __repr__(self) -> str:
        return f"<{self.op.value} {self.name or ''}[{','.join(self.axes)}]>"


@dataclass(frozen=True, eq=False)
class Graph:
    """A pure function: `params` are PARAM nodes, `results` any nodes. `labels` name the results."""

    params: tuple[Node, ...]
    results: tuple[Node, ...]
    labels: tuple[str, ...] = ()

    def nodes(self) -> list[Node]:
        """Every node once, arguments before users; parameters first, in their order."""
        order: dict[Node, None] = dict.fromkeys(self.params)
        for root in self.results:
            stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.args))]
            while stack:
                node, rest = stack[-1]
                child = next((a for a in rest if a not in order), None)
                if child is None:
                    stack.pop()
                    order.setdefault(node)
                else:
                    stack.append((child, iter(child.args)))
        return list(order)

    def users(self) -> dict[Node, list[Node]]:
        found: dict[Node, list[Node]] = {node: [] for node in self.nodes()}
        for node in found:
            for arg in dict.fromkeys(node.args):
                found[arg].append(node)
        return found

    def param(self, name: str) -> Node:
        for node in self.params:
            if node.attrs["name"] == name:
                return node
        raise GraphError(f"no parameter {name!r}; there are {[p.attrs['name'] for p in self.params]}")


# ---- constructors: the only way nodes are made; each computes the axes of what it returns


def param(name: str, axes: Sequence[str], where: str = "") -> Node:
    return Node(Op.PARAM, (), tuple(axes), {"name": name}, name=name, where=where)


def const(value: float) -> Node:
    return Node(Op.CONST, attrs={"value": float(value)})


def tensor(values: Any, axes: Sequence[str], name: str = "") -> Node:
    return Node(Op.TENSOR, (), tuple(axes), {"values": values}, name=name)


def pointwise(fn: str, *args: Node, name: str = "") -> Node:
    if FUNCTIONS.get(fn) != len(args):
        raise GraphError(f"pointwise {fn!r} with {len(args)} operands")
    widest = sorted(args, key=lambda a: -len(a.axes))
    return Node(Op.POINTWISE, args, order_axes(*(a.axes for a in widest)), {"fn": fn}, name=name)


def add(a: Node, b: Node, name: str = "") -> Node:
    return pointwise("add", a, b, name=name)


def sub(a: Node, b: Node, name: str = "") -> Node:
    return pointwise("sub", a, b, name=name)


def mul(a: Node, b: Node, name: str = "") -> Node:
    return pointwise("mul", a, b, name=name)


def symmetric(total: Node, rows: str, columns: str) -> Node:
    """A sum of which it is known that exchanging two axes changes nothing, so that one half is enough to make it."""
    return total.replace(attrs={**total.attrs, "symmetric": (rows, columns)})


def neg(a: Node, name: str = "") -> Node:
    return pointwise("neg", a, name=name)


def einsum(a: Node, b: Node, keep: Iterable[str] | None = None, *, over: Iterable[str] = (), name: str = "") -> Node:
    """The product of a and b, summed over `over`, or over all that `keep` lacks; axes in canonical order unless keep gives one."""
    both = order_axes(a.axes, b.axes)
    gone = set(over)
    axes = tuple(keep) if keep is not None else tuple(x for x in both if x not in gone)
    if not set(axes) <= set(both) or not gone <= set(both):
        raise GraphError(f"einsum {a.axes} x {b.axes} cannot give {axes}")
    return Node(Op.EINSUM, (a, b), axes, name=name)


def reduce(a: Node, over: Iterable[str], fn: str = "sum", name: str = "") -> Node:
    gone = tuple(x for x in a.axes if x in set(over))
    if set(over) != set(gone):
        raise GraphError(f"reduce over {tuple(over)} of {a.axes}")
    return Node(Op.REDUCE, (a,), tuple(x for x in a.axes if x not in gone), {"fn": fn, "over": gone}, name=name) if gone else a


def expand(a: Node, like: Node) -> Node:
    if set(like.axes) == set(a.axes):
        return a
    return Node(Op.EXPAND, (a, like), order_axes(like.axes, a.axes))


def rename(a: Node, names: Mapping[str, str], name: str = "") -> Node:
    names = {old: new for old, new in names.items() if old in a.axes and old != new}
    if not names:
        return a
    axes = tuple(names.get(x, x) for x in a.axes)
    return Node(Op.RENAME, (a,), axes, {"names": names}, name=name or a.name)


def _swap(axes: Sequence[str], old: str, new: Sequence[str]) -> tuple[str, ...]:
    at = tuple(axes).index(old)
    return (*axes[:at], *new, *axes[at + 1 :])


def gather(a: Node, axis: str, new: str, index: Sequence[int], size: int) -> Node:
    """`size` is the length of `axis`: the transpose, SCATTER, needs it."""
    attrs = {"axis": axis, "new": new, "index": tuple(index), "size": size}
    return Node(Op.GATHER, (a,), _swap(a.axes, axis, (new,)), attrs)


def scatter(a: Node, axis: str, new: str, index: Sequence[int], size: int) -> Node:
    attrs = {"axis": axis, "new": new, "index": tuple(index), "size": size}
    return Node(Op.SCATTER, (a,), _swap(a.axes, axis, (new,)), attrs)


def decay(x: Node, axis: str, new: str, name: str = "") -> Node:
    return Node(Op.DECAY, (x,), _swap(x.axes, axis, (axis, new)), {"axis": axis, "new": new}, name=name)


def band(x: Node, axis: str, slot: str, new: str, size: int, name: str = "") -> Node:
    axes = order_axes(tuple(a for a in x.axes if a != slot), (new,))
    return Node(Op.BAND, (x,), axes, {"axis": axis, "slot": slot, "new": new, "size": size}, name=name)


def unband(x: Node, axis: str, slot: str, new: str, size: int, name: str = "") -> Node:
    axes = order_axes(tuple(a for a in x.axes if a != new), (slot,))
    return Node(Op.UNBAND, (x,), axes, {"axis": axis, "slot": slot, "new": new, "size": size}, name=name)


def tril(x: Node, rows: str, cols: str, diagonal: int = 0, name: str = "") -> Node:
    return Node(Op.TRIL, (x,), x.axes, {"rows": rows, "cols": cols, "diagonal": diagonal}, name=name)


def shift(x: Node, fill: Node, axis: str, by: int = 1, name: str = "") -> Node:
    return Node(Op.SHIFT, (x, fill), order_axes(x.axes, fill.axes), {"axis": axis, "by": by}, name=name)


def windows(x: Node, axis: str, outer: str, inner: str, size: int, step: int = 1, name: str = "") -> Node:
    attrs = {"axis": axis, "outer": outer, "inner": inner, "size": size, "step": step}
    return Node(Op.WINDOWS, (x,), order_axes(_swap(x.axes, axis, (outer, inner))), attrs, name=name)


def fold(x: Node, like: Node, attrs: Mapping[str, Any], name: str = "") -> Node:
    return Node(Op.FOLD, (x, like), like.axes, dict(attrs), name=name)


def merge(x: Node, axes: tuple[str, str], new: str, size: int, name: str = "") -> Node:
    out = order_axes(tuple(a for a in x.axes if a not in axes), (new,))
    return Node(Op.MERGE, (x,), out, {"axes": axes, "new": new, "size": size}, name=name)


def split(x: Node, axis: str, new: tuple[str, str], size: int, name: str = "") -> Node:
    out = order_axes(tuple(a for a in x.axes if a != axis), new)
    return Node(Op.SPLIT, (x,), out, {"axis": axis, "new": new, "size": size}, name=name)


def select(x: Node, axis: str, index: int, name: str = "") -> Node:
    return Node(Op.SELECT, (x,), tuple(a for a in x.axes if a != axis), {"axis": axis, "index": index}, name=name)


def place(x: Node, like: Node, axis: str, index: int) -> Node:
    return Node(Op.PLACE, (x, like), like.axes, {"axis": axis, "index": index})


def solve(lower: Node, b: Node, rows: str, cols: str, transpose: bool = False, name: str = "") -> Node:
    """x with (I + tril(lower, -1)) x = b over axis `rows` of b (transpose: its transpose); x has b's axes and lower's other axes."""
    rest = tuple(a for a in lower.axes if a not in (rows, cols))
    return Node(Op.SOLVE, (lower, b), order_axes(b.axes, rest), {"rows": rows, "cols": cols, "transpose": transpose}, name=name)


def masked_product(z: Node, x: Node, c: Node, d: Node, contract: Sequence[str], cols: str, name: str = "") -> Node:
    """((z x^T) * c) d: scores over `contract`, weighed by c, summed over `cols` against d, in one pass."""
    gone = {*contract, cols}
    axes = tuple(a for a in order_axes(z.axes, x.axes, c.axes, d.axes) if a not in gone)
    return Node(Op.MASKED_PRODUCT, (z, x, c, d), axes, {"contract": tuple(contract), "cols": cols}, name=name)


def scan(
    body: Graph,
    carries: Sequence[Node],
    slices: Sequence[Node],
    consts: Sequence[Node] = (),
    *,
    axis: str = "n",
    reverse: bool = False,
    save: bool = False,
) -> list[Node]:
    """Run `body` along `axis`; returns its results as GET nodes: final carries, stacked outputs, then (save) stacked starting carries.

    body params: the carries, one slice of each of `slices` (without `axis`), the consts. body results: new carries, then outputs.
    """
    k = len(carries)
    attrs = {"axis": axis, "carries": k, "slices": len(slices), "reverse": reverse, "save": save}
    loop = Node(Op.SCAN, (*carries, *slices, *consts), (), attrs, body=body)
    outs = [get(loop, i, r.axes) for i, r in enumerate(body.results[:k])]
    outs += [get(loop, k + i, order_axes((axis,), r.axes)) for i, r in enumerate(body.results[k:])]
    if save:
        outs += [get(loop, len(body.results) + i, order_axes((axis,), c.axes)) for i, c in enumerate(body.params[:k])]
    return [o.replace(name=r.name) for o, r in zip(outs, (*body.results, *body.params[:k]), strict=False)]


def get(loop: Node, index: int, axes: Sequence[str]) -> Node:
    return Node(Op.GET, (loop,), tuple(axes), {"index": index})


def in_order(node: Node, axes: tuple[str, ...]) -> Node:
    """The same value laid out as `axes`."""
    if node.axes == axes:
        return node
    if node.op in (Op.PARAM, Op.TENSOR):  # their own order is that of the array that comes in
        return einsum(node, const(1.0), keep=axes)
    return node.replace(axes=axes)


def rebuild(graph: Graph, change: Any) -> Graph:
    """A copy of `graph` in which `change(node, new_args)` made every node; returning the node itself keeps it. Same object if nothing
    changed."""
    new: dict[Node, Node] = {}
    for node in graph.nodes():
        args = tuple(new[a] for a in node.args)
        new[node] = change(node, args)
    if all(new[n] is n for n in new):
        return graph
    return Graph(tuple(new[p] for p in graph.params), tuple(new[r] for r in graph.results), graph.labels)


def inline(graph: Graph, env: Mapping[str, Node]) -> list[Node]:
    """The results of `graph` with its parameters replaced by nodes that may carry more axes; every node is lifted over them.

    This is how a one-token equation becomes a whole chunk's: give `x` as [g, t, k] and each of its nodes gains g and t.
    """
    new: dict[Node, Node] = {}
    for node in graph.nodes():
        new[node] = (
            env[node.attrs["name"]] if node.op is Op.PARAM and node.attrs["name"] in env else lift(node, [new[a] for a in node.args])
        )
    return [new[r] for r in graph.results]


def lift(node: Node, args: Sequence[Node]) -> Node:
    """`node` on other arguments, which have all the axes its own arguments have, and perhaps more: these pass through."""
    if not args and node.op is not Op.SCAN:
        return node
    if all(new is old for new, old in zip(args, node.args, strict=True)):
        return node
    extra = [a for new, old in zip(args, node.args, strict=True) for a in new.axes if a not in old.axes]
    if node.op is Op.SCAN and extra:
        raise GraphError("a SCAN is not lifted")
    axes = order_axes(node.axes, extra) if extra else node.axes
    return node.replace(args=tuple(args), axes=axes)
