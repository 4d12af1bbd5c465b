"""What the last tokens of a chunk add to a wide state waits for the chunk in whose windows they are once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

from memkit.compiler import ir
from memkit.compiler.ir import Graph, Node, Op
from memkit.compiler.symmetric import summed

from .loops import Carry, Loop, put_in

DEAR = 2  # times what it takes to keep a state apart from what it waits for: a state wider than that is
LONG = 8  # times the tokens that wait: in chunks longer than that they are too few to matter
SLOT = "j"  # the axis of a window's slots
NONE = ir.const(0.0)


class Update(NamedTuple):
    """A state W that goes to a W + sum over s of m_s x_s^T, and is read as W x_s."""

    a: Node  # [g]
    m: Node  # [g, s, ..]
    x: Node  # [g, s, wide]; no state enters it
    kept: Node  # a W
    read: Node  # W x


def delay(graph: Graph, window: int, chunk: int, sizes: Mapping[str, int]) -> Graph:
    """Keep of a wide state W what comes without a chunk's last window - 1 tokens, V, and what these add, p; to run before kernel_trick.

    They are the first tokens j of the next chunk's windows, and there add to W again: in the same product. So no chunk adds up, or reads
    at, more than its own number of tokens, whatever the window.

    rewrite: W y                      ->  V y + sum over j of p_j (x_j . y)
             a W + sum of m_s x_s^T   ->  V: a V + sum of (m_s + a p_s) x_s^T over all tokens but the last, p: these of the last
             W x_j of the next chunk  ->  a (W x_j) + sum of m_s (x_s . x_j)
    keeps: results up to rounding, where chunks follow each other: the tokens before a chunk are the last of the one before it
    """
    scan = next((n for n in graph.nodes() if n.op is Op.SCAN), None)
    if scan is None or window == 1 or chunk > LONG * (window - 1):
        return graph
    loop = Loop.of(scan)
    for place, carry in enumerate(loop.carries):
        update = _update(loop, carry)
        if update is not None and (window - 1) * sizes.get(summed(update.read)[0], 0) > DEAR * (chunk + window) * window:
            return delay(_delayed(graph, loop, place, update, window), window, chunk, sizes)
    return graph


def _update(loop: Loop, carry: Carry) -> Update | None:
    """How a state is updated, if that is the only thing besides reads that becomes of it."""
    moving, reads, kept = _dependants(loop), [], []
    for node in loop.body.nodes():
        if carry.param in node.args:
            (kept if node.op is Op.POINTWISE else reads).append(node)
    if len(kept) != 1 or carry.param in loop.body.results or not all(_is_read(node, carry, moving) for node in reads):
        return None
    windowed = [node for node in reads if "s" in node.axes]
    if len(windowed) != 1 or any(summed(node) != summed(windowed[0]) for node in reads):
        return None
    (read,), (scaled,) = windowed, kept
    x, a = _other(read, carry.param), _other(scaled, carry.param)
    if scaled.attrs["fn"] != "mul" or not set(a.axes) <= {"g"} or carry.result.op is not Op.POINTWISE or scaled not in carry.result.args:
        return None
    added = _other(carry.result, scaled)
    if carry.result.attrs["fn"] != "add" or added.op is not Op.EINSUM or x not in added.args or summed(added) != ["s"]:
        return None
    m = _other(added, x)
    return Update(a, m, x, scaled, read) if set(m.axes) == set(read.axes) else None


def _other(node: Node, one: Node) -> Node:
    return node.args[1] if node.args[0] is one else node.args[0]


def _is_read(node: Node, carry: Carry, moving: set[Node]) -> bool:
    """Whether a node is the state times what no state enters, summed over one axis."""
    if node.op is not Op.EINSUM or node.args[0] is node.args[1] or len(summed(node)) != 1:
        return False
    y = _other(node, carry.param)
    return y not in moving and {*summed(node), "g"} <= set(y.axes)


def _dependants(loop: Loop) -> set[Node]:
    """What the states enter."""
    found = {c.param for c in loop.carries}
    for node in loop.body.nodes():
        if any(a in found for a in node.args):
            found.add(node)
    return found


def _slots(node: Node, end: int, window: int) -> Node:
    """A value at as many tokens as a window has: at the first that the chunk sees (end 0), or at the last (-1)."""
    return ir.select(ir.windows(node, "s", "t", SLOT, window), "t", end)


def _own(node: Node, slot: int, window: int) -> Node:
    """A value at as many tokens as the chunk has: without the first that it sees (slot -1), or without the last (0)."""
    return ir.select(ir.windows(node, "s", "t", SLOT, window), SLOT, slot)


def _laid(*parts: tuple[Node, str, int], like: Node, window: int) -> Node:
    """Values of some of the tokens that a chunk sees, laid out as one of all, 0 elsewhere: of its own (SLOT, -1), of a window (t, 0)."""
    shape = ir.windows(like, "s", "t", SLOT, window)
    placed = [ir.place(node, shape, axis, index) for node, axis, index in parts]
    both = reduce(lambda a, b: ir.add(a, b), placed)
    return ir.fold(both, like, {"axis": "s", "outer": "t", "inner": SLOT, "size": window, "step": 1})


def _next(node: Node) -> Node:
    """From the last tokens of a chunk to the tokens before the next: one fewer, so the last slot is 0."""
    return ir.shift(node, NONE, SLOT, -1)


def _delayed(graph: Graph, loop: Loop, place: int, update: Update, window: int) -> Graph:
    """The graph with the state apart from what waits, in the loop, and whole again behind it."""
    carry, axes = loop.carries[place], _axes(update, SLOT)
    begun = _next(ir.shift(ir.einsum(carry.start, _outside(loop, update.x, 0, window), axes), NONE, SLOT))
    new = _inside(loop, place, update, window, begun)
    scan = new.rebuilt()
    waiting = ir.shift(ir.get(scan, new.index("carry", len(loop.carries)), axes), NONE, SLOT)
    rest = ir.einsum(waiting, _outside(loop, update.x, -1, window), carry.result.axes)
    return put_in(graph, loop, new, scan, {("carry", place): ir.add(ir.get(scan, place, carry.result.axes), rest)})


def _axes(update: Update, tokens: str) -> tuple[str, ...]:
    """The axes of a read, with other tokens than those that the chunk sees."""
    return ir.order_axes([a for a in update.read.axes if a != "s"], (tokens,))


def _inside(loop: Loop, place: int, update: Update, window: int, begun: Node) -> Loop:
    """The loop with two carries more: p, what waits, from 0; and the next chunk's reads W x_j, from `begun`."""
    carry, (wide,), axes = loop.carries[place], summed(update.read), _axes(update, SLOT)
    late, ahead = (ir.param(f"{carry.param.attrs['name']}_{word}", axes) for word in ("late", "ahead"))
    first, last = (_slots(update.x, end, window) for end in (0, -1))

    def read(y: Node, like: tuple[str, ...]) -> Node:
        scores = ir.einsum(first, y, over=(wide,))
        return ir.add(ir.einsum(carry.param, y, like), ir.einsum(late, scores, like))

    shape = ir.in_order(ir.mul(ir.select(update.x, wide, 0), ir.select(carry.param, wide, 0)), update.read.axes)
    own = read(_own(update.x, -1, window), _axes(update, "t"))
    joined = _laid((own, SLOT, -1), (ahead, "t", 0), like=shape, window=window).replace(name=update.read.name)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node is update.read:
            return joined
        if node.op is Op.EINSUM and carry.param in node.args:
            return read(_other(node, carry.param), node.axes)
        return node if args == node.args else node.replace(args=args)

    body = ir.rebuild(Graph(loop.body.params, (*loop.body.results, update.m)), change)
    m, same = body.results[-1], loop.with_body(Graph(body.params, body.results[:-1]), loop.slices, loop.consts)
    owed = ir.add(m, _laid((ir.mul(update.a, late), "t", 0), like=m, window=window))
    added = ir.einsum(_own(owed, 0, window), _own(update.x, 0, window), carry.result.axes)
    seen = ir.einsum(m, ir.einsum(update.x, last, over=(wide,)), axes)
    carries = list(same.carries)
    carries[place] = carry._replace(result=ir.add(update.kept, added).replace(name=carry.result.name))
    waits = Carry(ir.expand(NONE, begun), late, _next(_slots(owed, -1, window)))
    reads = Carry(begun, ahead, _next(ir.add(ir.mul(update.a, _slots(joined, -1, window)), seen)))
    return replace(same, carries=(*carries, waits, reads))


def _outside(loop: Loop, x: Node, end: int, window: int) -> Node:
    """What no state enters, at the first tokens that the first chunk sees (end 0), or at the last of the last chunk (-1)."""
    given = {i.param.attrs["name"]: ir.select(i.value, loop.axis, end) for i in loop.slices}
    given = {name: ir.rename(_slots(i, end, window), {SLOT: "s"}) if "s" in i.axes else i for name, i in given.items()}
    (found,) = ir.inline(Graph((), (x,)), {**given, **{i.param.attrs["name"]: i.value for i in loop.consts}})
    return ir.rename(found, {"s": SLOT})
