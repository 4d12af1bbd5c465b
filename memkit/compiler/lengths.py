"""Where the length of an axis can be read without computing the node that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memkit.compiler.ir import GraphError, Node, Op

PASSING = (Op.POINTWISE, Op.EINSUM, Op.REDUCE, Op.EXPAND, Op.TRIL, Op.SHIFT)  # an axis is as long as any operand's of that name
MADE: Mapping[Op, Callable[[Mapping[str, Any]], tuple[str, ...]]] = {  # the axes an operation makes; its others are its operand's
    Op.GATHER: lambda a: (a["new"],),
    Op.SCATTER: lambda a: (a["new"],),
    Op.BAND: lambda a: (a["new"],),
    Op.UNBAND: lambda a: (a["slot"],),
    Op.WINDOWS: lambda a: (a["outer"], a["inner"]),
    Op.MERGE: lambda a: (a["new"],),
    Op.SPLIT: lambda a: a["new"],
    Op.SELECT: lambda a: (),
}
KNOWN: Mapping[Op, Callable[[Mapping[str, Any]], tuple[str, int]]] = {  # an axis whose length the attributes give
    Op.GATHER: lambda a: (a["new"], len(a["index"])),
    Op.SCATTER: lambda a: (a["new"], a["size"]),
    Op.UNBAND: lambda a: (a["slot"], a["size"]),
    Op.WINDOWS: lambda a: (a["inner"], a["size"]),
    Op.SPLIT: lambda a: (a["new"][1], a["size"]),
}


def length_of(node: Node, axis: str) -> int | tuple[Node, str]:
    """A number, or an earlier node and the name the axis has there."""
    while True:
        found = _known(node, axis)
        if found is not None:
            return found
        back = _back(node, axis)
        if back is None:
            return node, axis
        node, axis = back


def _known(node: Node, axis: str) -> int | None:
    if node.op is Op.CONST:
        raise GraphError(f"a constant has no axis {axis}")
    if node.op is Op.TENSOR:
        values = node.attrs["values"]
        for _ in range(node.axes.index(axis)):
            values = values[0]
        return len(values)
    name, length = KNOWN[node.op](node.attrs) if node.op in KNOWN else (None, None)
    return length if name == axis else None


def _back(node: Node, axis: str) -> tuple[Node, str] | None:
    """The operand with the same axis, and its name there."""
    if node.op is Op.RENAME:
        return node.args[0], {new: old for old, new in node.attrs["names"].items()}.get(axis, axis)
    if node.op is Op.DECAY:
        return node.args[0], node.attrs["axis"] if axis == node.attrs["new"] else axis
    if node.op in (Op.PLACE, Op.FOLD) or (node.op is Op.SOLVE and axis in node.args[1].axes):
        return node.args[1], axis
    if node.op in PASSING or (node.op in MADE and axis not in MADE[node.op](node.attrs)):
        return next(a for a in node.args if axis in a.axes), axis
    return None
