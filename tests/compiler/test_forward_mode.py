"""Forward-mode AD through a compiled rule: tangents, alone or beside gradients, and second derivatives are the token loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import memkit
from memkit.compiler.pipeline import compile_rule
from memkit.inputs import Inputs
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule
from tests.cases import draw, small
from tests.compare import assert_close

PLANS = {"linear": "gla", "solve": "gated_deltanet", "frozen": "titans", "orthogonal": "atlas", "span": "dot_linear", "scan": "kda"}
T = 5


def both(plan: str) -> tuple[Rule, Rule, Inputs, Inputs]:
    """The rule, its token loop, inputs, and a direction."""
    spec = small(PLANS[plan])
    rule = compile_rule(spec, 3, 3, plan=plan)
    return rule, ReferenceRule(spec, 3, 3), draw(rule, B=1, T=T, H=1), draw(rule, B=1, T=T, H=1, seed=1)


def pushed(rule: Rule, x: Inputs, along: Inputs, leaves: bool) -> dict[str, Tensor]:
    """The tangents of y and of the state's weights for tangents of every input."""
    with forward_ad.dual_level():
        x = x.leaves() if leaves else x
        directions = iter(along.named().values())
        y, state = x.map(lambda t: forward_ad.make_dual(t, next(directions))).run(rule)
        ends = {"y": y, **state.weights}
        return {n: t for n, end in ends.items() if (t := forward_ad.unpack_dual(end).tangent) is not None}


@pytest.mark.parametrize("plan", PLANS)
def test_tangents(plan: str) -> None:
    rule, oracle, x, along = both(plan)
    want = pushed(oracle, x, along, False)
    for leaves in (False, True):
        got = pushed(rule, x, along, leaves)
        assert set(got) == set(want)
        for n in want:
            assert_close(got[n], want[n], 1e-9, f"{plan}: {n}, leaves {leaves}")


@pytest.mark.parametrize("plan", PLANS)
def test_a_tangent_beside_gradients(plan: str) -> None:
    """One input carries a tangent while others ask for gradients, and the gradients are right, too."""
    rule, oracle, x, along = both(plan)
    found = []
    for run in (rule, oracle):
        v = x.v.clone().requires_grad_()
        with forward_ad.dual_level():
            y, _ = x._replace(k=forward_ad.make_dual(x.k, along.k), v=v).run(run)
            value, tangent = forward_ad.unpack_dual(y)
            assert tangent is not None
        found.append([tangent, *torch.autograd.grad((value * along.v).sum() + (tangent * along.v).sum(), [v])])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-9, plan)


@pytest.mark.parametrize("plan", PLANS)
def test_forward_over_reverse(plan: str) -> None:
    rule, oracle, x, along = both(plan)

    def product(run: Rule) -> Any:
        def slope(k: Tensor) -> Tensor:
            return torch.func.grad(lambda k: x._replace(k=k).run(run)[0].square().sum())(k)

        return torch.func.jvp(slope, (x.k,), (along.k,))[1]

    assert_close(product(rule), product(oracle), 1e-8, plan)


def test_gradients_outside_a_level_take_the_emitted_backward() -> None:
    rule, _, x, along = both("solve")
    pushed(rule, x, along, True)
    y, _ = x.leaves().run(rule)
    names: set[str] = set()
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.add(node.name())
            todo += [n for n, _ in node.next_functions]
    assert "ChunksBackward" in names


def test_a_layer() -> None:
    layer = memkit.load("titans_linear", dim=8, heads=2).double()
    x, along = torch.randn(2, 1, 7, 8, dtype=torch.float64)
    got = torch.func.jvp(lambda x: layer(x)[0], (x,), (along,))[1]
    near = (layer(x + 1e-6 * along)[0] - layer(x - 1e-6 * along)[0]) / 2e-6
    assert_close(got.detach(), near.detach(), 1e-6, "a layer")
