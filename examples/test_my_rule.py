"""Tests for a rule of your own: copy this file next to your spec and run it with pytest."""

from hypothesis import HealthCheck, given, settings
from pytest import raises

import memkit
from memkit import testing

# a delta rule that forgets, keeps a momentum and looks at the last three tokens
MY_RULE = {
    "name": "my_rule",
    "memory": "linear",
    "bias": "l2",
    "window": {"size": 3, "gate": "input"},
    "retention": "scalar",
    "optimizer": "momentum",
}


def test_it_reduces_to_the_delta_rule() -> None:
    testing.assert_equivalent(MY_RULE, "deltanet", given={"window.size": 1, "gates.momentum": 0, "gates.retain": 1}, kind="structural")


def test_it_is_not_gated_deltanet() -> None:
    with raises(AssertionError, match="they differ in y after 1 token"):
        testing.assert_equivalent(MY_RULE, "gated_deltanet", given={"window.size": 1, "gates.momentum": 0})


def test_the_compiled_rule_is_its_token_loop() -> None:
    testing.assert_matches_reference(MY_RULE)


@settings(max_examples=5, deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much))
@given(testing.runs("token", finite=True))
def test_a_cut_sequence_is_the_uncut_one(run) -> None:
    """Any spec, any widths: two pieces carried by the state give what the whole gives."""
    rule, inputs = run.rule(), run.inputs()
    y, _ = inputs.run(rule)
    cut = max(1, y.shape[1] // 2)
    first, state = inputs.piece(0, cut).run(rule)
    assert testing.distance(first, y[:, :cut]) < 1e-12
    if cut < y.shape[1]:
        second, _ = inputs.piece(cut, y.shape[1]).run(rule, state)
        assert testing.distance(second, y[:, cut:]) < 1e-12


def test_one_proof_printed() -> None:
    proof = memkit.equivalent(MY_RULE, "titans_linear", given={"window.size": 1})
    assert proof and proof.kind == "structural" and "one canonical form" in proof.evidence
