"""Tuning: off unless asked for, once for all lengths, and never the reason for another result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.compiler import autotune, launch
from memkit.compiler.autotune import Machine, Trial
from memkit.compiler.kernels.settings import TABLE, Configs, configs_for
from memkit.compiler.launch import Kernels
from memkit.compiler.pipeline import compile_rule
from memkit.compiler.triton_rule import TritonRule
from memkit.inputs import values_and_gradients
from memkit.specs.errors import KernelError
from tests.cases import draw, small
from tests.compare import assert_all_close

from .tuning import OPTIONS, Clock, files, forget, forward, job, kernels, on, used

# ---- when


def test_off_by_default(clock: Clock, rule: TritonRule, tmp_path: Path) -> None:
    forward(rule)
    assert clock.calls == 0 and not files(tmp_path) and used(rule) is None
    assert rule.explain().endswith("configuration of chunks, float32: 32 x 32, sums by 16, 4 warps (the table's)")


def test_times_every_option_once_and_takes_the_fastest(
    clock: Clock, rule: TritonRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = forward(rule)
    on(monkeypatch)
    torch.testing.assert_close(forward(rule), plain)
    forward(rule)
    assert clock.calls == len(OPTIONS) == 4 and used(rule) == OPTIONS[2]
    (path,) = files(tmp_path)
    said = json.loads(path.read_text())
    assert [t["milliseconds"] for t in said["trials"]] == clock.says and said["function"] == "chunks"
    assert "tuned: 1.000 ms, the table's 4.000 ms; 4 configurations timed, 0 dropped; timed in this process" in rule.explain()


def test_no_new_length_batch_or_head_count_starts_a_search(
    clock: Clock, rule: TritonRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    for T in (4, 1, 3, 5, 8, 9):
        forward(rule, T=T)
    forward(rule, B=2)
    forward(rule, H=3)
    functions = [json.loads(p.read_text())["function"] for p in files(tmp_path)]
    assert len(functions) == len(set(functions)) == len(kernels(rule).ran) and clock.calls == len(OPTIONS) * len(functions)


def test_a_key_says_kernels_types_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    own = job()
    assert own.key == job().key
    others = [
        job(dtype=torch.float64), job(precision="tf32"), job(options=OPTIONS[:3]),
        job(function=replace(own.function, sources=own.function.sources[:0])),
    ]  # fmt: skip
    keys = [own.key, *(o.key for o in others)]
    here = autotune.machine(own.device)
    for change in ({"name": "another"}, {"target": "sm_100"}, {"processors": 7}, {"triton": "4"}):
        monkeypatch.setattr(autotune, "machine", lambda device, change=change: replace(here, **change))
        keys.append(own.key)
    assert len(set(keys)) == 1 + len(others) + 4


def test_what_was_chosen_is_what_runs(clock: Clock, rule: TritonRule, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Configs | None] = []
    plain = Kernels.names

    def names(self: Kernels, single: bool, configs: Configs | None = None) -> dict[str, Any]:
        loaded.append(configs)
        return plain(self, single, configs)

    monkeypatch.setattr(Kernels, "names", names)
    forward(rule)
    assert loaded == [None]
    on(monkeypatch)
    forward(rule)
    forward(rule)
    assert loaded[-2:] == [OPTIONS[2], OPTIONS[2]]
    texts = {kernels(rule).module(True, c).source for c in (None, *OPTIONS[1:])}
    assert len(texts) == len(OPTIONS)  # no two options are one text


def test_the_disk_answers_the_next_process(clock: Clock, rule: TritonRule, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    first = forward(rule)
    forget(rule)
    clock.says = [1.0, 2.0, 3.0, 4.0]
    assert torch.equal(forward(rule), first)
    assert clock.calls == len(OPTIONS) and used(rule) == OPTIONS[2] and "read from the disk" in rule.explain()


def test_the_off_switch_wins(clock: Clock, rule: TritonRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over what the disk says and over what this process found."""
    on(monkeypatch)
    forward(rule)
    assert used(rule) == OPTIONS[2]
    monkeypatch.setenv("MEMKIT_AUTOTUNE", "0")
    forward(rule)
    assert used(rule) is None
    forget(rule)
    monkeypatch.setattr(autotune, "load", lambda *_: pytest.fail("the disk was asked"))
    forward(rule)
    assert used(rule) is None and clock.calls == len(OPTIONS)


def test_another_word_for_the_switch_is_refused(clock: Clock, rule: TritonRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKIT_AUTOTUNE", "yes")
    with pytest.raises(KernelError, match="MEMKIT_AUTOTUNE=yes"):
        forward(rule)


def test_calls_that_do_not_fill_the_device_are_not_timed(
    clock: Clock, rule: TritonRule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch)
    monkeypatch.setattr(autotune, "machine", lambda device: Machine("wide", "sm_90", 6, "3"))
    asked: list[Path] = []
    plain = autotune.load
    monkeypatch.setattr(autotune, "load", lambda path, own: asked.append(path) or plain(path, own))
    forward(rule, H=2)
    forward(rule, H=2)
    assert clock.calls == 0 and used(rule) is None and "too small" in rule.explain() and not files(tmp_path)
    assert len(asked) == 1  # the disk is not asked for every token
    forward(rule, B=3, H=2)
    assert clock.calls == len(OPTIONS) and used(rule) == OPTIONS[2]
    forward(rule, H=2)
    assert clock.calls == len(OPTIONS) and used(rule) == OPTIONS[2]


# ---- the search


def test_options_that_fail_are_dropped_with_a_reason(clock: Clock) -> None:
    def make(configs: Configs) -> Callable[[], list[Tensor]]:
        def launched() -> list[Tensor]:
            raise torch.OutOfMemoryError("too much shared memory\nand more")

        if configs == OPTIONS[1]:
            raise SyntaxError("it does not compile")
        return launched if configs == OPTIONS[2] else lambda: [torch.ones(2), torch.ones(2)]

    tried = autotune.search(job(make=make))
    assert [t.dropped for t in tried] == ["", "SyntaxError: it does not compile", "OutOfMemoryError: too much shared memory", ""]
    assert autotune.fastest(tried) == OPTIONS[3] and clock.calls == 2


@pytest.mark.parametrize("off", [2e-3, float("nan"), float("inf")])
def test_results_beyond_rounding_are_dropped(off: float, clock: Clock) -> None:
    def make(configs: Configs) -> Callable[[], list[Tensor]]:
        wrong = off if configs == OPTIONS[2] else 1e-6  # the others differ as rounding does
        return lambda: [torch.tensor([1.0, 1.0 + (0.0 if configs == OPTIONS[0] else wrong)]), torch.ones(1)]

    tried = autotune.search(job(make=make))
    assert [t.dropped.split(":")[0] for t in tried] == ["", "", "result 0 is not the table's", ""]


def test_not_a_number_from_the_inputs_drops_nothing(clock: Clock) -> None:
    tried = autotune.search(job(make=lambda configs: lambda: [torch.tensor([1.0, float("nan"), float("inf")])]))
    assert not any(t.dropped for t in tried)


def test_what_spills_is_dropped_unless_it_ships(clock: Clock) -> None:
    tried = autotune.search(job(spilled=lambda configs: 8 if configs in OPTIONS[:2] else 0))
    assert [t.dropped for t in tried] == ["", "spills 8 bytes a thread", "", ""]


def test_where_nothing_runs_the_table_says_why(clock: Clock, tmp_path: Path) -> None:
    def make(configs: Configs) -> Callable[[], list[Tensor]]:
        raise RuntimeError("no")

    choice = autotune.choose(job(make=make), timing=True)
    assert choice.configs is None and "RuntimeError: no" in choice.why and not files(tmp_path)


def test_spilled_bytes_come_from_the_launched_kernels() -> None:
    launched = SimpleNamespace(device_caches={0: ({"a": SimpleNamespace(n_spills=2), "b": SimpleNamespace(n_spills=5)}, None)})
    assert launch.spilled([object(), launched]) == 20 and launch.spilled([object()]) == 0


@pytest.mark.parametrize(("best", "index"), [(3.99, 0), (3.5, 2)])
def test_the_table_stays_unless_another_is_faster_than_noise(best: float, index: int) -> None:
    times = [4.0, 4.5, best, 5.0]
    assert autotune.fastest([Trial(configs=c, milliseconds=t) for c, t in zip(OPTIONS, times)]) == OPTIONS[index]


def test_a_measurement_is_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    spent = iter([9.0, 1.0, 2.0, 3.0, 50.0, 4.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr(autotune, "_milliseconds", lambda run, device: run() or next(spent))
    assert autotune.measure(lambda: runs.append(1), torch.device("cpu")) == 5.0
    assert len(runs) == autotune.WARM + autotune.ROUNDS
    spent = iter([400.0, 300.0, 500.0, 1.0])
    assert autotune.measure(lambda: runs.append(1), torch.device("cpu")) == 400.0


@pytest.mark.parametrize(("plan", "target"), TABLE)
@pytest.mark.parametrize("single", [False, True])
def test_options_start_with_the_table_and_are_few(plan: str, target: str, single: bool) -> None:
    table = configs_for(plan, target, single, 64, 64)
    found = autotune.candidates(table, target, single)
    assert found[0] == table and 4 <= len(found) == len(set(found)) <= autotune.FEW
    assert all(c.settle == table.loop.settle for o in found for c in (o.loop, o.each))


# ---- what it must not change


@pytest.mark.parametrize("name", ["gated_deltanet", "titans"])
def test_gradients_are_right_when_forward_and_backward_differ(name: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """And inputs stay as they were: kernels write to their own arrays alone, so that a call can be run again on what it was given."""
    rule = TritonRule(compile_rule(small(name), 4, 4, backend="torch"), pinned=True)
    forget(rule)
    x = draw(rule, B=1, T=5, H=1)
    want = values_and_gradients(rule, x)
    on(monkeypatch)
    clock.says = [4.0, 1.0, 3.0, 2.0, 4.0, 3.0, 1.0, 2.0]  # the forward pass gets one option, the backward pass another
    plain = launch._run

    def run(inputs: list[Tensor], key: str, which: str, sizes: list[int]) -> list[Tensor]:
        before = [t.clone() for t in inputs]
        found = plain(inputs, key, which, sizes)
        assert all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in zip(before, inputs, strict=True))
        return found

    monkeypatch.setattr(launch, "_run", run)
    assert_all_close(values_and_gradients(rule, x), want, 1e-9, name)
    assert [c.configs for c in kernels(rule).ran.values()] == [OPTIONS[1], OPTIONS[2]]
    forget(rule)
