"""Plan `span`: features that exist only as a kernel. Weights over them are kept as coefficients on the keys seen so far.

W phi(x) = sum_n d_n kernel(k_n, x). One graph runs a chunk, given what earlier keys contribute (`past_..`); a second one, `history`,
computes that contribution block by block, so that no [T, T] tensor exists. The chunk itself is the `solve` tile for a linear memory at
every token, else the `frozen` chunk; a deep memory with a gradient at every token is a chunk of one token.
"""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts, Product, retain_factor
from memkit.compiler.ir import Graph, Node

from . import frozen
from .chunk import ONE, Chunk, chunk_params, is_const, last, plus, state_nodes, times
from .frozen import frozen_chunk, updates
from .solve import by_column, solved_tile


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    if facts.finite:
        return "the features are finite, so the memory has a state of fixed size"
    if isinstance(facts.products, str):
        return facts.products
    if not facts.features_direct:
        return "the features meet something else before a weight, which their kernel cannot express"
    if facts.optimizer is None:
        return "the inner optimizer is not linear in the gradient"
    if facts.retention not in ("kept", "scalar"):
        return "retention is not one factor a head"
    return None


def exact_tiles(facts: Facts) -> bool:
    """Whether a tile of any size gives the token loop: a linear memory, gradients affine in the prediction."""
    return facts.grad_at != "chunk" and facts.memory_linear and facts.gradient_slope is not None


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """`step`, one chunk, and `history`, what one block of older keys contributes."""
    return {"step": lower(eq, facts), "history": history(eq)}


def tile(facts: Facts) -> int:
    """Tokens a chunk; no effect on results, but where it must be 1."""
    return min(64, max(8, 256 // facts.window)) if exact_tiles(facts) else 1


def lower(eq: Equations, facts: Facts) -> Graph:
    """The graph of one chunk; inputs end with the past's contributions, results with the chunk's own coefficients and what is left of
    older ones. Contributions to the keys' products are inputs only where the gradient needs the memory's answer to the keys."""
    chunk, carries, slices, consts = chunk_params(eq, facts, facts.grad_at == "chunk")
    past = past_nodes(eq, facts)
    chunk = Chunk(**{**vars(chunk), "past": past})
    if exact_tiles(facts):
        y, weights, slots, entries, at = _solved(chunk)
    else:
        y, weights, slots, entries, at = _frozen(chunk)
    results = [ir.in_order(ir.expand(new, old), old.axes) for new, old in zip(state_nodes(weights, slots), carries, strict=True)]
    flat = [ir.expand(x, like) for pair in entries for x, like in pair]
    left = [ir.expand(last(x), ir.select(chunk.clock(), "t", -1)) for x in ([at.a, at.b, at.m] if eq.slots else [at.a])]
    labels = ("y", *(c.attrs["name"] for c in carries), *(f"entry_{i}" for i in range(len(flat))), *(f"left_{i}" for i in range(len(left))))
    y = ir.expand(y, ir.einsum(chunk.q, chunk.values, ("g", "t", "v"))).replace(name="y")
    results = [y, *results, *flat, *left]
    read = set(Graph((), tuple(results)).nodes())
    lookers = {"q"} | {whose for (whose, _, _), node in past.items() if node in read}
    seen = [node for (whose, _, _), node in past.items() if whose in lookers]
    return Graph((*slices, *carries, *consts, *seen), tuple(results), labels)


def keys_look(step: Graph) -> bool:
    """Whether the keys of a chunk, and not its queries alone, need what earlier keys contribute."""
    return any(p.attrs["name"].startswith("past_keys_") for p in step.params)


def past_nodes(eq: Equations, facts: Facts) -> dict[tuple[str, str, str], Node]:
    """(whose, part, weight) -> what earlier keys contribute to its products: whose is "q" or "keys", part "weight" or "slot"."""
    found = {}
    parts = ("weight", "slot") if eq.slots else ("weight",)
    for name in eq.infinite:
        for whose, axis in (("q", "t"), ("keys", "s")):
            for part in parts:
                found[whose, part, name] = ir.param(f"past_{whose}_{part}_{name}", ("g", axis, eq.weights[name][0]))
    return found


def _solved(chunk: Chunk):
    y, at, place, signal, _ = solved_tile(chunk)
    tables = [by_column(chunk, at.now), *([by_column(chunk, at.slot)] if chunk.eq.slots else [])]
    entries = [[(_columns(chunk, times(last(t), signal)), chunk.values) for t in tables]]
    assert isinstance(place, Product)
    return y, {}, {}, entries, at


def _columns(chunk: Chunk, rows: Node) -> Node:
    """Values of rows (t, j), added up for each window token s = t + j."""
    if chunk.eq.window == 1:
        return ir.rename(rows, {"c": "s"})
    parts = ir.split(rows, "c", ("t", "j"), chunk.eq.window)
    return ir.fold(parts, chunk.values, {"axis": "s", "outer": "t", "inner": "j", "size": chunk.eq.window, "step": 1})


def _frozen(chunk: Chunk):
    factor = ONE
    if chunk.facts.grad_at == "decayed":
        (kept,) = ir.inline(Graph((), (retain_factor(chunk.eq),)), chunk.gates)
        factor = kept if is_const(kept, 1.0) else ir.select(chunk.over_time(kept), "t", 0)
    pairs = frozen.signals(chunk, factor)
    y, at, table, slot_table, _ = frozen_chunk(chunk, pairs)
    weights, slots = updates(chunk, at, table, slot_table, pairs)
    tables = [table, *([slot_table] if chunk.eq.slots else [])]
    entries = []
    for name in chunk.eq.infinite:
        out = chunk.eq.weights[name][0]
        own = [ir.rename(d, {p.out: out}) for p, d, _ in pairs if p.weight == name]
        like = chunk.past["keys", "weight", name]
        entries.append([(plus(*(times(last(t), d) for d in own)), like) for t in tables])
    return y, weights, slots, entries, at


def history(eq: Equations) -> Graph:
    """What one block of older keys contributes: x [g, t, k], keys [g, h, k], entries [g, h, out], scales [g, h] -> [g, t, out] each.

    A weight is scale_own * entry + scale_slot * slot entry; a slot is scale_left * slot entry.
    """
    if eq.kernel is None:
        raise ir.GraphError("infinite features without a kernel")
    params = {n: ir.param(n, ("g", *axes)) for n, axes in eq.params.items()}
    x, keys = ir.param("x", ("g", "t", "k")), ir.param("keys", ("g", "h", "k"))
    (scores,) = ir.inline(eq.kernel, {"a": x, "b": keys, **params})
    scales = [ir.param(n, ("g", "h")) for n in (("scale_own", "scale_slot", "scale_left") if eq.slots else ("scale_own",))]
    entries, results = [], []
    for name in eq.infinite:
        out = eq.weights[name][0]
        own = ir.param(f"entry_{name}", ("g", "h", out))
        entries.append(own)
        weight = ir.mul(scales[0], own)
        if eq.slots:
            slot = ir.param(f"entry_slot_{name}", ("g", "h", out))
            entries.append(slot)
            weight = ir.add(weight, ir.mul(scales[1], slot))
        results.append(ir.einsum(scores, weight, over=("h",)))
        if eq.slots:
            results.append(ir.einsum(scores, ir.mul(scales[2], slot), over=("h",)))
    labels = tuple(f"past_{i}" for i in range(len(results)))
    return Graph((x, keys, *entries, *scales, *params.values()), tuple(results), labels)
