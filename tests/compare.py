"""The one way tests compare tensors: it raises, and says where the largest difference lies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def assert_close(got: Tensor, want: Tensor, tol: float, what: str = "value") -> None:
    """Require |got - want| <= tol * max(1, largest |want|) everywhere, equal shapes, and no NaN or infinity on either side.

    Raises:
        AssertionError: with the largest difference, its place and both values there.
    """
    if tuple(got.shape) != tuple(want.shape):
        raise AssertionError(f"{what}: shape {list(got.shape)}, expected {list(want.shape)}")
    if got.numel() == 0:
        return
    x, y = got.detach().cpu().to(torch.float64), want.detach().cpu().to(torch.float64)
    for side, values in (("got", x), ("expected", y)):
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            place = tuple(bad[0].tolist())
            raise AssertionError(f"{what}: {len(bad)} of {values.numel()} entries of `{side}` are not finite, the first at {list(place)}")
    gap = (x - y).abs()
    limit = tol * max(1.0, y.abs().max().item())
    if gap.max().item() > limit:
        flat = int(gap.argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), gap.shape))
        raise AssertionError(
            f"{what}: largest difference {gap[place].item():.3e} > {limit:.3e} at {list(place)} of {list(gap.shape)}: "
            f"got {x[place].item():.17g}, expected {y[place].item():.17g}; {int((gap > limit).sum())} of {gap.numel()} entries differ"
        )


def assert_all_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tol: float, what: str = "") -> None:
    """`assert_close` for every name; the names must be the same on both sides."""
    if set(got) != set(want):
        raise AssertionError(f"{what}: names {sorted(got)}, expected {sorted(want)}")
    if not want:
        raise AssertionError(f"{what}: nothing to compare")
    for name in want:
        assert_close(got[name], want[name], tol, f"{what}{': ' if what else ''}{name}")
