"""Of a long sequence few states are kept, and the others made again on the way back: with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memkit.compiler import native_run
from memkit.compiler.checkpoints import checkpoints
from memkit.compiler.ir import Graph, Op, get, param, scan
from memkit.inputs import values_and_gradients
from tests.cases import draw

from .rules import COVERED, preset, wide


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the C++ functions that run from now on."""
    names: list[str] = []
    before = native_run.Launch.__call__

    def call(self: native_run.Launch, *rest: Any) -> None:
        names.append(self.name)
        before(self, *rest)

    monkeypatch.setattr(native_run.Launch, "__call__", call)
    return names


DELAYED = "features in stretches"  # a rule whose wide state waits for what windows add
BLOCKS = "orthogonal"  # one whose calls are for several blocks of a chunk


@pytest.mark.parametrize("name", [DELAYED, BLOCKS, *(n for n in COVERED if "chunks" in preset(n).native.module.stacks)])
@pytest.mark.parametrize("chunks", (1, 2))
def test_results_and_gradients_are_the_same(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = wide(name) if name in (DELAYED, BLOCKS) else preset(name)
    base = "blocks" if name == BLOCKS else "chunks"
    assert ("W1_late" in rule.native.module.source) == (name == DELAYED)
    inputs = draw(rule, B=2, T=5 * rule.compiled.chunk + 2, H=2)
    want = values_and_gradients(rule, inputs)
    a_chunk = rule.native.state_numbers(base) * inputs.q.shape[0] * inputs.q.shape[2] * inputs.q.element_size()
    for limit in ("STACKS", "DEAR", "ROOMY"):
        monkeypatch.setattr(native_run, limit, 0)
    monkeypatch.setattr(native_run, "PART", chunks * a_chunk)
    monkeypatch.setattr(native_run, "FEWEST", 1)
    names = called(monkeypatch)
    got = values_and_gradients(rule, inputs)
    assert names.count(f"{base}_thin") > 1 and f"{base}_states" in names and f"{base}_backward" in names
    for n, x in want.items():
        torch.testing.assert_close(got[n], x, rtol=1e-10, atol=1e-10, msg=lambda text, n=n: f"{n}: {text}")


def test_short_sequences_keep_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    names = called(monkeypatch)
    rule = preset("titans")
    values_and_gradients(rule, draw(rule, B=1, T=2 * rule.compiled.chunk, H=1))
    assert set(names) == {"chunks_saving", "chunks_backward"}


def test_parts_hold_what_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = preset("titans")
    numbers = sum(w.numel() for w in draw(rule, B=1, T=1, H=1).weights.values()) * 2  # weights, and momentum of each
    monkeypatch.setattr(native_run, "STACKS", 6 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "PART", 3 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "ROOMY", 5 * numbers * 2 * 8)
    assert rule.native.parts("chunks", (8, 2, 4), 8) == [(0, 5), (5, 8)], "few states are copied less often"
    monkeypatch.setattr(native_run, "PART", 5 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "ROOMY", 7 * numbers * 2 * 8)
    assert rule.native.parts("chunks", (8, 2, 4), 8) == [(0, 7), (7, 8)], "and so are those of which no cache holds many"
    monkeypatch.setattr(native_run, "PART", 3 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "ROOMY", 0)
    assert rule.native.parts("chunks", (8, 2, 4), 8) == [(0, 4), (4, 8)], "parts of fewer chunks copy states too often"
    monkeypatch.setattr(native_run, "FEWEST", 1)
    assert rule.native.parts("chunks", (8, 2, 4), 8) == [(0, 3), (3, 6), (6, 8)]
    assert rule.native.state_numbers("chunks") == numbers
    assert native_run.saving("chunks", numbers, (6, 2, 4), 8) == "chunks_saving"
    assert native_run.saving("chunks", numbers, (7, 2, 4), 8) == "chunks_thin"


def test_memory_counts_the_states_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence is not refused for states that are made again; blocks are those of C++."""
    rule = preset("titans")
    numbers, chunk = rule.native.state_numbers("chunks"), rule.compiled.chunk
    assert rule._kept_states(7 * chunk, 2, 8) == 7
    monkeypatch.setattr(native_run, "STACKS", 6 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "PART", 3 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "FEWEST", 1)
    monkeypatch.setattr(native_run, "ROOMY", 0)
    assert rule._kept_states(8 * chunk, 2, 8) == 3
    blocks = preset("atlas")
    assert (blocks.most, blocks._kept_states(9, 2, 8)) == (2, 5)
    numbers = blocks.native.state_numbers("blocks")
    monkeypatch.setattr(native_run, "DEAR", 4 * numbers * 2 * 8)
    monkeypatch.setattr(native_run, "PART", numbers * 2 * 8)
    assert blocks._kept_states(8, 2, 8) == 4, "of as many states as may all be kept"
    assert blocks._kept_states(9, 2, 8) == 6, "three calls, and no part of more than one block"


def forward(change: Callable[[Graph], Graph] = lambda graph: graph) -> Graph:
    """w' = w x_n, y_n = w, with the states saved."""
    w, x = param("w", ("g",)), param("x", ("g",))
    body = Graph((w, x), (w, w))
    start, xs = param("w", ("g",)), param("x", ("n", "g"))
    last, y = scan(body, [start], [xs], save=True)[:2]
    return change(Graph((start, xs), (y, last, get(last.args[0], 2, ("n", "g"))), ("y", "w", "saved_0")))


def test_a_loop_whose_state_starts_elsewhere_has_none() -> None:
    assert checkpoints(forward()) is not None
    renamed = forward(lambda graph: Graph(graph.params, graph.results, ("y", "other", "saved_0")))
    assert checkpoints(renamed) is None


def test_without_saved_states_there_are_none() -> None:
    assert checkpoints(forward(lambda graph: Graph(graph.params, graph.results[:2], graph.labels[:2]))) is None
    inputs = forward(lambda graph: Graph(graph.params, (*graph.results[:2], graph.params[1]), graph.labels))
    assert inputs.results[2].op is Op.PARAM and checkpoints(inputs) is None
