"""Where matrices along time are zero by their making: above the diagonal, or outside a window. Products leave that out."""

from __future__ import annotations

from typing import NamedTuple

from memkit.compiler.ir import Node, Op
from memkit.compiler.kernels import keep

ENDLESS = 1 << 30


class Strip(NamedTuple):
    """An entry may differ from zero only where least <= column - row <= most."""

    least: int = -ENDLESS
    most: int = ENDLESS

    def within(self, other: Strip) -> Strip:
        return Strip(max(self.least, other.least), min(self.most, other.most))

    def around(self, other: Strip) -> Strip:
        return Strip(min(self.least, other.least), max(self.most, other.most))

    def then(self, other: Strip) -> Strip:
        """Of a matrix product."""
        return Strip(max(self.least + other.least, -ENDLESS), min(self.most + other.most, ENDLESS))

    def turned(self) -> Strip:
        return Strip(-self.most, -self.least)

    def share(self, rows: int, cols: int, each: int) -> float:
        """Of a matrix, in blocks of `each` rows: what is left without what is zero in all rows of a block."""
        blocks = range(0, rows, each)
        return sum(max(0, min(cols, x + each + self.most) - max(0, x + self.least)) for x in blocks) / (cols * len(blocks))


ANYWHERE = Strip()


def strip(node: Node, row: str, col: str, known: dict[tuple[Node, str, str], Strip] | None = None) -> Strip:
    """Where `node` may differ from zero, as a matrix with these axes."""
    known = {} if known is None else known
    if row not in node.axes or col not in node.axes:
        return ANYWHERE
    if (node, row, col) not in known:
        known[node, row, col] = _strip(node, row, col, known)
    return known[node, row, col]


def _strip(node: Node, row: str, col: str, known: dict[tuple[Node, str, str], Strip]) -> Strip:
    a = node.attrs
    if node.op in MADE:
        rows, cols, own = MADE[node.op](a)
        own = own if (rows, cols) == (row, col) else own.turned() if (cols, rows) == (row, col) else ANYWHERE
        return own if node.op is not Op.TRIL else own.within(strip(node.args[0], row, col, known))
    if node.op is Op.RENAME:
        back = {new: old for old, new in a["names"].items()}
        return strip(node.args[0], back.get(row, row), back.get(col, col), known)
    if node.op is Op.EINSUM:
        found = [strip(x, row, col, known) for x in node.args]
        for y in keep.contracted(node):
            found += [strip(x, row, y, known).then(strip(z, y, col, known)) for x, z in (node.args, node.args[::-1])]
        return _all_of(found)
    if node.op is not Op.POINTWISE:
        return ANYWHERE
    own = [strip(x, row, col, known) for x in node.args]
    if a["fn"] in ("add", "sub"):
        return own[0].around(own[1])
    return _all_of(own) if a["fn"] == "mul" else own[0] if a["fn"] in ("neg", "div") else ANYWHERE


def _all_of(strips: list[Strip]) -> Strip:
    found = ANYWHERE
    for each in strips:
        found = found.within(each)
    return found


# ---- rows, columns and strip of what makes such matrices

MADE = {
    Op.DECAY: lambda a: (a["axis"], a["new"], Strip(most=0)),
    Op.BAND: lambda a: (a["axis"], a["new"], Strip(0, a["size"] - 1)),
    Op.TRIL: lambda a: (a["rows"], a["cols"], Strip(most=a["diagonal"])),
}
