"""One token of a spec as one graph: gradient, optimizer, retention and read, with the state as inputs and results.

Where it sits: the equivalence check compares these graphs. Unlike a plan's graph there is no batch, no chunk and no loop; the current
token stands apart from the older ones of its window, which share the axis j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import ir
from .autodiff import vjp
from .build import Equations
from .ir import Graph, Node, Op


@dataclass(frozen=True)
class TokenGraph:
    """`graph` with results labelled y, phi or kernel, next.weight<i>, next.weight<i>.<slot>; inputs q, k, v, old_k, old_v, inside,
    gate.*, param.*, weight<i>, weight<i>.<slot>, anchor<i>, phi_*, x. chunk: tokens that share the anchors, 0 where the graph has none.

    names: weight<i> -> the spec's own name. sizes: length of every input's axes, by input.
    """

    graph: Graph
    chunk: int
    names: dict[str, str]
    sizes: dict[str, tuple[int, ...]]


def token_graph(eq: Equations, fixed: Mapping[str, float | Sequence[float]]) -> TokenGraph:
    """The token graph of `eq`; gates named in `fixed` are those numbers (one a slot for the window's gate)."""
    return _Token(eq, fixed).build()


class _Token:
    """Builds the graph of one token."""

    def __init__(self, eq: Equations, fixed: Mapping[str, float | Sequence[float]]) -> None:
        self.eq, self.fixed = eq, fixed
        self.inputs: dict[str, Node] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.weights = {n: self.input(f"weight{i}", axes) for i, (n, axes) in enumerate(eq.weights.items(), 1)}
        self.params = {n: self.input(f"param.{n}", axes) for n, axes in eq.params.items()}

    def input(self, name: str, axes: Sequence[str]) -> Node:
        if name not in self.inputs:
            self.inputs[name] = ir.param(name, axes)
            length = {**self.eq.sizes, "j": self.eq.window - 1}
            self.sizes[name] = tuple(length[a] for a in axes)
        return self.inputs[name]

    def gate(self, name: str, axes: Sequence[str] = ()) -> Node:
        value = self.fixed.get(name)
        return self.input(f"gate.{name}", axes) if value is None else ir.const(float(value))  # type: ignore[arg-type]

    def window_gates(self) -> tuple[Node, Node]:
        """The gate of the current token, and those of the older ones, 0 before the sequence's start."""
        value = self.fixed.get("window_gate")
        inside = self.input("inside", ("j",)) if self.eq.window > 1 else ir.const(0.0)
        if isinstance(value, Sequence):
            older = ir.tensor(tuple(value[:-1]), ("j",)) if any(value[:-1]) else ir.const(0.0)
            return ir.const(value[-1]), ir.mul(older, inside)
        older = self.input("gate.window_gate.old", ("j",)) if value is None and self.eq.window > 1 else ir.const(float(value or 0.0))
        return self.gate("window_gate"), ir.mul(older, inside)

    def feature(self, x: Node, name: str) -> Node:
        """phi(x): a symbol of its own, said once what it is, unless it is x itself."""
        graph = self.eq.features
        if graph is None or _bare(graph.results[0]).op is not Op.PARAM:
            return self.input(f"phi_{name}", (*(a for a in x.axes if a == "j"), "f"))
        return ir.inline(graph, {"x": x})[0]

    def about_features(self) -> dict[str, Node]:
        """What the symbol phi stands for: its entries, or its kernel where only that exists."""
        own = {n: self.params[n] for n in self.eq.params if n.startswith("features_")}
        if "phi_q" not in self.inputs:
            return {}
        if self.eq.features is not None:
            return {"phi": ir.inline(self.eq.features, {"x": self.input("x", ("k",)), **own})[0]}
        assert self.eq.kernel is not None
        return {"kernel": ir.inline(self.eq.kernel, {"a": self.input("x", ("k",)), "b": self.input("x2", ("k",)), **own})[0]}

    def predict(self, weights: Mapping[str, Node], x: Node, name: str) -> Node:
        return ir.inline(self.eq.predict, {**weights, **self.params, "f": self.feature(x, name), "x": x})[0]

    def gradient(self, at: Mapping[str, Node]) -> dict[str, Node]:
        """The windowed inner gradient of every weight, in the current token and in the older ones."""
        now, older = self.window_gates()
        pairs = [("k", self.input("k", ("k",)), self.input("v", ("v",)), now)]
        if self.eq.window > 1:
            pairs.append(("old_k", self.input("old_k", ("j", "k")), self.input("old_v", ("j", "v")), older))
        total: dict[str, Node] = {}
        for name, key, value, weigh in pairs:
            prediction = self.predict(at, key, name)
            (slope,) = ir.inline(self.eq.slope, {"p": prediction, "target": value})
            signal = ir.mul(ir.expand(slope, prediction), weigh).replace(where="layer.window")
            found = vjp([prediction], [ir.expand(signal, prediction)], list(at.values()))
            for weight, grad in zip(at, found, strict=True):
                grad = ir.expand(ir.const(0.0), at[weight]) if grad is None else grad
                total[weight] = ir.add(total[weight], grad) if weight in total else grad
        return total

    def kept(self, weight: str) -> Node:
        graph = self.eq.retain[weight]
        env = {"W": self.weights[weight]}
        if any(p.attrs["name"] == "retain" for p in graph.params):
            env["retain"] = self.gate("retain", graph.param("retain").axes)
        return ir.inline(graph, env)[0]

    def axes_of(self, label: str) -> tuple[str, ...]:
        """The axes of a result, in the order that says which is which."""
        if label.startswith("next."):
            return self.inputs[label.removeprefix("next.")].axes
        return {"y": ("v",), "phi": ("f",)}.get(label, ())

    def build(self) -> TokenGraph:
        eq = self.eq
        size = eq.rule.spec.update.chunk_size if eq.grad_at == "chunk" else 1
        kept = {n: self.kept(n) for n in self.weights}
        at = kept if eq.grad_at == "decayed" else self.weights
        if size > 1:
            at = {n: self.input(f"anchor{i}", axes) for i, (n, axes) in enumerate(eq.weights.items(), 1)}
        grads, results, after = self.gradient(at), {}, {}
        for i, n in enumerate(self.weights, 1):
            slots = {s: self.input(f"weight{i}.{s}", eq.weights[n]) for s in eq.slots}
            gates = {g: self.gate(g) for g in eq.rule.spec.optimizer.roles()}
            move, *new = ir.inline(eq.update[n], {"grad": grads[n], **{f"slot_{s}": x for s, x in slots.items()}, **gates})
            after[n] = ir.add(kept[n], move)
            results |= {f"next.weight{i}": after[n], **{f"next.weight{i}.{s}": x for s, x in zip(slots, new, strict=True)}}
        query = self.input("q", ("k",))
        results["y"] = self.predict(self.weights if eq.read_before else after, query, "q")
        results |= self.about_features()
        names = {f"weight{i}": n for i, n in enumerate(self.weights, 1)}
        placed = {label: _by_place(x, self.axes_of(label)) for label, x in results.items()}
        graph = Graph(tuple(self.inputs.values()), tuple(placed.values()), tuple(placed))
        return TokenGraph(graph, size if size > 1 else 0, names, self.sizes)


def _by_place(node: Node, axes: Sequence[str]) -> Node:
    """`node` with its axes called by their place, so that no name of an axis is part of what is compared."""
    return ir.rename(node, {axis: f"axis{i}" for i, axis in enumerate(axes)})


def _bare(node: Node) -> Node:
    while node.op is Op.RENAME:
        node = node.args[0]
    return node
