"""Inside a chunk, products of wide features are a function of the raw keys: the kernel."""

from __future__ import annotations

from collections.abc import Mapping

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op

PER_TOKEN = (Op.RENAME, Op.WINDOWS, Op.MERGE, Op.SPLIT, Op.SELECT, Op.GATHER)  # they move tokens about and look into none


def kernel_trick(graph: Graph, features: Graph, kernel: Graph) -> Graph:
    """Replace products of two features by the kernel of what the features are of; to be run before features are simplified.

    features: one token, x [k] -> [f], perhaps with further parameters. kernel: one pair, a [k], b [k2] -> [], parameters of the same names.

    rewrite: einsum(phi(x), phi(y)) over f  ->  kernel(x, y)        also where tokens were renamed, windowed or merged after phi
    keeps: results up to rounding, if kernel(a, b) is phi(a).phi(b)
    """
    (pattern,) = features.results
    if pattern.op is Op.PARAM or len(pattern.axes) != 1:
        return graph
    (wide,) = pattern.axes

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        body = None if node.body is None else kernel_trick(node.body, features, kernel)
        if node.op is Op.EINSUM and wide in args[0].axes and wide in args[1].axes and wide not in node.axes:
            found = _scores(node, [_raw(a, pattern, wide) for a in args], kernel, wide)
            if found is not None:
                return found
        return node if args == node.args and body is node.body else node.replace(args=args, body=body)

    return ir.rebuild(graph, change)


def _scores(node: Node, raws: list[dict[str, Node] | None], kernel: Graph, wide: str) -> Node | None:
    first, second = raws
    if first is None or second is None or any(first[n] is not second[n] for n in first if n != "x"):
        return None
    ((a,), (b,)) = kernel.param("a").axes, kernel.param("b").axes
    if set(node.axes) != (set(first["x"].axes) | set(second["x"].axes)) - {a}:  # something else is summed, too
        return None
    given = {**{n: x for n, x in first.items() if n != "x"}, "a": first["x"], "b": ir.rename(second["x"], {a: b})}
    if any(p.attrs["name"] not in given for p in kernel.params):
        return None
    (found,) = ir.inline(kernel, given)
    if set(found.axes) != set(node.axes):
        return None
    return found.replace(name=node.name or found.name, where=node.where or found.where)


def _raw(node: Node, pattern: Node, wide: str) -> dict[str, Node] | None:
    """What `pattern`'s parameters are in `node`, if it is the features of something; x with what was done to the features' tokens."""
    bound: dict[str, Node] = {}
    if _matches(pattern, node, bound):
        return bound
    if node.op not in PER_TOKEN or wide not in node.axes or wide in _touched(node):
        return None
    below = _raw(node.args[0], pattern, wide)
    if below is None:
        return None
    narrow = [a for a in below["x"].axes if a not in node.args[0].axes]
    axes = [n for a in node.axes for n in (narrow if a == wide else [a])]
    return {**below, "x": node.replace(args=(below["x"],), axes=tuple(axes), name="")}


def _touched(node: Node) -> set[str]:
    """The axes an operation names."""
    found: set[str] = set()
    for value in node.attrs.values():
        parts = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, Mapping) else value
        found |= {a for a in parts if isinstance(a, str)} if not isinstance(parts, int) else set()
    return found


def _matches(pattern: Node, node: Node, bound: dict[str, Node]) -> bool:
    """Whether `node` is `pattern` lifted over more axes; fills in what its parameters are."""
    seen: dict[Node, Node] = {}

    def match(part: Node, of: Node) -> bool:
        if part in seen:
            return seen[part] is of
        seen[part] = of
        if not set(part.axes) <= set(of.axes):
            return False
        if part.op is Op.PARAM:
            return bound.setdefault(part.attrs["name"], of) is of
        return part.op is of.op and _same(part, of) and all(map(match, part.args, of.args))

    return match(pattern, node)


def _same(part: Node, of: Node) -> bool:
    return dict(part.attrs) == dict(of.attrs) and part.body is of.body and len(part.args) == len(of.args)
