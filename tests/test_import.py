"""`import memkit` needs neither triton nor matplotlib, and costs little beyond torch."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "matplotlib", "hypothesis", "graphviz_pure", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)

sys.meta_path.insert(0, Hidden())
import torch
import memkit

layer = memkit.load("titans", dim=16, heads=2, overrides={"update.chunk_size": 4})
y, state = layer(torch.randn(1, 9, 16))
y.sum().backward()
print(memkit.explain("deltanet").splitlines()[0], tuple(y.shape))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_layer_runs_without_the_extras() -> None:
    assert run(HIDDEN) == "deltanet (1, 9, 16)"


def test_import_leaves_the_extras_alone() -> None:
    loaded = run("import memkit, sys; print(*[m for m in ('torch', 'triton', 'matplotlib', 'hypothesis', 'torch.fx') if m in sys.modules])")
    assert loaded == "", f"import memkit loads {loaded}"
