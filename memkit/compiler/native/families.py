"""Functions of one value that are better made in one loop: most of what one of them takes serves the others, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memkit.compiler.ir import Node, Op

RELATED = (("gelu", "gelu_slope"), ("sigmoid", "silu", "silu_slope", "softplus"))  # by what functions.h makes them of


def family(node: Node) -> tuple[int, Node] | None:
    """What such functions have in common; None for all other nodes."""
    fn = node.attrs["fn"] if node.op is Op.POINTWISE else ""
    return next(((i, node.args[0]) for i, names in enumerate(RELATED) if fn in names), None)


def relatives(nodes: Iterable[Node], kept: Iterable[Node]) -> set[Node]:
    """Those of `nodes` that belong together with one of `kept`."""
    found = {family(n) for n in kept} - {None}
    return {n for n in nodes if n.axes and family(n) in found}


def gathered(items: Sequence[Node]) -> list[Node]:
    """The items with those that belong together one behind another, where the first of them stands."""
    first: dict[object, int] = {}
    place = {node: first.setdefault(family(node) or node, i) for i, node in enumerate(items)}
    return sorted(items, key=lambda node: place[node])


def go_on(node: Node, following: Iterable[Node]) -> bool:
    """Whether one of `following` belongs together with a node."""
    found = family(node)
    return found is not None and any(family(other) == found for other in following)
