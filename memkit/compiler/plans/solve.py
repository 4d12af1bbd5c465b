"""Plan `solve`: the exact token loop of a linear memory whose gradient is affine in the prediction, one triangular system a tile.

Row r = (t, j) is "token t looks at slot j of its window"; its signal d_r = d0_r + slope * (A_t z_r) with A_t the point where token t
takes its gradient. A_t holds the signals of earlier rows, so all d solve one unit-triangular system. Window 1 is DeltaNet's WY/UT form.
"""

from __future__ import annotations

from dataclasses import replace

from memkit.compiler import ir
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts, Product, retain_factor
from memkit.compiler.ir import Graph, Node, Op

from .chunk import (
    ZERO,
    Chunk,
    Coefficients,
    Slots,
    chunked,
    coefficients,
    is_const,
    kept_product,
    plus,
    read,
    times,
    update,
    weighed_scores,
    weight_product,
)


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    if facts.grad_at == "chunk":
        return "the inner gradient is taken once a chunk (grad_at: chunk)"
    if facts.gradient_slope is None:
        return "the inner gradient is not affine in the prediction with one slope"
    if not facts.memory_linear:
        return "the memory is not linear in one weight"
    if facts.optimizer is None:
        return "the inner optimizer is not linear in the gradient"
    if facts.retention == "other":
        return "retention is not a factor"
    if facts.retention == "diagonal" and facts.window > 1:
        return f"retention differs from feature to feature and the window is {facts.window}: only window 1 has a triangular form"
    if not facts.finite:
        return "the features exist only as a kernel"
    return None


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """The plan's graphs; see `chunked`."""
    return chunked(eq, facts, body)


def tile(facts: Facts) -> int:
    """Tokens a tile; no effect on results."""
    return 16 if facts.retention == "diagonal" else max(8, 64 // facts.window)


def rows(chunk: Chunk, x: Node) -> Node:
    """Window tokens [g, s, ..] as rows [g, r, ..]; with window 1 a row is a token."""
    if chunk.eq.window == 1:
        return ir.rename(x, {"s": "r"})
    return ir.merge(ir.windows(x, "s", "t", "j", chunk.eq.window), ("t", "j"), "r", chunk.eq.window)


def by_row(chunk: Chunk, x: Node) -> Node:
    """A value for each token [g, t, ..] repeated for its rows [g, r, ..]."""
    if "t" not in x.axes:
        return x
    if chunk.eq.window == 1:
        return ir.rename(x, {"t": "r"})
    return ir.merge(ir.expand(x, chunk.gate("window_gate")), ("t", "j"), "r", chunk.eq.window)


def by_column(chunk: Chunk, x: Node) -> Node:
    """Coefficients of tokens' gradients [.., u] as coefficients of rows [.., c], window gates included."""
    if is_const(x, 0.0):
        return ZERO
    gate = chunk.gate("window_gate")
    if chunk.eq.window == 1:
        return times(ir.rename(x, {"u": "c"}), gate if gate.op is Op.CONST else ir.rename(gate, {"t": "c"}))
    return ir.merge(ir.mul(x, ir.rename(gate, {"t": "u"})), ("u", "j"), "c", chunk.eq.window)


def body(chunk: Chunk) -> tuple[Node, dict[str, Node], Slots]:
    y, at, place, signal, columns = solved_tile(chunk)
    name = place.weight
    new, slot = update(chunk, name, at, by_column(chunk, at.now), by_column(chunk, at.slot), [(place, signal, columns)])
    return y, {name: new}, {name: {} if slot is None else {chunk.eq.slots[0]: slot}}


def solved_tile(chunk: Chunk) -> tuple[Node, Coefficients, Product, Node, Node]:
    """(y, coefficients, the one product, its signals [g, c, out], its activations [g, c, in]) of a tile."""
    facts, place = chunk.facts, chunk.facts.products[0]
    assert facts.optimizer is not None and isinstance(place, Product) and facts.gradient_slope is not None
    at = coefficients(chunk, facts.optimizer)
    point = decayed(chunk, at.before()) if facts.grad_at == "decayed" else at.before()
    blank = ir.expand(ZERO, chunk.values)
    free, _, operands = chunk.predict(chunk.feature(chunk.keys), chunk.keys, lambda *_: blank)
    z = rows(chunk, operands[place])
    fixed = rows(chunk, ir.expand(chunk.slope(free, chunk.values), chunk.values))
    signal = signals(chunk, place, point, z, fixed, facts.gradient_slope)
    reading = at.before() if facts.read_before else at
    columns = ir.rename(z, {"r": "c"})

    def product(where: Product, operand: Node) -> Node:
        return read(chunk, where, operand, reading, by_column(chunk, reading.now), signal, columns)

    y, _, _ = chunk.predict(chunk.feature(chunk.q), chunk.q, product)
    return y, at, place, signal, columns


def decayed(chunk: Chunk, point: Coefficients) -> Coefficients:
    """Coefficients of retain_t W_{t-1}."""
    (kept,) = ir.inline(Graph((), (retain_factor(chunk.eq),)), chunk.gates)
    return replace(point, a=times(kept, point.a), b=times(kept, point.b), now=times(kept, point.now))


def signals(chunk: Chunk, place: Product, point: Coefficients, z: Node, fixed: Node, slope: float) -> Node:
    """The rows' signals d [g, c, out]; affine in W and S, so that only three products stay inside the scan over tiles."""
    factor = ir.const(slope)
    matrix = by_row(chunk, by_column(chunk, point.now))
    scores = weighed_scores(chunk, place, z, ir.rename(z, {"r": "c"}), matrix)
    lower = ir.mul(ir.const(-slope), scores, name="L")

    def solved(right: Node, name: str) -> Node:
        return ir.solve(lower, right, "r", "c", name=name)

    if place.weight in chunk.eq.infinite:
        start = Coefficients(by_row(chunk, point.a), by_row(chunk, point.b), ZERO, ZERO, ZERO)
        seen = replace(chunk, past={key: rows(chunk, x) for key, x in chunk.past.items() if key[0] == "keys"})
        right = plus(fixed, times(factor, kept_product(seen, place, z, start, "keys")))
        return ir.rename(solved(right, "D"), {"r": "c"})
    axes = chunk.eq.weights[place.weight]
    terms = [solved(fixed, "D_fixed")]
    for kept, state in ((point.a, chunk.weights[place.weight]), (point.b, chunk.slot(place.weight))):
        if state is not None and slope and not is_const(kept, 0.0):
            operand = times(factor, times(by_row(chunk, kept), z))
            terms.append(weight_product(place, state, solved(operand, "D_state"), axes))
    return ir.rename(plus(*terms, name="D"), {"r": "c"})
