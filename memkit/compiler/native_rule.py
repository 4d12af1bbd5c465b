"""A rule that runs emitted C++ on CPU tensors."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from memkit.specs.errors import KernelError
from memkit.specs.state import MemoryState

from . import native_build, runtime
from .assemble import again, forward_mode
from .emit_native import NativeModule, native_module
from .native.text import Source
from .pipeline import Compiled, CompiledRule

PLANS = ("linear", "solve", "frozen", "orthogonal")
WITHOUT = {
    "span": "it keeps every key, and its products are large enough for torch's own",
    "scan": "it takes one token after another, and each is too little work",
}


def refusal(compiled: Compiled) -> str | None:
    """Why a compiled spec has no C++, or None."""
    plan = compiled.choice.name
    return None if plan in PLANS else f"plan {plan} has none: {WITHOUT[plan]}"


@dataclass
class Native:
    """A rule's C++: the module, written when first asked for, and its functions, each compiled when first called."""

    key: str
    make: Callable[[], NativeModule]
    title: str
    plain: dict[str, Any]  # what the emitted torch module defines
    written: NativeModule | None = None
    loaded: dict[tuple[str, torch.dtype], Future[ctypes.CDLL]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def module(self) -> NativeModule:
        with self.lock:
            if self.written is None:
                self.written = self.make()
            return self.written

    def library(self, name: str, dtype: torch.dtype) -> Future[ctypes.CDLL]:
        """The library of a function, to be waited for."""
        unit = self.module.unit(name)
        with self.lock:
            if (name, dtype) not in self.loaded:
                self.loaded[name, dtype] = _compilers().submit(native_build.library, f"{self.title}-{name}", unit, dtype)
            return self.loaded[name, dtype]

    def function(self, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
        """A function, and one that asks for large pages. What will be called after it is compiled at the same time."""
        found = self.library(name, dtype)
        if name.endswith("_saving"):
            self.library(name.replace("_saving", "_backward"), dtype)
        library = found.result()
        run, large = getattr(library, name), library.in_large_pages
        run.restype, run.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_long,) * 4)
        large.restype, large.argtypes = None, (ctypes.c_void_p, ctypes.c_long)
        return run, large


@cache
def _compilers() -> ThreadPoolExecutor:
    """Threads that wait for the C++ compiler."""
    return ThreadPoolExecutor(2, "memkit-native")


LARGE = 1 << 22  # bytes of an array that are worth large pages
_KNOWN: dict[str, Native] = {}


def native_of(compiled: Compiled, title: str, plain: dict[str, Any]) -> Native:
    """The C++ of a compiled spec, findable by its key, which is all that a traced graph holds of it."""
    key = hashlib.sha256(compiled.source.encode()).hexdigest()[:24]

    def make() -> NativeModule:
        graphs = {n: s.after("kernel_trick" if "kernel_trick" in dict(s.graphs) else "lower") for n, s in compiled.graphs.items()}
        return native_module(compiled.equations, compiled.choice.name, title, graphs, compiled.chunk)

    return _KNOWN.setdefault(key, Native(key, make, re.sub(r"\W", "_", title) or "rule", plain))


def sizes_of(source: Source, axes: Sequence[tuple[str, ...]], inputs: Sequence[Tensor]) -> tuple[int, int, int]:
    """N, G, LT."""
    found = {"n": 1, "g": 1, "t": 1}
    for own, x in zip(axes, inputs, strict=True):
        found |= dict(zip(own, x.shape, strict=True))
    return found["n"], found["g"], found["t"]


def _empty(source: Source, sizes: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    N, G, LT = sizes
    return [
        like.new_empty([G if a == "g" else length.at(LT, N) for a, length in zip(axes, lengths, strict=True)])
        for _, axes, lengths in source.results
    ]


# ---- the operation


@cache
def operation() -> Any:
    """`memkit::native(inputs, key, name, sizes) -> results and saved values`."""

    def native(inputs: list[Tensor], key: str, name: str, sizes: list[int]) -> list[Tensor]:
        return _run(inputs, key, name, sizes)

    native.__annotations__ = {"inputs": list[Tensor], "key": str, "name": str, "sizes": list[int], "return": list[Tensor]}
    op = torch.library.custom_op("memkit::native", native, mutates_args=(), device_types="cpu")
    op.register_fake(lambda inputs, key, name, sizes: _empty(_KNOWN[key].module.functions[name], tuple(sizes), inputs[0]))
    op.register_autograd(_pull, setup_context=_keep)
    return op


def _run(inputs: list[Tensor], key: str, name: str, sizes: Sequence[int]) -> list[Tensor]:
    native = _KNOWN[key]
    function, in_large_pages = native.function(name, inputs[0].dtype)
    given = [x.contiguous() for x in inputs]
    results = _empty(native.module.functions[name], tuple(sizes), inputs[0])  # type: ignore[arg-type]
    for x in results:
        if x.nbytes >= LARGE:
            in_large_pages(x.data_ptr(), x.nbytes)
    pointers = [(ctypes.c_void_p * len(group))(*(x.data_ptr() for x in group)) for group in (given, results)]
    if function(*pointers, *sizes, torch.get_num_threads()):
        raise MemoryError(f"no memory for the scratch of {name}")
    return results


def _keep(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, ctx.key, ctx.name, ctx.sizes = inputs
    ctx.set_materialize_grads(False)  # else zeros are made for the gradients of all saved values
    ctx.results = _KNOWN[ctx.key].module.results[ctx.name.removesuffix("_saving")]
    ctx.save_for_backward(*tensors, *output[ctx.results :])
    ctx.count = len(tensors)
    ctx.like = [x.shape for x in output[: ctx.results]]


def _pull(ctx: Any, grads: list[Tensor | None]) -> tuple:
    """The gradients of a call with saved values."""
    tensors = ctx.saved_tensors
    module, name = _KNOWN[ctx.key].module, ctx.name.removesuffix("_saving")
    given = [tensors[0].new_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.like, strict=False)]
    if torch.is_grad_enabled():  # differentiated once more: let torch differentiate the forward's source
        plain = _KNOWN[ctx.key].plain[f"plain_{name}"]
        inputs = tensors[: ctx.count]
        return list(again(plain, inputs, given, [x.requires_grad for x in inputs])), None, None, None
    forward, back = module.functions[ctx.name], module.functions[f"{name}_backward"]
    labels = [label for label, _, _ in forward.results]
    names = (*forward.inputs, *labels[ctx.results :], *(f"grad_{x}" for x in labels[: ctx.results]))
    known = dict(zip(names, (*tensors, *given), strict=True))
    found = operation()([known[n] for n in back.inputs], ctx.key, f"{name}_backward", ctx.sizes)
    by_name = dict(zip((label for label, _, _ in back.results), found, strict=True))
    return [by_name.get(n) for n in forward.inputs], None, None, None


# ---- the rule


def transformed() -> bool:
    """Whether a functorch transform is at work, which looks into torch operations only."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]


class NativeRule(CompiledRule):
    """A compiled rule with C++. pinned: it runs that or raises; else it runs it wherever it can run."""

    def __init__(self, base: CompiledRule, pinned: bool) -> None:
        self.__dict__.update(base.__dict__)
        self.pinned, self.why_not = pinned, refusal(self.compiled)
        if pinned and self.why_not:
            raise KernelError(f"backend: native, but {self.why_not}", "a plan with C++: " + ", ".join(PLANS), "backend: torch", "backend")
        self.native = native_of(self.compiled, self.spec.name, self._module)
        self.backend = "native, pinned" if pinned else "native on CPU tensors"
        operation()
        self.calls = [self._call(n) if n in self.compiled.graphs else None for n in ("chunks", "resume")]

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: compiled anew."""
        return type(self), (CompiledRule(self.spec, self.key_dim, self.value_dim, self._pin), self.pinned)

    def obstacle(self, x: Tensor | None = None) -> str | None:
        """Why C++ does not run on x, or on anything here, or None."""
        return self.why_not or native_build.obstacle(x)

    def _call(self, name: str) -> Callable[..., Sequence[Tensor]]:
        key, plain = self.native.key, self._module[f"call_{name}"]
        axes = [p.axes for p in self.compiled.graphs[name].last.params]

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            if forward_mode() or transformed():
                return plain(*inputs)
            needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
            module = self.native.module
            source = module.functions[f"{name}_saving" if needed else name]
            return operation()(list(inputs), key, source.name, list(sizes_of(source, axes, inputs)))[: module.results[name]]

        return run

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], params: dict[str, Tensor], state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        why = self.obstacle(v)
        if not self.pinned:
            self.backend = "native" if why is None else f"torch: {why}"
        if why is not None:
            if self.pinned:
                raise KernelError(f"backend: native, but {why}", "float32 or float64 tensors on the CPU", "backend: torch", "backend")
            return super().run(q, k, v, gates, params, state)
        if self.spec.window.size > 1 and "window_gate" in self.constants:
            shape = (*v.shape[:3], self.spec.window.size)
            gates = {**gates, "window_gate": v.new_full((), self.constants["window_gate"]).expand(shape)}
        if not torch.compiler.is_compiling():
            self._check_memory(q, k, v, gates, state)
        forward, resume = self.calls
        y, after = runtime.run_pieces(forward, resume, self._module["RULE"], q, k, v, gates, params, state._asdict())
        return y, MemoryState(**{**after, "span": None})
