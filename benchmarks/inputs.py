"""Inputs that both sides draw alike, so that their outputs can be compared: everything from one seed, in one order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

KEPT = 0.999  # what is left of a titans memory after a chunk, where x is 0
STEP = 0.05  # the largest step of its inner optimizer, for the mean of squared errors


def delta(T: int, H: int, K: int, channel: bool = False) -> dict[str, Tensor]:
    """q, k [1, T, H, K] of unit length, v [1, T, H, K], log_retain [1, T, H] or [1, T, H, K] in [-0.1, 0], step [1, T, H] in [0, 1)."""
    g = torch.Generator().manual_seed(7)
    q, k, v, out = (torch.randn(1, T, H, K, generator=g) for _ in range(4))
    log_retain = -0.1 * torch.rand((1, T, H, K) if channel else (1, T, H), generator=g)
    step = torch.rand(1, T, H, generator=g)
    return {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v, "log_retain": log_retain, "step": step, "out": out}


def bias_of(gate: float) -> float:
    """The bias with which a sigmoid gate is so large."""
    return torch.logit(torch.tensor(gate, dtype=torch.float64)).item()


class Timed:
    """A function of tensors as a case: `forward()` without gradients, `both()` with those of all its inputs."""

    def __init__(self, fn, inputs: list[Tensor], out: Tensor) -> None:
        self.fn, self.inputs, self.out = fn, [t.requires_grad_() for t in inputs], out
        self.info: dict[str, float] = {}

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.fn(*self.inputs)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.fn(*self.inputs), self.inputs, self.out, allow_unused=True)
