"""The README is true: its Python blocks run, its YAML validates, its preset table is what the presets say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memkit

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.strip().splitlines()[-1][:40])
def test_python_blocks_run(block: str) -> None:
    exec(compile(block, str(README), "exec"), {})


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
