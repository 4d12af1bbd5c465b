"""Rules that run C++, compiled once a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memkit.compiler.build import build
from memkit.compiler.facts import facts
from memkit.compiler.native_rule import PLANS, NativeRule
from memkit.compiler.plans import choose
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule
from tests.cases import PRESETS, Inputs, draw, small, spec_of
from tests.compiler.agree import compiled


def plan_of(spec: LayerSpec) -> str:
    return choose(facts(build(Rule(spec, 4, 4))), "auto").name


COVERED = tuple(name for name in PRESETS if plan_of(small(name)) in PLANS)
ONE_OF_EACH_PLAN = {"swla": "linear", "titans_linear": "solve", "omeganet": "frozen", "atlas": "orthogonal"}

# Widths at which large values are made in blocks, members of a team share steps, and products have several tiles each way.
WIDE: Mapping[str, tuple[str, Mapping[str, Any], int, int]] = {
    "linear": ("gla", {}, 70, 130),
    "linear with a window": ("swla", {}, 33, 67),
    "solve": ("kda", {}, 65, 72),
    "solve with a window and momentum": ("titans_linear", {"window": {"size": 3, "gate": "input"}}, 40, 33),
    "frozen": ("titans", {"update.chunk_size": 24}, 64, 64),
    "frozen with a window": ("omeganet", {"window.size": 5, "update.chunk_size": 20}, 10, 10),
    "features in stretches": ("omeganet", {"window.size": 3, "update.chunk_size": 12, "memory.expansion": 1}, 18, 18),
    "long chunks of features in stretches": ("omeganet", {"window.size": 3, "update.chunk_size": 66, "memory.expansion": 1}, 18, 18),
    "features of degree 3": ("omeganet", {"features.degree": 3, "update.chunk_size": 12, "memory.expansion": 1}, 8, 8),
    "frozen with a norm": ("ttt_mlp", {}, 34, 34),
    "long chunks of solve": ("gated_deltanet", {}, 20, 33),
    "long chunks of frozen": ("omeganet", {"window.size": 5, "update.chunk_size": 48, "features": "identity"}, 34, 34),
    "orthogonal": ("atlas", {"features": "identity", "update.chunk_size": 16, "optimizer.steps": 4}, 33, 33),
    "orthogonal with two wide weights": ("atlas_plus", {"update.chunk_size": 18, "memory.expansion": 2, "optimizer.steps": 3}, 6, 6),
}

_RULES: dict[tuple[str, int, int, int, str], NativeRule] = {}


def native(spec: LayerSpec, key_dim: int, value_dim: int, tile: int = 3, plan: str = "auto") -> NativeRule:
    """A rule that runs C++, with tiles of at most `tile` tokens and blocks of half as many; the same one for the same arguments."""
    key = (spec.model_dump_json(), key_dim, value_dim, tile, plan)
    if key not in _RULES:
        _RULES[key] = NativeRule(compiled(spec, key_dim, value_dim, tile, plan), most=min(8, (tile + 1) // 2))
    return _RULES[key]


def preset(name: str) -> NativeRule:
    """A preset cut small, with K = V = 4."""
    return native(small(name), 4, 4)


def wide(case: str) -> NativeRule:
    """A rule of `WIDE`, with tiles of 24 tokens, or of 48, in which products leave out zeros."""
    name, overrides, key_dim, value_dim = WIDE[case]
    return native(spec_of(name, overrides), key_dim, value_dim, tile=48 if case.startswith("long") else 24)


def drawn_wide(rule: NativeRule, tokens: int, heads: int) -> Inputs:
    """Inputs with small steps, under which wide memories stay as large as they were."""
    inputs = draw(rule, B=1, T=tokens, H=heads)
    return inputs._replace(gates={n: g / 4 if n == "step_size" else g for n, g in inputs.gates.items()})
