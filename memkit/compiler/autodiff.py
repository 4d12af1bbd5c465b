"""Reverse mode on the graph: gradients are nodes of the same graph, so they print, fuse and differentiate again.

Where it sits: the plans take inner gradients with `vjp`; `backward.py` splits a graph into two.

Invariant: a cotangent has exactly the axes, as a set, of the node it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from memkit.compiler import ir
from memkit.compiler.derivatives import slopes
from memkit.compiler.ir import Graph, GraphError, Node, Op, const, einsum, mul, neg, param, pointwise, reduce, rename

Contributions = Sequence[Node | None]

ZERO = const(0.0)


# A node, its cotangent, which operands are wanted -> cotangents of these, or of any values that the node is made of.
Rule = Callable[[Node, Any, Sequence[bool]], Sequence[Any] | Mapping[Node, Node]]


def vjp(
    results: Sequence[Node], cotangents: Sequence[Node | None], wrt: Sequence[Node], rules: Mapping[Op, Rule] | None = None
) -> list[Node | None]:
    """The cotangent of each of `wrt`, given those of `results`; None stands for zero. rules: in place of RULES."""
    rules = RULES if rules is None else rules
    order = Graph((), tuple(results)).nodes()
    active = dependents(order, wrt)
    known = {n: n for n in (*order, *Graph((), tuple(c for c in cotangents if c is not None)).nodes())}
    found: dict[Node, Any] = {}
    for node, cotangent in zip(results, cotangents, strict=True):
        if cotangent is not None and node in active:
            _accumulate(found, node, _checked(cotangent, node))
    for node in reversed(order):
        if node not in found or node.op not in rules:
            continue
        known.update({g: g for g in _values(found[node])})
        wanted = [a in active for a in node.args]
        given = rules[node.op](node, found[node], wanted)
        if isinstance(given, Mapping):
            for value, grad in given.items():
                _accumulate(found, value, _stamp(_fit(grad, value), known, node.where))
            continue
        for arg, want, grad in zip(node.args, wanted, given, strict=True):
            if want and isinstance(grad, Node):
                _accumulate(found, arg, _stamp(_fit(grad, arg), known, node.where))
            elif want and isinstance(grad, dict):
                _accumulate_results(found.setdefault(arg, {}), grad)
    return [found.get(node) for node in wrt]


def data_args(node: Node) -> tuple[Node, ...]:
    """The operands whose values matter; the rest lend their shape only."""
    return node.args[:1] if node.op in (Op.EXPAND, Op.PLACE, Op.FOLD) else node.args


def dependents(order: Iterable[Node], wrt: Iterable[Node]) -> set[Node]:
    """The nodes of `order` (arguments first) whose value depends on one of `wrt`, these included."""
    found = set(wrt)
    for node in order:
        if any(a in found for a in data_args(node)):
            found.add(node)
    return found


def _checked(cotangent: Node, node: Node) -> Node:
    if set(cotangent.axes) != set(node.axes):
        raise GraphError(f"cotangent with axes {cotangent.axes} for {node!r}")
    return cotangent


def _accumulate(found: dict[Any, Any], key: Any, grad: Node) -> None:
    found[key] = ir.add(found[key], grad) if key in found else grad


def _accumulate_results(found: dict[int, Node], grads: Mapping[int, Node]) -> None:
    for index, grad in grads.items():
        _accumulate(found, index, grad)


def _values(grad: Any) -> Iterable[Node]:
    return grad.values() if isinstance(grad, dict) else (grad,)


def _fit(grad: Node, arg: Node) -> Node:
    """`grad` with the axes of `arg`: sums out what arg lacks, repeats over what grad lacks."""
    return ir.expand(reduce(grad, [a for a in grad.axes if a not in arg.axes]), arg)


def _stamp(node: Node, known: dict[Node, Node], where: str) -> Node:
    """`node`, with `where` written on all that is new below it."""
    if node in known:
        return known[node]
    args = tuple(_stamp(a, known, where) for a in node.args)
    if args != node.args or (where and not node.where):
        known[node] = node.replace(args=args, where=node.where or where)
    else:
        known[node] = node
    known[known[node]] = known[node]
    return known[node]


def unused(taken: Iterable[str], hint: str) -> str:
    """`hint`, or hint with the first number that makes it new."""
    names = set(taken)
    return next(n for n in (hint, *(f"{hint}{i}" for i in range(2, len(names) + 3))) if n not in names)


# one rule per operation: (node, cotangent, which operands are wanted) -> a contribution per operand


def _times(grad: Node, slope: Node | None, arg: Node) -> Node | None:
    """grad * slope, summed over what `arg` lacks without building the wide product."""
    if slope is None:
        return None
    gone = [a for a in grad.axes if a not in arg.axes]
    if slope.op is Op.CONST:
        narrow, value = reduce(grad, gone), slope.attrs["value"]
        return {1.0: narrow, -1.0: neg(narrow)}.get(value, mul(slope, narrow))
    return einsum(grad, slope, over=gone) if gone else mul(grad, slope)


def _pointwise(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    if node.attrs["fn"] == "where":  # the branch not taken may hold inf or nan: mask, do not multiply by 0
        flag = node.args[0]
        return None, pointwise("where", flag, grad, ZERO), pointwise("where", flag, ZERO, grad)
    return [_times(grad, slope, arg) for slope, arg in zip(slopes(node), node.args, strict=True)]


def _einsum(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    def pull(other: Node, arg: Node) -> Node:
        return einsum(grad, other, over=[a for a in ir.order_axes(grad.axes, other.axes) if a not in arg.axes])

    a, b = node.args
    return pull(b, a), pull(a, b)


def _reduce(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    (x,) = node.args
    wide = ir.expand(grad, x)
    if node.attrs["fn"] == "sum":
        return (wide,)
    largest = pointwise("eq", x, node)  # ties share alike, as in torch.amax
    count = reduce(largest, node.attrs["over"])
    return (mul(wide, pointwise("div", largest, count)),)


def _gather(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    a = node.attrs
    return (ir.scatter(grad, a["new"], a["axis"], a["index"], a["size"]),)


def _scatter(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    a = node.attrs
    return (ir.gather(grad, a["new"], a["axis"], a["index"], a["size"]),)


def _decay(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    """dx[r] = sum_{s < r} (D^T g)[r, s] D[r - 1, s]: no division, so exact where x is 0."""
    axis, new = node.attrs["axis"], node.attrs["new"]
    row = unused(node.axes, "u")
    later = rename(node, {axis: row, new: axis})
    below = einsum(later, rename(grad, {axis: row}), over=(row,))
    before = ir.shift(node, ZERO, axis)
    return (einsum(below, before, over=(new,)),)


def _band(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    a = node.attrs
    return (ir.unband(grad, a["axis"], a["slot"], a["new"], a["size"]),)


def _unband(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    a = node.attrs
    return (ir.band(grad, a["axis"], a["slot"], a["new"], a["size"]),)


def _tril(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    a = node.attrs
    return (ir.tril(grad, a["rows"], a["cols"], a["diagonal"]),)


def _shift(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    axis, by = node.attrs["axis"], node.attrs["by"]
    return ir.shift(grad, ZERO, axis, -by), ir.select(grad, axis, {1: 0, -1: -1}[by])


def _windows(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return (ir.fold(grad, node.args[0], node.attrs),)


def _fold(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return ir.windows(grad, **node.attrs), None


def _merge(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return (ir.split(grad, node.attrs["new"], node.attrs["axes"], node.attrs["size"]),)


def _split(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return (ir.merge(grad, node.attrs["new"], node.attrs["axis"], node.attrs["size"]),)


def _select(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return (ir.place(grad, node.args[0], node.attrs["axis"], node.attrs["index"]),)


def _place(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return ir.select(grad, node.attrs["axis"], node.attrs["index"]), None


def _solve(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    """With A x = b: db = A^-T g and dA = -db x^T; for A^T x = b the two factors change places."""
    (lower, _), (rows, cols) = node.args, (node.attrs["rows"], node.attrs["cols"])
    back = ir.solve(lower, grad, rows, cols, transpose=not node.attrs["transpose"])
    left, right = (node, back) if node.attrs["transpose"] else (back, node)
    # a right-hand side may be indexed by an axis named like the columns
    aside = {cols: unused((*node.axes, *lower.axes), "side")} if cols in node.axes else {}
    outer = einsum(rename(left, aside), rename(right, {**aside, rows: cols}), keep=lower.axes)
    return neg(ir.tril(outer, rows, cols, -1)), back


def _masked_product(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    # stand-ins cut the operands off from each other: one may be computed from another
    z, x, c, d, given = stands = [param(str(i), a.axes) for i, a in enumerate((*node.args, grad))]
    plain = einsum(mul(einsum(z, x, over=node.attrs["contract"]), c), d, keep=node.axes)
    grads = [_fit(g, a) for g, a in zip(vjp([plain], [given], stands[:4]), stands, strict=False) if g is not None]
    return ir.inline(Graph((), tuple(grads)), {str(i): a for i, a in enumerate((*node.args, grad))})


def _rename(node: Node, grad: Node, wanted: Sequence[bool]) -> Contributions:
    return (rename(grad, {new: old for old, new in node.attrs["names"].items()}),)


# loops


def saving(graph: Graph, keep: Callable[[Graph], Container[Node]] | None = None) -> Graph:
    """`graph` with every loop keeping the carries its iterations start from (not the loops inside their bodies), and stacking up the
    values of its body that `keep` chooses: what is stacked is not computed again on the way back."""
    wider: dict[Node, tuple[int, int]] = {}  # a loop with more outputs: results it had, results it gained

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is Op.GET and args[0] in wider:
            had, gained = wider[args[0]]
            at = node.attrs["index"]
            return node.replace(args=args, attrs={"index": at + gained if at >= had else at})
        if node.op is not Op.SCAN:
            return node if args == node.args else node.replace(args=args)
        body = node.body
        assert body is not None
        kept = set(body.results[node.attrs["carries"] :])
        chosen = keep(body) if keep is not None else ()
        more = [n for n in body.nodes() if n in chosen and n not in kept]
        if node.attrs["save"] and not more:
            return node if args == node.args else node.replace(args=args)
        new = Graph(body.params, (*body.results, *more), body.labels if not more else ())
        loop = node.replace(args=args, attrs={**node.attrs, "save": True}, body=new)
        wider[loop] = len(body.results), len(more)
        return loop

    return ir.rebuild(graph, change)


def _reach(body: Graph) -> dict[Node, frozenset[Node]]:
    """For each node of a body, the parameters its value depends on."""
    found: dict[Node, frozenset[Node]] = {}
    for node in body.nodes():
        own = [node] if node.op is Op.PARAM else []
        found[node] = frozenset(own).union(*(found[a] for a in data_args(node)))
    return found


def _active_carries(body: Graph, count: int, wanted: Sequence[bool], found: Mapping[int, Node]) -> list[int]:
    """The carries whose cotangent must travel back: moved by what is wanted, and felt by a result with a cotangent."""
    reach = _reach(body)
    carries, ends = body.params[:count], (*body.results, *body.params[:count])
    varied = {p for p, want in zip(body.params, wanted, strict=True) if want}
    felt: set[Node] = {carries[i] for i in found if i < count}.union(*(reach[ends[i]] for i in found if i >= count))
    for _ in carries:  # a fixed point: each round carries both facts through one more iteration
        varied |= {p for p, new in zip(carries, body.results, strict=False) if reach[new] & varied}
        felt = felt.union(*(reach[new] for p, new in zip(carries, body.results, strict=False) if p in felt))
    return [i for i, p in enumerate(carries) if p in varied and p in felt]


class _Back(NamedTuple):
    """The body of the loop that runs the other way. Numbers are those of the forward body's parameters and results."""

    carried: dict[int, Node]  # the cotangent of a carry
    given: dict[int, Node]  # the cotangent of an output, or of a saved carry
    sums: dict[int, Node]  # the sum so far of a constant's cotangents
    results: dict[int, Node]  # by parameter: next cotangents of carries, next sums, cotangents of slices


def _body_back(
    body: Graph, k: int, m: int, found: Mapping[int, Node], wanted: Sequence[bool], rules: Mapping[Op, Rule] | None
) -> _Back:
    """Recompute the forward body, then pull back: k carries, m slices, `found` the results that have cotangents."""
    active = _active_carries(body, k, wanted, found)
    ends = (*body.results, *body.params[:k])
    names = [p.attrs["name"] for p in body.params]

    def gradient_of(label: str, like: Node) -> Node:
        names.append(unused(names, f"grad_{label}"))
        return param(names[-1], like.axes)

    carried = {i: gradient_of(names[i], body.params[i]) for i in active}
    given = {i: gradient_of(f"out{i - k}", ends[i]) for i in found if i >= k}
    cotangents = {**carried, **given}
    targets = [*active, *(i for i in range(k, len(body.params)) if wanted[i])]
    pulled = vjp([ends[i] for i in cotangents], list(cotangents.values()), [body.params[i] for i in targets], rules)
    grads = {i: g for i, g in zip(targets, pulled, strict=True) if g is not None}
    sums = {i: gradient_of(names[i], body.params[i]) for i in grads if i >= k + m}
    results = {i: grads.get(i) or ir.expand(ZERO, body.params[i]) for i in active}
    results |= {i: ir.add(sums[i], grads[i]) for i in sums}
    return _Back(carried, given, sums, results | {i: g for i, g in grads.items() if k <= i < k + m})


def pull_scan(
    node: Node, found: Mapping[int, Node], wanted: Sequence[bool], rules: Mapping[Op, Rule] | None = None
) -> Contributions:
    """One loop in the other direction over the saved carries, what the body reads, and the outputs' cotangents.

    rules: of what the body does, in place of RULES.
    """
    assert node.body is not None
    body, k, m = saving(node.body), node.attrs["carries"], node.attrs["slices"]
    carried, given, sums, results = _body_back(body, k, m, found, wanted, rules)
    results, known = _reused(body, k, results)
    loop = node if node.attrs["save"] else node.replace(attrs={**node.attrs, "save": True})
    stacks = [ir.order_axes((node.attrs["axis"],), p.axes) for p in body.params[:k]]
    saved = [ir.get(loop, len(body.results) + i, axes) for i, axes in enumerate(stacks)]
    outer = dict(zip(body.params, (*saved, *node.args[k:]), strict=True)) | {p: found[i] for i, p in given.items()}
    outer |= {p: ir.get(loop, i, ir.order_axes((node.attrs["axis"],), p.axes)) for i, p in known.items()}
    used = set(Graph((), tuple(results.values())).nodes())
    sliced = [p for p in (*body.params[: k + m], *given.values(), *known.values()) if p in used]
    sliced = sliced or [*given.values(), *body.params[k : k + m]][:1]  # a loop needs one slice for its length
    consts = [p for p in body.params[k + m :] if p in used]
    starts = [found.get(i) or ir.expand(ZERO, node.args[i]) for i in carried]
    starts += [ir.expand(ZERO, node.args[i]) for i in sums]
    back = Graph((*carried.values(), *sums.values(), *sliced, *consts), tuple(results.values()))
    ends = ir.scan(
        back, starts, [outer[p] for p in sliced], [outer[p] for p in consts],
        axis=node.attrs["axis"], reverse=not node.attrs["reverse"],
    )  # fmt: skip
    whose = dict(zip(results, ends, strict=True))
    return [whose.get(i) for i in range(len(node.args))]


def _reused(body: Graph, carries: int, results: Mapping[Any, Node]) -> tuple[dict[Any, Node], dict[int, Node]]:
    """The results with outputs of the forward loop read from their stacks, not computed again; and number -> slice."""
    taken = {p.attrs["name"] for p in Graph((), tuple(results.values())).nodes() if p.op is Op.PARAM}
    known: dict[Node, Node] = {}
    slices: dict[int, Node] = {}
    for i, output in enumerate(body.results[carries:], carries):
        if output.op in (Op.PARAM, Op.CONST, Op.EXPAND) or output in known:
            continue
        name = next(f"kept{i}{'_' * n}" for n in range(len(taken) + 1) if f"kept{i}{'_' * n}" not in taken)
        known[output] = slices[i] = ir.param(name, output.axes, output.where)
    graph = ir.rebuild(Graph((), tuple(results.values())), lambda node, args: known.get(node) or _with_args(node, args))
    return dict(zip(results, graph.results, strict=True)), slices


def _with_args(node: Node, args: tuple[Node, ...]) -> Node:
    return node if args == node.args else node.replace(args=args)


RULES: Mapping[Op, Rule] = {
    Op.POINTWISE: _pointwise,
    Op.EINSUM: _einsum,
    Op.REDUCE: _reduce,
    Op.EXPAND: lambda node, grad, wanted: (grad, None),
    Op.RENAME: _rename,
    Op.GATHER: _gather,
    Op.SCATTER: _scatter,
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
    Op.SCAN: pull_scan,
    Op.GET: lambda node, grad, wanted: ({node.attrs["index"]: grad},),
}
