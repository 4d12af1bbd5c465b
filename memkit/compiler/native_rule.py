"""A rule that runs emitted C++ on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memkit.specs.errors import KernelError
from memkit.specs.state import MemoryState

from . import native_build, runtime
from .assemble import forward_mode
from .native_run import native_of, operation, sizes_of
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
            sizes = sizes_of(axes, inputs)
            function = self.native.saving(name, sizes, inputs[0].element_size()) if needed else name
            return operation()(list(inputs), key, function, list(sizes))[: self.native.module.results[name]]

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
