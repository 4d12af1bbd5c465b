"""Kernels run here in triton's interpreter, on CPU tensors, in a process of their own: the variable must be set before triton is imported.

`test_interpreted.py` starts that process from the ordinary run; there the other files are not collected.
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FILES = [
    "test_values.py",
    "test_shim.py",
    "test_gpu_benchmark.py",
    "test_memory.py",
    "test_operation.py",
    "test_autotune.py",
    "test_autotune_files.py",
]
collect_ignore = ["test_interpreted.py"] if INTERPRETED else FILES

if INTERPRETED:
    from .shim import install

    install()

    from .tuning import clock, rule  # noqa: F401 (fixtures)
