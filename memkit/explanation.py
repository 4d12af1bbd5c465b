"""`explain`: what a spec computes, what is learned where, and what it costs, as text for people."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memkit.compiler.cost import Cost, plan_cost
from memkit.compiler.pipeline import CompiledRule, compile_rule
from memkit.layers.memory_layer import DEFAULT_DIM, MemoryLayer, make_rule
from memkit.specs.errors import SpecError
from memkit.specs.gate import Number
from memkit.specs.io import load_spec
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule
from memkit.specs.state import MemoryState, flatten

from .equations import LETTERS, PAPERS, equation_of

WIDTH = 110


def equation(source: Any, overrides: Mapping[str, Any] | None = None) -> str:
    """The recurrence of one head, one line a step.

    Args:
        source: a preset's name, a path, a dict, a LayerSpec, or a MemoryLayer or Rule.
        overrides: dotted path -> value.
    """
    return equation_of(_spec(source, overrides))


def explain(source: Any, *, dim: int | None = None, heads: int | None = None, overrides: Mapping[str, Any] | None = None) -> str:
    """What a layer is: equation, gates, inner and outer parameters, semantics, sizes, notation, source, and the plan that runs it.

    Args:
        source: a preset's name, a path, a dict, a LayerSpec, or a MemoryLayer, which brings what follows.
        dim: D for the sizes; 256 unless given. heads: H, the spec's own unless given.
        overrides: dotted path -> value.

    Raises:
        SpecError: for a source that cannot be read, sizes that do not fit it, or sizes or overrides of a layer that is made already.
    """
    if isinstance(source, MemoryLayer) and (dim is not None or heads is not None or overrides):
        raise SpecError("a MemoryLayer with dim, heads or overrides", "a layer alone, or its spec with these", "layer.spec", "explain")
    layer = source if isinstance(source, MemoryLayer) else _shell(_spec(source, overrides), DEFAULT_DIM if dim is None else dim, heads)
    spec = layer.spec
    parts = [
        ("", [spec.name]),
        ("equation, one head", equation_of(spec).splitlines()),
        ("gates", list(_gates(layer))),
        ("learned where", list(_parameters(layer))),
        ("when", list(_semantics(spec))),
        ("cost", list(_cost(layer))),
        ("notation", list(_notation(spec))),
        ("source", textwrap.wrap(spec.source or "not stated", WIDTH)),
        ("how it runs", layer.rule.explain().splitlines()),
    ]
    blocks = [("\n".join(lines)) if not title else "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts if lines]
    return "\n\n".join(blocks)


def state_bytes(layer: MemoryLayer) -> tuple[int, int]:
    """Bytes of one sequence's state in float32, and bytes it grows by with every token (0 unless the features are infinite)."""
    state = fresh_state(layer.rule, layer.heads)
    conv = 4 * layer.project.tail * layer.project.channels
    if state.span is None:
        return state.nbytes + conv, 0
    grows = [math.prod(t.shape[:-1]) for name, t in flatten(state.span).items() if name != "keys"]
    return state.nbytes + conv, 4 * (sum(grows) + layer.heads * layer.key_dim)


def fresh_state(rule: Rule, heads: int) -> MemoryState:
    """The state of one sequence before its first token, without memory behind its tensors."""
    weights = {name: torch.empty(heads, *shape, device="meta") for name, shape in rule.shapes.items()}
    return rule.init_state(1, weights, torch.empty(1, 1, heads, rule.value_dim, device="meta"))


def projection_flops(layer: MemoryLayer) -> int:
    """Floating point operations a token, forward, of the layer's own matrices; a product of [m, n] with a vector counts 2 m n."""
    around = ("project", "gates", "output", "output_gate")
    return 2 * sum(p.numel() for name, p in layer.named_parameters() if p.dim() == 2 and name.split(".")[0] in around)


def memory_cost(layer: MemoryLayer) -> tuple[str, Cost]:
    """(plan, its cost for a token of one head) of the compiled memory, the count that `how it runs` shows; also for a layer that runs the
    token loop."""
    rule = layer.rule
    rule = rule if isinstance(rule, CompiledRule) else compile_rule(layer.spec, rule.key_dim, rule.value_dim, backend="torch")
    graphs = {name: stages.last for name, stages in rule.compiled.graphs.items()}
    return rule.plan, plan_cost(rule.compiled.equations, graphs, rule.compiled.chunk)


def _spec(source: Any, overrides: Mapping[str, Any] | None) -> LayerSpec:
    return load_spec(source.spec if isinstance(source, MemoryLayer | Rule) else source, overrides)


def _shell(spec: LayerSpec, dim: int, heads: int | None) -> MemoryLayer:
    """A layer without memory behind its parameters; its rule is a real one, since tracing an equation runs it."""

    def factory(*args: Any) -> Rule:
        with torch.device("cpu"):
            return make_rule(*args)

    with torch.device("meta"):
        return MemoryLayer(spec, dim, heads, factory)


def _gates(layer: MemoryLayer) -> Iterator[str]:
    axes = {
        None: "one a head", "feature": "one a head and feature",
        "window": "one a head and window slot, slot j weighs token t - c + 1 + j",
    }
    for name, (role, gate) in layer.spec.roles().items():
        if isinstance(gate, Number):
            if name != "window_gate" or layer.spec.window.size > 1:
                yield f"{name:<12} {gate.equation()}"
            continue
        start = getattr(gate, "start", None)
        start = role.start if start is None else start
        ends = f"[{role.low:g}, {role.high:g}]" if role.high is not None else f">= {role.low:g}, in a layer below {role.ceiling:g}"
        yield f"{name:<12} {ends}; {gate.equation()}, {axes.get(role.axis, role.axis)}; starts at {start:g}"


def _parameters(layer: MemoryLayer) -> Iterator[str]:
    rule, heads = layer.rule, layer.heads
    yield "inner: the memory, one for each sequence and head; lives in the state, starts anew with each sequence, is no parameter"
    for name, shape in rule.shapes.items():
        yield f"  {name:<16} {list(shape)} a head, {heads * math.prod(shape):,} numbers a sequence"
    for name in rule.infinite:
        yield f"  {name:<16} a coefficient for every key seen"
    yield "outer: learned by training, shared by all sequences; gradients reach them through the whole recurrence"
    groups = {
        "project": "q, k and v: projection" + (" and convolution" if layer.spec.layer.conv else ""), "gates": "the gates above",
        "scalars": ", ".join(rule.init_params()), "initial": "the memory before the first token", "norm": "output norm",
        "output_gate": "output gate", "output": "output projection",
    }
    for name, module in layer.named_children():
        count = sum(p.numel() for p in module.parameters())
        if count:
            yield f"  {name:<16} {count:>12,}  {groups.get(name, '')}"
    if layer.spec.memory.initial == "zero":
        yield "  the memory starts at zero, so no start is learned"


def _semantics(spec: LayerSpec) -> Iterator[str]:
    update, c = spec.update, spec.window.size
    yield "gradient: " + {
        "token": "at the memory the previous token left, W_{t-1}",
        "decayed": "at the previous memory after retention",
        "chunk": f"at the memory of the chunk's start; {update.chunk_size} tokens each, from the sequence's start on, part of the meaning",
    }[update.grad_at]
    if c == 1:
        yield "window: the current token alone"
    else:
        later = "; tokens of earlier chunks are looked at again, at the current chunk's start" if update.grad_at == "chunk" else ""
        yield f"window: the last {c} tokens{later}"
    yield f"read: {update.read} the token's own write"
    yield "a sequence cut anywhere and carried by its state gives what the uncut one gives"


def _cost(layer: MemoryLayer) -> Iterator[str]:
    held, grows = state_bytes(layer)
    widths = f"dim {layer.dim}, {layer.heads} heads, key_dim {layer.key_dim}, value_dim {layer.value_dim}"
    features = f", {layer.rule.width:,} features" if layer.rule.finite and layer.rule.width != layer.key_dim else ""
    yield f"at {widths}{features}"
    yield f"state: {held:,} bytes a sequence" + (f", and {grows:,} more with every token" if grows else "")
    (plan, memory), around = memory_cost(layer), projection_flops(layer)
    token, growth = round(memory.token.flops), round(memory.growth.flops)
    yield f"FLOPs a token, forward: {around + layer.heads * token:,} (projections {around:,}, memory {layer.heads} heads x {token:,})"
    if growth:
        yield f"  and {layer.heads * growth:,} more for every earlier token ({layer.heads} heads x {growth:,})"
    yield f"  the memory's are those of plan {plan}; what each plan would take for one head stands under `how it runs`"


def _notation(spec: LayerSpec) -> Iterator[str]:
    shown = [name for name in spec.roles() if name != "window_gate" or spec.window.size > 1]
    if not shown:
        return
    yield f"{'here':<14}" + "".join(f"{paper:<14}" for paper in PAPERS).rstrip()
    for name in shown:
        yield f"{name:<14}" + "".join(f"{letter:<14}" for letter in LETTERS.get(name, ("-",) * len(PAPERS))).rstrip()
