"""The laws every way of running a spec obeys, as functions of a rule factory: one code sweeps the token loop and the compiled forms.

`make_rule(spec, key_dim, value_dim)` gives the rule under test. Every check raises AssertionError with the numbers that broke it.
Widths are K = V = 4, since a residual needs them equal; lengths are a few tokens, so use `tests.cases.small` specs (chunk 4, window 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from memkit.inputs import collect, values_and_gradients
from memkit.specs.errors import ShapeError
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState
from tests.cases import Inputs, draw, gates_given, spec_of, unit
from tests.compare import assert_all_close, assert_close

MakeRule = Callable[[LayerSpec, int, int], Rule]
K = V = 4
TOL = 1e-9


def started(rule: Rule, inputs: Inputs, prefix: int) -> MemoryState | None:
    """The state after `prefix` tokens, as leaves; None for 0."""
    if prefix == 0:
        return None
    _, state = inputs.piece(0, prefix).run(rule)
    return state.map(lambda t: t.detach().clone().requires_grad_())


def check_split(
    make_rule: MakeRule, spec: LayerSpec, pieces: Sequence[int], *, prefix: int = 0, dtype: torch.dtype = torch.float64, tol: float = TOL
) -> None:
    """A sequence cut into `pieces` (token counts) and carried by its state equals the uncut one: outputs, final state, and the
    gradients of both for inputs, weights and the initial state, which is `prefix` tokens old."""
    rule, length = make_rule(spec, K, V), sum(pieces)
    drawn = draw(rule, T=prefix + length, dtype=dtype)
    start, inputs = started(rule, drawn, prefix), drawn.piece(prefix, prefix + length).leaves()
    whole = collect(*inputs.run(rule, start), inputs, start)
    outputs, state, first = [], start, 0
    for size in pieces:
        y, state = inputs.piece(first, first + size).run(rule, state)
        outputs.append(y)
        first += size
    assert state is not None
    assert state.position == prefix + length
    parts = collect(torch.cat(outputs, 1), state, inputs, start)
    assert_all_close(parts, whole, tol, f"{spec.name} cut into {list(pieces)} after {prefix}")


def check_causality(
    make_rule: MakeRule, spec: LayerSpec, *, T: int = 9, at: int = 5, dtype: torch.dtype = torch.float64, tol: float = 0.0
) -> None:
    """Outputs before token `at` neither change with later tokens nor send gradients to them; the output at `at` does change."""
    rule = make_rule(spec, K, V)
    inputs, other = draw(rule, T=T, dtype=dtype), draw(rule, T=T, dtype=dtype, seed=7)

    def later(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[:, :at], b[:, at:]], 1)

    q, k, v = (later(a, b) for a, b in zip(inputs[:3], other[:3]))
    changed = inputs._replace(q=q, k=k, v=v, gates={n: later(g, other.gates[n]) for n, g in inputs.gates.items()})
    inputs = inputs.leaves()
    y, z = inputs.run(rule)[0], changed.run(rule)[0]
    assert_close(z[:, :at], y[:, :at], tol, f"{spec.name}: outputs before token {at}")
    if (y[:, at] - z[:, at]).abs().max() == 0:
        raise AssertionError(f"{spec.name}: token {at} changed and its output did not")
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | {f"gates.{n}": g for n, g in inputs.gates.items()}
    grads = torch.autograd.grad(y[:, :at].sum(), list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads):
        if grad is not None:
            assert_close(grad[:, at:], torch.zeros_like(grad[:, at:]), tol, f"{spec.name}: gradient of the past for later {name}")


def check_order(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64, tol: float = 1e-12) -> None:
    """Permuting rows and heads permutes outputs and states; a row alone gives what it gives in the batch."""
    rule = make_rule(spec, K, V)
    inputs = draw(rule, B=3, T=6, H=3, dtype=dtype)
    rows, heads = torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0])
    q, k, v = (t[rows][:, :, heads] for t in inputs[:3])
    gates = {n: g[rows][:, :, heads] for n, g in inputs.gates.items()}
    moved = Inputs(q, k, v, gates, {n: w[heads] for n, w in inputs.weights.items()}, inputs.params)
    (y, state), (z, after) = inputs.run(rule), moved.run(rule)
    assert_close(z, y[rows][:, :, heads], tol, f"{spec.name}: permuted y")
    for name, w in state.weights.items():
        assert_close(after.weights[name], w[rows][:, heads], tol, f"{spec.name}: permuted state.weights.{name}")
    one = inputs._replace(q=inputs.q[1:2], k=inputs.k[1:2], v=inputs.v[1:2], gates={n: g[1:2] for n, g in inputs.gates.items()})
    assert_close(one.run(rule)[0], y[1:2], tol, f"{spec.name}: row 1 alone")


def check_idle(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64, tol: float = 0.0) -> None:
    """Step size 0 and retain 1 leave the memory as it was, and every read sees it."""
    rule = make_rule(gates_given(spec), K, V)
    inputs = draw(rule, T=6, dtype=dtype)
    still = {"step_size": torch.zeros_like, "retain": torch.ones_like}
    inputs = inputs._replace(gates={n: still.get(n, torch.clone)(g) for n, g in inputs.gates.items()})
    y, state = inputs.run(rule)
    for name, w in inputs.weights.items():
        assert_close(state.weights[name], w.expand_as(state.weights[name]), tol, f"{spec.name}: idle {name}")
    if state.span is not None:
        for name, w in state.span.weights.items():
            assert_close(w, torch.zeros_like(w), tol, f"{spec.name}: idle {name}")
    for t in (0, 5):
        alone = inputs.piece(t, t + 1).run(rule)[0]
        assert_close(y[:, t : t + 1], alone, max(tol, 1e-14), f"{spec.name}: read of the untouched memory at token {t}")


def check_modes(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64, tol: float = 0.0) -> None:
    """Under inference_mode, under no_grad and with gradients: the same numbers; a graph is recorded only in the last."""
    rule = make_rule(spec, K, V)
    inputs = draw(rule, T=6, dtype=dtype)
    graph, _ = inputs.leaves().run(rule)
    assert graph.requires_grad
    with torch.no_grad():
        plain, state = inputs.leaves().run(rule)
        again, _ = inputs.leaves().run(rule, state)
    with torch.inference_mode():
        inferred, carried = inputs.map(torch.clone).run(rule)
        continued, _ = inputs.run(rule, carried)
    for name, t in {"no_grad": plain, "inference_mode": inferred, "carried": again}.items():
        assert not t.requires_grad, f"{spec.name}: a graph was recorded under {name}"
    assert not any(t.requires_grad for t in state.state_dict().values() if isinstance(t, Tensor))
    assert_close(plain, graph, tol, f"{spec.name}: no_grad")
    assert_close(inferred, graph, tol, f"{spec.name}: inference_mode")
    assert_close(continued, again, tol, f"{spec.name}: continued under inference_mode")


def check_state(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64, tol: float = 0.0) -> None:
    """detach cuts the graph, clone is untouched by later writes, nbytes counts every tensor, a saved state continues the sequence."""
    rule = make_rule(spec, K, V)
    inputs = draw(rule, T=8, dtype=dtype)
    _, state = inputs.leaves().piece(0, 5).run(rule)
    tensors = {n: t for n, t in state.state_dict().items() if isinstance(t, Tensor)}
    assert any(t.requires_grad for t in tensors.values())
    cut, copy = state.detach(), state.detach().clone()
    assert not any(t.requires_grad for t in cut.state_dict().values() if isinstance(t, Tensor))
    assert state.nbytes == sum(t.element_size() * t.numel() for t in tensors.values()) > 0
    rest = inputs.piece(5, 8)
    want, _ = rest.run(rule, cut)
    loaded = rule_state(rule, inputs).load_state_dict(copy.state_dict())
    assert loaded.position == 5
    for t in tensors.values():
        t.detach().fill_(float("nan"))
    assert_close(rest.run(rule, copy)[0], want, tol, f"{spec.name}: from a clone")
    assert_close(rest.run(rule, loaded)[0], want, tol, f"{spec.name}: from a loaded state")
    flat = copy.state_dict()
    flat.pop("keys")
    with pytest.raises(ShapeError, match="keys"):
        copy.load_state_dict(flat)


def rule_state(rule: Rule, inputs: Inputs) -> MemoryState:
    """A fresh state of the rule's structure."""
    return inputs.map(torch.zeros_like).piece(0, 1).run(rule)[1]


def check_debug(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64) -> None:
    """debug=True takes gates in range, ends included, and refuses each gate out of range with its name, value and place."""
    rule = make_rule(spec, K, V)
    inputs = draw(rule, T=3, dtype=dtype)
    for name, gate in inputs.gates.items():
        role, _ = spec.roles()[name]
        gate[0, 0] = role.low
        gate[0, 1] = 1.0 if role.high is None else role.high
    inputs.run(rule, debug=True)
    for name, gate in inputs.gates.items():
        role, _ = spec.roles()[name]
        for wrong in (role.low - 0.1, float("nan"), float("inf"), *([] if role.high is None else [role.high + 0.1])):
            bad = gate.clone()
            bad[1, 2, 0] = wrong
            with pytest.raises(ShapeError) as error:
                inputs._replace(gates=inputs.gates | {name: bad}).run(rule, debug=True)
            for part in (f"gates.{name}", f"{wrong:g}", "batch 1, token 2, head 0"):
                assert part in str(error.value), f"{part!r} is missing in\n{error.value}"


def check_shape_errors(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64) -> None:
    """Tensors that do not fit raise ShapeError, which names the tensor and lists the sizes bound so far."""
    rule = make_rule(spec, K, V)
    good = draw(rule, B=2, T=3, H=2, dtype=dtype)
    cases: dict[str, Inputs] = {"q": good._replace(q=good.q[..., :3]), "k": good._replace(k=good.k[:, :2])}
    for name, gate in good.gates.items():
        cases[f"gates.{name}"] = good._replace(gates=good.gates | {name: gate[:, :, :1]})
    for name, w in good.weights.items():
        cases[f"weights.{name}"] = good._replace(weights=good.weights | {name: w[:, :1]})
    cases["gates"] = good._replace(gates=good.gates | {"stepsize": good.v[..., 0]})
    for name, inputs in cases.items():
        with pytest.raises(ShapeError) as error:
            inputs.run(rule)
        for part in (f"at {name}\n", "B=2 T=3 H=2 K=4 V=4"):
            assert part in str(error.value), f"{part!r} is missing in\n{error.value}"


def check_recall(make_rule: MakeRule, spec: LayerSpec, *, dtype: torch.dtype = torch.float64, tol: float = 1e-12) -> None:
    """The delta rule (linear memory, l2, window 1): a unit key written with step size 1 reads its value back exactly."""
    rule = make_rule(gates_given(spec), K, V)
    inputs = draw(rule, dtype=dtype)
    gates = inputs.gates | {"step_size": torch.ones_like(inputs.gates["step_size"])}
    gates["window_gate"] = torch.ones_like(gates["window_gate"])
    if "retain" in gates and spec.update.grad_at != "decayed":
        gates["retain"] = torch.ones_like(gates["retain"])
    k = unit(inputs.k.double()).to(dtype)
    y, _ = inputs._replace(q=k, k=k, gates=gates).run(rule)
    assert_close(y, inputs.v, tol, f"{spec.name}: recall")


class Knob(NamedTuple):
    """A knob at its neutral value: `with_knob` and `without` are overrides, `gates` the neutral values by (name, inputs without)."""

    without: Mapping[str, Any]
    with_knob: Mapping[str, Any]
    gates: Callable[[Inputs], dict[str, Tensor]] = lambda _: {}
    rename: Mapping[str, str] = {}
    applies: Callable[[LayerSpec], bool] = lambda _: True


def _one(x: Inputs, *width: int) -> Tensor:
    return torch.ones_like(x.v[..., 0])[(..., *([None] * len(width)))].expand(*x.v.shape[:3], *width).clone()


def _last_slot(x: Inputs, size: int) -> Tensor:
    return torch.cat([torch.zeros_like(_one(x, size - 1)), _one(x, 1)], -1)


def _is(**kinds: str) -> Callable[[LayerSpec], bool]:
    """Specs whose families have these kinds."""
    return lambda spec: all(getattr(spec, family).kind == kind for family, kind in kinds.items())


def _spread(gate: Tensor) -> Tensor:
    return gate[..., None].expand(*gate.shape, K).clone()


def _matrix_of_keys(spec: LayerSpec) -> bool:
    return spec.memory.kind == "linear" and spec.features.finite() and spec.features.width(K) == K


GD = {"optimizer": {"kind": "gd", "step_size": "input"}}
SCALAR = {"retention": {"kind": "scalar", "gate": "input"}}
DECAYED = {**SCALAR, "update.grad_at": "decayed"}
CHANNEL = {"retention": {"kind": "channel", "gate": "input"}}
MOMENTUM = {"optimizer": {"kind": "momentum", "momentum": "input", "step_size": "input"}}
WINDOW = {"window": {"size": 3, "gate": "input"}}
CHAIN = {"memory": {"kind": "chain", "steps": [{"linear": 1}]}}
TAYLOR = {"features": {"kind": "polynomial", "coefficients": "taylor"}}
L2 = {"bias": "l2"}
PLAIN = {"features": "identity"}
KNOBS: Mapping[str, Knob] = {
    "retain scalar 1": Knob({"retention": "none"}, SCALAR, lambda x: {"retain": _one(x)}),
    "retain channel 1": Knob({"retention": "none"}, CHANNEL, lambda x: {"retain": _one(x, K)}, applies=_matrix_of_keys),
    "equal channels": Knob(SCALAR, CHANNEL, lambda x: {"retain": _spread(x.gates["retain"])}, applies=_matrix_of_keys),
    "momentum 0": Knob(GD, MOMENTUM, lambda x: {"momentum": torch.zeros_like(_one(x))}, applies=_is(optimizer="gd")),
    "window gate 0, .., 1": Knob({"window": {"size": 1, "gate": 1}}, WINDOW, lambda x: {"window_gate": _last_slot(x, 3)}),
    "chunk 1": Knob({"update.grad_at": "token"}, {"update.grad_at": "chunk", "update.chunk_size": 1}),
    "decayed by 1": Knob({"retention": "none", "update.grad_at": "token"}, DECAYED, lambda x: {"retain": _one(x)}),
    "constant gate": Knob({"optimizer.step_size": 0.25}, {"optimizer.step_size": "input"}, lambda x: {"step_size": 0.25 * _one(x)}),
    "window gate none": Knob({"window": {"size": 3, "gate": "none"}}, WINDOW, lambda x: {"window_gate": _one(x, 3)}),
    "mlp depth 1": Knob({"memory": "linear"}, {"memory": {"kind": "mlp", "depth": 1}}, rename={"W": "W1"}, applies=_is(memory="linear")),
    "chain of one": Knob({"memory": "linear"}, CHAIN, rename={"W": "W1"}, applies=_is(memory="linear")),
    "elementwise degree 1": Knob(PLAIN, {"features": {"kind": "elementwise", "degree": 1}}, applies=_is(features="identity")),
    "coefficients at 1/i!": Knob(TAYLOR, {"features": {"kind": "polynomial", "coefficients": "learned"}}),
    "lq 2": Knob(L2, {"bias": {"kind": "lq", "q": 2}}, applies=_is(bias="l2")),
    "huber far away": Knob(L2, {"bias": {"kind": "huber", "delta": 1e6}}, applies=_is(bias="l2")),
    "expression r^2/2": Knob(L2, {"bias": {"kind": "expression", "formula": "r^2/2"}}, applies=_is(bias="l2")),
}


def check_neutral(make_rule: MakeRule, spec: LayerSpec, knob: str, *, dtype: torch.dtype = torch.float64, tol: float = TOL) -> None:
    """A knob at its neutral value changes nothing: outputs, final memory, and their gradients for everything both rules share."""
    k = KNOBS[knob]
    plain, turned = (make_rule(spec_of(spec, o), K, V) for o in (k.without, {**k.without, **k.with_knob}))
    inputs = draw(plain, T=6, dtype=dtype)
    inputs = inputs._replace(params=plain.init_params() if knob.startswith("coefficients") else inputs.params).map(lambda t: t.to(dtype))
    gates = {n: g for n, g in {**inputs.gates, **k.gates(inputs)}.items() if n in turned.gates}
    weights = {k.rename.get(n, n): w for n, w in inputs.weights.items()}
    params = {n: p.to(dtype) for n, p in {**turned.init_params(), **inputs.params}.items()}
    found = []
    for rule, x in ((plain, inputs), (turned, inputs._replace(gates=gates, weights=weights, params=params))):
        x = x.leaves()
        y, state = x.run(rule)
        ends = state.weights | ({} if state.span is None else state.span.weights)
        ends = {k.rename.get(n, n): w for n, w in ends.items()}
        shared = {"q": x.q, "k": x.k, "v": x.v} | {k.rename.get(n, n): w for n, w in x.weights.items()}
        shared |= {n: g for n, g in x.gates.items() if n in plain.gates and n in turned.gates and plain.gates[n] == turned.gates[n]}
        total = sum(((t * t.detach().cos()).sum() for t in ends.values()), (y * y.detach().sin()).sum())
        grads = torch.autograd.grad(total, list(shared.values()), allow_unused=True)
        grads = {f"grad.{n}": torch.zeros_like(t) if d is None else d for (n, t), d in zip(shared.items(), grads)}
        found.append({"y": y, **ends, **grads})
    assert_all_close(found[1], found[0], tol, f"{spec.name}, {knob}")


def check_against(
    make_rule: MakeRule,
    make_oracle: MakeRule,
    spec: LayerSpec,
    *,
    T: int = 9,
    prefix: int = 0,
    key_dim: int = K,
    value_dim: int = V,
    tol: float = TOL,
) -> None:
    """In float64, a rule equals the oracle in outputs, final state and every gradient, from a start or from a state `prefix` tokens old."""
    rule, oracle = make_rule(spec, key_dim, value_dim), make_oracle(spec, key_dim, value_dim)
    drawn = draw(oracle, T=prefix + T)
    start = started(oracle, drawn, prefix)
    got, want = (values_and_gradients(r, drawn.piece(prefix, prefix + T), start) for r in (rule, oracle))
    assert_all_close(got, want, tol, f"{spec.name}, T={T}, after {prefix}")


DRAWS = 15


def check_precision(make_rule: MakeRule, make_oracle: MakeRule, spec: LayerSpec, dtype: torch.dtype, *, T: int = 14) -> None:
    """No further from the float64 oracle than twice the oracle in the same type, plus one rounding of the type.

    The floor of one rounding: where few values enter, the oracle's own error can be 0. One draw's largest errors are two samples of the
    same spread, whose ratio passes 2 by chance, either way round; then further draws are added, and the medians over all of them compared.
    """
    rule, oracle = make_rule(spec, K, V), make_oracle(spec, K, V)
    own, same = defaultdict(list), defaultdict(list)
    for seed in range(DRAWS):
        narrow = draw(oracle, T=T, dtype=dtype, seed=seed)
        exact = values_and_gradients(oracle, narrow.map(Tensor.double))
        for found, one in ((own, rule), (same, oracle)):
            for n, error in errors(one, narrow, exact).items():
                assert error == error, f"{n} is not a number"
                found[n].append(error)
        pairs = {n: (median(own[n]), median(same[n])) for n in own}
        far = {n: pair for n, pair in pairs.items() if pair[0] > 2 * pair[1] + torch.finfo(dtype).eps}
        if not far:
            return
    raise AssertionError(f"{spec.name}, {dtype}: (error, the oracle's error) {far}")


def errors(rule: Rule, inputs: Inputs, exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest distance from the float64 oracle, by name, as a share of the largest value (at least 1)."""
    found = values_and_gradients(rule, inputs)
    return {
        n: (found[n].double() - want).abs().max().item() / max(1.0, want.abs().max().item()) for n, want in exact.items() if want.numel()
    }
