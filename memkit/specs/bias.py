"""Attentional biases: what the memory is asked to remember. One inner loss of a prediction and a target, both [V]."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from .component import Component
from .formula import Formula


class AttentionalBias(Component):
    """Root of the attentional biases. A member writes `loss`; its inner gradient is derived, never written."""

    family: ClassVar[str] = "bias"

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The inner loss of one token: prediction [V], target [V] -> []."""
        raise NotImplementedError

    def equation(self) -> str:
        return f"loss(p, v) = {self.kind}(p, v)"


class Dot(AttentionalBias):
    """Hebbian: the prediction should point along the value.

    Equation:  -<p, v>
    Source:    Atlas (arXiv 2505.23735), eqs. 19 and 25, with the sign that descent needs
    Shapes:    p [V], v [V] -> []
    """

    kind = "dot"

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return -(prediction * target).sum()

    def equation(self) -> str:
        return "loss(p, v) = -p.v"


class Expression(AttentionalBias):
    """A formula in r = p - v, summed over the entries of r. Parsed by memkit, never evaluated as Python.

    Equation:  sum_j formula(r_j), for instance log(cosh(r))
    Source:    memkit
    Shapes:    p [V], v [V] -> []
    Ranges:    numbers, r, + - * / ** ^ ( ), and the functions named in the error text
    """

    kind = "expression"
    formula: str = Field(default="log(cosh(r))", min_length=1, max_length=500, description="a formula in r = prediction - target")
    examples = ({}, {"formula": "0.5*r^2"}, {"formula": "sqrt(1 + r**2) - 1"})

    @field_validator("formula")
    @classmethod
    def _parses(cls, text: str) -> str:
        Formula(text)
        return text

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return Formula(self.formula)(prediction - target).sum()

    def equation(self) -> str:
        return f"loss(p, v) = sum_j {self.formula}, r = p_j - v_j"


class Huber(AttentionalBias):
    """Quadratic near zero, linear beyond `delta`, entry by entry.

    Equation:  sum_j (r_j^2 / 2 if |r_j| <= delta else delta (|r_j| - delta / 2)),  r = p - v
    Source:    MIRAS (arXiv 2504.13173), eq. 14
    Shapes:    p [V], v [V] -> []
    Ranges:    delta > 0, in units of the value
    """

    kind = "huber"
    delta: float = Field(default=1.0, gt=0, description="residual at which the loss turns linear")
    examples = ({}, {"delta": 0.1})

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        r = (prediction - target).abs()
        return torch.where(r <= self.delta, 0.5 * r * r, self.delta * (r - 0.5 * self.delta)).sum()

    def equation(self) -> str:
        return f"loss(p, v) = sum_j huber(p_j - v_j), linear beyond {self.delta:g}"


class L2(AttentionalBias):
    """Half the squared error, so that step size 1 and a unit key write the value exactly.

    Equation:  1/2 ||p - v||^2
    Source:    Atlas (arXiv 2505.23735), eq. 9; differs: the papers print no 1/2 and absorb the factor in the step size
    Shapes:    p [V], v [V] -> []
    """

    kind = "l2"

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        r = prediction - target
        return 0.5 * (r * r).sum()

    def equation(self) -> str:
        return "loss(p, v) = 1/2 ||p - v||^2"


class Lq(AttentionalBias):
    """The l_q loss; q = 2 is `l2`.

    Equation:  1/q sum_j |r_j|^q,  r = p - v
    Source:    MIRAS (arXiv 2504.13173), eq. 24; differs: 1/q in front, so that the gradient is sign(r) |r|^(q-1)
    Shapes:    p [V], v [V] -> []
    Ranges:    1 <= q <= 8; below 2 the outer gradient is unbounded near r = 0
    """

    kind = "lq"
    q: float = Field(default=3.0, ge=1, le=8, description="the power")
    examples = ({}, {"q": 1.5}, {"q": 4})

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        size = (prediction - target).abs()
        away = size > 0
        powers = torch.where(away, size, torch.ones_like(size)) ** self.q
        return torch.where(away, powers, torch.zeros_like(size)).sum() / self.q

    def equation(self) -> str:
        return f"loss(p, v) = 1/{self.q:g} sum_j |p_j - v_j|^{self.q:g}"
