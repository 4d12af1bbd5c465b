"""Starts the interpreter's tests, and the ahead-of-time check of resources, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent
FILES = (
    "test_shim.py",
    "test_memory.py",
    "test_operation.py",
    "test_autotune.py",
    "test_autotune_files.py",
    "test_gpu_benchmark.py",
    "test_values.py",
)


def _run(arguments: list[str], **variables: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run([sys.executable, *arguments], env={**kept, **variables}, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    _run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)], TRITON_INTERPRET="1")


SAMPLE = "linear_attention,deltanet,ttt_linear"  # of each plan the preset that compiles fastest; `orthogonal` takes minutes


@pytest.mark.slow
def test_resources_of_shipped_configurations() -> None:
    """Registers, spills and shared memory of a sample on every target; `memkit kernels --check` looks at all."""
    _run(["-m", "memkit.kernels", "--check", "--presets", SAMPLE, "--widths", "64"], TRITON_INTERPRET="0")
