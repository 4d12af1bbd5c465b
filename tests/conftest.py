"""Shared set-up: fixed seeds, NaN in uninitialised memory, GPU tests skipped with a reason where there is none."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode asks for it on a GPU
NO_GPU = "needs a CUDA device and torch sees none"


@pytest.fixture(autouse=True)
def _fixed() -> None:
    """The same random numbers whatever the order of tests, and torch.empty filled with NaN."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NO_GPU in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: {NO_GPU} (torch {torch.__version__})")
