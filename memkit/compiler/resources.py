"""What a kernel needs on a GPU that is not here: registers, spilled bytes and shared memory, from the ahead-of-time compiler.

Run it in a process without TRITON_INTERPRET. `memkit kernels` prints what it finds.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .emit_torch import compile_source
from .emit_triton import Function, KernelModule
from .kernels.text import Source

SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes one program may have
SPILL = {"sm_80": 64, "sm_90": 0, "gfx942": 0}  # bytes a thread that are let pass
SEQUENCES = ("q", "keys", "values", "y_out", "grad_y", "q_out", "keys_out", "values_out")  # arrays of the input's type


@dataclass(frozen=True)
class Resources:
    """One kernel on one target. spill: bytes a thread; seconds: to compile it."""

    kernel: str
    target: str
    registers: int
    spill: int
    shared: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.spill <= SPILL[self.target] and self.shared <= SHARED[self.target]


def measure(module: KernelModule, functions: Sequence[str], target: str, dtype: str = "bf16", only: str = "") -> list[Resources]:
    """The resources of every kernel of these functions on "sm_80", "sm_90" or "gfx942"; `only`: of the kernel with this name."""
    names = compile_source(module.source, f"<resources {hash(module.source)}>")
    found = []
    for name in functions:
        function = module.functions[name]
        found += [_measured(names[s.name], s, function, target, dtype) for s in function.sources if only in ("", s.name)]
    return found


def _measured(kernel: Any, source: Source, function: Function, target: str, dtype: str) -> Resources:
    import triton
    from triton.compiler import ASTSource

    signature, constants, attributes = _signature(kernel, source, function, dtype, target)
    start = time.perf_counter()
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=_target(target),
        options={"num_warps": source.config.warps, "num_stages": source.config.stages},
    )
    seconds = time.perf_counter() - start
    registers, spill = _amd(made.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(made.asm["cubin"])
    return Resources(source.name, target, registers, spill, made.metadata.shared, seconds)


def _target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)


def _signature(kernel: Any, source: Source, function: Function, dtype: str, target: str) -> tuple[dict, dict, dict]:
    """Types of the arguments as a launch would find them: aligned pointers, last strides 1, other strides multiples of 16."""
    import triton.language as tl

    tables = {name: kind for (kind, _), name in source.tables.items()}
    last = {b.arguments[-1] for b in function.layout.placed.values() if b.arguments}
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in source.strides or name in ("groups", "heads", "N", "LT", "nought"):
            types[name] = "i32"
        elif name in ("D", "F", "P", "S") or name in last:
            types[name] = "constexpr"
        elif name in tables:
            types[name] = "*i32" if tables[name] != "number" else "*fp32"
        else:
            types[name] = f"*{dtype}" if name in SEQUENCES else "*fp32"
    constants: dict[str, Any] = {
        "D": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype], "F": tl.float32,
        "P": precision(target), "S": precision(target),
    }  # fmt: skip
    for name in last & set(kernel.arg_names):
        types[name], constants[name] = "constexpr", 1
    places = {name: i for i, name in enumerate(kernel.arg_names)}
    aligned = ["nought"] + [
        n for n, t in types.items() if t.startswith("*") or (n in source.strides and t == "i32" and n[-2:] not in ("_t", "_u"))
    ]
    return types, constants, {(places[n],): [["tt.divisibility", 16]] for n in aligned}


def precision(target: str) -> str:
    return "ieee"


def _nvidia(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _amd(text: str) -> tuple[int, int]:
    def last(key: str) -> int:
        return max(map(int, re.findall(rf"\.{key}:\s*(\d+)", text)), default=0)

    return last("vgpr_count"), 4 * last("vgpr_spill_count")
