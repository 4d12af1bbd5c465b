"""Inner optimizers: how the memory moves along its inner gradient, weight by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from .component import Component
from .gate import MOMENTUM, STEP_SIZE, Gate, Input, Role


class InnerOptimizer(Component):
    """Root of the inner optimizers. A member writes `init` and `update` for one weight.

    `init(W)` gives the starting slots, a dict of tensors shaped like W (empty for none). `update(grad, state, gates)` returns
    (move, new state); the rule then sets W_t = retain(W_{t-1}) + move. `gates` maps role names to this token's values.
    """

    family: ClassVar[str] = "optimizer"

    @classmethod
    def elementwise(cls) -> bool:
        """Whether each entry of the move depends on its own entry of the gradient alone; needed where a weight has infinite width."""
        return True

    def init(self, W: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, grad: Tensor, state: Mapping[str, Tensor], gates: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def equation(self) -> str:
        return f"U_t = {self.kind}(G_t)"


class Gd(InnerOptimizer):
    """Gradient descent.

    Equation:  U_t = -step_t G_t
    Source:    OmegaNet: Atlas (arXiv 2505.23735), eq. 10
    Shapes:    grad [out, in] -> [out, in]
    Ranges:    step_size >= 0
    """

    kind = "gd"
    step_size: Gate = Field(default=Input(), description="inner step size")
    gates: ClassVar[Mapping[str, Role]] = {"step_size": STEP_SIZE}

    def update(self, grad: Tensor, state: Mapping[str, Tensor], gates: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        return -(gates["step_size"] * grad), {}

    def equation(self) -> str:
        return f"U_t = -{self.term('step_size')}G_t"


class Momentum(InnerOptimizer):
    """Gradient descent with momentum.

    Equation:  S_t = momentum_t S_{t-1} - step_t G_t,  U_t = S_t
    Source:    Titans (arXiv 2501.00663), eqs. 9-10
    Shapes:    grad [out, in] -> [out, in]; one slot S [out, in]
    Ranges:    momentum in [0, 1], step_size >= 0
    """

    kind = "momentum"
    momentum: Gate = Field(default=Input(), description="fraction of the momentum kept")
    step_size: Gate = Field(default=Input(), description="inner step size")
    gates: ClassVar[Mapping[str, Role]] = {"momentum": MOMENTUM, "step_size": STEP_SIZE}

    def init(self, W: Tensor) -> dict[str, Tensor]:
        return {"S": torch.zeros_like(W)}

    def update(self, grad: Tensor, state: Mapping[str, Tensor], gates: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        slot = gates["momentum"] * state["S"] - gates["step_size"] * grad
        return slot, {"S": slot}

    def equation(self) -> str:
        return f"S_t = {self.term('momentum')}S_{{t-1}} - {self.term('step_size')}G_t; U_t = S_t"


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def newton_schulz(matrix: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """An approximate polar factor of `matrix` [out, in]: scaled to unit Frobenius norm, then `steps` quintic iterations.

    Works on the smaller Gram side. Odd in its argument and independent of its scale; 0 steps give matrix / ||matrix||.
    """
    a, b, c = NEWTON_SCHULZ
    square = (matrix * matrix).sum()
    some = square > 0  # the norm's derivative at 0 is taken as 0
    norm = torch.where(some, torch.sqrt(torch.where(some, square, torch.ones_like(square))), torch.zeros_like(square))
    x = matrix / (norm + eps)
    wide = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


class Muon(InnerOptimizer):
    """Momentum made orthogonal by Newton-Schulz.

    Equation:  S_t = momentum_t S_{t-1} - G_t,  U_t = step_t NS(S_t)
    Source:    Atlas (arXiv 2505.23735), eqs. 32-33; the coefficients are those of Muon
    Shapes:    grad [out, in] -> [out, in]; one slot S [out, in]
    Ranges:    steps 0 to 12; momentum in [0, 1], step_size >= 0
    """

    kind = "muon"
    steps: int = Field(default=5, ge=0, le=12, description="Newton-Schulz iterations")
    momentum: Gate = Field(default=Input(), description="fraction of the momentum kept")
    step_size: Gate = Field(default=Input(start=0.02), description="length of the orthogonal step")
    gates: ClassVar[Mapping[str, Role]] = {"momentum": MOMENTUM, "step_size": STEP_SIZE}
    examples = ({}, {"steps": 1}, {"steps": 0})

    @classmethod
    def elementwise(cls) -> bool:
        return False

    def init(self, W: Tensor) -> dict[str, Tensor]:
        return {"S": torch.zeros_like(W)}

    def update(self, grad: Tensor, state: Mapping[str, Tensor], gates: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        slot = gates["momentum"] * state["S"] - grad
        return gates["step_size"] * newton_schulz(slot, self.steps), {"S": slot}

    def equation(self) -> str:
        return f"S_t = {self.term('momentum')}S_{{t-1}} - G_t; U_t = {self.term('step_size')}NS{self.steps}(S_t)"
