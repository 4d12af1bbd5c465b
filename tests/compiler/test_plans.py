"""Every plan equals the token loop on every spec it accepts, chosen or pinned: float64, values, final states and all gradients.

Chunks are 4 tokens and tiles at most 5, so that each length crosses its own borders; resets, ends of ranges and idle tokens lie inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from memkit.compiler.build import build
from memkit.compiler.facts import facts
from memkit.compiler.plans import PLANS
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule
from tests.cases import Inputs, draw, spec_of
from tests.compiler.agree import check, compiled, oracle_results

C = 4
TILE = 5
LENGTHS = (1, C - 1, C, C + 1)
LONG = 77
WIDE = 6  # a window longer than a chunk


class At(NamedTuple):
    """A spec and the widths it is tried at."""

    fields: Mapping[str, Any]
    key_dim: int = 3
    value_dim: int = 5
    batch: int = 1
    step: float = 1.0  # shrinks step sizes where 77 of them would blow the memory up, and every rounding with it

    @property
    def spec(self) -> LayerSpec:
        given = {"window.gate": "input"} if "window.size" in self.fields and "window.gate" not in self.fields else {}
        return spec_of({}, {"update.chunk_size": C, **given, **self.fields})


SCALAR = {"retention": "scalar"}
CHANNEL = {"retention": "channel"}
MOMENTUM = {"optimizer": "momentum"}
MUON = {"optimizer": {"kind": "muon", "steps": 2}}
DOT, DECAYED, CHUNK, BEFORE = {"bias": "dot"}, {"update.grad_at": "decayed"}, {"update.grad_at": "chunk"}, {"update.read": "before"}
POLYNOMIAL = {"features": {"kind": "polynomial", "degree": 2}}
KERNEL = {"features": "exponential"}
MLP = {"memory": {"kind": "mlp", "depth": 2, "expansion": 2}}
DEEP = {"memory": {"kind": "mlp", "depth": 3, "expansion": 1, "activation": "silu"}}
GATED = {"memory": {"kind": "gated_mlp", "expansion": 2, "residual": True}}
STEPS = [{"linear": 2}, {"activation": "tanh"}, {"linear": 2}, {"skip": 2}, {"norm": "rms"}, {"linear": 1}]
CHAIN = {"memory": {"kind": "chain", "steps": STEPS}}
NORMED = {"memory": {"kind": "linear", "norm": "layer", "residual": True}}
COSH = {"bias": {"kind": "expression", "formula": "log(cosh(r))"}}
HUBER = {"bias": {"kind": "huber", "delta": 0.5}}
WINDOW = {"window.size": 3}

SPECS: Mapping[str, At] = {
    "dot": At({**DOT}, batch=2),
    "dot, scalar, momentum": At({**DOT, **SCALAR, **MOMENTUM, **WINDOW}, 2, 3),
    "dot, channel": At({**DOT, **CHANNEL, **WINDOW, **POLYNOMIAL}, 2, 3),
    "dot, channel, momentum, before": At({**DOT, **CHANNEL, **MOMENTUM, **BEFORE}),
    "dot, wide window, chunk": At({**DOT, **SCALAR, **CHUNK, "window.size": WIDE}, 5, 1),
    "l2": At({}, batch=2),
    "l2, scalar, decayed": At({**SCALAR, **DECAYED}, 5, 3),
    "l2, scalar, momentum, window": At({**SCALAR, **MOMENTUM, **WINDOW}),
    "l2, momentum, wide window, decayed, before": At({**SCALAR, **MOMENTUM, **DECAYED, **BEFORE, "window.size": WIDE}, 2, 1),
    "l2, channel, decayed": At({**CHANNEL, **DECAYED}, 3, 2),
    "l2, channel, momentum, polynomial": At({**CHANNEL, **MOMENTUM, **POLYNOMIAL}, 2, 3),
    "linear, chunk, wide window, momentum": At({**SCALAR, **MOMENTUM, **CHUNK, "window.size": WIDE}, 3, 2, 2),
    "linear, chunk, channel, huber": At({**CHANNEL, **CHUNK, **HUBER, **WINDOW}),
    "normed linear, chunk": At({**NORMED, **SCALAR, **CHUNK}, 3, 3),
    "mlp, chunk, momentum, window": At({**MLP, **SCALAR, **MOMENTUM, **CHUNK, **WINDOW}, batch=2),
    "deep mlp, chunk, expression, wide window, before": At({**DEEP, **COSH, **SCALAR, **CHUNK, **BEFORE, "window.size": WIDE}, 2, 3),
    "gated, chunk, polynomial": At({**GATED, **POLYNOMIAL, **CHUNK, **WINDOW}, 3, 3),
    "chain, chunk, momentum": At({**CHAIN, **MOMENTUM, **SCALAR, **CHUNK}, 3, 3, step=0.1),
    "muon, linear, chunk, window": At({**MUON, **SCALAR, **CHUNK, **WINDOW}, 3, 2),
    "muon, mlp, chunk": At({**MUON, **MLP, **SCALAR, **CHUNK}, 2, 3),
    "muon, dot, token, before": At({**MUON, **DOT, **SCALAR, **WINDOW, **BEFORE}, 2, 3),
    "muon, dot, channel, polynomial, before": At({**MUON, **DOT, **CHANNEL, **POLYNOMIAL, **BEFORE}, 2, 2),
    "token, mlp": At({**MLP, **SCALAR, **MOMENTUM, **WINDOW}, 2, 3),
    "token, muon, huber, decayed": At({**MUON, **HUBER, **SCALAR, **DECAYED}, 2, 3),
    "token, gated, residual": At({**GATED, **SCALAR, **WINDOW}, 3, 3),
    "kernel, dot": At({**KERNEL, **DOT, **SCALAR, **WINDOW}),
    "kernel, l2, momentum, decayed": At({**KERNEL, **SCALAR, **MOMENTUM, **DECAYED, "window.size": WIDE}, 2, 3),
    "kernel, huber": At({**KERNEL, **HUBER, **SCALAR}, 2, 3),
    "kernel, mlp, token": At({**KERNEL, **MLP, **SCALAR}, 2, 3),
    "kernel, mlp, chunk, momentum": At({**KERNEL, **MLP, **SCALAR, **MOMENTUM, **CHUNK, **WINDOW}, 3, 2),
    "kernel, linear, chunk, wide window": At({**KERNEL, **SCALAR, **CHUNK, "window.size": WIDE}, 2, 3),
}


def accepting(name: str) -> list[str]:
    at = SPECS[name]
    known = facts(build(Rule(at.spec, at.key_dim, at.value_dim)))
    return [plan for plan, module in PLANS.items() if module.refuse(known) is None]


PAIRS = [(name, plan) for name in SPECS for plan in accepting(name)]


def with_ends(inputs: Inputs, scale: float) -> Inputs:
    """Resets, full retention and momentum, idle steps and closed window slots at fixed tokens of the first head and row."""
    places = {("retain", 0.0): (2, 5), ("retain", 1.0): (3, 5), ("momentum", 0.0): (1, 7), ("momentum", 1.0): (3, 7)}
    places["step_size", 0.0] = (4, 6)
    gates = {n: g * scale if n == "step_size" else g.clone() for n, g in inputs.gates.items()}
    for (name, value), (first, step) in places.items():
        if name in gates:
            gates[name][0, first::step, 0] = value
    if "window_gate" in gates and gates["window_gate"].shape[-1] > 1:
        gates["window_gate"][0, 1::4, 0, :-1] = 0.0
        gates["window_gate"][0, 3::4, 0] = 1.0
    return inputs._replace(gates=gates)


@lru_cache(maxsize=8)
def wanted(name: str, tokens: int, prefix: int = 0) -> Any:
    """The token loop's results; the next plan that accepts the spec needs them again."""
    at = SPECS[name]
    oracle = ReferenceRule(at.spec, at.key_dim, at.value_dim)
    inputs = with_ends(draw(oracle, B=at.batch, T=prefix + tokens, H=2, seed=tokens), at.step)
    return oracle_results(oracle, inputs, prefix)


@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_agreement(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = SPECS[name]
    rule = compiled(at.spec, at.key_dim, at.value_dim, TILE, plan)
    assert rule.plan == plan
    for tokens in LENGTHS:
        check(rule, wanted(name, tokens), f"{plan}, {tokens} tokens")
    check(rule, wanted(name, C + 2, prefix=3), f"{plan}, from a state inside a chunk and a window")
    check(rule, wanted(name, LONG), f"{plan}, {LONG} tokens")
    if "chunks" in rule.compiled.graphs:
        monkeypatch.setitem(rule._module, "SEGMENT", 3 * 2 * at.batch * rule._module["RULE"]["numbers"])
        check(rule, wanted(name, LONG), f"{plan}, {LONG} tokens, three chunks a call")
