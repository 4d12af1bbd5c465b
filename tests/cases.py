"""Specs and inputs for tests: presets at small sizes, and random inputs in sane ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memkit.inputs import Inputs
from memkit.specs.io import load_spec, presets
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState

PRESETS = presets()
DEEP = ("mlp", "gated_mlp")
STEP = 0.3  # the largest drawn step size: stable for unit keys, short windows and features up to exp


def spec_of(source: Any, overrides: Mapping[str, Any] | None = None) -> LayerSpec:
    """A spec from a preset name or a mapping."""
    return load_spec(source, dict(overrides or {}))


def small(source: Any, overrides: Mapping[str, Any] | None = None, *, chunk: int = 4, window: int = 3) -> LayerSpec:
    """A preset cut down so that a few tokens cross chunks and windows: chunk size 4, window 3 where it has one, hidden width 2 V.

    What `overrides` sets stays as it is.
    """
    spec = spec_of(source, overrides)
    given = {path.split(".")[0] for path in overrides or {} if path in ("window", "window.size", "memory", "update", "update.chunk_size")}
    cut: dict[str, Any] = {}
    if "update" not in given:
        cut["update.chunk_size"] = chunk
    if "window" not in given and spec.window.size > 1:
        cut["window.size"] = window
    if "memory" not in given and spec.memory.kind in DEEP:
        cut["memory.expansion"] = 2
    return spec_of(spec, cut)


def gates_given(spec: LayerSpec) -> LayerSpec:
    """The same spec with every gate `input`, constants included, so that a test can choose their values."""
    found: dict[str, Any] = {}
    for path, component in spec.components():
        found |= {f"{path}.{field}": "input" for field in component.gates}
    return spec_of(spec, found | {"window.gate": "input"})


def unit(x: Tensor) -> Tensor:
    """x with unit rows."""
    return x / x.norm(dim=-1, keepdim=True)


def draw(rule: Rule, B: int = 2, T: int = 9, H: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Random inputs: unit keys and queries, gates in range with some exactly at the ends, weights that are never all zero.

    Shapes: q, k [B, T, H, K], v [B, T, H, V], gates [B, T, H, *], weights [H, out, in]. Step sizes stay below 0.3; the current
    token's window gate stays above 0.2, so that a Newton-Schulz step never starts from an exact zero.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    q, k = unit(normal(B, T, H, rule.key_dim)), unit(normal(B, T, H, rule.key_dim))
    v = normal(B, T, H, rule.value_dim)
    gates = {name: _gate(rule, name, (B, T, H, *shape), g) for name, shape in rule.gates.items()}
    weights = rule.init_weights(H, generator=g, dtype=torch.float64)
    weights = {n: w if w.any() else 0.3 * normal(*w.shape) for n, w in weights.items()}
    params = {n: p.double() + 0.1 * torch.rand(p.shape, generator=g, dtype=torch.float64) for n, p in rule.init_params().items()}
    return Inputs(q, k, v, gates, weights, params).map(lambda t: t.to(dtype))


def _gate(rule: Rule, name: str, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    role, _ = rule.spec.roles()[name]
    span = {"retain": (0.6, 1.0), "step_size": (0.0, STEP)}.get(name, (role.low, STEP if role.high is None else role.high))
    value = span[0] + (span[1] - span[0]) * torch.rand(shape, generator=g, dtype=torch.float64)
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
    g = torch.Generator().manual_seed(seed)
    total = sum((t * torch.randn(t.shape, generator=g, dtype=torch.float64).to(t)).sum() for t in outputs.values())
    leaves = inputs.named()
    if start is not None:  # the weights of a call that has a state are not used
        leaves = {n: t for n, t in leaves.items() if not n.startswith("weights.")}
        leaves |= {f"start.{n}": t for n, t in start.state_dict().items() if isinstance(t, Tensor)}
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    found = {f"grad.{n}": torch.zeros_like(t) if d is None else d for (n, t), d in zip(leaves.items(), grads)}
    return {n: t.detach() for n, t in outputs.items()} | found
