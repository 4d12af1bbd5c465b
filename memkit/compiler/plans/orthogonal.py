"""Plan `orthogonal`: gradients of a chunk in parallel at its starting memory, then an optimizer that is not linear, token by token.

Equals the loop under grad_at: chunk. Only one token's weights and slots exist at a time.
"""

from __future__ import annotations

from memkit.compiler import ir
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts, Product
from memkit.compiler.ir import Graph, Node

from . import frozen
from .chunk import Chunk, Slots, chunked, plus
from .scan import token_loop, window_tokens


def refuse(facts: Facts) -> str | None:
    """Why this plan cannot run the spec, or None."""
    if isinstance(facts.products, str):
        return facts.products
    if facts.grad_at != "chunk" and not (facts.gradient_degree == 0 and facts.memory_linear):
        return f"the inner gradient is taken at every token (grad_at: {facts.grad_at}) and depends on the memory"
    return None if facts.finite else "the features exist only as a kernel"


def graphs(eq: Equations, facts: Facts) -> dict[str, Graph]:
    """The plan's graphs; see `chunked`."""
    return chunked(eq, facts, body)


def tile(facts: Facts) -> int:
    """Tokens a tile; no effect on results."""
    return 64


def body(chunk: Chunk) -> tuple[Node, dict[str, Node], Slots]:
    pairs = frozen.signals(chunk)
    seen: dict[str, Node] = {}
    for i, (_, signal, activation) in enumerate(pairs):
        seen[f"signal{i}"] = window_tokens(chunk, signal, f"signal{i}")
        seen[f"activation{i}"] = window_tokens(chunk, activation, f"activation{i}")
    places = [p for p, _, _ in pairs]

    def gradient(token: Chunk, _: dict[str, Node]) -> dict[str, Node]:
        return {n: _weight_gradient(token, n, places) for n in token.weights}

    return token_loop(chunk, seen, gradient)


def _weight_gradient(token: Chunk, name: str, places: list[Product]) -> Node:
    """Sum over the window of gate * signal activation^T, over all products with this weight."""
    out, into = token.eq.weights[name]
    gate, found = token.gate("window_gate"), []
    for i, place in enumerate(places):
        if place.weight == name:
            signal, activation = ir.mul(token.extra[f"signal{i}"], gate), token.extra[f"activation{i}"]
            over = ("j",) if "j" in signal.axes else ()
            found.append(ir.rename(ir.einsum(signal, activation, over=over), {place.out: out, place.into: into}))
    return plus(*found)
