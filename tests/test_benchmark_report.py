"""What a benchmark found is written down: bars, tables, what was measured of memkit, and the figure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.bench import Bar, Section
from benchmarks.curves import figure
from memkit.compiler import native_build


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


@pytest.mark.parametrize(
    ("compiler", "line", "text"), [(None, "none", "No native code was measured"), ("cc", "cc 1.2", "tables show both")]
)
def test_the_page_says_what_code_is_measured(tmp_path: Path, monkeypatch, compiler: str | None, line: str, text: str) -> None:
    path = tmp_path / compiler if compiler else None
    if path:
        path.write_text("#!/bin/sh\necho cc 1.2\necho copyright\n")
        path.chmod(0o755)
    monkeypatch.setattr(native_build, "compiler", lambda: path and (str(path),))
    report.compiler.cache_clear()
    report.save(tmp_path, {"delta": section()}, "make bench", 2)
    report.compiler.cache_clear()
    page = (tmp_path / "benchmarks.md").read_text()
    assert f"C++ compiler {line}." in page and text in page


def test_a_quick_run_says_that_its_numbers_mean_nothing(tmp_path: Path) -> None:
    s = section()
    s.quick, s.load = True, 9.0
    report.save(tmp_path, {"delta": s}, "make bench", 2)
    page = (tmp_path / "benchmarks.md").read_text()
    assert "quick run" in page and "delta (9.0)" in page


def test_the_page_says_what_was_measured_later(tmp_path: Path) -> None:
    first, later = section(), section()
    later.title, later.again = "another section", True
    report.save(tmp_path, {"delta": first, "loop": later}, "make bench", 2)
    assert "Measured again after the rest: another section.\n" in (tmp_path / "benchmarks.md").read_text()


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    line = {"forward": [1.0, 2.0], "both": [2.0, 4.0], "forward_bytes": [2**20, 2**21], "both_bytes": [2**21, 2**22]}
    figure({"tokens": [512, 1024], "families": {"one": {"a": line, "b": line}, "two": {"a": line}}}, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
