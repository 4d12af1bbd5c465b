"""Whether a memory that starts at zero can ever learn, asked of its own formula: a product of two zeros has no gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .contract import learned_scalars, weight_shapes
from .errors import MemkitError
from .memory import MemoryNet
from .optimizer import InnerOptimizer
from .retention import Retention

WIDTHS = range(4, 65)  # F, K and V tried: the first at which the memory has a shape
SCALES = (0.01, 1.0, 100.0)  # of features and keys, so that no threshold of an odd net is taken for a dead end


def stuck(memory: MemoryNet, zero: set[str], retention: Retention, optimizer: InnerOptimizer) -> bool:
    """Whether a memory whose weights `zero` start at 0 stays there, whatever it is asked to remember.

    True only where every gradient of `zero` is exactly 0 for all features, keys, slopes of the loss and other weights that are tried, those
    other weights' gradients are 0, too, and neither retention nor optimizer moves a 0 by itself. False where that cannot be found out.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            width = _width(memory)
            if not zero or not width:
                return False
            moved = any(bool(g.any()) for scale in SCALES for seed in range(3) for g in _gradients(memory, width, zero, scale, seed))
            return not moved and _rests(retention, optimizer)
    except Exception:  # a formula that fails here is refused, with its reason, where it is traced
        return False


def _width(memory: MemoryNet) -> int:
    """A width for features and values at which the memory has a shape, 0 for none."""
    for width in WIDTHS:
        try:
            weight_shapes(memory, width, width)
        except MemkitError:
            continue
        return width
    return 0


def _gradients(memory: MemoryNet, width: int, zero: set[str], scale: float, seed: int) -> Iterator[Tensor]:
    """Gradients of all weights for one random token and one random slope of the loss."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    shapes = weight_shapes(memory, width, width)
    scalars = {n: p.double() + 0.1 * normal(*p.shape) for n, p in learned_scalars(memory, width).items()}
    weights = {n: (torch.zeros(s, dtype=torch.float64) if n in zero else normal(*s)).requires_grad_() for n, s in shapes.items()}
    found = memory.predict(weights, scale * normal(width), scale * normal(width), **scalars)
    gradients = torch.autograd.grad((found * normal(width)).sum(), list(weights.values()), allow_unused=True)
    yield from (g for g in gradients if g is not None)


def _rests(retention: Retention, optimizer: InnerOptimizer) -> bool:
    """Whether a weight of 0 without gradient stays 0."""
    zero, half = torch.zeros(2, 3), torch.tensor(0.5)
    kept = retention.retain(zero, *(half for _ in retention.roles()))
    move, slots = optimizer.update(zero, optimizer.init(zero), dict.fromkeys(optimizer.roles(), half))
    return not any(bool(t.any()) for t in (kept, move, *slots.values()))
