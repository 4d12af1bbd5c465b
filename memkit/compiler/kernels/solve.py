"""Unit-triangular systems: forward substitution in blocks of 16 rows, each block finished row by row."""

from __future__ import annotations

from contextlib import ExitStack

from memkit.compiler.ir import Node

from .memory import Buffer, Index, both
from .sums import operand
from .tile import Indices, Tiles

BLOCK = 16


def solve(k: Tiles, node: Node, out: Buffer, at: Indices, width: str) -> None:
    """Write the solution of a SOLVE, a tile of its columns at a time. `at` has the indices of all axes but the rows and `width`."""
    lower, right = node.args
    rows, cols, back = node.attrs["rows"], node.attrs["cols"], node.attrs["transpose"]
    length = k.length[node]
    count = length[rows].text
    with ExitStack() as loops:
        here = dict(at)
        here[width], block = loops.enter_context(k.along(width, length[width], k.config.cols, "col"))
        lane = k.lane(BLOCK)
        done = k.w.name("block")
        loops.enter_context(k.w.block(f"for {done} in range(0, ({count} + {BLOCK - 1}) // {BLOCK}):"))
        first = k.w.let("first", f"(({count} - 1) // {BLOCK} - {done}) * {BLOCK} + zero" if back else f"{done} * {BLOCK} + zero")
        row = _row(k, f"{first} + {lane}", "[:, None]", count, 0)
        loops.enter_context(k.shaped(2, BLOCK, block))
        x = k.w.let(node.name or "solved", operand(k, right, {**here, rows: row}))
        _earlier(k, node, out, here, (x, row, done, width), back)
        step = k.w.name("step")
        with k.w.block(f"for {step} in range(0, {BLOCK}):"):
            at_row = k.w.let("column", f"{first} + {BLOCK - 1} - {step}" if back else f"{first} + {step}")
            known = k.w.let("known", f"tl.sum(tl.where({row.text} == {at_row}, {x}, 0.0), 0)")
            column = Index(at_row, frozenset(), f"({at_row} < {count})")
            pair = {rows: column, cols: row} if back else {rows: row, cols: column}
            factor = k.value(lower, {**here, **pair})
            beyond = both(f"({row.text} {'<' if back else '>'} {at_row})", row.guard, column.guard)
            k.w.line(f"{x} -= tl.where({beyond}, {factor.text}, 0.0) * {known}[None, :]")
        k.write(out, {**here, rows: row}, _value(x))
        k.barrier()


def _earlier(k: Tiles, node: Node, out: Buffer, here: Indices, block: tuple[str, Index, str, str], back: bool) -> None:
    """Take what the blocks solved before contribute out of a block's right-hand side."""
    x, row, done, width = block
    rows, cols = node.attrs["rows"], node.attrs["cols"]
    count, lane = k.length[node][rows].text, k.lane(BLOCK)
    before = k.w.name("before")
    with k.w.block(f"for {before} in range(0, {done}):"):
        start = f"(({count} - 1) // {BLOCK} - {before}) * {BLOCK}" if back else f"{before} * {BLOCK}"
        across, down = _row(k, f"{start} + {lane}", "[None, :]", count, 1), _row(k, f"{start} + {lane}", "[:, None]", count, 0)
        with k.shaped(2, BLOCK, BLOCK):
            pair = {rows: across, cols: row} if back else {rows: row, cols: across}
            left = operand(k, node.args[0], {**here, **pair})
        found = k.read(out, {**here, rows: down}, "earlier")
        k.w.line(f"{x} -= tl.dot({left}, {found.text}, input_precision=S, out_dtype=F)")


def _row(k: Tiles, text: str, form: str, count: str, dim: int) -> Index:
    name = k.w.let("row", f"({text}){form}")
    return Index(name, frozenset({dim}), f"({name} < {count})")


def _value(text: str):
    from .memory import Value

    return Value(text, frozenset({0, 1}))
