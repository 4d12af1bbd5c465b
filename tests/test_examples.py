"""The examples run, each as a user would run it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memkit.explanation import explain
from memkit.layers.memory_layer import load

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_new_bias_from_outside_trains() -> None:
    out = run("new_bias.py")
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", out)[0])
    assert last < 0.9 * first
    assert "loss(p, v)    = pinball(p, v)" in out


def test_a_new_bias_takes_less_than_15_lines() -> None:
    source = (EXAMPLES / "new_bias.py").read_text()
    (cls,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert cls.end_lineno is not None and cls.end_lineno - cls.lineno + 1 < 15


def test_first_layer() -> None:
    assert "bytes" in run("first_layer.py")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_composed_layers_train(path: Path) -> None:
    layer = load(path, dim=16, heads=2)
    x = torch.randn(4, 10, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        y, _ = layer(x)
        loss = (y[:, 2:] - x[:, :-2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert layer.spec.name in explain(path, dim=16, heads=2)
