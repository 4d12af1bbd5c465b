"""Random inputs for a rule, and what a run of it gives: outputs, final state and gradients, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState

STEP = 0.3  # the largest drawn step size: stable for unit keys, short windows and features up to exp


class Inputs(NamedTuple):
    """The tensors of one call of a rule; q, k [B, T, H, K], v [B, T, H, V], the rest as `Rule.__call__` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    weights: dict[str, Tensor]
    params: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """All tensors by dotted name."""
        groups = (("gates", self.gates), ("weights", self.weights), ("params", self.params))
        return {"q": self.q, "k": self.k, "v": self.v} | {f"{g}.{n}": t for g, tensors in groups for n, t in tensors.items()}

    def map(self, fn: Any) -> Inputs:
        """`fn` of every tensor."""
        q, k, v = fn(self.q), fn(self.k), fn(self.v)
        gates, weights, params = ({n: fn(t) for n, t in group.items()} for group in (self.gates, self.weights, self.params))
        return Inputs(q, k, v, gates, weights, params)

    def piece(self, first: int, last: int) -> Inputs:
        """Tokens first to last - 1."""
        q, k, v = (t[:, first:last] for t in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v, gates={n: g[:, first:last] for n, g in self.gates.items()})

    def leaves(self) -> Inputs:
        """Copies that require gradients."""
        return self.map(lambda t: t.detach().clone().requires_grad_())

    def run(self, rule: Rule, state: MemoryState | None = None, **options: Any) -> tuple[Tensor, MemoryState]:
        """Call `rule` with these tensors."""
        return rule(self.q, self.k, self.v, self.gates, self.weights, self.params, state, **options)


def draw(rule: Rule, batch: int = 1, tokens: int = 5, heads: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random inputs: unit keys and queries, gates in range with some exactly at the ends, weights that are never all zero.

    Step sizes stay below 0.3; the current token's window gate stays above 0.2, so that no normalised step starts from an exact zero.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    q, k = (unit(normal(batch, tokens, heads, rule.key_dim)) for _ in range(2))
    v = normal(batch, tokens, heads, rule.value_dim)
    gates = {name: _gate(rule, name, (batch, tokens, heads, *shape), seed) for name, shape in rule.gates.items()}
    weights = rule.init_weights(heads, generator=g, dtype=torch.float64)
    weights = {n: w if w.any() else 0.3 * normal(*w.shape) for n, w in weights.items()}
    params = {n: p.double() + 0.1 * torch.rand(p.shape, generator=g, dtype=torch.float64) for n, p in rule.init_params().items()}
    return Inputs(q, k, v, gates, weights, params).map(lambda t: t.to(dtype))


def _gate(rule: Rule, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A gate's values; the same for the same name, shape and seed, whatever else the rule has."""
    g = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    role, _ = rule.spec.roles()[name]
    high = STEP if role.high is None else role.high
    low = max(role.low, 0.6) if role.name == "retain" else role.low
    value = low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)
    end = torch.rand(shape, generator=g, dtype=torch.float64)
    value = torch.where(end < 0.1, role.low, value)
    if role.high is not None:
        value = torch.where(end > 0.9, role.high, value)
    if role.axis == "window":
        value[..., -1] = value[..., -1].clamp(min=0.2)
    return value


def values_and_gradients(rule: Rule, inputs: Inputs, state: MemoryState | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Outputs, final state, and the gradient of a random functional of both for every input and initial state tensor, by name."""
    inputs = inputs.leaves()
    start = None if state is None else state.map(lambda t: t.detach().clone().requires_grad_())
    y, after = inputs.run(rule, start)
    return collect(y, after, inputs, start, seed)


def collect(y: Tensor, after: MemoryState, inputs: Inputs, start: MemoryState | None = None, seed: int = 1) -> dict[str, Tensor]:
    """The same for a run that has been made: `inputs` and `start` hold leaves that require gradients."""
    outputs = {"y": y} | {f"state.{n}": t for n, t in after.state_dict().items() if isinstance(t, Tensor)}
    leaves = inputs.named()
    if start is not None:  # the weights of a call that has a state are not used
        leaves = {n: t for n, t in leaves.items() if not n.startswith("weights.")}
        leaves |= {f"start.{n}": t for n, t in start.state_dict().items() if isinstance(t, Tensor)}
    return {n: t.detach() for n, t in outputs.items()} | gradients(outputs, leaves, seed)


def gradients(outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """The gradient of one random functional of `outputs` for every leaf, as grad.<name>; zeros for what it does not depend on."""
    g = torch.Generator().manual_seed(seed)
    total = sum((t * torch.randn(t.shape, generator=g, dtype=torch.float64).to(t)).sum() for t in outputs.values())
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    return {f"grad.{n}": torch.zeros_like(t) if d is None else d for (n, t), d in zip(leaves.items(), found, strict=True)}


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, over the largest entry or 1; infinite where only one side is finite or shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    return off.max().item() / max(1.0, b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0)
