"""Algebra that needs no plan: constants, neutral elements, pairs that cancel, shapes, equal nodes.

Where it sits: after tracing and after every gradient, so that facts can be read off the graph; passes use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memkit.compiler import ir
from memkit.compiler.interpret import FUNCTION_MEANING
from memkit.compiler.ir import Graph, Node, Op, const, neg, pointwise

Rule = Callable[[Node], "Node | None"]

# operations whose operands have, under each name, the very length the result has
_SAME_LENGTHS = (Op.POINTWISE, Op.EINSUM, Op.REDUCE, Op.EXPAND, Op.TRIL, Op.SHIFT, Op.MASKED_PRODUCT, Op.PLACE)


def simplify(graph: Graph) -> Graph:
    """`graph` with the rules below applied until none applies, equal nodes made one, and loop bodies simplified.

    rewrite: x * 1 -> x, x + 0 -> x, f(constants) -> constant, rename(rename(x)) -> rename(x), two f(a) -> one, ..
    keeps: results up to rounding, and their axes; 0 * x is 0 even where x may be inf or nan
    """
    layouts = [r.axes for r in graph.results]
    while (after := _once(graph)) is not graph:
        graph = after
    if layouts == [r.axes for r in graph.results]:
        return graph
    results = tuple(ir.in_order(r, axes) for r, axes in zip(graph.results, layouts, strict=True))
    return Graph(graph.params, results, graph.labels)


def uniform(node: Node) -> float | None:
    """The one value of all entries of `node`, where that is plain to see."""
    while node.op in (Op.EXPAND, Op.RENAME):
        node = node.args[0]
    return node.attrs["value"] if node.op is Op.CONST else None


def _once(graph: Graph) -> Graph:
    seen: dict[Any, Node] = {}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else simplify(node.body)
        if args != node.args or body is not node.body:
            node = node.replace(args=args, body=body)
        for rule in RULES.get(node.op, ()):
            better = rule(node)
            if better is not None:
                node = _labelled(better, node)
                break
        return node if node.op is Op.PARAM else seen.setdefault(_key(node), node)

    return ir.rebuild(graph, change)


def _labelled(new: Node, old: Node) -> Node:
    """`new` with the name and origin of what it stands for, unless it has its own."""
    complete = (new.name or not old.name) and (new.where or not old.where)
    if complete or new.op is Op.PARAM or new in old.args:
        return new
    return new.replace(name=new.name or old.name, where=new.where or old.where)


def _key(node: Node) -> Any:
    return node.op, node.args, node.axes, _frozen(node.attrs), node.body


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return tuple(_frozen(v) for v in value) if isinstance(value, tuple | list) else value


# shapes


def _widened(x: Node, node: Node) -> Node:
    """`x` with all the axes of `node`, their lengths taken from node's operands."""
    for arg in node.args:
        if not set(node.axes) <= set(x.axes):
            x = ir.expand(x, _lender(arg, set(node.axes) - set(x.axes), set(node.axes)))
    return x


def _lender(like: Node, missing: set[str], allowed: set[str]) -> Node:
    """The node nearest to the parameters that has the same `missing` axes as `like` and none but the `allowed`."""
    wanted = missing & set(like.axes)
    while like.op in _SAME_LENGTHS:
        deeper = (a for a in like.args if wanted <= set(a.axes) <= allowed)
        found = next(deeper, None)
        if found is None:
            break
        like = found
    return like


def _expand(node: Node) -> Node | None:
    x, like = node.args
    if set(like.axes) <= set(x.axes):
        return x
    lender = _lender(like, set(like.axes) - set(x.axes), set(node.axes))
    if x.op is Op.EXPAND and set(lender.axes) >= set(x.axes) - set(x.args[0].axes):
        return ir.expand(x.args[0], lender)
    return None if lender is like else ir.expand(x, lender)


def _bare(node: Node) -> Node | None:
    """Operands meet by name, so an operand need not be repeated over axes that another one has."""
    for i, arg in enumerate(node.args):
        if arg.op is not Op.EXPAND:
            continue
        others = {a for j, other in enumerate(node.args) if j != i for a in other.axes}
        if set(arg.axes) <= others | set(arg.args[0].axes):
            return node.replace(args=(*node.args[:i], arg.args[0], *node.args[i + 1 :]))
    return None


# pointwise


def _fold_constants(node: Node) -> Node | None:
    values = [uniform(a) for a in node.args]
    if any(v is None for v in values):
        return None
    args = [torch.tensor(v, dtype=torch.float64) for v in values]
    return _widened(const(float(FUNCTION_MEANING[node.attrs["fn"]](*args))), node)


def _is(value: float, node: Node) -> bool:
    return uniform(node) == value


def _add(a: Node, b: Node) -> Node | None:
    if _is(0.0, a) or _is(0.0, b):
        return b if _is(0.0, a) else a
    if a is b:
        return ir.mul(const(2.0), a)
    if _calls(b, "neg"):
        return ir.sub(a, b.args[0])
    return ir.sub(b, a.args[0]) if _calls(a, "neg") else None


def _sub(a: Node, b: Node) -> Node | None:
    if a is b:
        return const(0.0)
    if _is(0.0, b):
        return a
    if _is(0.0, a):
        return neg(b)
    return ir.add(a, b.args[0]) if _calls(b, "neg") else None


def _mul(a: Node, b: Node) -> Node | None:
    if uniform(b) is not None and uniform(a) is None:
        a, b = b, a
    factor = uniform(a)
    if factor is not None:
        simple = {0.0: const(0.0), 1.0: b, -1.0: neg(b)}
        if factor in simple:
            return simple[factor]
        if _calls(b, "neg"):
            return ir.mul(const(-factor), b.args[0])
        if _calls(b, "mul"):
            inner = next((i for i, x in enumerate(b.args) if uniform(x) is not None), None)
            if inner is not None:
                return ir.mul(const(factor * (uniform(b.args[inner]) or 0.0)), b.args[1 - inner])
        return None
    if _calls(a, "neg"):
        return ir.mul(a.args[0], b.args[0]) if _calls(b, "neg") else neg(ir.mul(a.args[0], b))
    return neg(ir.mul(a, b.args[0])) if _calls(b, "neg") else None


def _div(a: Node, b: Node) -> Node | None:
    if _is(1.0, a):
        return pointwise("reciprocal", b)
    simple = {1.0: a, -1.0: neg(a)}
    value = uniform(b)
    return const(0.0) if _is(0.0, a) else None if value is None else simple.get(value)


def _pow(a: Node, b: Node) -> Node | None:
    square = pointwise("square", a)
    simple = {0.0: const(1.0), 1.0: a, 2.0: square, 3.0: ir.mul(square, a), -1.0: pointwise("reciprocal", a)}
    roots = {0.5: pointwise("sqrt", a), -0.5: pointwise("rsqrt", a)}
    value = uniform(b)
    return None if value is None else {**simple, **roots}.get(value)


def _where(flag: Node, a: Node, b: Node) -> Node | None:
    value = uniform(flag)
    if value is not None:
        return a if value else b
    same = uniform(a) is not None and uniform(a) == uniform(b)
    return a if a is b or same else None


def _neg(a: Node) -> Node | None:
    if _calls(a, "neg"):
        return a.args[0]
    return ir.sub(a.args[1], a.args[0]) if _calls(a, "sub") else None


def _calls(node: Node, fn: str) -> bool:
    return node.op is Op.POINTWISE and node.attrs["fn"] == fn


NEUTRAL: Mapping[str, Callable[..., Node | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "where": _where,
    "neg": _neg,
    "abs": lambda a: pointwise("abs", a.args[0]) if _calls(a, "neg") else None,
    "square": lambda a: pointwise("square", a.args[0]) if _calls(a, "neg") or _calls(a, "abs") else None,
}


def _neutral(node: Node) -> Node | None:
    rule = NEUTRAL.get(node.attrs["fn"])
    found = None if rule is None else rule(*node.args)
    return None if found is None else _widened(found, node)


# the rest


def _einsum(node: Node) -> Node | None:
    """A number in a product is a factor of the sum; a sign, too."""
    for one, other in (node.args, node.args[::-1]):
        if other.op in (Op.PARAM, Op.TENSOR) and set(other.axes) == set(node.axes) and other.axes != node.axes:
            continue  # a change of layout, which a product with 1 is there for
        value = uniform(one)
        if value is not None and set(one.axes) <= set(other.axes):
            total = ir.reduce(other, [a for a in other.axes if a not in node.axes])
            return const(0.0) if value == 0.0 and not node.axes else ir.mul(const(value), total)
        if _calls(one, "neg"):
            return neg(ir.einsum(one.args[0], other, keep=node.axes))
    return None


def _reduce(node: Node) -> Node | None:
    (x,) = node.args
    if x.op is Op.REDUCE and x.attrs["fn"] == node.attrs["fn"]:
        return ir.reduce(x.args[0], (*x.attrs["over"], *node.attrs["over"]), node.attrs["fn"])
    if node.attrs["fn"] == "sum" and _is(0.0, x):
        return _widened_zero(node, x)
    return None


def _widened_zero(node: Node, like: Node) -> Node | None:
    """Zeros with the axes of `node`, where some node below `like` can lend them."""
    lender = _lender(like, set(node.axes), set(node.axes))
    return ir.expand(const(0.0), lender) if set(lender.axes) == set(node.axes) or not node.axes else None


def _rename(node: Node) -> Node | None:
    (x,), names = node.args, node.attrs["names"]
    if all(old == new for old, new in names.items()):
        return x
    if x.op is Op.CONST:
        return x
    if x.op is not Op.RENAME:
        return None
    first = x.attrs["names"]
    joint = {a: names.get(first.get(a, a), first.get(a, a)) for a in x.args[0].axes}
    return ir.rename(x.args[0], joint)


def _inverse_of(op: Op, match: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]) -> Rule:
    def rule(node: Node) -> Node | None:
        x = node.args[0]
        return x.args[0] if x.op is op and match(node.attrs, x.attrs) else None

    return rule


def _keeps_zero(node: Node) -> Node | None:
    """A masked or moved zero is the same zero."""
    values = [uniform(a) for a in node.args]
    return _widened(node.args[0], node) if all(v == 0.0 for v in values) else None


def _place(node: Node) -> Node | None:
    return ir.expand(const(0.0), node.args[1]) if _is(0.0, node.args[0]) else None


def _select(node: Node) -> Node | None:
    x, attrs = node.args[0], node.attrs
    if x.op is Op.PLACE and (x.attrs["axis"], x.attrs["index"]) == (attrs["axis"], attrs["index"]):
        return x.args[0]
    if x.op is Op.EXPAND and attrs["axis"] not in x.args[0].axes and set(x.args[0].axes) == set(node.axes):
        return x.args[0]
    return None


def _split_undoes(split: Mapping[str, Any], merge: Mapping[str, Any]) -> bool:
    return (split["axis"], split["new"], split["size"]) == (merge["new"], merge["axes"], merge["size"])


RULES: Mapping[Op, tuple[Rule, ...]] = {
    Op.POINTWISE: (_fold_constants, _neutral, _bare),
    Op.EINSUM: (_einsum, _bare),
    Op.REDUCE: (_reduce,),
    Op.EXPAND: (_expand,),
    Op.RENAME: (_rename,),
    Op.TRIL: (_keeps_zero,),
    Op.SHIFT: (_keeps_zero,),
    Op.PLACE: (_place,),
    Op.SELECT: (_select,),
    Op.SPLIT: (_inverse_of(Op.MERGE, _split_undoes),),
    Op.MERGE: (_inverse_of(Op.SPLIT, lambda merge, split: _split_undoes(split, merge)),),
    Op.UNBAND: (_inverse_of(Op.BAND, lambda a, b: all(a[k] == b[k] for k in ("axis", "slot", "new", "size"))),),
}
