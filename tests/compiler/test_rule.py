"""Compiled rules obey the law table for every preset, with tiles so small that a few tokens cross several of them."""

from __future__ import annotations

import pytest
import torch

from memkit.compiler.pipeline import CompiledRule
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from tests import laws
from tests.cases import PRESETS, draw, small, spec_of
from tests.compare import assert_all_close
from tests.compiler.agree import compiled

CUTS = {  # pieces, and the age of the state they start from
    "token by token": ([1] * 9, 0),
    "mid-chunk": ([3, 6], 0),
    "at the chunk": ([4, 5], 4),
    "mid-window": ([2, 1, 4], 5),
    "shorter than a chunk": ([1, 2], 2),
}
DELTA_RULES = ("deltanet", "gated_deltanet", "kda")
ONE_OF_EACH_PLAN = {"swla": "linear", "titans_linear": "solve", "omeganet": "frozen", "atlas": "orthogonal", "dot": "span"}


def make(spec: LayerSpec, key_dim: int, value_dim: int) -> CompiledRule:
    return compiled(spec, key_dim, value_dim, tile=3)


def scanned(spec: LayerSpec, key_dim: int, value_dim: int) -> CompiledRule:
    return compiled(spec, key_dim, value_dim, tile=3, plan="scan")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_split(name: str, cut: str) -> None:
    pieces, prefix = CUTS[cut]
    laws.check_split(make, small(name), pieces, prefix=prefix)


@pytest.mark.parametrize("name", PRESETS)
def test_split_where_the_window_is_longer_than_the_chunk(name: str) -> None:
    laws.check_split(make, small(name, {"window.size": 5, "update.grad_at": "chunk"}, chunk=2), [1, 2, 4], prefix=1)


@pytest.mark.parametrize("name", PRESETS)
def test_causality(name: str) -> None:
    laws.check_causality(make, small(name), tol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_order(name: str) -> None:
    laws.check_order(make, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_idle(name: str) -> None:
    laws.check_idle(make, small(name), tol=1e-14)


@pytest.mark.parametrize("name", PRESETS)
def test_modes(name: str) -> None:
    laws.check_modes(make, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_state(name: str) -> None:
    laws.check_state(make, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_debug_refuses_gates_out_of_range(name: str) -> None:
    laws.check_debug(make, small(name))


@pytest.mark.parametrize("name", DELTA_RULES)
def test_recall(name: str) -> None:
    laws.check_recall(make, spec_of(name))


NEUTRAL = [(k, n) for k, knob in laws.KNOBS.items() for n in ONE_OF_EACH_PLAN if knob.applies(small(n))]


@pytest.mark.parametrize(("knob", "name"), NEUTRAL)
def test_neutral_knob(knob: str, name: str) -> None:
    laws.check_neutral(make, small(name), knob)


@pytest.mark.parametrize("name", ("titans", "atlas", "deltanet"))
def test_laws_of_the_sequential_plan(name: str) -> None:
    spec = small(name)
    laws.check_split(scanned, spec, [2, 1, 4], prefix=5)
    laws.check_causality(scanned, spec, tol=1e-12)
    laws.check_order(scanned, spec)
    laws.check_idle(scanned, spec, tol=1e-14)


def test_every_plan_is_swept() -> None:
    assert {name: make(small(name), 4, 4).plan for name in ONE_OF_EACH_PLAN} == ONE_OF_EACH_PLAN


@pytest.mark.parametrize("cut", (3, 5))
@pytest.mark.parametrize("name", PRESETS)
def test_states_are_interchangeable(name: str, cut: int) -> None:
    """A state made by the token loop continues in the compiled rule, and the other way round, mid-chunk and mid-window."""
    spec = small(name)
    loop, rule = ReferenceRule(spec, 4, 4), make(spec, 4, 4)
    inputs = draw(rule, T=9)
    want, end = inputs.run(loop)
    for first, second in ((loop, rule), (rule, loop)):
        head, state = inputs.piece(0, cut).run(first)
        tail, after = inputs.piece(cut, 9).run(second, state)
        got = {"head": head, "tail": tail} | {n: t for n, t in after.state_dict().items() if n != "position"}
        exact = {"head": want[:, :cut], "tail": want[:, cut:]} | {n: t for n, t in end.state_dict().items() if n != "position"}
        assert_all_close(got, exact, laws.TOL, f"{name}: {first.plan} then {second.plan} at {cut}")
        assert after.position == end.position == 9


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_precision(name: str, dtype: torch.dtype) -> None:
    laws.check_precision(make, ReferenceRule, small(name), dtype)


@pytest.mark.parametrize("name", ["swla", "omeganet", "swdt"])
def test_the_state_is_no_view_of_what_came_in(name: str) -> None:
    """A caller may write the next tokens into the same memory."""
    rule = make(small(name), 4, 4)
    inputs = draw(rule, B=1, T=9, H=1)
    with torch.no_grad():
        _, state = inputs.run(rule)
        keys, values = state.keys.clone(), state.values.clone()
        inputs.k.zero_()
        inputs.v.zero_()
    assert keys.numel() and torch.equal(state.keys, keys) and torch.equal(state.values, values)
