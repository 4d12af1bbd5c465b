"""The inputs that tests, `doctor` and `equivalent` draw reach what they should reach, and the gradients they take are slopes."""

from __future__ import annotations

import pytest
import torch

from memkit.inputs import STEP, collect, draw, values_and_gradients
from memkit.specs.reference import ReferenceRule
from tests.cases import PRESETS, gates_given, small, spec_of


@pytest.mark.parametrize("name", PRESETS)
def test_drawn_inputs(name: str) -> None:
    """Unit keys and queries; gates that fill their range and touch its ends; a memory that is not zero; scalars off their start."""
    rule = ReferenceRule(gates_given(small(name)), 4, 4)
    x = draw(rule, 2, 40, 2, seed=3)
    for t in (x.q, x.k):
        torch.testing.assert_close(t.norm(dim=-1), torch.ones(2, 40, 2, dtype=torch.float64))
    assert x.v.std() > 0.8 and len(x.v.unique()) == x.v.numel()
    assert set(x.gates) == set(rule.gates)
    for gate, values in x.gates.items():
        role, _ = rule.spec.roles()[gate]
        high = STEP if role.high is None else role.high
        assert values.min() >= role.low and values.max() <= high
        inside = values[(values > role.low) & (values < high)]
        assert len(inside.unique()) > 60 and inside.std() > 0.05
        last = values[..., -1] if role.axis == "window" else values
        assert (values == role.low).any() or (role.axis == "window" and values.shape[-1] == 1)
        assert role.high is None or (values == role.high).any()
        assert role.axis != "window" or last.min() >= 0.2
    assert all(w.std() > 0.05 for w in x.weights.values())
    assert all((x.params[n] != p).any() for n, p in rule.init_params().items())


def test_draws_depend_on_the_seed_alone() -> None:
    rule, wider = (ReferenceRule(spec_of("titans_linear", {"window.size": c, "window.gate": "input"}), 3, 3) for c in (1, 4))
    a, b, c = (draw(rule, seed=s).named() for s in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not any(torch.equal(a[n], c[n]) for n in a)
    other = draw(wider).gates
    assert all(torch.equal(a[f"gates.{n}"], other[n]) for n in ("retain", "momentum", "step_size"))
    assert not torch.equal(a["gates.retain"], a["gates.momentum"])
    assert draw(rule, 3, 4, 5, dtype=torch.float32).v.shape == (3, 4, 5, 3) and draw(rule, dtype=torch.float32).v.dtype is torch.float32


def test_gradients_are_slopes() -> None:
    """Of one functional of outputs and final state, for every input, and for the state a piece starts from."""
    rule = ReferenceRule(small("titans"), 3, 3)
    whole = draw(rule, 1, 6, 1)
    start = whole.piece(0, 3).run(rule)[1].detach()
    x = whole.piece(3, 6)
    found = values_and_gradients(rule, x, start)
    weigh = torch.Generator().manual_seed(1)
    outputs = {n: t for n, t in found.items() if not n.startswith("grad.")}
    weights = {n: torch.randn(t.shape, generator=weigh, dtype=torch.float64) for n, t in outputs.items()}

    def functional(inputs, state):
        y, after = inputs.run(rule, state)
        return sum((weights[n] * (y if n == "y" else after.state_dict()[n.removeprefix("state.")])).sum() for n in weights)

    moved = x.map(lambda t: torch.randn(t.shape, generator=weigh, dtype=torch.float64))
    eps, total = 1e-6, 0.0
    for sign in (1, -1):
        values = iter(moved.named().values())
        total += sign * functional(x.map(lambda t, s=sign, v=values: t + s * eps * next(v)), start) / (2 * eps)
    slope = sum((found[f"grad.{n}"] * t).sum() for n, t in moved.named().items() if not n.startswith("weights."))
    torch.testing.assert_close(torch.as_tensor(total), slope, rtol=1e-6, atol=1e-6)
    bumped = start._replace(weights={n: w + eps for n, w in start.weights.items()})
    dropped = start._replace(weights={n: w - eps for n, w in start.weights.items()})
    slope = sum(found[f"grad.start.weights.{n}"].sum() for n in start.weights)
    torch.testing.assert_close((functional(x, bumped) - functional(x, dropped)) / (2 * eps), slope, rtol=1e-6, atol=1e-6)
    assert not any(n.startswith("grad.weights.") for n in found)


def test_a_run_that_has_been_made_gives_the_same() -> None:
    rule = ReferenceRule(small("gated_deltanet"), 3, 3)
    x = draw(rule, 1, 4, 1)
    leaves = x.leaves()
    made, fresh = collect(*leaves.run(rule), leaves), values_and_gradients(rule, x)
    assert set(made) == set(fresh) and all(torch.equal(made[n], fresh[n]) for n in made)
