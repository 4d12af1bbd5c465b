"""A rule that runs emitted kernels where it can, and says why where it cannot."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from memkit.specs.errors import KernelError
from memkit.specs.state import MemoryState

from . import launch
from .emit_triton import KernelModule, kernel_module
from .kernels.settings import Configs, configs_for
from .kernels.text import FAR
from .launch import Kernels
from .pipeline import Compiled, CompiledRule

CHUNK_PARALLEL = ("linear", "solve")  # plans whose work leaves the loop over chunks; under the others states would cost too much memory
PLANS = (*CHUNK_PARALLEL, "frozen", "orthogonal")
WITHOUT = {
    "span": "it keeps every key, and its products are large enough for torch's own",
    "scan": "it takes one token after another, and each is too little work for a kernel",
}
LARGEST = 1 << 23  # numbers in one weight, 32 MiB: beyond, one copy outgrows the cache of a device and torch's batched products win


def refusal(compiled: Compiled) -> str | None:
    """Why a compiled spec has no kernels, or None."""
    plan = compiled.choice.name
    if plan not in PLANS:
        return f"plan {plan} has no kernels: {WITHOUT[plan]}"
    sizes = compiled.equations.sizes
    largest = max(sizes[out] * sizes[into] for out, into in compiled.equations.weights.values())
    if largest > LARGEST:
        return f"a weight of {largest:,} numbers; one program can hold {LARGEST:,} in its part of the cache"
    if plan == "orthogonal" and largest * compiled.chunk > FAR:
        return f"a matrix of {largest:,} numbers for each of {compiled.chunk} tokens; in one value kernels count to {FAR:,}"
    return None


def kernels_of(compiled: Compiled, title: str) -> Kernels:
    """The kernels of a compiled spec, registered."""
    plan = compiled.choice.name
    graphs = {n: stages.last for n, stages in compiled.graphs.items()}

    def table(target: str, single: bool) -> Configs:
        return configs_for(plan, target, single, max(compiled.equations.sizes.values()), compiled.chunk)

    def make(target: str, single: bool, configs: Configs | None) -> KernelModule:
        configs = configs or table(target, single)
        return kernel_module(compiled.equations, plan, title, graphs, compiled.chunk, configs, plan in CHUNK_PARALLEL)

    key = f"{title}_{hashlib.sha256(compiled.source.encode()).hexdigest()[:16]}"
    return launch.register(Kernels(key, make, table))


class TritonRule(CompiledRule):
    """A compiled rule with kernels. pinned: it runs them or raises; else it runs them wherever they can run."""

    kernels: Kernels | None = None  # none before they are written

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: compiled anew."""
        base = CompiledRule(self.spec, self.key_dim, self.value_dim, self._pin)
        return type(self), (base, self.pinned)

    def __init__(self, base: CompiledRule, pinned: bool) -> None:
        self.__dict__.update(base.__dict__)
        self.pinned, self.why_not = pinned, refusal(self.compiled)
        self.backend = "triton, pinned" if pinned else "triton on CUDA or ROCm tensors"
        self.ready: dict[bool, tuple[Any, ...]] = {}  # by whether products are in float32: run, RULE, forward, resume
        if pinned and self.why_not:
            raise KernelError(
                f"backend: triton, but {self.why_not}", "a plan with kernels: " + ", ".join(PLANS), "backend: torch", "backend"
            )
        if pinned or self.obstacle() is None:
            self._prepare()

    def _prepare(self) -> None:
        """Write the kernels, and load them if they can run: then a call under torch.compile finds everything made."""
        kernels = self.kernels = kernels_of(self.compiled, self.spec.name)
        self.source = kernels.module(False).source
        if launch.obstacle() is None:
            for single in (False, True):
                names = kernels.names(single)
                calls = [kernels.call(n) if n in names else None for n in ("chunks", "resume")]
                self.ready[single] = names["run_views"], names["RULE"], *calls

    def explain(self) -> str:
        """As for every rule, and under which configurations its kernels ran."""
        return "\n".join([super().explain(), *(self.kernels.report() if self.kernels else [])])

    def obstacle(self, x: Tensor | None = None) -> str | None:
        """Why kernels do not run on x, or on any device here, or None."""
        return self.why_not or launch.obstacle(x)

    def sequence(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Sequences reach the kernels in the type they came in."""
        return x if x.dtype in launch.TYPES and self.obstacle(x) is None else x.to(dtype)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], params: dict[str, Tensor], state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        why = self.obstacle(v)
        if not self.pinned:
            self.backend = "triton" if why is None else f"torch: {why}"
        if why is not None:
            if self.pinned:
                launch.demand(v)
            return super().run(q, k, v, gates, params, state)
        if self.spec.window.size > 1 and "window_gate" in self.constants:
            shape = (*v.shape[:3], self.spec.window.size)
            gates = {**gates, "window_gate": torch.full((), self.constants["window_gate"], device=v.device).expand(shape)}
        run, rule, forward, resume = self.ready[v.dtype in (torch.float32, torch.float64)]
        y, after = run(forward, resume, rule, q, k, v, gates, params, state._asdict())
        return y, MemoryState(**{**after, "span": None})


def with_kernels(base: CompiledRule, pinned: bool) -> CompiledRule:
    """The rule with kernels; unless pinned, the base itself where they could not run, with a note why.

    Raises:
        KernelError: pinned, for a plan that has no kernels.
    """
    why = refusal(base.compiled) or launch.obstacle()
    if pinned or why is None:
        return TritonRule(base, pinned)
    base.backend = f"torch: {why}"
    return base
