"""memkit doctor: passes here, and catches a wrong backend, a wrong kind and a crash, naming the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from memkit import cli, doctor
from memkit.compiler import native_build, pipeline
from memkit.specs.bias import L2, Dot
from memkit.specs.errors import KernelError
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.optimizer import Gd, Momentum
from memkit.specs.retention import Channel, Scalar

REAL = pipeline.compile_rule


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(doctor, "devices", lambda: ["cpu"])
    monkeypatch.setattr(pipeline, "_CACHE", {})


def test_the_whole_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "everything agrees" in out, out
    assert all(name in out for name in (*doctor.presets(), *doctor.PACKAGES, "python", "backend torch   yes"))
    count = int(out.partition(" known equivalences")[0].rpartition("of ")[2])
    assert count >= 40 and f"{count} of {count} known" in out


@pytest.mark.parametrize(("found", "said"), [(("c++", "-m64"), "yes, compiled by c++ -m64"), (None, "no: no C++ compiler is installed")])
def test_the_compiler_is_named(
    found: tuple[str, ...] | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_build, "compiler", lambda: found)
    assert doctor.run(only="linear_attention") == 0, "a backend that is asked for is no part of the machine's health"
    assert f"backend native  {said}" in capsys.readouterr().out


def test_one_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(only="gla, retnet") == 0
    out = capsys.readouterr().out
    assert "gla" in out and "retnet" in out and "titans_linear  cpu" not in out


def _compiled_with(kind: Any, method: str, function: Any):
    """A compiler that sees another formula than the oracle does."""

    def wrong(spec: LayerSpec, *args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, method, function)
            return REAL(spec, *args, **options)

    return wrong


MUTATIONS = {
    "a sign": (L2, "loss", lambda self, p, v: -0.5 * ((p - v) * (p - v)).sum()),
    "a lost gate": (Scalar, "retain", lambda self, W, retain=None: W),
    "a factor": (L2, "loss", lambda self, p, v: 0.5001 * ((p - v) * (p - v)).sum()),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_wrong_backend_is_caught(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pipeline, "compile_rule", _compiled_with(*MUTATIONS[what]))
    assert doctor.run(only="gated_deltanet") == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "1 of 1 checks failed" in out
    assert "plan solve is wrong here" in out and "memkit.reference" in out


def test_the_remedy_is_a_plan_that_agrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(spec: LayerSpec, key_dim: int, value_dim: int, *, backend: str = "auto", plan: str = "auto") -> Any:
        return REAL(spec if plan == "scan" else load_spec(spec, {"update.read": "before"}), key_dim, value_dim, backend=backend, plan=plan)

    monkeypatch.setattr(pipeline, "compile_rule", wrong)
    assert doctor.run(only="titans") == 1
    assert 'memkit.compile(..., backend="torch", plan="scan"), which agrees' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "method", "function", "preset"),
    [
        (Momentum, "update", lambda self, g, s, gates: ((m := gates["momentum"] * s["S"] + gates["step_size"] * g), {"S": m}), "titans"),
        (Scalar, "retain", lambda self, W, retain=None: W, "gated_deltanet"),
        (Channel, "retain", lambda self, W, retain=None: W, "kda"),
        (L2, "loss", lambda self, p, v: -0.5 * ((p - v) * (p - v)).sum(), "deltanet"),
        (Dot, "loss", lambda self, p, v: (p * v).sum(), "retnet"),
        (Gd, "update", lambda self, g, s, gates: (gates["step_size"] * g, {}), "titans"),
    ],
)
def test_a_wrong_kind_is_caught_though_oracle_and_backend_agree_on_it(
    kind: Any, method: str, function: Any, preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kind, method, function)
    code = doctor.run(only=preset)
    out = capsys.readouterr().out
    assert "0 of 1 checks failed" in out and "no longer proved" in out and code == 1, out


def test_a_crash_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise KernelError("no such instruction", "another processor")

    monkeypatch.setattr(pipeline, "compile_rule", broken)
    assert doctor.run(only="gla") == 1 and "no such instruction" in capsys.readouterr().out
