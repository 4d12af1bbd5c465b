"""`explain` and `equation`: what they say is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memkit
from memkit.equations import equation_of
from memkit.explanation import equation, explain, memory_cost, projection_flops, state_bytes
from memkit.layers.memory_layer import MemoryLayer, load
from memkit.specs.errors import SpecError
from memkit.specs.gate import Number
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from tests.cases import PRESETS, small

ATLAS = """\
phi(a).phi(b) = a0 + a1 a.b + a2 (a.b)^2, a_i learned from 1/i!
M(x)          = x + W2 gelu(W1 phi(x))
loss(p, v)    = 1/2 ||p - v||^2
G_t           = sum_{i=t-7..t} window_gate_{t,i} grad_W loss(M(k_i; A_t), v_i)   A_t = W at the start of t's chunk of 64 tokens
S_t           = momentum_t S_{t-1} - G_t
U_t           = step_size_t NS5(S_t)
W_t           = retain_t W_{t-1} + U_t
y_t           = M(q_t; W_t)"""

DELTANET = """\
M(x)          = W x
loss(p, v)    = 1/2 ||p - v||^2
G_t           = grad_W loss(M(k_t; W_{t-1}), v_t)
U_t           = -step_size_t G_t
W_t           = W_{t-1} + U_t
y_t           = M(q_t; W_t)"""


def test_equations_word_by_word() -> None:
    assert equation("atlas") == ATLAS
    assert equation("deltanet") == equation(load("deltanet", dim=16)) == DELTANET


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"features": "elu1"}, "phi(x)        = elu(x) + 1"),
        ({"features": {"kind": "elementwise", "degree": 3}}, "phi(x)        = x + x^2/2 + x^3/6, entry by entry"),
        ({"features": {"kind": "polynomial", "degree": 3, "coefficients": "taylor"}}, "= 1 + a.b + 0.5 (a.b)^2 + 0.1667 (a.b)^3"),
        ({"features": "exponential"}, "for W = W; no d at the start"),
        ({"memory": {"kind": "mlp", "depth": 3, "activation": "silu", "norm": "layer"}}, "= LN(W3 silu(W2 silu(W1 x)))"),
        ({"memory": "gated_mlp"}, "= W2 (gelu(W1 x) * W3 x)"),
        ({"memory": {"kind": "chain", "steps": [{"linear": 1}, {"norm": "rms"}, {"skip": 1}]}}, "= (rms_norm(W1 x) + W1 x)"),
        ({"bias": {"kind": "huber", "delta": 0.5}}, "sum_j huber(p_j - v_j), linear beyond 0.5"),
        ({"bias": {"kind": "expression", "formula": "log(cosh(r))"}}, "sum_j log(cosh(r)), r = p_j - v_j"),
        ({"bias": {"kind": "lq", "q": 1.5}}, "1/1.5 sum_j |p_j - v_j|^1.5"),
        ({"retention": {"kind": "channel", "gate": "learned"}}, "W_t           = W_{t-1} diag(retain) + U_t"),
        ({"retention": {"kind": "scalar", "gate": 0.9}}, "W_t           = 0.9 W_{t-1} + U_t"),
        ({"retention": "scalar", "update.grad_at": "decayed"}, "loss(M(k_t; retain_t W_{t-1}), v_t)"),
        ({"optimizer": {"kind": "momentum", "momentum": 0.5, "step_size": 1}}, "S_t           = 0.5 S_{t-1} - G_t"),
        ({"optimizer": {"kind": "muon", "steps": 3, "step_size": 1}}, "U_t           = NS3(S_t)"),
        ({"window.size": 4}, "sum_{i=t-3..t} grad_W loss(M(k_i; W_{t-1}), v_i)"),
        ({"window": {"size": 4, "gate": "learned"}}, "sum_{i=t-3..t} window_gate_{i-t} grad_W"),
        ({"update.read": "before"}, "y_t           = M(q_t; W_{t-1})"),
    ],
)
def test_each_choice_shows(change: dict[str, object], line: str) -> None:
    text = equation("deltanet", change)
    assert line in text, text


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_explained(name: str) -> None:
    text, spec = explain(name), load_spec(name)
    assert text.startswith(name) and equation_of(spec).splitlines()[0] in text
    assert text.isascii()
    for gate, (_, kind) in spec.roles().items():
        assert isinstance(kind, Number) or f"\n  {gate}" in text
    for part in ("inner: the memory", "outer: learned", "read: after", "bytes a sequence", "FLOPs a token", "Deviations:", "plan: "):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize("name", PRESETS)
def test_state_bytes_are_those_of_a_real_state(name: str) -> None:
    layer = MemoryLayer(small(name), 8, 2)
    _, state = layer(torch.randn(1, 3, 8))
    held, grows = state_bytes(layer)
    assert state.nbytes == held + 3 * grows
    assert (grows > 0) == (not layer.rule.finite)


def test_projection_flops_by_hand() -> None:
    layer = load("deltanet", dim=6, heads=2)  # K = V = 3
    assert projection_flops(layer) == 2 * (6 * 18 + 4 * 18 + 6 * 2 + 6 * 6 + 6 * 6)  # q k v, convolution, step size, output gate, output


@pytest.mark.parametrize("name", ("titans", "exp_attention"))
def test_one_count_of_flops(name: str) -> None:
    """The layer's number is made of the plan's own, which stands below it, under the plan's name."""
    for backend in ("auto", "reference"):
        layer = load(name, dim=8, heads=2, backend=backend)
        text, (plan, cost) = explain(layer), memory_cost(layer)
        token, growth, around = round(cost.token.flops), round(cost.growth.flops), projection_flops(layer)
        assert f"FLOPs a token, forward: {around + 2 * token:,} (projections {around:,}, memory 2 heads x {token:,})\n" in text
        assert f"the memory's are those of plan {plan}; " in text
        assert backend == "reference" or f"\n    {plan:<10} {token:>12,} FLOPs" in text
        assert (growth > 0) == ("more for every earlier token (2 heads" in text) == (f" {2 * growth:,} more for every earlier" in text)
        assert text.count("FLOPs a token, forward") == 1


def test_sizes_and_overrides() -> None:
    text = explain("deltanet", dim=32, heads=2, overrides={"window.size": 3})
    assert "at dim 32, 2 heads, key_dim 16, value_dim 16" in text and "window: the last 3 tokens" in text
    assert "9,216 more with every token" in explain("dot")
    assert "no start is learned" in text
    with pytest.raises(SpecError):
        explain("deltanet", dim=30, heads=4)


def test_a_component_that_says_nothing_is_named() -> None:
    from memkit.specs.bias import AttentionalBias

    class Quiet(AttentionalBias):
        def loss(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (prediction - target).sum()

    Quiet.kind = "quiet"  # set late, so that the family does not list it
    assert "loss(p, v)    = quiet(p, v)" in equation_of(LayerSpec(bias=Quiet()))


def test_a_layer_that_is_made_takes_no_sizes() -> None:
    layer = load("deltanet", dim=16, heads=2)
    explain(layer)
    more: list[dict[str, Any]] = [{"dim": 32}, {"heads": 4}, {"overrides": {"window.size": 2}}]
    for given in more:
        with pytest.raises(SpecError, match="a MemoryLayer with dim, heads or overrides"):
            explain(layer, **given)


def test_what_comes_before_a_pinned_plan_is_not_said_to_come_later() -> None:
    chosen, pinned = (memkit.compile("deltanet", key_dim=4, value_dim=4, plan=plan).explain() for plan in ("auto", "scan"))
    assert "not scan: accepts too, but comes later\n" in chosen and "not solve: accepts too\n" in pinned
