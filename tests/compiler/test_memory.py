"""A run that cannot fit is refused before it starts, with the number."""

from __future__ import annotations

import pytest
import torch

import memkit
from memkit.compiler import memory, pipeline
from memkit.specs.errors import PlanError
from tests.cases import draw, small


def test_a_run_too_large_is_refused_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = memkit.compile(small("titans"), key_dim=4, value_dim=4)
    inputs = draw(rule, 1, 20, 2, torch.float32, 0).leaves()
    monkeypatch.setattr(pipeline, "SURE", 0)
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(PlanError, match=r"(?s)plan frozen over B=1 T=20 H=2 with gradients holds at least 0\.0 GiB.*chunk_size"):
        inputs.run(rule)
    monkeypatch.setattr(memory, "available", lambda device: None)
    inputs.run(rule)


def test_training_holds_the_states_of_all_chunks() -> None:
    rule = memkit.compile("titans", key_dim=8, value_dim=8)
    eq = rule.compiled.equations  # type: ignore[attr-defined]
    kept = [rule._kept_states(tokens, 3, 4) for tokens in (64, 128)]  # type: ignore[attr-defined]
    sizes = [memory.needed(eq, n * 64, 3, states, 4) - memory.needed(eq, n * 64, 3, None, 4) for n, states in enumerate(kept, 1)]
    states = 2 * (32 * 8 + 8 * 32)  # W1 and W2, each with its momentum
    tokens = 2 * (2 * 8 + 2 * 8 + 1)  # the sequences, twice more
    assert sizes == [3 * 4 * (states + 64 * tokens), 3 * 4 * (2 * states + 128 * tokens)]
