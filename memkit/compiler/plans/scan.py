"""Plan `scan`: the loop itself, one token after another. Accepts everything with finite features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memkit.compiler import ir
from memkit.compiler.autodiff import vjp
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts
from memkit.compiler.ir import Graph, Node, Op

from .chunk import Chunk, Slots, chunked, state_nodes

Gradient = Callable[[Chunk, dict[str, Node]], dict[str, Node]]  # (token, anchor weights) -> inner gradient of each weight


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    return None if facts.finite else "the features exist only as a kernel"


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """The plan's graphs; see `chunked`."""
    return chunked(eq, facts, body)


def tile(facts: Facts) -> int:
    """Tokens a tile; no effect on results."""
    return 64


def body(chunk: Chunk) -> tuple[Node, dict[str, Node], Slots]:
    keys, values = window_tokens(chunk, chunk.keys, "keys"), window_tokens(chunk, chunk.values, "values")
    return token_loop(chunk, {"keys": keys, "values": values}, from_window)


def window_tokens(chunk: Chunk, x: Node, name: str) -> Node:
    """Window tokens [g, s, ..] as seen by each token: [g, t, j, ..], or [g, t, ..] for window 1."""
    return ir.rename(x, {"s": "t"}, name=name) if chunk.eq.window == 1 else ir.windows(x, "s", "t", "j", chunk.eq.window, name=name)


def from_window(token: Chunk, at: dict[str, Node]) -> dict[str, Node]:
    """The inner gradient by reverse mode on the prediction at each window token; weights may enter it in any way."""
    names = list(at)
    env = {**at, "f": token.feature(token.keys), "x": token.keys, **token.params}
    (prediction,) = ir.inline(token.eq.predict, env)
    signal = ir.mul(token.slope(prediction, token.values), token.gate("window_gate"))
    found = vjp([prediction], [ir.expand(signal, prediction)], [at[n] for n in names])
    return {n: ir.expand(ir.const(0.0), at[n]) if g is None else g for n, g in zip(names, found, strict=True)}


def token_loop(chunk: Chunk, seen: dict[str, Node], gradient: Gradient) -> tuple[Node, dict[str, Node], Slots]:
    """A SCAN over the chunk's tokens. `seen`: extra sequences [g, t, ..] that `gradient` needs, by the name of a Chunk field or of its
    own."""
    sequences = {"q": chunk.q, **seen, **{n: g for n, g in chunk.gates.items() if g.op is not Op.CONST}}
    inner = {n: ir.param(n, tuple(a for a in x.axes if a != "t")) for n, x in sequences.items()}
    carries = state_nodes(chunk.weights, chunk.slots)
    inner_state = {c: ir.param(c.attrs["name"], c.axes) for c in carries}
    consts = [*chunk.params.values(), *(chunk.anchor[n] for n in chunk.anchor)]
    inner_params = {n: ir.param(n, p.axes) for n, p in chunk.params.items()}
    inner_anchor = {n: ir.param(f"start_{n}", a.axes) for n, a in chunk.anchor.items()}
    token = replace(
        chunk,
        q=inner["q"],
        keys=inner.get("keys", chunk.keys),
        values=inner.get("values", chunk.values),
        gates={n: inner.get(n, g) for n, g in chunk.gates.items()},
        weights={n: inner_state[w] for n, w in chunk.weights.items()},
        slots={n: {s: inner_state[x] for s, x in own.items()} for n, own in chunk.slots.items()},
        anchor=inner_anchor,
        params=inner_params,
    )
    y, weights, slots = step(token, gradient)
    results = [
        ir.in_order(ir.expand(new, old), old.axes) for new, old in zip(state_nodes(weights, slots), inner_state.values(), strict=True)
    ]
    graph = Graph((*inner_state.values(), *inner.values(), *inner_params.values(), *inner_anchor.values()), (*results, y))
    found = ir.scan(graph, carries, list(sequences.values()), consts, axis="t")
    after, rest = {}, iter(found)
    for name in chunk.weights:
        after[name] = next(rest)
    after_slots = {n: {s: next(rest) for s in own} for n, own in chunk.slots.items()}
    return found[len(carries)], after, after_slots


def step(token: Chunk, gradient: Gradient) -> tuple[Node, dict[str, Node], Slots]:
    """One token: gradient, optimizer, retention, read."""
    eq = token.eq
    kept = {n: ir.inline(eq.retain[n], {"W": w, **token.gates})[0] for n, w in token.weights.items()}
    at = {"token": token.weights, "decayed": kept, "chunk": token.anchor}[eq.grad_at]
    grads = gradient(token, at)
    weights: dict[str, Node] = {}
    slots: Slots = {}
    for name in token.weights:
        env = {"grad": grads[name], **{f"slot_{s}": x for s, x in token.slots[name].items()}, **token.gates}
        move, *after = ir.inline(eq.update[name], env)
        weights[name] = ir.add(kept[name], move)
        slots[name] = dict(zip(eq.slots, after, strict=True))
    reading = token.weights if token.facts.read_before else weights
    (y,) = ir.inline(eq.predict, {**reading, "f": token.feature(token.q), "x": token.q, **token.params})
    return y, weights, slots
