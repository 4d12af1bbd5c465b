"""A rule that runs emitted C++ on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit.specs.errors import KernelError
from memkit.specs.state import MemoryState

from . import native_build, runtime
from .assemble import forward_mode
from .native_run import block, native_of, operation, saving, sizes_of
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
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]


class NativeRule(CompiledRule):
    """A compiled rule that runs C++ on CPU tensors."""

    backend = "native"

    def __init__(self, base: CompiledRule, most: int | None = None) -> None:
        """most: tokens whose weights exist at once, where they must."""
        self.__dict__.update(base.__dict__)
        why = refusal(self.compiled)
        if why is not None:
            raise KernelError(f"backend: native, but {why}", "a plan with C++: " + ", ".join(PLANS), "backend: torch", "backend")
        self.missing = native_build.obstacle()  # asked here, where no trace looks on; to read the C++ takes no compiler
        own = self.compiled.chunk if "chunks" in self.compiled.graphs else most or block(self._module["RULE"]["numbers"])
        self.most = min(self.compiled.chunk, own)
        self.native = native_of(self.compiled, self.spec.name, self._module, self.most)
        self.calls = [self._call(n) if n in self.native.module.functions else None for n in ("chunks", "resume", "blocks")]

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: compiled anew."""
        return type(self), (CompiledRule(self.spec, self.key_dim, self.value_dim, self._pin),)

    def _call(self, name: str) -> Callable[..., Sequence[Tensor]]:
        """The function `name`. All that can be known now is, so that a traced call is one node."""
        op, key, plain = operation(), self.native.key, self._module.get(f"call_{name}") or self.native.function_in_torch(name)
        count = self.native.module.results[name]
        axes = self.native.module.functions[name].axes
        numbers = self.native.state_numbers(name)

        def run(*inputs: Tensor, blocks: int = 0) -> Sequence[Tensor]:
            """blocks: in the whole sequence, where calls are for parts of it."""
            if forward_mode() or transformed():
                return plain(*inputs)
            needed = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
            sizes = sizes_of(axes, inputs)
            kept = max(blocks, sizes[0]), *sizes[1:]
            function = saving(name, numbers, kept, inputs[0].element_size()) if needed else name
            return op(list(inputs), key, function, list(sizes))[:count]

        return run

    def _kept_states(self, tokens: int, heads: int, width: int) -> int:
        """As the torch code keeps them, but few of those that are made again, and in blocks of another size."""
        chunk = self.compiled.chunk
        if "chunks" in self.compiled.graphs:
            name, calls, sizes = "chunks", 1, (max(1, tokens // chunk), heads, chunk)
        else:
            name, calls, sizes = "blocks", math.ceil(tokens / chunk), (math.ceil(tokens / self.most), heads, self.most)
        if not saving(name, self.native.state_numbers(name), sizes, width).endswith("_thin"):
            return math.ceil(tokens / sizes[2])
        return calls * len(self.native.parts(name, (math.ceil(sizes[0] / calls), *sizes[1:]), width))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], params: dict[str, Tensor], state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        _demand(self.missing or native_build.unfit(v))
        gates = self._with_window_gate(gates, v)
        if not torch.compiler.is_compiling():
            self._check_memory(q, k, v, gates, state)
        forward, resume, several = self.calls
        if several is not None:
            several = partial(several, blocks=-(-v.shape[1] // self.most))
        rule = self._module["RULE"]
        y, after = runtime.run_pieces(forward, resume, rule, q, k, v, gates, params, state._asdict(), self.most, several)
        return y, MemoryState(**{**after, "span": None})


def _demand(why: str | None) -> None:
    if why is not None:
        got = f"backend: native, but {why}"
        raise KernelError(got, "g++ or clang++, or $CXX, and float32 or float64 tensors on the CPU", "backend: torch", "backend")
