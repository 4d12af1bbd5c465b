"""The benchmarks run at tiny sizes and count what a hand counts. Nothing here looks at a clock's verdict."""

from __future__ import annotations

import gc
import importlib
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memkit
from benchmarks import cpu, own_sections, peer_sections
from benchmarks.bench import BACKENDS, Bench, Section, backends, differ
from benchmarks.process import HERE, Missing, Worker
from memkit import benchmark
from memkit.compiler import native_build
from memkit.specs.errors import KernelError, SpecError


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of a worker's side as the worker does, from its own folder."""
    monkeypatch.syspath_prepend(str(HERE))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own heap is large, and collecting it before every run is most of what these tests would do."""
    monkeypatch.setattr(gc, "collect", lambda *a: 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled here: tests/native measures real native code."""
    monkeypatch.setattr(native_build, "compiler", lambda: None)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is native code, it seems: torch code under its name."""
    real = memkit.compile

    def pretend(source: Any, *, backend: str = "auto", **widths: Any) -> Any:
        rule = real(source, backend="torch", **widths)
        if backend == "native" and rule.plan == "span":
            raise KernelError("backend: native", "another plan", "", "backend")
        return rule

    monkeypatch.setattr(memkit, "compile", pretend)
    monkeypatch.setattr(native_build, "obstacle", lambda x=None: None)


@pytest.fixture
def bench() -> Bench:
    def peers() -> Path:
        raise Missing("no peers here")

    return Bench(sys.executable, peers, threads=1, quick=True)


# ---- the clock and the inputs


def test_alternate_takes_turns_and_counts_rounds() -> None:
    order: list[str] = []

    def run(name: str, seconds: float):
        return lambda: (order.append(name), seconds)[1]

    took = benchmark.alternate({"a": run("a", 2.0), "b": run("b", 1.0)}, least=2, most=5, seconds=7.0, warm=1)
    assert order == ["a", "b"] * 4 and took == {"a": (2.0, 2.0, 3), "b": (1.0, 1.0, 3)}


@pytest.mark.parametrize("spec", memkit.presets())
def test_drawn_inputs_fit_the_rule_and_stay_finite(spec: str) -> None:
    call = benchmark.draw(memkit.compile(spec, key_dim=4, value_dim=4), 8, 2)
    call.check()
    assert call.forward().shape == (1, 8, 2, 4) and call.state_bytes > 0
    assert all(torch.isfinite(g).all() for g in call.both() if g is not None)


def test_memkit_bench_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "b.json", tmp_path / "b.svg"
    assert benchmark.run(["gla", "titans"], tokens=16, heads=1, width=4, runs=1, cores=1, loop=4, plot=plot, out=out) == 0
    rows = json.loads(out.read_text())
    assert [row["spec"] for row in rows] == ["gla", "titans"] and rows[0]["tokens"] == [4, 8, 16]
    assert rows[1]["plan"] == "frozen" and rows[1]["loop"] > 0 and rows[0]["state_bytes"] == 4 * 4 * 4
    assert "titans" in capsys.readouterr().out and plot.read_text().count("titans") >= 1


@pytest.mark.parametrize("options", [{"plot": Path("x.gif")}, {"out": Path("nowhere/x.json")}, {"specs": ["nosuch"]}])
def test_memkit_bench_refuses_before_it_measures(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "measure", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(SpecError):
        benchmark.run(**options)


# ---- FLOPs


def by_hand(T: int, H: int, K: int, V: int, E: int, C: int) -> int:
    """FLOPs of the products of a two-layer memory with momentum, forward, T tokens in chunks of C, H heads.

    A token: its gradient (W1 k, W2 a, W2^T error); its reading of W and of S; the writes of its chunk that it sees, by scores and sums
    in both layers; both weight gradients, into W and into S; the coefficients of a chunk, a product of two decays.
    """
    token = 2 * E * (K + 2 * V) + 2 * 2 * E * (K + V) + 2 * C * (K + E) + 2 * C * (E + V) + 2 * 2 * E * (K + V) + 2 * C * (C + 1)
    return T * H * token


@pytest.mark.parametrize(("K", "factor", "C"), [(8, 2, 4), (4, 4, 8)])
def test_flops_agree_with_a_count_by_hand_and_with_a_run(sides, K: int, factor: int, C: int) -> None:
    flops = sides("flops")
    rule = memkit.compile("titans", key_dim=K, value_dim=K, overrides={"memory.expansion": factor, "update.chunk_size": C})
    T, H = 4 * C, 2
    want = by_hand(T, H, K, K, factor * K, C)
    assert flops.needed(rule, T, H) == 3 * want
    call = benchmark.draw(rule, T, H)
    assert flops.counted(call.forward) == want
    assert flops.counted(call.both) >= 3 * want - T * H * 8 * C * C  # coefficients may be cheaper backward


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.ones(3, 4) @ torch.ones(4, 5), 2 * 3 * 4 * 5),
        (lambda: torch.ones(2, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.ones(3, 4) * torch.ones(3, 4), 0),
    ],
)
def test_products_are_counted_as_they_run(sides, fn, want: int) -> None:
    assert sides("flops").counted(fn) == want


def test_the_yardstick_knows_its_flops(sides) -> None:
    yard = sides("flops").Bmm()
    assert yard.info["flops"] == yard.repeats * 512 * 64 * 64 * (64 + 64)


# ---- cases


CASES = [
    ("titans", {"T": 16, "d": 4, "C": 8}),
    ("delta", {"spec": "gated_deltanet", "T": 16, "H": 2, "K": 4}),
    ("delta", {"spec": "gla", "T": 16, "H": 2, "K": 4}),
    ("attention", {"T": 16, "H": 2, "K": 4}),
    ("rule", {"spec": "omeganet", "T": 16, "H": 1, "K": 4, "overrides": {"window.size": 16, "update.chunk_size": 8}}),
    ("loop", {"spec": "dot", "T": 4, "H": 1, "K": 4}),
    ("share", {"T": 16, "H": 1, "K": 4, "E": 8, "C": 4}),
]


@pytest.mark.parametrize(("case", "args"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_cases_run_both_ways(sides, case: str, args: dict[str, Any]) -> None:
    found = getattr(sides("ours"), case)(**args)
    assert torch.isfinite(found.forward()).all()
    assert any(g is not None and g.any() for g in found.both())


def test_the_layer_next_to_titans_pytorch_uses_every_parameter(sides) -> None:
    assert all(g is not None for g in sides("ours").titans(T=16, d=4, C=8).both())


def test_delta_case_is_the_rule_that_peers_compute(sides) -> None:
    """The gated delta rule written out, on the inputs both sides draw."""
    T, H, K = 6, 2, 4
    x = sides("inputs").delta(T, H, K)
    W = torch.zeros(H, K, K)
    rows = []
    for t in range(T):
        q, k, v, step = (x[n][0, t] for n in ("q", "k", "v", "step"))
        W = W * x["log_retain"][0, t].exp()[:, None, None]
        W = W + torch.einsum("h,hv,hk->hvk", step, v - torch.einsum("hvk,hk->hv", W, k), k)
        rows.append(torch.einsum("hvk,hk->hv", W, q) / math.sqrt(K))
    got = sides("ours").delta("gated_deltanet", T, H, K).forward()
    assert torch.allclose(got[0], torch.stack(rows), atol=1e-5)


# ---- workers and sections


def test_a_worker_runs_cases_and_says_what_went_wrong() -> None:
    with Worker(sys.executable, 1) as worker:
        info = worker.load("a", "ours", "rule", spec="gla", T=8, H=1, K=4)
        assert info["plan"] == "linear" and worker.runner("a")() > 0 and worker.runner("a", "forward")() > 0
        value = worker.ask("value", key="a")
        assert differ(value, value) == 0 and len(value) == 33  # 8 * 4 entries and the norm
        assert worker.ask("peak") > 0 and worker.ask("info", key="a")["state_bytes"] == 64
        with pytest.raises(Missing, match="no preset nosuch"):
            worker.load("b", "ours", "rule", spec="nosuch", T=8, H=1, K=4)
        worker.ask("drop")
        with pytest.raises(Missing, match="KeyError"):
            worker.ask("run", key="a", mode="both")


def test_backends_of_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends("titans") == ("torch",)
    monkeypatch.setattr(native_build, "obstacle", lambda x=None: None)
    assert backends("titans") == BACKENDS == ("native", "torch") and backends("dot") == ("torch",)


class Here:
    """A worker without a process."""

    def __init__(self, cases: Any) -> None:
        self.ask = lambda do, **order: cases.answer({"do": do, **order})

    def load(self, key: str, module: str, case: str, **args: Any) -> dict[str, Any]:
        return self.ask("load", key=key, module=module, case=case, args=args)

    def runner(self, key: str, mode: str = "both"):
        return lambda: self.ask("run", key=key, mode=mode)


class There(Here):
    """A peer's worker that computes what memkit does."""

    def __init__(self, cases: Any) -> None:
        self.ask = lambda do, **order: do == "imports" or cases.answer({"do": do, **order})

    def load(self, key: str, module: str, case: str, **args: Any) -> dict[str, Any]:
        if module == "peer_titans":
            return super().load(key, "ours", "titans", **{n: args[n] for n in ("T", "d", "C")})
        specs = {peer: spec for spec, (peer, _) in peer_sections.NAIVE.items()}
        return super().load(key, "ours", "delta", spec=specs.get(case, "gated_deltanet"), **args)


@pytest.fixture
def here(sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides in this process."""
    monkeypatch.setattr(memkit, "presets", lambda: ("gla", "dot", "titans"))
    monkeypatch.setattr(Bench, "ours", lambda self: nullcontext(Here(sides("worker").Cases())))
    monkeypatch.setattr(Bench, "theirs", lambda self: nullcontext(There(sides("worker").Cases())))


def measured(name: str, bench: Bench) -> Section:
    """A section that took as many steps as it said, with full rows and bars."""
    steps: list[str] = []
    section = cpu.measured(name, bench, steps.append)
    assert section.rows and all(bar.value is not None for bar in section.bars), section
    assert all(len(row) == len(section.columns) for row in section.rows)
    assert len(steps) == cpu.steps(name, bench)
    return section


@pytest.mark.parametrize("name", cpu.SECTIONS)
def test_sections_have_native_code_next_to_torch_code(bench: Bench, here, pretended, name: str) -> None:
    section = measured(name, bench)
    said = [*section.columns, *(cell for row in section.rows for cell in row)]
    assert any("torch code" in text for text in said)
    assert name in ("attention", "curves") or any("native" in text for text in said)
    assert [row[0] for row in section.rows if "-" in row] == (["dot"] if name == "loop" else [])
    assert any("kept on disk" in note for note in section.notes) == (name == "titans")


@pytest.mark.parametrize("name", cpu.SECTIONS)
def test_without_a_compiler_sections_have_torch_code_alone(bench: Bench, here, name: str) -> None:
    section = measured(name, bench)
    columns = [i for i, label in enumerate(section.columns) if "native" in label]
    assert all(row[i] == "-" for row in section.rows for i in columns)
    assert not any("native" in cell for row in section.rows for cell in row)
    assert not any("kept on disk" in note for note in section.notes)


def test_bars_are_about_native_code_and_the_window_has_both(bench: Bench, here, pretended) -> None:
    section = measured("window", bench)
    assert [bar.what.split(": ")[0] for bar in section.bars] == [
        f"omeganet{code}, chunk {C}" for code in ("", ", torch code") for C in (16, 32)
    ]
    assert [row[2] for row in section.rows] == ["native"] * 2 + ["torch code"] * 2


def test_slow_presets_are_measured_at_a_part_of_both_lengths(bench: Bench, here, pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_sections, "SLOW", 0.0)
    section = measured("lengths", bench)
    assert [row[0] for row in section.rows] == [f"{name}, an 8th of both lengths" for name in ("gla", "titans")]


def test_presets_near_the_bar_are_timed_again(bench: Bench, here, pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[list[str]] = []
    real = Bench.time
    monkeypatch.setattr(Bench, "time", lambda self, runs, **how: (timed.append(list(runs)), real(self, runs, **how))[1])
    both, torch_alone = ["native", "torch", "loop"], ["torch", "loop"]
    for near, want in ((0.0, [both, torch_alone, both]), (math.inf, [both, ["native", "loop"], torch_alone, torch_alone, both])):
        timed.clear()
        monkeypatch.setattr(own_sections, "NEAR", near)
        measured("loop", bench)
        assert timed[: len(want)] == want


@pytest.mark.parametrize("native", [False, True])
def test_curves_without_peers_are_ours_alone(bench: Bench, sides, request, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if native:
        request.getfixturevalue("pretended")
    monkeypatch.setattr(Bench, "ours", lambda self: nullcontext(Here(sides("worker").Cases())))
    section = cpu.measured("curves", bench, lambda what: None)
    labels = [label for lines in section.data["families"].values() for label in lines]
    codes = ("", ", torch code") if native else (", torch code",)
    own = [f"memkit {spec}{code}" for spec in ("titans", "gated_deltanet") for code in codes]
    assert labels == [*own, "torch, causal softmax attention"]
    assert len(section.rows) == len(labels) * len(section.data["tokens"]) and "no peers here" in section.notes[0]


@pytest.mark.parametrize("name", ["titans", "memory", "delta"])
def test_without_peers_a_section_says_so(bench: Bench, name: str) -> None:
    section = cpu.measured(name, bench, lambda what: None)
    assert section.bars and all(bar.reached is None and bar.detail == "no peers here" for bar in section.bars)


@pytest.mark.parametrize(
    ("slow", "fast", "want"), [((1, 4), (2, 2), 141.42), ((3, 4), (2, 2), 100.0), ((1, 1), (2, 2), None), ((3, 1, 9), (2, 2, 3), 261.5)]
)
def test_crossing(slow, fast, want: float | None) -> None:
    found = own_sections.crossing([100, 200, 400][: len(slow)], list(slow), list(fast))
    assert found is None if want is None else found == pytest.approx(want, rel=2e-3)


def test_unknown_sections_and_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--only", "nosuch"], ["--threads", "0"]):
        with pytest.raises(SystemExit) as stop:
            cpu.main(wrong)
        assert stop.value.code == 2
    assert "invalid choice: 'nosuch'" in capsys.readouterr().err
