"""The token loop obeys the law table for every preset, and gives numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from memkit.inputs import values_and_gradients
from memkit.specs.bias import AttentionalBias, Expression
from memkit.specs.errors import ShapeError, SpecError
from memkit.specs.features import Polynomial
from memkit.specs.layer import LayerSpec
from memkit.specs.optimizer import newton_schulz
from memkit.specs.reference import ReferenceRule
from tests import laws
from tests.cases import PRESETS, draw, small, spec_of, unit
from tests.compare import assert_close

F64 = torch.float64
Named = dict[str, object]
CUTS = {  # pieces, and the age of the state they start from
    "token by token": ([1] * 9, 0),
    "mid-chunk": ([3, 6], 0),
    "at the chunk": ([4, 5], 4),
    "mid-window": ([2, 1, 4], 5),
    "shorter than a chunk": ([1, 2], 2),
}
PLAIN = {"memory": "linear", "bias": "l2", "features": "identity", "optimizer": "gd"}
DELTA_RULES = [
    n for n in PRESETS if all(c.kind == PLAIN.get(f, c.kind) for f, c in spec_of(n).components()) and spec_of(n).memory.norm == "none"
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_split(name: str, cut: str) -> None:
    pieces, prefix = CUTS[cut]
    laws.check_split(ReferenceRule, small(name), pieces, prefix=prefix)


@pytest.mark.parametrize("name", PRESETS)
def test_split_where_the_window_is_longer_than_the_chunk(name: str) -> None:
    laws.check_split(ReferenceRule, small(name, {"window.size": 5, "update.grad_at": "chunk"}, chunk=2), [1, 2, 4], prefix=1)


MIXED: dict[str, tuple[str, Named]] = {  # what no preset has
    "momentum over infinite features": ("dot", {"optimizer": {"kind": "momentum"}, "retention": "scalar"}),
    "read before": ("titans", {"update.read": "before"}),
    "decayed window": ("omeganet", {"memory": "linear", "update.grad_at": "decayed", "optimizer": "momentum"}),
    "orthogonal by channel": ("kda", {"optimizer": {"kind": "muon", "steps": 2}, "window": {"size": 2, "gate": "learned"}}),
    "a chain": ("titans", {"memory": "chain", "bias": {"kind": "huber", "delta": 0.5}, "features": "elu1"}),
    "depth 3": ("dla", {"memory": {"kind": "mlp", "depth": 3, "expansion": 2, "norm": "layer"}, "bias": "lq", "features": "elementwise"}),
}


@pytest.mark.parametrize("name", MIXED)
def test_laws_of_mixed_specs(name: str) -> None:
    preset, overrides = MIXED[name]
    spec = small(preset, overrides)
    laws.check_split(ReferenceRule, spec, [2, 4, 3], prefix=5)  # cuts inside two chunks
    laws.check_causality(ReferenceRule, spec)
    laws.check_order(ReferenceRule, spec)
    laws.check_idle(ReferenceRule, spec)
    laws.check_modes(ReferenceRule, spec)
    laws.check_state(ReferenceRule, spec)


@pytest.mark.parametrize("name", PRESETS)
def test_causality(name: str) -> None:
    laws.check_causality(ReferenceRule, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_a_later_token_that_is_not_finite_leaves_the_past_alone(name: str) -> None:
    rule = ReferenceRule(small(name), 4, 4)
    inputs = draw(rule, T=6)
    bad = inputs.map(torch.clone)
    for t in (bad.q, bad.k, bad.v, *bad.gates.values()):
        t[:, 4:] = float("nan")
    assert_close(bad.run(rule)[0][:, :4], inputs.run(rule)[0][:, :4], 1e-14, name)


class Root(AttentionalBias):
    """Equation: sum_j sqrt(|r_j|)  Source: tests  Shapes: p [V], v [V] -> []"""

    kind = "root"

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction - target).abs().sqrt().sum()


del AttentionalBias.members["root"]  # known to its test alone


@pytest.mark.parametrize("bias", [Expression(formula="abs(r)^1.5"), Root()])
def test_window_slots_before_the_start_never_count(bias: AttentionalBias) -> None:
    """Not even where the bias has no finite slope at r = 0, which a made-up zero key and value would give."""
    spec = spec_of({"memory": "linear", "window": {"size": 3, "gate": "input"}}).model_copy(update={"bias": bias})
    rule = ReferenceRule(spec, 4, 4)
    for name, t in values_and_gradients(rule, draw(rule, T=4)).items():
        assert t.isfinite().all(), name


@pytest.mark.parametrize("name", ["atlas", "ttt_linear"])
def test_learned_scalars_may_differ_by_head(name: str) -> None:
    rule = ReferenceRule(small(name), 4, 4)
    inputs = draw(rule, T=6)
    assert inputs.params
    same = inputs._replace(params={n: p.expand(2, *p.shape) for n, p in inputs.params.items()})
    assert_close(same.run(rule)[0], inputs.run(rule)[0], 1e-14, "the same for both heads")
    other = {n: p * 1.5 for n, p in inputs.params.items()}
    apart = inputs._replace(params={n: torch.stack([p, other[n]]) for n, p in inputs.params.items()}).run(rule)[0]
    assert_close(apart[:, :, 0], inputs.run(rule)[0][:, :, 0], 1e-14, "head 0")
    assert_close(apart[:, :, 1], inputs._replace(params=other).run(rule)[0][:, :, 1], 1e-14, "head 1")


@pytest.mark.parametrize("name", PRESETS)
def test_order(name: str) -> None:
    laws.check_order(ReferenceRule, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_idle(name: str) -> None:
    laws.check_idle(ReferenceRule, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_modes(name: str) -> None:
    laws.check_modes(ReferenceRule, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_state(name: str) -> None:
    laws.check_state(ReferenceRule, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_debug_refuses_gates_out_of_range(name: str) -> None:
    laws.check_debug(ReferenceRule, small(name))


@pytest.mark.parametrize("name", PRESETS)
def test_shape_errors_list_the_sizes(name: str) -> None:
    laws.check_shape_errors(ReferenceRule, small(name))


@pytest.mark.parametrize(("knob", "name"), [(k, n) for k, knob in laws.KNOBS.items() for n in PRESETS if knob.applies(small(n))])
def test_neutral_knob(knob: str, name: str) -> None:
    laws.check_neutral(ReferenceRule, small(name), knob)


@pytest.mark.parametrize("name", DELTA_RULES)
def test_recall(name: str) -> None:
    laws.check_recall(ReferenceRule, spec_of(name))


def test_recall_is_tried() -> None:
    assert set(DELTA_RULES) == {"deltanet", "gated_deltanet", "kda"}


# Numbers worked by hand. One row and one head; matrices are written [out, in].


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=F64)


def run(spec: LayerSpec, q: object, k: object, v: object, gates: Named, weights: Named) -> tuple[Tensor, dict[str, Tensor]]:
    """y [T, V] and the final weights; tokens are rows, gates one value (or row) a token."""

    def rows(x: object) -> Tensor:
        return tensor(x)[None, :, None]

    rule = ReferenceRule(spec, 2, 2)
    y, state = rule(rows(q), rows(k), rows(v), {n: rows(g) for n, g in gates.items()}, {n: tensor(w)[None] for n, w in weights.items()})
    return y[0, :, 0], {n: w[0, 0] for n, w in state.weights.items()}


ZERO, EYE = [[0, 0], [0, 0]], [[1, 0], [0, 1]]


def test_hand_delta_rule() -> None:
    # t=1: W = (2,3) (1,0)^T; y = W (1,1) = (2,3)
    # t=2: W k = (1.2, 1.8), r = (0.2, 2.8); W -= 0.5 r (0.6, 0.8)^T -> [[1.94, -0.08], [2.16, -1.12]]; y = W (1,2) = (1.78, -0.08)
    y, w = run(spec_of("deltanet"), [[1, 1], [1, 2]], [[1, 0], [0.6, 0.8]], [[2, 3], [1, -1]], {"step_size": [1, 0.5]}, {"W": ZERO})
    assert_close(y, tensor([[2, 3], [1.78, -0.08]]), 1e-15, "y")
    assert_close(w["W"], tensor([[1.94, -0.08], [2.16, -1.12]]), 1e-15, "W")


def test_hand_decayed_linear_attention() -> None:
    # t=1: W = (1,-1) (1,2)^T = [[1,2],[-1,-2]]; y = W (1,0) = (1,-1)
    # t=2: W = 0.5 W + (4,2) (0,1)^T = [[0.5,5],[-0.5,1]]; y = W (2,1) = (6,0).   t=3: retain 0 resets: W = (1,1) (1,1)^T; y = (3,3)
    gates: Named = {"retain": [1, 0.5, 0]}
    y, w = run(spec_of("retnet"), [[1, 0], [2, 1], [1, 2]], [[1, 2], [0, 1], [1, 1]], [[1, -1], [4, 2], [1, 1]], gates, {"W": ZERO})
    assert_close(y, tensor([[1, -1], [6, 0], [3, 3]]), 1e-15, "y")
    assert_close(w["W"], tensor([[1, 1], [1, 1]]), 1e-15, "W")


def test_hand_momentum() -> None:
    # t=1: r = (1,0) - (0,0); G = [[1,0],[0,0]]; S = -0.5 G; W = 0.5 I + S = [[0,0],[0,0.5]]; y = W (1,1) = (0, 0.5)
    # t=2: r = (0,0.5) - (1,1); G = [[0,-1],[0,-0.5]]; S = 0.5 S - G = [[-0.25,1],[0,0.5]]; W = 0.5 W + S = [[-0.25,1],[0,0.75]]
    gates: Named = {"retain": [0.5, 0.5], "momentum": [0.9, 0.5], "step_size": [0.5, 1]}
    y, w = run(spec_of("titans_linear"), [[1, 1], [1, 1]], [[1, 0], [0, 1]], [[0, 0], [1, 1]], gates, {"W": EYE})
    assert_close(y, tensor([[0, 0.5], [0.75, 0.75]]), 1e-15, "y")
    assert_close(w["W"], tensor([[-0.25, 1], [0, 0.75]]), 1e-15, "W")


def test_hand_window() -> None:
    # c = 2. t=1: slot 0 lies before the sequence and counts nothing; r = -(1,0); W = [[1,0],[0,0]]
    # t=2, step 0.5: token 1: r = 0; token 2: r = (1,0) - (3,0) = (-2,0); W = [[2,0],[0,0]]
    # t=3, step 1: token 2 at the current W: r = (2,0) - (3,0) = (-1,0), gate 0.5; token 3: r = -(0,5), gate 1; W = [[2.5,0],[0,5]]
    spec = spec_of({"memory": "linear", "window": {"size": 2, "gate": "input"}})
    gates: Named = {"step_size": [1, 0.5, 1], "window_gate": [[1, 1], [0.5, 1], [0.5, 1]]}
    y, w = run(spec, [[1, 1], [1, 1], [2, 1]], [[1, 0], [1, 0], [0, 1]], [[1, 0], [3, 0], [0, 5]], gates, {"W": ZERO})
    assert_close(y, tensor([[1, 0], [2, 0], [5, 5]]), 1e-15, "y")
    assert_close(w["W"], tensor([[2.5, 0], [0, 5]]), 1e-15, "W")


def test_hand_frozen_chunk() -> None:
    # chunk 2, step 1, one key. t=1: r = -(1,0), W = [[1,0],[0,0]].  t=2: still at W_0 = 0: r = -(0,1), W = [[1,0],[1,0]]
    # t=3: new chunk, at W_2: r = (1,1) - (0,0), W = 0.   (At W_{t-1} token 2 would have r = (1,-1) and W = [[0,0],[1,0]].)
    spec = spec_of({"memory": "linear", "update": {"grad_at": "chunk", "chunk_size": 2}})
    keys, values = [[1, 0]] * 3, [[1, 0], [0, 1], [0, 0]]
    y, w = run(spec, keys, keys, values, {"step_size": [1, 1, 1]}, {"W": ZERO})
    assert_close(y, tensor([[1, 0], [1, 1], [0, 0]]), 1e-15, "y")
    assert_close(w["W"], tensor(ZERO), 1e-15, "W")
    y, w = run(spec_of(spec, {"update.grad_at": "token"}), keys[:2], keys[:2], values[:2], {"step_size": [1, 1]}, {"W": ZERO})
    assert_close(w["W"], tensor([[0, 0], [1, 0]]), 1e-15, "W at W_{t-1}")


def test_hand_decayed_gradient() -> None:
    # retain (0.5, 1) on columns: [[0.5,2],[1.5,4]]; r = (0.5,1.5) - (1,1) = (-0.5,0.5); W = [[1,2],[1,4]]
    # at W_{t-1} instead: r = (1,3) - (1,1) = (0,2); W = [[0.5,2],[-0.5,4]]
    gates: Named = {"retain": [[0.5, 1]], "step_size": [1]}
    for grad_at, want in (("decayed", [[1, 2], [1, 4]]), ("token", [[0.5, 2], [-0.5, 4]])):
        _, w = run(spec_of("kda", {"update.grad_at": grad_at}), [[1, 0]], [[1, 0]], [[1, 1]], gates, {"W": [[1, 2], [3, 4]]})
        assert_close(w["W"], tensor(want), 1e-15, grad_at)


def test_hand_exponential() -> None:
    # y_2 = v_1 exp(q.k_1) + v_2 exp(q.k_2) = 2 (1,0) + 3 (1,1) = (5,3); y_1 = v_1 exp(0) = (1,0)
    y, w = run(spec_of("exp_attention"), [[0, 1], [1, 1]], [[math.log(2), 0], [0, math.log(3)]], [[1, 0], [1, 1]], {}, {})
    assert_close(y, tensor([[1, 0], [5, 3]]), 1e-14, "y")
    assert w == {}


def test_hand_mlp() -> None:
    # W1 k = (1,-1), h = relu = (1,0), p = W2 h = (1,0) = r.  G2 = r h^T = [[1,0],[0,0]]; back: W2^T r = (1,0), times relu' = (1,0);
    # G1 = (1,0) (1,1)^T. Step 0.5: W2 = [[0.5,0],[0,1]], W1 = [[0.5,-0.5],[0,-1]]. Read (2,-2): W1 q = (2,2); y = (1,2)
    spec = spec_of({"memory": {"kind": "mlp", "expansion": 1, "activation": "relu"}})
    y, w = run(spec, [[2, -2]], [[1, 1]], [[0, 0]], {"step_size": [0.5]}, {"W1": [[1, 0], [0, -1]], "W2": EYE})
    assert_close(w["W1"], tensor([[0.5, -0.5], [0, -1]]), 1e-15, "W1")
    assert_close(w["W2"], tensor([[0.5, 0], [0, 1]]), 1e-15, "W2")
    assert_close(y, tensor([[1, 2]]), 1e-15, "y")


def test_hand_newton_schulz() -> None:
    # diag(3,4) / 5 = diag(0.6, 0.8); one step maps s to 3.4445 s - 4.775 s^3 + 2.0315 s^5:
    # 0.6 -> 2.0667 - 1.0314 + 0.15796944 = 1.19326944;  0.8 -> 2.7556 - 2.4448 + 0.66568192 = 0.97648192
    assert_close(newton_schulz(tensor([[3, 0], [0, 4]]), 1, eps=0.0), tensor([[1.19326944, 0], [0, 0.97648192]]), 1e-14, "one step")
    assert_close(newton_schulz(tensor([[3, 0], [0, 4]]), 0, eps=0.0), tensor([[0.6, 0], [0, 0.8]]), 1e-15, "no step")
    # S = 0.5 S_0 - G with S_0 = 0 and G = (W k - v) k^T = (-3,-4) (1,0)^T: NS_0(S) = [[0.6,0],[0.8,0]]; W = 0.5 I + 2 NS_0(S)
    spec = spec_of({"memory": "linear", "optimizer": {"kind": "muon", "steps": 0}, "retention": "scalar"})
    gates: Named = {"momentum": [0.5], "step_size": [2], "retain": [0.5]}
    y, w = run(spec, [[1, 2]], [[1, 0]], [[4, 4]], gates, {"W": EYE})
    assert_close(w["W"], tensor([[1.7, 0], [1.6, 0.5]]), 1e-7, "W")  # eps 1e-7 in the norm


def test_newton_schulz_at_zero_is_zero_with_a_finite_gradient() -> None:
    zero = torch.zeros(2, 3, dtype=F64, requires_grad=True)
    out = newton_schulz(zero, 5)
    out.sum().backward()
    assert_close(out, torch.zeros(2, 3), 0.0, "NS(0)")
    assert zero.grad is not None and bool(torch.isfinite(zero.grad).all())


def test_hand_read_before_and_residual() -> None:
    # read before: y_1 = W_0 q = (1,2), y_2 = W_1 q with W_1 = W_0 - r k^T: r = (1,0) - (0,0), W_1 = [[0,0],[0,1]] -> (0,2)
    spec = spec_of({"memory": "linear", "update": {"read": "before"}})
    y, _ = run(spec, [[1, 2]] * 2, [[1, 0]] * 2, [[0, 0]] * 2, {"step_size": [1, 1]}, {"W": EYE})
    assert_close(y, tensor([[1, 2], [0, 2]]), 1e-15, "read before")
    # residual: prediction W k + k = (2,0), r = (2,0) - (0,0), W_1 = I - [[2,0],[0,0]]; y = W_1 q + q = (-1,2) + (1,2)
    y, _ = run(spec_of({"memory": {"kind": "linear", "residual": True}}), [[1, 2]], [[1, 0]], [[0, 0]], {"step_size": [1]}, {"W": EYE})
    assert_close(y, tensor([[0, 4]]), 1e-15, "residual")


def test_hand_outer_gradients() -> None:
    # y = W q + s (v - W k) (k.q) = (2,0) + 0.5 * 2 * (2,-1) = (4,-1);  L = y_1 + y_2.  With e = v - W k = (2,-1), sum(e) = 1, k.q = 2:
    # dL/ds = sum(e) k.q = 2;  dL/dv = s (k.q) 1 = (1,1);  dL/dq = W^T 1 + s sum(e) k = (1,2) + (0.5,0.5)
    # dL/dk = -s (k.q) W^T 1 + s sum(e) q = (-1,-2) + (1,0);  dL/dW = 1 (q - s (k.q) k)^T = rows (1,-1)
    rule = ReferenceRule(spec_of("deltanet"), 2, 2)
    leaves = [tensor(x).requires_grad_() for x in ([[[[2, 0]]]], [[[[1, 1]]]], [[[[3, 1]]]], [[[0.5]]], [[[1, 0], [0, 2]]])]
    q, k, v, s, w = leaves
    y, _ = rule(q, k, v, {"step_size": s}, {"W": w})
    assert_close(y, tensor([[[[4, -1]]]]), 1e-15, "y")
    wanted = ([[[[1.5, 2.5]]]], [[[[0, -2]]]], [[[[1, 1]]]], [[[2]]], [[[1, -1], [1, -1]]])
    for name, got, want in zip(["q", "k", "v", "step_size", "W"], torch.autograd.grad(y.sum(), leaves), wanted):
        assert_close(got, tensor(want), 1e-15, name)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomial_features_have_a_polynomial_kernel(degree: int) -> None:
    # By hand, degree 2: a = (1,2), b = (3,-1): a.b = 1 and 1 + 1 + 1/2 = 2.5
    features = Polynomial(degree=degree, coefficients="learned")
    a, b = tensor([1, 2]), tensor([3, -1])
    want = tensor(sum(1 / math.factorial(i) for i in range(degree + 1)))
    assert_close(features(a) @ features(b), want, 1e-14, "phi(a).phi(b)")
    a, b = torch.randn(5, dtype=F64), torch.randn(5, dtype=F64)
    coefficients = tensor([0.3, 1.7, 0.2, 0.9][: degree + 1])
    want = torch.stack([c * (a @ b) ** i for i, c in enumerate(coefficients)]).sum()
    assert_close(features(a, coefficients) @ features(b, coefficients), want, 1e-13, "learned coefficients")
    assert_close(features.kernel(a, b, coefficients), want, 1e-13, "kernel")
    assert features(a).shape == (features.width(5),) == (math.comb(5 + degree, degree),)


@pytest.mark.parametrize("name", ["exp_attention", "dot_linear", "dot", "swdt"])
def test_exponential_features_are_the_limit_of_polynomial_ones(name: str) -> None:
    infinite = ReferenceRule(small(name), 3, 3)
    finite = ReferenceRule(small(name, {"features": {"kind": "polynomial", "degree": 6, "coefficients": "taylor"}}), 3, 3)
    inputs = draw(infinite, T=6)
    inputs = inputs._replace(q=0.5 * unit(inputs.q), k=0.5 * unit(inputs.k))  # |q.k| <= 1/4: the rest of the series is below 2e-8
    first = {n: torch.zeros(2, *s, dtype=F64) for n, s in finite.shapes.items() if n not in inputs.weights}
    y, z = inputs.run(infinite)[0], inputs._replace(weights=inputs.weights | first).run(finite)[0]
    assert_close(y, z, 1e-6, name)


# What a call refuses, and what it tells.


def test_widths_without_meaning() -> None:
    with pytest.raises(SpecError, match="key_dim = value_dim"):
        ReferenceRule(spec_of("atlas"), 4, 6)
    with pytest.raises(SpecError, match="features"):
        ReferenceRule(spec_of({"features": {"kind": "polynomial", "degree": 6}}), 64, 64)
    with pytest.raises(ShapeError, match="key_dim = 0"):
        ReferenceRule(spec_of("deltanet"), 0, 4)


def test_check_names_the_first_token_that_is_not_finite() -> None:
    rule = ReferenceRule(spec_of("deltanet"), 4, 4)
    inputs = draw(rule, T=5)
    v = inputs.v.clone()
    v[1, 3, 0, 2] = float("inf")
    with pytest.raises(ShapeError, match="batch 1, token 3, head 0"):
        inputs._replace(v=v).run(rule, check=True)


@pytest.mark.parametrize("name", PRESETS)
def test_types(name: str) -> None:
    """float32 in, float32 state out; bfloat16 gives bfloat16 outputs over a float32 state; both near the float64 loop."""
    rule = ReferenceRule(small(name), 4, 4)
    exact = draw(rule, T=6)
    for dtype, tol in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        narrow = exact.map(lambda t, d=dtype: t.to(d))
        y, state = narrow.run(rule)
        assert y.dtype == dtype
        assert all(w.dtype == torch.float32 for w in state.weights.values())
        assert_close(y, narrow.map(Tensor.double).run(rule)[0], tol, f"{name} {dtype}")
