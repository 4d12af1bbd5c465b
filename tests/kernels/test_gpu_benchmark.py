"""The script for a GPU runs from end to end at tiny sizes, so that its one run on a device is not its first."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from memkit.specs.errors import KernelError


def test_quick_run(tmp_path: Path) -> None:
    assert gpu.main(["--quick", "--presets", "deltanet", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu_benchmarks.json").read_text())
    (check,) = found["checks"]
    assert check["preset"] == "deltanet" and check["ok"] and check["difference"] < 1e-5
    assert [bar["reached"] for bar in found["bars"]] == [None] * 6  # no fla here, and the other presets were not asked for
    assert {(row["who"], row["tokens"], row["train"]) for row in found["times"] if "ms" in row} == {
        (who, tokens, train)
        for who in ("softmax attention", "deltanet triton", "deltanet torch")
        for tokens in (8, 16)
        for train in (False, True)
    }
    assert "1 of 1 checks held" in (tmp_path / "gpu_benchmarks.md").read_text()
    assert (tmp_path / "gpu_benchmarks.png").stat().st_size > 10_000


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.gpu_cases, "CHECKED", dict.fromkeys(gpu.gpu_cases.CHECKED, 0.0))
    monkeypatch.setattr(gpu, "times", lambda *_: iter(()))
    assert gpu.main(["--quick", "--presets", "deltanet", "--out", str(tmp_path)]) == 1
    assert "0 of 1 checks held" in (tmp_path / "gpu_benchmarks.md").read_text()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match="torch sees no GPU"):
        gpu.main(["--presets", "deltanet"])
    with pytest.raises(SystemExit):
        gpu.main(["--presets", "deltnet"])


def test_a_preset_that_fails_is_a_row_and_stops_no_other() -> None:
    (row,) = gpu.prepare(gpu.Plan.of(quick=True), ["nope", "deltanet"], True, time.monotonic() + 60)
    assert row["preset"] == "nope" and not row["ok"] and row["failed"].startswith("SpecError")
