"""The grammar of `ir.py`, checked: every node's operands, attributes and axes, and which operations a stage may hold.

Where it sits: after tracing, after a plan, and after every pass. A failure is a fault of memkit, never of a spec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memkit.compiler.ir import FUNCTIONS, Graph, GraphError, Node, Op

MEMORY = frozenset((
    Op.PARAM, Op.CONST, Op.TENSOR, Op.POINTWISE, Op.EINSUM, Op.REDUCE, Op.EXPAND, Op.RENAME, Op.GATHER, Op.SCATTER,
    Op.MERGE, Op.SPLIT, Op.SELECT, Op.PLACE,
))  # fmt: skip
TENSOR = frozenset(Op)
KERNEL = TENSOR - {Op.GATHER, Op.SCATTER}
VOCABULARIES: Mapping[str, frozenset[Op]] = {"memory": MEMORY, "tensor": TENSOR, "kernel": KERNEL}

OPERANDS: Mapping[Op, int] = {
    **dict.fromkeys((Op.PARAM, Op.CONST, Op.TENSOR), 0),
    **dict.fromkeys((Op.EINSUM, Op.EXPAND, Op.SHIFT, Op.FOLD, Op.PLACE, Op.SOLVE), 2),
    **dict.fromkeys((Op.REDUCE, Op.RENAME, Op.GATHER, Op.SCATTER, Op.DECAY, Op.BAND, Op.UNBAND, Op.TRIL), 1),
    **dict.fromkeys((Op.WINDOWS, Op.MERGE, Op.SPLIT, Op.SELECT, Op.GET), 1),
    Op.MASKED_PRODUCT: 4,
}

Axes = set[str]


def check(graph: Graph, vocabulary: str) -> None:
    """Raise GraphError, with the node and its origin, at the first breach of the grammar.

    vocabulary: "memory" (equations of one token), "tensor" (everything), "kernel" (what a kernel's skeleton takes).
    """
    if vocabulary not in VOCABULARIES:
        raise GraphError(f"no vocabulary {vocabulary!r}; there are {', '.join(VOCABULARIES)}")
    _graph(graph, vocabulary, inside=False)


def _graph(graph: Graph, vocabulary: str, inside: bool) -> None:
    _interface(graph)
    listed = set(graph.params)
    for node in graph.nodes():
        try:
            _need(node.op in VOCABULARIES[vocabulary], f"operation {node.op.value} is not in vocabulary {vocabulary!r}")
            _need(node.op is not Op.PARAM or node in listed, "is used but is not among the graph's parameters")
            _node(node)
            if vocabulary == "kernel":
                _kernel(node, inside)
        except GraphError as error:
            raise GraphError(f"{node!r}{f' at {node.where}' if node.where else ''}: {error}") from None
        if node.body is not None:
            try:
                _graph(node.body, vocabulary, inside=True)
            except GraphError as error:
                raise GraphError(f"in the body of {node!r}: {error}") from None


def _interface(graph: Graph) -> None:
    for p in graph.params:
        _need(p.op is Op.PARAM, f"{p!r} is listed as a parameter")
    names = Counter(p.attrs.get("name") for p in graph.params)
    shared = sorted(str(n) for n, c in names.items() if c > 1)
    _need(not shared, f"parameters share a name: {shared}")
    for r in graph.results:
        _need(r.op is not Op.SCAN, f"{r!r} is a result; its values are picked by GET")
    if graph.labels:
        _need(len(graph.labels) == len(graph.results), f"{len(graph.labels)} labels for {len(graph.results)} results")
        _need(len(set(graph.labels)) == len(graph.labels), f"results share a label: {graph.labels}")


def _node(node: Node) -> None:
    _need(len(set(node.axes)) == len(node.axes), f"axes {node.axes} repeat")
    expected = OPERANDS.get(node.op)
    _need(expected is None or len(node.args) == expected, f"{len(node.args)} operands, expected {expected}")
    _need(node.body is None or node.op is Op.SCAN, "has a body")
    for arg in node.args:
        _need(arg.op is not Op.SCAN or node.op is Op.GET, "uses a SCAN directly; its values are picked by GET")
    try:
        axes = AXES[node.op](node, *node.args)
    except KeyError as error:
        raise GraphError(f"attribute {error} is missing") from None
    _need(set(node.axes) == axes, f"says axes {sorted(node.axes)}, computed {sorted(axes)}")


def _need(fact: bool, otherwise: str) -> None:
    if not fact:
        raise GraphError(otherwise)


def _has(x: Node, *axes: str) -> None:
    for axis in axes:
        _need(axis in x.axes, f"operand {x!r} has no axis {axis}")


def _lacks(x: Node, *axes: str) -> None:
    for axis in axes:
        _need(axis not in x.axes, f"operand {x!r} already has axis {axis}")


def _union(args: Iterable[Node]) -> Axes:
    return {a for arg in args for a in arg.axes}


def _swapped(x: Node, gone: Iterable[str], new: Iterable[str]) -> Axes:
    """x's axes without `gone` and with `new`, which must be new."""
    _has(x, *gone)
    left = set(x.axes) - set(gone)
    for axis in new:
        _need(axis not in left, f"operand {x!r} already has axis {axis}")
        left.add(axis)
    return left


# one rule per operation: what must hold, and the axes that follow


def _param(node: Node) -> Axes:
    _need(isinstance(node.attrs["name"], str) and node.attrs["name"] != "", "a parameter needs a name")
    return set(node.axes)


def _const(node: Node) -> Axes:
    _need(isinstance(node.attrs["value"], float), f"value {node.attrs['value']!r} is no float")
    return set()


def _tensor(node: Node) -> Axes:
    values, rank = node.attrs["values"], 0
    while isinstance(values, tuple):
        _need(len(values) > 0, "a constant array without entries")
        values, rank = values[0], rank + 1
    _need(rank == len(node.axes), f"values nested {rank} deep for axes {node.axes}")
    return set(node.axes)


def _pointwise(node: Node, *args: Node) -> Axes:
    fn = node.attrs["fn"]
    _need(fn in FUNCTIONS, f"no function {fn!r}")
    _need(FUNCTIONS.get(fn) == len(args), f"{fn} with {len(args)} operands, expected {FUNCTIONS.get(fn)}")
    pair = node.attrs.get("symmetric", ())
    _need(set(pair) <= _union(args) and len(set(pair)) in (0, 2), f"is symmetric in {pair}, no two axes of it")
    return _union(args)


def _einsum(node: Node, a: Node, b: Node) -> Axes:
    extra = set(node.axes) - _union((a, b))
    _need(not extra, f"keeps axes {sorted(extra)} that no operand has")
    return set(node.axes)


def _reduce(node: Node, x: Node) -> Axes:
    _need(node.attrs["fn"] in ("sum", "max"), f"no reduction {node.attrs['fn']!r}")
    _need(len(node.attrs["over"]) > 0, "reduces over nothing")
    return _swapped(x, node.attrs["over"], ())


def _rename(node: Node, x: Node) -> Axes:
    names = node.attrs["names"]
    _has(x, *names)
    renamed = [names.get(a, a) for a in x.axes]
    _need(len(set(renamed)) == len(renamed), f"renames {x.axes} to {tuple(renamed)}")
    return set(renamed)


def _indexed(node: Node, x: Node) -> Axes:
    axis, new, index, size = (node.attrs[k] for k in ("axis", "new", "index", "size"))
    _need(all(isinstance(i, int) and 0 <= i < size for i in index), f"indices outside 0..{size - 1}")
    return _swapped(x, (axis,), (new,))


def _decay(node: Node, x: Node) -> Axes:
    _has(x, node.attrs["axis"])
    return _swapped(x, (), (node.attrs["new"],))


def _band(node: Node, x: Node) -> Axes:
    _has(x, node.attrs["axis"])
    _positive(node.attrs["size"])
    return _swapped(x, (node.attrs["slot"],), (node.attrs["new"],))


def _unband(node: Node, x: Node) -> Axes:
    _has(x, node.attrs["axis"])
    _positive(node.attrs["size"])
    return _swapped(x, (node.attrs["new"],), (node.attrs["slot"],))


def _positive(size: Any) -> None:
    _need(isinstance(size, int) and size > 0, f"size {size!r} is no positive whole number")


def _tril(node: Node, x: Node) -> Axes:
    _has(x, node.attrs["rows"], node.attrs["cols"])
    _need(node.attrs["rows"] != node.attrs["cols"], "rows and columns are one axis")
    _need(isinstance(node.attrs["diagonal"], int), "diagonal is no whole number")
    return set(x.axes)


def _shift(node: Node, x: Node, fill: Node) -> Axes:
    _has(x, node.attrs["axis"])
    _lacks(fill, node.attrs["axis"])
    _need(node.attrs["by"] in (1, -1), f"shifts by {node.attrs['by']}")
    return _union((x, fill))


def _windows(node: Node, x: Node) -> Axes:
    _positive(node.attrs["size"])
    _positive(node.attrs["step"])
    return _swapped(x, (node.attrs["axis"],), (node.attrs["outer"], node.attrs["inner"]))


def _fold(node: Node, x: Node, like: Node) -> Axes:
    _has(like, node.attrs["axis"])
    _positive(node.attrs["size"])
    return _swapped(x, (node.attrs["outer"], node.attrs["inner"]), (node.attrs["axis"],))


def _merge(node: Node, x: Node) -> Axes:
    _need(len(set(node.attrs["axes"])) == 2, f"merges {node.attrs['axes']}, expected two axes")
    _positive(node.attrs["size"])
    return _swapped(x, node.attrs["axes"], (node.attrs["new"],))


def _split(node: Node, x: Node) -> Axes:
    _need(len(set(node.attrs["new"])) == 2, f"splits into {node.attrs['new']}, expected two axes")
    _positive(node.attrs["size"])
    return _swapped(x, (node.attrs["axis"],), node.attrs["new"])


def _select(node: Node, x: Node) -> Axes:
    _need(node.attrs["index"] in (0, -1), f"selects index {node.attrs['index']}, expected 0 or -1")
    return _swapped(x, (node.attrs["axis"],), ())


def _place(node: Node, x: Node, like: Node) -> Axes:
    _has(like, node.attrs["axis"])
    _need(node.attrs["index"] in (0, -1), f"places at index {node.attrs['index']}, expected 0 or -1")
    return _swapped(x, (), (node.attrs["axis"],))


def _solve(node: Node, lower: Node, b: Node) -> Axes:
    rows, cols = node.attrs["rows"], node.attrs["cols"]
    _need(rows != cols, "rows and columns are one axis")
    _need(isinstance(node.attrs["transpose"], bool), "transpose is neither True nor False")
    _has(lower, rows, cols)
    _has(b, rows)
    return set(b.axes) | (set(lower.axes) - {rows, cols})


def _masked_product(node: Node, z: Node, x: Node, c: Node, d: Node) -> Axes:
    contract, cols = node.attrs["contract"], node.attrs["cols"]
    for operand in (z, x):
        _has(operand, *contract)
    for operand in (x, d):
        _has(operand, cols)
    for operand in (c, d):
        _lacks(operand, *contract)
    return _union((z, x, c, d)) - {*contract, cols}


def _scan(node: Node, *args: Node) -> Axes:
    body, attrs = node.body, node.attrs
    if body is None:
        raise GraphError("a SCAN without a body")
    k, m, axis = attrs["carries"], attrs["slices"], attrs["axis"]
    _need(isinstance(attrs["reverse"], bool) and isinstance(attrs["save"], bool), "reverse and save are True or False")
    _need(len(args) == len(body.params), f"{len(args)} operands for {len(body.params)} parameters of the body")
    _need(m > 0, "a SCAN needs a slice for its length")
    _need(k + m <= len(args) and k <= len(body.results), f"{k} carries and {m} slices do not fit")
    for i, (arg, p) in enumerate(zip(args, body.params, strict=True)):
        sliced = k <= i < k + m
        if sliced:
            _has(arg, axis)
        role = "carry" if i < k else "slice" if sliced else "constant"
        given = set(arg.axes) - ({axis} if sliced else set())
        says = f"{role} {p.attrs['name']!r} has axes {sorted(p.axes)}"
        _need(given == set(p.axes), f"{says}, is given {sorted(given)}")
        if role == "carry":
            after = set(body.results[i].axes)
            _need(after == set(p.axes), f"{says}, its next value {sorted(after)}")
    for r in (*body.results[k:], *(body.params[:k] if attrs["save"] else ())):
        _lacks(r, axis)
    return set()


def _get(node: Node, loop: Node) -> Axes:
    _need(loop.op is Op.SCAN and loop.body is not None, "picks from something that is no SCAN")
    assert loop.body is not None
    k, index = loop.attrs["carries"], node.attrs["index"]
    values = (*loop.body.results, *(loop.body.params[:k] if loop.attrs["save"] else ()))
    _need(0 <= index < len(values), f"picks result {index} of {len(values)}")
    return set(values[index].axes) | ({loop.attrs["axis"]} if index >= k else set())


AXES: Mapping[Op, Callable[..., Axes]] = {
    Op.PARAM: _param,
    Op.CONST: _const,
    Op.TENSOR: _tensor,
    Op.POINTWISE: _pointwise,
    Op.EINSUM: _einsum,
    Op.REDUCE: _reduce,
    Op.EXPAND: lambda node, x, like: _union((x, like)),
    Op.RENAME: _rename,
    Op.GATHER: _indexed,
    Op.SCATTER: _indexed,
    Op.DECAY: _decay,
    Op.BAND: _band,
    Op.UNBAND: _unband,
    Op.TRIL: _tril,
    Op.SHIFT: _shift,
    Op.WINDOWS: _windows,
    Op.FOLD: _fold,
    Op.MERGE: _merge,
    Op.SPLIT: _split,
    Op.SELECT: _select,
    Op.PLACE: _place,
    Op.SOLVE: _solve,
    Op.MASKED_PRODUCT: _masked_product,
    Op.SCAN: _scan,
    Op.GET: _get,
}


def _kernel(node: Node, inside: bool) -> None:
    """What a kernel's skeleton takes: products of matrices, at most, and no loop in a loop."""
    _need(node.op is not Op.SCAN or not inside, "a SCAN inside a SCAN does not fit a kernel")
    if node.op is Op.EINSUM:
        a, b = node.args
        batch = set(a.axes) & set(b.axes) & set(node.axes)
        for operand in (a, b):
            own = [x for x in operand.axes if x not in batch]
            _need(len(own) <= 2, f"operand {operand!r} brings {len(own)} axes {own} to a product, a kernel takes 2")
