"""The benchmark's own cases on native code: the same numbers as on torch code, compiled before they are timed."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench import BACKENDS, backends
from benchmarks.process import HERE
from memkit.compiler import native_build

CASES = [
    ("titans", {"T": 16, "d": 4, "C": 8}),
    ("delta", {"spec": "gated_deltanet", "T": 16, "H": 2, "K": 4}),
    ("rule", {"spec": "gla", "T": 16, "H": 2, "K": 4}),
]


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """memkit's side of a comparison, imported as a worker does it."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("ours")


@pytest.mark.parametrize(("case", "args"), CASES, ids=[case for case, _ in CASES])
def test_cases_compute_the_same_on_both_backends(ours: Any, monkeypatch: pytest.MonkeyPatch, case: str, args: dict[str, Any]) -> None:
    found = []
    for backend in BACKENDS:
        torch.manual_seed(0)
        ready = getattr(ours, case)(**args, backend=backend)
        with monkeypatch.context() as patch:
            patch.setattr(native_build, "library", lambda name, *_: pytest.fail(f"{name} is compiled after its case is ready"))
            found.append((ready.forward(), *ready.both()))
    for native, plain in zip(*found, strict=True):
        assert (native is None) == (plain is None)
        assert native is None or torch.allclose(native, plain, rtol=1e-3, atol=1e-5)


def test_products_are_counted_on_torch_code_alone(ours: Any) -> None:
    sizes = {"T": 16, "H": 1, "K": 4, "E": 8, "C": 4}
    native, plain = (ours.share(**sizes, backend=backend).info for backend in BACKENDS)
    assert native["needed"] == plain["needed"] > 0 and plain["done"] > 0 and "done" not in native


def test_the_first_call_compiles_in_a_folder_of_its_own(ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKIT_CACHE", str(tmp_path))
    case = ours.first_call(d=4, C=2)
    assert case.info["seconds"] > 0.1 and os.environ["MEMKIT_CACHE"] == str(tmp_path) and not list(tmp_path.iterdir())


def test_both_backends_are_measured_where_there_is_a_compiler() -> None:
    assert backends("atlas") == BACKENDS
