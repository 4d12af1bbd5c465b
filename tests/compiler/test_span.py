"""Plan `span` lets a chunk's keys look at the past only where the inner gradient needs the memory's answer to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.compiler.cost import plan_cost
from memkit.compiler.pipeline import compile_rule
from memkit.specs.reference import ReferenceRule
from tests.cases import draw, spec_of
from tests.compiler.agree import check, compiled, oracle_results

KERNEL = {"features": "exponential", "retention": "scalar", "update.chunk_size": 4}
DOT, CHUNK, MOMENTUM = {"bias": "dot"}, {"update.grad_at": "chunk"}, {"optimizer": "momentum"}
DEEP = {"memory": {"kind": "mlp", "expansion": 1}}

# fields -> whether the keys look: a signal that is free of the prediction, behind one weight, asks the memory nothing
LOOKING: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "a product": (DOT, False),
    "a product, from a window": ({**DOT, "window.size": 3}, False),
    "a product, once a chunk": ({**DOT, **CHUNK}, False),
    "a product, momentum": ({**DOT, **MOMENTUM}, False),
    "a product, momentum, once a chunk": ({**DOT, **MOMENTUM, **CHUNK}, False),
    "a product, one layer": ({**DOT, **CHUNK, "memory": {"kind": "mlp", "depth": 1, "residual": True}}, False),
    "a product, two layers": ({**DOT, **CHUNK, **DEEP}, True),
    "a product, normed": ({**DOT, **CHUNK, "memory": {"kind": "linear", "norm": "layer"}}, True),
    "a difference": ({}, True),
    "a difference, once a chunk": (CHUNK, True),
}


@pytest.mark.parametrize("name", LOOKING)
def test_who_looks_at_the_past(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, looks = LOOKING[name]
    spec = spec_of({}, {**KERNEL, **fields})
    rule = compiled(spec, 3, 3, 4)
    seen, history = [], rule._module["call_history"]

    def watched(x: Tensor, *rest: Tensor) -> Any:
        seen.append(x.shape[1])
        return history(x, *rest)

    monkeypatch.setitem(rule._module, "call_history", watched)
    inputs = draw(rule, B=1, T=12)
    inputs.run(rule)
    before = spec.window.size - 1
    assert seen and set(seen) == {4 + (4 + before if looks else 0)}
    wanted = oracle_results(ReferenceRule(spec, 3, 3), inputs, 3)
    check(rule, wanted, name)


def test_the_count_knows_who_looks() -> None:
    """An earlier key costs a query the product with it, 2 K, and its entry, 2 V; the same again where keys look."""
    costs = {}
    for bias in ("dot", "l2"):
        rule = compile_rule(spec_of({}, {**KERNEL, "bias": bias}), 3, 5)
        graphs = {n: s.last for n, s in rule.compiled.graphs.items()}
        costs[bias] = plan_cost(rule.compiled.equations, graphs, 4).growth.products
    assert costs == {"dot": 2 * 3 + 2 * 5, "l2": 2 * (2 * 3 + 2 * 5)}


def test_a_key_that_sees_nothing_has_its_gradient() -> None:
    """The numbers of a token loop over exp(q k), written here."""
    rule = compile_rule(spec_of("exp_attention", {"optimizer": {"kind": "gd", "step_size": 1}}), 3, 2)
    x = draw(rule, B=1, T=70, H=1).leaves()
    y, _ = x.run(rule)
    plain = torch.exp(x.q[0, :, 0] @ x.k[0, :, 0].T).tril() @ x.v[0, :, 0]
    want = torch.autograd.grad(plain.square().sum(), [x.q, x.k, x.v])
    got = torch.autograd.grad(y.square().sum(), [x.q, x.k, x.v])
    torch.testing.assert_close(y[0, :, 0], plain, rtol=1e-10, atol=1e-10)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
