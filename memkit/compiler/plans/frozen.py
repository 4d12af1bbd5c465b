"""Plan `frozen`: all gradients of a chunk at its starting memory; every product with a weight is rewritten, whatever lies between.

Equals the loop under grad_at: chunk. Derivation: docs/derivations/frozen.md.
"""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.autodiff import vjp
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts, Product
from memkit.compiler.ir import Graph, Node

from .chunk import ONE, ZERO, Chunk, Coefficients, Slots, chunked, coefficients, named, read, times, update, weight_product, windowed


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    if isinstance(facts.products, str):
        return facts.products
    if facts.grad_at != "chunk":
        return f"the inner gradient is taken at every token (grad_at: {facts.grad_at}), not once a chunk"
    if facts.optimizer is None:
        return "the inner optimizer is not linear in the gradient"
    if facts.retention == "other":
        return "retention is not a factor"
    if not facts.finite:
        return "the features exist only as a kernel"
    return None


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """The plan's graphs; see `chunked`."""
    return chunked(eq, facts, body)


def tile(facts: Facts) -> int:
    """Unused: the chunk is part of the meaning."""
    return 1


Pair = tuple[Product, Node, Node]  # a product with a weight, its inner gradient [g, s, out], its activations [g, s, in]


def signals(chunk: Chunk, factor: Node = ONE) -> list[Pair]:
    """The inner gradient of every product with a weight, at `factor` times the anchor."""
    weights = chunk.eq.weights

    def at_anchor(place: Product, operand: Node) -> Node:
        if place.weight in chunk.eq.infinite:
            past = chunk.past["keys", "weight", place.weight]
            return times(factor, ir.rename(past, {weights[place.weight][0]: place.out}))
        return times(factor, weight_product(place, chunk.anchor[place.weight], operand, weights[place.weight]))

    prediction, made, operands = chunk.predict(chunk.feature(chunk.keys), chunk.keys, at_anchor)
    places = list(made)
    found = vjp([prediction], [chunk.slope(prediction, chunk.values)], [made[p] for p in places])
    return [
        (p, ZERO if d is None else named(d, f"D_{p.weight}"), named(operands[p], f"Z_{p.weight}"))
        for p, d in zip(places, found, strict=True)
    ]


def body(chunk: Chunk) -> tuple[Node, dict[str, Node], Slots]:
    y, at, table, slot_table, pairs = frozen_chunk(chunk, signals(chunk))
    return y, *updates(chunk, at, table, slot_table, pairs)


def frozen_chunk(chunk: Chunk, pairs: list[Pair]) -> tuple[Node, Coefficients, Node, Node, list[Pair]]:
    """(y, coefficients, C, the slot's C, pairs) of a chunk with given gradients."""
    assert chunk.facts.optimizer is not None
    at = coefficients(chunk, chunk.facts.optimizer)
    table, slot_table = windowed(chunk, at.now, "C"), windowed(chunk, at.slot, "C_slot")
    by_place = {p: (d, z) for p, d, z in pairs}
    reading = at.before() if chunk.facts.read_before else at
    read_table = windowed(chunk, reading.now, "C_read") if chunk.facts.read_before else table
    y, _, _ = chunk.predict(chunk.feature(chunk.q), chunk.q, lambda place, z: read(chunk, place, z, reading, read_table, *by_place[place]))
    return y, at, table, slot_table, pairs


def updates(chunk: Chunk, at: Coefficients, table: Node, slot_table: Node, pairs: list[Pair]) -> tuple[dict[str, Node], Slots]:
    """All finite weights and slots after the chunk."""
    weights: dict[str, Node] = {}
    slots: Slots = {}
    for name in chunk.weights:
        weights[name], slot = update(chunk, name, at, table, slot_table, [x for x in pairs if x[0].weight == name])
        slots[name] = {} if slot is None else {chunk.eq.slots[0]: slot}
    return weights, slots
