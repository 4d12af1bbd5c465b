"""What a graph says about itself: polynomial degree, and whether a value acts entry by entry.

Where it sits: `facts` asks these questions of traced equations. Both answers are conservative: an operation without a
rule counts as neither polynomial nor entrywise, which costs speed, never truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from memkit.compiler.autodiff import data_args, dependents
from memkit.compiler.ir import Graph, GraphError, Node, Op
from memkit.compiler.simplify import simplify, uniform

__all__ = ["degree", "is_pointwise", "simplify", "uniform"]

INF = math.inf

# operations linear in their operands jointly (a sum, a choice, a move of entries)
_LINEAR = (
    Op.EXPAND, Op.RENAME, Op.GATHER, Op.SCATTER, Op.BAND, Op.UNBAND, Op.TRIL, Op.SHIFT, Op.WINDOWS, Op.FOLD, Op.MERGE,
    Op.SPLIT, Op.SELECT, Op.PLACE,
)  # fmt: skip
_PRODUCT = (Op.EINSUM, Op.MASKED_PRODUCT)


def _quotient(top: float, bottom: float) -> float:
    return top if bottom == 0 else INF


def _choice(flag: float, a: float, b: float) -> float:
    return max(a, b) if flag == 0 else INF


FUNCTION_DEGREES: Mapping[str, Callable[..., float]] = {
    "add": max,
    "sub": max,
    "neg": lambda a: a,
    "mul": lambda a, b: a + b,
    "square": lambda a: 2 * a,
    "div": _quotient,
    "where": _choice,
}


def degree(result: Node, wrt: Node) -> float:
    """Degree of `result` as a polynomial in `wrt`: 0, 1, or infinity for all else."""
    order = Graph((), (result,)).nodes()
    moved = dependents(order, [wrt])
    found: dict[Node, float] = {}
    for node in order:
        found[node] = _degree(node, [found[a] for a in data_args(node)]) if node in moved and node is not wrt else 0
        if node is wrt:
            found[node] = 1
    return found[result] if found[result] <= 1 else INF


def _degree(node: Node, args: Sequence[float]) -> float:
    if node.op is Op.POINTWISE:
        rule = FUNCTION_DEGREES.get(node.attrs["fn"])
        return INF if rule is None else rule(*args)
    if node.op in _PRODUCT:
        return sum(args)
    if node.op in _LINEAR or (node.op is Op.REDUCE and node.attrs["fn"] == "sum"):
        return max(args)
    if node.op is Op.SOLVE:
        return _quotient(args[1], args[0])
    return INF


def is_pointwise(result: Node, wrt: Node, axis: str) -> bool:
    """Whether entry i of `result` along `axis`, under any name, depends on `wrt` through its entry i alone."""
    if axis not in wrt.axes:
        raise GraphError(f"{wrt!r} has no axis {axis}")
    order = Graph((), (result,)).nodes()
    moved = dependents(order, [wrt])
    name: dict[Node, str | None] = {wrt: axis}  # what the axis is called in each node that depends on wrt; None: mixed
    for node in order:
        if node is wrt or node not in moved:
            continue
        names = {name[a] for a in data_args(node) if a in moved}
        (only,) = names if len(names) == 1 else (None,)
        name[node] = None if only is None or only in _mixed(node) else _renamed(node, only)
    return result not in moved or name[result] is not None


def _renamed(node: Node, axis: str) -> str | None:
    axis = node.attrs["names"].get(axis, axis) if node.op is Op.RENAME else axis
    return axis if axis in node.axes else None


# operation -> the attributes that hold an axis, or axes, along which entries meet or move
_MIXING: Mapping[Op, tuple[str, ...]] = {
    Op.REDUCE: ("over",),
    Op.GATHER: ("axis",),
    Op.SCATTER: ("axis",),
    Op.DECAY: ("axis", "new"),
    Op.BAND: ("axis", "slot", "new"),
    Op.UNBAND: ("axis", "slot", "new"),
    Op.SHIFT: ("axis",),
    Op.WINDOWS: ("axis", "outer", "inner"),
    Op.FOLD: ("axis", "outer", "inner"),
    Op.MERGE: ("axes", "new"),
    Op.SPLIT: ("axis", "new"),
    Op.SELECT: ("axis",),
    Op.PLACE: ("axis",),
    Op.SOLVE: ("rows", "cols"),
    Op.MASKED_PRODUCT: ("contract", "cols"),
}


def _mixed(node: Node) -> set[str]:
    """The axes of the operands along which `node` mixes entries; all of them for loops."""
    if node.op in (Op.SCAN, Op.GET):
        return {a for arg in node.args for a in arg.axes} | set(node.axes)
    values = (node.attrs[key] for key in _MIXING.get(node.op, ()))
    return {a for value in values for a in ((value,) if isinstance(value, str) else value)}
