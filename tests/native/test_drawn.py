"""Hypothesis draws whole specs; where their plan has C++, it equals the token loop in outputs, final state and every gradient.

MEMKIT_DRAWN sets the number of specs, at random then; the default is the same few dozen in every run.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, assume, given, settings

from memkit.compiler.native_rule import PLANS
from memkit.specs.reference import ReferenceRule
from memkit.strategies import Run, runs
from tests.compiler.agree import check, compiled, oracle_results

from .rules import native

ASKED = int(os.environ.get("MEMKIT_DRAWN", "0"))
LARGE = 1e6  # a memory that blows up multiplies every rounding; such draws are left out
SHARES = {"token": 13, "decayed": 7, "chunk": 20}


@pytest.mark.parametrize("sort", SHARES)
def test_drawn_specs(sort: str) -> None:
    @settings(
        max_examples=SHARES[sort] if not ASKED else ASKED * SHARES[sort] // sum(SHARES.values()),
        derandomize=not ASKED,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),  # type: ignore
    )
    @given(runs(sort, finite=True))
    def agrees(case: Run) -> None:
        assume(compiled(case.spec, case.key_dim, case.value_dim, case.tile).plan in PLANS)
        oracle = ReferenceRule(case.spec, case.key_dim, case.value_dim)
        want = oracle_results(oracle, case.inputs(oracle), case.prefix)
        assume(all(t.numel() == 0 or t.abs().max() < LARGE for t in want[2].values()))
        rule = native(case.spec, case.key_dim, case.value_dim, case.tile)
        check(rule, want, rule.plan)

    agrees()
