"""A memory that can never learn is refused, and only such a one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.specs import layer
from memkit.specs.errors import SpecError
from memkit.specs.io import load_spec, presets
from memkit.specs.learning import stuck
from memkit.specs.memory import Linear, MemoryNet, Mlp
from memkit.specs.optimizer import Gd
from memkit.specs.reference import ReferenceRule
from memkit.specs.retention import NoRetention
from tests.cases import draw, spec_of

LINEAR_NET = {"kind": "chain", "steps": [{"linear": 2}, {"linear": 1}]}
SKIP_NET = {"kind": "chain", "steps": [{"linear": 1}, {"activation": "tanh"}, {"linear": 1}, {"skip": 2}]}

# memory, features -> where the refusal points, or "" for a memory that can learn
STARTS: Mapping[str, tuple[dict[str, Any], str, str]] = {
    "a matrix at zero": ({"kind": "linear", "initial": "zero"}, "identity", ""),
    "a normed matrix at zero": ({"kind": "linear", "initial": "zero", "norm": "layer"}, "identity", ""),
    "one layer at zero": ({"kind": "mlp", "depth": 1, "initial": "zero"}, "identity", ""),
    "two layers at zero": ({"kind": "mlp", "initial": "zero"}, "identity", "memory.initial"),
    "a residual does not help": ({"kind": "mlp", "initial": "zero", "residual": True}, "identity", "memory.initial"),
    "nor does a width that few values divide": ({"kind": "mlp", "initial": "zero", "expansion": 0.3}, "identity", "memory.initial"),
    "two layers at zero, a last one fed with 1/2": ({"kind": "mlp", "initial": "zero", "activation": "sigmoid"}, "identity", ""),
    "gates at zero": ({"kind": "gated_mlp", "initial": "zero", "activation": "sigmoid"}, "identity", "memory.initial"),
    "a chain at zero": ({**LINEAR_NET, "initial": "zero"}, "identity", "memory.initial"),
    "a chain around its last layer": ({**SKIP_NET, "initial": "zero"}, "identity", ""),
    "two layers, learned": ({"kind": "mlp"}, "identity", ""),
    "kernels, a matrix": ({"kind": "linear"}, "exponential", ""),
    "kernels, two layers": ({"kind": "mlp"}, "exponential", ""),
    "kernels, a flat activation": ({"kind": "mlp", "activation": "relu"}, "exponential", "memory"),
    "kernels, gates": ({"kind": "gated_mlp"}, "exponential", "memory"),
    "kernels, open gates": ({"kind": "gated_mlp", "activation": "softplus"}, "exponential", ""),
    "kernels, two layers at zero": ({"kind": "mlp", "initial": "zero"}, "exponential", "memory.initial"),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_memory_that_can_never_learn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where, and only where, the token loop leaves a fresh memory exactly as it was."""
    memory, kind, where = STARTS[name]
    source = {"features": kind, "memory": memory}
    if where:
        with pytest.raises(SpecError, match="never moves") as caught:
            spec_of(source)
        assert caught.value.where == where
        monkeypatch.setattr(layer, "stuck", lambda *_: False)
    oracle = ReferenceRule(spec_of(source), 10, 10)
    inputs = draw(oracle, T=4)
    inputs = inputs._replace(weights=oracle.init_weights(2, dtype=torch.float64), gates={n: g + 0.1 for n, g in inputs.gates.items()})
    _, after = inputs.run(oracle)
    ends = after.weights if after.span is None else {**after.weights, **after.span.weights}
    starts = {n: inputs.weights.get(n, torch.zeros(())) for n in ends}
    assert all(torch.equal(w, starts[n].expand_as(w)) for n, w in ends.items()) == bool(where)


class Drifts(NoRetention):
    def retain(self, W: Tensor, retain: Tensor | None = None) -> Tensor:
        return W + 1


class Deaf(Linear):
    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        return W["W"] @ torch.relu(f - 50)


class Breaks(Linear):
    def read(self, W: Mapping[str, Tensor], f: Tensor, x: Tensor) -> Tensor:
        raise RuntimeError


@pytest.mark.parametrize(
    ("memory", "retention"),
    ((Mlp(), Drifts()), (Deaf(), NoRetention()), (Breaks(), NoRetention())),
    ids=("a retention moves it", "it hears loud features alone", "it cannot be asked"),
)
def test_no_dead_end(memory: MemoryNet, retention: NoRetention) -> None:
    zero = set(memory.shapes(4, 4))
    assert not stuck(memory, zero, retention, Gd())
    assert stuck(Mlp(), {"W1", "W2"}, NoRetention(), Gd()) and not stuck(Mlp(), {"W1"}, NoRetention(), Gd())


def test_asking_leaves_no_trace() -> None:
    """No random number is used up, whatever mode torch is in."""
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"), pytest.raises(SpecError, match="never moves"):
        spec_of({"memory": {"kind": "mlp", "initial": "zero"}})
    assert torch.equal(torch.get_rng_state(), state)


def test_presets_can_learn() -> None:
    for name in presets():
        load_spec(name)
