"""What a kernel needs on a GPU that is not here: registers, spilled bytes and shared memory, from the ahead-of-time compiler.

Run it in a process without TRITON_INTERPRET. `memkit kernels` prints what it finds.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .emit_torch import compile_source
from .emit_triton import Function, KernelModule
from .kernels.functions import definitions
from .kernels.text import Source
from .kernels.tile import Config

SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes one program may have
SPILL = {"sm_80": 64, "sm_90": 0, "gfx942": 0}  # bytes a thread that are let pass
SEQUENCES = ("q", "keys", "values", "y_out", "grad_y", "q_out", "keys_out", "values_out")  # arrays of the input's type
NUMBERS = ("scratch", "groups", "heads", "N", "LT", "nought")  # what every kernel takes after its arrays and their strides
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Resources:
    """What one kernel needs. spill: bytes a thread; seconds: to compile it."""

    registers: int
    spill: int
    shared: int
    seconds: float

    def fits(self, target: str) -> bool:
        return self.spill <= SPILL[target] and self.shared <= SHARED[target]


@dataclass(frozen=True)
class Work:
    """One kernel for one target, by itself: it can be compiled in another process. text: a module that defines `kernel` and its helpers."""

    kernel: str
    target: str
    dtype: str
    text: str
    types: tuple[tuple[str, str], ...]  # of the arguments, in order
    ones: tuple[str, ...]  # strides that are 1
    config: Config

    @cached_property
    def key(self) -> str:
        """The same for two kernels, of whatever rules, that one compilation serves."""
        import triton

        text = re.sub(rf'def {self.kernel}\(|""".*?"""', "", self.text, flags=re.S)
        parts = (triton.__version__, text, self.types, self.ones, self.target, self.dtype, self.config.options())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def work(module: KernelModule, functions: Sequence[str], target: str, dtype: str = "bf16") -> list[Work]:
    """Every kernel of these functions, for "sm_80", "sm_90" or "gfx942"; dtype: of sequences."""
    return [_work(s, module.functions[name], target, dtype) for name in functions for s in module.functions[name].sources]


def _work(source: Source, function: Function, target: str, dtype: str) -> Work:
    """With types of arguments as a launch would find them: last strides are 1."""
    tables = {name: kind for (kind, _), name in source.tables.items()}
    last = {b.arguments[-1] for b in function.layout.placed.values() if b.arguments}
    types: dict[str, str] = {}
    for name in (*(p for p in source.pointers if p != "mine"), *source.strides, *NUMBERS, "D", "F", "P", "S"):
        if name in ("D", "F", "P", "S") or name in last:
            types[name] = "constexpr"
        elif name in source.strides or (name in NUMBERS and name != "scratch"):
            types[name] = "i32"
        elif name in tables:
            types[name] = "*i32" if tables[name] != "number" else "*fp32"
        else:
            types[name] = f"*{dtype}" if name in SEQUENCES else "*fp32"
    text = f"import triton\nimport triton.language as tl\n\n{definitions(set(source.helpers))}\n{source.text}"
    ones = tuple(n for n in source.strides if n in last)
    return Work(source.name, target, dtype, text, tuple(types.items()), ones, source.config)


def measure(item: Work) -> Resources:
    """Compile one kernel and see what it needs."""
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.compiler import ASTSource

    kernel = compile_source(item.text, f"<resources {item.key}>")[item.kernel]
    constants = {"D": getattr(tl, TYPES[item.dtype]), "F": tl.float32, "P": "ieee", "S": "ieee", **dict.fromkeys(item.ones, 1)}
    source = ASTSource(fn=kernel, signature=dict(item.types), constexprs=constants, attrs=_aligned(item))
    start = time.perf_counter()
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True  # what Triton's own cache had would seem to take no time
        made = triton.compile(source, target=_target(item.target), options=item.config.options())
    seconds = time.perf_counter() - start
    registers, spill = _amd(made.asm["amdgcn"]) if item.target.startswith("gfx") else _nvidia(made.asm["cubin"])
    return Resources(registers, spill, made.metadata.shared, round(seconds, 2))


def _aligned(item: Work) -> dict[tuple[int], list[list[Any]]]:
    """What a launch would see to be multiples of 16: pointers, strides but those of single tokens and gates, and the zero."""
    places = {name: i for i, (name, _) in enumerate(item.types)}
    fixed = (*NUMBERS[:-1], *(n for n in places if n[-2:] in ("_t", "_u")))
    aligned = [n for n, kind in item.types if kind.startswith("*") or (kind == "i32" and n not in fixed)]
    return {(places[n],): [["tt.divisibility", 16]] for n in aligned}


def _target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)


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
