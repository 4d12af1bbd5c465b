"""A pre-norm residual block: a memory layer, then a gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memkit.specs.io import Source

from .memory_layer import LayerState, MemoryLayer, RuleFactory, make_rule


class RMSNorm(nn.Module):
    """x / rms(x) with a learned scale; computed in float32. [.., D] -> [.., D]"""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        z = x if x.dtype == torch.float64 else x.float()
        return (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.eps) * self.scale).to(x.dtype)


class SwiGLU(nn.Module):
    """W2 (silu(W1 x) * W3 x), W1 and W3 in one projection. [.., D] -> [.., D]"""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """x + memory(norm(x)), then x + mlp(norm(x)).

    Args:
        spec: the memory's spec: a LayerSpec, or a preset's name, a path or a dict.
        dim: D. heads: H, the spec's own unless given.
        hidden: width of the MLP; 0 leaves it out.

    Shapes: x [B, T, D], state -> [B, T, D], state
    """

    def __init__(
        self, spec: Source, dim: int, heads: int | None = None, hidden: int | None = None, rule_factory: RuleFactory = make_rule
    ) -> None:
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        self.norm1 = RMSNorm(dim)
        self.memory = MemoryLayer(spec, dim, heads, rule_factory)
        self.norm2 = RMSNorm(dim) if hidden else None
        self.mlp = SwiGLU(dim, hidden) if hidden else None

    def forward(self, x: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        y, after = self.memory(self.norm1(x), state)
        x = x + y
        if self.mlp is not None and self.norm2 is not None:
            x = x + self.mlp(self.norm2(x))
        return x, after
