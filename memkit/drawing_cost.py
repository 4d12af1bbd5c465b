"""How long axes are, and what a node costs, for the plan view: one chunk of one head. Adds up to what `memkit.compiler.cost` counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memkit.compiler.ir import Node, Op
from memkit.compiler.lengths import length_of

FREE = ("n", "g")  # chunks, and batch and heads in one: a drawing shows one of each


class Sizes:
    """Lengths of axes. `given`: axis letter -> length of a parameter's axis. Inside a loop, parameters are as long as its operands."""

    def __init__(self, given: Mapping[str, int]) -> None:
        self.given, self.outer = given, {}

    def enter(self, scan: Node) -> None:
        """Tell what the parameters of a loop's body stand for."""
        if scan.body is not None:
            self.outer.update(zip(scan.body.params, scan.args, strict=True))

    def length(self, node: Node, axis: str) -> int | None:
        """None for an axis whose length only a run decides."""
        if axis in FREE:
            return None
        found = length_of(node, axis)
        if isinstance(found, int):
            return found
        root, name = found
        if root.op is Op.PARAM:
            return self.length(self.outer[root], name) if root in self.outer else self.given.get(name)
        if root.op is Op.GET:
            return self._result(root, name)
        return self._made(root, name)

    def _result(self, get: Node, axis: str) -> int | None:
        loop = get.args[0]
        assert loop.body is not None
        self.enter(loop)
        index, results = get.attrs["index"], loop.body.results
        return self.length(results[index] if index < len(results) else loop.body.params[index - len(results)], axis)

    def _made(self, node: Node, axis: str) -> int | None:
        a, x = node.attrs, node.args[0]
        if node.op is Op.MERGE:
            return _times(self.length(x, a["axes"][0]), a["size"])
        if node.op is Op.SPLIT:
            whole = self.length(x, a["axis"])
            return None if whole is None else whole // a["size"]
        if node.op is Op.WINDOWS:
            whole = self.length(x, a["axis"])
            return None if whole is None else (whole - a["size"]) // a["step"] + 1
        if node.op is Op.BAND:
            rows = self.length(x, a["axis"])
            return None if rows is None else rows + a["size"] - 1
        return next((self.length(arg, axis) for arg in node.args if axis in arg.axes), None)

    def count(self, node: Node) -> int:
        """Numbers in a value, of one chunk and head; an axis of unknown length counts once."""
        return math.prod(self.length(node, axis) or 1 for axis in node.axes)

    def shape(self, node: Node) -> str:
        """`n,g,t64,k16`: axis letters, each with its length where it is known."""
        return ",".join(f"{axis}{self.length(node, axis) or ''}" for axis in node.axes) or "scalar"

    def flops(self, node: Node) -> int:
        """Floating point operations of one node: a multiply and an add count two, a pointwise function one an entry."""
        if node.op in (Op.POINTWISE, Op.DECAY):
            return self.count(node)
        if node.op in (Op.REDUCE, Op.FOLD):
            return sum(self.count(arg) for arg in node.args)
        if node.op is Op.EINSUM:
            a, b = node.args
            axes = {axis: self.length(a if axis in a.axes else b, axis) or 1 for axis in (*a.axes, *b.axes)}
            return math.prod(axes.values()) * (2 if set(axes) - set(node.axes) else 1)
        if node.op is Op.SOLVE:
            rows = self.length(node, node.attrs["cols" if node.attrs["transpose"] else "rows"]) or 1
            return rows * self.count(node)
        if node.op is Op.MASKED_PRODUCT:
            scores, mask, sums = self.fused(node)
            return scores + mask + sums
        return 0

    def fused(self, node: Node) -> tuple[int, int, int]:
        """The three steps of a masked product: scores, mask, sum over columns."""
        z, x, c, d = ({axis: self.length(arg, axis) or 1 for axis in arg.axes} for arg in node.args)
        full = {**z, **x}
        weighed = {axis: length for axis, length in {**full, **c}.items() if axis not in node.attrs["contract"]}
        return 2 * math.prod(full.values()), math.prod(weighed.values()), 2 * math.prod({**weighed, **d}.values())


def _times(a: int | None, b: int) -> int | None:
    return None if a is None else a * b
