"""The configurations that ship: tile sizes and warps by plan, widest axis and target, chosen by `memkit kernels`. The key never has a length."""

from __future__ import annotations

from collections.abc import Mapping

from .tile import Config

NARROW = Config(rows=32, cols=32, inner=32, warps=4)


def config_for(plan: str, sizes: Mapping[str, int], target: str, single: bool) -> Config:
    """The shipped configuration. single: products in float32, which no tensor core makes exactly."""
    return NARROW if single else Config()
