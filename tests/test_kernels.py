"""`memkit kernels` without a compiler: what is compiled once, what is kept, and what the report and the exit code say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from memkit import kernels
from memkit.compiler.resources import Resources, Work
from memkit.specs.errors import KernelError

FITS = Resources(registers=40, spill=0, shared=1024, seconds=0.5)
ONE = {"presets": "linear_attention", "widths": "16", "targets": "sm_90", "dtype": "bf16"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """What was given to the compiler, which finds that everything fits."""
    seen: list[Work] = []

    def measure(item: Work) -> Resources:
        seen.append(item)
        return FITS

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernels, "measure", measure)
    return seen


def run(**options: object) -> int:
    return kernels.run(**{**ONE, "check": True, "out": None, "store": None, "jobs": 1, **options})  # type: ignore[arg-type]


def test_kernels_of_one_text_are_compiled_once(compiled: list[Work]) -> None:
    assert run(presets="retnet,retnet") == 0
    assert len(compiled) == len({w.key for w in compiled}) == 6


def test_a_run_goes_on_where_it_was_cut_short(compiled: list[Work], tmp_path: Path) -> None:
    store = tmp_path / "found.jsonl"
    run(store=store)
    lines = store.read_text().splitlines()
    store.write_text("\n".join(lines[:2]) + '\n{"key": "half a li')
    compiled.clear()
    assert run(store=store) == 0
    assert len(compiled) == len(lines) - 2


@pytest.mark.parametrize("needs", [Resources(255, 8, 1024, 0.5), Resources(40, 0, 228 * 1024, 0.5)], ids=["spill", "shared"])
def test_what_does_not_fit_fails(compiled: list[Work], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needs: Resources) -> None:
    monkeypatch.setattr(kernels, "measure", lambda item: needs if item.kernel == "chunks_saving_1" else FITS)
    out = tmp_path / "kernels.md"
    assert run(out=out) == 1 and run(out=out, check=False) == 0
    assert out.read_text().count("does not fit") == 1
    found = re.search(r"(\d+) of (\d+) fit", out.read_text())
    assert found and int(found[1]) == int(found[2]) - 1


def test_the_report_shows_configurations_in_order(compiled: list[Work], tmp_path: Path) -> None:
    out, table = tmp_path / "kernels.json", tmp_path / "kernels.md"
    run(presets="retnet,linear_attention", targets="gfx942,sm_80", out=out)
    rows = json.loads(out.read_text())
    assert list(dict.fromkeys((r["preset"], r["target"]) for r in rows)) == [
        ("linear_attention", "sm_80"), ("linear_attention", "gfx942"), ("retnet", "sm_80"), ("retnet", "gfx942"),
    ]  # fmt: skip
    assert all(r["config"]["warps"] in (4, 8) and r["fits"] for r in rows)
    run(presets="retnet,dot", out=table)
    assert "dot 16: no kernels" in table.read_text() and "| 64x64x32 | 8 |" in table.read_text()


@pytest.mark.parametrize("options", [{"targets": "sm_70"}, {"dtype": "int8"}])
def test_unknown_choices_are_refused(compiled: list[Work], options: dict[str, str]) -> None:
    with pytest.raises(KernelError):
        run(**options)
