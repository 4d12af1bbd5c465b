"""The token loop against the papers' recurrences, each written here on its own: one row and head, plain loops, gradients by hand.

Values, the final memory and momentum, and the gradients of all of them for q, k, v, gates, learned scalars and the initial state
agree to 1e-12 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from memkit.specs.layer import LayerSpec
from memkit.specs.optimizer import newton_schulz
from memkit.specs.reference import ReferenceRule
from memkit.specs.state import MemoryState
from tests.cases import Inputs, draw, spec_of
from tests.compare import assert_all_close, assert_close

TOL = 1e-12
Weights = Mapping[str, Tensor]


class Sequence(NamedTuple):
    """One row and head: q, k [T, K], v [T, V], gates [T, *], initial weights and momentum [out, in], learned scalars."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Mapping[str, Tensor]
    W: Weights
    S: Weights
    params: Mapping[str, Tensor]
    phi: Callable[[Tensor], Tensor]


Result = tuple[list[Tensor], Weights, Weights]  # outputs, final weights, final momentum
Recurrence = Callable[[Sequence], Result]


def linear_attention(x: Sequence) -> Result:
    """Atlas eqs. 45-46: W_t = W_{t-1} + v_t k_t^T."""
    W, ys = x.W["W"], []
    for q, k, v in zip(x.q, x.k, x.v):
        W = W + v.outer(k)
        ys.append(W @ q)
    return ys, {"W": W}, {}


def retnet(x: Sequence) -> Result:
    """RetNet eq. 6: W_t = a W_{t-1} + v_t k_t^T."""
    W, ys = x.W["W"], []
    for q, k, v, a in zip(x.q, x.k, x.v, x.g["retain"]):
        W = a * W + v.outer(k)
        ys.append(W @ q)
    return ys, {"W": W}, {}


def gla(x: Sequence) -> Result:
    """GLA eq. 3: W_t = W_{t-1} diag(a_t) + v_t k_t^T."""
    W, ys = x.W["W"], []
    for q, k, v, a in zip(x.q, x.k, x.v, x.g["retain"]):
        W = W @ torch.diag(a) + v.outer(k)
        ys.append(W @ q)
    return ys, {"W": W}, {}


def window(x: Sequence, t: int, c: int) -> list[tuple[int, Tensor]]:
    """(token, gate) of the tokens in token t's objective."""
    gates = x.g["window_gate"][t] if "window_gate" in x.g else torch.ones(c, dtype=x.v.dtype)
    return [(i, gates[i - t + c - 1]) for i in range(max(0, t - c + 1), t + 1)]


def swla(c: int) -> Recurrence:
    """Atlas eqs. 20 and 55: W_t = a_t W_{t-1} + sum_i g_{t,i} v_i k_i^T."""

    def run(x: Sequence) -> Result:
        W, ys = x.W["W"], []
        for t in range(len(x.q)):
            W = x.g["retain"][t] * W + torch.stack([g * x.v[i].outer(x.k[i]) for i, g in window(x, t, c)]).sum(0)
            ys.append(W @ x.q[t])
        return ys, {"W": W}, {}

    return run


def deltanet(x: Sequence) -> Result:
    """DeltaNet: W_t = W_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T."""
    W, ys, eye = x.W["W"], [], torch.eye(x.k.shape[1], dtype=x.k.dtype)
    for q, k, v, b in zip(x.q, x.k, x.v, x.g["step_size"]):
        W = W @ (eye - b * k.outer(k)) + b * v.outer(k)
        ys.append(W @ q)
    return ys, {"W": W}, {}


def gated_deltanet(x: Sequence) -> Result:
    """Gated DeltaNet eq. 10: W_t = W_{t-1} a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T."""
    W, ys, eye = x.W["W"], [], torch.eye(x.k.shape[1], dtype=x.k.dtype)
    for q, k, v, a, b in zip(x.q, x.k, x.v, x.g["retain"], x.g["step_size"]):
        W = W @ (a * (eye - b * k.outer(k))) + b * v.outer(k)
        ys.append(W @ q)
    return ys, {"W": W}, {}


def kda(x: Sequence) -> Result:
    """KDA eq. 1: W_t = W_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T."""
    W, ys, eye = x.W["W"], [], torch.eye(x.k.shape[1], dtype=x.k.dtype)
    for q, k, v, a, b in zip(x.q, x.k, x.v, x.g["retain"], x.g["step_size"]):
        W = W @ torch.diag(a) @ (eye - b * k.outer(k)) + b * v.outer(k)
        ys.append(W @ q)
    return ys, {"W": W}, {}


def titans_linear(x: Sequence) -> Result:
    """Titans eqs. 32-33: S_t = eta_t S_{t-1} - theta_t (W_{t-1} k_t - v_t) k_t^T, W_t = (1 - alpha_t) W_{t-1} + S_t."""
    W, S, ys = x.W["W"], x.S["W"], []
    for t in range(len(x.q)):
        alpha, eta, theta = 1 - x.g["retain"][t], x.g["momentum"][t], x.g["step_size"][t]
        S = eta * S - theta * (W @ x.k[t] - x.v[t]).outer(x.k[t])
        W = (1 - alpha) * W + S
        ys.append(W @ x.q[t])
    return ys, {"W": W}, {"W": S}


def omega_linear(c: int) -> Recurrence:
    """Atlas eq. 11, signs mended: W_t = W_{t-1} (a_t I - sum_i e_i k_i k_i^T) + sum_i e_i v_i k_i^T, e_i = step_t g_{t,i}."""

    def run(x: Sequence) -> Result:
        W, ys, eye = x.W["W"], [], torch.eye(x.k.shape[1], dtype=x.k.dtype)
        for t in range(len(x.q)):
            left, right = x.g["retain"][t] * eye, torch.zeros_like(W)
            for i, g in window(x, t, c):
                left = left - x.g["step_size"][t] * g * x.k[i].outer(x.k[i])
                right = right + x.g["step_size"][t] * g * x.v[i].outer(x.k[i])
            W = W @ left + right
            ys.append(W @ x.q[t])
        return ys, {"W": W}, {}

    return run


def orthogonal(S: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz from the other side: X <- X (a I + b X^T X + c (X^T X)^2)."""
    X = S / (S.pow(2).sum().sqrt() + 1e-7)
    eye = torch.eye(S.shape[1], dtype=S.dtype)
    for _ in range(steps):
        gram = X.T @ X
        X = X @ (3.4445 * eye - 4.7750 * gram + 2.0315 * gram @ gram)
    return X


def atlas_linear(c: int) -> Recurrence:
    """Atlas eqs. 32-33 for a matrix: S_t = theta_t S_{t-1} - sum_i g_{t,i} (W_{t-1} k_i - v_i) k_i^T, W_t = a_t W_{t-1} + eta_t NS(S_t)."""

    def run(x: Sequence) -> Result:
        W, S, ys = x.W["W"], x.S["W"], []
        for t in range(len(x.q)):
            S = x.g["momentum"][t] * S
            for i, g in window(x, t, c):
                S = S - g * (W @ x.k[i] - x.v[i]).outer(x.k[i])
            W = x.g["retain"][t] * W + x.g["step_size"][t] * orthogonal(S)
            ys.append(W @ x.q[t])
        return ys, {"W": W}, {"W": S}

    return run


def exp_attention(x: Sequence) -> Result:
    """Atlas eq. 26: y_t = sum_{i<=t} v_i exp(q_t.k_i); the memory's coefficients are the values."""
    ys = [torch.exp(x.k[: t + 1] @ x.q[t]) @ x.v[: t + 1] for t in range(len(x.q))]
    return ys, {"W": x.v.T}, {}


def dot_linear_one(x: Sequence) -> Result:
    """Atlas eqs. 30-31, mended: u_t = eta_t (v_t - sum_{s<t} u_s exp(k_s.k_t)), y_t = sum_{s<=t} u_s exp(k_s.q_t)."""
    us: list[Tensor] = []
    ys = []
    for t in range(len(x.q)):
        seen = sum((u * torch.exp(x.k[s] @ x.k[t]) for s, u in enumerate(us)), torch.zeros_like(x.v[t]))
        us.append(x.g["step_size"][t] * (x.v[t] - seen))
        ys.append(sum((u * torch.exp(x.k[s] @ x.q[t]) for s, u in enumerate(us)), torch.zeros_like(x.v[t])))
    return ys, {"W": torch.stack(us, 1)}, {}


def ttt_linear(b: int) -> Recurrence:
    """TTT eqs. 2-5 with mini-batches of b: f(x) = x + LN(W x), W_t = W_{t'} - sum_{t'<s<=t} eta_s grad; the norm's gradient by hand."""

    def run(x: Sequence) -> Result:
        scale, shift = x.params["memory.scale"], x.params["memory.shift"]
        W, ys, anchor = x.W["W"], [], x.W["W"]
        for t in range(len(x.q)):
            anchor = W if t % b == 0 else anchor
            z = anchor @ x.k[t]
            spread = torch.sqrt(z.var(unbiased=False) + 1e-6)
            hat = (z - z.mean()) / spread
            back = (scale * hat + shift + x.k[t] - x.v[t]) * scale
            back = (back - back.mean() - hat * (back * hat).mean()) / spread
            W = W - x.g["step_size"][t] * back.outer(x.k[t])
            out = W @ x.q[t]
            hat = (out - out.mean()) / torch.sqrt(out.var(unbiased=False) + 1e-6)
            ys.append(x.q[t] + scale * hat + shift)
        return ys, {"W": W}, {}

    return run


def gelu(z: Tensor) -> Tensor:
    return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))


def gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def deep(c: int, b: int, *, residual: bool, loss: str = "l2", move: str = "gd") -> Recurrence:
    """Two-layer memories in chunks of b, back-propagation by hand: M(x) = [x +] W2 gelu(W1 phi(x)), all gradients of a chunk at its start.

    move: gd (OmegaNet eq. 10, DLA eq. 19), momentum (Titans eqs. 13-14) or muon (Atlas eqs. 32-33).
    """

    def gradient(x: Sequence, W1: Tensor, W2: Tensor, i: int) -> tuple[Tensor, Tensor]:
        f = x.phi(x.k[i])
        z = W1 @ f
        h = gelu(z)
        error = -x.v[i] if loss == "dot" else (x.k[i] if residual else 0.0) + W2 @ h - x.v[i]
        return ((W2.T @ error) * gelu_slope(z)).outer(f), error.outer(h)

    def run(x: Sequence) -> Result:
        W = [x.W["W1"], x.W["W2"]]
        S = [x.S[n] for n in ("W1", "W2")] if x.S else [torch.zeros_like(w) for w in W]
        anchor, ys = W, []
        for t in range(len(x.q)):
            anchor = W if t % b == 0 else anchor
            grads = [torch.zeros_like(w) for w in W]
            for i, g in window(x, t, c):
                grads = [total + g * d for total, d in zip(grads, gradient(x, anchor[0], anchor[1], i))]
            keep, eta, theta = x.g["retain"][t], x.g["step_size"][t], x.g["momentum"][t] if "momentum" in x.g else 0.0
            S = [theta * s - (1.0 if move == "muon" else eta) * g for s, g in zip(S, grads)]
            moves = [eta * orthogonal(s) for s in S] if move == "muon" else S
            W = [keep * w + m for w, m in zip(W, moves)]
            out = W[1] @ gelu(W[0] @ x.phi(x.q[t]))
            ys.append(out + x.q[t] if residual else out)
        return ys, dict(zip(("W1", "W2"), W)), dict(zip(("W1", "W2"), S)) if x.S else {}

    return run


class Paper(NamedTuple):
    """A preset (or overrides of one) and its recurrence."""

    preset: str
    recurrence: Recurrence
    overrides: Mapping[str, Any] = {}
    square: bool = False  # K = V


OMEGA = {"memory": "linear", "features": "identity", "window.size": 3, "update.grad_at": "token"}
ONE_TOKEN = {"window.size": 1, "window.gate": "none"}
DEEP = {"memory.expansion": 2, "update.chunk_size": 4}
PAPERS: Mapping[str, Paper] = {
    "linear_attention": Paper("linear_attention", linear_attention),
    "retnet": Paper("retnet", retnet),
    "gla": Paper("gla", gla),
    "swla": Paper("swla", swla(8)),
    "swla c=3": Paper("swla", swla(3), {"window.size": 3}),
    "deltanet": Paper("deltanet", deltanet),
    "gated_deltanet": Paper("gated_deltanet", gated_deltanet),
    "kda": Paper("kda", kda),
    "titans_linear": Paper("titans_linear", titans_linear),
    "omega linear c=3": Paper("omeganet", omega_linear(3), OMEGA),
    "omega linear c=1 is the delta rule": Paper("omeganet", deltanet, {**OMEGA, **ONE_TOKEN, "retention": "none"}),
    "atlas linear c=3": Paper("atlas", atlas_linear(3), OMEGA),
    "exp_attention": Paper("exp_attention", exp_attention),
    "dot_linear c=1": Paper("dot_linear", dot_linear_one, ONE_TOKEN),
    "ttt_linear": Paper("ttt_linear", ttt_linear(16), {}, True),
    "ttt_linear b=4": Paper("ttt_linear", ttt_linear(4), {"update.chunk_size": 4}, True),
    "titans": Paper("titans", deep(1, 4, residual=False, move="momentum"), DEEP),
    "dla": Paper("dla", deep(1, 4, residual=True, loss="dot"), DEEP, True),
    "omeganet c=3": Paper("omeganet", deep(3, 4, residual=True), {**DEEP, "window.size": 3}, True),
    "omeganet c=3, chunk 2": Paper("omeganet", deep(3, 2, residual=True), {**DEEP, "window.size": 3, "update.chunk_size": 2}, True),
    "atlas c=3": Paper("atlas", deep(3, 4, residual=True, move="muon"), {**DEEP, "window.size": 3}, True),
}


def start_of(rule: ReferenceRule, inputs: Inputs) -> MemoryState:
    """The state before the first token as leaves of its own, with momentum that is not zero."""
    like = inputs.v.detach()
    state = rule.init_state(like.shape[0], {n: w.detach() for n, w in inputs.weights.items()}, like)
    slots = {n: {s: 0.3 * torch.randn_like(t) for s, t in found.items()} for n, found in state.slots.items()}
    return state._replace(slots=slots).map(lambda t: t.detach().clone().requires_grad_())


def by_hand(spec: LayerSpec, recurrence: Recurrence, x: Inputs, start: MemoryState) -> tuple[Tensor, dict[str, Tensor]]:
    """The recurrence for every row and head: y [B, T, H, V] and the final weights and momentum [B, H, out, in]."""
    rows, heads = x.v.shape[0], x.v.shape[2]
    coefficients = {n.split(".")[1]: p for n, p in x.params.items() if n.startswith("features")}
    found: dict[str, list[list[Tensor]]] = {}
    for r in range(rows):
        for h in range(heads):
            sequence = Sequence(
                x.q[r, :, h],
                x.k[r, :, h],
                x.v[r, :, h],
                {n: g[r, :, h] for n, g in x.gates.items()},
                {n: w[r, h] for n, w in start.weights.items()},
                {n: s["S"][r, h] for n, s in start.slots.items() if s},
                x.params,
                lambda z: spec.features(z, **coefficients),
            )
            ys, W, S = recurrence(sequence)
            one = {"y": torch.stack(ys)} | {f"weights.{n}": w for n, w in W.items()} | {f"slots.{n}": s for n, s in S.items()}
            for name, t in one.items():
                found.setdefault(name, [[] for _ in range(rows)])[r].append(t)
    joined = {n: torch.stack([torch.stack(row) for row in t]) for n, t in found.items()}
    return joined.pop("y").transpose(1, 2), joined


@pytest.mark.parametrize("name", PAPERS)
def test_recurrence(name: str) -> None:
    paper = PAPERS[name]
    spec = spec_of(paper.preset, paper.overrides)
    rule = ReferenceRule(spec, 4 if paper.square else 3, 4)
    x = draw(rule, T=9).leaves()
    start = start_of(rule, x)
    y, after = x.run(rule, start)
    ends = {f"weights.{n}": w for n, w in (after.weights if after.span is None else after.span.weights).items()}
    ends |= {f"slots.{n}": s["S"] for n, s in after.slots.items() if s}
    hand, hand_ends = by_hand(spec, paper.recurrence, x, start)
    got, want = {"y": y, **ends}, {"y": hand, **hand_ends}
    leaves = {n: t for n, t in x.named().items() if not n.startswith("weights.")}
    leaves |= {f"start.weights.{n}": w for n, w in start.weights.items()}
    leaves |= {f"start.slots.{n}": s["S"] for n, s in start.slots.items() if s}
    assert_all_close(got, want, TOL, name)
    for part in got:  # outputs, final weights and final momentum each have gradients of their own
        weigh = torch.randn(got[part].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        ours, theirs = (
            torch.autograd.grad((o[part] * weigh).sum(), list(leaves.values()), retain_graph=True, allow_unused=True) for o in (got, want)
        )
        for leaf, a, b in zip(leaves, ours, theirs):
            zero = torch.zeros_like(leaves[leaf])
            assert_close(zero if a is None else a, zero if b is None else b, TOL, f"{name}: gradient of {part} for {leaf}")


def _ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def _only_last(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[..., 1:]), _ones(x[..., :1])], -1)


TOKEN = {"update.grad_at": "token"}
SAME: Mapping[str, tuple[Paper, str, Mapping[str, Callable[[Tensor], Tensor]]]] = {
    # the table `Same rule, other name` of docs/notation.md: a preset, its overrides, the preset it then equals, and gates that are set
    "omeganet is deltanet": (Paper("omeganet", deltanet, {**OMEGA, **ONE_TOKEN, "retention": "none"}), "deltanet", {}),
    "titans_linear is deltanet": (Paper("titans_linear", deltanet), "deltanet", {"momentum": torch.zeros_like, "retain": _ones}),
    "gated_deltanet is deltanet": (Paper("gated_deltanet", deltanet), "deltanet", {"retain": _ones}),
    "gated_deltanet at W_{t-1} is Titans": (Paper("gated_deltanet", titans_linear, TOKEN), "titans_linear", {"momentum": torch.zeros_like}),
    "swla is retnet": (Paper("swla", retnet), "retnet", {"window_gate": _only_last}),
    "gla is linear_attention": (Paper("gla", linear_attention), "linear_attention", {"retain": _ones}),
    "retnet is linear_attention": (Paper("retnet", linear_attention), "linear_attention", {"retain": _ones}),
    "deep_transformer is exp_attention": (
        Paper("deep_transformer", exp_attention, {**TOKEN, "memory": "linear"}),
        "exp_attention",
        {"step_size": _ones},
    ),
    "ttt_linear is deltanet": (Paper("ttt_linear", deltanet, {"memory": "linear", "update.chunk_size": 1}), "deltanet", {}),
}


@pytest.mark.parametrize("name", SAME)
def test_same_rule_other_name(name: str) -> None:
    paper, other, fixed = SAME[name]
    ours, theirs = ReferenceRule(spec_of(paper.preset, paper.overrides), 3, 4), ReferenceRule(spec_of(other), 3, 4)
    x = draw(ours, T=9)
    gates = {n: fixed[n](g) if n in fixed else g for n, g in x.gates.items()}
    x = x._replace(gates=gates)
    missing = {n: x.v[..., 0] for n in theirs.gates if n not in gates}
    twin = x._replace(gates={n: fixed[n](missing[n]) if n in missing else gates[n] for n in theirs.gates})
    assert_close(x.run(ours)[0], twin.run(theirs)[0], TOL, name)


def test_kda_with_equal_channels_is_gated_deltanet() -> None:
    kda_rule, gated = ReferenceRule(spec_of("kda"), 3, 4), ReferenceRule(spec_of("gated_deltanet"), 3, 4)
    x = draw(gated, T=9)
    wide = x.gates | {"retain": x.gates["retain"][..., None].expand(*x.v.shape[:3], 3)}
    assert_close(x._replace(gates=wide).run(kda_rule)[0], x.run(gated)[0], TOL, "y")


def test_swla_that_keeps_nothing_is_windowed_linear_attention() -> None:
    rule = ReferenceRule(spec_of("swla", {"window.size": 3}), 3, 4)
    x = draw(rule, T=7)
    y, _ = x._replace(gates={"retain": torch.zeros_like(x.gates["retain"]), "window_gate": _ones(x.gates["window_gate"])}).run(rule)
    seen = torch.ones(7, 7, dtype=torch.float64).tril().triu(-2)
    assert_close(y, torch.einsum("ts,bthk,bshk,bshv->bthv", seen, x.q, x.k, x.v), TOL, "y")


def test_newton_schulz_acts_on_singular_values() -> None:
    """NS(S) = U p(s / |s|) V^T, p applied five times, by way of the singular value decomposition."""
    for shape in ((4, 3), (3, 4), (5, 5)):
        S = torch.randn(shape, dtype=torch.float64)
        U, s, Vt = torch.linalg.svd(S, full_matrices=False)
        s = s / (s.norm() + 1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert_close(newton_schulz(S, 5), U @ torch.diag(s) @ Vt, 1e-11, f"NS of {shape}")
        assert_close(newton_schulz(-3 * S, 5), -newton_schulz(S, 5), 1e-5, "odd and independent of scale, eps aside")
