"""What tests of tuning share: a clock that says what it was told, a rule as a new process has it, and a job with a made-up run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.compiler import autotune
from memkit.compiler.autotune import Job
from memkit.compiler.kernels.settings import Configs, configs_for
from memkit.compiler.launch import Kernels
from memkit.compiler.pipeline import compile_rule
from memkit.compiler.triton_rule import TritonRule
from tests.cases import draw, small

OPTIONS = autotune.candidates(configs_for("linear", "sm_90", True, 4, 4), "sm_90", True)


class Clock:
    """Stands where times are measured: counts, and says what it was told about each option in turn."""

    def __init__(self) -> None:
        self.calls, self.says = 0, [4.0, 3.0, 1.0, 2.0]

    def __call__(self, run: Callable[[], object], device: torch.device) -> float:
        self.calls += 1
        return self.says[(self.calls - 1) % len(self.says)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    monkeypatch.setenv("MEMKIT_CACHE", str(tmp_path))
    monkeypatch.delenv("MEMKIT_AUTOTUNE", raising=False)
    found = Clock()
    monkeypatch.setattr(autotune, "measure", found)
    return found


@pytest.fixture
def rule() -> Iterator[TritonRule]:
    made = TritonRule(compile_rule(small("retnet"), 4, 4, backend="torch"), pinned=True)
    forget(made)
    yield made
    forget(made)


def kernels(rule: TritonRule) -> Kernels:
    assert rule.kernels is not None
    return rule.kernels


def forget(rule: TritonRule) -> None:
    """What a new process knows."""
    kernels(rule).chosen.clear()
    kernels(rule).ran.clear()


def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKIT_AUTOTUNE", "1")


def forward(rule: TritonRule, B: int = 1, T: int = 4, H: int = 1) -> Tensor:
    with torch.no_grad():
        return draw(rule, B=B, T=T, H=H, dtype=torch.float32).run(rule)[0]


def files(folder: Path) -> list[Path]:
    return sorted((folder / "autotune").glob("*")) if (folder / "autotune").exists() else []


def used(rule: TritonRule, name: str = "chunks") -> Configs | None:
    return kernels(rule).ran[name, torch.float32].configs


def job(**changes: Any) -> Job:
    """A job of a real function, with a made-up run."""
    made = kernels(TritonRule(compile_rule(small("retnet"), 4, 4, backend="torch"), pinned=True))
    given: dict[str, Any] = {
        "function": made.module(True).functions["chunks"], "options": OPTIONS, "target": "sm_90",
        "dtype": torch.float32, "precision": "ieee", "device": torch.device("cpu"),
        "make": lambda configs: lambda: [torch.ones(2), torch.ones(2)], "spilled": lambda configs: 0,
    }  # fmt: skip
    return Job(**{**given, **changes})
