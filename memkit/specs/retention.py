"""Retention: what is kept of the memory before each write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from .component import Component
from .gate import RETAIN, RETAIN_CHANNEL, Gate, Input, Role


class Retention(Component):
    """Root of the retentions. A member writes `retain(W, retain)` for one weight W [out, in] and the gate's value, if it has a gate."""

    family: ClassVar[str] = "retention"

    def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
        """What is kept of W."""
        raise NotImplementedError

    def equation(self) -> str:
        return f"{self.kind}(W_{{t-1}})"


class Channel(Retention):
    """One fraction kept for each feature.

    Equation:  W_t = W_{t-1} diag(a_t) + ..
    Source:    GLA (arXiv 2312.06635), eq. 3; KDA (arXiv 2510.26692)
    Shapes:    W [V, F], retain [F]; only for a memory whose weights all have F columns
    Ranges:    retain in [0, 1]
    """

    kind = "channel"
    gate: Gate = Field(default=Input(), description="fraction kept, one a feature")
    gates: ClassVar[Mapping[str, Role]] = {"gate": RETAIN_CHANNEL}

    def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
        return W if retain is None else W * retain

    def equation(self) -> str:
        return f"W_{{t-1}} diag({self.term('gate').strip() or 1})"


class NoRetention(Retention):
    """Everything is kept.

    Equation:  W_t = W_{t-1} + ..
    Source:    DeltaNet (arXiv 2406.06484)
    Shapes:    W [out, in]
    """

    kind = "none"

    def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
        return W

    def equation(self) -> str:
        return "W_{t-1}"


class Scalar(Retention):
    """One fraction kept for the whole memory of a head.

    Equation:  W_t = a_t W_{t-1} + ..
    Source:    Titans (arXiv 2501.00663), eq. 13, with a_t = 1 - alpha_t; Atlas (arXiv 2505.23735), eq. 10
    Shapes:    W [out, in], retain []
    Ranges:    retain in [0, 1]; 0 resets the memory
    """

    kind = "scalar"
    gate: Gate = Field(default=Input(), description="fraction kept")
    gates: ClassVar[Mapping[str, Role]] = {"gate": RETAIN}

    def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
        return W if retain is None else W * retain

    def equation(self) -> str:
        return f"{self.term('gate')}W_{{t-1}}"
