"""Plan `orthogonal`: an optimizer that is not linear, on gradients taken once a chunk: every token's slot at once, a few tokens at a time.

Equals the loop under grad_at: chunk. Slots S_t and weights W_t of a block of tokens exist together, never those of a whole chunk.
What C++ makes of Newton-Schulz: docs/derivations/orthogonal.md.
"""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts, Product, retain_factor
from memkit.compiler.ir import Graph, Node

from . import frozen
from .chunk import ONE, ZERO, Chunk, Slots, decay, is_const, last, looped, one_chunk, plus, running, times, weight_product, windowed


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    if isinstance(facts.products, str):
        return facts.products
    if facts.grad_at != "chunk" and not (facts.gradient_degree == 0 and facts.memory_linear):
        return f"the inner gradient is taken at every token (grad_at: {facts.grad_at}) and depends on the memory"
    if facts.slot is None or facts.step is None:
        return "the inner optimizer's move is not a function of one slot that is linear in the gradient"
    if facts.retention == "other":
        return "retention is not a factor"
    return None if facts.finite else "the features exist only as a kernel"


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """`resume`, a few tokens of one chunk, whose anchor is an input."""
    inner, carries, slices, consts = one_chunk(eq, facts, body, facts.grad_at == "chunk")
    y, states = inner.results[-1], inner.results[:-1]
    return {"resume": Graph((*slices, *carries, *consts), (y, *states), ("y", *inner.labels[:-1]))}


def blocks(eq: Equations, facts: Facts) -> Graph:
    """`resume` for several blocks of tokens of one chunk, one after another: a SCAN over blocks with inputs along the axis n."""
    return looped(*one_chunk(eq, facts, body, facts.grad_at == "chunk"))


def tile(facts: Facts) -> int:
    """Tokens a tile; no effect on results."""
    return 64


def body(chunk: Chunk) -> tuple[Node, dict[str, Node], Slots]:
    facts, pairs = chunk.facts, frozen.signals(chunk)
    assert facts.slot is not None and facts.step is not None
    m, w = ir.inline(Graph((), facts.slot), chunk.gates)
    trail = decay(chunk, m, "M")
    table = windowed(chunk, times(trail, w if not w.axes else ir.rename(w, {"t": "u"})), "C_slot")
    left = ZERO if is_const(m, 0.0) else running(chunk.over_time(m), trail)
    weights: dict[str, Node] = {}
    slots: Slots = {}
    after: dict[str, Node] = {}
    for name, start in chunk.weights.items():
        slot = _slots(chunk, name, left, table, pairs)
        (move,) = ir.inline(facts.step[name], {"slot_after": slot, **chunk.gates})
        after[name] = _weights(chunk, name, start, move)
        weights[name] = last(after[name])
        slots[name] = dict.fromkeys(chunk.slots[name], last(slot))
    reading = {n: ir.shift(x, chunk.weights[n], "t") for n, x in after.items()} if facts.read_before else after

    def product(place: Product, operand: Node) -> Node:
        return weight_product(place, reading[place.weight], operand, chunk.eq.weights[place.weight])

    y, _, _ = chunk.predict(chunk.feature(chunk.q), chunk.q, product)
    return y, weights, slots


def _slots(chunk: Chunk, name: str, left: Node, table: Node, pairs: list[frozen.Pair]) -> Node:
    """S_t of every token [g, t, out, in]."""
    out, into = chunk.eq.weights[name]
    start, found = chunk.slot(name), []
    if start is not None and not is_const(left, 0.0):
        found.append(times(left, start))
    for place, signal, activation in pairs:
        if place.weight == name:
            gradient = ir.einsum(ir.mul(table, signal), activation, over=("s",))
            found.append(ir.rename(gradient, {place.out: out, place.into: into}))
    return plus(*found)


def _weights(chunk: Chunk, name: str, start: Node, move: Node) -> Node:
    """W_t of every token [g, t, out, in] from all moves: W_t = a_t W + sum_u R[t, u] move_u."""
    (kept,) = ir.inline(Graph((), (retain_factor(chunk.eq),)), chunk.gates)
    keep = decay(chunk, kept, "R")
    a = ONE if is_const(kept, 1.0) else running(chunk.over_time(kept), keep)
    names = {"f": chunk.eq.weights[name][1]}
    keep, a = ir.rename(keep, names), ir.rename(a, names)
    move = chunk.over_time(move) if "t" in move.axes else ir.expand(move, chunk.clock())
    return plus(times(a, start), ir.einsum(keep, ir.rename(move, {"t": "u"}), over=("u",)))
