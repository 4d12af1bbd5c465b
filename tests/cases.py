"""Specs and inputs for tests: presets at small sizes, and random inputs in sane ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memkit import inputs
from memkit.inputs import Inputs
from memkit.specs.io import load_spec, presets
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule

PRESETS = presets()
DEEP = ("mlp", "gated_mlp")


def spec_of(source: Any, overrides: Mapping[str, Any] | None = None) -> LayerSpec:
    """A spec from a preset name or a mapping."""
    return load_spec(source, dict(overrides or {}))


def small(source: Any, overrides: Mapping[str, Any] | None = None, *, chunk: int = 4, window: int = 3) -> LayerSpec:
    """A preset cut down so that a few tokens cross chunks and windows: chunk size 4, window 3 where it has one, hidden width 2 V.

    What `overrides` sets stays as it is.
    """
    spec = spec_of(source, overrides)
    given = {path.split(".")[0] for path in overrides or {} if path in ("window", "window.size", "memory", "update", "update.chunk_size")}
    cut: dict[str, Any] = {}
    if "update" not in given:
        cut["update.chunk_size"] = chunk
    if "window" not in given and spec.window.size > 1:
        cut["window.size"] = window
    if "memory" not in given and spec.memory.kind in DEEP:
        cut["memory.expansion"] = 2
    return spec_of(spec, cut)


def gates_given(spec: LayerSpec) -> LayerSpec:
    """The same spec with every gate `input`, constants included, so that a test can choose their values."""
    found: dict[str, Any] = {}
    for path, component in spec.components():
        found |= {f"{path}.{field}": "input" for field in component.gates}
    return spec_of(spec, found | {"window.gate": "input"})


def unit(x: Tensor) -> Tensor:
    """x with unit rows."""
    return x / x.norm(dim=-1, keepdim=True)


def draw(rule: Rule, B: int = 2, T: int = 9, H: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """The library's random inputs, at the sizes most tests want: a few rows and heads, more tokens than a chunk and a window."""
    return inputs.draw(rule, B, T, H, seed, dtype)
