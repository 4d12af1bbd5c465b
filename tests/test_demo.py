"""The demonstration, cut short: what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from memkit import demo
from memkit.layers.model import ByteLM
from memkit.specs.errors import MemkitError
from memkit.specs.io import load_spec
from memkit.specs.reference import ReferenceRule


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model and a short evaluation."""
    monkeypatch.setattr(demo, "SIZES", {"dim": 16, "depth": 1, "heads": 4, "hidden": 16})
    monkeypatch.setattr(demo, "TOKENS", 8)
    monkeypatch.setattr(demo, "EVALUATED", (8, 8))


def test_it_leaves_a_folder_that_can_be_used(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    threads = torch.get_num_threads()
    code = demo.run_demo(2, tmp_path / "a" / "b")
    out, folder = capsys.readouterr().out, tmp_path / "a" / "b"
    metrics = json.loads((folder / "metrics.json").read_text())
    first = metrics["models"]["atlas"]
    below = first["held_out"] < metrics["unigram_entropy"]
    assert metrics["learned"] == (True if below else None if first["steps"] < demo.ENOUGH else False)
    assert code == (1 if metrics["learned"] is False else 0)
    assert metrics["same_after_reload"] and set(metrics["models"]) == {"atlas", "deltanet"}
    assert 2.0 < metrics["unigram_entropy"] < 4.0
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_bytes().startswith(b"The ")
    assert len(first["curve"]) == first["steps"] > 0 and first["curve"][-1][1] < first["curve"][0][1]
    used = [m["seconds"] for m in metrics["models"].values()]
    assert min(used) >= 2
    for name in ("atlas", "deltanet"):
        model = ByteLM.load(folder / name)
        assert math.isfinite(model.loss(torch.zeros(1, 4, dtype=torch.long)).item()) and model.spec.name == name
    for said in ("NS5(S_t)", "largest difference", "unigram entropy", "held out", "update.chunk_size 16", "the same output"):
        assert said in out, said
    assert torch.get_num_threads() == threads


def test_no_training_is_no_success(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a step where one would be enough to judge, the exit code is 1; and without matplotlib it says so and goes on."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(demo, "ENOUGH", 0)
    assert demo.run_demo(0, tmp_path) == 1
    out = capsys.readouterr().out
    assert "did NOT learn" in out and "no curve (matplotlib is not installed)" in out
    assert not (tmp_path / "curve.png").exists() and (tmp_path / "metrics.json").exists()


def test_too_few_steps_are_no_failure(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run_demo(0, tmp_path) == 0
    out = capsys.readouterr().out
    assert "too few steps to judge (0): give it more --seconds" in out and "did NOT learn" not in out
    assert json.loads((tmp_path / "metrics.json").read_text())["learned"] is None


def test_entropy_by_hand() -> None:
    assert demo.entropy(torch.tensor([1, 1, 2, 3], dtype=torch.uint8)) == pytest.approx(1.5 * math.log(2))
    assert demo.entropy(torch.tensor([7, 7])) == 0


def test_the_last_tenth_is_held_out() -> None:
    train, held = demo.split(bytes(range(100)))
    assert train.tolist() == list(range(90)) and held.tolist() == list(range(90, 100))


def test_the_text_is_english() -> None:
    text = demo.read_text()
    assert len(text) > 300_000 and text.count(b"The ") > 100 and text.count(b"Python") > 100


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec("deltanet")
    assert "agree" in demo.check_oracle(spec)
    wrong = load_spec("deltanet", {"bias": "dot"})
    monkeypatch.setattr(demo, "make_rule", lambda _, k, v: ReferenceRule(wrong, k, v))
    with pytest.raises(MemkitError, match="differs from the token loop"):
        demo.check_oracle(spec)


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(MemkitError, match="No such file"):
        demo.run_demo(1, tmp_path, text=tmp_path / "none.txt")
    with pytest.raises(MemkitError, match="nan"):
        demo.run_demo(math.nan, tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(MemkitError, match="9 bytes"):
        demo.run_demo(1, tmp_path, text=tmp_path / "short.txt")
    with pytest.raises(MemkitError, match="folder that can be written to"):
        demo.run_demo(1, tmp_path / "short.txt" / "x")
