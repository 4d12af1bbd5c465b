"""The benchmarks run at tiny sizes, count what a hand counts, and write down what they found. Nothing here looks at a clock's verdict."""

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
from benchmarks import cpu, own_sections, report
from benchmarks.bench import Bar, Bench, Section, differ
from benchmarks.curves import figure
from benchmarks.process import HERE, Missing, Worker
from memkit import benchmark
from memkit.specs.errors import SpecError


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


class Here:
    """A worker without a process."""

    def __init__(self, cases: Any) -> None:
        self.ask = lambda do, **order: cases.answer({"do": do, **order})

    def load(self, key: str, module: str, case: str, **args: Any) -> dict[str, Any]:
        return self.ask("load", key=key, module=module, case=case, args=args)

    def runner(self, key: str, mode: str = "both"):
        return lambda: self.ask("run", key=key, mode=mode)


@pytest.mark.parametrize("name", ["window", "lengths", "rate", "loop", "attention"])
def test_sections_of_our_own_fill_their_bars(bench: Bench, sides, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_sections.memkit, "presets", lambda: ("gla", "titans"))
    monkeypatch.setattr(Bench, "ours", lambda self: nullcontext(Here(sides("worker").Cases())))
    section = cpu.measured(name, bench, lambda what: None)
    assert section.rows and all(bar.value is not None for bar in section.bars), section
    assert all(len(row) == len(section.columns) for row in section.rows)


def test_curves_without_peers_are_ours_alone(bench: Bench, sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "ours", lambda self: nullcontext(Here(sides("worker").Cases())))
    section = cpu.measured("curves", bench, lambda what: None)
    labels = [label for lines in section.data["families"].values() for label in lines]
    own = [f"memkit {spec}{code}" for spec in ("titans", "gated_deltanet") for code in ("", ", torch code")]
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


# ---- what is written


def section() -> Section:
    s = Section("delta", "A title", columns=["a", "b"], rows=[["1", "x|y"]], notes=["A note."])
    s.bar("one", ">=", 2.5).fill(4.65, 4.7, "1 ms against 5 ms")
    s.bar("two", "<=", 1.1).fill(1.18)
    s.bar("three", ">=", 40, "%")
    return s


def test_bars_know_whether_they_are_reached() -> None:
    assert [bar.reached for bar in section().bars] == [True, False, None]
    assert Bar("x", "<=", 0, "", 0.0).reached and not Bar("x", ">=", 10, "x", math.nan).reached


def test_the_page_has_every_bar_and_every_table(tmp_path: Path) -> None:
    report.save(tmp_path, {"delta": section()}, "make bench", 2)
    page = (tmp_path / "benchmarks.md").read_text()
    for line in (
        "| one | >= 2.5x | 4.65x | yes | 4.7x | 1 ms against 5 ms |",
        "| two | <= 1.10x | 1.18x | **no** |  |  |",
        "| three | >= 40 % |  | not measured |  |  |",
        "1 of 2 bars reached; 1 not measured",
        "## A title",
        "| 1 | x\\|y |",
        "A note.",
        "`make bench`",
        f"torch {torch.__version__}",
        "titans-pytorch 0.",
        "2 threads",
    ):
        assert line in page, line
    assert "quick run" not in page and report.load(tmp_path) == {"delta": section()}


def test_a_quick_run_says_that_its_numbers_mean_nothing(tmp_path: Path) -> None:
    s = section()
    s.quick, s.load = True, 9.0
    report.save(tmp_path, {"delta": s}, "make bench", 2)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "quick run" in page and "delta (9.0)" in page


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    line = {"forward": [1.0, 2.0], "both": [2.0, 4.0], "forward_bytes": [2**20, 2**21], "both_bytes": [2**21, 2**22]}
    figure({"tokens": [512, 1024], "families": {"one": {"a": line, "b": line}, "two": {"a": line}}}, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"


def test_unknown_sections_and_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--only", "nosuch"], ["--threads", "0"]):
        with pytest.raises(SystemExit) as stop:
            cpu.main(wrong)
        assert stop.value.code == 2
    assert "invalid choice: 'nosuch'" in capsys.readouterr().err
