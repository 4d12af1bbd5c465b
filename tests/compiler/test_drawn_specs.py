"""Hypothesis draws whole specs; the compiled rule equals the token loop in outputs, final state and every gradient.

MEMKIT_DRAWN sets the number of specs, at random then; the default is the same few hundred in every run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memkit.specs.reference import ReferenceRule
from memkit.strategies import Run, runs
from tests.compiler.agree import check, compiled, oracle_results

ASKED = int(os.environ.get("MEMKIT_DRAWN", "0"))
LARGE = 1e6  # a memory that blows up multiplies every rounding; such draws are left out
SHARES = {"token": 210, "decayed": 130, "chunk": 240, "kernel": 80}  # draws of each sort, 660 in all; more than 300 of the specs differ


def drawn(sort: str):
    count = SHARES[sort] if not ASKED else ASKED * SHARES[sort] // sum(SHARES.values())
    return settings(
        max_examples=count,
        derandomize=not ASKED,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def agrees(case: Run) -> None:
    oracle = ReferenceRule(case.spec, case.key_dim, case.value_dim)
    want = oracle_results(oracle, case.inputs(oracle), case.prefix)
    assume(all(t.numel() == 0 or t.abs().max() < LARGE for t in want[2].values()))
    rule = compiled(case.spec, case.key_dim, case.value_dim, case.tile)
    check(rule, want, rule.plan)


@drawn("token")
@given(runs("token"))
def test_gradients_at_every_token(case: Run) -> None:
    agrees(case)


@drawn("decayed")
@given(runs("decayed"))
def test_gradients_at_the_decayed_memory(case: Run) -> None:
    agrees(case)


@drawn("chunk")
@given(runs("chunk"))
def test_gradients_at_the_start_of_chunks(case: Run) -> None:
    agrees(case)


@drawn("kernel")
@given(st.sampled_from(("token", "decayed", "chunk")).flatmap(lambda grad_at: runs(grad_at, finite=False)))
def test_features_that_are_a_kernel(case: Run) -> None:
    agrees(case)
