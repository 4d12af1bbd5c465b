"""Gates: where a per-token scalar comes from, its range, its start, and the module that makes it from the layer's input."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from .component import Component


@dataclass(frozen=True)
class Role:
    """What a gate does: its name in `rule.gates`, its range, where a fresh layer starts it, and the axis it has beyond [B, T, H].

    Ranges are closed; `high` None means unbounded at rule level (a layer bounds it by `ceiling`).
    """

    name: str
    low: float = 0.0
    high: float | None = 1.0
    start: float = 0.5
    ceiling: float = 1.0
    axis: str | None = None  # None, "feature" (one value a feature) or "window" (one value a window slot)

    def below(self, ceiling: float | None) -> Role:
        """The same role with a layer's values bounded by `ceiling`, where the role itself has no upper end."""
        return self if ceiling is None or self.high is not None else replace(self, ceiling=ceiling)


RETAIN = Role("retain", start=0.98)
RETAIN_CHANNEL = Role("retain", start=0.98, axis="feature")
MOMENTUM = Role("momentum", start=0.6)
STEP_SIZE = Role("step_size", high=None, start=0.1)
WINDOW_GATE = Role("window_gate", start=0.5, axis="window")


class Gate(Component):
    """Root of the gates. A member says whether the rule is given the gate, and makes the layer's module for it.

    Equation:  g_t in [low, high], one value a token and head
    Source:    memkit; the papers leave the form of their gates open (Atlas section 5, Titans section 3)
    Shapes:    x [B, T, D] -> [B, T, H, *axis]
    """

    family: ClassVar[str] = "gate"
    given: ClassVar[bool] = True  # the rule is called with it

    @classmethod
    def expand(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"kind": "number", "value": value}
        return super().expand(value)

    def module(self, role: Role, dim: int, heads: int, width: tuple[int, ...]) -> nn.Module | None:
        """The layer's module, or None where the rule needs no such gate."""
        raise NotImplementedError

    def term(self, name: str) -> str:
        """This gate as a factor in an equation, with a space behind it."""
        return f"{name}_t "


class Squash(nn.Module):
    """Maps any real into a role's range: a sigmoid, or a softplus bounded by the role's ceiling. Computed in float32."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role = role

    def forward(self, z: Tensor) -> Tensor:
        z = z if z.dtype == torch.float64 else z.float()
        if self.role.high is None:
            minus = F.logsigmoid(-z)  # -softplus(z); the backward of softplus itself has other strides than torch.compile foresees
            return self.role.ceiling * (1 - torch.exp(minus / self.role.ceiling))
        return self.role.low + (self.role.high - self.role.low) * torch.sigmoid(z)

    def inverse(self, value: float) -> float:
        """The real that maps to `value`; values at the ends of the range are moved just inside."""
        if self.role.high is None:
            ratio = min(max(value / self.role.ceiling, 1e-6), 1 - 1e-6)
            return math.log(math.expm1(-self.role.ceiling * math.log1p(-ratio)))
        ratio = min(max((value - self.role.low) / (self.role.high - self.role.low), 1e-6), 1 - 1e-6)
        return math.log(ratio / (1 - ratio))


class ProjectedGate(nn.Module):
    """squash(W x_t + b), started at `start` for every token."""

    def __init__(self, role: Role, dim: int, heads: int, width: tuple[int, ...], start: float) -> None:
        super().__init__()
        self.shape = (heads, *width)
        self.squash = Squash(role)
        self.proj = nn.Linear(dim, math.prod(self.shape))
        if not self.proj.weight.is_meta:  # drawing numbers for no memory would load half of torch
            nn.init.normal_(self.proj.weight, std=0.1 / math.sqrt(dim))
        nn.init.constant_(self.proj.bias, self.squash.inverse(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.proj(x).unflatten(-1, self.shape))


class LearnedGate(nn.Module):
    """One learned value a head (and slot or feature), the same for every token."""

    def __init__(self, role: Role, heads: int, width: tuple[int, ...], start: float) -> None:
        super().__init__()
        self.squash = Squash(role)
        self.value = nn.Parameter(torch.full((heads, *width), self.squash.inverse(start)))

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.value).expand(*x.shape[:2], *self.value.shape)


class Input(Gate):
    """A gate projected from the layer's input, g_t = squash(W x_t + b).

    Equation:  retain, momentum, window: sigmoid(W x_t + b); step size: bounded softplus
    Source:    Atlas (arXiv 2505.23735) figure 3: gates are input dependent, their form is not published
    Shapes:    x [B, T, D] -> [B, T, H, *axis]
    Ranges:    start within the role's range; None takes the role's own start
    """

    kind = "input"
    start: float | None = Field(default=None, description="value of a fresh layer, in the gate's own range")
    ceiling: float | None = Field(default=None, gt=0, description="largest value a layer's step size can reach; 1 unless given")
    examples = ({}, {"start": 0.5}, {"ceiling": 0.9})

    def module(self, role: Role, dim: int, heads: int, width: tuple[int, ...]) -> nn.Module | None:
        return ProjectedGate(role.below(self.ceiling), dim, heads, width, role.start if self.start is None else self.start)

    def equation(self) -> str:
        return "projected from x_t"


class Learned(Gate):
    """One learned value a head, the same for all tokens.

    Equation:  g_t = squash(b)
    Source:    RetNet (arXiv 2307.08621) has one fixed decay a head; memkit lets it be learned
    Shapes:    [H, *axis], expanded to [B, T, H, *axis]
    """

    kind = "learned"
    start: float | None = Field(default=None, description="value of a fresh layer, in the gate's own range")
    ceiling: float | None = Field(default=None, gt=0, description="largest value a layer's step size can reach; 1 unless given")
    examples = ({}, {"start": 0.5}, {"ceiling": 0.9})

    def module(self, role: Role, dim: int, heads: int, width: tuple[int, ...]) -> nn.Module | None:
        return LearnedGate(role.below(self.ceiling), heads, width, role.start if self.start is None else self.start)

    def equation(self) -> str:
        return "one learned value a head"

    def term(self, name: str) -> str:
        return f"{name} "


class Number(Gate):
    """A constant, written as a plain number. It is part of the rule and not among `rule.gates`.

    Equation:  g_t = value
    Source:    memkit
    Shapes:    []
    """

    kind = "number"
    given: ClassVar[bool] = False
    value: float = Field(default=1.0, description="the constant, within the gate's range")
    examples = ({"value": 1.0}, {"value": 0.5})

    def module(self, role: Role, dim: int, heads: int, width: tuple[int, ...]) -> nn.Module | None:
        return None

    def shorthand(self) -> Any:
        return self.value

    def equation(self) -> str:
        return f"the number {self.value:g}, part of the rule"

    def term(self, name: str) -> str:
        return "" if self.value == 1 else f"{self.value:g} "
