"""The whole compiler on one screen: spec -> equations -> facts -> plan -> graph -> passes -> source -> rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memkit.specs.errors import KernelError, PlanError, SpecError, near
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState, Span

from . import runtime
from .assemble import module_source
from .build import Equations, build
from .cost import report
from .emit_torch import compile_source
from .facts import Facts, facts
from .ir import Graph, GraphError
from .memory import check_memory, needed
from .passes import FORWARD, kernel_trick
from .plans import PLANS, Choice, choose
from .verify import check

SURE = 1 << 30  # bytes that every machine has; below, nothing is asked of it


@dataclass(frozen=True)
class Stages:
    """Every graph of one compilation, by the name of the step that made it; each was verified."""

    graphs: tuple[tuple[str, Graph], ...]

    def run(self, *passes: Callable[[Graph], Graph]) -> Stages:
        graphs = list(self.graphs)
        for step in passes:
            graph = step(graphs[-1][1])
            check(graph, "tensor")
            name = getattr(step, "func", step).__name__
            graphs.append((name if all(name != n for n, _ in graphs) else f"{name}_again", graph))
        return Stages(tuple(graphs))

    @property
    def last(self) -> Graph:
        return self.graphs[-1][1]

    def after(self, name: str) -> Graph:
        """The graph after a step; KeyError for a step that did not run."""
        return dict(self.graphs)[name]


@dataclass(frozen=True)
class Compiled:
    """Everything one compilation found: equations, facts, the plan, the graphs and the source that runs."""

    equations: Equations
    facts: Facts
    choice: Choice
    graphs: dict[str, Stages]
    chunk: int
    source: str


def compile_spec(rule: Rule, plan: str = "auto") -> Compiled:
    """The pipeline.

    Raises:
        SpecError: an equation that cannot be traced. PlanError: a pinned plan that refuses.
    """
    equations = build(rule)
    known = facts(equations)
    choice = choose(known, plan)
    graphs = {name: lowered(graph, equations) for name, graph in PLANS[choice.name].graphs(equations, known).items()}
    chunk = rule.spec.update.chunk_size if known.grad_at == "chunk" else PLANS[choice.name].tile(known)
    source = module_source(equations, choice.name, rule.spec.name, {name: s.last for name, s in graphs.items()}, chunk)
    return Compiled(equations, known, choice, graphs, chunk, source)


def lowered(graph: Graph, equations: Equations) -> Stages:
    """All stages of one graph of a plan."""
    check(graph, "tensor")
    first: tuple[Callable[[Graph], Graph], ...] = ()
    if equations.features is not None and equations.kernel is not None:
        first = (partial(kernel_trick, features=equations.features, kernel=equations.kernel),)
    return Stages((("lower", graph),)).run(*first, *FORWARD)


class CompiledRule(Rule):
    """A rule that runs emitted code. Same calls as `memkit.reference`; `plan`, `source` and `explain()` say what was chosen."""

    backend = "torch"  # and after a colon, why not another

    def __init__(self, spec: LayerSpec, key_dim: int, value_dim: int, plan: str = "auto") -> None:
        super().__init__(spec, key_dim, value_dim)
        self.compiled = _compiled(spec, key_dim, value_dim, plan)
        self.plan, self.source = self.compiled.choice.name, self.compiled.source
        self._module = _module(self.source, spec.name)
        self._pin = plan

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: compiled anew, since its code may not be copied."""
        return type(self), (self.spec, self.key_dim, self.value_dim, self._pin)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], params: dict[str, Tensor], state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        gates = self._with_window_gate(gates, v)
        if not torch.compiler.is_compiling():
            self._check_memory(q, k, v, gates, state)
        y, after = self._module["run"](q, k, v, gates, params, state._asdict())
        span = None if state.span is None else Span(*after["span"])
        return y, MemoryState(**{**after, "span": span})

    def _with_window_gate(self, gates: dict[str, Tensor], v: Tensor) -> dict[str, Tensor]:
        """The gates, with a window gate that is a number as a gate of every token and slot."""
        if self.spec.window.size == 1 or "window_gate" not in self.constants:
            return gates
        shape = (*v.shape[:3], self.spec.window.size)
        return {**gates, "window_gate": v.new_full((), self.constants["window_gate"]).expand(shape)}

    def _check_memory(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], state: MemoryState) -> None:
        batch, tokens, heads = v.shape[:3]
        inputs = (q, k, v, *gates.values(), *state.weights.values())
        training = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        states = self._kept_states(tokens, batch * heads, v.element_size()) if training else None
        held = needed(self.compiled.equations, tokens, batch * heads, states, v.element_size())
        if held > SURE:
            check_memory(held, v.device, f"plan {self.plan} over B={batch} T={tokens} H={heads}" + (" with gradients" if training else ""))

    def _kept_states(self, tokens: int, heads: int, width: int) -> int:
        """The states of a head that are kept for a backward: one a chunk, or a block where weights exist a block at a time."""
        blocks = hasattr(PLANS[self.plan], "blocks")
        return math.ceil(tokens / (min(self.compiled.chunk, runtime.BLOCK) if blocks else self.compiled.chunk))

    def explain(self) -> str:
        """The plan, why the others refused, what a token costs under each, and the length from which it beats softmax attention."""
        choice, known = self.compiled.choice, self.compiled.facts
        rows = [f"plan: {choice.name}" + (" (pinned)" if choice.pinned else "")]
        accepts = "accepts too" if choice.pinned else "accepts too, but comes later"
        rows += [f"  not {name}: {why or accepts}" for name, why in choice.refused]
        rows.append(
            f"chunk: {self.compiled.chunk} tokens, " + ("part of the meaning" if known.grad_at == "chunk" else "no effect on results")
        )
        graphs = {name: stages.last for name, stages in self.compiled.graphs.items()}
        rows += report(self.compiled.equations, known, choice.name, graphs, self.compiled.chunk)
        rows.append(f"backend: {self.backend}")
        if self.backend.startswith("torch"):
            from . import native_build, native_rule  # it extends this class

            why = native_rule.refusal(self.compiled) or native_build.obstacle()
            rows.append(f"  not native: {why}" if why else "  native: runs C++ on CPU tensors, where it is asked for")
        return "\n".join(rows)


_CACHE: dict[tuple[Any, ...], Compiled] = {}


def _compiled(spec: LayerSpec, key_dim: int, value_dim: int, plan: str) -> Compiled:
    kinds = tuple(type(component) for _, component in spec.components())  # a kind can be written anew under its old name
    key = (spec.model_dump_json(exclude={"name", "source", "layer"}), kinds, key_dim, value_dim, plan)
    if key not in _CACHE:
        try:
            _CACHE[key] = compile_spec(Rule(spec, key_dim, value_dim), plan)
        except GraphError as error:  # a formula that no user could know to be too much for the compiler
            own = ", ".join(f"{path}: {component.kind}" for path, component in spec.components())
            raise SpecError(
                f"formulas that the compiler cannot join ({error})",
                f"a spec it can lower; here {own}",
                "memkit.reference runs it",
                "compile",
            ) from error
    return _CACHE[key]


_MODULES: dict[str, dict] = {}


def _module(source: str, name: str) -> dict:
    if source not in _MODULES:
        _MODULES[source] = compile_source(source, f"<memkit {name} {len(_MODULES)}>")
    return _MODULES[source]


def compile_rule(spec: LayerSpec, key_dim: int, value_dim: int, *, backend: str = "auto", plan: str = "auto") -> CompiledRule:
    """A compiled rule at fixed widths.

    Raises:
        SpecError, PlanError: see `compile_spec`. KernelError: an unknown backend, or a plan that has no code under "native" or "triton".
    """
    if backend not in ("auto", "torch", "native", "triton"):
        known = ("auto", "torch", "native", "triton")
        raise KernelError(f"backend {backend!r}", "auto, torch, native or triton", near(backend, known), "backend")
    if plan not in ("auto", *PLANS):
        raise PlanError(f"plan {plan!r}", "auto, " + ", ".join(PLANS), near(plan, ("auto", *PLANS)), "plan")
    rule = CompiledRule(spec, key_dim, value_dim, plan)
    if backend == "torch":
        return rule
    if backend == "native":
        from .native_rule import NativeRule  # it extends CompiledRule

        return NativeRule(rule)
    from .triton_rule import with_kernels  # it extends CompiledRule

    return with_kernels(rule, pinned=backend == "triton")
