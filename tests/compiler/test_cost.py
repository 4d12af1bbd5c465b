"""Counted FLOPs, bytes and state bytes equal counts by hand; `explain` shows them."""

from __future__ import annotations

import math

import pytest

from memkit.compiler import ir
from memkit.compiler.cost import Count, advice, count, lowered, overtakes, plan_cost, softmax_growth, state_bytes
from memkit.compiler.ir import Graph
from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.compiler.plans import PLANS
from tests.cases import PRESETS, draw, small, spec_of

C, K, V = 6, 3, 5
E = 2 * V


def rule(name: str, **overrides: object) -> CompiledRule:
    return compile_rule(spec_of(name, {"update.chunk_size": C, **overrides}), K, V)


def counted(made: CompiledRule, chunk: int = C) -> Count:
    """The cost of a whole chunk."""
    graphs = {name: stages.last for name, stages in made.compiled.graphs.items()}
    return plan_cost(made.compiled.equations, graphs, chunk).token * chunk


def test_operations_by_hand() -> None:
    a, b = ir.param("a", ("t", "k")), ir.param("b", ("s", "k"))
    sizes = {"t": 4, "s": 6, "k": 3, "v": 2}
    product = Graph((a, b), (ir.einsum(a, b, over=("k",)),))
    assert count(product, sizes) == Count(2 * 4 * 6 * 3, 0, 4 * (4 * 3 + 6 * 3 + 4 * 6))
    assert count(Graph((a,), (ir.pointwise("exp", a),)), sizes) == Count(0, 12, 4 * 24)
    square, right = ir.param("l", ("r", "c")), ir.param("d", ("r", "v"))
    solved = Graph((square, right), (ir.solve(square, right, "r", "c"),))
    assert count(solved, {"r": 4, "c": 4, "v": 2}).products == 4 * 4 * 2
    z, c, d = ir.param("z", ("t", "k")), ir.param("c", ("t", "s")), ir.param("d", ("s", "v"))
    masked = Graph((z, b, c, d), (ir.masked_product(z, b, c, d, ("k",), "s"),))
    assert (count(masked, sizes).products, count(masked, sizes).others) == (2 * 24 * 3 + 2 * 24 * 2, 24)


def test_a_loop_counts_every_round() -> None:
    w, x = ir.param("w", ("v", "k")), ir.param("x", ("k",))
    body = Graph((w, x), (w, ir.einsum(w, x, over=("k",))))
    carry, rows = ir.param("w", ("v", "k")), ir.param("x", ("n", "k"))
    graph = Graph((carry, rows), tuple(ir.scan(body, [carry], [rows])))
    assert count(graph, {"n": 7, "v": 2, "k": 3}).products == 7 * 2 * 2 * 3


def test_linear_attention_by_hand() -> None:
    """Read of the state, scores, scores times values, update of the state."""
    made = rule("linear_attention")
    assert made.plan == "linear"
    assert counted(made).products == 2 * C * K * V + 2 * C * C * K + 2 * C * C * V + 2 * C * K * V


def test_deltanet_by_hand() -> None:
    """Keys with keys, the system for values and keys, three products with the state, queries with keys, times signals."""
    made = rule("deltanet")
    assert made.plan == "solve"
    assert counted(made).products == 2 * C * C * K + C * C * (K + V) + 6 * C * K * V + 2 * C * C * K + 2 * C * C * V


def test_titans_by_hand() -> None:
    """Two layers: predict, go back, read W and S, scores and their products, update W and S; and the decays' product."""
    made = rule("titans", **{"memory.expansion": 2})
    assert made.plan == "frozen"
    weights = K * E + E * V
    gradient = 2 * C * weights + 2 * C * E * V
    read = 4 * C * weights + 2 * C * C * (K + E) + 2 * C * C * (E + V)
    update = 4 * C * weights
    decays = 2 * C**3 + 2 * C * C
    assert counted(made).products == gradient + read + update + decays


def test_the_window_costs_only_its_columns() -> None:
    """Under `frozen` a window of c adds c - 1 columns and the band's product, nothing per token and slot."""
    one, four = (counted(rule("titans", **{"window": {"size": c, "gate": "input"}, "memory.expansion": 2})).products for c in (1, 4))
    more = 3
    per_column = 2 * (K * E + E * V) + 2 * E * V + 2 * C * (K + E) + 2 * C * (E + V) + 4 * (K * E + E * V)
    bands = 2 * (2 * C * C * (C + more))
    assert four - one == more * per_column + bands


def test_state_bytes_by_hand() -> None:
    made = rule("titans", **{"memory.expansion": 2, "window": {"size": 4, "gate": "input"}})
    held, grows = state_bytes(made.compiled.equations)
    assert (held, grows) == (4 * (3 * (K * E + E * V) + 3 * (K + V)), 0)


@pytest.mark.parametrize("name", PRESETS)
def test_state_bytes_are_those_of_the_state(name: str) -> None:
    made = compile_rule(small(name), 4, 4)
    held, grows = state_bytes(made.compiled.equations)
    for tokens in (1, 9):
        _, state = draw(made, B=1, T=tokens, H=1).map(lambda t: t.float()).run(made)
        assert state.nbytes == held + tokens * grows


def test_what_grows_with_the_past() -> None:
    """exp attention looks at every earlier key as softmax attention does, without the normaliser; where keys look too, it is twice that."""
    grows, overtaken = {}, {}
    for name in ("exp_attention", "dot_linear"):
        made = rule(name)
        cost = plan_cost(made.compiled.equations, {n: s.last for n, s in made.compiled.graphs.items()}, C)
        assert cost.at(1000).flops > cost.at(10).flops
        grows[name], overtaken[name] = cost.growth, overtakes(made.compiled.equations, cost)
    assert grows["exp_attention"].products == 2 * (K + V)
    assert grows["exp_attention"].flops < softmax_growth(made.compiled.equations) and not math.isinf(overtaken["exp_attention"])
    assert grows["dot_linear"].products >= 4 * (K + V) and math.isinf(overtaken["dot_linear"])


def test_the_length_that_overtakes_attention() -> None:
    """There, the mean FLOPs of causal attention have just reached the layer's."""
    made = rule("titans")
    eq = made.compiled.equations
    cost = plan_cost(eq, {n: s.last for n, s in made.compiled.graphs.items()}, C)
    length = overtakes(eq, cost)
    assert softmax_growth(eq) * (length - 1) / 2 < cost.token.flops <= softmax_growth(eq) * length / 2


def test_chunk_advice_balances() -> None:
    """Long chunks pay a square of their length; the advice is the longest that stays near the fewest FLOPs."""
    made = compile_rule(spec_of("linear_attention"), 32, 32)
    eq, graphs = made.compiled.equations, {n: s.last for n, s in made.compiled.graphs.items()}
    flops = {chunk: plan_cost(eq, graphs, chunk).token.flops for chunk in (8, 16, 32, 64, 128, 256)}
    best = advice(eq, graphs)
    assert flops[best] <= 1.25 * min(flops.values()) < flops[2 * best]


@pytest.mark.parametrize("name", PRESETS)
def test_explain_shows_the_cost_of_every_plan_that_accepts(name: str) -> None:
    made = compile_rule(small(name), 4, 4)
    text = made.explain()
    known, eq = made.compiled.facts, made.compiled.equations
    for plan, module in PLANS.items():
        if module.refuse(known) is None:
            graphs = lowered(eq, known, plan)
            chunk = made.compiled.chunk if known.grad_at == "chunk" else module.tile(known)
            assert f"  {plan:<10} {plan_cost(eq, graphs, chunk).token.flops:>12,.0f} FLOPs" in text
    assert "state of one head: " in text and "softmax attention" in text
