"""The layer view: what stands around the memory, [B, T, D] -> [B, T, D]."""

from __future__ import annotations

import torch

from memkit.explanation import state_bytes
from memkit.layers.memory_layer import DEFAULT_DIM, MemoryLayer, make_rule
from memkit.specs.gate import Number
from memkit.specs.layer import LayerSpec
from memkit.specs.rule import Rule

from .drawing_model import Picture
from .drawing_text import count
from .equations import equation_of

LEGEND = ("given", "inner", "outer", "step", "value", "outer_path")


def layer_picture(source: LayerSpec | MemoryLayer) -> Picture:
    """Boxes: projections, convolution, norms, gates, memory, output norm and gate; a spec is drawn at the default width."""
    layer = source if isinstance(source, MemoryLayer) else layer_of(source)
    spec, options = layer.spec, layer.spec.layer
    picture = Picture(f"{spec.name}: the layer, dim {layer.dim}, {layer.heads} heads", legend=LEGEND)
    picture.box("x", "x", f"[B, T, {layer.dim}]", kind="given")
    last = _projections(picture, layer)
    lines = [line for line in equation_of(spec).splitlines() if not line.startswith("phi")]
    held, grows = state_bytes(layer)
    size = f"state {count(held, 'B')} a sequence" + (f", {count(grows, 'B')} more a token" if grows else "")
    picture.box(
        "rule", f"memory, {layer.heads} heads, plan {layer.rule.plan}", *(" ".join(line.split()) for line in lines[:2]), size, kind="inner"
    )
    for name in last:
        picture.arrow(name, "rule")
    _inputs(picture, layer)
    picture.box("y_heads", "y", f"[B, T, {layer.heads}, {layer.value_dim}]")
    picture.arrow("rule", "y_heads", weight=3)
    tail = "y_heads"
    if layer.norm is not None:
        picture.box("norm", f"{options.output_norm} norm a head", f"{_params(layer.norm)} learned", kind="outer")
        picture.arrow(tail, "norm", weight=3)
        tail = "norm"
    if layer.output_gate is not None:
        picture.box("output_gate", "silu(projection of x)", f"output gate, {_params(layer.output_gate)} learned", kind="outer")
        picture.box("product", "product")
        picture.arrow("x", "output_gate")
        picture.arrow("output_gate", "product")
        picture.arrow(tail, "product", weight=3)
        tail = "product"
    picture.box("output", "output projection", f"{_params(layer.output)} learned", kind="outer")
    picture.arrow(tail, "output", weight=3)
    picture.box("y", "y", f"[B, T, {layer.dim}]", kind="result")
    picture.arrow("output", "y", weight=3)
    return picture


def layer_of(spec: LayerSpec) -> MemoryLayer:
    """A layer of the default width without memory behind its parameters. Its rule is a real one, since tracing an equation runs it."""

    def factory(spec: LayerSpec, key_dim: int, value_dim: int) -> Rule:
        with torch.device("cpu"):
            return make_rule(spec, key_dim, value_dim)

    with torch.device("meta"):
        return MemoryLayer(spec, DEFAULT_DIM, None, factory)


def _projections(picture: Picture, layer: MemoryLayer) -> list[str]:
    """q, k and v; returns the boxes that enter the memory."""
    options = layer.spec.layer
    picture.box("project", "projection to q, k, v", f"{_params(layer.project.qkv)} learned", kind="outer")
    picture.arrow("x", "project", weight=3)
    tail = "project"
    if layer.project.conv is not None:
        picture.box("conv", f"causal convolution of {options.conv}", f"{_params(layer.project.conv)} learned", kind="outer")
        picture.box("tail", "last inputs", f"{layer.project.tail} tokens", kind="inner")
        picture.arrow(tail, "conv", weight=3)
        picture.arrow("tail", "conv")
        tail = "conv"
    if options.activation != "none":
        picture.box("activation", options.activation)
        picture.arrow(tail, "activation", weight=3)
        tail = "activation"
    picture.box("v", "v", f"[B, T, {layer.heads}, {layer.value_dim}]")
    picture.box("qk", "q, k", f"[B, T, {layer.heads}, {layer.key_dim}]")
    picture.arrow(tail, "v")
    ends = ["v", "qk"]
    if options.key_norm != "none":
        picture.box("key_norm", f"{options.key_norm} norm", "of each query and key")
        picture.arrow(tail, "key_norm")
        picture.arrow("key_norm", "qk")
    else:
        picture.arrow(tail, "qk")
    return ends


def _inputs(picture: Picture, layer: MemoryLayer) -> None:
    """Gates, learned scalars and the memory's start."""
    spec = layer.spec
    given = [(name, gate) for name, (_, gate) in spec.roles().items() if not isinstance(gate, Number) and name in layer.rule.gates]
    from_x = [name for name, gate in given if gate.term(name).strip().endswith("_t")]
    for title, names in (("projected", from_x), ("learned", [name for name, _ in given if name not in from_x])):
        if names:
            box = picture.box(
                f"gates_{title}", "gates", ", ".join(names), *(("squashed projections of x",) if names is from_x else ()), kind="outer"
            )
            if names is from_x:
                picture.arrow("x", box)
            picture.arrow(box, "rule")
    if layer.scalars.names:
        picture.box("scalars", "learned scalars", ", ".join(name.split(".")[1] for name in layer.scalars.names), kind="outer")
        picture.arrow("scalars", "rule")
    if len(layer.initial):
        total = sum(p.numel() for p in layer.initial.values())
        picture.box("initial", "initial memory", f"{', '.join(layer.initial)}: {total:,} learned", kind="outer")
        picture.arrow("initial", "rule")


def _params(module: object) -> str:
    return f"{sum(p.numel() for p in module.parameters()):,}"  # type: ignore[attr-defined]
