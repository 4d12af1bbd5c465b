"""memkit.testing: passes what is right, and names what is wrong; the example file is run as a user would run it."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import memkit
from memkit.compiler import pipeline
from memkit.specs.errors import MemkitError
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.testing import assert_equivalent, assert_matches_reference, distance, edges, runs, specs

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "test_my_rule.py"


def test_it_is_part_of_memkit() -> None:
    assert memkit.testing.assert_equivalent is assert_equivalent and "testing" in memkit.__all__


def test_assert_equivalent() -> None:
    assert assert_equivalent("gated_deltanet", "deltanet", given={"gates.retain": 1}).kind == "structural"
    with pytest.raises(AssertionError, match="they differ in y after 1 token"):
        assert_equivalent("gated_deltanet", "deltanet")
    with pytest.raises(AssertionError, match="numerical evidence where structural"):
        assert_equivalent("titans_linear", "retnet", given={"gates.step_size": 0}, kind="structural")


@pytest.mark.parametrize("name", ["deltanet", "titans_linear", "swla", "exp_attention"])
def test_assert_matches_reference(name: str) -> None:
    small = {"window.size": 3} if load_spec(name).window.size > 1 else None
    assert_matches_reference(name, overrides=small, lengths=(1, 4))


def test_edges_of_windows_and_chunks() -> None:
    assert edges(load_spec("titans", {"update.chunk_size": 4})) == [1, 2, 3, 4, 5, 9]
    assert edges(load_spec("swla", {"window.size": 3})) == [1, 2, 3, 4] and 65 in edges(load_spec("titans"))


def test_a_compiled_rule_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.compile_rule

    def wrong(spec: LayerSpec, *args: Any, **options: Any) -> Any:
        return real(load_spec(spec, {"bias": {"kind": "expression", "formula": "-r^2/2"}}), *args, **options)

    monkeypatch.setattr(pipeline, "compile_rule", wrong)
    with pytest.raises(AssertionError, match=r"deltanet under plan solve is not its token loop, 1 tokens:\n  y: off by"):
        assert_matches_reference("deltanet", lengths=(1,))


@settings(max_examples=8, deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much))
@given(runs())
def test_drawn_runs_run(run: Any) -> None:
    inputs = run.inputs()
    y, state = inputs.run(run.rule())
    assert y.shape == (run.batch, run.prefix + run.tokens, run.heads, run.value_dim) and state.position == run.prefix + run.tokens
    assert distance(y, y) == 0 and distance(y, y + 1) > 0


@settings(max_examples=5, deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much))
@given(specs("decayed", finite=True))
def test_drawn_specs_are_what_was_asked_for(spec: LayerSpec) -> None:
    assert spec.update.grad_at == "decayed" and spec.features.finite()


def test_without_hypothesis_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("hypothesis"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "memkit.strategies", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MemkitError, match="pip install hypothesis"):
        specs()


def test_memkit_testing_imports_without_hypothesis() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import memkit; memkit.testing.assert_equivalent"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_example_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-3000:]
