"""Compiled rules with tiles of a chosen size, and their comparison with the token loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from memkit.compiler import pipeline, runtime_span
from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.compiler.plans import PLANS
from memkit.inputs import values_and_gradients
from memkit.specs.layer import LayerSpec
from memkit.specs.reference import ReferenceRule
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState
from tests.cases import Inputs
from tests.compare import assert_all_close

TOL = 1e-9


@contextmanager
def tiles(size: int, block: int = 4) -> Iterator[None]:
    """Plans cut sequences into tiles of at most `size` tokens, and the past of `span` into blocks of `block` keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_CACHE", {})
        patch.setattr(runtime_span, "BLOCK", block)
        for module in PLANS.values():
            patch.setattr(module, "tile", lambda facts, own=module.tile: min(size, own(facts)))
        yield


_RULES: dict[tuple[str, int, int, int, str], CompiledRule] = {}


def compiled(spec: LayerSpec, key_dim: int, value_dim: int, tile: int, plan: str = "auto") -> CompiledRule:
    """A compiled rule with tiles of at most `tile` tokens; the same one for the same arguments."""
    key = (spec.model_dump_json(), key_dim, value_dim, tile, plan)
    if key not in _RULES:
        with tiles(tile):
            _RULES[key] = compile_rule(spec, key_dim, value_dim, plan=plan)
    return _RULES[key]


def results(rule: Rule, inputs: Inputs, start: MemoryState | None) -> dict[str, Tensor]:
    """Outputs, final state and gradients.

    A window's keys lie twice in a state that has a span, and only the sum of their gradients has a meaning.
    """
    found = values_and_gradients(rule, inputs, start)
    if "grad.start.span.keys" in found and found["grad.start.keys"].shape[1]:
        tail, every = found.pop("grad.start.keys"), found["grad.start.span.keys"]
        seen = min(tail.shape[1], every.shape[1])
        padded = torch.cat([torch.zeros_like(every[:, seen:]), tail[:, tail.shape[1] - seen :]], 1)
        found |= {"grad.start.span.keys": every + padded, "grad.start.keys before": tail[:, : tail.shape[1] - seen]}
    return found


def oracle_results(oracle: ReferenceRule, inputs: Inputs, prefix: int) -> tuple[Inputs, MemoryState | None, dict[str, Tensor]]:
    """(the inputs after the first `prefix` tokens, the state these leave, the oracle's outputs, states and gradients for the rest)."""
    total = inputs.q.shape[1]
    start = inputs.piece(0, prefix).run(oracle)[1].detach() if prefix else None
    rest = inputs.piece(prefix, total)
    return rest, start, results(oracle, rest, start)


def check(rule: CompiledRule, want: tuple[Inputs, MemoryState | None, dict[str, Tensor]], what: str, tol: float = TOL) -> None:
    """`rule` gives what the oracle gave, from the same state."""
    rest, start, exact = want
    assert_all_close(results(rule, rest, start), exact, tol, what)
