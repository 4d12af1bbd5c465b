"""The README and docs/using.md are true: their Python blocks run, the YAML validates, the preset table is what the presets say."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import memkit
from memkit.compiler import native_build

ROOT = Path(__file__).parents[1]
README, USING = ROOT / "README.md", ROOT / "docs" / "using.md"


def blocks(language: str, page: Path = README) -> list[str]:
    """The page's blocks in a language, each below as many empty lines as lines go before it: a traceback shows the page's own lines."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in found]


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.strip().splitlines()[-1][:40])
def test_python_blocks_run(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


def test_the_blocks_of_using_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # traced, not built: that takes half a minute
    monkeypatch.setenv("MEMKIT_CACHE", str(tmp_path))
    names: dict[str, Any] = {}
    for block in blocks("python", USING):
        if 'backend="native"' in block and native_build.compiler() is None:
            continue
        exec(compile(block, str(USING), "exec"), names)
    torch.testing.assert_close(names["again"](names["x"])[0], names["layer"](names["x"])[0])


@pytest.mark.parametrize("page", [README, USING], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8"))
    assert links and [link for link in links if not (page.parent / link).exists()] == []


def test_yaml_blocks_validate(tmp_path: Path) -> None:
    for i, block in enumerate(blocks("yaml")):
        path = tmp_path / f"{i}.yaml"
        path.write_text(block, encoding="utf-8")
        spec = memkit.spec(path)
        assert memkit.compile(spec, key_dim=8, value_dim=8).plan == "frozen"


def test_commands_exist() -> None:
    from typer.main import get_command

    from memkit.cli import app
    from memkit.cli_tools import register

    register(app)
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = {line.split()[1] for block in blocks("console") for line in block.splitlines() if line.startswith("memkit ")}
    assert named <= known


def test_preset_table_is_current() -> None:
    rows = []
    for name in memkit.presets():
        s = memkit.spec(name)
        plan = memkit.compile(s, key_dim=8, value_dim=8).plan
        features = "" if s.features.kind == "identity" else f", {s.features.kind} features"
        at = s.update.grad_at if s.update.grad_at != "chunk" else f"chunk of {s.update.chunk_size}"
        parts = (f"{s.memory.kind}{features}", s.bias.kind, s.window.size, s.retention.kind, s.optimizer.kind, at, f"`{plan}`")
        rows.append(f"| `{name}` | " + " | ".join(map(str, parts)) + " |")
    assert "\n".join(rows) in README.read_text(encoding="utf-8")
