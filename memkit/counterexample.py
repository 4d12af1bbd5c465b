"""Two rules run on the same drawn inputs, in float64, until they differ: the shortest sequence, the first token, the head, the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memkit.given import Side
from memkit.inputs import Inputs, distance, draw, gradients
from memkit.specs.errors import SpecError
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule

TOLERANCE = 1e-9
LONGEST = 66  # tokens of the longest sequence run
WIDTHS = ((3, 4), (4, 4), (8, 8), (16, 16))


@dataclass(frozen=True)
class Counterexample:
    """Where two rules differ: in `quantity` (y, memory.<weight> or the gradient of an input), after `tokens` tokens.

    token, head: of the first difference in y; None for other quantities. a, b: the values there.
    """

    tokens: int
    quantity: str
    token: int | None
    head: int | None
    a: tuple[float, ...]
    b: tuple[float, ...]
    seed: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        place = f", token {self.token}, head {self.head}" if self.token is not None else ""
        rows = [f"{name}: {' '.join(f'{x:.6g}' for x in values)}" for name, values in (("first ", self.a), ("second", self.b))]
        head = f"they differ in {self.quantity} after {self.tokens} token{'s' if self.tokens > 1 else ''}{place}"
        return "\n  ".join([f"{head} (K={self.key_dim}, V={self.value_dim}, draw {self.seed})", *rows])


class Pair:
    """Two oracles at the same widths, and the inputs they share."""

    def __init__(self, left: Side, right: Side, key_dim: int, value_dim: int) -> None:
        self.sides = (left, right)
        self.rules = tuple(ReferenceRule(side.spec, key_dim, value_dim) for side in self.sides)
        a, b = self.rules
        self.names = {n: n for n in a.shapes if b.shapes.get(n) == a.shapes[n]}
        if not self.names and list(a.shapes.values()) == list(b.shapes.values()):
            self.names = dict(zip(a.shapes, b.shapes, strict=True))  # weights matched by their place
        self.comparable = len(self.names) == len(a.shapes) == len(b.shapes) and a.finite == b.finite
        self.gates = [n for n in a.gates if b.gates.get(n) == a.gates[n]]

    def draw(self, tokens: int, seed: int) -> tuple[Inputs, Inputs]:
        a, b = (draw(rule, 1, tokens, 2, seed) for rule in self.rules)
        weights = {**b.weights, **{other: a.weights[n] for n, other in self.names.items()}}
        params = {n: a.params.get(n, p) if n in a.params else self.rules[1].init_params()[n].double() for n, p in b.params.items()}
        if self.rules[0].finite != self.rules[1].finite:  # a memory over infinite features starts at zero
            a = a._replace(weights={n: torch.zeros_like(w) if n not in self.names else w for n, w in a.weights.items()})
            weights = {n: torch.zeros_like(w) if n not in self.names.values() else w for n, w in weights.items()}
        b = b._replace(q=a.q, k=a.k, v=a.v, weights=weights, params=params)
        a = a._replace(params={n: p if n in b.params else self.rules[0].init_params()[n].double() for n, p in a.params.items()})
        return _fixed(a, self.sides[0], self.rules[0]), _fixed(b, self.sides[1], self.rules[1])

    def run(self, index: int, inputs: Inputs) -> dict[str, Tensor]:
        """y, the memory and the gradients of what both sides share, under the first side's names."""
        rule, names = self.rules[index], {old if index == 0 else new: old for old, new in self.names.items()}
        inputs = inputs.leaves()
        y, state = inputs.run(rule)
        ends = {f"memory.{names[n]}": w for n, w in state.weights.items() if n in names}
        if self.comparable and state.span is not None:
            ends |= {f"memory.{n}": w for n, w in state.span.weights.items()}
        leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | {f"gates.{n}": inputs.gates[n] for n in self.gates}
        leaves = {n: t for n, t in leaves.items() if n.removeprefix("gates.") not in self._slots()}
        leaves |= {f"weights.{names[n]}": w for n, w in inputs.weights.items() if n in names}
        shared = set(self.rules[0].init_params()) & set(self.rules[1].init_params())
        leaves |= {f"params.{n}": p for n, p in inputs.params.items() if n in shared}
        outputs = {"y": y, **ends}
        return {n: t.detach() for n, t in outputs.items()} | gradients(outputs, leaves)

    def _slots(self) -> set[str]:
        return {n for side in self.sides for n in side.slots}

    def differ(self, tokens: int, seed: int) -> Counterexample | None:
        """The smallest difference on this draw, y before other things and the shortest sequence first."""
        while True:
            inputs = self.draw(LONGEST, seed)
            a, b = (self.run(i, x.piece(0, tokens)) for i, x in enumerate(inputs))
            wrong = [n for n in a if n not in b or distance(a[n], b[n]) > TOLERANCE]
            if not wrong:
                return None
            if "y" not in wrong:
                return self._found(tokens, wrong[0], None, None, a[wrong[0]].flatten(), b[wrong[0]].flatten(), seed)
            token, head = _place(a["y"], b["y"])
            if token + 1 == tokens:
                return self._found(tokens, "y", token, head, a["y"][0, token, head], b["y"][0, token, head], seed)
            tokens = token + 1

    def _found(self, tokens: int, what: str, token: int | None, head: int | None, a: Tensor, b: Tensor, seed: int) -> Counterexample:
        off = (a - b).abs().nan_to_num(nan=float("inf"))
        at = max(0, int(off.argmax()) - 3) if len(a) > 8 else 0
        shown = [tuple(t[at : at + 8].tolist()) for t in (a, b)]
        quantity = what.replace("grad.", "the gradient of ")
        return Counterexample(tokens, quantity, token, head, shown[0], shown[1], seed, self.rules[0].key_dim, self.rules[0].value_dim)


def _place(a: Tensor, b: Tensor) -> tuple[int, int]:
    """The first token, and its head, where two y [1, T, H, V] differ."""
    off = (a - b).abs().nan_to_num(nan=float("inf")).amax(-1)[0] > TOLERANCE * max(1.0, b.abs().max().item())
    token, head = off.nonzero()[0].tolist()
    return token, head


def _fixed(inputs: Inputs, side: Side, rule: Rule) -> Inputs:
    """Gates fixed slot by slot put in."""
    gates = {n: torch.tensor(side.slots[n], dtype=g.dtype).expand(g.shape) if n in side.slots else g for n, g in inputs.gates.items()}
    return inputs._replace(gates=gates)


def lengths(*sides: Side) -> list[int]:
    """1, 2, 3 tokens and those around the edges of windows and chunks, short ones first."""
    found = {1, 2, 3}
    for side in sides:
        c = side.spec.window.size
        found |= {c - 1, c, c + 1}
        if side.spec.update.grad_at == "chunk":
            size = side.spec.update.chunk_size
            found |= {size - 1, size, size + 1, size + c, *((2 * size + 1,) if size < 9 else ())}
    return sorted(n for n in found if 1 <= n <= LONGEST)


def _pairs(left: Side, right: Side) -> Iterator[Pair]:
    residual, made = left.spec.memory.residual or right.spec.memory.residual, 0
    for key_dim, value_dim in WIDTHS[1:] if residual else WIDTHS:
        try:
            pair = Pair(left, right, key_dim, value_dim)
        except SpecError as error:
            if "memory" not in error.where:
                raise
            continue
        yield pair
        made += 1
        if made == 2:
            return


def search(left: Side, right: Side) -> tuple[Counterexample | None, str]:
    """A counterexample, or None, and what was run."""
    pairs, tried = list(_pairs(left, right)), lengths(left, right)
    for tokens in tried:
        for seed in (0, 1) if tokens < 10 else (0,):
            for pair in pairs[: 2 if tokens < 10 else 1]:
                found = pair.differ(tokens, seed)
                if found is not None:
                    return found, _differences(pair) + str(found)
    widths = " and ".join(f"K={p.rules[0].key_dim} V={p.rules[0].value_dim}" for p in pairs)
    text = f"values, final memories and gradients agree to {TOLERANCE:g} in float64, {widths}, 2 heads, {', '.join(map(str, tried))} tokens"
    large = [s.spec.update.chunk_size for s in (left, right) if s.spec.update.grad_at == "chunk" and s.spec.update.chunk_size >= LONGEST]
    if large:
        text += f"; the edge of a chunk of {max(large)} was not reached"
    if pairs and not pairs[0].comparable:
        text += "; their memories have other shapes and were not compared"
    return None, text + ". Evidence, not a proof."


def _differences(pair: Pair) -> str:
    """What the two do not share, in words."""
    a, b = pair.rules
    rows: list[Any] = []
    for what, x, y in (("gates", a.gates, b.gates), ("weights", a.shapes, b.shapes)):
        mine, other = ({n: s for n, s in p.items() if q.get(n) != s} for p, q in ((x, y), (y, x)))
        if (mine or other) and not (what == "weights" and pair.names):
            rows.append(f"{what} of one side alone: {_listed(mine)} | {_listed(other)}")
    return "".join(f"{row}\n" for row in rows)


def _listed(shapes: Any) -> str:
    return ", ".join(f"{n} {list(s)}" for n, s in shapes.items()) or "none"
