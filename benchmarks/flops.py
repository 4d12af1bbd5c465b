"""Floating-point operations of matrix products: what a compiled rule needs by its graph, and what a run does, counted as it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.compiler.cost import plan_cost

PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1}  # operation -> place of its first factor


class Counted(TorchDispatchMode):
    """Counts 2 m k n for every product of matrices in its `with`, in-place ones included: `flops`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        first = PRODUCTS.get(func.overloadpacket.__name__.rstrip("_"))
        if first is not None:
            self.flops += 2 * args[first].numel() * args[first + 1].shape[-1]
        return func(*args, **(kwargs or {}))


def counted(fn: Callable[[], Any]) -> int:
    """FLOPs of the matrix products in one call, what is computed again in a backward included."""
    with Counted() as mode:
        fn()
    return mode.flops


def needed(rule: Any, tokens: int, heads: int) -> float:
    """FLOPs of the products that a compiled rule needs for forward and backward.

    The forward ones are counted from its graph; each has two of its own size in the backward. Nothing computed again is counted.
    """
    compiled = rule.compiled
    graphs = {name: stages.last for name, stages in compiled.graphs.items()}
    return 3 * plan_cost(compiled.equations, graphs, compiled.chunk).token.products * tokens * heads


class Bmm:
    """The yardstick as a case: torch.bmm of [512, 64, 64], as many times as make a run long enough to time."""

    repeats = 20

    def __init__(self) -> None:
        self.a, self.b = torch.randn(512, 64, 64), torch.randn(512, 64, 64)
        self.info = {"flops": self.repeats * 2 * 512 * 64**3}

    def forward(self) -> None:
        """One run."""
        for _ in range(self.repeats):
            torch.bmm(self.a, self.b)

    both = forward
