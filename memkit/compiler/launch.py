"""Emitted kernels as torch operations: registered once, with shapes for tracing and a gradient; and when they can run at all.

Where it sits: above `emit_triton`, below `pipeline`. triton is imported when a kernel first runs, never when memkit is.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from memkit.specs.errors import KernelError

from . import autotune
from .assemble import forward_mode
from .autotune import Choice
from .emit_torch import compile_source
from .emit_triton import Function, KernelModule
from .ir import GraphError
from .kernels.settings import Configs
from .runtime_triton import outside

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
TOKENS = ("q", "keys", "values", "grad_y")  # the first of these among a function's inputs gives the type of sequences


@cache
def can_import() -> bool:
    """Whether triton is installed."""
    try:
        return find_spec("triton") is not None
    except (ImportError, ValueError):  # something on the way to it says no
        return False


def interpreted() -> bool:
    """Whether triton's interpreter is on: kernels then run on CPU tensors, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def obstacle(x: Tensor | None = None) -> str | None:
    """Why kernels cannot run on x (or on any device here), or None."""
    if not can_import():
        return "triton is not installed"
    if x is not None and forward_mode():
        return "torch differentiates forwards, and kernels have no forward-mode derivative"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm device"
    if x is not None and not x.is_cuda:
        return f"the tensors are on {x.device}"
    if x is not None and x.dtype not in TYPES:
        return f"the tensors are {x.dtype}"
    return None


def demand(x: Tensor | None = None) -> None:
    """Raise where kernels cannot run.

    Raises:
        KernelError: with the reason.
    """
    why = obstacle(x)
    if why:
        raise KernelError(
            f"backend: triton, but {why}",
            "triton, and float32, bfloat16 or float16 tensors on a CUDA or ROCm device",
            "backend: torch",
            "backend",
        )


def architecture() -> str:
    """The target that block sizes are chosen for: this device's, or sm_90 where there is none."""
    if not torch.cuda.is_available():
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability()[0] >= 9 else "sm_80"


Which = tuple[str, bool, Configs | None]  # target, whether products are in float32, configurations if not the table's


@dataclass
class Kernels:
    """A rule's kernels: `make` writes the module for a target, for float32 products or narrow ones, under the `table`'s configurations
    or others, once each. chosen: what was found for a function, its types and a device; ran: what its last call ran under."""

    key: str
    make: Callable[[str, bool, Configs | None], KernelModule]
    table: Callable[[str, bool], Configs]
    written: dict[Which, KernelModule] = field(default_factory=dict)
    loaded: dict[Which, dict[str, Any]] = field(default_factory=dict)
    chosen: dict[tuple[str, torch.dtype, str, torch.device], Choice] = field(default_factory=dict)
    ran: dict[tuple[str, torch.dtype], Choice] = field(default_factory=dict)

    def module(self, single: bool, configs: Configs | None = None) -> KernelModule:
        """The module for this device."""
        which = architecture(), single, configs
        if which not in self.written:
            self.written[which] = self.make(*which)
        return self.written[which]

    def names(self, single: bool, configs: Configs | None = None) -> dict[str, Any]:
        """What the module defines; imports triton."""
        which, module = (architecture(), single, configs), self.module(single, configs)
        if which not in self.loaded:
            label = f"{self.key} {which[0]} {'single' if single else 'narrow'}"
            label += "" if configs is None else f" {hashlib.sha256(repr(configs).encode()).hexdigest()[:8]}"
            self.loaded[which] = compile_source(module.source, f"<memkit kernels {label}>")
        return self.loaded[which]

    def configuration(self, name: str, inputs: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype, told: How) -> Configs | None:
        """Configurations for a call, None for the table's."""
        choice = autotune.OFF
        if autotune.wanted():
            which = name, dtype, told.P, inputs[0].device
            with autotune.LOCK:
                choice = self.chosen.get(which, autotune.OFF)
                timing = not choice.final and _can_time(inputs[0], sizes)
                if timing or which not in self.chosen:
                    choice = self.chosen[which] = autotune.choose(self._job(name, inputs, sizes, dtype, told), timing)
        self.ran[name, dtype] = choice
        return choice.configs

    def _job(self, name: str, inputs: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype, told: How) -> autotune.Job:
        single, target = _single(dtype), architecture()
        table = self.table(target, single)

        def names(configs: Configs) -> dict[str, Any]:
            return self.names(single, None if configs == table else configs)

        def make(configs: Configs) -> Callable[[], Sequence[Tensor]]:
            run = names(configs)[name]
            return lambda: run(*inputs, tuple(sizes), dtype, told)

        function = self.module(single).functions[name]
        return autotune.Job(
            function, autotune.candidates(table, target, single), target, dtype, told.P, inputs[0].device, make,
            lambda configs: spilled(names(configs)[s.name] for s in function.sources),
        )  # fmt: skip

    def report(self) -> list[str]:
        """Under which configurations the functions last ran, and where these come from."""
        if not self.ran:
            return [f"configuration: the table's; {autotune.SWITCH} is {'on: the first call is timed' if autotune.wanted() else 'off'}"]
        rows = []
        for (name, dtype), choice in self.ran.items():
            used = choice.configs or self.table(architecture(), _single(dtype))
            rows.append(f"configuration of {name}, {str(dtype).removeprefix('torch.')}: {autotune.described(used)} ({choice.why})")
        return rows

    def function(self, name: str) -> Function:
        """One function's description, which no block size changes."""
        return (next(iter(self.written.values()), None) or self.module(False)).functions[name]

    def call(self, name: str) -> Callable[..., Sequence[Tensor]]:
        """The function `name` on tensors with batch and head axes. All that can be known now is, so that a traced call is one node."""
        function, op, key = self.function(name), operation(), self.key
        axes = [_outer(p.axes) for p in function.layout.graph.params]
        tokens = [p.attrs["name"] in TOKENS for p in function.layout.graph.params]
        results, saving = function.results, f"{name}_saving"

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
            given, sizes = one_type(tokens, inputs), sizes_of(axes, inputs)
            return op(given, key, saving if needed else name, sizes)[:results]

        return run


def _outer(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(a for axis in axes for a in (("b", "h") if axis == "g" else (axis,)))


def one_type(tokens: Sequence[bool], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs with all sequences in one type, wide enough for each."""
    kinds = [x.dtype for x, is_sequence in zip(inputs, tokens, strict=True) if is_sequence]
    wide = kinds[0]
    for kind in kinds[1:]:
        wide = torch.promote_types(wide, kind)
    return [x.to(wide) if is_sequence else x for x, is_sequence in zip(inputs, tokens, strict=True)]


def sizes_of(axes: Sequence[Sequence[str]], inputs: Sequence[Tensor]) -> list[int]:
    """N, B, H, LT."""
    found = {"n": 1, "t": 1}
    for own, x in zip(axes, inputs, strict=True):
        for axis, length in zip(own, x.shape, strict=True):
            found[axis] = length
    return [found["n"], found["b"], found["h"], found["t"]]


_KNOWN: dict[str, Kernels] = {}


def register(kernels: Kernels) -> Kernels:
    """Make kernels findable by their key, which is all that a traced graph holds of them."""
    return _KNOWN.setdefault(kernels.key, kernels)


def names_of(function: Function) -> list[str]:
    return [p.attrs["name"] for p in function.layout.graph.params]


# ---- the operation


@cache
def operation() -> Any:
    """`memkit::kernels(inputs, key, name, sizes) -> results and saved values`."""

    def kernels(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
        return _run(inputs, key, name, sizes)

    kernels.__annotations__ = {"inputs": list[Tensor], "key": str, "name": str, "sizes": list[int], "return": list[Tensor]}
    op = torch.library.custom_op("memkit::kernels", kernels, mutates_args=())
    op.register_fake(_fake)
    op.register_autograd(_pull, setup_context=_keep)
    return op


def _type(names: Sequence[str], inputs: Sequence[Tensor]) -> torch.dtype:
    return next(x.dtype for n, x in zip(names, inputs, strict=True) if n in TOKENS)


def _run(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
    kernels = _KNOWN[key]
    dtype = _type(names_of(kernels.function(name)), inputs)
    guard = torch.cuda.device(inputs[0].device) if inputs[0].is_cuda else contextlib.nullcontext()
    with guard:
        told = how(dtype)
        names = kernels.names(_single(dtype), kernels.configuration(name, inputs, sizes, dtype, told))
        return list(names[name](*inputs, tuple(sizes), dtype, told))


def _single(dtype: torch.dtype) -> bool:
    """Whether products are in float32 or wider."""
    return dtype in (torch.float32, torch.float64)


def _can_time(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether a call's times tell anything: it fills the device, and is run now, not captured."""
    N, B, H, _ = sizes
    return autotune.machine(x.device).processors <= N * B * H and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def spilled(kernels: Iterable[Any]) -> int:
    """The most bytes a thread that kernels which have run keep outside registers; 0 for interpreted ones."""
    compiled = [k for kernel in kernels for found in getattr(kernel, "device_caches", {}).values() for k in found[0].values()]
    return max((4 * (getattr(k, "n_spills", 0) or 0) for k in compiled), default=0)


def _fake(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
    function = _KNOWN[key].function(name)
    dtype = _type(names_of(function), inputs)
    return shapes(function, inputs[0], sizes, dtype)


SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def measured(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a length that the emitter wrote: whole numbers and sizes with + - * //."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        raise GraphError(f"{text!r} is no length")

    return value(ast.parse(text, mode="eval").body)


def shapes(function: Function, like: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Empty results of a function."""
    N, B, H, LT = sizes
    number = torch.float64 if dtype == torch.float64 else torch.float32
    arrays, found = {a.name: a for a in function.layout.arrays}, []
    for label, place, _ in function.layout.results():
        array = arrays[place.name]
        size = [measured(s, {"N": N, "B": B, "H": H, "LT": LT, "G": B * H}) for s in array.sizes]
        if array.kind == "result":
            axes = tuple(x for a in array.axes for x in (("b", "h") if a == "g" else (a,)))
            found.append(outside(like, dtype if label in ("y", "q", "keys", "values") else number, axes, *size))
        elif array.kind == "carry" and not label.startswith("saved_"):
            found.append(torch.empty((B, H, *size[2:]), device=like.device, dtype=number))
        else:
            found.append(torch.empty(size, device=like.device, dtype=number))
    return found


def _keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, ctx.key, ctx.name, ctx.sizes = inputs
    ctx.set_materialize_grads(False)  # else zeros are made for the gradients of all saved values
    function = _KNOWN[ctx.key].function(ctx.name)
    ctx.inputs, ctx.results = len(tensors), function.results
    ctx.labels = [label for label, _, _ in function.layout.results()]
    ctx.names = names_of(function)
    ctx.save_for_backward(*tensors, *output[function.results :])
    ctx.like = [(x.shape, x.dtype) for x in output[: function.results]]


def _pull(ctx: Any, grads: list[Tensor | None]) -> tuple:
    """The gradients of a call with saved values; a chunk's inside is computed again from the state saved at its start."""
    saved = ctx.saved_tensors
    name = ctx.name.removesuffix("_saving") + "_backward"
    given = [saved[0].new_zeros(shape, dtype=dtype) if g is None else g for g, (shape, dtype) in zip(grads, ctx.like, strict=False)]
    labels = ctx.labels
    known = dict(zip((*ctx.names, *labels[ctx.results :], *(f"grad_{x}" for x in labels[: ctx.results])), (*saved, *given), strict=True))
    function = _KNOWN[ctx.key].function(name)
    found = operation()([known[n] for n in names_of(function)], ctx.key, name, ctx.sizes)
    by_name = dict(zip((label for label, _, _ in function.layout.results()), found, strict=True))
    return [by_name.get(n) for n in ctx.names], None, None, None


@dataclass(frozen=True)
class How:
    """What an emitted function is told at each call: types and precisions."""

    number: torch.dtype
    D: Any
    F: Any
    P: str
    S: str

    def constant(self, table: Tensor, like: Tensor) -> Tensor:
        """A table of constants on a device."""
        return _table(id(table), table, like.device, self.number if table.is_floating_point() else table.dtype)


_TABLES: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}


def _table(known: int, table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    key = known, device, dtype
    if key not in _TABLES:
        _TABLES[key] = table.to(device=device, dtype=dtype)
    return _TABLES[key]


def how(dtype: torch.dtype) -> How:
    """Operands of products have the input's type; float32 products are exact unless torch allows tf32."""
    import triton.language as tl

    number = torch.float64 if dtype == torch.float64 else torch.float32
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 and not torch.version.hip
    return How(number, kinds[dtype], kinds[number], "tf32" if tf32 else "ieee", "ieee")
