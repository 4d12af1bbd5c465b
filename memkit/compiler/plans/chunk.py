"""What all chunked plans share: the inputs of a chunk, its decay and window coefficients, and a read with per-token weights.

Inside a chunk every weight is  W_t = a_t W + b_t S + sum_s C[t, s] d_s z_s^T  for signals d and activations z of the window's tokens,
so a product of W_t with activations never needs W_t itself. C = R M diag(step) Gamma: R from the retention, M from the optimizer's
slot, Gamma the sliding window's band of gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from memkit.compiler import ir
from memkit.compiler.build import Equations
from memkit.compiler.facts import Facts, Linear, Product, retain_factor
from memkit.compiler.ir import Graph, Node, Op

ONE, ZERO = ir.const(1.0), ir.const(0.0)


def is_const(node: Node | None, value: float) -> bool:
    return node is not None and node.op is Op.CONST and node.attrs["value"] == value


def times(a: Node, b: Node, name: str = "") -> Node:
    """a * b, with the constants 0 and 1 folded at once."""
    if is_const(a, 1.0):
        return b
    if is_const(b, 1.0):
        return a
    if is_const(a, 0.0) or is_const(b, 0.0):
        return ZERO
    return ir.mul(a, b, name=name)


def plus(*terms: Node | None, name: str = "") -> Node:
    """The sum of the terms that are there and not 0."""
    found = [t for t in terms if t is not None and not is_const(t, 0.0)]
    if not found:
        return ZERO
    total = found[0]
    for term in found[1:]:
        total = ir.add(total, term)
    return total.replace(name=name) if name and total.op is Op.POINTWISE else total


def named(node: Node, name: str) -> Node:
    """The same value under a name for the emitted code; inputs and constants keep theirs."""
    return node if node.op in (Op.PARAM, Op.CONST, Op.TENSOR) or node.name else node.replace(name=name)


@dataclass(frozen=True)
class Chunk:
    """The nodes a chunk starts from. Axes: q [g, t, k], keys [g, s, k], values [g, s, v], gates [g, t, ..], weights [g, out, in]."""

    eq: Equations
    facts: Facts
    q: Node
    keys: Node
    values: Node
    gates: dict[str, Node]
    weights: dict[str, Node]
    slots: dict[str, dict[str, Node]]  # weight name -> slot name -> slot
    anchor: dict[str, Node]  # where the gradient is taken; the weights themselves unless a chunk is resumed
    params: dict[str, Node]
    past: dict[tuple[str, str, str], Node] = field(default_factory=dict)  # infinite weights: see `past_nodes`

    def gate(self, name: str) -> Node:
        return self.gates[name]

    def slot(self, weight: str) -> Node | None:
        """The one slot of a weight under a linear optimizer, if it has one."""
        return next(iter(self.slots.get(weight, {}).values()), None)

    def clock(self) -> Node:
        """A node with axes [g, t]: what a constant is stretched over."""
        return ir.select(self.q, "k", 0)

    def over_time(self, x: Node) -> Node:
        """x with a token axis, stretched where it is a constant."""
        return x if "t" in x.axes else ir.expand(x, self.clock())

    # ---- features and predictions

    def feature(self, x: Node, name: str = "") -> Node:
        """phi(x) for x [.., k]: [.., f]; x itself where phi exists only as a kernel, since then only its owner can use it."""
        if self.eq.features is None:
            return x
        (out,) = ir.inline(self.eq.features, {"x": x, **self.params})
        return out.replace(name=name) if name and out is not x else out

    def slope(self, prediction: Node, target: Node) -> Node:
        """d loss / d prediction."""
        (out,) = ir.inline(self.eq.slope, {"p": prediction, "target": target})
        return out

    def predict(self, f: Node, x: Node, product: Callable[[Product, Node], Node]) -> tuple[Node, dict[Product, Node], dict[Product, Node]]:
        """The prediction with every product of a weight made by `product(place, operand)`; also the products and their operands."""
        graph = self.eq.predict
        places = {p.node: p for p in self.facts.products if isinstance(p, Product)}
        env = {"f": f, "x": x, **self.params}
        new: dict[Node, Node] = {}
        made: dict[Product, Node] = {}
        operands: dict[Product, Node] = {}
        for node in graph.nodes():
            if node.op is Op.PARAM:
                new[node] = env.get(node.attrs["name"], node)
            elif node in places:
                place = places[node]
                operands[place] = x if place.weight in self.eq.infinite else new[place.operand]
                new[node] = made[place] = product(place, operands[place])
            elif any(a.op is Op.PARAM and a.attrs["name"] in self.eq.weights for a in node.args) and node.op is Op.RENAME:
                new[node] = node  # a renamed weight, met again by its product
            else:
                new[node] = ir.lift(node, [new[a] for a in node.args])
        return new[graph.results[0]], made, operands


def weight_product(place: Product, weight: Node, operand: Node, axes: tuple[str, str], name: str = "") -> Node:
    """W z for W [.., out, in] with axes `axes`, z [.., into]: [.., out], under the names that the place uses."""
    out, into = axes
    named = ir.rename(weight, {out: place.out, into: place.into}) if (out, into) != (place.out, place.into) else weight
    return ir.einsum(named, operand, over=(place.into,), name=name)


# ---- coefficients


@dataclass(frozen=True)
class Coefficients:
    """How a token's weights follow from the chunk's start and its gradients. Retention may add the axis f to a, b and C.

    a [g, t] and b [g, t]: what is left of W and S in W_t. m [g, t]: what is left of S in S_t.
    now [g, t, u]: what the windowed gradient of token u adds to W_t. slot [g, t, u]: to S_t.
    """

    a: Node
    b: Node
    m: Node
    now: Node
    slot: Node

    def before(self) -> Coefficients:
        """The same, one token earlier: what W_{t-1} is made of."""

        def earlier(x: Node, first: Node) -> Node:
            return x if x.op is Op.CONST and x.attrs["value"] == first.attrs["value"] else ir.shift(x, first, "t")

        return replace(self, a=earlier(self.a, ONE), b=earlier(self.b, ZERO), now=earlier(self.now, ZERO))


def decay(chunk: Chunk, x: Node, name: str) -> Node:
    """D[t, u] = product of x over u < r <= t; also for a constant x."""
    return ir.decay(chunk.over_time(x), "t", "u", name=name)


def running(x: Node, matrix: Node) -> Node:
    """Running product of x from the chunk's start, out of its decay matrix: x_0 D[t, 0]."""
    return times(ir.select(x, "t", 0), ir.select(matrix, "u", 0))


def coefficients(chunk: Chunk, step: Linear) -> Coefficients:
    """Coefficients of W_t and S_t for W_t = r W + p S + u G, S_t = m S + w G with per-token r, p, u, m, w."""
    (r,) = ir.inline(Graph((), (retain_factor(chunk.eq),)), chunk.gates)
    (u,) = ir.inline(Graph((), (step.u,)), chunk.gates)
    keep = decay(chunk, r, "R")
    a = ONE if is_const(r, 1.0) else named(running(chunk.over_time(r), keep), "a")
    if step.p is None or step.m is None or step.w is None:
        return Coefficients(a, ZERO, ZERO, times(keep, _column(chunk, u)), ZERO)
    p, u, m, w = ir.inline(Graph((), (step.p, step.u, step.m, step.w)), chunk.gates)  # at once, so that equal ones stay one node
    if is_const(m, 0.0):
        slot = _diagonal(chunk, w)
        left = ZERO
    else:
        trail = decay(chunk, m, "M")
        slot = times(trail, _column(chunk, w))
        left = named(running(chunk.over_time(m), trail), "m")
    if p is m and u is w:  # the move is the new slot
        now, b = _product(keep, slot), named(_apply(keep, left), "b")
    else:
        carried = ZERO if is_const(p, 0.0) else times(p, ir.shift(slot, ZERO, "t"))
        now = plus(_product(keep, carried), times(keep, _column(chunk, u)))
        b = ZERO if is_const(p, 0.0) else _apply(keep, times(p, ir.shift(left, ONE, "t") if "t" in left.axes else _first(chunk)))
    return Coefficients(a, b, left, now, slot)


def _first(chunk: Chunk) -> Node:
    """1 at the chunk's first token, 0 after: what a slot that keeps nothing leaves."""
    return ir.shift(ir.mul(chunk.clock(), ZERO), ONE, "t")


def _column(chunk: Chunk, x: Node) -> Node:
    return x if x.op is Op.CONST else ir.rename(chunk.over_time(x), {"t": "u"})


def _diagonal(chunk: Chunk, x: Node) -> Node:
    """diag(x) as a matrix [t, u]: the decay matrix of nothing kept, times x."""
    return times(decay(chunk, ZERO, "I"), _column(chunk, x))


def _product(keep: Node, slot: Node) -> Node:
    """R times a [t, u] matrix."""
    if is_const(slot, 0.0):
        return ZERO
    return ir.einsum(ir.rename(keep, {"u": "r"}), ir.rename(slot, {"t": "r"}), over=("r",))


def _apply(keep: Node, vector: Node) -> Node:
    """R times a vector [t]."""
    return ZERO if is_const(vector, 0.0) else ir.einsum(keep, ir.rename(vector, {"t": "u"}), over=("u",))


def windowed(chunk: Chunk, matrix: Node, name: str = "C") -> Node:
    """[t, u] coefficients of windowed gradients as [t, s] coefficients of the window's own tokens: matrix times Gamma."""
    if is_const(matrix, 0.0):
        return ZERO
    gate = chunk.gate("window_gate")
    if chunk.eq.window == 1:
        column = gate if gate.op is Op.CONST else ir.rename(gate, {"t": "s"})
        return times(ir.rename(matrix, {"u": "s"}), column, name=name)
    gamma = ir.band(ir.rename(gate, {"t": "u"}), "u", "j", "s", chunk.eq.window, name="Gamma")
    return ir.einsum(matrix, gamma, over=("u",), name=name)


def weighed_scores(chunk: Chunk, place: Product, z: Node, x: Node, weights: Node) -> Node:
    """((z x^T) * C), also where C has the axis that is summed (channel retention), or where z x^T exists only as a kernel of raw keys."""
    over = place.into
    if place.weight in chunk.eq.infinite and chunk.eq.kernel is not None:
        (scores,) = ir.inline(chunk.eq.kernel, {"a": z, "b": x, **chunk.params})
        return ir.mul(scores, weights)
    if over in weights.axes:
        return ir.einsum(ir.mul(z, weights), x, over=(over,))
    return ir.mul(ir.einsum(z, x, over=(over,)), weights)


def column_axis(signal: Node) -> str:
    """The axis along which window tokens (s) or rows of a solve (c) lie."""
    return "c" if "c" in signal.axes else "s"


def read(chunk: Chunk, place: Product, operand: Node, at: Coefficients, table: Node, signal: Node, activation: Node) -> Node:
    """W_t z_t for every token t of the chunk, without W_t: a (W z) + b (S z) + ((z X^T) * C) D."""
    terms = [kept_product(chunk, place, operand, at, "q")]
    if not is_const(table, 0.0):
        scores = weighed_scores(chunk, place, operand, activation, table)
        terms.append(ir.einsum(scores, signal, over=(column_axis(signal),)))
    return plus(*terms)


def kept_product(chunk: Chunk, place: Product, operand: Node, at: Coefficients, of: str) -> Node:
    """a (W z) + b (S z): what the chunk's start contributes. `of` says whose activations z are, "q" or "keys"."""
    if place.weight in chunk.eq.infinite:
        past = [(factor, chunk.past.get((of, part, place.weight))) for factor, part in ((at.a, "weight"), (at.b, "slot"))]
        found = [times(factor, ir.rename(x, {chunk.eq.weights[place.weight][0]: place.out})) for factor, x in past if x is not None]
        return plus(*found)
    axes, slot = chunk.eq.weights[place.weight], chunk.slot(place.weight)
    wide = place.into in at.a.axes  # decays that differ from feature to feature act on z itself

    def kept(factor: Node, state: Node) -> Node:
        if wide:
            return weight_product(place, state, times(factor, operand), axes)
        return times(factor, weight_product(place, state, operand, axes))

    return plus(kept(at.a, chunk.weights[place.weight]), None if slot is None or is_const(at.b, 0.0) else kept(at.b, slot))


def last(x: Node) -> Node:
    """The chunk's last token."""
    return x if "t" not in x.axes else ir.select(x, "t", -1)


def update(
    chunk: Chunk, weight: str, at: Coefficients, table: Node, slot_table: Node, pairs: Sequence[tuple[Product, Node, Node]]
) -> tuple[Node, Node | None]:
    """The weight and its slot after the chunk; pairs are (place, signal, activation) of each product with this weight."""
    out, into = chunk.eq.weights[weight]
    state, slot = chunk.weights[weight], chunk.slot(weight)

    def gradient(coefs: Node) -> Node:
        if is_const(coefs, 0.0):
            return ZERO
        row = last(coefs)
        found = []
        for place, signal, activation in pairs:
            weighed = (signal, times(row, activation)) if place.into in row.axes else (times(row, signal), activation)
            found.append(ir.rename(ir.einsum(*weighed, over=(column_axis(signal),)), {place.out: out, place.into: into}))
        return plus(*found)

    new = plus(times(last(at.a), state), None if slot is None else times(last(at.b), slot), gradient(table), name=f"{weight}_next")
    if slot is None:
        return new, None
    return new, plus(times(last(at.m), slot), gradient(slot_table), name=f"{chunk.eq.slots[0]}_{weight}_next")


# ---- inputs


def chunk_params(eq: Equations, facts: Facts, resume: bool) -> tuple[Chunk, list[Node], list[Node], list[Node]]:
    """A chunk on fresh parameters: (chunk, carries, slices, constants)."""
    q, keys, values = ir.param("q", ("g", "t", "k")), ir.param("keys", ("g", "s", "k")), ir.param("values", ("g", "s", "v"))
    gates, given = gate_params(eq)
    weights = {n: ir.param(n, ("g", *eq.weights[n])) for n in eq.weights if n not in eq.infinite}
    slots = {n: {s: ir.param(f"{s}_{n}", ("g", *eq.weights[n])) for s in eq.slots} for n in weights}
    anchor = {n: ir.param(f"anchor_{n}", ("g", *eq.weights[n])) for n in weights} if resume else weights
    params = {n: ir.param(n, ("g", *axes)) for n, axes in eq.params.items()}
    chunk = Chunk(eq, facts, q, keys, values, gates, weights, slots, anchor, params)
    consts = [*(anchor.values() if resume else ()), *params.values()]
    return chunk, state_nodes(weights, slots), [q, keys, values, *given], consts


Slots = dict[str, dict[str, Node]]


def state_nodes(weights: dict[str, Node], slots: Slots) -> list[Node]:
    """The state in its one order: all weights, then the slots of each weight."""
    return [*weights.values(), *(slot for own in slots.values() for slot in own.values())]


def gate_params(eq: Equations) -> tuple[dict[str, Node], list[Node]]:
    """All gates as nodes, constants as CONST; and those that are parameters."""
    axis = {None: (), "feature": ("f",), "window": ("j",)}
    gates: dict[str, Node] = {}
    for name, (role, _) in eq.rule.spec.roles().items():
        window = role.axis == "window"
        if name in eq.rule.constants and not (window and eq.window > 1):
            gates[name] = ir.const(eq.rule.constants[name])
        else:
            gates[name] = ir.param(name, ("g", "t", *(() if window and eq.window == 1 else axis[role.axis])))
    return gates, [g for g in gates.values() if g.op is Op.PARAM]


Body = Callable[[Chunk], tuple[Node, dict[str, Node], Slots]]  # a chunk's y, and the weights and slots after it


def chunked(eq: Equations, facts: Facts, body: Body) -> dict[str, Graph]:
    """A plan's graphs from the body of one chunk: `chunks`, a SCAN over chunks with inputs along the axis n, and, where the chunk is
    part of the meaning, `resume`, one chunk that was begun earlier and whose anchor is an input of its own."""
    graphs = {"chunks": looped(*one_chunk(eq, facts, body, False))}
    if facts.grad_at == "chunk":
        inner, carries, slices, consts = one_chunk(eq, facts, body, True)
        y, states = inner.results[-1], inner.results[:-1]
        graphs["resume"] = Graph((*slices, *carries, *consts), (y, *states), ("y", *inner.labels[:-1]))
    return graphs


def one_chunk(eq: Equations, facts: Facts, body: Body, resume: bool) -> tuple[Graph, list[Node], list[Node], list[Node]]:
    """(graph of (carries, slices, constants) -> (carries, y), carries, slices, constants)."""
    chunk, carries, slices, consts = chunk_params(eq, facts, resume)
    y, weights, slots = body(chunk)
    results = [ir.in_order(ir.expand(new, old), old.axes) for new, old in zip(state_nodes(weights, slots), carries, strict=True)]
    y = ir.expand(y, ir.einsum(chunk.q, chunk.values, ("g", "t", "v")))
    y = y if y.op is Op.PARAM else y.replace(name="y")
    labels = (*(c.attrs["name"] for c in carries), "y")
    return Graph((*carries, *slices, *consts), (*results, y), labels), carries, slices, consts


def looped(inner: Graph, carries: list[Node], slices: list[Node], consts: list[Node]) -> Graph:
    """A SCAN of `inner` along an axis n that all of `slices` gain."""
    outer_slices = [ir.param(s.attrs["name"], ("n", *s.axes)) for s in slices]
    outer = [ir.param(p.attrs["name"], p.axes) for p in (*carries, *consts)]
    found = ir.scan(inner, outer[: len(carries)], outer_slices, outer[len(carries) :])
    return Graph((*outer_slices, *outer), (found[len(carries)], *found[: len(carries)]), ("y", *inner.labels[:-1]))
