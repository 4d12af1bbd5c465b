"""Hard inputs give finite results or an error that says where; plans that do not fit say why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.compiler.plans import PLANS
from memkit.specs.component import Component
from memkit.specs.errors import KernelError, PlanError, ShapeError
from memkit.specs.layer import LayerSpec
from memkit.specs.memory import MemoryNet
from memkit.specs.optimizer import InnerOptimizer
from memkit.specs.reference import ReferenceRule
from memkit.specs.retention import Retention
from tests.cases import PRESETS, Inputs, draw, small, spec_of, unit
from tests.compare import assert_close
from tests.compiler.agree import check, compiled, oracle_results

ONE_OF_EACH_PLAN = ("swla", "titans_linear", "omeganet", "atlas", "dot_linear")


def make(name: str, tile: int = 3) -> CompiledRule:
    return compiled(small(name), 4, 4, tile)


# ---- keys, gates and lengths at their ends


@pytest.mark.parametrize("spread", (0.0, 1e-3))
@pytest.mark.parametrize("name", ("deltanet", "gated_deltanet", "kda", "titans_linear", "dot_linear"))
def test_near_parallel_keys(name: str, spread: float) -> None:
    """Keys all (nearly) the same, step size up to 1: the triangular system stays accurate in float32."""
    rule = compile_rule(small(name), 16, 16)
    inputs = draw(rule, B=1, T=128, H=2)
    k = unit(inputs.k[:, :1] + spread * torch.randn(inputs.k.shape, dtype=torch.float64))
    gates = inputs.gates | {"step_size": torch.rand_like(inputs.gates["step_size"]) * (0.3 if rule.spec.window.size > 1 else 1.0)}
    inputs = inputs._replace(k=k, q=k, gates=gates)
    exact, _ = inputs.run(rule)
    y, _ = inputs.map(Tensor.float).run(rule)
    assert_close(y, exact, 2e-5, name)


@pytest.mark.parametrize("name", PRESETS)
def test_keys_without_norm(name: str) -> None:
    """Raw Gaussian keys: finite, or an error under check=True that names token, head and gates."""
    rule = compile_rule(small(name, chunk=16), 16, 16)
    inputs = draw(rule, B=1, T=64, H=1, dtype=torch.float32)
    inputs = inputs._replace(k=torch.randn_like(inputs.k), q=torch.randn_like(inputs.q))
    try:
        y, _ = inputs.run(rule, check=True)
    except ShapeError as error:
        text = str(error)
        assert "at check" in text and "head 0" in text and "normalise the keys" in text, text
        assert all(gate in text for gate in rule.gates), text
    else:
        assert torch.isfinite(y).all()


@pytest.mark.parametrize("end", (0.0, 1.0))
@pytest.mark.parametrize("name", PRESETS)
def test_gates_at_their_ends(name: str, end: float) -> None:
    """Every gate exactly 0, or exactly 1 (step sizes stay small), at every token: equal to the token loop, gradients too."""
    rule = make(name)
    inputs = draw(rule, T=6)
    gates = {n: torch.full_like(g, 0.1 if n == "step_size" and end else end) for n, g in inputs.gates.items()}
    if end == 0.0 and "window_gate" in gates and rule.spec.optimizer.roles().keys() > {"momentum"} and rule.plan == "orthogonal":
        gates["window_gate"][..., -1] = 0.5  # an orthogonal step from exactly nothing has no direction
    check(rule, oracle_results(ReferenceRule(rule.spec, 4, 4), inputs._replace(gates=gates), 0), f"{name}, gates {end}")


@pytest.mark.parametrize("name", PRESETS)
def test_one_token(name: str) -> None:
    rule = make(name)
    oracle = ReferenceRule(rule.spec, 4, 4)
    inputs = draw(rule, T=8)
    for prefix in (0, 7):
        check(rule, oracle_results(oracle, inputs.piece(0, prefix + 1), prefix), f"{name}, one token after {prefix}")


@pytest.mark.parametrize("name", ("linear_attention", "gated_deltanet"))
def test_a_long_odd_length(name: str) -> None:
    """43,883 tokens, a prime: finite, and the end is that of the same sequence cut at another odd place."""
    rule = compile_rule(spec_of(name), 4, 4)
    inputs = draw(rule, B=1, T=43_883, H=1, dtype=torch.float32)
    with torch.no_grad():
        y, state = inputs.run(rule)
        _, half = inputs.piece(0, 20_001).run(rule)
        z, after = inputs.piece(20_001, 43_883).run(rule, half)
    assert_close(y[:, 20_001:], z, 1e-4, name)
    assert_close(state.weights["W"], after.weights["W"], 1e-4, name)


# ---- check and debug


@pytest.mark.parametrize("where", ("k", "v", "step_size"))
@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_check_names_the_first_token(name: str, where: str) -> None:
    """One bad number inside a chunk and a tile: the token itself is named, not the chunk's first."""
    rule = make(name, tile=64)
    inputs = draw(rule, T=11)
    if where == "step_size" and where not in inputs.gates:
        pytest.skip("the rule takes no step size")
    gates = {n: g.clone() for n, g in inputs.gates.items()}
    bad = inputs._replace(k=inputs.k.clone(), v=inputs.v.clone(), gates=gates)
    target = gates[where] if where in gates else getattr(bad, where)
    target[1, 6, 1] = float("nan")
    with pytest.raises(ShapeError) as error:
        bad.run(rule, check=True)
    text = str(error.value)
    for part in ("non-finite", where, "batch 1, token 6, head 1", *(f"{n} = " for n in rule.gates)):
        assert part in text, f"{part!r} is missing in\n{text}"


def test_check_sees_a_memory_that_blows_up() -> None:
    """A step size that makes the memory overflow: the token where it does, and which tensor."""
    rule = make("titans")
    inputs = draw(rule, T=30, dtype=torch.float32)
    gates = inputs.gates | {"step_size": torch.full_like(inputs.gates["step_size"], 1e4)}
    where = r"first in (weights|slots)\.\w+.* at batch \d, token \d+, head \d; gates there: .*step_size"
    with pytest.raises(ShapeError, match=f"non-finite values, {where}"):
        inputs._replace(gates=gates).run(rule, check=True)


@pytest.mark.parametrize("name", ONE_OF_EACH_PLAN)
def test_debug_names_a_gate_out_of_range(name: str) -> None:
    rule = make(name)
    inputs = draw(rule, T=3)
    for gate in rule.gates:
        low = inputs.gates[gate].clone()
        low[0, 2, 1] = -0.25
        with pytest.raises(ShapeError, match=f"gates.{gate}\n.*{gate} = -0.25 at batch 0, token 2, head 1"):
            inputs._replace(gates=inputs.gates | {gate: low}).run(rule, debug=True)


# ---- plans that refuse


class Squashed(Retention):
    """Equation: tanh(W)  Source: tests  Shapes: W [out, in]"""

    kind = "squashed"

    def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
        return torch.tanh(W)


class Squares(MemoryNet):
    """Equation: (W + W * W) f  Source: tests  Shapes: f [F] -> [V]"""

    kind = "squares"

    def shapes(self, features: int, values: int) -> dict[str, tuple[int, ...]]:
        return {"W": (values, features)}

    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        return (W["W"] + W["W"] * W["W"]) @ f


class TwoSlots(InnerOptimizer):
    """Equation: two running means  Source: tests  Shapes: grad [out, in]"""

    kind = "two_slots"

    def init(self, W: Tensor) -> dict[str, Tensor]:
        return {"S": torch.zeros_like(W), "Q": torch.zeros_like(W)}

    def update(self, grad: Tensor, state: Mapping[str, Tensor], gates: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        slot, square = 0.5 * state["S"] - 0.1 * grad, 0.5 * state["Q"] + grad * grad
        return slot / torch.sqrt(square + 0.1), {"S": slot, "Q": square}


STRANGE: tuple[type[Component], ...] = (Squashed, Squares, TwoSlots)
for member in STRANGE:  # taken out of the registry again, so that no other test meets them
    del member.members[member.kind]


@pytest.fixture
def strange() -> Iterator[None]:
    """The kinds above are known while a test runs."""
    for member in STRANGE:
        member.members[member.kind] = member
    yield
    for member in STRANGE:
        del member.members[member.kind]


CHUNK = {"update.grad_at": "chunk"}
KERNEL = {"features": "exponential"}
MUON = {"optimizer": "muon"}
HEADLESS = {**KERNEL, "memory": {"kind": "chain", "steps": [{"activation": "tanh"}, {"linear": 1}]}}
ONLY_KERNEL, FACTOR, ONE_MATRIX, LINEAR_STEP = (
    "the features exist only as a kernel",
    "retention is not a factor",
    "the memory is not linear in one weight",
    "the inner optimizer is not linear in the gradient",
)
ELSEWHERE = "weight W enters the memory's equation other than as a matrix times activations"
REFUSALS = [
    ("linear", {}, "the inner gradient depends on the prediction (degree 1), so on the memory"),
    ("linear", {"bias": "huber"}, "the inner gradient depends on the prediction (degree inf), so on the memory"),
    ("linear", {"bias": "dot", "memory": "mlp"}, ONE_MATRIX),
    ("linear", {"bias": "dot", **MUON}, LINEAR_STEP),
    ("linear", {"bias": "dot", "retention": Squashed()}, FACTOR),
    ("linear", {"bias": "dot", **KERNEL}, ONLY_KERNEL),
    ("solve", CHUNK, "the inner gradient is taken once a chunk (grad_at: chunk)"),
    ("solve", {"bias": "huber"}, "the inner gradient is not affine in the prediction with one slope"),
    ("solve", {"memory": "mlp"}, ONE_MATRIX),
    ("solve", MUON, LINEAR_STEP),
    ("solve", {"retention": Squashed()}, FACTOR),
    ("solve", {"retention": "channel", "window": {"size": 3, "gate": "input"}}, "the window is 3: only window 1 has a triangular form"),
    ("solve", KERNEL, ONLY_KERNEL),
    ("frozen", {"memory": "mlp"}, "the inner gradient is taken at every token (grad_at: token), not once a chunk"),
    ("frozen", {"memory": "mlp", "retention": "scalar", "update.grad_at": "decayed"}, "(grad_at: decayed), not once a chunk"),
    ("frozen", {**CHUNK, "memory": Squares()}, ELSEWHERE),
    ("frozen", {**CHUNK, **MUON}, LINEAR_STEP),
    ("frozen", {**CHUNK, "retention": Squashed()}, FACTOR),
    ("frozen", {**CHUNK, **KERNEL}, ONLY_KERNEL),
    ("orthogonal", {**CHUNK, "memory": Squares()}, ELSEWHERE),
    ("orthogonal", {**MUON}, "the inner gradient is taken at every token (grad_at: token) and depends on the memory"),
    ("orthogonal", {**CHUNK, **KERNEL}, ONLY_KERNEL),
    ("span", {}, "the features are finite, so the memory has a state of fixed size"),
    ("span", {**KERNEL, "memory": Squares()}, ELSEWHERE),
    ("span", HEADLESS, "the features meet something else before a weight, which their kernel cannot express"),
    ("span", {**KERNEL, "optimizer": TwoSlots()}, LINEAR_STEP),
    ("span", {**KERNEL, "retention": Squashed()}, "retention is not one factor a head"),
    ("scan", KERNEL, ONLY_KERNEL),
]


def custom(fields: Mapping[str, Any]) -> LayerSpec:
    return spec_of({}, fields)


@pytest.mark.parametrize(("plan", "fields", "sentence"), REFUSALS)
def test_a_pinned_plan_says_why_it_refuses(strange: None, plan: str, fields: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        compile_rule(custom(fields), 4, 4, plan=plan)
    text = str(error.value)
    assert f"plan {plan!r}" in text and sentence in text and "PlanError at plan" in text, text


def test_a_pinned_plan_names_one_that_would_do() -> None:
    with pytest.raises(PlanError, match=r"try +plan: auto \(here solve\)"):
        compile_rule(custom({}), 4, 4, plan="linear")


def test_an_unknown_plan_lists_the_plans() -> None:
    with pytest.raises(PlanError) as error:
        compile_rule(custom({}), 4, 4, plan="liner")
    assert all(name in str(error.value) for name in ("liner", "auto", *PLANS))


def test_a_spec_that_every_plan_refuses() -> None:
    with pytest.raises(PlanError) as error:
        compile_rule(custom(HEADLESS), 4, 4)
    assert all(f"{name}: " in str(error.value) for name in PLANS), error.value


def written(scale: float) -> type[Retention]:
    class Rewritten(Retention):
        """Equation: tanh(scale W)  Source: tests  Shapes: W [out, in]"""

        kind = "rewritten"

        def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
            return torch.tanh(scale * W)

    return Rewritten


def test_a_kind_that_is_written_anew_is_compiled_anew() -> None:
    """As in a notebook: the same name with another equation, at the same widths."""
    outputs = []
    for scale in (1.0, 0.5):
        written(scale)
        rule = compile_rule(custom({"retention": "rewritten"}), 4, 4)
        outputs.append(draw(rule).run(rule)[0])
    del Retention.members["rewritten"]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(KernelError, match="backend 'abacus'"):
        compile_rule(custom({}), 4, 4, backend="abacus")


@pytest.mark.parametrize("name", PRESETS)
def test_explain_gives_every_refusal(name: str) -> None:
    """No preset runs on the sequential plan, and what was not chosen has a reason."""
    rule = make(name)
    assert rule.plan != "scan"
    lines = rule.explain().splitlines()
    for plan in PLANS:
        if plan != rule.plan:
            said = [line for line in lines if line.strip().startswith(f"not {plan}: ")]
            assert len(said) == 1 and len(said[0].split(": ", 1)[1]) > 10, lines


UNKNOWN = ({"retention": Squashed()}, {"memory": Squares()}, {"optimizer": TwoSlots()}, {"memory": Squares(), **CHUNK})


@pytest.mark.parametrize("fields", UNKNOWN)
def test_whatever_no_plan_knows_runs_as_the_loop(strange: None, fields: Mapping[str, Any]) -> None:
    """New kinds that fit no fast form still run, and equal the oracle."""
    spec = custom({"update.chunk_size": 4, **fields})
    rule = compiled(spec, 3, 2, 3)
    assert rule.plan == "scan"
    inputs: Inputs = draw(rule, T=6)
    check(rule, oracle_results(ReferenceRule(spec, 3, 2), inputs, 2), rule.plan)
