"""C++ equals the token loop in float64: values, final states and every gradient, at awkward widths, lengths, chunks and windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from memkit.compiler.native_rule import PLANS
from memkit.specs.reference import ReferenceRule
from memkit.testing import assert_matches_reference
from tests.cases import small
from tests.compiler.agree import check, oracle_results, tiles
from tests.compiler.test_plans import LENGTHS, LONG, PAIRS, SPECS, TILE, C, wanted

from .rules import COVERED, ONE_OF_EACH_PLAN, WIDE, drawn_wide, native, plan_of, wide

PAIRS = [(name, plan) for name, plan in PAIRS if plan in PLANS]


@pytest.mark.parametrize("name", COVERED)
def test_presets(name: str) -> None:
    """Around the edges of chunk, tile and window; from the start, and from states inside a chunk and a window."""
    spec = small(name)
    widths = (5, 5) if spec.memory.residual else (3, 5)
    with tiles(TILE):
        assert_matches_reference(
            spec, key_dim=widths[0], value_dim=widths[1], lengths=(1, 3, 4, 5, 9, 16), prefixes=(0, 1, 2, 7), backend="native"
        )


def test_every_plan_has_a_preset() -> None:
    assert {name: plan_of(small(name)) for name in ONE_OF_EACH_PLAN} == ONE_OF_EACH_PLAN
    assert set(ONE_OF_EACH_PLAN.values()) == set(PLANS)


@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_other_specs(name: str, plan: str) -> None:
    """What no preset has, with resets, full retention, idle steps and closed windows inside."""
    at = SPECS[name]
    rule = native(at.spec, at.key_dim, at.value_dim, TILE, plan)
    assert rule.plan == plan
    for tokens in LENGTHS:
        check(rule, wanted(name, tokens), f"{plan}, {tokens} tokens")
    check(rule, wanted(name, C + 2, prefix=3), f"{plan}, from a state inside a chunk and a window")
    check(rule, wanted(name, LONG), f"{plan}, {LONG} tokens")


CASES: Mapping[str, tuple[str, Mapping[str, Any], int, int]] = {
    "a power": ("dla", {"bias": {"kind": "lq", "q": 3}}, 4, 4),
    "huber": ("titans", {"bias": {"kind": "huber", "delta": 0.3}}, 3, 3),
    "powers of entries": ("titans_linear", {"features": {"kind": "elementwise", "degree": 3}}, 3, 2),
    "a cut-off": ("gla", {"features": "relu"}, 3, 4),
    "a number for every gate": ("omeganet", {"window.gate": 0.5, "retention.gate": 0.9, "optimizer.step_size": 0.1}, 3, 3),
    "numbers at every token": ("titans_linear", {"retention.gate": 0.9, "optimizer.momentum": 0.5}, 3, 2),
    "numbers at their ends": ("titans_linear", {"retention.gate": 1.0, "optimizer.momentum": 0.0}, 3, 2),
    "equal window slots": ("swla", {"window.gate": "none"}, 3, 2),
    "a gate that is learned": ("titans", {"retention.gate": "learned", "optimizer.step_size": "learned"}, 3, 3),
    "an expression, gated": ("titans", {"bias": {"kind": "expression", "formula": "log(cosh(r))"}, "memory.kind": "gated_mlp"}, 3, 3),
    "keys of one entry": ("kda", {}, 1, 4),
    "values of one entry": ("titans_linear", {}, 3, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_other_parts(case: str) -> None:
    name, overrides, key_dim, value_dim = CASES[case]
    with tiles(TILE):
        assert_matches_reference(
            small(name, overrides), key_dim=key_dim, value_dim=value_dim, lengths=(1, 5, 9), prefixes=(0, 2), backend="native"
        )


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("name", ["titans", "omeganet", "ttt_linear", "atlas"])
def test_chunk_sizes(name: str, chunk: int) -> None:
    lengths = (1, chunk, 2 * chunk + 1, 16)
    spec = small(name, chunk=chunk)
    assert_matches_reference(spec, key_dim=3, value_dim=3, lengths=lengths, prefixes=(0, 1, 2), backend="native")


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("case", WIDE)
def test_wide(case: str) -> None:
    rule = wide(case)
    oracle = ReferenceRule(rule.spec, rule.key_dim, rule.value_dim)
    check(rule, oracle_results(oracle, drawn_wide(rule, 3 + 66, heads=1), 3), case)
